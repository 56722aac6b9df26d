//! Norms, rope, the residual's sum, the embedding and sampling.

use super::{Const, Count, Float4, LongLong, Mut, Void};

abi! {
    /// Rows of a block, if each has one warp.
    const ROWS_OF_BLOCK: Count<i32> = 4;
    /// Warps of a row.
    const MAX_WARPS: Count<i32> = 32;
    /// What a thread keeps of a row in registers: packs of 16 bytes, or elements one by one.
    const KEPT_PACKS: Count<i32> = 4;
    const KEPT_ELEMENTS: Count<i32> = 8;

    struct RmsNormParams {
        x: Const<Void>,
        /// Null without.
        residual: Const<Void>,
        weight: Const<Void>,
        /// With a residual; may be x or the residual itself.
        sum: Mut<Void>,
        y: Mut<Void>,
        rows: u32,
        width: u32,
        /// Of one row.
        warps: u32,
        eps: f32,
        /// Whether all addresses and the width are multiples of 16 bytes.
        vectors: i32,
    }

    struct LayerNormParams {
        x: Const<Void>,
        /// Null without.
        residual: Const<Void>,
        weight: Const<Void>,
        /// Null without.
        bias: Const<Void>,
        /// With a residual; may be x or the residual itself.
        sum: Mut<Void>,
        y: Mut<Void>,
        rows: u32,
        width: u32,
        /// Of one row.
        warps: u32,
        eps: f32,
        /// Whether all addresses and the width are multiples of 16 bytes.
        vectors: i32,
    }

    const RESIDUAL_ADD_THREADS: Count<i32> = 256;

    struct ResidualAddParams {
        x: Const<Void>,
        a: Const<Void>,
        /// Null without a second residual.
        b: Const<Void>,
        y: Mut<Void>,
        count: u64,
        /// Whether all addresses are multiples of 16.
        vectors: i32,
    }

    const ROPE_THREADS: Count<i32> = 128;

    struct RopeParams {
        x: Const<Void>,
        y: Mut<Void>,
        k: Mut<Void>,
        v: Mut<Void>,
        /// `[positions, pairs]`
        cos: Const<Void>,
        sin: Const<Void>,
        /// `[D]` each, or null.
        q_norm: Const<Void>,
        k_norm: Const<Void>,
        /// Added to position and slot; null for nothing.
        at: Const<u32>,
        /// Strides in elements.
        x_batch: u64,
        x_token: u64,
        x_head: u64,
        y_batch: u64,
        y_token: u64,
        y_head: u64,
        position: u32,
        positions: u32,
        slot: u32,
        slots: u32,
        /// Heads of all tokens: B T (heads + 2 kv_heads).
        rows: u32,
        tokens: u32,
        heads: u32,
        kv_heads: u32,
        dim: u32,
        pairs: u32,
        /// Between sequences: 0 if one position holds for all, 2 if each has 64 bits.
        at_step: u32,
        /// Of one head, a power of two.
        lanes: u32,
        eps: f32,
        /// Element type of cos and sin.
        table: i32,
        /// Element type of k and v.
        cache: i32,
        /// Pairs (2i, 2i + 1) instead of (i, i + pairs).
        interleaved: i32,
        /// Whether 16-byte accesses fit.
        vectors: i32,
    }

    const EMBEDDING_THREADS: Count<i32> = 128;

    struct EmbeddingParams {
        table: Const<Void>,
        ids: Const<u32>,
        out: Mut<Void>,
        /// Of the table.
        rows: u32,
        /// Of ids.
        count: u32,
        /// Of a row: blocks of 32 values, packs of 16 bytes, or elements of 2.
        columns: u32,
        /// Of blocks.
        format: i32,
        /// Of the output, for blocks.
        dtype: i32,
    }

    const SAMPLE_THREADS: Count<i32> = 1024;
    /// The token where no logit is a number.
    const NO_TOKEN: u32 = 0xffffffff;

    /// How one sequence's token is chosen.
    struct SampleSettings {
        /// 0 takes the likeliest token.
        inverse_temperature: f32,
        /// 1 keeps all.
        top_p: f32,
        /// 0 keeps all.
        top_k: u32,
        penalty: f32,
        last_n: u32,
        seed_low: u32,
        seed_high: u32,
        sequence: u32,
        /// How far below the highest score min-p keeps tokens, in the steps of `distance`; all bits keep all.
        limit: u32,
        /// Whether the sequence's mask counts.
        masked: u32,
    }

    /// Where a step finds its logits and leaves its token.
    #[derive(Default)]
    struct SampleParams {
        /// `[sequences, vocab]`
        logits: Const<Void>,
        /// `[sequences]`
        settings: Const<SampleSettings>,
        /// `[sequences, vocab / 32 rounded up]`: a bit for each token that may be drawn, the lowest first; may be null.
        mask: Const<u32>,
        /// `[sequences]`
        token: Mut<u32>,
        /// `[sequences]`: the place of the token before, counted up.
        position: Mut<u32>,
        /// `[sequences, history_slots]`: token p at `p % history_slots`; may be null.
        history: Mut<u32>,
        /// `[sequences]`, counted up; may be null.
        step: Mut<u32>,
        /// On the host, `[mail_slots, sequences]`: step + 1 above the token; may be null.
        mailbox: Mut<LongLong>,
        /// `[sequences, vocab]`, logits after the penalty, needed by top-k and top-p.
        scores: Mut<f32>,
        /// `[sequences, chunks]`: the highest logit, the best score, the bits of its token.
        partial: Mut<Float4>,
        /// `[sequences]`, zero between launches.
        arrived: Mut<u32>,
        vocab: u32,
        /// Logits of a chunk, a multiple of 4, chunks in all, and chunks of a block; set by the launch.
        chunk: u32,
        chunks: u32,
        of_block: u32,
        /// Whether rows are whole pieces of 16 bytes; set by the launch.
        vectors: i32,
        history_slots: u32,
        mail_slots: u32,
        /// Of the logits.
        dtype: i32,
    }

    /// Where the log-probabilities of rows of logits go.
    #[derive(Default)]
    struct LogprobsParams {
        /// `[rows, vocab]`
        logits: Const<Void>,
        /// `[rows]`: the token whose log-probability is wanted.
        token: Const<u32>,
        /// `[rows]`: one more than the number of the likeliest tokens that are wanted, or 0 for nothing at all; null
        /// for `top` of them everywhere.
        wanted: Const<u32>,
        /// `[rows]`
        logprob: Mut<f32>,
        /// `[rows, width]`
        top_ids: Mut<u32>,
        /// `[rows, width]`
        top_logprobs: Mut<f32>,
        vocab: u32,
        width: u32,
        top: u32,
        /// Of the logits.
        dtype: i32,
    }

    const ZEROS_THREADS: Count<i32> = 256;

    struct ZerosParams {
        at: Mut<u32>,
        count: u32,
    }
}
