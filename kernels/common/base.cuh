// What every kernel includes: element types and their conversions, 16-byte packs, loads that bypass the L1 cache,
// reductions over a warp or a block, and programmatic dependent launch (PDL).
#pragma once

// Of 16-bit floats functions alone: nothing uses their operators, which every source would have to compile.
#define __CUDA_NO_HALF_OPERATORS__
#define __CUDA_NO_HALF2_OPERATORS__
#define __CUDA_NO_HALF_CONVERSIONS__
#define __CUDA_NO_BFLOAT16_OPERATORS__
#define __CUDA_NO_BFLOAT162_OPERATORS__
#define __CUDA_NO_BFLOAT16_CONVERSIONS__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "abi/common.cuh"

namespace fused {

constexpr unsigned FULL = 0xffffffffu;

// The architecture that this pass is for, as `__CUDA_ARCH__` numbers it. What the host never launches there
// is left empty: code takes time to compile.
#ifdef __CUDA_ARCH__
constexpr int COMPILED_FOR = __CUDA_ARCH__;
#else
constexpr int COMPILED_FOR = 0;
#endif

// Elements are stored as f32, f16 or bf16 and computed in f32.
__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T> __device__ __forceinline__ T from_float(float v);
template <> __device__ __forceinline__ float from_float<float>(float v) { return v; }
template <> __device__ __forceinline__ __half from_float<__half>(float v) { return __float2half_rn(v); }
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

// A value as it is after being stored in T.
template <typename T> __device__ __forceinline__ float rounded(float v) {
  return to_float(from_float<T>(v));
}

// N consecutive elements, moved in one access where N elements fill 16 bytes.
template <typename T, int N> struct alignas(sizeof(T) * N) Pack {
  T v[N];
};

// Elements of a 16-byte access.
template <typename T> constexpr int VEC = 16 / sizeof(T);

template <typename T, int N> __device__ __forceinline__ Pack<T, N> load(const T* p) {
  return *reinterpret_cast<const Pack<T, N>*>(p);
}

template <typename T, int N> __device__ __forceinline__ void store(T* p, const Pack<T, N>& v) {
  *reinterpret_cast<Pack<T, N>*>(p) = v;
}

// An address in shared memory as instructions take it that are not C++'s.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes that are read once, such as weights: they pass by the L1 cache.
__device__ __forceinline__ uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Of a word that another block writes and reads: what the writer has written before is there once the reader has seen it.
__device__ __forceinline__ void store_release(uint32_t* at, uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t* at) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}

// Volatile: issued where they stand, before a PDL wait that they need not wait for.
__device__ __forceinline__ uint32_t load_u8(const void* p) {
  uint16_t v;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ uint32_t load_u16(const void* p) {
  uint16_t v;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ uint32_t load_u32(const void* p) {
  uint32_t v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 load_u64(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

// word & mask | bits in one instruction, which takes one immediate.
__device__ __forceinline__ uint32_t masked_or(uint32_t word, uint32_t mask, uint32_t bits) {
  uint32_t v;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(word), "r"(mask), "r"(bits));
  return v;
}

// One of four words in registers, which a loop that is not unrolled cannot index.
__device__ __forceinline__ uint32_t pick(int i, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return i < 2 ? (i == 0 ? a : b) : (i == 2 ? c : d);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = WARP / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(FULL, v, offset);
  return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int offset = WARP / 2; offset > 0; offset /= 2) v = fmaxf(v, __shfl_xor_sync(FULL, v, offset));
  return v;
}

// The sum over a block of WARPS full warps, in every thread. `scratch` holds WARPS floats and may
// be used again after the next barrier.
template <int WARPS> __device__ __forceinline__ float block_sum(float v, float* scratch) {
  v = warp_sum(v);
  if constexpr (WARPS == 1) return v;
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  if (lane == 0) scratch[warp] = v;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) total += scratch[i];
  return total;
}

// threadIdx.x, by a volatile read: the compiler does not keep values that are derived from it live across an earlier loop.
__device__ __forceinline__ uint32_t thread_now() {
  uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// A barrier for the first `threads` of a block, which are whole warps: the others do something else.
__device__ __forceinline__ void sync_first(uint32_t threads) {
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

// Programmatic dependent launch (compute capability 9.0 and up; nothing elsewhere). A kernel lets
// the next one start early, and waits for the one before to be complete and visible. Every thread
// that reads what an earlier kernel wrote, or writes anything global, waits first; weights, which
// no kernel of a decode step writes, may be read before: what reads those that formats/dequantize.cu
// and formats/pack.cu write is not launched as a dependent one. A kernel whose blocks do not all wait
// would let the next kernel overtake the one before.
__device__ __forceinline__ void pdl_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace fused

// `NAME_f32`, `NAME_f16` and `NAME_bf16`: entry points that take one PARAMS by value.
#define FUSED_ENTRY(NAME, SUFFIX, TYPE, THREADS, PARAMS, BODY) \
  extern "C" __global__ void __launch_bounds__(THREADS)        \
      NAME##_##SUFFIX(const __grid_constant__ PARAMS p) {      \
    BODY<TYPE>(p);                                             \
  }
#define FUSED_ENTRIES(NAME, THREADS, PARAMS, BODY)      \
  FUSED_ENTRY(NAME, f32, float, THREADS, PARAMS, BODY)  \
  FUSED_ENTRY(NAME, f16, __half, THREADS, PARAMS, BODY) \
  FUSED_ENTRY(NAME, bf16, __nv_bfloat16, THREADS, PARAMS, BODY)
