//! Matrix products over quantized weights: GGUF blocks, INT8, FP8, NVFP4, NF4, INT4 and ternary.

pub use super::linear::reference;
use super::linear::{ActivationBits, Epilogue, Prologue, Weight, launch};
use candle_core::{Result, Tensor};

/// `y = act(prologue(x) Wᵀ + bias) + residuals` with W in GGUF blocks (Q4_0, Q4_1, Q5_0, Q5_1,
/// Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K) or by a [`Scheme`](crate::quant::Scheme) (INT8, FP8, NVFP4, NF4, INT4, ternary); on
/// the CPU activations are quantized in blocks of 32, or of 128 where all weights are ternary with scales
/// of tensors, rows or groups of 128, to 16 bits up to 64 rows of x and to 8 above ([`quant_linear_with`] and
/// [`ActivationBits`] change that).
///
/// * `x`: `[.., K]`, f32, f16 or bf16, any layout
/// * `weights`: one or more matrices `[N_i, K]`, whose outputs stand side by side; dense ones may be
///   among them, as GGUF files mix types
/// * result: `[.., N]` with N = sum of N_i, or `[.., N / 2]` with
///   [`Activation::SwiGlu`](super::Activation::SwiGlu), in x's dtype
///
/// On the CPU, dot products of a block are exact in integers and accumulated over blocks in f32; those of FP8 are
/// sums in f32 of exact products, those of NVFP4 are exact for each 16 values, and those of NF4 are sums in f32. The
/// quantized activations are what the result differs by from a product with the dequantized weights: at
/// most half a step of `max|x| / 127` for each input of a block in 8 bits, and a 256th of a step in 16, which are
/// two parts of 8. The method is that of ggml's `Q8_1` activations; the row-interleaved weight layout follows its
/// repacked kernels in idea. With AMX, bf16 takes the place of 8 bits for 32 rows and more: inputs and dequantized weights
/// are off by 2^-9 of themselves at most, and sums are in f32. Two numbers in bf16 for each take the place of 16 bits for
/// 48 rows and more (after Henry, Tang and Heinecke 2019), but not that of the 8 bits of `PerToken8`.
///
/// On CUDA, up to 8 rows of x are taken as two bf16 parts each, 16 bits in all, and multiplied with
/// the codes in f32 (2^-17 of each input; one row and 4-bit codes on Hopper: below); more rows and the weights are rounded to bf16 (to f16
/// where x is f16 or the GPU has no bf16) for one product with sums in f32.
///
/// INT8 and INT4 codes are multiplied on CUDA as the whole numbers they are, and e4m3 floats of FP8 as they are in bf16,
/// with sums of a group in f32 before its scale; on Hopper, more than 32 rows meet FP8 in blocks rounded to bf16. A row
/// of weights with a NaN of e4m3 gives outputs of NaN, and no others. NVFP4's floats times their scales of 16 values are
/// exact in bf16, and sums are multiplied with the scale of the row. NF4's values are rounded to bf16 (0.1 % on average), and
/// with more than 32 rows their products with scales are. Up to 8 rows of x lose nothing if they are bf16, and keep 16 bits otherwise (one row of INT4 on Hopper: below);
/// from there on up to 128 rows of bf16 or f32 are rounded to bf16 (after the idea of Marlin, Frantar
/// et al. 2024: codes go from memory to the tensor cores' registers); what has more rows, or is f16, takes
/// the way of GGUF blocks. Ternary codes meet up to 64 rows of x in int8, rounded to whole numbers of
/// each row's largest magnitude over 127 (W2A8, as BitNet b1.58, Ma et al. 2024): half a step of that for
/// each input. A single row meets codes with a scale for each row or tensor in two such parts on Hopper,
/// 16 bits in all.
///
/// On Hopper, few weights in GGUF blocks, INT4 or INT8 (products with K up to 2,048 and few output channels) that meet 2 to
/// 64 rows (128 in bf16), and INT4 and INT8 that meet one, are rounded to x's dtype instead (INT8 codes stay whole numbers, except in f16
/// behind a norm), in bf16 once more where a norm's weights multiply them; x is not rounded. In f16 behind a norm, weights
/// are to be below 512; products of a weight and the norm's below 2^-20 of the largest of 128 weights of the norm keep fewer
/// bits. Rows of f32 are two bf16 parts each, 16 bits in all, and so are weights that meet up to 8 of
/// them; weights that meet more are rounded to bf16, or are two parts, too.
///
/// On Hopper, any other single row is quantized for 4-bit codes (INT4, Q4_0, Q4_1, Q4_K), too: 256 of its values
/// are rounded to multiples of a power of two, in two int8 parts. An input is off by at most 1/32639 of their
/// largest magnitude, and those of bf16 down to a 64th of that are exact. Sums of a group are exact in integers. If one
/// of them is not finite, all outputs are NaN; below 2^-111 all count as zero.
///
/// With [`ActivationBits::PerToken8`] each row of x, after the norm, is rounded to whole numbers of its largest
/// magnitude over 127 whatever the weights, their count and the device: on the CPU and for ternary weights and few
/// rows on CUDA inside the kernel, elsewhere before it, where the rounded row is in x's dtype.
///
/// From 64 rows on (65 where few weights on Hopper do as above), weights that are all in INT8, at most three
/// whose rows are multiples of 8, are multiplied by int8 tensor cores on CUDA (W8A8): each row of x, after the norm,
/// becomes `round(x / s)` with `s = max|x| / 127` (a scale for each token, as in LLM.int8(), Dettmers et al. 2022), sums
/// are exact in integers, and `s` times the weight row's scale is applied after them in f32. An input is off by at most
/// half of its row's `s`. A row with values that are not finite gives a row of such values.
///
/// With [`ActivationBits::Bits8`], FP8 weights (at most three, whose rows are multiples of 8) meet 64 rows of x and more in
/// e4m3 where K is a multiple of 128, on GPUs of compute capability 8.9 and 9.0, and on newer ones if kernels are compiled
/// for these: each 128 values of a row, after the norm, in steps of e4m3 of their
/// largest magnitude over 448 (as in DeepSeek-V3, 2024), with sums of at most 128 added up in f32. An input is off by at
/// most a 16th of itself, or by a 1024th of that scale.
///
/// # Errors
/// If shapes or dtypes do not fit, by the name of the argument.
///
/// ```
/// use candle_core::quantized::{GgmlDType, QTensor};
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::cpu::packed::PackedMatrix;
/// use candle_fused::ops::{Epilogue, Prologue, Weight, quant_linear};
/// use std::sync::Arc;
/// let w = Tensor::ones((2, 32), DType::F32, &Device::Cpu)?;
/// let blocks = QTensor::quantize(&w, GgmlDType::Q8_0)?;
/// let packed = PackedMatrix::pack(GgmlDType::Q8_0, 2, 32, &blocks.data()?)?;
/// let x = Tensor::ones((1, 32), DType::F32, &Device::Cpu)?;
/// let weights = [Weight::Packed(Arc::new(packed))];
/// let y = quant_linear(&x, Prologue::None, &weights, &Epilogue::default())?;
/// assert!((y.to_vec2::<f32>()?[0][1] - 32.).abs() < 0.1);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn quant_linear(
    x: &Tensor,
    prologue: Prologue<'_>,
    weights: &[Weight],
    epilogue: &Epilogue<'_>,
) -> Result<Tensor> {
    quant_linear_with(x, prologue, weights, epilogue, ActivationBits::Auto)
}

