//! Quantized checkpoints of the hub, packed by the formats' own projects, against float64.

mod altered;

use crate::golden::{Golden, relative_error};
use crate::packers;
use crate::subject;
use crate::support::{device, on_every_device};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::models::{
    Architecture, CausalLm, Checkpoint, bitnet, gpt_neox, llama, qwen2, qwen3,
    save_compressed_tensors,
};
use candle_fused::quant::{Quantization, Recipe};
use candle_fused::trace;
use candle_nn::VarBuilder;
use serde::de::DeserializeOwned;
use std::collections::HashMap;
use std::path::PathBuf;

/// Every model, and the format in which its products have to run; FP8 in blocks of other sizes than 128 is dense, in
/// `linear`.
const MODELS: [(&str, &str); 21] = [
    ("llama_gptq_g128", "int4-g128"),
    ("llama_gptq_act_order", "int4-g32-z"),
    ("llama_gptq_own_orders", "int4-g64"),
    ("qwen2_gptq_v2", "int4-g64-z"),
    ("llama_gptq_int8_g32", "q8_0"),
    ("llama_gptq_int8", "int8"),
    ("llama_awq_g64", "int4-g64-z"),
    ("qwen2_w4a16_asymmetric", "int4-g64-z"),
    ("llama_w4a16_act_order", "int4-g32"),
    ("llama_w8a16", "int8"),
    ("qwen3_w8a8", "int8"),
    ("qwen3_fp8_block", "linear"),
    ("qwen3_fp8_block128", "fp8-block128"),
    ("llama_fp8_channel", "fp8"),
    ("llama_nvfp4", "nvfp4"),
    ("qwen3_nvfp4_w4a4", "nvfp4"),
    ("llama_nf4", "nf4"),
    ("qwen2_nf4_double", "nf4"),
    ("bitnet_offline", "ternary-row"),
    ("bitnet_online", "ternary-row"),
    ("bitnet_bitlinear", "ternary-row"),
];

pub struct Model {
    name: &'static str,
    folder: PathBuf,
    config: String,
}

impl Model {
    pub fn open(name: &'static str) -> Result<Self> {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let folder = root.join("tests/data/checkpoints").join(name);
        let config = std::fs::read_to_string(folder.join("config.json"))?;
        Ok(Self {
            name,
            folder,
            config,
        })
    }

    fn files(&self) -> Result<Vec<PathBuf>> {
        let entries = std::fs::read_dir(&self.folder)?;
        let mut files: Vec<_> = entries.map(|e| Ok(e?.path())).collect::<Result<_>>()?;
        let is_weights = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("model") && name.ends_with(".safetensors")
        };
        files.retain(is_weights);
        Ok(files)
    }

    pub fn weights(&self, dtype: DType) -> Result<VarBuilder<'static>> {
        let checkpoint = Checkpoint::open(&self.files()?, &self.config)?;
        Ok(checkpoint.var_builder(dtype, &device()))
    }

    /// As a program opens them that knows nothing of this crate's.
    fn plain_weights(&self, dtype: DType) -> Result<VarBuilder<'static>> {
        // SAFETY: nobody changes the repository's files.
        unsafe { VarBuilder::from_mmaped_safetensors(&self.files()?, dtype, &device()) }
    }

    pub fn read<C: DeserializeOwned>(&self) -> C {
        serde_json::from_str(&self.config).expect("a configuration")
    }

    pub fn golden(&self) -> Result<HashMap<String, Tensor>> {
        candle_core::safetensors::load(self.folder.join("golden.safetensors"), &Device::Cpu)
    }

    /// The logits of every position.
    fn logits(&self, vb: VarBuilder, ids: &Tensor, fusion: Fusion) -> Result<Tensor> {
        fn own<C: Architecture>(c: &C, vb: VarBuilder, ids: &Tensor, f: Fusion) -> Result<Tensor> {
            Ok(CausalLm::new_fused(c, vb, f)?.hidden_states(ids, 0)?.1)
        }
        match self.name.split('_').next() {
            Some("qwen2") => own(&self.read::<qwen2::Config>(), vb, ids, fusion),
            Some("qwen3") => own(&self.read::<qwen3::Config>(), vb, ids, fusion),
            Some("bitnet") => own(&self.read::<bitnet::Config>(), vb, ids, fusion),
            _ => {
                let config = self.read::<llama::LlamaConfig>().into_config(false);
                let mut cache = llama::Cache::new(true, vb.dtype(), &config, vb.device())?;
                let llama = llama::Llama::load_fused(vb, &config, fusion)?;
                Ok(llama.hidden_states(ids, 0, &mut cache)?.1)
            }
        }
    }

    /// How far the logits are from the reference.
    pub fn error(&self, vb: VarBuilder, fusion: Fusion) -> Result<f64> {
        let golden = self.golden()?;
        let ids = golden["input_ids"].to_dtype(DType::U32)?;
        let logits = self.logits(vb, &ids.to_device(&device())?, fusion)?;
        relative_error(&logits.to_device(&Device::Cpu)?, &golden["logits"])
    }
}

