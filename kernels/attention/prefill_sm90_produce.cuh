// The loading half of attention on Hopper: how a block is made up, its barriers, which rows it takes when, and the
// producer that brings their keys and values.
#pragma once

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "attention/prefill.cuh"
#include "common/tma.cuh"

namespace fused {

// How a block is made up: warpgroups that multiply, keys of a tile, and whether they share the keys
// out. A warpgroup has 64 rows. Either all have the same rows, and each every CONSUMERS-th tile: a
// lane to itself. Or each has its own rows, and all go along one lane, taking turns. STAGES tiles of
// keys, and of values, are in flight in a lane.
template <int D_, int CONSUMERS_, int KEYS_, bool SHARE_, Batch BATCH_> struct Config {
  static constexpr int D = D_, CONSUMERS = CONSUMERS_, KEYS = KEYS_, STAGES = 2;
  static constexpr bool SHARE = SHARE_, TURNS = !SHARE;
  static constexpr Batch BATCH = BATCH_;
  // Whether sequences have lengths of their own.
  static constexpr bool VARLEN = BATCH != Batch::DENSE;
  static constexpr int LANES = SHARE ? CONSUMERS : 1;
  static constexpr int ROWS = SHARE ? 64 : 64 * CONSUMERS;
  static constexpr int THREADS = 128 * (CONSUMERS + 1);
  // Threads that load. Pages are copied one by one, by the lanes of a warp.
  static constexpr int PRODUCERS = BATCH == Batch::PAGED ? WARP : 1;
  // Of a thread, out of the 168 or 128 that each has at the launch.
  static constexpr int PRODUCER_REGISTERS = CONSUMERS > 2 ? 32 : PRODUCERS > 1 ? 40 : 24;
  static constexpr int REGISTERS = ((CONSUMERS == 2 ? 504 : 512) - PRODUCER_REGISTERS) / CONSUMERS;
  // Elements of a piece of a row: as many as a swizzle of up to 128 bytes divides D into.
  static constexpr int PIECE = D % 64 == 0 ? 64 : D % 32 == 0 ? 32 : 16;
  static constexpr int SWIZZLE = 2 * PIECE;
  // Where keys and values of a tile lie: bytes from a piece of a row to its next, and from 8 rows to the next 8. A piece
  // of all rows is together; or, of rows that come page by page, 8 rows with all their pieces, as one copy leaves them.
  static constexpr int PIECE_BYTES = BATCH == Batch::PAGED ? 8 * SWIZZLE : KEYS * SWIZZLE;
  static constexpr int GROUP_BYTES = BATCH == Batch::PAGED ? 8 * 2 * D : 8 * SWIZZLE;
  static constexpr int Q_BYTES = ROWS * D * 2;
  static constexpr int TILE_BYTES = KEYS * D * 2;
};

// The barriers of a block, 8 bytes each; `slot` is a lane's stage.
template <int SLOTS> struct Barriers {
  uint32_t base;
  __device__ uint32_t q_full() const { return base; }
  __device__ uint32_t q_free() const { return base + 8; }
  __device__ uint32_t k_full(int slot) const { return base + 16 + 8 * slot; }
  __device__ uint32_t k_free(int slot) const { return base + 16 + 8 * (SLOTS + slot); }
  __device__ uint32_t v_full(int slot) const { return base + 16 + 8 * (2 * SLOTS + slot); }
  __device__ uint32_t v_free(int slot) const { return base + 16 + 8 * (3 * SLOTS + slot); }
};

// A block's pieces of work, one after the other: rows of one head. Heads are taken in sections
// whose keys and values stay in L2, rows by length, longest first; blocks take them to and fro, so
// that all have about the same to do. A section's last round may have no work for some. Of a ragged batch, each
// sequence has the tiles of the longest one, and those that it has not are passed over.
template <typename C> struct Work {
  int turn = 0;  // of this block
  int batch, head, first_row, tiles;

  __device__ __forceinline__ Sequence of(const AttentionSm90Params& p) const {
    if constexpr (C::VARLEN) return ragged;
    return sequence<Batch::DENSE>(p, batch);
  }

  // The next one whose last row, which sees the most keys, sees some; or, if not `KEYS`, none.
  template <bool KEYS = true> __device__ __forceinline__ bool next(const AttentionSm90Params& p) {
    const int grid = gridDim.x, rounds = (p.section * p.tiles + grid - 1) / grid;
    for (;; ++turn) {
      const int start = turn / rounds * p.section, columns = min(p.section, p.columns - start);
      if (columns <= 0) return false;
      const int block = turn % 2 ? grid - 1 - blockIdx.x : blockIdx.x;
      const int index = turn % rounds * grid + block;
      if (index >= columns * p.tiles) continue;
      const int column = start + index % columns;
      batch = column / p.heads;
      head = column % p.heads;
      first_row = (p.tiles - 1 - index / columns) * C::ROWS;
      const Sequence of = sequence<C::BATCH>(p, batch);
      if constexpr (C::VARLEN) {
        if (first_row >= of.queries) continue;
        ragged = of;
      }
      const int last = min(first_row + C::ROWS, of.queries) - 1;
      const int keys = p.causal ? of.keys - of.queries + last + 1 : of.keys;
      if (C::VARLEN && keys > 0 != KEYS) continue;
      tiles = (keys + C::KEYS - 1) / C::KEYS;
      ++turn;
      return true;
    }
  }

 private:
  Sequence ragged;
};

// Rows of a page, in groups of 8, with the pieces of a head: from piece `piece` of the rows and group `group` on.
__device__ __forceinline__ void bulk_copy_page(uint32_t to, const TensorMap& map, uint32_t barrier, int piece, int group,
                                               int page) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(0), "r"(piece), "r"(group), "r"(page)
      : "memory");
}

