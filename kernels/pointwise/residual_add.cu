// y = x + a, or (x + a) + b, each sum rounded to the element type.
#include "abi/pointwise.cuh"
#include "common/base.cuh"

using namespace fused;

template <typename T> __device__ __forceinline__ T sum(T x, T a, T b, bool second) {
  const T first = from_float<T>(to_float(x) + to_float(a));
  return second ? from_float<T>(to_float(first) + to_float(b)) : first;
}

template <typename T> __device__ __forceinline__ void residual_add(const ResidualAddParams& p) {
  constexpr int N = VEC<T>;
  const T* x = static_cast<const T*>(p.x);
  const T* a = static_cast<const T*>(p.a);
  const T* b = static_cast<const T*>(p.b);
  T* y = static_cast<T*>(p.y);
  const uint64_t first = blockIdx.x * uint64_t(RESIDUAL_ADD_THREADS) + threadIdx.x;
  const uint64_t step = gridDim.x * uint64_t(RESIDUAL_ADD_THREADS);
  const uint64_t packs = p.vectors ? p.count / N : 0;
  pdl_launch();
  pdl_wait();
  for (uint64_t i = first; i < packs; i += step) {
    const auto xs = load<T, N>(x + i * N);
    const auto as = load<T, N>(a + i * N);
    Pack<T, N> bs = {};
    if (b) bs = load<T, N>(b + i * N);
    Pack<T, N> ys;
#pragma unroll
    for (int j = 0; j < N; ++j) ys.v[j] = sum(xs.v[j], as.v[j], bs.v[j], b != nullptr);
    store(y + i * N, ys);
  }
  for (uint64_t i = packs * N + first; i < p.count; i += step)
    y[i] = sum(x[i], a[i], b ? b[i] : x[i], b != nullptr);
}

FUSED_ENTRIES(residual_add, RESIDUAL_ADD_THREADS, ResidualAddParams, residual_add)
