// GEMM for up to 64 rows of bf16 x and packed INT8 or INT4 weights (formats/packed.cuh): y = act(x W^T + bias) +
// residuals. As in Marlin (Frantar et al. 2024) weights lie in memory in the order of `mma`'s operands, go from there
// to registers, and are dequantized to bf16, which holds them exactly; the sums of a group are scaled in f32.
//
// An N tile is 16 output channels. A CTA has `cta_n_tiles` of them side by side, and `split_k` warps share the K of
// each: of every K tile a warp takes one K block of 128 values, whose weights are prefetched two K tiles ahead. The K
// tile's part of x, for all warps of the CTA, is copied to a stage in shared memory meanwhile (`cp.async`, two K
// tiles ahead); if there are stages for all of K, x stays there for the CTA's next N tiles.
//
// Lane 4 g + t has rows g and g + 8 of its warp's N tile, and ends up with their sums for rows 2t and 2t + 1 of each
// eight rows of x.
#pragma once

#include "linear/gemv_wna16.cuh"

namespace fused {

template <class Format> struct GemmM64 {
  static constexpr int DEPTH = 1, AHEAD = 2;             // K blocks of a warp in a K tile, K tiles
  static constexpr int ROWS = M64_ROWS, M_TILES = ROWS / 8;  // of x at most
  using Scales = TileScales<Format::GROUPS, Format::ZEROS, DEPTH>;

  const Gemv& p;
  const uint32_t cta_n_tiles, stages, k_tiles;
  const uint32_t part, place;   // of the warp's N tile, and its N tile among the block's
  const uint32_t n_tiles, k_blocks;
  const uint32_t tile_k_blocks, pitch;   // K blocks of a K tile, bytes of a row of x in it
  const uint32_t total;         // K tiles of all N tiles that this block takes one after the other
  const uint32_t shared;

  static __device__ uint32_t lane() { return threadIdx.x % WARP; }

  __device__ GemmM64(const GemmM64Params& t, uint32_t shared)
      : p(t.product), cta_n_tiles(t.cta_n_tiles), stages(t.stages), k_tiles(t.k_tiles),
        part(threadIdx.x / WARP / t.cta_n_tiles), place(threadIdx.x / WARP % t.cta_n_tiles),
        n_tiles((p.width + n_tile_outputs(p) - 1) / n_tile_outputs(p)), k_blocks(k_blocks_of(p.k)),
        tile_k_blocks(p.split_k * DEPTH), pitch(tile_k_blocks * (2 * K_BLOCK) + Format::XRows::PAD),
        total(rounds() * t.k_tiles), shared(shared) {}

  // N tiles are dealt out in turns, `cta_n_tiles` to a block.
  __device__ uint32_t rounds() const {
    const uint32_t sets = (n_tiles + cta_n_tiles - 1) / cta_n_tiles;
    return blockIdx.x < sets ? (sets - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  }
  __device__ uint32_t n_tile_of(uint32_t round) const { return (blockIdx.x + round * gridDim.x) * cta_n_tiles + place; }
  // The warp's first K block of a K tile.
  __device__ uint32_t first_k_block(uint32_t k_tile) const { return k_tile * tile_k_blocks + part * DEPTH; }

  struct Weights {
    typename Format::Piece pieces[DEPTH][2];
    Scales scales[2];
  };

  // K tile `at` of all that the block takes.
  __device__ __forceinline__ void prefetch(Weights& w, uint32_t at) const {
    if (at >= total) return;
    const uint32_t n_tile = n_tile_of(at / k_tiles), k_block = first_k_block(at % k_tiles);
    if (n_tile >= n_tiles) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const PackedRow row = PackedRow::of<Format>(p, n_tile_row(p, n_tile, lane() / 4 + 8 * i), lane() % 4);
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        if (k_block + d < k_blocks) Format::load(w.pieces[d][i], row.codes, p.k, k_block + d, lane() % 4);
      }
      w.scales[i].prefetch(p, row, k_block, k_blocks, lane() % 4);
    }
  }

  __device__ __forceinline__ uint32_t stage(uint32_t at) const { return shared + (at % stages) * (ROWS * pitch); }

  // All threads: issues the copies of a K tile of x, zeros past its end.
  __device__ __forceinline__ void copy(uint32_t at) const {
    // The block's later N tiles find it there.
    const bool stays = stages == k_tiles;
    if (at < total && !(stays && at >= k_tiles)) {
      const uint32_t chunks = tile_k_blocks * (K_BLOCK / 8), first = at % k_tiles * chunks;
      const char* x = static_cast<const char*>(p.prologue.x);
      for (uint32_t i = threadIdx.x; i < ROWS * chunks; i += blockDim.x) {
        const uint32_t row = i / chunks, chunk = i % chunks, value = 8 * (first + chunk);
        const bool valid = row < p.m && value < p.k;
        const uint64_t from = valid ? uint64_t(row) * p.k + value : 0;
        copy_async(stage(at) + row * pitch + 16 * chunk, x + 2 * from, valid);
      }
    }
    commit_copies();
  }

