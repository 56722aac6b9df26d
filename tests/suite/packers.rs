//! Tiny checkpoints in the formats of the hub: matrices rounded to 4 bits in groups of 32 columns, with a
//! zero point of 8, to NVFP4 or to NF4, and packed bit by bit.

use candle_core::{DType, Device, Result, Tensor};
use candle_fused::quant::{self, Scheme};
use serde_json::{Value, json};
use std::collections::HashMap;

/// Formats of the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Gptq,
    Awq,
    PackQuantized,
    Nvfp4,
    Nf4,
}

const GROUP: usize = 32;

impl Format {
    pub const ALL: [Self; 5] = [
        Self::Gptq,
        Self::Awq,
        Self::PackQuantized,
        Self::Nvfp4,
        Self::Nf4,
    ];

    /// `quantization_config` of a model.
    pub fn config(self) -> Value {
        match self {
            Self::Gptq => {
                json!({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": true,
                "desc_act": false})
            }
            Self::Awq => {
                json!({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"})
            }
            Self::PackQuantized => json!({"quant_method": "compressed-tensors",
                "format": "pack-quantized", "config_groups": {"group_0": {"weights":
                    {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}}}}),
            Self::Nvfp4 => json!({"quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized", "config_groups": {"group_0": {"weights":
                    {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}}}),
            Self::Nf4 => json!({"quant_method": "bitsandbytes", "load_in_4bit": true,
                "bnb_4bit_quant_type": "nf4"}),
        }
    }
}

/// The same tensors with the layers' matrices packed.
pub fn packed(weights: HashMap<String, Tensor>, format: Format) -> Result<HashMap<String, Tensor>> {
    let mut tensors = HashMap::new();
    for (name, tensor) in weights {
        match stem(&name, &tensor) {
            Some(stem) => {
                for (part, tensor) in matrix(&tensor, format)? {
                    tensors.insert(format!("{stem}.{part}"), tensor);
                }
            }
            None => drop(tensors.insert(name, tensor)),
        }
    }
    Ok(tensors)
}

/// The same tensors with the numbers that the codes of the layers' matrices stand for.
pub fn rounded(
    weights: HashMap<String, Tensor>,
    format: Format,
) -> Result<HashMap<String, Tensor>> {
    let rounded = |(name, tensor): (String, Tensor)| {
        if stem(&name, &tensor).is_none() {
            return Ok((name, tensor));
        }
        let codes = match format {
            Format::Nvfp4 => Some(nvfp4(&tensor)?),
            Format::Nf4 => Some(nf4(&tensor)?),
            _ => None,
        };
        if let Some(codes) = codes {
            let values = codes.dequantize();
            return Ok((name, Tensor::from_vec(values, tensor.dims(), &Device::Cpu)?));
        }
        let codes = Codes::of(&tensor)?;
        let values: Vec<f32> = (0..tensor.elem_count())
            .map(|at| codes.scales[at / GROUP] * (codes.code(at) as f32 - 8.))
            .collect();
        Ok((name, Tensor::from_vec(values, tensor.dims(), &Device::Cpu)?))
    };
    weights.into_iter().map(rounded).collect()
}

/// The name of a layer's matrix without its end.
fn stem<'a>(name: &'a str, tensor: &Tensor) -> Option<&'a str> {
    let layers = name.contains("layers.") && tensor.rank() == 2;
    name.strip_suffix(".weight").filter(|_| layers)
}

struct Codes {
    values: Vec<f32>,
    /// By group, exactly f16.
    scales: Vec<f32>,
}

impl Codes {
    fn of(weight: &Tensor) -> Result<Self> {
        let values: Vec<f32> = weight.flatten_all()?.to_vec1()?;
        let largest = |group: &[f32]| group.iter().fold(0f32, |most, w| most.max(w.abs()));
        let scales = values.chunks_exact(GROUP).map(|group| largest(group) / 7.);
        let scales = scales.map(|s| half::f16::from_f32(s).to_f32()).collect();
        Ok(Self { values, scales })
    }

