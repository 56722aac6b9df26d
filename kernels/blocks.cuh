// A core of gemv.cuh for weights in GGUF blocks: the tensor cores multiply 16 rows of weights with
// up to 4 rows of x.
//
// The numbers of a block, whole ones below 256 that bf16 holds exactly, are operand A of
// `mma.m16n8k16`. Operand B is x in two parts of bf16, the second what the first leaves over, as
// columns 2m and 2m + 1 for row m: 16 bits of x, and no limit to its range. Products of a block are
// summed up exactly in its own accumulator, which is scaled in f32. What is added to all values of
// a block (m of Q4_1, minima of the K formats) meets the sum of its x instead of each.
//
// Lane 4 g + t loads quarter t of rows g and g + 8, and ends up with their sums for row t of x.
#pragma once

#include "formats.cuh"
#include "gemv.cuh"

namespace fused {

// Rows of x as the tensor cores take them: of each block 32 first parts, then 32 second ones, in the
// order of formats.cuh: quarter t of the first half, then of the second, for each t in turn.
// Behind all rows, the sum of each block.
struct SplitRows {
  char* at;
  uint32_t k, groups;

  __device__ uint32_t pitch() const { return groups * GROUP * BLOCK * 4; }
  __device__ char* block(uint32_t row, uint32_t block) const { return at + row * pitch() + block * BLOCK * 4; }
  __device__ float* sum(uint32_t m, uint32_t row, uint32_t block) const {
    return reinterpret_cast<float*>(at + m * pitch()) + row * groups * GROUP + block;
  }

  // Values `first` to `first` + 4 of a row.
  __device__ void put(uint32_t row, uint32_t first, const float (&v)[4]) const {
    const uint32_t within = first % BLOCK;
    char* to = block(row, first / BLOCK) + within % 16 / 4 * 16 + within / 16 * 8;
    uint32_t parts[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t high[2], low[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float value = v[2 * i + j];
        high[j] = __bfloat16_as_ushort(__float2bfloat16_rn(value));
        low[j] = __bfloat16_as_ushort(__float2bfloat16_rn(value - __uint_as_float(high[j] << 16)));
      }
      parts[0][i] = high[0] | high[1] << 16;
      parts[1][i] = low[0] | low[1] << 16;
    }
    *reinterpret_cast<uint2*>(to) = make_uint2(parts[0][0], parts[0][1]);
    *reinterpret_cast<uint2*>(to + 2 * BLOCK) = make_uint2(parts[1][0], parts[1][1]);
  }
};

// Reads, normalises and splits the rows of x, each thread 4 values at a time.
struct SplitStage {
  static constexpr int KEPT = 4;  // pieces of 4 values that a thread keeps from its first pass
  const Gemv& p;
  SplitRows rows;
  float* scratch;  // 8 floats
  Team team;
  bool sums;  // whether the sums of blocks are wanted

  __device__ SplitStage(const Gemv& p, SplitRows rows, float* scratch, bool sums)
      : p(p), rows(rows), scratch(scratch), team{p.m == 1}, sums(sums) {}

  // 4 elements as they are stored; the upper half is there for f32 only.
  struct Raw {
    uint2 a, b;
  };
  template <typename T> __device__ __forceinline__ Raw read(const void* from, uint32_t piece) const {
    if constexpr (sizeof(T) == 4) {
      const uint4 v = __ldcg(static_cast<const uint4*>(from) + piece);
      return {make_uint2(v.x, v.y), make_uint2(v.z, v.w)};
    } else {
      return {__ldcg(static_cast<const uint2*>(from) + piece), make_uint2(0, 0)};
    }
  }
  // Of the norm's weight, which stays in the L1 cache after a rehearsal.
  template <typename T> __device__ __forceinline__ Raw read_weight(uint32_t piece) const {
    if constexpr (sizeof(T) == 4) {
      const uint4 v = __ldg(static_cast<const uint4*>(p.prologue.weight) + piece);
      return {make_uint2(v.x, v.y), make_uint2(v.z, v.w)};
    } else {
      return {__ldg(static_cast<const uint2*>(p.prologue.weight) + piece), make_uint2(0, 0)};
    }
  }
  template <typename T> static __device__ __forceinline__ void widen(const Raw& raw, float (&v)[4]) {
    if constexpr (sizeof(T) == 4) {
      v[0] = __uint_as_float(raw.a.x), v[1] = __uint_as_float(raw.a.y);
      v[2] = __uint_as_float(raw.b.x), v[3] = __uint_as_float(raw.b.y);
    } else {
      const float2 a = unpack2<T>(raw.a.x), b = unpack2<T>(raw.a.y);
      v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y;
    }
  }

