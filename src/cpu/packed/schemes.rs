//! Matrices of [`Scheme`]s: from codes and back, from dense weights, and in place from a file.

use super::layout::{Layout, ROW_GROUP, SchemeBlock};
use super::matrix::{PackedBuilder, PackedMatrix};
use super::q8::TOGETHER;
use super::store::{FileBytes, Store};
use crate::cpu::quantize::{largest_magnitude, quantize_part, sum_of_magnitudes};
use crate::pool;
use crate::quant::{Codes, FP8_BLOCK, Format, NVFP4_GROUP, Scheme, TernaryScale, widened};
use candle_core::{Result, Tensor, bail};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Values that are widened and quantized at a time.
const PART: usize = 1 << 20;

impl PackedMatrix {
    /// Packs a matrix of codes.
    ///
    /// # Errors
    /// If the codes are not what their scheme asks for (see [`Codes::check`]), or do not fit into
    /// memory.
    pub fn from_codes(codes: &Codes) -> Result<Self> {
        codes.check()?;
        let mut builder = PackedBuilder::new(codes.scheme.into(), codes.rows, codes.cols)?;
        builder.push_codes(codes)?;
        builder.finish()
    }

    /// Quantizes a dense matrix `[rows, cols]` (f32, f16 or bf16, on any device) by `scheme`, some rows
    /// at a time, so that little more than the packed matrix is held beside it.
    ///
    /// # Errors
    /// If `weight` is not such a matrix, or as [`quantize`](crate::quant::quantize).
    pub fn quantize(weight: &Tensor, scheme: Scheme) -> Result<Self> {
        let (rows, cols) = weight.dims2()?;
        scheme.check(cols)?;
        let mut builder = PackedBuilder::new(scheme.into(), rows, cols)?;
        let whole = match scheme {
            Scheme::Ternary {
                scale: TernaryScale::Tensor,
            } => {
                let mut sum = 0.;
                for part in parts(rows, cols) {
                    sum += rows_in_f32(weight, part, sum_of_magnitudes)?;
                }
                Some((sum / (rows * cols).max(1) as f64) as f32)
            }
            Scheme::Nvfp4 => {
                let mut largest = 0f32;
                for part in parts(rows, cols) {
                    largest = largest.max(rows_in_f32(weight, part, largest_magnitude)?);
                }
                Some(largest)
            }
            _ => None,
        };
        for part in parts(rows, cols) {
            let codes = rows_in_f32(weight, part.clone(), |values| {
                quantize_part(values, &part, cols, scheme, whole)
            })??;
            builder.push_codes(&codes)?;
        }
        builder.finish()
    }

    /// The matrix of `scheme` whose packed bytes are `range` of a file, used where they are.
    ///
    /// # Errors
    /// If the range does not lie in the file, or has not exactly the bytes of such a matrix.
    pub(crate) fn mapped(
        scheme: Scheme,
        (rows, cols): (usize, usize),
        file: Arc<FileBytes>,
        range: Range<usize>,
    ) -> Result<Self> {
        let expected = packed_bytes(scheme, rows, cols)?;
        if range.start > range.end || range.end > file.len() || range.len() != expected {
            bail!(
                "bytes: {} given, but {rows} rows of {cols} values in {scheme} take {expected}",
                range.len()
            );
        }
        Ok(Self {
            format: scheme.into(),
            rows,
            cols,
            store: Store::Mapped(file, range),
        })
    }

    /// Whether products with `tokens` tokens are faster by table look-up
    /// ([`Q8Activations::prepare_look_ups`](super::Q8Activations::prepare_look_ups)): those of ternary
    /// weights with one. On Zen 3 they take 0.70 to 0.75 of the time of multiplying with a scale for each
    /// 128 activations, 0.9 with one for each 32, for 576 to 8,192 columns.
    pub fn looks_up(&self, tokens: usize) -> bool {
        tokens == 1 && self.is_ternary()
    }

    /// Whether the codes are ternary.
    pub fn is_ternary(&self) -> bool {
        matches!(self.format, Format::Scheme(Scheme::Ternary { .. }))
    }

    /// Whether products with a token are faster where 128 activations have one scale
    /// ([`Grain::wide`](super::Grain::wide)).
    pub fn takes_wide(&self) -> bool {
        let Format::Scheme(scheme @ Scheme::Ternary { .. }) = self.format else {
            return false;
        };
        scheme.group().is_none_or(|group| group == 32 * TOGETHER)
    }

    /// The packed bytes, row group by row group.
    pub fn bytes(&self) -> &[u8] {
        self.store.bytes()
    }

