//! The decoder that pre-norm models share: embedding, layers of attention and MLP, final norm and
//! head.

use super::shape::Shape;
use crate::nn::{
    Attention, Embedding, KvCache, Mlp, Norm, PagedTokens, Projection, RotaryEmbedding, Tokens,
};
use crate::ops::{PagePool, RopeStyle};
use candle_core::{DType, Device, Module, Result, Tensor, bail};

/// One layer.
#[derive(Clone, Debug)]
pub struct Block {
    pub attention_norm: Norm,
    pub attention: Attention,
    pub mlp_norm: Norm,
    pub mlp: Mlp,
    /// Whether attention and MLP stand side by side.
    pub parallel: bool,
    /// Whether queries and keys are rotated.
    pub rotated: bool,
}

impl Block {
    /// `h = x + attention(norm(x))`, then `h + mlp(norm(h))`, or `h + mlp(norm(x))` side by side.
    fn forward(&self, x: &Tensor, at: &Tokens<'_>, cache: &mut KvCache) -> Result<Tensor> {
        let _span = tracing::trace_span!("block").entered();
        let norm = Some(&self.attention_norm);
        let h = self.attention.forward(x, norm, x, at, cache)?;
        self.behind_attention(x, &h)
    }

    /// The same for a token of each of several sequences, as [`Attention::forward_each`].
    fn forward_each(
        &self,
        x: &Tensor,
        at: &[Tokens<'_>],
        caches: &mut [&mut KvCache],
    ) -> Result<Tensor> {
        let _span = tracing::trace_span!("block").entered();
        let norm = Some(&self.attention_norm);
        let h = self.attention.forward_each(x, norm, x, at, caches)?;
        self.behind_attention(x, &h)
    }

    /// The same for tokens of any sequences, whose keys and values are in pages.
    fn forward_paged(
        &self,
        x: &Tensor,
        tokens: &PagedTokens,
        rotary: &RotaryEmbedding,
        pool: &PagePool,
    ) -> Result<Tensor> {
        let _span = tracing::trace_span!("block").entered();
        let norm = Some(&self.attention_norm);
        let h = self
            .attention
            .forward_paged(x, norm, tokens, rotary, pool)?;
        self.behind_attention(x, &h)
    }

    /// What the layer makes of what enters it, `x`, and of the residual stream after its attention, `h`.
    pub fn behind_attention(&self, x: &Tensor, h: &Tensor) -> Result<Tensor> {
        self.mlp
            .forward(self.mlp_input(x, h), Some(&self.mlp_norm), h)
    }

    /// Which of the two goes through the MLP's norm.
    pub fn mlp_input<'t>(&self, x: &'t Tensor, h: &'t Tensor) -> &'t Tensor {
        if self.parallel { x } else { h }
    }
}

/// The rotary tables of a model's layers.
#[derive(Clone, Debug)]
pub struct Rotaries {
    rotated: RotaryEmbedding,
    /// Tables that turn nothing, for layers without rotary.
    still: Option<RotaryEmbedding>,
}

impl Rotaries {
    /// The tables of a model of this shape.
    pub fn new(shape: &Shape, style: RopeStyle, device: &Device) -> Result<Self> {
        let frequencies = shape.frequencies.clone();
        let mut rotated = RotaryEmbedding::new(frequencies, style, device)?;
        if let Some(long) = &shape.long {
            rotated = rotated.with_long(long.frequencies.clone(), long.from, long.magnitude);
        }
        let zeros = || RotaryEmbedding::new(vec![0.; shape.frequencies.len()], style, device);
        let any = (0..shape.layers).any(|layer| !shape.rotates(layer));
        Ok(Self {
            rotated,
            still: any.then(zeros).transpose()?,
        })
    }

    /// The tables of a layer.
    pub fn of(&self, block: &Block) -> &RotaryEmbedding {
        match &self.still {
            Some(still) if !block.rotated => still,
            _ => &self.rotated,
        }
    }

