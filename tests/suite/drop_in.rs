//! Every public item of the modules that this crate stands in for, named with candle's signature: one that
//! is missing or different does not compile.
#![allow(clippy::type_complexity, reason = "the types are candle's signatures")]

use crate::gguf_file::bytes;
use crate::golden::{Golden, relative_error};
use crate::support::{device, on_every_device};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::{GgmlDType, QTensor, ggml_file};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_fused::models::{
    llama, quantized_llama, quantized_qwen2, quantized_qwen3, qwen2, qwen3,
};
use candle_fused::nn;
use candle_nn::VarBuilder;
use std::collections::HashMap;
use std::io::{BufReader, Cursor};

type File = BufReader<std::fs::File>;

fn models<T: Clone + std::fmt::Debug + Send + Sync + Unpin + 'static>() {}

#[test]
fn llama_is_there() {
    let _: usize = llama::DEFAULT_MAX_SEQ_LEN;
    let _: fn(&llama::LlamaConfig) -> usize = llama::LlamaConfig::num_key_value_heads;
    let _: fn(llama::LlamaConfig, bool) -> llama::Config = llama::LlamaConfig::into_config;
    let _: fn(bool) -> llama::Config = llama::Config::config_7b_v1;
    let _: fn(bool) -> llama::Config = llama::Config::config_7b_v2;
    let _: fn(bool, DType, &llama::Config, &Device) -> Result<llama::Cache> = llama::Cache::new;
    let _: fn(&mut llama::Cache) -> &mut bool = |cache| &mut cache.use_kv_cache;
    let _: fn(VarBuilder, &llama::Config) -> Result<llama::Llama> = llama::Llama::load;
    let _: fn(&llama::Llama, &Tensor) -> Result<Tensor> = llama::Llama::embed;
    let _: fn(&llama::Llama, &Tensor, usize, &mut llama::Cache) -> Result<Tensor> =
        llama::Llama::forward_input_embed;
    let _: fn(&llama::Llama, &Tensor, usize, &mut llama::Cache) -> Result<Tensor> =
        llama::Llama::forward;
    models::<(
        llama::LlamaConfig,
        llama::Config,
        llama::Cache,
        llama::Llama,
    )>();
}

#[test]
fn quantized_models_are_there() {
    type Llama = quantized_llama::ModelWeights;
    let _: usize = quantized_llama::MAX_SEQ_LEN;
    assert_eq!(
        quantized_llama::MAX_SEQ_LEN,
        candle_transformers::models::quantized_llama::MAX_SEQ_LEN
    );
    let _: fn(ggml_file::Content, usize) -> Result<Llama> = Llama::from_ggml;
    let _: fn(Content, &mut File, &Device) -> Result<Llama> = Llama::from_gguf::<File>;
    let _: fn(&mut Llama, &Tensor, usize) -> Result<Tensor> = Llama::forward;
    let _: fn(&mut Llama) = Llama::clear_kv_cache;

    type Qwen2 = quantized_qwen2::ModelWeights;
    let _: fn(Content, &mut File, &Device) -> Result<Qwen2> = Qwen2::from_gguf::<File>;
    let _: fn(&mut Qwen2, &Tensor, usize) -> Result<Tensor> = Qwen2::forward;
    let _: fn(&mut Qwen2) = Qwen2::clear_kv_cache;

    type Qwen3 = quantized_qwen3::ModelWeights;
    let _: fn(Content, &mut File, &Device) -> Result<Qwen3> = Qwen3::from_gguf::<File>;
    let _: fn(&mut Qwen3, &Tensor, usize) -> Result<Tensor> = Qwen3::forward;
    let _: fn(&mut Qwen3) = Qwen3::clear_kv_cache;

    type Gguf = quantized_qwen3::Gguf<File>;
    let _: fn(Content, File, Device) -> Gguf = Gguf::new;
    // candle-transformers' layers are those of its own modules; these have `forward` alike.
    let _: fn(&mut Gguf, &str) -> Result<nn::Linear> = Gguf::qmatmul;
    let _: fn(&mut Gguf, &str, f64) -> Result<nn::RmsNorm> = Gguf::rms_norm;
    let _: fn(&Gguf) -> &HashMap<String, Value> = Gguf::metadata;
    let _: fn(&mut Gguf, &str) -> Result<QTensor> = Gguf::tensor;

    type Rotary = quantized_qwen3::RotaryEmbedding;
    let _: fn(DType, usize, usize, f64, &Device) -> Result<Rotary> = Rotary::new;
    let _: fn(&Rotary, &Tensor, &Tensor, usize) -> Result<(Tensor, Tensor)> = Rotary::apply;
    let _: fn(&Rotary, usize) -> (&[f32], &[f32]) = Rotary::cos_sin_at;
    models::<(Llama, Qwen2, Qwen3, Rotary)>();
}

