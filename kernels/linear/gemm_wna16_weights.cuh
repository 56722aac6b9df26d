// The weight formats of the tensor-core GEMM for quantized weights and 16-bit activations: how a warp loads 16
// output channels by 128 values of K from memory straight into registers, and how they become operand A of
// `mma`/`wgmma` in bf16.
//
// A weight is dequantized once, to the value that `dequantize` gives rounded to bf16, so the products are those of
// a dense bf16 matrix. Two roundings are avoided without conversions from f32: where a format has only a scale, it
// is taken as the sum of two bf16 numbers, s = high + low, and fma(q, high, q * low) is rounded once.
//
// Lane 4 g + t of a warp has channels g and g + 8. It holds of each 32 values of K the 8 that memory has for lane t,
// in an order of the format's own (`order` of the host file), in which x is stored for it.
#pragma once

#include "formats/gguf.cuh"
#include "linear/gemv_wna16.cuh"

namespace fused {

// An operand A of 16 channels by 32 values of K: two of `m16n8k16`.
struct WeightFragment {
  uint32_t v[8];

  // Pair j of the 8 values that a lane has of channel g (row 0) or g + 8 (row 1).
  __device__ __forceinline__ uint32_t& at(int row, int j) { return v[4 * (j / 2) + 2 * (j % 2) + row]; }
};

__device__ __forceinline__ uint32_t bf16x2_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
#endif
  return out;
}

// A scale as two bf16 numbers, each twice.
struct SplitScale {
  uint32_t high, low;

  explicit __device__ __forceinline__ SplitScale(uint32_t parts) {
    high = __byte_perm(parts, 0, 0x1010), low = __byte_perm(parts, 0, 0x3232);
  }
  __device__ __forceinline__ uint32_t times(uint32_t numbers) const {
    return bf16x2_fma(numbers, high, bf16x2_mul(numbers, low));
  }
};

// Of a lane's two channels and a group of weights: what sums of codes times x are multiplied by, and what sums of x
// alone are.
struct GroupScale {
  float by[2], plus[2];
};

// The compiler would compute these addresses again for every load, to have fewer registers.
__device__ __forceinline__ void keep_in_registers(const char*& a, const char*& b) {
  asm volatile("" : "+l"(a), "+l"(b));
}

