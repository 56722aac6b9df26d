// What gemv_wna16_sm90.cuh does for a format: how a warp's part of a row of x lies in shared memory, and its products
// with a warp's part of a stage. Hopper only.
#pragma once

#include "linear/gemv_wna16.cuh"

namespace fused {

struct TernarySm90;
struct Int4Sm90;
template <int GROUPS> struct Fp8Sm90;
struct Nvfp4Sm90;
struct Nf4Sm90;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

constexpr uint32_t CHUNK = 2;                  // K blocks that a warp takes at once; one may be left over
constexpr uint32_t CONSUMER_WARPS = GEMV_WARPS;  // that multiply
constexpr uint32_t CONSUMER_THREADS = CONSUMER_WARPS * WARP;
constexpr int OWNED = GEMV_SM90_OWNED;

// Where the 8 values of a row begin that a lane has of its warp's part of a stage's K blocks, over 8.
__device__ __forceinline__ uint32_t pack_of(uint32_t stage_of_row) {
  return stage_of_row * CONSUMER_THREADS + threadIdx.x;
}

__device__ __forceinline__ uint4 read_pack(const void* from, uint32_t k, uint32_t pack) {
  return pack < k / 8 ? VectorPack::read(from, BF16, pack) : uint4{};
}

// Gives `use` each pack of x that this lane has, and its place; those of stages past OWNED are read for it.
template <class Use> __device__ __forceinline__ void each_stage(const Prologue& p, uint32_t k,
                                                                const uint4 (&owned)[OWNED], uint32_t stages_of_row,
                                                                Use use) {
#pragma unroll
  for (int i = 0; i < OWNED; ++i) {
    if (i < stages_of_row) use(pack_of(i), owned[i]);
  }
#pragma unroll 1
  for (uint32_t i = OWNED; i < stages_of_row; ++i) use(pack_of(i), read_pack(p.x, k, pack_of(i)));
}

// One row of x in two parts of int8, 256 times the first and the second: 16 bits. Each is laid out as in
// ByteRows. Then comes room for the row as it was, and what codes are multiplied by. Rows that are to be rounded to
// 8 bits of each token have nothing in the second part.
struct TwoByteRow {
  static constexpr int BATCH = 2;
  static constexpr int SUMS = 0;
  static constexpr bool SCALES = true;
  static constexpr uint32_t PAD = 16;  // lanes of both parts meet no bank twice
  static constexpr float LARGEST = 127 * 256;
  char* at;
  uint32_t k, k_blocks;
  uint32_t shift;  // of whole numbers, to where the first part is

  __device__ TwoByteRow(const Gemv& p, char* at)
      : at(at), k(p.k), k_blocks(k_blocks_of(p.k)), shift(p.prologue.rounds ? 8 : 0) {}

  __device__ uint32_t pitch() const { return k_blocks * K_BLOCK + PAD; }
  __device__ float4* raw() const { return reinterpret_cast<float4*>(at + 2 * pitch()); }
  __device__ float* factor() const { return reinterpret_cast<float*>(raw() + k / 4); }
  static __device__ __forceinline__ uint32_t place(uint32_t value) {
    return value / K_BLOCK * K_BLOCK + value % 32 / 8 * 32 + value % K_BLOCK / 32 * 8;
  }

