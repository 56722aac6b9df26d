//! Qwen2 and Qwen3: their own interfaces, configurations and sliding windows.

use crate::golden::{Golden, relative_error};
use crate::support::{device, on_every_device, randn};
use candle_core::{D, DType, Device, IndexOp, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::generation::{Generation, Options};
use candle_fused::models::{qwen2, qwen3};
use candle_nn::VarBuilder;
use candle_transformers::models::{qwen2 as stock2, qwen3 as stock3};
use std::collections::HashMap;

/// candle-transformers reads transformers 4 files only, so the values are handed over.
fn stock2_config(c: &qwen2::Config) -> stock2::Config {
    stock2::Config {
        vocab_size: c.vocab_size,
        hidden_size: c.hidden_size,
        intermediate_size: c.intermediate_size,
        num_hidden_layers: c.num_hidden_layers,
        num_attention_heads: c.num_attention_heads,
        num_key_value_heads: c.num_key_value_heads,
        max_position_embeddings: c.max_position_embeddings,
        sliding_window: c.sliding_window,
        max_window_layers: c.max_window_layers,
        tie_word_embeddings: c.tie_word_embeddings,
        rope_theta: c.rope_theta,
        rms_norm_eps: c.rms_norm_eps,
        use_sliding_window: c.use_sliding_window,
        hidden_act: c.hidden_act,
    }
}

fn stock3_config(c: &qwen3::Config) -> stock3::Config {
    stock3::Config {
        vocab_size: c.vocab_size,
        hidden_size: c.hidden_size,
        intermediate_size: c.intermediate_size,
        num_hidden_layers: c.num_hidden_layers,
        num_attention_heads: c.num_attention_heads,
        head_dim: c.head_dim,
        attention_bias: c.attention_bias,
        num_key_value_heads: c.num_key_value_heads,
        max_position_embeddings: c.max_position_embeddings,
        sliding_window: c.sliding_window,
        max_window_layers: c.max_window_layers,
        tie_word_embeddings: c.tie_word_embeddings,
        rope_theta: c.rope_theta,
        rms_norm_eps: c.rms_norm_eps,
        use_sliding_window: c.use_sliding_window,
        hidden_act: c.hidden_act,
    }
}

/// Same shape, dtype and, in f32, the same values.
fn same(got: &Tensor, want: &Tensor) -> Result<()> {
    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()));
    let error = relative_error(got, want)?;
    assert!(error < 1e-5, "{error:e}");
    Ok(())
}

#[test]
fn qwen2_is_candle_transformers() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("qwen2_bias")?;
        let config: qwen2::Config = golden.config();
        let weights = || golden.weights(DType::F32);
        let mut stock = stock2::ModelForCausalLM::new(&stock2_config(&config), weights()?)?;
        let mut model = qwen2::ModelForCausalLM::new(&config, weights()?)?;
        let mut stock_base = stock2::Model::new(&stock2_config(&config), weights()?)?;
        let mut base = qwen2::Model::new(&config, weights()?)?;
        let ids = golden.input_ids()?;
        for _ in 0..2 {
            for (start, len) in [(0, 7), (7, 3), (10, 1)] {
                let chunk = ids.narrow(1, start, len)?;
                same(
                    &model.forward(&chunk, start)?,
                    &stock.forward(&chunk, start)?,
                )?;
                same(
                    &base.forward(&chunk, start, None)?,
                    &stock_base.forward(&chunk, start, None)?,
                )?;
            }
            model.clear_kv_cache();
            stock.clear_kv_cache();
            base.clear_kv_cache();
            stock_base.clear_kv_cache();
        }
        Ok(())
    })
}

/// With a mask, attention is an encoder's: every token sees every other that is not masked.
#[test]
fn qwen2s_mask_is_candle_transformers() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("qwen2_bias")?;
        let config: qwen2::Config = golden.config();
        let weights = || golden.weights(DType::F32);
        let ids = golden.input_ids()?.narrow(1, 0, 6)?;
        let mask = Tensor::new(&[[0u32, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 1]], &device())?;
        let mut stock = stock2::Model::new(&stock2_config(&config), weights()?)?;
        let want = stock.forward(&ids, 0, Some(&mask))?;
        for fusion in [Fusion::all(), Fusion::none()] {
            let mut model = qwen2::Model::new_fused(&config, weights()?, fusion)?;
            same(&model.forward(&ids, 0, Some(&mask))?, &want)?;
            let narrow = mask.narrow(1, 0, 5)?;
            let error = model.forward(&ids, 0, Some(&narrow)).unwrap_err();
            assert!(error.to_string().contains("attn_mask has shape [2, 5]"));
        }
        Ok(())
    })
}

