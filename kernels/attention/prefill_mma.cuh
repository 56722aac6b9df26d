// Attention over many queries by `mma.sync`, from sm_75 on: 16 rows of queries for a warp, tiles of 32 or 64 keys, an
// online softmax (FlashAttention-2, Dao 2023). Where there are too few rows to fill the GPU, groups of warps split
// the keys.
#pragma once

#include "attention/prefill.cuh"
#include "formats/kv_codes.cuh"
#include "common/mma.cuh"

namespace fused {

using Params = AttentionParams;

constexpr int MAX_THREADS = ATTENTION_MMA_MAX_WARPS * WARP;

// Sizes for head dimension D. A row of keys in shared memory is 16 bytes longer than D elements, so
// that the 8 rows of a matrix lie in different banks.
template <int D> struct Tile {
  static constexpr int KEYS = D <= 128 ? 64 : 32;
  static constexpr int ROW = D + 8;
  static constexpr int BYTES = KEYS * ROW * 2;
  // Queries stay in registers where there is room for them.
  static constexpr bool Q_SHARED = D > 128;
  static constexpr int Q_BYTES = Q_SHARED ? 16 * ROW * 2 : 0;
};

// What a block's rows are of. Made anew where it is needed, since the loop over the keys has no registers to spare.
template <Batch B> struct Block {
  Sequence of;
  int batch, kv_head, rows;

  __device__ __forceinline__ explicit Block(const Params& p)
      : of(sequence<B>(p, blockIdx.z)), batch(blockIdx.z), kv_head(blockIdx.x), rows(of.queries * p.group) {}

  __device__ __forceinline__ Place place(const Params& p, int row) const { return fused::place(p, kv_head, row); }
};

// The last rows see the most keys: they come first.
__device__ __forceinline__ int first_row_of_block(const Params& p) {
  return (gridDim.y - 1 - blockIdx.y) * p.row_warps * 16;
}

__device__ __forceinline__ int first_row_of_warp(const Params& p) {
  const int row_warp = threadIdx.x / WARP & (p.row_warps - 1);  // a power of two
  return first_row_of_block(p) + row_warp * 16;
}

// One warp's 16 rows. Lane l holds rows l / 4 and l / 4 + 8, and of every 8 columns 2 (l % 4) and
// the next one: the layout of an accumulator of `mma`.
template <typename T, int D, bool SPLIT, Batch B> struct Rows {
  static constexpr int KEYS = Tile<D>::KEYS;
  static constexpr int Q_REGISTERS = Tile<D>::Q_SHARED ? 1 : D / 16;

  uint32_t q[Q_REGISTERS][4];
  uint32_t q_low[SPLIT ? Q_REGISTERS : 1][4];  // what rounding q to T has left over
  uint32_t q_shared;
  float o[D / 8][4];
  float top[2];  // largest score so far
  float sum[2];  // of this lane's columns
  Range range[2];
  const float* mask[2];
  Range all, some;  // keys that all of the rows see, that any of them may see

  __device__ void begin(const Params& p, const Block<B>& b, int first_row) {
    const int lane = threadIdx.x % WARP, rows = b.rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Place at = b.place(p, min(first_row + lane / 4 + 8 * i, rows - 1));
      range[i] = visible(p, b.of, at.query);
      mask[i] = mask_row(p, b.batch, at);
      top[i] = NEVER;
      sum[i] = 0.f;
    }
    const Range first = visible(p, b.of, b.place(p, min(first_row, rows - 1)).query);
    const Range last = visible(p, b.of, b.place(p, min(first_row + 15, rows - 1)).query);
    all = {last.from, first.to};
    some = {first.from, first_row < rows ? last.to : 0};
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) o[n][j] = 0.f;
  }

  // Reads the rows of q; those past the end are zero.
  __device__ void read_queries(const Params& p, const Block<B>& b, int first_row, char* shared) {
    const int lane = threadIdx.x % WARP;
    using Q = typename std::conditional<SPLIT, float, T>::type;
    const Q* base[2];
    bool valid[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + lane / 4 + 8 * i;
      valid[i] = row < b.rows;
      const Place at = b.place(p, valid[i] ? row : 0);
      base[i] = static_cast<const Q*>(p.q) + start_of<B>(p.q_strides, b.batch, b.of.first_query) +
                at.head * p.q_strides[1] + at.query * p.q_strides[2] + 2 * (lane % 4);
    }
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t part[4], low[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Q* from = base[j % 2] + k * 16 + j / 2 * 8;
        part[j] = low[j] = 0;
        if (!valid[j % 2]) continue;
        if constexpr (SPLIT) {
          const float2 v = *reinterpret_cast<const float2*>(from);
          part[j] = pack2<T>(v.x, v.y);
          low[j] = pack2<T>(v.x - rounded<T>(v.x), v.y - rounded<T>(v.y));
        } else {
          part[j] = *reinterpret_cast<const uint32_t*>(from);
        }
      }
      if constexpr (Tile<D>::Q_SHARED) {
        uint32_t* to = reinterpret_cast<uint32_t*>(shared);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          to[((lane / 4 + j % 2 * 8) * Tile<D>::ROW + k * 16 + j / 2 * 8) / 2 + lane % 4] = part[j];
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          q[k][j] = part[j];
          if constexpr (SPLIT) q_low[k][j] = low[j];
        }
      }
    }
    __syncwarp();
    q_shared = shared_address(shared) + (lane % 16 * Tile<D>::ROW + lane / 16 * 8) * 2;
  }

  // One tile of keys and values at these shared addresses.
  __device__ void step(const Params& p, int first_key, uint32_t keys, uint32_t values) {
    if (first_key >= some.to || first_key + KEYS <= some.from) return;
    const int lane = threadIdx.x % WARP;
    float s[KEYS / 8][4];
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[n][j] = 0.f;
    keys += ((lane / 16 * 8 + lane % 8) * Tile<D>::ROW + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
      uint32_t a[4];
      if constexpr (Tile<D>::Q_SHARED) {
        load_matrices(a, q_shared + k * 32);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[j] = q[k][j];
      }
#pragma unroll
      for (int n = 0; n < KEYS / 16; ++n) {
        uint32_t key[4];
        load_matrices(key, keys + (n * 16 * Tile<D>::ROW + k * 16) * 2);
        mma<T>(s[2 * n], a, key[0], key[1]);
        mma<T>(s[2 * n + 1], a, key[2], key[3]);
        if constexpr (SPLIT) {
          mma<T>(s[2 * n], q_low[k], key[0], key[1]);
          mma<T>(s[2 * n + 1], q_low[k], key[2], key[3]);
        }
      }
    }
    softmax(p, s, first_key);
    values += ((lane / 8 % 2 * 8 + lane % 8) * Tile<D>::ROW + lane / 16 * 8) * 2;
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
      uint32_t a[4], low[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float *pair = &s[2 * k + j / 2][j % 2 * 2], x = pair[0], y = pair[1];
        a[j] = pack2<T>(x, y);
        if constexpr (SPLIT) low[j] = pack2<T>(x - rounded<T>(x), y - rounded<T>(y));
      }
#pragma unroll
      for (int n = 0; n < D / 16; ++n) {
        uint32_t value[4];
        load_transposed(value, values + (k * 16 * Tile<D>::ROW + n * 16) * 2);
        mma<T>(o[2 * n], a, value[0], value[1]);
        mma<T>(o[2 * n + 1], a, value[2], value[3]);
        if constexpr (SPLIT) {
          mma<T>(o[2 * n], low, value[0], value[1]);
          mma<T>(o[2 * n + 1], low, value[2], value[3]);
        }
      }
    }
  }

  // Scores to weights; sums and outputs so far are scaled to the new maximum.
  __device__ void softmax(const Params& p, float (&s)[KEYS / 8][4], int first_key) {
    const bool general = p.general;
    const float unit = general ? 1.f : p.scale * LOG2E;
    const int column = first_key + threadIdx.x % 4 * 2;
    if (general) mask_scores(p, s, column);
    if (first_key < all.from || first_key + KEYS > all.to) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int key = column + n * 8 + j % 2;
          if (key < range[j / 2].from || key >= range[j / 2].to) s[n][j] = NEVER;
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = top[i];
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) most = fmaxf(most, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
      most = fmaxf(most, __shfl_xor_sync(FULL, most, 1));
      most = fmaxf(most, __shfl_xor_sync(FULL, most, 2));
      const float base = most == NEVER ? 0.f : most;
      const float shrink = exp2_approx((top[i] - base) * unit);
      top[i] = most;
      sum[i] *= shrink;
      const float shift = base * unit;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int j = 2 * i; j < 2 * i + 2; ++j) {
          // With q in f32 the difference is taken first: its rounding is that of a small number.
          s[n][j] = exp2_approx(SPLIT ? (s[n][j] - base) * unit : fmaf(s[n][j], unit, -shift));
          sum[i] += s[n][j];
        }
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        o[n][2 * i] *= shrink;
        o[n][2 * i + 1] *= shrink;
      }
    }
  }

  // Scale, softcap, ALiBi and mask, in units of log2.
  __device__ void mask_scores(const Params& p, float (&s)[KEYS / 8][4], int column) const {
    const float factor = p.softcap > 0.f ? p.scale : p.scale * LOG2E;
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[n][j] *= factor;
    if (p.softcap > 0.f) {
      const float cap = p.softcap * LOG2E, twice_inverse = 2.f * LOG2E / p.softcap;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) s[n][j] = capped(s[n][j], cap, twice_inverse);
    }
    if (p.alibi) {
      const Block<B> b(p);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = min(first_row_of_warp(p) + int(threadIdx.x) % WARP / 4 + 8 * i, b.rows - 1);
        const Slope slope = fused::slope(p, b.of, b.place(p, row));
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j)
            s[n][2 * i + j] -= slope.each * fabsf(float(slope.position - column - n * 8 - j));
      }
    }
    if (p.mask) {
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int key = column + n * 8 + j % 2;
          const bool seen = key >= range[j / 2].from && key < range[j / 2].to;
          const float more = seen ? mask[j / 2][key * p.mask_strides[3]] : 0.f;
          s[n][j] = fmaf(more, LOG2E, s[n][j]);
        }
    }
  }

  // Stores this warp's maxima, sums and outputs in shared memory, for the first group of warps to merge.
  __device__ void store_partial(float4* shared) const {
    const int lane = threadIdx.x % WARP;
    shared[lane] = make_float4(top[0], top[1], sum[0], sum[1]);
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      shared[(n + 1) * WARP + lane] = make_float4(o[n][0], o[n][1], o[n][2], o[n][3]);
  }

  // Merges what `store_partial` has stored into this warp's maxima, sums and outputs.
  __device__ void merge_partial(const Params& p, const float4* shared) {
    const int lane = threadIdx.x % WARP;
    const float unit = p.general ? 1.f : p.scale * LOG2E;
    const float4 other = shared[lane];
    float mine[2], its[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float its_top = i ? other.y : other.x;
      const float most = fmaxf(top[i], its_top), base = most == NEVER ? 0.f : most;
      mine[i] = exp2_approx((top[i] - base) * unit);
      its[i] = exp2_approx((its_top - base) * unit);
      sum[i] = sum[i] * mine[i] + (i ? other.w : other.z) * its[i];
      top[i] = most;
    }
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const float4 v = shared[(n + 1) * WARP + lane];
      o[n][0] = o[n][0] * mine[0] + v.x * its[0];
      o[n][1] = o[n][1] * mine[0] + v.y * its[0];
      o[n][2] = o[n][2] * mine[1] + v.z * its[1];
      o[n][3] = o[n][3] * mine[1] + v.w * its[1];
    }
  }

  __device__ void write(const Params& p) {
    const Block<B> b(p);
    const int lane = threadIdx.x % WARP, first_row = first_row_of_warp(p);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = sum[i];
      total += __shfl_xor_sync(FULL, total, 1);
      total += __shfl_xor_sync(FULL, total, 2);
      const int row = first_row + lane / 4 + 8 * i;
      if (row >= b.rows) continue;
      const float factor = total == 0.f ? 0.f : 1.f / total;
      const Place place = b.place(p, row);
      const int64_t at = (output_row<B>(p, b.of, b.batch, place.query) * p.heads + place.head) * D + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        const float x = o[n][2 * i] * factor, y = o[n][2 * i + 1] * factor;
        if constexpr (SPLIT)
          *reinterpret_cast<float2*>(static_cast<float*>(p.y) + at + n * 8) = make_float2(x, y);
        else
          *reinterpret_cast<uint32_t*>(static_cast<T*>(p.y) + at + n * 8) = pack2<T>(x, y);
      }
    }
  }
};

