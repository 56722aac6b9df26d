// Quantizes weights [rows, cols] of f32, f16 or bf16 to a byte for each code, which pack.cu takes, and scales, zero
// points and e4m3 scales, bit for bit as src/cpu/quantize does; quantize_weights.cuh has the arithmetic. What the host
// would refuse sets a flag.
//
// A row (INT8, FP8, ternary) or a block of FP8 has a thread block, which reads the weights once for the largest magnitude
// or the mean and once for the codes; INT8 reads them a third time, into shared memory for its 16 trials, of which each
// has 16 threads, one for each of the sums that the host's lanes have. A group has a warp (INT4, ternary) or half of one
// (NF4, NVFP4). Of INT4 a lane has a trial of its own and all 16 sums in registers, so that lanes read the same weights.
#include "formats/quantize_weights.cuh"

#include "common/dtype.cuh"

using namespace fused;

using Params = QuantizeWeightsParams;

// Weights of a row that are in shared memory at a time: whole rounds of the lanes of sums.
constexpr uint32_t CHUNK = 2048;
static_assert(CHUNK % TRIAL_LANES == 0 && QUANTIZE_THREADS == CLIPS * TRIAL_LANES && 2 * CLIPS == WARP);

__device__ __forceinline__ float weight_at(const Params& p, uint64_t i) {
  return widen_raw(read_raw(p.weights, p.dtype, i), p.dtype);
}

// The same of a weight that may not be a number.
__device__ __forceinline__ float checked_weight(const Params& p, uint64_t i) {
  const float w = weight_at(p, i);
  if (!is_finite(w)) *p.refused = 1;
  return w;
}

__device__ __forceinline__ void refuse_infinite(const Params& p, float scale) {
  if (is_infinite(scale)) *p.refused = 1;
}

// The largest of all threads of a block of QUANTIZE_THREADS, in every one.
__device__ __forceinline__ float block_max(float v) {
  __shared__ float of_warps[QUANTIZE_THREADS / WARP];
  v = warp_max(v);
  if (threadIdx.x % WARP == 0) of_warps[threadIdx.x / WARP] = v;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < QUANTIZE_THREADS / WARP; ++i) v = fmaxf(v, of_warps[i]);
  return v;
}

// The best of a warp's attempts, the first of those that are alike, if it is better than `best`. Those of lanes from
// `count` on are none.
__device__ __forceinline__ Attempt better(const Params& p, Attempt best, const Attempt& own, int count) {
  const int lane = threadIdx.x % WARP;
  if (lane < count) refuse_infinite(p, own.scale);
  float error = lane < count ? own.error : infinity();
  int from = lane;
#pragma unroll
  for (int offset = WARP / 2; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(FULL, error, offset);
    const int other_lane = __shfl_xor_sync(FULL, from, offset);
    if (other < error || (other == error && other_lane < from)) error = other, from = other_lane;
  }
  const float scale = __shfl_sync(FULL, own.scale, from);
  const uint32_t zero = __shfl_sync(FULL, own.zero, from);
  if (error < best.error) best = {scale, error, zero};
  return best;
}

// The best scale of a row of INT8, in every thread.
__device__ __forceinline__ Attempt best_of_row(const Params& p, uint64_t begin, float amax) {
  __shared__ float weights[CHUNK];
  // Rows of sums begin in different banks.
  __shared__ TrialSums lanes[CLIPS][TRIAL_LANES + 1];
  __shared__ Attempt found;
  const uint32_t lane = threadIdx.x % TRIAL_LANES, clip = threadIdx.x / TRIAL_LANES;
  Rounding by = {clipped_inverse(amax, 127.f, clip), 0.f, -127.f, 127.f};
  TrialSums sums = {};
  for (uint32_t first = 0; first < p.cols; first += CHUNK) {
    const uint32_t count = min(CHUNK, p.cols - first);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < count; i += QUANTIZE_THREADS) weights[i] = weight_at(p, begin + first + i);
    __syncthreads();
#pragma unroll 4
    for (uint32_t i = lane; i < count; i += TRIAL_LANES) sums.take(weights[i], by);
  }
  lanes[clip][lane] = sums;
  __syncthreads();
  if (threadIdx.x < WARP) {
    // The upper lanes have a trial of another.
    const uint32_t own = threadIdx.x % CLIPS;
    by.inverse = clipped_inverse(amax, 127.f, own);
    const Trial trial(by, p.cols, total(lanes[own]));
    const Attempt best = better(p, Attempt::none(0), Attempt::of<false>(trial, 0), CLIPS);
    if (threadIdx.x == 0) found = best;
  }
  __syncthreads();
  return found;
}

extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS)
    quantize_weights_int8(const __grid_constant__ Params p) {
  pdl_wait();
  const uint64_t row = blockIdx.x, begin = row * p.cols;
  float amax = 0.f;
  for (uint32_t i = threadIdx.x; i < p.cols; i += QUANTIZE_THREADS) {
    amax = fmaxf(amax, fabsf(checked_weight(p, begin + i)));
  }
  amax = block_max(amax);
  Attempt best = Attempt::none(0);
  if (amax >= SEARCH_TINY) best = best_of_row(p, begin, amax);
  const Rounding by = best.rounding(-127.f, 127.f);
  for (uint32_t i = threadIdx.x; i < p.cols; i += QUANTIZE_THREADS) {
    p.codes[begin + i] = code_of(weight_at(p, begin + i), by);
  }
  if (threadIdx.x == 0) p.scales[row] = best.scale;
}

// The codes and the scale of a group that a warp has, by what is stored.
__device__ __forceinline__ void put_group(const Params& p, uint64_t index, const float* weights, const Rounding& by,
                                          float scale) {
  const uint32_t lane = threadIdx.x % WARP;
  for (uint32_t i = lane; i < p.group; i += WARP) p.codes[index * p.group + i] = code_of(weights[i], by);
  if (lane == 0) p.scales[index] = scale;
}

// A warp's group in shared memory; past the matrix null.
__device__ __forceinline__ const float* warp_group(const Params& p, uint64_t& index) {
  alignas(16) __shared__ float weights[QUANTIZE_WARPS][MAX_GROUP];
  const uint32_t warp = threadIdx.x / WARP;
  index = blockIdx.x * uint64_t(QUANTIZE_WARPS) + warp;
  if (index >= p.rows * (p.cols / p.group)) return nullptr;
  for (uint32_t i = threadIdx.x % WARP; i < p.group; i += WARP) {
    weights[warp][i] = checked_weight(p, index * p.group + i);
  }
  __syncwarp();
  return weights[warp];
}

extern "C" __global__ void __launch_bounds__(QUANTIZE_WARPS * WARP)
    quantize_weights_int4(const __grid_constant__ Params p) {
  pdl_wait();
  uint64_t index;
  const float* weights = warp_group(p, index);
  if (!weights) return;
  const int lane = threadIdx.x % WARP;
  float amax = 0.f;
  for (uint32_t i = lane; i < p.group; i += WARP) amax = fmaxf(amax, fabsf(weights[i]));
  amax = warp_max(amax);
  Attempt best = Attempt::none(ZERO_MIDDLE);
  if (amax >= SEARCH_TINY) {
    // The ranges with a positive scale, and then those with a negative one.
    const float inverse = clipped_inverse(amax, lane < CLIPS ? 8.f : -8.f, lane % CLIPS);
    const Rounding by = {inverse, 8.f, 0.f, 15.f};
    const Trial trial(by, p.group, group_sums(weights, p.group, by));
    best = better(p, best, Attempt::of<true>(trial, ZERO_MIDDLE), WARP);
  }
  put_group(p, index, weights, best.rounding(0.f, 15.f), best.scale);
}

// Codes and line settle: the same trial in every lane, of which the first half have a sum each.
__device__ __forceinline__ Attempt settled(const Params& p, const float* weights, Attempt best) {
  __shared__ TrialSums of_warps[QUANTIZE_WARPS][TRIAL_LANES];
  TrialSums* lanes = of_warps[threadIdx.x / WARP];
  const uint32_t lane = threadIdx.x % WARP;
  for (int round = 0; round < ROUNDS; ++round) {
    const Rounding by = best.rounding(0.f, 15.f);
    if (lane < TRIAL_LANES) {
      TrialSums sums = {};
      for (uint32_t i = lane; i < p.group; i += TRIAL_LANES) sums.take(weights[i], by);
      lanes[lane] = sums;
    }
    __syncwarp();
    const Trial trial(by, p.group, total(lanes));
    const Attempt next = Attempt::of<true>(trial, stored_zero(trial.best_zero()));
    __syncwarp();
    refuse_infinite(p, next.scale);
    // Another round would be the same trial again.
    if (!(next.error < best.error)) break;
    best = next;
  }
  return best;
}

