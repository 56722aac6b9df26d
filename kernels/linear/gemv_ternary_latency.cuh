// GEMV for ternary weights and one to four rows of x on Hopper, where all weights of the product fit into the GPU's shared
// memory: y = act(prologue(x) W^T + bias) + residuals.
//
// In a decode step of a ternary model most products are so small: the largest of a layer of BitNet-2B-4T has 61 or 72 KB of
// weights for each multiprocessor of 132. A block copies all of its weights before the PDL wait, while the preceding
// kernel runs. What follows is bound by instructions: every block norms and quantizes the whole row, and on Hopper an
// integer instruction takes a scheduler two cycles. So rows are normed in pairs of 16-bit values, and few warps work,
// because each of them pays for the reductions.
//
// Codes meet x as operand A of `mma.m16n8k32`, as bytes without a sign. A byte has four codes in two's complement. With
// their upper bits flipped they are 1, 2 and 3 for -1, 0 and 1; a mask leaves one of them, times 1, 4, 16 or 64 by its
// place, in one instruction for four codes. Each place has a sum of its own, which is divided at the end, and twice the sum
// of x is subtracted once. Sums are whole numbers, which warps add in shared memory in any order.
//
// Rows are columns of operand B, of which there are eight, so several cost the products what one costs. Each of them has a
// team of warps, which norm and quantize it in registers, in rounds if the warps do not suffice for all.
#pragma once

#include "common/mma.cuh"
#include "common/tma.cuh"
#include "formats/packed.cuh"
#include "linear/raw_values.cuh"