    /// Makes the tables reach `positions`.
    fn reserve(&mut self, positions: usize) -> Result<()> {
        self.rotated.reserve(positions)?;
        self.still.as_mut().map_or(Ok(()), |r| r.reserve(positions))
    }
}

/// Keys and values of every layer, and the rotary tables.
#[derive(Clone, Debug)]
pub struct DecoderCache {
    layers: Vec<Option<KvCache>>,
    rotaries: Rotaries,
    keep: bool,
    dtype: DType,
    device: Device,
}

impl DecoderCache {
    /// `keep` false gives a cache that neither uses nor changes what it holds.
    pub fn new(
        layers: usize,
        rotaries: Rotaries,
        keep: bool,
        dtype: DType,
        device: &Device,
    ) -> Self {
        Self {
            layers: vec![None; layers],
            rotaries,
            keep,
            dtype,
            device: device.clone(),
        }
    }

    /// A cache of this one's kind over `layers` that are there already.
    pub fn over(&self, layers: Vec<KvCache>) -> Self {
        Self {
            layers: layers.into_iter().map(Some).collect(),
            rotaries: self.rotaries.clone(),
            keep: true,
            dtype: self.dtype,
            device: self.device.clone(),
        }
    }

    /// Whether calls use and add to what is held.
    pub fn set_keep(&mut self, keep: bool) {
        self.keep = keep;
    }

    /// What keys and values are stored in.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where keys and values are stored.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Counts `len` positions as written in every layer.
    pub fn set_len(&mut self, len: usize) {
        self.layers
            .iter_mut()
            .flatten()
            .for_each(|l| l.set_len(len));
    }

    /// Rotates tokens alike in all sequences of up to `positions` positions, see
    /// [`RotaryEmbedding::fix_frequencies`].
    pub fn fix_frequencies(&mut self, positions: usize) -> Result<()> {
        self.rotaries.rotated.fix_frequencies(positions)
    }

    /// Makes the rotary tables reach `positions` and gives them.
    pub fn rotaries(&mut self, positions: usize) -> Result<&Rotaries> {
        self.rotaries.reserve(positions)?;
        Ok(&self.rotaries)
    }

    /// Positions up to which a token's rotation does not depend on later ones.
    pub fn even_positions(&self) -> usize {
        self.rotaries.rotated.even_positions()
    }

    /// Forgets all positions.
    pub fn clear(&mut self) {
        self.layers.iter_mut().for_each(|l| *l = None);
    }
}

/// The model without its head.
#[derive(Clone, Debug)]
pub struct Stack {
    pub embedding: Embedding,
    pub blocks: Vec<Block>,
    pub norm: Norm,
    pub max_positions: usize,
}

/// The whole model.
#[derive(Clone, Debug)]
pub struct Decoder {
    pub stack: Stack,
    pub head: Projection,
}

impl Stack {
    /// The embedded tokens `[B, T, H]` of `input_ids` `[B, T]`.
    pub fn embed(&self, input_ids: &Tensor) -> Result<Tensor> {
        if input_ids.rank() != 2 {
            bail!("input_ids: {:?}, expected [B, T]", input_ids.dims());
        }
        self.embedding.forward(input_ids)
    }

    /// Runs the layers over embedded tokens `[B, T, H]` at `position..position + T` and returns the
    /// residual stream behind them.
    pub fn forward(
        &self,
        embedded: &Tensor,
        position: usize,
        cache: &mut DecoderCache,
    ) -> Result<Tensor> {
        self.forward_with(embedded, position, None, cache, None)
    }

    /// The same with a mask in place of the causal one, as in [`Tokens`]; `states` collects what
    /// enters each layer.
    pub fn forward_with(
        &self,
        embedded: &Tensor,
        position: usize,
        mask: Option<&Tensor>,
        cache: &mut DecoderCache,
        mut states: Option<&mut Vec<Tensor>>,
    ) -> Result<Tensor> {
        let (batch, tokens, _) = embedded.dims3()?;
        if tokens == 0 || batch == 0 {
            bail!("input_ids: empty, expected at least one token");
        }
        if cache.layers.len() != self.blocks.len() {
            bail!(
                "cache: made for {} layers, the model has {}",
                cache.layers.len(),
                self.blocks.len()
            );
        }
        let end = position.saturating_add(tokens);
        self.check_end(end)?;
        cache.rotaries.reserve(end)?;
        let mut x = embedded.clone();
        for (block, slot) in self.blocks.iter().zip(&mut cache.layers) {
            let at = Tokens {
                position,
                rotary: cache.rotaries.of(block),
                mask,
            };
            if let Some(states) = states.as_deref_mut() {
                states.push(x.clone());
            }
            let held = slot.take_if(|_| cache.keep);
            let mut layer = match held {
                Some(layer) if layer.batch() == batch || position > 0 => layer,
                _ => {
                    let limit = self.max_positions;
                    block
                        .attention
                        .new_cache(batch, limit, cache.dtype, &cache.device)?
                }
            };
            let result = block.forward(&x, &at, &mut layer);
            // Kept whatever came of it: a call that is refused leaves the positions before it.
            if cache.keep {
                *slot = Some(layer);
            }
            x = result?;
        }
        Ok(x)
    }

