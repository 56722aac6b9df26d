//! The columns of a matrix, rounded one after the other.

use super::factor::InverseFactor;
use crate::cpu::quantize::{self, Rounding};
use crate::pool;
use crate::quant::{Codes, Scheme};
use candle_core::{Device, Result, Tensor, bail};

/// Columns that update each other before they update the others.
const BLOCK: usize = 128;

/// Quantizes `weights`, row-major `rows` x `cols`, so that the product with the inputs that `inverse` comes from
/// changes least (see the [module](crate::quant::gptq)). Inputs of one size that have nothing in common (H is a multiple
/// of the identity) give what [`quant::quantize`](crate::quant::quantize) gives.
///
/// Takes [`Scheme::Int4`] and [`Scheme::Int8`], and up to `24 rows cols` bytes beside the result.
///
/// # Errors
/// If the scheme is another one, `inverse` is of other than `cols` inputs, or as
/// [`quant::quantize`](crate::quant::quantize).
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::quant::gptq::{self, Hessian, Options};
/// use candle_fused::quant::{self, Scheme};
/// let scheme = Scheme::Int4 { group: 32, zero_point: false };
/// let weights: Vec<f32> = (0..8 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
/// // Inputs whose columns are alike: 100 rows of 64.
/// let x: Vec<f32> = (0..100 * 64).map(|i| (i / 64) as f32 % 7. - 3. + (i as f32 * 1.7).sin()).collect();
/// let x = Tensor::from_vec(x, (100, 64), &Device::Cpu)?;
/// let mut hessian = Hessian::new(64)?;
/// hessian.add(&x)?;
/// let inverse = hessian.inverse(&Options::default())?;
/// let codes = gptq::quantize(&weights, 8, 64, scheme, &inverse)?;
/// # let weight = Tensor::from_slice(&weights, (8, 64), &Device::Cpu)?;
/// let error = |codes: quant::Codes| -> candle_core::Result<f32> {
///     let rounded = Tensor::from_vec(codes.dequantize(), (8, 64), &Device::Cpu)?;
///     x.matmul(&(&weight - rounded)?.t()?)?.sqr()?.sum_all()?.to_scalar()
/// };
/// let nearest = quant::quantize(&weights, 8, 64, scheme)?;
/// assert!(error(codes)? < 0.5 * error(nearest)?);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn quantize(
    weights: &[f32],
    rows: usize,
    cols: usize,
    scheme: Scheme,
    inverse: &InverseFactor,
) -> Result<Codes> {
    if !matches!(scheme, Scheme::Int4 { .. } | Scheme::Int8) {
        bail!("scheme: {scheme}, expected int4 or int8");
    }
    let InverseFactor { order, lower } = inverse;
    if order.len() != cols {
        bail!(
            "inverse: of {} inputs, expected one for each of {cols} columns",
            order.len()
        );
    }
    let mut codes = quantize::quantize_weighted(weights, rows, scheme, &inverse.counts()?)?;
    let ordered = weights
        .chunks_exact(cols)
        .flat_map(|row| order.iter().map(|k| f64::from(row[*k])));
    let mut open = Tensor::from_iter(ordered, &Device::Cpu)?.reshape((rows, cols))?;
    let mut end = cols;
    while end > 0 {
        // Blocks end at multiples of their length, counted from the last column.
        let first = end.saturating_sub(BLOCK);
        let len = end - first;
        let mut block: Vec<f64> = open.narrow(1, first, len)?.flatten_all()?.to_vec1()?;
        let factor = lower.narrow(0, first, len)?;
        let within: Vec<f64> = factor.narrow(1, first, len)?.flatten_all()?.to_vec1()?;
        let mut errors = vec![0f64; block.len()];
        let places = &order[first..end];
        pool::for_row_pairs(&mut block, &mut errors, len, 1, |first, block, errors| {
            let pairs = block
                .chunks_exact_mut(len)
                .zip(errors.chunks_exact_mut(len));
            for (row, (weights, errors)) in (first..).zip(pairs) {
                round(&codes, row, places, &within, weights, errors);
            }
        });
        for (row, rounded) in block.chunks_exact(len).enumerate() {
            for (k, code) in places.iter().zip(rounded) {
                codes.codes[row * cols + k] = *code as i8;
            }
        }
        if first > 0 {
            let errors = Tensor::from_vec(errors, (rows, len), &Device::Cpu)?;
            let update = errors.matmul(&factor.narrow(1, 0, first)?)?;
            open = (open.narrow(1, 0, first)? - update)?;
        }
        end = first;
    }
    Ok(codes)
}

/// Rounds a block of a row from its last column to its first. `weights` become codes; `errors` are what each column
/// misses, over N's diagonal.
fn round(
    codes: &Codes,
    row: usize,
    places: &[usize],
    factor: &[f64],
    weights: &mut [f64],
    errors: &mut [f64],
) {
    let len = weights.len();
    for i in (0..len).rev() {
        let (scale, zero) = codes.meaning(row, places[i]);
        let code = Rounding::new(codes.scheme, scale, zero).code(weights[i] as f32) as i8;
        let value = f64::from(Codes::value(codes.scheme, code, (scale, zero)));
        let factor = &factor[i * len..][..=i];
        let error = (weights[i] - value) / factor[i];
        for (weight, by) in weights[..i].iter_mut().zip(factor) {
            *weight -= error * by;
        }
        weights[i] = f64::from(code);
        errors[i] = error;
    }
}
