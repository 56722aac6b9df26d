// Attention in f32 arithmetic, for any layout, any pair of types and any head dimension up to 512: what the
// tensor-core kernels do not take.
#pragma once

#include "attention/prefill.cuh"
#include "formats/kv_codes.cuh"

namespace fused {

using Params = AttentionParams;

constexpr int THREADS = ATTENTION_PLAIN_THREADS;
constexpr int SIDE = 16;  // the block is SIDE x SIDE threads

// Thread (x, y) holds ROWS rows from y * ROWS; of a tile's scores, the keys x, x + 16, ...; of the
// output, the columns 4 x, 4 x + 1 .. 4 x + 3, 4 x + 64, ... The 16 threads of a row are half a warp.
template <int D_, int ROWS_, int KEYS_> struct Shape {
  static constexpr int D = D_;
  static constexpr int ROWS = ROWS_;
  static constexpr int KEYS = KEYS_;
  static constexpr int BLOCK_ROWS = ROWS * SIDE;
  static constexpr int KEYS_EACH = KEYS / SIDE;
  static constexpr int COLUMNS = D / 64;  // of 4 columns each
  static constexpr int PITCH = D + 4;     // 8 consecutive rows lie in different banks
  static constexpr int WEIGHTS = KEYS + 4;
};

__device__ __forceinline__ float read(const void* p, int type, int64_t at) {
  if (type == 0) return static_cast<const float*>(p)[at];
  if (type == 1) return to_float(static_cast<const __half*>(p)[at]);
  return to_float(static_cast<const __nv_bfloat16*>(p)[at]);
}

__device__ __forceinline__ void write(void* p, int type, int64_t at, float v) {
  if (type == 0)
    static_cast<float*>(p)[at] = v;
  else if (type == 1)
    static_cast<__half*>(p)[at] = from_float<__half>(v);
  else
    static_cast<__nv_bfloat16*>(p)[at] = from_float<__nv_bfloat16>(v);
}

__device__ __forceinline__ float half_warp_max(float v) {
#pragma unroll
  for (int i = SIDE / 2; i > 0; i /= 2) v = fmaxf(v, __shfl_xor_sync(FULL, v, i));
  return v;
}

__device__ __forceinline__ float half_warp_sum(float v) {
#pragma unroll
  for (int i = SIDE / 2; i > 0; i /= 2) v += __shfl_xor_sync(FULL, v, i);
  return v;
}

// Scale, softcap, ALiBi and mask, in units of log2. `mask` stands at the row's first key.
__device__ __forceinline__ float general_score(const Params& p, float s, const float* mask, Slope slope, int key) {
  s *= p.scale;
  if (p.softcap > 0.f) s = p.softcap * tanhf(s / p.softcap);
  if (mask) s += mask[key * p.mask_strides[3]];
  return s * LOG2E - slope.each * fabsf(float(slope.position - key));
}

// A tile of keys or values as f32; what lies past the head or the sequence, or in pages that the pool has not, is zero.
// `table`: the sequence's pages, if its keys are in pages, and `scales` the scales of their codes, if they are codes.
template <typename S, Batch B>
__device__ __forceinline__ void read_tile(const Params& p, float* to, const void* from, int64_t start,
                                          const int64_t (&strides)[4], const uint32_t* table, const float* scales,
                                          const uint64_t (&scale_strides)[2], int first, int end) {
  for (int i = threadIdx.x; i < S::KEYS * S::D; i += THREADS) {
    const int row = i / S::D, d = i % S::D;
    bool valid = first + row < end && d < p.dim;
    int64_t at = (first + row) * strides[2];
    if constexpr (B == Batch::PAGED) {
      at = valid ? in_pages(p.pages, table, strides, first + row) : -1;
      valid = at >= 0;
      if (is_coded(p.kv_type)) {
        float value = 0.f;
        if (valid) {
          const uint64_t of = scale_in_pages(p.pages, table, scale_strides, blockIdx.x, first + row);
          value = scales[of] * code_value(static_cast<const uint8_t*>(from)[start + at + d * strides[3]], p.kv_type);
        }
        to[row * S::PITCH + d] = value;
        continue;
      }
    }
    to[row * S::PITCH + d] = valid ? read(from, p.kv_type, start + at + d * strides[3]) : 0.f;
  }
}

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// One thread's part of the block's rows.
template <typename S> struct Rows {
  float s[S::ROWS][S::KEYS_EACH];
  float o[S::ROWS][S::COLUMNS][4];
  float top[S::ROWS], sum[S::ROWS];
  Range range[S::ROWS];
  const float* mask[S::ROWS];
  int x, y;

  __device__ void begin(const Params& p, const Sequence& of, int batch, int kv_head, int block_row) {
    x = threadIdx.x % SIDE;
    y = threadIdx.x / SIDE * S::ROWS;
#pragma unroll
    for (int i = 0; i < S::ROWS; ++i) {
      const Place at = place(p, kv_head, min(block_row + y + i, of.queries * int(p.group) - 1));
      range[i] = visible(p, of, at.query);
      mask[i] = mask_row(p, batch, at);
      top[i] = NEVER;
      sum[i] = 0.f;
#pragma unroll
      for (int c = 0; c < S::COLUMNS; ++c)
#pragma unroll
        for (int j = 0; j < 4; ++j) o[i][c][j] = 0.f;
    }
  }

  __device__ __forceinline__ void scores(const float* q, const float* keys) {
#pragma unroll
    for (int i = 0; i < S::ROWS; ++i)
#pragma unroll
      for (int n = 0; n < S::KEYS_EACH; ++n) s[i][n] = 0.f;
    for (int d = 0; d < S::D; d += 4) {
      float4 key[S::KEYS_EACH];
#pragma unroll
      for (int n = 0; n < S::KEYS_EACH; ++n)
        key[n] = *reinterpret_cast<const float4*>(keys + (x + n * SIDE) * S::PITCH + d);
#pragma unroll
      for (int i = 0; i < S::ROWS; ++i) {
        const float4 row = *reinterpret_cast<const float4*>(q + (y + i) * S::PITCH + d);
#pragma unroll
        for (int n = 0; n < S::KEYS_EACH; ++n) s[i][n] = dot(row, key[n], s[i][n]);
      }
    }
  }

  // Scores to weights, which go to shared memory; sums so far are scaled to the new maximum.
  __device__ __forceinline__ void softmax(const Params& p, const Sequence& of, int kv_head, int block_row, int first,
                                          float* weights) {
    const bool general = p.general;
    const float unit = general ? 1.f : p.scale * LOG2E;
#pragma unroll
    for (int i = 0; i < S::ROWS; ++i) {
      float most = top[i];
      Slope slope = {0.f, 0};
      if (p.alibi) {
        const int row = min(block_row + y + i, of.queries * int(p.group) - 1);
        slope = fused::slope(p, of, place(p, kv_head, row));
      }
#pragma unroll
      for (int n = 0; n < S::KEYS_EACH; ++n) {
        const int key = first + x + n * SIDE;
        const bool seen = key >= range[i].from && key < range[i].to;
        if (general && seen) s[i][n] = general_score(p, s[i][n], mask[i], slope, key);
        if (!seen) s[i][n] = NEVER;
        most = fmaxf(most, s[i][n]);
      }
      most = half_warp_max(most);
      const float base = most == NEVER ? 0.f : most;
      const float shrink = exp2_approx((top[i] - base) * unit);
      top[i] = most;
      sum[i] *= shrink;
#pragma unroll
      for (int n = 0; n < S::KEYS_EACH; ++n) {
        const float weight = exp2_approx((s[i][n] - base) * unit);
        sum[i] += weight;
        weights[(y + i) * S::WEIGHTS + x + n * SIDE] = weight;
      }
#pragma unroll
      for (int c = 0; c < S::COLUMNS; ++c)
#pragma unroll
        for (int j = 0; j < 4; ++j) o[i][c][j] *= shrink;
    }
  }

  __device__ __forceinline__ void outputs(const float* weights, const float* values) {
    for (int n = 0; n < S::KEYS; n += 4) {
      float w[S::ROWS][4];
#pragma unroll
      for (int i = 0; i < S::ROWS; ++i) {
        const float4 v = *reinterpret_cast<const float4*>(weights + (y + i) * S::WEIGHTS + n);
        w[i][0] = v.x, w[i][1] = v.y, w[i][2] = v.z, w[i][3] = v.w;
      }
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int c = 0; c < S::COLUMNS; ++c) {
          const float4 v =
              *reinterpret_cast<const float4*>(values + (n + m) * S::PITCH + c * 64 + x * 4);
#pragma unroll
          for (int i = 0; i < S::ROWS; ++i) {
            o[i][c][0] = fmaf(w[i][m], v.x, o[i][c][0]);
            o[i][c][1] = fmaf(w[i][m], v.y, o[i][c][1]);
            o[i][c][2] = fmaf(w[i][m], v.z, o[i][c][2]);
            o[i][c][3] = fmaf(w[i][m], v.w, o[i][c][3]);
          }
        }
    }
  }

