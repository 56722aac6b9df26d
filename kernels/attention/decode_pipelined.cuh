// The attention step of decoding where many sequences have their keys and values in pages (decode.cuh has the step).
//
// A block has all keys of a key/value head of one sequence, or a range of them where the sequence is long, and reads
// the rows of the projection once for all query heads. It has few warps, which take tiles of keys in turn: a warp's
// instructions wait for one another, so that one warp alone is late for its keys, but sums of many warps take long to
// bring together. Each warp prefetches keys and values into a ring of pipeline stages of its own in shared memory by
// `cp.async`, so that the bytes in flight do not depend on registers, and they go from there to tensor cores by
// `ldmatrix`. The new key and value are written into the last tile. Position, page table, angles and the first stages
// are read before the PDL wait, as decode.cuh says.
#pragma once

#include "attention/decode.cuh"

namespace fused {

// Keys and values of a warp's tiles, of `SUB` times 16 keys each. `W`: warps of the block. Rows in shared memory are 16
// bytes longer than a head, so that ldmatrix reads eight of them without bank conflicts. Offsets into the pools are in
// units of 16 bytes, which fit 32 bits, and are the same for keys and values.
template <typename C, int D, int SUB, int STAGES, int W> struct KeyPipeline {
  using From = KeysInPages;
  static constexpr bool IN_PAGES = true, CODES = false;
  static constexpr int WARPS = W, KEYS = 16 * SUB, STEPS = D / 16, LANE = D / 32;
  static constexpr int PITCH = 2 * D + 16, TILE = KEYS * PITCH, STAGE = 2 * TILE;
  // 16-byte pieces of a row, and rows that the warp copies at once.
  static constexpr int PIECES = D / 8, ROWS = WARP / PIECES;
  static_assert(D == 64 || D == 128, "ROWS divides 8");

  __device__ static int dtype(int) { return std::is_same<C, __half>::value ? F16 : BF16; }

  uint32_t ring;              // in shared memory
  const uint4* k;             // of the head, and of the lane's piece of a row
  const uint4* v;
  uint32_t page, token;       // strides, in 16 bytes
  // Entries of the page table, one a lane: a page holds a multiple of 8 keys, so lane i has that of keys window + 8 i
  // on. `ahead`: those of the next 256 keys.
  uint32_t window, entries, ahead;

  __device__ void begin(const KeysInPages& keys, uint32_t first) {
    window = first;
    entries = look(keys, first);
    ahead = look(keys, first + 8 * WARP);
  }

  __device__ static uint32_t look(const KeysInPages& keys, uint32_t first) {
    return keys.entry(first + 8 * (threadIdx.x % WARP));
  }

  static_assert(W * KEYS <= 8 * WARP, "a warp's next tile is in the next window at most");

  // The tile of keys from `first` on into a stage. Keys that are not there are zeros.
  __device__ void fetch(const KeysInPages& keys, uint32_t first, uint32_t stage) {
    if (first >= window + 8 * WARP) {
      window += 8 * WARP;
      entries = ahead;
      ahead = look(keys, window + 8 * WARP);
    }
    const int lane = threadIdx.x % WARP, row = lane / PIECES;
    const uint32_t to = ring + stage * STAGE + row * PITCH + lane % PIECES * 16;
#pragma unroll
    for (int j = 0; j < KEYS / 8; ++j) {
      const uint32_t key = first + 8 * j, entry = __shfl_sync(FULL, entries, (key - window) / 8);
      // A copy of nothing still has to name memory that there is.
      const bool known = entry < keys.pages;
      const uint32_t at = (known ? entry : 0) * page + (keys.slot(key) + row) * token;
#pragma unroll
      for (int i = 0; i < 8; i += ROWS) {
        const bool there = known && key + row + i - keys.low < keys.end - keys.low;
        copy_async(to + (8 * j + i) * PITCH, k + (at + i * token), there);
        copy_async(to + TILE + (8 * j + i) * PITCH, v + (at + i * token), there);
      }
    }
  }

  // Element d of row `row` of a stage's keys; values are TILE bytes behind.
  __device__ static uint32_t place(uint32_t stage, uint32_t row, int d) { return stage * STAGE + row * PITCH + 2 * d; }
};

// Scores of up to MAX_HEADS heads as rows of tensor-core products, and their values: queries and weights in two parts
// (decode_warp.cuh).
template <typename C, int D, int SUB> struct PipelinedCore {
  static constexpr int STEPS = D / 16, KEYS = 16 * SUB;

  uint32_t q[STEPS][4];
  float o[STEPS][4];
  float m, l;

  // The place of a query's element among the operands: (high part, low part 4 bytes behind).
  __device__ static int place(int head, int d) {
    return (d / 16 * WARP + head * 4 + d % 8 / 2) * 16 + d % 16 / 8 * 8 + d % 2 * 2;
  }

  __device__ static void put(char* queries, int head, int d, float value) {
    put_in_two<C>(queries + place(head, d), value);
  }

  __device__ void start(const char* queries) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const uint4 row = *reinterpret_cast<const uint4*>(queries + (i * WARP + threadIdx.x % WARP) * 16);
      q[i][0] = row.x, q[i][1] = row.y, q[i][2] = row.z, q[i][3] = row.w;
      o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
    }
    m = -INFINITY, l = 0.f;
  }

  // The tile of keys from `first` on, which lies at `keys_at` in shared memory; those from `end` on are not seen.
  template <int PITCH, int TILE>
  __device__ void step(const KeysInPages& keys, uint32_t first, uint32_t end, uint32_t keys_at) {
    const int lane = threadIdx.x % WARP, t = lane % 4;
    // Of matrix lane / 8: keys 8 on in the upper two, dimensions 8 on in the second and the fourth.
    const uint32_t at = keys_at + (lane / 16 * 8 + lane % 8) * PITCH + lane / 8 % 2 * 16;
    float s[2 * SUB][4] = {};
#pragma unroll
    for (int u = 0; u < SUB; ++u) {
#pragma unroll
      for (int i = 0; i < STEPS; ++i) {
        uint32_t b[4];
        load_matrices(b, at + u * 16 * PITCH + i * 32);
        mma<C>(s[2 * u], q[i], b[0], b[1]);
        mma<C>(s[2 * u + 1], q[i], b[2], b[3]);
      }
    }
    float p[2 * SUB][2], top = m;
    const uint32_t own = first + 2 * t - keys.low, seen = end - keys.low;
    if (keys.softcap == 0.f) {
#pragma unroll
      for (int i = 0; i < 4 * SUB; ++i) p[i / 2][i % 2] = keys.scale * (s[i / 2][i % 2] + s[i / 2][i % 2 + 2]);
    } else {
#pragma unroll
      for (int i = 0; i < 4 * SUB; ++i) p[i / 2][i % 2] = score(keys, s[i / 2][i % 2] + s[i / 2][i % 2 + 2]);
    }
#pragma unroll
    for (int i = 0; i < 4 * SUB; ++i) {
      if (own + i / 2 * 8 + i % 2 >= seen) p[i / 2][i % 2] = -INFINITY;
      top = fmaxf(top, p[i / 2][i % 2]);
    }
    const float off = rescale(top, m, l, o);
#pragma unroll
    for (int u = 0; u < SUB; ++u) {
      uint32_t high[2], low[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float p0 = exp2_fast(p[2 * u + j][0] - off), p1 = exp2_fast(p[2 * u + j][1] - off);
        l += p0 + p1;
        high[j] = pack2<C>(p0, p1);
        const float2 kept = unpack2<C>(high[j]);
        low[j] = pack2<C>(p0 - kept.x, p1 - kept.y);
      }
#pragma unroll
      for (int r = 0; r < STEPS; ++r) {
        uint32_t a[4];
        load_transposed(a, at + TILE + u * 16 * PITCH + r * 32);
        mma<C>(o[r], a, high[0], high[1]);
        mma<C>(o[r], a, low[0], low[1]);
      }
    }
  }

  // Where o[r][i] belongs.
  __device__ static int dimension(int r, int i) { return 16 * r + int(threadIdx.x % WARP) / 4 + i / 2 * 8; }
  __device__ static int head(int i) { return 2 * int(threadIdx.x % 4) + i % 2; }
};

