// How weights of the formats of gemm_wna16_weights.cuh go through shared memory: a warp's stage has the codes and scales
// of an N tile of 16 output channels and a K block of 128 values, where each lane has copied and reads its own codes;
// scales of a row are copied by one lane and read by four.
#pragma once

#include "common/mma.cuh"
#include "linear/gemm_wna16_weights.cuh"

namespace fused {

// 4 or 8 bytes to shared memory.
template <int BYTES> __device__ __forceinline__ void copy_async_few(uint32_t to, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
#endif
}
__device__ __forceinline__ uint32_t load_shared_u16(uint32_t at) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
  return v;
}
__device__ __forceinline__ uint32_t load_shared_u32(uint32_t at) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
  return v;
}
__device__ __forceinline__ uint2 load_shared_u64(uint32_t at) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
  return v;
}
// 0, 4, 8 or 16 bytes.
template <int BYTES, int WORDS> __device__ __forceinline__ void load_shared_words(uint32_t at, uint32_t (&words)[WORDS]) {
  static_assert(BYTES <= 4 * WORDS, "room for all");
  if constexpr (BYTES == 4) words[0] = load_shared_u32(at);
  if constexpr (BYTES == 8) {
    const uint2 v = load_shared_u64(at);
    words[0] = v.x, words[1] = v.y;
  }
  if constexpr (BYTES == 16) {
    const uint4 v = load_shared(at);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  }
}

// GGUF blocks. `x` says how the 8 values of a lane that a block of 32 meets lie among those of x in their own order.
template <class Format> struct GgufStage {
  using Weights = GemmGguf<Format>;
  using Block = typename Weights::Block;
  static constexpr uint32_t X_PADDING = 32;  // lanes read 8 bytes
  static constexpr uint32_t LOW = Format::LOW * WARP, HIGH = Format::HIGH * WARP;  // of 8 rows
  // Of a row: the scales of its four blocks, or the word that has that of its superblock, and the factors.
  static constexpr uint32_t SCALES = Format::IS_SUPER ? 4 : GROUP * Format::SCALE, FACTORS = Format::IS_SUPER ? 8 : 0;
  static constexpr uint32_t SCALES_AT = 2 * (LOW + HIGH), FACTORS_AT = SCALES_AT + 16 * SCALES;
  static constexpr uint32_t BYTES = (FACTORS_AT + 16 * FACTORS + 15) / 16 * 16;

  static __device__ __forceinline__ void copy(const Weights& w, const Gemv&, uint32_t k_block, uint32_t stage) {
    const uint32_t lane = threadIdx.x % WARP, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t place = LANES * k_block + w.rows[i].lane + t;
      const char* low = w.rows[i].tile + Format::LOW * place;
      if constexpr (Format::LOW == 16) copy_async(stage + i * LOW + Format::LOW * lane, low);
      else copy_async_few<Format::LOW>(stage + i * LOW + Format::LOW * lane, low);
      const char* high = w.rows[i].tile + Format::high_at(w.groups) + Format::HIGH * place;
      const uint32_t to = stage + 2 * LOW + i * HIGH + Format::HIGH * lane;
      if constexpr (Format::HIGH == 16) copy_async(to, high);
      else if constexpr (Format::HIGH > 0) copy_async_few<Format::HIGH>(to, high);
    }
    // Lanes 0 and 1 of four copy the scales of both rows, lanes 2 and 3 the factors.
    const BlockRow& row = t % 2 == 0 ? w.rows[0] : w.rows[1];
    const uint32_t g = t % 2 * 8 + lane / 4, first = LANES * k_block + row.lane;
    if (t < 2) {
      const char* from = row.tile + Format::scales_at(w.groups);
      const uint32_t to = stage + SCALES_AT + SCALES * g, at = Format::SCALE * Format::scale_place(first);
      if constexpr (Format::IS_SUPER) copy_async_few<4>(to, from + at / 4 * 4);
      else if constexpr (SCALES == 16) copy_async(to, from + at);
      else copy_async_few<8>(to, from + at);
    } else if constexpr (Format::IS_SUPER) {
      copy_async_few<8>(stage + FACTORS_AT + FACTORS * g, row.tile + Format::factors_at(w.groups) + 2 * first);
    }
  }

  static __device__ __forceinline__ Block read(const Weights& w, const Gemv&, uint32_t, uint32_t stage) {
    const uint32_t lane = threadIdx.x % WARP, t = lane % 4;
    Block block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      auto& piece = block.pieces[i];
      load_shared_words<Format::LOW>(stage + i * LOW + Format::LOW * lane, piece.low);
      piece.high[0] = 0;
      load_shared_words<Format::HIGH>(stage + 2 * LOW + i * HIGH + Format::HIGH * lane, piece.high);
      const uint32_t g = 8 * i + lane / 4, scales = stage + SCALES_AT + SCALES * g;
      if constexpr (Format::IS_SUPER) {
        // Scales of two rows may share a word.
        const uint32_t odd = w.rows[i].lane / GROUP % 2;
        piece.scale = Format::SCALE == 4 ? load_shared_u32(scales) : load_shared_u16(scales + 2 * odd);
        piece.factors = load_shared_u16(stage + FACTORS_AT + FACTORS * g + 2 * t);
      } else {
        piece.scale = Format::SCALE == 4 ? load_shared_u32(scales + 4 * t) : load_shared_u16(scales + 2 * t);
        piece.factors = 0;
      }
    }
    return block;
  }

  // What lane t meets of 32 values of x from `at` on.
  static __device__ __forceinline__ uint4 x(uint32_t at, uint32_t e, uint32_t t) {
    const uint2 a = load_shared_u64(at + 64 * e + 8 * t), b = load_shared_u64(at + 64 * e + 8 * t + 32);
    return make_uint4(a.x, a.y, b.x, b.y);
  }
};

