//! Chunks of the prompts of several sequences on a GPU, keys and values in pages.

use super::pages::padded;
use super::plan::PagedKeys;
use super::prefill::{LayerKeys, OP, Pass};
use crate::cpu::attention::Sizes;
use crate::cuda::{Address, Scratch, address_of};
use crate::models::decoder::{Block, Decoder, Rotaries};
use crate::nn::RotaryEmbedding;
use crate::ops::embedding::cuda::{self as embedding, Lookup};
use crate::ops::flash_attention::cuda::{self as flash_attention, Call, Operand, Ragged};
use crate::ops::paged_append::cuda::AppendAt;
use crate::ops::paged_attention::cuda::{key_pages, operands};
use candle_core::{CudaDevice, Result, Tensor};

/// Whose rows are read. All addresses are of u32.
pub(crate) struct PagedRows<'a> {
    pub decoder: &'a Decoder,
    pub rotaries: &'a Rotaries,
    /// The table has these rows' sequences.
    pub keys: PagedKeys<'a>,
    pub sequences: usize,
    /// `[tokens]`: ids, positions, and the number of each one's sequence.
    pub ids: Address,
    pub positions: Address,
    pub owners: Address,
    pub tokens: usize,
    /// `[sequences]`: tokens of each, with the rows.
    pub lengths: Address,
    /// `[sequences + 1]`: where each sequence's rows end.
    pub cu_seqlens: Address,
    /// Rows of a sequence, at most.
    pub longest: usize,
    /// `[draws]`: rows whose logits are wanted.
    pub last: Address,
    pub draws: usize,
}

/// Reads the rows, and gives the logits f32 `[draws, V]`; none if there are no draws.
///
/// # Errors
/// If a layer is not fused throughout, or memory is short.
pub(crate) fn read(device: &CudaDevice, rows: &PagedRows<'_>) -> Result<Option<Tensor>> {
    let decoder = rows.decoder;
    let mut kept = Scratch::new(device);
    let mut pass = Pass::new(device, decoder, [rows.ids, rows.tokens as u64], &mut kept)?;
    for (layer, block) in decoder.stack.blocks.iter().enumerate() {
        let rotary = rows.rotaries.of(block);
        pass.block(block, LayerKeys::Pages(rows, layer), rotary)?;
        pass.scratch.reset();
    }
    if rows.draws == 0 {
        return Ok(None);
    }
    let out = kept.take(OP, pass.dtype, rows.draws * pass.hidden)?;
    let mut lookup = Lookup::of_rows(pass.x, [rows.tokens, pass.hidden], pass.dtype);
    (lookup.ids, lookup.out, lookup.count) = (rows.last, out, rows.draws);
    // SAFETY: the stream has so many rows, and `out` has room for those that are wanted.
    unsafe { embedding::launch(&pass.launcher, &lookup)? };
    pass.logits(device, decoder, out, rows.draws).map(Some)
}

impl Pass {
    /// Rotation, append and attention, from `[tokens, (heads + 2 kv_heads) D]` to `[tokens, heads D]`.
    pub(super) fn paged(
        &mut self,
        block: &Block,
        [qkv, y]: [Address; 2],
        (rows, layer): (&PagedRows<'_>, usize),
        rotary: &RotaryEmbedding,
    ) -> Result<()> {
        let config = block.attention.config();
        let (heads, dim) = (config.heads, config.head_dim);
        let table = [
            rows.keys.table,
            rows.keys.width as u64,
            rows.sequences as u64,
        ];
        let pool = &rows.keys.pools[layer];
        let (pages, sizes) = padded(pool, table)?;
        let norms = block.attention.head_norms();
        let (cos, sin) = rotary.tables();
        let (tokens, width) = (self.tokens, heads * dim);
        let q = self.scratch.take(OP, self.dtype, tokens * width)?;
        let append = AppendAt {
            pages,
            x: qkv,
            y: q,
            cos: address_of(cos)?,
            sin: address_of(sin)?,
            q_norm: norms.map_or(Ok(0), |n| address_of(n.q))?,
            k_norm: norms.map_or(Ok(0), |n| address_of(n.k))?,
            at: rows.positions,
            owners: rows.owners,
            cu_seqlens: 0,
            tokens,
            heads,
            sizes,
            positions: cos.dim(0)?,
            pairs: cos.dim(1)?,
            style: Some(rotary.style()),
            eps: norms.map_or(0., |n| n.eps as f32),
            dtype: self.dtype,
        };
        let [k, v] = operands(&pages);
        let call = Call {
            q: Operand {
                address: q,
                strides: [tokens * width, dim, width, 1].map(|n| n as i64),
            },
            k,
            v,
            mask: None,
            alibi: None,
            ragged: Some(Ragged {
                cu_q: rows.cu_seqlens,
                cu_k: 0,
                total_q: tokens,
            }),
            pages: Some(key_pages(&pages, rows.lengths)),
            y,
            q_dtype: self.dtype,
            kv_dtype: pool.dtype(),
            sizes: Sizes {
                batch: rows.sequences,
                heads,
                kv_heads: config.kv_heads,
                queries: rows.longest,
                keys: rows.keys.width * sizes.page,
                dim,
            },
            scale: 1. / (dim as f32).sqrt(),
            softcap: None,
            right: Some(0),
            window: config.window,
        };
        // SAFETY: the addresses stand for buffers of these sizes, which are freed in the order of the stream; pages that
        // the table has not are neither written nor read.
        unsafe {
            append.run(&self.launcher)?;
            flash_attention::launch(&self.launcher, &call)
        }
    }
}
