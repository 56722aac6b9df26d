// The epilogue of W8A8 GEMMs (gemm_w8a8.cuh) for eight outputs in a row at a time, which are 16 or 32 bytes.
#pragma once

#include "common/mma.cuh"
#include "linear/gemm_w8a8.cuh"

namespace fused {

// 8 values in a row. They pass by the L1 cache as in common/dtype.cuh.
__device__ __forceinline__ void read8(const void* p, int dtype, uint64_t at, float (&v)[8]) {
  if (dtype == F32) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(p) + at);
    const float4 a = __ldcg(from), b = __ldcg(from + 1);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
    v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
  } else {
    const uint4 words = __ldcg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p) + at));
    if (dtype == BF16)
      unpack8<__nv_bfloat16>(words, v);
    else
      unpack8<__half>(words, v);
  }
}

template <typename T> __device__ __forceinline__ uint4 pack8(const float (&v)[8]) {
  return make_uint4(pack2<T>(v[0], v[1]), pack2<T>(v[2], v[3]), pack2<T>(v[4], v[5]), pack2<T>(v[6], v[7]));
}

__device__ __forceinline__ void write8(void* p, int dtype, uint64_t at, const float (&v)[8]) {
  if (dtype == F32) {
    const auto bits = [&](int i) { return __float_as_uint(v[i]); };
    float* to = static_cast<float*>(p) + at;
    store16(to, make_uint4(bits(0), bits(1), bits(2), bits(3)));
    store16(to + 4, make_uint4(bits(4), bits(5), bits(6), bits(7)));
  } else {
    store16(static_cast<uint16_t*>(p) + at, dtype == BF16 ? pack8<__nv_bfloat16>(v) : pack8<__half>(v));
  }
}

// Sums as they lie in shared memory.
__device__ __forceinline__ uint32_t sum_bits(int sum) { return sum; }
__device__ __forceinline__ uint32_t sum_bits(float sum) { return __float_as_uint(sum); }

__device__ __forceinline__ void read_sums(uint32_t from, int (&sums)[8]) {
  const uint4 a = load_shared(from), b = load_shared(from + 16);
  sums[0] = a.x, sums[1] = a.y, sums[2] = a.z, sums[3] = a.w;
  sums[4] = b.x, sums[5] = b.y, sums[6] = b.z, sums[7] = b.w;
}
__device__ __forceinline__ void read_sums(uint32_t from, float (&sums)[8]) {
  const float4 a = load_shared_float4(from), b = load_shared_float4(from + 16);
  sums[0] = a.x, sums[1] = a.y, sums[2] = a.z, sums[3] = a.w;
  sums[4] = b.x, sums[5] = b.y, sums[6] = b.z, sums[7] = b.w;
}

// Outputs of row m from `column` of the tile on, which are there. `gated` are sums of what gates multiply.
template <int N, typename Sum>
__device__ __forceinline__ void epilogue8(const W8A8Product& p, const Place& place, const Columns<N>& columns, uint32_t m,
                                          float x_scale, uint32_t column, const Sum (&sums)[8], const Sum (&gated)[8]) {
  const Epilogue& e = p.epilogue;
  const uint64_t at = m * e.stride + place.column[0] + column;
  float residuals[2][8];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (e.residuals[r]) read8(e.residuals[r], e.dtype, at, residuals[r]);
  float y[8];
  columns.scale8(column, x_scale, sums, y);
  if (gates(p)) {
    float up[8];
    columns.scale8(N / 2 + column, x_scale, gated, up);
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] = gate(e.activation, y[j]) * up[j];
  } else if (e.activation != ACT_NONE) {
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] = activate(e.activation, y[j]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!e.residuals[r]) continue;
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] += residuals[r][j];
  }
  write8(e.out, e.out_dtype, at, y);
}

}  // namespace fused