// INT8 and FP8, with a scale for each channel, or f32 scales of blocks.
template <class Format> struct ByteStage {
  using Weights = GemmInt<Format>;
  using Block = typename Weights::Block;
  static constexpr bool BLOCKS = Format::GROUPS == FP8_BLOCKS;
  static constexpr uint32_t X_PADDING = 16;  // 16 bytes of every 32
  static constexpr uint32_t ROWS = sizeof(typename Format::Piece) * WARP, SCALES_AT = 2 * ROWS;
  static constexpr uint32_t BYTES = SCALES_AT + (BLOCKS ? 64 : 0);

  static __device__ __forceinline__ void copy(const Weights& w, const Gemv& p, uint32_t k_block, uint32_t stage) {
    const uint32_t lane = threadIdx.x % WARP, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) Format::copy(stage + i * ROWS + 16 * lane, w.rows[i].codes, p.k, k_block, t);
    if constexpr (BLOCKS) {
      // Lanes 0 and 1 of four copy those of the two rows.
      const float *first = w.rows[0].block_scale(p, k_block), *second = w.rows[1].block_scale(p, k_block);
      if (t < 2) copy_async_few<4>(stage + SCALES_AT + 4 * (8 * t + lane / 4), t == 0 ? first : second);
    }
  }
  static __device__ __forceinline__ Block read(const Weights&, const Gemv&, uint32_t, uint32_t stage) {
    Block block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int q = 0; q < 2; ++q)
        block.pieces[i].words[q] = load_shared(stage + i * ROWS + q * (16 * WARP) + 16 * (threadIdx.x % WARP));
      const uint32_t row = 8 * i + threadIdx.x % WARP / 4;
      if constexpr (BLOCKS) block.scales[i].by = load_shared_u32(stage + SCALES_AT + 4 * row);
    }
    return block;
  }
  static __device__ __forceinline__ uint4 x(uint32_t at, uint32_t e, uint32_t t) {
    return load_shared(at + 2 * Format::value(e, t));
  }
};

