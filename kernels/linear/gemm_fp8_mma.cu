// FP8 GEMM by `mma.sync` (gemm_w8a8_mma.cuh), from sm_89 on, with the operands and scales of gemm_fp8_sm90.cu. The tensor
// cores' own sums have fewer bits than f32 (two-level sums): those of the 64 values of K of a stage are scaled and added up
// in f32 registers. That is twice in a K block of 128, so that a thread needs 16 of them at a time beside the 64 of its
// outputs, and two blocks fit on a multiprocessor; sums of two stages would be 64 more.
// Empty for older architectures, which never run it.
#include "formats/packed.cuh"
#include "linear/gemm_w8a8_mma.cuh"

using namespace fused;

// d += a b for a of 16 x 32, b of 32 x 8.
__device__ __forceinline__ void mma_e4m3(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
               "{%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <bool BLOCKS> struct Fp8Mma {
  using Sum = float;

  const float* w[2];  // each piece's scales along K: a piece lies in one block of rows
  uint32_t row;       // one of the thread's four rows of x, of which each lane of a quad has another's scale
  float of_x, of_w[2];

  __device__ __forceinline__ Fp8Mma(const W8A8Product& p, const Place& place) {
    const uint32_t lane = threadIdx.x % WARP;
    // Rows past the last have no outputs: any scale will do.
    row = min(place.m_tile * ROWS + warp_row(threadIdx.x) + lane % 4 * 8 + lane / 4, p.m - 1);
    if constexpr (BLOCKS) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const W8A8Weights& weights = p.weights[place.part[i]];
        const uint32_t first = min(place.row[i], weights.rows - 1);
        w[i] = weights.scales + fp8_block(first, 0, k_blocks_of(p.k), weights.own_scales != 0);
      }
    }
  }

  // 8 rows have the 128 bytes of a K block together (formats/packed.cuh), which are two stages.
  static __device__ __forceinline__ uint64_t row_at(uint32_t row, uint32_t k) {
    return place_of(row, 0, k_blocks_of(k)) * K_BLOCK;
  }
  static __device__ __forceinline__ uint32_t advance(uint32_t k) {
    return k % K_BLOCK < BLOCK_K ? BLOCK_K : ROW_GROUP * K_BLOCK - BLOCK_K;
  }

  // The sign says that there is a NaN among the codes, which makes its sums NaN by itself.
  static __device__ __forceinline__ float column_scale(const W8A8Weights& w, uint32_t row) {
    return BLOCKS ? 1.f : fabsf(w.scales[row]);
  }
  static __device__ __forceinline__ float row_scale(const W8A8Product&, uint32_t) { return 1.f; }

  // Those of a K block, at its first stage.
  __device__ __forceinline__ void fetch_scales(const W8A8Product& p, uint32_t k) {
    if (k % K_BLOCK != 0) return;
    const uint32_t k_block = k / K_BLOCK;
    of_x = __ldcg(p.x_scales + uint64_t(k_block) * p.m + row);
    if constexpr (BLOCKS) {
#pragma unroll
      for (int i = 0; i < 2; ++i) of_w[i] = fabsf(__ldg(w[i] + k_block));
    }
  }

  __device__ __forceinline__ void multiply(uint32_t stage, float (&sums)[64]) const {
    constexpr int STEPS = BLOCK_K / 32;
    uint32_t a[STEPS][2][4];
#pragma unroll
    for (int k = 0; k < STEPS; ++k) load_x(a[k], stage, k);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      float part[2][8] = {};
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        uint32_t b[4];
        load_w(b, stage, n, k);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma_e4m3(part[i], a[k][i], b[0], b[1]);
          mma_e4m3(part[i] + 4, a[k][i], b[2], b[3]);
        }
      }
      // By rows, which are 8 apart.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float by = __shfl_sync(FULL, of_x, i, 4);
        if (BLOCKS) by *= of_w[n / 4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = i % 2 * 2 + j / 2 * 4 + j % 2;
          float& sum = sums[i / 2 * 32 + 4 * n + at];
          sum = fmaf(part[i / 2][at], by, sum);
        }
      }
    }
  }
};

// Hopper's own code multiplies e4m3 as f16, to which a thread converts operands in registers: there it is for tests alone.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr int BLOCKS_OF_SM = 1;
#else
constexpr int BLOCKS_OF_SM = 2;
#endif

#define FP8_MMA(NAME, BLOCKS)                                             \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_OF_SM)     \
      NAME(const __grid_constant__ W8A8Product p) {                       \
    if constexpr (COMPILED_FOR >= 890) w8a8_mma<Fp8Mma<BLOCKS>>(p);       \
  }

FP8_MMA(gemm_fp8_mma, false)
FP8_MMA(gemm_fp8_mma_block, true)
