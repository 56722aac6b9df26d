//! Mistral, Phi-3 and SmolLM3: candle-transformers' interfaces and logits, and what is their own.

#![allow(clippy::type_complexity, reason = "the types are candle's signatures")]

use crate::common::distance::Distance;
use crate::gguf_file::bytes;
use crate::golden::{Golden, relative_error};
use crate::support::{device, on_every_device, randn_on};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, IndexOp, Result, Tensor};
use candle_fused::generation::{Generation, Options};
use candle_fused::models::smol::{quantized_smollm3, smollm3};
use candle_fused::models::{Architecture, CausalLm, mistral, phi3, quantized_phi3, save_quantized};
use candle_fused::quant::{Quantization, QuantizedFile, Recipe};
use candle_fused::{Fusion, nn};
use candle_nn::VarBuilder;
use candle_transformers::models::{
    mistral as stock_mistral, phi3 as stock_phi3, smol as stock_smol,
};
use std::io::{BufReader, Cursor};

type File = BufReader<std::fs::File>;

/// Every public item with candle's signature: one that is missing or different does not compile.
#[test]
fn every_item_is_there() {
    let _: fn(bool) -> mistral::Config = mistral::Config::config_7b_v0_1;
    let _: fn(bool) -> mistral::Config = mistral::Config::config_chat_ml;
    let _: fn(bool) -> mistral::Config = mistral::Config::config_amazon_mistral_lite;
    type Mistral = mistral::Model;
    let _: fn(&mistral::Config, VarBuilder) -> Result<Mistral> = Mistral::new;
    let _: fn(&Mistral) -> &nn::Embedding = Mistral::embed_tokens;
    let _: fn(&mut Mistral, &Tensor, usize) -> Result<Tensor> = Mistral::forward;
    let _: fn(&mut Mistral, &Tensor, Option<&Tensor>, usize) -> Result<Tensor> =
        Mistral::forward_embeds;
    let _: fn(&mut Mistral) = Mistral::clear_kv_cache;

    let _: fn(&phi3::Config) -> usize = phi3::Config::head_dim;
    let _ = phi3::RopeScaling {
        short_factor: vec![1f32],
        long_factor: vec![1f32],
        type_: phi3::RopeScalingType::LongRope,
    };
    type Phi3 = phi3::Model;
    let _: fn(&phi3::Config, VarBuilder) -> Result<Phi3> = Phi3::new;
    let _: fn(&mut Phi3, &Tensor, usize) -> Result<Tensor> = Phi3::forward;
    let _: fn(&mut Phi3) = Phi3::clear_kv_cache;
    type Phi3Rotary = phi3::RotaryEmbedding;
    let _: fn(DType, &phi3::Config, &Device) -> Result<Phi3Rotary> = Phi3Rotary::new;
    let _: fn(&Phi3Rotary, &Tensor, &Tensor, usize) -> Result<(Tensor, Tensor)> =
        Phi3Rotary::apply_rotary_emb_qkv;
    type Phi3Gguf = quantized_phi3::ModelWeights;
    let _: fn(bool, Content, &mut File, &Device) -> Result<Phi3Gguf> = Phi3Gguf::from_gguf::<File>;
    let _: fn(&mut Phi3Gguf, &Tensor, usize) -> Result<Tensor> = Phi3Gguf::forward;

    let _: fn(&smollm3::Config, usize) -> bool = smollm3::Config::should_skip_rope;
    let _: fn(&smollm3::Config) -> usize = smollm3::Config::head_dim;
    let _: fn(&smollm3::Config, VarBuilder) -> Result<smollm3::Model> = smollm3::Model::new;
    let _: fn(&mut smollm3::Model, &Tensor, usize) -> Result<Tensor> = smollm3::Model::forward;
    let _: fn(&mut smollm3::Model) = smollm3::Model::clear_kv_cache;
    type SmolLm3 = smollm3::ModelForCausalLM;
    let _: fn(&smollm3::Config, VarBuilder) -> Result<SmolLm3> = SmolLm3::new;
    let _: fn(&mut SmolLm3, &Tensor, usize) -> Result<Tensor> = SmolLm3::forward;
    let _: fn(&mut SmolLm3) = SmolLm3::clear_kv_cache;

    type QuantizedConfig = quantized_smollm3::QuantizedConfig;
    let _: fn(&Content) -> Result<QuantizedConfig> = QuantizedConfig::from_gguf;
    let _: fn(&QuantizedConfig, usize) -> bool = QuantizedConfig::should_skip_rope;
    let _: fn(&QuantizedConfig) -> usize = QuantizedConfig::head_dim;
    type Rotary = quantized_smollm3::RotaryEmbedding;
    let _: fn(DType, &QuantizedConfig, &Device, bool) -> Result<Rotary> = Rotary::new;
    let _: fn(&Rotary, &Tensor, &Tensor, usize) -> Result<(Tensor, Tensor)> =
        Rotary::apply_rotary_emb;
    let _: fn(&Rotary, usize) -> (&[f32], &[f32]) = Rotary::cos_sin_at;
    type Quantized = quantized_smollm3::QuantizedModelForCausalLM;
    let _: fn(&'static str, &Device, bool) -> Result<Quantized> = Quantized::from_gguf::<&str>;
    let _: fn(&mut Quantized, &Tensor, usize) -> Result<Tensor> = Quantized::forward;
    let _: fn(&mut Quantized) = Quantized::clear_kv_cache;
    let _: fn(&Quantized) -> &QuantizedConfig = Quantized::config;

    fn models<T: Clone + std::fmt::Debug + Send + Sync + Unpin + 'static>() {}
    models::<(mistral::Config, Mistral)>();
    models::<(phi3::Config, Phi3, Phi3Rotary, Phi3Gguf)>();
    models::<(smollm3::Config, smollm3::Model, SmolLm3)>();
    models::<(QuantizedConfig, Rotary, Quantized)>();
}

/// Same shape, dtype and, in f32, the same values.
fn same(got: &Tensor, want: &Tensor) -> Result<()> {
    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()));
    let error = relative_error(got, want)?;
    assert!(error < 1e-5, "{error:e}");
    Ok(())
}