// The copies of a tile's keys or values that begin with key `first` of a sequence, page by page. Each lane of a warp
// copies a page: 40 ns on an H200, however few rows and pieces it has. The constructor requests the page's entry of the
// table, and `issue` uses it: what is waited for between the two overlaps with that. A page that the pool has not comes as
// zeros.
template <typename C> struct PageCopies {
  static_assert(C::KEYS / 8 <= WARP, "pages have 8 tokens or more");
  const KeyPages& pages;
  const int lane, count, token;  // of the warp; of the tile; this lane's first
  uint32_t entry;

  __device__ __forceinline__ PageCopies(const KeyPages& pages, const Sequence& of, int first)
      : pages(pages), lane(threadIdx.x), count((min(C::KEYS, of.keys - first) + pages.piece - 1) / pages.piece),
        token(first + lane * pages.piece), entry(0) {
    if (lane < count) entry = of.pages[token >> pages.page_bits];
  }

  // The head begins with piece `piece` of the rows.
  __device__ __forceinline__ void issue(const TensorMap& map, uint32_t to, uint32_t barrier, int piece) const {
    const int bytes = pages.piece * 2 * C::D;
    if (lane == 0) barrier_expect(barrier, count * bytes);
    __syncwarp();
    if (lane >= count) return;
    const int group = (token & (pages.page - 1)) / 8;
    bulk_copy_page(to + lane * bytes, map, barrier, piece, group, min(entry, pages.pages));
  }
};

template <typename C>
__device__ __forceinline__ void produce(const AttentionSm90Params& p, Barriers<C::LANES * C::STAGES> barriers,
                                        uint32_t q, uint32_t k, uint32_t v) {
  Work<C> work;
  const int group = p.heads / p.kv_heads;
  int before = 0;  // tiles of earlier work, of which there is none where keys are shared
  for (int n = 0; work.next(p); ++n) {
    const Sequence of = work.of(p);
    const int kv_head = work.head / group;
    // The i-th tile, counted from the last.
    const auto fetch_tile = [&](int i, const TensorMap& map, int head_pieces, uint32_t to, uint32_t full, uint32_t free) {
      const int count = before + i / C::LANES, slot = i % C::LANES * C::STAGES + count % C::STAGES;
      const int token = (work.tiles - 1 - i) * C::KEYS;
      const auto wait = [&] { barrier_wait(free + 8 * slot, count / C::STAGES % 2 ^ 1); };
      if constexpr (C::BATCH == Batch::PAGED) {
        const PageCopies<C> copies(p.pages, of, token);
        wait();
        return copies.issue(map, to + slot * C::TILE_BYTES, full + 8 * slot, kv_head * head_pieces);
      }
      wait();
      barrier_expect(full + 8 * slot, C::TILE_BYTES);
      bulk_copy(to + slot * C::TILE_BYTES, map, full + 8 * slot, of.first_key + token,
                kv_head, C::VARLEN ? 0 : work.batch);
    };
    const auto fetch_k = [&](int i) { fetch_tile(i, p.k, p.k_head_pieces, k, barriers.k_full(0), barriers.k_free(0)); };
    const auto fetch_v = [&](int i) { fetch_tile(i, p.v, p.v_head_pieces, v, barriers.v_full(0), barriers.v_free(0)); };
    barrier_wait(barriers.q_free(), n % 2 ^ 1);
    if (threadIdx.x == 0) {
      barrier_expect(barriers.q_full(), C::Q_BYTES);
      bulk_copy(q, p.q, barriers.q_full(), of.first_query + work.first_row, work.head, C::VARLEN ? 0 : work.batch);
    }
#pragma unroll 1
    for (int i = 0; i < work.tiles + C::LANES; ++i) {
      if (i < work.tiles) fetch_k(i);
      if (i >= C::LANES) fetch_v(i - C::LANES);
    }
    before += work.tiles;
  }
}

}  // namespace fused

#endif
