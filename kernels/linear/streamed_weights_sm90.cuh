// The weight formats of the kernels for few rows of x on Hopper: how a stage of the pipeline has them (`Planes`), how
// operands A are made of them and where those meet x (`Stage`, gemm_wna16_stages.cuh), and how a lane reads what it has of
// K block s of a warp's two (`read`). `AHEAD`: stages that are on their way at once, as measured on an H100 (4096 x 14336
// in INT4: 12.7 us, 13.1 with twice as many).
#pragma once

#include "linear/gemm_wna16_stages.cuh"
#include "linear/weight_stream_sm90.cuh"

namespace fused {

template <int GROUPS, bool ZEROS> struct StreamedInt4;
struct StreamedNvfp4;
struct StreamedNf4;
template <int GROUPS> struct StreamedFp8;
struct StreamedInt8;
struct StreamedTernary;
template <class Blocks> struct StreamedGguf;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// What a lane reads of the scales of its two rows ahead of a stage: those of FP8's blocks, for the K blocks that it takes
// next.
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

// What formats have unless they say otherwise.
struct StreamedFormat {
  using BlockScales = NoBlockScales;
  static constexpr uint32_t AHEAD = 2;
  static constexpr bool ROW_SCALES = false;  // an f32 scale for each row, whose bits `row_scale` takes
  static __device__ __forceinline__ float row_scale(uint32_t bits) { return __uint_as_float(bits); }
};

// A lane's codes of 4 bits of a row and a K block.
__device__ __forceinline__ Int4Weights<ONE_GROUP>::Piece read_words(const char* codes) {
  const uint4 v = *reinterpret_cast<const uint4*>(codes + 16 * (threadIdx.x % WARP));
  return {{v.x, v.y, v.z, v.w}};
}
constexpr uint32_t WORD_CODES = ROW_GROUP * K_BLOCK / 2;  // bytes of 8 rows and a K block

// With GROUPS groups in a K block.
template <int GROUPS, bool ZEROS> struct StreamedInt4 : StreamedFormat {
  using Planes = CodePlanes<WORD_CODES, ROW_GROUP * GROUPS * sizeof(__half), ZEROS ? ROW_GROUP * GROUPS : 0>;
  using Stage = Int4Stage<Int4Weights<GROUPS, ZEROS>>;

  static __device__ __forceinline__ typename Stage::Block read(const typename Planes::WarpStage& at,
                                                               const NoBlockScales&, int s) {
    const uint32_t row = threadIdx.x % WARP / 4;
    typename Stage::Block block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto piece = read_words(at.template at<0>(i, s));
      for (int e = 0; e < 4; ++e) block.pieces[i].words[e] = piece.words[e];
      auto& scales = block.scales[i];
      const char* by = at.template at<1>(i, s) + row * GROUPS * sizeof(__half);
      if constexpr (GROUPS == 1) scales.by[0] = *reinterpret_cast<const uint16_t*>(by);
      if constexpr (GROUPS == 2) scales.by[0] = *reinterpret_cast<const uint32_t*>(by);
      if constexpr (GROUPS == 4) {
        const uint2 both = *reinterpret_cast<const uint2*>(by);
        scales.by[0] = both.x, scales.by[1] = both.y;
      }
      if constexpr (ZEROS) {
        const char* zeros = at.template at<2>(i, s) + row * GROUPS;
        if constexpr (GROUPS == 1) scales.zeros = *reinterpret_cast<const uint8_t*>(zeros);
        if constexpr (GROUPS == 2) scales.zeros = *reinterpret_cast<const uint16_t*>(zeros);
        if constexpr (GROUPS == 4) scales.zeros = *reinterpret_cast<const uint32_t*>(zeros);
      }
    }
    return block;
  }
};

struct StreamedNvfp4 : StreamedFormat {
  using Planes = CodePlanes<WORD_CODES, 0, ROW_GROUP * Nvfp4::SCALES>;
  using Stage = Nvfp4Stage;
  static constexpr bool ROW_SCALES = true;
  static __device__ __forceinline__ float row_scale(uint32_t bits) { return NVFP4_UNIT * __uint_as_float(bits); }

