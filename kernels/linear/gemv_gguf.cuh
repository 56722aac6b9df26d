// A core of gemv.cuh for weights in repacked GGUF blocks (formats/gguf.cuh), by tensor cores: an N tile of 16 output
// channels and up to 4 rows of x.
//
// The integers of a block, which are below 256 and so exact in bf16, are operand A of `mma.m16n8k16`. Operand B is x
// in two bf16 parts, the second the rounding error of the first, as columns 2m and 2m + 1 for row m: 16 bits of
// precision over all of f32's range. The products of a block are summed exactly in an accumulator of their own,
// which is scaled in f32. The offset of a block (m of Q4_1, minima of the K formats), in two parts too, is multiplied
// with the sum of the block's x; Q2_K has one for each half of a block.
//
// Lane 4 g + t loads quarter t of rows g and g + 8, and ends up with their sums for row t of x. Turing, without
// bf16, multiplies by f32 multiply-adds.
#pragma once

#include "formats/gguf.cuh"
#include "linear/stage_x.cuh"

namespace fused {

// Rows of x as the tensor cores take them: of each block 32 first parts, then 32 second ones, in the
// order of formats/gguf.cuh: quarter t of the first half, then of the second, for each t in turn. Behind
// all rows, for each row and part, the sums of its blocks or of their halves (SUMS of a block), each twice.
template <int SUMS_> struct SplitRows {
  static constexpr int BATCH = 4, SUMS = SUMS_;
  static constexpr bool SCALES = false;
  char* at;
  uint32_t m, groups;

  __device__ uint32_t pitch() const { return groups * GROUP * BLOCK * 4; }
  __device__ char* block(uint32_t row, uint32_t block) const { return at + row * pitch() + block * BLOCK * 4; }
  __device__ uint32_t* sum(uint32_t row, uint32_t part, uint32_t i) const {
    return reinterpret_cast<uint32_t*>(at + m * pitch()) + (2 * row + part) * groups * GROUP * SUMS + i;
  }
  __device__ void put_sum(uint32_t row, uint32_t i, float v) const {
    const uint32_t parts = split(v);
    *sum(row, 0, i) = __byte_perm(parts, 0, 0x1010);
    *sum(row, 1, i) = __byte_perm(parts, 0, 0x3232);
  }

  // Values 4 * piece and following of a row, f32 in their order until they are split.
  __device__ float4* raw(uint32_t row, uint32_t piece) const {
    return reinterpret_cast<float4*>(at + row * pitch()) + piece;
  }
  __device__ void put_raw(uint32_t row, uint32_t piece, float4 v) const { *raw(row, piece) = v; }
  __device__ float4 get_raw(uint32_t row, uint32_t piece) const { return *raw(row, piece); }
  __device__ void clear_tail(uint32_t m, uint32_t k) const {
    const uint32_t first = k / BLOCK, tail = groups * GROUP - first;
    for (uint32_t i = threadIdx.x; i < m * tail * BLOCK; i += blockDim.x) {
      const uint32_t row = i / (tail * BLOCK), word = i % (tail * BLOCK);
      reinterpret_cast<uint32_t*>(block(row, first))[word] = 0;
      if (word < tail * SUMS) put_sum(row, first * SUMS + word, 0.f);
    }
  }
  __device__ void put(uint32_t row, uint32_t piece, float4 v) const {
    const uint32_t within = piece % 8;
    char* to = block(row, piece / 8) + within % 4 * 16 + within / 4 * 8;
    const uint32_t a = split(v.x), b = split(v.y), c = split(v.z), d = split(v.w);
    *reinterpret_cast<uint2*>(to) = make_uint2(__byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410));
    *reinterpret_cast<uint2*>(to + 2 * BLOCK) = make_uint2(__byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x7632));
  }
};

