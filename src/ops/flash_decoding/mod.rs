//! The attention step of decoding: rotation, cache append and attention for one token of each
//! sequence, at positions that only the device has to know.

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod reference;

use super::rope::check_rotary_tables;
use super::view::{check_apart, check_storages, check_tensors, float};
use super::{HeadNorms, RopeStyle};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};

#[cfg(feature = "cuda")]
pub use crate::cuda::KernelInfo;
#[cfg(feature = "cuda")]
pub use cuda::kernel_table;
pub use reference::reference;

const OP: &str = "flash_decoding";

/// What [`flash_decoding`] takes beside the tensors that it changes.
#[derive(Clone, Copy, Debug)]
pub struct FlashDecoding<'a> {
    /// Query heads, a multiple of the caches' heads.
    pub heads: usize,
    /// Cosines `[positions, R / 2]`, f32, R at most the head dimension.
    pub cos: &'a Tensor,
    /// Sines, as the cosines.
    pub sin: &'a Tensor,
    /// Which dimensions of a head form a pair.
    pub style: RopeStyle,
    /// Norms of queries and keys before the rotation, or none.
    pub norms: Option<HeadNorms<'a>>,
    /// Multiplies the scores, usually `1 / sqrt(D)`.
    pub scale: f32,
    /// A token sees itself and `window - 1` before it; none sees all.
    pub window: Option<usize>,
    /// Scores become `cap tanh(score / cap)` (Gemma 2).
    pub softcap: Option<f32>,
}

/// One step of attention for one token of each sequence: queries and keys of the fused projection are
/// normalised if so asked and rotated, key and value are written into the caches at the token's
/// position, and the queries attend to everything up to it:
/// `softmax(scale q Kᵀ) V` over slots `0..=position`.
///
/// * `qkv`: `[B, (Hq + 2 Hkv) D]`, f32, f16 or bf16: queries, then keys, then values
/// * `k_cache`, `v_cache`: `[B, Hkv, S, D]`, contiguous, f32, f16 or bf16 (both of one dtype, which may
///   differ from qkv's); slot `position[b]` is overwritten
/// * `position`: `[B]`, u32, each below S and the rows of the tables; on CUDA it is read by the kernel
///   alone, and a sequence whose position is past the end is left out: its row of the result is not
///   defined
/// * result: `[B, Hq D]` in qkv's dtype
///
/// A query whose every score is -inf, from infinite values or beyond the range of f32, gets zeros, as in
/// PyTorch's `scaled_dot_product_attention`.
///
/// Scores and sums are f32. On CUDA the keys are shared out over the multiprocessors and brought
/// together within the same launch; head dimensions up to 256 are taken (`docs/kernels.md` of the repository has
/// those of the tensor cores).
///
/// Sources: Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023); RoFormer (Su et al. 2021).
///
/// # Errors
/// If shapes, dtypes or devices do not fit, by the name of the argument.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{FlashDecoding, RopeStyle, flash_decoding};
/// let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu);
/// let (cos, sin) = (zeros(&[16, 4])?.cos()?, zeros(&[16, 4])?);
/// let config = FlashDecoding {
///     heads: 2,
///     cos: &cos,
///     sin: &sin,
///     style: RopeStyle::HalfSplit,
///     norms: None,
///     scale: 8f32.powf(-0.5),
///     window: None,
///     softcap: None,
/// };
/// // The first token sees only itself, so its value comes out.
/// let (k_cache, v_cache) = (zeros(&[1, 1, 16, 8])?, zeros(&[1, 1, 16, 8])?);
/// let qkv = Tensor::ones((1, 32), DType::F32, &Device::Cpu)?;
/// let position = Tensor::new(&[0u32], &Device::Cpu)?;
/// let y = flash_decoding(&qkv, &k_cache, &v_cache, &position, &config)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[1.; 16]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn flash_decoding(
    qkv: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
    position: &Tensor,
    config: &FlashDecoding<'_>,
) -> Result<Tensor> {
    let op = Op {
        k_cache,
        v_cache,
        position,
        config,
    };
    op.check(qkv)?;
    let norms = config.norms.map(|n| [("norms.q", n.q), ("norms.k", n.k)]);
    let caches = [("k_cache", k_cache), ("v_cache", v_cache), ("qkv", qkv)];
    check_tensors(OP, caches.into_iter().chain(norms.into_iter().flatten()))?;
    qkv.contiguous()?.apply_op1_no_bwd(&op)
}

