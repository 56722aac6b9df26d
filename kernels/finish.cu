// What happens to the rows of a matrix product that a library computed: act(y + bias) + residuals,
// in f32, rounded once. With nothing to add it changes the element type.
#include "epilogue.cuh"

using namespace fused;

struct Params {
  const void* y;  // [m, rows], of y_dtype
  Epilogue e;
  uint32_t m, rows;
  int y_dtype;
  int vectors;  // whether width and stride are multiples of 4 and all addresses of 16
};

constexpr int THREADS = 256;

// W elements at i, widened: one access where W is 4.
template <int W> __device__ __forceinline__ void read(const void* p, int dtype, uint64_t i, float (&v)[W]) {
  if constexpr (W == 1) {
    v[0] = widen_raw(read_raw(p, dtype, i), dtype);
  } else if (dtype == F32) {
    const float4 f = __ldcg(reinterpret_cast<const float4*>(static_cast<const float*>(p) + i));
    v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
  } else {
    const uint2 words = __ldcg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(p) + i));
    const float2 a = dtype == F16 ? unpack2<__half>(words.x) : unpack2<__nv_bfloat16>(words.x);
    const float2 b = dtype == F16 ? unpack2<__half>(words.y) : unpack2<__nv_bfloat16>(words.y);
    v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y;
  }
}

template <int W> __device__ __forceinline__ void put(void* p, int dtype, uint64_t i, const float (&v)[W]) {
  if constexpr (W == 1) {
    write(p, dtype, i, v[0]);
  } else if (dtype == F32) {
    *reinterpret_cast<float4*>(static_cast<float*>(p) + i) = make_float4(v[0], v[1], v[2], v[3]);
  } else if (dtype == F16) {
    Pack<__half, 4> pack;
#pragma unroll
    for (int j = 0; j < 4; ++j) pack.v[j] = from_float<__half>(v[j]);
    store(static_cast<__half*>(p) + i, pack);
  } else {
    Pack<__nv_bfloat16, 4> pack;
#pragma unroll
    for (int j = 0; j < 4; ++j) pack.v[j] = from_float<__nv_bfloat16>(v[j]);
    store(static_cast<__nv_bfloat16*>(p) + i, pack);
  }
}

template <int W> __device__ __forceinline__ void add(const void* p, int dtype, uint64_t i, float (&v)[W]) {
  float more[W];
  read(p, dtype, i, more);
#pragma unroll
  for (int j = 0; j < W; ++j) v[j] += more[j];
}

template <int W> __device__ __forceinline__ void finish(const Params& p) {
  const Epilogue& e = p.e;
  const bool gated = e.activation == ACT_SWIGLU;
  const uint32_t width = gated ? p.rows / 2 : p.rows;
  const uint64_t packs = uint64_t(p.m) * (width / W);
  for (uint64_t i = blockIdx.x * uint64_t(THREADS) + threadIdx.x; i < packs; i += gridDim.x * uint64_t(THREADS)) {
    const uint32_t m = i / (width / W), column = i % (width / W) * W;
    const uint64_t from = uint64_t(m) * p.rows + column, to = m * e.stride + column;
    float v[W], up[W];
    read(p.y, p.y_dtype, from, v);
    if (gated) read(p.y, p.y_dtype, from + width, up);
    if (e.bias) add(e.bias, e.dtype, column, v);
    if (e.bias && gated) add(e.bias, e.dtype, column + width, up);
#pragma unroll
    for (int j = 0; j < W; ++j) v[j] = gated ? silu(v[j]) * up[j] : activate(e.activation, v[j]);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (e.residuals[r]) add(e.residuals[r], e.dtype, to, v);
    put(e.out, e.out_dtype, to, v);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) finish(const __grid_constant__ Params p) {
  allow_next();
  wait_previous();
  if (p.vectors) {
    finish<4>(p);
  } else {
    finish<1>(p);
  }
}
