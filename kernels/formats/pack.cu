// Packs INT8, FP8, NVFP4, NF4, INT4 or ternary weights, given as a byte each, into the layouts of packed.cuh (when a model is
// loaded), and dequantizes them: all rows, or those that token ids name. An id past the matrix gives a row of NaN: a step
// inside a CUDA graph has no other way to report it.
#include "formats/packed.cuh"

using namespace fused;

// 16 codes of a row from `first` on; `place` says where each of four goes.
template <class Place>
__device__ __forceinline__ uint4 sixteen(const PackParams& p, uint64_t row, uint32_t first, Place place) {
  uint32_t words[4] = {};
#pragma unroll
  for (uint32_t c = 0; c < 16; ++c) {
    const uint32_t at = first + c;
    if (at < p.k) words[c / 4] |= uint32_t(uint8_t(p.codes[row * p.k + at])) << (8 * place(c % 4));
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

extern "C" __global__ void __launch_bounds__(FORMAT_THREADS)
    pack_int8(const __grid_constant__ PackParams p) {
  pdl_wait();
  const uint64_t i = blockIdx.x * uint64_t(FORMAT_THREADS) + threadIdx.x;
  const uint32_t pieces = Int8::pitch(p.k) / 16, piece = i % pieces;
  const uint64_t row = i / pieces;
  if (row >= p.rows) return;
  reinterpret_cast<uint4*>(p.out)[i] = sixteen(p, row, 16 * piece, [](uint32_t c) { return c; });
}

extern "C" __global__ void __launch_bounds__(FORMAT_THREADS)
    pack_fp8(const __grid_constant__ PackParams p) {
  constexpr uint32_t PIECES = K_BLOCK / 16;
  pdl_wait();
  const uint64_t i = blockIdx.x * uint64_t(FORMAT_THREADS) + threadIdx.x, place = i / PIECES;
  const uint32_t k_blocks = k_blocks_of(p.k), k_block = place / ROW_GROUP % k_blocks;
  const uint64_t group = place / ROW_GROUP / k_blocks, row = group * ROW_GROUP + place % ROW_GROUP;
  if (group * ROW_GROUP >= p.rows) return;
  uint4 codes = make_uint4(0, 0, 0, 0);
  if (row < p.rows) codes = sixteen(p, row, k_block * K_BLOCK + i % PIECES * 16, Fp8<false>::place);
  reinterpret_cast<uint4*>(p.out)[i] = codes;
}

// Sets `out`, a u32, where a NaN is among the e4m3 floats.
extern "C" __global__ void __launch_bounds__(FORMAT_THREADS)
    pack_find_nan_fp8(const __grid_constant__ PackParams p) {
  pdl_wait();
  const uint64_t first = (blockIdx.x * uint64_t(FORMAT_THREADS) + threadIdx.x) * 16, count = p.rows * p.k;
  bool found = false;
#pragma unroll
  for (uint32_t c = 0; c < 16; ++c)
    if (first + c < count) found |= (uint8_t(p.codes[first + c]) & 0x7f) == 0x7f;
  if (found) *reinterpret_cast<uint32_t*>(p.out) = 1;
}

// A thread writes what a lane has of a row and a K block. `put` adds a code of a block to the words.
template <class Format, class Put> __device__ __forceinline__ void pack(const PackParams& p, Put put) {
  constexpr int WORDS = Format::BYTES / 4;
  pdl_wait();
  const uint64_t i = blockIdx.x * uint64_t(FORMAT_THREADS) + threadIdx.x;
  const uint32_t t = i % ROW_LANES, k_blocks = k_blocks_of(p.k);
  const uint64_t place = i / ROW_LANES;
  const uint32_t k_block = place / ROW_GROUP % k_blocks;
  const uint64_t group = place / ROW_GROUP / k_blocks, row = group * ROW_GROUP + place % ROW_GROUP;
  if (group * ROW_GROUP >= p.rows) return;
  uint32_t words[WORDS] = {};
  if (row < p.rows) {
#pragma unroll
    for (uint32_t b = 0; b < 4; ++b) {
#pragma unroll
      for (uint32_t c = 0; c < 8; ++c) {
        const uint32_t at = k_block * K_BLOCK + 32 * b + 8 * t + c;
        if (at < p.k) put(words, b, c, uint32_t(p.codes[row * p.k + at]));
      }
    }
  }
  uint32_t* out = reinterpret_cast<uint32_t*>(p.out) + i * WORDS;
#pragma unroll
  for (int w = 0; w < WORDS; ++w) out[w] = words[w];
}

extern "C" __global__ void __launch_bounds__(FORMAT_THREADS)
    pack_int4(const __grid_constant__ PackParams p) {
  pack<Int4<1>>(p, [](uint32_t* words, uint32_t b, uint32_t c, uint32_t code) {
    words[b] |= (code & 15) << (4 * (c / 2) + 16 * (c % 2));
  });
}

extern "C" __global__ void __launch_bounds__(FORMAT_THREADS)
    pack_ternary(const __grid_constant__ PackParams p) {
  pack<Ternary<0>>(p, [](uint32_t* words, uint32_t b, uint32_t c, uint32_t code) {
    words[b / 2] |= (code & 3) << (4 * c + 2 * (b % 2));
  });
}

extern "C" __global__ void __launch_bounds__(FORMAT_THREADS)
    pack_nvfp4(const __grid_constant__ PackParams p) {
  pack<Nvfp4>(p, Nvfp4::put);
}

extern "C" __global__ void __launch_bounds__(FORMAT_THREADS)
    pack_nf4(const __grid_constant__ PackParams p) {
  pack<Nf4>(p, Nf4::put);
}

// 8 values of a row, as far as it has them.
template <typename T> __device__ __forceinline__ void put_values(const UnpackParams& p, uint32_t row, uint32_t piece,
                                                                 const float (&v)[8]) {
  T* out = static_cast<T*>(p.out) + uint64_t(row) * p.k + 8 * piece;
  // A matrix may begin behind one with an odd number of values.
  if (sizeof(T) == 2 && p.k % 8 == 0 && reinterpret_cast<uintptr_t>(out) % 16 == 0) {
    Pack<T, 8> all;
#pragma unroll
    for (int j = 0; j < 8; ++j) all.v[j] = from_float<T>(v[j]);
    *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(&all);
    return;
  }
#pragma unroll
  for (uint32_t c = 0; c < 8; c += 4) {
    if (8 * piece + c >= p.k) break;
    Pack<T, 4> some;
#pragma unroll
    for (int j = 0; j < 4; ++j) some.v[j] = from_float<T>(v[c + j]);
    store(out + c, some);
  }
}

// A thread has 8 values.
template <typename T> __device__ __forceinline__ void values(const UnpackParams& p) {
  pdl_launch();
  pdl_wait();
  const uint32_t i = blockIdx.x * FORMAT_THREADS + threadIdx.x;
  const uint32_t pieces = (p.k + 7) / 8, at = i / pieces, piece = i - at * pieces;
  if (at >= p.count) return;
  const uint32_t row = p.ids ? p.ids[at] : at;
  float v[8];
  if (row < p.rows) {
    with_packed_format(p.format, [&](auto format) { decltype(format)::eight(p.matrix, p.k, row, piece, v); });
  } else {
#pragma unroll
    for (int c = 0; c < 8; ++c) v[c] = __uint_as_float(0x7fffffffu);
  }
  put_values<T>(p, at, piece, v);
}

FUSED_ENTRIES(unpack, FORMAT_THREADS, UnpackParams, values)

// All rows of a format whose codes lie in tiles: a warp has a tile, each lane 32 values of a row.
template <typename T> __device__ __forceinline__ void tiles(const UnpackParams& p) {
  pdl_launch();
  pdl_wait();
  const uint32_t k_blocks = k_blocks_of(p.k), tile = (blockIdx.x * FORMAT_THREADS + threadIdx.x) / WARP;
  const uint32_t lane = threadIdx.x % WARP, t = lane % 4, group = tile / k_blocks, k_block = tile - group * k_blocks;
  const uint32_t row = group * ROW_GROUP + lane / 4;
  if (row >= p.rows) return;
  with_packed_format(p.format, [&](auto format) {
    using F = decltype(format);
    if constexpr (F::HAS_TILES) {
      const typename F::Lane codes(p.matrix, row, uint64_t(tile) * ROW_GROUP + lane / 4, t);
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        const uint32_t piece = k_block * (K_BLOCK / 8) + 4 * block + t;
        if (8 * piece >= p.k) return;
        float v[8];
        codes.eight(block, v);
        put_values<T>(p, row, piece, v);
      }
    }
  });
}

FUSED_ENTRIES(unpack_tiles, FORMAT_THREADS, UnpackParams, tiles)
