// W8A8 GEMM in int8 by `mma.sync` (gemm_w8a8_mma.cuh), from sm_75 on.
#include "linear/gemm_w8a8_mma.cuh"

using namespace fused;

// d += a b for a of 16 x 32, b of 32 x 8.
__device__ __forceinline__ void mma_int8(int* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
               "{%8, %9}, {%0, %1, %2, %3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  // Turing multiplies 8 rows and 16 values of k at a time.
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
                 : "+r"(d[i % 2 * 2]), "+r"(d[i % 2 * 2 + 1])
                 : "r"(a[i]), "r"(i < 2 ? b0 : b1));
#endif
}

// Whole numbers: sums of all of K are exact, a scale belongs to each row of x and of W.
struct Int8Mma {
  using Sum = int;

  __device__ __forceinline__ Int8Mma(const W8A8Product&, const Place&) {}

  // Where a row of W begins, and how far it is from `k` to the next stage's.
  static __device__ __forceinline__ uint64_t row_at(uint32_t row, uint32_t k) { return uint64_t(row) * k; }
  static __device__ __forceinline__ uint32_t advance(uint32_t) { return BLOCK_K; }

  static __device__ __forceinline__ float column_scale(const W8A8Weights& w, uint32_t row) { return w.scales[row]; }
  static __device__ __forceinline__ float row_scale(const W8A8Product& p, uint32_t m) { return __ldcg(p.x_scales + m); }
  __device__ __forceinline__ void fetch_scales(const W8A8Product&, uint32_t) {}

  __device__ __forceinline__ void multiply(uint32_t stage, int (&sums)[64]) const {
#pragma unroll
    for (int k = 0; k < BLOCK_K / 32; ++k) {
      uint32_t a[2][4];
      load_x(a, stage, k);
#pragma unroll
      for (int n = 0; n < 8; n += 2) {
        uint32_t b[4];
        load_w(b, stage, n, k);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma_int8(sums + 32 * i + 4 * n, a[i], b[0], b[1]);
          mma_int8(sums + 32 * i + 4 * n + 4, a[i], b[2], b[3]);
        }
      }
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 2) gemm_w8a8_mma(const __grid_constant__ W8A8Product p) {
  w8a8_mma<Int8Mma>(p);
}
