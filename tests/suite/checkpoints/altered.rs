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
    // SAFETY: nobody changes the file, and what is mapped stays when it is removed.
    let checkpoint = unsafe { Checkpoint::open(&[file], config) }?;
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
    let ternary = "u8, f32, f16 or bf16";
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
