// code_slices.cuh's product, y = act(x W^T + bias) + residuals for up to 16 rows of bf16 x, where weights are so few
// that waiting is most of it: INT4 in groups of 128, up to 2,048 of k, not gated.
//
// BLOCKS of a cluster have two eights of rows of weights and share k, so that none waits for much of x; a
// warp has a step of 128 values. What a lane multiplies it has in registers, its codes and scales before the wait;
// x is operand A of the tensor cores. Warps meet once: each gives its sums of eight rows to the block that writes
// them.
#pragma once

#include "clusters.cuh"
#include "code_slices.cuh"

namespace fused {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

template <int BLOCKS> struct CodeShort {
  static constexpr int MOST = 16, OCTETS = 2, SUMS = 16 * OCTET;  // steps; of a cluster; of a warp and an octet
  static constexpr int WRITTEN = BLOCKS == 1 ? OCTETS : 1;        // octets of a block, if it writes any

  const Gemv& p;
  const uint32_t rank, first;            // first row of the cluster
  const uint32_t steps, warps, step;     // of k, of a block, the warp's
  const uint32_t lane, g, t;             // the lane's row and column of operands
  const uint32_t octet, m, column;       // what the thread writes, of those that the block writes,
  const bool writes;                     // if it does
  float4* const sums;                    // [WRITTEN][MOST][WARP]
  const uint32_t barrier;

  __device__ CodeShort(const Slices& s, float4* sums, uint32_t barrier)
      : p(s.product), rank(rank_in_cluster()), first(blockIdx.x / BLOCKS * (OCTETS * OCTET)),
        steps(steps_of(p.k)), warps(blockDim.x / WARP), step(warps * rank + threadIdx.x / WARP),
        lane(threadIdx.x % WARP), g(lane / 4), t(lane % 4), octet(WRITTEN > 1 ? threadIdx.x / SUMS : 0),
        m(threadIdx.x % SUMS / OCTET), column(first + OCTET * (rank + octet) + threadIdx.x % OCTET),
        writes(threadIdx.x < SUMS * WRITTEN && rank < OCTETS && m < p.m && column < p.width),
        sums(sums), barrier(barrier) {}

  // 32 values of rows g and g + 8 at a time: those from 32 e + 8 t on.
  __device__ __forceinline__ void load(uint4 (&x)[4][2]) const {
    const char* from = static_cast<const char*>(p.prologue.x) + 2 * (uint64_t(g) * p.k + step * STEP + 8 * t);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        x[e][n] = make_uint4(0, 0, 0, 0);
        if (8 * n + g < p.m) x[e][n] = __ldcg(reinterpret_cast<const uint4*>(from + 16 * n * uint64_t(p.k) + 64 * e));
      }
    }
  }

  // Sums of rows g and g + 8 of x for rows 2t and 2t + 1 of eight of weights, in chains of two products.
  static __device__ __forceinline__ float4 multiply(const uint4 (&x)[4][2], const uint4& codes, float2 scales) {
    const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
    float c[4][4] = {}, y[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) w[j] = int4_numbers<false>(words[e], j, 0);
      mma_bf16(c[e % 2], x[e][0].x, x[e][1].x, x[e][0].y, x[e][1].y, w[0], w[1]);
      mma_bf16(c[2 + e % 2], x[e][0].z, x[e][1].z, x[e][0].w, x[e][1].w, w[2], w[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] = (i % 2 ? scales.y : scales.x) * ((c[0][i] + c[1][i]) + (c[2][i] + c[3][i]));
    return make_float4(y[0], y[1], y[2], y[3]);
  }

  // Where the warp's sums of eight rows o are added up: here, or in block o of the cluster.
  __device__ __forceinline__ void give(int o, float4 y) const {
    float4* at = sums + (o % WRITTEN * MOST + step) * WARP + lane;
    if (BLOCKS == 1 || o == rank) *at = y;
    else send(in_block(shared_address(at), o), y, in_block(barrier, o));
  }
  __device__ __forceinline__ float total() const {
    // As a lane of `mma` has it: rows m % 8 and 8 more, columns 2t and 2t + 1.
    const float* from = reinterpret_cast<const float*>(sums + octet * (MOST * WARP));
    from += 4 * (m % 8 * 4 + column % OCTET / 2) + m / 8 * 2 + column % 2;
    float y = 0;
#pragma unroll
    for (int w = 0; w < MOST; ++w) {
      if (w < steps) y += from[w * SUMS];
    }
    return y;
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
    allow_next();
    if (threadIdx.x == 0) {
      const uint32_t own = min(steps, warps * (rank + 1)) - min(steps, warps * rank);
      barrier_init(barrier, 1), barrier_expect(barrier, (steps - own) * (WARP * sizeof(float4)));
    }
    barriers_made();
    cluster_arrive();
    uint4 codes[OCTETS];
    __half2 scales[OCTETS];
#pragma unroll
    for (int o = 0; o < OCTETS; ++o) {
      if (step >= steps) break;
      uint32_t row = min(first + OCTET * o, (p.width - 1) & ~7u);
      const Matrix& matrix = matrix_of(p, row);
      const uint64_t place = uint64_t(row / OCTET) * steps + step;
      codes[o] = load_once(static_cast<const char*>(matrix.data) + place * (WARP * 16) + 16 * lane);
      scales[o] = static_cast<const __half2*>(matrix.second)[place * (OCTET / 2) + t];
    }
    Addends of = {};
    if (writes) of.ask_bias(p.epilogue, column);
    cluster_wait();
    wait_previous();
    uint4 x[4][2];
    if (step < steps) load(x);
    if (writes) of.ask_residuals(p.epilogue, m, column);
    if (step < steps) {
#pragma unroll
      for (int o = 0; o < OCTETS; ++o) give(o, multiply(x, codes[o], __half22float2(scales[o])));
    }
    __syncthreads();
    // What is sent to a block has to come before it ends.
    if (rank < OCTETS) barrier_wait(barrier, 0);
    if (writes) write_output(total(), of);
  }
};

#endif

template <int BLOCKS> __device__ __forceinline__ void code_short(const Slices& s) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Core = CodeShort<BLOCKS>;
  __shared__ float4 sums[Core::WRITTEN * Core::MOST * WARP];
  __shared__ alignas(8) uint64_t barrier;
  Core(s, sums, shared_address(&barrier)).run();
#endif
}

}  // namespace fused

// `NAME`: a kernel for up to 16 rows of x and as many steps of k, in clusters of so many blocks.
#define FUSED_CODE_SHORT(NAME, BLOCKS)                                                                 \
  extern "C" __global__ void __launch_bounds__(512) NAME(const __grid_constant__ fused::Slices p) { \
    fused::code_short<BLOCKS>(p);                                                                      \
  }
