// gemm_wna16_m16.cuh's GEMM for few output channels, where latency is most of the time: INT4 in groups of 128, K up to
// 2,048, without a gate, on Hopper.
//
// Split-K over the CTAs of a cluster (1 to 4), which have 16 output channels, and over their warps: a warp has one K
// block of 128 values. All its operands are in registers, weights and scales before the PDL wait. Warps synchronize
// once: each sends its sums of eight output channels, through DSMEM, to the CTA that writes them.
#pragma once

#include "common/cluster.cuh"
#include "linear/gemm_wna16_m16.cuh"

namespace fused {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <int BLOCKS> struct GemmM16Cluster {
  static constexpr int MAX_K_BLOCKS = 16, ROW_GROUPS = 2;  // of a cluster
  static constexpr int SUMS = 16 * ROW_GROUP;              // of a warp and a row group
  static constexpr int WRITTEN = BLOCKS == 1 ? ROW_GROUPS : 1;        // row groups of a block, if it writes any
  // Whether the next launch starts when x has been loaded: beside many small blocks it would be in their way.
  static constexpr bool LATE = BLOCKS == 4;

  const Gemv& p;
  const uint32_t rank, first;            // first row of the cluster
  const uint32_t k_blocks, cta_k_blocks, k_block;     // of k, of a block, the warp's if it has one
  const uint32_t lane, g, t;             // the lane's row and column of operands
  const uint32_t row_group, m, column;       // what the thread writes, of those that the block writes,
  const bool writes;                     // if it does
  float4* const sums;                    // [WRITTEN][MOST][WARP]
  const uint32_t barrier;

  __device__ GemmM16Cluster(const GemmM16Params& s, float4* sums, uint32_t barrier)
      : p(s.product), rank(rank_in_cluster()), first(blockIdx.x / BLOCKS * (ROW_GROUPS * ROW_GROUP)),
        k_blocks(k_blocks_of(p.k)), cta_k_blocks((k_blocks + BLOCKS - 1) / BLOCKS),
        k_block(threadIdx.x / WARP < cta_k_blocks ? cta_k_blocks * rank + threadIdx.x / WARP : k_blocks),
        lane(threadIdx.x % WARP), g(lane / 4), t(lane % 4), row_group(WRITTEN > 1 ? threadIdx.x / SUMS : 0),
        m(threadIdx.x % SUMS / ROW_GROUP), column(first + ROW_GROUP * (rank + row_group) + threadIdx.x % ROW_GROUP),
        writes(threadIdx.x < SUMS * WRITTEN && rank < ROW_GROUPS && m < p.m && column < p.width),
        sums(sums), barrier(barrier) {}

  // Where the lane's values of rows g and g + 8 of x are, 8 of every 32. Past the last row the last is read again.
  __device__ __forceinline__ const char* x_of(uint32_t eight) const {
    const uint32_t row = min(8 * eight + g, p.m - 1);
    return static_cast<const char*>(p.prologue.x) + 2 * (uint64_t(row) * p.k + k_block * K_BLOCK + 8 * t);
  }

  // Rows g of both row groups of weights, 32 values, before x is there; the compiler would postpone it.
  static __device__ __forceinline__ Operands operands(const uint4 (&codes)[ROW_GROUPS], int e) {
    Operands w;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4& from = codes[i % ROW_GROUPS];
      w.v[i] = int4_numbers<false>(e < 2 ? (e ? from.y : from.x) : e > 2 ? from.w : from.z, i / 2, 0);
      asm volatile("" : "+r"(w.v[i]));
    }
    return w;
  }

