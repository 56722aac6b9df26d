//! The functions of candle-flash-attn-v3 0.11.1 by its names: those of [`flash_attn`](mod@crate::flash_attn)
//! with one argument more.
//!
//! `use_gqa_packing` asks candle's kernels to take the query heads of a key/value head together. Here the
//! table of kernels decides that, so it changes nothing. candle-flash-attn-v3 is for Hopper alone; this module
//! runs where [`flash_attn`](mod@crate::flash_attn) does, and honours `alibi_slopes`.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_fused::flash_attn_v3::flash_attn;
//! let q = Tensor::ones((1, 5, 9, 64), DType::F32, &Device::Cpu)?;
//! let k = q.narrow(2, 0, 3)?;
//! let y = flash_attn(&q, &k, &k, 0.125, true, false)?;
//! assert_eq!(y.dims(), [1, 5, 9, 64]);
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! # Errors
//! As those of [`flash_attn`](mod@crate::flash_attn).

use crate::flash_attn;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor};

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
    /// Changes nothing.
    pub use_gqa_packing: bool,
}

impl FlashAttn {
    fn without_packing(&self) -> flash_attn::FlashAttn {
        flash_attn::FlashAttn {
            softmax_scale: self.softmax_scale,
            alibi_slopes: self.alibi_slopes.clone(),
            window_size_left: self.window_size_left,
            window_size_right: self.window_size_right,
            softcap: None,
        }
    }
}

impl CustomOp3 for FlashAttn {
    fn name(&self) -> &'static str {
        "flash-attn-v3"
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
        self.without_packing()
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
        self.without_packing()
            .cuda_fwd(q, q_layout, k, k_layout, v, v_layout)
    }
}

/// [`flash_attn`](fn@flash_attn::flash_attn).
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let q = Tensor::ones((1, 5, 2, 16), DType::F32, &Device::Cpu)?;
/// let y = candle_fused::flash_attn_v3::flash_attn(&q, &q, &q, 0.25, true, false)?;
/// assert!((y - q)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn flash_attn(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    causal: bool,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    flash_attn::flash_attn(q, k, v, softmax_scale, causal)
}

/// [`flash_attn_windowed`](fn@flash_attn::flash_attn_windowed).
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{Device, Tensor};
/// let q = Tensor::randn(0f32, 1., (1, 5, 2, 16), &Device::Cpu)?;
/// // Within this window each token sees itself alone.
/// let y = candle_fused::flash_attn_v3::flash_attn_windowed(&q, &q, &q, 0.25, Some(0), Some(0), false)?;
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
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    flash_attn::flash_attn_windowed(q, k, v, softmax_scale, window_size_left, window_size_right)
}

/// [`flash_attn_alibi`](fn@flash_attn::flash_attn_alibi).
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{Device, Tensor};
/// let (q, slopes) = (Tensor::randn(0f32, 1., (1, 5, 2, 16), &Device::Cpu)?, Tensor::new(&[1e6f32, 1e6], &Device::Cpu)?);
/// // Slopes so steep leave nothing of tokens that are further away.
/// let y = candle_fused::flash_attn_v3::flash_attn_alibi(&q, &q, &q, &slopes, 0.25, true, false)?;
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
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    flash_attn::flash_attn_alibi(q, k, v, alibi_slopes, softmax_scale, causal)
}

/// [`flash_attn_alibi_windowed`](fn@flash_attn::flash_attn_alibi_windowed).
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{Device, Tensor};
/// let (q, slopes) = (Tensor::randn(0f32, 1., (1, 5, 2, 16), &Device::Cpu)?, Tensor::new(&[1e6f32, 1e6], &Device::Cpu)?);
/// // Slopes so steep leave nothing of tokens that are further away.
/// let y = candle_fused::flash_attn_v3::flash_attn_alibi_windowed(&q, &q, &q, &slopes, 0.25, Some(3), None, false)?;
/// assert!((y - q)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[allow(clippy::too_many_arguments, reason = "the signature is candle's")]
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    flash_attn::flash_attn_alibi_windowed(
        q,
        k,
        v,
        alibi_slopes,
        softmax_scale,
        window_size_left,
        window_size_right,
    )
}

/// [`flash_attn_varlen`](fn@flash_attn::flash_attn_varlen).
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// let (q, lengths) = (Tensor::ones((8, 2, 16), DType::F32, &Device::Cpu)?, Tensor::new(&[0u32, 3, 8], &Device::Cpu)?);
/// let y = candle_fused::flash_attn_v3::flash_attn_varlen(&q, &q, &q, &lengths, &lengths, 5, 5, 0.25, true, false)?;
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
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    flash_attn::flash_attn_varlen(
        q,
        k,
        v,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
    )
}

/// [`flash_attn_varlen_windowed`](fn@flash_attn::flash_attn_varlen_windowed).
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{Device, Tensor};
/// let (q, lengths) = (Tensor::randn(0f32, 1., (8, 2, 16), &Device::Cpu)?, Tensor::new(&[0u32, 3, 8], &Device::Cpu)?);
/// // Within this window each token sees itself alone.
/// let y = candle_fused::flash_attn_v3::flash_attn_varlen_windowed(&q, &q, &q, &lengths, &lengths, 5, 5, 0.25, Some(0), Some(0), false)?;
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
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    flash_attn::flash_attn_varlen_windowed(
        q,
        k,
        v,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        window_size_left,
        window_size_right,
    )
}

/// [`flash_attn_varlen_alibi`](fn@flash_attn::flash_attn_varlen_alibi).
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{Device, Tensor};
/// let (q, lengths) = (Tensor::randn(0f32, 1., (8, 2, 16), &Device::Cpu)?, Tensor::new(&[0u32, 3, 8], &Device::Cpu)?);
/// let slopes = Tensor::new(&[1e6f32, 1e6], &Device::Cpu)?;
/// // Slopes so steep leave nothing of tokens that are further away.
/// let y = candle_fused::flash_attn_v3::flash_attn_varlen_alibi(&q, &q, &q, &slopes, &lengths, &lengths, 5, 5, 0.25, true, false)?;
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
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    flash_attn::flash_attn_varlen_alibi(
        q,
        k,
        v,
        alibi_slopes,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        causal,
    )
}

/// [`flash_attn_varlen_alibi_windowed`](fn@flash_attn::flash_attn_varlen_alibi_windowed).
///
/// # Errors
/// As for the [module](self).
///
/// ```
/// use candle_core::{Device, Tensor};
/// let (q, lengths) = (Tensor::randn(0f32, 1., (8, 2, 16), &Device::Cpu)?, Tensor::new(&[0u32, 3, 8], &Device::Cpu)?);
/// let slopes = Tensor::new(&[1e6f32, 1e6], &Device::Cpu)?;
/// // Slopes so steep leave nothing of tokens that are further away.
/// let y = candle_fused::flash_attn_v3::flash_attn_varlen_alibi_windowed(&q, &q, &q, &slopes, &lengths, &lengths, 5, 5, 0.25, Some(3), None, false)?;
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
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    _use_gqa_packing: bool,
) -> Result<Tensor> {
    flash_attn::flash_attn_varlen_alibi_windowed(
        q,
        k,
        v,
        alibi_slopes,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        window_size_left,
        window_size_right,
    )
}
