// The next token of each sequence: mask, repeat penalty, temperature, top-k, top-p, min-p and a draw by the
// Gumbel-max trick, or the likeliest token; then what a decode step leaves behind for the next one. A logit that the
// mask does not allow counts as no number.
//
// The logits of a sequence are cut into chunks, of which a block takes some. The last block, by an atomic counter,
// merges the chunks; where the tokens to draw from depend on all logits (top-k, top-p) it finds the threshold by a radix
// select over their distance from the best. Sums are of integers, so the result does not depend on their order.
//
// The highest logit is subtracted before the division by the temperature, which then cannot overflow: that of its chunk
// at first, and its difference from the highest of all when chunks are merged. So a draw does not depend on which block
// has which chunks.
#include "pointwise/logits.cuh"

using namespace fused;

// Philox 4x32-10 (Salmon et al. 2011); the first of its four words.
__device__ uint32_t philox(uint4 counter, uint2 key) {
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
    counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
    key.x += 0x9E3779B9u;
    key.y += 0xBB67AE85u;
  }
  return counter.x;
}

// A standard Gumbel variate for one token of one draw: -ln(-ln(1 - v)), exact where v is small,
// which is where the winners are.
__device__ float gumbel(const SampleSettings& s, uint32_t draw, uint32_t token) {
  const uint32_t bits = philox(make_uint4(token, draw, s.sequence, 0), make_uint2(s.seed_low, s.seed_high));
  const float v = (float(bits) + 0.5f) * 2.3283064365386963e-10f;
  return -logf(-log1pf(-v));
}

// How far a logit is below the highest, over the temperature: at most 0. Equal ones have no distance,
// infinite ones neither.
__device__ __forceinline__ float below(float logit, float top, float inverse_temperature) {
  return logit == top ? 0.f : (logit - top) * inverse_temperature;
}

// How far a score is below the highest, which is 0, in steps of 2^-26; ever the same for equal scores.
__device__ __forceinline__ uint32_t distance(float score) {
  return static_cast<uint32_t>(fminf(-score * 67108864.f, 4294967040.f));
}

constexpr int DIGIT = 11;
constexpr int BINS = 1 << DIGIT;  // two for each thread

// Sums of weights up to 2^27 as halves of 13 and 14 bits, which stay below 2^32 for 2^18 tokens and
// are added by the native atomics.
struct Bins {
  uint32_t low[BINS], high[BINS];
  unsigned long long warps[WARPS];
  unsigned long long target;
  uint32_t found;

  __device__ unsigned long long sum(int bin) const {
    return low[bin] + (static_cast<unsigned long long>(high[bin]) << 14);
  }
};

// The logits of a sequence, behind the penalty, as scores: what is drawn from.
struct Scores {
  const float* logits;
  uint32_t vocab;
  float top, inverse_temperature;

  __device__ __forceinline__ float operator[](uint32_t i) const {
    return below(__ldcg(logits + i), top, inverse_temperature);
  }
};

// Counts the weights of the tokens whose distance is at most `limit` and begins with `prefix`, by
// the digit of their distance at `shift`: one each, or their probability in fixed point.
__device__ void tally(const Scores& scores, uint32_t limit, bool count, uint32_t prefix, int shift, Bins& bins) {
  for (int i = threadIdx.x; i < BINS; i += SAMPLE_THREADS) bins.low[i] = bins.high[i] = 0;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < scores.vocab; i += SAMPLE_THREADS) {
    const float score = scores[i];
    const uint32_t d = distance(score);
    const bool inside = shift + DIGIT >= 32 || (d >> (shift + DIGIT)) == (prefix >> (shift + DIGIT));
    if (isnan(score) || d > limit || !inside) continue;
    const uint32_t bin = (d >> shift) & (BINS - 1);
    if (count) {
      atomicAdd(&bins.low[bin], 1);
    } else {
      const uint32_t mass = __float2uint_rn(expf(score) * 134217728.f);
      atomicAdd(&bins.low[bin], mass & 16383);
      if (mass >> 14) atomicAdd(&bins.high[bin], mass >> 14);
    }
  }
  __syncthreads();
}

