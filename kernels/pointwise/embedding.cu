// The rows of a table that token ids name: of GGUF blocks (formats/gguf.cuh) as f32, f16 or bf16, or of these dtypes as
// they are. An id past the table gives a row of NaN: a step inside a CUDA graph has no other
// way to report it.
#include "abi/pointwise.cuh"
#include "common/dtype.cuh"
#include "formats/gguf.cuh"

using namespace fused;

// A NaN as f32, and twice as f16 or bf16.
constexpr uint32_t NOT_A_NUMBER = 0x7fff7fffu;

extern "C" __global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_blocks(const __grid_constant__ EmbeddingParams p) {
  // A quarter of a block for each thread.
  const uint32_t thread = blockIdx.x * EMBEDDING_THREADS + threadIdx.x, block = thread / 4;
  pdl_launch();
  pdl_wait();
  if (block >= p.columns) return;
  for (uint32_t i = blockIdx.y; i < p.count; i += gridDim.y) {
    const uint32_t id = p.ids[i];
    const uint64_t first = (uint64_t(i) * p.columns + block) * BLOCK;
    if (id >= p.rows) {
      const float nan = __uint_as_float(NOT_A_NUMBER);
      for (int half = 0; half < 2; ++half)
        write4(p.out, p.dtype, first + 16 * half + thread % 4 * 4, make_float4(nan, nan, nan, nan));
      continue;
    }
    with_format(p.format, [&](auto format) {
      using F = decltype(format);
      const uint32_t groups = groups_of(p.columns * BLOCK);
      F::quarter(F::row(p.table, id, groups), groups, block, thread % 4, [&](int at, float4 v) {
        write4(p.out, p.dtype, first + at, v);
      });
    });
  }
}

template <typename T> __device__ __forceinline__ void gather(const EmbeddingParams& p, T nan) {
  const uint32_t column = blockIdx.x * EMBEDDING_THREADS + threadIdx.x;
  pdl_launch();
  pdl_wait();
  if (column >= p.columns) return;
  for (uint32_t i = blockIdx.y; i < p.count; i += gridDim.y) {
    const uint32_t id = p.ids[i];
    T value = nan;
    if (id < p.rows) value = static_cast<const T*>(p.table)[uint64_t(id) * p.columns + column];
    static_cast<T*>(p.out)[uint64_t(i) * p.columns + column] = value;
  }
}

extern "C" __global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_packs(const __grid_constant__ EmbeddingParams p) {
  gather<uint4>(p, make_uint4(NOT_A_NUMBER, NOT_A_NUMBER, NOT_A_NUMBER, NOT_A_NUMBER));
}

extern "C" __global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_elements(const __grid_constant__ EmbeddingParams p) {
  gather<uint16_t>(p, static_cast<uint16_t>(NOT_A_NUMBER));
}
