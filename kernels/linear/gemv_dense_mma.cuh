// A core of gemv.cuh for f16 or bf16 x and weights, by tensor cores: an N tile of 8 output channels and up to 8 rows
// of x, eight of which cost hardly more than one.
//
// x is operand A of `mma.m16n8k16`, the weights are operand B. Lane 4 g + t should have k values 2t, 2t + 1, 2t + 8
// and 2t + 9 of row g of each; since the order of k does not matter as long as both agree, it loads 16 bytes in one
// piece, k values 8t to 8t + 7 of 32, which are the operands of two instructions.
#pragma once

#include "linear/gemv.cuh"

namespace fused {

struct Accumulator {
  float v[4];
};

// sums += x weights^T for rows 0..8 of x, and rows 8..16 (`y`), which are zero where they are not given.
template <typename T>
__device__ __forceinline__ void mma(Accumulator& c, uint32_t x0, uint32_t x1, uint32_t w0, uint32_t w1,
                                    uint32_t y0 = 0, uint32_t y1 = 0) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
        : "r"(x0), "r"(y0), "r"(x1), "r"(y1), "r"(w0), "r"(w1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
        : "r"(x0), "r"(y0), "r"(x1), "r"(y1), "r"(w0), "r"(w1));
  }
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
  // Turing multiplies 8 values of k at a time.
  static_assert(std::is_same_v<T, __half>, "before sm_80 there is no mma of bf16");
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
      : "r"(x0), "r"(y0), "r"(w0));
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
      : "r"(x1), "r"(y1), "r"(w1));
#endif
}

template <typename T, int K_BLOCKS_> struct MmaCore {
  static constexpr int N_TILE = 8, K_BLOCKS = K_BLOCKS_, VALUES = 2;
  using Staged = T;

  static __device__ uint32_t group() { return threadIdx.x % WARP / 4; }  // a row of weights, and of x
  static __device__ uint32_t member() { return threadIdx.x % 4; }        // 16 bytes of 64
  static __device__ uint32_t chunks(const Gemv& p) { return p.k / 8; }
  static __device__ uint32_t k_blocks(const Gemv& p) { return (chunks(p) + 3) / 4; }

  // Gates and what they gate take turns, so that a lane has both.
  static __device__ uint32_t gated(uint32_t r) { return r / 2; }
  static __device__ bool is_gated(uint32_t r) { return r % 2; }
  static __device__ uint32_t output(int i) { return 2 * member() + i; }
  static __device__ uint32_t row_of_x() { return group(); }
  static __device__ bool keeps() { return true; }
  static __device__ float partner(const float (&y)[2]) { return y[1]; }

  struct Rows {
    const T* row;

    template <class Find> __device__ void enter(const Gemv& p, Find find) {
      uint32_t r = find(group());
      const Matrix& matrix = matrix_of(p, r);
      row = static_cast<const T*>(matrix.data) + uint64_t(r) * p.k + member() * 8;
    }
  };

  // Four accumulators: half the K blocks apart, and one for each half of a chunk.
  struct Sums {
    Accumulator parts[4];

    __device__ void total(const Gemv&, Staged*, float (&y)[2]) const {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        y[i] = (parts[0].v[i] + parts[1].v[i]) + (parts[2].v[i] + parts[3].v[i]);
    }
  };

  struct Tile {
    uint4 chunk[K_BLOCKS];

    // Whether the whole tile lies before `end` and inside k.
    static __device__ bool whole(const Gemv& p, uint32_t k_block, uint32_t end) {
      return k_block + K_BLOCKS <= min(end, p.k / 32);
    }

    __device__ void prefetch(const Gemv& p, const Rows& from, uint32_t k_block, uint32_t end) {
      const T* at = from.row + k_block * 32;
      if (whole(p, k_block, end)) {
#pragma unroll
        for (int s = 0; s < K_BLOCKS; ++s) chunk[s] = load_once(at + s * 32);
      } else {
#pragma unroll
        for (int s = 0; s < K_BLOCKS; ++s) {
          chunk[s] = make_uint4(0, 0, 0, 0);
          if (k_block + s < end && (k_block + s) * 4 + member() < chunks(p)) chunk[s] = load_once(at + s * 32);
        }
      }
    }

    // x lies in shared memory with zeros up to a whole K block.
    __device__ void multiply(const Gemv& p, uint32_t k_block, uint32_t end, const T* xs, Sums& sums) const {
      const T* row = xs + group() * staged_pitch<T>(p.k) + member() * 8 + k_block * 32;
      const bool mine = group() < p.m;
#pragma unroll
      for (int first = 0; first < K_BLOCKS; first += 4) {
        uint4 x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          x[i] = make_uint4(0, 0, 0, 0);
          if (mine && k_block + first + i < end) x[i] = *reinterpret_cast<const uint4*>(row + (first + i) * 32);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // A chunk behind the end is zero.
          const uint4 w = chunk[first + i];
          mma<T>(sums.parts[i % 2], x[i].x, x[i].y, w.x, w.y);
          mma<T>(sums.parts[2 + i % 2], x[i].z, x[i].w, w.z, w.w);
        }
      }
    }
  };

  // The rows of x as they are or as the norm rounds them, with zeros up to a whole K block.
  struct Prepare {
    const Gemv& p;
    Stage<T, VectorPack> stage;

    __device__ Prepare(const Gemv& p, T* xs, float* scratch)
        : p(p), stage(p.prologue, p.m == 1, p.k, xs, scratch) {}
    __device__ void prefetch() { stage.prefetch(); }
    __device__ void run() const {
      stage.template run<T>(p.m);
      const uint32_t tail = (0u - p.k) % 32;
      for (uint32_t i = threadIdx.x; i < p.m * tail; i += blockDim.x)
        stage.rows[i / tail * staged_pitch<T>(p.k) + p.k + i % tail] = from_float<T>(0.f);
    }
  };
};

}  // namespace fused
