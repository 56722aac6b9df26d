//! INT8, FP8, NVFP4, NF4, INT4 and ternary: products in every fused form, whole models, files, foreign layers.

use crate::golden::{Golden, relative_error};
use crate::linear::{ACTIVATIONS, error};
use crate::quant_linear::tolerance;
use crate::subject::{GOLDENS, Subject, dense, over};
use crate::support::{device, devices, on_every_device, randn, randn_on};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_fused::cpu::packed::PackedMatrix;
use candle_fused::models::llama::{Cache, Llama, LlamaConfig};
use candle_fused::models::{CausalLm, gpt_neox, qwen2, qwen3, save_quantized};
use candle_fused::ops::linear::reference;
use candle_fused::ops::{Epilogue, Prologue, Weight, quant_linear};
use candle_fused::quant::{self, Quantization, QuantizedFile, Recipe, Rounded, Scheme};
use candle_fused::{Fusion, nn, trace};
use candle_nn::VarBuilder;
use std::sync::{Arc, Mutex};

const SCHEMES: [&str; 10] = [
    "int8",
    "fp8",
    "fp8-block128",
    "int4-g32",
    "int4-g64-z",
    "int4-g128",
    "ternary-row",
    "ternary-g64",
    "nvfp4",
    "nf4",
];

/// A random matrix in a scheme, in the form that the device takes.
pub fn weight_on(rows: usize, cols: usize, scheme: Scheme, device: &Device) -> Result<Weight> {
    let values = randn(&[rows, cols], DType::F32)?.flatten_all()?.to_vec1()?;
    let codes = quant::quantize(&values, rows, cols, scheme)?;
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        let matrix = candle_fused::cuda::BlockMatrix::from_codes(&codes, device)?;
        return Ok(Weight::Blocks(Arc::new(matrix)));
    }
    assert!(device.is_cpu());
    Ok(Weight::Packed(Arc::new(PackedMatrix::from_codes(&codes)?)))
}

#[test]
fn products_in_every_fused_form_stay_within_the_error_of_their_activations() -> Result<()> {
    for device in devices() {
        for (i, name) in SCHEMES.into_iter().enumerate() {
            let scheme = name.parse()?;
            for (j, m) in [1, 2, 5, 8, 33].into_iter().enumerate() {
                let (k, n) = ([128, 384, 1536][(i + j) % 3], 36);
                let activation = ACTIVATIONS[(i + j) % ACTIVATIONS.len()];
                let dtype = [DType::F32, DType::BF16][j % 2];
                // Two matrices whose rows do not divide by 16, and for the GPU's sake of one format.
                let weights = [
                    weight_on(n, k, scheme, &device)?,
                    weight_on(n, k, scheme, &device)?,
                ];
                let x = randn_on(&[m, k], dtype, &device)?;
                let scale = randn_on(&[k], dtype, &device)?;
                let prologue = match j % 3 {
                    0 => Prologue::None,
                    1 => Prologue::RmsNorm {
                        weight: &scale,
                        eps: 1e-6,
                    },
                    _ => Prologue::LayerNorm {
                        weight: &scale,
                        bias: None,
                        eps: 1e-6,
                    },
                };
                let width = if activation.gate().is_some() {
                    n
                } else {
                    2 * n
                };
                let bias = randn_on(&[2 * n], dtype, &device)?;
                let residual = randn_on(&[m, width], dtype, &device)?;
                let epilogue = Epilogue {
                    bias: Some(&bias),
                    activation,
                    residuals: &[&residual],
                };
                let (got, calls) =
                    trace::capture(|| quant_linear(&x, prologue, &weights, &epilogue));
                let expected = reference(&x, prologue, &weights, &epilogue)?;
                let error = error(&got?, &expected)?;
                let unit = if dtype == DType::F32 { 1e-6 } else { 8e-3 };
                // Ternary weights meet activations of 8 bits on a GPU too, and NF4's values are rounded to bf16.
                let rounding = match name.starts_with("ternary") || name == "nf4" {
                    true => &Device::Cpu,
                    false => &device,
                };
                assert!(
                    error < 2. * tolerance(rounding, m) + unit,
                    "{device:?} {name} {m}x{k}: {error:e}"
                );
                assert!(calls.to_string().contains(name), "{calls}");
            }
        }
    }
    Ok(())
}

