//! The few vector operations that the kernels are written in; `x86` and `neon` have the instruction
//! sets.

use super::activations::Q8Block;
use super::codes::Codes;

/// An instruction set: vectors whose 32-bit lanes are `ROWS` rows.
///
/// # Safety
/// Every function requires a processor with the instruction set, and pointers that are good for the
/// reads that its description names. They must be inlined into a function compiled for the set.
pub(super) trait Isa: Copy {
    /// Four codes of each row.
    type Bytes: Copy;
    /// An f32 of each row.
    type Floats: Copy;

    /// Rows of a vector.
    const ROWS: usize;
    /// What [`Self::eight_bits`] adds to a signed code.
    const EIGHT_BIT_ZERO: i32;

    /// Reads 4 x ROWS bytes.
    unsafe fn load(p: *const u8) -> Self::Bytes;
    /// The same byte everywhere.
    unsafe fn splat(byte: u8) -> Self::Bytes;
    unsafe fn and(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// Each byte shifted left by one.
    unsafe fn double(a: Self::Bytes) -> Self::Bytes;
    /// Each byte shifted left by 2; its low 2 bits are anything.
    unsafe fn shl2(a: Self::Bytes) -> Self::Bytes;
    /// Each byte shifted right by 2; its high 2 bits are anything.
    unsafe fn shr2(a: Self::Bytes) -> Self::Bytes;
    /// Each byte shifted right by 4; its high 4 bits are anything.
    unsafe fn shr4(a: Self::Bytes) -> Self::Bytes;
    /// Signed codes as `dot` takes them.
    unsafe fn eight_bits(a: Self::Bytes) -> Self::Bytes;
    /// Of four runs of 16 bytes from `p` on, the first ROWS of each: row by row the byte of each run.
    unsafe fn quads(p: *const u8) -> Self::Bytes;

    unsafe fn zero() -> Self::Floats;
    /// The same number everywhere.
    unsafe fn set(x: f32) -> Self::Floats;
    /// Reads ROWS f16.
    unsafe fn load_f16(p: *const u8) -> Self::Floats;
    /// Reads ROWS u8.
    unsafe fn load_u8(p: *const u8) -> Self::Floats;
    /// Reads ROWS i8.
    unsafe fn load_i8(p: *const u8) -> Self::Floats;
    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// a b + c
    unsafe fn fma(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// Reads ROWS f32.
    unsafe fn load_f32(p: *const u8) -> Self::Floats;
    /// Writes 4 x ROWS bytes.
    unsafe fn store_bytes(p: *mut u8, a: Self::Bytes);
    /// Writes ROWS f32.
    unsafe fn store(p: *mut f32, a: Self::Floats);

    /// Adds the products of part `part` of a block (`planes`) with T tokens' blocks to `sums`: the
    /// exact integer dot product, times the weights' scale and the token's.
    unsafe fn accumulate<C: Codes, const T: usize>(
        sums: &mut [Self::Floats; T],
        scale: Self::Floats,
        planes: *const u8,
        part: usize,
        x: [*const Q8Block; T],
    );
}