#[test]
fn qwen3_is_candle_transformers() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("qwen3_qknorm")?;
        let config: qwen3::Config = golden.config();
        let weights = || golden.weights(DType::F32);
        let mut stock = stock3::ModelForCausalLM::new(&stock3_config(&config), weights()?)?;
        let mut model = qwen3::ModelForCausalLM::new(&config, weights()?)?;
        let mut stock_base = stock3::Model::new(&stock3_config(&config), weights()?)?;
        let mut base = qwen3::Model::new(&config, weights()?)?;
        let ids = golden.input_ids()?.narrow(0, 1, 1)?;
        // Single tokens may run ahead: they are rotated by their position, and stand in the next slot.
        for (start, len, position) in [(0, 7, 0), (7, 3, 7), (10, 1, 11), (11, 1, 14)] {
            let chunk = ids.narrow(1, start, len)?;
            same(
                &model.forward(&chunk, position)?,
                &stock.forward(&chunk, position)?,
            )?;
            same(
                &base.forward(&chunk, position)?,
                &stock_base.forward(&chunk, position)?,
            )?;
        }
        Ok(())
    })
}

/// Logits come in the model's dtype, as candle-transformers' do.
#[test]
fn logits_are_of_the_models_dtype() -> Result<()> {
    let golden = Golden::open("qwen3_qknorm")?;
    let mut model = qwen3::ModelForCausalLM::new(&golden.config(), golden.weights(DType::BF16)?)?;
    let logits = model.forward(&golden.input_ids()?, 0)?;
    assert_eq!(
        (logits.dims(), logits.dtype()),
        (&[2, 1, 256][..], DType::BF16)
    );
    Ok(())
}

/// Where every layer slides, candle-transformers' mask is the same with a window one smaller: it
/// counts the positions before the token, Hugging Face the token too.
#[test]
fn a_window_in_every_layer_is_candle_transformers_mask() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("qwen2_bias")?;
        let mut config: qwen2::Config = golden.config();
        let ids = golden.input_ids()?;
        for window in [1, 3, 8] {
            config.sliding_window = window - 1;
            let stock_config = stock2_config(&config);
            let mut stock = stock2::Model::new(&stock_config, golden.weights(DType::F32)?)?;
            let want = stock.forward(&ids, 0, None)?;
            (config.use_sliding_window, config.max_window_layers) = (true, 0);
            config.sliding_window = window;
            for fusion in [Fusion::all(), Fusion::none()] {
                let mut model =
                    qwen2::Model::new_fused(&config, golden.weights(DType::F32)?, fusion)?;
                same(&model.forward(&ids, 0, None)?, &want)?;
            }
        }
        Ok(())
    })
}

/// Windows hold from a layer on, through chunks, single tokens and the token loop.
#[test]
fn windows_hold_however_tokens_come() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("qwen3_qknorm")?;
        let ids = golden.input_ids()?.narrow(0, 0, 1)?;
        let tokens = ids.dim(1)?;
        let mut config: qwen3::Config = golden.config();
        let load = |config: &qwen3::Config, fusion| {
            qwen3::ModelForCausalLM::new_fused(config, golden.weights(DType::F32)?, fusion)
        };
        let full = load(&config, Fusion::all())?.hidden_states(&ids, 0)?.0;
        config.use_sliding_window = true;
        (config.sliding_window, config.max_window_layers) = (Some(5), 1);
        let (states, logits) = load(&config, Fusion::none())?.hidden_states(&ids, 0)?;
        // The first layer sees all, the others do not, and the first five tokens see all anyway.
        assert!(relative_error(&states[1], &full[1])? < 1e-5);
        assert!(relative_error(&states[2], &full[2])? > 1e-3);
        let first = |t: &Tensor| t.narrow(1, 0, 5);
        assert!(relative_error(&first(&states[3])?, &first(&full[3])?)? < 1e-5);

        let mut model = load(&config, Fusion::all())?;
        for chunks in [vec![tokens], vec![1; tokens], vec![4, 1, tokens - 5]] {
            model.clear_kv_cache();
            let mut position = 0;
            for chunk in chunks {
                let got = model.forward(&ids.narrow(1, position, chunk)?, position)?;
                position += chunk;
                let want = logits.i((.., position - 1..position))?;
                let error = relative_error(&got, &want)?;
                assert!(error < 1e-4, "{position}: {error:e}");
            }
        }

        let options = Options {
            positions: Some(64),
            ..Default::default()
        };
        let prompt = ids.i(0)?.to_vec1::<u32>()?;
        let mut generation = Generation::new(&model, &options)?;
        let mut drawn = vec![generation.extend(0, &prompt)?];
        let mut text = prompt;
        while drawn.len() < 12 {
            drawn.extend(generation.step()?[0]);
        }
        let mut plain = load(&config, Fusion::none())?;
        for token in drawn {
            let input = Tensor::new(text.as_slice(), &device())?.unsqueeze(0)?;
            let logits = plain.forward(&input, 0)?.flatten_all()?;
            assert_eq!(logits.argmax(D::Minus1)?.to_scalar::<u32>()?, token);
            text.push(token);
        }
        Ok(())
    })
}

