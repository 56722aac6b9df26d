//! What a new user stumbles over: input that cannot be meant is refused at once, by its name, with what to do
//! instead.

use crate::golden::Golden;
use crate::support::{devices, randn_on, values, widest_error};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::models::llama::{Cache, Llama, LlamaConfig};
use candle_fused::models::{qwen2, qwen3, save_quantized};
use candle_fused::nn::{LinearWeight, Projection};
use candle_fused::ops::{
    Activation, Epilogue, RopeAppend, RopeStyle, Rotation, linear, rms_norm_linear, rope_append,
};
use candle_fused::quant::{Quantization, Recipe, Scheme};
use candle_nn::VarBuilder;

fn said<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("accepted"),
        Err(error) => error.to_string(),
    }
}

/// A gate and what it gates in one matrix are what they are in two, dense and in blocks.
#[test]
fn gate_and_up_may_be_one_matrix() -> Result<()> {
    for device in devices() {
        let both = randn_on(&[160, 64], DType::F32, &Device::Cpu)?;
        let halves = [both.narrow(0, 0, 80)?, both.narrow(0, 80, 80)?];
        for dtype in [None, Some(GgmlDType::Q8_0), Some(GgmlDType::Q4_0)] {
            let weight = |w: &Tensor| -> Result<LinearWeight> {
                // Candle quantizes a view from the start of its storage.
                let w = w.force_contiguous()?;
                Ok(match dtype {
                    None => LinearWeight::Dense(w.to_device(&device)?),
                    Some(dtype) => {
                        LinearWeight::Quantized(QTensor::quantize_onto(&w, dtype, &device)?.into())
                    }
                })
            };
            // Candle's quantized products on a GPU read rows of 512 values, past the last row of these from memory
            // that holds anything.
            let plain = device.is_cpu() || dtype.is_none();
            let fusions = [Some(Fusion::all()), plain.then(Fusion::none)];
            for fusion in fusions.into_iter().flatten() {
                let joint = Projection::new(vec![weight(&both)?], None, fusion)?;
                let apart = vec![weight(&halves[0])?, weight(&halves[1])?];
                let apart = Projection::new(apart, None, fusion)?;
                for rows in [1, 5, 70] {
                    let x = randn_on(&[rows, 64], DType::F32, &device)?;
                    let of = |p: &Projection| p.forward_activated(&x, None, Activation::SwiGlu);
                    let (got, want) = (of(&joint)?, of(&apart)?);
                    assert_eq!(got.dims(), [rows, 80]);
                    let error = widest_error(&got, &values(&want)?)
                        .map_err(|e| e.context(format!("{dtype:?} {fusion} {rows}")))?;
                    assert!(error < 1e-5, "{dtype:?} {fusion} {rows}: {error:e}");
                }
            }
        }
    }
    Ok(())
}

/// Matrices that are no gate and what it gates, none at all, and transposed ones.
#[test]
fn matrices_that_cannot_be_meant_are_named() -> Result<()> {
    let ones = |dims: &[usize]| Tensor::ones(dims, DType::F32, &Device::Cpu);
    let (x, norm) = (ones(&[1, 8])?, ones(&[8])?);
    let swiglu = Epilogue {
        activation: Activation::SwiGlu,
        ..Default::default()
    };
    let plain = Epilogue::default();
    let [wide, narrow] = [ones(&[32, 8])?, ones(&[16, 8])?];
    let error = said(rms_norm_linear(&x, &norm, 0., &[&wide, &narrow], &swiglu));
    let expected = "rms_norm_linear: swiglu over matrices of [32, 16] rows, expected a gate";
    assert!(error.contains(expected), "{error}");
    let error = said(linear(&x, &ones(&[3, 8])?, &swiglu));
    assert!(error.contains("matrices of [3] rows"), "{error}");
    let error = said(linear(&x, &ones(&[0, 8])?, &plain));
    assert!(
        error.contains("weights[0] is [0, 8], expected at least one row"),
        "{error}"
    );
    let error = said(linear(&x, &ones(&[8, 3])?, &plain));
    assert!(error.contains("may be transposed"), "{error}");
    Ok(())
}

#[test]
fn rope_append_speaks_under_its_own_name() -> Result<()> {
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu);
    let (cos, sin) = (zeros(&[4, 4])?, zeros(&[4, 4])?);
    let append = |position, slot| RopeAppend {
        rotation: Rotation {
            cos: &cos,
            sin: &sin,
            position,
            style: RopeStyle::HalfSplit,
        },
        heads: 2,
        kv_heads: 1,
        slot,
        norms: None,
    };
    let cache = || zeros(&[1, 1, 16, 8]);
    let qkv = zeros(&[1, 1, 32])?;
    let run = |qkv: &Tensor, append: RopeAppend<'_>, k: &Tensor| -> Result<Tensor> {
        rope_append(qkv, &append, k, &cache()?)
    };
    for error in [
        said(run(&qkv, append(4, 0), &cache()?)),
        said(run(&qkv, append(0, 16), &cache()?)),
        said(run(&zeros(&[1, 1, 31])?, append(0, 0), &cache()?)),
        said(run(&qkv, append(0, 0), &zeros(&[1, 16, 8])?)),
    ] {
        assert!(error.starts_with("rope_append: "), "{error}");
    }
    let whole = |t: Tensor| t.to_dtype(DType::U32);
    let error = said(run(&whole(qkv.clone())?, append(0, 0), &cache()?));
    assert!(error.starts_with("rope_append: qkv is U32"), "{error}");
    let error = said(run(&qkv, append(0, 0), &whole(cache()?)?));
    assert!(error.starts_with("rope_append: k_cache is U32"), "{error}");
    Ok(())
}