/// The op as candle sees it.
struct Op<'a> {
    k_cache: &'a Tensor,
    v_cache: &'a Tensor,
    position: &'a Tensor,
    config: &'a FlashDecoding<'a>,
}

impl Op<'_> {
    fn check(&self, qkv: &Tensor) -> Result<()> {
        let FlashDecoding {
            heads, cos, sin, ..
        } = *self.config;
        let [batch, kv_heads, _, dim] = *self.k_cache.dims() else {
            bail!(
                "{OP}: k_cache has shape {:?}, expected [B, Hkv, S, D]",
                self.k_cache.shape()
            );
        };
        float(OP, "qkv", qkv.dtype())?;
        float(OP, "k_cache", self.k_cache.dtype())?;
        if self.v_cache.dims() != self.k_cache.dims()
            || self.v_cache.dtype() != self.k_cache.dtype()
        {
            bail!(
                "{OP}: v_cache is {:?} {:?}, expected k_cache's {:?} {:?}",
                self.v_cache.dtype(),
                self.v_cache.dims(),
                self.k_cache.dtype(),
                self.k_cache.dims()
            );
        }
        if !self.k_cache.is_contiguous() || !self.v_cache.is_contiguous() {
            bail!("{OP}: k_cache and v_cache have to be contiguous, they are written in place");
        }
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            bail!("{OP}: {heads} heads, expected a multiple of k_cache's {kv_heads}");
        }
        if qkv.dims() != [batch, (heads + 2 * kv_heads) * dim] {
            bail!(
                "{OP}: qkv has shape {:?}, expected [{batch}, {}]",
                qkv.shape(),
                (heads + 2 * kv_heads) * dim
            );
        }
        if self.position.dims() != [batch] || self.position.dtype() != DType::U32 {
            bail!(
                "{OP}: position is {:?} {:?}, expected U32 [{batch}]",
                self.position.dtype(),
                self.position.dims()
            );
        }
        check_rotary_tables(OP, "", [cos, sin], dim)?;
        self.check_rest(qkv, dim)
    }

    fn check_rest(&self, qkv: &Tensor, dim: usize) -> Result<()> {
        let config = self.config;
        if let Some(norms) = config.norms {
            for (name, weight) in [("norms.q", norms.q), ("norms.k", norms.k)] {
                if weight.dims() != [dim] || weight.dtype() != qkv.dtype() {
                    bail!(
                        "{OP}: {name} is {:?} {:?}, expected {:?} [{dim}]",
                        weight.dtype(),
                        weight.dims(),
                        qkv.dtype()
                    );
                }
            }
        }
        if !config.scale.is_finite() {
            bail!("{OP}: scale is {}, expected a finite number", config.scale);
        }
        if config.window == Some(0) {
            bail!("{OP}: window is 0, expected at least 1, the token's own position");
        }
        if let Some(cap) = config.softcap.filter(|c| !(c.is_finite() && *c > 0.)) {
            bail!("{OP}: softcap is {cap}, expected a positive number");
        }
        let norms = config.norms.map(|n| [n.q, n.k]);
        let others = [
            self.k_cache,
            self.v_cache,
            self.position,
            config.cos,
            config.sin,
        ];
        for other in others.into_iter().chain(norms.into_iter().flatten()) {
            if !other.device().same_device(qkv.device()) {
                bail!(
                    "{OP}: a tensor is on {:?}, qkv on {:?}",
                    other.device().location(),
                    qkv.device().location()
                );
            }
        }
        let caches = [("k_cache", self.k_cache), ("v_cache", self.v_cache)];
        check_storages(OP, &caches, ("qkv", qkv))?;
        let FlashDecoding { cos, sin, .. } = *config;
        let read = [
            ("qkv", qkv),
            ("position", self.position),
            ("cos", cos),
            ("sin", sin),
        ];
        check_apart(OP, &caches, &read)?;
        if let Some(HeadNorms { q, k, .. }) = config.norms {
            check_apart(OP, &caches, &[("norms.q", q), ("norms.k", k)])?;
        }
        Ok(())
    }
}

impl CustomOp1 for Op<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        cpu::forward(self, qkv, layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, qkv: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda::forward(self, qkv, layout)
    }
}
