// Packed INT8, FP8, NVFP4, NF4, INT4 and ternary weights (formats/packed.cuh) as tensor cores take them: codes as operand A, and
// the scales of a tile.
#pragma once

#include "linear/stage_x_wna16.cuh"

namespace fused {

// a - b of two bf16 each. Exact where a is 128 plus a code and b is 128, and where a is a code and b its zero point.
__device__ __forceinline__ uint32_t less_bf16x2(uint32_t a, uint32_t b) {
  uint32_t out = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(b), "r"(0xbf80bf80u), "r"(a));
#endif
  return out;
}

__device__ __forceinline__ uint32_t bf16x2_mul(uint32_t a, uint32_t b) {
  uint32_t out = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  // Without the negative zero of an addend a product of -0 would become +0.
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return out;
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// The numbers of 8 values of k of rows g and g + 8, as operands A of two products.
struct Operands {
  uint32_t v[8];
};

__device__ __forceinline__ void mma_both(float (&c)[4], const Operands& a, uint4 x) {
  mma_bf16(c, a.v[0], a.v[1], a.v[2], a.v[3], x.x, x.y);
  mma_bf16(c, a.v[4], a.v[5], a.v[6], a.v[7], x.z, x.w);
}

__device__ __forceinline__ void mma_s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                       uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}

// Codes 2j and 2j + 1 of a word of INT4 as bf16, and 128 more.
__device__ __forceinline__ uint32_t int4_biased(uint32_t word, int j) {
  return masked_or(word >> (4 * j), 0x000f000fu, 0x43004300u);
}

// The same less their zero point: 8, or `zero` if there are ZEROS.
template <bool ZEROS> __device__ __forceinline__ uint32_t int4_numbers(uint32_t word, int j, uint32_t zero) {
  const uint32_t v = int4_biased(word, j);
  return ZEROS ? less_bf16x2(less_bf16x2(v, 0x43004300u), zero) : less_bf16x2(v, 0x43084308u);
}

// Codes 2j and 2j + 1 of a word of INT8 as bf16. The low 7 bits of a byte become the mantissa of a number from 128 on;
// 128 is subtracted, or 256 if the byte's top bit is set.
__device__ __forceinline__ uint32_t int8_numbers(uint32_t word, int j) {
  const uint32_t v = __byte_perm(word, 0, j == 0 ? 0x4140 : 0x4342);
  return less_bf16x2(masked_or(v, 0x007f007fu, 0x43004300u), masked_or(v, 0x00800080u, 0x43004300u));
}

// Values 2j and 2j + 1 of a word of FP8, which the layout has in bytes j and j + 2, as bf16: sign, exponent and mantissa
// in their places, and then what the exponents' biases differ by, 2^120. Subnormal numbers are exact too.
__device__ __forceinline__ uint32_t fp8_numbers(uint32_t word, int j) {
  const uint32_t signs = j == 0 ? word << 8 : word, rest = j == 0 ? word << 4 : word >> 4;
  return bf16x2_mul(masked_or(signs, 0x80008000u, rest & 0x07f007f0u), 0x7b807b80u);
}

// 2^118 times the scale of the lane's half of block e, as two bf16. A pair of codes from nvfp4_pair times this scale is
// exactly 1 / NVFP4_UNIT of the values.
constexpr float NVFP4_UNIT = 256.f;
__device__ __forceinline__ uint32_t nvfp4_scale(uint32_t bytes, int e) {
  return (__byte_perm(bytes, 0, 0x4040 | e * 0x0101) << 4) + 0x75807580u;
}

// What a scale of FP8 multiplies by: NaN where its sign is set.
__device__ __forceinline__ float nan_if_negative(uint32_t scale) {
  return __uint_as_float(scale | static_cast<uint32_t>(static_cast<int>(scale) >> 31));
}

// TERNARY_UNIT times codes 0, 2, 4 and 6 of block b, or those behind each, as bytes, of the words that
// ternary has of a lane.
__device__ __forceinline__ uint32_t ternary_bytes(uint32_t word, int b, int odd) {
  return word << (6 - 2 * (b % 2) - 4 * odd) & 0xc0c0c0c0u;
}
__device__ __forceinline__ uint32_t ternary_bytes(const uint32_t (&words)[2], int b, int odd) {
  return ternary_bytes(words[b / 2], b, odd);
}