#[test]
fn qwen_is_there() {
    let _: fn(&qwen2::Config, VarBuilder) -> Result<qwen2::Model> = qwen2::Model::new;
    let _: fn(&mut qwen2::Model, &Tensor, usize, Option<&Tensor>) -> Result<Tensor> =
        qwen2::Model::forward;
    let _: fn(&mut qwen2::Model) = qwen2::Model::clear_kv_cache;
    type Qwen2 = qwen2::ModelForCausalLM;
    let _: fn(&qwen2::Config, VarBuilder) -> Result<Qwen2> = Qwen2::new;
    let _: fn(&mut Qwen2, &Tensor, usize) -> Result<Tensor> = Qwen2::forward;
    let _: fn(&mut Qwen2) = Qwen2::clear_kv_cache;
    let _: fn(&qwen3::Config, VarBuilder) -> Result<qwen3::Model> = qwen3::Model::new;
    let _: fn(&mut qwen3::Model, &Tensor, usize) -> Result<Tensor> = qwen3::Model::forward;
    type Qwen3 = qwen3::ModelForCausalLM;
    let _: fn(&qwen3::Config, VarBuilder) -> Result<Qwen3> = Qwen3::new;
    let _: fn(&mut Qwen3, &Tensor, usize) -> Result<Tensor> = Qwen3::forward;
    let _: fn(&mut Qwen3) = Qwen3::clear_kv_cache;
    models::<(qwen2::Config, qwen2::Model, Qwen2)>();
    models::<(qwen3::Config, qwen3::Model, Qwen3)>();
}

#[test]
fn layers_are_there() {
    use nn::LayerNormConfig;
    use nn::kv_cache::Cache;
    use nn::{Embedding, KvCache, LayerNorm, Linear, RmsNorm};
    let _: fn(Tensor, Option<Tensor>) -> Linear = Linear::new;
    let _: fn(&Linear) -> &Tensor = Linear::weight;
    let _: fn(&Linear) -> Option<&Tensor> = Linear::bias;
    let _: fn(usize, usize, VarBuilder) -> Result<Linear> = nn::linear;
    let _: fn(usize, usize, VarBuilder) -> Result<Linear> = nn::linear_no_bias;
    let _: fn(usize, usize, bool, VarBuilder) -> Result<Linear> = nn::linear_b;

    let _: fn(Tensor, usize) -> Embedding = Embedding::new;
    let _: fn(&Embedding) -> &Tensor = Embedding::embeddings;
    let _: fn(&Embedding) -> usize = Embedding::hidden_size;
    let _: fn(usize, usize, VarBuilder) -> Result<Embedding> = nn::embedding;

    let _: fn(Tensor, Tensor, f64) -> LayerNorm = LayerNorm::new;
    let _: fn(Tensor, f64) -> LayerNorm = LayerNorm::new_no_bias;
    let _: fn(Tensor, f64) -> LayerNorm = LayerNorm::rms_norm;
    let _: fn(&LayerNorm) -> &Tensor = LayerNorm::weight;
    let _: fn(&LayerNorm) -> Option<&Tensor> = LayerNorm::bias;
    let _: fn(&LayerNorm) -> f64 = LayerNorm::eps;
    let _: fn(&LayerNorm) -> bool = LayerNorm::remove_mean;
    let _: fn(usize, LayerNormConfig, VarBuilder) -> Result<LayerNorm> = nn::layer_norm;
    let _: fn(usize, f64, VarBuilder) -> Result<LayerNorm> = nn::layer_norm;
    let _: fn(usize, f64, VarBuilder) -> Result<LayerNorm> = nn::layer_norm_no_bias;

    let _: fn(Tensor, f64) -> RmsNorm = RmsNorm::new;
    let _: fn(RmsNorm) -> LayerNorm = RmsNorm::into_inner;
    let _: fn(&RmsNorm) -> &Tensor = RmsNorm::weight;
    let _: fn(&RmsNorm) -> f64 = RmsNorm::eps;
    let _: fn(&RmsNorm, &Tensor) -> Result<Tensor> = RmsNorm::forward_diff;
    let _: fn(usize, f64, VarBuilder) -> Result<RmsNorm> = nn::rms_norm;

    let _: fn(usize, usize) -> Cache = Cache::new;
    let _: fn(&Cache) -> usize = Cache::dim;
    let _: fn(&Cache) -> usize = Cache::current_seq_len;
    let _: fn(&Cache) -> usize = Cache::max_seq_len;
    let _: fn(&Cache) -> &Option<Tensor> = Cache::all_data;
    let _: fn(&Cache) -> Result<Option<Tensor>> = Cache::current_data;
    let _: fn(&mut Cache) = Cache::reset;
    let _: fn(&mut Cache, &Tensor) -> Result<()> = Cache::append;
    let _: fn(usize, usize) -> KvCache = KvCache::new;
    let _: fn(&KvCache) -> &Cache = KvCache::k_cache;
    let _: fn(&KvCache) -> &Cache = KvCache::v_cache;
    let _: fn(&mut KvCache) -> &mut Cache = KvCache::k_cache_mut;
    let _: fn(&mut KvCache) -> &mut Cache = KvCache::v_cache_mut;
    let _: fn(&KvCache) -> Result<Option<Tensor>> = KvCache::k;
    let _: fn(&KvCache) -> Result<Option<Tensor>> = KvCache::v;
    let _: fn(&mut KvCache, &Tensor, &Tensor) -> Result<(Tensor, Tensor)> = KvCache::append;
    let _: fn(&KvCache) -> usize = KvCache::current_seq_len;
    let _: fn(&mut KvCache) = KvCache::reset;
    use nn::rotary_emb::{rope, rope_i, rope_i_slow, rope_slow, rope_thd};
    let _: [fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>; 5] =
        [rope, rope_i, rope_i_slow, rope_slow, rope_thd];
    models::<(Linear, Embedding, LayerNorm, RmsNorm, Cache, KvCache)>();
    fn module<T: Module>() {}
    module::<Linear>();
    module::<Embedding>();
    module::<LayerNorm>();
    module::<RmsNorm>();
}

