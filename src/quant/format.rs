//! One name for the quantized formats of GGUF and the schemes of our own.

use super::{BlockFormat, Scheme, TernaryScale};
use std::fmt;

/// How a quantized matrix is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// Blocks of a GGUF file.
    Block(BlockFormat),
    /// Codes of a scheme.
    Scheme(Scheme),
}

/// `q4_1`, `int8`, `int4 g128`, `int4 g32 z`, `ternary g64`.
impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Format::Block(format) => f.write_str(&format!("{:?}", format.dtype).to_lowercase()),
            Format::Scheme(Scheme::Int8) => f.write_str("int8"),
            Format::Scheme(Scheme::Int4 { group, zero_point }) => {
                let zero = if *zero_point { " z" } else { "" };
                write!(f, "int4 g{group}{zero}")
            }
            Format::Scheme(Scheme::Ternary { scale }) => match scale {
                TernaryScale::Tensor => f.write_str("ternary"),
                TernaryScale::Row => f.write_str("ternary row"),
                TernaryScale::Group(group) => write!(f, "ternary g{group}"),
            },
        }
    }
}