  template <Batch B>
  __device__ void epilogue(const Params& p, const Sequence& of, int batch, int kv_head, int block_row) const {
#pragma unroll
    for (int i = 0; i < S::ROWS; ++i) {
      const float total = half_warp_sum(sum[i]);
      const float factor = total == 0.f ? 0.f : 1.f / total;
      const int row = block_row + y + i;
      const Place to = place(p, kv_head, row);
      const int64_t at = (output_row<B>(p, of, batch, to.query) * p.heads + to.head) * p.dim;
#pragma unroll
      for (int c = 0; c < S::COLUMNS; ++c)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int d = c * 64 + x * 4 + j;
          if (row < of.queries * int(p.group) && d < p.dim)
            write(p.y, p.q_type, at + d, o[i][c][j] * factor);
        }
    }
  }
};

template <typename S, Batch B> __device__ __forceinline__ void attend(const Params& p) {
  extern __shared__ __align__(16) float shared[];
  float* const q = shared;
  float* const tile = q + S::BLOCK_ROWS * S::PITCH;  // keys, then values
  float* const weights = tile + S::KEYS * S::PITCH;
  const int kv_head = blockIdx.x, batch = blockIdx.z;
  // The last rows see the most keys: they come first.
  const int block_row = (gridDim.y - 1 - blockIdx.y) * S::BLOCK_ROWS;
  pdl_launch();
  pdl_wait();
  const LeftOver<B, Params> left_over(p, gridDim.z, p.dim);
  const Sequence of = sequence<B>(p, batch);
  left_over.each(Zeroing::all(), [&](int64_t at) { write(p.y, p.q_type, at, 0.f); });
  const int rows = of.queries * p.group;
  if (B != Batch::DENSE && block_row >= rows) return;
  const int last_row = min(block_row + S::BLOCK_ROWS, rows) - 1;
  const int from = visible(p, of, place(p, kv_head, block_row).query).from / S::KEYS * S::KEYS;
  const int to = visible(p, of, place(p, kv_head, last_row).query).to;
  const int64_t q_start = start_of<B>(p.q_strides, batch, of.first_query);
  for (int i = threadIdx.x; i < S::BLOCK_ROWS * S::D; i += THREADS) {
    const int row = block_row + i / S::D, d = i % S::D;
    const Place at = place(p, kv_head, row);
    const int64_t start = q_start + at.head * p.q_strides[1] + at.query * p.q_strides[2];
    q[i / S::D * S::PITCH + d] =
        row < rows && d < p.dim ? read(p.q, p.q_type, start + d * p.q_strides[3]) : 0.f;
  }
  Rows<S> state;
  state.begin(p, of, batch, kv_head, block_row);
  // A warp whose rows are all past the end only helps to read.
  const bool works = block_row + threadIdx.x / WARP * 2 * S::ROWS < rows;
  const int64_t k_start = start_of<B>(p.k_strides, batch, of.first_key) + kv_head * p.k_strides[1];
  const int64_t v_start = start_of<B>(p.v_strides, batch, of.first_key) + kv_head * p.v_strides[1];
  for (int first = from; first < to; first += S::KEYS) {
    __syncthreads();
    read_tile<S, B>(p, tile, p.k, k_start, p.k_strides, of.pages, p.pages.k_scales, p.pages.k_scale_strides, first, of.keys);
    __syncthreads();
    if (works) {
      state.scores(q, tile);
      state.softmax(p, of, kv_head, block_row, first, weights);
    }
    __syncthreads();
    read_tile<S, B>(p, tile, p.v, v_start, p.v_strides, of.pages, p.pages.v_scales, p.pages.v_scale_strides, first, of.keys);
    __syncthreads();
    if (works) state.outputs(weights, tile);
  }
  state.template epilogue<B>(p, of, batch, kv_head, block_row);
}

}  // namespace fused
