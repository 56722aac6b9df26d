//! `models::quantized_mistral` and `quantized_var_builder` against candle-transformers' own.

use crate::gguf_file;
use crate::golden::{Golden, relative_error};
use crate::support::{device, on_every_device, randn_on};
use candle_core::quantized::{GgmlDType, QTensor, gguf_file::write};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::models::{mistral, quantized_mistral as ours};
use candle_fused::{Fusion, quantized_var_builder};
use candle_transformers::models::quantized_mistral as stock;
use std::io::Cursor;
use std::sync::Arc;

/// Every public item with candle's signature.
#[test]
fn every_item_is_there() {
    let _: fn(&ours::Config, ours::VarBuilder) -> Result<ours::Model> = ours::Model::new;
    let _: fn(&mut ours::Model, &Tensor, usize) -> Result<Tensor> = ours::Model::forward;
    let _: fn(&mut ours::Model) = ours::Model::clear_kv_cache;
    let _: fn(ours::Config) -> mistral::Config = |config| config;
    let _: fn(ours::VarBuilder) -> quantized_var_builder::VarBuilder = |vb| vb;
    fn model<T: Clone + std::fmt::Debug>() {}
    model::<ours::Model>();

    use quantized_var_builder::VarBuilder;
    let _: fn(&'static str, &Device) -> Result<VarBuilder> = VarBuilder::from_gguf::<&str>;
    let _: fn(&[u8], &Device) -> Result<VarBuilder> = VarBuilder::from_gguf_buffer;
    let _: fn(&VarBuilder, usize) -> VarBuilder = VarBuilder::pp::<usize>;
    type Dims = (usize, usize);
    let _: fn(&VarBuilder, Dims, &str) -> Result<Arc<QTensor>> = VarBuilder::get::<Dims>;
    let _: fn(&VarBuilder, &str) -> Result<Arc<QTensor>> = VarBuilder::get_no_shape;
    let _: fn(&VarBuilder) -> &Device = VarBuilder::device;
    let _: fn(&VarBuilder, &str) -> bool = VarBuilder::contains_key;
}

const LAYERS: usize = 2;

fn config() -> ours::Config {
    ours::Config {
        vocab_size: 96,
        hidden_size: 128,
        intermediate_size: 160,
        num_hidden_layers: LAYERS,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        max_position_embeddings: 64,
        sliding_window: None,
        ..ours::Config::config_7b_v0_1(false)
    }
}

fn stock_config() -> stock::Config {
    let ours::Config {
        vocab_size,
        hidden_size,
        intermediate_size,
        num_hidden_layers,
        num_attention_heads,
        head_dim,
        num_key_value_heads,
        hidden_act,
        max_position_embeddings,
        rms_norm_eps,
        rope_theta,
        sliding_window,
        use_flash_attn,
    } = config();
    stock::Config {
        vocab_size,
        hidden_size,
        intermediate_size,
        num_hidden_layers,
        num_attention_heads,
        head_dim,
        num_key_value_heads,
        hidden_act,
        max_position_embeddings,
        rms_norm_eps,
        rope_theta,
        sliding_window,
        use_flash_attn,
    }
}

/// The bytes of a file with names of safetensors, `prefix` in front of them; without the tensors that `leaves`
/// says.
fn file(prefix: &str, dtype: GgmlDType, leaves: &str) -> Result<Vec<u8>> {
    let config = config();
    let (hidden, inner, vocab) = (128, config.intermediate_size, config.vocab_size);
    let mut shapes = vec![
        ("model.embed_tokens".to_owned(), vec![vocab, hidden]),
        ("model.norm".to_owned(), vec![hidden]),
        ("lm_head".to_owned(), vec![vocab, hidden]),
    ];
    for layer in 0..LAYERS {
        for (name, shape) in [
            ("input_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![hidden, hidden]),
            ("self_attn.k_proj", vec![hidden / 2, hidden]),
            ("self_attn.v_proj", vec![hidden / 2, hidden]),
            ("self_attn.o_proj", vec![hidden, hidden]),
            ("post_attention_layernorm", vec![hidden]),
            ("mlp.gate_proj", vec![inner, hidden]),
            ("mlp.up_proj", vec![inner, hidden]),
            ("mlp.down_proj", vec![hidden, inner]),
        ] {
            shapes.push((format!("model.layers.{layer}.{name}"), shape));
        }
    }
    let mut tensors = Vec::new();
    for (name, shape) in shapes.into_iter().filter(|(name, _)| name != leaves) {
        let values = randn_on(&shape, DType::F32, &Device::Cpu)?;
        let (values, dtype) = match shape.len() {
            1 => (values.affine(0.1, 1.)?, GgmlDType::F32),
            _ => (values.affine(0.1, 0.)?, dtype),
        };
        let tensor = QTensor::quantize(&values, dtype)?;
        tensors.push((format!("{prefix}{name}.weight"), tensor));
    }
    let tensors: Vec<_> = tensors.iter().map(|(k, t)| (k.as_str(), t)).collect();
    let mut file = Cursor::new(Vec::new());
    write(&mut file, &[], &tensors)?;
    Ok(file.into_inner())
}

#[test]
fn logits_are_candle_transformers() -> Result<()> {
    on_every_device(|| {
        // In blocks ours keeps 16 bits of activations and of the cache, stock 8 of the activations.
        for (dtype, tolerance) in [(GgmlDType::F32, 1e-5), (GgmlDType::Q8_0, 5e-2)] {
            let bytes = file("", dtype, "")?;
            let vb = stock::VarBuilder::from_gguf_buffer(&bytes, &device())?;
            let mut theirs = stock::Model::new(&stock_config(), vb)?;
            let vb = || ours::VarBuilder::from_gguf_buffer(&bytes, &device());
            let ids = Tensor::from_iter((0..12u32).map(|i| i * 37 % 96), &device())?;
            let ids = ids.reshape((1, 12))?;
            for fusion in [Fusion::all(), Fusion::none()] {
                let mut model = ours::Model::new_fused(&config(), vb()?, fusion)?;
                for (start, len) in [(0, 7), (7, 1), (8, 3), (11, 1), (0, 5)] {
                    let chunk = ids.narrow(1, start, len)?;
                    if start == 0 {
                        theirs.clear_kv_cache();
                        model.clear_kv_cache();
                    }
                    let (got, want) = (
                        model.forward(&chunk, start)?,
                        theirs.forward(&chunk, start)?,
                    );
                    assert_eq!((got.dims(), got.dtype()), (want.dims(), want.dtype()));
                    let error = relative_error(&got, &want)?;
                    assert!(error < tolerance, "{dtype:?} {start}: {error:e}");
                }
            }
        }
        Ok(())
    })
}

#[test]
fn a_builder_finds_what_candle_transformers_finds() -> Result<()> {
    on_every_device(|| {
        let bytes = file("inner.", GgmlDType::Q8_0, "")?;
        let theirs = stock::VarBuilder::from_gguf_buffer(&bytes, &device())?;
        let vb = ours::VarBuilder::from_gguf_buffer(&bytes, &device())?;
        let layer = vb.pp("inner").pp("model.layers").pp(1);
        let stock_layer = theirs.pp("inner").pp("model.layers").pp(1);
        let name = "mlp.up_proj.weight";
        let (got, want) = (
            layer.get((160, 128), name)?,
            stock_layer.get((160, 128), name)?,
        );
        assert_eq!((got.dtype(), got.data()?), (want.dtype(), want.data()?));
        let whole = "inner.model.layers.1.mlp.up_proj.weight";
        for key in [whole, name] {
            assert_eq!(
                layer.contains_key(key),
                stock_layer.contains_key(key),
                "{key}"
            );
        }
        for (got, said) in [
            (
                layer.get((128, 160), name),
                "has shape [160, 128], expected [128, 160]",
            ),
            (
                vb.get_no_shape(name),
                "tensor `mlp.up_proj.weight` is missing",
            ),
        ] {
            let error = got.expect_err("accepted").to_string();
            assert!(error.contains(said), "{error}");
        }
        // A model below a prefix.
        let mut model = ours::Model::new(&config(), vb.pp("inner"))?;
        let ids = Tensor::new(&[[1u32, 2, 3]], &device())?;
        assert_eq!(model.forward(&ids, 0)?.dims(), [1, 1, 96]);
        Ok(())
    })
}

#[test]
fn what_is_missing_is_named() -> Result<()> {
    let refused = |leaves: &str, config: &ours::Config| -> Result<String> {
        let bytes = file("", GgmlDType::F32, leaves)?;
        let vb = ours::VarBuilder::from_gguf_buffer(&bytes, &Device::Cpu)?;
        Ok(ours::Model::new(config, vb)
            .expect_err("accepted")
            .to_string())
    };
    for name in ["lm_head", "model.norm", "model.layers.1.self_attn.k_proj"] {
        let said = refused(name, &config())?;
        assert!(
            said.contains(&format!("`{name}.weight` is missing")),
            "{said}"
        );
    }
    let wide = ours::Config {
        intermediate_size: 192,
        ..config()
    };
    let said = refused("", &wide)?;
    assert!(
        said.contains("has shape [160, 128], expected [192, 128]"),
        "{said}"
    );
    let golden = Golden::open("mistral_window")?;
    let bytes = gguf_file::bytes(&golden, GgmlDType::F32)?;
    let vb = ours::VarBuilder::from_gguf_buffer(&bytes, &Device::Cpu)?;
    let said = ours::Model::new(&golden.config(), vb).expect_err("accepted");
    let said = said.to_string();
    assert!(said.contains("models::mistral::ModelWeights"), "{said}");
    let missing = quantized_var_builder::VarBuilder::from_gguf("/no/such/file", &Device::Cpu);
    let said = missing.err().expect("opened").to_string();
    assert!(said.contains("/no/such/file"), "{said}");
    Ok(())
}
