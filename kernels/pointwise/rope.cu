// Rotary embedding of heads, with an RMSNorm of each head before it and the append to the caches.
//
// x [B, T, heads + 2 kv_heads, D] by its strides: the first `heads` are rotated to y, the next
// `kv_heads` are rotated into slots of k [B, kv_heads, slots, D], the last are copied into v. Plain
// rope is the case without kv_heads.
// (a, b) -> (a cos - b sin, b cos + a sin) in f32, rounded once; a norm's result is rounded to the
// element type first, as rms_norm's is. A few lanes own a head: each turns packs of pairs whose
// cosines lie side by side. Bytes moved: x once, y, k and v once.
#include "abi/pointwise.cuh"
#include "common/base.cuh"

using namespace fused;

// N neighbours, in pieces of 16 bytes at most.
template <typename T, int N> __device__ __forceinline__ void widen(const void* table, uint64_t at, float (&out)[N]) {
  constexpr int PIECE = N < VEC<T> ? N : VEC<T>;
#pragma unroll
  for (int j = 0; j < N; j += PIECE) {
    const auto v = load<T, PIECE>(static_cast<const T*>(table) + at + j);
#pragma unroll
    for (int i = 0; i < PIECE; ++i) out[j + i] = to_float(v.v[i]);
  }
}

template <int N>
__device__ __forceinline__ void load_angles(const void* table, int type, uint64_t at, float (&out)[N]) {
  if (type == 0)
    widen<float>(table, at, out);
  else if (type == 1)
    widen<__half>(table, at, out);
  else
    widen<__nv_bfloat16>(table, at, out);
}

// One head: where it is, what normalises it, and who works on it.
template <typename T> struct Head {
  const T* x;
  const T* weight;  // null without a norm
  float factor;
  uint32_t lane, lanes;

  template <int N> __device__ __forceinline__ void read(uint32_t at, float (&out)[N]) const {
    const auto v = load<T, N>(x + at);
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = to_float(v.v[j]);
    if (weight) {
      const auto w = load<T, N>(weight + at);
#pragma unroll
      for (int j = 0; j < N; ++j) out[j] = rounded<T>(rounded<T>(out[j] * factor) * to_float(w.v[j]));
    }
  }

  template <int N> __device__ __forceinline__ void normalise(uint32_t dim, float eps) {
    float squares = 0.f;
    for (uint32_t at = lane * N; at < dim; at += lanes * N) {
      const auto v = load<T, N>(x + at);
#pragma unroll
      for (int j = 0; j < N; ++j) squares = fmaf(to_float(v.v[j]), to_float(v.v[j]), squares);
    }
    // Heads of one warp differ in whether they have a norm, so each sums among its own lanes.
    const unsigned own = (FULL >> (WARP - lanes)) << (threadIdx.x % WARP / lanes * lanes);
    for (uint32_t offset = lanes / 2; offset > 0; offset /= 2)
      squares += __shfl_xor_sync(own, squares, offset);
    factor = 1.f / sqrtf(squares / dim + eps);
  }
};

template <typename O, int N> __device__ __forceinline__ void write(O* y, const float (&v)[N]) {
  Pack<O, N> out;
#pragma unroll
  for (int j = 0; j < N; ++j) out.v[j] = from_float<O>(v[j]);
  store(y, out);
}

