// The attention step of decoding in one launch: from a row of the fused projection per sequence,
// q and k norm, rotation, cache append, attention over all keys so far.
//
// A row of blocks (grid x) shares the keys of one key/value head of one sequence, with up to HEADS
// of its query heads: clusters of blocks on sm_90, single blocks elsewhere. How many of them work
// follows from the position, which is read here. The blocks of a cluster merge through distributed
// shared memory; several clusters through `partial` and a counter that the last one sets back.
//
// Keys before the position were written by earlier steps, which are complete if the position is
// what it is, so they are fetched before the kernel in front is waited for; the position is read
// again behind.
#include "cluster.cuh"
#include "decoding_cores.cuh"

using namespace fused;

struct Params {
  const void* qkv;           // [B, (heads + 2 kv_heads) head_dim]
  const void* q_norm;        // [head_dim], or null
  const void* k_norm;
  const float* cos;          // [positions, pairs]
  const float* sin;
  void* k_cache;             // [B, kv_heads, slots, head_dim]
  void* v_cache;
  void* y;                   // [B, heads head_dim]
  float2* partial;           // of each cluster: [HEADS head_dim] of (mean value, log2 weight)
  uint32_t* counters;        // zero between launches
  const uint32_t* position;  // [B]
  uint32_t heads, kv_heads, head_dim, slots, positions, pairs;
  uint32_t window;           // 0: none
  uint32_t clusters;         // in a row of blocks
  uint32_t tiles;            // of keys, before another cluster joins; at least one a warp
  uint32_t single;           // tiles up to which one block does it all
  int32_t dtype;             // of qkv, the norms and y: 0 f32, 1 f16, 2 bf16
  int32_t cache_dtype;
  int32_t interleaved;
  int32_t rehearse;          // whether there is time before the kernel in front is complete
  float scale, softcap, eps;
};