/// Within the window, where both see the same; embedded tokens with a mask and without.
#[test]
fn mistral_is_candle_transformers() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("mistral_window")?;
        let mut config: mistral::Config = golden.config();
        config.sliding_window = None;
        let stock_config = stock_mistral::Config {
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            num_hidden_layers: config.num_hidden_layers,
            num_attention_heads: config.num_attention_heads,
            head_dim: config.head_dim,
            num_key_value_heads: config.num_key_value_heads,
            hidden_act: config.hidden_act,
            max_position_embeddings: config.max_position_embeddings,
            rms_norm_eps: config.rms_norm_eps,
            rope_theta: config.rope_theta,
            sliding_window: None,
            use_flash_attn: false,
        };
        let weights = || golden.weights(DType::F32);
        let mut stock = stock_mistral::Model::new(&stock_config, weights()?)?;
        let mut model = mistral::Model::new(&config, weights()?)?;
        let ids = golden.input_ids()?;
        for (start, len, position) in [(0, 7, 0), (7, 3, 7), (10, 1, 12)] {
            let chunk = ids.narrow(1, start, len)?;
            same(
                &model.forward(&chunk, position)?,
                &stock.forward(&chunk, position)?,
            )?;
        }
        model.clear_kv_cache();
        stock.clear_kv_cache();
        let embedded = model.embed_tokens().forward(&ids)?;
        let tokens = ids.dim(1)?;
        let hidden = (0..tokens * tokens).map(|i| match i % tokens > i / tokens + 2 {
            true => f32::NEG_INFINITY,
            false => 0.,
        });
        let mask = Tensor::from_iter(hidden, &device())?.reshape((1, 1, tokens, tokens))?;
        for mask in [Some(&mask), None] {
            let got = model.forward_embeds(&embedded, mask, 0)?;
            same(&got, &stock.forward_embeds(&embedded, mask, 0)?)?;
            model.clear_kv_cache();
            stock.clear_kv_cache();
        }
        Ok(())
    })
}

