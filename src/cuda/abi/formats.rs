//! Quantized matrices: packing, repacking, and their values.

use super::{Char, Const, Count, Mut, Void};

abi! {
    /// Values of a K block of codes.
    const K_BLOCK: Count<u32> = 128;
    /// Rows of codes that are taken together.
    const ROW_GROUP: Count<u32> = 8;
    /// Rows of a block of FP8 that has a scale; its columns are a K block.
    const FP8_BLOCK: Count<u32> = 128;
    /// Lanes of a row of codes.
    const ROW_LANES: Count<u32> = 4;

    /// Values of a GGUF block, and blocks of a group.
    const BLOCK: Count<u32> = 32;
    const GROUP: Count<u32> = 4;

    /// Threads of a block of the kernels that pack, repack or dequantize.
    const FORMAT_THREADS: Count<i32> = 256;

    /// A matrix of codes on the device.
    struct PackedMatrix {
        codes: Const<Char>,
        /// f32 for each row, or f16 for each group, which of NF4 are f32 too.
        scales: Const<Void>,
        /// Null for none; of FP8 in blocks, not null if rows have scales of their own; of NVFP4 the scales of 16 values.
        zeros: Const<u8>,
    }

    struct PackParams {
        /// `[rows, k]`
        codes: Const<i8>,
        /// Where row 0 goes; that is the first of eight.
        out: Mut<Char>,
        rows: u64,
        k: u32,
    }

    struct UnpackWordsParams {
        /// 32 / bits codes each.
        words: Const<u32>,
        /// `[k]`: the column of the words that each column is; null for those in order.
        order: Const<u32>,
        /// `[rows, k]`
        codes: Mut<i8>,
        /// Rows to unpack, from `first` on.
        rows: u64,
        first: u64,
        /// Words from one row, or one word's rows, to the next, and likewise of columns.
        row_step: u64,
        col_step: u64,
        k: u32,
        /// Binary logarithms of the rows and columns that share a word, of which one is 0.
        row_log: u32,
        col_log: u32,
        /// The field of the i-th code of a word, 4 bits each.
        fields: u32,
        bits: u32,
        /// Bits of a code that are inverted.
        flip: u32,
    }

    struct UnpackParams {
        matrix: PackedMatrix,
        /// `[count]`, or null for all rows.
        ids: Const<u32>,
        /// `[count, k]`, aligned to 16 bytes.
        out: Mut<Void>,
        count: u64,
        /// Of the matrix.
        rows: u32,
        /// A multiple of 4.
        k: u32,
        format: i32,
    }

    struct RepackParams {
        blocks: Const<u8>,
        out: Mut<Char>,
        rows: u64,
        /// Of 32 values.
        blocks_of_row: u32,
    }

    /// A matrix of GGUF blocks among those that are dequantized by one launch.
    struct DequantizeSource {
        data: Const<Char>,
        /// Its first block among all; past them for a matrix that is not there.
        first: u64,
        /// Of 32 values.
        blocks_of_row: u32,
        format: i32,
    }

    /// Matrices that one launch dequantizes.
    const MAX_SOURCES: Count<i32> = 8;

    struct DequantizeParams {
        sources: [DequantizeSource; MAX_SOURCES],
        /// Aligned to 16 bytes.
        out: Mut<Void>,
        /// Blocks in all.
        total: u64,
    }

    /// Values of a row that a block narrows.
    const FORMAT_CHUNK: Count<u32> = 2048;

    /// The order that x has.
    const IN_ORDER: Count<u32> = 0x543210;

    struct NarrowParams {
        /// `[rows, width]`
        x: Const<Void>,
        /// An RMS norm's, `[width]`, or null.
        weight: Const<Void>,
        /// f16 or bf16, `parts` rows of each, `pitch` values apart, with zeros past the width.
        out: Mut<Void>,
        /// `[pitch / 32][rows of out]` of f32, or null: sums over 32 values as they are written.
        sums: Mut<f32>,
        /// Of the sums: values from one 32 to the next.
        sums_pitch: u32,
        /// Rows of out for each of x: 2 have bf16 and what it leaves over.
        parts: u32,
        /// A multiple of 4, and of 64 if the order is not x's.
        pitch: u32,
        /// Of a row.
        chunks: u32,
        /// Where bit i of a value's index goes among the 6 lowest, in digits of 4 bits.
        order: u32,
        /// A multiple of 4.
        width: u32,
        eps: f32,
        out_dtype: i32,
        /// Whether 4 elements of x and of the weight are aligned.
        vectors: i32,
        /// Words that become 0, for the next kernel to count with.
        counters: Mut<u32>,
        counter_count: u32,
    }
}