__device__ __forceinline__ uint32_t read_position(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// A block's shared memory. `stride`: from head to head, in floats.
template <class Core> struct Shared {
  char* queries;   // operands of the tensor cores
  float* q;        // [HEADS][head_dim]
  float* k;        // the new key and value, as the cache holds them
  float* v;
  float* fresh;    // the new key's scores
  float* tops;     // of each warp, then of the block
  float* weights;
  float* top;
  float* weight;
  float* sums;     // [WARPS][heads][stride]
  int stride;

  __device__ Shared(char* memory, int head_dim) {
    queries = memory;
    q = reinterpret_cast<float*>(memory + Core::QUERIES);
    k = q + HEADS * head_dim;
    v = k + head_dim;
    fresh = v + head_dim;
    tops = fresh + HEADS;
    weights = tops + Core::WARPS * HEADS;
    top = weights + Core::WARPS * HEADS;
    weight = top + HEADS;
    sums = weight + HEADS;
    sums += (reinterpret_cast<uintptr_t>(sums) / 4) % 2;
    stride = head_dim + head_dim % 2 + 2;
  }
};

__device__ __forceinline__ float read_weight(const void* p, int i, int dtype) {
  if (dtype == 0) return __ldg(static_cast<const float*>(p) + i);
  if (dtype == 1) return to_float(__ldg(static_cast<const __half*>(p) + i));
  return to_float(__ldg(static_cast<const __nv_bfloat16*>(p) + i));
}

// One head's row, of which a lane has elements lane, lane + 32, ...: normed and rotated. `scratch`
// holds head_dim floats.
template <int N>
__device__ __forceinline__ void turn(const Params& p, const void* norm, uint32_t position, int head_dim,
                                     float (&x)[N], float* scratch) {
  const int lane = threadIdx.x % WARP, pairs = p.pairs;
  const uint64_t row = uint64_t(min(position, p.positions - 1)) * pairs;
  float cos[N], sin[N], weight[N];
#pragma unroll
  for (int e = 0; e < N; ++e) {
    const int d = lane + 32 * e, i = p.interleaved ? d / 2 : d < pairs ? d : d - pairs;
    const bool rotated = d < 2 * pairs;
    cos[e] = rotated ? __ldg(p.cos + row + i) : 1.f;
    sin[e] = rotated ? __ldg(p.sin + row + i) : 0.f;
    weight[e] = norm && d < head_dim ? read_weight(norm, d, p.dtype) : 1.f;
  }
  if (norm) {
    float squares = 0.f;
#pragma unroll
    for (int e = 0; e < N; ++e) squares += x[e] * x[e];
    const float factor = rsqrtf(warp_sum(squares) / head_dim + p.eps);
#pragma unroll
    for (int e = 0; e < N; ++e)
      x[e] = rounded_to(p.dtype, rounded_to(p.dtype, x[e] * factor) * weight[e]);
  }
#pragma unroll
  for (int e = 0; e < N; ++e)
    if (lane + 32 * e < head_dim) scratch[lane + 32 * e] = x[e];
  __syncwarp();
#pragma unroll
  for (int e = 0; e < N; ++e) {
    const int d = lane + 32 * e;
    if (d >= 2 * pairs) continue;
    const bool first = p.interleaved ? d % 2 == 0 : d < pairs;
    const float y = scratch[p.interleaved ? d ^ 1 : first ? d + pairs : d - pairs];
    x[e] = x[e] * cos[e] + (first ? -y : y) * sin[e];
  }
  __syncwarp();
}

// What there is to do, as far as the position tells.
struct Work {
  uint32_t start, end;  // keys from earlier steps that are seen
  uint32_t tiles;
  uint32_t active;      // clusters that take part
  bool single;          // the first block alone does it all

  __device__ Work(const Params& p, uint32_t position, uint32_t keys) {
    end = min(position, p.slots);
    start = p.window && position + 1 > p.window ? min(position + 1 - p.window, end) : 0;
    tiles = (end - start + keys - 1) / keys;
    active = min(p.clusters, max(1u, (tiles + p.tiles - 1) / p.tiles));
    single = active == 1 && tiles <= p.single;
  }
};

// Which heads a block works on.
struct Place {
  uint32_t kv, head;  // key/value head, first query head
  int heads;
  bool appends;       // of the blocks with these keys, those of the first query heads append
  uint64_t qkv, plane, out, row;

  __device__ Place(const Params& p, int head_dim) {
    const uint32_t group = p.heads / p.kv_heads, parts = (group + HEADS - 1) / HEADS;
    const uint32_t part = blockIdx.y % parts, b = blockIdx.z;
    kv = blockIdx.y / parts;
    head = kv * group + part * HEADS;
    heads = min(group - part * HEADS, uint32_t(HEADS));
    appends = part == 0;
    qkv = uint64_t(b) * (p.heads + 2 * p.kv_heads) * head_dim;
    plane = (uint64_t(b) * p.kv_heads + kv) * p.slots * head_dim;
    out = (uint64_t(b) * p.heads + head) * head_dim;
    row = b * gridDim.y + blockIdx.y;
  }
};

// A lane's part of row `job`: the queries in turn, the new key, the new value.
template <int N>
__device__ __forceinline__ void read_row(const Params& p, const Place& at, int head_dim, int job,
                                         float (&x)[N]) {
  const int lane = threadIdx.x % WARP;
  const uint32_t from =
      job < at.heads ? at.head + job : p.heads + at.kv + (job > at.heads ? p.kv_heads : 0);
#pragma unroll
  for (int e = 0; e < N; ++e) {
    const int d = lane + 32 * e;
    const bool there = d < head_dim && job < at.heads + 2;
    x[e] = there ? load_any(p.qkv, at.qkv + uint64_t(from) * head_dim + d, p.dtype) : 0.f;
  }
}

// Leaves the row where it is needed, rotated if it is a query or the key.
template <class Core, int N>
__device__ __forceinline__ void place_row(const Params& p, const Shared<Core>& s, const Place& at,
                                          uint32_t position, int head_dim, int job, float (&x)[N]) {
  float* out = job < at.heads ? s.q + job * head_dim : job == at.heads ? s.k : s.v;
  if (job <= at.heads) turn(p, job < at.heads ? p.q_norm : p.k_norm, position, head_dim, x, out);
#pragma unroll
  for (int e = 0; e < N; ++e) {
    const int d = int(threadIdx.x % WARP) + 32 * e;
    if (d >= head_dim) continue;
    out[d] = rounded_to(job < at.heads ? p.dtype : Core::dtype(p.cache_dtype), x[e]);
    if (job < at.heads) Core::put(s.queries, job, d, out[d]);
  }
}

// Scores of the new key; the last warps, which have the fewest keys.
template <class Core>
__device__ __forceinline__ void score_fresh(const Shared<Core>& s, const Keys& keys, int heads) {
  const int lane = threadIdx.x % WARP;
  for (int h = Core::WARPS - 1 - int(threadIdx.x / WARP); h < heads; h += Core::WARPS) {
    float product = 0.f;
    for (int d = lane; d < keys.head_dim; d += WARP) product += s.q[h * keys.head_dim + d] * s.k[d];
    product = warp_sum(product);
    if (lane == 0) s.fresh[h] = score(keys, product);
  }
}

// A value on its way: the sum of weight times value, the sum of the weights, both relative to the
// highest score.
struct Value {
  float top, weight, sum;
};

// Element d of head h over the block's first `warps` warps, and the new key where `leads`.
template <class Core>
__device__ __forceinline__ Value merge_warps(const Shared<Core>& s, int heads, int h, int d,
                                             int warps, bool leads) {
  float tops[Core::WARPS];
  Value r = {leads ? s.fresh[h] : -INFINITY, 0.f, 0.f};
  const float fresh = r.top;
#pragma unroll
  for (int w = 0; w < Core::WARPS; ++w) {
    tops[w] = w < warps ? s.tops[w * HEADS + h] : -INFINITY;
    r.top = fmaxf(r.top, tops[w]);
  }
  if (leads) {
    r.weight = exp2_fast(fresh - r.top);
    r.sum = r.weight * s.v[d];
  }
#pragma unroll
  for (int w = 0; w < Core::WARPS; ++w) {
    const float share = w < warps ? exp2_fast(tops[w] - r.top) : 0.f;
    r.weight += share * (w < warps ? s.weights[w * HEADS + h] : 0.f);
    r.sum += share * (w < warps ? s.sums[(w * heads + h) * s.stride + d] : 0.f);
  }
  return r;
}

// The same over the blocks of the cluster.
template <class Core>
__device__ __forceinline__ Value merge_blocks(const Shared<Core>& s, int h, int d, int size) {
  float tops[8], weights[8], sums[8];
  Value r = {-INFINITY, 0.f, 0.f};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int rank = min(j, size - 1);
    tops[j] = cluster_read(s.top + h, rank);
    weights[j] = cluster_read(s.weight + h, rank);
    sums[j] = cluster_read(s.sums + h * s.stride + d, rank);
  }
#pragma unroll
  for (int j = 0; j < 8; ++j)
    if (j < size) r.top = fmaxf(r.top, tops[j]);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    // A block without keys has left nothing.
    if (j >= size || !(weights[j] > 0.f)) continue;
    const float share = exp2_fast(tops[j] - r.top);
    r.weight += share * weights[j];
    r.sum += share * sums[j];
  }
  return r;
}