// How the threads of a group share out the 16-byte pieces of a tile: thread by thread along the
// rows, so each goes on by the same step.
template <typename T, int D> struct Copier {
  static constexpr int PIECES = D / 8;
  int row, piece, row_step, piece_step;

  __device__ Copier(int thread, int threads)
      : row(thread / PIECES), piece(thread % PIECES), row_step(threads / PIECES),
        piece_step(threads % PIECES) {}

  // A tile of keys (or values) to shared memory; rows from `count` on become zeros.
  __device__ __forceinline__ void copy(uint32_t to, const T* from, int64_t stride, int count) const {
    int r = row, c = piece;
#pragma unroll 2
    while (r < Tile<D>::KEYS) {
      copy_async(to + (r * Tile<D>::ROW + c * 8) * 2, from + (r < count ? r * stride : 0) + c * 8,
                 r < count);
      r += row_step;
      c += piece_step;
      if (c >= PIECES) c -= PIECES, ++r;
    }
  }

  // The same of keys and values in pages of a power of two of tokens: one look into the table for both. Rows of
  // pages that the pool has not become zeros too.
  __device__ __forceinline__ void copy_pages(const Params& p, const uint32_t* table, uint32_t to, const T* k, const T* v,
                                             int first_key, int count) const {
    const KeyPages& pages = p.pages;
    int r = row, c = piece;
#pragma unroll 2
    while (r < Tile<D>::KEYS) {
      const uint32_t token = first_key + r, id = r < count ? table[token >> pages.page_bits] : pages.pages;
      const bool there = id < pages.pages;
      const int64_t page = there ? id : 0, slot = there ? token & (pages.page - 1) : 0;
      const uint32_t at = to + (r * Tile<D>::ROW + c * 8) * 2;
      copy_async(at, k + page * p.k_strides[0] + slot * p.k_strides[2] + c * 8, there);
      copy_async(at + Tile<D>::BYTES, v + page * p.v_strides[0] + slot * p.v_strides[2] + c * 8, there);
      r += row_step;
      c += piece_step;
      if (c >= PIECES) c -= PIECES, ++r;
    }
  }

  // The same of codes: 8 of a row at a time.
  __device__ __forceinline__ void copy_codes(const Params& p, const uint32_t* table, uint32_t to, const uint8_t* k,
                                             const uint8_t* v, int first_key, int count, int kv_head) const {
    const KeyPages& pages = p.pages;
    int r = row, c = piece;
#pragma unroll 4
    while (r < Tile<D>::KEYS) {
      const uint32_t token = first_key + r, id = r < count ? table[token >> pages.page_bits] : pages.pages;
      const bool there = id < pages.pages;
      const int64_t page = there ? id : 0, slot = there ? token & (pages.page - 1) : 0;
      const int64_t k_at = page * p.k_strides[0] + slot * p.k_strides[2] + c * 8;
      const int64_t v_at = page * p.v_strides[0] + slot * p.v_strides[2] + c * 8;
      uint2 keys = make_uint2(0, 0), values = keys;
      float of_key = 0.f, of_value = 0.f;
      if (there) {
        keys = __ldcg(reinterpret_cast<const uint2*>(k + k_at));
        values = __ldcg(reinterpret_cast<const uint2*>(v + v_at));
        of_key = __ldcg(pages.k_scales + scale_at(pages.k_scale_strides, page, kv_head, slot));
        of_value = __ldcg(pages.v_scales + scale_at(pages.v_scale_strides, page, kv_head, slot));
      }
      const uint32_t at = to + (r * Tile<D>::ROW + c * 8) * 2;
      put_codes(at, keys, of_key, p.kv_type);
      put_codes(at + Tile<D>::BYTES, values, of_value, p.kv_type);
      r += row_step;
      c += piece_step;
      if (c >= PIECES) c -= PIECES, ++r;
    }
  }

  // 8 codes as T.
  __device__ __forceinline__ static void put_codes(uint32_t to, uint2 codes, float scale, int format) {
    Pack<uint32_t, 4> out;
    const uint32_t words[2] = {codes.x, codes.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = i % 2 ? words[i / 2] >> 16 : words[i / 2];
      const bool whole = format == INT8;
      const uint32_t pair = whole ? widen_codes<CodeInt8, false>(word) : widen_codes<CodeFp8, false>(word);
      const float2 v = unpack2<__half>(pair);
      out.v[i] = pack2<T>(v.x * scale, v.y * scale);
    }
    store_shared(to, out);
  }
};

