//! Rounding a token's values to codes of 8 bits: the plain code, and what a level has in its place.

use super::q8::{FINER, Grain, Q8Block};

/// Adding it to a float below 2^22 leaves the nearest integer, ties to even, in the low bits.
const ROUND: f32 = 12_582_912.0;

/// Blocks whose largest magnitude is below this are taken as zeros: the reciprocal of their scale
/// would overflow.
const TINY: f32 = 1e-35;

/// What is done to the 32 values of a block. All implementations agree bit for bit.
///
/// # Safety
/// Every function requires a processor with the implementation's level, and must be inlined into a function
/// compiled for it.
pub(super) trait Rounding {
    /// The largest magnitude as bits: without their sign, floats order as integers do, with infinities and NaN on
    /// top.
    unsafe fn top(x: &[f32; 32]) -> u32;
    /// Values in steps of `d`, whose reciprocal is `inverse`, to nearest even; there are at most 127 steps.
    unsafe fn rounded(x: &[f32; 32], d: f32, inverse: f32) -> Q8Block;
    /// What `coarse` leaves of `x`, at most `most` in magnitude.
    unsafe fn rest(x: &[f32; 32], coarse: &Q8Block, most: f32) -> [f32; 32];
}

/// Without any level's instructions.
struct Plain;

impl Rounding for Plain {
    #[inline(always)]
    unsafe fn top(x: &[f32; 32]) -> u32 {
        x.iter()
            .fold(0, |top, v| top.max(v.to_bits() & 0x7fff_ffff))
    }

    #[inline(always)]
    unsafe fn rounded(x: &[f32; 32], d: f32, inverse: f32) -> Q8Block {
        let mut codes = [0i8; 32];
        for (q, v) in codes.iter_mut().zip(x) {
            *q = ((v * inverse + ROUND).to_bits()).wrapping_sub(ROUND.to_bits()) as i8;
        }
        let sum = |q: &[i8]| q.iter().map(|q| i32::from(*q)).sum::<i32>() as f32;
        Q8Block::new(codes, d, [sum(&codes[..16]), sum(&codes[16..])])
    }

    #[inline(always)]
    unsafe fn rest(x: &[f32; 32], coarse: &Q8Block, most: f32) -> [f32; 32] {
        let mut rest = *x;
        for (left, q) in rest.iter_mut().zip(&coarse.q) {
            *left = (*left - coarse.d * f32::from(*q)).clamp(-most, most);
        }
        rest
    }
}

/// Quantizes a token's values into its blocks.
pub(super) fn plain(x: &[f32], blocks: &mut [Q8Block], grain: Grain) {
    // SAFETY: it takes any processor.
    unsafe { quantize::<Plain>(x, blocks, grain) }
}

/// [`plain`] with the instructions of a level.
///
/// # Safety
/// As [`Rounding`].
#[inline(always)]
pub(super) unsafe fn quantize<R: Rounding>(x: &[f32], blocks: &mut [Q8Block], grain: Grain) {
    let (coarse, fine) = match grain.fine {
        true => blocks.split_at_mut(blocks.len() / 2),
        false => (blocks, &mut [][..]),
    };
    let x = x.as_chunks::<32>().0;
    let together = grain.together(x.len());
    // SAFETY: the caller's.
    unsafe {
        for (x, blocks) in x.chunks(together).zip(coarse.chunks_mut(together)) {
            let mut top = 0;
            for x in x {
                top = top.max(R::top(x));
            }
            let amax = f32::from_bits(top);
            for (x, block) in x.iter().zip(blocks) {
                *block = coarse_part::<R>(x, amax);
            }
        }
        for ((x, coarse), fine) in x.iter().zip(coarse).zip(fine) {
            *fine = fine_part::<R>(x, coarse);
            // Offsets of the weights take the sums of both parts at once.
            coarse.sum += std::mem::take(&mut fine.sum);
            let sums = std::mem::take(&mut fine.sums);
            coarse.sums[0] += sums[0];
            coarse.sums[1] += sums[1];
        }
    }
}

/// A block of values of magnitudes up to `amax`.
///
/// # Safety
/// As [`Rounding`].
#[inline(always)]
unsafe fn coarse_part<R: Rounding>(x: &[f32; 32], amax: f32) -> Q8Block {
    if !amax.is_finite() {
        return Q8Block {
            d: f32::NAN,
            sum: f32::NAN,
            sums: [f32::NAN; 2],
            ..Q8Block::ZERO
        };
    }
    match amax < TINY {
        true => Q8Block::ZERO,
        // SAFETY: the caller's.
        false => unsafe { R::rounded(x, amax / 127.0, 127.0 / amax) },
    }
}

/// What `coarse` leaves of `x`, at most half of its scale each.
///
/// # Safety
/// As [`Rounding`].
#[inline(always)]
unsafe fn fine_part<R: Rounding>(x: &[f32; 32], coarse: &Q8Block) -> Q8Block {
    let d = coarse.d / FINER as f32;
    // Not a number, or so small that its reciprocal would overflow. The products take this part's scale, so it is
    // set all the same.
    if d.is_nan() || d < TINY {
        return Q8Block { d, ..Q8Block::ZERO };
    }
    // Half a step of the coarse part is 128 steps, one more than there are.
    // SAFETY: the caller's.
    unsafe { R::rounded(&R::rest(x, coarse, 127.0 * d), d, 1.0 / d) }
}
