//! Prompts of random lengths, stops and restarts for as long as one likes: the memory stays flat, and
//! the tokens are those of a fresh process.
//!
//! `SOAK_SECONDS=3600 cargo test --release --test suite -- --ignored --nocapture soak::`
//!
//! `SOAK_DEVICE=cuda` runs on the first GPU. `SOAK_WEIGHTS=random` takes SmolLM2's shape with weights in bf16
//! that are the same in every process, where the real ones are not to be had.

use crate::subject::{self, Subject};
use crate::support::{self, on};
use crate::{smollm2, support::device};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::generation::{Generation, Options};
use candle_fused::models::llama::{self, Cache, Llama};
use candle_nn::VarBuilder;
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use std::collections::HashMap;
use std::process::Command;
use std::time::{Duration, Instant};

/// Prompts, by number, that a fresh process each has answered.
const PROMPTS: u64 = 12;

/// Tokens of an answer.
const TOKENS: usize = 24;

/// Printed by the child, in front of its tokens.
const MARK: &str = "tokens of a fresh process: ";

fn prompt(number: u64) -> Vec<u32> {
    let rng = &mut StdRng::seed_from_u64(number);
    let length = rng.random_range(1..300);
    (0..length).map(|_| rng.random_range(3..49_000)).collect()
}

fn is_set(name: &str, value: &str) -> bool {
    std::env::var(name).is_ok_and(|v| v == value)
}

/// The device that was asked for.
fn place() -> Device {
    let gpu = is_set("SOAK_DEVICE", "cuda");
    let found = support::devices().into_iter().find(|d| d.is_cuda() == gpu);
    found.expect("a GPU, and a build with CUDA")
}

fn model() -> Result<Box<dyn Subject>> {
    on(&place(), || match is_set("SOAK_WEIGHTS", "random") {
        true => random(),
        false => {
            let bytes = std::fs::read(smollm2::gguf())?;
            let model = subject::open::<llama::Config>(&bytes, Fusion::all())?;
            Ok(Box::new(model) as Box<dyn Subject>)
        }
    })
}

/// SmolLM2-135M's shape. Weights are uniform around zero, of the size that keeps a row's as it is.
fn random() -> Result<Box<dyn Subject>> {
    let config = llama::Config {
        hidden_size: 576,
        intermediate_size: 1536,
        vocab_size: 49_152,
        num_hidden_layers: 30,
        num_attention_heads: 9,
        num_key_value_heads: 3,
        rope_theta: 1e5,
        max_position_embeddings: 2048,
        tie_word_embeddings: true,
        ..llama::Config::config_7b_v2(false)
    };
    let rng = &mut StdRng::seed_from_u64(135);
    let mut matrix = |rows: usize, columns: usize| {
        let mut bytes = vec![0u8; rows * columns];
        rng.fill_bytes(&mut bytes);
        let size = (3. / columns as f32).sqrt() / 127.5;
        let value = |byte: &u8| (f32::from(*byte) - 127.5) * size;
        let values: Vec<f32> = bytes.iter().map(value).collect();
        Tensor::from_vec(values, (rows, columns), &Device::Cpu)?.to_dtype(DType::BF16)
    };
    let ones = Tensor::ones(576, DType::BF16, &Device::Cpu)?;
    let mut weights = HashMap::from([
        ("model.embed_tokens.weight".to_owned(), matrix(49_152, 576)?),
        ("model.norm.weight".to_owned(), ones.clone()),
    ]);
    for layer in 0..config.num_hidden_layers {
        let mut add = |name: &str, tensor| {
            weights.insert(format!("model.layers.{layer}.{name}.weight"), tensor);
        };
        add("input_layernorm", ones.clone());
        add("post_attention_layernorm", ones.clone());
        add("self_attn.q_proj", matrix(576, 576)?);
        add("self_attn.k_proj", matrix(192, 576)?);
        add("self_attn.v_proj", matrix(192, 576)?);
        add("self_attn.o_proj", matrix(576, 576)?);
        add("mlp.gate_proj", matrix(1536, 576)?);
        add("mlp.up_proj", matrix(1536, 576)?);
        add("mlp.down_proj", matrix(576, 1536)?);
    }
    let weights = VarBuilder::from_tensors(weights, DType::BF16, &device());
    let cache = Cache::new(true, DType::BF16, &config, &device())?;
    Ok(Box::new((Llama::load(weights, &config)?, cache)))
}