template <class Format, int K_BLOCKS_> struct GgufCore : SixteenRows {
  static constexpr int K_BLOCKS = K_BLOCKS_, SCALES = Format::SCALES;
  using XRows = SplitRows<Format::HAS_OFFSET ? SCALES : 0>;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  // Turing has no bf16: its lanes multiply by themselves.
  static constexpr bool MMA = false;
#else
  static constexpr bool MMA = true;
#endif

  static __device__ uint32_t k_blocks(const Gemv& p) { return groups_of(p.k); }

  struct Rows {
    BlockRow row[2];

    template <class Find> __device__ void enter(const Gemv& p, Find find) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t r = find(group() + 8 * i);
        const Matrix& matrix = matrix_of(p, r);
        row[i] = Format::row(matrix.data, r, groups_of(p.k));
      }
    }
  };

  struct Sums {
    float whole[2];         // of this lane's row of x
    float added[4];         // what offsets give, as the tensor cores leave it
    float parts[2][MAX_M];  // without tensor cores: of every row of x, from this lane's quarter of k

    __device__ void total(const Gemv&, Staged*, float (&y)[2]) const {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (MMA) {
          y[i] = whole[i];
          if constexpr (Format::HAS_OFFSET) y[i] += added[2 * i] + added[2 * i + 1];
        } else {
          y[i] = sum_of_quarters(parts[i]);
        }
      }
    }
  };

  struct Tile {
    typename Format::Piece pieces[K_BLOCKS][2];

    __device__ void prefetch(const Gemv& p, const Rows& from, uint32_t k_block, uint32_t end) {
#pragma unroll
      for (int s = 0; s < K_BLOCKS; ++s) {
        if (k_block + s >= end) break;
#pragma unroll
        for (int i = 0; i < 2; ++i) pieces[s][i] = Format::load(from.row[i], groups_of(p.k), k_block + s, member());
      }
    }

    __device__ void multiply(const Gemv& p, uint32_t k_block, uint32_t end, char* xs, Sums& sums) const {
      const XRows x = {xs, p.m, groups_of(p.k)};
#pragma unroll
      for (int s = 0; s < K_BLOCKS; ++s) {
        if (k_block + s >= end) break;
        float by[2][SCALES], plus[2][SCALES];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const auto& piece = pieces[s][i];
#pragma unroll
          for (int h = 0; h < SCALES; ++h) {
            by[i][h] = Format::multiplier(piece.scale, piece.factors, h);
            plus[i][h] = Format::offset(piece.scale, piece.factors, h);
          }
        }
        if constexpr (MMA) {
          if constexpr (Format::HAS_OFFSET) add_offsets(p, x, plus, k_block + s, sums);
          on_tensor_cores(p, x, pieces[s], by, k_block + s, sums);
        } else {
          if constexpr (Format::HAS_OFFSET) add_offsets_on_lanes(p, x, plus, k_block + s, sums);
          on_lanes(p, x, pieces[s], by, k_block + s, sums);
        }
      }
    }

    // The offset of block t is k values 2t and 2t + 1 of 8, in two parts, both of which meet the
    // first part of the block's sum and then, in the next column, the second. Those of second halves are 8 more.
    static __device__ __forceinline__ void add_offsets(const Gemv& p, const XRows& x, const float (&plus)[2][SCALES],
                                                       uint32_t k_block, Sums& sums) {
      uint32_t sum[SCALES] = {};
      if (group() < 2 * p.m) {
        const uint32_t* from = x.sum(group() / 2, group() % 2, SCALES * (k_block * GROUP + member()));
#pragma unroll
        for (int h = 0; h < SCALES; ++h) sum[h] = from[h];
      }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
      float(&c)[4] = sums.added;
      if constexpr (SCALES == 2) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(split(plus[0][0])), "r"(split(plus[1][0])), "r"(split(plus[0][1])), "r"(split(plus[1][1])),
              "r"(sum[0]), "r"(sum[1]));
      } else {
        asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(split(plus[0][0])), "r"(split(plus[1][0])), "r"(sum[0]));
      }
