//! The same checkpoints with other names, other dtypes and other zero points.

use super::{Model, first_line};
use crate::support::{device, on_every_device};
use candle_core::{DType, Result};
use candle_fused::Fusion;
use candle_fused::models::Checkpoint;
use candle_nn::VarBuilder;
use half::f16;
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize_to_file};
use std::collections::BTreeMap;
use tempfile::TempDir;

/// A layer that every model has quantized.
const LAYER: &str = "model.layers.0.mlp.up_proj";

/// A tensor as a file has it: candle's tensors cannot be signed bytes.
#[derive(Clone)]
struct Raw {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

impl Raw {
    fn new(dtype: Dtype, shape: &[usize], data: impl IntoIterator<Item = u8>) -> Self {
        Self {
            dtype,
            shape: shape.to_vec(),
            data: data.into_iter().collect(),
        }
    }

    fn i8(shape: &[usize], values: &[i8]) -> Self {
        Self::new(Dtype::I8, shape, values.iter().map(|v| *v as u8))
    }

    fn i32(shape: &[usize], values: &[i32]) -> Self {
        let data = values.iter().flat_map(|v| v.to_le_bytes());
        Self::new(Dtype::I32, shape, data)
    }

    fn f32(shape: &[usize], values: &[f32]) -> Self {
        let data = values.iter().flat_map(|v| v.to_le_bytes());
        Self::new(Dtype::F32, shape, data)
    }

    /// Of tensors of four bytes a value.
    fn words(&self) -> impl Iterator<Item = [u8; 4]> {
        let words = self.data.chunks_exact(4);
        words.map(|word| word.try_into().expect("four bytes"))
    }
}

type Tensors = BTreeMap<String, Raw>;

/// The tensors of all files of a model.
fn tensors(model: &Model) -> Result<Tensors> {
    let mut tensors = Tensors::new();
    for file in model.files()? {
        let bytes = std::fs::read(file)?;
        for (name, view) in SafeTensors::deserialize(&bytes)?.tensors() {
            let raw = Raw::new(view.dtype(), view.shape(), view.data().iter().copied());
            tensors.insert(name, raw);
        }
    }
    Ok(tensors)
}

/// One file of these tensors.
fn written(tensors: &Tensors) -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    let mut views = Vec::new();
    for (name, raw) in tensors {
        let view = TensorView::new(raw.dtype, raw.shape.clone(), &raw.data)?;
        views.push((name, view));
    }
    serialize_to_file(views, None, &folder.path().join("model.safetensors"))?;
    Ok(folder)
}

fn open(folder: &TempDir, config: &str) -> Result<VarBuilder<'static>> {
    let file = folder.path().join("model.safetensors");
    let checkpoint = Checkpoint::open(&[file], config)?;
    Ok(checkpoint.var_builder(DType::F32, &device()))
}

/// A model of several parts has its language model behind a prefix. The configuration goes along, without which FP8, bytes
/// and zero points cannot be read, and BitNet does not round its inputs.
#[test]
fn a_prefix_and_other_names_keep_the_configuration() -> Result<()> {
    on_every_device(|| {
        for name in [
            "qwen3_fp8_block",
            "qwen3_fp8_block128",
            "llama_fp8_channel",
            "qwen3_w8a8",
            "qwen2_gptq_v2",
            "llama_gptq_act_order",
            "bitnet_offline",
            "bitnet_online",
            "bitnet_bitlinear",
        ] {
            let model = Model::open(name)?;
            let behind = |name: &str| format!("language_model.{name}");
            let renamed = tensors(&model)?.into_iter();
            let folder = written(&renamed.map(|(name, raw)| (behind(&name), raw)).collect())?;
            for vb in [
                open(&folder, &model.config)?.pp("language_model"),
                open(&folder, &model.config)?.rename_f(behind),
                open(&folder, &model.config)?
                    .rename_f(|name| name.replace("text.", "language_model."))
                    .pp("text"),
            ] {
                let error = model.error(vb, Fusion::none())?;
                assert!(error < 1e-5, "{name}: {error:e}");
            }
        }
        Ok(())
    })
}

