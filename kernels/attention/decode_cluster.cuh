// The attention step of decoding where latency bounds a launch, not memory (decode.cuh has the step): one sequence, or a
// few dozen.
//
// A cluster of small blocks shares the keys of one key/value head. Its blocks send their sums to the first one through
// distributed shared memory, which takes some 0.4 us where memory and an atomic counter take 1.3. Only sequences so long
// that a cluster would go over its keys several times are shared among clusters, whose results pass through memory.
//
// Before the PDL wait come the first tile of keys and the rotation's angles. What comes behind it is a chain of few
// instructions: half a warp has one row of the projection, normed and rotated within its lanes; scores and values are
// products of tensor cores; the new key and value are put among the fetched ones in registers. A block has as many warps
// as a multiprocessor has schedulers.
#pragma once

#include "attention/decode.cuh"
#include "attention/half_warp_row.cuh"
#include "common/cluster.cuh"
#include "common/tma.cuh"

namespace fused {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A block's shared memory, as byte offsets: two barriers, maxima and weights of each warp, the rotated rows, the sums of
// each warp, and in a cluster's first block what the others send. `flash_decoding/cuda/cluster.rs` has the same.
template <int D> struct ClusterMemory {
  static constexpr int WARPS = DECODING_CLUSTER_WARPS, SECOND_BARRIER = 8;
  static constexpr int TOPS = 16, WEIGHTS = TOPS + MAX_HEADS * WARPS * 4, ROWS = WEIGHTS + MAX_HEADS * WARPS * 4;
  // Bytes from row to row: eight lanes that read 16 bytes each of two rows have no bank conflict.
  static constexpr int ROW = 2 * D + 64;
  // Bytes from head to head. Behind each 16 sums, which one lane stores, a gap of 4 keeps the lanes' stores off the same
  // banks.
  static constexpr int SUMS = D == 64 ? 320 : 704;
  __device__ static int place(int d) { return 4 * (d / 16 * 20 + d % 16); }

  int heads;
  bool rests;  // whether queries have more bits than keys: what rounding has left of them follows the rows
  __device__ int rest(int job) const { return ROWS + (heads + 1 + job) * ROW; }
  __device__ int sums() const { return rest(rests ? heads : 0); }
  __device__ int received() const { return sums() + WARPS * heads * SUMS; }
  // Bytes from sender to sender: sums, and behind them each head's maximum and weight, which are `bytes`.
  __device__ int step() const { return heads * (D * 4 + 16); }
  __device__ int bytes() const { return heads * (D * 4 + 8); }
};

// Softmax sums on their way: four values relative to the highest score, and the weight of that.
struct Sums {
  float4 values;
  float top, weight;