// Counts a block of each cluster; in the last of them, true, and the counter is back at zero.
__device__ __forceinline__ bool is_last(uint32_t* counter, uint32_t of) {
  __shared__ uint32_t before;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    before = atomicAdd(counter, 1);
    if (before == of - 1) *counter = 0;
  }
  __syncthreads();
  __threadfence();
  return before == of - 1;
}

// Over the clusters, from what they left in memory, `step` values apart.
__device__ __forceinline__ float merge_clusters(const float2* partial, uint32_t clusters, int step) {
  Value r = {-INFINITY, 0.f, 0.f};
#pragma unroll 4
  for (uint32_t c = 0; c < clusters; ++c) {
    const float2 o = __ldcg(partial + c * step);
    const float top = fmaxf(r.top, o.y), fade = exp2_fast(r.top - top), share = exp2_fast(o.y - top);
    r = {top, r.weight * fade + share, r.sum * fade + share * o.x};
  }
  return __fdividef(r.sum, r.weight);
}

// What a block takes part in.
struct Part {
  bool real;        // false: a rehearsal
  int size, rank;   // of the cluster; a cluster of one where the first block does it all
  uint32_t active;  // clusters
  int warps;        // of this block that have had keys
  bool leads;       // whether it has the new key
};

// Brings the block's warps together, then the blocks, and writes y.
template <class Core>
__device__ __forceinline__ void finish(const Params& p, const Shared<Core>& s, const Place& at,
                                       const Part& part, int head_dim, uint32_t position) {
  constexpr int THREADS = Core::WARPS * WARP;
  const int total = at.heads * head_dim, step = HEADS * head_dim;
  float2* partial = p.partial + at.row * p.clusters * step;
  const auto emit = [&](int i, const Value& v) {
    const float mean = __fdividef(v.sum, v.weight);
    if (!part.real) return;
    if (part.active == 1) store_any(p.y, at.out + i, p.dtype, mean);
    else partial[blockIdx.x / cluster_size() * step + i] = make_float2(mean, v.top + __log2f(v.weight));
  };
  for (int i = threadIdx.x; i < total; i += THREADS) {
    const int h = i / head_dim, d = i % head_dim;
    const Value v = merge_warps(s, at.heads, h, d, part.warps, part.leads);
    if (part.size == 1) {
      emit(i, v);
    } else {
      // Warp 0's sums at this place have been read by this thread, and by no other.
      s.sums[h * s.stride + d] = v.sum;
      if (d == 0) s.top[h] = v.top, s.weight[h] = v.weight;
    }
  }
  // Each block of a cluster goes on with its slice.
  const int slice = (total + part.size - 1) / part.size;
  const int first = part.rank * slice + threadIdx.x, end = min(total, (part.rank + 1) * slice);
  if (part.size > 1) {
    cluster_sync();
    for (int i = first; i < end; i += THREADS)
      emit(i, merge_blocks(s, i / head_dim, i % head_dim, part.size));
    cluster_arrive();
  }
  // Behind the cluster's barrier, which would wait for these to be complete.
  if (part.leads && at.appends && part.real) {
    const uint64_t slot = at.plane + uint64_t(position) * head_dim;
    for (int d = threadIdx.x; d < head_dim; d += THREADS) {
      store_any(p.k_cache, slot + d, Core::dtype(p.cache_dtype), s.k[d]);
      store_any(p.v_cache, slot + d, Core::dtype(p.cache_dtype), s.v[d]);
    }
  }
  if (part.active > 1 && part.real &&
      is_last(p.counters + at.row * part.size + part.rank, part.active))
    for (int i = first; i < end; i += THREADS)
      store_any(p.y, at.out + i, p.dtype, merge_clusters(partial + i, part.active, step));
  if (part.size > 1) cluster_wait();
}

