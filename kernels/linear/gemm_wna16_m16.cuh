// y = act(x W^T + bias) + residuals for up to 16 rows of bf16 x and weights in INT8 or INT4 codes
// (formats/packed.cuh), multiplied as gemm_wna16_m64.cuh does it, but with x in registers.
//
// One or two blocks, a cluster, share k, and `split` warps of a block its slice: a warp has two steps of 128
// values of all rows of x in registers while units of 16 rows of weights pass by. Its codes and their scales
// stream through a ring in shared memory of its own, which is filled before the wait, and which leaves room for
// the next kernel's. If a warp has more steps, the units of a batch pass again for the next two, and it goes on
// from its sums: warps wait for each other when a batch is done and not before.
//
// Codes of INT4 in groups of 128 are multiplied as they come, 136 more than their numbers: the products begin
// with what that makes too much, from the sums of x over each step.
//
// After a batch of four units every thread adds up four outputs over the warps, in their order. Of two blocks
// each gets the other's sums for every second row of x, and writes those.
#pragma once

#include "common/cluster.cuh"
#include "common/tma.cuh"
#include "linear/gemv_wna16.cuh"

namespace fused {

// Of what a warp asks for at once: its steps, and how many such its ring has room for.
template <class Format, int DEPTH> struct CodeRing {
  static constexpr int STEPS = Format::GROUPS == ONE_GROUP ? DEPTH : 1;
  static constexpr int GROUPS = Format::GROUPS == SOME_GROUPS ? 4 : Format::GROUPS;
  static constexpr int SLOTS = Format::GROUPS == SOME_GROUPS ? 6 : 4;
  static constexpr uint32_t PIECE = sizeof(typename Format::Piece) * WARP;  // of 8 rows and a step
  static constexpr uint32_t CODES = 2 * STEPS * PIECE;
  static constexpr uint32_t SCALES = 2 * STEPS * OCTET * GROUPS * 2;
  static constexpr uint32_t ZEROS = Format::ZEROS ? SCALES / 2 : 0;
  static constexpr uint32_t SLOT = CODES + SCALES + ZEROS;
};

// 8 bytes to shared memory.
__device__ __forceinline__ void copy_async_8(uint32_t to, const void* from) {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
#endif
}

template <class Format> struct CodeSlices {
  static constexpr int WARPS = SLICES_WARPS, THREADS = WARPS * WARP, EIGHTS = SLICES_ROWS / 8;
  static constexpr int DEPTH = SLICES_DEPTH, BATCH = SLICES_BATCH;
  using R = CodeRing<Format, DEPTH>;
  using Scales = TileScales<Format::GROUPS, Format::ZEROS, R::STEPS>;
  static constexpr int SLOTS = R::SLOTS, CHUNKS = DEPTH / R::STEPS;
  static constexpr uint32_t SUMS = 16 * 8 * EIGHTS;  // of a unit
  static constexpr uint32_t RINGS = WARPS * SLOTS * R::SLOT, PARTS = WARPS * BATCH * SUMS * 4;
  // What a batch brings from the other block, in bytes, and batches that there is room for: sums are given at
  // the end of a batch and taken at the end of the next, and a block may be two batches ahead of the other.
  static constexpr uint32_t GIVEN = 8 * THREADS, TURNS = 4;
  static_assert(DEPTH % R::STEPS == 0 && BATCH * SUMS == 4 * THREADS);
  // f32 has room for what the bias makes of a step's sums: they end 2^-18 of theirs off at most.
  static constexpr bool BIASED = Format::GROUPS == ONE_GROUP && R::STEPS == DEPTH;
  static constexpr float BIAS = 136.f;
  static constexpr uint32_t ONES = 0x3f803f80u;  // two bf16

  const Gemv& p;
  const uint32_t slices, rank, side, part, place;
  const uint32_t outputs;       // of a unit
  uint32_t first, units;        // of the cluster
  uint32_t begin, end, passes;  // the warp's steps
  uint32_t ring;                // the warp's
  float* parts;                 // [BATCH][split][SUMS]
  float4* biases;               // the warp's: [DEPTH][4], what products of lane t begin with
  uint32_t given;               // [TURNS] sums from the other block, then those that meet them
  uint32_t barriers;            // [TURNS]

  static __device__ uint32_t lane() { return threadIdx.x % WARP; }
  static __device__ uint32_t warp() { return threadIdx.x / WARP; }

  __device__ CodeSlices(const SlicesParams& s, char* memory, float4* biases, uint32_t barriers)
      : p(s.product), slices(s.slices), rank(blockIdx.x & (s.slices - 1)), side(WARPS / s.product.split),
        part(warp() / side), place(warp() % side), outputs(unit_outputs(p)),
        biases(biases + warp() * (4 * DEPTH)), barriers(barriers) {
    const uint32_t clusters = gridDim.x / slices, cluster = blockIdx.x / slices;
    const uint32_t all = (p.width + outputs - 1) / outputs;
    first = uint64_t(all) * cluster / clusters;
    units = uint64_t(all) * (cluster + 1) / clusters - first;
    const uint32_t steps = steps_of(p.k), slice = (steps + slices - 1) / slices;
    const uint32_t last = min(steps, (rank + 1) * slice), share = (slice + p.split - 1) / p.split;
    begin = min(rank * slice + part * share, last);
    end = min(begin + share, last);
    passes = (share + DEPTH - 1) / DEPTH;
    ring = shared_address(memory) + warp() * (SLOTS * R::SLOT);
    parts = reinterpret_cast<float*>(memory + RINGS);
    given = shared_address(memory) + RINGS + PARTS;
  }

  // Where what is asked for next lies.
  struct Ahead {
    uint32_t from, pass, unit, chunk;  // first unit of a batch, ..., the warps' first unit of a round
  };
  __device__ void advance(Ahead& a) const {
    if (CHUNKS > 1 && ++a.chunk < CHUNKS) return;
    a.chunk = 0;
    a.unit += side;
    if (a.unit < min(a.from + BATCH, units)) return;
    if (++a.pass == passes) a.pass = 0, a.from += BATCH;
    a.unit = a.from;
  }

  __device__ __forceinline__ void ask(Ahead& a, uint32_t slot) const {
    const uint32_t unit = a.unit + place, step = begin + a.pass * DEPTH + a.chunk * R::STEPS;
    if (unit < units && step < end) {
      if constexpr (R::GROUPS == 0) ask_rows(first + unit, step, slot);
      else ask_octets(first + unit, step, slot);
    }
    commit_copies();
    advance(a);
  }

  // Codes that lie row by row.
  __device__ __forceinline__ void ask_rows(uint32_t unit, uint32_t step, uint32_t slot) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const CodeRow row = CodeRow::of<Format>(p, unit_row(p, unit, lane() / 4 + 8 * i), lane() % 4);
      Format::copy(slot + i * R::PIECE + 16 * lane(), row.codes, p.k, step, lane() % 4);
    }
  }

  // Eight rows of a unit and a step are side by side: 512 bytes of codes, 16 of scales and 8 of zero points for
  // each group.
  __device__ __forceinline__ void ask_octets(uint32_t unit, uint32_t step, uint32_t slot) const {
    const uint32_t groups = Format::GROUPS == SOME_GROUPS ? p.groups : Format::GROUPS, steps = steps_of(p.k);
    uint32_t places[2], of[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t row = gates(p) ? 8 * unit + i * p.width : min(16 * unit + 8 * i, (p.width - 1) & ~7u);
      of[i] = (row >= p.weights[1].first) + (row >= p.weights[2].first);
      places[i] = (row - p.weights[of[i]].first) / OCTET * steps + step;
      const char* codes = static_cast<const char*>(p.weights[of[i]].data) + uint64_t(places[i]) * R::PIECE + 16 * lane();
#pragma unroll
      for (int d = 0; d < R::STEPS; ++d) {
        if (step + d < end) copy_async(slot + (d * 2 + i) * R::PIECE + 16 * lane(), codes + d * R::PIECE);
      }
    }
    const uint32_t side = R::STEPS * groups, i = lane() % 16 / side, c = lane() % side;
    if (i < 2 && step + c / groups < end) {
      const Matrix& matrix = p.weights[i ? of[1] : of[0]];
      const char* scales = static_cast<const char*>(matrix.scales);
      const uint32_t at = (i ? places[1] : places[0]) * groups + c, to = slot + R::CODES, n = i * side + c;
      if (lane() < 16) copy_async(to + 16 * n, scales + 16 * uint64_t(at));
      if constexpr (Format::ZEROS) {
        const uint32_t zeros = to + R::SCALES + 8 * n;
        if (lane() >= 16 && matrix.zeros > 0) copy_async_8(zeros, scales + 2 * uint64_t(matrix.zeros) + 8 * uint64_t(at));
        if (lane() >= 16 && matrix.zeros == 0) store_shared(zeros, 0x80808080u), store_shared(zeros + 4, 0x80808080u);
      }
    }
  }

  using X = uint4[DEPTH][4][EIGHTS];

  // Addresses are those of a row's first values and constants, as there is nothing else to do meanwhile.
  __device__ __forceinline__ void load(X& x, uint32_t pass) const {
    const uint32_t g = lane() / 4, first = (begin + pass * DEPTH) * STEP + Format::value(0, lane() % 4);
    const int left = static_cast<int>(min(p.k, end * STEP)) - static_cast<int>(first);
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) {
      const uint32_t m = 8 * n + g;
      const char* row = static_cast<const char*>(p.prologue.x) + 2 * (uint64_t(m) * p.k + first);
      const int values = m < p.m ? left : 0;
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int at = d * STEP + Format::value(e, 0);
          x[d][e][n] = make_uint4(0, 0, 0, 0);
          if (at < values) x[d][e][n] = __ldcg(reinterpret_cast<const uint4*>(row + 2 * at));
        }
      }
    }
    if constexpr (BIASED) leave_biases(x);
  }

  // The sums of x over a step, from products with ones.
  __device__ __forceinline__ void leave_biases(const X& x) const {
    const Operands ones = {ONES, ONES, ONES, ONES, ONES, ONES, ONES, ONES};
    __syncwarp();
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      float c[EIGHTS][4] = {};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) mma_both(c[n], ones, x[d][e][n]);
      }
      const float4 bias = make_float4(-BIAS * c[0][0], -BIAS * c[0][1], -BIAS * c[1][0], -BIAS * c[1][1]);
      if (lane() < 4) biases[4 * d + lane()] = bias;
    }
    __syncwarp();
  }
  // What the sums of a group of step d begin with.
  __device__ __forceinline__ void begin_sums(float (&c)[EIGHTS][4], int d) const {
    float4 bias = {};
    if (BIASED) bias = biases[4 * d + lane() % 4];
    c[0][0] = c[0][2] = bias.x, c[0][1] = c[0][3] = bias.y, c[1][0] = c[1][2] = bias.z, c[1][1] = c[1][3] = bias.w;
  }

  __device__ __forceinline__ float scale(uint32_t slot, int i, int d, int e) const {
    const uint32_t groups = Format::GROUPS == SOME_GROUPS ? p.groups : Format::GROUPS;
    const uint32_t at = slot + R::CODES + ((i * R::STEPS + d) * OCTET + lane() / 4) * groups * 2 + e * groups / 4 * 2;
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at));
    return __half2float(__ushort_as_half(v));
  }
  // A zero point as two bf16: the upper half of the f32.
  __device__ __forceinline__ uint32_t zero(uint32_t slot, int i, int d, int e) const {
    if constexpr (!Format::ZEROS) return 0;
    const uint32_t at = slot + R::CODES + R::SCALES + ((i * R::STEPS + d) * OCTET + lane() / 4) * p.groups + e * p.groups / 4;
    uint16_t v;
    asm volatile("{\n.reg .u8 byte;\nld.shared.u8 byte, [%1];\ncvt.u16.u8 %0, byte;\n}" : "=h"(v) : "r"(at));
    return __byte_perm(__float_as_uint(ZERO_STEP * static_cast<float>(v)), 0, 0x3232);
  }
  __device__ __forceinline__ typename Format::Piece piece(uint32_t slot, int d, int i) const {
    typename Format::Piece v;
    uint4* words = reinterpret_cast<uint4*>(&v);
#pragma unroll
    for (int q = 0; q < int(sizeof(v) / 16); ++q)
      words[q] = load_shared(slot + (d * 2 + i) * R::PIECE + q * (16 * WARP) + 16 * lane());
    return v;
  }

  // The steps of a slot; they meet those of x from the d0-th on. Steps that are not there meet zeros, and their
  // scales may be anything.
  __device__ __forceinline__ void multiply(uint32_t slot, uint32_t step, const X& x, int d0,
                                           float (&sums)[EIGHTS][4]) const {
    constexpr bool HOLDS_SCALES = R::GROUPS == 1;  // there are registers for all
    typename Format::Piece pieces[R::STEPS][2];
    float by[R::STEPS][2];
#pragma unroll
    for (int d = 0; d < R::STEPS; ++d) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        pieces[d][i] = piece(slot, d, i);
        if (HOLDS_SCALES) by[d][i] = scale(slot, i, d, 0);
      }
    }
    float c[R::STEPS][EIGHTS][4];
    uint32_t zeros[R::STEPS][2] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