#[test]
fn ids_and_dtypes_are_refused_early() -> Result<()> {
    let golden = Golden::open("llama_gqa_tied")?;
    let config = golden.config::<LlamaConfig>().into_config(false);
    let cpu = Device::Cpu;
    let llama = Llama::load(golden.weights(DType::F32)?, &config)?;
    let mut cache = Cache::new(true, DType::F32, &config, &cpu)?;
    let flat = Tensor::new(&[1u32, 2], &cpu)?;
    let error = said(llama.forward(&flat, 0, &mut cache));
    assert!(error.contains("input_ids: [2], expected [B, T]"), "{error}");
    let golden = Golden::open("qwen2_bias")?;
    let mut qwen = qwen2::Model::new(&golden.config(), golden.weights(DType::F32)?)?;
    let mask = Tensor::ones((1, 2), DType::F32, &cpu)?;
    let error = said(qwen.forward(&flat, 0, Some(&mask)));
    assert!(error.contains("input_ids: [2], expected [B, T]"), "{error}");
    let golden = Golden::open("qwen3_qknorm")?;
    let mut qwen = qwen3::ModelForCausalLM::new(&golden.config(), golden.weights(DType::F32)?)?;
    let error = said(qwen.forward(&flat, 0));
    assert!(error.contains("input_ids: [2], expected [B, T]"), "{error}");
    let error = said(qwen3::ModelForCausalLM::new(
        &golden.config(),
        golden.weights(DType::F64)?,
    ));
    assert!(
        error.contains("dtype: F64, expected f32, f16 or bf16"),
        "{error}"
    );
    Ok(())
}

/// A GPU's kernels have a widest head, the CPU and candle's own operations have none.
#[test]
fn heads_that_are_too_wide_are_refused_when_a_model_is_loaded() -> Result<()> {
    let golden = Golden::open("qwen3_qknorm")?;
    for device in devices() {
        let mut config: qwen3::Config = golden.config();
        config.head_dim = 1024;
        let load = |fusion| {
            let vb = VarBuilder::zeros(DType::F32, &device);
            qwen3::ModelForCausalLM::new_fused(&config, vb, fusion)
        };
        load(Fusion::none())?;
        let loaded = load(Fusion::all());
        if device.is_cpu() {
            loaded?;
            continue;
        }
        let error = said(loaded);
        assert!(
            error.contains("heads of 1024 values, expected 1 to"),
            "{error}"
        );
    }
    Ok(())
}

#[test]
fn a_quantized_file_points_to_its_loader() -> Result<()> {
    let golden = Golden::open("llama_gqa_tied")?;
    let config = golden.config::<LlamaConfig>().into_config(false);
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    let plain = Recipe::new(Quantization::Int8);
    for recipe in [plain.clone(), plain.with_embedding(Quantization::Int8)] {
        save_quantized(&config, golden.weights(DType::F32)?, &recipe, &path)?;
        let bytes = std::fs::read(&path)?;
        let vb = VarBuilder::from_buffered_safetensors(bytes, DType::F32, &Device::Cpu)?;
        let error = said(Llama::load(vb, &config));
        assert!(error.contains("`from_quantized`"), "{error}");
    }
    Ok(())
}

#[test]
fn recipes_say_what_they_cannot_do() -> Result<()> {
    let golden = Golden::open("llama_gqa_tied")?;
    let config = golden.config::<LlamaConfig>().into_config(false);
    let load = |recipe: Recipe| {
        Llama::load_quantized(golden.weights(DType::F32)?, &config, &recipe, Fusion::all())
    };
    let int8 = || Recipe::new(Quantization::Int8);
    for pattern in ["*.mlp.down", "model.layers.99.*", "down_proj.weight"] {
        let error = said(load(int8().with(pattern, None)));
        assert!(
            error.contains(&format!("the pattern `{pattern}` matches no matrix")),
            "{error}"
        );
        assert!(error.contains("mlp.down_proj.weight"), "{error}");
    }
    for pattern in [
        "*.down_proj.weight",
        "lm_head.weight",
        "model.embed_tokens.*",
        "*",
    ] {
        load(int8().with(pattern, None))?;
    }
    for (text, name) in [
        ("INT8", "int8"),
        ("Int4-G64-Z", "int4-g64-z"),
        ("int4_g64", "int4-g64"),
        ("TERNARY_ROW", "ternary-row"),
        ("q4_k", "q4k"),
        ("Q4_K", "q4k"),
        ("Q2_K", "q2k"),
        ("q3_k", "q3k"),
        ("Q80", "q8_0"),
    ] {
        assert_eq!(text.parse::<Quantization>()?.to_string(), name);
    }
    assert!(said("Q9_0".parse::<Quantization>()).contains("`Q9_0` is not one of"));
    let error = said("int4-g128".parse::<Scheme>()?.check(576));
    assert!(error.contains("write int4-g32 or int4-g64"), "{error}");
    let error = said("int4-g128-z".parse::<Quantization>()?.check(100));
    assert!(error.contains("int8 divides by any"), "{error}");
    let error = said("q4k".parse::<Quantization>()?.check(576));
    assert!(error.contains("write q4_0 or q5_0, or int8"), "{error}");
    Ok(())
}
