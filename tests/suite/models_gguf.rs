//! Every model from GGUF files.

use crate::common::distance::Distance;
use crate::gguf_file::bytes;
use crate::golden::{Golden, relative_error};
use crate::subject::{ALL, dense, gguf, gguf_in_place};
use crate::support::{device, on_every_device};
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{D, DType, Device, IndexOp, Result, Tensor};
use candle_fused::models::{gpt_neox, qwen3};
use candle_fused::{Fusion, trace};
use std::io::Cursor;

/// Unquantized files show that names, row order, rotary factors and metadata are read right.
#[test]
fn unquantized_files_agree_with_hugging_face() -> Result<()> {
    on_every_device(|| {
        for name in ALL {
            let golden = Golden::open(name)?;
            let bytes = bytes(&golden, GgmlDType::F32)?;
            let expected = &golden.outputs["hidden_states"];
            for fusion in [Fusion::all(), Fusion::none()] {
                let mut model = gguf(&golden, &bytes, fusion)?;
                let (states, logits) = model.hidden_states(&golden.input_ids()?, 0)?;
                for (i, state) in states.iter().enumerate() {
                    let error = relative_error(state, &expected.get(i)?)?;
                    assert!(error < 1e-4, "{name} {fusion} state {i}: {error:e}");
                }
                let error = relative_error(&logits, &golden.outputs["logits"])?;
                assert!(error < 1e-4, "{name} {fusion}: {error:e}");
            }
        }
        Ok(())
    })
}

/// `|a - b| / |b|` over all elements.
fn distance(a: &Tensor, b: &Tensor) -> Result<f64> {
    Ok(Distance::between(a, b)?.relative_norm())
}

/// Holds a file's logits to the error of candle's own quantized products, which round activations to int8, or where
/// nothing is quantized to what keys and values in 16 bits cost.
fn as_close_as_candle(golden: &Golden, file: &[u8]) -> Result<()> {
    let error = |fusion| -> Result<f64> {
        let mut model = gguf(golden, file, fusion)?;
        let (_, logits) = model.hidden_states(&golden.input_ids()?, 0)?;
        distance(&logits, &golden.outputs["logits"])
    };
    let (fused, plain) = (error(Fusion::all())?, error(Fusion::none())?);
    assert!(
        fused < plain.max(1e-3),
        "{}: {fused:e}, candle's {plain:e}",
        golden.name
    );
    Ok(())
}

/// Blocks run as fused ops, in whole prompts and token by token.
#[test]
fn quantized_files_run_fused_and_stay_close() -> Result<()> {
    on_every_device(|| {
        for name in ALL {
            let golden = Golden::open(name)?;
            let file = bytes(&golden, GgmlDType::Q8_0)?;
            as_close_as_candle(&golden, &file)?;
            let layers = golden.outputs["hidden_states"].dim(0)? as u64 - 1;
            let ids = golden.input_ids()?;
            let mut model = gguf(&golden, &file, Fusion::all())?;
            for (start, len) in [(0, 9), (9, 3), (12, 1)] {
                let part = ids.narrow(1, start, len)?;
                let (logits, calls) = trace::capture(|| model.forward(&part, start));
                logits?;
                // Matrices whose width does not divide by the blocks stay dense, and none of them
                // is behind a norm.
                let products = calls.count("quant_linear") + calls.count("linear");
                assert_eq!(products, 4 * layers + 1, "{name}");
                assert!(calls.count("quant_linear") > 2 * layers, "{name}");
                assert_eq!(calls.count("rope"), layers);
                assert_eq!(calls.count("flash_attention"), layers);
                let others = calls.by_op().values().sum::<u64>() - calls.count("embedding");
                assert_eq!(others, 6 * layers + 1, "{name}");
            }
        }
        Ok(())
    })
}