namespace fused {

constexpr int TERNARY_WARPS = GEMV_WARPS, TERNARY_THREADS = TERNARY_WARPS * WARP;
constexpr int TERNARY_PACKS = 4;  // of 8 values of x that a thread has
constexpr int TERNARY_GAINS = 2;  // of which it loads the norm's weight before the PDL wait
constexpr int TERNARY_SLICE = 6;  // K blocks of a split-K slice at most: a warp has their x in registers
constexpr int TERNARY_ROWS = 4;   // of x; in two parts these are all columns of operand B

// What a warp multiplies: split-K slices of `length` K blocks, from K block `first` on in steps of `step`, and of those
// N tile `team` and every `teams`th one after it.
struct TernaryWork {
  uint32_t first, length, step, team, teams;
};

struct TernaryScratch {
  TernaryWork work[TERNARY_WARPS];
  alignas(16) float squares[TERNARY_WARPS];  // of a row of x
  uint32_t largest[TERNARY_WARPS];
  int totals[TERNARY_ROWS];
  float factors[TERNARY_ROWS];
  uint32_t team;  // warps for a row, where there are several
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

constexpr uint32_t CODE_BYTES = ROW_GROUP * ROW_LANES * Ternary<0>::BYTES;  // of 8 rows and a K block

// x in PARTS parts of int8: one, or 256 times the first and the second, which are 16 bits. One row, or a few.
template <typename T, int PARTS, bool ROWS> struct TernaryLatency {
  // Of 8 values, that a thread has of one of several rows: 64 registers.
  static constexpr int ROW_PACKS = 64 / EightRaw<T>::WORDS;
  static constexpr int DTYPE = sizeof(T) == 4 ? F32 : BF16;  // 16-bit types are read alike
  static constexpr float MOST = PARTS == 1 ? 127.f : 127.f * 256.f;

  const Gemv& p;
  const uint32_t k_blocks;
  const uint32_t row_groups;  // of this block
  char* const codes;          // [row groups][K blocks][CODE_BYTES]
  char* const x_codes;        // [rows][x_row]: [PARTS][K blocks][K_BLOCK] of each
  int* const sums;            // [rows][row groups][ROW_GROUP]
  float* const scales;        // [row groups][ROW_GROUP]
  TernaryScratch& scratch;
  const uint32_t barrier;     // of codes

  static __device__ __forceinline__ uint32_t of_block(const Gemv& p) {
    const uint32_t all = (p.width + ROW_GROUP - 1) / ROW_GROUP;
    return (all + gridDim.x - 1 - blockIdx.x) / gridDim.x << gates(p);
  }
  __device__ __forceinline__ TernaryLatency(const Gemv& p, char* memory, TernaryScratch& scratch, uint32_t barrier)
      : p(p), k_blocks(k_blocks_of(p.k)), row_groups(of_block(p)), codes(memory),
        x_codes(memory + row_groups * k_blocks * CODE_BYTES),
        sums(reinterpret_cast<int*>(x_codes + rows() * x_row())),
        scales(reinterpret_cast<float*>(sums + rows() * row_groups * ROW_GROUP)), scratch(scratch), barrier(barrier) {}

  __device__ __forceinline__ uint32_t rows() const { return ROWS ? p.m : 1; }
  // Bytes from a row's codes to the next one's, whose words are in other banks of shared memory.
  __device__ __forceinline__ uint32_t x_row() const { return PARTS * k_blocks * K_BLOCK + (ROWS ? 16 : 0); }

  __device__ __forceinline__ bool normed() const { return p.prologue.norm != NORM_NONE; }

  // The first column of 8 outputs of this block, and the row of the weights that a row group begins with: where one half of
  // the outputs gates the other, row groups of gates alternate with those of what they gate.
  __device__ __forceinline__ uint32_t column(uint32_t i) const { return (blockIdx.x + i * gridDim.x) * ROW_GROUP; }
  __device__ __forceinline__ uint32_t first_row(uint32_t row_group) const {
    return gates(p) ? column(row_group / 2) + row_group % 2 * p.width : column(row_group);
  }

  // The first warp: a lane for each row group.
  __device__ __forceinline__ void copy_codes() const {
    const uint32_t bytes = k_blocks * CODE_BYTES;
    if (threadIdx.x == 0) {
      barrier_init(barrier, 1);
      barriers_made();
      barrier_expect(barrier, row_groups * bytes);
    }
    __syncwarp();
    const uint64_t policy = evict_first();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < row_groups; i += WARP) {
      uint32_t row = first_row(i);
      const Matrix& matrix = matrix_of(p, row);
      const char* from = static_cast<const char*>(matrix.data) + uint64_t(row / ROW_GROUP) * bytes;
      bulk_copy(shared_address(codes) + i * bytes, from, bytes, barrier, policy);
    }
  }
  // The second warp: sums of 0, and scales. Rows past the last one have its scale, and are not written.
  __device__ __forceinline__ void clear_sums() const {
    const uint32_t lane = threadIdx.x % WARP;
    if (lane < TERNARY_ROWS) scratch.totals[lane] = 0;
#pragma unroll 1
    for (uint32_t i = lane; i < row_groups * ROW_GROUP; i += WARP) {
      uint32_t row = min(first_row(i / ROW_GROUP) + i % ROW_GROUP, p.rows - 1);
      const Matrix& matrix = matrix_of(p, row);
      for (uint32_t r = 0; r < rows(); ++r) sums[r * row_groups * ROW_GROUP + i] = 0;
      scales[i] = __uint_as_float(load_u32(static_cast<const uint32_t*>(matrix.scales) + row));
    }
  }
  // The third warp: what each warp does. K is split into `split_k` slices. If there are more warps than slices, teams of
  // warps divide the N tiles. The result is kept in shared memory: the compiler would move the divisions after the wait.
  __device__ __forceinline__ void assign_work() const {
    const uint32_t warp = threadIdx.x % WARP;
    if (warp >= TERNARY_WARPS) return;
    const uint32_t length = (k_blocks + p.split_k - 1) / p.split_k;
    const uint32_t at_once = min(p.split_k, TERNARY_WARPS), team = warp / at_once;
    if (ROWS && warp == 0) scratch.team = warps_of_row();
    scratch.work[warp] = {(warp - team * at_once) * length, length, at_once * length, team, TERNARY_WARPS / at_once};
  }

  // Warps for one of several rows: its values fit into their registers, and no warp is left over.
  __device__ __forceinline__ uint32_t warps_of_row() const {
    uint32_t team = 1;
    while (team < TERNARY_WARPS && (p.k / 8 > team * WARP * ROW_PACKS || 2 * team * p.m <= TERNARY_WARPS)) team *= 2;
    return team;
  }