  __device__ void put_raw(uint32_t, uint32_t piece, float4 v) const { raw()[piece] = v; }
  __device__ float4 get_raw(uint32_t, uint32_t piece) const { return raw()[piece]; }
  __device__ void put_sum(uint32_t, uint32_t, float) const {}
  __device__ void put(uint32_t, uint32_t piece, float4 v) const {
    const uint32_t w[4] = {whole(v.x), whole(v.z), whole(v.y), whole(v.w)};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint16_t* to = reinterpret_cast<uint16_t*>(at + part * pitch() + place(piece / 2 * 8)) + piece % 2;
      to[0] = bytes_of(w[0], w[1], part), to[2] = bytes_of(w[2], w[3], part);
    }
  }
  __device__ __forceinline__ uint32_t whole(float v) const { return ByteRows::whole(v) << shift; }
  // Byte 1 of what is rounded to whole 256s, or byte 0, which has a sign.
  static __device__ __forceinline__ uint32_t bytes_of(uint32_t a, uint32_t b, int part) {
    return part == 0 ? __byte_perm(a + 128, b + 128, 0x0051) : __byte_perm(a, b, 0x0040);
  }
  static __device__ __forceinline__ uint32_t bytes_of(const uint32_t (&v)[4], int part) {
    return __byte_perm(bytes_of(v[0], v[1], part), bytes_of(v[2], v[3], part), 0x5410);
  }
  // What values are multiplied by; those too small for it are zero.
  __device__ float inverse(float largest) const {
    return largest > 1e-33f ? __fdividef(shift ? 127.f : LARGEST, largest) : 0.f;
  }
  static __device__ float factor_of(float largest) { return largest * (1.f / (LARGEST * TERNARY_UNIT)); }
  __device__ float put_largest(uint32_t, float largest) const {
    *factor() = factor_of(largest);
    return inverse(largest);
  }

  __device__ void put_eight(uint32_t value, uint4 v, float by) const {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    uint32_t even[4], odd[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      even[w] = whole(__uint_as_float(words[w] << 16) * by);
      odd[w] = whole(__uint_as_float(words[w] & 0xffff0000u) * by);
    }
#pragma unroll
    for (int part = 0; part < 2; ++part)
      *reinterpret_cast<uint2*>(at + part * pitch() + place(value)) =
          make_uint2(bytes_of(even, part), bytes_of(odd, part));
  }
  // What a warp has of a row of bf16, and of a row that is longer what is still to be read: each warp has a
  // factor of its own, unless the row is to have one. `scratch` is that of `ThreadGroup::max`.
  __device__ float take(const Prologue& p, const uint4 (&owned)[OWNED], uint32_t stages_of_row, float* scratch) const {
    uint32_t both = 0;
    each_stage(p, k, owned, stages_of_row, [&](uint32_t, uint4 v) {
      both = __vmaxu2(both, __vmaxu2(__vmaxu2(v.x & 0x7fff7fffu, v.y & 0x7fff7fffu),
                                     __vmaxu2(v.z & 0x7fff7fffu, v.w & 0x7fff7fffu)));
    });
    const uint32_t most = __reduce_max_sync(FULL, max(both << 16, both & 0xffff0000u));
    const float largest = __uint_as_float(p.rounds ? ThreadGroup(CONSUMER_THREADS).max(most, scratch) : most);
    const float by = inverse(largest);
    each_stage(p, k, owned, stages_of_row, [&](uint32_t pack, uint4 v) {
      if (pack < k_blocks * (K_BLOCK / 8)) put_eight(8 * pack, v, by);
    });
    return factor_of(largest);
  }
  __device__ float taken() const { return *factor(); }
  __device__ void clear_tail(uint32_t threads) const {
    for (uint32_t i = k / 4 + threadIdx.x; i < k_blocks * (K_BLOCK / 4); i += threads) put(0, i, float4{});
  }
};

// One row of x in one or two parts of bf16.
struct PartRow : PartRows<INT4_PADDING> {
  uint32_t pieces;

  __device__ PartRow(const Gemv& p, char* at) : PartRows<INT4_PADDING>(p, at), pieces(p.k / 4) {}

  // As above, with nothing to multiply by.
  __device__ float take(const Prologue& p, const uint4 (&owned)[OWNED], uint32_t stages_of_row, float*) const {
    each_stage(p, 4 * pieces, owned, stages_of_row, [&](uint32_t pack, uint4 v) {
      if (pack < k_blocks * (K_BLOCK / 8)) reinterpret_cast<uint4*>(part(0, 0))[pack] = v;
    });
    return 1.f;
  }
  __device__ float taken() const { return 1.f; }
  __device__ void clear_tail(uint32_t threads) const {
    for (uint32_t i = pieces + threadIdx.x; i < k_blocks * (K_BLOCK / 4); i += threads) put(0, i, float4{});
  }
};