/// The embedding of a file without `output.weight` is the head, whatever it is stored in.
#[test]
fn a_missing_head_is_the_embedding() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("qwen2_bias")?;
        for dtype in [GgmlDType::F16, GgmlDType::Q8_0] {
            let file = bytes(&golden, dtype)?;
            let content = Content::read(&mut Cursor::new(&file))?;
            assert!(!content.tensor_infos.contains_key("output.weight"));
            as_close_as_candle(&golden, &file)?;
        }
        Ok(())
    })
}

/// Two ways of rounding activations to int8.
const ROUNDING: f64 = 3e-2;

#[test]
fn logits_follow_candle_transformers() -> Result<()> {
    use candle_transformers::models::{quantized_qwen2, quantized_qwen3};
    on_every_device(|| {
        let token = |ids: &Tensor, i: usize| ids.narrow(1, i, 1);
        let golden = Golden::open("qwen2_bias")?;
        let file = bytes(&golden, GgmlDType::Q8_0)?;
        let mut reader = Cursor::new(&file);
        let content = Content::read(&mut reader)?;
        let mut stock = quantized_qwen2::ModelWeights::from_gguf(content, &mut reader, &device())?;
        let mut fused = gguf(&golden, &file, Fusion::all())?;
        let ids = golden.input_ids()?.narrow(0, 0, 1)?;
        for (chunk, position) in [(ids.narrow(1, 0, 9)?, 0), (token(&ids, 9)?, 9)] {
            let (got, want) = (
                fused.forward(&chunk, position)?,
                stock.forward(&chunk, position)?,
            );
            assert_eq!(got.dims(), want.dims());
            assert!(distance(&got, &want)? < ROUNDING);
        }

        let golden = Golden::open("qwen3_qknorm")?;
        let file = bytes(&golden, GgmlDType::Q8_0)?;
        let mut reader = Cursor::new(&file);
        let mut content = Content::read(&mut reader)?;
        // candle-transformers rotates in f16 unless it is told otherwise.
        content
            .metadata
            .insert("general.dtype".into(), Value::U32(0));
        let mut stock = quantized_qwen3::ModelWeights::from_gguf(content, &mut reader, &device())?;
        let mut fused = gguf(&golden, &file, Fusion::all())?;
        let ids = golden.input_ids()?.narrow(0, 0, 1)?;
        for (chunk, position) in [(ids.narrow(1, 0, 9)?, 0), (token(&ids, 9)?, 9)] {
            let (got, want) = (
                fused.forward(&chunk, position)?,
                stock.forward(&chunk, position)?,
            );
            assert_eq!(got.dims(), want.dims());
            assert!(distance(&got, &want)? < ROUNDING);
        }
        Ok(())
    })
}

#[test]
fn what_does_not_fit_is_named() -> Result<()> {
    let refused = |name: &str, change: &dyn Fn(&mut Content)| -> Result<String> {
        let golden = Golden::open(name)?;
        let bytes = bytes(&golden, GgmlDType::F32)?;
        let mut reader = Cursor::new(&bytes);
        let mut content = Content::read(&mut reader)?;
        change(&mut content);
        let error = match golden.model_type().as_str() {
            "qwen3" => qwen3::ModelWeights::from_gguf(content, &mut reader, &Device::Cpu).err(),
            _ => gpt_neox::ModelWeights::from_gguf(content, &mut reader, &Device::Cpu).err(),
        };
        Ok(error.map(|e| e.to_string()).unwrap_or_default())
    };
    let set = |key: &str, value: Value| {
        let key = key.to_owned();
        move |c: &mut Content| drop(c.metadata.insert(key.clone(), value.clone()))
    };
    for (name, key, value, said) in [
        (
            "qwen3_qknorm",
            "qwen3.attention.key_length",
            Value::U32(16),
            "value_length",
        ),
        (
            "qwen3_qknorm",
            "qwen3.rope.dimension_count",
            Value::U32(33),
            "dimension_count",
        ),
        (
            "gpt_neox_parallel",
            "gptneox.rope.dimension_count",
            Value::U32(0),
            "rotated",
        ),
        (
            "gpt_neox_parallel",
            "gptneox.use_parallel_residual",
            Value::U32(1),
            "bool",
        ),
        (
            "gpt_neox_parallel",
            "gptneox.attention.layer_norm_epsilon",
            Value::F32(-1.),
            "above 0",
        ),
    ] {
        let message = refused(name, &set(key, value))?;
        assert!(message.contains(said), "{key}: {message}");
    }
    let unsaid = |c: &mut Content| drop(c.metadata.remove("gptneox.use_parallel_residual"));
    let message = refused("gpt_neox_parallel", &unsaid)?;
    assert!(message.contains("use_parallel_residual"), "{message}");
    for (name, tensor) in [
        ("qwen3_qknorm", "blk.1.attn_q_norm.weight"),
        ("gpt_neox_parallel", "blk.0.attn_qkv.bias"),
        ("gpt_neox_parallel", "blk.2.ffn_norm.bias"),
        ("gpt_neox_sequential", "output_norm.bias"),
    ] {
        let message = refused(name, &|c| drop(c.tensor_infos.remove(tensor)))?;
        assert!(message.contains(tensor), "{message}");
    }
    Ok(())
}

