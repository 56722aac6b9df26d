// Operands of cuBLASLt where weights are GGUF blocks and x has many rows: up to eight repacked matrices (gguf.cuh) of
// any formats and widths become dense ones, one after the other; rows of x, behind an RMS norm or none, become f16
// or bf16.
#include "common/dtype.cuh"
#include "formats/gguf.cuh"

using namespace fused;

template <typename T> __device__ __forceinline__ void dequantize(const DequantizeParams& p) {
  // A quarter for each thread, so that a warp writes whole sectors.
  const uint64_t thread = blockIdx.x * uint64_t(FORMAT_THREADS) + threadIdx.x, i = thread / 4;
  pdl_launch();
  pdl_wait();
  if (i >= p.total) return;
  int source = 0;
#pragma unroll
  for (int s = 1; s < MAX_SOURCES; ++s) source += i >= p.sources[s].first;
  const DequantizeSource& from = p.sources[source];
  const uint64_t within = i - from.first, row = within / from.blocks_of_row;
  const uint32_t block = within % from.blocks_of_row, groups = groups_of(from.blocks_of_row * BLOCK);
  T* out = static_cast<T*>(p.out) + i * BLOCK;
  with_format(from.format, [&](auto format) {
    using F = decltype(format);
    const char* data = from.data + row * F::pitch(groups);
    F::quarter(data, groups, block, thread % 4, [&](int at, float4 v) {
      Pack<T, 4> values;
      values.v[0] = from_float<T>(v.x), values.v[1] = from_float<T>(v.y);
      values.v[2] = from_float<T>(v.z), values.v[3] = from_float<T>(v.w);
      store(out + at, values);
    });
  });
}

FUSED_ENTRIES(dequantize, FORMAT_THREADS, DequantizeParams, dequantize)

template <typename T> __device__ __forceinline__ Pack<T, 4> read4(const T* p, bool vectors) {
  if (vectors) return load<T, 4>(p);
  return {{p[0], p[1], p[2], p[3]}};
}

// A block takes a row.
template <typename T> __device__ __forceinline__ void narrow(const NarrowParams& p) {
  __shared__ float scratch[FORMAT_THREADS / WARP];
  const T* x = static_cast<const T*>(p.x) + blockIdx.x * uint64_t(p.width);
  const T* weight = static_cast<const T*>(p.weight);
  const uint64_t row = blockIdx.x * uint64_t(p.width);
  pdl_launch();
  pdl_wait();
  float factor = 1.f;
  if (weight) {
    float squares = 0.f;
    for (uint32_t i = 4 * threadIdx.x; i < p.width; i += 4 * FORMAT_THREADS) {
      const auto v = read4(x + i, p.vectors);
#pragma unroll
      for (int j = 0; j < 4; ++j) squares = fmaf(to_float(v.v[j]), to_float(v.v[j]), squares);
    }
    factor = rsqrtf(block_sum<FORMAT_THREADS / WARP>(squares, scratch) / p.width + p.eps);
  }
  for (uint32_t i = 4 * threadIdx.x; i < p.width; i += 4 * FORMAT_THREADS) {
    const auto v = read4(x + i, p.vectors);
    Pack<T, 4> w = {};
    if (weight) w = read4(weight + i, p.vectors);
    uint16_t out[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float y = to_float(v.v[j]);
      if (weight) y = rounded<T>(rounded<T>(y * factor) * to_float(w.v[j]));
      out[j] = p.out_dtype == F16 ? __half_as_ushort(from_float<__half>(y))
                                  : __bfloat16_as_ushort(from_float<__nv_bfloat16>(y));
    }
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + row + i) =
        make_uint2(out[0] | uint32_t(out[1]) << 16, out[2] | uint32_t(out[3]) << 16);
  }
}

#define NARROW(SUFFIX, TYPE)                                               \
  extern "C" __global__ void __launch_bounds__(FORMAT_THREADS)             \
      dequantize_narrow_##SUFFIX(const __grid_constant__ NarrowParams p) { \
    narrow<TYPE>(p);                                                       \
  }
NARROW(f32, float)
NARROW(f16, __half)
NARROW(bf16, __nv_bfloat16)