  __device__ float4 mean() const {
    const float by = weight == 0.f ? 0.f : __fdividef(1.f, weight);
    return make_float4(values.x * by, values.y * by, values.z * by, values.w * by);
  }
};

// The projection and y are of X, keys and values of C. Where the same launch computes it (decode_with_qkv.cuh),
// COMPUTES is the number of query heads, whose rows are in shared memory, and X is C; it is 0 elsewhere.
template <typename X, typename C, int D, bool PAGED, int COMPUTES = 0> struct ClusterDecoding {
  static constexpr bool RESTS = sizeof(X) > sizeof(C);
  static constexpr int WARPS = DECODING_CLUSTER_WARPS, STEPS = D / 16, WORDS = D / 8, PIECES = D / 32;
  using Core = TensorCore<C, D, WARPS, 1, PAGED>;
  using Memory = ClusterMemory<D>;
  using Row = HalfWarpRow<X, D>;
  using Run = PackedRun<C, Row::RUN>;
  static constexpr int KEYS = Core::KEYS;

  const DecodingParams& p;
  const Block here;
  const Place at;
  const uint32_t cluster, rank, team;  // blocks of a cluster, this one's place in it, and the cluster's in the row
  const uint32_t shared;               // as an address, like what follows
  const Memory layout;
  const uint32_t sums, received;
  uint32_t projected_rows;  // in shared memory: the query heads' one by one, the key's and the value's
  const int lane, warp, g, t;
  typename Core::From keys;
  Core core;
  Row row;
  uint32_t fresh_value[STEPS];  // the new value, as a lane has values
  // What follows from the position.
  uint32_t position, low, start, tiles, active;
  bool leads;  // whether the new key is among this block's
  float o[STEPS][2][4];
  float m, l;

  __device__ ClusterDecoding(const DecodingParams& params, const Block& block, uint32_t blocks, uint32_t memory)
      : p(params), here(block), at(place_of(params, block)), cluster(blocks), rank(block.x % blocks),
        team(block.x / blocks), shared(memory), layout{at.heads, RESTS}, sums(memory + layout.sums()),
        received(memory + layout.received()), projected_rows(0), lane(threadIdx.x % WARP), warp(threadIdx.x / WARP),
        g(lane / 4), t(lane % 4), keys(keys_of<Core>(params, at, block.z, D)), position(UINT32_MAX), tiles(0), active(1),
        leads(false) {}

  // With the number of heads as a constant, if it is one.
  __device__ static Place place_of(const DecodingParams& params, const Block& block) {
    Place place(params, block, D, MAX_HEADS);
    if (COMPUTES > 0) place.heads = COMPUTES;
    return place;
  }

  __device__ uint32_t first() const { return here.x * WARPS + warp; }
  __device__ const X* projected(uint32_t head) const { return static_cast<const X*>(p.qkv) + at.qkv + head * D; }
  __device__ bool idle() const { return here.x >= active || tiles == 0; }
  // Blocks of this cluster that have keys.
  __device__ uint32_t blocks_of_team() const {
    return tiles == 0 || team * cluster >= active ? 0 : min(cluster, active - team * cluster);
  }
  // Behind all else in shared memory.
  __device__ uint32_t product() const { return received + (cluster - 1) * layout.step(); }

  // What the position alone decides. Keys up to it are seen; those before it are in the cache.
  __device__ void begin(uint32_t now) {
    position = now;
    low = p.window && position + 1 > p.window ? position + 1 - p.window : 0;
    start = PAGED ? low / KEYS * KEYS : low;
    tiles = position < p.slots && position < p.positions ? (position - start) / KEYS + 1 : 0;
    active = min(tiles <= p.tiles ? cluster : here.of_x, max(1u, (tiles + WARPS - 1) / WARPS));
    leads = here.x == (tiles - 1) / WARPS % active;
    if (idle()) return;
    keys.end = position;
    if constexpr (PAGED) keys.low = low;
    core.begin(keys, start + first() * KEYS, active * WARPS * KEYS);
    row.fetch_angles(p, position);
  }

  // Row `job` of the heads', behind which is the new key's.
  __device__ void fetch_row(int job) {
    if constexpr (COMPUTES > 0) row.load_row(p, projected_rows + min(job, at.heads) * D * sizeof(X));
    else row.fetch_row(p, projected(job < at.heads ? at.head + job : p.heads + at.kv), job <= at.heads);
  }

  // Rotated rows to shared memory, the new key and value to the cache.
  __device__ void place_rows() {
    // Eight half-warps take the rows in one iteration, unless there are nine: eight heads and the new key.
#pragma unroll 1
    for (int job = 2 * warp + lane / 16, base = 0; base <= at.heads; base += 2 * WARPS, job += 2 * WARPS) {
      if (base > 0) {
        row.fetch_norm(p, job < at.heads ? p.q_norm : p.k_norm);
        fetch_row(job);
      }
      row.apply_rope(p);
      if (job > at.heads) continue;
      const uint32_t to = shared + Memory::ROWS + job * Memory::ROW;
      const int at_x = Row::place_x(p), at_y = Row::place_y(p);
      const Run x(row.x), y(row.y);
      x.store(to + 2 * at_x);
      y.store(to + 2 * at_y);
      if (RESTS && job < at.heads) {
        x.rest(row.x).store(shared + layout.rest(job) + 2 * at_x);
        y.rest(row.y).store(shared + layout.rest(job) + 2 * at_y);
      }
      if (leads && at.appends && job == at.heads && !is_missing()) {
        C* k = static_cast<C*>(p.k_cache) + slot(p.k_strides);
        x.store(k + at_x);
        y.store(k + at_y);
      }
    }
    if (leads && at.appends && warp == (tiles - 1) % WARPS && t == 0 && !is_missing()) {
      C* v = static_cast<C*>(p.v_cache) + slot(p.v_strides);
#pragma unroll
      for (int i = 0; i < STEPS; i += 4)
        *reinterpret_cast<uint4*>(v + i * 16 + g * 8) =
            make_uint4(fresh_value[i], fresh_value[i + 1], fresh_value[i + 2], fresh_value[i + 3]);
    }
  }

  __device__ static void put(X* y, float4 v) {
    if constexpr (RESTS) *reinterpret_cast<float4*>(y) = v;
    else *reinterpret_cast<uint2*>(y) = make_uint2(pack2<X>(v.x, v.y), pack2<X>(v.z, v.w));
  }

  // The new value, as a lane has values.
  __device__ void fetch_value() {
    if constexpr (COMPUTES > 0) {
      const uint32_t of_value = projected_rows + (at.heads + 1) * D * sizeof(X);
#pragma unroll
      for (int i = 0; i < STEPS; i += 4) {
        const uint4 v = load_shared(of_value + (i * 16 + g * 8) * sizeof(X));
        fresh_value[i] = v.x, fresh_value[i + 1] = v.y, fresh_value[i + 2] = v.z, fresh_value[i + 3] = v.w;
      }
      return;
    }
    const X* value = projected(p.heads + p.kv_heads + at.kv);
    if constexpr (!RESTS) {
      Core::Value::fetch(fresh_value, value, true);
    } else {
#pragma unroll
      for (int i = 0; i < STEPS; i += 2) {
        uint32_t r[4];
        fetch16(r, value + i / 4 * 64 + g * 8 + i % 4 * 2, true);
        fresh_value[i] = pack2<C>(__uint_as_float(r[0]), __uint_as_float(r[1]));
        fresh_value[i + 1] = pack2<C>(__uint_as_float(r[2]), __uint_as_float(r[3]));
      }
    }
  }

  // Whether the pool has no page for the position.
  __device__ bool is_missing() const { return PAGED && page_of(p, here.z, position) >= p.pages.pages; }

  // Where the new key or value goes.
  __device__ uint64_t slot(const uint64_t (&strides)[3]) const {
    if constexpr (!PAGED) return at.plane + uint64_t(position) * D;
    const uint32_t token = position & (p.pages.page - 1);
    return page_of(p, here.z, position) * strides[0] + token * strides[1] + at.kv * strides[2];
  }

  // The new key and value among those that were fetched.
  __device__ void insert() {
    const int place = (position - start) % KEYS;
    const uint32_t key = shared + Memory::ROWS + at.heads * Memory::ROW + t * 16;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const uint4 piece = load_shared(key + 64 * i);
      const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const bool mine = place == 8 * j + g;
#pragma unroll
        for (int w = 0; w < 4; ++w) core.k[0][j][4 * i + w] = mine ? words[w] : core.k[0][j][4 * i + w];
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool mine = place == 2 * t + j % 2 + j / 2 * 8;
#pragma unroll
      for (int w = 0; w < STEPS; ++w) core.v[0][j][w] = mine ? fresh_value[w] : core.v[0][j][w];
    }
  }

