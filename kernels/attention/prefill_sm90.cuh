// Attention on Hopper after FlashAttention-3 (Shah et al. 2024): a producer warpgroup loads tiles by TMA, consumer
// warpgroups multiply them by asynchronous tensor-core products (`wgmma`) while their softmax runs. Takes 16-bit
// tensors without mask, window and softcap.
#pragma once

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "attention/prefill_sm90_produce.cuh"
#include "common/wgmma.cuh"

namespace fused {

// The descriptor of keys or values of a tile, from `at` on.
template <typename C> __device__ __forceinline__ uint64_t tile_descriptor(uint32_t at) {
  return descriptor<C::SWIZZLE>(at, C::PIECE_BYTES, C::GROUP_BYTES);
}

// One warpgroup's 64 rows. A thread holds rows lane / 4 and lane / 4 + 8 of its warp's 16.
template <typename T, typename C> struct Rows {
  static constexpr int D = C::D, KEYS = C::KEYS;
  float s[KEYS / 2];
  float o[D / 2];
  uint32_t weights[KEYS / 4];
  float top[2], sum[2];
  int visible[2];  // keys

  __device__ __forceinline__ void begin(const AttentionSm90Params& p, const Sequence& of, int first_row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + threadIdx.x % WARP / 4 + 8 * i;
      visible[i] = p.causal ? min(of.keys, of.keys - of.queries + row + 1) : of.keys;
      top[i] = NEVER;
      sum[i] = 0.f;
    }
  }

  // Begins the product of queries and keys.
  __device__ __forceinline__ void scores(uint32_t q, uint32_t k) {
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const int piece = i * 16 / C::PIECE, inside = i * 32 % C::SWIZZLE;
      wgmma(T(), s, descriptor<C::SWIZZLE>(q + piece * C::ROWS * C::SWIZZLE + inside, 0),
            tile_descriptor<C>(k + piece * C::PIECE_BYTES + inside), i > 0);
    }
  }

  // Begins to add the product of weights and values, of which the sequence has the first `count`. The values behind
  // them are another sequence's, and a weight of 0 would not hide a NaN among them. So a product of 16 keys that are
  // all behind the end, whose weights are 0, reads the first 16 instead.
  __device__ __forceinline__ void outputs(uint32_t v, bool add, int count) {
#pragma unroll
    for (int i = 0; i < KEYS / 16; ++i) {
      const int first = C::VARLEN && i * 16 >= count ? 0 : i * 16;
      wgmma(T(), o, weights + 4 * i, tile_descriptor<C>(v + first / 8 * C::GROUP_BYTES), add || i > 0);
    }
  }

  __device__ __forceinline__ void hide(int first_key) {
    const int column = first_key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (column + n * 8 + j % 2 >= visible[j / 2]) s[4 * n + j] = NEVER;
  }

  // Scores to weights, still in f32. The base of the exponent is only raised when scores outgrow it
  // by 2^8; what sums and outputs so far are to be scaled by then is returned.
  __device__ __forceinline__ void softmax(float unit, float (&shrink)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = s[2 * i];
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) most = fmaxf(most, fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
      most = fmaxf(most, __shfl_xor_sync(FULL, most, 1));
      most = fmaxf(most, __shfl_xor_sync(FULL, most, 2));
      shrink[i] = 1.f;
      if (!((most - top[i]) * unit <= 8.f)) {
        const float raised = fmaxf(most, top[i]);
        shrink[i] = raised == NEVER ? 1.f : exp2_approx((top[i] - raised) * unit);
        top[i] = raised;
        sum[i] *= shrink[i];
      }
      const float shift = top[i] == NEVER ? 0.f : top[i] * unit;
      float part[2] = {0.f, 0.f};
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = s[4 * n + 2 * i + j];
          x = exp2_approx(fmaf(x, unit, -shift));
          part[j] += x;
        }
      sum[i] += part[0] + part[1];
    }
  }

  __device__ __forceinline__ void rescale(const float (&shrink)[2]) {
    if (!__any_sync(FULL, shrink[0] != 1.f || shrink[1] != 1.f)) return;
#pragma unroll
    for (int n = 0; n < D / 2; ++n) o[n] *= shrink[n / 2 % 2];
  }

  __device__ __forceinline__ void round_weights() {
#pragma unroll
    for (int n = 0; n < KEYS / 4; ++n) weights[n] = pack2<T>(s[2 * n], s[2 * n + 1]);
  }

  // Stores these rows' maxima, sums and outputs in shared memory, for the first warpgroup to merge.
  __device__ __forceinline__ void store_partial(char* outputs, char* sums) const {
    const int thread = threadIdx.x % 128;
    float4* to = reinterpret_cast<float4*>(outputs);
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
      to[n * 128 + thread] = make_float4(o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]);
    reinterpret_cast<float4*>(sums)[thread] = make_float4(top[0], top[1], sum[0], sum[1]);
  }

  __device__ __forceinline__ void merge_partial(float unit, const char* outputs, const char* sums) {
    const int thread = threadIdx.x % 128;
    const float4 its = reinterpret_cast<const float4*>(sums)[thread];
    float mine[2], other[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float its_top = i ? its.y : its.x, raised = fmaxf(top[i], its_top);
      const float base = raised == NEVER ? 0.f : raised;
      mine[i] = exp2_approx((top[i] - base) * unit);
      other[i] = exp2_approx((its_top - base) * unit);
      top[i] = raised;
      sum[i] = sum[i] * mine[i] + (i ? its.w : its.z) * other[i];
    }
    const float4* from = reinterpret_cast<const float4*>(outputs);
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const float4 x = from[n * 128 + thread];
      o[4 * n] = o[4 * n] * mine[0] + x.x * other[0];
      o[4 * n + 1] = o[4 * n + 1] * mine[0] + x.y * other[0];
      o[4 * n + 2] = o[4 * n + 2] * mine[1] + x.z * other[1];
      o[4 * n + 3] = o[4 * n + 3] * mine[1] + x.w * other[1];
    }
  }

  __device__ __forceinline__ void write(const AttentionSm90Params& p, const Work<C>& work, int first_row) const {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float total = sum[i];
      total += __shfl_xor_sync(FULL, total, 1);
      total += __shfl_xor_sync(FULL, total, 2);
      const float factor = total == 0.f ? 0.f : 1.f / total;
      const int row = first_row + lane / 4 + 8 * i;
      const Sequence of = work.of(p);
      if (row >= of.queries) continue;
      const int64_t at = output_row<C::BATCH>(p, of, work.batch, row) * p.heads + work.head;
      T* y = static_cast<T*>(p.y) + at * D + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        *reinterpret_cast<uint32_t*>(y + n * 8) =
            pack2<T>(o[4 * n + 2 * i] * factor, o[4 * n + 2 * i + 1] * factor);
    }
  }
};