/// The shapes of real models, with few layers and a small vocabulary: Qwen2-0.5B (7 query heads to
/// a key head, tied), Qwen2-7B's head (untied), Qwen3 with more heads than the stream is wide.
#[test]
fn shapes_of_real_models_agree_with_their_plain_form() -> Result<()> {
    on_every_device(|| {
        for (hidden, heads, kv_heads, head_dim, tied) in [
            (896, 14, 2, 64, true),
            (448, 28, 4, 16, false),
            (128, 16, 8, 128, true),
        ] {
            let config: qwen3::Config = serde_json::from_value(serde_json::json!({
                "vocab_size": 100, "hidden_size": hidden, "intermediate_size": 200,
                "num_hidden_layers": 2, "num_attention_heads": heads,
                "num_key_value_heads": kv_heads, "head_dim": head_dim,
                "tie_word_embeddings": tied, "rope_theta": 1e6, "max_position_embeddings": 64,
            }))
            .expect("a configuration");
            let weights = random_weights(&config)?;
            let run = |fusion| -> Result<Tensor> {
                let vb = VarBuilder::from_tensors(weights.clone(), DType::F32, &device());
                let mut model = qwen3::ModelForCausalLM::new_fused(&config, vb, fusion)?;
                let ids = Tensor::new(&[[1u32, 50, 99, 7, 3]], &device())?;
                Ok(model.hidden_states(&ids, 0)?.1)
            };
            let error = relative_error(&run(Fusion::all())?, &run(Fusion::none())?)?;
            assert!(error < 1e-4, "{hidden} {heads}: {error:e}");
        }
        Ok(())
    })
}

fn random_weights(c: &qwen3::Config) -> Result<HashMap<String, Tensor>> {
    let (hidden, inner, dim) = (c.hidden_size, c.intermediate_size, c.head_dim);
    let (q, kv) = (c.num_attention_heads * dim, c.num_key_value_heads * dim);
    let mut weights = HashMap::new();
    let mut add = |name: String, dims: &[usize]| -> Result<()> {
        let scale = 1. / (dims[dims.len() - 1] as f64).sqrt();
        let weight = (randn(dims, DType::F32)? * scale)?;
        weights.insert(format!("{name}.weight"), weight.to_device(&device())?);
        Ok(())
    };
    add("model.embed_tokens".into(), &[c.vocab_size, hidden])?;
    add("lm_head".into(), &[c.vocab_size, hidden])?;
    add("model.norm".into(), &[hidden])?;
    for layer in 0..c.num_hidden_layers {
        for (name, dims) in [
            ("input_layernorm", &[hidden][..]),
            ("post_attention_layernorm", &[hidden]),
            ("self_attn.q_norm", &[dim]),
            ("self_attn.k_norm", &[dim]),
            ("self_attn.q_proj", &[q, hidden]),
            ("self_attn.k_proj", &[kv, hidden]),
            ("self_attn.v_proj", &[kv, hidden]),
            ("self_attn.o_proj", &[hidden, q]),
            ("mlp.gate_proj", &[inner, hidden]),
            ("mlp.up_proj", &[inner, hidden]),
            ("mlp.down_proj", &[hidden, inner]),
        ] {
            add(format!("model.layers.{layer}.{name}"), dims)?;
        }
    }
    Ok(weights)
}

