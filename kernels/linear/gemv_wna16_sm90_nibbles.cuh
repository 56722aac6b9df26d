// 4-bit codes and one row of x in 16-bit integers (gemv_wna16_sm90.cuh): x is quantized in K blocks of 128 values, and
// `mma` of int8 multiplies codes by each of its two bytes.
//
// On Hopper integer instructions run at half rate, and to unpack codes to bf16 takes longer than to load them: for 512
// weights a warp executes 8 `lop3`, 6 shifts, 8 subtractions and two `mma`, where int8 takes four `lop3`, two shifts and
// one `mma`. Zero points and offsets are applied as their product with the sum of a group's x.
#pragma once

#include "formats/int16_blocks.cuh"
#include "linear/gemv_wna16_sm90_mma.cuh"

namespace fused {

template <int GROUPS, bool ZEROS> struct Int4Codes;
template <class Blocks> struct GgufNibbles;
template <class Codes> struct NibbleProducts;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// INT4: a lane has 8 values side by side in each block of 32.
template <int GROUPS_, bool ZEROS> struct Int4Codes {
  using Format = StreamedInt4<GROUPS_, ZEROS>;
  using Block = typename Format::Stage::Block;
  static constexpr int GROUPS = GROUPS_;  // of a K block
  static constexpr bool OFFSETS = ZEROS;  // whether sums of x are added; else codes have a zero point of 8
  static constexpr bool BOTH_HALVES = false;

  static __device__ __forceinline__ uint32_t word(const Block& block, int i, int e) { return block.pieces[i].words[e]; }
  static __device__ __forceinline__ GroupScale group(const Gemv& p, const Block& block, int g) {
    GroupScale s = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int e = 4 / GROUPS * g;
      s.by[i] = block.scales[i].scale(p, e);
      if constexpr (ZEROS) s.plus[i] = -s.by[i] * __uint_as_float(block.scales[i].zero(p, e) & 0xffff0000u);
    }
    return s;
  }
};

// GGUF blocks: a lane has four values side by side of both halves of a block of 32.
template <class Blocks> struct GgufNibbles {
  using Format = StreamedGguf<Blocks>;
  using Block = typename Format::Stage::Block;
  static constexpr int GROUPS = GROUP;
  static constexpr bool OFFSETS = Blocks::HAS_OFFSET;
  static constexpr bool BOTH_HALVES = true;

  static __device__ __forceinline__ uint32_t word(const Block& block, int i, int e) { return block.pieces[i].low[e]; }
  static __device__ __forceinline__ GroupScale group(const Gemv& p, const Block& block, int g) {
    return Format::Stage::Weights::group(block, p, g);
  }
};