#[test]
fn smollm3_is_candle_transformers() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("smollm3_nope")?;
        let c: smollm3::Config = golden.config();
        let stock_config = |list: &Option<Vec<usize>>| stock_smol::smollm3::Config {
            vocab_size: c.vocab_size,
            hidden_size: c.hidden_size,
            intermediate_size: c.intermediate_size,
            num_hidden_layers: c.num_hidden_layers,
            num_attention_heads: c.num_attention_heads,
            num_key_value_heads: c.num_key_value_heads,
            max_position_embeddings: c.max_position_embeddings,
            tie_word_embeddings: c.tie_word_embeddings,
            rope_theta: c.rope_theta,
            rms_norm_eps: c.rms_norm_eps,
            hidden_act: c.hidden_act,
            attention_bias: None,
            attention_dropout: None,
            mlp_bias: None,
            sliding_window: None,
            use_sliding_window: None,
            rope_scaling: None,
            bos_token_id: None,
            eos_token_id: None,
            pad_token_id: None,
            max_window_layers: None,
            no_rope_layers: list.clone(),
            no_rope_layer_interval: c.no_rope_layer_interval,
        };
        let ids = golden.input_ids()?;
        let weights = || golden.weights(DType::F32);
        let mut all = Vec::new();
        for list in [None, Some(vec![1, 0, 0, 1]), Some(vec![1, 1, 1, 1])] {
            let config = smollm3::Config {
                no_rope_layers: list,
                ..c.clone()
            };
            let theirs = stock_config(&config.no_rope_layers);
            let mut stock = stock_smol::smollm3::ModelForCausalLM::new(&theirs, weights()?)?;
            let mut base = stock_smol::smollm3::Model::new(&theirs, weights()?)?;
            let mut model = smollm3::ModelForCausalLM::new(&config, weights()?)?;
            let mut ours = smollm3::Model::new(&config, weights()?)?;
            for layer in 0..6 {
                assert_eq!(
                    config.should_skip_rope(layer),
                    theirs.should_skip_rope(layer)
                );
            }
            for (start, len) in [(0, 7), (7, 3), (10, 1)] {
                let chunk = ids.narrow(1, start, len)?;
                let got = model.forward(&chunk, start)?;
                same(&got, &stock.forward(&chunk, start)?)?;
                same(&ours.forward(&chunk, start)?, &base.forward(&chunk, start)?)?;
                all.push(got);
            }
        }
        // The list matters.
        assert!(relative_error(&all[2], &all[5])? > 1e-3);
        assert!(relative_error(&all[2], &all[8])? > 1e-3);
        Ok(())
    })
}

