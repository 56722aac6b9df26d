//! What a linear op holds, ready for kernels.

use super::problem::{NormAt, NormKind};
use crate::cuda::{Address, address_of};
use crate::ops::linear::op::LinearOp;
use crate::ops::linear::{Prologue, Weight};
use candle_core::{Result, Tensor};

/// The op's tensors in row-major order: copies of views live until the launches are made; the stream
/// that runs those frees them.
pub(in crate::ops::linear) struct Owned {
    pub weights: Vec<Weight>,
    norm: Option<OwnedNorm>,
    bias: Option<Tensor>,
    residuals: Vec<Tensor>,
}

struct OwnedNorm {
    kind: NormKind,
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f32,
}

impl Owned {
    pub fn new(op: &LinearOp<'_>) -> Result<Self> {
        let weights = op.weights.iter().map(|w| match w {
            Weight::Dense(w) => Ok(Weight::Dense(w.contiguous()?)),
            other => Ok(other.clone()),
        });
        let residuals = op.epilogue.residuals.iter().map(|r| r.contiguous());
        // The kernels for quantized weights read norms 16 bytes at a time.
        let aligned = |t: &Tensor| match address_of(t)?.is_multiple_of(16) {
            true => t.contiguous(),
            false => t.copy(),
        };
        Ok(Self {
            weights: weights.collect::<Result<_>>()?,
            norm: match op.prologue {
                Prologue::None => None,
                Prologue::RmsNorm { weight, eps } => Some(OwnedNorm {
                    kind: NormKind::Rms,
                    weight: aligned(weight)?,
                    bias: None,
                    eps: eps as f32,
                }),
                Prologue::LayerNorm { weight, bias, eps } => Some(OwnedNorm {
                    kind: NormKind::Layer,
                    weight: aligned(weight)?,
                    bias: bias.map(aligned).transpose()?,
                    eps: eps as f32,
                }),
            },
            bias: op.epilogue.bias.map(Tensor::contiguous).transpose()?,
            residuals: residuals.collect::<Result<_>>()?,
        })
    }

    /// Where the norm's vectors are.
    pub fn norm(&self) -> Result<Option<NormAt>> {
        let at = |norm: &OwnedNorm| {
            Ok(NormAt {
                kind: norm.kind,
                weight: address_of(&norm.weight)?,
                bias: norm.bias.as_ref().map_or(Ok(0), address_of)?,
                eps: norm.eps,
            })
        };
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
