//! A dense matrix as quantized weights on its device, and back.

use super::recipe::Quantization;
use crate::cpu::packed::PackedMatrix;
#[cfg(feature = "cuda")]
use crate::cpu::quantize::quantize;
#[cfg(feature = "cuda")]
use crate::cuda::BlockMatrix;
use crate::ops::Weight;
use crate::pool;
#[cfg(feature = "cuda")]
use crate::quant::words::Words;
use crate::quant::{BlockFormat, Codes, widened};
#[cfg(feature = "cuda")]
use candle_core::DType;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Result, Tensor, bail};
use std::sync::{Arc, Mutex};

/// An error that begins with the tensor's name.
pub(crate) fn named<T>(name: &str, result: Result<T>) -> Result<T> {
    match result {
        Ok(value) => Ok(value),
        Err(e) => bail!("tensor `{name}`: {e}"),
    }
}

/// A dense matrix `[N, K]` quantized where it is.
pub(crate) fn pack(weight: &Tensor, quantization: Quantization) -> Result<Weight> {
    let (rows, cols) = weight.dims2()?;
    quantization.check(cols)?;
    match (weight.device(), quantization.scheme(), quantization) {
        (Device::Cpu, Some(scheme), _) => {
            let packed = PackedMatrix::quantize(weight, scheme)?;
            Ok(Weight::Packed(Arc::new(packed)))
        }
        #[cfg(feature = "cuda")]
        (Device::Cuda(_), Some(scheme), _) => {
            if let Some(matrix) = BlockMatrix::quantize(weight, scheme)? {
                return Ok(Weight::Blocks(Arc::new(matrix)));
            }
            let values = weight.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
            on_device(&quantize(&values, rows, cols, scheme)?, weight.device())
        }
        (device, None, Quantization::Gguf(dtype)) => {
            let blocks = blocks(weight, dtype)?;
            blocks_on_device(dtype, (rows, cols), &blocks, device)
        }
        (device, ..) => bail!(
            "{quantization} on {:?}: expected the CPU or a CUDA device, with the feature `cuda`",
            device.location()
        ),
    }
}

/// Codes in the layout of a device.
pub(crate) fn on_device(codes: &Codes, device: &Device) -> Result<Weight> {
    match device {
        Device::Cpu => Ok(Weight::Packed(Arc::new(PackedMatrix::from_codes(codes)?))),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => {
            let matrix = BlockMatrix::from_codes(codes, device)?;
            Ok(Weight::Blocks(Arc::new(matrix)))
        }
        other => bail!(
            "{} on {:?}: expected the CPU or a CUDA device, with the feature `cuda`",
            codes.scheme,
            other.location()
        ),
    }
}

/// A matrix that is packed for a CPU in the layout of another device.
pub(crate) fn packed_on_device(packed: &PackedMatrix, device: &Device) -> Result<Weight> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        let codes = packed.without_codes()?;
        // Where a NaN is among the codes of FP8, a scale has to say so.
        if !codes.scheme.is_fp8() {
            let read = |first: usize, rows: &mut [i8]| packed.read_codes(first, rows);
            let matrix = BlockMatrix::from_rows(&codes, read, device)?;
            return Ok(Weight::Blocks(Arc::new(matrix)));
        }
    }
    on_device(&packed.to_codes()?, device)
}

/// Codes that are still in words in the layout of a GPU, as [`BlockMatrix::from_words`].
#[cfg(feature = "cuda")]
pub(crate) fn words_on_device(
    codes: &Codes,
    words: (&Words, Option<&[u32]>),
    device: &Device,
) -> Result<Weight> {
    let matrix = BlockMatrix::from_words(codes, words, device)?;
    Ok(Weight::Blocks(Arc::new(matrix)))
}

