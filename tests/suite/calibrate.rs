//! Models quantized by what a text makes of them.

use crate::golden::{Golden, relative_error};
use crate::subject::ALL;
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::models::llama::LlamaConfig;
use candle_fused::models::smol::smollm3;
use candle_fused::models::{
    Architecture, Calibration, CausalLm, Checkpoint, calibrate, gpt_neox, mistral, phi3, qwen2,
    qwen3, save_compressed_tensors, save_quantized,
};
use candle_fused::quant::gptq::Options;
use candle_fused::quant::{Quantization, QuantizedFile, Recipe};
use candle_nn::VarBuilder;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Runs `$body` with the configuration of a golden model.
macro_rules! with_config {
    ($golden:expr, $config:ident => $body:expr) => {
        match $golden.model_type().as_str() {
            "llama" => {
                let $config = $golden.config::<LlamaConfig>().into_config(false);
                $body
            }
            "qwen2" => with_config!(@ qwen2::Config, $golden, $config => $body),
            "qwen3" => with_config!(@ qwen3::Config, $golden, $config => $body),
            "gpt_neox" => with_config!(@ gpt_neox::Config, $golden, $config => $body),
            "mistral" => with_config!(@ mistral::Config, $golden, $config => $body),
            "phi3" => with_config!(@ phi3::Config, $golden, $config => $body),
            "smollm3" => with_config!(@ smollm3::Config, $golden, $config => $body),
            other => panic!("no model is called {other}"),
        }
    };
    (@ $kind:ty, $golden:expr, $config:ident => $body:expr) => {{
        let $config: $kind = $golden.config();
        $body
    }};
}

fn weights(golden: &Golden) -> Result<VarBuilder<'static>> {
    let file = std::fs::read(golden.folder.join("model.safetensors"))?;
    VarBuilder::from_buffered_safetensors(file, DType::F32, &Device::Cpu)
}

fn text(count: usize, vocab: u32) -> Vec<u32> {
    let mut random = StdRng::seed_from_u64(7);
    (0..count).map(|_| random.random_range(0..vocab)).collect()
}

fn recipe(name: &str) -> Result<Recipe> {
    Ok(Recipe::new(name.parse()?))
}

/// A width of 176 does not divide by 32.
fn narrow(golden: &Golden) -> Result<Recipe> {
    let recipe = recipe("int4-g32")?;
    Ok(match golden.model_type().as_str() {
        "llama" => recipe.with("*.down_proj.weight", Some(Quantization::Int8)),
        _ => recipe,
    })
}

/// The logits of a model whose matrices are quantized, multiplied at what they are worth.
fn logits<C: Architecture>(
    config: &C,
    vb: VarBuilder,
    recipe: &Recipe,
    ids: &[u32],
) -> Result<Tensor> {
    let mut model = CausalLm::new_quantized(config, vb, recipe, Fusion::none())?;
    let ids = Tensor::from_slice(ids, (ids.len() / 64, 64), &Device::Cpu)?;
    Ok(model.hidden_states(&ids, 0)?.1)
}

#[test]
fn every_family_comes_nearer_to_itself_than_with_the_nearest_codes() -> Result<()> {
    fn check<C: Architecture>(golden: &Golden, config: &C) -> Result<f64> {
        let vb = weights(golden)?;
        // Few tokens, so that inputs have much in common.
        let ids = text(64 * 64, 12);
        let recipe = narrow(golden)?;
        let calibrated = calibrate(config, vb.clone(), &recipe, &Calibration::new(&ids, 64)?)?;
        // Another text than the one it has seen.
        let others = &text(3 * ids.len(), 12)[2 * ids.len()..];
        let of = |recipe: &Recipe| logits(config, vb.clone(), recipe, others);
        let exact = of(&Recipe::default())?;
        let nearest = relative_error(&of(&recipe)?, &exact)?;
        Ok(relative_error(&of(&calibrated)?, &exact)? / nearest)
    }
    for name in ALL {
        let golden = Golden::open(name)?;
        let share = with_config!(golden, config => check(&golden, &config))?;
        assert!(share < 0.8, "{name}: {share}");
    }
    Ok(())
}

/// The bytes of the saved model's tensors, and the layers that were heard of.
fn saved(golden: &Golden, folder: Option<&Path>, stop: usize) -> Result<(Vec<u8>, usize)> {
    let config = golden.config::<LlamaConfig>().into_config(false);
    let seen = Arc::new(Mutex::new(std::collections::BTreeSet::new()));
    let hears = Arc::clone(&seen);
    let mut calibration = Calibration::new(&text(640, 256), 64)?.with_progress(move |at| {
        assert!(at.done <= at.total && at.layer < at.layers);
        hears.lock().expect("no panic").insert(at.layer);
        assert!(at.layer < stop, "stopped");
    });
    if let Some(folder) = folder {
        calibration = calibration.with_folder(folder);
    }
    let vb = weights(golden)?;
    let recipe = calibrate(&config, vb.clone(), &narrow(golden)?, &calibration)?;
    let target = tempfile::tempdir()?;
    let path = target.path().join("model.safetensors");
    save_quantized(&config, vb, &recipe, &path)?;
    let layers = seen.lock().expect("no panic").len();
    let bytes = std::fs::read(path)?;
    // The header's entries are in no order.
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"));
    Ok((bytes[8 + header as usize..].to_vec(), layers))
}

