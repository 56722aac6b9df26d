// The epilogue of a product: act(y + bias) + residuals, computed in f32 and rounded once.
#pragma once

#include "abi/linear.cuh"
#include "common/dtype.cuh"

namespace fused {

// Whether outputs are the sums.
__device__ __forceinline__ bool is_plain(const Epilogue& e) {
  return e.activation == ACT_NONE && !e.bias && !e.residuals[0] && !e.residuals[1];
}

// Whether one half of the outputs gates the other.
__device__ __forceinline__ bool gates(const Epilogue& e) { return e.activation >= ACT_SWIGLU; }

__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.f + __expf(-v)); }

// What is no number stays none.
__device__ __forceinline__ float relu(float v) { return v < 0.f ? 0.f : v; }

__device__ __forceinline__ float activate(int activation, float v) {
  switch (activation) {
    case ACT_SILU:
      return silu(v);
    case ACT_GELU:
      return 0.5f * v * (1.f + erff(v * 0.70710678f));
    case ACT_GELU_TANH:
      return 0.5f * v * (1.f + tanhf(0.79788456f * (v + 0.044715f * v * v * v)));
    case ACT_RELU:
      return relu(v);
    case ACT_RELU2:
      return relu(v) * relu(v);
    default:
      return v;
  }
}

// What multiplies the gated half.
__device__ __forceinline__ float gate(int activation, float v) {
  if (activation == ACT_SWIGLU) return silu(v);
  if (activation == ACT_RELU2_GLU) return activate(ACT_RELU2, v);
  return activate(activation == ACT_GEGLU ? ACT_GELU : ACT_GELU_TANH, v);
}

// What an output needs besides its sum, read ahead and widened when the sum is there.
struct Addends {
  uint32_t bias, residuals[2];

  __device__ __forceinline__ void load_bias(const Epilogue& e, uint32_t row) {
    bias = e.bias ? read_raw(e.bias, e.dtype, row) : 0;
  }
  __device__ __forceinline__ void load_residuals(const Epilogue& e, uint32_t m, uint32_t column) {
    const uint64_t i = m * e.stride + column;
#pragma unroll
    for (int r = 0; r < 2; ++r) residuals[r] = e.residuals[r] ? read_raw(e.residuals[r], e.dtype, i) : 0;
  }
};

}  // namespace fused
