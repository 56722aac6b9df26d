// Hopper's bulk copies from global to shared memory (TMA), the mbarriers that they complete on, and the state of a
// pipeline of stages.
#pragma once

#include "common/base.cuh"

namespace fused {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// mbarriers, which count arrivals, and bytes in flight.
__device__ __forceinline__ void barrier_init(uint32_t at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
// Behind it bulk copies and other blocks of a cluster find the barriers that the thread has made.
__device__ __forceinline__ void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_arrive(uint32_t at) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
// Arrives, and expects bytes.
__device__ __forceinline__ void barrier_expect(uint32_t at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
               : "memory");
}
// Until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(uint32_t at, uint32_t phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(at),
      "r"(phase)
      : "memory");
}

// Whether it is over.
__device__ __forceinline__ bool barrier_over(uint32_t at, uint32_t phase) {
  uint32_t over;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(over)
      : "r"(at), "r"(phase)
      : "memory");
  return over;
}

// Fetches the description of a tensor ahead of its first use.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// `bytes`, a multiple of 16, from and to multiples of 16, with a policy of the L2 cache; the barrier counts the bytes.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// A tile of `map` to shared memory; the barrier counts its bytes.
__device__ __forceinline__ void bulk_copy(uint32_t to, const TensorMap& map, uint32_t barrier, int token,
                                      int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %3, %5, %6}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(0), "r"(token), "r"(head), "r"(batch)
      : "memory");
}

// A tile of rows of `map`, as above.
__device__ __forceinline__ void bulk_copy_rows(uint32_t to, const TensorMap& map, uint32_t barrier,
                                               int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

// Likewise, for the blocks of the cluster whose bits are set in `blocks`: at the same address in each of
// them, and counted by the barrier at the same address in each.
__device__ __forceinline__ void bulk_copy_rows(uint32_t to, const TensorMap& map, uint32_t barrier,
                                               int column, int row, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

// A tile of row groups of `map`, of which each has `column` and following of its own rows together; for the blocks of
// the cluster whose bits are set in `blocks`.
__device__ __forceinline__ void bulk_copy_groups(uint32_t to, const TensorMap& map, uint32_t barrier, int column,
                                                 int group) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(0), "r"(column), "r"(group)
      : "memory");
}
__device__ __forceinline__ void bulk_copy_groups(uint32_t to, const TensorMap& map, uint32_t barrier, int column,
                                                 int group, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(0), "r"(column), "r"(group), "h"(blocks)
      : "memory");
}

// A tile of chunks of rows of `map`, from chunk `chunk` of all rows on.
__device__ __forceinline__ void bulk_copy_chunks(uint32_t to, const TensorMap& map, uint32_t barrier, int chunk) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %3, %4}], [%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(0), "r"(chunk)
      : "memory");
}

#endif

// The current stage of a pipeline, and the parity of its barriers.
template <int STAGES> struct PipelineState {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

}  // namespace fused