#[test]
fn a_calibration_that_was_stopped_goes_on() -> Result<()> {
    let golden = Golden::open("llama_gqa_tied")?;
    let (whole, layers) = saved(&golden, None, usize::MAX)?;
    assert_eq!(layers, 3);
    let folder = tempfile::tempdir()?;
    let folder = folder.path().join("calibration");
    // It is stopped in the second layer, then in the third, and then ends.
    for stop in [1, 2] {
        let stopped = catch_unwind(AssertUnwindSafe(|| saved(&golden, Some(&folder), stop)));
        assert!(stopped.is_err());
        assert!(
            folder
                .join(format!("layer-{}.safetensors", stop - 1))
                .exists()
        );
        assert!(!folder.join(format!("layer-{stop}.safetensors")).exists());
    }
    assert!(saved(&golden, Some(&folder), usize::MAX)?.0 == whole);
    // All of it is there, and is found again.
    assert!(saved(&golden, Some(&folder), usize::MAX)?.0 == whole);
    // A layer that is damaged, or another's.
    let layer = folder.join("layer-1.safetensors");
    let bytes = std::fs::read(&layer)?;
    std::fs::write(&layer, &bytes[..bytes.len() / 2])?;
    let error = saved(&golden, Some(&folder), usize::MAX).expect_err("cut short");
    assert!(error.to_string().contains("layer-1.safetensors"), "{error}");
    std::fs::copy(folder.join("layer-0.safetensors"), &layer)?;
    assert!(saved(&golden, Some(&folder), usize::MAX)?.0 == whole);
    Ok(())
}

#[test]
fn a_folder_of_another_calibration_is_refused() -> Result<()> {
    let golden = Golden::open("llama_gqa_tied")?;
    let config = golden.config::<LlamaConfig>().into_config(false);
    let folder = tempfile::tempdir()?;
    let run = |ids: &[u32], window, options, recipe: &Recipe| {
        let calibration = Calibration::new(ids, window)?
            .with_options(options)
            .with_folder(folder.path());
        calibrate(&config, weights(&golden)?, recipe, &calibration).map(drop)
    };
    let (ids, options, recipe) = (text(256, 256), Options::default(), recipe("int8")?);
    run(&ids, 64, options, &recipe)?;
    run(&ids, 64, options, &recipe)?;
    let other = Options {
        damping: 0.5,
        ..options
    };
    let others: Vec<u32> = ids.iter().rev().copied().collect();
    let balanced = recipe.clone().with_balance();
    for (result, why) in [
        (run(&ids, 32, options, &recipe), "window is 64, expected 32"),
        (run(&ids, 64, other, &recipe), "damping: 0.01"),
        (
            run(&ids[..192], 64, options, &recipe),
            "tokens is 256, expected 192",
        ),
        (run(&others, 64, options, &recipe), "text is"),
        (run(&ids, 64, options, &balanced), "balanced: false"),
    ] {
        let error = result.expect_err(why).to_string();
        assert!(
            error.contains(why) && error.contains("calibration.json"),
            "{error}"
        );
    }
    Ok(())
}

#[test]
fn what_a_model_cannot_take_is_refused() -> Result<()> {
    let golden = Golden::open("llama_gqa_tied")?;
    let config = golden.config::<LlamaConfig>().into_config(false);
    let heard = Arc::new(AtomicUsize::new(0));
    let refused = |vb: VarBuilder, recipe: &Recipe, calibration: Result<Calibration>, why: &str| {
        let hears = Arc::clone(&heard);
        let result = calibration.and_then(|calibration| {
            let calibration = calibration.with_progress(move |_| {
                hears.fetch_add(1, Ordering::Relaxed);
            });
            calibrate(&config, vb, recipe, &calibration)
        });
        let error = result.expect_err(why).to_string();
        assert!(error.contains(why), "`{error}` does not say `{why}`");
    };
    let (vb, int8) = (weights(&golden)?, recipe("int8")?);
    let ids = text(640, 256);
    let fits = || Calibration::new(&ids, 64);
    let calibration = Calibration::new(&[], 64);
    refused(vb.clone(), &int8, calibration, "calibration: 0 tokens");
    refused(
        vb.clone(),
        &int8,
        Calibration::new(&ids, 641),
        "640 tokens in windows of 641",
    );
    refused(vb.clone(), &int8, Calibration::new(&ids, 0), "windows of 0");
    refused(
        vb.clone(),
        &int8,
        Calibration::new(&ids, 600),
        "context length is 512",
    );
    refused(
        vb.clone(),
        &int8,
        Calibration::new(&[256; 64], 64),
        "token 256",
    );
    let little = fits()?.with_memory(100 * 512);
    refused(vb.clone(), &int8, Ok(little), "give 100 tokens");
    let options = Options {
        damping: -1.,
        ..Options::default()
    };
    refused(
        vb.clone(),
        &int8,
        Ok(fits()?.with_options(options)),
        "damping: -1",
    );
    // 176 does not divide by 32.
    refused(
        vb.clone(),
        &recipe("int4-g32")?,
        fits(),
        "mlp.down_proj.weight",
    );
    let typo = int8.clone().with("*.dwon.*", None);
    refused(vb, &typo, fits(), "*.dwon.*");
    assert_eq!(heard.load(Ordering::Relaxed), 0, "nothing was begun");
    Ok(())
}

