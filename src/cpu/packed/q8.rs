//! 32 activations in 8 bits.

/// Blocks that share a scale in [`Grain::wide`](super::Grain::wide).
pub(super) const TOGETHER: usize = 4;

/// How many steps of the fine part are one of the coarse part. A power of two, so that dot products of both are one
/// integer after a shift.
pub(super) const FINER: i32 = 256;

/// How [`Q8Activations`](super::Q8Activations) are quantized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Grain {
    /// One scale for each 128 values along k (the last of a token may have fewer) instead of 32, so that
    /// products with ternary weights are exact integers over as many
    /// ([`PackedMatrix::takes_wide`](super::PackedMatrix::takes_wide)). Every matrix takes them.
    pub wide: bool,
    /// One scale for all values of a token, as layers have it that were trained so. Every matrix takes them.
    pub whole: bool,
    /// 16 bits in two parts of 8: what rounding to d leaves is quantized once more, to d / 256.
    pub fine: bool,
}

impl Grain {
    /// Whether each 128 values have one scale.
    pub(super) fn is_wide(self) -> bool {
        self.wide || self.whole
    }

    /// Blocks of a token of `blocks` that share a scale.
    pub(super) fn together(self, blocks: usize) -> usize {
        match self {
            Self { whole: true, .. } => blocks.max(1),
            Self { wide: true, .. } => TOGETHER,
            _ => 1,
        }
    }

    /// Parts of a token, each with a row of blocks.
    pub(super) fn parts(self) -> usize {
        if self.fine { 2 } else { 1 }
    }
}

/// 32 consecutive activations of a token, or what rounding them to 8 bits leaves.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub(super) struct Q8Block {
    pub q: [i8; 32],
    /// The scale: x = d q.
    pub d: f32,
    /// d times the sum of all codes, for offsets of 32 weights; a coarse part has that of both parts, and the fine
    /// part none.
    pub sum: f32,
    /// The same of the first and the last 16 codes.
    pub sums: [f32; 2],
}

impl Q8Block {
    pub const ZERO: Self = Self {
        q: [0; 32],
        d: 0.0,
        sum: 0.0,
        sums: [0.0; 2],
    };

    /// Of codes in steps of `d`, and the sums of the first and the last 16 of them.
    #[inline(always)]
    pub fn new(q: [i8; 32], d: f32, [low, high]: [f32; 2]) -> Self {
        Self {
            q,
            d,
            sum: d * (low + high),
            sums: [d * low, d * high],
        }
    }
}
