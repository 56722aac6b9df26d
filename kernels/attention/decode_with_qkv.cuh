// The products for queries, keys and values and the attention step that takes them (decode_cluster.cuh), in one launch:
// one dependent launch less for each layer of a small model.
//
// The cluster of a key/value head computes that head's rows of the products, an equal share in each block. Weights are
// in registers before x arrives, as in linear/gemv_dense_latency.cuh. The blocks exchange what they have computed
// through distributed shared memory, so that q, k and v never go to memory.
#pragma once

#include "attention/decode_cluster.cuh"
#include "linear/gemv_dense_latency.cuh"

namespace fused {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// Row g of two N tiles of weights, the first operand, times the row x, which is every column of the second.
template <typename T, int K_BLOCKS>
__device__ __forceinline__ void multiply_pair(const uint4 (&above)[K_BLOCKS], const uint4 (&below)[K_BLOCKS],
                                              const uint4 (&x)[K_BLOCKS], float& y_above, float& y_below) {
  float even[4] = {}, odd[4] = {};
#pragma unroll
  for (int s = 0; s < K_BLOCKS; ++s) {
    const uint32_t first[4] = {above[s].x, below[s].x, above[s].y, below[s].y};
    const uint32_t second[4] = {above[s].z, below[s].z, above[s].w, below[s].w};
    mma<T>(even, first, x[s].x, x[s].y);
    mma<T>(odd, second, x[s].z, x[s].w);
  }
  y_above = even[0] + odd[0];
  y_below = even[2] + odd[2];
}

// The rows of q, k and v that a cluster needs: GROUP query heads, their key and their value, all of D values of T.
template <typename T, int D, int GROUP, int K_BLOCKS> struct HeadsProduct {
  static constexpr int WARPS = DECODING_CLUSTER_WARPS, BLOCKS = DECODE_WITH_QKV_BLOCKS;
  static constexpr int ROWS = (GROUP + 2) * D, OWN = ROWS / BLOCKS, N_TILES = OWN / 8;
  static_assert(OWN * BLOCKS == ROWS && N_TILES * 8 == OWN && sizeof(T) == 2);
  // Rows that a thread adds up the warps' sums of, and sends: they belong to one head.
  static constexpr int RUN = 4, RUNS = OWN / RUN;
  // A block's shared memory: each warp's sum of squares and sums of products, and all rows, which the cluster's blocks
  // send. `flash_decoding/cuda/with_qkv.rs` has the same.
  static constexpr int SUMS = 16, HEADS = SUMS + WARPS * OWN * 4;

  const DecodingParams& p;
  const Gemv& product;
  const Place& at;
  const uint32_t rank, shared;
  const int lane, warp, g, t;
  LatencyChunks chunks;
  uint4 w[N_TILES][K_BLOCKS], norm[K_BLOCKS], x[K_BLOCKS];
  float reciprocal_k;

  __device__ HeadsProduct(const DecodeWithQkvParams& params, const Place& place, uint32_t rank_in_cluster,
                          uint32_t memory)
      : p(params.attention), product(params.product), at(place), rank(rank_in_cluster), shared(memory),
        lane(threadIdx.x % WARP), warp(threadIdx.x / WARP), g(lane / 4), t(lane % 4) {
    const uint32_t warp_k_blocks = ((product.k + 31) / 32 + WARPS - 1) / WARPS;
    reciprocal_k = 1.f / product.k;
    chunks = {4 * warp * warp_k_blocks + t, min(product.k / 8, 4 * (warp + 1) * warp_k_blocks)};
  }

  __device__ bool is_normed() const { return product.prologue.norm != NORM_NONE; }

  // Where row r of the block's own is in the matrix of q, k and v.
  __device__ uint32_t row_of(uint32_t r) const {
    r += rank * OWN;
    const uint32_t part = r / D;
    const uint32_t head = part < GROUP ? at.head + part : p.heads + at.kv + (part - GROUP) * p.kv_heads;
    return head * D + r % D;
  }

  __device__ void load_weights() {
#pragma unroll
    for (int tile = 0; tile < N_TILES; ++tile) {
      uint32_t row = row_of(8 * tile + g);
      const Matrix& matrix = matrix_of(product, row);
      const uint4* from = packs_of<T>(matrix.data, row, product.k) + chunks.first;
      load_chunks(chunks, w[tile], [&](int i) { return load_once(from + i); });
    }
    const uint4* from = static_cast<const uint4*>(product.prologue.weight) + chunks.first;
    if (is_normed()) load_chunks(chunks, norm, [&](int i) { return from[i]; });
  }

  __device__ void load_x() {
    const uint4* from = packs_of<T>(product.prologue.x, 0, product.k) + chunks.first;
    load_chunks(chunks, x, [&](int i) { return __ldcg(from + i); });
  }

  // bf16 has the range of f32: there x is multiplied with the norm's weights alone, and its factor with the sums, so that
  // no product waits for it.
  static constexpr bool LATE_FACTOR = std::is_same_v<T, __nv_bfloat16>;

  // This warp's sums to shared memory, and that of the squares of its share of x.
  __device__ void multiply() {
    if (!LATE_FACTOR && is_normed()) norm_x();
    const bool gains = LATE_FACTOR && is_normed();
    if (gains) store_squares();
    float sums[N_TILES + 1];
    uint4 operand[K_BLOCKS];
#pragma unroll
    for (int s = 0; s < K_BLOCKS; ++s) operand[s] = gains ? multiplied(x[s], norm[s]) : x[s];
#pragma unroll
    for (int tile = 0; tile < N_TILES; tile += 2)
      multiply_pair<T>(w[tile], w[min(tile + 1, N_TILES - 1)], operand, sums[tile], sums[tile + 1]);
    if (t != 0) return;
#pragma unroll
    for (int tile = 0; tile < N_TILES; ++tile)
      store_shared(shared + SUMS + (warp * OWN + 8 * tile + g) * 4, __float_as_uint(sums[tile]));
  }

  __device__ static uint4 multiplied(uint4 a, uint4 b) {
    return make_uint4(multiply_pairs<T>(a.x, b.x), multiply_pairs<T>(a.y, b.y), multiply_pairs<T>(a.z, b.z),
                      multiply_pairs<T>(a.w, b.w));
  }

  // RMSNorm of x. Lanes that differ in g alone have the same values.
  __device__ void norm_x() {
    store_squares();
    __syncthreads();
    const float factor = rms_factor();
#pragma unroll
    for (int s = 0; s < K_BLOCKS; ++s) {
      uint4& v = x[s];
      v = make_uint4(scaled<T>(v.x, factor, norm[s].x), scaled<T>(v.y, factor, norm[s].y),
                     scaled<T>(v.z, factor, norm[s].z), scaled<T>(v.w, factor, norm[s].w));
    }
  }

  __device__ void store_squares() const {
    float sum = 0.f;
#pragma unroll
    for (int s = 0; s < K_BLOCKS; ++s) sum += squares_of<T>(x[s]);
    sum += __shfl_xor_sync(FULL, sum, 1);
    sum += __shfl_xor_sync(FULL, sum, 2);
    if (lane == 0) store_shared(shared + 4 * warp, __float_as_uint(sum));
  }

  // What RMSNorm multiplies x with, of all warps' squares.
  __device__ float rms_factor() const {
    static_assert(WARPS == 4);
    const float4 of_warps = load_shared_float4(shared);
    const float total = (of_warps.x + of_warps.y) + (of_warps.z + of_warps.w);
    return rsqrtf(fmaf(total, reciprocal_k, product.prologue.eps));
  }

  // The block's rows, complete and rounded to T, to the first `blocks` of the cluster, whose barriers count the bytes.
  __device__ void send_rows(uint32_t blocks, uint32_t barrier) const {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < RUNS * blocks; i += WARPS * WARP) {
      const uint32_t r = i % RUNS * RUN, to = i / RUNS;
      const float factor = LATE_FACTOR && is_normed() ? rms_factor() : 1.f;
      float4 y = load_shared_float4(shared + SUMS + r * 4);
#pragma unroll
      for (int from = 1; from < WARPS; ++from) {
        const float4 part = load_shared_float4(shared + SUMS + (from * OWN + r) * 4);
        y = make_float4(y.x + part.x, y.y + part.y, y.z + part.z, y.w + part.w);
      }
      y = make_float4(y.x * factor, y.y * factor, y.z * factor, y.w * factor);
      if (product.epilogue.bias) {
        const T* bias = static_cast<const T*>(product.epilogue.bias) + row_of(r);
        y = make_float4(y.x + to_float(bias[0]), y.y + to_float(bias[1]), y.z + to_float(bias[2]),
                        y.w + to_float(bias[3]));
      }
      const Pack<uint32_t, 2> rounded_y = {{pack2<T>(y.x, y.y), pack2<T>(y.z, y.w)}};
      send(in_block(shared + HEADS + (rank * OWN + r) * 2, to), rounded_y, in_block(barrier, to));
    }
  }
};

