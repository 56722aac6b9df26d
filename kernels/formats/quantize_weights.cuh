// The arithmetic of src/cpu/quantize, bit for bit: each operation is one that rounds to nearest (`__fmul_rn` and so on),
// which nvcc does not join to a multiply-add, in the order in which the host has it. src/cpu/quantize has the reasons.
#pragma once

#include "abi/quantize_weights.cuh"
#include "formats/nf4.cuh"

namespace fused {

__device__ __forceinline__ float times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float minus(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float over(float a, float b) { return __fdiv_rn(a, b); }

constexpr uint32_t INFINITE = 0x7f800000u;

__device__ __forceinline__ float infinity() { return __uint_as_float(INFINITE); }
__device__ __forceinline__ bool is_finite(float v) { return (__float_as_uint(v) & INFINITE) != INFINITE; }
__device__ __forceinline__ bool is_infinite(float v) { return (__float_as_uint(v) & 0x7fffffffu) == INFINITE; }

// What f16 stores of a scale.
__device__ __forceinline__ float in_f16(float scale) { return __half2float(__float2half_rn(scale)); }

// From weights to codes: clamp(round(w * inverse + zero), low, high).
struct Rounding {
  float inverse, zero, low, high;

  // No NaN comes here but from w * inverse, which makes NaN of a trial's error whatever the code is.
  __device__ __forceinline__ float code(float w) const {
    const float v = plus(times(w, inverse), zero);
    return minus(plus(fminf(fmaxf(v, low), high), ROUND), ROUND);
  }
};

// Sums over weights of r = w / scale - v, of the code v less its zero point, and of r^2, r v and v^2.
struct TrialSums {
  float r, v, rr, rv, vv;

  __device__ __forceinline__ void take(float w, const Rounding& by) {
    const float code = minus(by.code(w), by.zero);
    const float miss = minus(times(w, by.inverse), code);
    r = plus(r, miss);
    v = plus(v, code);
    rr = plus(rr, times(miss, miss));
    rv = plus(rv, times(miss, code));
    vv = plus(vv, times(code, code));
  }

  __device__ __forceinline__ void add(const TrialSums& other) {
    r = plus(r, other.r);
    v = plus(v, other.v);
    rr = plus(rr, other.rr);
    rv = plus(rv, other.rv);
    vv = plus(vv, other.vv);
  }
};

// What TRIAL_LANES sums come to, in order.
__device__ __forceinline__ TrialSums total(const TrialSums* lanes) {
  TrialSums sum = lanes[0];
  for (uint32_t lane = 1; lane < TRIAL_LANES; ++lane) sum.add(lanes[lane]);
  return sum;
}

// The sums over a group, by one thread.
__device__ __forceinline__ TrialSums group_sums(const float* weights, uint32_t group, const Rounding& by) {
  TrialSums lanes[TRIAL_LANES] = {};
#pragma unroll 1
  for (uint32_t first = 0; first < group; first += TRIAL_LANES) {
#pragma unroll
    for (uint32_t lane = 0; lane < TRIAL_LANES; ++lane) lanes[lane].take(weights[first + lane], by);
  }
  TrialSums sum = lanes[0];
#pragma unroll
  for (uint32_t lane = 1; lane < TRIAL_LANES; ++lane) sum.add(lanes[lane]);
  return sum;
}

struct Trial {
  float scale, zero, count;
  TrialSums sums;

  __device__ __forceinline__ Trial(const Rounding& by, uint32_t values, const TrialSums& sums)
      : scale(over(1.f, by.inverse)), zero(by.zero), count(float(values)), sums(sums) {}

  // The scale with the least squared error if the zero point moves by `shift`.
  __device__ __forceinline__ float best_scale(float shift) const {
    const float moved = times(times(shift, shift), count);
    const float with = minus(plus(sums.rv, times(shift, minus(sums.v, sums.r))), moved);
    const float spread = plus(minus(sums.vv, times(times(2.f, shift), sums.v)), moved);
    return times(scale, plus(1.f, over(with, spread)));
  }

  // The zero point of the best line through the weights over these codes.
  __device__ __forceinline__ float best_zero() const {
    const float spread = minus(times(count, sums.vv), times(sums.v, sums.v));
    if (spread <= 0.f) return zero;
    const float slope = over(minus(times(count, sums.rv), times(sums.r, sums.v)), spread);
    const float above = minus(sums.r, times(slope, sums.v));
    return minus(zero, over(above, times(count, plus(1.f, slope))));
  }

  // The squared error with another scale and the zero point moved by `shift`.
  __device__ __forceinline__ float error(float other, float shift) const {
    const float d = minus(over(other, scale), 1.f);
    const float e = times(-plus(1.f, d), shift);
    const float line = plus(times(e, count), times(2.f, minus(times(d, sums.v), sums.r)));
    const float lines = plus(times(times(d, d), sums.vv), times(e, line));
    const float rest = plus(minus(sums.rr, times(times(2.f, d), sums.rv)), lines);
    return times(times(scale, scale), rest);
  }
};

// A zero point in sixteenths; 0 for NaN.
__device__ __forceinline__ uint32_t stored_zero(float zero) {
  return uint32_t(fminf(fmaxf(rintf(over(zero, ZERO_STEP)), 0.f), 255.f));
}

// What a trial comes to.
struct Attempt {
  float scale, error;
  uint32_t zero;

  // Nothing tried: all weights are zero.
  static __device__ __forceinline__ Attempt none(uint32_t zero) { return {0.f, infinity(), zero}; }

  // By a trial whose zero point goes to `zero`. One that is never better has an infinite error. An infinite scale stays.
  template <bool F16> static __device__ __forceinline__ Attempt of(const Trial& trial, uint32_t zero) {
    Attempt out = none(zero);
    if (trial.sums.vv == 0.f || !is_finite(trial.scale)) return out;
    const float shift = minus(times(float(zero), ZERO_STEP), trial.zero), scale = trial.best_scale(shift);
    out.scale = F16 ? in_f16(scale) : scale;
    const float error = trial.error(out.scale, shift);
    if (error < out.error) out.error = error;
    return out;
  }

  __device__ __forceinline__ Rounding rounding(float low, float high) const {
    return {over(1.f, scale), times(float(zero), ZERO_STEP), low, high};
  }
};

// The clip-th of the ranges without zero points: codes reach `below` their zero.
__device__ __forceinline__ float clipped_inverse(float amax, float below, int clip) {
  return over(below, times(amax, minus(1.f, times(float(clip), CLIP_STEP))));
}

// The index-th pair of ends with zero points.
__device__ __forceinline__ Rounding between_ends(float bottom, float top, int index) {
  const float low = times(bottom, minus(1.f, times(times(float(index / ENDS), 2.f), CLIP_STEP)));
  const float high = times(top, minus(1.f, times(times(float(index % ENDS), 2.f), CLIP_STEP)));
  const float inverse = over(15.f, minus(high, low));
  return {inverse, times(-low, inverse), 0.f, 15.f};
}

// A scale `step` steps away from the best.
__device__ __forceinline__ Rounding near(const Attempt& best, int step) {
  const float scale = times(best.scale, plus(1.f, times(float(step), NEAR_STEP)));
  return {over(1.f, scale), times(float(best.zero), ZERO_STEP), 0.f, 15.f};
}

// The code of a weight, by what is stored.
__device__ __forceinline__ int8_t code_of(float w, const Rounding& by) {
  return int8_t(int(is_finite(by.inverse) ? by.code(w) : by.zero));
}

// The code of e4m3 nearest to a finite number, ties to even, as quant::e4m3 has it.
__device__ __forceinline__ uint32_t e4m3_of(float value) {
  constexpr float SMALL = 16384.f;
  const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  const float least = fminf(__uint_as_float(magnitude), 1.f);
  const uint32_t small = __float_as_uint(plus(least, SMALL)) - __float_as_uint(SMALL);
  const uint32_t most = __float_as_uint(E4M3_MAX);
  const uint32_t rounded = (magnitude < most ? magnitude : most) + 0x7ffffu + (magnitude >> 20 & 1);
  const uint32_t normal = (rounded >> 20) - (120u << 3);
  return (bits >> 24 & 0x80u) | (magnitude < (127u - 6u) << 23 ? small : normal);
}

// The value of a code of e4m3 that is not NaN and has no sign.
__device__ __forceinline__ float e4m3_value(uint32_t code) {
  return times(__uint_as_float(code << 20), __uint_as_float((127u + 120u) << 23));
}

// The code of e2m1 nearest to a number, ties to even.
__device__ __forceinline__ uint32_t e2m1_of(float value) {
  const float m = fabsf(value);
  const uint32_t code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.f);
  return code | (__float_as_uint(value) >> 31) << 3;
}

// The code of NF4 nearest to a number, the lower of two.
__device__ __forceinline__ uint32_t nf4_of(float value) {
  uint32_t code = 0;
#pragma unroll
  for (uint32_t next = 1; next < 16; ++next) {
    // Kernels store codes with bits 0 to 2 inverted.
    code += value > times(plus(NF4_VALUES[(next - 1) ^ 7], NF4_VALUES[next ^ 7]), 0.5f);
  }
  return code;
}

}  // namespace fused
