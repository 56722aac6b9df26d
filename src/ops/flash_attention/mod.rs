//! Attention in one pass over keys and values, without a score matrix.

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod reference;

use super::view::inference_only;
use crate::cpu::simd::{self, Level};
use candle_core::{DType, Result, Tensor, bail};

#[cfg(feature = "cuda")]
pub use crate::cuda::KernelInfo;
#[cfg(feature = "cuda")]
pub use cuda::kernel_table;
pub use reference::reference;

/// How scores are formed and what a query sees.
#[derive(Clone, Debug)]
pub struct AttentionParams {
    /// Factor on the scores, usually `1 / sqrt(D)`; 1 by default.
    pub scale: f32,
    /// Query `i` sees keys `0 ..= Tk - Tq + i`: the queries are the last positions.
    pub causal: bool,
    /// Sliding window: query `i`, at position `Tk - Tq + i`, sees no key more than `window - 1`
    /// before its own position. Without `causal` it still sees all keys behind it.
    pub window: Option<usize>,
    /// Scores become `softcap * tanh(score / softcap)`, before the mask.
    pub softcap: Option<f32>,
    /// Added to the scores: f32, f16 or bf16, broadcast to `[B, Hq, Tq, Tk]`; -inf hides a key.
    pub mask: Option<Tensor>,
}

impl Default for AttentionParams {
    fn default() -> Self {
        Self {
            scale: 1.0,
            causal: false,
            window: None,
            softcap: None,
            mask: None,
        }
    }
}

/// `y = softmax(scale q kᵀ + mask) v`, for every head, over the keys that each query sees.
///
/// * `q`: `[B, Hq, Tq, D]`, f32, f16 or bf16
/// * `k`, `v`: `[B, Hkv, Tk, D]`, f32, f16 or bf16, both of one type; Hkv divides Hq, and query head
///   `h` reads key/value head `h / (Hq / Hkv)`
/// * result: `[B, Hq, Tq, D]` in q's dtype, a transposed view of `[B, Tq, Hq, D]` in memory, so that
///   `y.transpose(1, 2)?.reshape((b, t, ()))?` copies nothing
///
/// candle-flash-attn's layout `[B, T, H, D]` is passed as `q.transpose(1, 2)?`, which copies nothing, and
/// the result is turned back in the same way. Its `softmax_scale` is `scale`, which is 1 by default here.
///
/// Any layout is read where it lies; keys and values whose last dimension is contiguous are fastest,
/// so a view into a longer cache costs nothing. Scores and sums are in f32 whatever the types are.
/// A query that sees no key, or whose every score is -inf, gets zeros, as in PyTorch's
/// `scaled_dot_product_attention`. The result does not depend on the number of threads.
///
/// On a GPU keys and values of 16 bits go through the tensor cores where head dimension, alignment (rows
/// in whole 16-byte pieces) and types (q of the same type, or f32 over f16 with up to 128 dimensions)
/// allow it; the weights are rounded to that type before they multiply the values, except with q in f32.
/// Everything else is computed in f32. Head dimensions that are taken:
///
/// | compute capability | shared memory of a block | tensor cores, f16 | tensor cores, bf16 | all dtypes |
/// |---|---|---|---|---|
/// | 7.5 (T4) | 64 KB | 64, 80, 96, 128, 256 | none | up to 256 |
/// | 8.0 (A100), 8.7 (Orin) | 163 KB | 64, 80, 96, 128, 256 | 64, 80, 96, 128, 256 | up to 512 |
/// | 8.6 (RTX 3090), 8.9 (L4) | 99 KB | 64, 80, 96, 128, 256 | 64, 80, 96, 128, 256 | up to 512 |
/// | 9.0 (H100, H200) | 227 KB | 64, 80, 96, 128, 256 | 64, 80, 96, 128, 256 | up to 512 |
///
/// Newer GPUs run the code for 8.0. `docs/kernels.md` of the repository says which kernel takes what.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{AttentionParams, flash_attention};
/// let cache = Tensor::zeros((1, 3, 256, 64), DType::F32, &Device::Cpu)?;
/// let (k, v) = (cache.narrow(2, 0, 40)?, cache.narrow(2, 0, 40)?);
/// let q = Tensor::ones((1, 9, 1, 64), DType::F32, &Device::Cpu)?;
/// let params = AttentionParams { scale: 0.125, causal: true, ..Default::default() };
/// let y = flash_attention(&q, &k, &v, &params)?;
/// assert_eq!(y.transpose(1, 2)?.reshape((1, 1, ()))?.dims(), [1, 1, 576]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// Sources: FlashAttention-2 (Dao, 2023); FlashAttention-3 (Shah, Bikshandi, Zhang, Thakkar, Ramani,
/// Dao, 2024); Flash-Decoding for few queries (Dao, Haziza, Massa,
/// Sizov, 2023).
///
/// # Errors
/// If ranks, dimensions, dtypes or devices do not fit, or a parameter is no usable number.
pub fn flash_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    params: &AttentionParams,
) -> Result<Tensor> {
    flash_attention_at(simd::level(), q, k, v, params)
}