  // Scores of the tile that was fetched; heads are rows.
  __device__ void score_tile(float (&s)[2][4]) const {
    const int head = min(g, at.heads - 1);
    const uint32_t query = shared + Memory::ROWS + head * Memory::ROW + t * 16;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const uint4 q = load_shared(query + 64 * i);
      // Rows from 8 on are empty where queries are exact in C.
      uint4 rest = make_uint4(0, 0, 0, 0);
      if constexpr (RESTS) rest = load_shared(shared + layout.rest(head) + t * 16 + 64 * i);
      const uint32_t early[4] = {q.x, rest.x, q.y, rest.y}, late[4] = {q.z, rest.z, q.w, rest.w};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        mma<C>(s[j], early, core.k[0][j][4 * i], core.k[0][j][4 * i + 1]);
        mma<C>(s[j], late, core.k[0][j][4 * i + 2], core.k[0][j][4 * i + 3]);
      }
    }
    if constexpr (RESTS) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i / 2][i % 2] += s[i / 2][i % 2 + 2];
    }
  }

  // Softmax weights as operands: rounded in rows 0-7, and in rows 8-15 what rounding has left of them. Takes earlier
  // sums to the new maximum.
  __device__ void weigh(float (&s)[2][4], uint32_t tile, bool earlier, uint32_t (&a)[4]) {
    if (keys.softcap == 0.f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i / 2][i % 2] *= keys.scale;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i / 2][i % 2] = score(keys, s[i / 2][i % 2]);
    }
    float top = m;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t key = start + tile * KEYS + i / 2 * 8 + 2 * t + i % 2;
      if (key - low > position - low) s[i / 2][i % 2] = -INFINITY;
      top = fmaxf(top, s[i / 2][i % 2]);
    }
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
    top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
    const float off = origin(top);
    if (earlier) {
      const float fade = exp2_fast(m - off);
      l *= fade;
#pragma unroll
      for (int i = 0; i < 8 * STEPS; ++i) o[i / 8][i / 4 % 2][i % 4] *= fade;
    }
    m = top;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float first = exp2_fast(s[j][0] - off), second = exp2_fast(s[j][1] - off);
      l += first + second;
      a[2 * j] = pack2<C>(first, second);
      const float2 kept = unpack2<C>(a[2 * j]);
      a[2 * j + 1] = pack2<C>(first - kept.x, second - kept.y);
    }
  }

  // This warp's tiles.
  __device__ void attend() {
    const uint32_t stride = active * WARPS;
    m = -INFINITY, l = 0.f;
#pragma unroll
    for (int i = 0; i < 8 * STEPS; ++i) o[i / 8][i / 4 % 2][i % 4] = 0.f;
#pragma unroll 1
    for (uint32_t tile = first(); tile < tiles; tile += stride) {
      if (tile == tiles - 1) insert();
      float s[2][4] = {};
      score_tile(s);
      const bool more = tile + stride < tiles;
      if (more) {
        core.advance_page();
        core.fetch_keys(keys, start + (tile + stride) * KEYS);
      }
      uint32_t a[4];
      weigh(s, tile, tile != first(), a);
#pragma unroll
      for (int r = 0; r < STEPS; ++r) {
        uint32_t v[4];
        Core::Value::operand(core.v[0], r, v);
        mma<C>(o[r][0], a, v[0], v[2]);
        mma<C>(o[r][1], a, v[1], v[3]);
      }
      if (more) {
        core.fetch_values(keys, start + (tile + stride) * KEYS);
        core.look(keys, start + (tile + 2 * stride) * KEYS);
      }
    }
  }

  // This warp's sums to shared memory. A lane has 16 neighbouring values of its head for each 64.
  __device__ void store() {
    l += __shfl_xor_sync(FULL, l, 1);
    l += __shfl_xor_sync(FULL, l, 2);
    if (t == 0) {
      const uint32_t to = shared + (g * WARPS + warp) * 4;
      store_shared(to + Memory::TOPS, __float_as_uint(m));
      store_shared(to + Memory::WEIGHTS, __float_as_uint(l));
    }
    if (g >= at.heads) return;
#pragma unroll
    for (int r = 0; r < STEPS; r += 2) {
      const uint32_t to = sums + (warp * at.heads + g) * Memory::SUMS + Memory::place(r / 4 * 64 + 16 * t);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float(&x)[2][4] = o[r], (&y)[2][4] = o[r + 1];
        store_shared(to + 4 * (8 * c + 2 * (r % 4)), make_float4(x[0][c] + x[0][c + 2], x[1][c] + x[1][c + 2],
                                                                 y[0][c] + y[0][c + 2], y[1][c] + y[1][c + 2]));
      }
    }
  }

  // Four values of head h over the block's warps.
  __device__ Sums merge_warps(int h, int d) const {
    const float4 tops = load_shared_float4(shared + Memory::TOPS + h * WARPS * 4);
    const float4 weights = load_shared_float4(shared + Memory::WEIGHTS + h * WARPS * 4);
    Sums r = {make_float4(0.f, 0.f, 0.f, 0.f), fmaxf(fmaxf(tops.x, tops.y), fmaxf(tops.z, tops.w)), 0.f};
    const float off = origin(r.top), of_tops[WARPS] = {tops.x, tops.y, tops.z, tops.w};
    const float of_weights[WARPS] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float4 v = load_shared_float4(sums + (w * at.heads + h) * Memory::SUMS + Memory::place(d));
      const float share = exp2_fast(of_tops[w] - off);
      r.values.x = fmaf(v.x, share, r.values.x), r.values.y = fmaf(v.y, share, r.values.y);
      r.values.z = fmaf(v.z, share, r.values.z), r.values.w = fmaf(v.w, share, r.values.w);
      r.weight = fmaf(of_weights[w], share, r.weight);
    }
    return r;
  }

  // To the cluster's first block.
  __device__ void send_sums(const Sums& r, int i) const {
    const uint32_t barrier = in_block(shared, 0), from_here = received + (rank - 1) * layout.step();
    send(in_block(from_here + 4 * i, 0), r.values, barrier);
    if (i % D == 0) send(in_block(from_here + at.heads * D * 4 + i / D * 8, 0), make_float2(r.top, r.weight), barrier);
  }

  // What `count` blocks have sent, to the sums r. The loads of the second loop do not wait for one another.
  __device__ void add_received(Sums& r, uint32_t count, int i) const {
    const uint32_t weights = received + at.heads * D * 4 + i / D * 8;
    float top = r.top;
    for (uint32_t b = 0; b < count; ++b) top = fmaxf(top, load_shared_float2(weights + b * layout.step()).x);
    const float off = origin(top), own = exp2_fast(r.top - off);
    r = {make_float4(r.values.x * own, r.values.y * own, r.values.z * own, r.values.w * own), top, r.weight * own};
#pragma unroll 4
    for (uint32_t b = 0; b < count; ++b) {
      const float2 of_head = load_shared_float2(weights + b * layout.step());
      const float4 v = load_shared_float4(received + b * layout.step() + 4 * i);
      const float share = exp2_fast(of_head.x - off);
      r.values.x = fmaf(v.x, share, r.values.x), r.values.y = fmaf(v.y, share, r.values.y);
      r.values.z = fmaf(v.z, share, r.values.z), r.values.w = fmaf(v.w, share, r.values.w);
      r.weight = fmaf(of_head.y, share, r.weight);
    }
  }

  // Brings warps, blocks and clusters together, and writes y.
  __device__ void finish() {
    const uint32_t blocks = blocks_of_team();
    if (blocks > 1) {
      // The first block's barrier is there before others send.
      if constexpr (COMPUTES == 0) cluster_wait();
      if (rank == 0 && threadIdx.x == 0) barrier_expect(shared, (blocks - 1) * layout.bytes());
    }
    const Partials partials(p, here, at.row, D);
#pragma unroll 1
    for (int i = 4 * threadIdx.x; i < at.heads * D; i += 4 * WARPS * WARP) {
      Sums r = merge_warps(i / D, i % D);
      if (rank != 0) {
        send_sums(r, i);
        continue;
      }
      if (blocks > 1) {
        barrier_wait(shared, 0);
        add_received(r, blocks - 1, i);
      }
      const float4 mean = r.mean();
      if (active <= cluster) {
        put(static_cast<X*>(p.y) + at.out + i, mean);
      } else {
        const float weight = r.top + __log2f(r.weight);
        float4* to = reinterpret_cast<float4*>(partials.both + team * MAX_HEADS * D + i);
        to[0] = make_float4(mean.x, weight, mean.y, weight);
        to[1] = make_float4(mean.z, weight, mean.w, weight);
      }
    }
    if (active <= cluster || rank != 0) return;
    const uint32_t teams = (active + cluster - 1) / cluster;
    if (is_last(p.counters + at.row, teams)) merge_narrow<Core>(p, partials.both, teams, at.heads, D, at.out);
  }

  // All that can be fetched before the PDL wait, if the sequence stands at this position.
  __device__ void prepare(uint32_t expected) {
    row.fetch_norm(p, 2 * warp + lane / 16 < at.heads ? p.q_norm : p.k_norm);
    begin(expected);
  }

  // This half-warp's first row, and the new value.
  __device__ void take_rows() {
    fetch_row(2 * warp + lane / 16);
    fetch_value();
  }

  __device__ void attend_and_finish() {
    place_rows();
    __syncthreads();
    attend();
    store();
    __syncthreads();
    finish();
  }

  __device__ void decode() {
    prepare(read_position(p.position + here.z));
    pdl_wait();
    const uint32_t now = read_position(p.position + here.z);
    take_rows();
    // What was fetched is another step's.
    if (now != position) begin(now);
    if (!idle()) attend_and_finish();
  }
};

template <typename X, typename C, int D, bool PAGED>
__device__ __forceinline__ void decode_in_cluster(const DecodingParams& p) {
  extern __shared__ uint4 memory[];
  pdl_launch();
  // By asm, which the compiler does not repeat: it would read a slow special register at each access.
  uint32_t shared, blocks;
  asm volatile("mov.u32 %0, %1;" : "=r"(shared) : "r"(shared_address(memory)));
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  if (threadIdx.x == 0) {
    barrier_init(shared, 1);
    barriers_made();
  }
  cluster_arrive();
  ClusterDecoding<X, C, D, PAGED> step(p, {blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x, gridDim.y}, blocks, shared);
  step.decode();
}

#endif

}  // namespace fused