// Codes of 4 bits.
template <class Format> struct WordStage {
  using Weights = GemmInt<Format>;
  using Block = typename Weights::Block;
  static constexpr uint32_t X_PADDING = 64;  // lanes read 16 bytes
  static constexpr uint32_t ROWS = Format::BYTES * WARP;  // codes of 8 rows

  static __device__ __forceinline__ void copy_codes(const Weights& w, uint32_t k_block, uint32_t stage) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      copy_async(stage + i * ROWS + Format::BYTES * (threadIdx.x % WARP),
                 w.rows[i].codes + k_block * (ROW_GROUP * ROW_LANES * Format::BYTES));
  }
  static __device__ __forceinline__ void read_codes(Block& block, uint32_t stage) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      load_shared_words<Format::BYTES>(stage + i * ROWS + Format::BYTES * (threadIdx.x % WARP), block.pieces[i].words);
  }
  static __device__ __forceinline__ uint4 x(uint32_t at, uint32_t e, uint32_t t) {
    return load_shared(at + 64 * e + 16 * t);
  }
};

// INT4, with scales of groups, and zero points where the format has them.
template <class Format> struct Int4Stage : WordStage<Format> {
  using typename WordStage<Format>::Weights, typename WordStage<Format>::Block;
  using WordStage<Format>::ROWS;
  static constexpr uint32_t GROUPS = Format::GROUPS;
  // Of a row: bytes of two or four scales; and four zero points. Where the row has fewer, they are among those.
  static constexpr uint32_t SCALES = GROUPS == 4 ? 8 : 4, SCALES_AT = 2 * ROWS, ZEROS_AT = SCALES_AT + 16 * SCALES;
  static constexpr uint32_t BYTES = ZEROS_AT + (Format::ZEROS ? 64 : 0);

  // Where a K block's scales and zero points of a row begin, counted in them.
  static __device__ __forceinline__ uint64_t first(const PackedRow& row, const Gemv& p, uint32_t k_block) {
    return row.place(k_block, p.k) * GROUPS;
  }
  static __device__ __forceinline__ void copy(const Weights& w, const Gemv& p, uint32_t k_block, uint32_t stage) {
    const uint32_t lane = threadIdx.x % WARP, t = lane % 4;
    WordStage<Format>::copy_codes(w, k_block, stage);
    // Lanes 0 and 1 of four copy the scales of both rows, lanes 2 and 3 the zero points.
    const PackedRow& row = t % 2 == 0 ? w.rows[0] : w.rows[1];
    const Matrix& m = p.weights[row.which];
    const char* scales = static_cast<const char*>(m.scales);
    const uint32_t g = t % 2 * 8 + lane / 4;
    const uint64_t at = first(row, p, k_block);
    if (t < 2) {
      const uint32_t to = stage + SCALES_AT + SCALES * g;
      copy_async_few<SCALES>(to, scales + 2 * (at / (SCALES / 2) * (SCALES / 2)));
    } else if (Format::ZEROS) {
      copy_async_few<4>(stage + ZEROS_AT + 4 * g, scales + 2 * uint64_t(m.zeros) + at / 4 * 4);
    }
  }
  static __device__ __forceinline__ Block read(const Weights& w, const Gemv& p, uint32_t k_block, uint32_t stage) {
    const uint32_t lane = threadIdx.x % WARP;
    Block block;
    WordStage<Format>::read_codes(block, stage);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t g = 8 * i + lane / 4, at = static_cast<uint32_t>(first(w.rows[i], p, k_block));
      const uint32_t scales = stage + SCALES_AT + SCALES * g;
      auto& by = block.scales[i].by;
      by[0] = load_shared_u32(scales) >> (GROUPS == 1 ? 16 * (at % 2) : 0);
      if constexpr (GROUPS == 4) by[1] = load_shared_u32(scales + 4);
      if constexpr (Format::ZEROS) block.scales[i].zeros = load_shared_u32(stage + ZEROS_AT + 4 * g) >> (8 * (at % 4));
    }
    return block;
  }
};

