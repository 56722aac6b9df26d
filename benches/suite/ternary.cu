// y = rms_norm(x) W^T for one row of K floats and ternary W, in five ways of fusing the norm. Compiled
// at run time for each K.
//
// W is [rows, K] with four codes to a byte, code i at bits 2i: a weight of -1, 0 or 1 plus 1. A code c
// becomes the float 1 + c / 4 by putting its bits into the fraction of 1, so that
//   sum (c - 1) v = 4 sum (1 + c / 4) v - 5 sum v.
// Lanes of a warp that share a row take every LANES-th byte of it.

constexpr int FOURS = K / 4;
constexpr unsigned FULL = 0xffffffffu;
constexpr float EPS = 1e-5f;

struct Params {
  const float* x;
  const float* weight;  // of the norm
  const unsigned char* codes;
  const float* scales;  // [rows]
  float* y;
  float* normed;        // [K], and behind it its sum
  int rows;
};

__device__ __forceinline__ float code_of(unsigned byte, int i) {
  return __uint_as_float((byte << (21 - 2 * i) & 0x600000u) | 0x3f800000u);
}

// sum (1 + c / 4) v over four values.
__device__ __forceinline__ float dot(unsigned byte, float4 v) {
  return fmaf(code_of(byte, 0), v.x, code_of(byte, 1) * v.y) + fmaf(code_of(byte, 2), v.z, code_of(byte, 3) * v.w);
}

__device__ __forceinline__ float4 times(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ __forceinline__ float sum_of(float4 v) { return (v.x + v.y) + (v.z + v.w); }

template <int LANES> __device__ __forceinline__ float over_lanes(float v) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(FULL, v, offset);
  return v;
}