/// An error without the backtrace that candle may add.
fn first_line(error: &str) -> &str {
    error.lines().next().unwrap_or_default()
}

/// In f32 without fusion the weights are the checkpoint's own numbers, so that one code in a wrong place
/// shows. Fused, a CPU rounds activations to 8 bits too: 0.6 % of a deviation of each product, which the
/// layer's seven products, one behind another, make three times as much of the largest logit.
#[test]
fn logits_are_those_of_the_formats_own_projects() -> Result<()> {
    on_every_device(|| {
        for (name, format) in MODELS {
            let model = Model::open(name)?;
            let plain = model.error(model.weights(DType::F32)?, Fusion::none())?;
            assert!(plain < 1e-5, "{name}: {plain:e} without fusion");
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let (fused, calls) =
                    trace::capture(|| model.error(model.weights(dtype)?, Fusion::all()));
                let fused = fused?;
                assert!(fused < 4e-2, "{name} in {dtype:?}: {fused:e}");
                let ran = calls
                    .iter()
                    .map(|(call, _)| format!("{} {}", call.op, call.path));
                let ran: Vec<_> = ran.collect();
                let expected = ran.iter().any(|call| call.contains(format));
                assert!(expected, "{name}: {format} is not among {ran:?}");
            }
        }
        Ok(())
    })
}

/// From files alone, without the configuration, as `VarBuilder::from_mmaped_safetensors` opens them.
#[test]
fn a_plain_builder_gives_what_tensors_tell() -> Result<()> {
    on_every_device(|| {
        for (name, said) in [
            ("llama_gptq_g128", None),
            ("llama_gptq_own_orders", None),
            ("llama_gptq_int8", None),
            ("llama_awq_g64", None),
            ("qwen2_w4a16_asymmetric", None),
            ("llama_w8a16", None),
            ("llama_nf4", None),
            ("llama_nvfp4", None),
            ("qwen2_nf4_double", None),
            ("llama_gptq_act_order", Some("checkpoint_format")),
            ("qwen2_gptq_v2", Some("checkpoint_format")),
            ("qwen3_w8a8", Some("models::Checkpoint")),
            ("qwen3_fp8_block", Some("models::Checkpoint")),
        ] {
            let model = Model::open(name)?;
            match (
                model.error(model.plain_weights(DType::F32)?, Fusion::none()),
                said,
            ) {
                (Ok(error), None) => assert!(error < 1e-5, "{name}: {error:e}"),
                (Err(error), Some(said)) => {
                    let error = error.to_string();
                    assert!(
                        error.contains(said) && error.contains("proj"),
                        "{name}: {error}"
                    );
                }
                (other, _) => panic!("{name}: {other:?}"),
            }
        }
        Ok(())
    })
}

/// Candle's own models load the same files, by the numbers that the codes are worth.
#[test]
fn plain_candle_takes_the_numbers() -> Result<()> {
    use candle_transformers::models::llama as stock;
    for name in [
        "llama_gptq_act_order",
        "llama_awq_g64",
        "llama_w8a16",
        "llama_fp8_channel",
        "llama_nf4",
        "llama_nvfp4",
    ] {
        let model = Model::open(name)?;
        let (vb, golden) = (model.weights(DType::F32)?, model.golden()?);
        let config = model.read::<stock::LlamaConfig>().into_config(false);
        let mut cache = stock::Cache::new(false, DType::F32, &config, &device())?;
        let llama = stock::Llama::load(vb, &config)?;
        let ids = golden["input_ids"].to_dtype(DType::U32)?;
        let logits = llama.forward(&ids, 0, &mut cache)?;
        let last = golden["logits"].narrow(1, ids.dim(1)? - 1, 1)?.squeeze(1)?;
        let error = relative_error(&logits, &last)?;
        assert!(error < 1e-5, "{name}: {error:e}");
    }
    Ok(())
}