// Turns the first `pairs` pairs of the head and copies the rest.
template <int N, typename T, typename O>
__device__ __forceinline__ void turn(const RopeParams& p, const Head<T>& head, uint32_t position,
                                     uint32_t pairs, O* y) {
  const uint32_t turns = pairs / N, all = turns + (p.dim - 2 * pairs) / N;
  for (uint32_t u = head.lane; u < all; u += head.lanes) {
    float a[N], b[N];
    if (u >= turns) {
      const uint32_t at = 2 * pairs + (u - turns) * N;
      head.template read<N>(at, a);
      write(y + at, a);
      continue;
    }
    const uint32_t first = p.interleaved ? 2 * u * N : u * N;
    const uint32_t second = p.interleaved ? first + N : first + pairs;
    float c[N], s[N];
    load_angles<N>(p.cos, p.table, uint64_t(position) * pairs + u * N, c);
    load_angles<N>(p.sin, p.table, uint64_t(position) * pairs + u * N, s);
    head.template read<N>(first, a);
    head.template read<N>(second, b);
    if (N > 1 && p.interleaved) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        float& even = 2 * j < N ? a[2 * j % N] : b[2 * j % N];
        float& odd = 2 * j < N ? a[(2 * j + 1) % N] : b[(2 * j + 1) % N];
        const float e = even, o = odd;
        even = fmaf(e, c[j], -(o * s[j]));
        odd = fmaf(o, c[j], e * s[j]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float e = a[j], o = b[j];
        a[j] = fmaf(e, c[j], -(o * s[j]));
        b[j] = fmaf(o, c[j], e * s[j]);
      }
    }
    write(y + first, a);
    write(y + second, b);
  }
}

// Keys or values of one head into their slot, in the cache's type.
template <bool VECTORS, typename T, typename C>
__device__ __forceinline__ void append(const RopeParams& p, Head<T> head, uint32_t position,
                                       uint32_t pairs, uint64_t at, void* cache) {
  constexpr int N = !VECTORS ? 1 : VEC<T> < VEC<C> ? VEC<T> : VEC<C>;
  if (head.weight) head.template normalise<N>(p.dim, p.eps);
  turn<N>(p, head, position, pairs, static_cast<C*>(cache) + at);
}

template <typename T, bool VECTORS> __device__ __forceinline__ void rope_head(const RopeParams& p) {
  pdl_launch();
  pdl_wait();
  const uint32_t row = blockIdx.x * (ROPE_THREADS / p.lanes) + threadIdx.x / p.lanes;
  if (row >= p.rows) return;
  const uint32_t heads = p.heads + 2 * p.kv_heads;
  const uint32_t h = row % heads, token = row / heads % p.tokens, batch = row / heads / p.tokens;
  const uint32_t moved = p.at ? p.at[batch * p.at_step] : 0;
  const uint32_t position = p.position + moved + token, slot = p.slot + moved + token;
  // A length on the device that has run past what there is must not touch other memory.
  if (position >= p.positions || (h >= p.heads && slot >= p.slots)) return;
  Head<T> head = {};
  head.x = static_cast<const T*>(p.x) + batch * p.x_batch + token * p.x_token + h * p.x_head;
  head.lane = threadIdx.x % p.lanes;
  head.lanes = p.lanes;
  if (h < p.heads) {
    constexpr int N = VECTORS ? VEC<T> : 1;
    T* y = static_cast<T*>(p.y) + batch * p.y_batch + token * p.y_token + h * p.y_head;
    head.weight = static_cast<const T*>(p.q_norm);
    if (head.weight) head.template normalise<N>(p.dim, p.eps);
    turn<N>(p, head, position, p.pairs, y);
    return;
  }
  const bool key = h < p.heads + p.kv_heads;
  const uint32_t plane = h - p.heads - (key ? 0 : p.kv_heads);
  const uint64_t at = ((uint64_t(batch) * p.kv_heads + plane) * p.slots + slot) * p.dim;
  const uint32_t pairs = key ? p.pairs : 0;
  void* cache = key ? p.k : p.v;
  if (key) head.weight = static_cast<const T*>(p.k_norm);
  if (p.cache == 0)
    append<VECTORS, T, float>(p, head, position, pairs, at, cache);
  else if (p.cache == 1)
    append<VECTORS, T, __half>(p, head, position, pairs, at, cache);
  else
    append<VECTORS, T, __nv_bfloat16>(p, head, position, pairs, at, cache);
}

template <typename T> __device__ __forceinline__ void rope(const RopeParams& p) {
  if (p.vectors)
    rope_head<T, true>(p);
  else
    rope_head<T, false>(p);
}

FUSED_ENTRIES(rope, ROPE_THREADS, RopeParams, rope)
