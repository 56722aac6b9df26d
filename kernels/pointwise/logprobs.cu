// The log-probabilities of a token and of the likeliest ones, of each row of logits:
// logit - highest - ln(sum of exp(logit - highest)).
//
// A block has a row. It reads it once, each thread every SAMPLE_THREADS-th logit, for the sum and the thread's best.
// The best of these is the likeliest token; then the warp of the thread that had it looks for that thread's next best,
// and so on: a row is read once, and a SAMPLE_THREADS-th part of it again for each token that is listed.
#include "pointwise/logits.cuh"

using namespace fused;

// The highest of some logits, and the sum of their exponentials over that of the highest.
struct Sum {
  float top, sum;

  // 1 for the highest itself, also if it is infinite.
  static __device__ __forceinline__ float share(float logit, float top) {
    return logit == top ? 1.f : expf(logit - top);
  }

  __device__ __forceinline__ void add(Sum other) {
    const float both = fmaxf(top, other.top);
    sum = sum * share(top, both) + other.sum * share(other.top, both);
    top = both;
  }

  __device__ __forceinline__ float logprob(float logit) const {
    return (logit == top ? 0.f : logit - top) - logf(sum);
  }
};

__device__ Sum warp_total(Sum own) {
#pragma unroll
  for (int offset = WARP / 2; offset > 0; offset /= 2) {
    own.add({__shfl_xor_sync(FULL, own.top, offset), __shfl_xor_sync(FULL, own.sum, offset)});
  }
  return own;
}

// The best of the tokens of thread `owner` that come behind `won`, in a warp.
__device__ Best next_of(const LogprobsParams& p, uint64_t row, uint32_t owner, Best won) {
  Best next = {-INFINITY, NO_TOKEN};
  const uint32_t lane = threadIdx.x % WARP;
  for (uint64_t i = owner + lane * SAMPLE_THREADS; i < p.vocab; i += WARP * SAMPLE_THREADS) {
    const Best one = {logit(p.logits, p.dtype, row + i), uint32_t(i)};
    const bool behind = one.score < won.score || (one.score == won.score && one.token > won.token);
    if (behind) next = better(next, one);
  }
  return warp_best(next);
}

extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS) logprobs(const __grid_constant__ LogprobsParams p) {
  __shared__ Best scratch[WARPS];
  __shared__ Sum sums[WARPS];
  __shared__ Best found;
  const uint32_t b = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  pdl_launch();
  pdl_wait();
  const uint32_t wanted = p.wanted ? p.wanted[b] : p.top + 1;
  if (wanted == 0) return;
  const uint64_t row = uint64_t(b) * p.vocab;
  Best best = {-INFINITY, NO_TOKEN};
  Sum total = {-INFINITY, 0.f};
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < p.vocab; i += SAMPLE_THREADS) {
    const float v = logit(p.logits, p.dtype, row + i);
    if (isnan(v)) continue;
    best = better(best, {v, i});
    total.add({v, 1.f});
  }
  total = warp_total(total);
  if (lane == 0) sums[warp] = total;
  __syncthreads();
  if (warp == 0) total = warp_total(sums[lane]);
  if (threadIdx.x == 0) {
    const uint32_t token = p.token[b];
    p.logprob[b] = total.logprob(token < p.vocab ? logit(p.logits, p.dtype, row + token) : NAN);
  }
  for (uint32_t n = 0; n < min(wanted - 1, p.width); ++n) {
    const Best first = block_best(best, scratch);
    if (threadIdx.x == 0) {
      found = first;
      const uint64_t at = uint64_t(b) * p.width + n;
      p.top_ids[at] = first.token;
      p.top_logprobs[at] = first.token == NO_TOKEN ? -INFINITY : total.logprob(first.score);
    }
    __syncthreads();
    const Best won = found;
    const uint32_t owner = won.token % SAMPLE_THREADS;
    if (won.token == NO_TOKEN || owner / WARP != warp) continue;
    const Best next = next_of(p, row, owner, won);
    if (lane == owner % WARP) best = next;
  }
}