// One row of x as two bytes of each value, in a plane of upper bytes and one of lower bytes: 256 times the first and the
// second, both with a sign. What lane t multiplies in a K block is together: of each 8 values v those that the lower codes
// of a word's bytes are multiplied by, v0 v4 v1 v5, then those for the upper codes, v2 v6 v3 v7. Behind the planes are, for
// each K block, the scaled sums of its groups and its scale. Each warp quantizes the K blocks that it multiplies, and waits
// for no other, but for a norm's sums.
template <class Codes> struct Int16Row {
  static constexpr int GROUPS = Codes::GROUPS;
  static constexpr uint32_t PAD = 16;  // lanes of both planes meet no bank twice
  static constexpr uint32_t SCALE_AT = Codes::OFFSETS ? GROUPS : 0;
  static constexpr uint32_t ENTRY = !Codes::OFFSETS ? 1 : GROUPS == 1 ? 2 : 2 * GROUPS;  // f32 of a K block
  static constexpr float UNIT = Codes::OFFSETS ? 1.f : 1.f / 16;  // without offsets operands are 16 times the codes
  char* at;
  uint32_t k, k_blocks;

  __device__ Int16Row(const Gemv& p, char* at) : at(at), k(p.k), k_blocks(k_blocks_of(p.k)) {}

  __device__ __forceinline__ uint32_t pitch() const { return k_blocks * K_BLOCK + PAD; }
  __device__ __forceinline__ float* entries() const { return reinterpret_cast<float*>(at + 2 * pitch()); }
  // Where 8 values of the block of 32 that has value `value` lie, those that lane t meets.
  __device__ __forceinline__ uint2* place(uint32_t value, uint32_t t, int part) const {
    return reinterpret_cast<uint2*>(at + part * pitch() + value / K_BLOCK * K_BLOCK + 32 * t + value % K_BLOCK / 32 * 8);
  }
  // The bytes of 8 values in that order, from those of the first four and of the others.
  static __device__ __forceinline__ uint2 interleave(uint32_t first, uint32_t second) {
    return make_uint2(__byte_perm(first, second, 0x5140), __byte_perm(first, second, 0x7362));
  }

  static __device__ __forceinline__ uint32_t whole(float v, const KBlockScale& by) {
    return __float_as_uint(fmaf(v, by.inverse, 12582912.f));
  }
  // The scale of a K block, and the sum of a group, of which each of LANES lanes side by side has as many bytes of each
  // part: 256 times the first and the second.
  template <int LANES, int N>
  __device__ __forceinline__ void put_entry(uint32_t value, const uint32_t (&bytes)[2][N], float scale) const {
    float* entry = entries() + value / K_BLOCK * ENTRY;
    const bool in_row = value < k_blocks * K_BLOCK;
    if constexpr (Codes::OFFSETS) {
      int sums[2] = {};
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int i = 0; i < N; ++i) sums[part] = __dp4a(static_cast<int>(bytes[part][i]), 0x01010101, sums[part]);
      }
      int sum = 256 * sums[0] + sums[1];
#pragma unroll
      for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(FULL, sum, offset);
      if (in_row && threadIdx.x % LANES == 0)
        entry[value % K_BLOCK * GROUPS / K_BLOCK] = scale * static_cast<float>(sum);
    }
    if (in_row && value % K_BLOCK == 0) entry[SCALE_AT] = scale * UNIT;
  }

  // Values `value` and the 7 behind it. All lanes of a warp put theirs, 256 values side by side.
  __device__ __forceinline__ void put_eight(uint32_t value, const float (&x)[8], const KBlockScale& by) const {
    const uint32_t t = value % 32 / 8;
    uint32_t v[8], bytes[2][2];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = whole(x[i], by);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t first = bytes_of({v[0], v[1], v[2], v[3]}, part), second = bytes_of({v[4], v[5], v[6], v[7]}, part);
      bytes[part][0] = first, bytes[part][1] = second;
      uint32_t to = t;
      if constexpr (Codes::BOTH_HALVES) {
        // The lane two further has the other half of the block: it gets the second four, and gives its first.
        const bool upper = t >= 2;
        const uint32_t other = __shfl_xor_sync(FULL, upper ? first : second, 2);
        if (upper) first = other;
        else second = other;
        to = t % 2 * 2 + upper;
      }
      if (value < k_blocks * K_BLOCK) *place(value, to, part) = interleave(first, second);
    }
    put_entry<16 / GROUPS>(value, bytes, by.scale);
  }

  // What a warp has of stages `first` and following of a row of bf16: two K blocks of each, which have one scale. All
  // stages side by side, for they wait for shuffles.
  __device__ __forceinline__ void quantize(const uint4 (&packs)[OWNED], uint32_t first, uint32_t stages_of_row) const {
    uint32_t largest[OWNED];
#pragma unroll
    for (int i = 0; i < OWNED; ++i) {
      if (first + i >= stages_of_row) break;
      const uint32_t both = __vmaxu2(__vmaxu2(packs[i].x & 0x7fff7fffu, packs[i].y & 0x7fff7fffu),
                                     __vmaxu2(packs[i].z & 0x7fff7fffu, packs[i].w & 0x7fff7fffu));
      largest[i] = __reduce_max_sync(FULL, max(both << 16, both & 0xffff0000u));
    }
#pragma unroll
    for (int i = 0; i < OWNED; ++i) {
      if (first + i >= stages_of_row) break;
      float v[8];
      unpack8<__nv_bfloat16>(packs[i], v);
      put_eight(8 * pack_of(first + i), v, KBlockScale(largest[i]));
    }
  }
  // Of a row that is longer than what the warp has of it the rest is still to be read.
  __device__ float take(const Prologue& p, const uint4 (&owned)[OWNED], uint32_t stages_of_row, float*) const {
    quantize(owned, 0, stages_of_row);
#pragma unroll 1
    for (uint32_t first = OWNED; first < stages_of_row; first += OWNED) {
      uint4 packs[OWNED];
#pragma unroll
      for (int i = 0; i < OWNED; ++i)
        packs[i] = first + i < stages_of_row ? read_pack(p.x, k, pack_of(first + i)) : uint4{};
      quantize(packs, first, stages_of_row);
    }
    return 1.f;
  }
};

