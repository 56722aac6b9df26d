//! Self-attention with rotary positions over a preallocated cache.

use super::{KvCache, Projection, RmsNorm, RotaryEmbedding};
use crate::Fusion;
use crate::ops::{self, AttentionParams, RopeAppend, RopeStyle, Rotation};
use candle_core::{D, DType, Device, Result, Tensor};

/// The shape of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionConfig {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// Projections to queries, keys and values, rotation, causal attention and the projection back.
#[derive(Clone, Debug)]
pub struct Attention {
    qkv: Projection,
    output: Projection,
    config: AttentionConfig,
    fusion: Fusion,
}

impl Attention {
    /// From the q, k and v matrices (in this order) as one [`Projection`], and the output matrix.
    pub fn new(
        qkv: Projection,
        output: Projection,
        config: AttentionConfig,
        fusion: Fusion,
    ) -> Self {
        Self {
            qkv,
            output,
            config,
            fusion,
        }
    }

    /// The shape.
    pub fn config(&self) -> AttentionConfig {
        self.config
    }

    /// The projections to q, k and v, and back.
    #[cfg(feature = "cuda")]
    pub(crate) fn projections(&self) -> (&Projection, &Projection) {
        (&self.qkv, &self.output)
    }

    /// Whether rotation, append and attention are fused.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_fused(&self) -> bool {
        self.fusion.rope && self.fusion.flash_attention && self.fusion.residual_add
    }

    /// An empty cache for this layer, see [`KvCache::new`].
    pub fn new_cache(
        &self,
        batch: usize,
        start: usize,
        limit: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<KvCache> {
        let AttentionConfig {
            kv_heads, head_dim, ..
        } = self.config;
        KvCache::new((batch, kv_heads, head_dim), start, limit, dtype, device)
    }

    /// `residual + attention(norm(x))` for x `[B, T, H]` at `position..position + T`.
    ///
    /// # Errors
    /// If the position does not follow what the cache holds, or shapes do not fit.
    pub fn forward(
        &self,
        x: &Tensor,
        norm: &RmsNorm,
        residual: &Tensor,
        position: usize,
        rotary: &RotaryEmbedding,
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        let _span = tracing::trace_span!("attention").entered();
        let (batch, tokens, _) = x.dims3()?;
        let slot = cache.advance(position, tokens, batch)?;
        let q = if self.fusion.rope {
            let qkv = self.qkv.forward_joint(x, Some(norm))?;
            self.rotate(&qkv, position, slot, rotary, cache)?
        } else {
            let qkv = self.qkv.forward_parts(x, Some(norm))?;
            self.rotate_plain(&qkv, position, slot, rotary, cache)?
        };
        let (k, v) = cache.views()?;
        let scale = 1. / (self.config.head_dim as f32).sqrt();
        let y = if self.fusion.flash_attention {
            let params = AttentionParams {
                scale,
                causal: true,
                ..Default::default()
            };
            ops::flash_attention(&q, &k, &v, &params)?
        } else {
            plain_attention(&q, &k, &v, scale)?
        };
        let y = y.transpose(1, 2)?.reshape((batch, tokens, ()))?;
        self.output.forward_residual(&y, residual)
    }

    /// The fused step: rotated q `[B, Hq, T, D]`; rotated k and v are in the cache.
    fn rotate(
        &self,
        qkv: &Tensor,
        position: usize,
        slot: usize,
        rotary: &RotaryEmbedding,
        cache: &KvCache,
    ) -> Result<Tensor> {
        let AttentionConfig {
            heads, kv_heads, ..
        } = self.config;
        let (cos, sin) = rotary.tables();
        let rotation = Rotation {
            cos,
            sin,
            position,
            style: rotary.style(),
        };
        let (k_buffer, v_buffer) = cache.buffers();
        let append = RopeAppend {
            rotation,
            heads,
            kv_heads,
            slot,
            norms: None,
        };
        ops::rope_append(qkv, &append, k_buffer, v_buffer)
    }

    /// The same with candle's operations.
    fn rotate_plain(
        &self,
        qkv: &[Tensor],
        position: usize,
        slot: usize,
        rotary: &RotaryEmbedding,
        cache: &KvCache,
    ) -> Result<Tensor> {
        let [q, k, v] = qkv else {
            candle_core::bail!("attention: {} projections, expected q, k and v", qkv.len());
        };
        let (batch, tokens, _) = q.dims3()?;
        let heads = |t: &Tensor| -> Result<Tensor> {
            t.reshape((batch, tokens, (), self.config.head_dim))?
                .transpose(1, 2)?
                .contiguous()
        };
        let (cos, sin) = rotary.tables();
        let cos = cos.narrow(0, position, tokens)?.to_dtype(q.dtype())?;
        let sin = sin.narrow(0, position, tokens)?.to_dtype(q.dtype())?;
        let rotate = |t: &Tensor| match rotary.style() {
            RopeStyle::HalfSplit => candle_nn::rotary_emb::rope(t, &cos, &sin),
            RopeStyle::Interleaved => candle_nn::rotary_emb::rope_i(t, &cos, &sin),
        };
        let (k_buffer, v_buffer) = cache.buffers();
        k_buffer.slice_set(&rotate(&heads(k)?)?.to_dtype(k_buffer.dtype())?, 2, slot)?;
        v_buffer.slice_set(&heads(v)?.to_dtype(v_buffer.dtype())?, 2, slot)?;
        rotate(&heads(q)?)
    }
}

/// Attention as candle-transformers writes it: repeated keys, materialised scores in f32.
fn plain_attention(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32) -> Result<Tensor> {
    let (batch, heads, tokens, head_dim) = q.dims4()?;
    let (_, kv_heads, keys, _) = k.dims4()?;
    let repeat = |t: &Tensor| -> Result<Tensor> {
        t.to_dtype(DType::F32)?
            .unsqueeze(2)?
            .expand((batch, kv_heads, heads / kv_heads, keys, head_dim))?
            .reshape((batch, heads, keys, head_dim))
    };
    let scores = (q
        .to_dtype(DType::F32)?
        .contiguous()?
        .matmul(&repeat(k)?.t()?)?
        * f64::from(scale))?;
    let scores = if tokens == 1 {
        scores
    } else {
        let first = keys - tokens;
        let hidden = (0..tokens).flat_map(|i| {
            (0..keys).map(move |j| if j > first + i { f32::NEG_INFINITY } else { 0. })
        });
        let mask = Tensor::from_iter(hidden, q.device())?.reshape((tokens, keys))?;
        scores.broadcast_add(&mask)?
    };
    let weights = candle_nn::ops::softmax(&scores, D::Minus1)?;
    weights.matmul(&repeat(v)?)?.to_dtype(q.dtype())
}
