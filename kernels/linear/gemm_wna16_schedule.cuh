// Which blocks of K of which tiles a CTA of gemm_wna16_sm90.cuh multiplies, and how several CTAs add up a tile's sums
// through memory.
//
// Stream-K (Osama et al., 2023): where whole tiles would leave multiprocessors idle in the last round, clusters have
// equal shares of all K blocks of all tiles, side by side. A share that ends within a tile begins with that part, and
// leaves its sums in memory; the cluster that has the tile's last K blocks comes to them at the end, adds the sums that
// clusters before it have left, and writes the outputs. So a cluster waits only for those before it.
#pragma once

#include "linear/gemv_wna16.cuh"

namespace fused {

// A tile's sizes, and the CTA's.
template <int TOKENS> struct GemmShape {
  static constexpr int WARPS = 8, CONSUMERS = WARPS * WARP;
  // Whether a warpgroup of its own brings x; where there are few tokens a consumer does that beside its products, and
  // two blocks of a multiprocessor have more registers.
  static constexpr bool PRODUCER = TOKENS > GEMM_WNA16_SMALL_TOKENS;
  static constexpr int THREADS = CONSUMERS + (PRODUCER ? 128 : 0);
  // Of a thread. A CTA with a producer is launched with 168 for each of its 384 threads: with more in all, `setmaxnreg`
  // waits for ever.
  static_assert(!PRODUCER || THREADS == 384);
  static constexpr int PRODUCER_REGISTERS = TOKENS == 256 ? 24 : 40, CONSUMER_REGISTERS = (3 * 168 - PRODUCER_REGISTERS) / 2;
  static constexpr int CHANNELS = GEMM_WNA16_CHANNELS;
  static_assert(CHANNELS == 16 * WARPS);
  static constexpr int STAGES = TOKENS >= 192 ? 3 : TOKENS >= 64 ? 4 : 6;
  // Whether groups are scaled as sums, which there are fewer of than weights.
  static constexpr bool SCALES_SUMS = TOKENS <= GEMM_WNA16_SUMS_TOKENS;
  static constexpr int BLOCKS = PRODUCER ? 1 : 2;     // of an SM
  static constexpr uint32_t HALF = TOKENS * 128;      // 64 values of K
  static constexpr uint32_t STAGE = 2 * HALF;
  static constexpr uint32_t PITCH = CHANNELS + 4;     // f32 of a token's sums
  static constexpr uint32_t X_SUMS = SCALES_SUMS ? TOKENS * 16 : 0;  // of each 32 values of K, of a stage
  // Tokens whose sums lie behind the stages on their way to memory, where a CTA has several tiles.
  static constexpr int STAGED_TOKENS = GEMM_WNA16_STAGED_TOKENS;
};

template <int TOKENS> struct GemmSchedule {
  using Shape = GemmShape<TOKENS>;

  // A tile: of channels, and its first row of operand B.
  struct Place {
    uint32_t n, first_row;
  };
  // Blocks of K of a tile.
  struct Segment {
    uint32_t tile, begin, end;
  };

  const GemmWna16Params& g;
  const Gemv& p;
  const uint32_t cluster, rank;  // CTAs of the cluster, and which of them this is
  const uint32_t k_blocks;

  // Where there is a producer they are read from %tid anew: kept live, they would be spilled in the main loop.
  static __device__ uint32_t thread() { return Shape::PRODUCER ? thread_now() : threadIdx.x; }
  static __device__ uint32_t warp() { return thread() / WARP; }
  static __device__ uint32_t lane() { return thread() % WARP; }

  __device__ __forceinline__ explicit GemmSchedule(const GemmWna16Params& g)
      : g(g), p(g.product), cluster(max(g.split_k, g.sharing)), rank(blockIdx.x % cluster), k_blocks(k_blocks_of(p.k)) {}

  __device__ __forceinline__ Place place(uint32_t tile) const {
    const uint32_t n = tile / g.m_tiles;
    return {g.sharing > 1 ? n * g.sharing + rank : n, tile % g.m_tiles * TOKENS};
  }

  // The first of the blocks of K of all tiles, one tile behind the other, that cluster `c` has.
  __device__ __forceinline__ uint32_t share(uint32_t c) const {
    return (c * g.share + min(c, g.larger_shares)) * (g.partial_sums ? 1 : k_blocks);
  }
  // What the cluster takes first, and then: the last tile of its share is the first.
  __device__ __forceinline__ Segment first_segment() const {
    const uint32_t c = blockIdx.x / cluster;
    if (g.split_k > 1) return {c, k_blocks * rank / g.split_k, k_blocks * (rank + 1) / g.split_k};
    return segment_before(share(c + 1));
  }
  __device__ __forceinline__ Segment segment_before(uint32_t end) const {
    const uint32_t tile = (end - 1) / k_blocks, first = tile * k_blocks, from = share(blockIdx.x / cluster);
    return {tile, max(from, first) - first, end - first};
  }
  // Whether there is one more. `segment` becomes it.
  __device__ __forceinline__ bool advance(Segment& segment) const {
    const uint32_t end = segment.tile * k_blocks + segment.begin;
    if (g.split_k > 1 || end == share(blockIdx.x / cluster)) return false;
    segment = segment_before(end);
    return true;
  }

  // Of stream-K: where a warp leaves its sums of a segment, and its flag beside them.
  __device__ __forceinline__ float4* partial_sums(uint32_t cta) const {
    return reinterpret_cast<float4*>(g.partial_sums) + (cta * Shape::WARPS + warp()) * (TOKENS / 8 * WARP) + lane();
  }
  __device__ __forceinline__ uint32_t* flag(uint32_t cta) const { return g.flags + cta * Shape::WARPS + warp(); }

  __device__ __forceinline__ void leave_partial(const float (&sums)[TOKENS / 2]) const {
    float4* to = partial_sums(blockIdx.x);
#pragma unroll
    for (int j = 0; j < TOKENS / 8; ++j)
      __stcg(to + j * WARP, make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]));
    __syncwarp();
    if (lane() == 0) store_release(flag(blockIdx.x), 1);
  }
  // Adds what the clusters before this one have left of the tile of a segment.
  __device__ __forceinline__ void add_partials(float (&sums)[TOKENS / 2], const Segment& of) const {
    const uint32_t first = of.tile * k_blocks;
    uint32_t c = blockIdx.x / cluster;
#pragma unroll 1
    do {
      --c;
      const uint32_t cta = c * cluster + rank;
      while (load_acquire(flag(cta)) == 0) {}
      __syncwarp();
      const float4* from = partial_sums(cta);
#pragma unroll
      for (int j = 0; j < TOKENS / 8; ++j) {
        const float4 v = __ldcg(from + j * WARP);
        sums[4 * j] += v.x, sums[4 * j + 1] += v.y, sums[4 * j + 2] += v.z, sums[4 * j + 3] += v.w;
      }
    } while (share(c) > first);
  }
};

}  // namespace fused
