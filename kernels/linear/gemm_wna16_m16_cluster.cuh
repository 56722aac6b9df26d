// gemm_wna16_m16.cuh's product, y = act(x W^T + bias) + residuals for up to 16 rows of bf16 x, where weights are so few
// that waiting is most of it: INT4 in groups of 128, up to 2,048 of k, not gated.
//
// BLOCKS of a cluster have two eights of rows of weights and share k, so that none waits for much of x; a
// warp has a step of 128 values. What a lane multiplies it has in registers, its codes and scales before the wait,
// their numbers before x. Warps meet once: each gives its sums of eight rows to the block that writes them.
#pragma once

#include "common/cluster.cuh"
#include "linear/gemm_wna16_m16.cuh"

namespace fused {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <int BLOCKS> struct CodeShort {
  static constexpr int MOST = 16, OCTETS = 2, SUMS = 16 * OCTET;  // steps; of a cluster; of a warp and an octet
  static constexpr int WRITTEN = BLOCKS == 1 ? OCTETS : 1;        // octets of a block, if it writes any
  // Whether the next launch starts when x has been asked for: beside many small blocks it would be in their way.
  static constexpr bool LATE = BLOCKS == 4;

  const Gemv& p;
  const uint32_t rank, first;            // first row of the cluster
  const uint32_t steps, share, step;     // of k, of a block, the warp's if it has one
  const uint32_t lane, g, t;             // the lane's row and column of operands
  const uint32_t octet, m, column;       // what the thread writes, of those that the block writes,
  const bool writes;                     // if it does
  float4* const sums;                    // [WRITTEN][MOST][WARP]
  const uint32_t barrier;

  __device__ CodeShort(const SlicesParams& s, float4* sums, uint32_t barrier)
      : p(s.product), rank(rank_in_cluster()), first(blockIdx.x / BLOCKS * (OCTETS * OCTET)),
        steps(steps_of(p.k)), share((steps + BLOCKS - 1) / BLOCKS),
        step(threadIdx.x / WARP < share ? share * rank + threadIdx.x / WARP : steps),
        lane(threadIdx.x % WARP), g(lane / 4), t(lane % 4), octet(WRITTEN > 1 ? threadIdx.x / SUMS : 0),
        m(threadIdx.x % SUMS / OCTET), column(first + OCTET * (rank + octet) + threadIdx.x % OCTET),
        writes(threadIdx.x < SUMS * WRITTEN && rank < OCTETS && m < p.m && column < p.width),
        sums(sums), barrier(barrier) {}

  // Where the lane's values of rows g and g + 8 of x are, 8 of every 32. Behind the last row that one stands again.
  __device__ __forceinline__ const char* x_of(uint32_t eight) const {
    const uint32_t row = min(8 * eight + g, p.m - 1);
    return static_cast<const char*>(p.prologue.x) + 2 * (uint64_t(row) * p.k + step * STEP + 8 * t);
  }

  // Rows g of both eights of weights, 32 values, before x is there, which a compiler would leave for later.
  static __device__ __forceinline__ Operands operands(const uint4 (&codes)[OCTETS], int e) {
    Operands w;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4& from = codes[i % OCTETS];
      w.v[i] = int4_numbers<false>(e < 2 ? (e ? from.y : from.x) : e > 2 ? from.w : from.z, i / 2, 0);
      asm volatile("" : "+r"(w.v[i]));
    }
    return w;
  }

