//! Prompts that are read again: on a GPU those of small models are recorded, and then give what they gave at first.

use crate::generation::{by_forward, load, options};
use crate::golden::Golden;
use crate::support::on_every_device;
use candle_core::{DType, Result};
use candle_fused::Fusion;
use candle_fused::generation::{Generation, Options};
use candle_fused::models::llama::{Llama, LlamaConfig};
use candle_fused::quant::Recipe;

/// Some ids below 96 that differ from prompt to prompt.
fn prompt(len: usize, seed: usize) -> Vec<u32> {
    (0..len)
        .map(|i| ((7 * i * i + 31 * i + 13 * seed) % 96) as u32)
        .collect()
}

/// Lengths around the ends of buckets, and past the last of them that there is room for.
#[test]
fn a_prompt_gives_its_tokens_whenever_it_is_read() -> Result<()> {
    const TOKENS: usize = 6;
    on_every_device(|| {
        let model = load("llama_gqa_tied", Fusion::all())?;
        let mut generation = Generation::new(&model.0, &options(2))?;
        for len in [1, 2, 15, 16, 17, 32, 33, 40, 63, 64, 65, 80] {
            for (round, seed) in [0, 1, 1, 0, 1, 0].into_iter().enumerate() {
                let prompt = prompt(len, seed);
                // The other sequence has buckets of its own.
                let index = round / 3;
                generation.truncate(index, 0)?;
                let mut tokens = vec![generation.extend(index, &prompt)?];
                while tokens.len() < TOKENS {
                    tokens.extend(generation.step()?[index]);
                }
                let expected = by_forward(&model, &prompt, TOKENS)?;
                assert_eq!(tokens, expected, "{len} tokens, round {round}");
                generation.truncate(index, 0)?;
            }
        }
        Ok(())
    })
}

/// What fills a recorded prompt up to its bucket is not seen by what follows, whose own keys and values take its place.
#[test]
fn a_conversation_goes_on_behind_a_recorded_prompt() -> Result<()> {
    on_every_device(|| {
        let model = load("llama3_rope", Fusion::all())?;
        let mut generation = Generation::new(&model.0, &options(1))?;
        for round in 0..4 {
            generation.truncate(0, 0)?;
            let first = prompt(19, round);
            let answer = generation.extend(0, &first)?;
            let second = [&[answer], &prompt(5, round + 1)[..]].concat();
            let token = generation.extend(0, &second)?;
            let expected = by_forward(&model, &[first, second].concat(), 1)?;
            assert_eq!(vec![token], expected, "round {round}");
        }
        Ok(())
    })
}

/// Quantized layers, whose kernels change with the number of rows: a prompt gives the same tokens at each reading.
#[test]
fn quantized_models_give_the_same_again() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("llama_gqa_tied")?;
        let config = golden.config::<LlamaConfig>().into_config(false);
        for format in ["int8", "int4-g32-z", "q4_0"] {
            for dtype in [DType::F32, DType::BF16] {
                // Its rows divide by no group.
                let recipe =
                    Recipe::new(format.parse()?).with("*.down_proj.weight", Some("int8".parse()?));
                let weights = golden.weights(dtype)?;
                let model = Llama::load_quantized(weights, &config, &recipe, Fusion::all())?;
                let room = Options {
                    positions: Some(192),
                    ..options(1)
                };
                let mut generation = Generation::new(&model, &room)?;
                let mut first = Vec::new();
                for round in 0..4 {
                    // A longer prompt in between has the shorter ones recorded anew. On Hopper the weights of the longest
                    // are dequantized together.
                    for (i, len) in [7, 12, 40, 70, 150, 12].into_iter().enumerate() {
                        generation.truncate(0, 0)?;
                        let mut tokens = vec![generation.extend(0, &prompt(len, 3))?];
                        for _ in 0..4 {
                            tokens.extend(generation.step()?[0]);
                        }
                        match first.get(i) {
                            None => first.push(tokens),
                            Some(first) => {
                                assert_eq!(tokens, *first, "{format} {dtype:?} {len} {round}");
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    })
}