#[test]
fn the_other_caches_have_candles_signatures() {
    use nn::kv_cache::{
        ConcatKvCache as Concat, IndicesAndMask, InterleavedKvCache as Interleaved,
        RawInterleavedKvCache as Raw, ScatteredCacheBuilder as Builder,
        ScatteredKvCache as Scattered,
    };
    let _: fn(usize, usize, DType, &Device) -> Result<Builder> = Builder::new;
    let _: fn(&Builder, usize, usize) -> Result<Scattered> = Builder::make_cache;
    let _: fn(&Builder) -> &[usize] = Builder::positions;
    let _: fn(&mut Builder) = Builder::reset;
    let _: fn(&Builder) -> usize = Builder::batch_size;
    let _: fn(&mut Builder, usize) = Builder::reset_batch_index;
    let _: fn(&mut Builder, usize, &[bool]) -> Result<IndicesAndMask> = Builder::indices_and_mask;
    let _: fn(&Builder) -> &Device = Builder::device;
    let _: fn(&IndicesAndMask) -> &Tensor = IndicesAndMask::mask;
    type Pair = (Tensor, Tensor);
    let _: fn(&mut Scattered, &Tensor, &Tensor, &IndicesAndMask) -> Result<Pair> =
        Scattered::append;
    let _: [fn(&Scattered) -> &Tensor; 2] = [Scattered::k, Scattered::v];

    let _: fn(usize) -> Concat = Concat::new;
    let _: [fn(&Concat) -> usize; 2] = [Concat::current_seq_len, Concat::dim];
    let _: fn(&Concat) -> bool = Concat::is_empty;
    let _: fn(&mut Concat, &Tensor, &Tensor) -> Result<Pair> = Concat::append;
    let _: fn(&mut Concat) = Concat::reset;
    let _: [fn(&Concat) -> Option<&Tensor>; 2] = [Concat::k, Concat::v];
    let _: [fn(&mut Concat) -> Option<&mut Tensor>; 2] = [Concat::k_mut, Concat::v_mut];
    let _: fn(Concat) -> Option<Pair> = Concat::into_inner;

    let _: fn(usize) -> Interleaved = Interleaved::new;
    let _: [fn(&Interleaved) -> usize; 2] = [Interleaved::current_seq_len, Interleaved::head_dim];
    let _: fn(&Interleaved) -> bool = Interleaved::is_empty;
    let _: fn(&mut Interleaved, &Tensor, &Tensor) -> Result<Tensor> = Interleaved::append;
    let _: fn(&Interleaved) -> Option<&Tensor> = Interleaved::kv;
    let _: fn(&mut Interleaved) = Interleaved::reset;

    let _: fn(usize, usize, usize) -> Raw = Raw::new;
    let _: [fn(&Raw) -> usize; 3] = [Raw::len, Raw::h_kv, Raw::d];
    let _: fn(&Raw) -> bool = Raw::is_empty;
    let _: fn(&mut Raw, &[f32], &[f32]) = Raw::write_kv;
    let _: fn(&mut Raw, &[f32], &[f32], usize) = Raw::write_kv_batch;
    let _: fn(&Raw) -> &[f32] = Raw::data;
    let _: fn(&mut Raw) = Raw::reset;
    let _: fn(&mut [f32], &[f32], &[f32], usize, usize) = nn::kv_cache::rope_i_inplace;
}

