//! The kernels for x86: a file for each level, and for each level what it has for a token and ternary codes.

pub(super) mod amx;
pub(super) mod avx2;
pub(super) mod avx512;
mod dot_avx2;
pub(super) mod rounding;
pub(super) mod ternary;
pub(super) mod ternary_avx2;
pub(super) mod ternary_avx512;
