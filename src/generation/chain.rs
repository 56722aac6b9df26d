//! What a plan of a decode step is made of: its inputs and outputs, where keys and values are, and its launches.

use crate::cuda::{Address, address_of};
use crate::nn::{KvCache, Norm};
use crate::ops::PagePool;
use crate::ops::embedding::cuda::Lookup;
use crate::ops::flash_decoding::cuda::Attention;
use crate::ops::linear::cuda::{NormAt, NormKind, Product};
use crate::ops::sample::cuda as sample;
use candle_core::{DType, Result, Tensor};

/// A step's inputs and outputs on the GPU.
#[derive(Clone, Copy)]
pub(crate) struct StepIo {
    pub sequences: usize,
    /// u32 `[sequences]`: the tokens that the step takes in, and where they stand.
    pub token: Address,
    pub position: Address,
    /// The choice of the next tokens, from logits that the plan has the address of.
    pub sampling: sample::Step,
}

/// Where a layer's keys and values are.
pub(crate) enum Keys<'a> {
    /// In buffers, one for each layer.
    Caches(&'a [KvCache]),
    /// In pages, a pool for each layer.
    Pages(PagedKeys<'a>),
}

/// Keys and values in pages.
pub(crate) struct PagedKeys<'a> {
    pub pools: &'a [PagePool],
    /// u32 `[sequences, width]`: the pages of each sequence.
    pub table: Address,
    pub width: usize,
}

impl Keys<'_> {
    /// Keys and values of each layer, and their scales.
    pub fn tensors(&self) -> Result<Vec<Tensor>> {
        match self {
            Keys::Caches(caches) => {
                let held = caches.iter().map(KvCache::buffers);
                let held = held.collect::<Result<Vec<_>>>()?.into_iter();
                Ok(held.flat_map(|(k, v)| [k.clone(), v.clone()]).collect())
            }
            Keys::Pages(pages) => {
                let held = pages.pools.iter().flat_map(PagePool::named);
                Ok(held.map(|(_, t)| t.clone()).collect())
            }
        }
    }
}

/// One launch of the step, or a product of several.
pub(super) enum StepOp {
    Embedding(Lookup),
    Linear(Product),
    /// Alone, or beside a product.
    Attention(Box<Attention>),
    Sample(sample::Step),
}

/// None if the norm is of another dtype than the stream.
pub(super) fn norm_at(norm: &Norm, dtype: DType) -> Result<Option<NormAt>> {
    let (kind, weight, bias, eps) = match norm {
        Norm::Rms(n) => (NormKind::Rms, n.weight(), None, n.eps()),
        // Without the removal of the mean and with a bias: no model has it.
        Norm::Layer(n) if !n.remove_mean() => return Ok(None),
        Norm::Layer(n) => (NormKind::Layer, n.weight(), n.bias(), n.eps()),
    };
    if weight.dtype() != dtype || bias.is_some_and(|b| b.dtype() != dtype) {
        return Ok(None);
    }
    Ok(Some(NormAt {
        kind,
        weight: address_of(weight)?,
        bias: bias.map_or(Ok(0), address_of)?,
        eps: eps as f32,
    }))
}