// Groups of a K block: so many, up to four as the kernel's parameters say, or a scale for each row; of FP8 one for each
// row, or one for each block of rows and K block.
constexpr int ONE_GROUP = 1, TWO_GROUPS = 2, FOUR_GROUPS = 4, SOME_GROUPS = 5, ROW_SCALES = 0, FP8_ROWS = 6, FP8_BLOCKS = 7;
// A scale for each row and one for each 16 values, by which codes are multiplied first.
constexpr int ROW_AND_GROUP16_SCALES = 8;
// Two groups, with f32 scales.
constexpr int TWO_F32_GROUPS = 9;

// A row of weights: what a lane has of its codes begins at `codes`, and its matrix is number `which`.
struct PackedRow {
  const char* codes;
  uint32_t row, which;

  template <class Format> static __device__ __forceinline__ PackedRow of(const Gemv& p, uint32_t row, uint32_t t) {
    const uint32_t which = (row >= p.weights[1].first) + (row >= p.weights[2].first);
    row -= p.weights[which].first;
    const char* codes = static_cast<const char*>(p.weights[which].data);
    return {codes + Format::begin(row, p.k) + Format::BYTES * t, row, which};
  }
  // Row g or, with i, g + 8 of an N tile for lane 4 g + t.
  template <class Format> static __device__ __forceinline__ PackedRow of_lane(const Gemv& p, uint32_t n_tile, int i);

  __device__ __forceinline__ uint64_t place(uint32_t k_block, uint32_t k) const {
    return place_of(row, k_block, k_blocks_of(k));
  }
  // Where FP8's scale of the row's block and a K block is.
  __device__ __forceinline__ const float* block_scale(const Gemv& p, uint32_t k_block) const {
    const Matrix& m = p.weights[which];
    return static_cast<const float*>(m.scales) + fp8_block(row, k_block, k_blocks_of(p.k), m.zeros > 0);
  }
  // Where the scales of 16 values are that lane t has of a K block of NVFP4.
  __device__ __forceinline__ const char* group16_scales(const Gemv& p, uint32_t k_block, uint32_t t) const {
    const Matrix& m = p.weights[which];
    return static_cast<const char*>(m.scales) + 2 * uint64_t(m.zeros) + place(k_block, p.k) * Nvfp4::SCALES + t / 2 * 4;
  }
};

// An N tile is 16 rows of weights as the tensor cores take them: its outputs, the column of its row r, and the row
// of the weights that comes from. Rows 8 and following are what the first 8 gate, if they do. Past the last
// column the last is computed again.
__device__ __forceinline__ uint32_t n_tile_outputs(const Gemv& p) { return gates(p) ? 8 : 16; }
__device__ __forceinline__ uint32_t n_tile_column(const Gemv& p, uint32_t n_tile, uint32_t r) {
  return gates(p) ? 8 * n_tile + r % 8 : 16 * n_tile + r;
}
__device__ __forceinline__ uint32_t n_tile_row(const Gemv& p, uint32_t n_tile, uint32_t r) {
  return min(n_tile_column(p, n_tile, r), p.width - 1) + (gates(p) && r >= 8 ? p.width : 0);
}

template <class Format>
__device__ __forceinline__ PackedRow PackedRow::of_lane(const Gemv& p, uint32_t n_tile, int i) {
  return of<Format>(p, n_tile_row(p, n_tile, threadIdx.x % WARP / 4 + 8 * i), threadIdx.x % 4);
}

// Zero point i of four, which are stored in sixteenths, as two bf16: the upper half of the f32.
__device__ __forceinline__ uint32_t zero_point(uint32_t bytes, uint32_t i) {
  const float zero = ZERO_STEP * static_cast<float>(bytes >> (8 * i) & 255);
  return __byte_perm(__float_as_uint(zero), 0, 0x3232);
}

