//! Attention of the newest tokens of many sequences over keys and values in pages.

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod reference;

use super::pages::{PagePool, PageTable, PoolSizes};
use super::view::{check_tensors, dense_on_cuda, float};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};
use std::ops::Range;

#[cfg(feature = "cuda")]
pub use crate::cuda::KernelInfo;
#[cfg(feature = "cuda")]
pub use cuda::kernel_table;
pub use reference::reference;
pub(super) use reference::reference_of;

const OP: &str = "paged_attention";

/// How scores are formed and what a query sees.
#[derive(Clone, Debug)]
pub struct PagedAttention {
    /// Factor on the scores, usually `1 / sqrt(D)`; 1 by default.
    pub scale: f32,
    /// A token sees itself and `window - 1` before it; none sees all.
    pub window: Option<usize>,
    /// Scores become `softcap * tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// ALiBi: `alibi_slopes[h] * (p - j)` is taken off the score of a query at position `p` and key `j` in head
    /// `h`, after the softcap: `[Hq]`, f32, f16 or bf16.
    pub alibi_slopes: Option<Tensor>,
    /// Batch invariance: a query's result is the same to the last bit whatever other sequences are in the batch, how many
    /// there are and how long they are; false by default. What else it does not depend on, and what it costs, is said
    /// where the op is.
    pub batch_invariant: bool,
}

impl Default for PagedAttention {
    fn default() -> Self {
        Self {
            scale: 1.,
            window: None,
            softcap: None,
            alibi_slopes: None,
            batch_invariant: false,
        }
    }
}

/// The newest T tokens of each sequence attend to all its tokens up to their own:
/// `y = softmax(scale q Kᵀ) V`, for every head, where query `i` of a sequence of L tokens is at position
/// `L - T + i` and sees keys `0 ..= L - T + i`.
///
/// * `q`: `[B, T, Hq, D]`, f32, f16 or bf16: a token of each sequence (T = 1), or several to verify a draft; any
///   number is taken, up to 16 are what it is made for
/// * `pool`: keys and values of all sequences, those of the T tokens among them
///   ([`paged_append`](fn@super::paged_append) writes them); f32, f16 or bf16, which may differ from q's dtype, or
///   quantized; Hkv divides Hq, and query head `h` reads key/value head `h / (Hq / Hkv)`
/// * `table`: each sequence's pages and length, B sequences
/// * result: `[B, T, Hq, D]` in q's dtype
///
/// A query that sees no key, as all of an empty sequence do and the first ones of a sequence shorter than T, gets
/// zeros, and so does one whose every score is -inf.
///
/// Scores and sums are f32. On CUDA one launch shares the keys of all sequences out over the GPU, in equal parts
/// whatever the sequences' lengths are: lengths and table are read by the kernel alone, and the grid follows from
/// shapes, so that a captured graph serves changing batches. Tensor cores take 8 queries of a key/value head at a
/// time, or 16 where there are more than 8 and q is of the pool's dtype; with 16 the weights are rounded to that dtype
/// before they multiply the values. Codes become f16 in registers, and so do queries, in two parts where they are 8: they
/// may be 65504 at most. Scales of keys multiply the scores, and scales of values the weights. q, and a view of it, is
/// read where it lies if a head's elements lie side by side.
///
/// # Batch invariance
/// Which keys are summed together follows from all sequences' lengths by default, so that the last bits of a result depend
/// on the batch. With [`PagedAttention::batch_invariant`] keys are split at multiples of 128, counted from the sequence's
/// first token. Of the splits `c` of the keys that a query sees
/// `y = sum over c of 2^(t_c - t) o_c / sum over c of 2^(t_c - t) l_c`, where `t_c` is the largest score of split `c` in
/// units of log 2, `l_c` the sum of its weights `2^(s - t_c)`, `o_c` that of its values by these, and `t` the largest
/// `t_c`. Each is computed from its first key to its last, and splits are added up in an order that follows from their
/// number. A query's result is then the same bits, as long as keys and values are finite,
///
/// * whatever other sequences are in the batch, in whatever order, and however long they are;
/// * however many queries are in the step, T = 4 for a draft or four times T = 1;
/// * wherever its pages lie in the pool, in a padded table or one in CSR form.
///
/// Nothing is promised from one dtype, pool layout, kind of GPU or CPU to another, nor from queries whose strides and
/// address are multiples of 16 bytes to others, and [`paged_prefill`](fn@super::paged_prefill) gives other bits. Ranges of
/// `indptr` must not overlap.
///
/// On CUDA the price is a second launch, which merges the splits, and memory that their partial results go through:
/// `T Hq (D + 2)` floats for each split of as many tokens as the table has entries for, or as a window reaches. Warps take
/// whole splits, which share less evenly than single tiles, and 8 queries at most, never 16. On an H200 the op takes 1.0 to
/// 1.4 times as long, with 64 and 256 MB of keys and values of 1, 16 and 256 sequences of very different lengths. On the
/// CPU, where other sequences have no influence anyway, each of the T queries reads the keys by itself.
///
/// Sources: PagedAttention (Kwon et al. 2023); Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023); Stream-K (Osama,
/// Merrill, Cecka, Garland, Owens, 2023); FlashInfer (Ye et al. 2025), whose fixed split size this is, and "Defeating
/// Nondeterminism in LLM Inference" (Thinking Machines, 2025), which says why.
///
/// # Errors
/// If shapes, dtypes or devices do not fit, by the name of the argument. On the CPU also if a table or a length
/// reaches past what there is. On CUDA, where that is not known before, keys in pages that are not in the pool are
/// not seen, and lengths end with the table.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{PageLayout, PagePool, PageTable, PagedAttention, paged_attention};
/// let device = Device::Cpu;
/// // 8 pages of 16 tokens, for two key/value heads of 64.
/// let pages = Tensor::ones((8, 2, 16, 2, 64), DType::F32, &device)?;
/// let pool = PagePool::combined(&pages, PageLayout::Nhd)?;
/// // 20 tokens in pages 5 and 2, and none.
/// let table = PageTable::Padded {
///     block_table: Tensor::new(&[[5u32, 2], [0, 0]], &device)?,
///     lengths: Tensor::new(&[20u32, 0], &device)?,
/// };
/// let q = Tensor::ones((2, 1, 4, 64), DType::F32, &device)?;
/// let params = PagedAttention { scale: 0.125, ..Default::default() };
/// let y = paged_attention(&q, &pool, &table, &params)?;
/// assert_eq!(y.sum((1, 2, 3))?.to_vec1::<f32>()?, [256., 0.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn paged_attention(
    q: &Tensor,
    pool: &PagePool,
    table: &PageTable,
    params: &PagedAttention,
) -> Result<Tensor> {
    Op::new(OP, q, pool, table, params, None)?.apply(q)
}

