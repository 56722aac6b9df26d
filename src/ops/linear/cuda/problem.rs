//! What is asked of a product: its operands by address, and the [`Case`] that a kernel is chosen by.

use crate::cuda::abi;
pub(crate) use crate::cuda::abi::{Fetch, MAX_WEIGHTS as MAX_MATRICES};
use crate::cuda::{Address, BlockMatrix, GpuSpec, Launcher, Preceding, address_of};
use crate::ops::linear::{Activation, ActivationBits, Weight};
use crate::quant::{Format, Scaling, Scheme};
use candle_core::{DType, Result, bail};
use std::fmt;
use std::sync::Arc;

/// Which norm is the prologue of a product, as the kernels number them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum NormKind {
    Rms = abi::NORM_RMS as isize,
    Layer = abi::NORM_LAYER as isize,
}

/// A norm on raw addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormAt {
    pub kind: NormKind,
    /// `[k]`.
    pub weight: Address,
    /// Likewise, for a layer norm; 0 for none.
    pub bias: Address,
    pub eps: f32,
}

/// A product without its weights, on raw addresses; 0 stands for no tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductAt {
    /// `[m, k]`.
    pub x: Address,
    /// In front of the product.
    pub norm: Option<NormAt>,
    /// `[output channels of all weights]`.
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
    /// With quantized weights.
    pub x_bits: ActivationBits,
    /// x's dtype, or f32.
    pub out_dtype: DType,
}

impl ProductAt {
    /// The same for weights whose outputs begin at `column`.
    pub fn at_column(&self, column: usize) -> Self {
        let (x, out) = (self.x_dtype.size_in_bytes(), self.out_dtype.size_in_bytes());
        Self {
            bias: offset(self.bias, column * x),
            residuals: self.residuals.map(|r| offset(r, column * x)),
            out: offset(self.out, column * out),
            ..*self
        }
    }

    /// The same for `count` rows of x from row `first` on.
    pub fn at_rows(&self, first: usize, count: usize) -> Self {
        let (x, out) = (self.x_dtype.size_in_bytes(), self.out_dtype.size_in_bytes());
        Self {
            x: offset(self.x, first * self.k * x),
            residuals: self.residuals.map(|r| offset(r, first * self.stride * x)),
            out: offset(self.out, first * self.stride * out),
            m: count,
            ..*self
        }
    }
}

/// An address advanced by `bytes`; 0 stays 0.
pub(super) fn offset(base: Address, bytes: usize) -> Address {
    match base {
        0 => 0,
        base => base + bytes as Address,
    }
}

/// A matrix of weights on a GPU.
#[derive(Clone, Debug)]
pub(crate) enum Operand {
    /// `[rows, k]`, row-major; the caller keeps it alive.
    Dense {
        address: Address,
        rows: usize,
        dtype: DType,
    },
    Quantized(Arc<BlockMatrix>),
}

impl Operand {
    fn new(weight: &Weight) -> Result<Self> {
        Ok(match weight {
            Weight::Dense(w) => Operand::Dense {
                address: address_of(w)?,
                rows: w.dims()[0],
                dtype: w.dtype(),
            },
            Weight::Blocks(w) => Operand::Quantized(w.clone()),
            Weight::Packed(_) => bail!("linear: weights are packed for the CPU"),
        })
    }

    /// Output channels.
    pub fn rows(&self) -> usize {
        match self {
            Operand::Dense { rows, .. } => *rows,
            Operand::Quantized(w) => w.rows(),
        }
    }

    pub fn format(&self) -> WeightFormat {
        match self {
            Operand::Dense { dtype, .. } => WeightFormat::Dense(*dtype),
            Operand::Quantized(w) => WeightFormat::Quantized(w.format()),
        }
    }

    /// Bytes of k values of all rows.
    fn bytes(&self, k: usize) -> usize {
        match self {
            Operand::Dense { rows, dtype, .. } => rows * k * dtype.size_in_bytes(),
            Operand::Quantized(w) => w.size_in_bytes(),
        }
    }
}