/// A tensor in another dtype than its format has is no garbage, but a line that names it.
#[test]
fn other_dtypes_are_named() -> Result<()> {
    use Dtype::{BF16, F8_E4M3, F8_E8M0, F16, F32, I8, I32, U8};
    let [numbers, bytes, words, floats] = ["f32, f16 or bf16", "u8 or i8", "i32", "f8e4m3"];
    let (either, ternary) = ("i32, or i8", "u8, f32, f16 or bf16");
    for (name, part, dtype, expected) in [
        ("qwen3_fp8_block", "weight", BF16, floats),
        ("qwen3_fp8_block128", "weight", I8, floats),
        ("llama_fp8_channel", "weight", F32, floats),
        ("llama_fp8_channel", "weight_scale", U8, numbers),
        ("llama_fp8_channel", "weight_scale", F8_E8M0, numbers),
        ("qwen3_w8a8", "weight", F32, bytes),
        ("qwen3_w8a8", "weight", F8_E4M3, bytes),
        ("qwen3_w8a8", "weight_scale", I32, numbers),
        ("llama_gptq_g128", "qweight", F16, words),
        ("llama_gptq_act_order", "qzeros", F32, words),
        ("llama_gptq_own_orders", "g_idx", BF16, words),
        ("llama_gptq_int8", "scales", I32, numbers),
        ("llama_awq_g64", "qweight", F32, words),
        ("llama_w8a16", "weight_packed", F16, words),
        ("qwen2_w4a16_asymmetric", "weight_zero_point", F16, either),
        ("llama_nvfp4", "weight_packed", I32, bytes),
        ("llama_nvfp4", "weight_scale", F16, floats),
        ("llama_nf4", "weight", F16, bytes),
        ("llama_nf4", "weight.absmax", U8, numbers),
        ("bitnet_offline", "weight", I32, ternary),
        ("bitnet_online", "weight", U8, numbers),
    ] {
        let model = Model::open(name)?;
        let (mut tensors, part) = (tensors(&model)?, format!("{LAYER}.{part}"));
        let shape = tensors[&part].shape.clone();
        let size = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        tensors.insert(part.clone(), Raw::new(dtype, &shape, vec![0; size]));
        let vb = open(&written(&tensors)?, &model.config)?;
        let error = model.error(vb, Fusion::all()).expect_err(name).to_string();
        let found = match dtype {
            // candle has no signed bytes.
            I8 | U8 => bytes.to_owned(),
            other => format!("{other:?}").to_lowercase().replace('_', ""),
        };
        let said = format!("tensor `{part}` is {found}, expected {expected}");
        assert!(first_line(&error).ends_with(&said), "{name}: {error}");
    }
    Ok(())
}

/// Codes without a scale beside them are no numbers either.
#[test]
fn codes_alone_are_named() -> Result<()> {
    let model = Model::open("qwen3_w8a8")?;
    let mut tensors = tensors(&model)?;
    tensors.remove(&format!("{LAYER}.weight_scale"));
    let folder = written(&tensors)?;
    for config in [&model.config, "{}"] {
        let vb = open(&folder, config)?;
        let error = vb.get((128, 128), &format!("{LAYER}.weight")).unwrap_err();
        let (error, said) = (error.to_string(), "weight` is u8 or i8, expected f32, f16");
        assert!(first_line(&error).contains(said), "{error}");
    }
    Ok(())
}

/// The same values in other dtypes that files have are read all the same.
#[test]
fn other_dtypes_of_the_same_values_are_taken() -> Result<()> {
    on_every_device(|| {
        for name in [
            "llama_gptq_own_orders",
            "llama_w4a16_act_order",
            "qwen3_w8a8",
        ] {
            let model = Model::open(name)?;
            let mut tensors = tensors(&model)?;
            for (name, raw) in &mut tensors {
                let part = name.rsplit('.').next().unwrap_or_default();
                *raw = match (part, raw.dtype) {
                    ("g_idx" | "weight_g_idx", Dtype::I32) => {
                        let wide = raw.words().map(|w| i64::from(i32::from_le_bytes(w)));
                        Raw::new(Dtype::I64, &raw.shape, wide.flat_map(i64::to_le_bytes))
                    }
                    (_, Dtype::I32) => Raw::new(Dtype::U32, &raw.shape, raw.data.clone()),
                    (_, Dtype::I8) => Raw::new(Dtype::U8, &raw.shape, raw.data.clone()),
                    ("scales" | "weight_scale", Dtype::F16) => {
                        let halves = raw.data.chunks_exact(2);
                        let values = halves.map(|h| f16::from_le_bytes([h[0], h[1]]).to_f32());
                        Raw::f32(&raw.shape, &values.collect::<Vec<_>>())
                    }
                    _ => continue,
                };
            }
            let vb = open(&written(&tensors)?, &model.config)?;
            let error = model.error(vb, Fusion::none())?;
            assert!(error < 1e-5, "{name}: {error:e}");
        }
        Ok(())
    })
}

/// One of [`LAYER`]'s numbers by the definition, with a scale and a zero point for each row.
fn worth(codes: &[i32], scales: &[f32], zeros: &[i32]) -> Vec<u32> {
    let rows = codes.chunks_exact(128).zip(scales).zip(zeros);
    rows.flat_map(|((row, s), z)| row.iter().map(move |q| (s * (q - z) as f32).to_bits()))
        .collect()
}

