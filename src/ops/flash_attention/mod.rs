//! Attention in one pass over keys and values, without a score matrix.

mod attention;
mod check;
mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod op;
mod ragged;
mod reference;

use super::view::{check_tensors, cpu_storage};
use crate::cpu::simd::{self, Level};
use crate::trace;
use candle_core::op::BackpropOp;
use candle_core::{Device, Result, Storage, Tensor, bail};

pub(crate) use attention::{Attention, joined};
pub(crate) use check::{Form, facts};
pub use ragged::RaggedBatch;
pub(crate) use ragged::cumulative_lengths;

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
    /// before its own position. Without `causal` it still sees all keys after it.
    pub window: Option<usize>,
    /// Query `i` sees no key more than this many positions after its own; 0 is the same as `causal`, which
    /// goes before it.
    pub window_right: Option<usize>,
    /// Scores become `softcap * tanh(score / softcap)`, before the mask.
    pub softcap: Option<f32>,
    /// ALiBi: `alibi_slopes[h] * |Tk - Tq + i - j|` is taken off the score of query `i` and key `j` in head
    /// `h`, after the softcap: `[Hq]`, f32, f16 or bf16.
    pub alibi_slopes: Option<Tensor>,
    /// Added to the scores: f32, f16 or bf16, broadcast to `[B, Hq, Tq, Tk]`; -inf hides a key.
    pub mask: Option<Tensor>,
}

impl Default for AttentionParams {
    fn default() -> Self {
        Self {
            scale: 1.0,
            causal: false,
            window: None,
            window_right: None,
            softcap: None,
            alibi_slopes: None,
            mask: None,
        }
    }
}

impl AttentionParams {
    /// Keys after a query's own position that it sees.
    pub(crate) fn right(&self) -> Option<usize> {
        if self.causal {
            Some(0)
        } else {
            self.window_right
        }
    }

    /// The tensors among them, by name.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let mask = self.mask.iter().map(|mask| ("mask", mask));
        let slopes = self.alibi_slopes.iter();
        mask.chain(slopes.map(|slopes| ("alibi_slopes", slopes)))
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
/// Tensors in candle-flash-attn's layout, `[B, T, H, D]`, are passed as `q.transpose(1, 2)?`, which copies nothing;
/// its `softmax_scale` is `scale`, which is 1 by default here. Its functions by their own names and layout are in
/// [`crate::flash_attn`]. Batches of sequences of different lengths are
/// [`flash_attention_varlen`](fn@super::flash_attention_varlen)'s, and with padding
/// [`flash_attention_padded`](fn@super::flash_attention_padded)'s.
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
/// Sizov, 2023); ALiBi (Press, Smith, Lewis, 2022).
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
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::cpu::simd::Level;
/// use candle_fused::ops::AttentionParams;
/// use candle_fused::ops::flash_attention::{flash_attention, flash_attention_at};
/// let q = Tensor::randn(0f32, 1., (1, 2, 3, 16), &Device::Cpu)?;
/// let params = AttentionParams { causal: true, ..Default::default() };
/// let plain = flash_attention_at(Level::Scalar, &q, &q, &q, &params)?;
/// let fastest = flash_attention(&q, &q, &q, &params)?;
/// assert!((plain - fastest)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-4);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn flash_attention_at(
    level: Level,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    params: &AttentionParams,
) -> Result<Tensor> {
    let op = checked(level, q, k, v, params)?;
    let given = params.tensors().chain([("q", q), ("k", k), ("v", v)]);
    check_tensors(op.form.op, given)?;
    q.apply_op3_no_bwd(k, v, &op)?.transpose(1, 2)
}