// What a lane reads of the scales of its two rows: those of FP8's blocks, for the K blocks that it takes next.
struct NoBlockScales {
  __device__ NoBlockScales(const Gemv&, uint32_t, uint32_t) {}
  __device__ void load(uint32_t, uint32_t) {}
};
struct Fp8BlockScales {
  const float* of[2];
  uint32_t by[CHUNK][2];

  __device__ Fp8BlockScales(const Gemv& p, uint32_t first, uint32_t second) {
    const uint32_t rows[2] = {first, second};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Past the last row those of the last, which are not used.
      uint32_t row = min(rows[i], p.rows - 1);
      const Matrix& matrix = matrix_of(p, row);
      of[i] = static_cast<const float*>(matrix.scales) + fp8_block(row, 0, k_blocks_of(p.k), matrix.zeros > 0);
    }
  }
  __device__ __forceinline__ void load(uint32_t k_block, uint32_t k_blocks) {
#pragma unroll
    for (uint32_t s = 0; s < CHUNK; ++s) {
      if (k_block + s < k_blocks) by[s][0] = load_u32(of[0] + k_block + s), by[s][1] = load_u32(of[1] + k_block + s);
    }
  }
};

// The formats. `CODES`: bytes of the codes of 8 rows in a K block; `AHEAD`: stages that are on their way at once,
// as measured on an H100 (4096 x 14336 in INT4: 12.7 us, 13.1 with twice as many).
struct TernarySm90 {
  static constexpr uint32_t CODES = 256, GROUPS = ROW_SCALES, AHEAD = 4;
  using Row = TwoByteRow;
  using BlockScales = NoBlockScales;

  struct Sums {
    int v[4][4];

    __device__ void total(float by, float (&y)[2]) const {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int high = (v[0][2 * i] + v[1][2 * i]) + (v[2][2 * i] + v[3][2 * i]);
        const int low = (v[0][2 * i + 1] + v[1][2 * i + 1]) + (v[2][2 * i + 1] + v[3][2 * i + 1]);
        y[i] = by * fmaf(256.f, static_cast<float>(high), static_cast<float>(low));
      }
    }
  };
  // N K blocks from `k_block` on, those of a stage whose codes and scales of each 8 rows are at `codes` and `scales`.
  template <int N> static __device__ __forceinline__ void multiply(const char* (&codes)[2], const char* (&)[2],
                                                                   NoBlockScales, const Row& x, uint32_t k_block, uint32_t lane,
                                                                   Sums& sums) {
    uint32_t words[N][2][2];
#pragma unroll
    for (int s = 0; s < N; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 v = *reinterpret_cast<const uint2*>(codes[i] + s * CODES + 8 * lane);
        words[s][i][0] = v.x, words[s][i][1] = v.y;
      }
    }
    // Sums of the other columns are not used.
    const uint32_t from = shared_address(x.at) + lane / 4 % 2 * x.pitch() + k_block * K_BLOCK + 32 * (lane % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int s = 0; s < N; ++s) {
        const uint4 v = load_shared(from + s * K_BLOCK + 16 * half);
        const uint32_t(&a)[2] = words[s][0], (&b)[2] = words[s][1];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int e = 2 * half + i;
          mma_s8(sums.v[2 * s + i], ternary_bytes(a, e, 0), ternary_bytes(b, e, 0), ternary_bytes(a, e, 1),
                 ternary_bytes(b, e, 1), i == 0 ? v.x : v.z, i == 0 ? v.y : v.w);
        }
      }
    }
  }
};