// Warpgroups take turns: while one multiplies, the others have their softmax. A turn has come when
// all others have passed theirs.
template <typename C> __device__ __forceinline__ void take_turn(int consumer) {
  if constexpr (C::TURNS)
    asm volatile("bar.sync %0, %1;" ::"r"(1 + consumer), "n"(128 * C::CONSUMERS) : "memory");
}
template <typename C> __device__ __forceinline__ void pass_turn(int consumer) {
  if constexpr (C::TURNS) {
#pragma unroll
    for (int i = 1; i < C::CONSUMERS; ++i)
      asm volatile("bar.arrive %0, %1;" ::"r"(1 + (consumer + i) % C::CONSUMERS), "n"(128 * C::CONSUMERS)
                   : "memory");
  }
}

// A warpgroup that multiplies, and where it stands in its lane.
template <typename T, typename C> struct Consumer {
  static constexpr int SLOTS = C::LANES * C::STAGES;
  const AttentionSm90Params& p;
  const Barriers<SLOTS> barriers;
  const uint32_t q, k, v;
  const int number, lane, part;  // among all; its lane; its place among the rows of the block
  const bool elected;            // one thread of each warp
  PipelineState<C::STAGES> at_k, at_v;
  Rows<T, C> rows;
  int all;    // from this key on some of the rows see nothing
  int count;  // keys of the sequence in the tile whose outputs come next

  __device__ __forceinline__ Consumer(const AttentionSm90Params& p, Barriers<SLOTS> barriers, int number, uint32_t q,
                                      uint32_t k, uint32_t v)
      : p(p), barriers(barriers), q(q + (C::SHARE ? 0 : number) * 64 * C::SWIZZLE), k(k), v(v),
        number(number), lane(C::SHARE ? number : 0), part(C::SHARE ? 0 : number),
        elected(threadIdx.x % WARP == 0) {}

  __device__ __forceinline__ int k_slot() const { return lane * C::STAGES + at_k.stage; }
  __device__ __forceinline__ int v_slot() const { return lane * C::STAGES + at_v.stage; }
  __device__ __forceinline__ void free_k() {
    if (elected) barrier_arrive(barriers.k_free(k_slot()));
    at_k.next();
  }
  __device__ __forceinline__ void free_v() {
    if (elected) barrier_arrive(barriers.v_free(v_slot()));
    at_v.next();
  }
  __device__ __forceinline__ void softmax(int tile, float (&shrink)[2]) {
    if (tile * C::KEYS + C::KEYS > all) rows.hide(tile * C::KEYS);
    rows.softmax(p.unit, shrink);
  }

  // The scores of the first tile; `meanwhile` runs while the tensor cores compute them.
  template <typename F> __device__ __forceinline__ void begin(int tile, F meanwhile) {
    float shrink[2];
    barrier_wait(barriers.k_full(k_slot()), at_k.phase);
    take_turn<C>(number);
    wgmma_fence();
    rows.scores(q, k + k_slot() * C::TILE_BYTES);
    wgmma_commit();
    pass_turn<C>(number);
    meanwhile();
    wgmma_wait<0>();
    settle(rows.s);
    free_k();
    softmax(tile, shrink);
    rows.round_weights();
    if (tile >= C::LANES) barrier_wait(barriers.k_full(k_slot()), at_k.phase);
  }

  // Zeros the values behind the sequence's end among the 16 keys in which it ends, for the same reason. Each
  // warpgroup that reads the tile does it, before its own products.
  __device__ __forceinline__ void clear_values(char* values) {
    if (count % 16 == 0) return;
    barrier_wait(barriers.v_full(v_slot()), at_v.phase);
    char* const tile = values + v_slot() * C::TILE_BYTES;
    const int bytes = (16 - count % 16) * C::SWIZZLE;
    for (int piece = 0; piece < C::D / C::PIECE; ++piece)
      for (int i = threadIdx.x % 128 * 16; i < bytes; i += 128 * 16) {
        const int row = count + i / C::SWIZZLE, at = row / 8 * C::GROUP_BYTES + row % 8 * C::SWIZZLE;
        *reinterpret_cast<uint4*>(tile + piece * C::PIECE_BYTES + at + i % C::SWIZZLE) = make_uint4(0, 0, 0, 0);
      }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync %0, 128;" ::"r"(1 + C::CONSUMERS + number) : "memory");
  }

  // A tile's scores, and beside their softmax the outputs of the tile before.
  __device__ __forceinline__ void step(int tile, bool add) {
    float shrink[2];
    take_turn<C>(number);
    wgmma_fence();
    rows.scores(q, k + k_slot() * C::TILE_BYTES);
    wgmma_commit();
    barrier_wait(barriers.v_full(v_slot()), at_v.phase);
    rows.outputs(v + v_slot() * C::TILE_BYTES, add, count);
    wgmma_commit();
    count = C::KEYS;
    pass_turn<C>(number);
    wgmma_wait<1>();
    settle(rows.s);
    free_k();
    softmax(tile, shrink);
    // The next keys are waited for here, at a branch that needs the sum (which is never negative):
    // the compiler must not move the exponentials, which are to be computed while the tensor cores
    // work, after the PDL wait for these.
    const uint32_t odd = rows.sum[0] + rows.sum[1] < 0.f;
    if (tile >= C::LANES) barrier_wait(barriers.k_full(k_slot()), at_k.phase ^ odd);
    wgmma_wait<0>();
    settle(rows.o);
    free_v();
    rows.rescale(shrink);
    rows.round_weights();
  }

  // The outputs of the last tile.
  __device__ __forceinline__ void end(bool add) {
    if (elected) barrier_arrive(barriers.q_free());
    barrier_wait(barriers.v_full(v_slot()), at_v.phase);
    wgmma_fence();
    rows.outputs(v + v_slot() * C::TILE_BYTES, add, count);
    wgmma_commit();
    wgmma_wait<0>();
    settle(rows.o);
    free_v();
  }
};