#pragma unroll
      for (int d = 0; d < R::STEPS; ++d) {
        if (Format::ZEROS && Scales::begins(p, e)) zeros[d][0] = zero(slot, 0, d, e), zeros[d][1] = zero(slot, 1, d, e);
        if (R::GROUPS > 0 && Scales::begins(p, e)) begin_sums(c[d], d);
        Operands w;
        if constexpr (BIASED) w = Format::biased_operands(pieces[d][0], pieces[d][1], e);
        else w = Format::operands(pieces[d][0], pieces[d][1], e, zeros[d]);
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) mma_both(R::GROUPS > 0 ? c[d][n] : sums[n], w, x[d0 + d][e][n]);
      }
      if constexpr (R::GROUPS > 0) {
        if (!Scales::ends(p, e)) continue;
#pragma unroll
        for (int d = 0; d < R::STEPS; ++d) {
          if (!HOLDS_SCALES) by[d][0] = scale(slot, 0, d, e), by[d][1] = scale(slot, 1, d, e);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float factor = step + d < end ? by[d][i / 2] : 0.f;
#pragma unroll
            for (int n = 0; n < EIGHTS; ++n) sums[n][i] = fmaf(factor, c[d][n][i], sums[n][i]);
          }
        }
      }
    }
  }

  // A warp's sums of one of a batch's units; it goes on from what it had of former passes.
  __device__ __forceinline__ void leave(const float (&sums)[EIGHTS][4], uint32_t unit, bool again) const {
    float4* mine = reinterpret_cast<float4*>(parts) + ((unit + place) * p.split + part) * (SUMS / 4) + lane();
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) {
      float4 v = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
      if (again) {
        const float4 old = mine[n * WARP];
        v.x += old.x, v.y += old.y, v.z += old.z, v.w += old.w;
      }
      mine[n * WARP] = v;
    }
  }

  // Where the first warp of those that share a unit has left what the thread adds up: four sums, as a lane of
  // `mma` has them, of rows g and g + 8 of the weights, each for rows 2t and 2t + 1 of eight rows of x.
  __device__ __forceinline__ const float4* of_thread() const {
    const uint32_t unit = threadIdx.x / (SUMS / 4);
    return reinterpret_cast<const float4*>(parts) + unit * p.split * (SUMS / 4) + threadIdx.x % (SUMS / 4);
  }
  __device__ __forceinline__ void add(float4& y) const {
    const float4* from = of_thread();
    float4 v[WARPS];
#pragma unroll
    for (int q = 0; q < WARPS; ++q) {
      v[q] = float4{};
      if (q < p.split) v[q] = from[q * (SUMS / 4)];
    }
#pragma unroll
    for (int q = 0; q < WARPS; ++q) y.x += v[q].x, y.y += v[q].y, y.z += v[q].z, y.w += v[q].w;
  }

  // All threads: the outputs of a batch for rows 2t + b of eights of x.
  __device__ __forceinline__ void finish(uint32_t from, uint32_t b, float2 y) const {
    const uint32_t unit = from + threadIdx.x / (SUMS / 4), m = threadIdx.x / WARP % 2 * 8 + lane() % 4 * 2 + b;
    if (unit < units && m < p.m) write_outputs(first + unit, lane() / 4, m, y);
  }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // All threads of two blocks: the first writes the even rows of x, the other the odd ones. Each gives what it
  // has of the other's rows, and keeps what it has of its own.
  __device__ __forceinline__ void exchange(uint32_t from, float4 y) const {
    const uint32_t turn = from / BATCH % TURNS, at = given + turn * GIVEN + 8 * threadIdx.x, other = rank ^ 1;
    const float2 others = rank ? make_float2(y.x, y.z) : make_float2(y.y, y.w);
    send(in_block(at, other), others, in_block(barriers + 8 * turn, other));
    if (from > 0) finish_given(from - BATCH);
    const float2 own = rank ? make_float2(y.y, y.w) : make_float2(y.x, y.z);
    store_shared(given + TURNS * GIVEN + 8 * threadIdx.x, __float_as_uint(own.x), __float_as_uint(own.y));
  }
  __device__ __forceinline__ void finish_given(uint32_t from) const {
    const uint32_t batch = from / BATCH, turn = batch % TURNS, barrier = barriers + 8 * turn;
    barrier_wait(barrier, batch / TURNS % 2);
    if (threadIdx.x == 0) barrier_expect(barrier, GIVEN);
    const float2 own = load_pair(given + TURNS * GIVEN + 8 * threadIdx.x);
    const float2 other = load_pair(given + turn * GIVEN + 8 * threadIdx.x);
    finish(from, rank, make_float2(own.x + other.x, own.y + other.y));
  }
  static __device__ __forceinline__ float2 load_pair(uint32_t at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
  }
