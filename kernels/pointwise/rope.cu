// Rotary embedding of heads, with an RMSNorm of each head before it and the append to the caches.
//
// x [B, T, heads + 2 kv_heads, D] by its strides: the first `heads` are rotated to y, the next
// `kv_heads` are rotated into slots of k [B, kv_heads, slots, D], the last are copied into v. Plain
// rope is the case without kv_heads.
// (a, b) -> (a cos - b sin, b cos + a sin) in f32, rounded once; a norm's result is rounded to the
// element type first, as rms_norm's is. Queries of a position that the tables lack are zeros. A few lanes own a head: each turns packs of pairs whose
// cosines lie side by side. Bytes moved: x once, y, k and v once.
#include "pointwise/rope.cuh"

using namespace fused;

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
  const bool known = position < p.positions && (p.at_step < 2 || p.at[batch * p.at_step + 1] == 0);
  if (h >= p.heads && (!known || slot >= p.slots)) return;
  Head<T> head = {};
  head.x = static_cast<const T*>(p.x) + batch * p.x_batch + token * p.x_token + h * p.x_head;
  head.lane = threadIdx.x % p.lanes;
  head.lanes = p.lanes;
  if (h < p.heads) {
    constexpr int N = VECTORS ? VEC<T> : 1;
    T* y = static_cast<T*>(p.y) + batch * p.y_batch + token * p.y_token + h * p.y_head;
    if (!known) {
      const float zeros[N] = {};
      for (uint32_t d = head.lane * N; d < p.dim; d += p.lanes * N) write(y + d, zeros);
      return;
    }
    head.weight = static_cast<const T*>(p.q_norm);
    if (head.weight) head.template normalise<N>(p.dim, p.eps);
    apply_rope<N>(p, head, position, p.pairs, y);
    return;
  }
  const bool key = h < p.heads + p.kv_heads;
  const uint32_t plane = h - p.heads - (key ? 0 : p.kv_heads);
  const uint64_t at = ((uint64_t(batch) * p.kv_heads + plane) * p.slots + slot) * p.dim;
  const uint32_t pairs = key ? p.pairs : 0;
  void* cache = key ? p.k : p.v;
  if (key) head.weight = static_cast<const T*>(p.k_norm);
  append<VECTORS>(p, head, position, pairs, at, cache, p.cache);
}

template <typename T> __device__ __forceinline__ void rope(const RopeParams& p) {
  if (p.vectors)
    rope_head<T, true>(p);
  else
    rope_head<T, false>(p);
}

FUSED_ENTRIES(rope, ROPE_THREADS, RopeParams, rope)
