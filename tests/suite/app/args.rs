use std::ffi::OsString;

use candle_core::DType;
use candle_fused::ops::SamplingParams;

use crate::common::args::{self, Args};
use crate::common::report::one_line;

fn parse(line: &str) -> Result<Args, String> {
    let words = std::iter::once("smollm")
        .chain(line.split_whitespace())
        .map(OsString::from);
    args::parse(words, "a/b").map_err(|error| one_line(&error))
}

#[test]
fn the_flags_are_those_of_candles_examples_and_our_own() {
    let args = parse(
        "--prompt hello --chat --cpu --dtype bf16 --model a/b --revision v1 --temperature 0.5 --top-p 0.9 --top-k 40 \
         --seed 7 -n 12 --repeat-penalty 1.2 --repeat-last-n 32 --tracing --fusion rope,linear --threads 2 --compare \
         --json out.json",
    )
    .unwrap();
    assert_eq!(args.prompt.as_deref(), Some("hello"));
    assert!(args.chat && args.tracing && args.compare && args.model.cpu && !args.stock);
    assert_eq!(args.model.dtype, Some(DType::BF16));
    assert_eq!(
        (args.model.model.as_deref(), args.model.revision.as_deref()),
        (Some("a/b"), Some("v1"))
    );
    assert_eq!(args.model.threads, Some(2));
    assert_eq!((args.sampling.seed, args.sampling.sample_len), (7, 12));
    assert_eq!(
        (args.sampling.repeat_penalty, args.sampling.repeat_last_n),
        (1.2, 32)
    );
    assert_eq!(
        args.sampling.params(),
        SamplingParams {
            temperature: 0.5,
            top_p: Some(0.9),
            top_k: Some(40),
            min_p: None,
            repeat_penalty: 1.2,
            repeat_last_n: 32,
            seed: 7,
        }
    );
    assert_eq!(parse("--sample-len 3").unwrap().sampling.sample_len, 3);
    assert!(parse("--stock").unwrap().stock);
}

#[test]
fn sampling_is_greedy_unless_asked_for() {
    let params = |line: &str| {
        let params = parse(line).unwrap().sampling.params();
        (params.temperature, params.top_k, params.top_p)
    };
    assert_eq!(params(""), (0., None, None));
    assert_eq!(params("--temperature 0"), (0., None, None));
    assert_eq!(params("--temperature 0 --top-k 3"), (0., Some(3), None));
    assert_eq!(params("--temperature 1"), (1., None, None));
    assert_eq!(params("--top-p 0.5"), (0.8, None, Some(0.5)));
    assert_eq!(params("--top-k 5"), (0.8, Some(5), None));
}

#[test]
fn what_cannot_be_meant_is_refused_on_one_line() {
    let cases = [
        ("--temperature -1", "must be 0 or more"),
        ("--temperature nan", "must be 0 or more"),
        ("--temperature inf", "must be 0 or more"),
        ("--temperature warm", "not a number"),
        ("--top-p 0", "above 0"),
        ("--top-p 1.1", "at most 1"),
        ("--top-p -0.5", "above 0"),
        ("--top-k 0", "at least 1"),
        ("-n 0", "at least 1"),
        ("-n -5", "at least 1"),
        ("--sample-len 1.5", "whole number"),
        ("--sample-len 99999999999999999999999", "too large"),
        ("--repeat-penalty 0", "above 0"),
        ("--repeat-penalty -1", "above 0"),
        ("--threads 0", "at least 1"),
        ("--dtype f64", "f32, f16 or bf16"),
        ("--fusion rope,nothing", "nothing"),
        ("--seed x", "--seed"),
        ("--prompt=", "prompt is empty"),
        ("--revision=", "it is empty"),
        ("--stock --compare", "--compare"),
        ("--stock --fusion all", "--fusion"),
        ("--mmap --dtype f32", "--dtype"),
        ("--mmap --quantize int8", "--quantize"),
        ("--unknown", "--unknown"),
        ("stray", "stray"),
        ("--prompt", "--prompt"),
    ];
    for (line, wanted) in cases {
        let Err(said) = parse(line) else {
            panic!("{line}: taken")
        };
        assert!(said.contains(wanted), "{line}: {said}");
        assert!(
            !said.contains('\n') && !said.starts_with("error"),
            "{line}: {said}"
        );
    }
}