/// The queries of a ragged batch, one sequence after the other.
#[derive(Clone, Debug)]
pub struct RaggedQueries {
    /// `[B + 1]`, u32: sequence b has rows `cu_seqlens_q[b] .. cu_seqlens_q[b + 1]` of q.
    pub cu_seqlens_q: Tensor,
    /// At least as many as the longest sequence has. On a GPU, which alone reads the lengths there, what a sequence
    /// has beyond it is not computed.
    pub max_seqlen_q: usize,
}

/// The op as candle sees it: `paged_attention`, and `paged_prefill` where queries are ragged.
pub(super) struct Op<'a> {
    name: &'static str,
    pages: &'a PagePool,
    table: &'a PageTable,
    params: &'a PagedAttention,
    /// In f32, contiguous.
    slopes: Option<Tensor>,
    pool: PoolSizes,
    sequences: usize,
    /// Of a sequence, at most if they are ragged.
    queries: usize,
    heads: usize,
    /// Cumulative numbers of queries, contiguous.
    ragged: Option<Tensor>,
}

impl<'a> Op<'a> {
    /// Checks everything that can be told without the tensors' values.
    pub(super) fn new(
        name: &'static str,
        q: &Tensor,
        pages: &'a PagePool,
        table: &'a PageTable,
        params: &'a PagedAttention,
        ragged: Option<&RaggedQueries>,
    ) -> Result<Self> {
        let pool = pages.checked(name)?;
        float(name, "q", q.dtype())?;
        let sequences = table.checked(name, pages.k.device())?;
        let (of_q, queries, heads, dim) = match (q.dims(), ragged) {
            (&[b, t, heads, dim], None) => (b, t, heads, dim),
            (&[rows, heads, dim], Some(r)) => (sequences, r.max_seqlen_q.min(rows), heads, dim),
            (_, None) => bail!(
                "{name}: q has shape {:?}, expected [B, T, Hq, D]",
                q.shape()
            ),
            (_, Some(_)) => bail!(
                "{name}: q has shape {:?}, expected [total_q, Hq, D]",
                q.shape()
            ),
        };
        if of_q != sequences {
            bail!("{name}: the table has {sequences} sequences, q has {of_q}");
        }
        if dim != pool.dim {
            bail!(
                "{name}: q has heads of {dim}, expected pool.k's {}",
                pool.dim
            );
        }
        if heads % pool.kv_heads != 0 {
            bail!(
                "{name}: q has {heads} heads, expected a multiple of pool.k's {}",
                pool.kv_heads
            );
        }
        for (argument, t) in [("q", q), ("pool.v", &pages.v)] {
            if !t.device().same_device(pages.k.device()) {
                bail!("{name}: {argument} is on another device than pool.k");
            }
        }
        let ragged = ragged.map(|r| r.checked(name, sequences, q)).transpose()?;
        let slopes = params.checked(name, heads, q)?;
        Ok(Self {
            name,
            pages,
            table,
            params,
            slopes,
            pool,
            sequences,
            queries,
            heads,
            ragged,
        })
    }