template <typename T, int D, int GROUP, int K_BLOCKS, bool PAGED>
__device__ __forceinline__ void decode_with_qkv(const DecodeWithQkvParams& p) {
  using Product = HeadsProduct<T, D, GROUP, K_BLOCKS>;
  using Step = ClusterDecoding<T, T, D, PAGED, GROUP>;
  extern __shared__ uint4 memory[];
  pdl_launch();
  // By asm, which the compiler does not repeat: it would read a slow special register at each access.
  uint32_t shared;
  asm volatile("mov.u32 %0, %1;" : "=r"(shared) : "r"(shared_address(memory)));
  const Block here = {blockIdx.x, blockIdx.y, blockIdx.z, gridDim.x, gridDim.y};
  Step step(p.attention, here, Product::BLOCKS, shared);
  Product product(p, step.at, step.rank, step.product());
  const uint32_t rows_come = shared + Step::Memory::SECOND_BARRIER;
  step.projected_rows = product.shared + Product::HEADS;
  if (threadIdx.x == 0) {
    barrier_init(shared, 1);
    barrier_init(rows_come, 1);
    barriers_made();
    barrier_expect(rows_come, Product::ROWS * int(sizeof(T)));
  }
  cluster_arrive();
  // Only long sequences need more clusters than the first.
  bool loaded = step.team == 0;
  if (loaded) product.load_weights();
  const uint32_t* position = p.attention.position + here.z;
  step.prepare(read_position(position));
  if (!loaded && step.blocks_of_team() > 0) {
    product.load_weights();
    loaded = true;
  }
  // The barriers of all blocks are there before any sends.
  cluster_wait();

  pdl_wait();
  product.load_x();
  const uint32_t now = read_position(position);
  // What was fetched is another step's.
  if (now != step.position) step.begin(now);
  const uint32_t blocks = step.blocks_of_team();
  if (blocks == 0) return;
  if (!loaded) product.load_weights();
  product.multiply();
  __syncthreads();
  product.send_rows(blocks, rows_come);
  if (step.idle()) return;
  barrier_wait(rows_come, 0);
  step.take_rows();
  step.attend_and_finish();
}

#endif

}  // namespace fused
