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

  // 8 sums of a token, from value `at` of each plane on.
  __device__ __forceinline__ void gather(float (&y)[8], uint32_t at) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = 0.f;
    for (uint32_t r = 0; r < split_k; ++r) {
      for (uint32_t q = 0; q < planes; ++q) {
        const uint32_t from = sums + 4 * (q * plane + at);
        const float4 a = load(from, r), b = load(from + 16, r);
        y[0] += a.x, y[1] += a.y, y[2] += a.z, y[3] += a.w;
        y[4] += b.x, y[5] += b.y, y[6] += b.z, y[7] += b.w;
      }
    }
  }

  // Every thread that takes part in it, 8 channels of a token at a time: those from `first` on, `step` apart.
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
      const uint32_t at = token * pitch + 16 * n_tile + 8 * half;
      const uint64_t to = uint64_t(first_token + token) * e.stride + column;
      const EightOutputs outputs(e, column, to, p.width, vectors);
      float y[8];
      gather(y, at);
      outputs.add_bias(y, 0);
      if (gated) {
        float up[8];
        gather(up, at + 8);
        outputs.add_bias(up, p.width);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = gate(e.activation, y[j]) * up[j];
      } else if (e.activation != ACT_NONE) {
#pragma unroll
        for (int j = 0; j < 8; ++j) y[j] = activate(e.activation, y[j]);
      }
      outputs.add_residuals(y);
      outputs.write(y);
    }
  }
};

}  // namespace fused
