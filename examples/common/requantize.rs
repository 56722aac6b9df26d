//! A GGUF file again, with its matrices in other block types.

use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::Path;

use anyhow::{Context, Result};
use candle_core::Device;
use candle_core::quantized::gguf_file::{self, Content};
use candle_core::quantized::{GgmlDType, QTensor};

/// What a matrix that is no multiple of 256 wide becomes in place of a K-quant, as in llama.cpp; Q2_K and Q3_K
/// become Q4_0, for candle has no IQ4_NL.
pub fn fallback(dtype: GgmlDType) -> GgmlDType {
    match dtype {
        GgmlDType::Q2K | GgmlDType::Q3K => GgmlDType::Q4_0,
        GgmlDType::Q4K => GgmlDType::Q5_0,
        GgmlDType::Q5K => GgmlDType::Q5_1,
        GgmlDType::Q6K => GgmlDType::Q8_0,
        other => other,
    }
}

/// Writes `input` to `output`. `dtype` is asked for the type of each matrix, by its name and width;
/// what it has none for stays as it is.
pub fn requantize(
    input: &Path,
    output: &Path,
    dtype: impl Fn(&str, usize, &Content) -> Option<GgmlDType>,
) -> Result<()> {
    let device = Device::Cpu;
    let file = File::open(input).with_context(|| input.display().to_string())?;
    let mut reader = BufReader::new(file);
    let content = Content::read(&mut reader)?;
    let mut tensors = Vec::new();
    for name in content.tensor_infos.keys() {
        let tensor = content.tensor(&mut reader, name, &device)?;
        let dtype = match *tensor.shape().dims() {
            [_, width] => dtype(name, width, &content),
            _ => None,
        };
        let tensor = match dtype {
            Some(dtype) => QTensor::quantize(&tensor.dequantize(&device)?, dtype)?,
            None => tensor,
        };
        tensors.push((name.as_str(), tensor));
    }
    tensors.sort_by_key(|(name, _)| *name);
    let metadata: Vec<_> = content
        .metadata
        .iter()
        .map(|(k, v)| (k.as_str(), v))
        .collect();
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, tensor)| (*name, tensor))
        .collect();
    let file = File::create(output).with_context(|| output.display().to_string())?;
    let mut writer = BufWriter::new(file);
    gguf_file::write(&mut writer, &metadata, &tensors)?;
    Ok(())
}