template <typename T, typename C>
__device__ __forceinline__ void consume(const AttentionSm90Params& p, Barriers<C::LANES * C::STAGES> barriers,
                                        uint32_t q, uint32_t k, uint32_t v, char* shared_k,
                                        char* shared_v) {
  // The same in all lanes of a warp, as the compiler is told by the shuffle.
  const int number = __shfl_sync(FULL, int(threadIdx.x) / 128 - 1, 0);
  Consumer<T, C> self(p, barriers, number, q, k, v);
  Work<C> work;
  if constexpr (C::TURNS) {
    // As if the last round of turns had just been passed.
    for (int i = 0; i < number; ++i)
      asm volatile("bar.arrive %0, %1;" ::"r"(1 + i), "n"(128 * C::CONSUMERS) : "memory");
  }
  for (int n = 0; work.next(p); ++n) {
    const int part_row = work.first_row + self.part * 64;
    const int first_row = part_row + threadIdx.x / WARP % 4 * 16;
    const Sequence of = work.of(p);
    self.all = p.causal ? of.keys - of.queries + part_row + 1 : of.keys;
    self.rows.begin(p, of, first_row);
    barrier_wait(barriers.q_full(), n & 1);
    int tile = work.tiles - 1 - self.lane;
    if (tile >= 0) {
      bool add = false;
      self.count = min(of.keys - tile * C::KEYS, int(C::KEYS));
      self.begin(tile, [&] {
        if constexpr (C::VARLEN) self.clear_values(shared_v);
      });
      for (tile -= C::LANES; tile >= 0; tile -= C::LANES) {
        self.step(tile, add);
        add = true;
      }
      self.end(add);
    }
    if constexpr (C::SHARE) {
      constexpr int LANE_BYTES = C::STAGES * C::TILE_BYTES;
      if (number > 0) self.rows.store_partial(shared_k + number * LANE_BYTES, shared_v + number * LANE_BYTES);
      asm volatile("bar.sync 1, %0;" ::"n"(128 * C::CONSUMERS) : "memory");
      if (number > 0) return;
      for (int i = 1; i < min(C::LANES, work.tiles); ++i)
        self.rows.merge_partial(p.unit, shared_k + i * LANE_BYTES, shared_v + i * LANE_BYTES);
    }
    self.rows.write(p, work, first_row);
  }
}

