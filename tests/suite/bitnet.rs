//! BitNet against transformers' own layers in float64, which round their inputs to 8 bits of each token.

use crate::checkpoints::Model;
use crate::per_token::apart;
use crate::quant_schemes::weight_on;
use crate::support::{device, on_every_device, randn_on};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::generation::{self, Generation};
use candle_fused::models::bitnet::{Config, ModelForCausalLM};
use candle_fused::models::{Checkpoint, llama};
use candle_fused::ops::linear::reference;
use candle_fused::ops::{Activation, Epilogue, Prologue, Weight, quant_linear};
use candle_fused::serving::{self, Engine, Request};
use candle_fused::{ActivationBits, Fusion};

const MODELS: [&str; 3] = ["bitnet_offline", "bitnet_online", "bitnet_bitlinear"];

fn load(name: &'static str, dtype: DType, fusion: Fusion) -> Result<ModelForCausalLM> {
    let model = Model::open(name)?;
    ModelForCausalLM::new_fused(&model.read::<Config>(), model.weights(dtype)?, fusion)
}

/// Packed weights are transformers' to the bit. Those of numbers have the mean magnitude as their scale, which is a sum
/// in another order.
#[test]
fn weights_are_those_of_transformers() -> Result<()> {
    let name = "model.layers.0.self_attn.q_proj.weight";
    for model in MODELS {
        let opened = Model::open(model)?;
        let own = opened.weights(DType::F32)?.get((128, 128), name)?;
        let expected = opened.golden()?["q_proj"].to_device(&device())?;
        let rows = own.flatten_all()?.to_vec1::<f32>()?;
        let expected = expected.flatten_all()?.to_vec1::<f32>()?;
        let ulps = if model == "bitnet_online" { 2 } else { 0 };
        for (a, b) in rows.iter().zip(&expected) {
            let apart = a.abs().to_bits().abs_diff(b.abs().to_bits());
            let same = apart <= ulps && (*a == 0. || a.signum() == b.signum());
            assert!(same, "{model}: {a} {b}");
        }
        assert!(expected.contains(&0.), "{model}");
    }
    Ok(())
}

/// In f32. On the CPU only its own roundings are left; an input that falls to another step would be a hundred times as
/// much. On a GPU more than eight rows of x are rounded to bf16 in front of the tensor cores, which makes inputs of the
/// next product fall so.
fn limit() -> f64 {
    if device().is_cpu() { 1e-5 } else { 4e-2 }
}

/// The models round where the reference does.
#[test]
fn logits_are_those_of_rounded_inputs() -> Result<()> {
    on_every_device(|| {
        for name in MODELS {
            let model = Model::open(name)?;
            let error = |dtype, fusion| model.error(model.weights(dtype)?, fusion);
            let fused = error(DType::F32, Fusion::all())?;
            assert!(fused < limit(), "{name}: {fused:e}");
            // Without the fused products of quantized weights, their numbers in dense ones.
            let dense = Fusion {
                quant_linear: false,
                ..Fusion::all()
            };
            let dense = error(DType::F32, dense)?;
            assert!(dense < limit(), "{name}: {dense:e} with dense products");
            for dtype in [DType::F16, DType::BF16] {
                let half = error(dtype, Fusion::all())?;
                assert!(half < 4e-2, "{name} in {dtype:?}: {half:e}");
            }
        }
        Ok(())
    })
}

/// Other bits than the trained ones are another model, which is had where it is asked for.
#[test]
fn other_bits_are_had_where_they_are_asked_for() -> Result<()> {
    let model = Model::open("bitnet_bitlinear")?;
    let error = |activations| {
        let fusion = Fusion {
            activations,
            ..Fusion::all()
        };
        model.error(model.weights(DType::F32)?, fusion)
    };
    let [auto, trained, fine] = [
        ActivationBits::Auto,
        ActivationBits::PerToken8,
        ActivationBits::Bits16,
    ]
    .map(error);
    let fine = fine?;
    assert_eq!(auto?, trained?);
    assert!((1e-4..0.1).contains(&fine), "{fine:e}");
    Ok(())
}

/// The tokens that float64 goes on with, by the token loop and by the engine.
#[test]
fn tokens_are_those_of_transformers() -> Result<()> {
    on_every_device(|| {
        for name in MODELS {
            let golden = Model::open(name)?.golden()?;
            let ids = golden["prompt"].to_dtype(DType::U32)?;
            let prompt = ids.to_vec2::<u32>()?.swap_remove(0);
            let next = golden["next"].to_dtype(DType::U32)?;
            let next = next.flatten_all()?.to_vec1::<u32>()?;
            let model = load(name, DType::F32, Fusion::all())?;

            let options = generation::Options {
                positions: Some(64),
                ..Default::default()
            };
            let mut generation = Generation::new(&model, &options)?;
            let mut tokens = vec![generation.extend(0, &prompt)?];
            while tokens.len() < next.len() {
                tokens.extend(generation.step()?[0]);
            }
            assert_eq!(tokens, next, "{name}");

            let options = serving::Options {
                sequences: 2,
                positions: Some(64),
                ..Default::default()
            };
            let mut engine = Engine::new(&model, &options)?;
            let request = |prompt: &[u32]| Request {
                max_tokens: next.len(),
                ..Request::new(prompt)
            };
            let first = engine.submit(request(&prompt))?;
            engine.submit(request(&prompt[..4]))?;
            let mut tokens = Vec::new();
            while !engine.is_idle() {
                let outputs = engine.step()?;
                tokens.extend(
                    outputs
                        .iter()
                        .filter(|o| o.id == first)
                        .flat_map(|o| o.token),
                );
            }
            assert_eq!(tokens, next, "{name}, engine");
        }
        Ok(())
    })
}

