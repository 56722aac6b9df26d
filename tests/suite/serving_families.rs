//! The engine runs every family of models, with the tokens of forward passes.

use crate::golden::Golden;
use crate::serving::{count, finish};
use crate::subject::{ALL, Subject, dense};
use crate::support::{device, on_every_device};
use candle_core::{D, DType, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::serving::{Options, Request};
use std::collections::BTreeMap;

/// The likeliest tokens, one forward pass after the other.
fn by_forward(model: &mut dyn Subject, prompt: &[u32], count: usize) -> Result<Vec<u32>> {
    model.clear()?;
    let mut tokens = prompt.to_vec();
    let mut position = 0;
    while tokens.len() < prompt.len() + count {
        let ids = Tensor::new(&tokens[position..], &device())?.unsqueeze(0)?;
        let logits = model.forward(&ids, position)?;
        position = tokens.len();
        tokens.push(logits.argmax(D::Minus1)?.squeeze(0)?.to_scalar()?);
    }
    Ok(tokens.split_off(prompt.len()))
}

/// Prompts of one page, of several chunks, and two with one beginning, in more requests than there are slots. The
/// longest goes past the windows that the models have.
#[test]
fn every_family_gives_the_tokens_of_forward_passes() -> Result<()> {
    on_every_device(|| {
        for name in ALL {
            let golden = Golden::open(name)?;
            let mut model = dense(&golden, DType::F32, Fusion::all())?;
            let mut engine = model.engine(&Options {
                sequences: 3,
                page: 8,
                prompt_budget: 16,
                ..Default::default()
            })?;
            // Of a model whose rotation changes behind its original context, the engine serves that.
            let long = engine.positions().min(96) as u32 * 5 / 12;
            let vocab = engine.vocab_size() as u32;
            let prompt =
                |seed: u32, tokens: u32| (0..tokens).map(move |i| (seed + i * 23) % (vocab - 1));
            let prompts: [Vec<u32>; 5] = [
                prompt(5, 3).collect(),
                prompt(11, long).collect(),
                prompt(2, 9).collect(),
                prompt(11, long).chain([7]).collect(),
                prompt(3, long / 2).collect(),
            ];
            let mut wanted = BTreeMap::new();
            for (i, prompt) in prompts.iter().enumerate() {
                let max_tokens = long as usize / 3 + 2 * i;
                let request = Request {
                    max_tokens,
                    ..Request::new(&prompt[..])
                };
                wanted.insert(engine.submit(request)?, (prompt, max_tokens));
            }
            let mut given = BTreeMap::new();
            finish(&mut engine, &mut given)?;
            let shared = u64::from(long) / 8 * 8;
            assert!(engine.stats().cached_tokens >= shared, "{name}");
            for (id, (prompt, max_tokens)) in wanted {
                let expected = by_forward(&mut *model, prompt, max_tokens)?;
                assert_eq!(given[&id].0, expected, "{name} request {id}");
            }
            assert_eq!(engine.graph_refusal(), None, "{name}");
        }
        Ok(())
    })
}

/// Mistral's window is shorter than the prompts: what lies before it does not count, also where its pages are shared.
#[test]
fn tokens_before_a_window_do_not_count() -> Result<()> {
    on_every_device(|| {
        let golden = Golden::open("mistral_window")?;
        let model = dense(&golden, DType::F32, Fusion::all())?;
        // Two layers of 7 tokens see 13 back.
        let end: Vec<u32> = (0..30).map(|i| (i * 19 + 4) % 120).collect();
        let mut given = BTreeMap::new();
        let mut engine = model.engine(&Options {
            positions: Some(96),
            page: 8,
            ..Default::default()
        })?;
        for beginning in [3u32, 50] {
            let text = (0..24).map(|i| (beginning + i) % 120);
            let prompt: Vec<u32> = text.chain(end.iter().copied()).collect();
            let request = Request {
                max_tokens: 20,
                ..Request::new(prompt)
            };
            engine.submit(request)?;
            while !engine.is_idle() {
                count(&mut given, engine.step()?);
            }
        }
        let tokens: Vec<_> = given.into_values().collect();
        assert_eq!(tokens[0], tokens[1]);
        Ok(())
    })
}