  static __device__ __forceinline__ Stage::Block read(const Planes::WarpStage& at, const NoBlockScales&, int s) {
    const uint32_t lane = threadIdx.x % WARP, half = lane % 4 / 2 * 4;
    Stage::Block block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      block.pieces[i] = read_words(at.template at<0>(i, s));
      block.scales[i].by = *reinterpret_cast<const uint32_t*>(at.template at<2>(i, s) + lane / 4 * Nvfp4::SCALES + half);
    }
    return block;
  }
};

struct StreamedNf4 : StreamedFormat {
  using Planes = CodePlanes<WORD_CODES, ROW_GROUP * Nf4::SCALES>;
  using Stage = Nf4Stage;

  static __device__ __forceinline__ Stage::Block read(const Planes::WarpStage& at, const NoBlockScales&, int s) {
    Stage::Block block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      block.pieces[i] = read_words(at.template at<0>(i, s));
      block.scales[i].by = *reinterpret_cast<const uint2*>(at.template at<1>(i, s) + threadIdx.x % WARP / 4 * Nf4::SCALES);
    }
    return block;
  }
};

template <int GROUPS> struct StreamedFp8 : StreamedFormat {
  using Planes = CodePlanes<ROW_GROUP * K_BLOCK>;
  using Stage = ByteStage<Fp8Weights<GROUPS>>;
  using BlockScales = typename std::conditional<GROUPS == FP8_BLOCKS, Fp8BlockScales, NoBlockScales>::type;
  static constexpr bool ROW_SCALES = GROUPS == FP8_ROWS;
  static __device__ __forceinline__ float row_scale(uint32_t bits) { return nan_if_negative(bits); }

  static __device__ __forceinline__ typename Stage::Block read(const typename Planes::WarpStage& at,
                                                               const BlockScales& of_blocks, int s) {
    const uint32_t row = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
    typename Stage::Block block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int q = 0; q < 2; ++q)
        block.pieces[i].words[q] =
            *reinterpret_cast<const uint4*>(at.template at<0>(i, s) + row * K_BLOCK + 64 * q + 16 * t);
      if constexpr (GROUPS == FP8_BLOCKS) block.scales[i].by = of_blocks.by[s][i];
    }
    return block;
  }
};

struct StreamedInt8 : StreamedFormat {
  using Planes = Int8Planes;
  using Stage = ByteStage<Int8Weights>;
  static constexpr bool ROW_SCALES = true;

  static __device__ __forceinline__ Stage::Block read(const Planes::WarpStage& at, const NoBlockScales&, int s) {
    Stage::Block block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int q = 0; q < 2; ++q) block.pieces[i].words[q] = at.codes(i, s, q);
    }
    return block;
  }
};

// With a scale for each row.
struct StreamedTernary : StreamedFormat {
  using Planes = CodePlanes<ROW_GROUP * K_BLOCK / 4>;
  using Stage = TernaryStage;
  static constexpr uint32_t AHEAD = 4;
  static constexpr bool ROW_SCALES = true;

  static __device__ __forceinline__ Stage::Block read(const Planes::WarpStage& at, const NoBlockScales&, int s) {
    Stage::Block block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 v = *reinterpret_cast<const uint2*>(at.template at<0>(i, s) + 8 * (threadIdx.x % WARP));
      block.pieces[i].words[0] = v.x, block.pieces[i].words[1] = v.y;
    }
    return block;
  }
};