// The scales and zero points of a lane for a row and a tile of K blocks: lane t has the f16 scales, and the zero
// points, of K blocks t, 4 + t and so on; or the scale of the row.
template <int GROUPS, bool ZEROS, int K_BLOCKS> struct TileScales {
  static constexpr int LOADS = (K_BLOCKS + 3) / 4, WORDS = GROUPS == ONE_GROUP ? 1 : 2;
  uint32_t by[LOADS][WORDS], zeros[ZEROS ? LOADS : 1];

  // How many groups there are, and whether 32 values end one that began `e` times 32 values before.
  static __device__ __forceinline__ uint32_t groups(const Gemv& p) { return GROUPS == SOME_GROUPS ? p.groups : GROUPS; }
  static __device__ __forceinline__ bool begins(const Gemv& p, int e) { return e * groups(p) % 4 == 0; }
  static __device__ __forceinline__ bool ends(const Gemv& p, int e) { return (e + 1) * groups(p) % 4 == 0; }

  __device__ __forceinline__ void prefetch(const Gemv& p, const PackedRow& row, uint32_t k_block, uint32_t end,
                                           uint32_t t) {
    const char* scales = static_cast<const char*>(p.weights[row.which].scales);
    const uint32_t zeros_at = ZEROS ? p.weights[row.which].zeros : 0, count = groups(p);
#pragma unroll
    for (int l = 0; l < LOADS; ++l) {
      const uint32_t s = k_block + 4 * l + t;
      if (s >= end || 4 * l + t >= K_BLOCKS) continue;
      const uint64_t first = row.place(s, p.k) * count;
      const char *at = scales + 2 * first, *zero = scales + 2 * uint64_t(zeros_at) + first;
      if (count == 1) {
        by[l][0] = load_u16(at);
        if constexpr (ZEROS) zeros[l] = load_u8(zero);
      } else if (count == 2) {
        by[l][0] = load_u32(at);
        if constexpr (ZEROS) zeros[l] = load_u16(zero);
      } else {
        const uint2 both = load_u64(at);
        by[l][0] = both.x, by[l][WORDS - 1] = both.y;
        if constexpr (ZEROS) zeros[l] = load_u32(zero);
      }
    }
  }
  // The scale of the group that has 32 values from `32 * e` on of K block s of the tile.
  __device__ __forceinline__ float scale(const Gemv& p, int s, int e) const {
    const uint32_t group = e * groups(p) / 4;
    uint32_t own = by[s / 4][0];
    if (WORDS == 2 && group >= 2) own = by[s / 4][WORDS - 1];
    const uint32_t word = __shfl_sync(FULL, own, s % 4, 4);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(word >> (16 * (group % 2)))));
  }
  // Its zero point as two bf16.
  __device__ __forceinline__ uint32_t zero(const Gemv& p, int s, int e) const {
    if constexpr (!ZEROS) return 0x41004100u;
    return zero_point(__shfl_sync(FULL, zeros[s / 4], s % 4, 4), e * groups(p) / 4);
  }
};
template <int K_BLOCKS> struct TileScales<ROW_SCALES, false, K_BLOCKS> {
  uint32_t by;

  static __device__ __forceinline__ bool begins(const Gemv&, int e) { return e == 0; }
  static __device__ __forceinline__ bool ends(const Gemv&, int e) { return e == 3; }

  __device__ __forceinline__ void prefetch(const Gemv& p, const PackedRow& row, uint32_t, uint32_t, uint32_t) {
    by = load_u32(static_cast<const char*>(p.weights[row.which].scales) + 4 * uint64_t(row.row));
  }
  __device__ __forceinline__ float scale(const Gemv&, int, int) const { return __uint_as_float(by); }
  __device__ __forceinline__ uint32_t zero(const Gemv&, int, int) const { return 0; }
};

template <int K_BLOCKS> struct TileScales<FP8_ROWS, false, K_BLOCKS> : TileScales<ROW_SCALES, false, K_BLOCKS> {
  __device__ __forceinline__ float scale(const Gemv&, int, int) const {
    return nan_if_negative(this->by);
  }
};
// Lane t has the scales of K blocks t, 4 + t and so on.
template <int K_BLOCKS> struct TileScales<FP8_BLOCKS, false, K_BLOCKS> {
  static constexpr int LOADS = (K_BLOCKS + 3) / 4;
  uint32_t by[LOADS];

  static __device__ __forceinline__ bool begins(const Gemv&, int e) { return e == 0; }
  static __device__ __forceinline__ bool ends(const Gemv&, int e) { return e == 3; }

  __device__ __forceinline__ void prefetch(const Gemv& p, const PackedRow& row, uint32_t k_block, uint32_t end,
                                           uint32_t t) {
#pragma unroll
    for (int l = 0; l < LOADS; ++l) {
      const uint32_t s = k_block + 4 * l + t;
      if (s < end && 4 * l + t < K_BLOCKS) by[l] = load_u32(row.block_scale(p, s));
    }
  }
  __device__ __forceinline__ float scale(const Gemv&, int s, int) const {
    return nan_if_negative(__shfl_sync(FULL, by[s / 4], s % 4, 4));
  }
  __device__ __forceinline__ uint32_t zero(const Gemv&, int, int) const { return 0; }
};