// GGUF blocks (gguf.cuh).
template <class Format> struct GemmGguf {
  static constexpr bool CHANNEL_SCALES = false;
  static constexpr int GROUPS = Format::SCALES * 4;  // of 128 values of K
  // Whether sums of x count.
  static constexpr bool HAS_OFFSET = Format::HAS_OFFSET;
  static __device__ __forceinline__ constexpr bool loads_early(int) { return true; }

  struct Block {
    typename Format::Piece pieces[2];
  };

  BlockRow rows[2];
  uint32_t groups;

  __device__ __forceinline__ GemmGguf(const Gemv& p, uint32_t n_tile) : groups(groups_of(p.k)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t r = n_tile_row(p, n_tile, threadIdx.x % WARP / 4 + 8 * i);
      const uint32_t which = (r >= p.weights[1].first) + (r >= p.weights[2].first);
      r -= p.weights[which].first;
      rows[i] = Format::row(p.weights[which].data, r, groups);
    }
  }

  __device__ __forceinline__ void keep() { keep_in_registers(rows[0].tile, rows[1].tile); }

  __device__ __forceinline__ void load(Block& block, const Gemv&, uint32_t k_block) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) block.pieces[i] = Format::load(rows[i], groups, k_block, threadIdx.x % 4);
  }

  // A word of each load.
  static __device__ __forceinline__ uint32_t loaded(const Block& block) {
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto& piece = block.pieces[i];
      all ^= piece.low[0] ^ piece.high[0] ^ piece.scale ^ piece.factors;
    }
    return all;
  }

  // Numbers that are not scaled yet.
  static __device__ __forceinline__ WeightFragment raw(const Block& block, const Gemv&, int e) {
    WeightFragment a;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto codes = Format::codes(block.pieces[i], e);
#pragma unroll
      for (int j = 0; j < 4; ++j) a.at(i, j) = Format::bf16_numbers(codes, j);
    }
    return a;
  }
  static __device__ __forceinline__ GroupScale group(const Block& block, const Gemv&, int g) {
    GroupScale s;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto& piece = block.pieces[i];
      const float by = Format::multiplier(piece.scale, piece.factors, g % Format::SCALES);
      s.by[i] = __shfl_sync(FULL, by, g / Format::SCALES, 4);
      if constexpr (Format::HAS_OFFSET)
        s.plus[i] = __shfl_sync(FULL, Format::offset(piece.scale, piece.factors, g % Format::SCALES),
                                g / Format::SCALES, 4);
    }
    return s;
  }

  // The offset of row i and half h of the GGUF block that the lane has scales of.
  static __device__ __forceinline__ float offset(const Block& block, int i, int h) {
    return Format::offset(block.pieces[i].scale, block.pieces[i].factors, h);
  }

  // What turns the codes of the GGUF block that the lane has scales of into values.
  struct Scales {
    uint32_t by[2][Format::SCALES];  // f32, or split where there is no offset
    float plus[2][Format::SCALES];
  };
  static __device__ __forceinline__ Scales scales(const Block& block, const Gemv&) {
    Scales s;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto& piece = block.pieces[i];
#pragma unroll
      for (int h = 0; h < Format::SCALES; ++h) {
        const float by = Format::multiplier(piece.scale, piece.factors, h);
        s.by[i][h] = Format::HAS_OFFSET ? __float_as_uint(by) : split(by);
        s.plus[i][h] = Format::offset(piece.scale, piece.factors, h);
      }
    }
    return s;
  }

  // Values 32 e and following of the block.
  static __device__ __forceinline__ WeightFragment fragment(const Block& block, const Scales& s, const Gemv&, int e) {
    WeightFragment a;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto codes = Format::codes(block.pieces[i], e);
      constexpr int PAIRS = 4 / Format::SCALES;
#pragma unroll
      for (int h = 0; h < Format::SCALES; ++h) {
        const uint32_t scale = __shfl_sync(FULL, s.by[i][h], e, 4);
        if constexpr (Format::HAS_OFFSET) {
          const float by = __uint_as_float(scale), plus = __shfl_sync(FULL, s.plus[i][h], e, 4);
#pragma unroll
          for (int j = PAIRS * h; j < PAIRS * (h + 1); ++j) {
            const float2 q = unpack2<__nv_bfloat16>(Format::bf16_numbers(codes, j));
            a.at(i, j) = pack2<__nv_bfloat16>(fmaf(q.x, by, plus), fmaf(q.y, by, plus));
          }
        } else {
          const SplitScale by(scale);
#pragma unroll
          for (int j = PAIRS * h; j < PAIRS * (h + 1); ++j) a.at(i, j) = by.times(Format::bf16_numbers(codes, j));
        }
      }
    }
    return a;
  }
};

template <class Piece> __device__ __forceinline__ uint32_t word_of(const Piece& piece) {
  return reinterpret_cast<const uint32_t*>(&piece)[0];
}

