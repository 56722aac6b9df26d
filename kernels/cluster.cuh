// Thread-block clusters with distributed shared memory (compute capability 9.0 and up). Elsewhere,
// and in a launch without clusters, every block is a cluster of one.
#pragma once

#include "common.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define FUSED_CLUSTERS 1
#else
#define FUSED_CLUSTERS 0
#endif

namespace fused {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank = 0;
#if FUSED_CLUSTERS
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size = 1;
#if FUSED_CLUSTERS
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
  return size;
}

// A barrier over the cluster in two halves: what was written to shared memory before the first is
// seen by every block behind the second.
__device__ __forceinline__ void cluster_arrive() {
#if FUSED_CLUSTERS
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if FUSED_CLUSTERS
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

__device__ __forceinline__ void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// What stands at `own`'s place in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ float cluster_read(const float* own, uint32_t rank) {
#if FUSED_CLUSTERS
  float v;
  asm volatile(
      "{.reg .b32 a;\n"
      "mapa.shared::cluster.u32 a, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [a];}"
      : "=f"(v)
      : "r"(uint32_t(__cvta_generic_to_shared(own))), "r"(rank)
      : "memory");
  return v;
#else
  return *own;
#endif
}

__device__ __forceinline__ uint64_t cluster_read(const uint64_t* own, uint32_t rank) {
#if FUSED_CLUSTERS
  uint64_t v;
  asm volatile(
      "{.reg .b32 a;\n"
      "mapa.shared::cluster.u32 a, %1, %2;\n"
      "ld.shared::cluster.u64 %0, [a];}"
      : "=l"(v)
      : "r"(uint32_t(__cvta_generic_to_shared(own))), "r"(rank)
      : "memory");
  return v;
#else
  return *own;
#endif
}

}  // namespace fused