template <class Blocks> struct StreamedGguf : StreamedFormat {
  using Planes = GgufPlanes<Blocks>;
  using Stage = GgufStage<Blocks>;

  static __device__ __forceinline__ typename Stage::Block read(const typename Planes::WarpStage& at,
                                                               const NoBlockScales&, int s) {
    const uint32_t lane = threadIdx.x % WARP;
    typename Stage::Block block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      auto& piece = block.pieces[i];
      load_shared_words<Blocks::LOW>(shared_address(at.template at<0>(i, s)) + Blocks::LOW * lane, piece.low);
      piece.high[0] = 0;
      load_shared_words<Blocks::HIGH>(shared_address(at.template at<1>(i, s)) + Blocks::HIGH * lane, piece.high);
      // Both K blocks of a warp have one scale in the K formats.
      const uint32_t scale = shared_address(at.template at<2>(i, Blocks::IS_SUPER ? 0 : s)) +
                             (Blocks::IS_SUPER ? lane / GROUP : lane) * Blocks::SCALE;
      piece.scale = Blocks::SCALE == 4 ? load_shared_u32(scale) : load_shared_u16(scale);
      piece.factors = 0;
      if constexpr (Blocks::IS_SUPER) piece.factors = load_shared_u16(shared_address(at.template at<3>(i, s)) + 2 * lane);
    }
    return block;
  }
};

// Two bf16 parts of a sum of x, each twice: as operand B has them.
__device__ __forceinline__ uint2 both_parts(float sum) {
  const uint32_t parts = split(sum);
  return make_uint2(__byte_perm(parts, 0, 0x1010), __byte_perm(parts, 0, 0x3232));
}
// The sum of 8 bf16 values of each of LANES lanes side by side.
template <int LANES> __device__ __forceinline__ float sum_of_packs(uint4 pack) {
  float v[8];
  unpack8<__nv_bfloat16>(pack, v);
  float sum = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(FULL, sum, offset);
  return sum;
}