/// GGUF blocks `[rows, cols]` in the layout of a device.
pub(crate) fn blocks_on_device(
    dtype: GgmlDType,
    (rows, cols): (usize, usize),
    blocks: &[u8],
    device: &Device,
) -> Result<Weight> {
    match device {
        Device::Cpu => {
            let packed = PackedMatrix::pack(dtype, rows, cols, blocks)?;
            Ok(Weight::Packed(Arc::new(packed)))
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => {
            let matrix = BlockMatrix::new(dtype, rows, cols, blocks, device)?;
            Ok(Weight::Blocks(Arc::new(matrix)))
        }
        other => bail!(
            "{dtype:?} on {:?}: expected the CPU or a CUDA device, with the feature `cuda`",
            other.location()
        ),
    }
}

/// GGUF blocks as candle quantizes them, on the host: some rows on each thread of the pool.
fn blocks(weight: &Tensor, dtype: GgmlDType) -> Result<Vec<u8>> {
    let (rows, cols) = weight.dims2()?;
    let of_row = BlockFormat::of(dtype)?.row_bytes(cols)?;
    let weight = weight.to_device(&Device::Cpu)?;
    widened(&weight, |values| {
        if let Some(at) = pool::first_without(values, |w| w.is_finite()) {
            bail!(
                "weights: a value that is not finite at row {}, column {}",
                at / cols,
                at % cols
            );
        }
        let mut blocks = vec![0; rows * of_row];
        let failed = Mutex::new(None);
        pool::for_rows(&mut blocks, of_row, 1, |first, part| {
            let count = part.len() / of_row;
            let some = &values[first * cols..][..count * cols];
            let quantized = Tensor::from_slice(some, (count, cols), &Device::Cpu)
                .and_then(|some| QTensor::quantize(&some, dtype));
            match quantized.as_ref().map(|blocks| blocks.data()) {
                Ok(Ok(bytes)) if bytes.len() == part.len() => part.copy_from_slice(&bytes),
                other => {
                    let what = other.map(|bytes| bytes.map(|bytes| bytes.len()));
                    let said = format!("{dtype:?} of {count} rows: {what:?}");
                    *failed.lock().unwrap_or_else(|e| e.into_inner()) = Some(said);
                }
            }
        });
        match failed.into_inner().unwrap_or_else(|e| e.into_inner()) {
            Some(said) => bail!("weights: {said}"),
            None => Ok(blocks),
        }
    })?
}

/// The values of a weight, `[N, K]` in f32 (a dense one as it is).
pub(crate) fn dense(weight: &Weight) -> Result<Tensor> {
    match weight {
        Weight::Dense(w) => Ok(w.clone()),
        Weight::Packed(w) => {
            let mut values = vec![0f32; w.rows() * w.cols()];
            for (row, out) in values.chunks_exact_mut(w.cols()).enumerate() {
                w.dequantize_row(row, out)?;
            }
            Tensor::from_vec(values, (w.rows(), w.cols()), &Device::Cpu)
        }
        #[cfg(feature = "cuda")]
        Weight::Blocks(w) => w.dequantize(DType::F32),
    }
}

/// The same in another form: quantized by `quantization` and back, for models whose layers are
/// candle's own tensors.
pub(crate) fn rounded(weight: &Tensor, quantization: Quantization) -> Result<Tensor> {
    let on_host = weight.to_device(&Device::Cpu)?;
    dense(&pack(&on_host, quantization)?)?
        .to_dtype(weight.dtype())?
        .to_device(weight.device())
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(feature = "cuda")]
    use crate::quant::Scheme;
    use candle_core::DType;

    #[test]
    fn rows_that_threads_quantize_are_candles() -> Result<()> {
        let weight = Tensor::randn(0f32, 1., (37, 512), &Device::Cpu)?;
        for dtype in BlockFormat::DTYPES {
            for kind in [DType::F32, DType::BF16] {
                let weight = weight.to_dtype(kind)?;
                let whole = QTensor::quantize(&weight.to_dtype(DType::F32)?, dtype)?;
                assert!(blocks(&weight, dtype)? == *whole.data()?, "{dtype:?}");
            }
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn packed_rows_are_uploaded_as_codes_are() -> Result<()> {
        let Ok(device) = Device::new_cuda(0) else {
            return Ok(());
        };
        let schemes = [
            "int8",
            "int4-g32",
            "int4-g64-z",
            "ternary-row",
            "ternary-tensor",
            "ternary",
            "nf4",
            "nvfp4",
        ];
        for scheme in schemes.into_iter().chain(["fp8", "fp8-block128"]) {
            let scheme: Scheme = scheme.parse()?;
            // More rows than one part of page-locked memory has, and a last group that is not full.
            for (rows, cols) in [(13, 320), (2061, 8192)] {
                let weight = Tensor::randn(0f32, 1., (rows, cols), &Device::Cpu)?;
                // A group without values, whose scale is 0.
                let mask = Tensor::arange(0u32, cols as u32, &Device::Cpu)?.ge(64u32)?;
                let weight = weight.broadcast_mul(&mask.to_dtype(DType::F32)?)?;
                let packed = PackedMatrix::quantize(&weight, scheme)?;
                let Weight::Blocks(ours) = packed_on_device(&packed, &device)? else {
                    panic!("expected blocks");
                };
                let theirs = BlockMatrix::from_codes(&packed.to_codes()?, &device)?;
                let values = |of: &BlockMatrix| of.dequantize(DType::F32);
                let differ = values(&ours)?.ne(&values(&theirs)?)?.to_dtype(DType::F32)?;
                let count = differ.sum_all()?.to_scalar::<f32>()?;
                assert_eq!(count, 0., "{scheme}, {rows} x {cols}");
            }
        }
        Ok(())
    }
}