/// How the weights of a product are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum WeightFormat {
    Dense(DType),
    Quantized(Format),
    /// Matrices of several formats, or more than [`MAX_MATRICES`], some of them quantized or none.
    Mixed {
        quantized: bool,
    },
}

impl fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WeightFormat::Dense(dtype) => f.write_str(dtype.as_str()),
            WeightFormat::Quantized(format) => format.fmt(f),
            WeightFormat::Mixed { quantized: true } => f.write_str("mixed"),
            WeightFormat::Mixed { quantized: false } => f.write_str("mixed-dense"),
        }
    }
}

/// A product with its weights.
#[derive(Clone, Debug)]
pub(crate) struct Operands {
    /// Side by side in the output.
    pub weights: Vec<Operand>,
    pub at: ProductAt,
    /// A second matrix `[rows, k - k_split]` beside the only one, which is `[rows, k_split]` then, and `k_split`.
    pub second: Option<(Address, usize)>,
    /// What a pipelined GEMV prefetches for the next kernel.
    pub fetch: Option<Fetch>,
    /// All weights in [`product_dtype`](crate::cuda::product_dtype), row-major under one another, where somebody
    /// has dequantized them already.
    pub dequantized: Option<Address>,
}

impl Operands {
    /// # Errors
    /// If a weight is not on a GPU.
    pub fn new(weights: &[Weight], at: &ProductAt) -> Result<Self> {
        Ok(Self {
            weights: weights.iter().map(Operand::new).collect::<Result<_>>()?,
            at: *at,
            second: None,
            fetch: None,
            dequantized: None,
        })
    }

    /// Output channels of all weights.
    pub fn rows(&self) -> usize {
        self.weights.iter().map(Operand::rows).sum()
    }

    /// Outputs of a row of x.
    pub fn width(&self) -> usize {
        self.at.activation.outputs(self.rows())
    }

    /// Bytes of all weights.
    pub fn weight_bytes(&self) -> usize {
        self.weights.iter().map(|w| w.bytes(self.at.k)).sum()
    }

    /// The quantized matrices.
    pub fn quantized(&self) -> impl Iterator<Item = &Arc<BlockMatrix>> {
        self.weights.iter().filter_map(|w| match w {
            Operand::Quantized(w) => Some(w),
            Operand::Dense { .. } => None,
        })
    }

    /// Runs of neighbours of one format, as many as a launch takes, each with what belongs to its columns.
    pub fn segments(&self) -> Vec<Operands> {
        let mut column = 0;
        let runs = self.weights.chunk_by(|a, b| a.format() == b.format());
        let runs = runs.flat_map(|run| run.chunks(MAX_MATRICES));
        runs.map(|run| {
            let segment = Operands {
                weights: run.to_vec(),
                at: self.at.at_column(column),
                second: None,
                fetch: None,
                dequantized: None,
            };
            column += segment.rows();
            segment
        })
        .collect()
    }

    /// What a kernel is chosen by.
    pub fn case(&self, launcher: &Launcher) -> Case {
        let at = &self.at;
        let aligned = |addresses: &[Address]| addresses.iter().all(|a| a.is_multiple_of(16));
        let norm = at.norm.map_or([0; 2], |n| [n.weight, n.bias]);
        let dense = self.weights.iter().all(|w| match w {
            Operand::Dense { address, .. } => aligned(&[*address]),
            Operand::Quantized(_) => true,
        });
        let first = self.weights.first().map(Operand::format);
        let alike = self.weights.iter().all(|w| Some(w.format()) == first);
        let mut rows = [0; MAX_MATRICES];
        let format = match first {
            Some(format) if alike && self.weights.len() <= MAX_MATRICES => {
                for (rows, weight) in rows.iter_mut().zip(&self.weights) {
                    *rows = weight.rows();
                }
                format
            }
            _ => {
                rows[0] = self.rows();
                WeightFormat::Mixed {
                    quantized: self.quantized().next().is_some(),
                }
            }
        };
        Case {
            gpu: launcher.gpu.spec,
            weight: format,
            x: at.x_dtype,
            out: at.out_dtype,
            x_bits: at.x_bits,
            m: at.m,
            k: at.k,
            rows,
            k_split: self.second.map(|(_, k_split)| k_split),
            norm: at.norm.map(|n| n.kind),
            activation: at.activation,
            bias: at.bias != 0,
            residuals: at.residuals.iter().filter(|r| **r != 0).count(),
            preceding: launcher.preceding,
            recorded: launcher.recorded,
            alignment: Alignment {
                x: aligned(&[at.x]),
                norm: aligned(&norm),
                weights: dense && aligned(&[self.second.map_or(0, |(w, _)| w)]),
                outputs: at.stride.is_multiple_of(8)
                    && aligned(&[at.bias, at.residuals[0], at.residuals[1], at.out]),
            },
        }
    }
}

