//! Devices without kernels of this crate: models and layers take candle's own operations, forced here on the CPU. A GPU
//! has kernels, and candle's quantized products there round activations otherwise than ours.

use crate::gguf_file::bytes;
use crate::golden::{Golden, relative_error};
use crate::linear::ACTIVATIONS;
use crate::subject::{ALL, dense, gguf};
use crate::support::{device, on_every_device, randn_on, values};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_fused::generation::Options;
use candle_fused::models::smol::quantized_smollm3;
use candle_fused::models::{phi3, quantized_qwen3};
use candle_fused::nn::kv_cache::RotatingKvCache;
use candle_fused::nn::{LayerNorm, Linear, Norm, Projection, RmsNorm, RotaryEmbedding};
use candle_fused::ops::{AttentionParams, RopeStyle};
use candle_fused::{Fusion, trace, with_fallback};

/// That nothing but candle's own operations ran, and that the trace says why.
fn told(calls: &trace::Calls) {
    assert!(calls.iter().count() > 0);
    for (call, _) in calls.iter() {
        assert_eq!(call.path, "candle: the fallback is forced", "{}", call.op);
    }
}

/// Sums of 64 values in another order, in f32. Gated products reach some hundreds.
fn close(got: &Tensor, want: &Tensor) -> Result<()> {
    assert_eq!(got.dims(), want.dims());
    for (a, b) in values(got)?.iter().zip(&values(want)?) {
        assert!((a - b).abs() < 1e-4 * (1. + b.abs()), "{a} for {b}");
    }
    Ok(())
}

#[test]
fn models_take_candles_operations_and_say_why() -> Result<()> {
    on_every_device(|| {
        if !device().is_cpu() {
            return Ok(());
        }
        for name in ALL {
            let golden = Golden::open(name)?;
            let ids = golden.input_ids()?;
            let file = bytes(&golden, GgmlDType::Q8_0)?;
            let mut fused = dense(&golden, DType::F32, Fusion::all())?;
            with_fallback(|| -> Result<()> {
                let mut model = dense(&golden, DType::F32, Fusion::all())?;
                let mut blocks = gguf(&golden, &file, Fusion::all())?;
                // Loaded there, and loaded elsewhere.
                for model in [&mut model, &mut fused] {
                    let (states, calls) = trace::capture(|| model.hidden_states(&ids, 0));
                    told(&calls);
                    let error = relative_error(&states?.1, &golden.outputs["logits"])?;
                    assert!(error < 1e-4, "{name}: {error:e}");
                }
                let plain = gguf(&golden, &file, Fusion::none())?.forward(&ids, 0)?;
                assert!(relative_error(&blocks.forward(&ids, 0)?, &plain)? < 1e-5);
                let options = Options {
                    positions: Some(64),
                    ..Default::default()
                };
                let mut generation = model.generation(&options)?;
                let prompt = ids.get(0)?.to_vec1::<u32>()?;
                let expected = golden.outputs["greedy"]
                    .to_dtype(DType::U32)?
                    .to_vec2::<u32>()?;
                assert_eq!(generation.extend(0, &prompt)?, expected[0][0]);
                Ok(())
            })?;
        }
        Ok(())
    })
}

#[test]
fn layers_take_candles_operations_and_say_why() -> Result<()> {
    let cpu = Device::Cpu;
    let x = randn_on(&[2, 3, 64], DType::F32, &cpu)?;
    let (weight, bias) = (
        randn_on(&[64], DType::F32, &cpu)?,
        randn_on(&[64], DType::F32, &cpu)?,
    );
    let matrix = |n| randn_on(&[n, 64], DType::F32, &cpu);
    let norm = Norm::from(RmsNorm::new(weight.clone(), 1e-5));
    let layers: [Box<dyn Module>; 3] = [
        Box::new(Linear::new(matrix(48)?, Some(bias.narrow(0, 0, 48)?))),
        Box::new(RmsNorm::new(weight.clone(), 1e-5)),
        Box::new(LayerNorm::new(weight, bias, 1e-5)),
    ];
    for layer in &layers {
        let want = layer.forward(&x)?;
        let (got, calls) = trace::capture(|| with_fallback(|| layer.forward(&x)));
        told(&calls);
        close(&got?, &want)?;
    }
    let gate_up = [
        Linear::new(matrix(32)?, None),
        Linear::new(matrix(32)?, None),
    ];
    let gate_up = Projection::from_linears(gate_up.to_vec())?;
    let square = Projection::from(Linear::new(matrix(64)?, None));
    for activation in ACTIVATIONS {
        for norm in [Some(&norm), None] {
            let run = || gate_up.forward_activated(&x, norm, activation);
            let (got, calls) = trace::capture(|| with_fallback(run));
            told(&calls);
            close(&got?, &run()?)?;
        }
    }
    let runs: [&dyn Fn() -> Result<Tensor>; 2] = [&|| square.forward_residual(&x, &x), &|| {
        Tensor::cat(&gate_up.forward_parts(&x, Some(&norm))?, 2)
    }];
    for run in runs {
        let (got, calls) = trace::capture(|| with_fallback(run));
        told(&calls);
        close(&got?, &run()?)?;
    }
    Ok(())
}

