//! The CPU form: one sequence after the other through the cores of `rope_append` and
//! `flash_attention`.

use super::{OP, Op};
use crate::ops::{AttentionParams, RopeAppend, Rotation, flash_attention, rope_append};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, Layout, Result, Shape, Storage, Tensor, bail};

pub(super) fn forward(
    op: &Op<'_>,
    qkv: &CpuStorage,
    layout: &Layout,
) -> Result<(CpuStorage, Shape)> {
    trace::record(OP, || {
        let (q, kv) = (qkv.dtype().as_str(), op.k_cache.dtype().as_str());
        format!("cpu by rope and flash_attention q {q} kv {kv}")
    });
    let (batch, width) = layout.shape().dims2()?;
    let qkv = rows(qkv, layout)?;
    let (slots, positions) = (op.k_cache.dims()[2], op.config.cos.dims()[0]);
    let attended = op
        .position
        .to_vec1::<u32>()?
        .into_iter()
        .enumerate()
        .map(|(b, position)| {
            let position = position as usize;
            if position >= slots || position >= positions {
                bail!(
                    "{OP}: position[{b}] is {position}, the caches have {slots} slots and the tables \
                     {positions} positions"
                );
            }
            let row = qkv.narrow(0, b, 1)?.reshape((1, 1, width))?;
            one(op, &row, b, position)
        })
        .collect::<Result<Vec<_>>>()?;
    let out = Tensor::cat(&attended, 0)?;
    let shape = Shape::from((batch, out.dim(1)?));
    let (storage, _) = out.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok((storage.clone(), shape)),
        _ => bail!("{OP}: expected a tensor on the CPU"),
    }
}

/// One sequence: `[1, Hq D]`.
fn one(op: &Op<'_>, qkv: &Tensor, b: usize, position: usize) -> Result<Tensor> {
    let config = op.config;
    let [k_cache, v_cache] = [op.k_cache, op.v_cache].map(|cache| cache.narrow(0, b, 1));
    let (k_cache, v_cache) = (k_cache?, v_cache?);
    let append = RopeAppend {
        rotation: Rotation {
            cos: config.cos,
            sin: config.sin,
            position,
            style: config.style,
        },
        heads: config.heads,
        kv_heads: k_cache.dims()[1],
        slot: position,
        norms: config.norms,
    };
    let q = rope_append(qkv, &append, &k_cache, &v_cache)?;
    let first = config
        .window
        .map_or(0, |window| (position + 1).saturating_sub(window));
    let seen = |cache: &Tensor| cache.narrow(2, first, position + 1 - first);
    let params = AttentionParams {
        scale: config.scale,
        softcap: config.softcap,
        ..Default::default()
    };
    flash_attention(&q, &seen(&k_cache)?, &seen(&v_cache)?, &params)?
        .transpose(1, 2)?
        .reshape((1, ()))
}

/// The rows, which are contiguous, as a tensor of their own.
fn rows(storage: &CpuStorage, layout: &Layout) -> Result<Tensor> {
    let len = match storage {
        CpuStorage::F32(v) => v.len(),
        CpuStorage::F16(v) => v.len(),
        CpuStorage::BF16(v) => v.len(),
        _ => bail!(
            "{OP}: qkv is {:?}, expected f32, f16 or bf16",
            storage.dtype()
        ),
    };
    let storage = Storage::Cpu(storage.clone());
    Tensor::from_storage(storage, len, BackpropOp::none(), false)
        .narrow(0, layout.start_offset(), layout.shape().elem_count())?
        .reshape(layout.shape())
}
