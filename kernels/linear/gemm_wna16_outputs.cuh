// What the GEMMs for quantized weights do with the sums of a tile that lie in shared memory: they are added up over the
// warps and blocks that share K, always in the same order, and go through the epilogue.
#pragma once

#include "common/cluster.cuh"
#include "linear/epilogue.cuh"
#include "linear/gemv_wna16.cuh"

namespace fused {

// 8 neighbouring outputs of a token.
struct EightOutputs {
  const Epilogue& e;
  uint32_t column, count;
  uint64_t to;
  bool vectors;

  __device__ __forceinline__ EightOutputs(const Epilogue& e, uint32_t column, uint64_t to, uint32_t width, bool vectors)
      : e(e), column(column), count(min(8u, width - column)), to(to), vectors(vectors && count == 8) {}

  template <typename T> static __device__ __forceinline__ void read(const void* from, uint64_t at, float (&v)[8]) {
    const char* p = static_cast<const char*>(from) + at * sizeof(T);
    if constexpr (sizeof(T) == 4) {
      const float4 a = __ldcg(reinterpret_cast<const float4*>(p)), b = __ldcg(reinterpret_cast<const float4*>(p) + 1);
      v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
      unpack8<T>(__ldcg(reinterpret_cast<const uint4*>(p)), v);
    }
  }
  __device__ __forceinline__ void add(const void* from, uint64_t at, float (&y)[8]) const {
    float v[8] = {};
    if (vectors && e.dtype == BF16) {
      read<__nv_bfloat16>(from, at, v);
    } else if (vectors && e.dtype == F16) {
      read<__half>(from, at, v);
    } else if (vectors) {
      read<float>(from, at, v);
    } else {
      for (uint32_t j = 0; j < 8; ++j) {
        if (j < count) v[j] = widen_raw(read_raw(from, e.dtype, at + j), e.dtype);
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] += v[j];
  }
  __device__ __forceinline__ void add_bias(float (&y)[8], uint32_t past) const {
    if (e.bias) add(e.bias, past + column, y);
  }
  __device__ __forceinline__ void add_residuals(float (&y)[8]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (e.residuals[r]) add(e.residuals[r], to, y);
    }
  }
  template <typename T> __device__ __forceinline__ void write_packed(const float (&y)[8]) const {
    const uint4 v = make_uint4(pack2<T>(y[0], y[1]), pack2<T>(y[2], y[3]), pack2<T>(y[4], y[5]), pack2<T>(y[6], y[7]));
    *reinterpret_cast<uint4*>(static_cast<T*>(e.out) + to) = v;
  }
  __device__ __forceinline__ void write(const float (&y)[8]) const {
    if (vectors && e.out_dtype == BF16) return write_packed<__nv_bfloat16>(y);
    if (vectors && e.out_dtype == F16) return write_packed<__half>(y);
    if (vectors) {
      float4* out = reinterpret_cast<float4*>(static_cast<float*>(e.out) + to);
      out[0] = make_float4(y[0], y[1], y[2], y[3]), out[1] = make_float4(y[4], y[5], y[6], y[7]);
      return;
    }
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j) {
      if (j < count) fused::write(e.out, e.out_dtype, to + j, y[j]);
    }
  }
};

// The outputs of a tile of N tiles of 16 channels side by side and some tokens.
struct TileOutputs {
  const Gemv& p;
  // Planes of f32 sums `[token][pitch]` in shared memory, one for each warp that shares K: address, values from a
  // token to the next, planes, values from a plane to the next.
  uint32_t sums, pitch, planes, plane;
  // Blocks of the cluster, which share K too.
  uint32_t split_k;
  uint32_t first_n_tile, n_tiles, first_token, tokens;
  bool vectors;

  __device__ __forceinline__ float4 load(uint32_t at, uint32_t rank) const {
    if (split_k == 1) {
      const uint4 v = load_shared(at);
      return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
    }
    float4 v = {};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(in_block(at, rank)));
#endif
    return v;
  }

  // Blocks of the cluster whose sums are on their way at once.
  static constexpr int AHEAD = 4;

  // The 8 sums of a token, from value `at` of each plane on.
  __device__ __forceinline__ void gather(float (&y)[8], uint32_t at) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = 0.f;
    for (uint32_t r = 0; r < split_k; r += AHEAD) {
      for (uint32_t q = 0; q < planes; ++q) {
        const uint32_t from = sums + 4 * (q * plane + at);
        float4 v[AHEAD][2];
#pragma unroll
        for (int b = 0; b < AHEAD; ++b) {
#pragma unroll
          for (int i = 0; i < 2; ++i) v[b][i] = r + b < split_k ? load(from + 16 * i, r + b) : float4{};
        }
#pragma unroll
        for (int b = 0; b < AHEAD; ++b) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float* to = y + 4 * i;
            to[0] += v[b][i].x, to[1] += v[b][i].y, to[2] += v[b][i].z, to[3] += v[b][i].w;
          }
        }
      }
    }
  }

  // Writes items `first`, `first + step` and so on, each 8 channels of a token.
  __device__ __forceinline__ void write(uint32_t first, uint32_t step) const {
    const Epilogue& e = p.epilogue;
    const bool gated = gates(p);
    // A power of two.
    const uint32_t pieces = gated ? n_tiles : 2 * n_tiles, pieces_log2 = 31 - __clz(pieces);
#pragma unroll 1
    for (uint32_t i = first; i < tokens * pieces; i += step) {
      const uint32_t token = i >> pieces_log2, piece = i & (pieces - 1);
      const uint32_t n_tile = gated ? piece : piece / 2, half = gated ? 0 : piece % 2;
      const uint32_t column = n_tile_column(p, first_n_tile + n_tile, 0) + 8 * half;
      if (column >= p.width) continue;
      const EightOutputs outputs(e, column, uint64_t(first_token + token) * e.stride + column, p.width, vectors);
      float residuals[8] = {}, y[8], up[8];
      outputs.add_residuals(residuals);
      const uint32_t at = token * pitch + 16 * n_tile + 8 * half;
      gather(y, at);
      if (gated) gather(up, at + 8);
      outputs.add_bias(y, 0);
      if (gated) {
        outputs.add_bias(up, p.width);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = gate(e.activation, y[j]) * up[j];
      } else if (e.activation != ACT_NONE) {
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = activate(e.activation, y[j]);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) y[j] += residuals[j];
      outputs.write(y);
    }
  }
};