// Adds the products of N K blocks of codes of 4 bits. `numbers` makes operands of pair j of a word, that of row i of K block
// s and its values from 32 e on. Both halves of each 32 values have their sums, or, if BY_64, both halves of a K block.
template <bool BY_64 = false, int N, class Row, class Numbers>
__device__ __forceinline__ void word_products(float (&c)[N][2][4], const uint4 (&words)[N][2], const Row& x,
                                              uint32_t k_block, uint32_t lane, Numbers numbers) {
  // Sums of the other columns are not used.
  const uint32_t from = shared_address(x.part(0, lane / 4 % x.parts)) + 2 * k_block * K_BLOCK + 16 * (lane % 4);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
#pragma unroll
    for (int s = 0; s < N; ++s) {
      const uint4 of_x = load_shared(from + 2 * s * K_BLOCK + 64 * e);
      uint32_t v[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4& w = words[s][i];
        const uint32_t word = e == 0 ? w.x : e == 1 ? w.y : e == 2 ? w.z : w.w;
#pragma unroll
        for (int j = 0; j < 4; ++j) v[i][j] = numbers(word, j, s, i, e);
      }
      mma_bf16(c[s][BY_64 ? e / 2 : 0], v[0][0], v[1][0], v[0][1], v[1][1], of_x.x, of_x.y);
      mma_bf16(c[s][BY_64 ? e / 2 : 1], v[0][2], v[1][2], v[0][3], v[1][3], of_x.z, of_x.w);
    }
  }
}

struct Int4Sm90 {
  static constexpr uint32_t CODES = 512, GROUPS = ONE_GROUP, AHEAD = 2;
  using Row = PartRow;
  using BlockScales = NoBlockScales;

  struct Sums {
    float v[2];

    __device__ void total(float, float (&y)[2]) const { y[0] = v[0], y[1] = v[1]; }
  };
  template <int N>
  static __device__ __forceinline__ void multiply(const char* (&codes)[2], const char* (&scales)[2], NoBlockScales,
                                                  const Row& x, uint32_t k_block, uint32_t lane, Sums& sums) {
    uint4 words[N][2];
    __half by[N][2];
#pragma unroll
    for (int s = 0; s < N; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[s][i] = *reinterpret_cast<const uint4*>(codes[i] + s * CODES + 16 * lane);
        by[s][i] = *reinterpret_cast<const __half*>(scales[i] + s * (2 * ROW_GROUP) + lane / 4 * 2);
      }
    }
    float c[N][2][4] = {};
    word_products(c, words, x, k_block, lane, [](uint32_t word, int j, int, int, int) {
      return int4_numbers<false>(word, j, 0);
    });
#pragma unroll
    for (int s = 0; s < N; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = c[s][0][2 * i] + c[s][1][2 * i];
        if (x.parts == 2) sum += c[s][0][2 * i + 1] + c[s][1][2 * i + 1];
        sums.v[i] = fmaf(__half2float(by[s][i]), sum, sums.v[i]);
      }
    }
  }
};

// In the places of INT4, with the scales of 16 values in front of the products and those of rows in the epilogue.
struct Nvfp4Sm90 {
  static constexpr uint32_t CODES = Int4Sm90::CODES, GROUPS = ROW_AND_GROUP16_SCALES, AHEAD = 2;
  using Row = PartRow;
  using BlockScales = NoBlockScales;
  using Sums = Int4Sm90::Sums;

  template <int N>
  static __device__ __forceinline__ void multiply(const char* (&codes)[2], const char* (&scales)[2], NoBlockScales,
                                                  const Row& x, uint32_t k_block, uint32_t lane, Sums& sums) {
    uint4 words[N][2];
    uint32_t by[N][2];
#pragma unroll
    for (int s = 0; s < N; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[s][i] = *reinterpret_cast<const uint4*>(codes[i] + s * CODES + 16 * lane);
        const char* of_row = scales[i] + (s * ROW_GROUP + lane / 4) * Nvfp4::SCALES;
        by[s][i] = *reinterpret_cast<const uint32_t*>(of_row + lane % 4 / 2 * 4);
      }
    }
    float c[N][2][4] = {};
    word_products(c, words, x, k_block, lane, [&](uint32_t word, int j, int s, int i, int e) {
      return Nvfp4Weights::numbers(word, j, nvfp4_scale(by[s][i], e));
    });
#pragma unroll
    for (int s = 0; s < N; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums.v[i] += c[s][0][2 * i] + c[s][1][2 * i];
        if (x.parts == 2) sums.v[i] += c[s][0][2 * i + 1] + c[s][1][2 * i + 1];
      }
    }
  }
};