fn begin(model: &dyn Subject) -> Result<Generation> {
    model.generation(&Options {
        positions: Some(400),
        ..Default::default()
    })
}

/// The first `count` tokens of the answer, behind a sequence that is empty.
fn answer(generation: &mut Generation, number: u64, count: usize) -> Result<Vec<u32>> {
    let mut tokens = vec![generation.extend(0, &prompt(number))?];
    while tokens.len() < count {
        tokens.extend(generation.step()?[0]);
    }
    Ok(tokens)
}

/// What a child is asked for: the answer to the prompt that `SOAK_PROMPT` numbers.
#[test]
#[ignore = "part of the soak"]
fn a_fresh_process_answers() -> Result<()> {
    let number = std::env::var("SOAK_PROMPT").map_or(0, |n| n.parse().expect("a number"));
    let tokens = answer(&mut begin(&*model()?)?, number, TOKENS)?;
    println!("{MARK}{tokens:?}");
    assert_eq!(tokens.len(), TOKENS);
    Ok(())
}

fn of_a_fresh_process(number: u64) -> Result<Vec<u32>> {
    let out = Command::new(std::env::current_exe()?)
        .args([
            "soak::a_fresh_process_answers",
            "--exact",
            "--ignored",
            "--nocapture",
        ])
        .env("SOAK_PROMPT", number.to_string())
        .output()?;
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    let tokens = said
        .split_once(MARK)
        .and_then(|(_, rest)| rest.lines().next());
    let tokens = tokens.and_then(|tokens| serde_json::from_str(tokens).ok());
    Ok(tokens.unwrap_or_else(|| panic!("{said}")))
}

/// Resident bytes.
#[cfg(target_os = "linux")]
pub fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("statm");
    let pages: usize = pages
        .split(' ')
        .nth(1)
        .and_then(|n| n.parse().ok())
        .expect("pages");
    4096 * pages
}

/// Bytes of the GPU's memory that are taken, by whomever; 0 on the CPU.
#[cfg(target_os = "linux")]
fn on_the_gpu() -> Result<usize> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = place() {
        let info = cuda.cuda_stream().context().mem_get_info();
        let (free, all) = info.map_err(candle_core::Error::wrap)?;
        return Ok(all - free);
    }
    Ok(0)
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "runs for SOAK_SECONDS"]
fn memory_stays_flat_and_tokens_the_same() -> Result<()> {
    let seconds = std::env::var("SOAK_SECONDS").map_or(60, |n| n.parse().expect("seconds"));
    let expected: Vec<Vec<u32>> = (0..PROMPTS)
        .map(of_a_fresh_process)
        .collect::<Result<_>>()?;
    let model = model()?;
    let mut generation = begin(&*model)?;
    let rng = &mut StdRng::seed_from_u64(1);
    let (start, whole) = (Instant::now(), Duration::from_secs(seconds));
    let (mut rounds, mut tokens, mut warm) = (0usize, 0usize, None);
    while start.elapsed() < whole {
        let number = rng.random_range(0..PROMPTS);
        match rng.random_range(0..3) {
            // A new generation, or the old one from the start.
            0 => generation = begin(&*model)?,
            _ => generation.truncate(0, 0)?,
        }
        let count = rng.random_range(1..=TOKENS);
        let said = answer(&mut generation, number, count)?;
        let known = &expected[number as usize];
        assert_eq!(said, known[..count], "prompt {number}");
        rounds += 1;
        tokens += count + prompt(number).len();
        if warm.is_none() && start.elapsed() > whole / 5 {
            warm = Some([resident(), on_the_gpu()?]);
        }
    }
    let warm = warm.expect("a fifth of the time has passed");
    let end = [resident(), on_the_gpu()?];
    println!(
        "soak: {rounds} prompts, {tokens} tokens in {seconds} s; after a fifth {} bytes on the host and {} on the \
         GPU, at the end {} and {}",
        warm[0], warm[1], end[0], end[1]
    );
    for (warm, end) in warm.into_iter().zip(end) {
        assert!(end < warm + (16 << 20), "{warm} bytes grew to {end}");
    }
    if let Some(why) = generation.graph_refusal() {
        panic!("without a graph: {why}");
    }
    Ok(())
}
