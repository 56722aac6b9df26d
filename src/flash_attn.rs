//! The functions of candle-flash-attn 0.11.1 by its names, with its layouts, over this crate's kernels.
//!
//! A program that calls `candle_flash_attn::flash_attn` calls `candle_fused::flash_attn::flash_attn` with
//! the same arguments; or it keeps its code, and a line below `[patch.crates-io]` puts the package
//! `shims/candle-flash-attn` in the place of candle-flash-attn, for candle-transformers too.
//!
//! `softmax(softmax_scale q kᵀ + bias) v`, where the queries are the last positions: query `i` stands at
//! `Tk - Tq + i`. It sees the keys from `window_size_left` before to `window_size_right` after its position;
//! `None` is without a limit, `causal` is a `window_size_right` of 0. `alibi_slopes[h]` times the distance of
//! query and key is taken off the scores of head `h`, after the softcap.
//!
//! | | q | k, v | result |
//! |---|---|---|---|
//! | `flash_attn` and its forms | `[B, Tq, Hq, D]` | `[B, Tk, Hkv, D]` | `[B, Tq, Hq, D]` |
//! | `flash_attn_varlen` and its forms | `[total_q, Hq, D]` | `[total_k, Hkv, D]` | `[total_q, Hq, D]` |
//! | `flash_attn_varlen_paged_windowed` | `[total_q, Hq, D]` | `[blocks, page, Hkv, D]` | `[total_q, Hq, D]` |
//!
//! What goes beyond candle-flash-attn: the CPU; f32 beside f16 and bf16; any head dimension (on a GPU up to
//! 512); strided last dimensions; GPUs from compute capability 7.5 on; a softcap, windows and slopes in any
//! combination. What is missing, over pages: prefix ranges and keys after the query. As there, tensors that
//! are tracked for gradients are taken (not over pages), and a backward pass is an error.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_fused::flash_attn::flash_attn;
//! let q = Tensor::ones((1, 5, 9, 64), DType::F32, &Device::Cpu)?;
//! let k = q.narrow(2, 0, 3)?;
//! let y = flash_attn(&q, &k, &k, 0.125, true)?;
//! assert_eq!(y.dims(), [1, 5, 9, 64]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! # Errors
//! Each function fails if ranks, dimensions, dtypes or devices do not fit, or a parameter is no usable number.
//! The forms for ragged batches have those of [`flash_attention_varlen`](fn@crate::ops::flash_attention_varlen)
//! besides.

mod paged;

use crate::cpu::simd;
use crate::ops::flash_attention::{Attention, Form};
use crate::ops::{AttentionParams, RaggedBatch};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor};
pub use paged::flash_attn_varlen_paged_windowed;

const FORM: Form = Form {
    op: "flash_attn",
    axes: "[batch, tokens, heads, dim]",
    heads: 2,
    tokens: 1,
    rank: 4,
};

const RAGGED: Form = Form {
    op: "flash_attn_varlen",
    axes: "[tokens, heads, dim]",
    heads: 1,
    tokens: 0,
    rank: 3,
};

/// The op of `flash_attn` and its forms, for `Tensor::apply_op3`.
pub struct FlashAttn {
    /// Factor on the scores.
    pub softmax_scale: f32,
    /// `[Hq]`
    pub alibi_slopes: Option<Tensor>,
    /// Keys before a query's position that it sees.
    pub window_size_left: Option<usize>,
    /// Keys after it.
    pub window_size_right: Option<usize>,
    /// Scores become `softcap * tanh(score / softcap)`; 0 is none.
    pub softcap: Option<f32>,
}

impl FlashAttn {
    fn params(&self) -> AttentionParams {
        AttentionParams {
            scale: self.softmax_scale,
            causal: false,
            // That one has the query's own position besides.
            window: self.window_size_left.map(|left| left.saturating_add(1)),
            window_right: self.window_size_right,
            softcap: self.softcap.filter(|cap| *cap != 0.),
            alibi_slopes: self.alibi_slopes.clone(),
            mask: None,
        }
    }

    fn attention(
        &self,
        layouts: [&Layout; 3],
        dtypes: [DType; 3],
        device: &Device,
    ) -> Result<Attention> {
        let [q, k, v] = [0, 1, 2].map(|i| (layouts[i].dims(), dtypes[i]));
        Attention::new(FORM, &self.params(), [q, k, v], device, simd::level())
    }
}

