//! A quantized matrix out of its packing, before it gets a format of the crate's own.

use crate::nn::pack::{blocks_on_device, on_device};
use crate::nn::{InputOrder, LinearWeight};
use crate::pool;
use crate::quant::{Codes, Scheme, TernaryScale};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor, bail};
use half::f16;

/// Values of a block of Q8_0.
const BLOCK: usize = 32;

/// Below these an f16 is no normal number, and its steps are 2^-24.
const NORMAL: f32 = 1. / 16384.;

/// `w[n, k] = s[n, g] (q[n, k] - z[n, g])`, with g the group of column k.
#[derive(Clone, Debug, PartialEq)]
pub struct Unpacked {
    /// Output channels.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// Of a code: 2, of ternary values, 4 or 8.
    pub bits: u32,
    /// q, `[rows, cols]`, unsigned.
    pub codes: Vec<u8>,
    /// s, `[rows, groups]`.
    pub scales: Vec<f32>,
    /// z, `[rows, groups]`; none for half of the codes' range, or 1 of ternary values.
    pub zeros: Option<Vec<u8>>,
    /// The group of each column, if columns are not grouped in their order.
    pub groups: Option<Vec<i32>>,
}

/// Where a weight is wanted, and in which form.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    pub device: &'a Device,
    /// Of numbers.
    pub dtype: DType,
    /// Whether it is wanted in the form that fused products take; else as numbers.
    pub fused: bool,
}

impl Target<'_> {
    /// Whether a GPU unpacks words of codes itself, of a matrix whose `heads` are put apart on the host, if any are.
    pub fn unpacks_words(&self, heads: Option<usize>) -> bool {
        heads.is_none() && self.fused && self.device.is_cuda()
    }
}

impl Unpacked {
    /// The weight on its device, with the rows of `heads` put apart as [`Source::matrix`] has it.
    ///
    /// [`Source::matrix`]: crate::models::weights::Source::matrix
    ///
    /// # Errors
    /// If a length is not the one that follows from the others, or no format here holds the numbers
    /// exactly.
    pub fn into_weight(mut self, heads: Option<usize>, to: Target<'_>) -> Result<LinearWeight> {
        let group = self.check()?;
        if let Some(heads) = heads {
            self.put_apart(heads)?;
        }
        if !to.fused {
            let values = self.into_values(to.dtype)?.to_device(to.device)?;
            return Ok(LinearWeight::Dense(values));
        }
        let order = self.sort(group)?;
        let weight = match self.bits {
            2 => on_device(&self.into_ternary()?, to.device)?,
            4 => on_device(&self.into_int4(group)?, to.device)?,
            _ if group == self.cols => on_device(&self.into_int8()?, to.device)?,
            _ => {
                let size = (self.rows, self.cols);
                blocks_on_device(GgmlDType::Q8_0, size, &self.q8_0(group)?, to.device)?
            }
        };
        Ok(match order {
            Some(order) => LinearWeight::Reordered(weight, InputOrder::new(order, to.device)?),
            None => LinearWeight::Packed(weight),
        })
    }

    /// The numbers `[rows, cols]`, on the host.
    ///
    /// # Errors
    /// If a length is not the one that follows from the others.
    pub fn into_values(mut self, dtype: DType) -> Result<Tensor> {
        let group = self.check()?;
        let order = self.sort(group)?;
        let values = Tensor::from_vec(self.values(), (self.rows, self.cols), &Device::Cpu)?;
        let values = match order {
            Some(order) => InputOrder::new(order, &Device::Cpu)?.restore(&values)?,
            None => values,
        };
        values.to_dtype(dtype)
    }

    /// z where none is stored.
    fn middle(&self) -> u8 {
        match self.bits {
            2 => 1,
            bits => 1 << (bits - 1),
        }
    }

    /// Values of a row that share a scale.
    fn check(&self) -> Result<usize> {
        let (rows, cols) = (self.rows, self.cols);
        if rows.checked_mul(cols) != Some(self.codes.len()) {
            bail!("codes: {} given for {rows} x {cols}", self.codes.len());
        }
        self.check_scales()
    }