// A block's shared memory, behind the rings of its warps. The rows of the projection come as they are to the last stage
// of the first ring, which is fetched into only when they have left.
template <int D, int W> struct PipelinedShared {
  static constexpr int QUERIES = D / 16 * WARP * 16;
  char* queries;
  float* k;          // the new key and value, as the cache holds them
  float* v;
  float* scratch;    // [D] of a warp
  const char* rows;  // [heads + 2][D]: queries, the new key, the new value

  __device__ PipelinedShared(char* memory, const char* stage) {
    queries = memory;
    k = reinterpret_cast<float*>(memory + QUERIES);
    v = k + D;
    scratch = v + D + threadIdx.x / WARP * D;
    rows = stage;
  }
};

// What a lane's elements of every head's row are multiplied with, as `read_angles` of decode.cuh has it, but in
// registers: the loads are issued before the wait for the preceding kernel, and waited for behind it.
template <int D> struct LaneFactors {
  static constexpr int N = D / 32;
  float cos[N], sin[N], q_norm[N], k_norm[N];

  __device__ void read(const DecodingParams& p, uint32_t position) {
    const uint64_t row = uint64_t(position) * p.pairs;
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const uint32_t d = threadIdx.x % WARP + 32 * e, i = p.interleaved ? d / 2 : d < p.pairs ? d : d - p.pairs;
      const bool rotated = d < 2 * p.pairs;
      cos[e] = rotated ? __ldg(p.cos + row + i) : 1.f;
      sin[e] = rotated ? __ldg(p.sin + row + i) : 0.f;
      q_norm[e] = p.q_norm ? read_weight(p.q_norm, d, p.dtype) : 1.f;
      k_norm[e] = p.q_norm ? read_weight(p.k_norm, d, p.dtype) : 1.f;
    }
  }
};

