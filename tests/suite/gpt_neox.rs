//! GPT-NeoX: its configuration, shards, and what sets its forms apart.

use crate::golden::{Golden, relative_error};
use crate::support::on_every_device;
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::models::gpt_neox::{Config, Model, ModelForCausalLM};
use candle_nn::VarBuilder;
use std::collections::HashMap;

fn tensors(golden: &Golden) -> Result<HashMap<String, Tensor>> {
    candle_core::safetensors::load(golden.folder.join("model.safetensors"), &Device::Cpu)
}

/// A checkpoint in two files is the checkpoint in one.
#[test]
fn shards_are_one_checkpoint() -> Result<()> {
    let golden = Golden::open("gpt_neox_parallel")?;
    let folder = tempfile::tempdir()?;
    let mut parts = [HashMap::new(), HashMap::new()];
    let mut names: Vec<_> = tensors(&golden)?.into_iter().collect();
    names.sort_by(|a, b| a.0.cmp(&b.0));
    for (i, (name, tensor)) in names.into_iter().enumerate() {
        parts[i % 2].insert(name, tensor);
    }
    let mut files = Vec::new();
    for (i, part) in parts.iter().enumerate() {
        let file = folder
            .path()
            .join(format!("model-0000{}-of-00002.safetensors", i + 1));
        candle_core::safetensors::save(part, &file)?;
        files.push(file);
    }
    // SAFETY: nobody changes the files while they are mapped.
    let vb = unsafe { VarBuilder::from_mmaped_safetensors(&files, DType::F32, &Device::Cpu)? };
    let mut model = ModelForCausalLM::new(&golden.config(), vb)?;
    let ids = golden.outputs["input_ids"].to_dtype(DType::U32)?;
    let (_, logits) = model.hidden_states(&ids, 0)?;
    assert!(relative_error(&logits, &golden.outputs["logits"])? < 1e-4);
    Ok(())
}

/// The base model gives what the last norm gives.
#[test]
fn the_base_model_ends_with_the_norm() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("gpt_neox_sequential")?;
        let ids = golden.input_ids()?;
        let states = &golden.outputs["hidden_states"];
        let expected = states.get(states.dim(0)? - 1)?;
        for fusion in [Fusion::all(), Fusion::none()] {
            let mut model =
                Model::new_fused(&golden.config(), golden.weights(DType::F32)?, fusion)?;
            assert!(relative_error(&model.forward(&ids, 0)?, &expected)? < 1e-4);
        }
        Ok(())
    })
}

/// One residual taken for the other is wrong from the first layer on.
#[test]
fn the_kind_of_residual_matters() -> Result<()> {
    for name in ["gpt_neox_parallel", "gpt_neox_sequential"] {
        let golden = Golden::open(name)?;
        let mut config: Config = golden.config();
        config.use_parallel_residual = !config.use_parallel_residual;
        let mut model = ModelForCausalLM::new(&config, golden.weights(DType::F32)?)?;
        let (states, _) = model.hidden_states(&golden.input_ids()?, 0)?;
        let error = relative_error(&states[1], &golden.outputs["hidden_states"].get(1)?)?;
        assert!(error > 1e-2, "{name}: {error:e}");
    }
    Ok(())
}

/// Every activation that a configuration may name runs fused as it does plainly, and they differ.
#[test]
fn activations_are_those_of_the_configuration() -> Result<()> {
    use candle_nn::Activation;
    on_every_device(|| {
        let golden = Golden::open("gpt_neox_parallel")?;
        let ids = golden.input_ids()?;
        let mut seen: Vec<Tensor> = Vec::new();
        for act in [Activation::Gelu, Activation::NewGelu, Activation::Silu] {
            let config = Config {
                hidden_act: act,
                ..golden.config()
            };
            let run = |fusion| -> Result<Tensor> {
                let weights = golden.weights(DType::F32)?;
                let mut model = ModelForCausalLM::new_fused(&config, weights, fusion)?;
                Ok(model.hidden_states(&ids, 0)?.1)
            };
            let fused = run(Fusion::all())?;
            assert!(relative_error(&fused, &run(Fusion::none())?)? < 1e-4);
            for other in &seen {
                assert!(relative_error(&fused, other)? > 1e-4, "{act:?}");
            }
            seen.push(fused);
        }
        Ok(())
    })
}