/// A golden model with its matrices quantized by `recipe`.
fn quantized(
    golden: &Golden,
    dtype: DType,
    recipe: &Recipe,
    fusion: Fusion,
) -> Result<Box<dyn Subject>> {
    quantized_over(golden, golden.weights(dtype)?, recipe, fusion)
}

/// The same with other weights.
pub fn quantized_over(
    golden: &Golden,
    vb: VarBuilder,
    recipe: &Recipe,
    fusion: Fusion,
) -> Result<Box<dyn Subject>> {
    let dtype = vb.dtype();
    Ok(match golden.model_type().as_str() {
        "llama" => {
            let config = golden.config::<LlamaConfig>().into_config(false);
            let cache = Cache::new(true, dtype, &config, &device())?;
            Box::new((Llama::load_quantized(vb, &config, recipe, fusion)?, cache))
        }
        "qwen2" => Box::new(CausalLm::<qwen2::Config>::new_quantized(
            &golden.config(),
            vb,
            recipe,
            fusion,
        )?),
        "qwen3" => Box::new(CausalLm::<qwen3::Config>::new_quantized(
            &golden.config(),
            vb,
            recipe,
            fusion,
        )?),
        _ => Box::new(CausalLm::<gpt_neox::Config>::new_quantized(
            &golden.config(),
            vb,
            recipe,
            fusion,
        )?),
    })
}

fn in_place(golden: &Golden, file: &QuantizedFile, dtype: DType) -> Result<Box<dyn Subject>> {
    let (device, fusion) = (device(), Fusion::all());
    Ok(match golden.model_type().as_str() {
        "llama" => {
            let config = golden.config::<LlamaConfig>().into_config(false);
            let cache = Cache::new(true, dtype, &config, &device)?;
            let llama = Llama::from_quantized(file, &config, dtype, &device, fusion)?;
            Box::new((llama, cache))
        }
        "qwen2" => Box::new(CausalLm::<qwen2::Config>::from_quantized(
            &golden.config(),
            file,
            dtype,
            &device,
            fusion,
        )?),
        "qwen3" => Box::new(CausalLm::<qwen3::Config>::from_quantized(
            &golden.config(),
            file,
            dtype,
            &device,
            fusion,
        )?),
        _ => Box::new(CausalLm::<gpt_neox::Config>::from_quantized(
            &golden.config(),
            file,
            dtype,
            &device,
            fusion,
        )?),
    })
}

fn save(golden: &Golden, recipe: &Recipe, path: &std::path::Path) -> Result<()> {
    let file = std::fs::read(golden.folder.join("model.safetensors"))?;
    let vb = VarBuilder::from_buffered_safetensors(file, DType::F32, &Device::Cpu)?;
    match golden.model_type().as_str() {
        "llama" => {
            let config = golden.config::<LlamaConfig>().into_config(false);
            save_quantized(&config, vb, recipe, path)
        }
        "qwen2" => save_quantized::<qwen2::Config>(&golden.config(), vb, recipe, path),
        "qwen3" => save_quantized::<qwen3::Config>(&golden.config(), vb, recipe, path),
        _ => save_quantized::<gpt_neox::Config>(&golden.config(), vb, recipe, path),
    }
}

pub fn logits(golden: &Golden, model: &mut dyn Subject) -> Result<Tensor> {
    Ok(model.hidden_states(&golden.input_ids()?, 0)?.1)
}

/// Weights and activations of 8 bits are each off by some 0.3 to 0.6 % of their deviation, and the
/// layers of these tiny models, drawn wide, multiply that; on a GPU a whole row of activations has one
/// scale.
#[test]
fn every_model_stays_near_its_golden_in_int8() -> Result<()> {
    on_every_device(|| {
        for name in GOLDENS {
            let golden = Golden::open(name)?;
            for fusion in [Fusion::all(), Fusion::none()] {
                let recipe = Recipe::new(Quantization::Int8).with_head(Quantization::Int8);
                let mut model = quantized(&golden, DType::F32, &recipe, fusion)?;
                let error =
                    relative_error(&logits(&golden, model.as_mut())?, &golden.outputs["logits"])?;
                let most = if device().is_cuda() { 7e-2 } else { 5e-2 };
                assert!(error < most, "{name} {fusion}: {error:e}");
            }
        }
        Ok(())
    })
}

