// A core of gemv.cuh for packed INT8, FP8, NVFP4, NF4, INT4 or ternary weights (formats/packed.cuh), by tensor cores: an N tile of
// 16 output channels and up to 4 rows of x.
//
// INT8, FP8, NVFP4 and INT4, less their zero points, are exact in bf16, and NF4's values rounded to it: operand A of `mma.m16n8k16`. Operand B is x in bf16,
// as column 2m for row m; x of other types has two bf16 parts, the second, in column 2m + 1, the rounding error of the
// first: 16 bits of precision over all of f32's range. Ternary weights become int8 for `mma.m16n8k32`, with x
// quantized to int8, a scale per row.
//
// The products of a group are summed in an accumulator of their own, which is scaled in f32.
#pragma once

#include "linear/gemv_wna16_nf4.cuh"

namespace fused {

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
