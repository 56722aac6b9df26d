//! Llama's own interface: its cache, its configuration, and candle-transformers' logits.

use crate::golden::{Golden, relative_error};
use crate::support::{device, on_every_device};
use candle_core::{DType, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::models::llama::{Cache, Config, Llama, LlamaConfig};
use candle_transformers::models::llama as stock;

struct Model {
    golden: Golden,
    config: Config,
    llama: Llama,
    dtype: DType,
}

impl Model {
    fn load(name: &str, dtype: DType, fusion: Fusion) -> Result<Self> {
        let golden = Golden::open(name)?;
        let config = golden.config::<LlamaConfig>().into_config(false);
        let llama = Llama::load_fused(golden.weights(dtype)?, &config, fusion)?;
        Ok(Self {
            golden,
            config,
            llama,
            dtype,
        })
    }

    fn cache(&self) -> Result<Cache> {
        Cache::new(true, self.dtype, &self.config, &device())
    }
}

/// candle-transformers reads transformers 4 files only, so the values are handed over.
fn stock_config(c: &Config) -> stock::Config {
    stock::Config {
        hidden_size: c.hidden_size,
        intermediate_size: c.intermediate_size,
        vocab_size: c.vocab_size,
        num_hidden_layers: c.num_hidden_layers,
        num_attention_heads: c.num_attention_heads,
        num_key_value_heads: c.num_key_value_heads,
        use_flash_attn: false,
        rms_norm_eps: c.rms_norm_eps,
        rope_theta: c.rope_theta,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: c.max_position_embeddings,
        tie_word_embeddings: c.tie_word_embeddings,
    }
}

#[test]
fn the_logits_are_candle_transformers() -> Result<()> {
    on_every_device(|| {
        let model = Model::load("llama_gqa_tied", DType::F32, Fusion::all())?;
        let config = stock_config(&model.config);
        let reference = stock::Llama::load(model.golden.weights(DType::F32)?, &config)?;
        let mut stock_cache = stock::Cache::new(true, DType::F32, &config, &device())?;
        let mut cache = model.cache()?;
        let ids = model.golden.input_ids()?;
        let (first, rest) = (ids.narrow(1, 0, 6)?, ids.narrow(1, 6, 1)?);
        for (chunk, position) in [(first, 0), (rest, 6)] {
            let expected = reference.forward(&chunk, position, &mut stock_cache)?;
            let logits = model.llama.forward(&chunk, position, &mut cache)?;
            assert!(relative_error(&logits, &expected)? < 1e-5);
        }
        Ok(())
    })
}

#[test]
fn without_a_cache_each_call_stands_alone() -> Result<()> {
    on_every_device(|| {
        let model = Model::load("llama_gqa_tied", DType::F32, Fusion::all())?;
        let ids = model.golden.input_ids()?;
        let mut cache = Cache::new(false, DType::F32, &model.config, &device())?;
        let first = model.llama.forward(&ids, 0, &mut cache)?;
        let second = model.llama.forward(&ids, 0, &mut cache)?;
        assert_eq!(first.to_vec2::<f32>()?, second.to_vec2::<f32>()?);
        // Attention depends on distances only, so shifted tokens that see each other alone agree.
        let shifted = model.llama.forward(&ids, 9, &mut cache)?;
        assert!(relative_error(&shifted, &first)? < 1e-4);
        Ok(())
    })
}

/// Some programs count one position too many behind the prompt: tokens are rotated by what they say and
/// stand in the next slot.
#[test]
fn positions_that_run_ahead_are_candle_transformers() -> Result<()> {
    on_every_device(|| {
        for fusion in [Fusion::all(), Fusion::none()] {
            let model = Model::load("llama_gqa_tied", DType::F32, fusion)?;
            let config = stock_config(&model.config);
            let reference = stock::Llama::load(model.golden.weights(DType::F32)?, &config)?;
            let mut stock_cache = stock::Cache::new(true, DType::F32, &config, &device())?;
            let mut cache = model.cache()?;
            let ids = model.golden.input_ids()?;
            for (start, len, position) in [(0, 6, 0), (6, 1, 7), (7, 1, 8), (8, 1, 12), (9, 1, 13)]
            {
                let chunk = ids.narrow(1, start, len)?;
                let expected = reference.forward(&chunk, position, &mut stock_cache)?;
                let logits = model.llama.forward(&chunk, position, &mut cache)?;
                let error = relative_error(&logits, &expected)?;
                assert!(error < 1e-5, "{fusion} {position}: {error:e}");
            }
        }
        Ok(())
    })
}

/// Switched off, calls neither see nor change what is held.
#[test]
fn the_caches_switch_is_candle_transformers() -> Result<()> {
    on_every_device(|| {
        let model = Model::load("llama_gqa_tied", DType::F32, Fusion::all())?;
        let config = stock_config(&model.config);
        let reference = stock::Llama::load(model.golden.weights(DType::F32)?, &config)?;
        let mut stock_cache = stock::Cache::new(true, DType::F32, &config, &device())?;
        let mut cache = model.cache()?;
        let ids = model.golden.input_ids()?;
        for (start, len, position, used) in [
            (0, 5, 0, true),
            (3, 2, 0, false),
            (5, 1, 5, true),
            (6, 1, 2, false),
            (6, 1, 6, true),
        ] {
            (cache.use_kv_cache, stock_cache.use_kv_cache) = (used, used);
            let chunk = ids.narrow(1, start, len)?;
            let expected = reference.forward(&chunk, position, &mut stock_cache)?;
            let logits = model.llama.forward(&chunk, position, &mut cache)?;
            let error = relative_error(&logits, &expected)?;
            assert!(error < 1e-5, "{start} {position}: {error:e}");
        }
        Ok(())
    })
}

#[test]
fn a_sequence_can_be_rewound_and_started_over() -> Result<()> {
    on_every_device(|| {
        let model = Model::load("llama3_rope", DType::F32, Fusion::all())?;
        let ids = model.golden.input_ids()?;
        let tokens = ids.dim(1)?;
        let mut cache = model.cache()?;
        let whole = model.llama.forward(&ids, 0, &mut cache)?.to_vec2::<f32>()?;
        let tail = ids.narrow(1, tokens - 4, 4)?;
        let again = model.llama.forward(&tail, tokens - 4, &mut cache)?;
        assert!(relative_error(&again, &Tensor::new(whole.clone(), &device())?)? < 1e-5);
        let one = ids.narrow(0, 0, 1)?;
        let alone = model.llama.forward(&one, 0, &mut cache)?;
        let first = Tensor::new(whole, &device())?.narrow(0, 0, 1)?;
        assert!(
            relative_error(&alone, &first)? < 1e-5,
            "another batch size from position 0"
        );
        Ok(())
    })
}

/// Steps write in place, so a clone that shared its buffers would see the other's tokens.
#[test]
fn clones_of_a_cache_go_their_own_ways() -> Result<()> {
    on_every_device(|| {
        let model = Model::load("llama_gqa_tied", DType::F32, Fusion::all())?;
        let token = |id: u32| Tensor::new(&[[id]], &device());
        let prompt = Tensor::new(&[[1u32, 2, 3, 4]], &device())?;
        let mut first = model.cache()?;
        model.llama.forward(&prompt, 0, &mut first)?;
        let mut second = first.clone();
        model.llama.forward(&token(5)?, 4, &mut first)?;
        model.llama.forward(&token(9)?, 4, &mut second)?;
        let logits = model.llama.forward(&token(6)?, 5, &mut first)?;
        let fresh = Tensor::new(&[[1u32, 2, 3, 4, 5, 6]], &device())?;
        let expected = model.llama.forward(&fresh, 0, &mut model.cache()?)?;
        assert!(relative_error(&logits, &expected)? < 1e-5);
        Ok(())
    })
}

#[test]
fn a_refused_call_leaves_the_cache_as_it_was() -> Result<()> {
    on_every_device(|| {
        let model = Model::load("llama_gqa_tied", DType::F32, Fusion::all())?;
        let ids = model.golden.input_ids()?;
        let mut cache = model.cache()?;
        model.llama.forward(&ids.narrow(1, 0, 4)?, 0, &mut cache)?;
        let next = ids.narrow(1, 4, 1)?;
        assert!(refused(model.llama.forward(&next, usize::MAX, &mut cache)).contains("context"));
        let one = next.narrow(0, 0, 1)?;
        assert!(refused(model.llama.forward(&one, 4, &mut cache)).contains("batch size"));
        let logits = model.llama.forward(&next, 4, &mut cache)?;
        let expected = model
            .llama
            .forward(&ids.narrow(1, 0, 5)?, 0, &mut model.cache()?)?;
        assert!(relative_error(&logits, &expected)? < 1e-5);
        Ok(())
    })
}

/// The message of an error that has to be there.
fn refused<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("accepted"),
        Err(e) => e.to_string().lines().next().unwrap_or_default().to_owned(),
    }
}