// NVFP4, with a scale for each channel and one for each 16 values.
struct Nvfp4Stage : WordStage<Nvfp4Weights> {
  static constexpr uint32_t SCALES_AT = 2 * ROWS, BYTES = SCALES_AT + 16 * Nvfp4::SCALES;

  static __device__ __forceinline__ void copy(const Weights& w, const Gemv&, uint32_t k_block, uint32_t stage) {
    const uint32_t lane = threadIdx.x % WARP, t = lane % 4;
    copy_codes(w, k_block, stage);
    // Lanes 0 and 1 of four, which have those of the first halves, copy all scales of 16 values of both rows.
    const char* scales = t == 0 ? w.places[0].scales : w.places[1].scales;
    const uint32_t to = stage + SCALES_AT + Nvfp4::SCALES * (8 * t + lane / 4);
    if (t < 2) copy_async_few<8>(to, scales + k_block * (ROW_GROUP * Nvfp4::SCALES));
  }
  static __device__ __forceinline__ Block read(const Weights&, const Gemv&, uint32_t, uint32_t stage) {
    const uint32_t lane = threadIdx.x % WARP, half = lane % 4 / 2 * 4;
    Block block;
    read_codes(block, stage);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      block.scales[i].by = load_shared_u32(stage + SCALES_AT + Nvfp4::SCALES * (8 * i + lane / 4) + half);
    return block;
  }
};

// NF4, with two f32 scales.
struct Nf4Stage : WordStage<Nf4Weights> {
  static constexpr uint32_t SCALES_AT = 2 * ROWS, BYTES = SCALES_AT + 16 * Nf4::SCALES;

  static __device__ __forceinline__ void copy(const Weights& w, const Gemv&, uint32_t k_block, uint32_t stage) {
    const uint32_t lane = threadIdx.x % WARP, t = lane % 4;
    copy_codes(w, k_block, stage);
    // Lanes 0 and 1 of four copy the scales of the two rows.
    const char* scales = t == 0 ? w.places[0].scales : w.places[1].scales;
    const uint32_t to = stage + SCALES_AT + Nf4::SCALES * (8 * t + lane / 4);
    if (t < 2) copy_async_few<8>(to, scales + k_block * (ROW_GROUP * Nf4::SCALES));
  }
  static __device__ __forceinline__ Block read(const Weights&, const Gemv&, uint32_t, uint32_t stage) {
    Block block;
    read_codes(block, stage);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      block.scales[i].by = load_shared_u64(stage + SCALES_AT + Nf4::SCALES * (8 * i + threadIdx.x % WARP / 4));
    return block;
  }
};

// Ternary, with a scale for each channel.
struct TernaryStage {
  using Weights = GemmTernary<ROW_SCALES>;
  using Format = Weights::Format;
  using Block = Weights::Block;
  static constexpr uint32_t X_PADDING = 64;  // lanes read 16 bytes
  static constexpr uint32_t ROWS = Format::BYTES * WARP, BYTES = 2 * ROWS;

  static __device__ __forceinline__ void copy(const Weights& w, const Gemv&, uint32_t k_block, uint32_t stage) {
    const uint32_t lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      copy_async_few<Format::BYTES>(stage + i * ROWS + Format::BYTES * lane,
                                    w.rows[i].codes + k_block * (ROW_GROUP * ROW_LANES * Format::BYTES));
  }
  static __device__ __forceinline__ Block read(const Weights&, const Gemv&, uint32_t, uint32_t stage) {
    Block block;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      load_shared_words<Format::BYTES>(stage + i * ROWS + Format::BYTES * (threadIdx.x % WARP), block.pieces[i].words);
    return block;
  }
  // Values j and j + 4 meet codes j and j + 4.
  static __device__ __forceinline__ uint4 x(uint32_t at, uint32_t e, uint32_t t) {
    const uint4 v = load_shared(at + 2 * Format::value(e, t));
    return make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632), __byte_perm(v.y, v.w, 0x5410),
                      __byte_perm(v.y, v.w, 0x7632));
  }
};

}  // namespace fused
