//! Products of e4m3 floats with quantized activations, in f32.
//!
//! A code whose bits stand where an f32 has them is its value over 2^120, subnormal ones too, as an f32 of these bits
//! is. The activations' codes are whole numbers of up to 16 bits, so that products are exact and their sums far from
//! the ends of f32's range.

use super::kernel::Isa;
use super::q8::{FINER, Q8Block};
use crate::quant::e4m3::UNBIAS;

/// The sign, and the lowest bits of the exponent with the highest of the mantissa.
pub(super) const E4M3_PLACES: i32 = 0x87f0_0000_u32 as i32;

/// Sums that a token's products are added to in turns, so that they need not wait for one another.
const CHAINS: usize = 4;

/// [`Isa::accumulate`] of e4m3 floats.
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn accumulate<I: Isa, const T: usize, const P: usize>(
    sums: &mut [I::Floats; T],
    scale: I::Floats,
    planes: *const u8,
    x: [[*const Q8Block; P]; T],
) {
    // SAFETY: the planes and tokens are readable, by the caller's contract.
    unsafe {
        let q: [[f32; 32]; T] = x.map(|parts| whole_numbers(parts));
        let chains = CHAINS.div_ceil(T);
        let mut dots = [[I::zero(); CHAINS]; T];
        for i in 0..8 {
            let codes = I::load(planes.add(64 * i));
            for byte in 0..4 {
                let w = I::e4m3(codes, byte);
                for t in 0..T {
                    let dot = &mut dots[t][byte % chains];
                    *dot = I::fma(w, I::set(q[t][4 * i + byte]), *dot);
                }
            }
        }
        let (one, unbias) = (I::set(1.), I::set(UNBIAS));
        for t in 0..T {
            let mut dot = dots[t][0];
            for other in &dots[t][1..chains] {
                dot = I::fma(*other, one, dot);
            }
            let product = I::mul(I::mul(dot, unbias), scale);
            sums[t] = I::fma(product, I::set((*x[t][P - 1]).d), sums[t]);
        }
    }
}

/// The codes of a token's block, in units of its finest part.
///
/// # Safety
/// The parts are readable.
#[inline(always)]
unsafe fn whole_numbers<const P: usize>(parts: [*const Q8Block; P]) -> [f32; 32] {
    // SAFETY: the caller's.
    let parts = parts.map(|part| unsafe { &(*part).q });
    std::array::from_fn(|k| {
        let code = |sum, q: &[i8; 32]| FINER * sum + i32::from(q[k]);
        parts.into_iter().fold(0, code) as f32
    })
}