// Outputs of rows that see no key, by some threads of the block.
template <typename T, typename C>
__device__ __forceinline__ void write_zeros(const AttentionSm90Params& p, uint32_t thread, uint32_t threads) {
  constexpr uint32_t PAIRS = C::D / 2;
  // Where sequences have as many keys as queries, each row sees one.
  const bool alike = p.pitch || (p.cu_q == p.cu_k && p.total_q <= p.total_k);
  if (C::BATCH == Batch::RAGGED && alike) return;
  Work<C> work;
  while (work.template next<false>(p)) {
    const Sequence of = work.of(p);
    const uint32_t count = min(C::ROWS, of.queries - work.first_row) * PAIRS;
    for (uint32_t i = thread; i < count; i += threads) {
      const int64_t row = output_row<C::BATCH>(p, of, work.batch, work.first_row + i / PAIRS);
      static_cast<uint32_t*>(p.y)[(row * p.heads + work.head) * PAIRS + i % PAIRS] = 0;
    }
  }
}

template <typename T, typename C> __device__ __forceinline__ void attend(const AttentionSm90Params& p) {
  constexpr int SLOTS = C::LANES * C::STAGES, ARRIVALS = 4 * C::CONSUMERS / C::LANES;
  extern __shared__ char shared[];
  __shared__ __align__(8) uint64_t room[2 + 4 * SLOTS];
  const uint32_t start = shared_address(shared), q = (start + 1023) & ~1023u;
  const uint32_t k = q + C::Q_BYTES, v = k + SLOTS * C::TILE_BYTES;
  const Barriers<SLOTS> barriers = {shared_address(room)};
  if (threadIdx.x == 0) {
    prefetch_tensor_map(p.q);
    prefetch_tensor_map(p.k);
    prefetch_tensor_map(p.v);
    barrier_init(barriers.q_full(), 1);
    barrier_init(barriers.q_free(), 4 * C::CONSUMERS);
    for (int i = 0; i < SLOTS; ++i) {
      barrier_init(barriers.k_full(i), 1);
      barrier_init(barriers.v_full(i), 1);
      barrier_init(barriers.k_free(i), ARRIVALS);
      barrier_init(barriers.v_free(i), ARRIVALS);
    }
    barriers_made();
  }
  __syncthreads();
  pdl_launch();
  pdl_wait();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(C::PRODUCER_REGISTERS));
    if (threadIdx.x < C::PRODUCERS) {
      produce<C>(p, barriers, q, k, v);
    } else if (threadIdx.x >= WARP) {
      // These warps have nothing else to do.
      const LeftOver<C::BATCH, AttentionSm90Params> left_over(p, p.columns / p.heads, C::D);
      const auto zero = [&](int64_t at) { static_cast<T*>(p.y)[at] = from_float<T>(0.f); };
      left_over.each({threadIdx.x - WARP, 128 - WARP}, zero);
      if constexpr (C::VARLEN) write_zeros<T, C>(p, threadIdx.x - WARP, 128 - WARP);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(C::REGISTERS));
    consume<T, C>(p, barriers, q, k, v, shared + (k - start), shared + (v - start));
  }
}

}  // namespace fused

#endif
