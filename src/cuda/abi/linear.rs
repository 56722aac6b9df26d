//! Products: few rows of x with weights of any format, many rows in int8.

use super::{Char, Const, Count, Mut, TensorMap, Void, WARP};

abi! {
    /// Numbers of norms.
    const NORM_NONE: Count<i32> = 0;
    const NORM_RMS: Count<i32> = 1;
    const NORM_LAYER: Count<i32> = 2;

    /// Numbers of activations.
    const ACT_NONE: Count<i32> = 0;
    const ACT_SILU: Count<i32> = 1;
    const ACT_GELU: Count<i32> = 2;
    const ACT_GELU_TANH: Count<i32> = 3;
    const ACT_RELU: Count<i32> = 4;
    const ACT_RELU2: Count<i32> = 5;
    /// The first of those where one half of the outputs gates the other.
    const ACT_SWIGLU: Count<i32> = 6;
    const ACT_GEGLU: Count<i32> = 7;
    const ACT_GEGLU_TANH: Count<i32> = 8;
    const ACT_RELU2_GLU: Count<i32> = 9;

    /// Matrices of a launch.
    const MAX_WEIGHTS: Count<i32> = 3;

    /// Threads of a block of few rows of x, at most.
    const GEMV_WARPS: Count<i32> = 8;
    const GEMV_THREADS: Count<i32> = GEMV_WARPS * WARP;

    /// Rows of quantized weights that a warp computes together, and rows of x that meet them.
    const N_TILE: Count<i32> = 16;
    const N_TILE_MAX_M: Count<i32> = 4;

    /// Padding of a row of x in shared memory, in bytes, by the weights that it is multiplied with, so that lanes
    /// which read several rows have no bank conflicts.
    const INT8_PADDING: Count<u32> = 80;
    const INT4_PADDING: Count<u32> = 64;
    const TERNARY_PADDING: Count<u32> = 32;

    /// One of up to three weights of the same k, side by side in the output.
    struct Matrix {
        /// Values, GGUF blocks or codes.
        data: Const<Void>,
        /// Of codes: f32 for each row, or f16 for each group.
        scales: Const<Void>,
        /// Its first row among all rows; past them for a weight that is not there.
        first: u32,
        /// Of codes: how many scales of 2 bytes lie in front of the zero points; 0 without zero points. Of FP8 in
        /// blocks, not 0 if rows have scales of their own. Of NVFP4 the same in front of the scales of 16 values.
        zeros: u32,
    }

    /// What happens to the rows of x before a product.
    #[derive(Default)]
    struct Prologue {
        /// `[m, k]`
        x: Const<Void>,
        /// `[k]`, null without a norm.
        weight: Const<Void>,
        /// `[k]` or null; layer norm only.
        bias: Const<Void>,
        eps: f32,
        norm: i32,
        /// Of x and of the norm's weight and bias.
        dtype: i32,
        /// Whether rows are quantized to int8 with one scale each (largest magnitude over 127), in kernels that support it.
        rounds: i32,
    }

    /// What happens to an output before it is written: act(y + bias) + residuals.
    #[derive(Default)]
    struct Epilogue {
        /// `[rows]` or null.
        bias: Const<Void>,
        /// `[m, width]`, each row `stride` elements after the one before, or null.
        residuals: [Const<Void>; 2],
        /// Likewise.
        out: Mut<Void>,
        stride: u64,
        activation: i32,
        /// Of bias and residuals.
        dtype: i32,
        /// f32 for logits.
        out_dtype: i32,
    }

    /// A product of few rows of x.
    struct Gemv {
        weights: [Matrix; MAX_WEIGHTS],
        prologue: Prologue,
        epilogue: Epilogue,
        /// Rows of x, at most the kernel's M.
        m: u32,
        k: u32,
        /// Of all weights.
        rows: u32,
        /// Outputs: rows, or half of them if one half gates the other.
        width: u32,
        /// Warps that share an N tile: a power of two that divides the block's warps.
        split_k: u32,
        /// Of codes: scales of each 128 values of a row; 0 if a row has one.
        groups: u32,
        /// Of dense weights.
        weight_dtype: i32,
        /// Of the pipeline, in the kernels that have one.
        stages: u32,
    }

    /// The pipelined GEMV: values of a K block, bytes of a stage, which is a K block of two rows of weights, and
    /// packs of 16 bytes of x that a thread has at once.
    const PIPELINED_K_BLOCK: Count<i32> = 256;
    const PIPELINED_STAGE: Count<i32> = 2 * PIPELINED_K_BLOCK * 2;
    const PIPELINED_PACKS: Count<i32> = 8;

    /// Keys and values that the next kernel of a chain reads, to be fetched into the L2 cache: those of
    /// `planes` heads, in front of the position.
    #[derive(Default)]
    struct Fetch {
        /// `[planes][plane]`
        k: Const<Char>,
        v: Const<Char>,
        /// Null: nothing is fetched.
        position: Const<u32>,
        planes: u32,
        /// Bytes.
        plane: u32,
        /// Bytes of a token.
        row: u32,
    }

    /// A dense matrix `[rows, k - border]` beside the only one, which is `[rows, border]` then.
    #[derive(Default)]
    struct Second {
        data: Const<Void>,
        border: u32,
    }

    /// A GEMV whose dense weights stream through pipelines.
    struct GemvPipelinedParams {
        product: Gemv,
        /// Of the kernels for two matrices side by side.
        second: Second,
        fetch: Fetch,
    }

    /// The GEMV for Hopper with packed weights: K blocks of a stage, stages at most, and such stages of a row of x
    /// that a warp has in registers (owned operands).
    const GEMV_SM90_K_BLOCKS: Count<u32> = 16;
    const GEMV_SM90_MAX_STAGES: Count<u32> = 16;
    const GEMV_SM90_OWNED: Count<i32> = 8;

    /// Warps of the skinny GEMM that write outputs, and its threads: with these, those that multiply and a warp that
    /// brings weights.
    const SKINNY_EPILOGUE_WARPS: Count<i32> = 2;
    const SKINNY_THREADS: Count<i32> = WARP * (GEMV_WARPS + 1 + SKINNY_EPILOGUE_WARPS);
    /// Bytes behind each row's sums of x in its shared memory: lanes that read several rows have no bank conflicts.
    const SKINNY_SUMS_PADDING: Count<u32> = 32;

    /// Up to 32 rows of x, all in shared memory, and packed weights.
    struct GemmSkinnyParams {
        /// Without prologue; its x are `rows` rows of bf16.
        product: Gemv,
        /// Of operand B.
        rows: u32,
        /// Rows of operand B for each token: 1 or 2.
        parts: u32,
        /// Whether 16-byte accesses fit bias, residuals and outputs.
        vectors: i32,
        /// Blocks (CTAs) of a cluster, which share K: not more than there are tokens.
        cluster_size: u32,
    }

    /// Rows of x of a launch for up to 16 of them, warps of a block, K blocks whose x a warp has at a time, and
    /// N tiles of a batch.
    const M16_ROWS: Count<i32> = 16;
    const M16_WARPS: Count<i32> = 8;
    const M16_DEPTH: Count<i32> = 2;
    const M16_BATCH: Count<i32> = 4;

    /// Up to 16 rows of x.
    struct GemmM16Params {
        /// Without a norm; x is bf16.
        product: Gemv,
        /// Blocks (CTAs) of a cluster, which share K.
        cluster_size: u32,
    }

    /// The same where k is long.
    struct GemmM16TmaParams {
        /// `[k / 64][m][64]`, of which a box is `[4][16][64]`.
        x: TensorMap,
        m16: GemmM16Params,
    }

    /// Tokens of a tile of the GEMM for quantized weights on Hopper, and stages of x. A tile has 128 output
    /// channels.
    table GEMM_WNA16 of GemmWna16Form (tokens: usize, stages: usize) =
        [(8, 6), (16, 6), (32, 6), (64, 4), (128, 4), (192, 3), (256, 3)];
    const GEMM_WNA16_CHANNELS: Count<i32> = 128;
    /// Tokens of a tile up to which groups are scaled as sums.
    const GEMM_WNA16_SUMS_TOKENS: Count<i32> = 32;
    /// Tokens of a tile up to which a block has no producer of its own, and a multiprocessor two blocks.
    const GEMM_WNA16_SMALL_TOKENS: Count<i32> = 64;
    /// Tokens whose sums are in shared memory together, of a tile that no other block shares.
    const GEMM_WNA16_STAGED_TOKENS: Count<i32> = 64;

    /// Quantized weights and 16-bit activations, any number of tokens.
    struct GemmWna16Params {
        /// Operand B: `parts` rows of each token, in the order of the weights' format. A box is `[64][T]`, or
        /// `[64][T / 2]` where two blocks share it.
        x: TensorMap,
        /// `[k / 32][rows of operand B]` of f32: its sums over 32 values. A box is `[T][4]`.
        x_sums: TensorMap,
        /// Without prologue.
        product: Gemv,
        m_tiles: u32,
        /// What a cluster has that shares no K: tiles of channels by tokens, for each of its `sharing` blocks, or blocks
        /// of K of all such tiles (stream-K). The first `larger_shares` clusters have one more.
        share: u32,
        larger_shares: u32,
        split_k: u32,
        /// Blocks of a cluster, side by side in N, which share x: 1 or 2.
        sharing: u32,
        /// Rows of operand B for each token: 1 or 2.
        parts: u32,
        /// Whether 16-byte accesses fit bias, residuals and outputs.
        vectors: i32,
        /// Of stream-K, or null: `[blocks][8 warps][T / 8][32 lanes][4]`, sums that a block leaves for a later one.
        partial_sums: Mut<f32>,
        /// `[blocks][8 warps]`, whether they are there: 0 before the launch.
        flags: Mut<u32>,
    }

    /// Blocks of the kernel for small dense matrices: K at most, N tiles of 8 output channels, and rows of x.
    table GEMV_DENSE_LATENCY of GemvDenseLatencyForm (k: usize, n_tiles: usize, rows: usize) = [
        (1024, 1, 8), (1536, 1, 8), (1024, 3, 8), (768, 1, 16), (1536, 1, 16), (768, 3, 16),
        (768, 1, 32), (768, 2, 32), (768, 3, 32), (768, 6, 32), (1536, 1, 32), (1536, 2, 32),
        (1024, 4, 8), (1024, 6, 8), (2048, 1, 8), (2048, 2, 8), (2048, 3, 8), (3072, 1, 8),
        (1024, 4, 16), (1024, 6, 16), (2048, 1, 16), (2048, 2, 16), (2048, 3, 16), (3072, 1, 16),
        (1024, 4, 32), (1024, 6, 32), (2048, 1, 32), (1536, 3, 32), (3072, 2, 16)
    ];

    /// 16-byte pieces of weights and x that a lane of these blocks has in registers, up to which there is room for those of a
    /// norm's weights, too.
    const GEMV_DENSE_LATENCY_NORMED: Count<i32> = 40;

    /// Tiles of the GEMM for dense weights on Hopper: output channels, tokens, and stages of 64 values of K, with which
    /// a multiprocessor has room for two blocks.
    table GEMM_DENSE_SM90 of GemmDenseForm (channels: usize, tokens: usize, stages: usize) = [
        (64, 8, 10), (64, 16, 10), (64, 32, 8), (64, 64, 6), (64, 128, 4), (128, 8, 6), (128, 16, 6),
        (128, 32, 5), (128, 64, 4), (128, 128, 3)
    ];

    /// Dense weights and x of one 16-bit type.
    struct GemmDenseParams {
        /// Boxes of `[64][tokens]`.
        x: TensorMap,
        /// Of each matrix, boxes of `[64][channels]`, or of half as many channels.
        weights: [TensorMap; MAX_WEIGHTS],
        /// Its prologue is for `gemm_dense_normed_sm90` alone: elsewhere a preceding kernel norms.
        product: Gemv,
        m_tiles: u32,
        /// Of a tile: a multiple of 8, up to those that the kernel has room for.
        tokens: u32,
        /// Blocks of a cluster, which share K.
        split_k: u32,
        /// Whether the halves of a tile's channels are not side by side in one matrix.
        halves: i32,
        /// Whether 16-byte accesses fit bias, residuals and outputs.
        vectors: i32,
    }

    /// Warps of a block of the GEMM for quantized weights and few tokens from Ampere on, at most.
    const GEMM_WNA16_MMA_MAX_WARPS: Count<i32> = 16;

    /// Quantized weights and few rows of bf16 x.
    struct GemmWna16MmaParams {
        /// Without prologue; its x are `rows` rows of bf16, and `split_k` warps of a block share K.
        product: Gemv,
        /// Of operand B.
        rows: u32,
        m_tiles: u32,
        /// Blocks of a cluster, which share K.
        cluster_size: u32,
        /// Log2 of the K blocks of x that are in shared memory together, twice: a multiple of the warps that share K.
        slab_log2: u32,
        /// Rows of operand B for each token: 1 or 2.
        parts: u32,
        /// Whether 16-byte accesses fit bias, residuals and outputs.
        vectors: i32,
    }

    const SUMS_EPILOGUE_THREADS: Count<i32> = 256;

    /// What the library leaves to do behind a product of many rows.
    struct SumsEpilogueParams {
        /// `[m, rows]`
        sums: Const<f32>,
        epilogue: Epilogue,
        m: u32,
        rows: u32,
        /// Rows, or half of them if one half gates the other.
        width: u32,
        /// Whether width is a multiple of 4 and all addresses fit 4 elements.
        vectors: i32,
    }

    struct WidenParams {
        from: Const<Void>,
        to: Mut<f32>,
        count: u64,
    }

    /// Rows of x to int8, with a scale for each, to e4m3, or to 16-bit whole numbers.
    struct QuantizeRowsParams {
        prologue: Prologue,
        /// `[rows, pitch]`, with zeros past the width; of 16 bits `[rows, 2, pitch]`, upper and lower parts.
        codes: Mut<i8>,
        /// `[rows]`, or `[width / 128][rows]`, of e4m3; of 16 bits rows as `W8A16_UNIT` has them, as many as fill units.
        scales: Mut<f32>,
        rows: u32,
        width: u32,
        pitch: u32,
        /// Of one row.
        warps: u32,
        /// Whether all addresses and the width are multiples of 16 bytes.
        vectors: i32,
    }

    /// K block of int8 operands on Hopper, in values.
    const W8A8_BLOCK_K: Count<i32> = 128;
    /// Where the first stage begins.
    const W8A8_ALIGNMENT: Count<u32> = 1024;
    /// Rows of x of a tile.
    const W8A8_ROWS: Count<i32> = 128;
    /// Columns whose outputs a warp stages at a time, and bytes from one row of them to the next: words that
    /// are written together meet no bank twice.
    const W8A8_STAGED: Count<i32> = 64;
    const W8A8_STAGED_PITCH: Count<i32> = 2 * W8A8_STAGED + 16;

    /// One of up to three weights in int8 or e4m3 of the same k, side by side in the output.
    struct W8A8Weights {
        /// `[rows, k]`, as `Int8` or `Fp8` of formats/packed.cuh lays them out.
        codes: Const<i8>,
        /// `[rows]`, or as `Fp8` has those of blocks.
        scales: Const<f32>,
        rows: u32,
        /// Its first among the outputs.
        column: u32,
        /// Its first; past them for a weight that is not there.
        tile: u32,
        /// Of FP8 in blocks: whether rows have scales of their own.
        own_scales: u32,
    }

    /// A product by integers. Rows of all weights, and the epilogue's rows, are multiples of 8 and begin at
    /// 16 bytes.
    struct W8A8Product {
        /// `[m, k]`
        x: Const<i8>,
        /// `[m]`, or `[k / 128][m]`, of e4m3.
        x_scales: Const<f32>,
        weights: [W8A8Weights; MAX_WEIGHTS],
        epilogue: Epilogue,
        m: u32,
        /// A multiple of 16: zeros have been added.
        k: u32,
        /// Outputs.
        width: u32,
        m_tiles: u32,
        n_tiles: u32,
        /// Tiles of m that are taken together.
        section: u32,
        /// Where gates multiply: whose rows those are,
        gated_part: u32,
        /// and the first of them.
        gated_row: u32,
    }

    /// The forms for Hopper: rows of W of a tile, blocks that share them, stages.
    table W8A8_SM90 of W8A8Sm90 (columns: usize, cluster: usize, stages: usize) =
        [(128, 1, 6), (128, 2, 6), (256, 2, 4)];
    const W8A8_SM90_THREADS: Count<i32> = 384;

    struct W8A8Sm90Params {
        x: TensorMap,
        weights: [TensorMap; MAX_WEIGHTS],
        product: W8A8Product,
    }

    /// Stages of W at most, where a launch makes int8 of x itself.
    const W8A8_CLUSTER_MAX_STAGES: Count<i32> = 12;

    /// The forms that quantize x themselves: rows of x and of W of a block, warpgroups that multiply, those of them
    /// that lie side by side in W's rows, producer warps that quantize x, whether the last of them loads W instead
    /// of a warp of its own, blocks of a cluster, which share rows of x, lanes for a row of it, packs of 16 values for
    /// each lane at most, whether all of W is in shared memory, and stages of W that are loaded before x.
    table W8A8_CLUSTER of W8A8Cluster (
        rows: usize, columns: usize, warpgroups: usize, beside: usize, producers: usize, loads_w: bool, cluster: usize,
        lanes: usize, packs: usize, whole: bool, early: usize
    ) = [
        (64, 64, 1, 1, 8, false, 4, 16, 3, true, 0),
        (64, 128, 2, 2, 8, false, 4, 16, 3, false, 2),
        (128, 192, 2, 1, 8, true, 2, 8, 5, true, 0),
        (48, 64, 1, 1, 8, false, 3, 32, 3, true, 0),
        (64, 144, 1, 1, 11, false, 2, 32, 3, false, 0),
        (64, 192, 2, 2, 11, false, 3, 32, 3, false, 0)
    ];

    struct W8A8ClusterParams {
        /// Tiles of half a warpgroup's rows.
        weights: [TensorMap; MAX_WEIGHTS],
        /// Without x and its scales.
        product: W8A8Product,
        /// `[m, k]` of f16 or bf16.
        x: Const<Void>,
        /// Of W in shared memory.
        stages: u32,
    }
}