extern "C" __global__ void __launch_bounds__(QUANTIZE_WARPS * WARP)
    quantize_weights_int4_zeros(const __grid_constant__ Params p) {
  pdl_wait();
  uint64_t index;
  const float* weights = warp_group(p, index);
  if (!weights) return;
  const int lane = threadIdx.x % WARP;
  // The largest of the weights, and of their negatives.
  float top = 0.f, depth = 0.f;
  for (uint32_t i = lane; i < p.group; i += WARP) top = fmaxf(top, weights[i]), depth = fmaxf(depth, -weights[i]);
  top = warp_max(top);
  const float bottom = -warp_max(depth);
  Attempt best = Attempt::none(ZERO_MIDDLE);
  if (minus(top, bottom) >= SEARCH_TINY) {
    constexpr int PAIRS = ENDS * ENDS, GRIDS = (PAIRS + WARP - 1) / WARP;
    // The grid of ranges, and then scales around its best.
#pragma unroll 1
    for (int step = 0; step <= GRIDS; ++step) {
      const bool grid = step < GRIDS;
      const int count = grid ? PAIRS - step * WARP : 2 * NEAR + 1;
      const Rounding by = grid ? between_ends(bottom, top, step * WARP + lane) : near(best, lane - NEAR);
      const Trial trial(by, p.group, group_sums(weights, p.group, by));
      best = better(p, best, Attempt::of<true>(trial, stored_zero(trial.best_zero())), count);
    }
    best = settled(p, weights, best);
  }
  put_group(p, index, weights, best.rounding(0.f, 15.f), best.scale);
  if (lane == 0) p.zeros[index] = uint8_t(best.zero);
}

// A thread block has `height` rows of `group` columns, or what there is of them.
extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS)
    quantize_weights_fp8(const __grid_constant__ Params p) {
  pdl_wait();
  const uint32_t across = (p.cols + p.group - 1) / p.group, left = blockIdx.x % across * p.group;
  const uint64_t top = uint64_t(blockIdx.x / across) * p.height;
  const uint64_t bottom = min(p.rows, top + p.height);
  const uint32_t right = min(p.cols, left + p.group);
  const uint32_t threads = p.height == 1 ? QUANTIZE_THREADS : QUANTIZE_THREADS / 2;
  const uint32_t first_row = threadIdx.x / threads, rows = QUANTIZE_THREADS / threads;
  const uint32_t first = left + threadIdx.x % threads;
  float amax = 0.f;
  for (uint64_t row = top + first_row; row < bottom; row += rows) {
    for (uint32_t i = first; i < right; i += threads) amax = fmaxf(amax, fabsf(checked_weight(p, row * p.cols + i)));
  }
  amax = block_max(amax);
  const float scale = amax < FP8_TINY ? 0.f : over(amax, E4M3_MAX);
  for (uint64_t row = top + first_row; row < bottom; row += rows) {
    for (uint32_t i = first; i < right; i += threads) {
      const float w = weight_at(p, row * p.cols + i);
      p.codes[row * p.cols + i] = int8_t(scale == 0.f ? 0u : e4m3_of(over(w, scale)));
    }
  }
  if (threadIdx.x == 0) p.scales[blockIdx.x] = scale;
}

// Half a warp has a group. `scale_of` makes its scale of the largest magnitude, in every thread.
template <class Scale, class Code>
__device__ __forceinline__ void quantize_floats(const Params& p, Scale scale_of, Code code_of_value) {
  constexpr uint32_t LANES = WARP / 2;
  pdl_wait();
  const uint64_t index = blockIdx.x * uint64_t(2 * QUANTIZE_WARPS) + threadIdx.x / LANES;
  const uint32_t lane = threadIdx.x % LANES;
  const bool some = index < p.rows * (p.cols / p.group);
  const uint64_t begin = index * p.group;
  float amax = 0.f;
  for (uint32_t i = lane; some && i < p.group; i += LANES) amax = fmaxf(amax, fabsf(checked_weight(p, begin + i)));
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) amax = fmaxf(amax, __shfl_xor_sync(FULL, amax, offset));
  if (!some) return;
  const float scale = scale_of(amax, index, lane == 0);
  for (uint32_t i = lane; i < p.group; i += LANES) {
    const float value = scale == 0.f ? 0.f : over(weight_at(p, begin + i), scale);
    p.codes[begin + i] = int8_t(code_of_value(value));
  }
}