impl CustomOp3 for FlashAttn {
    fn name(&self) -> &'static str {
        "flash-attn"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let dtypes = [q, k, v].map(BackendStorage::dtype);
        self.attention([q_layout, k_layout, v_layout], dtypes, &Device::Cpu)?
            .cpu_fwd(q, q_layout, k, k_layout, v, v_layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let dtypes = [q, k, v].map(BackendStorage::dtype);
        let device = Device::Cuda(q.device().clone());
        self.attention([q_layout, k_layout, v_layout], dtypes, &device)?
            .cuda_fwd(q, q_layout, k, k_layout, v, v_layout)
    }
}

/// Causal is a right window of nothing.
fn right(causal: bool) -> Option<usize> {
    causal.then_some(0)
}

/// Attention of `q`, `[B, Tq, Hq, D]`, over `k` and `v`, `[B, Tk, Hkv, D]`.
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let q = Tensor::ones((1, 5, 2, 16), DType::F32, &Device::Cpu)?;
/// let y = candle_fused::flash_attn::flash_attn(&q, &q, &q, 0.25, true)?;
/// assert!((y - q)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn flash_attn(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_windowed(q, k, v, softmax_scale, None, right(causal))
}

/// [`flash_attn`] within a window around the query's position.
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{Device, Tensor};
/// let q = Tensor::randn(0f32, 1., (1, 5, 2, 16), &Device::Cpu)?;
/// // Within this window each token sees itself alone.
/// let y = candle_fused::flash_attn::flash_attn_windowed(&q, &q, &q, 0.25, Some(0), Some(0))?;
/// assert!((y - q)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let op = FlashAttn {
        softmax_scale,
        alibi_slopes: None,
        window_size_left,
        window_size_right,
        softcap: None,
    };
    q.apply_op3(k, v, op)
}

/// [`flash_attn`] with ALiBi: `alibi_slopes` is `[Hq]`.
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{Device, Tensor};
/// let (q, slopes) = (Tensor::randn(0f32, 1., (1, 5, 2, 16), &Device::Cpu)?, Tensor::new(&[1e6f32, 1e6], &Device::Cpu)?);
/// // Slopes so steep leave nothing of tokens that are further away.
/// let y = candle_fused::flash_attn::flash_attn_alibi(&q, &q, &q, &slopes, 0.25, true)?;
/// assert!((y - q)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_alibi_windowed(q, k, v, alibi_slopes, softmax_scale, None, right(causal))
}

/// [`flash_attn`] with ALiBi within a window.
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{Device, Tensor};
/// let (q, slopes) = (Tensor::randn(0f32, 1., (1, 5, 2, 16), &Device::Cpu)?, Tensor::new(&[1e6f32, 1e6], &Device::Cpu)?);
/// // Slopes so steep leave nothing of tokens that are further away.
/// let y = candle_fused::flash_attn::flash_attn_alibi_windowed(&q, &q, &q, &slopes, 0.25, Some(3), None)?;
/// assert!((y - q)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let op = FlashAttn {
        softmax_scale,
        alibi_slopes: Some(alibi_slopes.clone()),
        window_size_left,
        window_size_right,
        softcap: None,
    };
    q.apply_op3(k, v, op)
}

/// [`flash_attn`] with everything: a softcap (0 is none), and if they are given ALiBi and a window.
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{Device, Tensor};
/// let q = Tensor::randn(0f32, 1., (1, 5, 2, 16), &Device::Cpu)?;
/// // Within this window each token sees itself alone.
/// let y = candle_fused::flash_attn::flash_attn_alibi_windowed_softcap(&q, &q, &q, None, 0.25, Some(0), Some(0), 30.)?;
/// assert!((y - q)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[allow(clippy::too_many_arguments, reason = "the signature is candle's")]
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let op = FlashAttn {
        softmax_scale,
        alibi_slopes: alibi_slopes.cloned(),
        window_size_left,
        window_size_right,
        softcap: Some(softcap),
    };
    q.apply_op3(k, v, op)
}

/// Attention of a ragged batch.
fn ragged(
    [q, k, v]: [&Tensor; 3],
    seqlens: [&Tensor; 2],
    max_seqlen_q: usize,
    op: &FlashAttn,
) -> Result<Tensor> {
    RAGGED.check_tensors(q, k, v)?;
    let [cu_seqlens_q, cu_seqlens_k] = seqlens.map(Clone::clone);
    let batch = RaggedBatch {
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
    };
    let facts = [q, k, v].map(|t| (t.dims(), t.dtype()));
    let attention = Attention::new(RAGGED, &op.params(), facts, q.device(), simd::level())?;
    q.apply_op3(k, v, attention.over(&batch, q.device())?)
}