/// With the same weights, quantized and turned back, in candle's own operations.
#[test]
fn quantized_models_are_what_their_weights_are_worth() -> Result<()> {
    on_every_device(|| {
        for name in ["llama3_rope", "qwen2_bias", "gpt_neox_parallel"] {
            let golden = Golden::open(name)?;
            for format in "int4-g32-z fp8 fp8-block128 nvfp4 ternary-row q4_1".split(' ') {
                let recipe = Recipe::new(format.parse()?);
                let of = |fusion| {
                    let mut model = quantized(&golden, DType::F32, &recipe, fusion)?;
                    logits(&golden, model.as_mut())
                };
                let error = relative_error(&of(Fusion::all())?, &of(Fusion::none())?)?;
                assert!(error < 8e-2, "{name} {format}: {error:e}");
            }
        }
        Ok(())
    })
}

#[test]
fn a_saved_model_is_used_where_it_is_mapped() -> Result<()> {
    let folder = tempfile::tempdir()?;
    on_every_device(|| {
        for (i, name) in GOLDENS.into_iter().enumerate() {
            let golden = Golden::open(name)?;
            let mut recipe = Recipe::new(Quantization::Int8)
                .with("*.0.*", Some("int4-g32-z".parse()?))
                .with("*.1.*att*", None);
            // Heads and tables of every kind.
            let format: Quantization = ["int4-g32", "fp8-block128", "nvfp4"][i / 2 % 3].parse()?;
            if i % 2 == 0 {
                recipe = recipe.with_head(format);
            }
            if i % 3 == 0 {
                recipe = recipe.with_embedding(format);
            }
            // Widths that do not divide.
            recipe = match name {
                "llama_gqa_tied" => Recipe::new(Quantization::Int8).with_head(format),
                "qwen2_bias" => recipe.with_balance(),
                _ => recipe,
            };
            let path = folder
                .path()
                .join(format!("{name}-{:?}", device().location()));
            save(&golden, &recipe, &path)?;
            // SAFETY: nobody else knows the file.
            let file = unsafe { QuantizedFile::open(&path)? };
            let mut loaded = in_place(&golden, &file, DType::F32)?;
            let mut direct = quantized(&golden, DType::F32, &recipe, Fusion::all())?;
            let (loaded, direct) = (
                logits(&golden, loaded.as_mut())?,
                logits(&golden, direct.as_mut())?,
            );
            assert_eq!(relative_error(&loaded, &direct)?, 0., "{name}");
            // candle's own layers load the same numbers out of it, but where a head is tied: they take
            // the embedding for it, whatever the head was quantized to.
            let config: serde_json::Value = golden.config();
            if config["tie_word_embeddings"] == true {
                continue;
            }
            let vb = VarBuilder::from_backend(Box::new(file), DType::F32, device());
            let mut plain = over(&golden, vb, Fusion::none())?;
            let plain = logits(&golden, plain.as_mut())?;
            let error = relative_error(&plain, &direct)?;
            // Of int8 activations, as above; rows in another order would be off by all there is.
            assert!(error < 0.1, "{name}: {error:e}");
        }
        Ok(())
    })
}

#[test]
fn the_mapped_bytes_are_the_matrix() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let golden = Golden::open("qwen3_qknorm")?;
    let path = folder.path().join("model.safetensors");
    save(&golden, &Recipe::new(Quantization::Int8), &path)?;
    // SAFETY: nobody else knows the file.
    let file = unsafe { QuantizedFile::open(&path)? };
    let name = "model.layers.0.mlp.up_proj.weight";
    let (first, second) = (file.matrix(name, 160, 64)?, file.matrix(name, 160, 64)?);
    // No copy: both are the same memory, and that on a cache line.
    assert_eq!(first.bytes().as_ptr(), second.bytes().as_ptr());
    assert_eq!(first.bytes().as_ptr().align_offset(64), 0);
    let bytes = std::fs::read(&path)?;
    let inside = bytes.windows(256).any(|w| w == &first.bytes()[..256]);
    assert!(inside, "the file does not hold the matrix as it is used");
    // candle reads the file too, as bytes.
    let plain = candle_core::safetensors::load(&path, &Device::Cpu)?;
    assert_eq!(plain[name].dims(), [first.bytes().len()]);
    assert_eq!(first.to_codes()?, second.to_codes()?);
    assert!(file.matrix(name, 64, 160).is_err());
    assert!(file.matrix("model.norm.weight", 64, 1).is_err());
    Ok(())
}

