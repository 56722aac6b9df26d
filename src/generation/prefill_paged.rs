//! Chunks of the prompts of several sequences on a GPU, keys and values in pages.

use super::chain::PagedKeys;
use super::pages::padded;
use super::prefill::{LayerKeys, OP, PagedRows, Pass, launcher};
use crate::cpu::attention::Sizes;
use crate::cuda::{Address, Scratch, address_of};
use crate::models::decoder::{Block, Decoder, Rotaries};
use crate::nn::RotaryEmbedding;
use crate::ops::PagePool;
use crate::ops::embedding::cuda::{self as embedding, Lookup};
use crate::ops::flash_attention::cuda::{self as flash_attention, Call, Operand, Ragged};
use crate::ops::paged_append::cuda::AppendAt;
use crate::ops::paged_attention::cuda::{key_pages, operands};
use candle_core::{CudaDevice, Device, Result, Tensor};

/// Rows of several sequences, one sequence after the other.
pub(crate) struct Rows {
    ids: Vec<u32>,
    positions: Vec<u32>,
    owners: Vec<u32>,
    ends: Vec<u32>,
    lengths: Vec<u32>,
    last: Vec<u32>,
    table: Vec<u32>,
    width: usize,
    longest: usize,
}

impl Rows {
    /// None yet, of sequences of up to `width` pages.
    pub fn new(width: usize) -> Self {
        Self {
            ids: Vec::new(),
            positions: Vec::new(),
            owners: Vec::new(),
            ends: vec![0],
            lengths: Vec::new(),
            last: Vec::new(),
            table: Vec::new(),
            width,
            longest: 0,
        }
    }

    /// Tokens of one more sequence, from position `from` on, whose pages are these; `draws`: the logits behind the last
    /// are wanted.
    pub fn add(&mut self, ids: &[u32], from: usize, pages: &[u32], draws: bool) {
        let (owner, end) = (self.lengths.len() as u32, from + ids.len());
        self.ids.extend(ids);
        self.positions.extend(from as u32..end as u32);
        self.owners.resize(self.ids.len(), owner);
        self.ends.push(self.ids.len() as u32);
        self.lengths.push(end as u32);
        if draws {
            self.last.push(self.ids.len() as u32 - 1);
        }
        self.table.extend(pages);
        self.table.resize(self.lengths.len() * self.width, u32::MAX);
        self.longest = self.longest.max(ids.len());
    }

    /// Reads them, and gives the logits f32 `[draws, V]`; none if there are no draws.
    ///
    /// # Errors
    /// If a layer is not fused throughout, or memory is short.
    pub fn read(
        &self,
        device: &CudaDevice,
        decoder: &Decoder,
        rotaries: &Rotaries,
        pools: &[PagePool],
    ) -> Result<Option<Tensor>> {
        let lists = [
            &self.ids,
            &self.positions,
            &self.owners,
            &self.ends,
            &self.lengths,
            &self.last,
            &self.table,
        ];
        let words: Vec<u32> = lists.iter().flat_map(|list| list.iter().copied()).collect();
        let words = Tensor::new(words, &Device::Cuda(device.clone()))?;
        let mut starts = [address_of(&words)?; 7];
        for i in 1..lists.len() {
            starts[i] = starts[i - 1] + 4 * lists[i - 1].len() as Address;
        }
        let [ids, positions, owners, ends, lengths, last, table] = starts;
        let rows = PagedRows {
            decoder,
            rotaries,
            keys: PagedKeys {
                pools,
                table,
                width: self.width,
            },
            lengths,
            sequences: self.lengths.len(),
            ids,
            positions,
            owners,
            tokens: self.ids.len(),
            cu_seqlens: ends,
            longest: self.longest,
            last,
            draws: self.last.len(),
        };
        read(device, &rows)
    }
}

fn read(device: &CudaDevice, rows: &PagedRows<'_>) -> Result<Option<Tensor>> {
    let decoder = rows.decoder;
    let (mut kept, mut scratch) = (Scratch::new(device), Scratch::new(device));
    let at = [rows.ids, rows.tokens as u64];
    let mut pass = Pass::new(launcher(device)?, &mut scratch, decoder, at, &mut kept)?;
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

impl Pass<'_> {
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
        let keys = &rows.keys;
        let table = [keys.table, keys.width as u64, rows.sequences as u64];
        let pool = &keys.pools[layer];
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
                pitch: 0,
            }),
            pages: Some(key_pages(&pages, rows.lengths)),
            y,
            q_dtype: self.dtype,
            kv_dtype: pool.stored(),
            sizes: Sizes {
                batch: rows.sequences,
                heads,
                kv_heads: config.kv_heads,
                queries: rows.longest,
                keys: keys.width * sizes.page,
                dim,
            },
            scale: 1. / (dim as f32).sqrt(),
            softcap: None,
            right: Some(0),
            window: config.window,
            batch_invariant: false,
        };
        // SAFETY: the addresses stand for buffers of these sizes, which are freed in the order of the stream; pages that
        // the table has not are neither written nor read.
        unsafe {
            append.run(&self.launcher)?;
            flash_attention::launch(&self.launcher, &call)
        }
    }
}
