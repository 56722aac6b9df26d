//! Rotation and attention in candle's own operations.

use crate::ops::{AttentionParams, RopeStyle, Rotation};
use candle_core::{D, DType, Result, Tensor};

/// Rotation of `[B, H, T, D]`; dimensions past the tables are kept.
pub(super) fn plain_rope(x: &Tensor, rotation: &Rotation<'_>) -> Result<Tensor> {
    let (_, _, tokens, head_dim) = x.dims4()?;
    let rows = |table: &Tensor| {
        let rows = table.narrow(0, rotation.position, tokens)?;
        rows.to_dtype(x.dtype())?.contiguous()
    };
    let (cos, sin) = (rows(rotation.cos)?, rows(rotation.sin)?);
    let rotated = 2 * cos.dim(1)?;
    let turn = match rotation.style {
        RopeStyle::HalfSplit => candle_nn::rotary_emb::rope,
        RopeStyle::Interleaved => candle_nn::rotary_emb::rope_i,
    };
    let part = |start, len| x.narrow(3, start, len)?.contiguous();
    let first = turn(&part(0, rotated)?, &cos, &sin)?;
    match head_dim - rotated {
        0 => Ok(first),
        rest => Tensor::cat(&[first, part(rotated, rest)?], 3),
    }
}

/// Attention as candle-transformers writes it: repeated keys, materialised scores in f32. Limits to the right and slopes
/// are left out.
pub(super) fn plain_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    params: &AttentionParams,
) -> Result<Tensor> {
    let (batch, heads, tokens, head_dim) = q.dims4()?;
    let (_, kv_heads, keys, _) = k.dims4()?;
    let repeat = |t: &Tensor| -> Result<Tensor> {
        t.to_dtype(DType::F32)?
            .unsqueeze(2)?
            .expand((batch, kv_heads, heads / kv_heads, keys, head_dim))?
            .reshape((batch, heads, keys, head_dim))
    };
    let mut scores = (q
        .to_dtype(DType::F32)?
        .contiguous()?
        .matmul(&repeat(k)?.t()?)?
        * f64::from(params.scale))?;
    if let Some(cap) = params.softcap.map(f64::from) {
        scores = ((scores / cap)?.tanh()? * cap)?;
    }
    if let Some(mask) = &params.mask {
        scores = scores.broadcast_add(mask)?;
    }
    let window = params.window.unwrap_or(usize::MAX);
    if (params.causal && tokens > 1) || window < keys {
        let first = keys - tokens;
        let hidden = (0..tokens).flat_map(|i| {
            let own = first + i;
            (0..keys).map(move |j| {
                let ahead = params.causal && j > own;
                match ahead || own.saturating_sub(j) >= window {
                    true => f32::NEG_INFINITY,
                    false => 0.,
                }
            })
        });
        let mask = Tensor::from_iter(hidden, q.device())?.reshape((tokens, keys))?;
        scores = scores.broadcast_add(&mask)?;
    }
    let weights = candle_nn::ops::softmax(&scores, D::Minus1)?;
    weights.matmul(&repeat(v)?)?.to_dtype(q.dtype())
}