// The products of an N tile with a warp's part of K, and M_TILES tiles of 8 rows of operand B.
template <class Format, int M_TILES> struct StreamedProducts {
  using Stream = WeightStream<Format>;
  using Stage = typename Format::Stage;
  using Weights = typename Stage::Weights;
  static constexpr bool BY_GROUPS = !Weights::CHANNEL_SCALES;
  // Groups of a K block, and how many products of 16 values of K a group has.
  static constexpr int GROUPS = BY_GROUPS ? Weights::GROUPS : 1, LENGTH = 8 / GROUPS;
  // Sets of sums of a group, or, without groups, of each of a warp's K blocks: a product that adds to the sums of another
  // waits for it.
  static constexpr int SETS = M_TILES == 1 && LENGTH > 1 ? 2 : 1;
  // Sums of x that meet the offsets of a block of 32 weights.
  static constexpr int X_SUMS = !Weights::HAS_OFFSET ? 0 : GROUPS == 8 ? 2 : 1;
  using Sums = float[M_TILES][4];

  // Adds the offsets of a K block times sums of x. That of block t is values 2t and 2t + 1 of k, in two parts that meet the
  // first part of the block's sum, and so are values 2t + 8 and 2t + 9, which meet the second part.
  static __device__ __forceinline__ void add_offsets(const typename Stage::Block& block, const uint32_t (&x_sums)[M_TILES],
                                                     uint32_t k_block, Sums& y) {
#pragma unroll
    for (int h = 0; h < X_SUMS; ++h) {
      const uint32_t first = split(Weights::offset(block, 0, h)), second = split(Weights::offset(block, 1, h));
#pragma unroll
      for (int n = 0; n < M_TILES; ++n) {
        const uint2 v = load_shared_u64(x_sums[n] + 8 * ((4 * k_block + threadIdx.x % 4) * X_SUMS + h));
        mma_bf16(y[n], first, second, first, second, v.x, v.y);
      }
    }
  }

  // Adds the products of K blocks `k_block` and, with N = 2, the one after it.
  template <int N>
  static __device__ __forceinline__ void add(const Gemv& p, const typename Stream::WarpStage& at,
                                             const typename Format::BlockScales& of_blocks, uint32_t k_block,
                                             const uint32_t (&x)[M_TILES], const uint32_t (&x_sums)[M_TILES],
                                             Sums (&y)[CHUNK][SETS]) {
    typename Stage::Block blocks[N];
#pragma unroll
    for (int s = 0; s < N; ++s) blocks[s] = Format::read(at, of_blocks, s);
    Sums of_group[N][SETS] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int s = 0; s < N; ++s) {
        const WeightFragment a = Weights::raw(blocks[s], p, e);
        uint4 v[M_TILES];
#pragma unroll
        for (int n = 0; n < M_TILES; ++n) v[n] = Stage::x(x[n] + (k_block + s) * (2 * K_BLOCK), e, threadIdx.x % 4);
        Sums(&to)[SETS] = BY_GROUPS ? of_group[s] : y[s];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t* const of_half = a.v + 4 * h;
#pragma unroll
          for (int n = 0; n < M_TILES; ++n)
            mma_bf16(to[h % SETS][n], of_half[0], of_half[1], of_half[2], of_half[3], h == 0 ? v[n].x : v[n].z,
                     h == 0 ? v[n].y : v[n].w);
          if (BY_GROUPS && (2 * e + h + 1) % LENGTH == 0)
            end_group(Weights::group(blocks[s], p, (2 * e + h) / LENGTH), of_group[s], y[0][0]);
        }
      }
    }
    if constexpr (Weights::HAS_OFFSET) {
#pragma unroll
      for (int s = 0; s < N; ++s) add_offsets(blocks[s], x_sums, k_block + s, y[0][0]);
    }
  }

  // Adds the scaled sums of a group, which are zero then.
  static __device__ __forceinline__ void end_group(const GroupScale& scale, Sums (&of_group)[SETS], Sums& y) {
#pragma unroll
    for (int n = 0; n < M_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float sum = of_group[0][n][i];
        if constexpr (SETS == 2) sum += of_group[1][n][i];
        y[n][i] = fmaf(scale.by[i / 2], sum, y[n][i]);
#pragma unroll
        for (int set = 0; set < SETS; ++set) of_group[set][n][i] = 0.f;
      }
    }
  }

  // The sums of N tile `i`, without the scales of rows. `x` and `x_sums`: where the lane's rows of operand B and of their
  // sums begin in shared memory.
  static __device__ __forceinline__ void multiply(const Stream& stream, uint32_t i, uint32_t warp,
                                                  const uint32_t (&x)[M_TILES], const uint32_t (&x_sums)[M_TILES],
                                                  StageState& stage, Sums& y) {
    const Gemv& p = stream.p;
    const uint32_t lane = threadIdx.x % WARP, first = stream.share.first_k_block;
    typename Format::BlockScales of_blocks(p, stream.weight_row(i, lane / 4), stream.weight_row(i, lane / 4 + ROW_GROUP));
    Sums parts[CHUNK][SETS] = {};
#pragma unroll 1
    for (uint32_t k_block = CHUNK * warp; k_block < stream.stages_of_row * STAGE_K_BLOCKS; k_block += STAGE_K_BLOCKS) {
      const auto at = stream.of_warp(stage.stage, warp);
      of_blocks.load(first + k_block, first + stream.k_blocks);
      barrier_wait(stream.full + 8 * stage.stage, stage.phase);
      if (k_block + CHUNK <= stream.k_blocks) {
        add<CHUNK>(p, at, of_blocks, k_block, x, x_sums, parts);
      } else if (k_block < stream.k_blocks) {
        add<1>(p, at, of_blocks, k_block, x, x_sums, parts);
      }
      // Every lane arrives: no slower than one for all, and racecheck understands it.
      barrier_arrive(stream.empty + 8 * stage.stage);
      stage.next(p.stages);
    }
#pragma unroll
    for (int n = 0; n < M_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y[n][i] = 0.f;
#pragma unroll
        for (int s = 0; s < CHUNK; ++s) {
#pragma unroll
          for (int set = 0; set < SETS; ++set) y[n][i] += parts[s][set][n][i];
        }
      }
    }
  }
};

#endif

}  // namespace fused
