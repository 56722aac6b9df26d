// FP8 GEMM on Hopper (gemm_w8a8_sm90.cuh): e4m3 x with a scale for each 128 values of a row, and e4m3 W with a scale
// for each output channel or for each 128 x 128 values (as in DeepSeek-V3, 2024). The tensor cores' own sums have some
// 14 bits: those of 128 values of K are scaled and added up in f32 registers.
// Empty for other architectures, which never run it.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "formats/packed.cuh"
#include "linear/gemm_w8a8_sm90.cuh"

using namespace fused;

template <bool BLOCKS> struct Fp8Sums {
  using Sum = float;
  static constexpr int SETS = 2;

  // A piece of W, of whole row groups, from a row and a K block on.
  template <class... Blocks>
  static __device__ __forceinline__ void copy(uint32_t to, const TensorMap& map, uint32_t barrier, uint32_t k,
                                              uint32_t row, Blocks... blocks) {
    bulk_copy_groups(to, map, barrier, k / K_BLOCK * ROW_GROUP, row / ROW_GROUP, blocks...);
  }

  // The sign says that there is a NaN among the codes, which makes its sums NaN by itself.
  static __device__ __forceinline__ float column_scale(const W8A8Weights& w, uint32_t row) {
    return BLOCKS ? 1.f : fabsf(w.scales[row]);
  }
  // Of a block of K, by pieces of W and by rows of x, `row` and 8 further. A piece lies in one block of rows.
  static __device__ __forceinline__ void scales(const W8A8Product& p, const Place& place, uint32_t row,
                                                uint32_t k_block, float (&by)[2][2]) {
    float of_x[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      of_x[i] = row + 8 * i < p.m ? __ldcg(p.x_scales + uint64_t(k_block) * p.m + row + 8 * i) : 0.f;
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      float of_w = 1.f;
      if constexpr (BLOCKS) {
        const W8A8Weights& w = p.weights[place.part[piece]];
        const uint32_t first = min(place.row[piece], w.rows - 1);
        of_w = fabsf(__ldg(w.scales + fp8_block(first, k_block, k_blocks_of(p.k), w.own_scales != 0)));
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) by[piece][i] = of_x[i] * of_w;
    }
  }
};

#define FP8_SM90(NAME, BLOCKS, CLUSTER)                                                        \
  extern "C" __global__ void __launch_bounds__(Tiles<128, CLUSTER, Fp8Sums<BLOCKS>>::THREADS, 1) \
      NAME##_##CLUSTER(const __grid_constant__ W8A8Sm90Params p) {                             \
    w8a8<128, CLUSTER, Fp8Sums<BLOCKS>>(p);                                                    \
  }

FP8_SM90(gemm_fp8_sm90, false, 1)
FP8_SM90(gemm_fp8_sm90, false, 2)
FP8_SM90(gemm_fp8_sm90_block, true, 1)
FP8_SM90(gemm_fp8_sm90_block, true, 2)

#endif