    fn code(&self, at: usize) -> u32 {
        (self.values[at] / self.scales[at / GROUP] + 8.).round() as u32
    }
}

fn nvfp4(weight: &Tensor) -> Result<quant::Codes> {
    let (rows, cols) = weight.dims2()?;
    let values: Vec<f32> = weight.flatten_all()?.to_vec1()?;
    quant::quantize(&values, rows, cols, Scheme::Nvfp4)
}

fn nvfp4_matrix(weight: &Tensor) -> Result<Vec<(&'static str, Tensor)>> {
    let (rows, cols) = weight.dims2()?;
    let codes = nvfp4(weight)?;
    let byte = |pair: &[i8]| (pair[0] | pair[1] << 4) as u8;
    let bytes: Vec<u8> = codes.codes.chunks_exact(2).map(byte).collect();
    let by_group = codes.group_scales.iter().map(|b| {
        let (exponent, mantissa) = (i32::from(b >> 3), f32::from(b & 7));
        match exponent {
            0 => mantissa / 512.,
            _ => (8. + mantissa) * 2f32.powi(exponent - 10),
        }
    });
    let scales: Vec<f32> = by_group.collect();
    let scales = Tensor::from_vec(scales, (rows, cols / 16), &Device::Cpu)?;
    Ok(vec![
        (
            "weight_packed",
            Tensor::from_vec(bytes, (rows, cols / 2), &Device::Cpu)?,
        ),
        ("weight_scale", scales.to_dtype(DType::F8E4M3)?),
        (
            "weight_global_scale",
            Tensor::new(&[1. / codes.scales[0]], &Device::Cpu)?,
        ),
    ])
}

/// Groups of bitsandbytes go on from a row to the next.
fn nf4(weight: &Tensor) -> Result<quant::Codes> {
    let values: Vec<f32> = weight.flatten_all()?.to_vec1()?;
    quant::quantize(&values, 1, values.len(), Scheme::Nf4)
}

fn nf4_matrix(weight: &Tensor) -> Result<Vec<(&'static str, Tensor)>> {
    let codes = nf4(weight)?;
    let byte = |pair: &[i8]| (pair[0] << 4 | pair[1]) as u8;
    let bytes: Vec<u8> = codes.codes.chunks_exact(2).map(byte).collect();
    let every = quant::Codes {
        cols: 64,
        codes: (0..64).map(|i| i % 16).collect(),
        scales: vec![1.],
        ..codes.clone()
    };
    let state = json!({"quant_type": "nf4", "blocksize": 64, "shape": weight.dims()}).to_string();
    let cpu = &Device::Cpu;
    Ok(vec![
        ("weight", Tensor::new(bytes, cpu)?.reshape(((), 1))?),
        ("weight.absmax", Tensor::new(codes.scales, cpu)?),
        (
            "weight.quant_map",
            Tensor::new(&every.dequantize()[..16], cpu)?,
        ),
        (
            "weight.quant_state.bitsandbytes__nf4",
            Tensor::new(state.as_bytes(), cpu)?,
        ),
    ])
}

fn matrix(weight: &Tensor, format: Format) -> Result<Vec<(&'static str, Tensor)>> {
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let (rows, cols) = weight.dims2()?;
    let groups = cols / GROUP;
    let codes = Codes::of(weight)?;
    let code = |at| codes.code(at);
    let place = |row: usize| ORDER.iter().position(|r| *r == row % 8).unwrap_or(0);
    let scales = Tensor::new(codes.scales.as_slice(), &Device::Cpu)?
        .reshape((rows, groups))?
        .to_dtype(DType::F16)?;
    let by_group = |zero: u32| -> Result<Vec<_>> {
        let zeros = words((groups, rows / 8), (rows, groups), |n, g| {
            (g * (rows / 8) + n / 8, n % 8, zero)
        });
        Ok(vec![
            ("qzeros", zeros?),
            ("scales", scales.t()?.contiguous()?),
        ])
    };
    let mut parts = match format {
        Format::Gptq => by_group(7)?,
        Format::Awq => by_group(8)?,
        Format::PackQuantized => vec![("weight_scale", scales)],
        Format::Nvfp4 => return nvfp4_matrix(weight),
        Format::Nf4 => return nf4_matrix(weight),
    };
    let size = (rows, cols);
    parts.push(match format {
        Format::Gptq => {
            let field = |n, k| (k / 8 * rows + n, k % 8, code(n * cols + k));
            ("qweight", words((cols / 8, rows), size, field)?)
        }
        Format::Awq => {
            let field = |n, k| (k * (rows / 8) + n / 8, place(n), code(n * cols + k));
            ("qweight", words((cols, rows / 8), size, field)?)
        }
        _ => {
            let field = |n, k| ((n * cols + k) / 8, k % 8, code(n * cols + k));
            ("weight_packed", words((rows, cols / 8), size, field)?)
        }
    });
    Ok(parts)
}

/// Words in which `field` gives each code's word, its place there and its value.
fn words(
    shape: (usize, usize),
    (rows, cols): (usize, usize),
    field: impl Fn(usize, usize) -> (usize, usize, u32),
) -> Result<Tensor> {
    let mut words = vec![0u32; shape.0 * shape.1];
    for (n, k) in (0..rows).flat_map(|n| (0..cols).map(move |k| (n, k))) {
        let (word, place, code) = field(n, k);
        words[word] |= code << (4 * place);
    }
    let words: Vec<_> = words.into_iter().map(|word| word as i32).collect();
    Tensor::from_vec(words, shape, &Device::Cpu)
}