// CODES: keys and values in pages are codes, which become T on their way to shared memory.
template <typename T, int D, bool SPLIT, Batch B, bool CODES = false>
__device__ __forceinline__ void attend(const Params& p) {
  extern __shared__ __align__(16) char shared[];
  using Warp = Rows<T, D, SPLIT, B>;
  constexpr int KEYS = Tile<D>::KEYS, BYTES = Tile<D>::BYTES;
  const int warp = threadIdx.x / WARP, part = warp >> (31 - __clz(p.row_warps));
  const int row_warp = warp & (p.row_warps - 1);  // a power of two
  const int threads = p.row_warps * WARP, thread = threadIdx.x & (threads - 1);
  const int block_row = first_row_of_block(p);
  const Copier<T, D> copier(thread, threads);
  if constexpr (B != Batch::DENSE) {
    pdl_launch();
    pdl_wait();
  }
  const LeftOver<B, Params> left_over(p, gridDim.z, D);
  const Block<B> block(p);
  const bool has_rows = B == Batch::DENSE || block_row < block.rows;
  const Sequence& of = block.of;
  const int first_row = block_row + row_warp * 16;
  char* own = shared + part * p.group_bytes;
  const uint32_t tiles = shared_address(own);
  const int last_row = min(block_row + p.row_warps * 16, block.rows) - 1;
  const int from = visible(p, of, block.place(p, block_row).query).from / KEYS;
  const int to = (max(visible(p, of, block.place(p, last_row).query).to, 0) + KEYS - 1) / KEYS;
  const int64_t k_start = start_of<B>(p.k_strides, block.batch, of.first_key);
  const int64_t v_start = start_of<B>(p.v_strides, block.batch, of.first_key);
  using S = typename std::conditional<CODES, uint8_t, T>::type;
  const S* k = static_cast<const S*>(p.k) + k_start + block.kv_head * p.k_strides[1];
  const S* v = static_cast<const S*>(p.v) + v_start + block.kv_head * p.v_strides[1];
  const auto fetch = [&](int tile, int stage) {
    const uint32_t at = tiles + stage * 2 * BYTES;
    const int first_key = tile * KEYS, count = of.keys - first_key;
    if constexpr (CODES) {
      copier.copy_codes(p, of.pages, at, k, v, first_key, count, block.kv_head);
    } else if constexpr (B == Batch::PAGED) {
      copier.copy_pages(p, of.pages, at, k, v, first_key, count);
    } else {
      copier.copy(at, k + first_key * p.k_strides[2], p.k_strides[2], count);
      copier.copy(at + BYTES, v + first_key * p.v_strides[2], p.v_strides[2], count);
    }
  };
  if constexpr (B == Batch::DENSE) {
    pdl_launch();
    pdl_wait();
  }
  int tile = from + part, stage = 0;
  if (has_rows && tile < to) fetch(tile, 0);
  using Y = typename std::conditional<SPLIT, float, T>::type;
  left_over.each(Zeroing::all(), [&](int64_t at) { static_cast<Y*>(p.y)[at] = from_float<Y>(0.f); });
  if (!has_rows) return;
  Warp state;
  state.begin(p, block, first_row);
  char* q_shared = shared + p.key_groups * p.group_bytes + warp * Tile<D>::Q_BYTES;
  state.read_queries(p, block, first_row, q_shared);
  for (; tile < to; tile += p.key_groups) {
    const int next = tile + p.key_groups;
    await_copies();
    barrier(1 + part, threads);
    if (p.stages == 2 && next < to) fetch(next, stage ^ 1);
    const uint32_t at = tiles + stage * 2 * BYTES;
    state.step(p, tile * KEYS, at, at + BYTES);
    if (p.stages == 2) {
      stage ^= 1;
    } else if (next < to) {
      barrier(1 + part, threads);
      fetch(next, 0);
    }
  }
  if (p.key_groups > 1) {
    constexpr int LEFT = (D / 8 + 1) * WARP * 16;
    barrier(1 + part, threads);
    if (part > 0) state.store_partial(reinterpret_cast<float4*>(own + row_warp * LEFT));
    __syncthreads();
    if (part > 0) return;
    for (int i = 1; i < p.key_groups; ++i)
      state.merge_partial(p, reinterpret_cast<const float4*>(shared + i * p.group_bytes + row_warp * LEFT));
  }
  state.write(p);
}

}  // namespace fused