extern "C" __global__ void __launch_bounds__(QUANTIZE_WARPS * WARP)
    quantize_weights_nf4(const __grid_constant__ Params p) {
  const auto scale = [&](float amax, uint64_t index, bool first) {
    if (first) p.scales[index] = amax;
    return amax;
  };
  quantize_floats(p, scale, [](float v) { return nf4_of(v); });
}

extern "C" __global__ void __launch_bounds__(QUANTIZE_WARPS * WARP)
    quantize_weights_nvfp4(const __grid_constant__ Params p) {
  const auto scale = [&](float amax, uint64_t index, bool first) {
    const uint32_t b = e4m3_of(over(times(amax, p.global), E2M1_MAX));
    if (first) p.zeros[index] = uint8_t(b);
    return p.global == 0.f ? 0.f : over(e4m3_value(b), p.global);
  };
  quantize_floats(p, scale, [](float v) { return e2m1_of(v); });
}

// The largest magnitude of a matrix. Bits of floats without a sign have the order of the floats.
extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS)
    quantize_weights_largest(const __grid_constant__ Params p) {
  pdl_wait();
  const uint64_t count = p.rows * p.cols, step = gridDim.x * uint64_t(QUANTIZE_THREADS);
  float amax = 0.f;
  for (uint64_t i = blockIdx.x * uint64_t(QUANTIZE_THREADS) + threadIdx.x; i < count; i += step) {
    amax = fmaxf(amax, fabsf(checked_weight(p, i)));
  }
  amax = block_max(amax);
  if (threadIdx.x == 0) atomicMax(p.largest, __float_as_uint(amax));
}

// The mean magnitude, of a sum in f64 in order.
__device__ __forceinline__ float mean_of(double sum, uint32_t count) {
  return __double2float_rn(__ddiv_rn(sum, double(count)));
}

// Ternary codes for a scale.
__device__ __forceinline__ Rounding ternary(float scale) { return {over(1.f, scale), 0.f, -1.f, 1.f}; }

extern "C" __global__ void __launch_bounds__(QUANTIZE_WARPS * WARP)
    quantize_weights_ternary_group(const __grid_constant__ Params p) {
  pdl_wait();
  uint64_t index;
  const float* weights = warp_group(p, index);
  if (!weights) return;
  // The same in every lane.
  double sum = 0.;
  for (uint32_t i = 0; i < p.group; ++i) sum = __dadd_rn(sum, double(fabsf(weights[i])));
  const float scale = in_f16(mean_of(sum, p.group));
  refuse_infinite(p, scale);
  put_group(p, index, weights, ternary(scale), scale);
}

extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS)
    quantize_weights_ternary_row(const __grid_constant__ Params p) {
  __shared__ float weights[CHUNK];
  __shared__ float mean;
  pdl_wait();
  const uint64_t row = blockIdx.x, begin = row * p.cols;
  double sum = 0.;
  for (uint32_t first = 0; first < p.cols; first += CHUNK) {
    const uint32_t count = min(CHUNK, p.cols - first);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < count; i += QUANTIZE_THREADS) weights[i] = checked_weight(p, begin + first + i);
    __syncthreads();
    if (threadIdx.x > 0) continue;
#pragma unroll 8
    for (uint32_t i = 0; i < count; ++i) sum = __dadd_rn(sum, double(fabsf(weights[i])));
  }
  if (threadIdx.x == 0) p.scales[row] = mean = mean_of(sum, p.cols);
  __syncthreads();
  const Rounding by = ternary(mean);
  for (uint32_t i = threadIdx.x; i < p.cols; i += QUANTIZE_THREADS) {
    p.codes[begin + i] = code_of(weight_at(p, begin + i), by);
  }
}