/// Without factors; with them, which candle-transformers multiplies frequencies by, against the formula.
#[test]
fn rotary_tables_of_phi3_are_candle_transformers() -> Result<()> {
    on_every_device(|| {
        let c: phi3::Config = Golden::open("phi3_partial")?.config();
        let theirs = stock_phi3::Config {
            vocab_size: c.vocab_size,
            hidden_act: c.hidden_act,
            hidden_size: c.hidden_size,
            intermediate_size: c.intermediate_size,
            num_hidden_layers: c.num_hidden_layers,
            num_attention_heads: c.num_attention_heads,
            num_key_value_heads: c.num_key_value_heads,
            rms_norm_eps: c.rms_norm_eps,
            rope_theta: c.rope_theta,
            bos_token_id: None,
            eos_token_id: None,
            rope_scaling: None,
            max_position_embeddings: c.max_position_embeddings,
            original_max_position_embeddings: None,
            partial_rotary_factor: c.partial_rotary_factor,
            tie_word_embeddings: c.tie_word_embeddings,
        };
        let dim = c.head_dim();
        let stock = stock_phi3::RotaryEmbedding::new(DType::F32, &theirs, &device())?;
        let ours = phi3::RotaryEmbedding::new(DType::F32, &c, &device())?;
        let q = randn_on(&[1, 4, 3, dim], DType::F32, &device())?;
        let k = randn_on(&[1, 2, 3, dim], DType::F32, &device())?;
        for at in [0, 9, c.max_position_embeddings - 3] {
            let want = stock.apply_rotary_emb_qkv(&q, &k, at)?;
            let got = ours.apply_rotary_emb_qkv(&q, &k, at)?;
            // Frequencies there are rounded behind the power, here before it, as in Hugging Face's tables: at
            // position 511 angles differ by 3e-5.
            assert!(relative_error(&got.0, &want.0)? < 1e-4);
            assert!(relative_error(&got.1, &want.1)? < 1e-4);
        }
        let past = ours.apply_rotary_emb_qkv(&q, &k, c.max_position_embeddings - 2);
        assert!(past.is_err());

        let c: phi3::Config = Golden::open("phi3_long")?.config();
        let (scaling, first) = (&c.rope_scaling, c.original_max_position_embeddings);
        let (scaling, first) = (scaling.as_ref().expect("factors"), first.expect("a length"));
        let rotary = phi3::RotaryEmbedding::new(DType::F32, &c, &device())?;
        let factor = c.max_position_embeddings as f64 / first as f64;
        let magnitude = (1. + factor.ln() / (first as f64).ln()).sqrt();
        let pairs = scaling.short_factor.len();
        let ones = Tensor::ones((1, 1, 1, c.head_dim()), DType::F32, &device())?;
        for (at, factors) in [
            (first - 1, &scaling.short_factor),
            (first, &scaling.long_factor),
        ] {
            let (got, _) = rotary.apply_rotary_emb_qkv(&ones, &ones, at)?;
            let got = got.flatten_all()?.to_vec1::<f32>()?;
            for (i, factor) in factors.iter().enumerate() {
                let frequency = c.rope_theta.powf(-(i as f64) / pairs as f64) / f64::from(*factor);
                let (sin, cos) = (at as f64 * frequency).sin_cos();
                let want = [cos - sin, cos + sin].map(|x| x * magnitude);
                let got = [got[i], got[i + pairs]].map(f64::from);
                assert!((got[0] - want[0]).abs() < 1e-4 && (got[1] - want[1]).abs() < 1e-4);
            }
        }
        Ok(())
    })
}

/// A prompt past the first context length turns by the long factors, and so does every token behind it,
/// from safetensors and from GGUF, in the model and in the token loop.
#[test]
fn long_prompts_of_phi3_are_hugging_faces() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("phi3_long")?;
        let ids = golden.outputs["longer_ids"]
            .to_dtype(DType::U32)?
            .to_device(&device())?;
        let expected = &golden.outputs["longer_logits"];
        let file = bytes(&golden, GgmlDType::F32)?;
        for fusion in [Fusion::all(), Fusion::none()] {
            let mut model =
                phi3::Model::new_fused(&golden.config(), golden.weights(DType::F32)?, fusion)?;
            let (_, logits) = model.hidden_states(&ids, 0)?;
            let error = relative_error(&logits, expected)?;
            assert!(error < 1e-4, "{fusion}: {error:e}");
            let mut reader = Cursor::new(&file);
            let content = Content::read(&mut reader)?;
            let mut model =
                phi3::ModelWeights::from_gguf_fused(content, &mut reader, &device(), fusion)?;
            let (_, logits) = model.hidden_states(&ids, 0)?;
            let error = relative_error(&logits, expected)?;
            assert!(error < 1e-4, "gguf {fusion}: {error:e}");

            // Behind such a prompt one token at a time gives what the whole text gives.
            let tokens = ids.dim(1)?;
            let mut whole = model.clone();
            let mut generation = Generation::new(&model, &Options::default())?;
            let mut text = ids.i(0)?.to_vec1::<u32>()?;
            let mut drawn = vec![generation.extend(0, &text)?];
            while drawn.len() < 8 {
                drawn.extend(generation.step()?[0]);
            }
            for token in drawn {
                let input = Tensor::new(text.as_slice(), &device())?.unsqueeze(0)?;
                let logits = whole.forward(&input, 0)?.flatten_all()?.to_vec1::<f32>()?;
                let best = logits.iter().copied().fold(f32::MIN, f32::max);
                assert!(best - logits[token as usize] < 1e-3, "{fusion} {tokens}");
                text.push(token);
            }
        }
        Ok(())
    })
}