  __device__ void run() const {
    const int dtype = p.prologue.dtype;
    if (dtype == BF16) {
      run_as<__nv_bfloat16>();
    } else if (dtype == F16) {
      run_as<__half>();
    } else {
      run_as<float>();
    }
    // Zeros where a last group has no blocks.
    const uint32_t blocks = rows.groups * GROUP, tail = blocks - p.k / BLOCK;
    if (tail == 0) return;
    for (uint32_t i = threadIdx.x; i < p.m * tail * BLOCK; i += blockDim.x) {
      const uint32_t row = i / (tail * BLOCK), word = i % (tail * BLOCK);
      reinterpret_cast<uint32_t*>(rows.block(row, p.k / BLOCK))[word] = 0;
      if (word < tail) *rows.sum(p.m, row, p.k / BLOCK + word) = 0.f;
    }
  }

  template <typename T> __device__ __forceinline__ void run_as() const {
#pragma unroll 1
    for (uint32_t r = team.index(); r < p.m; r += team.teams())
      stage<T>(static_cast<const T*>(p.prologue.x) + uint64_t(r) * p.k, r);
  }

  template <typename T> __device__ __forceinline__ void stage(const T* x, uint32_t row) const {
    const uint32_t pieces = p.k / 4, size = team.size();
    Raw kept[KEPT] = {};
    float factor = 1.f;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
      const uint32_t piece = team.rank() + i * size;
      if (piece < pieces) kept[i] = read<T>(x, piece);
    }
    if (p.prologue.norm != NORM_NONE) {
      float squares = 0.f;
      auto add = [&](const Raw& raw) {
        float v[4];
        widen<T>(raw, v);
#pragma unroll
        for (int j = 0; j < 4; ++j) squares = fmaf(v[j], v[j], squares);
      };
#pragma unroll
      for (int i = 0; i < KEPT; ++i) add(kept[i]);
#pragma unroll 1
      for (uint32_t piece = team.rank() + KEPT * size; piece < pieces; piece += size) add(read<T>(x, piece));
      factor = rsqrtf(__fdividef(team.sum(squares, scratch), p.k) + p.prologue.eps);
    }
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
      const uint32_t piece = team.rank() + i * size;
      if (piece >= pieces) return;
      finish<T>(kept[i], piece, row, factor);
    }
#pragma unroll 1
    for (uint32_t piece = team.rank() + KEPT * size; piece < pieces; piece += size)
      finish<T>(read<T>(x, piece), piece, row, factor);
  }

  // A block is in the hands of 8 lanes side by side, all of which are here.
  template <typename T>
  __device__ __forceinline__ void finish(const Raw& raw, uint32_t piece, uint32_t row, float factor) const {
    float v[4];
    widen<T>(raw, v);
    if (p.prologue.norm != NORM_NONE) {
      float w[4];
      widen<T>(read_weight<T>(piece), w);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = rounded<T>(rounded<T>(v[j] * factor) * w[j]);
    }
    rows.put(row, 4 * piece, v);
    if (!sums) return;
    float sum = (v[0] + v[1]) + (v[2] + v[3]);
    const unsigned lanes = 0xffu << (threadIdx.x % WARP / 8 * 8);
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) sum += __shfl_xor_sync(lanes, sum, offset);
    if (threadIdx.x % 8 == 0) *rows.sum(p.m, row, piece / 8) = sum;
  }
};