#[test]
fn wrong_files_are_named() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let golden = Golden::open("qwen3_qknorm")?;
    let path = folder.path().join("model.safetensors");
    save(&golden, &Recipe::new(Quantization::Int8), &path)?;
    let good = std::fs::read(&path)?;
    let refused = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let text = String::from_utf8_lossy(&good[..20_000]).into_owned();
        let at = text.find(from).expect("the text is in the header");
        let mut bytes = good.clone();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        std::fs::write(&path, bytes).unwrap();
        // SAFETY: nobody else knows the file.
        unsafe { QuantizedFile::open(&path) }
            .unwrap_err()
            .to_string()
    };
    assert!(refused("layout\":\"2\"", "layout\":\"7\"").contains("layout is `7`"));
    let error = refused("int8 160x64", "int8 161x64");
    assert!(error.contains("tensor `model.layers."), "{error}");
    let error = refused("int8 160x64", "int9 160x64");
    assert!(
        error.contains("int9 160x64") && error.contains("tensor `"),
        "{error}"
    );
    let error = refused("candle_fused.model.layers.0", "candle_fused.model.layers.9");
    assert!(error.contains("model.layers."), "{error}");
    std::fs::write(&path, &good[..good.len() - 64])?;
    // SAFETY: nobody else knows the file.
    assert!(unsafe { QuantizedFile::open(&path) }.is_err());
    let plain = golden.folder.join("model.safetensors");
    // SAFETY: nobody changes the golden.
    let error = unsafe { QuantizedFile::open(plain) }.unwrap_err();
    assert!(error.to_string().contains("no quantized model"), "{error}");
    let recipe = Recipe::new(Quantization::Gguf(candle_core::quantized::GgmlDType::Q8_0));
    let error = save(&golden, &recipe, &path).unwrap_err().to_string();
    assert!(error.contains("GGUF"), "{error}");
    Ok(())
}

/// Sizes whose bytes come out right only where the arithmetic wraps.
#[test]
fn sizes_that_wrap_are_refused() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    for (described, len) in [
        ("int8 16x1152921504573292544", 0),
        ("int8 18446744073709551615x32", 0),
        ("int4-g128 1152921504606846976x1152921504606846976", 0),
        ("int8 48x32 heads=6148914691236517206", 3 * (64 + 512)),
    ] {
        let header = serde_json::json!({
            "__metadata__": { "candle_fused.layout": "2", "candle_fused.w": described },
            "w": { "dtype": "U8", "shape": [len], "data_offsets": [0, len] },
        });
        let header = header.to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes().chain(std::iter::repeat_n(0, len)));
        std::fs::write(&path, bytes)?;
        // SAFETY: nobody else knows the file.
        let Err(error) = (unsafe { QuantizedFile::open(&path) }) else {
            panic!("{described}: opened");
        };
        assert!(error.to_string().contains("tensor `w`"), "{error}");
    }
    Ok(())
}

#[test]
fn tensors_that_cannot_be_quantized_are_named() -> Result<()> {
    let golden = Golden::open("qwen3_qknorm")?;
    let load = |vb, format: &str| {
        let recipe = Recipe::new(format.parse()?);
        CausalLm::<qwen3::Config>::new_quantized(&golden.config(), vb, &recipe, Fusion::all())
    };
    let error = load(golden.weights(DType::F32)?, "int4-g128")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("self_attn.q_proj.weight") && error.contains("64"),
        "{error}"
    );
    let error = load(golden.weights(DType::F32)?, "q6k")
        .unwrap_err()
        .to_string();
    assert!(error.contains("self_attn.q_proj.weight"), "{error}");
    let file = golden.folder.join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(file, &Device::Cpu)?;
    let name = "model.layers.1.mlp.up_proj.weight";
    let nan = (&tensors[name] * f64::NAN)?;
    tensors.insert(name.to_owned(), nan);
    for format in ["int8", "q8_0"] {
        let vb = VarBuilder::from_tensors(tensors.clone(), DType::F32, &Device::Cpu);
        let error = load(vb, format).unwrap_err().to_string();
        assert!(
            error.contains(name) && error.contains("row 0, column 0"),
            "{error}"
        );
    }
    Ok(())
}