/// One for all rows, or one for each, beside a scale of the same or of another shape.
#[test]
fn zero_points_are_shared_as_scales_are() -> Result<()> {
    let one = |value| (vec![1], vec![value; 128]);
    let scales: Vec<f32> = (1..=128).map(|n| n as f32 / 1024.).collect();
    let zeros: Vec<i8> = (0..128).map(|n| (n % 16 - 8) as i8).collect();
    let scales = [
        one(0.25),
        (vec![128], scales.clone()),
        (vec![128, 1], scales),
    ];
    let zeros = [
        (vec![1], vec![-3i8; 128]),
        (vec![], vec![5; 128]),
        (vec![128], zeros.clone()),
        (vec![128, 1], zeros),
    ];
    for name in ["qwen3_w8a8", "qwen2_w4a16_asymmetric"] {
        let model = Model::open(name)?;
        let tensors = tensors(&model)?;
        let packed = tensors.get(&format!("{LAYER}.weight_packed"));
        let codes: Vec<i32> = match packed {
            Some(packed) => {
                let fields = |word| {
                    (0..8).map(move |j| (u32::from_le_bytes(word) >> (4 * j) & 15) as i32 - 8)
                };
                packed.words().flat_map(fields).collect()
            }
            None => {
                let bytes = tensors[&format!("{LAYER}.weight")].data.iter();
                bytes.map(|byte| i32::from(*byte as i8)).collect()
            }
        };
        // In words, eight zero points in each, where codes are.
        let in_words = |(shape, zeros): &(Vec<usize>, Vec<i8>)| {
            let word = |eight: &[i8]| {
                let fields = eight.iter().rev();
                fields.fold(0u32, |word, z| word << 4 | (z + 8) as u32) as i32
            };
            let words: Vec<i32> = zeros.chunks_exact(8).map(word).collect();
            match shape.first() {
                Some(128) => Raw::i32(&[&[16], &shape[1..]].concat(), &words),
                _ => Raw::i32(shape, &words[..1]),
            }
        };
        for (scale_shape, scales) in &scales {
            for zeros in &zeros {
                let count = |shape: &[usize]| shape.iter().product::<usize>();
                let bytes = Raw::i8(&zeros.0, &zeros.1[..count(&zeros.0)]);
                let stored = [Some(bytes), packed.is_some().then(|| in_words(zeros))];
                let wide: Vec<i32> = zeros.1.iter().map(|z| i32::from(*z)).collect();
                let expected = worth(&codes, scales, &wide);
                for zeros in stored.into_iter().flatten() {
                    let said = format!("{name}: {:?} {:?}", zeros.dtype, zeros.shape);
                    let scale = Raw::f32(scale_shape, &scales[..count(scale_shape)]);
                    let mut tensors = tensors.clone();
                    tensors.insert(format!("{LAYER}.weight_scale"), scale);
                    tensors.insert(format!("{LAYER}.weight_zero_point"), zeros);
                    let vb = open(&written(&tensors)?, &model.config)?;
                    let values = vb.get((128, 128), &format!("{LAYER}.weight"))?;
                    let values: Vec<f32> = values.flatten_all()?.to_vec1()?;
                    let values: Vec<u32> = values.iter().map(|v| v.to_bits()).collect();
                    assert!(values == expected, "{said}");
                }
            }
        }
    }
    Ok(())
}

/// Zero points of another shape, or that are none.
#[test]
fn other_zero_points_are_named() -> Result<()> {
    let scale = Raw::f32(&[1], &[0.5]);
    for (name, zeros, said) in [
        (
            "qwen3_w8a8",
            Raw::i8(&[2], &[0; 2]),
            "has shape [2], expected one value",
        ),
        (
            "qwen2_w4a16_asymmetric",
            Raw::i8(&[2], &[0; 2]),
            "has shape [2], expected one value",
        ),
        (
            "qwen2_w4a16_asymmetric",
            Raw::i32(&[2], &[0; 2]),
            "has shape [2], expected one value",
        ),
        (
            "qwen2_w4a16_asymmetric",
            Raw::i8(&[1], &[8]),
            "8, expected -8 to 7",
        ),
        (
            "qwen2_w4a16_asymmetric",
            Raw::i32(&[1], &[-3]),
            "0xfffffffd, expected one field",
        ),
    ] {
        let model = Model::open(name)?;
        let mut tensors = tensors(&model)?;
        tensors.insert(format!("{LAYER}.weight_scale"), scale.clone());
        tensors.insert(format!("{LAYER}.weight_zero_point"), zeros);
        let vb = open(&written(&tensors)?, &model.config)?;
        let error = model.error(vb, Fusion::all()).expect_err(name).to_string();
        let line = first_line(&error);
        assert!(
            line.contains("up_proj") && line.contains("weight_zero_point"),
            "{line}"
        );
        assert!(line.contains(said), "{line}");
    }
    Ok(())
}