// The same, with f32 scales of 64 values.
struct Nf4Sm90 {
  static constexpr uint32_t CODES = Int4Sm90::CODES, GROUPS = TWO_F32_GROUPS, AHEAD = 2;
  using Row = PartRow;
  using BlockScales = NoBlockScales;
  using Sums = Int4Sm90::Sums;

  template <int N>
  static __device__ __forceinline__ void multiply(const char* (&codes)[2], const char* (&scales)[2], NoBlockScales,
                                                  const Row& x, uint32_t k_block, uint32_t lane, Sums& sums) {
    uint4 words[N][2];
    float2 by[N][2];
#pragma unroll
    for (int s = 0; s < N; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[s][i] = *reinterpret_cast<const uint4*>(codes[i] + s * CODES + 16 * lane);
        by[s][i] = *reinterpret_cast<const float2*>(scales[i] + (s * ROW_GROUP + lane / 4) * Nf4::SCALES);
      }
    }
    float c[N][2][4] = {};
    word_products<true>(c, words, x, k_block, lane, [](uint32_t word, int j, int, int, int) { return nf4_pair(word, j); });
#pragma unroll
    for (int s = 0; s < N; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int group = 0; group < 2; ++group) {
          float sum = c[s][group][2 * i];
          if (x.parts == 2) sum += c[s][group][2 * i + 1];
          sums.v[i] = fmaf(group == 0 ? by[s][i].x : by[s][i].y, sum, sums.v[i]);
        }
      }
    }
  }
};

// With scales of rows, which the epilogue applies, or of blocks.
template <int GROUPS_> struct Fp8Sm90 {
  static constexpr uint32_t CODES = ROW_GROUP * K_BLOCK, GROUPS = GROUPS_, AHEAD = 2;
  using Row = PartRow;
  using BlockScales = typename std::conditional<GROUPS == FP8_BLOCKS, Fp8BlockScales, NoBlockScales>::type;
  using Sums = Int4Sm90::Sums;

  static __device__ __forceinline__ float scale(const NoBlockScales&, int, int) { return 1.f; }
  static __device__ __forceinline__ float scale(const Fp8BlockScales& of_blocks, int s, int i) {
    return nan_if_negative(of_blocks.by[s][i]);
  }
  template <int N>
  static __device__ __forceinline__ void multiply(const char* (&codes)[2], const char* (&)[2],
                                                  const BlockScales& of_blocks, const Row& x, uint32_t k_block,
                                                  uint32_t lane, Sums& sums) {
    const uint32_t g = lane / 4, t = lane % 4;
    uint4 words[N][2][2];  // K block, row, half of it
#pragma unroll
    for (int s = 0; s < N; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[s][i / 2][i % 2] =
            *reinterpret_cast<const uint4*>(codes[i / 2] + s * CODES + g * K_BLOCK + i % 2 * 64 + 16 * t);
    }
    // Sums of the other columns are not used.
    const uint32_t from = shared_address(x.part(0, g % x.parts)) + 2 * k_block * K_BLOCK + 32 * t;
    float c[N][2][4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int s = 0; s < N; ++s) {
        const uint4 of_x = load_shared(from + 2 * s * K_BLOCK + e / 2 * 128 + e % 2 * 16);
        uint32_t v[2][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint4& w = words[s][i][e / 2];
#pragma unroll
          for (int j = 0; j < 4; ++j)
            v[i][j] = fp8_numbers(e % 2 == 0 ? (j < 2 ? w.x : w.y) : (j < 2 ? w.z : w.w), j % 2);
        }
        mma_bf16(c[s][0], v[0][0], v[1][0], v[0][1], v[1][1], of_x.x, of_x.y);
        mma_bf16(c[s][1], v[0][2], v[1][2], v[0][3], v[1][3], of_x.z, of_x.w);
      }
    }
#pragma unroll
    for (int s = 0; s < N; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = c[s][0][2 * i] + c[s][1][2 * i];
        if (x.parts == 2) sum += c[s][0][2 * i + 1] + c[s][1][2 * i + 1];
        sums.v[i] = fmaf(scale(of_blocks, s, i), sum, sums.v[i]);
      }
    }
  }
};

#endif

}  // namespace fused