/// [`flash_attention`] of a token of each of several sequences on the CPU, in one pass: its queries `[1, Hq, 1, D]`, and
/// keys and values `[1, Hkv, Tk, D]` with a length of their own. Gives `[S, 1, Hq D]`, the same bits as one by one.
///
/// # Errors
/// As [`flash_attention`], if a tensor is not on the CPU, or sequences differ in dtype, queries or heads.
pub(crate) fn flash_attention_each(
    sequences: &[[Tensor; 3]],
    params: &AttentionParams,
) -> Result<Tensor> {
    let mut last = None;
    for [q, k, v] in sequences {
        let op = checked(simd::level(), q, k, v, params)?;
        check_tensors(op.form.op, [("q", q), ("k", k), ("v", v)])?;
        trace::record(op.traced(), || {
            format!("cpu {} decode side by side", op.level.name())
        });
        last = Some((op, q));
    }
    let Some((op, q)) = last else {
        bail!("flash_attention: there are no sequences");
    };
    let held: Vec<_> = sequences
        .iter()
        .map(|all| all.each_ref().map(Tensor::storage_and_layout))
        .collect();
    let mut operands = Vec::with_capacity(held.len());
    for [q, k, v] in &held {
        operands.push([
            (cpu_storage(&q.0)?, q.1),
            (cpu_storage(&k.0)?, k.1),
            (cpu_storage(&v.0)?, v.1),
        ]);
    }
    let storage = Storage::Cpu(cpu::forward_each(&op, &operands)?);
    let (_, heads, queries, dim) = q.dims4()?;
    let shape = (sequences.len(), queries, heads * dim);
    Ok(Tensor::from_storage(
        storage,
        shape,
        BackpropOp::none(),
        false,
    ))
}

/// Fails if no kernel of the device takes heads of this size, whatever the dtypes are.
pub(crate) fn check_head_dim(device: &Device, dim: usize) -> Result<()> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => {
            let gpu = crate::cuda::Gpu::of(device)?.spec;
            cuda::check_head_dim(gpu, dim)
        }
        _ if dim == 0 => bail!("flash_attention: heads of 0 values, expected at least 1"),
        _ => Ok(()),
    }
}

/// Fails where [`flash_attention`] does, before it computes anything.
pub(crate) fn check(q: &Tensor, k: &Tensor, v: &Tensor, params: &AttentionParams) -> Result<()> {
    checked(Level::Scalar, q, k, v, params)?;
    let given = params.tensors().chain([("q", q), ("k", k), ("v", v)]);
    check_tensors(check::FORM.op, given)
}

fn checked(
    level: Level,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    params: &AttentionParams,
) -> Result<Attention> {
    let form = check::FORM;
    form.check_tensors(q, k, v)?;
    let facts = [facts(q), facts(k), facts(v)];
    Attention::new(form, params, facts, q.device(), level)
}

#[cfg(test)]
mod tests {
    use super::{AttentionParams, flash_attention, flash_attention_each};
    use candle_core::{DType, Device, Result, Tensor};

    /// Sequences of their own lengths, of which some have keys for several tasks, give the bits that each gives by itself.
    #[test]
    fn sequences_side_by_side_give_what_each_gives() -> Result<()> {
        let randn = |heads: usize, tokens: usize, dtype| {
            Tensor::randn(0f32, 1., (1, heads, tokens, 64), &Device::Cpu)?.to_dtype(dtype)
        };
        for (dtype, cache, window) in [
            (DType::F32, DType::F16, None),
            (DType::F32, DType::F32, Some(70)),
            (DType::BF16, DType::BF16, None),
        ] {
            let params = AttentionParams {
                scale: 0.125,
                causal: true,
                window,
                ..Default::default()
            };
            let mut sequences = Vec::new();
            for keys in [1, 130, 700, 33] {
                let kept = || randn(3, keys, cache);
                sequences.push([randn(9, 1, dtype)?, kept()?, kept()?]);
            }
            let all = flash_attention_each(&sequences, &params)?;
            assert_eq!((all.dims(), all.dtype()), (&[4, 1, 9 * 64][..], dtype));
            for (i, [q, k, v]) in sequences.iter().enumerate() {
                let one = flash_attention(q, k, v, &params)?.flatten_all()?;
                let own = all.get(i)?.flatten_all()?;
                let bits = |t: Tensor| t.to_dtype(DType::F32)?.to_vec1::<f32>();
                assert_eq!(bits(own)?, bits(one)?, "{dtype:?} {i}");
            }
        }
        let error = flash_attention_each(&[], &AttentionParams::default());
        assert!(error.is_err());
        let other = [randn(9, 1, DType::F32)?, randn(3, 2, DType::F32)?];
        let two = [randn(6, 1, DType::F32)?, randn(3, 2, DType::F32)?];
        let of = |[q, k]: [Tensor; 2]| [q, k.clone(), k];
        let error = flash_attention_each(&[of(other), of(two)], &AttentionParams::default());
        let error = error.expect_err("heads differ").to_string();
        assert!(error.contains("sequences differ"), "{error}");
        Ok(())
    }
}