    /// The same without the codes, which may be elsewhere.
    pub(super) fn check_scales(&self) -> Result<usize> {
        let Self {
            rows, cols, bits, ..
        } = *self;
        if ![2, 4, 8].contains(&bits) {
            bail!("bits: {bits}, expected 2, 4 or 8");
        }
        if rows == 0 || cols == 0 {
            bail!("codes: a matrix of {rows} x {cols}, expected some");
        }
        let count = self.scales.len();
        let groups = count / rows;
        if groups == 0 || !count.is_multiple_of(rows) || !cols.is_multiple_of(groups) {
            bail!("scales: {count} given for {rows} x {cols}, expected some for each row");
        }
        if let Some(zeros) = self.zeros.as_ref().filter(|zeros| zeros.len() != count) {
            bail!("zero points: {} given, expected {count}", zeros.len());
        }
        if let Some(at) = pool::first_without(&self.scales, |scale| scale.is_finite()) {
            bail!("scales: {}, expected a number", self.scales[at]);
        }
        Ok(cols / groups)
    }

    /// Rows `[heads, 3, ..]` as `[3, heads, ..]`.
    fn put_apart(&mut self, heads: usize) -> Result<()> {
        let (rows, cols) = (self.rows, self.cols);
        let source = put_apart(rows, heads)?;
        let groups = self.scales.len() / rows;
        self.codes = gathered(&self.codes, cols, rows, &source);
        self.scales = gathered(&self.scales, groups, rows, &source);
        self.zeros = self
            .zeros
            .take()
            .map(|z| gathered(&z, groups, rows, &source));
        Ok(())
    }

    /// Sorts the columns by their groups; gives the column that each was, or none if they are in order.
    fn sort(&mut self, group: usize) -> Result<Option<Vec<u32>>> {
        let order = self.order(group)?;
        self.groups = None;
        if let Some(order) = &order {
            let mut sorted = vec![0; self.cols];
            for row in self.codes.chunks_exact_mut(self.cols) {
                for (to, from) in sorted.iter_mut().zip(order) {
                    *to = row[*from as usize];
                }
                row.copy_from_slice(&sorted);
            }
        }
        Ok(order)
    }

    /// The columns in the order of their groups; none if they are in that order.
    pub(super) fn order(&self, group: usize) -> Result<Option<Vec<u32>>> {
        let Some(groups) = &self.groups else {
            return Ok(None);
        };
        let cols = self.cols;
        // A checkpoint without act order may say nothing by -1.
        let plain = |(k, g): (usize, &i32)| usize::try_from(*g) == Ok(k / group);
        if groups.len() == cols
            && (groups.iter().enumerate().all(plain) || groups.iter().all(|g| *g == -1))
        {
            return Ok(None);
        }
        let mut order: Vec<u32> = (0..cols as u32).collect();
        order.sort_by_key(|k| groups.get(*k as usize));
        let in_place = |(at, k): (usize, &u32)| {
            let of = groups.get(*k as usize).copied();
            of.and_then(|g| usize::try_from(g).ok()) == Some(at / group)
        };
        if groups.len() != cols || !order.iter().enumerate().all(in_place) {
            bail!(
                "group index: expected each of the {} groups for {group} of the {cols} columns",
                cols / group
            );
        }
        Ok(Some(order))
    }

    /// `[rows, cols]`, with the columns as they are.
    fn values(&self) -> Vec<f32> {
        let groups = self.scales.len() / self.rows;
        let group = self.cols / groups;
        let middle = self.middle();
        let mut values = Vec::with_capacity(self.codes.len());
        for (index, codes) in self.codes.chunks_exact(group).enumerate() {
            let zero = self.zeros.as_ref().map_or(middle, |zeros| zeros[index]);
            let scale = self.scales[index];
            values.extend(
                codes
                    .iter()
                    .map(|q| scale * f32::from(i16::from(*q) - i16::from(zero))),
            );
        }
        values
    }

    fn into_int4(self, group: usize) -> Result<Codes> {
        let shell = self.int4(group)?;
        if let Some(at) = pool::first_without(&self.codes, |q| *q <= 15) {
            bail!("codes: {}, expected 0 to 15", self.codes[at]);
        }
        Ok(Codes {
            codes: pool::map(&self.codes, |q| *q as i8),
            ..shell
        })
    }

    /// As INT4, without the codes.
    pub(super) fn int4(&self, group: usize) -> Result<Codes> {
        let Some(ours) = [128, 64, 32]
            .into_iter()
            .find(|ours| group.is_multiple_of(*ours))
        else {
            bail!("groups of {group} columns, expected a multiple of 32");
        };
        let times = group / ours;
        let middle = self.middle();
        let zeros = self.zeros.as_ref();
        let zeros = zeros.filter(|z| !pool::all(z, |z| *z == middle));
        let zeros = match zeros {
            Some(zeros) => {
                if let Some(z) = zeros.iter().find(|z| **z > 15) {
                    bail!("zero points: {z}, expected 0 to 15");
                }
                // The crate's are in sixteenths.
                repeated(pool::map(zeros, |z| 16 * z), times)
            }
            None => Vec::new(),
        };
        let scales = halves(&self.scales)?;
        Ok(Codes {
            scheme: Scheme::Int4 {
                group: ours,
                zero_point: !zeros.is_empty(),
            },
            rows: self.rows,
            cols: self.cols,
            codes: Vec::new(),
            scales: repeated(scales, times),
            zeros,
            group_scales: Vec::new(),
        })
    }

