// What surrounds cuBLASLt where x has many rows: the epilogue of f32 sums, and 16-bit matrices widened to f32.
#include "linear/epilogue.cuh"

using namespace fused;

template <int N> __device__ __forceinline__ void read_sums(const float* from, float (&v)[N]) {
  if constexpr (N == 4) {
    const float4 part = *reinterpret_cast<const float4*>(from);
    v[0] = part.x, v[1] = part.y, v[2] = part.z, v[3] = part.w;
  } else {
    v[0] = from[0];
  }
}

template <typename T, int N> __device__ __forceinline__ void add(const void* from, uint64_t at, float (&v)[N]) {
  const auto other = load<T, N>(static_cast<const T*>(from) + at);
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] += to_float(other.v[j]);
}

template <typename T, int N>
__device__ __forceinline__ void epilogue_elements(const SumsEpilogueParams& p, uint32_t m, uint32_t column) {
  const Epilogue& e = p.epilogue;
  const float* sums = p.sums + uint64_t(m) * p.rows + column;
  float y[N];
  read_sums(sums, y);
  if (e.bias) add<T, N>(e.bias, column, y);
  if (gates(e)) {
    float up[N];
    read_sums(sums + p.width, up);
    if (e.bias) add<T, N>(e.bias, column + p.width, up);
#pragma unroll
    for (int j = 0; j < N; ++j) y[j] = gate(e.activation, y[j]) * up[j];
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) y[j] = activate(e.activation, y[j]);
  }
  const uint64_t at = m * e.stride + column;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (e.residuals[r]) add<T, N>(e.residuals[r], at, y);
  }
  Pack<T, N> out;
#pragma unroll
  for (int j = 0; j < N; ++j) out.v[j] = from_float<T>(y[j]);
  store(static_cast<T*>(e.out) + at, out);
}

template <typename T> __device__ __forceinline__ void epilogue(const SumsEpilogueParams& p) {
  pdl_launch();
  pdl_wait();
  const uint32_t step = p.vectors ? 4 : 1;
  const uint32_t column = (blockIdx.x * SUMS_EPILOGUE_THREADS + threadIdx.x) * step;
  if (column >= p.width) return;
  for (uint32_t m = blockIdx.y; m < p.m; m += gridDim.y) {
    if (p.vectors) {
      epilogue_elements<T, 4>(p, m, column);
    } else {
      epilogue_elements<T, 1>(p, m, column);
    }
  }
}

FUSED_ENTRIES(gemm_dense_epilogue, SUMS_EPILOGUE_THREADS, SumsEpilogueParams, epilogue)

template <typename T> __device__ __forceinline__ void widen(const WidenParams& p) {
  pdl_launch();
  pdl_wait();
  const uint64_t step = gridDim.x * uint64_t(SUMS_EPILOGUE_THREADS);
  for (uint64_t i = blockIdx.x * uint64_t(SUMS_EPILOGUE_THREADS) + threadIdx.x; i < p.count; i += step)
    p.to[i] = to_float(static_cast<const T*>(p.from)[i]);
}

#define WIDEN(SUFFIX, TYPE)                                              \
  extern "C" __global__ void __launch_bounds__(SUMS_EPILOGUE_THREADS)    \
      gemm_dense_widen_##SUFFIX(const __grid_constant__ WidenParams p) { \
    widen<TYPE>(p);                                                      \
  }
WIDEN(f16, __half)
WIDEN(bf16, __nv_bfloat16)