#[test]
fn bad_input_is_named() -> Result<()> {
    on_every_device(|| {
        let model = Model::load("llama_gqa_tied", DType::F32, Fusion::all())?;
        let run = |ids: Vec<u32>, rows: usize, position: usize| {
            let tokens = ids.len() / rows;
            let ids = Tensor::from_vec(ids, (rows, tokens), &device())?;
            model.llama.forward(&ids, position, &mut model.cache()?)
        };
        let limit = model.config.max_position_embeddings;
        assert!(refused(run(vec![], 1, 0)).contains("empty"));
        let vocab = model.config.vocab_size as u32;
        assert!(refused(run(vec![1, vocab], 1, 0)).contains("out of the vocabulary"));
        assert!(refused(run(vec![1; limit + 1], 1, 0)).contains("context length"));
        let mut cache = model.cache()?;
        let two = Tensor::ones((2, 3), DType::U32, &device())?;
        model.llama.forward(&two, 0, &mut cache)?;
        let one = two.narrow(0, 0, 1)?;
        assert!(refused(model.llama.forward(&one, 3, &mut cache)).contains("batch size"));
        Ok(())
    })
}

/// Zeros for whatever name is asked for, those that the model does not have among them.
#[test]
fn weights_of_zeros_load() -> Result<()> {
    on_every_device(|| {
        let config = Golden::open("llama_gqa_tied")?.config::<LlamaConfig>();
        let config = config.into_config(false);
        let zeros = candle_nn::VarBuilder::zeros(DType::F32, &device());
        let llama = Llama::load(zeros, &config)?;
        let mut cache = Cache::new(true, DType::F32, &config, &device())?;
        let ids = Tensor::new(&[[1u32, 2, 3]], &device())?;
        let logits = llama.forward(&ids, 0, &mut cache)?.flatten_all()?;
        assert!(logits.to_vec1::<f32>()?.iter().all(|logit| *logit == 0.));
        Ok(())
    })
}

