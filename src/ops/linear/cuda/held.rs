//! What a linear op holds, ready for kernels.

use crate::cuda::{Address, address_of};
use crate::ops::linear::launch::LinearOp;
use crate::ops::linear::{Prologue, Weight};
use candle_core::{Result, Tensor};

/// The op's tensors in row-major order: copies of views live until the launches are made; the stream
/// that runs those frees them.
pub(super) struct Held {
    pub weights: Vec<Weight>,
    norm: Option<(Tensor, f32)>,
    bias: Option<Tensor>,
    residuals: Vec<Tensor>,
}

impl Held {
    pub fn new(op: &LinearOp<'_>) -> Result<Self> {
        let weights = op.weights.iter().map(|w| match w {
            Weight::Dense(w) => Ok(Weight::Dense(w.contiguous()?)),
            other => Ok(other.clone()),
        });
        let residuals = op.epilogue.residuals.iter().map(|r| r.contiguous());
        Ok(Self {
            weights: weights.collect::<Result<_>>()?,
            norm: match op.prologue {
                Prologue::None => None,
                Prologue::RmsNorm { weight, eps } => Some((weight.contiguous()?, eps as f32)),
            },
            bias: op.epilogue.bias.map(Tensor::contiguous).transpose()?,
            residuals: residuals.collect::<Result<_>>()?,
        })
    }

    /// The same with a norm's weight that begins at a multiple of 16 bytes.
    pub fn with_aligned_norm(mut self) -> Result<Self> {
        if let Some((weight, _)) = &mut self.norm
            && !address_of(weight)?.is_multiple_of(16)
        {
            *weight = weight.copy()?;
        }
        Ok(self)
    }

    /// The norm's weight and eps.
    pub fn norm(&self) -> Result<Option<(Address, f32)>> {
        let at = |(weight, eps): &(Tensor, f32)| Ok((address_of(weight)?, *eps));
        self.norm.as_ref().map(at).transpose()
    }

    /// 0 without a bias.
    pub fn bias(&self) -> Result<Address> {
        self.bias.as_ref().map_or(Ok(0), address_of)
    }

    /// 0 where there is none.
    pub fn residuals(&self) -> Result<[Address; 2]> {
        let mut at = [0; 2];
        for (at, residual) in at.iter_mut().zip(&self.residuals) {
            *at = address_of(residual)?;
        }
        Ok(at)
    }
}