template <class Core> __device__ __forceinline__ void decode(const Params& p) {
  constexpr int N = Core::LANE, WARPS = Core::WARPS;
  extern __shared__ uint4 memory[];
  allow_next();
  const int head_dim = Core::DIM ? Core::DIM : int(p.head_dim), warp = threadIdx.x / WARP;
  const Shared<Core> s(reinterpret_cast<char*>(memory), head_dim);
  const uint32_t size = cluster_size(), cluster = blockIdx.x / size;
  const uint32_t block = blockIdx.x * WARPS, first = block + warp;
  const Place at(p, head_dim);
  Keys keys = {p.k_cache, p.v_cache, at.plane, 0, head_dim, p.cache_dtype,
               p.softcap > 0.f ? p.scale : p.scale * LOG2E, p.softcap};
  Core core;
  Work work(p, 0, Core::KEYS);
  uint32_t position = UINT32_MAX;
  for (int i = threadIdx.x; i < Core::QUERIES / 16; i += WARPS * WARP) memory[i] = make_uint4(0, 0, 0, 0);

  // The rehearsal goes the same way on what is there; it leaves nothing behind but the keys in
  // registers and the instructions in the caches, which otherwise would be fetched one by one once
  // the queries are there. Threads may read different positions in it, and no barrier or shuffle
  // may depend on that.
#pragma unroll 1
  for (int pass = p.rehearse ? 0 : 1; pass < 2; ++pass) {
    const bool real = pass == 1;
    __syncthreads();
    if (real) wait_previous();
    const uint32_t now = read_position(p.position + blockIdx.z);
    float x[N];
    read_row(p, at, head_dim, real ? warp : HEADS + 2, x);
    if (now != position) {
      position = now;
      work = Work(p, position, Core::KEYS);
      const bool idle = work.single ? blockIdx.x > 0 : cluster >= work.active;
      keys.end = idle ? 0 : work.end;
      core.fetch_keys(keys, work.start + first * Core::KEYS);
      core.fetch_values(keys, work.start + first * Core::KEYS);
    }
    const bool single = real ? work.single : size == 1;
    if (real) {
      const bool idle = single ? blockIdx.x > 0 : cluster >= work.active;
      if (position >= p.slots || position >= p.positions || idle) return;
    } else if (cluster > 0) {
      continue;
    }
    Part part;
    part.real = real;
    part.size = single ? 1 : size;
    part.rank = single ? 0 : cluster_rank();
    part.active = real ? work.active : 1;
    part.warps = real ? min(max(int(work.tiles) - int(block), 0), WARPS) : WARPS;
    // The new key goes to the block with the fewest others.
    part.leads = real ? blockIdx.x == part.size - 1 : true;
    for (int job = warp; job < at.heads + (part.leads ? 2 : 0); job += WARPS) {
      if (job != warp) read_row(p, at, head_dim, real ? job : HEADS + 2, x);
      place_row(p, s, at, position, head_dim, job, x);
    }
    __syncthreads();
    if (part.leads) score_fresh(s, keys, at.heads);
    core.start();
    const uint32_t stride = part.active * part.size * WARPS, tiles = real ? work.tiles : first + 1;
    for (uint32_t tile = first; tile < tiles; tile += stride)
      core.step(keys, work.start, tile, tile + stride, tiles, s.queries, s.q, at.heads);
    if (first < tiles)
      core.finish(s.sums + warp * at.heads * s.stride, s.stride, s.tops + warp * HEADS,
                  s.weights + warp * HEADS, at.heads, head_dim);
    __syncthreads();
    finish(p, s, at, part, head_dim, position);
  }
}

#define DECODING(NAME, BLOCKS, ...)                                                        \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__::WARPS* WARP, BLOCKS)           \
      flash_decoding_##NAME(const __grid_constant__ Params p) {                            \
    decode<__VA_ARGS__>(p);                                                                \
  }

#ifndef W64
#define W64 8
#define S64 4
#define B64 1
#endif
#define DECODING_DIM(D, W, SUB, BLOCKS)                                       \
  DECODING(d##D##_f16, BLOCKS, TensorCore<__half, D, W, SUB>)                 \
  DECODING(d##D##_bf16, BLOCKS, TensorCore<__nv_bfloat16, D, W, SUB>)

DECODING_DIM(64, W64, S64, B64)
#ifndef ONLY64
DECODING_DIM(80, 8, 2, 1)
DECODING_DIM(96, 8, 2, 1)
DECODING_DIM(128, 8, 2, 1)
DECODING_DIM(256, 4, 1, 2)
DECODING(any128, 1, LaneCore<4, 8>)
DECODING(any256, 1, LaneCore<8, 8>)
#endif
