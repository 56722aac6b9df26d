//! What a quantized matrix holds, of either kind.

use super::{BlockFormat, Scheme};
use std::fmt;

/// How a matrix is quantized: in the blocks of a GGUF file or by a scheme of our own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// GGUF blocks.
    Block(BlockFormat),
    /// [`Scheme`].
    Scheme(Scheme),
}

impl From<BlockFormat> for Format {
    fn from(format: BlockFormat) -> Self {
        Format::Block(format)
    }
}

impl From<Scheme> for Format {
    fn from(scheme: Scheme) -> Self {
        Format::Scheme(scheme)
    }
}

/// As in `q4_0` or `int4-g128`.
impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Format::Block(format) => f.write_str(&format!("{:?}", format.dtype).to_lowercase()),
            Format::Scheme(scheme) => scheme.fmt(f),
        }
    }
}
