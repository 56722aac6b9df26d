//! Keys and values in pages: attention over them, appending to them, copies of them.

use super::{Const, Count, Mut, Void};

abi! {
    /// A padded table of pages or one in CSR form, and the pools.
    struct Pages {
        /// `[sequences, width]` or, in CSR form, `[width]`.
        entries: Const<u32>,
        /// `[sequences + 1]` in CSR form, null otherwise.
        indptr: Const<u32>,
        k: Mut<Void>,
        v: Mut<Void>,
        /// Elements from page to page, token to token and head to head.
        k_page: u64,
        k_token: u64,
        k_head: u64,
        v_page: u64,
        v_token: u64,
        v_head: u64,
        /// Of codes: `[pages, kv_heads, page]` by these strides in elements, from page to page and head to head; null for
        /// floats.
        k_scales: Mut<f32>,
        v_scales: Mut<f32>,
        k_scale_strides: [u64; 2],
        v_scale_strides: [u64; 2],
        /// Entries from one sequence to the next in a padded table.
        step: u32,
        width: u32,
        sequences: u32,
        /// Tokens of a page.
        page: u32,
        pages: u32,
        /// Element type of the pools.
        dtype: i32,
    }

    struct PagedAttentionParams {
        pages: Pages,
        /// `[sequences]`: tokens of each, or, in CSR form, tokens of its last page.
        lengths: Const<u32>,
        /// `[sequences, queries, heads, head_dim]` by its strides in elements.
        q: Const<Void>,
        q_sequence: u64,
        q_token: u64,
        q_head: u64,
        /// Contiguous.
        y: Mut<Void>,
        /// `[heads]`, or null.
        slopes: Const<f32>,
        /// What blocks leave of the first and the last part of their share, where others have more of it:
        /// `[blocks, 2, rows of a warp, head_dim]`, and `[blocks, 2, rows of a warp]`. With splits of a fixed size, the sums
        /// of each split, not divided yet, and the maxima that they are relative to: `[splits of all sequences, kv_heads,
        /// rows of a key/value head, head_dim]`, and the same without `head_dim`. A sequence with one split need not leave
        /// anything.
        means: Mut<f32>,
        tops: Mut<f32>,
        /// `[sequences, kv_heads, parts]`, zero between launches; not with splits of a fixed size.
        counters: Mut<u32>,
        queries: u32,
        heads: u32,
        kv_heads: u32,
        head_dim: u32,
        /// Warps that are needed for all queries of a key/value head.
        parts: u32,
        /// 0 for none.
        window: u32,
        /// Of q and y.
        dtype: i32,
        /// Whether q is of the pools' dtype, or of 16 bits over codes, and has 16-byte pieces.
        packs: i32,
        scale: f32,
        softcap: f32,
        /// With splits of a fixed size, the weights of their sums, as `tops`, and how many of these each sequence has room
        /// for; 0 if each has as much as its entries in a table in CSR form need.
        weights: Mut<f32>,
        splits: u32,
    }

    /// Keys of a split where its size is fixed: splits begin at multiples of it, whatever the sequence's length is.
    const PAGED_SPLIT: Count<u32> = 128;
    /// A warp's share of the work is counted in units of so many keys, and one more in front of each split. Counted in splits,
    /// many short sequences, each in a split that is not full, would be as much as long ones.
    const PAGED_UNIT: Count<u32> = 16;
    /// Units of a split.
    const PAGED_SPLIT_UNITS: Count<u32> = 1 + PAGED_SPLIT / PAGED_UNIT;

    /// Outputs of a row for which a warp merges splits, and blocks that do so on a multiprocessor at once.
    const PAGED_MERGED: Count<u32> = 64;
    const PAGED_MERGE_BLOCKS: Count<i32> = 4;

    /// Warps of a block of the kernels below at most: fewer where shared memory has no room for their partial results.
    /// A multiprocessor has one block of so many.
    const PAGED_WARPS: Count<i32> = 8;

    /// The forms for tensor cores: head dimension, keys that a warp takes at once, and rows (queries of a key/value
    /// head) of a warp.
    table PAGED_MMA of PagedMma (dim: usize, keys: usize, rows: usize) = [
        (64, 32, 8), (64, 16, 16),
        (80, 16, 8), (80, 16, 16),
        (96, 16, 8), (96, 16, 16),
        (128, 16, 8), (128, 16, 16),
        (256, 16, 8)
    ];

    /// The same over codes.
    table PAGED_CODES of PagedCodes (dim: usize, keys: usize, rows: usize) = [
        (64, 32, 8), (64, 16, 16),
        (80, 32, 8), (80, 16, 16),
        (96, 16, 8), (96, 16, 16),
        (128, 16, 8), (128, 32, 16),
        (256, 16, 8)
    ];

    /// The forms for everything else: the widest head, and rows of a warp.
    table PAGED_PLAIN of PagedPlain (dim: usize, rows: usize) = [(64, 4), (128, 4), (256, 2)];
    /// Keys that a warp of these takes at once.
    const PAGED_PLAIN_KEYS: Count<i32> = 16;

    struct PagedAppendParams {
        pages: Pages,
        /// `[tokens, (heads + 2 kv_heads) dim]`, contiguous, and `[tokens, heads, dim]`.
        x: Const<Void>,
        y: Mut<Void>,
        /// `[positions, pairs]`
        cos: Const<Void>,
        sin: Const<Void>,
        /// `[dim]` each, or null.
        q_norm: Const<Void>,
        k_norm: Const<Void>,
        /// `[tokens]`
        at: Const<u32>,
        /// `[tokens]`, or null.
        owners: Const<u32>,
        /// `[sequences + 1]`, or null.
        cu_seqlens: Const<u32>,
        /// Heads of all tokens.
        rows: u32,
        heads: u32,
        kv_heads: u32,
        dim: u32,
        positions: u32,
        pairs: u32,
        /// Of one head, a power of two.
        lanes: u32,
        eps: f32,
        /// Element type of cos and sin.
        table: i32,
        /// Pairs (2i, 2i + 1) instead of (i, i + pairs).
        interleaved: i32,
        /// Whether 16-byte accesses fit.
        vectors: i32,
    }

    const COPY_PAGES_THREADS: Count<i32> = 256;

    struct CopyPagesParams {
        /// `[count, 2]`, rows `step` apart.
        pairs: Const<u32>,
        step: u32,
        k: Mut<Void>,
        v: Mut<Void>,
        /// In pieces, as all that follows.
        k_page: u64,
        k_token: u64,
        k_head: u64,
        v_page: u64,
        v_token: u64,
        v_head: u64,
        pages: u32,
        page: u32,
        kv_heads: u32,
        /// Of a head of a token.
        pieces: u32,
        /// Bytes of a piece: 16, 4, 2 or 1.
        size: i32,
    }
}
