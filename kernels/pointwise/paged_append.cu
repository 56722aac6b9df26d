// New keys and values into pages, with norms of the heads and the rotary embedding before, and copies of pages.
//
// x [N, heads + 2 kv_heads, D]: of each token the first `heads` are rotated to y [N, heads, D], the next `kv_heads` are
// rotated into the token's slot of k, the last are copied into that of v. The slot follows from the token's sequence,
// its position and the table of pages; what has no slot is left out, and its queries are zeros. A few lanes own a head. For
// pools of codes they go through it for its largest magnitude, for the best scale of e4m3, and to quantize.
// Bytes moved: x once, y and the slots once.
#include "abi/paged.cuh"
#include "formats/kv_codes.cuh"
#include "pointwise/rope.cuh"

using namespace fused;

constexpr uint32_t NOWHERE = UINT32_MAX;

// The sequence of a token.
__device__ __forceinline__ uint32_t owner_of(const PagedAppendParams& p, uint32_t token) {
  if (p.owners) return p.owners[token];
  if (!p.cu_seqlens) return token;
  // The first that ends behind the token.
  uint32_t low = 0, high = p.pages.sequences;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (p.cu_seqlens[middle + 1] > token) high = middle;
    else low = middle + 1;
  }
  return low < p.pages.sequences && p.cu_seqlens[low] <= token ? low : NOWHERE;
}

// The page of a sequence's token.
__device__ __forceinline__ uint32_t page_of(const Pages& pages, uint32_t sequence, uint32_t position) {
  if (sequence >= pages.sequences) return NOWHERE;
  uint32_t from = 0, to = pages.width;
  const uint32_t* entries = pages.entries;
  if (pages.indptr) {
    from = min(pages.indptr[sequence], pages.width);
    to = min(pages.indptr[sequence + 1], pages.width);
  } else {
    entries += uint64_t(sequence) * pages.step;
  }
  const uint32_t at = position / pages.page;
  if (from >= to || at >= to - from) return NOWHERE;
  const uint32_t id = entries[from + at];
  return id < pages.pages ? id : NOWHERE;
}

// Keys or values of one head into their place as codes, and their scale.
template <bool VECTORS, typename T>
__device__ __forceinline__ void append_codes(const PagedAppendParams& p, Head<T> head, uint32_t position,
                                             uint32_t pairs, uint8_t* codes, float* scale) {
  constexpr int N = VECTORS ? VEC<T> : 1;
  const int format = p.pages.dtype;
  if (head.weight) head.template normalise<N>(p.dim, p.eps);
  float most = 0.f;
  each_turned<N>(p, head, position, pairs, [&](uint32_t, const float (&v)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) most = larger(most, v[j]);
  });
  for (uint32_t offset = head.lanes / 2; offset > 0; offset /= 2)
    most = larger(most, __shfl_xor_sync(head.own_lanes(), most, offset));
  Quantizer quantizer(most, format);
  if (format == E4M3) {
    uint32_t errors[Quantizer::STEPS] = {};
    each_turned<N>(p, head, position, pairs, [&](uint32_t, const float (&v)[N]) {
#pragma unroll
      for (int j = 0; j < N; ++j) quantizer.add_errors(v[j], errors);
    });
    quantizer.take_best(errors, head.lanes, head.own_lanes());
  }
  each_turned<N>(p, head, position, pairs, [&](uint32_t at, const float (&v)[N]) {
    Pack<uint8_t, N> own;
#pragma unroll
    for (int j = 0; j < N; ++j) own.v[j] = quantizer.code(v[j], format);
    store(codes + at, own);
  });
  if (head.lane == 0) *scale = quantizer.scale;
}

