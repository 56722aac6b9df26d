//! Keys and values of several sequences in pages: each sequence has as many as its positions need, in order.

use crate::models::decoder::{Decoder, DecoderCache};
use crate::nn::{AttentionConfig, PagedRun, PagedTokens};
use crate::ops::{PageLayout, PagePool};
use crate::quant::KvCacheType;
use candle_core::{Result, Tensor, bail};

/// Tokens of a page.
const PAGE: usize = 64;

/// Pages of every layer, the values of a page after its keys.
pub(crate) fn pools(
    decoder: &Decoder,
    kind: &DecoderCache,
    [pages, page]: [usize; 2],
    kv_cache: KvCacheType,
) -> Result<Vec<PagePool>> {
    let device = kind.device();
    // On the CPU a task reads the tokens of one head: side by side, the hardware fetches them ahead.
    let layout = match device.is_cpu() {
        true => PageLayout::Hnd,
        false => PageLayout::Nhd,
    };
    let pool = |config: AttentionConfig| {
        let sizes = [pages, page, config.kv_heads, config.head_dim];
        PagePool::of_type(sizes, layout, (kv_cache, kind.dtype()), device)
    };
    let blocks = decoder.stack.blocks.iter();
    blocks.map(|block| pool(block.attention.config())).collect()
}

/// The pages of all sequences.
#[derive(Clone)]
pub(super) struct PagedCache {
    /// Of each layer.
    pub pools: Vec<PagePool>,
    /// The pages of all sequences, `width` each.
    pub table: Vec<u32>,
    pub width: usize,
    kind: DecoderCache,
}

/// Tokens of a sequence, by its number.
#[derive(Clone, Copy)]
pub(super) struct Run {
    pub index: usize,
    pub position: usize,
    pub tokens: usize,
}

impl PagedCache {
    /// `kind` has rotary tables that reach all positions.
    ///
    /// # Errors
    /// If attention is not fused, or rotates by more than the position, or memory is short.
    pub fn new(
        decoder: &Decoder,
        kind: &DecoderCache,
        [sequences, positions]: [usize; 2],
        kv_cache: KvCacheType,
    ) -> Result<Self> {
        const OP: &str = "generation: kv_cache";
        let mut blocks = decoder.stack.blocks.iter();
        if let Some(layer) = blocks.position(|block| !block.attention.is_fused()) {
            bail!("{OP}: attention of layer {layer} is not fused, which {kv_cache} needs");
        }
        let even = kind.even_positions();
        if positions > even {
            bail!(
                "{OP}: {positions} positions, expected at most {even} of this model in {kv_cache}"
            );
        }
        let width = positions.div_ceil(PAGE);
        let pools = pools(decoder, kind, [sequences * width, PAGE], kv_cache).map_err(|e| {
            e.context(format!(
                "generation: no room for the keys and values of {positions} positions of \
                 {sequences} sequences could be made"
            ))
        })?;
        Ok(Self {
            pools,
            table: (0..(sequences * width) as u32).collect(),
            width,
            kind: kind.over(Vec::new()),
        })
    }

    /// The pages of a sequence.
    pub fn of(&self, index: usize) -> &[u32] {
        &self.table[index * self.width..][..self.width]
    }

    /// Tokens through all layers, `[1, N, H]`; of the runs, the first `singles` have one token.
    pub fn forward(
        &self,
        decoder: &Decoder,
        ids: &[u32],
        runs: &[Run],
        singles: usize,
    ) -> Result<Tensor> {
        let device = self.kind.device();
        let runs: Vec<_> = runs
            .iter()
            .map(|run| PagedRun {
                pages: self.of(run.index),
                first: run.position,
                tokens: run.tokens,
            })
            .collect();
        let tokens = PagedTokens::new(&runs, singles, device)?;
        let ids = Tensor::new(ids, device)?.unsqueeze(0)?;
        let embedded = decoder.stack.embedding.rows(&ids)?;
        decoder
            .stack
            .forward_paged(&embedded, &tokens, &self.kind, &self.pools)
    }
}