// The scales, and zero points, of a row and a K block, of which every lane has those of its rows.
template <int GROUPS, bool ZEROS> struct BlockScales {
  uint32_t by[GROUPS == ONE_GROUP ? 1 : 2], zeros;

  // Where those of K block 0 lie.
  struct Place {
    const char *scales, *zeros;  // zeros: null without zero points

    __device__ __forceinline__ Place(const Gemv& p, const PackedRow& row) {
      const Matrix& m = p.weights[row.which];
      const uint64_t first = row.place(0, p.k) * count(p);
      scales = static_cast<const char*>(m.scales) + 2 * first;
      zeros = ZEROS ? static_cast<const char*>(m.scales) + 2 * uint64_t(m.zeros) + first : nullptr;
    }
  };
  static __device__ __forceinline__ uint32_t count(const Gemv& p) { return GROUPS == SOME_GROUPS ? p.groups : GROUPS; }

  __device__ __forceinline__ void load(const Gemv& p, const Place& row, uint32_t k_block) {
    const uint32_t groups = count(p), at = k_block * ROW_GROUP * groups;
    if (groups == 1) {
      by[0] = load_u16(row.scales + 2 * at);
    } else if (groups == 2) {
      by[0] = load_u32(row.scales + 2 * at);
    } else {
      const uint2 both = load_u64(row.scales + 2 * at);
      by[0] = both.x;
      if constexpr (GROUPS != ONE_GROUP) by[1] = both.y;
    }
    if constexpr (ZEROS) {
      const char* from = row.zeros + at;
      zeros = groups == 1 ? load_u8(from) : groups == 2 ? load_u16(from) : load_u32(from);
    }
  }
  __device__ __forceinline__ uint32_t loaded() const { return ZEROS ? by[0] ^ zeros : by[0]; }
  // The scale of the group that has 32 values from `32 * e` on.
  __device__ __forceinline__ float scale(const Gemv& p, int e) const {
    const uint32_t group = e * count(p) / 4;
    uint32_t word = by[0];
    if constexpr (GROUPS != ONE_GROUP) {
      if (group >= 2) word = by[1];
    }
    return half_of(word, group % 2);
  }
  // Its zero point as two bf16.
  __device__ __forceinline__ uint32_t zero(const Gemv& p, int e) const {
    if constexpr (!ZEROS) return 0x41004100u;
    return zero_point(zeros, e * count(p) / 4);
  }
};
// The epilogue's scales of channels.
struct ChannelScale {
  struct Place {
    const float* at;
    __device__ __forceinline__ Place(const Gemv& p, const PackedRow& row)
        : at(static_cast<const float*>(p.weights[row.which].scales) + row.row) {}
  };
  __device__ __forceinline__ void load(const Gemv&, const Place&, uint32_t) {}
  __device__ __forceinline__ uint32_t loaded() const { return 0; }
  __device__ __forceinline__ float scale(const Gemv&, int) const { return 1.f; }
  __device__ __forceinline__ uint32_t zero(const Gemv&, int) const { return 0; }
};
template <> struct BlockScales<ROW_SCALES, false> : ChannelScale {};
template <> struct BlockScales<FP8_ROWS, false> : ChannelScale {};
template <> struct BlockScales<FP8_BLOCKS, false> {
  uint32_t by;

  struct Place {
    const char* scales;
    __device__ __forceinline__ Place(const Gemv& p, const PackedRow& row)
        : scales(reinterpret_cast<const char*>(row.block_scale(p, 0))) {}
  };
  __device__ __forceinline__ void load(const Gemv&, const Place& row, uint32_t k_block) {
    by = load_u32(row.scales + 4 * k_block);
  }
  __device__ __forceinline__ uint32_t loaded() const { return by; }
  __device__ __forceinline__ float scale(const Gemv&, int) const { return nan_if_negative(by); }
  __device__ __forceinline__ uint32_t zero(const Gemv&, int) const { return 0; }
};

// The epilogue's scales of channels beside those of 16 values, of which a lane has those of its half of each block.
template <> struct BlockScales<ROW_AND_GROUP16_SCALES, false> {
  uint32_t by;

  struct Place {
    const float* at;
    const char* scales;
    __device__ __forceinline__ Place(const Gemv& p, const PackedRow& row)
        : at(ChannelScale::Place(p, row).at), scales(row.group16_scales(p, 0, threadIdx.x % 4)) {}
  };
  __device__ __forceinline__ void load(const Gemv&, const Place& row, uint32_t k_block) {
    by = load_u32(row.scales + k_block * (ROW_GROUP * Nvfp4::SCALES));
  }
  __device__ __forceinline__ uint32_t loaded() const { return by; }
  __device__ __forceinline__ float scale(const Gemv&, int) const { return 1.f; }
  // What codes of block e are multiplied by.
  __device__ __forceinline__ uint32_t zero(const Gemv&, int e) const { return nvfp4_scale(by, e); }
};