/// Values of a table are bitsandbytes' to the bit, and e4m3 floats torch's times their scale.
#[test]
fn values_are_those_of_the_formats_own_projects() -> Result<()> {
    let name = "model.layers.0.self_attn.q_proj.weight";
    for model in [
        "llama_nf4",
        "qwen2_nf4_double",
        "qwen3_fp8_block",
        "qwen3_fp8_block128",
        "llama_fp8_channel",
    ] {
        let opened = Model::open(model)?;
        let own = opened.weights(DType::F32)?.get((128, 128), name)?;
        let expected = opened.golden()?["q_proj"].flatten_all()?;
        let values = |t: Tensor| t.flatten_all()?.to_vec1::<f32>();
        assert_eq!(values(own)?, values(expected)?, "{model}");
    }
    Ok(())
}

/// Those of NVFP4 are the exact products of their three factors within a rounding of f32 or two: here a matrix is multiplied
/// by one over its global scale.
#[test]
fn values_of_nvfp4_are_those_of_the_formats_own_project() -> Result<()> {
    let name = "model.layers.0.self_attn.q_proj.weight";
    for model in ["llama_nvfp4", "qwen3_nvfp4_w4a4"] {
        let opened = Model::open(model)?;
        let own = opened.weights(DType::F32)?.get((128, 128), name)?;
        let expected = opened.golden()?["q_proj"].flatten_all()?;
        let values = |t: Tensor| t.flatten_all()?.to_vec1::<f32>();
        for (own, expected) in values(own)?.iter().zip(values(expected)?) {
            let most = 2. * f32::EPSILON * expected.abs();
            assert!((own - expected).abs() <= most, "{own} for {expected}");
        }
    }
    Ok(())
}

/// A model that is quantized already is not quantized again, and a configuration of another format is an
/// error before anything is read.
#[test]
fn what_cannot_be_had_is_one_line() -> Result<()> {
    let model = Model::open("llama_awq_g64")?;
    let config = model.read::<llama::LlamaConfig>().into_config(false);
    let recipe = Recipe::new(Quantization::Int8);
    let vb = model.weights(DType::F32)?;
    let again = llama::Llama::load_quantized(vb, &config, &recipe, Fusion::all());
    let error = again.unwrap_err().to_string();
    assert!(error.contains("quantized already"), "{error}");
    for (from, to, said) in [
        ("\"awq\"", "\"hqq\"", "quant_method is `hqq`"),
        ("\"bits\": 4", "\"bits\": 3", "bits is 3, expected 4"),
        ("\"gemm\"", "\"gemv\"", "version is `gemv`, expected gemm"),
    ] {
        let config = model.config.replace(from, to);
        assert_ne!(config, model.config);
        let error = Checkpoint::open(&model.files()?, &config).unwrap_err();
        let error = error.to_string();
        assert!(first_line(&error).contains(said), "{error}");
    }
    Ok(())
}

