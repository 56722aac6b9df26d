//! Products of e4m3 floats, and of those of a table, with quantized activations, in f32.
//!
//! An e4m3 code whose bits stand where an f32 has them is its value over 2^120, subnormal ones too, as an f32 of these bits
//! is. The activations' codes are whole numbers of up to 16 bits, so that products of e4m3 are exact, and
//! sums far from the ends of f32's range.

use super::kernel::{Codes, Isa};
use super::q8::{FINER, Q8Block};

/// The sign, and the lowest bits of the exponent with the highest of the mantissa.
pub(super) const E4M3_PLACES: i32 = 0x87f0_0000_u32 as i32;

/// [`Isa::accumulate`] of codes that are [`Codes::FLOATS`].
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn accumulate<I: Isa, C: Codes, const T: usize, const P: usize>(
    sums: &mut [I::Floats; T],
    scale: I::Floats,
    planes: *const u8,
    x: [[*const Q8Block; P]; T],
) {
    // SAFETY: the planes and tokens are readable, by the caller's contract.
    unsafe {
        let mut q = [[0.; 32]; T];
        for t in 0..T {
            whole_numbers::<I, P>(x[t], &mut q[t]);
        }
        // One sum, in order of k, whatever the tile: a token's result does not depend on how many there are. Blocks
        // need not wait for one another.
        let mut dots = [I::zero(); T];
        let mut codes = C::open::<I>(planes, 0);
        for i in 0..C::VECTORS {
            let (codes, k) = codes.next(i);
            for byte in 0..4 {
                let w = C::float::<I>(codes, byte);
                for t in 0..T {
                    dots[t] = I::fma(w, I::set(q[t][k + byte]), dots[t]);
                }
            }
        }
        let less = I::set(C::FLOATS_LESS);
        for t in 0..T {
            let product = I::mul(I::mul(dots[t], less), scale);
            sums[t] = I::fma(product, I::set((*x[t][P - 1]).d), sums[t]);
        }
    }
}

/// The codes of a token's block, in units of its finest part.
///
/// # Safety
/// The processor has `I`, and the parts are readable.
#[inline(always)]
unsafe fn whole_numbers<I: Isa, const P: usize>(parts: [*const Q8Block; P], out: &mut [f32; 32]) {
    // SAFETY: the caller's; a vector's place lies within the 32 codes.
    unsafe {
        let finer = I::set(FINER as f32);
        for k in (0..32).step_by(I::ROWS) {
            let codes = |part: usize| (&raw const (*parts[part]).q).cast::<u8>().add(k);
            let mut sum = I::load_i8(codes(0));
            for part in 1..P {
                sum = I::fma(sum, finer, I::load_i8(codes(part)));
            }
            I::store(out.as_mut_ptr().add(k), sum);
        }
    }
}