  // Sums of rows g of both eights of weights for rows 2t and 2t + 1 of both of x, in chains of four products.
  __device__ __forceinline__ void multiply(const Operands (&w)[4], const uint4 (&x)[4][2], const __half (&scales)[2],
                                           float4 (&y)[OCTETS]) const {
    float c[2][2][4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
      for (int n = 0; n < 2; ++n) mma_both(c[e % 2][n], w[e], x[e][n]);
#pragma unroll
    for (int o = 0; o < OCTETS; ++o) {
      const float by = __half2float(scales[o]);
      const auto sum = [&](int n, int i) { return by * (c[0][n][2 * o + i] + c[1][n][2 * o + i]); };
      y[o] = make_float4(sum(0, 0), sum(0, 1), sum(1, 0), sum(1, 1));
    }
  }

  // Where the warp's sums of eight rows o are added up: here, or in block o of the cluster.
  __device__ __forceinline__ void give(int o, float4 y) const {
    float4* at = sums + (o % WRITTEN * MOST + step) * WARP + lane;
    if (BLOCKS == 1 || o == rank) *at = y;
    else send(in_block(shared_address(at), o), y, in_block(barrier, o));
  }
  // Where among sums output (m, column) has its first, which lane 4 column + m % 8 / 2 has made.
  __device__ __forceinline__ uint32_t place() const {
    return octet * (MOST * SUMS) + 4 * (column % OCTET * 4 + m % 8 / 2) + m / 8 * 2 + m % 2;
  }
  __device__ __forceinline__ float total(uint32_t place) const {
    const float* from = reinterpret_cast<const float*>(sums) + place;
    float y[4] = {};
#pragma unroll
    for (int w = 0; w < MOST; ++w) {
      if (w < steps) y[w % 4] += from[w * SUMS];
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
    if (!LATE) allow_next();
    uint4 codes[OCTETS];
    __half scales[OCTETS];
#pragma unroll
    for (int o = 0; o < OCTETS; ++o) {
      if (step >= steps) break;
      uint32_t row = min(first + OCTET * o, (p.width - 1) & ~7u);
      const Matrix& matrix = matrix_of(p, row);
      const uint64_t place = uint64_t(row / OCTET) * steps + step;
      codes[o] = load_once(static_cast<const char*>(matrix.data) + place * (WARP * 16) + 16 * lane);
      scales[o] = static_cast<const __half*>(matrix.scales)[place * OCTET + g];
    }
    if (threadIdx.x == 0) {
      const uint32_t own = min(steps, share * (rank + 1)) - min(steps, share * rank);
      barrier_init(barrier, 1), barrier_expect(barrier, (steps - own) * (WARP * sizeof(float4)));
    }
    barriers_made();
    cluster_arrive();
    Addends of = {};
    if (writes) of.ask_bias(p.epilogue, column);
    // All addresses are known before the wait.
    const char* from[2] = {x_of(0), x_of(1)};
    uint32_t at = place();
    asm volatile("" : "+l"(from[0]), "+l"(from[1]), "+r"(at));
    cluster_wait();
    wait_previous();
    float4 y[OCTETS];
    uint4 x[4][2];
    Operands w[4];
    if (step < steps) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
#pragma unroll
        for (int n = 0; n < 2; ++n) x[e][n] = __ldcg(reinterpret_cast<const uint4*>(from[n] + 64 * e));
#pragma unroll
      for (int e = 0; e < 4; ++e) w[e] = operands(codes, e);
    }
    if (LATE) allow_next();
    if (writes) of.ask_residuals(p.epilogue, m, column);
    if (step < steps) {
      multiply(w, x, scales, y);
#pragma unroll
      for (int o = 0; o < OCTETS; ++o) give(o, y[o]);
    }
    __syncthreads();
    // What is sent to a block has to come before it ends.
    if (rank < OCTETS) barrier_wait(barrier, 0);
    if (writes) write_output(total(at), of);
  }
};

#endif

template <int BLOCKS> __device__ __forceinline__ void code_short(const SlicesParams& s) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Core = CodeShort<BLOCKS>;
  __shared__ float4 sums[Core::WRITTEN * Core::MOST * WARP];
  __shared__ alignas(8) uint64_t barrier;
  Core(s, sums, shared_address(&barrier)).run();
#endif
}

}  // namespace fused

// `NAME`: a kernel for up to 16 rows of x and as many steps of k, in clusters of so many blocks.
#define FUSED_CODE_SHORT(NAME, BLOCKS)                                                                    \
  extern "C" __global__ void __launch_bounds__(512) NAME(const __grid_constant__ fused::SlicesParams p) { \
    fused::code_short<BLOCKS>(p);                                                                         \
  }
