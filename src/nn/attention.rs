//! Self-attention with rotary positions over a preallocated cache.

use super::plain::{plain_attention, plain_rope};
use super::{KvCache, Norm, Projection, RmsNorm, RotaryEmbedding};
use crate::Fusion;
use crate::fusion::fallback;
use crate::ops::flash_attention::flash_attention_each;
use crate::ops::view::inference_only;
use crate::ops::{self, AttentionParams, HeadNorms, RopeAppend, Rotation};
use crate::trace;
use candle_core::{D, DType, Device, Module, Result, Tensor, bail};

/// The shape of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionConfig {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Sliding window: a token sees itself and `window - 1` before it; none sees all.
    pub window: Option<usize>,
}

impl AttentionConfig {
    /// Outputs of the projections to queries, keys and values.
    pub fn widths(&self) -> [usize; 3] {
        let [q, kv] = [self.heads, self.kv_heads].map(|heads| heads * self.head_dim);
        [q, kv, kv]
    }
}

/// Where the tokens of a call stand, and what they see.
#[derive(Clone, Copy, Debug)]
pub struct Tokens<'a> {
    /// The position of the first.
    pub position: usize,
    /// Tables that reach the last.
    pub rotary: &'a RotaryEmbedding,
    /// Added to the scores instead of the causal mask, for encoders: f32, broadcast to
    /// `[B, heads, T, keys]`.
    pub mask: Option<&'a Tensor>,
}

impl<'a> Tokens<'a> {
    /// What `tokens` of them are rotated by.
    fn rotation(&self, tokens: usize) -> Rotation<'a> {
        self.rotary.rotation_of(self.position, tokens)
    }
}

/// Projections to queries, keys and values, rotation, causal attention and the projection back.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::Fusion;
/// use candle_fused::nn::{self, Attention, AttentionConfig, Projection, RotaryEmbedding, Tokens};
/// use candle_fused::ops::RopeStyle;
/// use candle_nn::VarBuilder;
/// let (device, vb) = (Device::Cpu, VarBuilder::zeros(DType::F32, &Device::Cpu));
/// let config = AttentionConfig { heads: 4, kv_heads: 2, head_dim: 16, window: None };
/// let [q, k, v] = config.widths().map(|width| nn::linear_no_bias(64, width, vb.pp("qkv")));
/// let qkv = Projection::from_linears(vec![q?, k?, v?])?;
/// let output = nn::linear_no_bias(64, 64, vb.pp("o_proj"))?;
/// // As Qwen3 has it: norms of each head's queries and keys.
/// let norm = |name: &str| nn::rms_norm(16, 1e-6, vb.pp(name));
/// let attention = Attention::new(qkv, output.into(), config)
///     .with_head_norms(norm("q_norm")?, norm("k_norm")?)
///     .with_fusion(Fusion::all());
/// assert_eq!(attention.config(), config);
///
/// let rotary = RotaryEmbedding::with_theta(16, 1e4, 128, RopeStyle::HalfSplit, &device)?;
/// let mut cache = attention.new_cache(1, 128, DType::F32, &device)?;
/// let at = Tokens { position: 0, rotary: &rotary, mask: None };
/// let x = Tensor::ones((1, 3, 64), DType::F32, &device)?;
/// // Weights of zeros: only the residual is left.
/// let y = attention.forward(&x, None, &x, &at, &mut cache)?;
/// assert_eq!(y.sum_all()?.to_scalar::<f32>()?, 3. * 64.);
/// // The same without the projection back, for a fourth token.
/// let at = Tokens { position: 3, ..at };
/// let y = attention.attend(&x.narrow(1, 0, 1)?, None, &at, &mut cache)?;
/// assert_eq!((y.dims(), cache.len()), (&[1, 1, 64][..], 4));
/// assert!(attention.output().fusion().linear && attention.sub_norm().is_none());
///
/// // As BitNet has it: a norm before the projection back.
/// let attention = attention.with_sub_norm(nn::rms_norm(64, 1e-6, vb.pp("attn_sub_norm"))?.into());
/// assert!(attention.sub_norm().is_some());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Attention {
    qkv: Projection,
    output: Projection,
    head_norms: Option<[RmsNorm; 2]>,
    sub_norm: Option<Norm>,
    config: AttentionConfig,
    fusion: Fusion,
}