#[test]
fn the_rotating_cache_has_candles_signatures() {
    use nn::kv_cache::{RotatingCache as One, RotatingKvCache as Both};
    type Pair = (Tensor, Tensor);
    let _: fn(usize, usize) -> One = One::new;
    let _: [fn(&One) -> usize; 4] = [
        One::offset,
        One::dim,
        One::current_seq_len,
        One::max_seq_len,
    ];
    let _: fn(&One) -> &Option<Tensor> = One::all_data;
    let _: fn(&One) -> Result<Option<Tensor>> = One::current_data;
    let _: fn(&mut One) = One::reset;
    let _: fn(&mut One, &Tensor) -> Result<Tensor> = One::append;
    let _: fn(&One, usize) -> Vec<usize> = One::positions;
    let _: fn(&One, usize, &Device) -> Result<Option<Tensor>> = One::attn_mask;
    let _: fn(usize, usize) -> Both = Both::new;
    let _: [fn(&Both) -> &One; 2] = [Both::k_cache, Both::v_cache];
    let _: [fn(&mut Both) -> &mut One; 2] = [Both::k_cache_mut, Both::v_cache_mut];
    let _: [fn(&Both) -> Result<Option<Tensor>>; 2] = [Both::k, Both::v];
    let _: fn(&mut Both, &Tensor, &Tensor) -> Result<Pair> = Both::append;
    let _: [fn(&Both) -> usize; 2] = [Both::offset, Both::current_seq_len];
    let _: fn(&Both, usize, &Device) -> Result<Option<Tensor>> = Both::attn_mask;
    let _: fn(&Both, usize) -> Vec<usize> = Both::positions;
    let _: fn(&mut Both) = Both::reset;
    models::<(One, Both)>();
}

/// Layers and tables out of a file, against candle-transformers' own.
#[test]
fn a_files_layers_are_candle_transformers() -> Result<()> {
    use candle_transformers::models::quantized_qwen3 as stock;
    on_every_device(|| {
        let golden = Golden::open("qwen3_qknorm")?;
        let file = bytes(&golden, GgmlDType::Q8_0)?;
        let content = || Content::read(&mut Cursor::new(&file));
        let mut theirs = stock::Gguf::new(content()?, Cursor::new(&file), device());
        let mut ours = quantized_qwen3::Gguf::new(content()?, Cursor::new(&file), device());
        assert_eq!(ours.metadata().len(), theirs.metadata().len());
        let x = Tensor::arange(0f32, 128., &device())?.reshape((2, 64))?;
        let x = ((x / 64.)? - 1.)?;
        let name = "blk.0.ffn_norm.weight";
        let (norm, stock_norm) = (ours.rms_norm(name, 1e-6)?, theirs.rms_norm(name, 1e-6)?);
        let (x, expected) = (norm.forward(&x)?, stock_norm.forward(&x)?);
        assert!(relative_error(&x, &expected)? < 1e-6);
        let name = "blk.0.ffn_up.weight";
        let (up, stock_up) = (ours.qmatmul(name)?, theirs.qmatmul(name)?);
        assert!(relative_error(&up.forward(&x)?, &stock_up.forward(&x)?)? < 1e-2);
        let [got, want] = [ours.tensor(name)?, theirs.tensor(name)?];
        assert_eq!((got.shape(), got.dtype()), (want.shape(), want.dtype()));
        let missing = ours.qmatmul("blk.9.ffn_up.weight").expect_err("accepted");
        assert!(missing.to_string().contains("blk.9.ffn_up.weight"));

        let theirs = stock::RotaryEmbedding::new(DType::F32, 32, 40, 1e4, &device())?;
        let ours = quantized_qwen3::RotaryEmbedding::new(DType::F32, 32, 40, 1e4, &device())?;
        let q = Tensor::arange(0f32, 192., &device())?.reshape((1, 2, 3, 32))?;
        let (got, want) = (ours.apply(&q, &q, 9)?, theirs.apply(&q, &q, 9)?);
        assert!(relative_error(&got.0, &want.0)? < 1e-5);
        assert!(relative_error(&got.1, &want.1)? < 1e-5);
        for ((a, b), (c, d)) in [0, 1, 39].map(|p| (ours.cos_sin_at(p), theirs.cos_sin_at(p))) {
            let all = a.iter().chain(b).zip(c.iter().chain(d));
            assert_eq!((a.len(), b.len()), (c.len(), d.len()));
            all.for_each(|(x, y)| assert!((x - y).abs() < 1e-6));
        }
        assert!(ours.cos_sin_at(40).0.is_empty() && ours.cos_sin_at(usize::MAX).1.is_empty());
        Ok(())
    })
}