  __device__ __forceinline__ uint32_t pack(int i) const { return threadIdx.x + i * TERNARY_THREADS; }
  __device__ __forceinline__ bool has(int i) const { return pack(i) < p.k / 8; }

  // RMSNorm of what this thread has of x.
  __device__ __forceinline__ void norm(EightRaw<T> (&x)[TERNARY_PACKS], const EightRaw<T> (&gains)[TERNARY_GAINS]) const {
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < TERNARY_PACKS; ++i) {
      if (has(i)) squares += x[i].squares();
    }
    squares = warp_sum(squares);
    if (threadIdx.x % WARP == 0) scratch.squares[threadIdx.x / WARP] = squares;
    __syncthreads();
    squares = 0.f;
#pragma unroll
    for (int w = 0; w < TERNARY_WARPS; ++w) squares += scratch.squares[w];
    const float factor = rsqrtf(__fdividef(squares, p.k) + p.prologue.eps);
#pragma unroll
    for (int i = 0; i < TERNARY_PACKS; ++i) {
      if (!has(i)) break;
      EightRaw<T> gain = gains[i % TERNARY_GAINS];
      if (i >= TERNARY_GAINS) gain.load(p.prologue.weight, pack(i));
      x[i].norm(factor, gain);
    }
  }

  // The largest magnitude of the row; NaN if there is one.
  __device__ __forceinline__ float largest(const EightRaw<T> (&x)[TERNARY_PACKS]) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < TERNARY_PACKS; ++i) {
      if (has(i)) bits = max(bits, x[i].largest());
    }
    bits = __reduce_max_sync(FULL, bits);
    if (threadIdx.x % WARP == 0) scratch.largest[threadIdx.x / WARP] = bits;
    __syncthreads();
    bits = 0;