// Lane t has the scales of 16 values of K block t.
template <int K_BLOCKS> struct TileScales<ROW_AND_GROUP16_SCALES, false, K_BLOCKS> : TileScales<ROW_SCALES, false, K_BLOCKS> {
  static_assert(K_BLOCKS <= 4, "a lane for each");
  uint2 halves;

  __device__ __forceinline__ void prefetch(const Gemv& p, const PackedRow& row, uint32_t k_block, uint32_t end,
                                           uint32_t t) {
    TileScales<ROW_SCALES, false, K_BLOCKS>::prefetch(p, row, k_block, end, t);
    if (t < K_BLOCKS && k_block + t < end) halves = load_u64(row.group16_scales(p, k_block + t, 0));
  }
  __device__ __forceinline__ float scale(const Gemv&, int, int) const {
    return NVFP4_UNIT * __uint_as_float(this->by);
  }
  // Those of K block s that the lane has values of.
  __device__ __forceinline__ uint32_t zero(const Gemv&, int s, int) const {
    const uint32_t first = __shfl_sync(FULL, halves.x, s, 4), second = __shfl_sync(FULL, halves.y, s, 4);
    return threadIdx.x % 4 < 2 ? first : second;
  }
};

// The formats as cores take them. A piece is what a lane has of a row and a K block: four times 8 values.
// `value` says where the 8 begin within a K block, for lane t.
struct Int8Codes {
  static constexpr int K_BLOCKS = 2, GROUPS = ROW_SCALES;
  static constexpr bool ZEROS = false, BYTE_CODES = true;
  using XRows = PartRows<INT8_PADDING>;
  using Sum = float;
  struct Piece {
    uint4 words[2];
  };

  static constexpr uint32_t BYTES = 16;  // of a lane side by side
  static __device__ __forceinline__ uint64_t begin(uint32_t row, uint32_t k) { return uint64_t(row) * Int8::pitch(k); }
  static __device__ __forceinline__ void load(Piece& piece, const char* codes, uint32_t k, uint32_t k_block,
                                              uint32_t t) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const uint32_t at = k_block * K_BLOCK + 64 * q;
      piece.words[q] = make_uint4(0, 0, 0, 0);
      if (at + BYTES * t < k) piece.words[q] = load_once(codes + at);
    }
  }
  // The same to shared memory, where lanes have 16 bytes each side by side.
  static __device__ __forceinline__ void copy(uint32_t to, const char* codes, uint32_t k, uint32_t k_block,
                                              uint32_t t) {
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const uint32_t at = k_block * K_BLOCK + 64 * q;
      const bool valid = at + BYTES * t < k;
      copy_async(to + q * (WARP * BYTES), codes + (valid ? at : 0), valid);
    }
  }
  static __device__ __forceinline__ uint32_t value(int e, uint32_t t) { return 64 * (e / 2) + 16 * t + 8 * (e % 2); }
  static __device__ __forceinline__ uint32_t word(const Piece& piece, int e, int i) {
    const uint4& v = piece.words[e / 2];
    return e % 2 == 0 ? (i == 0 ? v.x : v.y) : (i == 0 ? v.z : v.w);
  }
  static __device__ __forceinline__ uint32_t numbers(uint32_t word, int j) { return int8_numbers(word, j); }
  static __device__ __forceinline__ float number(uint32_t word, uint32_t c) {
    return static_cast<float>(static_cast<int8_t>(word >> (8 * c)));
  }
};