#endif

  // Sums of rows g and g + 8 of a unit for row m of x.
  __device__ __forceinline__ void write_outputs(uint32_t unit, uint32_t g, uint32_t m, float2 sums) const {
    const Epilogue& e = p.epilogue;
    float v[2] = {sums.x, sums.y};
    // Sums in bf16. All that may be behind them, below, takes up to a tenth of a product's time.
    if (Format::GROUPS != ROW_SCALES && is_plain(e) && e.out_dtype == BF16) {
      const uint32_t c = 16 * unit + g;
      auto* out = static_cast<__nv_bfloat16*>(e.out) + m * e.stride + c;
      if (c < p.width) out[0] = from_float<__nv_bfloat16>(v[0]);
      if (c + 8 < p.width) out[8] = from_float<__nv_bfloat16>(v[1]);
      return;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t row = unit_row(p, unit, g + 8 * i);
      const float bias = e.bias ? widen_raw(read_raw(e.bias, e.dtype, row), e.dtype) : 0.f;
      if constexpr (Format::GROUPS == ROW_SCALES) {
        const Matrix& matrix = matrix_of(p, row);
        v[i] *= static_cast<const float*>(matrix.scales)[row];
      }
      v[i] += bias;
    }
    if (gates(p)) v[0] = silu(v[0]) * v[1];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t c = unit_column(p, unit, g + 8 * i);
      if ((i == 1 && gates(p)) || c >= p.width) continue;
      Addends of;
      of.ask_residuals(e, m, c);
      float y = gates(p) ? v[i] : activate(e.activation, v[i]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (e.residuals[j]) y += widen_raw(of.residuals[j], e.dtype);
      }
      write(e.out, e.out_dtype, m * e.stride + c, y);
    }
  }

  __device__ __forceinline__ void run() const {
    allow_next();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (slices > 1) {
      if (threadIdx.x == 0) {
        for (int i = 0; i < TURNS; ++i) barrier_init(barriers + 8 * i, 1), barrier_expect(barriers + 8 * i, GIVEN);
      }
      barriers_made();
      cluster_arrive();
    }
#endif
    Ahead asked = {};
#pragma unroll 1
    for (int i = 0; i < SLOTS; ++i) ask(asked, ring + i * R::SLOT);
    wait_previous();
    X x;
    load(x, 0);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (slices > 1) cluster_wait();
#endif
    uint32_t slot = 0;
#pragma unroll 1
    for (uint32_t from = 0; from < units; from += BATCH) {
      const uint32_t to = min(from + BATCH, units);
#pragma unroll 1
      for (uint32_t pass = 0; pass < passes; ++pass) {
#pragma unroll 1
        for (uint32_t unit = from; unit < to; unit += side) {
          float sums[EIGHTS][4] = {};
#pragma unroll
          for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            await_copies_but<SLOTS - 1>();
            __syncwarp();  // scales are copied by other lanes
            const uint32_t at = ring + slot * R::SLOT;
            multiply(at, begin + pass * DEPTH + chunk * R::STEPS, x, chunk * R::STEPS, sums);
            __syncwarp();
            ask(asked, at);
            if (++slot == SLOTS) slot = 0;
          }
          leave(sums, unit - from, pass > 0);
        }
        if (passes > 1 && (pass + 1 < passes || to < units)) load(x, (pass + 1) % passes);
      }
      __syncthreads();
      float4 total = {};
      add(total);
      __syncthreads();
      if (slices == 1) {
        finish(from, 0, make_float2(total.x, total.z));
        finish(from, 1, make_float2(total.y, total.w));
      }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      if (slices > 1) exchange(from, total);
#endif
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (slices > 1) finish_given((units - 1) / BATCH * BATCH);
#endif
  }
};

template <class Format> __device__ __forceinline__ void code_slices(const SlicesParams& s) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  using Core = CodeSlices<Format>;
  extern __shared__ float4 dynamic_shared[];
  __shared__ alignas(8) uint64_t barriers[Core::TURNS];
  __shared__ float4 biases[Core::BIASED ? Core::WARPS * Core::DEPTH * 4 : 1];
  Core(s, reinterpret_cast<char*>(dynamic_shared), biases, shared_address(barriers)).run();
#endif
}

}  // namespace fused

// `NAME`: a kernel for up to 16 rows of x, with registers for two blocks on a multiprocessor.
#define FUSED_CODE_SLICES(NAME, FORMAT)                                               \
  extern "C" __global__ void __launch_bounds__(fused::CodeSlices<FORMAT>::THREADS, 2) \
      NAME(const __grid_constant__ fused::SlicesParams p) {                           \
    fused::code_slices<FORMAT>(p);                                                    \
  }