/// What is saved for other programs is, read back, what a model quantized at load has: the same logits to
/// the bit.
#[test]
fn a_saved_checkpoint_is_the_model_quantized_at_load() -> Result<()> {
    fn check<C: Architecture + DeserializeOwned>(name: &str) -> Result<()> {
        let golden = Golden::open(name)?;
        let config: C = golden.config();
        let recipe = Recipe::new(Quantization::Int8).with(
            "*mlp*",
            Some(Quantization::Int4 {
                group: 32,
                zero_point: false,
            }),
        );
        check_by(&golden, &config, recipe.with_balance())?;
        // Groups of several formats, and of one.
        let fp8 = |more| Recipe::new(Quantization::Fp8).with("*mlp*", Some(more));
        check_by(&golden, &config, fp8(Quantization::Int8))?;
        check_by(&golden, &config, fp8(Quantization::Fp8Block128))?;
        check_by(&golden, &config, Recipe::new(Quantization::Fp8))
    }
    fn check_by<C: Architecture>(golden: &Golden, config: &C, recipe: Recipe) -> Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("model.safetensors");
        let vb = golden.weights(DType::F32)?;
        let written = save_compressed_tensors(config, vb.clone(), &recipe, &path)?;
        let text = format!(r#"{{"quantization_config": {written}}}"#);
        let saved = Checkpoint::open(&[path], &text)?;
        let saved = saved.var_builder(DType::F32, &device());
        let ids = golden.input_ids()?;
        let mut read = CausalLm::new(config, saved)?;
        let mut made = CausalLm::new_quantized(config, vb, &recipe, Fusion::all())?;
        let logits = |model: &mut CausalLm<C>| {
            let (_, logits) = model.hidden_states(&ids, 0)?;
            logits.flatten_all()?.to_vec1::<f32>()
        };
        assert_eq!(logits(&mut read)?, logits(&mut made)?, "{written}");
        Ok(())
    }
    check::<qwen2::Config>("qwen2_bias")?;
    check::<qwen3::Config>("qwen3_qknorm")?;
    check::<gpt_neox::Config>("gpt_neox_parallel")
}

/// Every family's tensors by their names: packed, they are the numbers that their codes stand for.
#[test]
fn every_family_takes_packed_matrices() -> Result<()> {
    on_every_device(|| {
        // Of one the MLP's width is no multiple of the group.
        for name in subject::ALL
            .iter()
            .filter(|name| **name != "llama_gqa_tied")
        {
            let golden = Golden::open(name)?;
            let ids = golden.input_ids()?;
            let path = golden.folder.join("model.safetensors");
            let weights = candle_core::safetensors::load(path, &Device::Cpu)?;
            let logits = |tensors, fusion| {
                let vb = VarBuilder::from_tensors(tensors, DType::F32, &device());
                let mut model = subject::over(&golden, vb, fusion)?;
                Ok::<_, candle_core::Error>(model.hidden_states(&ids, 0)?.1)
            };
            for format in packers::Format::ALL {
                let rounded = packers::rounded(weights.clone(), format)?;
                let expected = logits(rounded, Fusion::none())?;
                let packed = packers::packed(weights.clone(), format)?;
                let plain = relative_error(&logits(packed.clone(), Fusion::none())?, &expected)?;
                assert!(plain < 1e-6, "{name} {format:?}: {plain:e}");
                let fused = relative_error(&logits(packed, Fusion::all())?, &expected)?;
                assert!(fused < 0.1, "{name} {format:?}: {fused:e} fused");
            }
        }
        Ok(())
    })
}

/// A damaged file of NF4 is one line that names the tensor.
#[test]
fn damaged_tables_are_named() -> Result<()> {
    let model = Model::open("qwen2_nf4_double")?;
    let tensors =
        candle_core::safetensors::load(model.folder.join("model.safetensors"), &Device::Cpu)?;
    let weight = "model.layers.0.self_attn.q_proj.weight";
    let state = |text: &str| Tensor::new(text.as_bytes(), &Device::Cpu);
    let short = |part: &str| tensors[&format!("{weight}.{part}")].narrow(0, 0, 8);
    for (part, tensor, said) in [
        (".absmax", short("absmax")?, "absmax` has shape [8]"),
        (
            ".quant_map",
            short("quant_map")?,
            "weight.quant_map has shape [8]",
        ),
        (
            ".nested_quant_map",
            short("nested_quant_map")?,
            "expected [256]",
        ),
        (".quant_state.bitsandbytes__nf4", state("{}")?, "blocksize"),
        (
            ".quant_state.bitsandbytes__nf4",
            state(r#"{"blocksize": 64, "shape": [64, 128]}"#)?,
            "says the shape [64, 128], expected [128, 128]",
        ),
        (
            ".quant_state.bitsandbytes__nf4",
            state(r#"{"blocksize": 48, "shape": [128, 128]}"#)?,
            "expected a power of two",
        ),
    ] {
        let mut tensors = tensors.clone();
        tensors.insert(format!("{weight}{part}"), tensor);
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let error = CausalLm::new(&model.read::<qwen2::Config>(), vb).unwrap_err();
        let error = error.to_string();
        let line = first_line(&error);
        assert!(line.contains(said) && line.contains("q_proj"), "{line}");
    }
    Ok(())
}