/// Checkpoints without biases in attention have none there.
#[test]
fn attention_may_have_no_biases() -> Result<()> {
    let golden = Golden::open("gpt_neox_parallel")?;
    let mut weights = tensors(&golden)?;
    let zeroed: Vec<_> = weights
        .keys()
        .filter(|name| name.contains("attention.") && name.ends_with("bias"))
        .cloned()
        .collect();
    assert_eq!(zeroed.len(), 6);
    for name in &zeroed {
        let zeros = weights[name].zeros_like()?;
        weights.insert(name.clone(), zeros);
    }
    let run = |weights: &HashMap<String, Tensor>, attention_bias: bool| {
        let config = Config {
            attention_bias,
            ..golden.config()
        };
        let vb = VarBuilder::from_tensors(weights.clone(), DType::F32, &Device::Cpu);
        let mut model = ModelForCausalLM::new(&config, vb)?;
        let ids = golden.outputs["input_ids"].to_dtype(DType::U32)?;
        Ok::<_, candle_core::Error>(model.hidden_states(&ids, 0)?.1)
    };
    let with = run(&weights, true)?;
    zeroed.iter().for_each(|name| drop(weights.remove(name)));
    assert!(relative_error(&run(&weights, false)?, &with)? < 1e-6);
    let missing = run(&weights, true).unwrap_err().to_string();
    assert!(missing.contains("query_key_value.bias"), "{missing}");
    Ok(())
}

#[test]
fn configs_of_transformers_4_and_5_are_read() {
    let text = |rest: &str| {
        format!(
            r#"{{"model_type":"gpt_neox","hidden_size":64,"intermediate_size":256,"vocab_size":256,
            {rest}"num_hidden_layers":2,"num_attention_heads":4}}"#
        )
    };
    let read = |rest: &str| serde_json::from_str::<Config>(&text(rest));
    let said = |rest: &str| read(rest).unwrap_err().to_string();
    let old =
        read(r#""rotary_pct":0.5,"rotary_emb_base":20000,"hidden_act":"gelu_fast","#).unwrap();
    assert_eq!((old.rotary_pct, old.rotary_emb_base), (0.5, 20000.));
    assert_eq!(old.hidden_act, candle_nn::Activation::NewGelu);
    let rope = r#"{"partial_rotary_factor":1.0,"rope_theta":500.0,"rope_type":"default"}"#;
    let new = read(&format!(
        r#""rope_parameters":{rope},"use_parallel_residual":false,"#
    ))
    .unwrap();
    assert_eq!((new.rotary_pct, new.rotary_emb_base), (1., 500.));
    assert!(!new.use_parallel_residual);
    // What transformers takes where nothing is said.
    let bare = read("").unwrap();
    assert_eq!((bare.rotary_pct, bare.rotary_emb_base), (0.25, 10_000.));
    assert!(bare.use_parallel_residual && bare.attention_bias && !bare.tie_word_embeddings);
    assert_eq!(bare.hidden_act, candle_nn::Activation::Gelu);

    assert!(said(r#""hidden_act":"relu","#).contains("`relu`"));
    assert!(said(r#""rope_scaling":{"type":"linear","factor":2.0},"#).contains("linear"));
    assert!(said(r#""rotary_emb_base":0,"#).contains("rope_theta"));
    let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    for pct in [0., 1.5, f64::NAN, 0.2] {
        let config = Config {
            rotary_pct: pct,
            ..bare.clone()
        };
        let error = ModelForCausalLM::new(&config, vb.clone()).expect_err("accepted");
        assert!(error.to_string().contains("rotary_pct"), "{pct}: {error}");
    }
}