/// Which operands begin at multiples of 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Alignment {
    pub x: bool,
    pub norm: bool,
    pub weights: bool,
    /// Bias, residuals and output, and every eighth value of their rows.
    pub outputs: bool,
}

impl Alignment {
    /// All of them do.
    #[cfg(test)]
    pub const ALL: Self = Self {
        x: true,
        norm: true,
        weights: true,
        outputs: true,
    };
}

/// All that the choice of a kernel may depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Case {
    pub gpu: GpuSpec,
    pub weight: WeightFormat,
    /// Of x, and of the outputs.
    pub x: DType,
    pub out: DType,
    /// With quantized weights.
    pub x_bits: ActivationBits,
    pub m: usize,
    pub k: usize,
    /// Output channels of each matrix, 0 for none; of a mixed product of all in the first.
    pub rows: [usize; MAX_MATRICES],
    /// Where two matrices lie side by side along K: the columns of the first.
    pub k_split: Option<usize>,
    pub norm: Option<NormKind>,
    pub activation: Activation,
    pub bias: bool,
    pub residuals: usize,
    /// The kernel in front, see [`Launcher::preceding`].
    pub preceding: Preceding,
    /// Whether it is recorded, see [`Launcher::recorded`].
    pub recorded: bool,
    pub alignment: Alignment,
}

impl Case {
    /// How codes become values, of weights in GGUF blocks.
    pub fn block_scaling(&self) -> Option<Scaling> {
        match self.weight {
            WeightFormat::Quantized(Format::Block(block)) => Some(block.scaling),
            _ => None,
        }
    }

    /// Output channels of all matrices: N.
    pub fn n(&self) -> usize {
        self.rows.iter().sum()
    }

    /// Outputs of a row of x.
    pub fn width(&self) -> usize {
        self.activation.outputs(self.n())
    }

    /// Whether x is to be rounded to 8 bits of each token.
    pub fn is_rounded(&self) -> bool {
        let dense = matches!(
            self.weight,
            WeightFormat::Dense(_) | WeightFormat::Mixed { quantized: false }
        );
        self.x_bits == ActivationBits::PerToken8 && !dense
    }

    /// Whether one half of the outputs gates the other.
    pub fn gates(&self) -> bool {
        self.activation.gate().is_some()
    }

    /// Output channels of the matrices that are there.
    pub fn matrices(&self) -> impl Iterator<Item = usize> {
        self.rows.into_iter().filter(|rows| *rows > 0)
    }

    /// The scheme of the weights, if they are quantized by one.
    pub fn scheme(&self) -> Option<Scheme> {
        match self.weight {
            WeightFormat::Quantized(Format::Scheme(scheme)) => Some(scheme),
            _ => None,
        }
    }

    /// The dtype of the weights, if they are dense.
    pub fn dense(&self) -> Option<DType> {
        match self.weight {
            WeightFormat::Dense(dtype) => Some(dtype),
            _ => None,
        }
    }
}

/// As in `bf16 x [16, 4096] by int4-g128 [14336, 4096] +rms +swiglu`.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { m, k, .. } = self;
        write!(f, "{} x [{m}, {k}] by {}", self.x.as_str(), self.weight)?;
        for rows in self.matrices() {
            write!(f, " [{rows}, {k}]")?;
        }
        if let Some(norm) = self.norm {
            write!(f, " +{norm:?}")?;
        }
        if self.activation != Activation::None {
            write!(f, " +{:?}", self.activation)?;
        }
        write!(f, " on sm_{}", self.gpu.arch)
    }
}