// e4m3 floats, of a row and a K block in the same places.
template <int GROUPS_> struct Fp8Codes : Int8Codes {
  static constexpr int GROUPS = GROUPS_;
  static constexpr uint32_t STEP = ROW_GROUP * K_BLOCK;  // bytes from one K block to the next

  static __device__ __forceinline__ uint64_t begin(uint32_t row, uint32_t k) {
    return place_of(row, 0, k_blocks_of(k)) * K_BLOCK;
  }
  static __device__ __forceinline__ void load(Piece& piece, const char* codes, uint32_t, uint32_t k_block, uint32_t) {
#pragma unroll
    for (int q = 0; q < 2; ++q) piece.words[q] = load_once(codes + k_block * STEP + 64 * q);
  }
  static __device__ __forceinline__ void copy(uint32_t to, const char* codes, uint32_t, uint32_t k_block, uint32_t) {
#pragma unroll
    for (int q = 0; q < 2; ++q) copy_async(to + q * (WARP * BYTES), codes + k_block * STEP + 64 * q);
  }

  static __device__ __forceinline__ uint32_t numbers(uint32_t word, int j) { return fp8_numbers(word, j); }
  // A NaN is in the scale.
  static __device__ __forceinline__ float number(uint32_t word, uint32_t c) {
    return Fp8<false>::value(word >> (8 * Fp8<false>::place(c)) & 255);
  }
};

// Codes of a byte as cores take them.
template <class Codes> struct ByteWeights : Codes {
  using typename Codes::Piece;
  using typename Codes::XRows;
  using Codes::word;

  static __device__ __forceinline__ Operands operands(const Piece& a, const Piece& b, int e, const uint32_t (&)[2]) {
    Operands v;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v.v[2 * j] = Codes::numbers(word(a, e, j / 2), j % 2);
      v.v[2 * j + 1] = Codes::numbers(word(b, e, j / 2), j % 2);
    }
    return v;
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const Piece& a, const Piece& b, int e,
                                                  const uint32_t (&zeros)[2], uint4 x) {
    mma_both(c, operands(a, b, e, zeros), x);
  }
  static __device__ __forceinline__ float dot(const Piece& piece, int e, uint32_t, const typename XRows::Eight& x) {
    const uint4 &a = piece.words[0], &b = piece.words[1];
    const uint32_t words[2] = {pick(e, a.x, a.z, b.x, b.z), pick(e, a.y, a.w, b.y, b.w)};
    float w[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) w[c] = Codes::number(words[c / 4], c % 4);
    return XRows::dot(w, x);
  }
};

using Int8Weights = ByteWeights<Int8Codes>;
template <int GROUPS> using Fp8Weights = ByteWeights<Fp8Codes<GROUPS>>;

// Operands of codes of which a block has a word.
template <class Format>
__device__ __forceinline__ Operands word_operands(const typename Format::Piece& a, const typename Format::Piece& b, int e,
                                                  const uint32_t (&by)[2]) {
  Operands v;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    v.v[2 * j] = Format::numbers(a.words[e], j, by[0]);
    v.v[2 * j + 1] = Format::numbers(b.words[e], j, by[1]);
  }
  return v;
}

template <int GROUPS_, bool ZEROS_ = false> struct Int4Weights {
  static constexpr int K_BLOCKS = 4, GROUPS = GROUPS_;
  static constexpr bool ZEROS = ZEROS_, BYTE_CODES = false;
  using XRows = PartRows<INT4_PADDING>;
  using Sum = float;
  struct alignas(16) Piece {
    uint32_t words[4];
  };

  static constexpr uint32_t BYTES = 16;
  static __device__ __forceinline__ uint64_t begin(uint32_t row, uint32_t k) {
    return place_of(row, 0, k_blocks_of(k)) * (ROW_LANES * BYTES);
  }
  static __device__ __forceinline__ void load(Piece& piece, const char* codes, uint32_t, uint32_t k_block, uint32_t) {
    const uint4 v = load_once(codes + k_block * (ROW_GROUP * ROW_LANES * BYTES));
    piece.words[0] = v.x, piece.words[1] = v.y, piece.words[2] = v.z, piece.words[3] = v.w;
  }
  static __device__ __forceinline__ uint32_t value(int e, uint32_t t) { return 32 * e + 8 * t; }
  static __device__ __forceinline__ uint32_t numbers(uint32_t word, int j, uint32_t zero) {
    return int4_numbers<ZEROS>(word, j, zero);
  }
  static __device__ __forceinline__ Operands operands(const Piece& a, const Piece& b, int e,
                                                      const uint32_t (&zeros)[2]) {
    return word_operands<Int4Weights>(a, b, e, zeros);
  }
  // 136 more each than their numbers, without zero points.
  static __device__ __forceinline__ Operands biased_operands(const Piece& a, const Piece& b, int e) {
    Operands v;
#pragma unroll
    for (int j = 0; j < 4; ++j) v.v[2 * j] = int4_biased(a.words[e], j), v.v[2 * j + 1] = int4_biased(b.words[e], j);
    return v;
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const Piece& a, const Piece& b, int e,
                                                  const uint32_t (&zeros)[2], uint4 x) {
    mma_both(c, operands(a, b, e, zeros), x);
  }
  static __device__ __forceinline__ float dot(const Piece& piece, int e, uint32_t zero, const XRows::Eight& x) {
    const uint32_t word = pick(e, piece.words[0], piece.words[1], piece.words[2], piece.words[3]);
    float w[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const int code = word >> (4 * (c / 2) + 16 * (c % 2)) & 15;
      w[c] = static_cast<float>(code) - __uint_as_float(zero & 0xffff0000u);
    }
    return XRows::dot(w, x);
  }
};