/// A GGML file, whose tensors are those of a GGUF file under other names.
fn ggml(golden: &Golden, dtype: GgmlDType) -> Result<ggml_file::Content> {
    let config = golden.config::<llama::LlamaConfig>().into_config(false);
    let file = bytes(golden, dtype)?;
    let mut reader = Cursor::new(&file);
    let content = Content::read(&mut reader)?;
    let mut tensors = HashMap::new();
    for name in content.tensor_infos.keys() {
        let mut new = name.clone();
        for (gguf, ggml) in [
            ("token_embd", "tok_embeddings"),
            ("output_norm", "norm"),
            ("blk.", "layers."),
            ("attn_norm", "attention_norm"),
            ("attn_output", "attention.wo"),
            ("attn_q", "attention.wq"),
            ("attn_k", "attention.wk"),
            ("attn_v", "attention.wv"),
            ("ffn_gate", "feed_forward.w1"),
            ("ffn_down", "feed_forward.w2"),
            ("ffn_up", "feed_forward.w3"),
        ] {
            new = new.replace(gguf, ggml);
        }
        tensors.insert(new, content.tensor(&mut reader, name, &device())?);
    }
    let head = content.tensor(&mut reader, "token_embd.weight", &device())?;
    tensors.entry("output.weight".into()).or_insert(head);
    Ok(ggml_file::Content {
        magic: ggml_file::VersionedMagic::GgjtV3,
        hparams: ggml_file::HParams {
            n_vocab: config.vocab_size as u32,
            n_embd: config.hidden_size as u32,
            n_mult: 0,
            n_head: config.num_attention_heads as u32,
            n_layer: config.num_hidden_layers as u32,
            n_rot: 0,
            ftype: 0,
        },
        vocab: ggml_file::Vocab {
            token_score_pairs: Vec::new(),
        },
        tensors,
        device: device(),
    })
}

#[test]
fn ggml_files_are_candle_transformers() -> Result<()> {
    use candle_transformers::models::quantized_llama as stock;
    on_every_device(|| {
        let golden = Golden::open("llama_gqa_tied")?;
        let config = golden.config::<llama::LlamaConfig>().into_config(false);
        let gqa = config.num_attention_heads / config.num_key_value_heads;
        let ids = golden.input_ids()?.narrow(0, 0, 1)?;
        for (dtype, tolerance) in [(GgmlDType::F32, 1e-5), (GgmlDType::Q8_0, 5e-2)] {
            let mut theirs = stock::ModelWeights::from_ggml(ggml(&golden, dtype)?, gqa)?;
            let mut ours = quantized_llama::ModelWeights::from_ggml(ggml(&golden, dtype)?, gqa)?;
            for (start, len) in [(0, 7), (7, 1), (8, 1)] {
                let chunk = ids.narrow(1, start, len)?;
                let (got, want) = (ours.forward(&chunk, start)?, theirs.forward(&chunk, start)?);
                assert_eq!(got.dims(), want.dims());
                let error = relative_error(&got, &want)?;
                assert!(error < tolerance, "{dtype:?} {start}: {error:e}");
            }
        }
        let refused = |change: &dyn Fn(&mut ggml_file::Content), gqa| -> Result<String> {
            let mut content = ggml(&golden, GgmlDType::F32)?;
            change(&mut content);
            let loaded = quantized_llama::ModelWeights::from_ggml(content, gqa);
            Ok(loaded.expect_err("accepted").to_string())
        };
        assert!(refused(&|_| (), 0)?.contains("gqa is 0"));
        assert!(refused(&|_| (), 5)?.contains("gqa is 5"));
        for name in [
            "output.weight",
            "layers.0.feed_forward.w1.weight",
            "layers.1.ffn_norm.weight",
        ] {
            let said = refused(&|c| drop(c.tensors.remove(name)), gqa)?;
            assert!(said.contains(name), "{said}");
        }
        let said = refused(&|c| c.hparams.n_vocab += 1, gqa)?;
        assert!(said.contains("tok_embeddings"), "{said}");
        assert!(refused(&|c| c.hparams.n_head = 0, gqa)?.contains("heads"));
        Ok(())
    })
}