    /// The result for queries that the op was made for.
    pub(super) fn apply(&self, q: &Tensor) -> Result<Tensor> {
        let slopes = self.params.alibi_slopes.iter().map(|t| ("alibi_slopes", t));
        let given = std::iter::once(("q", q)).chain(self.pages.named());
        check_tensors(self.name, given.chain(slopes))?;
        // A kernel follows any strides but those within a head.
        let packed = self.pool.dim <= 1 || q.stride()[q.rank() - 1] == 1;
        let q = if packed { q.clone() } else { dense_on_cuda(q)? };
        q.apply_op1_no_bwd(self)
    }

    /// Rows of q that each sequence has, of `total`; read from a tensor on any device.
    fn rows(&self, total: usize) -> Result<Vec<Range<usize>>> {
        let name = self.name;
        let Some(lengths) = &self.ragged else {
            let of_sequence = |b| b * self.queries..(b + 1) * self.queries;
            return Ok((0..self.sequences).map(of_sequence).collect());
        };
        let lengths = lengths.to_vec1::<u32>()?;
        let row = |(b, ends): (usize, &[u32])| {
            let (from, to) = (ends[0] as usize, ends[1] as usize);
            if from > to || to > total {
                bail!("{name}: cu_seqlens_q has {from}..{to} for sequence {b}, q has {total} rows");
            }
            if to - from > self.queries {
                let most = self.queries;
                bail!(
                    "{name}: sequence {b} has {} queries, max_seqlen_q is {most}",
                    to - from
                );
            }
            Ok(from..to)
        };
        lengths.windows(2).enumerate().map(row).collect()
    }

    /// The first key that one of a sequence's last `queries` of `length` tokens sees.
    fn first_key(&self, length: usize, queries: usize) -> usize {
        let before = |window: usize| (length + 1).saturating_sub(window.saturating_add(queries));
        self.params.window.map_or(0, before)
    }
}

impl PagedAttention {
    /// The slopes in f32, contiguous, if all is usable.
    fn checked(&self, name: &str, heads: usize, q: &Tensor) -> Result<Option<Tensor>> {
        if !self.scale.is_finite() {
            bail!("{name}: scale is {}, expected a finite number", self.scale);
        }
        if self.window == Some(0) {
            bail!("{name}: window is 0, expected at least 1, the token's own position");
        }
        if let Some(cap) = self.softcap.filter(|c| !(c.is_finite() && *c > 0.)) {
            bail!("{name}: softcap is {cap}, expected a positive number");
        }
        match &self.alibi_slopes {
            Some(slopes) => {
                float(name, "alibi_slopes", slopes.dtype())?;
                if slopes.dims() != [heads] || !slopes.device().same_device(q.device()) {
                    bail!(
                        "{name}: alibi_slopes has shape {:?} on {:?}, expected [{heads}] on q's device",
                        slopes.shape(),
                        slopes.device().location()
                    );
                }
                Ok(Some(slopes.to_dtype(DType::F32)?.contiguous()?))
            }
            None => Ok(None),
        }
    }
}

impl RaggedQueries {
    /// The cumulative numbers, contiguous.
    fn checked(&self, name: &str, sequences: usize, q: &Tensor) -> Result<Tensor> {
        let lengths = &self.cu_seqlens_q;
        if lengths.dims() != [sequences + 1] || lengths.dtype() != DType::U32 {
            bail!(
                "{name}: cu_seqlens_q is {:?} {:?}, expected U32 [{}], one more than sequences",
                lengths.dtype(),
                lengths.dims(),
                sequences + 1
            );
        }
        if !lengths.device().same_device(q.device()) {
            bail!("{name}: cu_seqlens_q is on another device than q");
        }
        lengths.contiguous()
    }
}

impl CustomOp1 for Op<'_> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, q: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        cpu::forward(self, q, layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, q: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda::forward(self, q, layout)
    }
}
