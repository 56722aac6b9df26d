// y = act(prologue(x) W^T + bias) + residuals for one row of x and weights of its 16-bit type that are
// more than the multiprocessors hold: they stream through rings in shared memory, one for each warp.
//
// What costs such a product its bandwidth are its ends, so what does not need x is asked for before the
// wait, little by little, and all of x at once behind it. A block has consecutive units of two rows of weights
// and cuts all their steps into equal shares for its warps, borders of units or not: no warp has more
// to do than another, and sums meet once, at the end.
#pragma once

#include "common/mma.cuh"
#include "linear/gemv_dense.cuh"

namespace fused {

constexpr int STREAM_AHEAD = 2;                   // of the norm's weight and bias, before the wait
// Slots that are asked for before the wait, where x is normed behind it: x is not to stand in line behind all
// of them, or what they hold is waiting when the sums of x are still being taken.
constexpr uint32_t STREAM_EARLY = 8;
// Slots of a warp that are on their way before the wait. All of a ring at once, in all blocks, would keep the
// memory from the last reads of the kernel in front for as long as it takes to answer, and those are what all
// wait for.
constexpr int STREAM_PACE = 2;

// Until the oldest of `slots` groups is there. The instruction takes a constant.
__device__ __forceinline__ void wait_oldest(uint32_t slots) {
  switch (slots) {
    case 12:
      return await_copies_but<11>();
    case 10:
      return await_copies_but<9>();
    case 8:
      return await_copies_but<7>();
    case 6:
      return await_copies_but<5>();
    default:
      return await_copies_but<3>();
  }
}

// What is fetched does not stand in line with the weights.
constexpr uint32_t FETCH_LINE = 128, FETCH_MOST = 1 << 17;  // bytes, lines

__device__ __forceinline__ void fetch_lines(const Fetch& f, uint32_t position) {
  const uint32_t bytes = min(uint64_t(position) * f.row, uint64_t(f.plane));
  const uint32_t lines = min((bytes + FETCH_LINE - 1) / FETCH_LINE, FETCH_MOST / (2 * f.planes));
  for (uint32_t i = blockIdx.x * GEMV_THREADS + threadIdx.x; i < 2 * f.planes * lines; i += gridDim.x * GEMV_THREADS) {
    const uint32_t plane = i / lines / 2;
    const char* from = (i / lines % 2 ? f.v : f.k) + uint64_t(plane) * f.plane + i % lines * FETCH_LINE;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }
}

// PAIR: a second matrix goes on where rows of the first end.
template <typename T, bool PAIR> struct Stream {
  const Gemv& p;
  const Second& second;
  uint32_t outputs;       // of a unit: two, or one of which it has the gate and what is gated
  uint32_t first, units;  // of the block
  uint32_t steps, share;  // of a unit, of a warp
  uint32_t begin, end;    // this warp's steps of the block's
  char* ring;
  T* xs;
  float* sums;            // [units][2]: what a unit's first warp has
  float (*rest)[2];       // [warps]: what a warp adds to a unit that another began
  uint64_t policy;        // of the weights

  static __device__ uint32_t lane() { return threadIdx.x % WARP; }
  static __device__ uint32_t warp() { return threadIdx.x / WARP; }

  __device__ Stream(const Gemv& p, const Second& second, uint32_t block, uint32_t blocks, char* memory,
                    float (*rest)[2])
      : p(p), second(second), outputs(gates(p) ? 1 : 2), rest(rest), policy(evict_first()) {
    const uint32_t all = (p.width + outputs - 1) / outputs;
    first = uint64_t(all) * block / blocks;
    units = uint64_t(all) * (block + 1) / blocks - first;
    steps = (p.k + STREAM_STEP - 1) / STREAM_STEP;
    share = (units * steps + GEMV_WARPS - 1) / GEMV_WARPS;
    begin = min(warp() * share, units * steps);
    end = min(begin + share, units * steps);
    ring = memory + warp() * p.slots * STREAM_SLOT;
    xs = reinterpret_cast<T*>(memory + GEMV_WARPS * p.slots * STREAM_SLOT);
    sums = reinterpret_cast<float*>(xs + staged_pitch<T>(p.k));
  }

  // Where the next step to be asked for lies.
  struct Ahead {
    uint32_t at, unit, step;
    const char *rows[2], *others[2];  // the second matrix's, as if they began where the first's do
  };

  __device__ void enter(Ahead& a) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t unit = first + a.unit;
      // Past the last row the last is read again and not written.
      uint32_t row = outputs == 1 ? unit + r * p.width : min(2 * unit + r, p.width - 1);
      const Matrix& matrix = matrix_of(p, row);
      const uint64_t k = PAIR ? second.border : p.k;
      a.rows[r] = static_cast<const char*>(matrix.data) + row * k * sizeof(T);
      if constexpr (PAIR)
        a.others[r] = static_cast<const char*>(second.data) + (row * (p.k - k) - int64_t(k)) * int64_t(sizeof(T));
    }
  }

  // A lane copies what it will multiply itself, so nobody else has to be told.
  __device__ void ask(Ahead& a, uint32_t slot) const {
    if (a.at < end) {
      const uint32_t at = (a.step * WARP + lane()) * 8;
      if (at < p.k) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const char* row = PAIR && at >= second.border ? a.others[r] : a.rows[r];
          copy_async(slot + r * (STREAM_SLOT / 2), row + at * sizeof(T), policy);
        }
      }
      ++a.at;
      if (++a.step == steps) {
        a.step = 0, ++a.unit;
        enter(a);
      }
    }
    commit_copies();
  }

  // Of the norm's weight and bias what is asked for ahead: behind the wait it would stand in line behind all
  // the weights that are on their way.
  struct Affine {
    uint4 weight[STREAM_AHEAD], bias[STREAM_AHEAD];

    __device__ void ask(const Prologue& x, uint32_t packs) {
      if (x.norm == NORM_NONE) return;
      read(x.weight, packs, weight);
      if (x.bias) read(x.bias, packs, bias);
    }
    // Those of the thread's pack i.
    __device__ void get(const Prologue& x, int i, uint32_t pack, uint4& w, uint4& b) const {
      const bool there = i < STREAM_AHEAD;
      w = there ? weight[i % STREAM_AHEAD] : VectorPack::read(x.weight, x.dtype, pack);
      if (x.bias) b = there ? bias[i % STREAM_AHEAD] : VectorPack::read(x.bias, x.dtype, pack);
    }
  };

  // Puts x where it is multiplied from, normed if asked for. Nothing is read twice.
  __device__ void stage(const uint4 (&raw)[STREAM_PACKS], const Affine& affine, float (*scratch)[GEMV_WARPS]) const {
    const Prologue& x = p.prologue;
    const uint32_t packs = p.k / 8;
    float mean = 0.f, factor = 1.f;
    if (x.norm == NORM_LAYER) mean = block_sum<GEMV_WARPS>(over<false>(raw, 0.f), scratch[0]) / p.k;
    if (x.norm != NORM_NONE)
      factor = rsqrtf(__fdividef(block_sum<GEMV_WARPS>(over<true>(raw, mean), scratch[1]), p.k) + x.eps);
#pragma unroll
    for (int i = 0; i < STREAM_PACKS; ++i) {
      const uint32_t pack = threadIdx.x + i * GEMV_THREADS;
      if (pack >= packs) break;
      uint4 out = raw[i];
      if (x.norm != NORM_NONE) {
        uint4 weight, bias = {};
        affine.get(x, i, pack, weight, bias);
        out = normed<T>(x, raw[i], mean, factor, weight, bias);
      }
      reinterpret_cast<uint4*>(xs)[pack] = out;
    }
    // Longer rows, which the host gives no norm.
    for (uint32_t pack = threadIdx.x + STREAM_PACKS * GEMV_THREADS; pack < packs; pack += GEMV_THREADS)
      reinterpret_cast<uint4*>(xs)[pack] = VectorPack::read(x.x, BF16, pack);
    __syncthreads();
  }

  // This thread's part of the sum of x, or of the squares of its distances from the mean.
  template <bool SQUARES>
  __device__ float over(const uint4 (&raw)[STREAM_PACKS], float mean) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < STREAM_PACKS; ++i) {
      if (threadIdx.x + i * GEMV_THREADS >= p.k / 8) break;
      float v[8];
      unpack8<T>(raw[i], v);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += SQUARES ? (v[j] - mean) * (v[j] - mean) : v[j];
    }
    return sum;
  }

  // A warp's sums of a unit.
  __device__ void keep(uint32_t unit, float (&v)[2], bool began) const {
    const float y = spread_sums<2>(v);
    if (lane() % 16 == 0) (began ? sums + 2 * unit : rest[warp()])[lane() / 16] = y;
    v[0] = v[1] = 0.f;
  }

  // The sum of a unit's row: what a warp began, and what those behind it had of the unit.
  __device__ float total(uint32_t unit, uint32_t r) const {
    float y = sums[2 * unit + r];
    for (uint32_t w = unit * steps / share + 1; w < GEMV_WARPS && w * share < (unit + 1) * steps; ++w) y += rest[w][r];
    return y;
  }

  __device__ void finish(Addends addends) const {
    const Epilogue& e = p.epilogue;
    for (uint32_t i = threadIdx.x; i < units * outputs; i += GEMV_THREADS) {
      const uint32_t column = first * outputs + i;
      if (column >= p.width) return;
      if (i >= GEMV_THREADS) ask(addends, column);
      float y = total(i / outputs, i % outputs) + widen_raw(addends.bias, e.dtype);
      if (gates(p)) {
        const float bias = e.bias ? widen_raw(read_raw(e.bias, e.dtype, column + p.width), e.dtype) : 0.f;
        y = silu(y) * (total(i, 1) + bias);
      } else {
        y = activate(e.activation, y);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) y += widen_raw(addends.residuals[r], e.dtype);
      write(e.out, e.out_dtype, column, y);
    }
  }
  __device__ void ask(Addends& addends, uint32_t column) const {
    addends.ask_bias(p.epilogue, column);
    addends.ask_residuals(p.epilogue, 0, column);
  }

  // All of this warp's steps; each is asked for again as soon as its slot is free.
  __device__ void multiply(Ahead& ahead) const {
    const uint32_t packs = p.k / 8, mine = shared_address(ring) + lane() * 16;
    float v[2] = {};
    uint32_t unit = begin / steps, step = begin % steps, slot = 0;
    bool began = step == 0;
#pragma unroll 1
    for (uint32_t i = begin; i < end; ++i) {
      wait_oldest(p.slots);
      const uint32_t pack = step * WARP + lane();
      if (pack < packs) {
        const char* at = ring + slot * STREAM_SLOT + lane() * 16;
        Inputs<8> x;
        unpack8<T>(reinterpret_cast<const uint4*>(xs)[pack], x.v);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float w[8];
          unpack8<T>(*reinterpret_cast<const uint4*>(at + r * (STREAM_SLOT / 2)), w);
          v[r] += dot(w, x);
        }
      }
      ask(ahead, mine + slot * STREAM_SLOT);
      if (++slot == p.slots) slot = 0;
      if (++step == steps) {
        keep(unit, v, began);
        began = true, step = 0, ++unit;
      }
    }
    if (step != 0 && begin < end) keep(unit, v, began);
  }

  // `ready`: the kernel in front does not write x, and all before that one are complete. Then only the
  // outputs wait.
  __device__ void run(float (*scratch)[GEMV_WARPS], bool ready, const Fetch& fetch) const {
    if (ready) allow_next();
    uint32_t position = 0;
    if (fetch.position) position = read_raw(fetch.position, F32, 0);
    const uint32_t packs = p.k / 8, column = first * outputs + threadIdx.x;
    const bool finishes = threadIdx.x < units * outputs && column < p.width;
    Affine affine;
    uint4 raw[STREAM_PACKS];
    Addends addends = {};
    // What is short comes first, the rings' reads take long.
    affine.ask(p.prologue, packs);
    if (finishes) addends.ask_bias(p.epilogue, column);
    if (ready) read(p.prologue.x, packs, raw);
    const uint32_t mine = shared_address(ring) + lane() * 16;
    const uint32_t early = ready || p.prologue.norm == NORM_NONE ? p.slots : min(p.slots, STREAM_EARLY);
    Ahead ahead = {begin, begin / steps, begin % steps};
    if (begin < end) enter(ahead);
    // In front of the ring, which is long on its way: so they are there when x is asked for.
    if (fetch.position) fetch_lines(fetch, position);
#pragma unroll 1
    for (uint32_t i = 0; i < early; ++i) {
      ask(ahead, mine + i * STREAM_SLOT);
      if (!ready) await_copies_but<STREAM_PACE>();
    }
    if (!ready) {
      wait_previous();
      // Not before: so the next kernel may rely on all in front of this one. It has no room here anyway.
      allow_next();
      read(p.prologue.x, packs, raw);
#pragma unroll 1
      for (uint32_t i = early; i < p.slots; ++i) ask(ahead, mine + i * STREAM_SLOT);
    }
    if (finishes) addends.ask_residuals(p.epilogue, 0, column);
    stage(raw, affine, scratch);

    multiply(ahead);
    if (ready) wait_previous();
    __syncthreads();
    finish(addends);
  }

  template <int N> __device__ static void read(const void* from, uint32_t packs, uint4 (&raw)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint32_t pack = threadIdx.x + i * GEMV_THREADS;
      if (pack < packs) raw[i] = VectorPack::read(from, BF16, pack);
    }
  }
};

// The body of a kernel, or of those of its blocks that share the product. Turing has no asynchronous copies,
// and the host asks it for none of this.
template <typename T, bool PAIR>
__device__ __forceinline__ void stream(const Gemv& p, const Second& second, uint32_t block, uint32_t blocks, bool ready,
                                       const Fetch& fetch) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  extern __shared__ float4 dynamic_shared[];
  __shared__ float rest[GEMV_WARPS][2], scratch[2][GEMV_WARPS];
  Stream<T, PAIR>(p, second, block, blocks, reinterpret_cast<char*>(dynamic_shared), rest).run(scratch, ready, fetch);
#endif
}

}  // namespace fused
