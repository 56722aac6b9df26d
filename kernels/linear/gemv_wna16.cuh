// A core of gemv.cuh for packed INT8, INT4 or ternary weights (formats/packed.cuh), by tensor cores: an N tile of 16
// output channels and up to 4 rows of x.
//
// INT8 and INT4, less their zero points, are exact in bf16: operand A of `mma.m16n8k16`. Operand B is x in bf16, as
// column 2m for row m; x of other types has two bf16 parts, the second, in column 2m + 1, the rounding error of the
// first: 16 bits of precision over all of f32's range. Ternary weights become int8 for `mma.m16n8k32`, with x
// quantized to int8, a scale per row.
//
// The products of a group are summed in an accumulator of their own, which is scaled in f32.
#pragma once

#include "linear/stage_x_wna16.cuh"

namespace fused {

// Numbers of bf16, less others: exact for codes and 128 more, and for codes and zero points.
__device__ __forceinline__ uint32_t less_bf16x2(uint32_t a, uint32_t b) {
  uint32_t out = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(b), "r"(0xbf80bf80u), "r"(a));
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

// Codes 2j and 2j + 1 of a word of INT8 as bf16. A code below 128 is the low bits of the mantissa of 128;
// the top bit of a byte, set, makes 256 of the 128 that is taken off.
__device__ __forceinline__ uint32_t int8_numbers(uint32_t word, int j) {
  const uint32_t v = __byte_perm(word, 0, j == 0 ? 0x4140 : 0x4342);
  return less_bf16x2(masked_or(v, 0x007f007fu, 0x43004300u), masked_or(v, 0x00800080u, 0x43004300u));
}

// TERNARY_UNIT times codes 0, 2, 4 and 6 of block b, or those behind each, as bytes, of the words that
// ternary has of a lane.
__device__ __forceinline__ uint32_t ternary_bytes(uint32_t word, int b, int odd) {
  return word << (6 - 2 * (b % 2) - 4 * odd) & 0xc0c0c0c0u;
}
__device__ __forceinline__ uint32_t ternary_bytes(const uint32_t (&words)[2], int b, int odd) {
  return ternary_bytes(words[b / 2], b, odd);
}

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
  __device__ __forceinline__ uint64_t place(uint32_t k_block, uint32_t k) const {
    return place_of(row, k_block, k_blocks_of(k));
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

// Groups of a K block: so many, up to four as the kernel's parameters say, or a scale for each row.
constexpr int ONE_GROUP = 1, FOUR_GROUPS = 4, SOME_GROUPS = 5, ROW_SCALES = 0;

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
      if constexpr (ZEROS) zeros[l] = 0x80808080u;
      if (count == 1) {
        by[l][0] = load_u16(at);
        if (zeros_at > 0) zeros[l] = load_u8(zero);
      } else if (count == 2) {
        by[l][0] = load_u32(at);
        if (zeros_at > 0) zeros[l] = load_u16(zero);
      } else {
        const uint2 both = load_u64(at);
        by[l][0] = both.x, by[l][WORDS - 1] = both.y;
        if (zeros_at > 0) zeros[l] = load_u32(zero);
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
  // Its zero point as two bf16: the upper half of the f32.
  __device__ __forceinline__ uint32_t zero(const Gemv& p, int s, int e) const {
    if constexpr (!ZEROS) return 0x41004100u;
    const uint32_t bytes = __shfl_sync(FULL, zeros[s / 4], s % 4, 4);
    const float zero = ZERO_STEP * static_cast<float>(bytes >> (8 * (e * groups(p) / 4)) & 255);
    return __byte_perm(__float_as_uint(zero), 0, 0x3232);
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

// The formats as cores take them. A piece is what a lane has of a row and a K block: four times 8 values.
// `value` says where the 8 begin within a K block, for lane t.
struct Int8Weights {
  static constexpr int K_BLOCKS = 2, GROUPS = ROW_SCALES;
  static constexpr bool ZEROS = false;
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
  static __device__ __forceinline__ Operands operands(const Piece& a, const Piece& b, int e, const uint32_t (&)[2]) {
    Operands v;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v.v[2 * j] = int8_numbers(word(a, e, j / 2), j % 2);
      v.v[2 * j + 1] = int8_numbers(word(b, e, j / 2), j % 2);
    }
    return v;
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const Piece& a, const Piece& b, int e,
                                                  const uint32_t (&zeros)[2], uint4 x) {
    mma_both(c, operands(a, b, e, zeros), x);
  }
  static __device__ __forceinline__ float dot(const Piece& piece, int e, uint32_t, const XRows::Eight& x) {
    const uint4 &a = piece.words[0], &b = piece.words[1];
    const uint32_t words[2] = {pick(e, a.x, a.z, b.x, b.z), pick(e, a.y, a.w, b.y, b.w)};
    float w[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) w[c] = static_cast<float>(static_cast<int8_t>(words[c / 4] >> (8 * (c % 4))));
    return XRows::dot(w, x);
  }
};

template <int GROUPS_> struct Int4Weights {
  static constexpr int K_BLOCKS = 4, GROUPS = GROUPS_;
  // Those of one group have a kernel without zero points.
  static constexpr bool ZEROS = GROUPS != ONE_GROUP;
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
  static __device__ __forceinline__ Operands operands(const Piece& a, const Piece& b, int e,
                                                      const uint32_t (&zeros)[2]) {
    Operands v;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      v.v[2 * j] = int4_numbers<ZEROS>(a.words[e], j, zeros[0]);
      v.v[2 * j + 1] = int4_numbers<ZEROS>(b.words[e], j, zeros[1]);
    }
    return v;
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

template <class Format> struct PackedCore : SixteenRows {
  static constexpr int K_BLOCKS = Format::K_BLOCKS;
  using Scales = TileScales<Format::GROUPS, Format::ZEROS, K_BLOCKS>;
  using XRows = typename Format::XRows;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  // Turing has neither bf16 nor the shape of int8: its lanes multiply by themselves.
  static constexpr bool MMA = false;
#else
  static constexpr bool MMA = true;
#endif

  static __device__ uint32_t k_blocks(const Gemv& p) { return k_blocks_of(p.k); }

  struct Rows {
    PackedRow row[2];

    template <class Find> __device__ void enter(const Gemv& p, Find find) {
#pragma unroll
      for (int i = 0; i < 2; ++i) row[i] = PackedRow::of<Format>(p, find(group() + 8 * i), member());
    }
  };

  // Whole numbers of a row with one scale stay such to the end of k.
  static constexpr bool CARRIES = MMA && XRows::SCALES && Format::GROUPS == ROW_SCALES;

  struct Sums {
    float whole[2];         // of this lane's row of x
    float parts[2][MAX_M];  // without tensor cores: of every row of x, from this lane's quarter of k
    int carried[2][4];      // of even and of odd blocks

    __device__ void total(const Gemv& p, Staged* xs, float (&y)[2]) const {
      float by = 1.f;
      if constexpr (XRows::SCALES) by = XRows(p, xs).scales()[min(member(), p.m - 1)];
#pragma unroll
      for (int i = 0; i < 2; ++i) y[i] = by * (MMA ? whole[i] : sum_of_quarters(parts[i]));
    }
  };

  struct Tile {
    typename Format::Piece pieces[K_BLOCKS][2];
    Scales scales[2];

    __device__ void prefetch(const Gemv& p, const Rows& from, uint32_t k_block, uint32_t end) {
#pragma unroll
      for (int s = 0; s < K_BLOCKS; ++s) {
        if (k_block + s >= end) break;
#pragma unroll
        for (int i = 0; i < 2; ++i) Format::load(pieces[s][i], from.row[i].codes, p.k, k_block + s, member());
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) scales[i].prefetch(p, from.row[i], k_block, end, member());
    }

    __device__ void multiply(const Gemv& p, uint32_t k_block, uint32_t end, char* xs, Sums& sums) const {
      const XRows x(p, xs);
#pragma unroll
      for (int s = 0; s < K_BLOCKS; ++s) {
        if (k_block + s >= end) break;
        if constexpr (!MMA) {
          on_lanes(p, x, s, k_block + s, sums);
          continue;
        }
        const uint32_t first = (k_block + s) * K_BLOCK;
        typename Format::Sum c[4] = {};
        uint32_t zeros[2] = {};
        const auto inputs = x.k_block(group(), member(), k_block + s);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (Scales::begins(p, e)) zeros[0] = scales[0].zero(p, s, e), zeros[1] = scales[1].zero(p, s, e);
          const uint32_t value = first + Format::value(e, member());
          if constexpr (CARRIES) {
            Format::multiply(sums.carried[e % 2], pieces[s][0], pieces[s][1], e, zeros, inputs.block(e, value));
          } else {
            Format::multiply(c, pieces[s][0], pieces[s][1], e, zeros, inputs.block(e, value));
            if (!Scales::ends(p, e)) continue;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float sum = static_cast<float>(c[2 * i]);
              if constexpr (!XRows::SCALES) sum += static_cast<float>(c[2 * i + 1]);
              sums.whole[i] = fmaf(scales[i].scale(p, s, e), sum, sums.whole[i]);
              c[2 * i] = c[2 * i + 1] = 0;
            }
          }
        }
      }
      if (CARRIES && k_block + K_BLOCKS >= end) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          sums.whole[i] =
              scales[i].scale(p, 0, 0) * static_cast<float>(sums.carried[0][2 * i] + sums.carried[1][2 * i]);
      }
    }

    // The same by multiply-adds, with piece s, which has K block `k_block` of k.
    __device__ __forceinline__ void on_lanes(const Gemv& p, const XRows& x, int s, uint32_t k_block, Sums& sums) const {
      uint32_t zeros[2] = {};
      // Blocks are long: unrolled they would not fit into the instruction cache.
#pragma unroll 1
      for (int e = 0; e < 4; ++e) {
        const uint32_t value = k_block * K_BLOCK + Format::value(e, member());
        float by[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          by[i] = scales[i].scale(p, s, e);
          if (Scales::begins(p, e)) zeros[i] = scales[i].zero(p, s, e);
        }
#pragma unroll
        for (int m = 0; m < MAX_M; ++m) {
          if (m >= p.m) break;
          const auto eight = x.eight(m, value);
#pragma unroll
          for (int i = 0; i < 2; ++i)
            sums.parts[i][m] = fmaf(by[i], Format::dot(pieces[s][i], e, zeros[i], eight), sums.parts[i][m]);
        }
      }
    }
  };

  struct Prepare {
    RowStage<XRows> stage;

    __device__ Prepare(const Gemv& p, char* xs, float* scratch) : stage(p, XRows(p, xs), scratch) {
      // Rows are long: the whole block takes one after the other.
      stage.group.block = true;
    }
    __device__ void prefetch() { stage.prefetch(); }
    __device__ void run() const {
      const Gemv& p = stage.p;
      const bool plain = p.prologue.norm == NORM_NONE && p.prologue.dtype == BF16 && p.k % 8 == 0;
      const uint64_t bytes = uint64_t(p.k) * (p.prologue.dtype == F32 ? 4 : 2);
#pragma unroll 1
      for (uint32_t r = 0; r < p.m; ++r) {
        const char* x = static_cast<const char*>(p.prologue.x) + r * bytes;
        if (r > 0) __syncthreads();  // the scratch is used again
        if (!(plain && stage.rows.take(x, r, p.k, stage.group, stage.scratch))) stage.stage(x, r);
      }
      stage.rows.clear_tail(p.m, p.k);
    }
  };
};

}  // namespace fused