    /// Whether the context reaches to `end`.
    fn check_end(&self, end: usize) -> Result<()> {
        if end > self.max_positions {
            bail!(
                "input_ids: position {end} is past the model's context length of {}: shorten the \
                 prompt or generate fewer tokens",
                self.max_positions
            );
        }
        Ok(())
    }

    /// Runs the layers over one embedded token of each of several sequences, `[S, 1, H]`: sequence s at
    /// `positions[s]`, with a cache of its own that has buffers for every layer. Products read their weights once for
    /// all sequences.
    pub fn forward_each(
        &self,
        embedded: &Tensor,
        positions: &[usize],
        caches: &mut [&mut DecoderCache],
    ) -> Result<Tensor> {
        for (cache, position) in caches.iter_mut().zip(positions) {
            self.check_end(position + 1)?;
            cache.rotaries.reserve(position + 1)?;
        }
        let mut x = embedded.clone();
        for (layer, block) in self.blocks.iter().enumerate() {
            let (mut at, mut layers) = (Vec::new(), Vec::new());
            for (cache, position) in caches.iter_mut().zip(positions) {
                let DecoderCache {
                    layers: all,
                    rotaries,
                    ..
                } = &mut **cache;
                let Some(Some(held)) = all.get_mut(layer) else {
                    bail!("cache: layer {layer} has no buffers");
                };
                layers.push(held);
                at.push(Tokens {
                    position: *position,
                    rotary: rotaries.of(block),
                    mask: None,
                });
            }
            x = block.forward_each(&x, &at, &mut layers)?;
        }
        Ok(x)
    }

    /// Runs the layers over embedded tokens `[1, N, H]` of any sequences, whose keys and values are in pages: a pool
    /// for each layer. `kind` has rotary tables that reach them all.
    pub(crate) fn forward_paged(
        &self,
        embedded: &Tensor,
        tokens: &PagedTokens,
        kind: &DecoderCache,
        pools: &[PagePool],
    ) -> Result<Tensor> {
        if pools.len() != self.blocks.len() {
            let (pools, layers) = (pools.len(), self.blocks.len());
            bail!("cache: pages of {pools} layers, the model has {layers}");
        }
        let mut x = embedded.clone();
        for (block, pool) in self.blocks.iter().zip(pools) {
            x = block.forward_paged(&x, tokens, kind.rotaries.of(block), pool)?;
        }
        Ok(x)
    }
}

impl Decoder {
    /// The logits `[B, vocab]`, in x's dtype, of the last of `[B, T, H]`.
    pub fn last_logits(&self, x: &Tensor) -> Result<Tensor> {
        let (_, tokens, _) = x.dims3()?;
        self.logits(&x.narrow(1, tokens - 1, 1)?.squeeze(1)?)
    }

    /// The logits `[N, vocab]`, in x's dtype, of rows `[N, H]` of the residual stream.
    pub fn logits(&self, x: &Tensor) -> Result<Tensor> {
        let _span = tracing::trace_span!("head").entered();
        self.head.forward_joint(x, Some(&self.stack.norm))
    }

    /// Every hidden state as transformers counts them: the embedding, what leaves each layer but the
    /// last, and what leaves the last after the final norm; and the logits of every position.
    pub fn states_and_logits(
        &self,
        ids: &Tensor,
        position: usize,
        cache: &mut DecoderCache,
    ) -> Result<(Vec<Tensor>, Tensor)> {
        let stack = &self.stack;
        let mut states = Vec::with_capacity(stack.blocks.len() + 1);
        let embedded = stack.embed(ids)?;
        let x = stack.forward_with(&embedded, position, None, cache, Some(&mut states))?;
        let normed = stack.norm.forward(&x)?;
        let logits = self
            .head
            .forward_joint(&normed, None)?
            .to_dtype(DType::F32)?;
        states.push(normed);
        Ok((states, logits))
    }
}
