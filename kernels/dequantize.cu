// Rows of GGUF blocks, repacked as formats.cuh describes, into dense rows: up to three matrices of
// any formats under one another, for products with many rows of x.
#include "formats.cuh"

using namespace fused;

struct Source {
  const char* data;
  uint64_t first;  // its first row among all rows; past them for a matrix that is not there
  int format;
  int unused;
};

struct Params {
  Source sources[3];
  void* out;               // [rows, 32 * blocks_of_row], aligned to 16 bytes
  uint64_t total;          // blocks in all
  uint32_t blocks_of_row;  // of 32 values
  int unused;
};

constexpr int THREADS = 256;

template <typename T> __device__ __forceinline__ void dequantize(const Params& p) {
  const uint64_t i = blockIdx.x * uint64_t(THREADS) + threadIdx.x;
  allow_next();
  wait_previous();
  if (i >= p.total) return;
  const uint64_t row = i / p.blocks_of_row;
  const uint32_t block = i % p.blocks_of_row, groups = groups_of(p.blocks_of_row * BLOCK);
  const Source& from = p.sources[(row >= p.sources[1].first) + (row >= p.sources[2].first)];
  T* out = static_cast<T*>(p.out) + i * BLOCK;
  with_format(from.format, [&](auto format) {
    using F = decltype(format);
    const char* data = from.data + (row - from.first) * F::pitch(groups);
    F::each_value(data, groups, block, [&](int at, float4 v) {
      Pack<T, 4> values;
      values.v[0] = from_float<T>(v.x), values.v[1] = from_float<T>(v.y);
      values.v[2] = from_float<T>(v.z), values.v[3] = from_float<T>(v.w);
      store(out + at, values);
    });
  });
}

FUSED_ENTRIES(dequantize, THREADS, dequantize)