    fn into_ternary(self) -> Result<Codes> {
        if self.scales.len() != self.rows || self.zeros.is_some() {
            bail!("scales: expected one for each row of ternary values, and no zero points");
        }
        Ok(Codes {
            scheme: Scheme::Ternary {
                scale: TernaryScale::Row,
            },
            rows: self.rows,
            cols: self.cols,
            codes: pool::map(&self.codes, |q| *q as i8 - 1),
            scales: self.scales,
            zeros: Vec::new(),
            group_scales: Vec::new(),
        })
    }

    /// The zero points of 8 bits are those of no format here.
    fn check_middle(&self) -> Result<()> {
        let mut zeros = self.zeros.iter().flatten();
        match zeros.find(|z| **z != self.middle()) {
            Some(z) => bail!("zero points: {z} of 8 bits, expected 128, as symmetric weights have"),
            None => Ok(()),
        }
    }

    fn into_int8(self) -> Result<Codes> {
        let shell = self.int8()?;
        Ok(Codes {
            codes: pool::map(&self.codes, |q| signed(*q)),
            ..shell
        })
    }

    /// As INT8, without the codes.
    pub(super) fn int8(&self) -> Result<Codes> {
        self.check_middle()?;
        Ok(Codes {
            scheme: Scheme::Int8,
            rows: self.rows,
            cols: self.cols,
            codes: Vec::new(),
            scales: self.scales.clone(),
            zeros: Vec::new(),
            group_scales: Vec::new(),
        })
    }

    /// 8 bits in groups are blocks of Q8_0 that share their scales.
    fn q8_0(&self, group: usize) -> Result<Vec<u8>> {
        self.check_middle()?;
        if !group.is_multiple_of(BLOCK) {
            bail!("groups of {group} columns, expected a multiple of {BLOCK}");
        }
        let scales = halves(&self.scales)?;
        let mut blocks = Vec::with_capacity(self.codes.len() / BLOCK * (BLOCK + 2));
        for (codes, scale) in self.codes.chunks_exact(group).zip(&scales) {
            for codes in codes.chunks_exact(BLOCK) {
                blocks.extend(f16::from_f32(*scale).to_le_bytes());
                blocks.extend(codes.iter().map(|q| signed(*q) as u8));
            }
        }
        Ok(blocks)
    }
}

/// A code of 8 bits less 128.
fn signed(code: u8) -> i8 {
    (code ^ 0x80) as i8
}

/// Scales that f16 holds; tiny ones in its steps.
fn halves(scales: &[f32]) -> Result<Vec<f32>> {
    let half = |scale: &f32| f16::from_f32(*scale).to_f32();
    let is_half = |scale: &f32| half(scale) == *scale || scale.abs() < NORMAL;
    if let Some(at) = pool::first_without(scales, is_half) {
        bail!("scales: {}, expected an f16", scales[at]);
    }
    Ok(pool::map(scales, half))
}

/// Each value so many times.
fn repeated<T: Copy>(values: Vec<T>, times: usize) -> Vec<T> {
    let each = |value: T| std::iter::repeat_n(value, times);
    match times {
        1 => values,
        _ => values.into_iter().flat_map(each).collect(),
    }
}

/// Where each of the rows `[3, heads, ..]` is among `[heads, 3, ..]`.
pub fn put_apart(rows: usize, heads: usize) -> Result<impl Fn(usize) -> usize> {
    if heads == 0 || !rows.is_multiple_of(heads.saturating_mul(3)) {
        bail!("{rows} rows are not queries, keys and values of {heads} heads");
    }
    let size = rows / 3 / heads;
    Ok(move |row: usize| {
        let (part, head, within) = (row / (heads * size), row / size % heads, row % size);
        (3 * head + part) * size + within
    })
}

/// Rows of `width` values, row i being that at `source(i)`.
pub fn gathered<T: Copy>(
    values: &[T],
    width: usize,
    rows: usize,
    source: impl Fn(usize) -> usize,
) -> Vec<T> {
    let row = |row| &values[source(row) * width..][..width];
    (0..rows).flat_map(row).copied().collect()
}