// 8 neighbouring elements as they are stored.
template <typename T> struct EightValues {
  static constexpr int WORDS = sizeof(T) / 2;  // of 16 bytes
  uint4 raw[WORDS];

  __device__ __forceinline__ void load(const void* from, uint64_t at) {
    const uint4* p = reinterpret_cast<const uint4*>(static_cast<const T*>(from) + at);
#pragma unroll
    for (int i = 0; i < WORDS; ++i) raw[i] = __ldcg(p + i);
  }
  __device__ __forceinline__ void add_to(float (&y)[8]) const {
    float v[8];
    if constexpr (WORDS == 1) {
      unpack8<T>(raw[0], v);
    } else {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(raw);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = __uint_as_float(words[j]);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] += v[j];
  }
  static __device__ __forceinline__ void store(void* out, uint64_t at, const float (&y)[8]) {
    uint4* p = reinterpret_cast<uint4*>(static_cast<T*>(out) + at);
    if constexpr (WORDS == 1) {
      *p = make_uint4(pack2<T>(y[0], y[1]), pack2<T>(y[2], y[3]), pack2<T>(y[4], y[5]), pack2<T>(y[6], y[7]));
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* v = y + 4 * i;
        p[i] = make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
      }
    }
  }
};

// The outputs of a warp's N tile of 16 channels and many tokens, straight from the accumulators of `wgmma`: of lane
// 4 g + t, channel 8 h + g of token 8 j + 2 t + i is value 4 j + 2 h + i. CHUNK tokens at a time are staged in the
// warp's part of shared memory, so the CTA needs no barrier. Outputs, bias and residuals have type T, aligned for
// 16-byte accesses.
template <typename T, int TOKENS> struct WarpOutputs {
  static constexpr uint32_t CHUNK = 32, PITCH = 20;  // f32 of a token, free of bank conflicts

  const Gemv& p;
  float* staged;  // `[CHUNK][PITCH]`, of this warp
  uint32_t n_tile, first_token;

  static __device__ __forceinline__ void stage(float* staged, const float* sums) {
    const uint32_t lane = thread_now() % WARP;
    float* to = staged + lane % 4 * 2 * PITCH + lane / 4;
#pragma unroll
    for (int j = 0; j < CHUNK / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) to[(8 * j + i % 2) * PITCH + i / 2 * 8] = sums[4 * j + i];
    }
  }
  static __device__ __forceinline__ void read(const float* from, float (&y)[8]) {
    const float4 a = *reinterpret_cast<const float4*>(from), b = *reinterpret_cast<const float4*>(from + 4);
    y[0] = a.x, y[1] = a.y, y[2] = a.z, y[3] = a.w, y[4] = b.x, y[5] = b.y, y[6] = b.z, y[7] = b.w;
  }
  __device__ __forceinline__ void add(const void* from, uint64_t at, float (&y)[8]) const {
    if (!from) return;
    EightValues<T> v;
    v.load(from, at);
    v.add_to(y);
  }

  // A lane's 8 channels of a token of the chunk.
  __device__ __forceinline__ void write_eight(uint32_t chunk, uint32_t token, uint32_t channel) const {
    const Epilogue& e = p.epilogue;
    const bool gated = gates(p);
    const uint32_t column = n_tile_column(p, n_tile, 0) + channel;
    const float* from = staged + token * PITCH + channel;
    token += first_token + chunk * CHUNK;
    if (column >= p.width || token >= p.m) return;
    float y[8];
    read(from, y);
    add(e.bias, column, y);
    if (gated) {
      float up[8];
      read(from + 8, up);
      add(e.bias, p.width + column, up);
#pragma unroll
      for (int j = 0; j < 8; ++j) y[j] = gate(e.activation, y[j]) * up[j];
    } else if (e.activation != ACT_NONE) {
#pragma unroll
      for (int j = 0; j < 8; ++j) y[j] = activate(e.activation, y[j]);
    }
    const uint64_t to = token * e.stride + column;
    add(e.residuals[0], to, y);
    add(e.residuals[1], to, y);
    EightValues<T>::store(e.out, to, y);
  }

  __device__ __forceinline__ void write(const float (&sums)[TOKENS / 2]) const {
    const uint32_t lane = thread_now() % WARP;
#pragma unroll 1
    for (uint32_t chunk = 0; chunk < TOKENS / CHUNK; ++chunk) {
      if (first_token + chunk * CHUNK >= p.m) break;
      __syncwarp();  // what the chunk before left has been read
      // Sums are in registers, which have no addresses.
#pragma unroll
      for (int i = 0; i < TOKENS / CHUNK; ++i) {
        if (i == chunk) stage(staged, sums + i * (CHUNK / 2));
      }
      __syncwarp();
      if (gates(p)) {
        write_eight(chunk, lane, 0);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) write_eight(chunk, 16 * i + lane % 16, lane / 16 * 8);
      }
    }
  }
};

}  // namespace fused