// In the places of INT4. What that has zero points for are the scales of 16 values.
struct Nvfp4Weights : Int4Weights<ONE_GROUP> {
  static constexpr int GROUPS = ROW_AND_GROUP16_SCALES;

  static __device__ __forceinline__ uint32_t numbers(uint32_t word, int j, uint32_t scale) {
    return bf16x2_mul(nvfp4_pair(word, j), scale);
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const Piece& a, const Piece& b, int e,
                                                  const uint32_t (&scales)[2], uint4 x) {
    const uint32_t by[2] = {nvfp4_scale(scales[0], e), nvfp4_scale(scales[1], e)};
    mma_both(c, word_operands<Nvfp4Weights>(a, b, e, by), x);
  }
  static __device__ __forceinline__ float dot(const Piece& piece, int e, uint32_t scales, const XRows::Eight& x) {
    const float by = __uint_as_float(nvfp4_scale(scales, e) & 0xffff0000u);
    const uint32_t word = pick(e, piece.words[0], piece.words[1], piece.words[2], piece.words[3]);
    float w[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const uint32_t pair = nvfp4_pair(word, c / 2);
      w[c] = __uint_as_float(c % 2 == 0 ? pair << 16 : pair & 0xffff0000u) * by;
    }
    return XRows::dot(w, x);
  }
};

template <int GROUPS_> struct TernaryWeights {
  static constexpr int GROUPS = GROUPS_;
  static constexpr bool ZEROS = false;
  // Scales of groups take the registers of codes.
  static constexpr int K_BLOCKS = GROUPS == ROW_SCALES ? 8 : 4;
  using XRows = ByteRows;
  using Sum = int;
  struct Piece {
    uint32_t words[2];
  };

  static constexpr uint32_t BYTES = 8;
  static __device__ __forceinline__ uint64_t begin(uint32_t row, uint32_t k) {
    return place_of(row, 0, k_blocks_of(k)) * (ROW_LANES * BYTES);
  }
  static __device__ __forceinline__ void load(Piece& piece, const char* codes, uint32_t, uint32_t k_block, uint32_t) {
    const uint2 v = load_u64(codes + k_block * (ROW_GROUP * ROW_LANES * BYTES));
    piece.words[0] = v.x, piece.words[1] = v.y;
  }
  static __device__ __forceinline__ uint32_t value(int e, uint32_t t) { return 32 * e + 8 * t; }
  static __device__ __forceinline__ void multiply(int (&c)[4], const Piece& a, const Piece& b, int e,
                                                  const uint32_t (&)[2], uint2 x) {
    mma_s8(c, ternary_bytes(a.words, e, 0), ternary_bytes(b.words, e, 0), ternary_bytes(a.words, e, 1),
           ternary_bytes(b.words, e, 1), x.x, x.y);
  }
  static __device__ __forceinline__ float dot(const Piece& piece, int e, uint32_t, const XRows::Eight& x) {
    const uint32_t word = e < 2 ? piece.words[0] : piece.words[1];
    const int low = __dp4a(static_cast<int>(ternary_bytes(word, e, 0)), static_cast<int>(x.x), 0);
    return static_cast<float>(__dp4a(static_cast<int>(ternary_bytes(word, e, 1)), static_cast<int>(x.y), low));
  }
};

}  // namespace fused