// The tiles of a block: `first` up to `last`.
struct TileRange {
  uint32_t low, start;  // the first key that is seen, and where the first tile begins
  uint32_t first, last;
  uint32_t active;      // blocks with tiles
  bool leads;           // whether the new key is among them

  __device__ TileRange(const DecodingParams& p, const Block& block, uint32_t position, uint32_t keys) {
    const bool valid = position < p.slots && position < p.positions;
    low = p.window && position + 1 > p.window ? position + 1 - p.window : 0;
    start = low / keys * keys;
    const uint32_t tiles = valid ? (position - start) / keys + 1 : 0;
    const uint32_t each = max(p.tiles, (tiles + block.of_x - 1) / block.of_x);
    active = (tiles + each - 1) / each;
    first = block.x * each;
    last = min(first + each, tiles);
    leads = block.x + 1 == active;
  }
  __device__ bool empty() const { return first >= last; }
};

template <typename C, int D, int SUB, int STAGES, int W> struct PipelinedDecoding {
  using Pipeline = KeyPipeline<C, D, SUB, STAGES, W>;
  using Core = PipelinedCore<C, D, SUB>;
  static constexpr int N = Pipeline::LANE, KEYS = Pipeline::KEYS, THREADS = W * WARP, RING = STAGES * Pipeline::STAGE;
  static_assert((MAX_HEADS + 2) * D * 4 <= Pipeline::STAGE, "the rows of the projection fit into a stage");

  const DecodingParams& p;
  const Block here;
  const Place at;
  const uint32_t warp;
  KeysInPages keys;
  Pipeline pipeline;
  TileRange range;
  PipelinedShared<D, W> s;
  LaneFactors<D> factors;

  __device__ PipelinedDecoding(const DecodingParams& params, const Block& block, char* memory)
      : p(params), here(block), at(params, block, D, MAX_HEADS), warp(threadIdx.x / WARP),
        keys(keys_of<Pipeline>(params, at, block.z, D)), range(params, block, UINT32_MAX, KEYS),
        s(memory + W * RING, memory + RING - Pipeline::STAGE) {
    const int piece = threadIdx.x % WARP % Pipeline::PIECES;
    pipeline.ring = shared_address(memory) + warp * RING;
    pipeline.k = static_cast<const uint4*>(keys.k) + piece;
    pipeline.v = static_cast<const uint4*>(keys.v) + piece;
    pipeline.page = uint32_t(keys.k_page / 8), pipeline.token = uint32_t(keys.k_token / 8);
  }

  __device__ uint32_t first_key(uint32_t tile) const { return range.start + tile * KEYS; }

  // A warp's tiles in turn, into its stages.
  __device__ void fetch(uint32_t tile, uint32_t stage) {
    if (tile < range.last) pipeline.fetch(keys, first_key(tile), stage);
    commit_copies();
  }

  // What the position alone decides: angles and the warp's first tile, which are on their way.
  __device__ void begin(uint32_t position) {
    range = TileRange(p, here, position, KEYS);
    if (range.empty()) return;
    keys.end = position, keys.low = range.low;
    // In front of the wait for the pages.
    factors.read(p, position);
    pipeline.begin(keys, first_key(range.first + warp));
    fetch(range.first + warp, 0);
  }

  __device__ void fetch_ahead() {
#pragma unroll 1
    for (uint32_t i = 1; i < STAGES - 1; ++i) fetch(range.first + warp + i * W, i);
  }

  // Pieces of 16 bytes of a row, and of a lane's part of all rows.
  __device__ int row_shift() const { return (D == 64 ? 3 : 4) + (p.dtype == F32); }
  static constexpr int LANE_PIECES = ((MAX_HEADS + 2) * (D / 4) + THREADS - 1) / THREADS;

  // The rows of the heads, the new key and the new value. Not by `cp.async`: its groups complete in order, so these
  // would wait for the keys.
  __device__ void load_rows(uint4 (&rows)[LANE_PIECES]) const {
    const int shift = row_shift(), row = 1 << shift, count = (at.heads + 2) * row;
    const uint4* from =
        reinterpret_cast<const uint4*>(static_cast<const char*>(p.qkv) + (uint64_t(at.qkv) * 2 << (p.dtype == F32)));
#pragma unroll
    for (int j = 0; j < LANE_PIECES; ++j) {
      const int i = threadIdx.x + j * THREADS, job = i >> shift;
      const uint32_t head = job < at.heads ? at.head + job : p.heads + at.kv + (job > at.heads ? p.kv_heads : 0);
      if (i < count) rows[j] = __ldcg(from + head * row + i % row);
    }
  }
  __device__ void place_rows(char* to, const uint4 (&rows)[LANE_PIECES]) const {
    const int count = (at.heads + 2) << row_shift();
#pragma unroll
    for (int j = 0; j < LANE_PIECES; ++j)
      if (int(threadIdx.x) + j * THREADS < count) reinterpret_cast<uint4*>(to)[threadIdx.x + j * THREADS] = rows[j];
  }

  __device__ void read_row(int job, float (&x)[N]) const {
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const int i = job * D + threadIdx.x % WARP + 32 * e;
      x[e] = p.dtype == F32 ? reinterpret_cast<const float*>(s.rows)[i]
                            : widen_raw(reinterpret_cast<const uint16_t*>(s.rows)[i], p.dtype);
    }
  }

  // As `apply_rope` of decode.cuh, with angles and norms in registers. What a value is rotated with belongs to the same
  // lane where the whole head is rotated by halves.
  __device__ void apply_rope_to_row(bool is_key, float (&x)[N]) const {
    const int lane = threadIdx.x % WARP, pairs = p.pairs;
    if (p.q_norm) {
      const float factor = rms_factor(p, x, D);
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const float norm = is_key ? factors.k_norm[e] : factors.q_norm[e];
        x[e] = rounded_to(p.dtype, rounded_to(p.dtype, x[e] * factor) * norm);
      }
    }
    float other[N];
    if (!p.interleaved && 2 * pairs == D) {
#pragma unroll
      for (int e = 0; e < N; ++e) other[e] = x[(e + N / 2) % N];
    } else if (p.interleaved) {
#pragma unroll
      for (int e = 0; e < N; ++e) other[e] = __shfl_xor_sync(FULL, x[e], 1);
    } else {
#pragma unroll
      for (int e = 0; e < N; ++e) s.scratch[lane + 32 * e] = x[e];
      __syncwarp();
#pragma unroll
      for (int e = 0; e < N; ++e) {
        const int d = lane + 32 * e;
        other[e] = d < 2 * pairs ? s.scratch[d < pairs ? d + pairs : d - pairs] : 0.f;
      }
      __syncwarp();
    }
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const int d = lane + 32 * e;
      const bool first = p.interleaved ? d % 2 == 0 : d < pairs;
      if (d < 2 * pairs) x[e] = x[e] * factors.cos[e] + (first ? -other[e] : other[e]) * factors.sin[e];
    }
  }

  // Queries to operands of the tensor cores; the new key and value to k and v, as the cache has them. Warps take rows
  // in turn, all in one loop, so that a warp's second row finds its instructions there.
  __device__ void prepare_rows() const {
    const int lane = threadIdx.x % WARP, stored = Pipeline::dtype(0);
#pragma unroll 1
    for (int job = warp; job < at.heads + 2; job += W) {
      float x[N];
      read_row(job, x);
      if (job <= at.heads) apply_rope_to_row(job == at.heads, x);
      if (job < at.heads) {
#pragma unroll
        for (int e = 0; e < N; ++e) Core::put(s.queries, job, lane + 32 * e, rounded_to(p.dtype, x[e]));
      } else {
        float* to = job == at.heads ? s.k : s.v;
#pragma unroll
        for (int e = 0; e < N; ++e) to[lane + 32 * e] = rounded_to(stored, x[e]);
      }
    }
  }

  // The new key and value in their place of a stage.
  __device__ void insert(char* ring, uint32_t stage, uint32_t row) const {
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const int d = threadIdx.x % WARP + 32 * e;
      char* to = ring + Pipeline::place(stage, row, d);
      *reinterpret_cast<C*>(to) = from_float<C>(s.k[d]);
      *reinterpret_cast<C*>(to + Pipeline::TILE) = from_float<C>(s.v[d]);
    }
  }

  __device__ void attend(char* ring, uint32_t position, Core& core) {
    uint32_t stage = 0, free = STAGES - 1;
#pragma unroll 1
    for (uint32_t tile = range.first + warp; tile < range.last; tile += W) {
      await_copies_but<STAGES - 2>();
      __syncwarp();
      if (range.leads && tile + 1 == range.last) {
        insert(ring, stage, position - first_key(tile));
        __syncwarp();
      }
      fetch(tile + (STAGES - 1) * W, free);
      core.template step<Pipeline::PITCH, Pipeline::TILE>(keys, first_key(tile), position + 1,
                                                          pipeline.ring + stage * Pipeline::STAGE);
      free = stage;
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
  }

  // A warp's sums of a head, [D] floats, with the largest score and the sum of the weights behind them. They lie in its
  // ring, which is free by now.
  static constexpr int SUMS = D + 4;
  static_assert(MAX_HEADS * SUMS * 4 <= RING, "a warp's sums fit into its ring");

  __device__ static const float* sums_of(const char* memory, int warp, int head) {
    return reinterpret_cast<const float*>(memory + warp * RING) + head * SUMS;
  }

  __device__ void leave_sums(char* ring, Core& core) const {
    const int lane = threadIdx.x % WARP, t = lane % 4;
    core.l += __shfl_xor_sync(FULL, core.l, 1);
    core.l += __shfl_xor_sync(FULL, core.l, 2);
    float* sums = reinterpret_cast<float*>(ring);
    __syncwarp();
    if (t == 0) *reinterpret_cast<float2*>(sums + lane / 4 * SUMS + D) = make_float2(core.m, core.l);
#pragma unroll
    for (int r = 0; r < Core::STEPS; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[Core::head(i) * SUMS + Core::dimension(r, i)] = core.o[r][i];
    }
  }

  // Means of the heads over the block's warps to y, or, with their weights, to the partial results that the last block
  // merges.
  __device__ void finish(const char* memory) const {
    const Partials partials(p, here, at.row, D);
    float2* partial = partials.both + here.x * MAX_HEADS * D;
    for (int i = 4 * threadIdx.x; i < at.heads * D; i += 4 * THREADS) {
      float2 weights[W];
      float top = -INFINITY, total = 0.f;
#pragma unroll
      for (int w = 0; w < W; ++w) {
        weights[w] = *reinterpret_cast<const float2*>(sums_of(memory, w, i / D) + D);
        top = fmaxf(top, weights[w].x);
      }
      const float off = origin(top);
      float4 mean = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const float share = exp2_fast(weights[w].x - off);
        const float4 sum = *reinterpret_cast<const float4*>(sums_of(memory, w, i / D) + i % D);
        total += share * weights[w].y;
        mean.x += share * sum.x, mean.y += share * sum.y, mean.z += share * sum.z, mean.w += share * sum.w;
      }
      const float by = total == 0.f ? 0.f : __fdividef(1.f, total);
      mean.x *= by, mean.y *= by, mean.z *= by, mean.w *= by;
      if (range.active == 1) {
        write4(p.y, p.dtype, at.out + i, mean);
      } else {
        const float weight = top + __log2f(total);
        *reinterpret_cast<float4*>(partial + i) = make_float4(mean.x, weight, mean.y, weight);
        *reinterpret_cast<float4*>(partial + i + 2) = make_float4(mean.z, weight, mean.w, weight);
      }
    }
    if (range.active > 1 && is_last(p.counters + at.row, range.active))
      merge_narrow<Pipeline>(p, partials.both, range.active, at.heads, D, at.out);
  }

  __device__ void decode(char* memory) {
    uint32_t position = read_position(p.position + here.z);
    for (int i = threadIdx.x; i < PipelinedShared<D, W>::QUERIES / 16; i += THREADS)
      reinterpret_cast<uint4*>(s.queries)[i] = make_uint4(0, 0, 0, 0);
    begin(position);
    pdl_wait();
    // In front of all tiles but one: behind more of them, rows would arrive later.
    uint4 rows[LANE_PIECES];
    load_rows(rows);
    const uint32_t now = read_position(p.position + here.z);
    fetch_ahead();
    place_rows(memory + RING - Pipeline::STAGE, rows);
    if (now != position) {
      // What was fetched is another step's.
      await_copies();
      position = now;
      begin(position);
      fetch_ahead();
    }
    if (range.empty()) return;
    const bool appends = range.leads && at.appends;
    const uint32_t page = appends ? page_of(p, here.z, position) : 0;
    __syncthreads();
    prepare_rows();
    __syncthreads();
    if (appends) append<Pipeline>(p, s, at, page, D, position);
    Core core;
    core.start(s.queries);
    char* ring = memory + warp * RING;
    attend(ring, position, core);
    leave_sums(ring, core);
    __syncthreads();
    finish(memory);
  }
};

}  // namespace fused
