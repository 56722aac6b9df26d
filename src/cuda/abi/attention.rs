//! Attention over many queries, and the attention step of decoding.

use super::{Const, Count, Float2, Gemv, Mut, TensorMap, Void};

abi! {
    /// Where the sequences of a batch have their keys and values in pages: a padded table or one in CSR form.
    #[derive(Default)]
    struct KeyPages {
        /// `[sequences, width]` or, in CSR form, `[width]`.
        entries: Const<u32>,
        /// `[sequences + 1]` in CSR form, null otherwise.
        indptr: Const<u32>,
        /// `[sequences]`: tokens of each, or, in CSR form, tokens of its last page.
        lengths: Const<u32>,
        /// Of codes: `[pages, kv_heads, page]` by these strides in elements, from page to page and head to head; null for
        /// floats.
        k_scales: Mut<f32>,
        v_scales: Mut<f32>,
        k_scale_strides: [u64; 2],
        v_scale_strides: [u64; 2],
        /// Entries from one sequence to the next in a padded table.
        step: u32,
        width: u32,
        /// Tokens of a page, and its logarithm where that is a power of two.
        page: u32,
        page_bits: u32,
        pages: u32,
        /// Tokens of a page that are copied at once, on Hopper.
        piece: u32,
    }

    /// The query heads of one key/value head are rows of one matrix: row r stands for query r / group
    /// and head r % group of the key/value head's group, so that keys are read once for all of them.
    struct AttentionParams {
        q: Const<Void>,
        k: Const<Void>,
        v: Const<Void>,
        /// Null without one.
        mask: Const<f32>,
        /// `[heads]`, or null.
        alibi: Const<f32>,
        /// Cumulative lengths of a ragged batch, whose tensors have a batch of one; with a pitch, the lengths alone.
        cu_q: Const<u32>,
        cu_k: Const<u32>,
        pages: KeyPages,
        /// `[batch, queries, heads, dim]` in q's type.
        y: Mut<Void>,
        /// Batch, or page of keys and values, head, token, dim.
        q_strides: [i64; 4],
        k_strides: [i64; 4],
        v_strides: [i64; 4],
        mask_strides: [i64; 4],
        q_type: i32,
        kv_type: i32,
        heads: i32,
        kv_heads: i32,
        queries: i32,
        keys: i32,
        dim: i32,
        /// heads / kv_heads
        group: u32,
        /// 2^32 / group rounded up; 0 for a group of 1.
        group_magic: u32,
        scale: f32,
        /// 0 without one.
        softcap: f32,
        /// Keys after a query's own position that it sees; negative without a limit.
        right: i32,
        /// 0 without one.
        window: i32,
        /// Whether scores need more than a positive factor and a range of keys.
        general: i32,
        /// Rows of a ragged batch.
        total_q: i32,
        total_k: i32,
        /// Rows from a sequence of a padded batch to the next; 0 where lengths are cumulative.
        pitch: i32,
        /// How the tensor-core form divides a block: warps of 16 rows,
        row_warps: i32,
        /// groups of such warps that take every key_groups-th tile of keys,
        key_groups: i32,
        /// tiles of keys and values in flight,
        stages: i32,
        /// and bytes of a group.
        group_bytes: i32,
    }

    /// The forms for tensor cores: head dimension, keys of a tile.
    table ATTENTION_MMA of AttentionMma (dim: usize, keys: usize) =
        [(64, 64), (80, 64), (96, 64), (128, 64), (256, 32)];
    /// Rows of a warp of these.
    const ATTENTION_MMA_ROWS: Count<i32> = 16;
    const ATTENTION_MMA_MAX_WARPS: Count<i32> = 8;

    /// The forms in f32: the head dimension that there is room for, rows of a block, keys of a tile.
    table ATTENTION_PLAIN of AttentionPlain (dim: usize, rows: usize, keys: usize) =
        [(64, 64, 64), (128, 64, 32), (256, 32, 16), (512, 16, 16)];
    const ATTENTION_PLAIN_THREADS: Count<i32> = 256;

    /// Without mask, window and softcap, on Hopper.
    struct AttentionSm90Params {
        /// Dimensions, innermost first: a piece of a row as long as the swizzle, tokens, pieces of a row,
        /// heads, batch. Of keys and values in pages: a piece, 8 tokens, pieces of the rows of all heads, groups of 8
        /// tokens, pages.
        q: TensorMap,
        k: TensorMap,
        v: TensorMap,
        /// `[batch, queries, heads, dim]`
        y: Mut<Void>,
        /// Cumulative lengths of a ragged batch, whose tensors have a batch of one; with a pitch, the lengths alone.
        cu_q: Const<u32>,
        cu_k: Const<u32>,
        pages: KeyPages,
        heads: i32,
        kv_heads: i32,
        queries: i32,
        keys: i32,
        /// Positive; scores times this are in units of log2.
        unit: f32,
        causal: i32,
        /// Of queries.
        tiles: i32,
        /// batch * heads
        columns: i32,
        /// Columns whose keys and values stay in L2 together.
        section: i32,
        /// Rows of a ragged batch.
        total_q: i32,
        total_k: i32,
        /// Rows from a sequence of a padded batch to the next; 0 where lengths are cumulative.
        pitch: i32,
        /// Pieces from a head to the next, in pages.
        k_head_pieces: i32,
        v_head_pieces: i32,
    }

    /// The forms for Hopper: head dimension, consumer warpgroups of 64 rows, keys of a tile, and whether
    /// the warpgroups have the same rows and share the keys out.
    table ATTENTION_SM90 of AttentionSm90 (dim: usize, consumers: usize, keys: usize, share: bool) = [
        (64, 3, 128, false),
        (80, 2, 128, false),
        (96, 2, 128, false),
        (128, 2, 128, false),
        (256, 2, 80, false),
        (64, 2, 128, true),
        (128, 2, 64, true)
    ];

    /// The attention step of decoding.
    struct DecodingParams {
        /// `[B, (heads + 2 kv_heads) head_dim]`
        qkv: Const<Void>,
        /// `[head_dim]`, or null.
        q_norm: Const<Void>,
        k_norm: Const<Void>,
        /// `[positions, pairs]`
        cos: Const<f32>,
        sin: Const<f32>,
        /// `[B, kv_heads, slots, head_dim]`, or pools of pages.
        k_cache: Mut<Void>,
        v_cache: Mut<Void>,
        /// Where keys and values are in pages: `slots` are those of a row of the table, and elements lie so far from
        /// page to page, token to token and head to head.
        pages: KeyPages,
        k_strides: [u64; 3],
        v_strides: [u64; 3],
        /// `[B, heads head_dim]`
        y: Mut<Void>,
        /// What blocks leave: see `Partials`.
        partial: Mut<Float2>,
        /// Zero between launches.
        counters: Mut<u32>,
        /// `[B]`
        position: Const<u32>,
        heads: u32,
        kv_heads: u32,
        head_dim: u32,
        slots: u32,
        positions: u32,
        pairs: u32,
        /// 0 for none.
        window: u32,
        /// Of keys, that a block takes before another joins, at least its warps; or that a cluster does.
        tiles: u32,
        /// Of qkv, the norms and y.
        dtype: i32,
        cache_dtype: i32,
        interleaved: i32,
        /// Whether there is time before the preceding kernel is complete.
        warm_up: i32,
        scale: f32,
        softcap: f32,
        eps: f32,
    }

    /// Query heads of a block at most: the width of an mma.
    const MAX_HEADS: Count<i32> = 8;

    /// The forms for tensor cores: head dimension, keys that a warp takes at once.
    table DECODING_MMA of DecodingMma (dim: usize, keys: usize) =
        [(64, 32), (80, 16), (96, 16), (128, 16), (256, 16)];
    const DECODING_MMA_WARPS: Count<i32> = 8;
    /// Over keys and values in pages, where there are many sequences: two to four blocks for a multiprocessor.
    const DECODING_PAGED_WARPS: Count<i32> = 4;
    /// Keys that a warp of these takes at once.
    const DECODING_PAGED_KEYS: Count<i32> = 16;

    /// The forms where there are many sequences, with a ring of stages in shared memory for each warp: head dimension,
    /// keys of a stage, stages, warps.
    table DECODING_PIPELINED of DecodingPipelined (dim: usize, keys: usize, stages: usize, warps: usize) =
        [(64, 16, 3, 2), (128, 16, 2, 2)];

    /// The forms of one sequence or a few dozen on Hopper, in clusters of blocks: head dimension.
    table DECODING_CLUSTER of DecodingCluster (dim: usize) = [(64), (128)];
    /// A warp takes 16 keys at once.
    const DECODING_CLUSTER_WARPS: Count<i32> = 4;

    /// The forms for everything else: the widest head, the query heads that share a block, warps.
    table DECODING_LANES of DecodingLanes (dim: usize, heads: usize, warps: usize) =
        [(64, 4, 8), (128, 4, 8), (256, 2, 4)];
    /// Keys that a warp of these takes at once.
    const DECODING_LANES_KEYS: Count<i32> = 16;

    /// The attention step of decoding, and a product that does not need it.
    struct DecodeWithGemvParams {
        attention: DecodingParams,
        product: Gemv,
        /// Of attention: the last of the launch.
        blocks: [u32; 3],
        /// Whether the product's x is there, see linear/gemv_dense_pipelined.cuh.
        ready: u32,
    }

    /// The product for queries, keys and values, and the attention step that takes them.
    struct DecodeWithQkvParams {
        /// Whose `qkv` is not read.
        attention: DecodingParams,
        /// Whose output is not written.
        product: Gemv,
    }

    /// The forms with the product in front: head dimension, query heads of a key/value head, K at most.
    table DECODE_WITH_QKV of DecodeWithQkv (dim: usize, group: usize, k: usize) = [(64, 3, 640)];
    /// Blocks of a cluster of these.
    const DECODE_WITH_QKV_BLOCKS: Count<i32> = 8;

    /// The forms with a GEMV: head dimension.
    table DECODE_WITH_GEMV of DecodeWithGemv (dim: usize) = [(64), (80), (96), (128)];
    /// Keys that a warp of these takes at once.
    const DECODE_WITH_GEMV_KEYS: Count<i32> = 16;
}