// The least distance t such that the weights of the tokens up to t, of those within `limit`, reach
// the target: `amount` tokens, or the share `amount` of their probability.
__device__ uint32_t select(const Scores& scores, uint32_t limit, bool count, double amount, Bins& bins) {
  const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  uint32_t prefix = 0;
  // 22 is a multiple of the digit's width; the highest digit has ten bits that can be set.
  for (int shift = 2 * DIGIT; shift >= 0; shift -= DIGIT) {
    tally(scores, limit, count, prefix, shift, bins);
    const unsigned long long first = bins.sum(2 * threadIdx.x), second = bins.sum(2 * threadIdx.x + 1);
    unsigned long long until = first + second;  // of all bins up to this thread's
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
      const unsigned long long before = __shfl_up_sync(FULL, until, offset);
      if (lane >= offset) until += before;
    }
    if (lane == WARP - 1) bins.warps[warp] = until;
    __syncthreads();
    for (int i = 0; i < warp; ++i) until += bins.warps[i];
    if (shift == 2 * DIGIT && threadIdx.x == SAMPLE_THREADS - 1) {
      bins.found = UINT32_MAX;  // stays if nothing has any weight: all are kept
      const double wanted = ceil(count ? amount : amount * double(until));
      bins.target = max(1ull, min(until, static_cast<unsigned long long>(wanted)));
    }
    __syncthreads();
    const unsigned long long target = bins.target, before = until - first - second;
    __syncthreads();
    if (before < target && target <= until) {
      const bool in_first = target <= before + first;
      bins.found = prefix | (uint32_t(2 * threadIdx.x + (in_first ? 0 : 1)) << shift);
      bins.target = target - before - (in_first ? 0 : first);
    }
    __syncthreads();
    prefix = bins.found;
  }
  return prefix;
}

// The draw among the tokens that top-k, top-p and min-p keep, in the first warp.
__device__ Best restricted(const SampleParams& p, const SampleSettings& s, uint32_t b, uint32_t draw, float top,
                           Bins& bins, Best* scratch) {
  const Scores scores = {p.scores + uint64_t(b) * p.vocab, p.vocab, top, s.inverse_temperature};
  uint32_t limit = UINT32_MAX;
  if (s.top_k > 0 && s.top_k < p.vocab) limit = select(scores, limit, true, s.top_k, bins);
  if (s.top_p < 1.f) limit = min(limit, select(scores, limit, false, s.top_p, bins));
  limit = min(limit, s.limit);
  Best best = {-INFINITY, NO_TOKEN};
  for (uint32_t i = threadIdx.x; i < p.vocab; i += SAMPLE_THREADS) {
    const float score = scores[i];
    if (distance(score) <= limit) best = better(best, {score + gumbel(s, draw, i), i});
  }
  return block_best(best, scratch);
}

// What the next step finds: the token at `position`, and the host's copy of it if there is a `step` to count.
__device__ void write_result(const SampleParams& p, uint32_t b, uint32_t token, uint32_t position, uint32_t step) {
  p.token[b] = token;
  p.position[b] = position;
  if (p.history) p.history[uint64_t(b) * p.history_slots + position % p.history_slots] = token;
  if (!p.step) return;
  p.step[b] = step + 1;
  if (!p.mailbox) return;
  // One 8-byte store: the host sees all of it or nothing.
  volatile unsigned long long* slot = p.mailbox + uint64_t(step % p.mail_slots) * gridDim.y + b;
  *slot = (static_cast<unsigned long long>(step + 1) << 32) | token;
}

