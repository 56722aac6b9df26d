//! The form over keys and values in pages.

use crate::ops::flash_attention::cumulative_lengths;
use crate::ops::{PageLayout, PagePool, PageTable, PagedAttention, RaggedQueries, paged_prefill};
use candle_core::{DType, Device, Result, Tensor, bail};

const OP: &str = "flash_attn_varlen_paged";

/// [`flash_attn_varlen`](super::flash_attn_varlen), causal, over keys and values in pages: `k` and `v` are `[blocks,
/// page_block_size, Hkv, D]`, and `block_table`, u32 `[sequences, max_blocks]`, says which blocks a sequence's are in.
/// It may be i32 too, and comes to the host then.
///
/// `window_size_right` has to be 0, and `mm_prefix_ranges` `None`: pages are read by
/// [`paged_prefill`](fn@crate::ops::paged_prefill), where no query sees a key after its own. Blocks may be of any
/// size (on a GPU up to 256).
///
/// # Errors
/// As for the [module](super), or if there is more to see than that.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::flash_attn::flash_attn_varlen_paged_windowed;
/// let device = Device::Cpu;
/// // 4 blocks of 32 tokens. A sequence of 40 tokens, the last 3 of them new, is in blocks 2 and 0.
/// let kv = Tensor::randn(0f32, 1., (4, 32, 2, 16), &device)?;
/// let (q, table) = (Tensor::ones((3, 2, 16), DType::F32, &device)?, Tensor::new(&[[2u32, 0]], &device)?);
/// let [of_q, of_k] = [3u32, 40].map(|n| Tensor::new(&[0, n], &device));
/// let y = flash_attn_varlen_paged_windowed(
///     &q, &kv, &kv, &of_q?, &of_k?, &table, None, 3, 40, 0.25, Some(0), Some(0), 32, None,
/// )?;
/// // Within this window each token sees itself alone: the last one is the eighth of block 0.
/// let own = kv.get(0)?.get(7)?;
/// assert!((y.get(2)? - own)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[allow(clippy::too_many_arguments, reason = "the signature is candle's")]
pub fn flash_attn_varlen_paged_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    _max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    if mm_prefix_ranges.is_some() {
        bail!("{OP}: mm_prefix_ranges are given, expected none");
    }
    if window_size_right != Some(0) {
        bail!("{OP}: window_size_right is {window_size_right:?}, expected Some(0)");
    }
    if k.rank() == 4 && k.dims()[1] != page_block_size {
        bail!(
            "{OP}: page_block_size is {page_block_size}, expected that of k, {:?}",
            k.shape()
        );
    }
    let [of_q, of_k] = [seqlens_q, seqlens_k].map(Tensor::dims);
    if of_k.len() != 1 || of_k != of_q || of_k[0] < 2 || seqlens_k.dtype() != DType::U32 {
        bail!(
            "{OP}: seqlens_k is {:?} {of_k:?}, expected U32 of seqlens_q's shape, {of_q:?}, and two \
             elements at least",
            seqlens_k.dtype()
        );
    }
    if q.device().is_cpu() {
        cumulative_lengths(OP, "seqlens_k", seqlens_k)?;
    }
    let sequences = of_k[0] - 1;
    let ends = seqlens_k.narrow(0, 1, sequences)?;
    let lengths = (ends - seqlens_k.narrow(0, 0, sequences)?)?;
    let block_table = match block_table.dtype() {
        // candle has no conversion of them on a GPU.
        DType::I32 => {
            let table = block_table.to_device(&Device::Cpu)?.to_dtype(DType::U32)?;
            table.to_device(q.device())?
        }
        _ => block_table.clone(),
    };
    let pool = PagePool {
        k: k.clone(),
        v: v.clone(),
        layout: PageLayout::Nhd,
        scales: None,
    };
    let queries = RaggedQueries {
        cu_seqlens_q: seqlens_q.clone(),
        max_seqlen_q,
    };
    let params = PagedAttention {
        scale: softmax_scale,
        // That one has the query's own position besides.
        window: window_size_left.map(|left| left.saturating_add(1)),
        softcap: softcap.filter(|cap| *cap != 0.),
        ..Default::default()
    };
    let table = PageTable::Padded {
        block_table,
        lengths,
    };
    paged_prefill(q, &pool, &table, &queries, &params)
}