#pragma unroll
    for (int w = 0; w < TERNARY_WARPS; ++w) bits = max(bits, scratch.largest[w]);
    return __uint_as_float(bits);
  }

  // Byte 0 of four words, or byte 1 of what is rounded to whole 256s.
  template <bool HIGH> static __device__ __forceinline__ uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    if constexpr (HIGH) {
      return __byte_perm(__byte_perm(a + 128, b + 128, 0x0051), __byte_perm(c + 128, d + 128, 0x0051), 0x5410);
    } else {
      return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
    }
  }
  template <bool HIGH> __device__ __forceinline__ int put_part(char* to, const uint32_t (&whole)[8]) const {
    const uint32_t even = bytes_of<HIGH>(whole[0], whole[2], whole[4], whole[6]);
    const uint32_t odd = bytes_of<HIGH>(whole[1], whole[3], whole[5], whole[7]);
    *reinterpret_cast<uint32_t*>(to) = even, *reinterpret_cast<uint32_t*>(to + 16) = odd;
    return __dp4a(static_cast<int>(even), 0x01010101, __dp4a(static_cast<int>(odd), 0x01010101, 0));
  }
  // 8 values in parts; gives the sum of their whole numbers. What lane t meets in a K block is together, as registers of
  // operand B: values 0, 2, 4 and 6 of its 8 of blocks 0, 2, 1 and 3, then the others of each.
  __device__ __forceinline__ int put(char* row, uint32_t pack, const EightRaw<T>& x, float by) const {
    float v[8];
    x.widen(v);
    uint32_t whole[8];  // in the lower bits: a sum has no others left
#pragma unroll
    for (int j = 0; j < 8; ++j) whole[j] = __float_as_uint(__fadd_rn(__fmul_rn(v[j], by), 12582912.f));
    const uint32_t block = pack % 16 / 4;
    char* to = row + pack / 16 * K_BLOCK + pack % 4 * 32 + block % 2 * 8 + block / 2 * 4;
    if constexpr (PARTS == 1) {
      return put_part<false>(to, whole);
    } else {
      return 256 * put_part<true>(to, whole) + put_part<false>(to + k_blocks * K_BLOCK, whole);
    }
  }

  // The prologue: codes of x in shared memory. Sums are to be multiplied by what it gives.
  __device__ __forceinline__ float stage(EightRaw<T> (&x)[TERNARY_PACKS], const EightRaw<T> (&gains)[TERNARY_GAINS]) const {
    if (normed()) norm(x, gains);
    const float most = largest(x);
    // Values too small for it are zero.
    const float by = most > 1e-33f ? __fdividef(MOST, most) : 0.f;
    int total = 0;
#pragma unroll
    for (int i = 0; i < TERNARY_PACKS; ++i) {
      // Zeros behind the last value.
      if (pack(i) >= k_blocks * (K_BLOCK / 8)) break;
      total += put(x_codes, pack(i), x[i], by);
    }
    total = __reduce_add_sync(FULL, total);
    if (threadIdx.x % WARP == 0) atomicAdd(&scratch.totals[0], total);
    return most * (1.f / MOST);
  }

  // The same for a row of which this thread has pack `first` and every `step`th one after it; `team` is the first of its
  // warps. All threads of the block.
  __device__ __forceinline__ void stage_row(uint32_t row, uint32_t first, uint32_t step, uint32_t team) const {
    const uint32_t warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, packs = row < p.m ? p.k / 8 : 0;
    const T* const from = static_cast<const T*>(p.prologue.x) + uint64_t(row) * p.k;
    EightRaw<T> x[ROW_PACKS];
#pragma unroll
    for (int i = 0; i < ROW_PACKS; ++i) {
      x[i] = {};
      if (first + i * step < packs) x[i].load(from, first + i * step);
    }
    if (normed()) {
      float squares = 0.f;
#pragma unroll
      for (int i = 0; i < ROW_PACKS; ++i) squares += x[i].squares();
      squares = warp_sum(squares);
      if (lane == 0) scratch.squares[warp] = squares;
      __syncthreads();
      squares = 0.f;
      for (uint32_t w = 0; w < step / WARP; ++w) squares += scratch.squares[team + w];
      const float factor = rsqrtf(__fdividef(squares, p.k) + p.prologue.eps);
#pragma unroll
      for (int i = 0; i < ROW_PACKS; ++i) {
        if (first + i * step >= packs) break;
        EightRaw<T> gain;
        gain.load(p.prologue.weight, first + i * step);
        x[i].norm(factor, gain);
      }
    }
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < ROW_PACKS; ++i) bits = max(bits, x[i].largest());
    bits = __reduce_max_sync(FULL, bits);
    if (lane == 0) scratch.largest[warp] = bits;
    __syncthreads();
    for (uint32_t w = 0; w < step / WARP; ++w) bits = max(bits, scratch.largest[team + w]);
    const float most = __uint_as_float(bits), by = most > 1e-33f ? __fdividef(MOST, most) : 0.f;
    if (row < p.m) {
      int total = 0;
#pragma unroll
      for (int i = 0; i < ROW_PACKS; ++i) {
        if (first + i * step >= k_blocks * (K_BLOCK / 8)) break;
        total += put(x_codes + row * x_row(), first + i * step, x[i], by);
      }
      total = __reduce_add_sync(FULL, total);
      if (lane == 0) atomicAdd(&scratch.totals[row], total);
      if (lane == 0 && warp == team) scratch.factors[row] = most * (1.f / MOST);
    }
    // Before the next round's largest magnitudes.
    __syncthreads();
  }
  __device__ __forceinline__ void stage_rows() const {
    const uint32_t warp = threadIdx.x / WARP, size = scratch.team, team = warp / size * size;
#pragma unroll 1
    for (uint32_t first = 0; first < p.m; first += TERNARY_WARPS / size)
      stage_row(first + warp / size, threadIdx.x - team * WARP, size * WARP, team);
  }

  // Codes I of all bytes of a word, with their upper bits flipped. A variable has those bits: with two constants it would
  // be two instructions.
  template <int I> static __device__ __forceinline__ uint32_t field(uint32_t word, uint32_t flip) {
    uint32_t v;
    asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(v) : "r"(word), "r"(flip), "n"(0x03030303u << (2 * I)));
    return v;
  }
  template <int I>
  static __device__ __forceinline__ void add(int (&c)[4], uint2 a, uint2 b, uint32_t flip, uint32_t x0, uint32_t x1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(field<I>(a.x, flip)), "r"(field<I>(b.x, flip)), "r"(field<I>(a.y, flip)), "r"(field<I>(b.y, flip)), "r"(x0),
          "r"(x1));
  }

  // Adds the sums of N tiles over `count` K blocks. An N tile is two row groups; the last may be alone. A column of operand B
  // is a row, or, of two parts, every second one a part; columns past the last row are that row again.
  __device__ __forceinline__ void multiply(uint32_t first, uint32_t count, const TernaryWork& work) const {
    const uint32_t lane = threadIdx.x % WARP, g = lane / 4, pitch = k_blocks * CODE_BYTES;
    const uint32_t part = PARTS == 2 ? g % 2 * (k_blocks * K_BLOCK) : 0;
    const uint32_t row = ROWS ? min(g / PARTS, p.m - 1) * x_row() : 0;
    const uint32_t from_x = shared_address(x_codes) + row + part + first * K_BLOCK + lane % 4 * 32;
    uint4 x[TERNARY_SLICE][2];
#pragma unroll
    for (int s = 0; s < TERNARY_SLICE; ++s) {
      if (s < count) x[s][0] = load_shared(from_x + s * K_BLOCK), x[s][1] = load_shared(from_x + s * K_BLOCK + 16);
    }
    uint32_t flip;
    asm volatile("mov.u32 %0, 0xaaaaaaaa;" : "=r"(flip));
#pragma unroll 1
    for (uint32_t i = 2 * work.team; i < row_groups; i += 2 * work.teams) {
      const char* upper = codes + i * pitch + first * CODE_BYTES + 8 * lane;
      const char* lower = upper + (i + 1 < row_groups ? pitch : 0);
      int c[4][4] = {};
#pragma unroll
      for (int s = 0; s < TERNARY_SLICE; ++s) {
        if (s >= count) break;
        const uint2 a = *reinterpret_cast<const uint2*>(upper + s * CODE_BYTES);
        const uint2 b = *reinterpret_cast<const uint2*>(lower + s * CODE_BYTES);
        add<0>(c[0], a, b, flip, x[s][0].x, x[s][0].y);
        add<1>(c[1], a, b, flip, x[s][0].z, x[s][0].w);
        add<2>(c[2], a, b, flip, x[s][1].x, x[s][1].y);
        add<3>(c[3], a, b, flip, x[s][1].z, x[s][1].w);
      }
      if (!ROWS && lane % 4 != 0) continue;
      // A lane has two columns: of one row, or of two.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (i + r >= row_groups) break;
#pragma unroll
        for (int second = 0; second < (ROWS ? 2 / PARTS : 1); ++second) {
          int sum = 0;
#pragma unroll
          for (int at = 2 * r + second; at < 2 * r + second + PARTS; ++at)
            sum = 256 * sum + c[0][at] + (c[1][at] >> 2) + (c[2][at] >> 4) + (c[3][at] >> 6);
          const uint32_t of = ROWS ? lane % 4 * (2 / PARTS) + second : 0;
          if (of < rows()) atomicAdd(&sums[(of * row_groups + i + r) * ROW_GROUP + g], sum);
        }
      }
    }
  }

  // Output `o` of this block, of a row of x.
  __device__ __forceinline__ void epilogue(uint32_t of, uint32_t o, float factor, const uint32_t (&residuals)[2]) const {
    const Epilogue& e = p.epilogue;
    const uint32_t column = this->column(o / ROW_GROUP) + o % ROW_GROUP;
    if (column >= p.width) return;
    const auto total = [&](uint32_t row_group, uint32_t row) {
      const uint32_t i = row_group * ROW_GROUP + o % ROW_GROUP;
      const int sum = sums[of * row_groups * ROW_GROUP + i] - 2 * scratch.totals[of];
      const float y = factor * scales[i] * static_cast<float>(sum);
      return e.bias ? y + widen_raw<T>(read_raw(e.bias, DTYPE, row)) : y;
    };
    float y;
    if (gates(p)) {
      y = gate(e.activation, total(o / ROW_GROUP * 2, column)) * total(o / ROW_GROUP * 2 + 1, column + p.width);
    } else {
      y = activate(e.activation, total(o / ROW_GROUP, column));
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) y += e.residuals[r] ? widen_raw<T>(residuals[r]) : 0.f;
    write(e.out, e.out_dtype, of * e.stride + column, y);
  }
  __device__ __forceinline__ void load_residuals(uint32_t of, uint32_t o, uint32_t (&residuals)[2]) const {
    const Epilogue& e = p.epilogue;
    const uint32_t column = this->column(o / ROW_GROUP) + o % ROW_GROUP;
    if (column >= p.width) return;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      residuals[r] = e.residuals[r] ? read_raw(e.residuals[r], DTYPE, of * e.stride + column) : 0;
  }

  __device__ __forceinline__ void run() const {
    // Few warps work here: the preceding kernel runs on the same SM.
    const uint32_t warp = threadIdx.x / WARP, outputs = (row_groups >> gates(p)) * ROW_GROUP;
    if (warp == 0) copy_codes();
    pdl_launch();
    if (warp == 1) clear_sums();
    if (warp == 2) assign_work();
    EightRaw<T> x[TERNARY_PACKS], gains[TERNARY_GAINS];
#pragma unroll
    for (int i = 0; i < TERNARY_GAINS; ++i) {
      if (!ROWS && normed() && has(i)) gains[i].load(p.prologue.weight, pack(i));
    }
    __syncthreads();
    pdl_wait();
#pragma unroll
    for (int i = 0; i < TERNARY_PACKS; ++i) {
      x[i] = {};
      if (!ROWS && has(i)) x[i].load(p.prologue.x, pack(i));
    }
    // The first of the outputs that this thread writes, of all rows.
    uint32_t residuals[2] = {};
    if (threadIdx.x < rows() * outputs) {
      const uint32_t of = ROWS ? threadIdx.x / outputs : 0;
      load_residuals(of, threadIdx.x - of * outputs, residuals);
    }
    float factor = 0.f;
    if constexpr (ROWS) {
      stage_rows();
    } else {
      factor = stage(x, gains);
      __syncthreads();
    }
    barrier_wait(barrier, 0);
    const TernaryWork work = scratch.work[warp];
    if (work.team < work.teams) {
#pragma unroll 1
      for (uint32_t first = work.first; first < k_blocks; first += work.step)
        multiply(first, min(work.length, k_blocks - first), work);
    }
    __syncthreads();
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < rows() * outputs; i += TERNARY_THREADS) {
      const uint32_t of = ROWS ? i / outputs : 0, o = i - of * outputs;
      if (i >= TERNARY_THREADS) load_residuals(of, o, residuals);
      epilogue(of, o, ROWS ? scratch.factors[of] : factor, residuals);
    }
  }
};

#endif

template <typename T, int PARTS, bool ROWS> __device__ __forceinline__ void gemv_ternary_latency(const Gemv& p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ float4 dynamic_shared[];
  __shared__ TernaryScratch scratch;
  __shared__ uint64_t barrier;
  TernaryLatency<T, PARTS, ROWS>(p, reinterpret_cast<char*>(dynamic_shared), scratch, shared_address(&barrier)).run();
#endif
}

}  // namespace fused

// `NAME`: a kernel for x, the norm's weight, bias and residuals of TYPE, with x in PARTS parts, of one row or of several.
#define FUSED_GEMV_TERNARY_LATENCY(NAME, TYPE, PARTS, ROWS)               \
  extern "C" __global__ void __launch_bounds__(fused::TERNARY_THREADS, 2) \
      NAME(const __grid_constant__ fused::Gemv p) {                       \
    fused::gemv_ternary_latency<TYPE, PARTS, ROWS>(p);                    \
  }
