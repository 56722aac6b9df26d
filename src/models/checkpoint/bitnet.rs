//! BitNet's layouts, as transformers writes them: ternary matrices whose inputs are rounded to 8 bits of each token.
//!
//! | tensor | | |
//! |---|---|---|
//! | `weight` | u8 `[N / 4, K]` | bits 2i and 2i + 1 of byte (r, k) are value (i N / 4 + r, k), plus 1 |
//! | `weight_scale` | of one value | `autobitlinear` multiplies by it, `bitlinear` divides by it |
//!
//! `quantization_mode` `online` has numbers `[N, K]` and no scale: it is the mean magnitude m, and values are those
//! nearest to `w / m` of -1, 0 and 1.
//!
//! Method: BitNet b1.58 (Ma et al. 2024).

use super::compressed::SCALE;
use super::tensors::{Stored, Tensors};
use super::unpacked::Unpacked;
use crate::pool;
use candle_core::{Result, bail};

/// Values of a byte.
const IN_BYTE: usize = 4;

/// The least mean magnitude, for matrices of zeros.
const LEAST: f32 = 1e-5;

/// What a layer does with its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// `autobitlinear` in mode `offline`: the scale multiplies.
    Multiplied,
    /// `bitlinear`: the scale divides.
    Divided,
    /// `autobitlinear` in mode `online`: numbers, which become ternary.
    Online,
}

/// Whether a layer is one of BitNet's; embeddings and heads are not.
pub fn is_there(tensors: &Tensors<'_>, layer: Layer) -> bool {
    match layer {
        Layer::Multiplied | Layer::Divided => tensors.has("weight") && tensors.has(SCALE),
        Layer::Online => tensors.has("weight") && !tensors.is_end(),
    }
}

/// The matrix of a layer.
pub fn read(tensors: &Tensors<'_>, (rows, cols): (usize, usize), layer: Layer) -> Result<Unpacked> {
    let (codes, scale) = if layer == Layer::Online {
        let (values, dims) = tensors.numbers("weight")?;
        if dims != [rows, cols] {
            bail!("weight has shape {dims:?}, expected {:?}", [rows, cols]);
        }
        nearest(&values)?
    } else {
        let codes = match tensors.numbers_or_bytes("weight")? {
            (Stored::Bytes(bytes), dims) if is_packed(&dims, (rows, cols)) => {
                fields(&bytes, (rows, cols))?
            }
            (values, dims) => stored(&values.into_numbers(), &dims, (rows, cols))?,
        };
        (codes, scale(tensors, layer)?)
    };
    Ok(Unpacked {
        rows,
        cols,
        bits: 2,
        codes,
        scales: vec![scale; rows],
        zeros: None,
        groups: None,
    })
}

/// Whether bytes of this shape hold four rows each.
fn is_packed(dims: &[usize], (rows, cols): (usize, usize)) -> bool {
    rows.is_multiple_of(IN_BYTE) && dims == [rows / IN_BYTE, cols]
}

/// The fields of bytes, which are values plus 1.
fn fields(bytes: &[u8], (rows, cols): (usize, usize)) -> Result<Vec<u8>> {
    // No field has both bits.
    if !pool::all(bytes, |byte| byte & byte >> 1 & 0x55 == 0) {
        bail!("weight: 2 is stored, expected -1, 0 or 1");
    }
    let height = rows / IN_BYTE;
    let mut codes = vec![0; rows * cols];
    pool::for_rows(&mut codes, cols, 8, |first, part| {
        for (row, codes) in (first..).zip(part.chunks_exact_mut(cols)) {
            let (field, bytes) = (row / height, &bytes[row % height * cols..]);
            for (code, byte) in codes.iter_mut().zip(bytes) {
                *code = byte >> (2 * field) & 3;
            }
        }
    });
    Ok(codes)
}

/// What is stored as numbers, one value in each or four, plus 1.
fn stored(values: &[f32], dims: &[usize], (rows, cols): (usize, usize)) -> Result<Vec<u8>> {
    let code = |value: f32| match value {
        0. => Ok(0),
        1. => Ok(1),
        2. => Ok(2),
        other => bail!("weight: {} is stored, expected -1, 0 or 1", other - 1.),
    };
    if dims == [rows, cols] {
        return values.iter().map(|value| code(value + 1.)).collect();
    }
    if !is_packed(dims, (rows, cols)) {
        bail!(
            "weight has shape {dims:?}, expected {rows} rows in bytes of {IN_BYTE} of them: [{rows} / {IN_BYTE}, \
             {cols}]"
        );
    }
    let is_byte = |value: &f32| (0. ..=255.).contains(value) && value.fract() == 0.;
    if let Some(value) = values.iter().find(|value| !is_byte(value)) {
        bail!("weight: {value} is stored, expected bytes of {IN_BYTE} values");
    }
    let bytes = pool::map(values, |value| *value as u8);
    fields(&bytes, (rows, cols))
}

/// What the stored values are multiplied by.
fn scale(tensors: &Tensors<'_>, layer: Layer) -> Result<f32> {
    let (scale, dims) = tensors.numbers(SCALE)?;
    match (scale.as_slice(), layer) {
        ([scale], Layer::Divided) => Ok(1. / scale),
        ([scale], _) => Ok(*scale),
        _ => bail!("{SCALE} has shape {dims:?}, expected one value"),
    }
}

/// The nearest ternary values, plus 1, and their scale, in f32 as transformers has them.
fn nearest(values: &[f32]) -> Result<(Vec<u8>, f32)> {
    let sum: f64 = values.iter().map(|w| f64::from(w.abs())).sum();
    let mean = (sum / values.len().max(1) as f64) as f32;
    if !mean.is_finite() {
        bail!("weight has values that are no numbers");
    }
    let by = 1. / mean.max(LEAST);
    let code = |w: &f32| ((w * by).round_ties_even().clamp(-1., 1.) + 1.) as u8;
    Ok((values.iter().map(code).collect(), 1. / by))
}