// 8 values side by side as they are stored; the second half is there for f32 only.
struct RawEight {
  uint4 halves[2];

  // Those of `pack` of a row of k values, zeros behind it.
  __device__ __forceinline__ void read(const void* from, int dtype, uint32_t k, uint32_t pack) {
    halves[0] = halves[1] = uint4{};
    if (pack >= k / 8) return;
    const uint4* at = static_cast<const uint4*>(from) + (dtype == F32 ? 2 * pack : pack);
    halves[0] = __ldcg(at);
    if (dtype == F32) halves[1] = __ldcg(at + 1);
  }
  __device__ __forceinline__ void widen(int dtype, float (&v)[8]) const {
    if (dtype == BF16) return unpack8<__nv_bfloat16>(halves[0], v);
    if (dtype == F16) return unpack8<__half>(halves[0], v);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      v[4 * i] = __uint_as_float(halves[i].x), v[4 * i + 1] = __uint_as_float(halves[i].y);
      v[4 * i + 2] = __uint_as_float(halves[i].z), v[4 * i + 3] = __uint_as_float(halves[i].w);
    }
  }
};

// The largest magnitude that a warp has, as bits, of which those of NaN are the largest.
__device__ __forceinline__ uint32_t largest_of_warp(const float (&v)[8]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) largest = max(largest, magnitude(v[i]));
  return __reduce_max_sync(FULL, largest);
}

