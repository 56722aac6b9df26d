//! Schemes of our own: INT8 per output channel, INT4 in groups, ternary.

/// Values that share one scale of [`Scheme::Ternary`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TernaryScale {
    /// The whole matrix.
    Tensor,
    /// A row: an output channel.
    Row,
    /// This many consecutive values of a row.
    Group(usize),
}

/// How the weights of a linear layer are quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scheme {
    /// `s[n] * q`, q in -127..=127: symmetric, a scale for each output channel.
    Int8,
    /// `s[n, g] * (q - z)`, q in 0..=15: a scale for each `group` consecutive values of a row.
    Int4 {
        /// 32, 64 or 128.
        group: usize,
        /// Whether z is stored for each group (0..=15); otherwise it is 8.
        zero_point: bool,
    },
    /// `s * q`, q in -1..=1 (BitNet b1.58, Ma et al. 2024).
    Ternary {
        /// What shares a scale.
        scale: TernaryScale,
    },
}

/// A quantized matrix in plain form, a byte for each code, on its way into the layout of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct Codes {
    /// How codes become values.
    pub scheme: Scheme,
    /// Output channels.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// `[rows, cols]`, in the range that the scheme names.
    pub codes: Vec<i8>,
    /// `[1]`, `[rows]` or `[rows, cols / group]`, each exactly an f16 for [`Scheme::Int4`] and the
    /// groups of [`Scheme::Ternary`].
    pub scales: Vec<f32>,
    /// `[rows, cols / group]` where the scheme stores zero points, else empty.
    pub zeros: Vec<u8>,
}
