// What gemv_wna16_sm90.cuh does for a format: how a warp's part of a row of x lies in shared memory, and its products
// with a warp's part of a stage. Hopper only.
#pragma once

#include "linear/streamed_weights_sm90.cuh"

namespace fused {

struct TernaryProducts;
template <class Format> struct PartProducts;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

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
  __device__ void put(uint32_t, uint32_t piece, float4 v) const {
    const uint32_t w[4] = {whole(v.x), whole(v.z), whole(v.y), whole(v.w)};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint16_t* to = reinterpret_cast<uint16_t*>(at + part * pitch() + place(piece / 2 * 8)) + piece % 2;
      to[0] = bytes_of(w[0], w[1], part), to[2] = bytes_of(w[2], w[3], part);
    }
  }
  __device__ __forceinline__ uint32_t whole(float v) const { return ByteRows::whole(v) << shift; }
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

// One row of x in one or two parts of bf16. Behind them come, where weights have offsets, SUMS sums of x for each 32 values:
// two parts of each, every one twice. Where the row has two parts, columns of both meet the sums: half of each.
template <int SUMS_> struct PartRow : PartRows<INT4_PADDING> {
  static constexpr int SUMS = SUMS_;
  uint32_t pieces;

  __device__ PartRow(const Gemv& p, char* at) : PartRows<INT4_PADDING>(p, at), pieces(p.k / 4) {}

  __device__ __forceinline__ uint2* sums() const { return reinterpret_cast<uint2*>(at + parts * pitch()); }
  __device__ __forceinline__ void put_sum(uint32_t, uint32_t i, float v) const {
    sums()[i] = both_parts(parts == 2 ? 0.5f * v : v);
  }

  // As above, with nothing to multiply by.
  __device__ float take(const Prologue& p, const uint4 (&owned)[OWNED], uint32_t stages_of_row, float*) const {
    each_stage(p, 4 * pieces, owned, stages_of_row, [&](uint32_t pack, uint4 v) {
      const bool in_row = pack < k_blocks * (K_BLOCK / 8);
      if (in_row) reinterpret_cast<uint4*>(part(0, 0))[pack] = v;
      if constexpr (SUMS > 0) {
        const float sum = sum_of_packs<4 / SUMS>(v);
        if (in_row && pack % (4 / SUMS) == 0) put_sum(0, pack / (4 / SUMS), sum);
      }
    });
    return 1.f;
  }
  __device__ float taken() const { return 1.f; }
  __device__ void clear_tail(uint32_t threads) const {
    for (uint32_t i = pieces + threadIdx.x; i < k_blocks * (K_BLOCK / 4); i += threads) put(0, i, float4{});
    if constexpr (SUMS > 0) {
      for (uint32_t i = pieces / 8 * SUMS + threadIdx.x; i < k_blocks * (K_BLOCK / 32) * SUMS; i += threads)
        put_sum(0, i, 0.f);
    }
  }
};

// How a row comes to shared memory of which warps do not own their parts: the whole block stages it.
template <class Row> struct BlockStaging : RowStage<Row> {
  __device__ BlockStaging(const Gemv& p, Row row, float (*scratch)[CONSUMER_WARPS])
      : RowStage<Row>(p, row, scratch[0], ThreadGroup(CONSUMER_THREADS)) {}

  // The factor of all products.
  __device__ float run(uint32_t) const {
    this->stage(this->p.prologue.x, 0);
    this->rows.clear_tail(CONSUMER_THREADS);
    sync_first(CONSUMER_THREADS);
    return this->rows.taken();
  }
};

// Ternary weights and int8: whole numbers to the end of K.
struct TernaryProducts {
  using Format = StreamedTernary;
  using Stream = WeightStream<Format>;
  static constexpr uint32_t AHEAD = Format::AHEAD;
  using Row = TwoByteRow;
  using Staging = BlockStaging<Row>;

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
  // N K blocks from `k_block` on.
  template <int N>
  static __device__ __forceinline__ void add(const Stream::WarpStage& at, const Row& x, uint32_t k_block, Sums& sums) {
    const uint32_t lane = threadIdx.x % WARP;
    uint32_t words[N][2][2];
#pragma unroll
    for (int s = 0; s < N; ++s) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 v = *reinterpret_cast<const uint2*>(at.template at<0>(i, s) + 8 * lane);
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

  // Sums of rows g and g + 8 of N tile `i`.
  static __device__ __forceinline__ void multiply(const Stream& stream, const Row& x, uint32_t, uint32_t warp, float by,
                                                  StageState& stage, float (&y)[2]) {
    Sums sums = {};
#pragma unroll 1
    for (uint32_t k_block = CHUNK * warp; k_block < stream.stages_of_row * STAGE_K_BLOCKS; k_block += STAGE_K_BLOCKS) {
      const auto at = stream.of_warp(stage.stage, warp);
      barrier_wait(stream.full + 8 * stage.stage, stage.phase);
      if (k_block + CHUNK <= stream.k_blocks) {
        add<CHUNK>(at, x, k_block, sums);
      } else if (k_block < stream.k_blocks) {
        add<1>(at, x, k_block, sums);
      }
      barrier_arrive(stream.empty + 8 * stage.stage);
      stage.next(stream.p.stages);
    }
    sums.total(by, y);
  }
};

// Other formats and bf16: every column of operand B is the row, or, of two parts, every second one a part.
template <class Format_> struct PartProducts {
  using Format = Format_;
  using Stream = WeightStream<Format>;
  static constexpr uint32_t AHEAD = Format::AHEAD;
  using Products = StreamedProducts<Format, 1>;
  using Row = PartRow<Products::X_SUMS>;
  using Staging = BlockStaging<Row>;

  static __device__ __forceinline__ void multiply(const Stream& stream, const Row& row, uint32_t i, uint32_t warp, float,
                                                  StageState& stage, float (&y)[2]) {
    const uint32_t part = threadIdx.x % WARP / 4 % row.parts;
    const uint32_t x[1] = {shared_address(row.part(0, part))}, x_sums[1] = {shared_address(row.sums())};
    typename Products::Sums sums;
    Products::multiply(stream, i, warp, x, x_sums, stage, sums);
#pragma unroll
    for (int i = 0; i < 2; ++i) y[i] = sums[0][2 * i] + (row.parts == 2 ? sums[0][2 * i + 1] : 0.f);
  }
};

#endif

}  // namespace fused
