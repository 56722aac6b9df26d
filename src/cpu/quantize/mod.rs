//! From weights to codes, row by row or group by group.

mod floats;
mod fp8;
mod nf4;
mod nvfp4;
mod search;
#[cfg(test)]
mod tests;

use crate::cpu::simd;
use crate::pool;
use crate::quant::{Codes, Scheme, TernaryScale};
use candle_core::{Result, bail};
pub(crate) use floats::largest_magnitude;
use search::{Found, Unit, mean_magnitude, search};
pub(crate) use search::{Rounding, sum_of_magnitudes};
use std::ops::Range;
use std::sync::Mutex;

/// Quantizes `weights`, row-major `rows` x `cols`, over the thread pool.
///
/// Rows of zeros get the scale 0 and codes that mean zero. [`Scheme::Fp8Block128`] counts its blocks from the first row.
///
/// ```
/// use candle_fused::quant::{Scheme, quantize};
/// let weights: Vec<f32> = (0..64).map(|i| (i as f32 * 0.7).sin()).collect();
/// let codes = quantize(&weights, 2, 32, Scheme::Int8)?;
/// for (w, v) in weights.iter().zip(codes.dequantize()) {
///     assert!((w - v).abs() < 0.5 / 127.);
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If `weights` does not have `rows * cols` values, the scheme cannot be had for rows of this width
/// (see [`Scheme::check`]), a weight is NaN or infinite (by its place), or so large that the scale of
/// its group would not be an f16.
pub fn quantize(weights: &[f32], rows: usize, cols: usize, scheme: Scheme) -> Result<Codes> {
    check(weights, &(0..rows), cols, scheme)?;
    let whole = match scheme {
        Scheme::Ternary {
            scale: TernaryScale::Tensor,
        } => Some(mean_magnitude(weights)),
        Scheme::Nvfp4 => Some(largest_magnitude(weights)),
        _ => None,
    };
    quantize_with(weights, rows, cols, scheme, whole, None)
}

/// [`quantize`] with squared errors that count `counts[k]` in column k, in INT8 or INT4.
pub(crate) fn quantize_weighted(
    weights: &[f32],
    rows: usize,
    scheme: Scheme,
    counts: &[f32],
) -> Result<Codes> {
    let cols = counts.len();
    check(weights, &(0..rows), cols, scheme)?;
    quantize_with(weights, rows, cols, scheme, None, Some(counts))
}

/// [`quantize`] of some rows of a matrix, `whole` being the scale of a matrix that has one only, or the largest magnitude
/// of one in NVFP4.
pub(crate) fn quantize_part(
    weights: &[f32],
    part: &Range<usize>,
    cols: usize,
    scheme: Scheme,
    whole: Option<f32>,
) -> Result<Codes> {
    check(weights, part, cols, scheme)?;
    quantize_with(weights, part.len(), cols, scheme, whole, None)
}

fn check(weights: &[f32], rows: &Range<usize>, cols: usize, scheme: Scheme) -> Result<()> {
    let count = rows.len();
    if count.checked_mul(cols) != Some(weights.len()) {
        bail!(
            "weights: {} values given for {count} x {cols}",
            weights.len()
        );
    }
    scheme.check(cols)?;
    if let Some(at) = pool::first_without(weights, |w| w.is_finite()) {
        bail!(
            "weights: {} at row {}, column {}, expected a finite number",
            weights[at],
            rows.start + at / cols,
            at % cols
        );
    }
    Ok(())
}

fn quantize_with(
    weights: &[f32],
    rows: usize,
    cols: usize,
    scheme: Scheme,
    whole: Option<f32>,
    counts: Option<&[f32]>,
) -> Result<Codes> {
    if scheme.is_fp8() {
        return Ok(fp8::quantize(weights, rows, cols, scheme));
    }
    if scheme == Scheme::Nvfp4 {
        let largest = whole.unwrap_or_else(|| largest_magnitude(weights));
        return Ok(nvfp4::quantize(weights, rows, cols, largest));
    }
    if scheme == Scheme::Nf4 {
        return Ok(nf4::quantize(weights, rows, cols));
    }
    let unit = scheme.group().unwrap_or(cols);
    let units = rows * (cols / unit);
    let mut codes = vec![0i8; weights.len()];
    let mut found = vec![Found::default(); units];
    let (failed, level) = (Mutex::new(None), simd::level());
    // Codes and scales of a row are written together, and rows are spread over the pool.
    let in_row = cols / unit;
    let scales = Rows(found.as_mut_ptr());
    pool::for_rows(&mut codes, cols, 1, |first, part| {
        for (i, codes) in part.chunks_exact_mut(unit).enumerate() {
            let index = first * in_row + i;
            let one = Unit {
                weights: &weights[index * unit..][..unit],
                counts: counts.map(|counts| &counts[index % in_row * unit..][..unit]),
                whole,
            };
            let result = storable(scheme, search(level, scheme, one, codes));
            match result {
                // SAFETY: this task has the rows of `part` alone, and there is a unit for each.
                Ok(one) => unsafe { scales.set(index, one) },
                Err(e) => *failed.lock().unwrap_or_else(|e| e.into_inner()) = Some((index, e)),
            }
        }
    });
    if let Some((index, e)) = failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
        bail!("weights: row {}: {e}", index / in_row);
    }
    let scales = match whole {
        Some(scale) => vec![scale],
        None => found.iter().map(|f| f.scale).collect(),
    };
    let zeros = match scheme.has_zeros() {
        true => found.iter().map(|f| f.zero).collect(),
        false => Vec::new(),
    };
    Ok(Codes {
        scheme,
        rows,
        cols,
        codes,
        scales,
        zeros,
        group_scales: Vec::new(),
    })
}

/// Results that several tasks write, each its own.
struct Rows(*mut Found);

// SAFETY: it stands for a `&mut [Found]`, whose parts the callers of `set` keep apart.
unsafe impl Sync for Rows {}

impl Rows {
    /// # Safety
    /// There is an element `index`, and no other thread accesses it.
    unsafe fn set(&self, index: usize, found: Found) {
        // SAFETY: the caller's.
        unsafe { self.0.add(index).write(found) };
    }
}

/// Fails if the scale of a group has become infinite as an f16.
fn storable(scheme: Scheme, found: Found) -> Result<Found> {
    if scheme.has_f16_scales() && !found.scale.is_finite() {
        bail!("the weights are so large that their scale is no f16; take int8");
    }
    Ok(found)
}
