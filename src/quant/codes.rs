//! A quantized matrix in plain form.

use super::scheme::{FP8_BLOCK, NVFP4_GROUP};
use super::{Scheme, e2m1, e4m3, nf4};
use crate::pool;
use candle_core::{Result, bail};
use half::f16;

/// Zero points are stored in these steps. Codes of 0 to 15 less such a zero point have no more than 8
/// significant bits, so that bf16 holds them exactly.
pub(crate) const ZERO_STEP: f32 = 1. / 16.;

/// The zero point of codes of 0 to 15 where none is stored: 8.
pub(crate) const MIDDLE: u8 = 8 * 16;

/// A quantized matrix in plain form, a byte for each code, before it gets the layout of a device.
///
/// ```
/// use candle_fused::quant::{Scheme, quantize};
/// let weights: Vec<f32> = (0..64).map(|i| i as f32 / 63. - 0.5).collect();
/// let codes = quantize(&weights, 2, 32, Scheme::Int8)?;
/// codes.check()?;
/// let back = codes.dequantize();
/// assert!(weights.iter().zip(back).all(|(a, b)| (a - b).abs() < 0.5 / 127.));
/// // A byte for each weight, and a scale for each row.
/// assert!(codes.nominal_bytes() < 4 * weights.len());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Codes {
    /// How codes become values.
    pub scheme: Scheme,
    /// Output channels.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// `[rows, cols]`, in the range that the scheme names; e4m3 and e2m1 floats by their bits.
    pub codes: Vec<i8>,
    /// `[1]`, `[rows]` or `[rows, cols / group]`, each exactly an f16 for [`Scheme::Int4`] and the
    /// groups of [`Scheme::Ternary`]; of [`Scheme::Fp8Block128`] `[rows / 128, cols / 128]`, both rounded up. Those
    /// of FP8 are not negative.
    pub scales: Vec<f32>,
    /// `[rows, cols / group]` in sixteenths where the scheme stores zero points, else empty.
    pub zeros: Vec<u8>,
    /// `[rows, cols / 16]`, the e4m3 scales of [`Scheme::Nvfp4`] by their bits, numbers of positive sign; else empty.
    pub group_scales: Vec<u8>,
}

impl Codes {
    /// Checks that everything is there and in range.
    ///
    /// # Errors
    /// If a length, a code or a scale is not what the scheme asks for.
    pub fn check(&self) -> Result<()> {
        self.scheme.check(self.cols)?;
        self.check_codes()?;
        self.check_scales()
    }

    fn check_codes(&self) -> Result<()> {
        let Self {
            scheme, rows, cols, ..
        } = self;
        if rows.checked_mul(*cols) != Some(self.codes.len()) {
            bail!("codes: {} given for {rows} x {cols}", self.codes.len());
        }
        let (low, high) = scheme.code_range();
        if let Some(at) = pool::first_without(&self.codes, |q| (low..=high).contains(q)) {
            bail!(
                "codes: {} at row {}, column {}, expected {low} to {high}",
                self.codes[at],
                at / cols,
                at % cols
            );
        }
        Ok(())
    }

    /// [`Self::check`] without the codes, which may be elsewhere.
    pub(crate) fn check_scales(&self) -> Result<()> {
        let Self {
            scheme, rows, cols, ..
        } = self;
        scheme.check(*cols)?;
        let scales = scheme.scale_count(*rows, *cols);
        if self.scales.len() != scales {
            bail!(
                "scales: {} given, expected {scales} for {rows} x {cols} in {scheme}",
                self.scales.len()
            );
        }
        let zeros = if scheme.has_zeros() { scales } else { 0 };
        if self.zeros.len() != zeros {
            bail!(
                "zeros: {} given, expected {zeros} for {rows} x {cols} in {scheme}",
                self.zeros.len()
            );
        }
        let groups = scheme.group_scale_count(*rows, *cols);
        if self.group_scales.len() != groups {
            bail!(
                "group_scales: {} given, expected {groups} for {rows} x {cols} in {scheme}",
                self.group_scales.len()
            );
        }
        if let Some(at) = pool::first_without(&self.group_scales, |b| *b < e4m3::NAN) {
            let b = self.group_scales[at];
            bail!("group_scales: {b:#x}, expected an e4m3 number of positive sign");
        }
        let half = scheme.has_f16_scales();
        let is_stored = |s: &f32| {
            s.is_finite()
                & (!half || f16::from_f32(*s).to_f32() == *s)
                & (!scheme.is_fp8() || s.is_sign_positive())
        };
        if let Some(at) = pool::first_without(&self.scales, is_stored) {
            let s = self.scales[at];
            let kind = match (half, scheme.is_fp8()) {
                (true, _) => "an f16",
                (_, true) => "a finite number of positive sign",
                _ => "a finite number",
            };
            bail!("scales: {s} is not {kind}");
        }
        Ok(())
    }

    /// What a row's codes mean: of the value at `row`, `col` the scale, and the zero point in sixteenths or the e4m3 scale of
    /// its group.
    pub(crate) fn meaning(&self, row: usize, col: usize) -> (f32, u8) {
        let at = match self.scheme.group() {
            _ if self.scheme == Scheme::Nvfp4 => row,
            Some(_) if self.scheme == Scheme::Fp8Block128 => {
                row / FP8_BLOCK * self.cols.div_ceil(FP8_BLOCK) + col / FP8_BLOCK
            }
            Some(group) => row * (self.cols / group) + col / group,
            None if self.scales.len() == 1 => 0,
            None => row,
        };
        let zero = match self.scheme {
            Scheme::Int4 {
                zero_point: true, ..
            } => self.zeros[at],
            Scheme::Int4 { .. } => MIDDLE,
            Scheme::Nvfp4 => self.group_scales[row * (self.cols / NVFP4_GROUP) + col / NVFP4_GROUP],
            _ => 0,
        };
        (self.scales[at], zero)
    }

    /// The value of a code whose meaning is known.
    pub(crate) fn value(scheme: Scheme, code: i8, (scale, other): (f32, u8)) -> f32 {
        match scheme {
            Scheme::Fp8 | Scheme::Fp8Block128 => scale * e4m3::to_f32(code as u8),
            // The product of two small floats is exact.
            Scheme::Nvfp4 => scale * (e2m1::to_f32(code as u8) * e4m3::to_f32(other)),
            Scheme::Nf4 => scale * nf4::to_f32(code as u8),
            _ => scale * (f32::from(code) - f32::from(other) * ZERO_STEP),
        }
    }

    /// The values, `[rows, cols]`: `s * (q - z)`, `s * w`, `s * (b w)` or `s * t`, rounded once to f32. The oracle of every kernel.
    pub fn dequantize(&self) -> Vec<f32> {
        let unit = self.scheme.group().unwrap_or(self.cols);
        let mut values = Vec::with_capacity(self.codes.len());
        for (row, codes) in self.codes.chunks_exact(self.cols.max(1)).enumerate() {
            for (index, codes) in codes.chunks(unit).enumerate() {
                let by = self.meaning(row, index * unit);
                values.extend(codes.iter().map(|q| Self::value(self.scheme, *q, by)));
            }
        }
        values
    }

    /// Bytes that the codes, scales and zero points take at their nominal widths, without the padding
    /// of any layout.
    pub fn nominal_bytes(&self) -> usize {
        let scale = if self.scheme.has_f16_scales() { 2 } else { 4 };
        let codes = (self.codes.len() * self.scheme.bits() as usize).div_ceil(8);
        codes + scale * self.scales.len() + self.zeros.len() + self.group_scales.len()
    }
}