  // Sums of rows g of both row groups of weights for rows 2t and 2t + 1 of both of x, in chains of four products.
  __device__ __forceinline__ void multiply(const Operands (&w)[4], const uint4 (&x)[4][2], const __half (&scales)[2],
                                           float4 (&y)[ROW_GROUPS]) const {
    float c[2][2][4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
      for (int n = 0; n < 2; ++n) mma_both(c[e % 2][n], w[e], x[e][n]);
#pragma unroll
    for (int o = 0; o < ROW_GROUPS; ++o) {
      const float by = __half2float(scales[o]);
      const auto sum = [&](int n, int i) { return by * (c[0][n][2 * o + i] + c[1][n][2 * o + i]); };
      y[o] = make_float4(sum(0, 0), sum(0, 1), sum(1, 0), sum(1, 1));
    }
  }

  // Where the warp's sums of eight rows o are added up: here, or in block o of the cluster.
  __device__ __forceinline__ void give(int o, float4 y) const {
    float4* at = sums + (o % WRITTEN * MAX_K_BLOCKS + k_block) * WARP + lane;
    if (BLOCKS == 1 || o == rank) *at = y;
    else send(in_block(shared_address(at), o), y, in_block(barrier, o));
  }
  // Where among sums output (m, column) has its first, which lane 4 column + m % 8 / 2 has made.
  __device__ __forceinline__ uint32_t place() const {
    return row_group * (MAX_K_BLOCKS * SUMS) + 4 * (column % ROW_GROUP * 4 + m % 8 / 2) + m / 8 * 2 + m % 2;
  }
  __device__ __forceinline__ float total(uint32_t place) const {
    const float* from = reinterpret_cast<const float*>(sums) + place;
    float y[4] = {};
#pragma unroll
    for (int w = 0; w < MAX_K_BLOCKS; ++w) {
      if (w < k_blocks) y[w % 4] += from[w * SUMS];
    }
    return (y[0] + y[1]) + (y[2] + y[3]);
  }
  __device__ __forceinline__ void write_output(float y, const Addends& of) const {
    const Epilogue& e = p.epilogue;
    if (is_plain(e) && e.out_dtype == BF16) {
      static_cast<__nv_bfloat16*>(e.out)[m * e.stride + column] = from_float<__nv_bfloat16>(y);
      return;
    }
    if (e.bias) y += widen_raw(of.bias, e.dtype);
    y = activate(e.activation, y);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (e.residuals[r]) y += widen_raw(of.residuals[r], e.dtype);
    }
    write(e.out, e.out_dtype, m * e.stride + column, y);
  }

  __device__ __forceinline__ void run() const {
    if (!LATE) pdl_launch();
    uint4 codes[ROW_GROUPS];
    __half scales[ROW_GROUPS];
#pragma unroll
    for (int o = 0; o < ROW_GROUPS; ++o) {
      if (k_block >= k_blocks) break;
      uint32_t row = min(first + ROW_GROUP * o, (p.width - 1) & ~7u);
      const Matrix& matrix = matrix_of(p, row);
      const uint64_t place = uint64_t(row / ROW_GROUP) * k_blocks + k_block;
      codes[o] = load_once(static_cast<const char*>(matrix.data) + place * (WARP * 16) + 16 * lane);
      scales[o] = static_cast<const __half*>(matrix.scales)[place * ROW_GROUP + g];
    }
    if (threadIdx.x == 0) {
      const uint32_t own = min(k_blocks, cta_k_blocks * (rank + 1)) - min(k_blocks, cta_k_blocks * rank);
      barrier_init(barrier, 1), barrier_expect(barrier, (k_blocks - own) * (WARP * sizeof(float4)));
    }
    barriers_made();
    cluster_arrive();
    Addends of = {};
    if (writes) of.load_bias(p.epilogue, column);
    // All addresses are known before the PDL wait.
    const char* from[2] = {x_of(0), x_of(1)};
    uint32_t at = place();
    asm volatile("" : "+l"(from[0]), "+l"(from[1]), "+r"(at));
    cluster_wait();
    pdl_wait();
    float4 y[ROW_GROUPS];
    uint4 x[4][2];
    Operands w[4];
    if (k_block < k_blocks) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int n = 0; n < 2; ++n) x[e][n] = __ldcg(reinterpret_cast<const uint4*>(from[n] + 64 * e));
#pragma unroll
      for (int e = 0; e < 4; ++e) w[e] = operands(codes, e);
    }
    if (LATE) pdl_launch();
    if (writes) of.load_residuals(p.epilogue, m, column);
    if (k_block < k_blocks) {
      multiply(w, x, scales, y);
#pragma unroll
      for (int o = 0; o < ROW_GROUPS; ++o) give(o, y[o]);
    }
    __syncthreads();
    // What is sent to a block has to come before it ends.
    if (rank < ROW_GROUPS) barrier_wait(barrier, 0);
    if (writes) write_output(total(at), of);
  }
};

#endif

template <int BLOCKS> __device__ __forceinline__ void gemm_m16_cluster(const GemmM16Params& s) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Core = GemmM16Cluster<BLOCKS>;
  __shared__ float4 sums[Core::WRITTEN * Core::MAX_K_BLOCKS * WARP];
  __shared__ alignas(8) uint64_t barrier;
  Core(s, sums, shared_address(&barrier)).run();
#endif
}

}  // namespace fused

// `NAME`: a kernel for up to 16 rows of x and as many K blocks, in clusters of so many blocks.
#define FUSED_GEMM_M16_CLUSTER(NAME, BLOCKS)                                                               \
  extern "C" __global__ void __launch_bounds__(512) NAME(const __grid_constant__ fused::GemmM16Params p) { \
    fused::gemm_m16_cluster<BLOCKS>(p);                                                                    \
  }