/// The modules under candle-transformers' names, from a file.
#[test]
fn quantized_modules_are_the_same_models() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("phi3_partial")?;
        let file = bytes(&golden, GgmlDType::F32)?;
        let mut reader = Cursor::new(&file);
        let content = Content::read(&mut reader)?;
        let mut model =
            quantized_phi3::ModelWeights::from_gguf(false, content, &mut reader, &device())?;
        let ids = golden.input_ids()?;
        let last = golden.outputs["logits"].dim(1)? - 1;
        let error = relative_error(
            &model.forward(&ids, 0)?,
            &golden.outputs["logits"].i((.., last))?,
        )?;
        assert!(error < 1e-4, "{error:e}");
        Generation::new(&model, &Options::default())?.extend(0, &[1, 2])?;

        let golden = Golden::open("smollm3_nope")?;
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("model.gguf");
        std::fs::write(&path, bytes(&golden, GgmlDType::F32)?)?;
        let mut model =
            quantized_smollm3::QuantizedModelForCausalLM::from_gguf(&path, &device(), false)?;
        let logits = model.forward(&golden.input_ids()?, 0)?;
        let last = golden.outputs["logits"].dim(1)? - 1;
        let error = relative_error(&logits, &golden.outputs["logits"].narrow(1, last, 1)?)?;
        assert!(error < 1e-4, "{error:e}");
        let config = model.config();
        assert_eq!((config.vocab_size, config.head_dim()), (128, 16));
        assert!(config.should_skip_rope(3) && !config.should_skip_rope(2));
        for interleaved in [false, true] {
            use stock_smol::quantized_smollm3 as stock;
            let content = Content::read(&mut std::fs::File::open(&path)?)?;
            let theirs = stock::QuantizedConfig {
                vocab_size: config.vocab_size,
                hidden_size: config.hidden_size,
                intermediate_size: config.intermediate_size,
                num_hidden_layers: config.num_hidden_layers,
                num_attention_heads: config.num_attention_heads,
                num_key_value_heads: config.num_key_value_heads,
                max_position_embeddings: config.max_position_embeddings,
                rope_theta: config.rope_theta,
                rms_norm_eps: config.rms_norm_eps,
                rope_dimension_count: config.rope_dimension_count,
                no_rope_layer_interval: config.no_rope_layer_interval,
            };
            let ours = quantized_smollm3::QuantizedConfig::from_gguf(&content)?;
            let q = Tensor::arange(0f32, 96., &device())?.reshape((1, 2, 3, 16))?;
            let rotary =
                quantized_smollm3::RotaryEmbedding::new(DType::F32, &ours, &device(), interleaved)?;
            let stock = stock::RotaryEmbedding::new(DType::F32, &theirs, &device(), interleaved)?;
            let (got, want) = (
                rotary.apply_rotary_emb(&q, &q, 9)?,
                stock.apply_rotary_emb(&q, &q, 9)?,
            );
            assert!(relative_error(&got.0, &want.0)? < 1e-5);
            assert!((rotary.cos_sin_at(9).0[1] - stock.cos_sin_at(9).0[1]).abs() < 1e-6);
        }
        let missing =
            quantized_smollm3::QuantizedModelForCausalLM::from_gguf("/no/file", &device(), false);
        assert!(
            missing
                .expect_err("accepted")
                .to_string()
                .contains("/no/file")
        );
        Ok(())
    })
}

