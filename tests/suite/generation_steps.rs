//! Small models, whose layers take fewer launches on a GPU: the logit of each token is nearly the highest one of the model
//! in f32.

#[cfg(feature = "cuda")]
use crate::support::architecture;
use crate::support::{device, on_every_device, randn};
use candle_core::{DType, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::generation::{Generation, Options};
use candle_fused::models::llama::{Cache, Config, Llama};
use candle_fused::serving::{self, Engine, Request};
use candle_nn::VarBuilder;
use std::collections::HashMap;

const VOCAB: usize = 400;
const INNER: usize = 500;
const PROMPT: [u32; 5] = [1, 77, 3, 9, 200];

/// A model of three query heads of 64 for each key/value head, as SmolLM2 is.
fn config(kv_heads: usize) -> Config {
    Config {
        hidden_size: 192 * kv_heads,
        intermediate_size: INNER,
        vocab_size: VOCAB,
        num_hidden_layers: 3,
        num_attention_heads: 3 * kv_heads,
        num_key_value_heads: kv_heads,
        use_flash_attn: false,
        rms_norm_eps: 1e-5,
        rope_theta: 1e4,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: 6000,
        tie_word_embeddings: true,
    }
}

/// Random weights on the CPU, as `dtype` has them.
fn weights(config: &Config, dtype: DType) -> Result<HashMap<String, Tensor>> {
    let hidden = config.hidden_size;
    let kv = hidden / 3;
    let matrix = |rows: usize, columns: usize| {
        let scale = 1. / (columns as f64).sqrt();
        (randn(&[rows, columns], DType::F32)? * scale)?.to_dtype(dtype)
    };
    // Between about 0.5 and 1.5.
    let gain = || {
        randn(&[hidden], DType::F32)?
            .tanh()?
            .affine(0.5, 1.)?
            .to_dtype(dtype)
    };
    let embedding = (matrix(VOCAB, hidden)? * 8.)?;
    let mut all = HashMap::from([
        ("model.embed_tokens.weight".to_owned(), embedding),
        ("model.norm.weight".to_owned(), gain()?),
    ]);
    for layer in 0..config.num_hidden_layers {
        let mut put = |name: &str, weight: Tensor| {
            all.insert(format!("model.layers.{layer}.{name}.weight"), weight);
        };
        put("self_attn.q_proj", matrix(hidden, hidden)?);
        put("self_attn.k_proj", matrix(kv, hidden)?);
        put("self_attn.v_proj", matrix(kv, hidden)?);
        put("self_attn.o_proj", matrix(hidden, hidden)?);
        put("mlp.gate_proj", matrix(INNER, hidden)?);
        put("mlp.up_proj", matrix(INNER, hidden)?);
        put("mlp.down_proj", matrix(hidden, INNER)?);
        put("input_layernorm", gain()?);
        put("post_attention_layernorm", gain()?);
    }
    Ok(all)
}

/// The model in f32 without fusion, and in `dtype` with everything.
fn models(config: &Config, dtype: DType) -> Result<[Llama; 2]> {
    let weights = weights(config, dtype)?;
    let load = |dtype, fusion| {
        let vb = VarBuilder::from_tensors(weights.clone(), dtype, &device());
        Llama::load_fused(vb, config, fusion)
    };
    Ok([
        load(DType::F32, Fusion::none())?,
        load(dtype, Fusion::all())?,
    ])
}

/// How far the logit of each token is below the highest one at most, where all of them vary by about 8.
fn shortfall(exact: &Llama, config: &Config, prompt: &[u32], tokens: &[u32]) -> Result<f32> {
    let mut cache = Cache::new(true, DType::F32, config, &device())?;
    let all = [prompt, tokens].concat();
    let mut most = 0f32;
    for (i, token) in tokens.iter().enumerate() {
        let (from, to) = match i {
            0 => (0, prompt.len()),
            _ => (prompt.len() + i - 1, prompt.len() + i),
        };
        let ids = Tensor::new(&all[from..to], &device())?.unsqueeze(0)?;
        let logits = exact.forward(&ids, from, &mut cache)?.squeeze(0)?;
        let logits = logits.to_vec1::<f32>()?;
        let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        most = most.max(highest - logits[*token as usize]);
    }
    Ok(most)
}

/// On a GPU with clusters q, k and v come from the launch of attention.
#[cfg(feature = "cuda")]
fn check_parts(generation: &mut Generation) -> Result<()> {
    let parts = generation.profile(1)?;
    if architecture(&device())? >= 90 {
        let names: Vec<_> = parts.iter().map(|part| part.part).collect();
        assert!(names.contains(&"qkv+attention"), "{names:?}");
    }
    Ok(())
}

#[test]
fn tokens_are_the_likeliest_to_the_model_in_f32() -> Result<()> {
    on_every_device(|| {
        for (kv_heads, dtype) in [(1, DType::F16), (3, DType::BF16), (3, DType::F16)] {
            let config = config(kv_heads);
            let [exact, fused] = models(&config, dtype)?;
            for positions in [300, 2048, 5000] {
                let options = Options {
                    positions: Some(positions),
                    ..Default::default()
                };
                let mut generation = Generation::new(&fused, &options)?;
                let mut tokens = vec![generation.extend(0, &PROMPT)?];
                while tokens.len() < 200 {
                    tokens.extend(generation.step()?[0]);
                }
                let off = shortfall(&exact, &config, &PROMPT, &tokens)?;
                let bound = if dtype == DType::BF16 { 0.6 } else { 0.1 };
                assert!(off <= bound, "{kv_heads} {dtype:?} {positions}: {off}");
                #[cfg(feature = "cuda")]
                if device().is_cuda() && positions <= 2048 {
                    check_parts(&mut generation)?;
                }
            }
        }
        Ok(())
    })
}

/// The same over pages.
#[test]
fn a_request_alone_gets_the_likeliest_tokens() -> Result<()> {
    on_every_device(|| {
        let config = config(3);
        let [exact, fused] = models(&config, DType::BF16)?;
        for positions in [256, 4096] {
            let options = serving::Options {
                sequences: 2,
                positions: Some(positions),
                page: 16,
                ..Default::default()
            };
            let mut engine = Engine::new(&fused, &options)?;
            engine.submit(Request {
                max_tokens: 150,
                ..Request::new(PROMPT)
            })?;
            let mut tokens = Vec::new();
            while !engine.is_idle() {
                tokens.extend(engine.step()?.into_iter().filter_map(|output| output.token));
            }
            assert_eq!(tokens.len(), 150);
            let off = shortfall(&exact, &config, &PROMPT, &tokens)?;
            assert!(off <= 0.6, "{positions}: {off}");
        }
        Ok(())
    })
}