/// A file gives what the checkpoint it was made from gives, token by token.
#[test]
fn greedy_tokens_are_the_checkpoints() -> Result<()> {
    on_every_device(|| {
        for name in ALL {
            let golden = Golden::open(name)?;
            let file = bytes(&golden, GgmlDType::F32)?;
            let mut models = [
                dense(&golden, DType::F32, Fusion::all())?,
                gguf(&golden, &file, Fusion::all())?,
            ];
            let ids = golden.input_ids()?.narrow(0, 1, 1)?;
            let mut tokens = [Vec::new(), Vec::new()];
            for (model, tokens) in models.iter_mut().zip(&mut tokens) {
                let mut logits = model.forward(&ids, 0)?;
                for position in ids.dim(1)?..ids.dim(1)? + 12 {
                    let token = logits.argmax(D::Minus1)?;
                    tokens.push(token.i(0)?.to_scalar::<u32>()?);
                    logits = model.forward(&token.unsqueeze(0)?, position)?;
                }
            }
            assert_eq!(tokens[0], tokens[1], "{name}");
        }
        Ok(())
    })
}

/// Blocks that stay in the file go through the same products as repacked ones. Without those products
/// the tensors are copied, and the model is candle's.
#[test]
fn a_file_in_place_computes_what_a_repacked_one_does() -> Result<()> {
    for name in ALL {
        let golden = Golden::open(name)?;
        let ids = golden.input_ids()?;
        for dtype in [GgmlDType::Q4_0, GgmlDType::Q8_0, GgmlDType::F32] {
            let file = bytes(&golden, dtype)?;
            for fusion in [Fusion::all(), Fusion::none()] {
                let (_, repacked) = gguf(&golden, &file, fusion)?.hidden_states(&ids, 0)?;
                let mut model = gguf_in_place(&golden, &file, fusion)?;
                let (_, in_place) = model.hidden_states(&ids, 0)?;
                assert_eq!(
                    in_place.flatten_all()?.to_vec1::<f32>()?,
                    repacked.flatten_all()?.to_vec1::<f32>()?,
                    "{name} {dtype:?} {fusion}"
                );
            }
        }
    }
    Ok(())
}

/// A file that ends in the middle of a matrix is refused when it is loaded.
#[test]
fn a_file_in_place_that_is_cut_short_names_the_tensor() -> Result<()> {
    let golden = Golden::open("llama_gqa_tied")?;
    let mut file = bytes(&golden, GgmlDType::Q8_0)?;
    file.truncate(file.len() - 100);
    let error = gguf_in_place(&golden, &file, Fusion::all()).err();
    let error = error.expect("an error").to_string();
    assert!(error.contains("gguf: tensor `"), "{error}");
    assert!(error.contains("cut short"), "{error}");
    Ok(())
}