// How rows of f32 and f16 come there, and those of bf16 that are too long for the registers and have a norm.
template <class Codes> struct NibbleStaging {
  // Stages whose values a lane has at once: they are put side by side, for they wait for shuffles.
  static constexpr uint32_t BATCH = 2;
  const Prologue& x;
  const Int16Row<Codes>& row;
  float (*const scratch)[CONSUMER_WARPS];
  RawEight gain;  // of the first stage, before the PDL wait

  __device__ NibbleStaging(const Gemv& p, const Int16Row<Codes>& row, float (*scratch)[CONSUMER_WARPS])
      : x(p.prologue), row(row), scratch(scratch) {}

  __device__ __forceinline__ void prefetch() {
    if (x.norm != NORM_NONE) gain.read(x.weight, x.dtype, row.k, pack_of(0));
  }

  __device__ __forceinline__ void read(RawEight (&to)[BATCH], uint32_t first) const {
#pragma unroll
    for (uint32_t i = 0; i < BATCH; ++i) to[i].read(x.x, x.dtype, row.k, pack_of(first + i));
  }

  // The mean of the row's values, or of the squares of what they are off the mean.
  __device__ __forceinline__ float mean_of(RawEight (&own)[BATCH], uint32_t stages_of_row, bool squares, float mean) const {
    float sum = 0.f;
#pragma unroll 1
    for (uint32_t first = 0; first < stages_of_row; first += BATCH) {
      if (stages_of_row > BATCH) read(own, first);
#pragma unroll
      for (uint32_t i = 0; i < BATCH; ++i) {
        if (pack_of(first + i) >= row.k / 8) break;
        float v[8];
        own[i].widen(x.dtype, v);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += squares ? (v[j] - mean) * (v[j] - mean) : v[j];
      }
    }
    return __fdividef(ThreadGroup(CONSUMER_THREADS).sum(sum, scratch[squares]), row.k);
  }

  // Rounded as the norm's own kernel rounds.
  __device__ __forceinline__ void norm(float (&v)[8], const RawEight& gain, uint32_t pack, float mean, float factor) const {
    float w[8], b[8] = {};
    gain.widen(x.dtype, w);
    if (x.bias) {
      RawEight bias;
      bias.read(x.bias, x.dtype, row.k, pack);
      bias.widen(x.dtype, b);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float scaled = (v[j] - mean) * factor;
      v[j] = rounded_to(x.dtype, x.norm == NORM_LAYER ? fmaf(scaled, w[j], b[j]) : rounded_to(x.dtype, scaled) * w[j]);
    }
  }

  __device__ __forceinline__ void put(const RawEight (&own)[BATCH], uint32_t first, float mean, float factor,
                                      uint32_t stages_of_row) const {
    float v[BATCH][8];
    uint32_t largest[BATCH];
#pragma unroll
    for (uint32_t i = 0; i < BATCH; ++i) {
      const uint32_t pack = pack_of(first + i);
      own[i].widen(x.dtype, v[i]);
      if (x.norm != NORM_NONE && pack < row.k / 8) {
        RawEight gain = this->gain;
        if (first + i > 0) gain.read(x.weight, x.dtype, row.k, pack);
        norm(v[i], gain, pack, mean, factor);
      }
      largest[i] = largest_of_warp(v[i]);
    }
#pragma unroll
    for (uint32_t i = 0; i < BATCH; ++i) {
      if (first + i < stages_of_row) row.put_eight(8 * pack_of(first + i), v[i], KBlockScale(largest[i]));
    }
  }

  // The factor of all products.
  __device__ float run(uint32_t stages_of_row) const {
    RawEight own[BATCH], next[BATCH];
    read(own, 0);
    float mean = 0.f, factor = 1.f;
    if (x.norm != NORM_NONE) {
#pragma unroll 1
      for (int squares = x.norm == NORM_LAYER ? 0 : 1; squares < 2; ++squares) {
        const float total = mean_of(own, stages_of_row, squares, mean);
        if (squares) factor = rsqrtf(total + x.eps);
        else mean = total;
      }
      if (stages_of_row > BATCH) read(own, 0);
    }
#pragma unroll 1
    for (uint32_t first = 0; first < stages_of_row; first += BATCH) {
      read(next, first + BATCH);
      put(own, first, mean, factor, stages_of_row);
#pragma unroll
      for (uint32_t i = 0; i < BATCH; ++i) own[i] = next[i];
    }
    __syncwarp();
    return 1.f;
  }
};

