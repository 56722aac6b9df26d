//! Attention over a padded batch: sequences of different lengths, each in as many rows.

use crate::cpu::simd::{self, Level};
use crate::ops::flash_attention::{self, Attention, AttentionParams, Form, facts, joined};
use crate::ops::view::check_tensors;
use candle_core::{DType, Device, Result, Tensor, bail};

/// As this op takes queries, keys and values.
const FORM: Form = Form {
    op: "flash_attention_padded",
    axes: "[batch, heads, tokens, dim]",
    heads: 1,
    tokens: 2,
    rank: 4,
};

/// `y = softmax(scale q kᵀ) v` of each sequence's first `lengths[b]` tokens, for every head, over the keys that each
/// query sees: attention of an encoder over a padded batch, without a mask.
///
/// * `q`: `[B, Hq, T, D]`, f32, f16 or bf16
/// * `k`, `v`: `[B, Hkv, T, D]`, f32, f16 or bf16, both of one type; Hkv divides Hq, and query head `h` reads key/value
///   head `h / (Hq / Hkv)`
/// * `lengths`: `[B]`, u32, on q's device, each at most T; no query sees a key from there on
/// * `params`: as in [`flash_attention`](fn@crate::ops::flash_attention), which sees both directions by default;
///   without a mask
/// * result: `[B, Hq, T, D]` in q's dtype, a transposed view of `[B, T, Hq, D]` in memory; rows from a length on are
///   zeros
///
/// Tensors are read where they lie if the tokens of all sequences are as far apart, as in transposed views of
/// `[B, T, H, D]` and of parts of a joint projection; others are copied. What is in the padding, numbers or not, has no part in the result. On a GPU this is one launch,
/// by the kernels of [`flash_attention_varlen`](fn@crate::ops::flash_attention_varlen), and the lengths are read on
/// the device: they may change under a CUDA graph. Tiles of rows that are padding are passed over.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{AttentionParams, flash_attention_padded};
/// let device = Device::Cpu;
/// // Two sequences, of 3 and of 5 tokens.
/// let qkv = Tensor::ones((2, 5, 12, 64), DType::F32, &device)?;
/// let part = |first| qkv.narrow(2, first, 4)?.transpose(1, 2);
/// let lengths = Tensor::new(&[3u32, 5], &device)?;
/// let params = AttentionParams { scale: 0.125, ..Default::default() };
/// let y = flash_attention_padded(&part(0)?, &part(4)?, &part(8)?, &lengths, &params)?;
/// assert_eq!(y.dims(), [2, 4, 5, 64]);
/// assert_eq!(y.sum_all()?.to_scalar::<f32>()?, 8. * 4. * 64.);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// Source: FlashAttention-2 (Dao, 2023).
///
/// # Errors
/// If ranks, dimensions, dtypes or devices do not fit, or a parameter is no usable number. On the CPU also if a length
/// is above T, which a GPU takes as T.
pub fn flash_attention_padded(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    lengths: &Tensor,
    params: &AttentionParams,
) -> Result<Tensor> {
    flash_attention_padded_at(simd::level(), q, k, v, lengths, params)
}

/// [`flash_attention_padded`] with the instructions of `level`, or of the best level that the processor has where that
/// is less.
///
/// # Errors
/// As [`flash_attention_padded`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::cpu::simd::Level;
/// use candle_fused::ops::AttentionParams;
/// use candle_fused::ops::flash_attention_varlen::{flash_attention_padded, flash_attention_padded_at};
/// let q = Tensor::randn(0f32, 1., (2, 2, 5, 16), &Device::Cpu)?;
/// let lengths = Tensor::new(&[3u32, 5], &Device::Cpu)?;
/// let params = AttentionParams::default();
/// let plain = flash_attention_padded_at(Level::Scalar, &q, &q, &q, &lengths, &params)?;
/// let fastest = flash_attention_padded(&q, &q, &q, &lengths, &params)?;
/// assert!((plain - fastest)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-4);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn flash_attention_padded_at(
    level: Level,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    lengths: &Tensor,
    params: &AttentionParams,
) -> Result<Tensor> {
    let op = checked(level, [q, k, v], lengths, params)?;
    let given = params.tensors().chain([("lengths", lengths)]);
    check_tensors(FORM.op, given.chain([("q", q), ("k", k), ("v", v)]))?;
    let one_behind_the_other = |t: &Tensor| match joined(t.dims(), t.stride()) {
        Some(_) => Ok(t.clone()),
        None => t.transpose(1, 2)?.contiguous()?.transpose(1, 2),
    };
    let [q, k, v] = [q, k, v].map(one_behind_the_other);
    q?.apply_op3_no_bwd(&k?, &v?, &op)?.transpose(1, 2)
}

fn checked(
    level: Level,
    [q, k, v]: [&Tensor; 3],
    lengths: &Tensor,
    params: &AttentionParams,
) -> Result<Attention> {
    FORM.check_tensors(q, k, v)?;
    let (batch, tokens) = (q.dims()[0], q.dims()[2]);
    if k.dims()[2] != tokens {
        bail!(
            "{}: k is {:?}, expected q's {tokens} tokens",
            FORM.op,
            k.dims()
        );
    }
    if params.mask.is_some() {
        bail!(
            "{}: there is a mask, which padded batches do not take",
            FORM.op
        );
    }
    let facts = [facts(q), facts(k), facts(v)];
    let op = Attention::new(FORM, params, facts, q.device(), level)?;
    op.over_padded(lengths, [batch, tokens], q.device())
}

/// [`flash_attention_padded`] in f64, one sequence after the other; f64 result `[B, Hq, T, D]`.
///
/// # Errors
/// As [`flash_attention_padded`] on the CPU.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::AttentionParams;
/// use candle_fused::ops::flash_attention_varlen::reference_padded;
/// // Equal scores: the mean of the first two values, and nothing for the padding.
/// let q = Tensor::zeros((1, 1, 3, 1), DType::F32, &Device::Cpu)?;
/// let v = Tensor::new(&[[[[1f32], [2.], [9.]]]], &Device::Cpu)?;
/// let lengths = Tensor::new(&[2u32], &Device::Cpu)?;
/// let y = reference_padded(&q, &q, &v, &lengths, &AttentionParams::default())?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f64>()?, [1.5, 1.5, 0.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference_padded(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    lengths: &Tensor,
    params: &AttentionParams,
) -> Result<Tensor> {
    checked(Level::Scalar, [q, k, v], lengths, params)?;
    let &[_, heads, tokens, dim] = q.dims() else {
        bail!("{}: q is {:?}, expected {}", FORM.op, q.dims(), FORM.axes);
    };
    let mut y = Tensor::zeros(q.dims(), DType::F64, &Device::Cpu)?;
    for (b, n) in lengths.to_vec1::<u32>()?.into_iter().enumerate() {
        let n = n as usize;
        if n > tokens {
            bail!("{}: lengths[{b}] is {n}, q has {tokens} tokens", FORM.op);
        }
        if n == 0 {
            continue;
        }
        let own = |t: &Tensor| t.narrow(0, b, 1)?.narrow(2, 0, n);
        let own = flash_attention::reference(&own(q)?, &own(k)?, &own(v)?, params)?;
        y = y.slice_assign(&[b..b + 1, 0..heads, 0..n, 0..dim], &own)?;
    }
    Ok(y)
}