    /// The codes of a matrix of a [`Scheme`].
    ///
    /// # Errors
    /// If the matrix holds GGUF blocks.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_fused::cpu::packed::PackedMatrix;
    /// use candle_fused::quant::Scheme;
    /// let weight = Tensor::randn(0f32, 1., (16, 64), &Device::Cpu)?;
    /// let matrix = PackedMatrix::quantize(&weight, Scheme::Int8)?;
    /// let same = PackedMatrix::from_codes(&matrix.to_codes()?)?;
    /// assert_eq!(same.bytes(), matrix.bytes());
    /// // Only ternary weights look sums up, and take one scale for 128 activations.
    /// assert!(!matrix.is_ternary() && !matrix.looks_up(1) && !matrix.takes_wide());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn to_codes(&self) -> Result<Codes> {
        let shell = self.without_codes()?;
        let mut codes = vec![0i8; self.rows * self.cols];
        pool::for_rows(&mut codes, self.cols, ROW_GROUP, |first, rows| {
            self.read_codes(first, rows);
        });
        Ok(Codes { codes, ..shell })
    }

    /// The same without the codes themselves.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn without_codes(&self) -> Result<Codes> {
        let Format::Scheme(scheme) = self.format else {
            bail!("the matrix is {}, expected a scheme", self.format);
        };
        let layout = Layout::of_scheme(&scheme);
        let unit = match scheme.group() {
            Some(group) if scheme != Scheme::Nvfp4 => group / 32,
            _ => self.blocks(),
        };
        let height = match scheme {
            Scheme::Fp8Block128 => FP8_BLOCK,
            _ => 1,
        };
        let one = scheme.scale_count(self.rows, self.cols) == 1;
        let mut codes = Codes {
            scheme,
            rows: self.rows,
            cols: self.cols,
            codes: Vec::new(),
            scales: Vec::new(),
            zeros: Vec::new(),
            group_scales: Vec::new(),
        };
        let (parts, shell) = (Mutex::new(Vec::new()), codes.clone());
        pool::for_ranges(self.rows, ROW_GROUP, |rows| {
            let (first, mut part, mut room) = (rows.start, shell.clone(), Vec::new());
            for row in rows {
                let group = self.group(row / ROW_GROUP, &mut room);
                for block in 0..self.blocks() {
                    let begins = block % unit == 0 && row.is_multiple_of(height);
                    let has_scale = begins && (row == 0 || !one);
                    if !has_scale && scheme != Scheme::Nvfp4 {
                        continue;
                    }
                    let read = layout.read_scheme(group, block, row % ROW_GROUP);
                    if scheme == Scheme::Nvfp4 {
                        let groups = 32.min(self.cols - 32 * block) / NVFP4_GROUP;
                        part.group_scales.extend(&read.others[..groups]);
                    }
                    if has_scale {
                        part.scales.push(read.scale);
                        if scheme.has_zeros() {
                            part.zeros.push(read.others[0]);
                        }
                    }
                }
            }
            let mut parts = parts.lock().unwrap_or_else(|e| e.into_inner());
            parts.push((first, part));
        });
        let mut parts = parts.into_inner().unwrap_or_else(|e| e.into_inner());
        parts.sort_by_key(|(first, _)| *first);
        for (_, part) in parts {
            codes.scales.extend(part.scales);
            codes.zeros.extend(part.zeros);
            codes.group_scales.extend(part.group_scales);
        }
        Ok(codes)
    }

    /// The codes of whole rows, from row `first` on, of a matrix of a [`Scheme`].
    pub(crate) fn read_codes(&self, first: usize, rows: &mut [i8]) {
        let Format::Scheme(scheme) = self.format else {
            return;
        };
        let (layout, mut room) = (Layout::of_scheme(&scheme), Vec::new());
        for (row, out) in (first..).zip(rows.chunks_exact_mut(self.cols)) {
            let group = self.group(row / ROW_GROUP, &mut room);
            for (block, out) in out.chunks_mut(32).enumerate() {
                let read = layout.read_scheme(group, block, row % ROW_GROUP);
                out.copy_from_slice(&read.codes[..out.len()]);
            }
        }
    }
}

impl PackedBuilder {
    /// Appends the rows of `codes`.
    fn push_codes(&mut self, codes: &Codes) -> Result<()> {
        let (format, cols) = self.format();
        debug_assert_eq!((format, cols), (codes.scheme.into(), codes.cols));
        self.push_with(codes.rows, |layout, group, row, lane| {
            let values = &codes.codes[row * cols..][..cols];
            for (block, values) in values.chunks(32).enumerate() {
                let (scale, first) = codes.meaning(row, 32 * block);
                let second = match values.len() > NVFP4_GROUP {
                    true => codes.meaning(row, 32 * block + NVFP4_GROUP).1,
                    // Of values that are not there.
                    false if codes.scheme == Scheme::Nvfp4 => 0,
                    false => first,
                };
                let mut read = SchemeBlock {
                    codes: [0; 32],
                    scale,
                    others: [first, second],
                };
                read.codes[..values.len()].copy_from_slice(values);
                layout.write_scheme(group, block, lane, &read);
            }
        })
    }
}

/// Bytes of the packed form of a matrix.
///
/// # Errors
/// If the scheme cannot be had for rows of this width, or there are too many.
pub(crate) fn packed_bytes(scheme: Scheme, rows: usize, cols: usize) -> Result<usize> {
    scheme.check(cols)?;
    match Layout::of_scheme(&scheme).matrix(rows, cols) {
        Some(bytes) => Ok(bytes),
        None => bail!("rows: {rows} rows of {cols} values are too many"),
    }
}

/// Ranges of rows of about [`PART`] values.
fn parts(rows: usize, cols: usize) -> impl Iterator<Item = Range<usize>> {
    // Whole row groups, and whole blocks of FP8.
    let some = (PART / cols.max(1)).max(1).next_multiple_of(FP8_BLOCK);
    (0..rows)
        .step_by(some)
        .map(move |first| first..(first + some).min(rows))
}

/// What `take` makes of some rows of a matrix in f32.
fn rows_in_f32<T>(
    weight: &Tensor,
    rows: Range<usize>,
    take: impl FnOnce(&[f32]) -> T,
) -> Result<T> {
    widened(&weight.narrow(0, rows.start, rows.len())?, take)
}