template <class Codes> struct NibbleProducts {
  using Format = typename Codes::Format;
  using Stream = WeightStream<Format>;
  using Row = Int16Row<Codes>;
  using Staging = NibbleStaging<Codes>;
  using Block = typename Codes::Block;
  // Eight layers of Llama-3-8B in INT4 and its head take 1.6 % less time on an H200 than with two.
  static constexpr uint32_t AHEAD = 3;
  static constexpr int GROUPS = Codes::GROUPS, LENGTH = 4 / GROUPS;  // products of 32 values of K that a group has
  // A whole number of 22 bits and a sign in an f32: sums that begin with it need no conversion.
  static constexpr int WHOLE = 0x4b400000;

  struct Entry {
    float sums[GROUPS], scale;

    __device__ __forceinline__ Entry(const Row& x, uint32_t k_block) {
      const uint32_t at = shared_address(x.entries() + k_block * Row::ENTRY);
      uint32_t words[2 * GROUPS];
      if constexpr (!Codes::OFFSETS) {
        words[Row::SCALE_AT] = load_shared_u32(at);
      } else if constexpr (GROUPS == 1) {
        const uint2 v = load_shared_u64(at);
        words[0] = v.x, words[1] = v.y;
      } else {
        const uint4 v = load_shared(at);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        if constexpr (GROUPS == 4) words[Row::SCALE_AT] = load_shared_u32(at + 16);
      }
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) sums[g] = Codes::OFFSETS ? __uint_as_float(words[g]) : 0.f;
      scale = __uint_as_float(words[Row::SCALE_AT]);
    }
  };

  // The lower or the upper codes of a word's bytes: as they are, or, without offsets, 16 times what they are less 8: with
  // their upper bit flipped they have a sign. A variable has those bits: two constants would be two instructions.
  template <bool UPPER> static __device__ __forceinline__ uint32_t codes(uint32_t word, uint32_t flip) {
    if constexpr (Codes::OFFSETS) return (UPPER ? word >> 4 : word) & 0x0f0f0f0fu;
    uint32_t v;
    asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(v) : "r"(UPPER ? word : word << 4), "r"(flip), "n"(0xf0f0f0f0u));
    return v;
  }

  // Adds a group's sums: of rows g and g + 8 those of x's upper bytes, then those of its lower ones.
  static __device__ __forceinline__ void end_group(const GroupScale& by, const int (&c)[4], float x_sum, float scale,
                                                   float (&y)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float high = __int_as_float(c[2 * i]) - __int_as_float(WHOLE);
      const float low = __int_as_float(c[2 * i + 1]) - __int_as_float(WHOLE);
      if constexpr (Codes::OFFSETS) y[i] = fmaf(by.plus[i], x_sum, y[i]);
      y[i] = fmaf(by.by[i] * scale, fmaf(256.f, high, low), y[i]);
    }
  }

  // Adds the products of N K blocks from `k_block` on.
  template <int N>
  static __device__ __forceinline__ void add(const Gemv& p, const typename Stream::WarpStage& at, const Row& x,
                                             uint32_t k_block, float (&y)[CHUNK][2]) {
    const uint32_t lane = threadIdx.x % WARP;
    const typename Format::BlockScales none(p, 0, 0);
    Block blocks[N];
#pragma unroll
    for (int s = 0; s < N; ++s) blocks[s] = Format::read(at, none, s);
    // Even columns of operand B are the plane of upper bytes, odd ones that of lower bytes. One of each is enough.
    const uint32_t from = shared_address(x.at) + lane / 4 % 2 * x.pitch() + k_block * K_BLOCK + 32 * (lane % 4);
    uint32_t flip;
    asm volatile("mov.u32 %0, 0x88888888;" : "=r"(flip));
    int c[N][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int s = 0; s < N; ++s) {
        const uint4 v = load_shared(from + s * K_BLOCK + 16 * half);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int e = 2 * half + i;
          const uint32_t a = Codes::word(blocks[s], 0, e), b = Codes::word(blocks[s], 1, e);
          if (e % LENGTH == 0) c[s][0] = c[s][1] = c[s][2] = c[s][3] = WHOLE;
          mma_s8(c[s], codes<false>(a, flip), codes<false>(b, flip), codes<true>(a, flip), codes<true>(b, flip),
                 i == 0 ? v.x : v.z, i == 0 ? v.y : v.w);
          if ((e + 1) % LENGTH == 0) {
            const Entry entry(x, k_block + s);
            const int g = e / LENGTH;
            end_group(Codes::group(p, blocks[s], g), c[s], entry.sums[g], entry.scale, y[s]);
          }
        }
      }
    }
  }

  // Sums of rows g and g + 8 of N tile `i`.
  static __device__ __forceinline__ void multiply(const Stream& stream, const Row& x, uint32_t, uint32_t warp, float,
                                                  StageState& stage, float (&y)[2]) {
    const Gemv& p = stream.p;
    float sums[CHUNK][2] = {};
#pragma unroll 1
    for (uint32_t k_block = CHUNK * warp; k_block < stream.stages_of_row * STAGE_K_BLOCKS; k_block += STAGE_K_BLOCKS) {
      const auto at = stream.of_warp(stage.stage, warp);
      barrier_wait(stream.full + 8 * stage.stage, stage.phase);
      if (k_block + CHUNK <= stream.k_blocks) {
        add<CHUNK>(p, at, x, k_block, sums);
      } else if (k_block < stream.k_blocks) {
        add<1>(p, at, x, k_block, sums);
      }
      barrier_arrive(stream.empty + 8 * stage.stage);
      stage.next(p.stages);
    }
    y[0] = sums[0][0] + sums[1][0], y[1] = sums[0][1] + sums[1][1];
  }
};

#endif

}  // namespace fused
