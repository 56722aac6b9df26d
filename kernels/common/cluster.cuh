// Clusters of thread blocks (CTAs) on Hopper: the rank of a CTA, barriers of the cluster, and writes to the shared
// memory of other CTAs (DSMEM).
#pragma once

#include "common/base.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

namespace fused {

// This CTA's rank in its cluster.
__device__ __forceinline__ uint32_t rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// The address of `at` in the shared memory of another CTA of the cluster.
__device__ __forceinline__ uint32_t in_block(uint32_t at, uint32_t rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
  return there;
}
// Arrives at a barrier of any block of the cluster, as `in_block` gives its address. This orders no accesses to
// memory: what the block has read must be complete.
__device__ __forceinline__ void barrier_arrive_at(uint32_t there) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}
// Likewise, predicated: by the threads for which `arrives` holds, without a branch.
__device__ __forceinline__ void barrier_arrive_if(bool arrives, uint32_t there) {
  asm volatile(
      "{\n.reg .pred arrives;\nsetp.ne.b32 arrives, %0, 0;\n"
      "@arrives mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%1];\n}" ::"r"(uint32_t(arrives)),
      "r"(there)
      : "memory");
}
// The same at the barrier that stands at the same address in another block.
__device__ __forceinline__ void barrier_arrive(uint32_t at, uint32_t rank) { barrier_arrive_at(in_block(at, rank)); }
// All threads of all blocks of the cluster, which need not be together. It orders no accesses either.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}
// The same for the threads of whole warps: behind it the blocks of the cluster see one another's writes to shared memory.
__device__ __forceinline__ void cluster_sync_memory() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Tells all blocks of the cluster that this thread has come so far, and goes on. It orders nothing but what
// `barriers_made` does before it.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// Until all threads of all blocks of the cluster have arrived: they have begun, and their barriers are there.
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Writes to another CTA, whose barrier counts the bytes; both addresses as `in_block` gives them.
__device__ __forceinline__ void send(uint32_t to, const Pack<uint32_t, 2>& v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "r"(v.v[0]), "r"(v.v[1]), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void send(uint32_t to, float2 v, uint32_t barrier) {
  send(to, Pack<uint32_t, 2>{{__float_as_uint(v.x), __float_as_uint(v.y)}}, barrier);
}
__device__ __forceinline__ void send(uint32_t to, const Pack<uint32_t, 4>& v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "r"(v.v[0]), "r"(v.v[1]), "r"(v.v[2]), "r"(v.v[3]), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void send(uint32_t to, float4 v, uint32_t barrier) {
  const uint32_t x = __float_as_uint(v.x), y = __float_as_uint(v.y), z = __float_as_uint(v.z);
  send(to, Pack<uint32_t, 4>{{x, y, z, __float_as_uint(v.w)}}, barrier);
}
__device__ __forceinline__ void send(uint32_t to, float v, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(__float_as_uint(v)), "r"(barrier)
               : "memory");
}

}  // namespace fused

#endif