#endif
    }

    static __device__ __forceinline__ void add_offsets_on_lanes(const Gemv& p, const XRows& x,
                                                                const float (&plus)[2][SCALES], uint32_t k_block,
                                                                Sums& sums) {
#pragma unroll
      for (int m = 0; m < MAX_M; ++m) {
        if (m >= p.m) break;
#pragma unroll
        for (int h = 0; h < SCALES; ++h) {
          const uint32_t at = SCALES * (k_block * GROUP + member()) + h;
          const float sum = __uint_as_float(*x.sum(m, 0, at) << 16) + __uint_as_float(*x.sum(m, 1, at) << 16);
#pragma unroll
          for (int i = 0; i < 2; ++i) sums.parts[i][m] = fmaf(plus[i][h], sum, sums.parts[i][m]);
        }
      }
    }

    // The scale of block b, which lane b of the four has.
    static __device__ __forceinline__ float of_block(float by, int b) { return __shfl_sync(FULL, by, b, 4); }

    static __device__ __forceinline__ void on_tensor_cores(const Gemv& p, const XRows& x,
                                                           const typename Format::Piece (&pieces)[2],
                                                           const float (&by)[2][SCALES], uint32_t k_block, Sums& sums) {
      // The column of operand B: the first or second part of row g / 2.
      const char* column = x.block(group() / 2, k_block * GROUP) + group() % 2 * (2 * BLOCK) + member() * 16;
      const bool mine = group() < 2 * p.m;
#pragma unroll
      for (int b = 0; b < GROUP; ++b) {
        uint4 v = make_uint4(0, 0, 0, 0);
        if (mine) v = *reinterpret_cast<const uint4*>(column + b * (BLOCK * 4));
        const auto first = Format::codes(pieces[0], b), second = Format::codes(pieces[1], b);
        float c[SCALES][4] = {};
        mma(c[0], first, second, 0, v.x, v.y);
        mma(c[SCALES - 1], first, second, 2, v.z, v.w);
#pragma unroll
        for (int h = 0; h < SCALES; ++h) {
#pragma unroll
          for (int i = 0; i < 2; ++i)
            sums.whole[i] = fmaf(of_block(by[i][h], b), c[h][2 * i] + c[h][2 * i + 1], sums.whole[i]);
        }
      }
    }

    static __device__ __forceinline__ void mma(float (&c)[4], const typename Format::Codes& first,
                                               const typename Format::Codes& second, int j, uint32_t x0, uint32_t x1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
          : "r"(Format::bf16_numbers(first, j)), "r"(Format::bf16_numbers(second, j)),
            "r"(Format::bf16_numbers(first, j + 1)), "r"(Format::bf16_numbers(second, j + 1)), "r"(x0), "r"(x1));
#endif
    }

    static __device__ __forceinline__ void on_lanes(const Gemv& p, const XRows& x,
                                                    const typename Format::Piece (&pieces)[2],
                                                    const float (&by)[2][SCALES], uint32_t k_block, Sums& sums) {
      // Blocks are long: unrolled they would not fit into the instruction cache.
#pragma unroll 1
      for (int b = 0; b < GROUP; ++b) {
        float w[2][8], scale[2][SCALES];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const auto codes = Format::codes_in_loop(pieces[i], b);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 pair = Format::numbers(codes, j);
            w[i][2 * j] = pair.x, w[i][2 * j + 1] = pair.y;
          }
#pragma unroll
          for (int h = 0; h < SCALES; ++h) scale[i][h] = of_block(by[i][h], b);
        }
#pragma unroll
        for (int m = 0; m < MAX_M; ++m) {
          if (m >= p.m) break;
          const char* at = x.block(m, k_block * GROUP + b) + member() * 16;
          float v[8], low[8];
          unpack8<__nv_bfloat16>(*reinterpret_cast<const uint4*>(at), v);
          unpack8<__nv_bfloat16>(*reinterpret_cast<const uint4*>(at + 2 * BLOCK), low);
#pragma unroll
          for (int c = 0; c < 8; ++c) v[c] += low[c];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float y[SCALES] = {};
#pragma unroll
            for (int c = 0; c < 8; ++c) y[c / 4 % SCALES] = fmaf(w[i][c], v[c], y[c / 4 % SCALES]);
#pragma unroll
            for (int h = 0; h < SCALES; ++h) sums.parts[i][m] = fmaf(scale[i][h], y[h], sums.parts[i][m]);
          }
        }
      }
    }
  };

  struct Prepare {
    RowStage<XRows> stage;

    __device__ Prepare(const Gemv& p, char* xs, float* scratch)
        : stage(p, XRows{xs, p.m, groups_of(p.k)}, scratch) {}
    __device__ void prefetch() { stage.prefetch(); }
    __device__ void run() const { stage.run(); }
  };
};

}  // namespace fused