// NF4's.
template <> struct BlockScales<TWO_F32_GROUPS, false> {
  uint2 by;

  struct Place {
    const char* scales;
    __device__ __forceinline__ Place(const Gemv& p, const PackedRow& row)
        : scales(static_cast<const char*>(p.weights[row.which].scales) + row.place(0, p.k) * Nf4::SCALES) {}
  };
  __device__ __forceinline__ void load(const Gemv&, const Place& row, uint32_t k_block) {
    by = load_u64(row.scales + k_block * (ROW_GROUP * Nf4::SCALES));
  }
  __device__ __forceinline__ uint32_t loaded() const { return by.x; }
  __device__ __forceinline__ float scale(const Gemv&, int e) const { return __uint_as_float(e < 2 ? by.x : by.y); }
  __device__ __forceinline__ uint32_t zero(const Gemv&, int) const { return 0; }
};

// What a lane has of an N tile of packed weights: two rows, and of each its codes and scales of a K block.
template <class Format> struct PackedBlocks {
  static constexpr bool ONLY_CHANNEL_SCALES = Format::GROUPS == ROW_SCALES || Format::GROUPS == FP8_ROWS;
  static constexpr bool CHANNEL_SCALES = ONLY_CHANNEL_SCALES || Format::GROUPS == ROW_AND_GROUP16_SCALES;
  // What a number of `raw` is to be multiplied by, before its scale.
  static constexpr float UNIT = 1.f;
  using Scales = BlockScales<Format::GROUPS, Format::ZEROS>;

  struct Block {
    typename Format::Piece pieces[2];
    Scales scales[2];
  };

  PackedRow rows[2];
  typename Scales::Place places[2];

  __device__ __forceinline__ PackedBlocks(const Gemv& p, uint32_t n_tile)
      : rows{PackedRow::of_lane<Format>(p, n_tile, 0), PackedRow::of_lane<Format>(p, n_tile, 1)},
        places{{p, rows[0]}, {p, rows[1]}} {}

  __device__ __forceinline__ void keep() {
    keep_in_registers(rows[0].codes, rows[1].codes);
    if constexpr (!ONLY_CHANNEL_SCALES) keep_in_registers(places[0].scales, places[1].scales);
  }

  __device__ __forceinline__ void load(Block& block, const Gemv& p, uint32_t k_block) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      Format::load(block.pieces[i], rows[i].codes, p.k, k_block, threadIdx.x % 4);
      block.scales[i].load(p, places[i], k_block);
    }
  }
  // A word of each load.
  static __device__ __forceinline__ uint32_t loaded(const Block& block) {
    return word_of(block.pieces[0]) ^ word_of(block.pieces[1]) ^ block.scales[0].loaded() ^ block.scales[1].loaded();
  }
};

