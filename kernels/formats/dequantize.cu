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

// Where value `i` of a row goes.
__device__ __forceinline__ uint32_t place(const NarrowParams& p, uint32_t i) {
  uint32_t to = i & ~63u;
#pragma unroll
  for (int bit = 0; bit < 6; ++bit) to |= (i >> bit & 1) << (p.order >> (4 * bit) & 15);
  return to;
}

// Four values from `i` on of part `part` of the block's row.
__device__ __forceinline__ void put(const NarrowParams& p, uint32_t part, uint32_t i, const uint16_t (&v)[4]) {
  uint16_t* row = static_cast<uint16_t*>(p.out) + (uint64_t(blockIdx.x) * p.parts + part) * p.pitch;
  if (p.order == IN_ORDER) {
    *reinterpret_cast<uint2*>(row + i) = make_uint2(v[0] | uint32_t(v[1]) << 16, v[2] | uint32_t(v[3]) << 16);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) row[place(p, i + j)] = v[j];
  }
}

// Adds up four values of each of 8 lanes, which have 32 side by side.
__device__ __forceinline__ void put_sum(const NarrowParams& p, uint32_t part, uint32_t i, const uint16_t (&v)[4]) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < 4; ++j) sum += __uint_as_float(uint32_t(v[j]) << 16);
#pragma unroll
  for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(FULL, sum, offset);
  if (threadIdx.x % 8 == 0 && i < p.pitch) p.sums[uint64_t(i / 32) * p.sums_pitch + blockIdx.x * p.parts + part] = sum;
}

// A block takes a row.
template <typename T> __device__ __forceinline__ void narrow(const NarrowParams& p) {
  __shared__ float scratch[FORMAT_THREADS / WARP];
  const T* x = static_cast<const T*>(p.x) + blockIdx.x * uint64_t(p.width);
  const T* weight = static_cast<const T*>(p.weight);
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
  // Whole warps come round, for their sums.
  for (uint32_t first = 0; first < p.pitch; first += 4 * FORMAT_THREADS) {
    const uint32_t i = first + 4 * threadIdx.x;
    Pack<T, 4> v = {}, w = {};
    if (i < p.width) v = read4(x + i, p.vectors);
    if (weight && i < p.width) w = read4(weight + i, p.vectors);
    uint16_t out[4], rest[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float y = to_float(v.v[j]);
      if (weight) y = rounded<T>(rounded<T>(y * factor) * to_float(w.v[j]));
      if (p.out_dtype == F16) {
        out[j] = __half_as_ushort(from_float<__half>(y)), rest[j] = 0;
      } else {
        const __nv_bfloat16 high = from_float<__nv_bfloat16>(y);
        out[j] = __bfloat16_as_ushort(high);
        rest[j] = __bfloat16_as_ushort(from_float<__nv_bfloat16>(y - to_float(high)));
      }
    }
    if (i < p.pitch) put(p, 0, i, out);
    if (i < p.pitch && p.parts == 2) put(p, 1, i, rest);
    if (p.sums) {
      put_sum(p, 0, i, out);
      if (p.parts == 2) put_sum(p, 1, i, rest);
    }
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
