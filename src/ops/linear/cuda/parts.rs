//! Few rows of x and weights of any kinds: each run of one kind in a launch of its own.

use super::blocks::{FewBlocks, few_blocks};
use super::few::{FEW, FewRows, few_rows};
use super::gemv::NormAt;
use crate::cuda::{Address, Gpu, Launcher, address_of};
use crate::ops::linear::{Activation, Weight};
use candle_core::{DType, Result, bail};

/// Dense matrices of one launch.
const MOST_DENSE: usize = 3;

/// A product without its weights, on raw addresses; 0 stands for no tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductAt {
    /// `[m, k]`.
    pub x: Address,
    /// In front of the product.
    pub norm: Option<NormAt>,
    /// `[rows of all weights]`.
    pub bias: Address,
    pub activation: Activation,
    /// `[m, width]`, each row `stride` elements after the one before.
    pub residuals: [Address; 2],
    /// Likewise; with `out_dtype`.
    pub out: Address,
    /// Elements from one row of the output to the next, at least the width.
    pub stride: usize,
    pub m: usize,
    pub k: usize,
    /// Of x, the norm, the bias and the residuals.
    pub x_dtype: DType,
    /// x's dtype, or, for few rows, f32.
    pub out_dtype: DType,
}

impl ProductAt {
    /// Fails if the library's product with weights of so many rows would write its outputs otherwise.
    pub fn check_for_library(&self, op: &str, rows: usize) -> Result<()> {
        let width = self.activation.outputs(rows);
        if self.stride != width || self.out_dtype != self.x_dtype {
            bail!(
                "{op}: {} rows of {:?} to rows of {:?} {} elements apart, expected the same dtype and \
                 {width} elements",
                self.m,
                self.x_dtype,
                self.out_dtype,
                self.stride
            );
        }
        Ok(())
    }

    /// The same for weights whose outputs begin at `column`.
    fn at_column(&self, column: usize) -> Self {
        let behind = |base: Address, dtype: DType| match base {
            0 => 0,
            base => base + (column * dtype.size_in_bytes()) as u64,
        };
        Self {
            bias: behind(self.bias, self.x_dtype),
            residuals: self.residuals.map(|r| behind(r, self.x_dtype)),
            out: behind(self.out, self.out_dtype),
            ..*self
        }
    }
}

/// A product of few rows, with the weights in blocks it reads; dense ones are the caller's to keep.
#[derive(Clone, Debug)]
pub(crate) struct Few {
    parts: Vec<Part>,
}

/// Neighbours among the weights that a kernel takes together.
#[derive(Clone, Debug)]
enum Part {
    Blocks(FewBlocks),
    Dense(FewRows),
}

impl Few {
    /// The product of rows that are at `at` with `weights`, dense ones of which are contiguous; none
    /// if no kernel for few rows takes it.
    ///
    /// # Errors
    /// If the weights are not on a GPU.
    pub fn new(launcher: &Launcher, weights: &[Weight], at: &ProductAt) -> Result<Option<Self>> {
        let mut parts = Vec::new();
        let mut column = 0;
        for run in weights.chunk_by(alike) {
            for run in run.chunks(most(&run[0])) {
                parts.push(Part::new(run, &at.at_column(column))?);
                column += run.iter().map(Weight::rows).sum::<usize>();
            }
        }
        let gates = at.activation == Activation::SwiGlu;
        let takes = !(gates && parts.len() > 1)
            && parts.iter().all(|part| match part {
                Part::Blocks(part) => part.fits(launcher),
                Part::Dense(part) => at.m <= FEW && part.fits(launcher),
            });
        Ok(takes.then_some(Self { parts }))
    }
}

impl Few {
    /// The kernel of each part, for the trace.
    pub fn path(&self, gpu: &Gpu) -> String {
        let paths = self.parts.iter().map(|part| match part {
            Part::Blocks(_) => "blocks".to_owned(),
            Part::Dense(part) => part.path(gpu),
        });
        paths.collect::<Vec<_>>().join(" and ")
    }

    /// The product, if dense weights of one dtype are all there is to it.
    pub fn dense(&self) -> Option<&FewRows> {
        match &self.parts[..] {
            [Part::Dense(rows)] => Some(rows),
            _ => None,
        }
    }
}

impl From<FewRows> for Few {
    fn from(rows: FewRows) -> Self {
        Self {
            parts: vec![Part::Dense(rows)],
        }
    }
}

/// Launches the product.
///
/// # Safety
/// Each address holds what its field says, until the stream has passed the launches. In a dependent
/// chain no kernel in front writes weights, norm or bias.
pub(crate) unsafe fn few(launcher: &Launcher, few: &Few) -> Result<()> {
    few.parts.iter().try_for_each(|part| {
        // SAFETY: the caller's.
        unsafe {
            match part {
                Part::Blocks(part) => few_blocks(launcher, part),
                Part::Dense(part) => few_rows(launcher, part),
            }
        }
    })
}

/// Whether a kernel takes both.
fn alike(a: &Weight, b: &Weight) -> bool {
    match (a, b) {
        (Weight::Dense(a), Weight::Dense(b)) => a.dtype() == b.dtype(),
        (a, b) => a.is_quantized() && b.is_quantized(),
    }
}

/// Weights of a part.
fn most(weight: &Weight) -> usize {
    match weight {
        Weight::Dense(_) => MOST_DENSE,
        _ => usize::MAX,
    }
}

impl Part {
    fn new(run: &[Weight], at: &ProductAt) -> Result<Self> {
        let mut dense = [(0, 0); MOST_DENSE];
        let mut w_dtype = at.x_dtype;
        let mut blocks = Vec::new();
        for (i, weight) in run.iter().enumerate() {
            match weight {
                Weight::Blocks(w) => blocks.push(w.clone()),
                Weight::Dense(w) => {
                    dense[i] = (address_of(w)?, w.dims()[0]);
                    w_dtype = w.dtype();
                }
                Weight::Packed(_) => bail!("weights are packed for the CPU"),
            }
        }
        if !blocks.is_empty() {
            return Ok(Part::Blocks(FewBlocks {
                weights: blocks,
                at: *at,
            }));
        }
        Ok(Part::Dense(FewRows {
            x: at.x,
            norm: at.norm,
            weights: dense,
            second: None,
            fetch: None,
            bias: at.bias,
            activation: at.activation,
            residuals: at.residuals,
            out: at.out,
            stride: at.stride,
            m: at.m,
            k: at.k,
            x_dtype: at.x_dtype,
            w_dtype,
            out_dtype: at.out_dtype,
        }))
    }
}