  __device__ __forceinline__ void multiply(const Weights& w, uint32_t at, float (&sums)[M_TILES][4]) const {
    const uint32_t k_block = first_k_block(at % k_tiles), g = lane() / 4, t = lane() % 4;
    const uint32_t x = stage(at) + g * pitch + part * (DEPTH * 2 * K_BLOCK);
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      if (k_block + d >= k_blocks) break;
      float c[M_TILES][4] = {};
      uint32_t zeros[2] = {};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (Scales::begins(p, e)) zeros[0] = w.scales[0].zero(p, d, e), zeros[1] = w.scales[1].zero(p, d, e);
        const auto a = Format::operands(w.pieces[d][0], w.pieces[d][1], e, zeros);
#pragma unroll
        for (int n = 0; n < M_TILES; ++n) {
          const uint4 v = load_shared(x + n * 8 * pitch + 2 * (d * K_BLOCK + Format::value(e, t)));
          mma_both(c[n], a, v);
        }
        if (!Scales::ends(p, e)) continue;
        const float by[2] = {w.scales[0].scale(p, d, e), w.scales[1].scale(p, d, e)};
#pragma unroll
        for (int n = 0; n < M_TILES; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[n][i] = fmaf(by[i / 2], c[n][i], sums[n][i]), c[n][i] = 0.f;
        }
      }
    }
  }

  // Sums of row r of an N tile and row m of x from one warp.
  __device__ __forceinline__ uint32_t sum_at(uint32_t warp, uint32_t r, uint32_t m) const {
    const uint32_t lane = 4 * (r % 8) + m % 8 / 2;
    return ((warp * M_TILES + m / 8) * 4 + 2 * (r / 8) + m % 2) * WARP + lane;
  }
  // Output r of an N tile of the block's, of those that begin with N tile `first`, before activation.
  __device__ __forceinline__ float total_of(const float* parts, uint32_t first, uint32_t n_tile, uint32_t r,
                                            uint32_t m) const {
    const Epilogue& e = p.epilogue;
    float y = 0.f;
    for (uint32_t other = 0; other < p.split_k; ++other) y += parts[sum_at(other * cta_n_tiles + n_tile, r, m)];
    if (e.bias) y += widen_raw(read_raw(e.bias, e.dtype, n_tile_row(p, first + n_tile, r)), e.dtype);
    return y;
  }

  // All threads: the sums of the warps that share N tiles, added in their order, become outputs. No
  // thread returns here before a barrier of the next N tiles' K tiles.
  __device__ __forceinline__ void epilogue(uint32_t first, const float (&sums)[M_TILES][4], float* parts) const {
    const uint32_t warp = threadIdx.x / WARP;
#pragma unroll
    for (int n = 0; n < M_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) parts[((warp * M_TILES + n) * 4 + i) * WARP + lane()] = sums[n][i];
    }
    __syncthreads();
    const Epilogue& e = p.epilogue;
    const uint32_t of_n_tile = n_tile_outputs(p), wide = cta_n_tiles * of_n_tile;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < wide * p.m; i += blockDim.x) {
      const uint32_t m = i / wide, n_tile = i % wide / of_n_tile, r = i % of_n_tile, c = first * of_n_tile + i % wide;
      if (c >= p.width) continue;
      float y = total_of(parts, first, n_tile, r, m);
      if (gates(p)) {
        y = silu(y) * total_of(parts, first, n_tile, r + 8, m);
      } else {
        y = activate(e.activation, y);
      }
      Addends of;
      of.load_residuals(e, m, c);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (e.residuals[j]) y += widen_raw(of.residuals[j], e.dtype);
      }
      write(e.out, e.out_dtype, m * e.stride + c, y);
    }
  }

  __device__ __forceinline__ void run(float* parts) const {
    Weights w[2] = {};
    pdl_launch();
    prefetch(w[0], 0);
    prefetch(w[1], 1);
    pdl_wait();
    for (int i = 0; i < AHEAD; ++i) copy(i);
    float sums[M_TILES][4] = {};
#pragma unroll 1
    for (uint32_t at = 0; at < total; ++at) {
      // K tile `at` of x has come, and all warps are done with the stage that the next copy goes to.
      await_copies_but<AHEAD - 1>();
      __syncthreads();
      copy(at + AHEAD);
      if (at % 2 == 0) {
        multiply(w[0], at, sums);
        prefetch(w[0], at + 2);
      } else {
        multiply(w[1], at, sums);
        prefetch(w[1], at + 2);
      }
      if ((at + 1) % k_tiles > 0) continue;
      epilogue(n_tile_of(at / k_tiles) - place, sums, parts);
#pragma unroll
      for (int n = 0; n < M_TILES; ++n) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.f;
    }
  }
};

// Dynamic shared memory holds the sums of the warps that share N tiles, then the stages of x.
template <class Format> __device__ __forceinline__ void gemm_m64(const GemmM64Params& t) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  extern __shared__ float4 dynamic_shared[];
  const uint32_t parts = t.product.split_k * t.cta_n_tiles * (GemmM64<Format>::M_TILES * 4 * WARP * 4);
  const uint32_t base = shared_address(dynamic_shared);
  GemmM64<Format>(t, base + parts).run(reinterpret_cast<float*>(dynamic_shared));
#endif
}

}  // namespace fused

// `NAME`: a kernel for 64 rows of x and at most 8 warps.
#define FUSED_GEMM_M64(NAME, FORMAT)                               \
  extern "C" __global__ void __launch_bounds__(8 * fused::WARP, 1) \
      NAME(const __grid_constant__ fused::GemmM64Params p) {       \
    fused::gemm_m64<FORMAT>(p);                                    \
  }