/// Quantized while they load, saved, and used where the file is mapped.
#[test]
fn families_can_be_quantized() -> Result<()> {
    fn check<C>(name: &str) -> Result<()>
    where
        C: Architecture + serde::de::DeserializeOwned,
    {
        let golden = Golden::open(name)?;
        let (config, ids): (C, _) = (golden.config(), golden.input_ids()?);
        // What 8 and 4 bits lose in weights that are as wide as these.
        for (recipe, most) in [
            (
                Recipe::new(Quantization::Int8).with_head(Quantization::Int8),
                0.1,
            ),
            (Recipe::new(Quantization::Int8).with_balance(), 0.1),
            (Recipe::new("int4-g32-z".parse()?), 0.5),
        ] {
            let mut model = CausalLm::<C>::new_quantized(
                &config,
                golden.weights(DType::F32)?,
                &recipe,
                Fusion::all(),
            )?;
            let (_, logits) = model.hidden_states(&ids, 0)?;
            let error = Distance::between(&logits, &golden.outputs["logits"])?.relative_norm();
            assert!(error < most, "{name}: {error:e}");
            let folder = tempfile::tempdir()?;
            let path = folder.path().join("model.safetensors");
            let dense = std::fs::read(golden.folder.join("model.safetensors"))?;
            let vb = VarBuilder::from_buffered_safetensors(dense, DType::F32, &Device::Cpu)?;
            save_quantized(&config, vb, &recipe, &path)?;
            // SAFETY: nobody else has the file.
            let file = unsafe { QuantizedFile::open(&path)? };
            let mut stored = CausalLm::<C>::from_quantized(
                &config,
                &file,
                DType::F32,
                &device(),
                Fusion::all(),
            )?;
            let (_, again) = stored.hidden_states(&ids, 0)?;
            assert!(relative_error(&again, &logits)? < 1e-5, "{name}");
        }
        Ok(())
    }
    on_every_device(|| {
        check::<mistral::Config>("mistral_window")?;
        check::<phi3::Config>("phi3_partial")?;
        check::<smollm3::Config>("smollm3_nope")
    })
}

#[test]
fn what_configurations_cannot_say_is_named() {
    fn said<C: serde::de::DeserializeOwned>(
        golden: &str,
        change: Option<(&str, serde_json::Value)>,
    ) -> String {
        let mut config: serde_json::Value = Golden::open(golden).expect("a golden").config();
        if let Some((key, value)) = change {
            config[key] = value;
        }
        let read = serde_json::from_value::<C>(config);
        read.err().map(|e| e.to_string()).unwrap_or_default()
    }
    use serde_json::json;
    let mistral = |change| said::<mistral::Config>("mistral_window", change);
    assert_eq!(mistral(None), "");
    assert!(mistral(Some(("model_type", json!("phi3")))).contains("models::phi3`"));
    assert!(mistral(Some(("tie_word_embeddings", json!(true)))).contains("tie_word_embeddings"));
    let phi3 = |change| said::<phi3::Config>("phi3_long", change);
    assert_eq!(phi3(None), "");
    let yarn = json!({"rope_type": "yarn", "rope_theta": 1e4});
    assert!(phi3(Some(("rope_parameters", yarn.clone()))).contains("`yarn`"));
    assert!(mistral(Some(("rope_parameters", yarn))).contains("`yarn`"));
    let half = json!({"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0]});
    assert!(phi3(Some(("rope_parameters", half))).contains("long_factor"));
    assert!(phi3(Some(("attention_bias", json!(true)))).contains("attention_bias"));
    let smol = |change| said::<smollm3::Config>("smollm3_nope", change);
    assert_eq!(smol(None), "");
    assert!(smol(Some(("use_sliding_window", json!(true)))).contains("use_sliding_window"));
    let linear = json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4});
    assert!(smol(Some(("rope_parameters", linear))).contains("`linear`"));

    let load = |config: phi3::Config| -> String {
        let weights = VarBuilder::zeros(DType::F32, &Device::Cpu);
        let error = phi3::Model::new(&config, weights).expect_err("accepted");
        error.to_string()
    };
    let golden = Golden::open("phi3_long").expect("a golden");
    let config: phi3::Config = golden.config();
    let changed = |change: &dyn Fn(&mut phi3::Config)| {
        let mut config = config.clone();
        change(&mut config);
        load(config)
    };
    assert!(changed(&|c| c.partial_rotary_factor = Some(1.5)).contains("partial_rotary_factor"));
    assert!(changed(&|c| c.partial_rotary_factor = Some(0.5)).contains("short_factor has 6"));
    assert!(changed(&|c| c.original_max_position_embeddings = None).contains("original_max"));
    assert!(changed(&|c| c.sliding_window = Some(0)).contains("sliding_window is 0"));
}