impl Attention {
    /// From the q, k and v matrices (in this order) as one [`Projection`] of three matrices or of one
    /// that holds them all, and the output matrix. Rotation and attention are fused as `qkv` is.
    pub fn new(qkv: Projection, output: Projection, config: AttentionConfig) -> Self {
        Self {
            fusion: qkv.fusion(),
            qkv,
            output,
            head_norms: None,
            sub_norm: None,
            config,
        }
    }

    /// The same with rotation and attention fused as `fusion` says; the matrices stay as they are.
    pub fn with_fusion(self, fusion: Fusion) -> Self {
        Self { fusion, ..self }
    }

    /// The same with norms of each head's queries and keys before the rotation, as Qwen3 has
    /// them.
    pub fn with_head_norms(self, queries: RmsNorm, keys: RmsNorm) -> Self {
        Self {
            head_norms: Some([queries, keys]),
            ..self
        }
    }

    /// The same with a norm of what the heads gather, before the projection back, as BitNet has it (SubLN,
    /// Wang et al. 2022).
    pub fn with_sub_norm(self, norm: Norm) -> Self {
        Self {
            sub_norm: Some(norm),
            ..self
        }
    }

    /// The norm before the projection back.
    pub fn sub_norm(&self) -> Option<&Norm> {
        self.sub_norm.as_ref()
    }

    /// The projection back.
    pub fn output(&self) -> &Projection {
        &self.output
    }

    /// The shape.
    pub fn config(&self) -> AttentionConfig {
        self.config
    }

    /// The projections to q, k and v, and back.
    pub(crate) fn projections(&self) -> (&Projection, &Projection) {
        (&self.qkv, &self.output)
    }

