//! The command line of the examples, a word a line.

use crate::common::args::{self, Args};
use candle_core::{Device, Tensor};
use candle_fused::ops::sample;
use clap::CommandFactory;
use std::ffi::OsString;

pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let words: Vec<OsString> = std::iter::once("smollm")
        .chain(text.lines())
        .map(OsString::from)
        .collect();
    let asked = Args::command().try_get_matches_from(&words);
    if asked.is_err_and(|e| !e.use_stderr()) {
        // Help and version, which end the process.
        return;
    }
    let args = match args::parse::<Args>(words, "a/b") {
        Ok(args) => args,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let _ = args.model.quantize.recipe();
    let _ = args.model.quantize.describe();
    // Sampling may still refuse them, by name.
    let logits = [[0f32, 3., -1., f32::NEG_INFINITY, 2., 2., 1e30, f32::NAN]];
    let logits = Tensor::new(&logits, &Device::Cpu).expect("numbers");
    if let Ok(token) = sample(&logits, &[args.sampling.params()], &[&[1, 4, 9]]) {
        let token = token.to_vec1::<u32>().expect("a token");
        assert!(token[0] < 7, "{token:?}");
    }
}