/// Fusion by fusion, the model is the same.
#[test]
fn every_fusion_gives_the_same_model() -> Result<()> {
    on_every_device(|| {
        let model = Model::open("bitnet_online")?;
        for name in Fusion::NAMES {
            let error = model.error(model.weights(DType::F32)?, name.parse()?)?;
            assert!(error < limit(), "{name}: {error:e}");
        }
        Ok(())
    })
}

#[test]
fn what_cannot_be_had_is_named() -> Result<()> {
    let model = Model::open("bitnet_offline")?;
    // A Llama has no norms there.
    let text = r#"{"vocab_size": 64, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
                   "max_position_embeddings": 128, "tie_word_embeddings": true}"#;
    let config: llama::LlamaConfig = serde_json::from_str(text).expect("a configuration");
    let vb = model.weights(DType::F32)?;
    let error = llama::Llama::load(vb, &config.into_config(false)).unwrap_err();
    assert!(error.to_string().contains("attn_sub_norm"), "{error}");

    let config = Config {
        hidden_act: candle_nn::Activation::Gelu,
        ..model.read()
    };
    let error = ModelForCausalLM::new(&config, model.weights(DType::F32)?).unwrap_err();
    assert!(
        error.to_string().contains("expected relu2 or silu"),
        "{error}"
    );

    // One layer, damaged in each way.
    let u8s = |values: &[u8], shape: (usize, usize)| {
        Tensor::from_slice(values, shape, &Device::Cpu).map(|t| ("weight", t))
    };
    let scale = |n: usize| Tensor::ones(n, DType::F32, &Device::Cpu).map(|t| ("weight_scale", t));
    for (tensors, said) in [
        ([u8s(&[0b11; 8], (1, 8))?, scale(1)?], "expected -1, 0 or 1"),
        (
            [u8s(&[1; 16], (2, 8))?, scale(1)?],
            "weight has shape [2, 8]",
        ),
        (
            [u8s(&[1; 8], (1, 8))?, scale(2)?],
            "weight_scale has shape [2]",
        ),
    ] {
        let error = read(&tensors).unwrap_err();
        assert!(error.to_string().contains(said), "{error}");
    }
    let ternary = read(&[u8s(&[0b10_01_00_01; 8], (1, 8))?, scale(1)?])?;
    let column = ternary.narrow(1, 3, 1)?.flatten_all()?;
    assert_eq!(column.to_vec1::<f32>()?, [0., -1., 0., 1.]);
    Ok(())
}

/// The matrix `[4, 8]` of a layer that these tensors are.
fn read(tensors: &[(&str, Tensor)]) -> Result<Tensor> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    let named = tensors
        .iter()
        .map(|(part, t)| (format!("layer.{part}"), t.clone()));
    candle_core::safetensors::save(&named.collect(), &path)?;
    let config = r#"{"quantization_config": {"quant_method": "bitnet"}}"#;
    let checkpoint = Checkpoint::open(&[path], config)?;
    let vb = checkpoint.var_builder(DType::F32, &Device::Cpu);
    vb.get((4, 8), "layer.weight")
}

/// In products of every kind: dense ones of each dtype, and INT8 weights that meet many rows in int8 on a GPU.
#[test]
fn squared_relu_gates_in_every_product() -> Result<()> {
    on_every_device(|| {
        let epilogue = Epilogue {
            activation: Activation::Relu2Glu,
            ..Default::default()
        };
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            for m in [1, 3, 16, 70] {
                let x = (randn_on(&[m, 128], dtype, &device())? * 0.2)?;
                let dense = |n: usize| randn_on(&[n, 128], dtype, &device()).map(Weight::Dense);
                let int8 = |n: usize| weight_on(n, 128, "int8".parse()?, &device());
                for (weights, limit) in [
                    ([dense(32)?, dense(32)?], 2e-2),
                    ([int8(32)?, int8(32)?], 5e-2),
                ] {
                    let y = quant_linear(&x, Prologue::None, &weights, &epilogue)?;
                    let expected = reference(&x, Prologue::None, &weights, &epilogue)?;
                    let error = apart(&y, &expected)?;
                    assert!(error < limit, "{dtype:?} [{m}, 128]: {error:e}");
                }
            }
        }
        Ok(())
    })
}