    /// The norms of queries and keys.
    pub(crate) fn head_norms(&self) -> Option<HeadNorms<'_>> {
        self.head_norms.as_ref().map(|[q, k]| HeadNorms {
            q: q.weight(),
            k: k.weight(),
            eps: q.eps(),
        })
    }

    /// Whether rotation, append and attention are fused.
    pub(crate) fn is_fused(&self) -> bool {
        self.fusion.rope && self.fusion.flash_attention && self.fusion.residual_add
    }

    /// An empty cache for this layer, see [`KvCache::with_shape`].
    pub fn new_cache(
        &self,
        batch: usize,
        limit: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<KvCache> {
        let AttentionConfig {
            kv_heads, head_dim, ..
        } = self.config;
        KvCache::with_shape((batch, kv_heads, head_dim), limit, dtype, device)
    }

    /// `residual + attention(norm(x))` for x `[B, T, H]` at `position..position + T`.
    ///
    /// # Errors
    /// If the cache's limit is passed, or shapes do not fit.
    pub fn forward(
        &self,
        x: &Tensor,
        norm: Option<&Norm>,
        residual: &Tensor,
        at: &Tokens<'_>,
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        let _span = tracing::trace_span!("attention").entered();
        let y = self.attend(x, norm, at, cache)?;
        self.project_back(&y, residual)
    }

    /// `residual + output(sub_norm(y))`.
    pub(crate) fn project_back(&self, y: &Tensor, residual: &Tensor) -> Result<Tensor> {
        let norm = self.sub_norm.as_ref();
        self.output.forward_norm_residual(y, norm, residual)
    }

    /// What the heads gather, `[B, T, heads x head_dim]`, for models that do something else with it
    /// than [`Attention::forward`]; [`Attention::sub_norm`] and [`Attention::output`] take it from there.
    ///
    /// # Errors
    /// As [`Attention::forward`].
    pub fn attend(
        &self,
        x: &Tensor,
        norm: Option<&Norm>,
        at: &Tokens<'_>,
        cache: &mut KvCache,
    ) -> Result<Tensor> {
        self.placed(x, at, cache, |slot, cache| {
            self.attended(x, norm, at, slot, cache)
        })
    }

    /// [`Attention::forward`] for a token of each of several sequences, x `[S, 1, H]`: every sequence has its place
    /// and a cache of its own, for one sequence, and the products of all read the weights once.
    ///
    /// # Errors
    /// As [`Attention::forward`], or if there are not S places and caches.
    pub(crate) fn forward_each(
        &self,
        x: &Tensor,
        norm: Option<&Norm>,
        residual: &Tensor,
        at: &[Tokens<'_>],
        caches: &mut [&mut KvCache],
    ) -> Result<Tensor> {
        let _span = tracing::trace_span!("attention").entered();
        if x.dim(0)? != at.len() || at.len() != caches.len() {
            bail!(
                "attention: {} sequences with {} places and {} caches",
                x.dim(0)?,
                at.len(),
                caches.len()
            );
        }
        let fusion = self.fusion.on(x.device());
        let joint = match fusion.rope {
            true => Some(self.qkv.forward_joint(x, norm)?),
            false => None,
        };
        if let Some(joint) = &joint
            && fusion.flash_attention
            && x.device().is_cpu()
            && at.iter().all(|at| at.mask.is_none())
        {
            let y = self.attend_each(joint, at, caches)?;
            return self.project_back(&y, residual);
        }
        let each = at.iter().zip(caches).enumerate().map(|(i, (at, cache))| {
            let x = x.narrow(0, i, 1)?;
            let Some(joint) = &joint else {
                return self.attend(&x, norm, at, cache);
            };
            let qkv = joint.narrow(0, i, 1)?;
            self.placed(&x, at, cache, |slot, cache| {
                let q = self.rotate(&qkv, at, slot, cache)?;
                self.gathered(&q, at, cache)
            })
        });
        let y = Tensor::cat(&each.collect::<Result<Vec<_>>>()?, 0)?;
        self.project_back(&y, residual)
    }

    /// What one token of each sequence gathers from its cache, `[S, 1, heads x head_dim]`, by its row of `joint`, on the
    /// CPU: in one pass, since most of these steps are shorter than a task's hand-over.
    fn attend_each(
        &self,
        joint: &Tensor,
        at: &[Tokens<'_>],
        caches: &mut [&mut KvCache],
    ) -> Result<Tensor> {
        let AttentionConfig {
            kv_heads, head_dim, ..
        } = self.config;
        let mut slots = Vec::with_capacity(at.len());
        let mut attend = || {
            let mut sequences = Vec::with_capacity(at.len());
            for (i, (at, cache)) in at.iter().zip(caches.iter_mut()).enumerate() {
                let qkv = joint.narrow(0, i, 1)?;
                cache.take_shape((1, kv_heads, head_dim), qkv.dtype(), qkv.device())?;
                let slot = cache.advance(at.position, 1, 1)?;
                slots.push(slot);
                let q = self.rotate(&qkv, at, slot, cache)?;
                let (k, v) = cache.views()?;
                sequences.push([q, k, v]);
            }
            flash_attention_each(&sequences, &self.params(None))
        };
        let y = attend();
        if y.is_err() {
            // Who knows what has been written of the new positions.
            for (cache, slot) in caches.iter_mut().zip(slots) {
                cache.set_len(slot);
            }
        }
        y
    }

    /// Makes room for x's tokens in the cache, and runs `attended` with the first slot. It gives
    /// `[B, heads, T, head_dim]`, which comes back as `[B, T, heads x head_dim]`.
    fn placed(
        &self,
        x: &Tensor,
        at: &Tokens<'_>,
        cache: &mut KvCache,
        attended: impl FnOnce(usize, &KvCache) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (batch, tokens, _) = x.dims3()?;
        let AttentionConfig {
            kv_heads, head_dim, ..
        } = self.config;
        cache.take_shape((batch, kv_heads, head_dim), x.dtype(), x.device())?;
        let slot = cache.advance(at.position, tokens, batch)?;
        let y = attended(slot, cache);
        if y.is_err() {
            // Who knows what has been written of the new positions.
            cache.set_len(slot);
        }
        y?.transpose(1, 2)?.reshape((batch, tokens, ()))
    }

    /// [`Attention::attend`] with slots from `slot` on: `[B, heads, T, head_dim]`.
    fn attended(
        &self,
        x: &Tensor,
        norm: Option<&Norm>,
        at: &Tokens<'_>,
        slot: usize,
        cache: &KvCache,
    ) -> Result<Tensor> {
        let fusion = self.fusion.on(x.device());
        if fusion != self.fusion
            && let Some(why) = fallback(x.device())
        {
            trace::record("flash_attention", || format!("candle: {why}"));
        }
        let q = if fusion.rope {
            let qkv = self.qkv.forward_joint(x, norm)?;
            self.rotate(&qkv, at, slot, cache)?
        } else {
            let qkv = self.qkv.forward_parts(x, norm)?;
            self.rotate_plain(&qkv, at, slot, cache)?
        };
        self.gathered(&q, at, cache)
    }

    fn params(&self, mask: Option<&Tensor>) -> AttentionParams {
        AttentionParams {
            scale: 1. / (self.config.head_dim as f32).sqrt(),
            causal: mask.is_none(),
            // A mask says all that is hidden.
            window: self.config.window.filter(|_| mask.is_none()),
            mask: mask.cloned(),
            ..Default::default()
        }
    }

    /// What rotated queries gather from the cache.
    fn gathered(&self, q: &Tensor, at: &Tokens<'_>, cache: &KvCache) -> Result<Tensor> {
        let fusion = self.fusion.on(q.device());
        let (k, v) = cache.views()?;
        let params = self.params(at.mask);
        if fusion.flash_attention {
            ops::flash_attention(q, &k, &v, &params)
        } else {
            plain_attention(q, &k, &v, &params)
        }
    }

    /// The fused step: rotated q `[B, Hq, T, D]`; rotated k and v are in the cache.
    fn rotate(
        &self,
        qkv: &Tensor,
        at: &Tokens<'_>,
        slot: usize,
        cache: &KvCache,
    ) -> Result<Tensor> {
        let AttentionConfig {
            heads, kv_heads, ..
        } = self.config;
        let (k_buffer, v_buffer) = cache.buffers()?;
        let append = RopeAppend {
            rotation: at.rotation(qkv.dim(1)?),
            heads,
            kv_heads,
            slot,
            norms: self.head_norms(),
        };
        ops::rope_append(qkv, &append, k_buffer, v_buffer)
    }

    /// The same with candle's operations.
    fn rotate_plain(
        &self,
        qkv: &[Tensor],
        at: &Tokens<'_>,
        slot: usize,
        cache: &KvCache,
    ) -> Result<Tensor> {
        let [q, k, v] = match qkv {
            [q, k, v] => [q.clone(), k.clone(), v.clone()],
            [joint] => {
                let [q, k, v] = self.config.widths();
                let part = |start, len| joint.narrow(D::Minus1, start, len);
                [part(0, q)?, part(q, k)?, part(q + k, v)?]
            }
            _ => bail!("attention: {} projections, expected q, k and v", qkv.len()),
        };
        // Into the cache they are copied without a trace.
        inference_only("attention", [("k", &k), ("v", &v)])?;
        let (batch, tokens, _) = q.dims3()?;
        let heads = |t: &Tensor, norm: Option<&RmsNorm>| -> Result<Tensor> {
            let t = t.reshape((batch, tokens, (), self.config.head_dim))?;
            let t = match norm {
                Some(norm) => norm.forward(&t)?,
                None => t,
            };
            t.transpose(1, 2)?.contiguous()
        };
        let [q_norm, k_norm] = match &self.head_norms {
            Some([q, k]) => [Some(q), Some(k)],
            None => [None, None],
        };
        let (k_buffer, v_buffer) = cache.buffers()?;
        let rotation = at.rotation(tokens);
        let k = plain_rope(&heads(&k, k_norm)?, &rotation)?;
        k_buffer.slice_set(&k.to_dtype(k_buffer.dtype())?, 2, slot)?;
        v_buffer.slice_set(&heads(&v, None)?.to_dtype(v_buffer.dtype())?, 2, slot)?;
        plain_rope(&heads(&q, q_norm)?, &rotation)
    }
}
