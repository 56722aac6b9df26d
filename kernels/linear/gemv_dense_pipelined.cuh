// GEMV for one row of x and weights of its 16-bit type that are more than the SMs hold: every warp streams them
// through a pipeline of 4 to 12 `cp.async` stages (two rows of weights x 256 k values each) in shared memory.
//
// Bandwidth is lost at the beginning and the end. So what does not depend on x is loaded before the PDL wait, a few
// stages at a time, and all of x at once after it. A block has consecutive N tiles of two output channels; their K
// blocks are cut into equal shares for its warps (stream-K within the block), so that all end together, and sums
// are added once, at the end.
#pragma once

#include "common/mma.cuh"
#include "linear/gemv_dense.cuh"

namespace fused {

constexpr int NORM_PACKS = 2;  // of the norm's weight and bias, before the PDL wait
// Stages that are loaded before the PDL wait, where x is normed after it: loads of x must not queue behind all of
// them, or the weights are there while the norm's sums are still being taken.
constexpr uint32_t EARLY_STAGES = 8;
// Stages of a warp that are in flight at once before the PDL wait. All of a pipeline, in all blocks, would delay the
// last reads of the preceding kernel, which all blocks wait for.
constexpr int MAX_IN_FLIGHT = 2;

// Until the oldest of `stages` groups is there. The instruction takes a constant.
__device__ __forceinline__ void wait_oldest(uint32_t stages) {
  switch (stages) {
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

// Prefetches the next kernel's keys and values into the L2 cache.
constexpr uint32_t FETCH_LINE = 128, MAX_FETCH_LINES = 1 << 17;  // bytes, lines

__device__ __forceinline__ void fetch_lines(const Fetch& f, uint32_t position) {
  const uint32_t bytes = min(uint64_t(position) * f.row, uint64_t(f.plane));
  const uint32_t lines = min((bytes + FETCH_LINE - 1) / FETCH_LINE, MAX_FETCH_LINES / (2 * f.planes));
  for (uint32_t i = blockIdx.x * GEMV_THREADS + threadIdx.x; i < 2 * f.planes * lines; i += gridDim.x * GEMV_THREADS) {
    const uint32_t plane = i / lines / 2;
    const char* from = (i / lines % 2 ? f.v : f.k) + uint64_t(plane) * f.plane + i % lines * FETCH_LINE;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
  }
}

// PAIR: a second matrix goes on where rows of the first end.
template <typename T, bool PAIR> struct GemvPipelined {
  const Gemv& p;
  const Second& second;
  uint32_t outputs;       // of an N tile: two, or one of which it has the gate and what is gated
  uint32_t first, n_tiles;  // of the block
  uint32_t k_blocks, warp_k_blocks;  // of an N tile, of a warp
  uint32_t begin, end;    // this warp's K blocks of the block's
  char* pipeline;
  T* xs;
  float* sums;            // [N tiles][2]: what an N tile's first warp has
  float (*rest)[2];       // [warps]: what a warp adds to an N tile that another began
  uint64_t policy;        // of the weights

  static __device__ uint32_t lane() { return threadIdx.x % WARP; }
  static __device__ uint32_t warp() { return threadIdx.x / WARP; }

  __device__ GemvPipelined(const Gemv& p, const Second& second, uint32_t block, uint32_t blocks, char* memory,
                    float (*rest)[2])
      : p(p), second(second), outputs(gates(p) ? 1 : 2), rest(rest), policy(evict_first()) {
    const uint32_t all = (p.width + outputs - 1) / outputs;
    first = uint64_t(all) * block / blocks;
    n_tiles = uint64_t(all) * (block + 1) / blocks - first;
    k_blocks = (p.k + PIPELINED_K_BLOCK - 1) / PIPELINED_K_BLOCK;
    warp_k_blocks = (n_tiles * k_blocks + GEMV_WARPS - 1) / GEMV_WARPS;
    begin = min(warp() * warp_k_blocks, n_tiles * k_blocks);
    end = min(begin + warp_k_blocks, n_tiles * k_blocks);
    pipeline = memory + warp() * p.stages * PIPELINED_STAGE;
    xs = reinterpret_cast<T*>(memory + GEMV_WARPS * p.stages * PIPELINED_STAGE);
    sums = reinterpret_cast<float*>(xs + staged_pitch<T>(p.k));
  }

  // Where the next K block to be loaded lies.
  struct PrefetchCursor {
    uint32_t at, n_tile, k_block;
    const char *rows[2], *others[2];  // the second matrix's, as if they began where the first's do
  };

  __device__ void enter(PrefetchCursor& a) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t n_tile = first + a.n_tile;
      // Past the last row the last is read again and not written.
      uint32_t row = outputs == 1 ? n_tile + r * p.width : min(2 * n_tile + r, p.width - 1);
      const Matrix& matrix = matrix_of(p, row);
      const uint64_t k = PAIR ? second.border : p.k;
      a.rows[r] = static_cast<const char*>(matrix.data) + row * k * sizeof(T);
      if constexpr (PAIR)
        a.others[r] = static_cast<const char*>(second.data) + (row * (p.k - k) - int64_t(k)) * int64_t(sizeof(T));
    }
  }

  // A lane copies what it will multiply itself, so no barrier is needed.
  __device__ void prefetch(PrefetchCursor& a, uint32_t stage) const {
    if (a.at < end) {
      const uint32_t at = (a.k_block * WARP + lane()) * 8;
      if (at < p.k) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const char* row = PAIR && at >= second.border ? a.others[r] : a.rows[r];
          copy_async(stage + r * (PIPELINED_STAGE / 2), row + at * sizeof(T), policy);
        }
      }
      ++a.at;
      if (++a.k_block == k_blocks) {
        a.k_block = 0, ++a.n_tile;
        enter(a);
      }
    }
    commit_copies();
  }

  // Of the norm's weight and bias what is loaded ahead: after the PDL wait it would queue behind all
  // the weights in flight.
  struct Affine {
    uint4 weight[NORM_PACKS], bias[NORM_PACKS];

    __device__ void prefetch(const Prologue& x, uint32_t packs) {
      if (x.norm == NORM_NONE) return;
      read(x.weight, packs, weight);
      if (x.bias) read(x.bias, packs, bias);
    }
    // Those of the thread's pack i.
    __device__ void get(const Prologue& x, int i, uint32_t pack, uint4& w, uint4& b) const {
      const bool there = i < NORM_PACKS;
      w = there ? weight[i % NORM_PACKS] : VectorPack::read(x.weight, x.dtype, pack);
      if (x.bias) b = there ? bias[i % NORM_PACKS] : VectorPack::read(x.bias, x.dtype, pack);
    }
  };

  // Puts x where it is multiplied from, behind the norm if there is one. Nothing is read twice.
  __device__ void stage(const uint4 (&raw)[PIPELINED_PACKS], const Affine& affine, float (*scratch)[GEMV_WARPS]) const {
    const Prologue& x = p.prologue;
    const uint32_t packs = p.k / 8;
    float mean = 0.f, factor = 1.f;
    if (x.norm == NORM_LAYER) mean = block_sum<GEMV_WARPS>(over<false>(raw, 0.f), scratch[0]) / p.k;
    if (x.norm != NORM_NONE)
      factor = rsqrtf(__fdividef(block_sum<GEMV_WARPS>(over<true>(raw, mean), scratch[1]), p.k) + x.eps);
#pragma unroll
    for (int i = 0; i < PIPELINED_PACKS; ++i) {
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
    for (uint32_t pack = threadIdx.x + PIPELINED_PACKS * GEMV_THREADS; pack < packs; pack += GEMV_THREADS)
      reinterpret_cast<uint4*>(xs)[pack] = VectorPack::read(x.x, BF16, pack);
    __syncthreads();
  }

  // This thread's part of the sum of x, or of the squares of its distances from the mean.
  template <bool SQUARES>
  __device__ float over(const uint4 (&raw)[PIPELINED_PACKS], float mean) const {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < PIPELINED_PACKS; ++i) {
      if (threadIdx.x + i * GEMV_THREADS >= p.k / 8) break;
      float v[8];
      unpack8<T>(raw[i], v);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += SQUARES ? (v[j] - mean) * (v[j] - mean) : v[j];
    }
    return sum;
  }

  // A warp's sums of an N tile.
  __device__ void keep(uint32_t n_tile, float (&v)[2], bool began) const {
    const float y = spread_sums<2>(v);
    if (lane() % 16 == 0) (began ? sums + 2 * n_tile : rest[warp()])[lane() / 16] = y;
    v[0] = v[1] = 0.f;
  }

  // The sum of an N tile's row: what a warp began, and what those behind it had of the N tile.
  __device__ float total(uint32_t n_tile, uint32_t r) const {
    float y = sums[2 * n_tile + r];
    for (uint32_t w = n_tile * k_blocks / warp_k_blocks + 1;
         w < GEMV_WARPS && w * warp_k_blocks < (n_tile + 1) * k_blocks; ++w)
      y += rest[w][r];
    return y;
  }

  __device__ void epilogue(Addends addends) const {
    const Epilogue& e = p.epilogue;
    for (uint32_t i = threadIdx.x; i < n_tiles * outputs; i += GEMV_THREADS) {
      const uint32_t column = first * outputs + i;
      if (column >= p.width) return;
      if (i >= GEMV_THREADS) prefetch(addends, column);
      float y = total(i / outputs, i % outputs) + widen_raw(addends.bias, e.dtype);
      if (gates(p)) {
        const float bias = e.bias ? widen_raw(read_raw(e.bias, e.dtype, column + p.width), e.dtype) : 0.f;
        y = gate(e.activation, y) * (total(i, 1) + bias);
      } else {
        y = activate(e.activation, y);
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) y += widen_raw(addends.residuals[r], e.dtype);
      write(e.out, e.out_dtype, column, y);
    }
  }
  __device__ void prefetch(Addends& addends, uint32_t column) const {
    addends.load_bias(p.epilogue, column);
    addends.load_residuals(p.epilogue, 0, column);
  }

  // All of this warp's K blocks; each is loaded again as soon as its stage is free.
  __device__ void multiply(PrefetchCursor& ahead) const {
    const uint32_t packs = p.k / 8, mine = shared_address(pipeline) + lane() * 16;
    float v[2] = {};
    uint32_t n_tile = begin / k_blocks, k_block = begin % k_blocks, stage = 0;
    bool began = k_block == 0;
#pragma unroll 1
    for (uint32_t i = begin; i < end; ++i) {
      wait_oldest(p.stages);
      const uint32_t pack = k_block * WARP + lane();
      if (pack < packs) {
        const char* at = pipeline + stage * PIPELINED_STAGE + lane() * 16;
        Inputs<8> x;
        unpack8<T>(reinterpret_cast<const uint4*>(xs)[pack], x.v);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float w[8];
          unpack8<T>(*reinterpret_cast<const uint4*>(at + r * (PIPELINED_STAGE / 2)), w);
          v[r] += dot(w, x);
        }
      }
      prefetch(ahead, mine + stage * PIPELINED_STAGE);
      if (++stage == p.stages) stage = 0;
      if (++k_block == k_blocks) {
        keep(n_tile, v, began);
        began = true, k_block = 0, ++n_tile;
      }
    }
    if (k_block != 0 && begin < end) keep(n_tile, v, began);
  }

  // `ready`: the preceding kernel does not write x, and all before that one are complete. Then only the
  // outputs wait.
  __device__ void run(float (*scratch)[GEMV_WARPS], bool ready, const Fetch& fetch) const {
    if (ready) pdl_launch();
    uint32_t position = 0;
    if (fetch.position) position = read_raw(fetch.position, F32, 0);
    const uint32_t packs = p.k / 8, column = first * outputs + threadIdx.x;
    const bool finishes = threadIdx.x < n_tiles * outputs && column < p.width;
    Affine affine;
    uint4 raw[PIPELINED_PACKS];
    Addends addends = {};
    // Short reads first: those of the pipelines take long.
    affine.prefetch(p.prologue, packs);
    if (finishes) addends.load_bias(p.epilogue, column);
    if (ready) read(p.prologue.x, packs, raw);
    const uint32_t mine = shared_address(pipeline) + lane() * 16;
    const uint32_t early = ready || p.prologue.norm == NORM_NONE ? p.stages : min(p.stages, EARLY_STAGES);
    PrefetchCursor ahead = {begin, begin / k_blocks, begin % k_blocks};
    if (begin < end) enter(ahead);
    // Before the pipeline, whose reads take long: so they are there when x is loaded.
    if (fetch.position) fetch_lines(fetch, position);
#pragma unroll 1
    for (uint32_t i = 0; i < early; ++i) {
      prefetch(ahead, mine + i * PIPELINED_STAGE);
      if (!ready) await_copies_but<MAX_IN_FLIGHT>();
    }
    if (!ready) {
      pdl_wait();
      // Not before: so the next kernel may rely on all kernels before this one. It has no room on the SM anyway.
      pdl_launch();
      read(p.prologue.x, packs, raw);
#pragma unroll 1
      for (uint32_t i = early; i < p.stages; ++i) prefetch(ahead, mine + i * PIPELINED_STAGE);
    }
    if (finishes) addends.load_residuals(p.epilogue, 0, column);
    stage(raw, affine, scratch);

    multiply(ahead);
    if (ready) pdl_wait();
    __syncthreads();
    epilogue(addends);
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
// and never runs it.
template <typename T, bool PAIR>
__device__ __forceinline__ void gemv_dense_pipelined(const Gemv& p, const Second& second, uint32_t block,
                                                     uint32_t blocks, bool ready, const Fetch& fetch) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  extern __shared__ float4 dynamic_shared[];
  __shared__ float rest[GEMV_WARPS][2], scratch[2][GEMV_WARPS];
  GemvPipelined<T, PAIR>(p, second, block, blocks, reinterpret_cast<char*>(dynamic_shared), rest)
      .run(scratch, ready, fetch);
#endif
}

}  // namespace fused
