//! The inputs of a layer, summed up.

use super::Options;
use super::factor::{InverseFactor, factorize};
use crate::pool;
use candle_core::{D, DType, Device, Result, Tensor, bail};

/// Columns whose products with all columns before them are computed at a time.
const PANEL: usize = 512;

/// Larger inputs would have sums that an f32 does not hold.
const MOST: f32 = 1e15;

/// `Xᵀ X` of all inputs X that a layer has met, in f64: `8 K²` bytes. H is twice as much, which makes no difference.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::quant::gptq::{Hessian, Options};
/// let mut hessian = Hessian::new(2)?;
/// hessian.add(&Tensor::new(&[[1f32, 2.], [3., 4.], [5., 6.]], &Device::Cpu)?)?;
/// assert_eq!((hessian.inputs(), hessian.rows()), (2, 3));
/// let inverse = hessian.inverse(&Options::default())?;
/// # assert_eq!(format!("{inverse:?}"), "InverseFactor(2 inputs)");
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Hessian {
    inputs: usize,
    rows: u64,
    /// `[K, K]`, of which the lower triangle is in use.
    sums: Vec<f64>,
}

impl std::fmt::Debug for Hessian {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hessian({} inputs, {} rows)", self.inputs, self.rows)
    }
}

impl Hessian {
    /// Of a layer with `inputs` inputs, K, that has met none yet.
    ///
    /// # Errors
    /// If `inputs` is 0, or there is no memory for `inputs²` numbers.
    pub fn new(inputs: usize) -> Result<Self> {
        let mut sums = Vec::new();
        let room = inputs.checked_mul(inputs).filter(|count| *count > 0);
        match room.map(|count| (count, sums.try_reserve_exact(count))) {
            Some((count, Ok(()))) => sums.resize(count, 0.),
            _ => bail!("inputs: {inputs}, expected 1 or more, and memory for their square"),
        }
        Ok(Self {
            inputs,
            rows: 0,
            sums,
        })
    }

    /// Adds inputs `[.., K]` (f32, f16 or bf16, on any device). Products are summed in f32 over the rows of one call
    /// and in f64 over calls, so hand over some thousand rows at a time.
    ///
    /// # Errors
    /// If x has no rows of K values, or one of them is no number below 1e15 in magnitude, by its place.
    pub fn add(&mut self, x: &Tensor) -> Result<()> {
        let inputs = self.inputs;
        if x.rank() == 0 || x.dim(D::Minus1)? != inputs {
            bail!("x: shape {:?}, expected [.., {inputs}]", x.dims());
        }
        let x = x.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
        let rows = x.elem_count() / inputs;
        if rows == 0 {
            return Ok(());
        }
        let x = x.reshape((rows, inputs))?.contiguous()?;
        let values = x.flatten_all()?.to_vec1::<f32>()?;
        let wrong = |v: &f32| v.is_nan() || v.abs() >= MOST;
        if let Some(at) = values.iter().position(wrong) {
            bail!(
                "x: {} at row {}, column {}, expected a finite number below {MOST:e}",
                values[at],
                at / inputs,
                at % inputs
            );
        }
        drop(values);
        for first in (0..inputs).step_by(PANEL) {
            let len = PANEL.min(inputs - first);
            let end = first + len;
            let panel = x.narrow(1, first, len)?.t()?;
            let products = panel.matmul(&x.narrow(1, 0, end)?)?;
            let products = products.flatten_all()?.to_vec1::<f32>()?;
            let rows = &mut self.sums[first * inputs..end * inputs];
            pool::for_rows(rows, inputs, 1, |begin, rows| {
                for (i, row) in rows.chunks_exact_mut(inputs).enumerate() {
                    let products = &products[(begin + i) * end..][..end];
                    for (sum, product) in row.iter_mut().zip(products) {
                        *sum += f64::from(*product);
                    }
                }
            });
        }
        self.rows += rows as u64;
        Ok(())
    }

    /// Inputs of the layer, K.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Rows that have been added.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// `Xᵀ X` at `[i, j]`, and at `[j, i]`.
    fn at(&self, i: usize, j: usize) -> f64 {
        self.sums[i.max(j) * self.inputs + i.min(j)]
    }

    /// N of `H⁻¹ = Nᵀ N`, for [`quantize`](super::quantize): `16 K²` bytes while it is computed, then `8 K²`.
    ///
    /// # Errors
    /// If no inputs have been added or all were zero, the damping is not above 0, or so small that H is not positive
    /// definite as numbers are rounded.
    pub fn inverse(&self, options: &Options) -> Result<InverseFactor> {
        options.check()?;
        let inputs = self.inputs;
        if self.rows == 0 {
            bail!("hessian: no inputs have been added");
        }
        let diagonal: Vec<f64> = (0..inputs).map(|k| self.at(k, k)).collect();
        let mean = diagonal.iter().sum::<f64>() / inputs as f64;
        if mean == 0. {
            bail!("hessian: all inputs were zero");
        }
        // The last is visited first.
        let mut order: Vec<usize> = (0..inputs).rev().collect();
        if options.act_order {
            order.sort_by(|a, b| diagonal[*a].total_cmp(&diagonal[*b]));
        }
        let damping = options.damping * mean;
        let mut lower = vec![0f64; inputs * inputs];
        pool::for_rows(&mut lower, inputs, 1, |first, rows| {
            for (i, row) in (first..).zip(rows.chunks_exact_mut(inputs)) {
                for (j, value) in row[..=i].iter_mut().enumerate() {
                    *value = self.at(order[i], order[j]);
                }
                row[i] += damping;
            }
        });
        match factorize(lower, inputs)? {
            Ok(lower) => Ok(InverseFactor { order, lower }),
            Err(at) => bail!(
                "hessian: not positive definite at input {} with damping {}, expected more damping",
                order[at],
                options.damping
            ),
        }
    }
}