// INT8, FP8, NVFP4, NF4 and INT4 (packed.cuh). INT8, FP8 and NVFP4 may have a scale for each channel, which the epilogue applies.
template <class Format> struct GemmInt : PackedBlocks<Format> {
  using PackedBlocks<Format>::CHANNEL_SCALES;
  static constexpr int GROUPS = Format::GROUPS == ONE_GROUP || Format::GROUPS == FP8_BLOCKS        ? 1
                                : Format::GROUPS == TWO_GROUPS || Format::GROUPS == TWO_F32_GROUPS ? 2
                                                                                                   : 4;
  static constexpr bool HAS_OFFSET = false;
  static __device__ __forceinline__ constexpr bool loads_early(int tokens) {
    return tokens >= (Format::BYTE_CODES ? 128 : 64);
  }
  using typename PackedBlocks<Format>::Block;
  using PackedBlocks<Format>::PackedBlocks, PackedBlocks<Format>::places;

  __device__ __forceinline__ float channel_scale(int i) const {
    const float scale = __ldg(places[i].at);
    if constexpr (Format::GROUPS == ROW_AND_GROUP16_SCALES) return NVFP4_UNIT * scale;
    if constexpr (Format::GROUPS != FP8_ROWS) return scale;
    return nan_if_negative(__float_as_uint(scale));
  }

  static __device__ __forceinline__ WeightFragment raw(const Block& block, const Gemv& p, int e) {
    WeightFragment a;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (Format::BYTE_CODES) {
#pragma unroll
        for (int j = 0; j < 4; ++j) a.at(i, j) = Format::numbers(Format::word(block.pieces[i], e, j / 2), j % 2);
      } else {
        const uint32_t zero = block.scales[i].zero(p, e);
#pragma unroll
        for (int j = 0; j < 4; ++j) a.at(i, j) = Format::numbers(block.pieces[i].words[e], j, zero);
      }
    }
    return a;
  }
  static __device__ __forceinline__ GroupScale group(const Block& block, const Gemv& p, int g) {
    const int e = 4 / GROUPS * g;
    return {{block.scales[0].scale(p, e), block.scales[1].scale(p, e)}, {}};
  }

  // Where a K block has one: split.
  struct Scales {
    uint32_t by[2];
  };
  static __device__ __forceinline__ Scales scales(const Block& block, const Gemv& p) {
    Scales s = {};
    if constexpr (GROUPS == 1 && !CHANNEL_SCALES)
      s.by[0] = split(block.scales[0].scale(p, 0)), s.by[1] = split(block.scales[1].scale(p, 0));
    return s;
  }

  static __device__ __forceinline__ WeightFragment fragment(const Block& block, const Scales& s, const Gemv& p, int e) {
    WeightFragment a = raw(block, p, e);
    if constexpr (!CHANNEL_SCALES) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const SplitScale by(GROUPS == 1 ? s.by[i] : split(block.scales[i].scale(p, e)));
#pragma unroll
        for (int j = 0; j < 4; ++j) a.at(i, j) = by.times(a.at(i, j));
      }
    }
    return a;
  }
};

// Ternary (packed.cuh). Pair j is codes j and j + 4, whose two bits become sign and lowest exponent bit: twice the
// code in bf16.
template <int GROUPS_> struct GemmTernary : PackedBlocks<TernaryWeights<GROUPS_>> {
  using PackedBlocks<TernaryWeights<GROUPS_>>::CHANNEL_SCALES;
  static constexpr float UNIT = 0.5f;
  static constexpr int GROUPS = 4;
  static constexpr bool HAS_OFFSET = false;
  static __device__ __forceinline__ constexpr bool loads_early(int tokens) { return tokens >= 64; }
  using Format = TernaryWeights<GROUPS_>;
  using typename PackedBlocks<Format>::Block;
  using PackedBlocks<Format>::PackedBlocks, PackedBlocks<Format>::places;

  __device__ __forceinline__ float channel_scale(int i) const { return UNIT * __ldg(places[i].at); }

  static __device__ __forceinline__ WeightFragment raw(const Block& block, const Gemv&, int e) {
    WeightFragment a;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) a.at(i, j) = block.pieces[i].words[e / 2] << (14 - 4 * j - 2 * (e % 2)) & 0xc000c000u;
    }
    return a;
  }
  static __device__ __forceinline__ GroupScale group(const Block& block, const Gemv& p, int g) {
    return {{UNIT * block.scales[0].scale(p, g), UNIT * block.scales[1].scale(p, g)}, {}};
  }

  struct Scales {};
  static __device__ __forceinline__ Scales scales(const Block&, const Gemv&) { return {}; }

  static __device__ __forceinline__ WeightFragment fragment(const Block& block, const Scales&, const Gemv& p, int e) {
    WeightFragment a = raw(block, p, e);
    if constexpr (!CHANNEL_SCALES) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Of one code, rounding is that of the scale.
        const uint32_t by = __byte_perm(pack2<__nv_bfloat16>(UNIT * block.scales[i].scale(p, e), 0.f), 0, 0x1010);
#pragma unroll
        for (int j = 0; j < 4; ++j) a.at(i, j) = bf16x2_mul(a.at(i, j), by);
      }
    }
    return a;
  }
};

}  // namespace fused