// Calls `take` with the place and the logit of each of a thread's among those of a row from `begin` to `end`.
template <class Take>
__device__ __forceinline__ void each_logit(const SampleParams& p, uint64_t row, uint32_t begin, uint32_t end, Take take) {
  if (!p.vectors || p.dtype != 0) {
    for (uint32_t i = begin + threadIdx.x; i < end; i += SAMPLE_THREADS) take(i, logit(p.logits, p.dtype, row + i));
    return;
  }
  constexpr int AT_ONCE = 4;
  const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(p.logits) + row);
  for (uint32_t i = begin / 4 + threadIdx.x; i < end / 4; i += AT_ONCE * SAMPLE_THREADS) {
    float4 v[AT_ONCE];
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      if (i + u * SAMPLE_THREADS < end / 4) v[u] = __ldcg(from + i + u * SAMPLE_THREADS);
    }
#pragma unroll
    for (int u = 0; u < AT_ONCE; ++u) {
      const uint32_t at = 4 * (i + u * SAMPLE_THREADS);
      if (at < end) take(at, v[u].x), take(at + 1, v[u].y), take(at + 2, v[u].z), take(at + 3, v[u].w);
    }
  }
}

// One thread: what a chunk comes to, its best score being measured from its highest logit.
__device__ __forceinline__ void put(const SampleParams& p, uint32_t b, uint32_t chunk, float top, Best best) {
  p.partial[uint64_t(b) * p.chunks + chunk] = make_float4(top, best.score, __uint_as_float(best.token), 0.f);
}

// The first warp, whose first thread has put the block's chunks: whether this was the last block to do so. Then `best`
// becomes that of all chunks, measured from the highest logit of all where there is a temperature.
__device__ bool gather(const SampleParams& p, uint32_t b, float inverse_temperature, Best& best) {
  const uint32_t lane = threadIdx.x;
  const float4* partial = p.partial + uint64_t(b) * p.chunks;
  bool last = false;
  if (lane == 0) {
    // The block's scores too: a barrier lies between them and this thread.
    __threadfence();
    last = atomicAdd(&p.arrived[b], 1) == gridDim.x - 1;
  }
  last = __shfl_sync(FULL, last, 0);
  if (!last) return false;
  __threadfence();
  float top = 0.f;
  if (inverse_temperature != 0.f) {
    top = -INFINITY;
    for (uint32_t i = lane; i < p.chunks; i += WARP) top = fmaxf(top, __ldcg(partial + i).x);
    top = warp_max(top);
  }
  best = {-INFINITY, NO_TOKEN};
  for (uint32_t i = lane; i < p.chunks; i += WARP) {
    const float4 one = __ldcg(partial + i);
    const float lacking = inverse_temperature != 0.f ? below(one.x, top, inverse_temperature) : 0.f;
    best = better(best, {one.y + lacking, __float_as_uint(one.z)});
  }
  best = warp_best(best);
  if (lane == 0) p.arrived[b] = 0;
  return true;
}

// A sequence's sampling settings, and the position whose token is drawn.
struct Draw {
  SampleSettings s;
  uint32_t b;
  const uint32_t* mask;  // of the sequence, if it has one
  uint32_t number;       // the place of the token that is drawn
  bool all, drawn, penalised;

  // The logit of token i, if it may be drawn.
  __device__ __forceinline__ float allowed(uint32_t i, float logit) const {
    return !mask || (mask[i / 32] >> (i % 32) & 1) ? logit : NAN;
  }
};

// The tokens of the history among `begin` to `end`, penalised from the logit itself, so that a token seen twice is
// penalised once.
__device__ __forceinline__ void penalise(const SampleParams& p, const Draw& d, uint32_t begin, uint32_t end,
                                         float* chunk) {
  const uint32_t known = min(min(d.s.last_n, p.history_slots), d.number);
  for (uint32_t i = threadIdx.x; i < known; i += SAMPLE_THREADS) {
    const uint32_t t = p.history[uint64_t(d.b) * p.history_slots + (d.number - 1 - i) % p.history_slots];
    if (t >= begin && t < end) {
      const float v = d.allowed(t, logit(p.logits, p.dtype, uint64_t(d.b) * p.vocab + t));
      chunk[t - begin] = v >= 0.f ? v / d.s.penalty : v * d.s.penalty;
    }
  }
}

