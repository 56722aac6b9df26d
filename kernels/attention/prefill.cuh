// What the attention kernels for many queries share: a row's place, and the keys that it sees.
#pragma once

#include "abi/attention.cuh"
#include "common/dtype.cuh"

namespace fused {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float NEVER = -INFINITY;

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Whether scores need more than a positive factor and a range of keys.
__device__ __forceinline__ bool is_general(const AttentionParams& p) {
  return p.mask || p.softcap > 0.f || p.scale <= 0.f;
}

// The keys that a query sees: from..to.
struct Range {
  int from, to;
};

__device__ __forceinline__ Range visible(const AttentionParams& p, int query) {
  const int position = p.keys - p.queries + query;
  Range r = {0, p.keys};
  if (p.causal) r.to = min(r.to, position + 1);
  if (p.window) r.from = max(r.from, position - p.window + 1);
  return r;
}

// softcap * tanh(s / softcap); off by up to a few millionths of the cap.
__device__ __forceinline__ float capped(float s, float cap, float twice_inverse) {
  const float e = exp2_approx(s * twice_inverse);
  return cap - __fdividef(2.f * cap, 1.f + e);
}

// The query and the head that a row stands for.
struct Place {
  int query, head;
};

__device__ __forceinline__ Place place(const AttentionParams& p, int kv_head, int row) {
  uint32_t query = row;
  if (p.group_magic) {
    query = __umulhi(row, p.group_magic);
    if (query * p.group > uint32_t(row)) --query;  // the rounding of the factor may carry
  }
  return {int(query), int(kv_head * p.group + row - query * p.group)};
}

__device__ __forceinline__ const float* mask_row(const AttentionParams& p, int batch, Place at) {
  if (!p.mask) return nullptr;
  return p.mask + batch * p.mask_strides[0] + at.head * p.mask_strides[1] +
         at.query * p.mask_strides[2];
}

}  // namespace fused