/// [`quant_linear`] with x in as many bits as `bits` says.
///
/// # Errors
/// As [`quant_linear`].
///
/// ```
/// use candle_core::quantized::{GgmlDType, QTensor};
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::cpu::packed::PackedMatrix;
/// use candle_fused::ops::{ActivationBits, Epilogue, Prologue, Weight, quant_linear_with};
/// use std::sync::Arc;
/// let w = Tensor::ones((1, 32), DType::F32, &Device::Cpu)?;
/// let blocks = QTensor::quantize(&w, GgmlDType::Q8_0)?;
/// let packed = PackedMatrix::pack(GgmlDType::Q8_0, 1, 32, &blocks.data()?)?;
/// let weights = [Weight::Packed(Arc::new(packed))];
/// let x = Tensor::randn(0f32, 1., (1, 32), &Device::Cpu)?;
/// let exact = x.sum_all()?.to_scalar::<f32>()?;
/// let error = |bits| -> candle_core::Result<f32> {
///     let y = quant_linear_with(&x, Prologue::None, &weights, &Epilogue::default(), bits)?;
///     Ok((y.to_vec2::<f32>()?[0][0] - exact).abs())
/// };
/// assert!(error(ActivationBits::Bits8)? < 1. && error(ActivationBits::Bits16)? < 0.01);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn quant_linear_with(
    x: &Tensor,
    prologue: Prologue<'_>,
    weights: &[Weight],
    epilogue: &Epilogue<'_>,
    bits: ActivationBits,
) -> Result<Tensor> {
    launch("quant_linear", x, prologue, weights, *epilogue, bits)
}
