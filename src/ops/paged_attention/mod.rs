//! Attention of the newest tokens of many sequences over keys and values in pages.

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod reference;

use super::pages::{PagePool, PageTable, PoolSizes};
use super::view::{dense_on_cuda, float, inference_only};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};

#[cfg(feature = "cuda")]
pub use crate::cuda::KernelInfo;
#[cfg(feature = "cuda")]
pub use cuda::kernel_table;
pub use reference::reference;

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
    /// `h`, behind the softcap: `[Hq]`, f32, f16 or bf16.
    pub alibi_slopes: Option<Tensor>,
}

impl Default for PagedAttention {
    fn default() -> Self {
        Self {
            scale: 1.,
            window: None,
            softcap: None,
            alibi_slopes: None,
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
///   ([`paged_append`](fn@super::paged_append) writes them); f32, f16 or bf16, which may differ from q's dtype; Hkv
///   divides Hq, and query head `h` reads key/value head `h / (Hq / Hkv)`
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
/// before they multiply the values. q, and a view of it, is read where it lies if a head's elements lie side by side.
///
/// Sources: PagedAttention (Kwon et al. 2023); Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023); Stream-K (Osama,
/// Merrill, Cecka, Garland, Owens, 2023); FlashInfer (Ye et al. 2025).
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
    let op = Op::new(q, pool, table, params)?;
    let slopes = params.alibi_slopes.iter().map(|t| ("alibi_slopes", t));
    let given = [("q", q), ("pool.k", &pool.k), ("pool.v", &pool.v)];
    inference_only(OP, given.into_iter().chain(slopes))?;
    // A kernel follows any strides but those within a head.
    let packed = op.pool.dim <= 1 || q.stride()[3] == 1;
    let q = if packed { q.clone() } else { dense_on_cuda(q)? };
    q.apply_op1_no_bwd(&op)
}

/// The op as candle sees it.
struct Op<'a> {
    pages: &'a PagePool,
    table: &'a PageTable,
    params: &'a PagedAttention,
    /// In f32, contiguous.
    slopes: Option<Tensor>,
    pool: PoolSizes,
    sequences: usize,
    /// Of a sequence.
    queries: usize,
    heads: usize,
}

impl<'a> Op<'a> {
    /// Checks everything that can be told without the table's values.
    fn new(
        q: &Tensor,
        pages: &'a PagePool,
        table: &'a PageTable,
        params: &'a PagedAttention,
    ) -> Result<Self> {
        let pool = pages.checked(OP)?;
        float(OP, "q", q.dtype())?;
        let &[sequences, queries, heads, dim] = q.dims() else {
            bail!("{OP}: q has shape {:?}, expected [B, T, Hq, D]", q.shape());
        };
        if dim != pool.dim {
            bail!("{OP}: q has heads of {dim}, expected pool.k's {}", pool.dim);
        }
        if heads % pool.kv_heads != 0 {
            bail!(
                "{OP}: q has {heads} heads, expected a multiple of pool.k's {}",
                pool.kv_heads
            );
        }
        for (name, t) in [("q", q), ("pool.v", &pages.v)] {
            if !t.device().same_device(pages.k.device()) {
                bail!("{OP}: {name} is on another device than pool.k");
            }
        }
        let tabled = table.checked(OP, pages.k.device())?;
        if tabled != sequences {
            bail!("{OP}: the table has {tabled} sequences, q has {sequences}");
        }
        if !params.scale.is_finite() {
            bail!("{OP}: scale is {}, expected a finite number", params.scale);
        }
        if params.window == Some(0) {
            bail!("{OP}: window is 0, expected at least 1, the token's own position");
        }
        if let Some(cap) = params.softcap.filter(|c| !(c.is_finite() && *c > 0.)) {
            bail!("{OP}: softcap is {cap}, expected a positive number");
        }
        let slopes = match &params.alibi_slopes {
            Some(slopes) => {
                float(OP, "alibi_slopes", slopes.dtype())?;
                if slopes.dims() != [heads] || !slopes.device().same_device(q.device()) {
                    bail!(
                        "{OP}: alibi_slopes has shape {:?} on {:?}, expected [{heads}] on q's device",
                        slopes.shape(),
                        slopes.device().location()
                    );
                }
                Some(slopes.to_dtype(DType::F32)?.contiguous()?)
            }
            None => None,
        };
        Ok(Self {
            pages,
            table,
            params,
            slopes,
            pool,
            sequences,
            queries,
            heads,
        })
    }

    /// Elements of the result.
    fn len(&self) -> usize {
        self.sequences * self.queries * self.heads * self.pool.dim
    }

    /// The first key that a query of a sequence of so many tokens sees.
    fn first_key(&self, length: usize) -> usize {
        let before =
            |window: usize| (length + 1).saturating_sub(window.saturating_add(self.queries));
        self.params.window.map_or(0, before)
    }
}

impl CustomOp1 for Op<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, q: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        cpu::forward(self, q, layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, q: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda::forward(self, q, layout)
    }
}