#[test]
fn numbers_that_are_none_are_refused() -> Result<()> {
    let golden = Golden::open("llama_gqa_tied")?;
    let config = golden.config::<LlamaConfig>().into_config(false);
    let calibration = Calibration::new(&text(640, 256), 64)?;
    // Weights that are no numbers, and an activation that becomes none.
    let path = golden.folder.join("model.safetensors");
    for (name, value, why) in [
        (
            "model.layers.1.mlp.up_proj.weight",
            f32::NAN,
            "layers.1.mlp.up_proj.weight",
        ),
        (
            "model.layers.0.input_layernorm.weight",
            f32::INFINITY,
            "layers.0.self_attn.q_proj",
        ),
    ] {
        let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu)?;
        let tensor = tensors.get_mut(name).expect("a tensor of the model");
        *tensor = Tensor::full(value, tensor.dims(), &Device::Cpu)?;
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let error = calibrate(&config, vb, &recipe("int8")?, &calibration);
        let error = error.expect_err(why).to_string();
        assert!(error.contains(why), "`{error}` does not say `{why}`");
    }
    Ok(())
}

/// In our own layout and in that of compressed-tensors, the matrices are those of the model quantized at load, to the bit.
#[test]
fn what_is_saved_is_read_back() -> Result<()> {
    fn check<C: Architecture>(golden: &Golden, config: &C) -> Result<()> {
        let vb = weights(golden)?;
        let ids = text(640, 128);
        let recipe = narrow(golden)?.with_balance();
        let recipe = calibrate(config, vb.clone(), &recipe, &Calibration::new(&ids, 64)?)?;
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("model.safetensors");
        let fusion = Fusion::all();
        let logits = |mut model: CausalLm<C>| {
            let ids = Tensor::from_slice(&ids[..64], (1, 64), &Device::Cpu)?;
            let (_, logits) = model.hidden_states(&ids, 0)?;
            logits.flatten_all()?.to_vec1::<f32>()
        };
        let made = logits(CausalLm::new_quantized(
            config,
            vb.clone(),
            &recipe,
            fusion,
        )?)?;
        save_quantized(config, vb.clone(), &recipe, &path)?;
        // SAFETY: nobody changes the file.
        let file = unsafe { QuantizedFile::open(&path) }?;
        let own = CausalLm::from_quantized(config, &file, DType::F32, &Device::Cpu, fusion)?;
        assert_eq!(logits(own)?, made);
        let path = folder.path().join("compressed.safetensors");
        let written = save_compressed_tensors(config, vb, &recipe, &path)?;
        let text = format!(r#"{{"quantization_config": {written}}}"#);
        let saved = Checkpoint::open(&[path], &text)?;
        let read = CausalLm::new(config, saved.var_builder(DType::F32, &Device::Cpu))?;
        assert_eq!(logits(read)?, made);
        Ok(())
    }
    for name in ["llama_gqa_tied", "qwen3_qknorm", "gpt_neox_parallel"] {
        let golden = Golden::open(name)?;
        with_config!(golden, config => check(&golden, &config))?;
    }
    Ok(())
}

#[test]
fn matrices_of_another_model_or_format_are_refused() -> Result<()> {
    let golden = Golden::open("qwen3_qknorm")?;
    let config: qwen3::Config = golden.config();
    let calibration = Calibration::new(&text(640, 256), 64)?;
    let calibrated = calibrate(&config, weights(&golden)?, &recipe("int8")?, &calibration)?;
    let first = "model.layers.0.self_attn.q_proj.weight";
    let changed = calibrated.clone().with(first, Some("int4-g32".parse()?));
    let (vb, fusion) = (weights(&golden)?, Fusion::all());
    let error = CausalLm::new_quantized(&config, vb.clone(), &changed, fusion);
    let error = error.expect_err("another format").to_string();
    assert!(
        error.contains(first) && error.contains("expected int4-g32"),
        "{error}"
    );
    // One that is left as it is now.
    let dense = calibrated.with(first, None);
    CausalLm::new_quantized(&config, vb, &dense, fusion).map(drop)
}
