//! 32 activations in 8 bits.

/// Blocks that share a scale in [`Q8Activations::refill_wide`](super::Q8Activations::refill_wide).
pub(super) const TOGETHER: usize = 4;

/// 32 consecutive activations of a token.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(16))]
pub(super) struct Q8Block {
    pub q: [i8; 32],
    /// The scale: x = d q.
    pub d: f32,
    /// d times the sum of all codes, for offsets of 32 weights.
    pub sum: f32,
    /// d times the sums of the first and the last 16 codes.
    pub sums: [f32; 2],
}

impl Q8Block {
    pub const ZERO: Self = Self {
        q: [0; 32],
        d: 0.0,
        sum: 0.0,
        sums: [0.0; 2],
    };
}