// A chunk that is not only looked through for its highest logit.
__device__ void take_chunk(const SampleParams& p, const Draw& d, uint32_t number, float* chunk, Best* scratch,
                           Best& found) {
  const uint32_t begin = number * p.chunk, end = min(begin + p.chunk, p.vocab);
  const uint64_t row = uint64_t(d.b) * p.vocab;
  each_logit(p, row, begin, end, [&](uint32_t i, float v) { chunk[i - begin] = d.allowed(i, v); });
  __syncthreads();
  if (d.penalised) {
    penalise(p, d, begin, end, chunk);
    __syncthreads();
  }
  Best best = {-INFINITY, NO_TOKEN};
  for (uint32_t i = begin + threadIdx.x; i < end; i += SAMPLE_THREADS) {
    const float score = chunk[i - begin];
    if (!d.all) p.scores[row + i] = score;
    best = better(best, {score, i});
  }
  best = block_best(best, scratch);
  float top = 0.f;
  if (d.drawn) {
    if (threadIdx.x == 0) found = best;
    __syncthreads();
    top = found.score;
    best = {-INFINITY, NO_TOKEN};
    for (uint32_t i = begin + threadIdx.x; i < end; i += SAMPLE_THREADS) {
      best = better(best, {below(chunk[i - begin], top, d.s.inverse_temperature) + gumbel(d.s, d.number, i), i});
    }
    best = block_best(best, scratch);
  }
  if (threadIdx.x == 0) put(p, d.b, number, top, best);
  // The chunk and the scratch are written anew.
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS) sample(const __grid_constant__ SampleParams p) {
  extern __shared__ float chunk[];
  __shared__ Best scratch[WARPS];
  __shared__ Bins bins;
  __shared__ bool last;
  __shared__ Best found;
  const uint32_t b = blockIdx.y;
  pdl_launch();
  Draw d = {p.settings[b], b};
  const bool greedy = d.s.inverse_temperature == 0.f;
  if (p.mask && d.s.masked) d.mask = p.mask + uint64_t(b) * ((p.vocab + 31) / 32);
  const bool narrowed = (d.s.top_k > 0 && d.s.top_k < p.vocab) || d.s.top_p < 1.f || d.s.limit != UINT32_MAX;
  d.all = greedy || !narrowed;
  d.drawn = d.all && !greedy;
  d.penalised = p.history && d.s.penalty != 1.f;
  pdl_wait();
  d.number = p.position[b] + 1;
  const uint32_t step = p.step ? p.step[b] : 0;
  const uint32_t first = blockIdx.x * p.of_block, behind = min(first + p.of_block, p.chunks);
  Best best = {-INFINITY, NO_TOKEN};
  if (greedy && !d.penalised) {
    const uint32_t end = min(behind * p.chunk, p.vocab);
    each_logit(p, uint64_t(b) * p.vocab, first * p.chunk, end,
               [&](uint32_t i, float v) { best = better(best, {d.allowed(i, v), i}); });
    best = block_best(best, scratch);
    // All of the block's chunks come to one.
    if (threadIdx.x == 0) {
      for (uint32_t i = first; i < behind; ++i) put(p, b, i, 0.f, i == first ? best : Best{-INFINITY, NO_TOKEN});
    }
  } else {
    for (uint32_t i = first; i < behind; ++i) take_chunk(p, d, i, chunk, scratch, found);
  }
  bool gathered = false;
  if (threadIdx.x < WARP) gathered = gather(p, b, d.drawn ? d.s.inverse_temperature : 0.f, best);
  if (!d.all) {
    if (threadIdx.x == 0) last = gathered, found = best;
    __syncthreads();
    if (!last) return;
    // Nothing is drawn where no logit is a number.
    if (found.token != NO_TOKEN) best = restricted(p, d.s, b, d.number, found.score, bins, scratch);
  }
  if (gathered && threadIdx.x == 0) write_result(p, b, best.token, d.number, step);
}