/// Heads and tables in every combination; a tied embedding is what it was.
#[test]
fn tied_embeddings_stay_intact() -> Result<()> {
    let golden = Golden::open("llama_gqa_tied")?;
    let plain = dense(&golden, DType::F32, Fusion::all())?
        .hidden_states(&golden.input_ids()?, 0)?
        .0;
    let recipe = Recipe::new(Quantization::Int8).with_head(Quantization::Int8);
    let mut model = quantized(&golden, DType::F32, &recipe, Fusion::all())?;
    let states = model.hidden_states(&golden.input_ids()?, 0)?.0;
    assert_eq!(relative_error(&states[0], &plain[0])?, 0.);
    for dtype in [DType::F32, DType::BF16] {
        let recipe = recipe.clone().with_embedding(Quantization::Int8);
        let mut model = quantized(&golden, dtype, &recipe, Fusion::all())?;
        let (states, logits) = model.hidden_states(&golden.input_ids()?, 0)?;
        let error = relative_error(&states[0], &plain[0])?;
        assert!(error > 0. && error < 1e-2, "{dtype:?}: {error:e}");
        assert!(relative_error(&logits, &golden.outputs["logits"])? < 6e-2);
    }
    Ok(())
}

#[test]
fn progress_names_every_matrix() -> Result<()> {
    for name in GOLDENS {
        let golden = Golden::open(name)?;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let total = Arc::new(Mutex::new(0));
        let (heard, counted) = (seen.clone(), total.clone());
        let recipe = Recipe::new(Quantization::Int8).with_progress(move |p| {
            let mut seen = heard.lock().unwrap();
            seen.push(p.tensor.to_owned());
            assert_eq!(p.done, seen.len());
            *counted.lock().unwrap() = p.total;
        });
        quantized(&golden, DType::F32, &recipe, Fusion::all())?;
        assert_eq!(*total.lock().unwrap(), seen.lock().unwrap().len(), "{name}");
        let seen = seen.lock().unwrap();
        let file = golden.folder.join("model.safetensors");
        let tensors = candle_core::safetensors::load(file, &Device::Cpu)?;
        let matrices = tensors.values().filter(|t| t.rank() == 2).count();
        assert_eq!(seen.len(), matrices, "{name}: {seen:?}");
    }
    Ok(())
}

#[test]
fn foreign_layers_are_quantized() -> Result<()> {
    on_every_device(|| {
        let device = device();
        let weight = randn_on(&[40, 128], DType::F32, &device)?;
        let bias = randn_on(&[40], DType::F32, &device)?;
        let x = randn_on(&[3, 128], DType::F32, &device)?;
        let layer = candle_nn::Linear::new(weight.clone(), Some(bias));
        let expected = layer.forward(&x)?;
        let ours = quant::quantize_linear(layer, Scheme::Int8)?;
        assert!(ours.is_quantized() && ours.weight().dims() == [0, 128]);
        let error = relative_error(&ours.forward(&x)?, &expected)?;
        assert!(error < 2e-2, "{error:e}");
        // Joined with another, as q, k and v are.
        let plain = nn::Linear::new(weight.clone(), ours.bias().cloned());
        let both = nn::Projection::from_linears(vec![ours, plain])?.forward(&x)?;
        assert_eq!(both.dims(), [3, 80]);
        assert!(relative_error(&both.narrow(1, 40, 40)?, &expected)? < 1e-5);
        // What the numbers are worth, for layers that hold tensors.
        let tensors = std::collections::HashMap::from([("a.weight".to_owned(), weight.clone())]);
        let rounded = Rounded::new(Box::new(tensors), Recipe::new("int4-g32".parse()?));
        let vb = VarBuilder::from_backend(Box::new(rounded), DType::F32, device.clone());
        let layer = candle_nn::linear_no_bias(128, 40, vb.pp("a"))?;
        let error = relative_error(layer.weight(), &weight)?;
        assert!(error > 1e-3 && error < 0.1, "{error:e}");
        Ok(())
    })
}