#[test]
fn weights_that_do_not_fit_the_config_are_named() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("llama_gqa_tied")?;
        let config = golden.config::<LlamaConfig>().into_config(false);
        let load = |config: &Config| Llama::load(golden.weights(DType::F32)?, config);
        let deeper = Config {
            num_hidden_layers: 99,
            ..config.clone()
        };
        assert!(refused(load(&deeper)).contains("model.layers."));
        let wider = Config {
            intermediate_size: config.intermediate_size + 1,
            ..config.clone()
        };
        assert!(refused(load(&wider)).contains("gate_proj"));
        let heads = Config {
            num_attention_heads: 5,
            ..config.clone()
        };
        assert!(refused(load(&heads)).contains("heads"));
        Ok(())
    })
}

#[test]
fn configs_of_transformers_4_and_5_are_read() {
    let text = |rope: &str| {
        format!(
            r#"{{"model_type":"llama","hidden_size":64,"intermediate_size":128,"vocab_size":256,
            "num_hidden_layers":2,"num_attention_heads":4,"rms_norm_eps":1e-5,"hidden_act":"silu",
            "max_position_embeddings":512,{rope}"eos_token_id":[1,2]}}"#
        )
    };
    let read = |rope: &str| serde_json::from_str::<LlamaConfig>(&text(rope));
    let old = read(r#""rope_theta":500000.0,"rope_scaling":null,"#).unwrap();
    assert_eq!(old.rope_theta, 500_000.);
    let new = read(r#""rope_parameters":{"rope_theta":500000.0,"rope_type":"default"},"#).unwrap();
    assert_eq!(new.rope_theta, 500_000.);
    assert!(new.rope_scaling.is_none());
    let scaled = r#"{"rope_type":"llama3","rope_theta":5e5,"factor":8.0,"low_freq_factor":1.0,
        "high_freq_factor":4.0,"original_max_position_embeddings":128}"#;
    let scaled = read(&format!(r#""rope_parameters":{scaled},"#)).unwrap();
    assert_eq!(scaled.rope_scaling.unwrap().factor, 8.);
    let yarn = read(r#""rope_scaling":{"type":"yarn","factor":4.0},"#)
        .unwrap_err()
        .to_string();
    assert!(yarn.contains("yarn"), "{yarn}");
    let act = read(r#""mlp_bias":false,"head_dim":99,"#)
        .unwrap_err()
        .to_string();
    assert!(act.contains("head_dim"), "{act}");
}
