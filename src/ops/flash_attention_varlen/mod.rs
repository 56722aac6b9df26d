//! Attention over a ragged batch: sequences of different lengths without padding.

mod padded;

use super::flash_attention::{self, Attention, AttentionParams, Form, facts};
use super::view::check_tensors;
use crate::cpu::simd::{self, Level};
use candle_core::{DType, Device, Result, Tensor};

pub use super::flash_attention::RaggedBatch;
pub use padded::{flash_attention_padded, flash_attention_padded_at, reference_padded};

/// As this op takes queries, keys and values.
pub(crate) const FORM: Form = Form {
    op: "flash_attention_varlen",
    axes: "[tokens, heads, dim]",
    heads: 1,
    tokens: 0,
    rank: 3,
};

/// `y = softmax(scale q kᵀ) v` of every sequence by itself, for every head, over the keys that each query
/// sees.
///
/// * `q`: `[total_q, Hq, D]`, f32, f16 or bf16: the queries of all sequences, one sequence after the other
/// * `k`, `v`: `[total_k, Hkv, D]`, f32, f16 or bf16, both of one type; Hkv divides Hq, and query head `h`
///   reads key/value head `h / (Hq / Hkv)`
/// * `batch`: where sequences begin and end; one may have more keys than queries, or none at all
/// * `params`: as in [`flash_attention`](fn@super::flash_attention), for each sequence with its own `Tq` and
///   `Tk`, so that its queries are its last positions; without a mask
/// * result: `[total_q, Hq, D]` in q's dtype, contiguous; rows that no sequence has are zeros
///
/// Any layout is read where it lies. A sequence gets what [`flash_attention`](fn@super::flash_attention)
/// gives it, whatever else is in the batch. On a GPU one launch takes all sequences, by the same kernels,
/// and the lengths are read on the device: they may change under a CUDA graph as long as totals and
/// `max_seqlen_q` do not.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{AttentionParams, RaggedBatch, flash_attention_varlen};
/// let device = Device::Cpu;
/// // Two sequences, of 3 and of 5 tokens.
/// let q = Tensor::ones((8, 9, 64), DType::F32, &device)?;
/// let (k, v) = (q.narrow(1, 0, 3)?, q.narrow(1, 3, 3)?);
/// let lengths = Tensor::new(&[0u32, 3, 8], &device)?;
/// let batch = RaggedBatch {
///     cu_seqlens_q: lengths.clone(),
///     cu_seqlens_k: lengths,
///     max_seqlen_q: 5,
/// };
/// let params = AttentionParams { scale: 0.125, causal: true, ..Default::default() };
/// let y = flash_attention_varlen(&q, &k, &v, &batch, &params)?;
/// assert_eq!(y.dims(), [8, 9, 64]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// Source: FlashAttention-2 (Dao, 2023), whose `flash_attn_varlen_func` this is.
///
/// # Errors
/// If ranks, dimensions, dtypes or devices do not fit, or a parameter is no usable number. On the CPU also
/// if cumulative lengths decrease, pass the number of tokens, or give a sequence more than `max_seqlen_q`
/// queries. A GPU reads no rows but those of q, k and v, whatever the lengths are; what such sequences get
/// there is not defined.
pub fn flash_attention_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    batch: &RaggedBatch,
    params: &AttentionParams,
) -> Result<Tensor> {
    flash_attention_varlen_at(simd::level(), q, k, v, batch, params)
}

/// [`flash_attention_varlen`] with the instructions of `level`, or of the best level that the processor
/// has where that is less.
///
/// # Errors
/// As [`flash_attention_varlen`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::cpu::simd::Level;
/// use candle_fused::ops::flash_attention_varlen::{flash_attention_varlen, flash_attention_varlen_at};
/// use candle_fused::ops::{AttentionParams, RaggedBatch};
/// let q = Tensor::randn(0f32, 1., (8, 2, 16), &Device::Cpu)?;
/// let lengths = Tensor::new(&[0u32, 3, 8], &Device::Cpu)?;
/// let batch = RaggedBatch { cu_seqlens_q: lengths.clone(), cu_seqlens_k: lengths, max_seqlen_q: 5 };
/// let params = AttentionParams { causal: true, ..Default::default() };
/// let plain = flash_attention_varlen_at(Level::Scalar, &q, &q, &q, &batch, &params)?;
/// let fastest = flash_attention_varlen(&q, &q, &q, &batch, &params)?;
/// assert!((plain - fastest)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-4);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn flash_attention_varlen_at(
    level: Level,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    batch: &RaggedBatch,
    params: &AttentionParams,
) -> Result<Tensor> {
    let op = checked(level, [q, k, v], batch, params)?;
    let lengths = [
        ("cu_seqlens_q", &batch.cu_seqlens_q),
        ("cu_seqlens_k", &batch.cu_seqlens_k),
    ];
    let given = params.tensors().chain(lengths);
    check_tensors(FORM.op, given.chain([("q", q), ("k", k), ("v", v)]))?;
    q.apply_op3_no_bwd(k, v, &op)
}

fn checked(
    level: Level,
    [q, k, v]: [&Tensor; 3],
    batch: &RaggedBatch,
    params: &AttentionParams,
) -> Result<Attention> {
    FORM.check_tensors(q, k, v)?;
    let facts = [facts(q), facts(k), facts(v)];
    Attention::new(FORM, params, facts, q.device(), level)?.over(batch, q.device())
}

/// [`flash_attention_varlen`](fn@flash_attention_varlen) in f64, one sequence after the other; f64 result
/// `[total_q, Hq, D]`.
///
/// # Errors
/// As [`flash_attention_varlen`](fn@flash_attention_varlen) on the CPU.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::ops::{AttentionParams, RaggedBatch, flash_attention_varlen};
/// // A sequence of one token, and one of two: each token sees those of its own sequence.
/// let q = Tensor::zeros((3, 1, 1), candle_core::DType::F32, &Device::Cpu)?;
/// let v = Tensor::new(&[[[5f32]], [[1.]], [[2.]]], &Device::Cpu)?;
/// let lengths = Tensor::new(&[0u32, 1, 3], &Device::Cpu)?;
/// let batch = RaggedBatch { cu_seqlens_q: lengths.clone(), cu_seqlens_k: lengths, max_seqlen_q: 2 };
/// let y = flash_attention_varlen::reference(&q, &q, &v, &batch, &AttentionParams::default())?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f64>()?, [5., 1.5, 1.5]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    batch: &RaggedBatch,
    params: &AttentionParams,
) -> Result<Tensor> {
    checked(Level::Scalar, [q, k, v], batch, params)?;
    let sequence =
        |t: &Tensor, first: usize, n: usize| t.narrow(0, first, n)?.transpose(0, 1)?.unsqueeze(0);
    let mut y = Tensor::zeros(q.dims(), DType::F64, &Device::Cpu)?;
    for rows in batch.ranges(FORM.op, q.dims()[0], k.dims()[0])? {
        let (first, n) = (rows.first_query, rows.queries);
        if n == 0 {
            continue;
        }
        let own = flash_attention::reference(
            &sequence(q, first, n)?,
            &sequence(k, rows.first_key, rows.keys)?,
            &sequence(v, rows.first_key, rows.keys)?,
            params,
        )?;
        let own = own.squeeze(0)?.transpose(0, 1)?.contiguous()?;
        y = y.slice_assign(&[first..first + n, 0..q.dims()[1], 0..q.dims()[2]], &own)?;
    }
    Ok(y)
}
