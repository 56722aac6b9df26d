//! Attention of ragged queries, prompts and single tokens mixed, over keys and values in pages.

use super::paged_attention::{Op, PagedAttention, reference_of};
use super::pages::{PagePool, PageTable};
use candle_core::{Result, Tensor};

pub use super::paged_attention::RaggedQueries;

const OP: &str = "paged_prefill";

/// The newest tokens of each sequence, of each as many as it has in q, attend to all its tokens up to their own:
/// `y = softmax(scale q Kᵀ) V`, for every head, where query `i` of `n` of a sequence of L tokens is at position
/// `L - n + i` and sees keys `0 ..= L - n + i`.
///
/// * `q`: `[total_q, Hq, D]`, f32, f16 or bf16: the queries of all sequences, prompts, chunks of prompts and single
///   tokens mixed, one sequence after the other
/// * `pool`: keys and values of all sequences, those of the new tokens among them
///   ([`paged_append`](fn@super::paged_append) writes them); f32, f16 or bf16, which may differ from q's dtype, or
///   quantized; Hkv divides Hq, and query head `h` reads key/value head `h / (Hq / Hkv)`
/// * `table`: each sequence's pages and length, B sequences
/// * `queries`: which rows of q are whose
/// * result: `[total_q, Hq, D]` in q's dtype, contiguous; zeros in rows that no sequence has, and where no key is seen
///
/// It is [`flash_attention_varlen`](fn@super::flash_attention_varlen), causal, with keys in pages, by the same kernels:
/// on Hopper TMA copies page by page (of 8 tokens or more), elsewhere `cp.async` row by row; a page's tokens are a
/// power of two there, and any number for the kernel in f32 arithmetic. For one query of each sequence
/// [`paged_attention`](fn@super::paged_attention) shares long sequences out over the GPU, which this does not. Lengths
/// and table are read by the kernel alone: they may change under a CUDA graph as long as `total_q` and `max_seqlen_q`
/// do not.
///
/// With [`PagedAttention::batch_invariant`] the rows of a sequence are the same bits whatever other sequences are in the
/// batch, in whatever order and however long they are, wherever its pages lie, and whatever `max_seqlen_q` is, as long as
/// keys and values are finite and its own queries are the same. Cutting its prompt into other chunks may change them, and
/// [`paged_attention`](fn@super::paged_attention) gives other bits. On CUDA no kernel shares a row's keys out among warps
/// then, which takes longer where there are few rows, and the choice of a kernel does not depend on the number of queries.
///
/// Sources: PagedAttention (Kwon et al. 2023); FlashAttention-2 (Dao 2023); FlashAttention-3 (Shah et al. 2024).
///
/// # Errors
/// If shapes, dtypes or devices do not fit, by the name of the argument. On the CPU also if a table or a length
/// reaches past what there is, or a sequence has more than `max_seqlen_q` queries. On CUDA, where that is not known
/// before, lengths end with the table, and what is seen of pages that are not in the pool is not defined.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{PageLayout, PagePool, PageTable, PagedAttention, RaggedQueries, paged_prefill};
/// let device = Device::Cpu;
/// let pages = Tensor::ones((8, 2, 16, 2, 64), DType::F32, &device)?;
/// let pool = PagePool::combined(&pages, PageLayout::Nhd)?;
/// // The last 18 of 20 tokens in pages 5 and 2, and the one token in page 3.
/// let table = PageTable::Padded {
///     block_table: Tensor::new(&[[5u32, 2], [3, 0]], &device)?,
///     lengths: Tensor::new(&[20u32, 1], &device)?,
/// };
/// let queries = RaggedQueries {
///     cu_seqlens_q: Tensor::new(&[0u32, 18, 19], &device)?,
///     max_seqlen_q: 18,
/// };
/// let q = Tensor::ones((19, 4, 64), DType::F32, &device)?;
/// let params = PagedAttention { scale: 0.125, ..Default::default() };
/// let y = paged_prefill(&q, &pool, &table, &queries, &params)?;
/// assert_eq!(y.sum_all()?.to_scalar::<f32>()?, 19. * 256.);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn paged_prefill(
    q: &Tensor,
    pool: &PagePool,
    table: &PageTable,
    queries: &RaggedQueries,
    params: &PagedAttention,
) -> Result<Tensor> {
    Op::new(OP, q, pool, table, params, Some(queries))?.apply(q)
}

/// [`paged_prefill`](fn@paged_prefill) in float64, one score at a time, `[total_q, Hq, D]` in row-major order.
///
/// # Errors
/// As [`paged_prefill`](fn@paged_prefill) on the CPU.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{PageLayout, PagePool, PageTable, PagedAttention, RaggedQueries, paged_prefill};
/// let device = Device::Cpu;
/// let pages = Tensor::ones((4, 2, 8, 1, 16), DType::F32, &device)?;
/// let pool = PagePool::combined(&pages, PageLayout::Nhd)?;
/// let table = PageTable::Padded {
///     block_table: Tensor::new(&[[3u32, 1]], &device)?,
///     lengths: Tensor::new(&[10u32], &device)?,
/// };
/// let queries = RaggedQueries { cu_seqlens_q: Tensor::new(&[0u32, 3], &device)?, max_seqlen_q: 3 };
/// let q = Tensor::randn(0f32, 1., (3, 2, 16), &device)?;
/// // All values are 1, and so is any mean of them.
/// let y = paged_prefill::reference(&q, &pool, &table, &queries, &PagedAttention::default())?;
/// assert!(y.len() == 96 && y.iter().all(|y| (y - 1.).abs() < 1e-12));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference(
    q: &Tensor,
    pool: &PagePool,
    table: &PageTable,
    queries: &RaggedQueries,
    params: &PagedAttention,
) -> Result<Vec<f64>> {
    reference_of(OP, q, pool, table, params, Some(queries))
}
