// 4-bit codes and one row of x in 16-bit integers (gemv_wna16_sm90.cuh): x is quantized in K blocks of 128 values, and
// `mma` of int8 multiplies codes by each of its two bytes.
//
// On Hopper integer instructions run at half rate, and to unpack codes to bf16 takes longer than to load them: for 512
// weights a warp executes 8 `lop3`, 6 shifts, 8 subtractions and two `mma`, where int8 takes four `lop3`, two shifts and
// one `mma`. Zero points and offsets are applied as their product with the sum of a group's x.
#pragma once

#include "linear/gemv_wna16_sm90_mma.cuh"

namespace fused {

template <int GROUPS, bool ZEROS> struct Int4Codes;
template <class Blocks> struct GgufNibbles;
template <class Codes> struct NibbleProducts;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The power of two by which a K block of x is quantized: its largest magnitude becomes 14 bits and a sign at least, and
// at most 127.5 times 256, so that the upper byte has a sign, too. Values of bf16 down to 1/64 of the largest stay exact.
struct KBlockScale {
  // Added to the bits of an f32, it carries into the exponent from a mantissa of 1.9921 on: x times 2^14 over the power of
  // two is rounded to at most 32639, which is 127 * 256 + 127.
  static constexpr uint32_t PAST_127 = 0x10200;
  float scale, inverse;

  // `largest`: bits of f32. K blocks of less than 2^-111 are zero.
  __device__ __forceinline__ explicit KBlockScale(uint32_t largest) {
    const uint32_t exponent = (largest + PAST_127) >> 23;
    const bool zero = exponent < 16;
    inverse = zero ? 0.f : __uint_as_float((127 + 14 + 127 - exponent) << 23);
    scale = zero ? 0.f : __uint_as_float((exponent - 14) << 23);
    if (largest >= 0x7f800000) scale = __uint_as_float(0x7fffffff);
  }
};

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
// each K block, the scaled sums of its groups and its scale, and then room for the row as it was.
template <class Codes> struct Int16Row {
  static constexpr int BATCH = 2;
  static constexpr int SUMS = 0;
  static constexpr bool SCALES = false, K_BLOCK_SCALES = true;
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
  __device__ float4* raw() const { return reinterpret_cast<float4*>(entries() + (k_blocks * ENTRY + 3) / 4 * 4); }
  // Where 8 values of the block of 32 that has value `value` lie, those that lane t meets.
  __device__ __forceinline__ uint2* place(uint32_t value, uint32_t t, int part) const {
    return reinterpret_cast<uint2*>(at + part * pitch() + value / K_BLOCK * K_BLOCK + 32 * t + value % K_BLOCK / 32 * 8);
  }
  // The bytes of 8 values in that order, from those of the first four and of the others.
  static __device__ __forceinline__ uint2 interleave(uint32_t first, uint32_t second) {
    return make_uint2(__byte_perm(first, second, 0x5140), __byte_perm(first, second, 0x7362));
  }

  __device__ void put_raw(uint32_t, uint32_t piece, float4 v) const { raw()[piece] = v; }
  __device__ float4 get_raw(uint32_t, uint32_t piece) const { return raw()[piece]; }
  __device__ void put_sum(uint32_t, uint32_t, float) const {}
  __device__ void put(uint32_t, uint32_t, float4) const {}
  __device__ float put_largest(uint32_t, float) const { return 1.f; }

  // Byte 1 of what is rounded to whole 256s, or byte 0, which has a sign.
  static __device__ __forceinline__ uint32_t bytes_of(int part, const uint32_t (&whole)[4]) {
    return TwoByteRow::bytes_of(whole, part);
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

  // A warp's 32 pieces of 4 values, which are a K block. Two lanes have the first and the second four of 8 values that
  // belong together; the one stores the upper bytes, the other the lower ones.
  __device__ void put_k_block(uint32_t piece, float4 v) const {
    const uint32_t largest = max(max(magnitude(v.x), magnitude(v.y)), max(magnitude(v.z), magnitude(v.w)));
    const KBlockScale by(__reduce_max_sync(FULL, largest));
    constexpr uint32_t OTHER = Codes::BOTH_HALVES ? 4 : 1;
    const bool second = piece & OTHER;
    uint32_t bytes[2][1];
    uint2 words;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      bytes[part][0] = bytes_of(part, {whole(v.x, by), whole(v.y, by), whole(v.z, by), whole(v.w, by)});
      const uint32_t own = bytes[part][0], other = __shfl_xor_sync(FULL, own, OTHER);
      if (part == second) words = second ? interleave(other, own) : interleave(own, other);
    }
    if (4 * piece < k_blocks * K_BLOCK)
      *place(4 * piece, Codes::BOTH_HALVES ? piece % 4 : piece / 2 % 4, second) = words;
    put_entry<32 / GROUPS>(4 * piece, bytes, by.scale);
  }

  // 8 values of bf16, which are values `value` and following.
  __device__ __forceinline__ void put_pack(uint32_t value, uint4 pack, const KBlockScale& by) const {
    const uint32_t words[4] = {pack.x, pack.y, pack.z, pack.w}, t = value % 32 / 8;
    uint32_t v[8], bytes[2][2];
#pragma unroll
    for (int w = 0; w < 4; ++w)
      v[2 * w] = whole(__uint_as_float(words[w] << 16), by),
             v[2 * w + 1] = whole(__uint_as_float(words[w] & 0xffff0000u), by);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t first = bytes_of(part, {v[0], v[1], v[2], v[3]}), second = bytes_of(part, {v[4], v[5], v[6], v[7]});
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
      put_pack(8 * pack_of(first + i), packs[i], KBlockScale(largest[i]));
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
  __device__ float taken() const { return 1.f; }
  // Zeros behind the last value are in its K block.
  __device__ void clear_tail(uint32_t) const {}
};

template <class Codes> struct NibbleProducts {
  using Format = typename Codes::Format;
  using Stream = WeightStream<Format>;
  using Row = Int16Row<Codes>;
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
