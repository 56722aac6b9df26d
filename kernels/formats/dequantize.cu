// Operands of cuBLASLt where weights are GGUF blocks and x has many rows: up to eight repacked matrices (gguf.cuh) of
// any formats and widths become dense ones, one after the other; rows of x, behind an RMS norm or none, become f16
// or bf16.
#include "common/dtype.cuh"
#include "formats/gguf.cuh"

using namespace fused;

template <typename T> __device__ __forceinline__ void dequantize(const DequantizeParams& p) {
  // A quarter for each thread, so that a warp writes whole sectors.
  const uint32_t i = blockIdx.x * (FORMAT_THREADS / 4) + threadIdx.x / 4;
  pdl_launch();
  pdl_wait();
  if (i >= p.total) return;
  int source = 0;
#pragma unroll
  for (int s = 1; s < MAX_SOURCES; ++s) source += i >= p.sources[s].first;
  const DequantizeSource& from = p.sources[source];
  const uint32_t within = i - uint32_t(from.first), row = within / from.blocks_of_row;
  const uint32_t block = within - row * from.blocks_of_row, groups = groups_of(from.blocks_of_row * BLOCK);
  T* out = static_cast<T*>(p.out) + uint64_t(i) * BLOCK;
  with_format(from.format, [&](auto format) {
    using F = decltype(format);
    F::quarter(F::row(from.data, row, groups), groups, block, threadIdx.x % 4, [&](int at, float4 v) {
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

// Values of a thread, and of a block.
constexpr uint32_t NARROW_VALUES = 8, NARROW_CHUNK = NARROW_VALUES * FORMAT_THREADS;
static_assert(NARROW_CHUNK == FORMAT_CHUNK, "the host shares rows out by chunks");

// Where bits FIRST to FIRST + 2 of a value's index put it.
template <int FIRST> __device__ __forceinline__ uint32_t place(const NarrowParams& p, uint32_t i) {
  uint32_t to = 0;
#pragma unroll
  for (int bit = FIRST; bit < FIRST + 3; ++bit) to |= (i >> bit & 1) << (p.order >> (4 * bit) & 15);
  return to;
}

// Writes values i to i + 7 of a row of the output. Where they change places, they go through shared memory, so that a
// thread writes 16 bytes.
__device__ __forceinline__ void put(const NarrowParams& p, uint64_t row, uint32_t i, const uint16_t (&v)[NARROW_VALUES],
                                    uint16_t* staged) {
  uint16_t* to = static_cast<uint16_t*>(p.out) + row * p.pitch + i;
  if (p.order == IN_ORDER) {
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      if (i + j < p.pitch)
        *reinterpret_cast<uint2*>(to + j) = make_uint2(v[j] | uint32_t(v[j + 1]) << 16, v[j + 2] | uint32_t(v[j + 3]) << 16);
    }
    return;
  }
  uint16_t* group = staged + threadIdx.x / 8 * 64 + place<3>(p, i);
#pragma unroll
  for (int j = 0; j < 8; ++j) group[place<0>(p, j)] = v[j];
  __syncwarp();
  if (i < p.pitch) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(staged + 8 * threadIdx.x);
}

// Writes the sum over 32 values, of which each of 4 lanes has eight.
__device__ __forceinline__ void put_sum(const NarrowParams& p, uint64_t row, uint32_t i,
                                        const uint16_t (&v)[NARROW_VALUES]) {
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < 8; ++j) sum += __uint_as_float(uint32_t(v[j]) << 16);
  sum += __shfl_xor_sync(FULL, sum, 1);
  sum += __shfl_xor_sync(FULL, sum, 2);
  if (threadIdx.x % 4 == 0 && i < p.pitch) p.sums[uint64_t(i / 32) * p.sums_pitch + row] = sum;
}

// What an RMS norm multiplies the row by.
template <typename T>
__device__ __forceinline__ float norm_factor(const NarrowParams& p, const T* x, float* scratch) {
  float squares = 0.f;
  for (uint32_t i = 4 * threadIdx.x; i < p.width; i += 4 * FORMAT_THREADS) {
    const auto v = read4(x + i, p.vectors);
#pragma unroll
    for (int j = 0; j < 4; ++j) squares = fmaf(to_float(v.v[j]), to_float(v.v[j]), squares);
  }
  return rsqrtf(block_sum<FORMAT_THREADS / WARP>(squares, scratch) / p.width + p.eps);
}

// A block takes a chunk of a row.
template <typename T> __device__ __forceinline__ void narrow(const NarrowParams& p) {
  __shared__ float scratch[FORMAT_THREADS / WARP];
  __shared__ __align__(16) uint16_t staged[2][NARROW_CHUNK];
  const uint64_t row = blockIdx.x / p.chunks;
  const uint32_t i = blockIdx.x % p.chunks * NARROW_CHUNK + NARROW_VALUES * threadIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.width;
  const T* weight = static_cast<const T*>(p.weight);
  pdl_launch();
  pdl_wait();
  if (blockIdx.x == 0) {
    for (uint32_t c = threadIdx.x; c < p.counter_count; c += FORMAT_THREADS) p.counters[c] = 0;
  }
  const float factor = weight ? norm_factor(p, x, scratch) : 1.f;
  uint16_t out[NARROW_VALUES], rest[NARROW_VALUES];
#pragma unroll
  for (int half = 0; half < 8; half += 4) {
    Pack<T, 4> v = {}, w = {};
    if (i + half < p.width) v = read4(x + i + half, p.vectors);
    if (weight && i + half < p.width) w = read4(weight + i + half, p.vectors);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float y = to_float(v.v[j]);
      if (weight) y = rounded<T>(rounded<T>(y * factor) * to_float(w.v[j]));
      if (p.out_dtype == F16) {
        out[half + j] = __half_as_ushort(from_float<__half>(y)), rest[half + j] = 0;
      } else {
        const __nv_bfloat16 high = from_float<__nv_bfloat16>(y);
        out[half + j] = __bfloat16_as_ushort(high);
        rest[half + j] = __bfloat16_as_ushort(from_float<__nv_bfloat16>(y - to_float(high)));
      }
    }
  }
  put(p, row * p.parts, i, out, staged[0]);
  if (p.sums) put_sum(p, row * p.parts, i, out);
  if (p.parts == 1) return;
  put(p, row * p.parts + 1, i, rest, staged[1]);
  if (p.sums) put_sum(p, row * p.parts + 1, i, rest);
}

#define NARROW(SUFFIX, TYPE)                                               \
  extern "C" __global__ void __launch_bounds__(FORMAT_THREADS)             \
      dequantize_narrow_##SUFFIX(const __grid_constant__ NarrowParams p) { \
    narrow<TYPE>(p);                                                       \
  }
NARROW(f32, float)
NARROW(f16, __half)
NARROW(bf16, __nv_bfloat16)
