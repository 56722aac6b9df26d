// The attention step of decoding in one launch: from a row of the fused projection per sequence, q and k norm,
// rotation, cache append, and attention over all keys so far (Flash-Decoding: keys split over blocks).
//
// Keys and values are in a cache of slots for each sequence, or in pages that a table has for it.
//
// A row of blocks (grid x) shares the keys of one key/value head of one sequence, with up to MAX_HEADS of its query
// heads. How many of the blocks work follows from the position, which is read here. Each writes its result to
// `partial`; the last one, by an atomic counter, merges them and resets the counter. One block alone, which is
// enough for a few hundred keys, writes y at once.
//
// Keys before the position were written by earlier steps, which are complete once the position has its value. So these
// keys are loaded before the PDL wait, and the position is read again after it. A chain of launches in which an earlier
// kernel writes such keys while the position stays the same is not allowed.
#pragma once

#include "attention/decode_place.cuh"
#include "attention/decode_warp.cuh"

namespace fused {

// Whether all is run once without effect before the PDL wait, which brings the instructions into the caches.
__device__ __forceinline__ bool warms_up(const DecodingParams& p) { return COMPILED_FOR >= 900 && p.warm_up; }

__device__ __forceinline__ uint32_t read_position(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// A block's shared memory. `stride`: from head to head, in floats.
template <class Core> struct Shared {
  char* queries;       // operands of the tensor cores
  float* q;            // [MAX_HEADS][head_dim]
  float* k;            // the new key and value, as the cache holds them: codes without their scales
  float* v;
  float* cos;          // of each element; 1 and 0 where it is not rotated
  float* sin;
  float* q_norm;
  float* k_norm;
  float* fresh;        // the new key's scores
  float* tops;         // of each warp
  float* weights;
  uint32_t* position;  // as it was read before the PDL wait, the same for all threads
  float* scales;       // of the new key and value, if they are codes
  float* sums;         // [WARPS][heads][stride]
  int stride;

  __device__ Shared(char* memory, int head_dim) {
    queries = memory;
    q = reinterpret_cast<float*>(memory + Core::QUERIES);
    k = q + MAX_HEADS * head_dim;
    v = k + head_dim;
    cos = v + head_dim;
    sin = cos + head_dim;
    q_norm = sin + head_dim;
    k_norm = q_norm + head_dim;
    fresh = k_norm + head_dim;
    tops = fresh + MAX_HEADS;
    weights = tops + Core::WARPS * MAX_HEADS;
    position = reinterpret_cast<uint32_t*>(weights + Core::WARPS * MAX_HEADS);
    scales = weights + Core::WARPS * MAX_HEADS + 1;
    sums = weights + Core::WARPS * MAX_HEADS + 4;
    stride = head_dim + head_dim % 2 + 2;
  }
};

// As raw bits: CUDA's loads of 16-bit floats are plain asm to the compiler, which may hoist them past
// the test for a null pointer.
__device__ __forceinline__ float read_weight(const void* p, int i, int dtype) {
  if (dtype == F32) return __ldg(static_cast<const float*>(p) + i);
  return widen_raw(__ldg(static_cast<const uint16_t*>(p) + i), dtype);
}

// What every head's row is multiplied with at a position.
template <class Core>
__device__ __forceinline__ void read_angles(const DecodingParams& p, const Shared<Core>& s, uint32_t position,
                                            int head_dim) {
  const int pairs = p.pairs;
  const uint64_t row = uint64_t(min(position, p.positions - 1)) * pairs;
  for (int d = threadIdx.x; d < head_dim; d += Core::WARPS * WARP) {
    const int i = p.interleaved ? d / 2 : d < pairs ? d : d - pairs;
    const bool rotated = d < 2 * pairs;
    s.cos[d] = rotated ? __ldg(p.cos + row + i) : 1.f;
    s.sin[d] = rotated ? __ldg(p.sin + row + i) : 0.f;
    s.q_norm[d] = p.q_norm ? read_weight(p.q_norm, d, p.dtype) : 1.f;
    s.k_norm[d] = p.q_norm ? read_weight(p.k_norm, d, p.dtype) : 1.f;
  }
}

// 1 / rms of a head's row, of which a lane has N elements, those past its end zero.
template <int N>
__device__ __forceinline__ float rms_factor(const DecodingParams& p, const float (&x)[N], int head_dim) {
  float squares = 0.f;
#pragma unroll
  for (int e = 0; e < N; ++e) squares += x[e] * x[e];
  return rsqrtf(warp_sum(squares) / head_dim + p.eps);
}

// One head's row, of which a lane has elements lane, lane + 32, ...: normed and rotated. `scratch`
// holds head_dim floats.
template <class Memory, int N>
__device__ __forceinline__ void apply_rope(const DecodingParams& p, const Memory& s, const float* norm,
                                     int head_dim, float (&x)[N], float* scratch) {
  const int lane = threadIdx.x % WARP, pairs = p.pairs;
  if (p.q_norm) {
    const float factor = rms_factor(p, x, head_dim);
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const int d = lane + 32 * e;
      if (d < head_dim) x[e] = rounded_to(p.dtype, rounded_to(p.dtype, x[e] * factor) * norm[d]);
    }
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
    x[e] = x[e] * s.cos[d] + (first ? -y : y) * s.sin[d];
  }
  __syncwarp();
}

// A lane's part of row `job`: the queries in turn, the new key, the new value.
template <int N>
__device__ __forceinline__ void read_row(const DecodingParams& p, const Place& at, int head_dim, int job,
                                         float (&x)[N]) {
  const int lane = threadIdx.x % WARP;
  const uint32_t from =
      job < at.heads ? at.head + job : p.heads + at.kv + (job > at.heads ? p.kv_heads : 0);
#pragma unroll
  for (int e = 0; e < N; ++e) {
    const int d = lane + 32 * e;
    const bool there = d < head_dim && job < at.heads + 2;
    x[e] = there ? widen_raw(read_raw(p.qkv, p.dtype, at.qkv + from * head_dim + d), p.dtype) : 0.f;
  }
}

// Leaves what the codes of a row stand for, and gives their scale.
template <int N>
__device__ __forceinline__ float place_codes(const float (&x)[N], int format, int head_dim, float* out) {
  const int lane = threadIdx.x % WARP;
  float most = 0.f;
#pragma unroll
  for (int e = 0; e < N; ++e)
    if (lane + 32 * e < head_dim) most = larger(most, x[e]);
#pragma unroll
  for (int offset = WARP / 2; offset > 0; offset /= 2) most = larger(most, __shfl_xor_sync(FULL, most, offset));
  Quantizer quantizer(most, format);
  if (format == E4M3) {
    uint32_t errors[Quantizer::STEPS] = {};
#pragma unroll
    for (int e = 0; e < N; ++e)
      if (lane + 32 * e < head_dim) quantizer.add_errors(x[e], errors);
    quantizer.take_best(errors, WARP, FULL);
  }
#pragma unroll
  for (int e = 0; e < N; ++e)
    if (lane + 32 * e < head_dim) out[lane + 32 * e] = code_value(quantizer.code(x[e], format), format);
  return quantizer.scale;
}

// Leaves the row where it is needed, rotated if it is a query or the key.
template <class Core, int N>
__device__ __forceinline__ void place_row(const DecodingParams& p, const Shared<Core>& s, const Place& at,
                                          int head_dim, int job, float (&x)[N]) {
  float* out = job < at.heads ? s.q + job * head_dim : job == at.heads ? s.k : s.v;
  if (job <= at.heads) apply_rope(p, s, job < at.heads ? s.q_norm : s.k_norm, head_dim, x, out);
  if (job >= at.heads && Core::coded(p.cache_dtype)) {
    const float scale = place_codes(x, p.cache_dtype, head_dim, out);
    if (threadIdx.x % WARP == 0) s.scales[job - at.heads] = scale;
    return;
  }
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
  const float scale = Core::coded(keys.dtype) ? s.scales[0] : 1.f;
  const int lane = threadIdx.x % WARP;
  for (int h = Core::WARPS - 1 - int(threadIdx.x / WARP); h < heads; h += Core::WARPS) {
    float product = 0.f;
    for (int d = lane; d < keys.head_dim; d += WARP) product += s.q[h * keys.head_dim + d] * s.k[d];
    product = warp_sum(product);
    if (lane == 0) s.fresh[h] = score(keys, product * scale);
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
                                             int warps, bool leads, int stored) {
  float tops[Core::WARPS];
  Value r = {leads ? s.fresh[h] : -INFINITY, 0.f, 0.f};
  const float fresh = r.top;
#pragma unroll
  for (int w = 0; w < Core::WARPS; ++w) {
    tops[w] = w < warps ? s.tops[w * MAX_HEADS + h] : -INFINITY;
    r.top = fmaxf(r.top, tops[w]);
  }
  const float off = origin(r.top);
  if (leads) {
    r.weight = exp2_fast(fresh - off);
    r.sum = r.weight * (Core::coded(stored) ? s.v[d] * s.scales[1] : s.v[d]);
  }
#pragma unroll
  for (int w = 0; w < Core::WARPS; ++w) {
    const float share = w < warps ? exp2_fast(tops[w] - off) : 0.f;
    r.weight += share * (w < warps ? s.weights[w * MAX_HEADS + h] : 0.f);
    r.sum += share * (w < warps ? s.sums[(w * heads + h) * s.stride + d] : 0.f);
  }
  return r;
}

// Counts a block; in the last of them, true, and the counter is back at zero.
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

// The mean of values, or 0 where no score was above -inf, as PyTorch's scaled_dot_product_attention has it.
__device__ __forceinline__ float mean_of(const Value& v) {
  return v.weight == 0.f ? 0.f : __fdividef(v.sum, v.weight);
}

// A value over the blocks, from what they left in memory `step` apart.
__device__ __forceinline__ float merge_blocks(const float2* partial, uint32_t blocks, int step) {
  Value r = {-INFINITY, 0.f, 0.f};
#pragma unroll 4
  for (uint32_t b = 0; b < blocks; ++b) {
    const float2 o = __ldcg(partial + b * step);
    const float top = fmaxf(r.top, o.y), off = origin(top);
    const float fade = exp2_fast(r.top - off), share = exp2_fast(o.y - off);
    r = {top, r.weight * fade + share, r.sum * fade + share * o.x};
  }
  return mean_of(r);
}

// What blocks leave for the last of them.
struct Partials {
  float2* both;  // narrow heads: [blocks][MAX_HEADS head_dim] of (mean value, log2 weight)
  float* means;  // wide heads: [blocks][MAX_HEADS head_dim],
  float* tops;   // and [blocks][MAX_HEADS] of log2 weights behind them

  __device__ Partials(const DecodingParams& p, const Block& block, uint32_t row, int head_dim) {
    const uint64_t step = MAX_HEADS * head_dim;
    both = p.partial + row * block.of_x * step;
    means = reinterpret_cast<float*>(both);
    tops = means + block.of_x * step;
  }
};

// All values of narrow heads: few for each thread, and few blocks.
template <class Core>
__device__ __forceinline__ void merge_narrow(const DecodingParams& p, const float2* partial, uint32_t blocks, int heads,
                                             int head_dim, uint32_t out) {
  for (int i = threadIdx.x; i < heads * head_dim; i += Core::WARPS * WARP)
    write(p.y, p.dtype, out + i, merge_blocks(partial + i, blocks, MAX_HEADS * head_dim));
}

// All values of wide heads. The blocks' shares of each head come first, so that what is left are
// sums of products whose loads wait for nothing.
template <class Core>
__device__ __forceinline__ void merge_wide(const DecodingParams& p, const Shared<Core>& s, const Partials& partials,
                                           uint32_t blocks, int heads, int head_dim, uint32_t out) {
  const int lane = threadIdx.x % WARP;
  float* shares = s.sums;  // [heads][blocks]
  for (int h = threadIdx.x / WARP; h < heads; h += Core::WARPS) {
    float top = -INFINITY, total = 0.f;
    for (uint32_t b = lane; b < blocks; b += WARP) top = fmaxf(top, __ldcg(partials.tops + b * MAX_HEADS + h));
    top = warp_max(top);
    const float off = origin(top);
    for (uint32_t b = lane; b < blocks; b += WARP) {
      const float share = exp2_fast(__ldcg(partials.tops + b * MAX_HEADS + h) - off);
      shares[h * blocks + b] = share;
      total += share;
    }
    total = warp_sum(total);
    if (lane == 0) s.weights[h] = total == 0.f ? 0.f : __fdividef(1.f, total);
  }
  __syncthreads();
  for (int i = 4 * threadIdx.x; i < heads * head_dim; i += 4 * Core::WARPS * WARP) {
    const int h = i / head_dim;
    float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 16
    for (uint32_t b = 0; b < blocks; ++b) {
      const float4 mean = __ldcg(reinterpret_cast<const float4*>(partials.means + b * MAX_HEADS * head_dim + i));
      const float share = shares[h * blocks + b];
      y.x = fmaf(share, mean.x, y.x), y.y = fmaf(share, mean.y, y.y);
      y.z = fmaf(share, mean.z, y.z), y.w = fmaf(share, mean.w, y.w);
    }
    const float by = s.weights[h];
    write(p.y, p.dtype, out + i, y.x * by);
    write(p.y, p.dtype, out + i + 1, y.y * by);
    write(p.y, p.dtype, out + i + 2, y.z * by);
    write(p.y, p.dtype, out + i + 3, y.w * by);
  }
}

// Writes the codes of the new key and value, and their scales.
template <class Core, class Memory>
__device__ __forceinline__ void append_codes(const DecodingParams& p, const Memory& s, uint64_t k_slot,
                                             uint64_t v_slot, const uint64_t (&scale_slots)[2], int head_dim) {
  for (int d = threadIdx.x; d < head_dim; d += Core::WARPS * WARP) {
    static_cast<uint8_t*>(p.k_cache)[k_slot + d] = code_of(s.k[d], p.cache_dtype);
    static_cast<uint8_t*>(p.v_cache)[v_slot + d] = code_of(s.v[d], p.cache_dtype);
  }
  if (threadIdx.x == 0) p.pages.k_scales[scale_slots[0]] = s.scales[0];
  if (threadIdx.x == 0) p.pages.v_scales[scale_slots[1]] = s.scales[1];
}

// The page that a position is in, for a sequence's row of the table.
__device__ __forceinline__ uint32_t page_of(const DecodingParams& p, uint32_t b, uint32_t position) {
  return __ldcg(p.pages.entries + uint64_t(b) * p.pages.step + (position >> p.pages.page_bits));
}

// Writes the new key and value to where the position is; in pages, if the pool has `page`.
template <class Core, class Memory>
__device__ __forceinline__ void append(const DecodingParams& p, const Memory& s, const Place& at, uint32_t page,
                                       int head_dim, uint32_t position) {
  uint64_t k_slot = at.plane + uint64_t(position) * head_dim, v_slot = k_slot;
  if constexpr (Core::IN_PAGES) {
    const uint32_t slot = position & (p.pages.page - 1);
    if (page >= p.pages.pages) return;
    k_slot = page * p.k_strides[0] + slot * p.k_strides[1] + at.kv * p.k_strides[2];
    v_slot = page * p.v_strides[0] + slot * p.v_strides[1] + at.kv * p.v_strides[2];
    if constexpr (Core::CODES) {
      if (Core::coded(p.cache_dtype)) {
        const uint64_t(&of_k)[2] = p.pages.k_scale_strides, (&of_v)[2] = p.pages.v_scale_strides;
        const uint64_t slots[2] = {page * of_k[0] + at.kv * of_k[1] + slot, page * of_v[0] + at.kv * of_v[1] + slot};
        return append_codes<Core>(p, s, k_slot, v_slot, slots, head_dim);
      }
    }
  }
  const int stored = Core::dtype(p.cache_dtype);
  for (int d = threadIdx.x; d < head_dim; d += Core::WARPS * WARP) {
    write(p.k_cache, stored, k_slot + d, s.k[d]);
    write(p.v_cache, stored, v_slot + d, s.v[d]);
  }
}

// Where a block's keys are.
template <class Core>
__device__ __forceinline__ typename Core::From keys_of(const DecodingParams& p, const Place& at, uint32_t b,
                                                       int head_dim) {
  const Keys keys = {p.k_cache, p.v_cache, at.plane, 0, head_dim, p.cache_dtype,
                     p.softcap > 0.f ? p.scale : p.scale * LOG2E, p.softcap};
  if constexpr (Core::IN_PAGES) {
    const uint32_t size = size_of(p.cache_dtype);
    KeysInPages in = {keys};
    in.first = 0;
    in.k = static_cast<const char*>(keys.k) + at.kv * p.k_strides[2] * size;
    in.v = static_cast<const char*>(keys.v) + at.kv * p.v_strides[2] * size;
    in.row = p.pages.entries + uint64_t(b) * p.pages.step;
    in.k_page = p.k_strides[0], in.k_token = p.k_strides[1];
    in.v_page = p.v_strides[0], in.v_token = p.v_strides[1];
    in.page_bits = p.pages.page_bits, in.pages = p.pages.pages;
    in.low = 0;
    in.k_scales = p.pages.k_scales + at.kv * p.pages.k_scale_strides[1];
    in.v_scales = p.pages.v_scales + at.kv * p.pages.v_scale_strides[1];
    in.k_scale_page = p.pages.k_scale_strides[0], in.v_scale_page = p.pages.v_scale_strides[0];
    return in;
  } else {
    return keys;
  }
}

// What a block takes part in.
struct Part {
  bool real;        // false: the warm-up
  uint32_t active;  // blocks
  int warps;        // of this block that have had keys
  bool leads;       // whether it has the new key
  Block block;
};

// Brings the block's warps together, then the blocks, and writes the caches and y.
template <class Core>
__device__ __forceinline__ void epilogue(const DecodingParams& p, const Shared<Core>& s, const Place& at,
                                         const Part& part, int head_dim, uint32_t position) {
  constexpr int THREADS = Core::WARPS * WARP;
  constexpr bool WIDE = Core::DIM >= 256;
  const int total = at.heads * head_dim, step = MAX_HEADS * head_dim;
  const Partials partials(p, part.block, at.row, head_dim);
  for (int i = threadIdx.x; i < total; i += THREADS) {
    const Value v = merge_warps(s, at.heads, i / head_dim, i % head_dim, part.warps, part.leads, p.cache_dtype);
    const float mean = mean_of(v);
    if (!part.real) continue;
    const float top = v.top + __log2f(v.weight);
    if (part.active == 1) {
      write(p.y, p.dtype, at.out + i, mean);
    } else if constexpr (WIDE) {
      partials.means[part.block.x * step + i] = mean;
      if (i % head_dim == 0) partials.tops[part.block.x * MAX_HEADS + i / head_dim] = top;
    } else {
      partials.both[part.block.x * step + i] = make_float2(mean, top);
    }
  }
  if (!part.real) return;
  if (part.leads && at.appends) {
    const uint32_t page = Core::IN_PAGES ? page_of(p, part.block.z, position) : 0;
    append<Core>(p, s, at, page, head_dim, position);
  }
  if (part.active > 1 && is_last(p.counters + at.row, part.active)) {
    if constexpr (WIDE) merge_wide(p, s, partials, part.active, at.heads, head_dim, at.out);
    else merge_narrow<Core>(p, partials.both, part.active, at.heads, head_dim, at.out);
  }
}

template <class Core> __device__ __forceinline__ void decode(const DecodingParams& p, const Block& here) {
  constexpr int N = Core::LANE, WARPS = Core::WARPS;
  extern __shared__ uint4 memory[];
  pdl_launch();
  const int head_dim = Core::DIM ? Core::DIM : int(p.head_dim), warp = threadIdx.x / WARP;
  const Shared<Core> s(reinterpret_cast<char*>(memory), head_dim);
  const uint32_t block = here.x * WARPS, first = block + warp;
  const Place at(p, here, head_dim, Core::MAX_CORE_HEADS);
  typename Core::From keys = keys_of<Core>(p, at, here.z, head_dim);
  Core core;
  Work work(p, here, 0, Core::KEYS, Core::IN_PAGES);
  uint32_t position = UINT32_MAX;
  for (int i = threadIdx.x; i < Core::QUERIES / 16; i += WARPS * WARP) memory[i] = make_uint4(0, 0, 0, 0);
  if (warms_up(p) && threadIdx.x == 0) *s.position = read_position(p.position + here.z);
  __syncthreads();

  // Pass 0 is a warm-up before the PDL wait: the same code without queries. All that remains of it are the keys in
  // registers, the angles in shared memory, and the instructions in the caches. Fetching these line by line once the
  // queries are there would take as long as the work.
#pragma unroll 1
  for (int pass = warms_up(p) ? 0 : 1; pass < 2; ++pass) {
    const bool real = pass == 1;
    if (real) pdl_wait();
    const uint32_t now = real ? read_position(p.position + here.z) : *s.position;
    float x[N];
    read_row(p, at, head_dim, real ? warp : MAX_HEADS + 2, x);
    if (now != position) {
      position = now;
      work = Work(p, here, position, Core::KEYS, Core::IN_PAGES);
      if (here.x < work.active) {
        keys.end = work.end;
        if constexpr (Core::IN_PAGES) keys.low = work.low;
        core.begin(keys, work.start + first * Core::KEYS, work.active * WARPS * Core::KEYS);
        read_angles(p, s, position, head_dim);
      }
      __syncthreads();
    }
    if (here.x >= work.active) continue;
    if (real && (position >= p.slots || position >= p.positions)) return;
    Part part;
    part.real = real;
    part.active = work.active;
    part.warps = min(max(int(work.tiles) - int(block), 0), WARPS);
    // The new key goes to the block with the fewest others.
    part.leads = here.x == work.active - 1;
    part.block = here;
    for (int job = warp; job < at.heads + (part.leads ? 2 : 0); job += WARPS) {
      if (job != warp) read_row(p, at, head_dim, real ? job : MAX_HEADS + 2, x);
      place_row(p, s, at, head_dim, job, x);
    }
    __syncthreads();
    if (part.leads) score_fresh(s, keys, at.heads);
    core.start();
    const uint32_t stride = part.active * WARPS, tiles = real ? work.tiles : min(work.tiles, first + 1);
    for (uint32_t tile = first; tile < tiles; tile += stride)
      core.step(keys, work.start, tile, tile + stride, tiles, s.queries, s.q, at.heads);
    if (first < tiles)
      core.store(s.sums + warp * at.heads * s.stride, s.stride, s.tops + warp * MAX_HEADS,
                 s.weights + warp * MAX_HEADS, at.heads, head_dim);
    __syncthreads();
    epilogue(p, s, at, part, head_dim, position);
    if (!real) __syncthreads();
  }
}

}  // namespace fused
