//! Quantized weight matrices, packed once for fast products with activations in 8 bits.
//!
//! A [`PackedMatrix`] holds the blocks of a GGUF tensor or the codes of a scheme (see [`crate::quant`])
//! in groups of 16 rows, interleaved so that a vector lane is a row: a product needs no horizontal sums,
//! one activation serves 16 rows, and the same bytes serve AVX2, AVX-512 and NEON. The interleaving goes back to
//! llama.cpp's repacked formats (`q4_0_8x8`); 16 rows, one layout for all formats and an f32 scale
//! for every 32 activations (128 for ternary weights) are particular to this one. `layout.rs` has the bytes.
//!
//! AMX multiplies tiles of bf16, which weights are dequantized to (`x86/amx.rs`).
//!
//! [`Q8Activations`] are made once for each step and serve every matrix that reads the same input.

mod activations;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod codes;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod floats;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod kernel;
mod layout;
mod matmul;
mod matrix;
mod memory;
#[cfg(target_arch = "aarch64")]
mod neon;
mod q8;
mod registry;
mod repack;
mod rounding;
mod scalar;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod scales;
#[cfg(test)]
mod scheme_tests;
mod schemes;
mod store;
#[cfg(test)]
mod tests;
#[cfg(all(test, any(target_arch = "x86_64", target_arch = "aarch64")))]
mod wide;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use activations::{Q8Activations, Q8Row, Q8Rows};
pub use layout::ROW_GROUP;
pub use matrix::{PackedBuilder, PackedMatrix};
pub use q8::Grain;
pub(crate) use schemes::packed_bytes;
pub(crate) use store::FileBytes;
pub use store::SharedBytes;