// The sums of two numbers over the block, in each thread.
__device__ __forceinline__ float2 over_block(float2 v) {
  __shared__ float2 scratch[32];
  v.x = over_lanes<32>(v.x), v.y = over_lanes<32>(v.y);
  const int lane = threadIdx.x % 32;
  if (lane == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  v = lane < blockDim.x / 32 ? scratch[lane] : make_float2(0.f, 0.f);
  return make_float2(over_lanes<32>(v.x), over_lanes<32>(v.y));
}

__device__ __forceinline__ float factor_of(float squares) { return rsqrtf(squares / K + EPS); }

// The normalised row, and its sum.
__device__ __forceinline__ float normalise(const Params& p, float4* row) {
  const float4* x = reinterpret_cast<const float4*>(p.x);
  const float4* weight = reinterpret_cast<const float4*>(p.weight);
  float2 sums = {0.f, 0.f};
  for (int i = threadIdx.x; i < FOURS; i += blockDim.x) {
    const float4 v = x[i], by = times(v, weight[i]);
    sums.x += sum_of(times(v, v)), sums.y += sum_of(by);
    row[i] = by;
  }
  sums = over_block(sums);
  const float factor = factor_of(sums.x);
  for (int i = threadIdx.x; i < FOURS; i += blockDim.x) row[i] = times(row[i], make_float4(factor, factor, factor, factor));
  return sums.y * factor;
}

// The row for LANES lanes of this thread's.
template <int LANES> __device__ __forceinline__ int row_of() {
  return (blockIdx.x * blockDim.x + threadIdx.x) / LANES;
}

// Calls `take` with every four values that are this lane's, and the byte of a row that meets them.
template <int LANES, class Take> __device__ __forceinline__ void each_four(const Params& p, int row, Take take) {
  const unsigned char* codes = p.codes + row * FOURS;
  const int lane = threadIdx.x % LANES;
#pragma unroll 12
  for (int i = 0; i < FOURS / LANES; ++i) take(lane + i * LANES, codes[lane + i * LANES]);
  const int last = lane + FOURS / LANES * LANES;
  if (FOURS % LANES && last < FOURS) take(last, codes[last]);
}

// A row of `v`. Sums are each lane's own, then the warp's by shuffles.
template <int LANES> __device__ __forceinline__ float product(const Params& p, int row, const float4* v) {
  float sum = 0.f;
  each_four<LANES>(p, row, [&](int at, unsigned byte) { sum += dot(byte, v[at]); });
  return over_lanes<LANES>(sum);
}

template <int LANES> __device__ __forceinline__ void put(const Params& p, int row, float y) {
  if (row < p.rows && threadIdx.x % LANES == 0) p.y[row] = y;
}

// Apart: the norm.
extern "C" __global__ void rms_norm(Params p) {
  const float sum = normalise(p, reinterpret_cast<float4*>(p.normed));
  if (threadIdx.x == 0) p.normed[K] = sum;
}

// Apart: the product.
template <int LANES> __device__ __forceinline__ void matmul(const Params& p) {
  const int row = row_of<LANES>(), there = min(row, p.rows - 1);
  const float sum = product<LANES>(p, there, reinterpret_cast<const float4*>(p.normed));
  put<LANES>(p, row, p.scales[there] * (4.f * sum - 5.f * p.normed[K]));
}

// Naive: every block normalises the row into shared memory; its threads take the bytes of its ROWS rows
// in turn and add to the rows' sums by atomics.
extern "C" __global__ void naive(Params p) {
  constexpr int ROWS = 8;
  __shared__ float4 x[FOURS];
  __shared__ float sums[ROWS];
  if (threadIdx.x < ROWS) sums[threadIdx.x] = 0.f;
  const float total = normalise(p, x);
  __syncthreads();
  const int first = blockIdx.x * ROWS, count = min(ROWS, p.rows - first);
  for (int i = threadIdx.x; i < count * FOURS; i += blockDim.x)
    atomicAdd(&sums[i / FOURS], dot(p.codes[first * FOURS + i], x[i % FOURS]));
  __syncthreads();
  if (threadIdx.x < count) {
    const int row = first + threadIdx.x;
    p.y[row] = p.scales[row] * (4.f * sums[threadIdx.x] - 5.f * total);
  }
}

// Private: the same row in shared memory, but sums are each lane's own, then the warp's by shuffles.
template <int LANES> __device__ __forceinline__ void privately(const Params& p) {
  __shared__ float4 x[FOURS];
  const int row = row_of<LANES>(), there = min(row, p.rows - 1);
  const float scale = p.scales[there], total = normalise(p, x);
  __syncthreads();
  put<LANES>(p, row, scale * (4.f * product<LANES>(p, there, x) - 5.f * total));
}

// Streaming: no row is kept. The sum of squares and the product grow in one pass over x, and the
// norm's factor is applied behind it.
template <int LANES> __device__ __forceinline__ void streaming(const Params& p) {
  const float4* x = reinterpret_cast<const float4*>(p.x);
  const float4* weight = reinterpret_cast<const float4*>(p.weight);
  const int row = row_of<LANES>(), there = min(row, p.rows - 1);
  const float scale = p.scales[there];
  float squares = 0.f, sum = 0.f;
  each_four<LANES>(p, there, [&](int at, unsigned byte) {
    const float4 v = x[at], by = times(v, weight[at]);
    squares += sum_of(times(v, v));
    // 4 (1 + c / 4) v - 5 v
    sum += fmaf(4.f, dot(byte, by), -5.f * sum_of(by));
  });
  squares = over_lanes<LANES>(squares), sum = over_lanes<LANES>(sum);
  put<LANES>(p, row, scale * factor_of(squares) * sum);
}

#define LANES_OF(N)                                                        \
  extern "C" __global__ void matmul_##N(Params p) { matmul<N>(p); }       \
  extern "C" __global__ void private_##N(Params p) { privately<N>(p); }   \
  extern "C" __global__ void streaming_##N(Params p) { streaming<N>(p); }
LANES_OF(4)
LANES_OF(8)
LANES_OF(16)
LANES_OF(32)