#[test]
fn configs_of_transformers_4_and_5_are_read() {
    let text = |rest: &str| {
        format!(
            r#"{{"model_type":"qwen2","hidden_size":64,"intermediate_size":128,"vocab_size":256,
            "num_hidden_layers":4,"num_attention_heads":4,"num_key_value_heads":2,
            "hidden_act":"silu","rms_norm_eps":1e-6,"max_position_embeddings":512,{rest}
            "tie_word_embeddings":true}}"#
        )
    };
    let read = |rest: &str| serde_json::from_str::<qwen2::Config>(&text(rest));
    let said = |rest: &str| read(rest).unwrap_err().to_string();
    let old = read(r#""rope_theta":1e6,"sliding_window":128,"max_window_layers":2,"use_sliding_window":false,"#)
        .unwrap();
    assert_eq!((old.rope_theta, old.use_sliding_window), (1e6, false));
    let new = read(
        r#""rope_parameters":{"rope_theta":1e6,"rope_type":"default"},"sliding_window":null,"#,
    )
    .unwrap();
    assert_eq!((new.rope_theta, new.use_sliding_window), (1e6, false));

    let window = r#""use_sliding_window":true,"sliding_window":8,"#;
    let by_number = read(&format!(r#"{window}"max_window_layers":3,"#)).unwrap();
    assert_eq!(
        (by_number.sliding_window, by_number.max_window_layers),
        (8, 3)
    );
    // The list is what counts where there is one.
    let types =
        |types: [&str; 4]| format!(r#"{window}"layer_types":{types:?},"max_window_layers":28,"#);
    let (full, slides) = ("full_attention", "sliding_attention");
    let by_list = read(&types([full, full, slides, slides])).unwrap();
    assert_eq!(by_list.max_window_layers, 2);
    assert_eq!(read(&types([full; 4])).unwrap().max_window_layers, 4);
    assert!(said(&types([slides, full, slides, full])).contains("layer_types"));
    assert!(said(&types([full, full, full, "linear_attention"])).contains("linear_attention"));
    let short = format!(r#"{window}"layer_types":["full_attention"],"#);
    assert!(said(&short).contains("1 layers"));
    // A window that nobody set is none.
    let unset = read(r#""use_sliding_window":true,"sliding_window":null,"#).unwrap();
    assert!(!unset.use_sliding_window);
    // One that nobody names is transformers' own.
    let usual = read(r#""use_sliding_window":true,"#).unwrap();
    assert_eq!(
        (usual.use_sliding_window, usual.sliding_window),
        (true, 4096)
    );
    // Files that went through several versions name the rope type twice.
    let twice = r#""rope_scaling":{"type":"default","rope_type":"default"},"#;
    assert_eq!(read(twice).unwrap().rope_theta, 10_000.);
    assert!(said(r#""rope_scaling":{"type":"yarn"},"#).contains("yarn"));

    assert!(said(r#""rope_scaling":{"type":"yarn","factor":4.0},"#).contains("yarn"));
    assert!(said(r#""rope_theta":-1.0,"#).contains("rope_theta"));
    assert!(said(r#""head_dim":32,"#).contains("head_dim 32"));
    let other = text("").replace("qwen2", "qwen3");
    assert!(
        serde_json::from_str::<qwen2::Config>(&other)
            .unwrap_err()
            .to_string()
            .contains("qwen3")
    );
    let third = serde_json::from_str::<qwen3::Config>(&other).unwrap();
    assert_eq!(
        (third.head_dim, third.attention_bias, third.sliding_window),
        (128, false, None)
    );
}

#[test]
fn what_cannot_be_loaded_is_named() -> Result<()> {
    let golden = Golden::open("qwen2_bias")?;
    let config: qwen2::Config = golden.config();
    let weights =
        candle_core::safetensors::load(golden.folder.join("model.safetensors"), &Device::Cpu)?;
    let said = |config: &qwen2::Config, without: &str| {
        let mut weights = weights.clone();
        weights.remove(without);
        let vb = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
        let error = qwen2::ModelForCausalLM::new(config, vb).expect_err("accepted");
        error.to_string()
    };
    for name in [
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.2.mlp.up_proj.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
    ] {
        assert!(
            said(&config, name).contains(name),
            "{}",
            said(&config, name)
        );
    }
    let changed = |change: &dyn Fn(&mut qwen2::Config)| {
        let mut config = config.clone();
        change(&mut config);
        said(&config, "")
    };
    assert!(changed(&|c| c.num_attention_heads = 5).contains("heads"));
    assert!(changed(&|c| c.num_attention_heads = 0).contains("heads"));
    assert!(changed(&|c| c.num_key_value_heads = 3).contains("heads"));
    assert!(changed(&|c| c.num_hidden_layers = 0).contains("layers"));
    assert!(changed(&|c| c.rms_norm_eps = f64::NAN).contains("eps"));
    assert!(changed(&|c| c.hidden_act = candle_nn::Activation::Relu).contains("hidden_act"));
    let window = changed(&|c| (c.use_sliding_window, c.sliding_window) = (true, 0));
    assert!(window.contains("sliding_window is 0"), "{window}");
    let golden3 = Golden::open("qwen3_qknorm")?;
    let biased = qwen3::Config {
        attention_bias: true,
        ..golden3.config()
    };
    let vb = golden3.weights(DType::F32)?;
    let error = qwen3::ModelForCausalLM::new(&biased, vb).expect_err("accepted");
    assert!(error.to_string().contains("q_proj.bias"), "{error}");
    // Without a head of its own the embedding is the head, as in candle-transformers.
    let untied = qwen2::Config {
        tie_word_embeddings: false,
        ..config.clone()
    };
    let vb = VarBuilder::from_tensors(weights.clone(), DType::F32, &Device::Cpu);
    let mut model = qwen2::ModelForCausalLM::new(&untied, vb)?;
    let ids = golden.outputs["input_ids"].to_dtype(DType::U32)?;
    let (_, logits) = model.hidden_states(&ids, 0)?;
    assert!(relative_error(&logits, &golden.outputs["logits"])? < 1e-4);
    Ok(())
}