/// [`flash_attention`] with the instructions of `level`, or of the best level that the processor
/// has where that is less.
///
/// # Errors
/// As [`flash_attention`].
pub fn flash_attention_at(
    level: Level,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    params: &AttentionParams,
) -> Result<Tensor> {
    check(q, k, v, params)?;
    let mask_given = params.mask.iter().map(|mask| ("mask", mask));
    inference_only(
        "flash_attention",
        mask_given.chain([("q", q), ("k", k), ("v", v)]),
    )?;
    let (batch, heads, queries, _) = q.dims4()?;
    let keys = k.dims()[2];
    let mask = match &params.mask {
        Some(mask) => {
            let wide = mask.to_dtype(DType::F32)?;
            Some(wide.broadcast_as((batch, heads, queries, keys))?)
        }
        None => None,
    };
    let op = cpu::FlashAttention {
        params,
        mask,
        level,
    };
    q.apply_op3_no_bwd(k, v, &op)?.transpose(1, 2)
}

fn check(q: &Tensor, k: &Tensor, v: &Tensor, params: &AttentionParams) -> Result<()> {
    for (name, x) in [("q", q), ("k", k), ("v", v)] {
        if x.rank() != 4 {
            bail!(
                "flash_attention: {name} is {:?}, expected [batch, heads, tokens, dim]",
                x.dims()
            );
        }
        if !matches!(x.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            bail!(
                "flash_attention: {name} is {:?}, expected f32, f16 or bf16",
                x.dtype()
            );
        }
        if !x.device().same_device(q.device()) {
            bail!("flash_attention: {name} is on another device than q");
        }
    }
    let ((batch, heads, queries, dim), (_, kv_heads, keys, _)) = (q.dims4()?, k.dims4()?);
    if k.dims() != [batch, kv_heads, keys, dim] {
        bail!(
            "flash_attention: k is {:?}, expected [{batch}, kv_heads, keys, {dim}] to go with q {:?}",
            k.dims(),
            q.dims()
        );
    }
    if v.dims() != k.dims() {
        bail!(
            "flash_attention: v is {:?}, expected k's {:?}",
            v.dims(),
            k.dims()
        );
    }
    if v.dtype() != k.dtype() {
        bail!(
            "flash_attention: v is {:?}, expected k's {:?}",
            v.dtype(),
            k.dtype()
        );
    }
    if kv_heads == 0 || heads % kv_heads != 0 {
        bail!("flash_attention: q has {heads} heads, expected a multiple of k's {kv_heads}");
    }
    if dim == 0 {
        bail!(
            "flash_attention: q is {:?}, expected a head dimension of at least 1",
            q.dims()
        );
    }
    if !params.scale.is_finite() {
        bail!(
            "flash_attention: scale is {}, expected a finite number",
            params.scale
        );
    }
    if params.window == Some(0) {
        bail!("flash_attention: window is 0, expected at least 1, the query's own position");
    }
    if let Some(cap) = params.softcap.filter(|c| !(c.is_finite() && *c > 0.0)) {
        bail!("flash_attention: softcap is {cap}, expected a positive number");
    }
    if let Some(mask) = &params.mask {
        check_mask(mask, q, [batch, heads, queries, keys])?;
    }
    Ok(())
}

fn check_mask(mask: &Tensor, q: &Tensor, scores: [usize; 4]) -> Result<()> {
    if !matches!(mask.dtype(), DType::F32 | DType::F16 | DType::BF16) {
        bail!(
            "flash_attention: mask is {:?}, expected f32, f16 or bf16, added to the scores",
            mask.dtype()
        );
    }
    if !mask.device().same_device(q.device()) {
        bail!("flash_attention: mask is on another device than q");
    }
    let fits = mask.rank() <= 4
        && mask
            .dims()
            .iter()
            .rev()
            .zip(scores.iter().rev())
            .all(|(m, s)| *m == 1 || m == s);
    if !fits {
        bail!(
            "flash_attention: mask is {:?}, expected a shape that broadcasts to {scores:?} \
             [batch, heads, queries, keys]",
            mask.dims()
        );
    }
    Ok(())
}