/// Queries and keys rotated from a position on.
type Rotate<'a> = &'a dyn Fn(&Tensor, &Tensor, usize) -> Result<(Tensor, Tensor)>;

#[test]
fn rotary_embeddings_take_candles_operations_and_say_why() -> Result<()> {
    let cpu = Device::Cpu;
    let table = |dims, style| RotaryEmbedding::with_theta(dims, 1e4, 64, style, &cpu);
    let half = table(16, RopeStyle::HalfSplit)?;
    // Dimensions past the tables are kept.
    let part = table(8, RopeStyle::Interleaved)?;
    let qwen = quantized_qwen3::RotaryEmbedding::new(DType::F32, 16, 64, 1e6, &cpu)?;
    let long = phi3::RotaryEmbedding::new(DType::F32, &phi3_config(), &cpu)?;
    let smol = |interleaved| {
        let config = smollm3_config();
        quantized_smollm3::RotaryEmbedding::new(DType::F32, &config, &cpu, interleaved)
    };
    let smol = [smol(false)?, smol(true)?];
    let all: [Rotate<'_>; 6] = [
        &|q, k, at| half.apply(q, k, at),
        &|q, k, at| part.apply(q, k, at),
        &|q, k, at| qwen.apply(q, k, at),
        &|q, k, at| long.apply_rotary_emb_qkv(q, k, at),
        &|q, k, at| smol[0].apply_rotary_emb(q, k, at),
        &|q, k, at| smol[1].apply_rotary_emb(q, k, at),
    ];
    // As a projection gives them: heads behind tokens.
    let heads = |n| randn_on(&[2, 3, n, 16], DType::F32, &cpu)?.transpose(1, 2);
    let (q, k) = (heads(4)?, heads(2)?);
    for rotate in all {
        // Within the first context length of Phi-3's, and past it.
        for position in [0, 30] {
            let want = rotate(&q, &k, position)?;
            let (got, calls) = trace::capture(|| with_fallback(|| rotate(&q, &k, position)));
            told(&calls);
            assert_eq!(calls.count("rope"), 2);
            let got = got?;
            close(&got.0, &want.0)?;
            close(&got.1, &want.1)?;
        }
        let refused = |q: &Tensor, position| {
            let rotated = with_fallback(|| rotate(q, &k, position));
            rotated.expect_err("accepted").to_string()
        };
        // As everywhere else.
        assert!(refused(&q, 1 << 40).contains("positions"));
        assert!(refused(&q.to_dtype(DType::U32)?, 0).contains("U32"));
    }
    Ok(())
}

fn phi3_config() -> phi3::Config {
    let config = r#"{"vocab_size": 32, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "max_position_embeddings": 64, "original_max_position_embeddings": 32,
        "rope_scaling": {"type": "longrope", "short_factor": [1, 1, 1, 1, 1, 1, 1, 1],
                         "long_factor": [2, 2, 3, 3, 4, 4, 5, 5]}}"#;
    serde_json::from_str(config).expect("a configuration")
}

fn smollm3_config() -> quantized_smollm3::QuantizedConfig {
    quantized_smollm3::QuantizedConfig {
        vocab_size: 32,
        hidden_size: 64,
        intermediate_size: 96,
        num_hidden_layers: 1,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 64,
        rope_theta: 1e4,
        rms_norm_eps: 1e-5,
        rope_dimension_count: 16,
        no_rope_layer_interval: None,
    }
}

#[test]
fn a_rotating_cache_takes_candles_operations_and_says_why() -> Result<()> {
    let cpu = Device::Cpu;
    for softcap in [None, Some(2.)] {
        let params = AttentionParams {
            scale: 0.25,
            softcap,
            ..Default::default()
        };
        let mut caches = [(); 2].map(|()| RotatingKvCache::new(2, 5));
        // A prompt, tokens, a chunk that passes the window's end, and one that is longer than the window.
        for tokens in [3, 1, 1, 3, 1, 7, 1] {
            let heads = |n| randn_on(&[2, n, tokens, 16], DType::F32, &cpu);
            let (q, k, v) = (heads(4)?, heads(2)?, heads(2)?);
            let [fused, plain] = &mut caches;
            let want = fused.attend(&q, &k, &v, &params)?;
            let (got, calls) =
                trace::capture(|| with_fallback(|| plain.attend(&q, &k, &v, &params)));
            told(&calls);
            assert_eq!(calls.count("flash_attention"), 1);
            close(&got?, &want)?;
        }
    }
    Ok(())
}