template <class Format, int STEPS_> struct BlockRows {
  static constexpr int UNIT = 16, STEPS = STEPS_, VALUES = 2, MAX_M = 4;
  static constexpr int SCALES = Format::SCALES;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  // Turing has no bf16: its lanes multiply by themselves.
  static constexpr bool MMA = false;
#else
  static constexpr bool MMA = true;
#endif
  using Staged = char;

  static __device__ uint32_t lane() { return threadIdx.x % WARP; }
  static __device__ uint32_t group() { return lane() / 4; }  // a row of weights, and 8 below it
  static __device__ uint32_t member() { return lane() % 4; }
  static __device__ uint32_t steps(const Gemv& p) { return groups_of(p.k); }

  // A lane has a gate and what it gates.
  static __device__ uint32_t gated(uint32_t r) { return r % 8; }
  static __device__ bool is_gated(uint32_t r) { return r >= 8; }
  static __device__ uint32_t output(int i) { return group() + 8 * i; }
  static __device__ uint32_t row_of_x() { return member(); }
  static __device__ bool keeps() { return true; }
  static __device__ float partner(const float (&y)[2]) { return y[1]; }

  struct Rows {
    const char* row[2];

    template <class Find> __device__ void enter(const Gemv& p, Find find) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t r = find(group() + 8 * i);
        const Matrix& matrix = matrix_of(p, r);
        row[i] = static_cast<const char*>(matrix.data) + uint64_t(r) * Format::pitch(groups_of(p.k));
      }
    }
  };

  struct Sums {
    float whole[2];         // of this lane's row of x
    float parts[2][MAX_M];  // of every row of x, what this lane's quarter of k gives

    __device__ void total(float (&y)[2]) const {
      const bool upper = member() & 2, odd = member() & 1;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        y[i] = whole[i];
        if (!MMA || Format::HAS_OFFSET) {
          const float* v = parts[i];
          const float a = (upper ? v[2] : v[0]) + __shfl_xor_sync(FULL, upper ? v[0] : v[2], 2);
          const float b = (upper ? v[3] : v[1]) + __shfl_xor_sync(FULL, upper ? v[1] : v[3], 2);
          y[i] += (odd ? b : a) + __shfl_xor_sync(FULL, odd ? a : b, 1);
        }
      }
    }
  };

  struct Tile {
    typename Format::Piece pieces[STEPS][2];

    __device__ void ask(const Gemv& p, const Rows& from, uint32_t step, uint32_t end) {
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        if (step + s >= end) break;
#pragma unroll
        for (int i = 0; i < 2; ++i) pieces[s][i] = Format::load(from.row[i], groups_of(p.k), step + s, member());
      }
    }

    __device__ void multiply(const Gemv& p, uint32_t step, uint32_t end, char* xs, Sums& sums) const {
      const SplitRows x = {xs, p.k, groups_of(p.k)};
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        if (step + s >= end) break;
        float by[2][SCALES];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const auto& piece = pieces[s][i];
#pragma unroll
          for (int h = 0; h < SCALES; ++h) by[i][h] = Format::multiplier(piece.scale, piece.factors, h);
          if constexpr (Format::HAS_OFFSET) {
            const float plus = Format::offset(piece.scale, piece.factors);
#pragma unroll
            for (int m = 0; m < MAX_M; ++m) {
              if (m >= p.m) break;
              sums.parts[i][m] = fmaf(plus, *x.sum(p.m, m, (step + s) * GROUP + member()), sums.parts[i][m]);
            }
          }
        }
        if constexpr (MMA) {
          on_tensor_cores(p, x, pieces[s], by, step + s, sums);
        } else {
          on_lanes(p, x, pieces[s], by, step + s, sums);
        }
      }
    }

    // The scale of block b, which lane b of the four has.
    static __device__ __forceinline__ float of_block(float by, int b) { return __shfl_sync(FULL, by, b, 4); }

    static __device__ __forceinline__ void on_tensor_cores(const Gemv& p, const SplitRows& x,
                                                           const typename Format::Piece (&pieces)[2],
                                                           const float (&by)[2][SCALES], uint32_t step, Sums& sums) {
      // The column of operand B: the first or second part of row g / 2.
      const char* column = x.block(group() / 2, step * GROUP) + group() % 2 * (2 * BLOCK) + member() * 16;
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

    static __device__ __forceinline__ void on_lanes(const Gemv& p, const SplitRows& x,
                                                    const typename Format::Piece (&pieces)[2],
                                                    const float (&by)[2][SCALES], uint32_t step, Sums& sums) {
#pragma unroll
      for (int b = 0; b < GROUP; ++b) {
        const auto first = Format::codes(pieces[0], b), second = Format::codes(pieces[1], b);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float2 w[2] = {Format::numbers(first, j), Format::numbers(second, j)};
          float scale[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) scale[i] = of_block(by[i][j / 2 % SCALES], b);
#pragma unroll
          for (int m = 0; m < MAX_M; ++m) {
            if (m >= p.m) break;
            const char* at = x.block(m, step * GROUP + b) + member() * 16 + j * 4;
            const float2 high = unpack2<__nv_bfloat16>(*reinterpret_cast<const uint32_t*>(at));
            const float2 low = unpack2<__nv_bfloat16>(*reinterpret_cast<const uint32_t*>(at + 2 * BLOCK));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const float y = fmaf(w[i].x, high.x + low.x, w[i].y * (high.y + low.y));
              sums.parts[i][m] = fmaf(scale[i], y, sums.parts[i][m]);
            }
          }
        }
      }
    }
  };

  struct Prepare {
    SplitStage stage;

    __device__ Prepare(const Gemv& p, char* xs, float* scratch)
        : stage(p, SplitRows{xs, p.k, groups_of(p.k)}, scratch, Format::HAS_OFFSET) {}
    __device__ void ask() {}
    __device__ void run() const { stage.run(); }
  };
};

}  // namespace fused