template <typename T, bool VECTORS> __device__ __forceinline__ void append_head(const PagedAppendParams& p) {
  pdl_launch();
  pdl_wait();
  const uint32_t row = blockIdx.x * (ROPE_THREADS / p.lanes) + threadIdx.x / p.lanes;
  if (row >= p.rows) return;
  const uint32_t heads = p.heads + 2 * p.kv_heads, h = row % heads, token = row / heads;
  const uint32_t position = p.at[token];
  const uint32_t page = position < p.positions ? page_of(p.pages, owner_of(p, token), position) : NOWHERE;
  Head<T> head = {};
  head.x = static_cast<const T*>(p.x) + uint64_t(row) * p.dim;
  head.lane = threadIdx.x % p.lanes;
  head.lanes = p.lanes;
  if (h < p.heads) {
    constexpr int N = VECTORS ? VEC<T> : 1;
    T* y = static_cast<T*>(p.y) + (uint64_t(token) * p.heads + h) * p.dim;
    if (page == NOWHERE) {
      const float zeros[N] = {};
      for (uint32_t d = head.lane * N; d < p.dim; d += p.lanes * N) write(y + d, zeros);
      return;
    }
    head.weight = static_cast<const T*>(p.q_norm);
    if (head.weight) head.template normalise<N>(p.dim, p.eps);
    apply_rope<N>(p, head, position, p.pairs, y);
    return;
  }
  if (page == NOWHERE) return;
  const bool key = h < p.heads + p.kv_heads;
  const uint32_t plane = h - p.heads - (key ? 0 : p.kv_heads), slot = position % p.pages.page;
  const Pages& pages = p.pages;
  const uint64_t at = key ? page * pages.k_page + slot * pages.k_token + plane * pages.k_head
                          : page * pages.v_page + slot * pages.v_token + plane * pages.v_head;
  const uint32_t pairs = key ? p.pairs : 0;
  void* pool = key ? pages.k : pages.v;
  if (key) head.weight = static_cast<const T*>(p.k_norm);
  if (is_coded(pages.dtype)) {
    const uint64_t(&strides)[2] = key ? pages.k_scale_strides : pages.v_scale_strides;
    float* scale = (key ? pages.k_scales : pages.v_scales) + page * strides[0] + plane * strides[1] + slot;
    append_codes<VECTORS>(p, head, position, pairs, static_cast<uint8_t*>(pool) + at, scale);
  } else {
    append<VECTORS>(p, head, position, pairs, at, pool, pages.dtype);
  }
}

template <typename T> __device__ __forceinline__ void paged_append(const PagedAppendParams& p) {
  if (p.vectors)
    append_head<T, true>(p);
  else
    append_head<T, false>(p);
}

FUSED_ENTRIES(paged_append, ROPE_THREADS, PagedAppendParams, paged_append)

// A pair of pages for each block along x, keys or values along y, pieces of T.
template <typename T> __device__ __forceinline__ void copy_page(const CopyPagesParams& p) {
  const uint32_t from = p.pairs[blockIdx.x * p.step], to = p.pairs[blockIdx.x * p.step + 1];
  if (from >= p.pages || to >= p.pages) return;
  const bool keys = blockIdx.y == 0;
  T* pool = static_cast<T*>(keys ? p.k : p.v);
  const uint64_t of_page = keys ? p.k_page : p.v_page, of_token = keys ? p.k_token : p.v_token;
  const uint64_t of_head = keys ? p.k_head : p.v_head;
  const uint32_t row = p.kv_heads * p.pieces, all = p.page * row;
  for (uint32_t i = blockIdx.z * COPY_PAGES_THREADS + threadIdx.x; i < all; i += gridDim.z * COPY_PAGES_THREADS) {
    const uint32_t token = i / row, head = i % row / p.pieces, piece = i % p.pieces;
    const uint64_t at = token * of_token + head * of_head + piece;
    pool[to * of_page + at] = pool[from * of_page + at];
  }
}

extern "C" __global__ void __launch_bounds__(COPY_PAGES_THREADS)
    paged_append_copy(const __grid_constant__ CopyPagesParams p) {
  pdl_launch();
  pdl_wait();
  if (p.size == 16) copy_page<uint4>(p);
  else if (p.size == 4) copy_page<uint32_t>(p);
  else if (p.size == 2) copy_page<uint16_t>(p);
  else copy_page<uint8_t>(p);
}