/// Attention of the sequences of a ragged batch: `q` is `[total_q, Hq, D]`, `k` and `v` are `[total_k, Hkv,
/// D]`; `seqlens_q` and `seqlens_k`, u32 `[sequences + 1]`, are where they begin and end.
///
/// No sequence has more queries than `max_seqlen_q`; `max_seqlen_k` is not needed.
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let (q, lengths) = (Tensor::ones((8, 2, 16), DType::F32, &Device::Cpu)?, Tensor::new(&[0u32, 3, 8], &Device::Cpu)?);
/// let y = candle_fused::flash_attn::flash_attn_varlen(&q, &q, &q, &lengths, &lengths, 5, 5, 0.25, true)?;
/// assert!((y - q)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[allow(clippy::too_many_arguments, reason = "the signature is candle's")]
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_varlen_windowed(
        q,
        k,
        v,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        None,
        right(causal),
    )
}

/// [`flash_attn_varlen`] within a window around the query's position.
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{Device, Tensor};
/// let (q, lengths) = (Tensor::randn(0f32, 1., (8, 2, 16), &Device::Cpu)?, Tensor::new(&[0u32, 3, 8], &Device::Cpu)?);
/// // Within this window each token sees itself alone.
/// let y = candle_fused::flash_attn::flash_attn_varlen_windowed(&q, &q, &q, &lengths, &lengths, 5, 5, 0.25, Some(0), Some(0))?;
/// assert!((y - q)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[allow(clippy::too_many_arguments, reason = "the signature is candle's")]
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    _max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let op = FlashAttn {
        softmax_scale,
        alibi_slopes: None,
        window_size_left,
        window_size_right,
        softcap: None,
    };
    ragged([q, k, v], [seqlens_q, seqlens_k], max_seqlen_q, &op)
}

/// [`flash_attn_varlen`] with ALiBi: `alibi_slopes` is `[Hq]`.
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{Device, Tensor};
/// let (q, lengths) = (Tensor::randn(0f32, 1., (8, 2, 16), &Device::Cpu)?, Tensor::new(&[0u32, 3, 8], &Device::Cpu)?);
/// let slopes = Tensor::new(&[1e6f32, 1e6], &Device::Cpu)?;
/// // Slopes so steep leave nothing of tokens that are further away.
/// let y = candle_fused::flash_attn::flash_attn_varlen_alibi(&q, &q, &q, &slopes, &lengths, &lengths, 5, 5, 0.25, true)?;
/// assert!((y - q)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[allow(clippy::too_many_arguments, reason = "the signature is candle's")]
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_varlen_alibi_windowed(
        q,
        k,
        v,
        alibi_slopes,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        None,
        right(causal),
    )
}

/// [`flash_attn_varlen`] with ALiBi within a window.
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{Device, Tensor};
/// let (q, lengths) = (Tensor::randn(0f32, 1., (8, 2, 16), &Device::Cpu)?, Tensor::new(&[0u32, 3, 8], &Device::Cpu)?);
/// let slopes = Tensor::new(&[1e6f32, 1e6], &Device::Cpu)?;
/// // Slopes so steep leave nothing of tokens that are further away.
/// let y = candle_fused::flash_attn::flash_attn_varlen_alibi_windowed(&q, &q, &q, &slopes, &lengths, &lengths, 5, 5, 0.25, Some(3), None)?;
/// assert!((y - q)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[allow(clippy::too_many_arguments, reason = "the signature is candle's")]
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    _max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let op = FlashAttn {
        softmax_scale,
        alibi_slopes: Some(alibi_slopes.clone()),
        window_size_left,
        window_size_right,
        softcap: None,
    };
    ragged([q, k, v], [seqlens_q, seqlens_k], max_seqlen_q, &op)
}

/// [`flash_attn_varlen`] with everything: a softcap (0 is none), and if they are given ALiBi and a window.
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{Device, Tensor};
/// let (q, lengths) = (Tensor::randn(0f32, 1., (8, 2, 16), &Device::Cpu)?, Tensor::new(&[0u32, 3, 8], &Device::Cpu)?);
/// // Within this window each token sees itself alone.
/// let y = candle_fused::flash_attn::flash_attn_varlen_alibi_windowed_softcap(&q, &q, &q, None, &lengths, &lengths, 5, 5, 0.25, Some(0), Some(0), 30.)?;
/// assert!((y - q)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[allow(clippy::too_many_arguments, reason = "the signature is candle's")]
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    _max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let op = FlashAttn {
        softmax_scale,
        alibi_slopes: alibi_slopes.cloned(),
        window_size_left,
        window_size_right,
        softcap: Some(softcap),
    };
    ragged([q, k, v], [seqlens_q, seqlens_k], max_seqlen_q, &op)
}
