//! Sequences of a generation each by itself: stop ids, parking, sampling.

use crate::generation::{PROMPTS, by_forward, load, options};
use crate::golden::Golden;
use crate::support::on_every_device;
use candle_core::{DType, Result};
use candle_fused::Fusion;
use candle_fused::generation::{Generation, Options, SamplingParams};
use candle_fused::models::llama::{Llama, LlamaConfig};

/// A stop id ends its sequence, whether it is drawn by the prompt or later, and no other; what was given
/// stays, and the slot can be used again.
#[test]
fn stop_ids_end_their_sequence() -> Result<()> {
    on_every_device(|| {
        let model = load("llama_gqa_tied", Fusion::all())?;
        let expected = [0, 1].map(|i| by_forward(&model, PROMPTS[i], 24));
        let [first, second] = expected;
        let (first, second) = (first?, second?);
        let fresh = |&at: &usize| !first[..at].contains(&first[at]);
        let end = (2..24).find(fresh).expect("an id that is new");
        let until = |all: &[u32]| match all.iter().position(|id| *id == first[end]) {
            Some(at) => all[..=at].to_vec(),
            None => all.to_vec(),
        };
        let with_stop = Options {
            stop: vec![first[end]],
            ..options(2)
        };
        let mut generation = Generation::new(&model.0, &with_stop)?;
        let mut tokens = [
            vec![generation.extend(0, PROMPTS[0])?],
            vec![generation.extend(1, PROMPTS[1])?],
        ];
        for _ in 1..24 {
            for (all, token) in tokens.iter_mut().zip(generation.step()?) {
                all.extend(token);
            }
        }
        assert_eq!(tokens, [until(&first), until(&second)]);
        assert!(generation.is_finished(0));
        // The stop id itself is not held.
        assert_eq!(generation.ids(0), [PROMPTS[0], &first[..end]].concat());
        assert_eq!(generation.pending(0), None);

        // Alone at its end, a loop gets none rather than an error.
        generation.truncate(1, 0)?;
        assert_eq!(generation.step()?, [None, None]);
        // With the id that ended it, the sequence goes on.
        let next = generation.extend(0, &[first[end]])?;
        assert_eq!(next, by_forward(&model, PROMPTS[0], end + 2)?[end + 1]);
        assert_eq!(generation.is_finished(0), next == first[end]);
        // Another text in its place, whose prompt draws the id at once.
        generation.truncate(0, 0)?;
        let text = [PROMPTS[0], &first[..end]].concat();
        assert_eq!(generation.extend(0, &text)?, first[end]);
        assert!(generation.is_finished(0) && generation.pending(0).is_none());
        Ok(())
    })
}

/// Room by default is the model's context, or 2,048 positions of a longer one.
#[test]
fn positions_by_default_are_the_context_or_2048() -> Result<()> {
    on_every_device(|| {
        for (context, positions) in [(512, 512), (4096, 2048)] {
            let golden = Golden::open("llama_gqa_tied")?;
            let mut config = golden.config::<LlamaConfig>().into_config(false);
            config.max_position_embeddings = context;
            let model = Llama::load(golden.weights(DType::F32)?, &config)?;
            let mut generation = Generation::new(&model, &Options::default())?;
            let full = generation.extend(0, &vec![1; positions + 1]).unwrap_err();
            let expected = format!("{positions} positions");
            assert!(full.to_string().contains(&expected), "{full}");
            generation.extend(0, &vec![1; positions])?;
        }
        Ok(())
    })
}

/// A parked sequence gives none and keeps what it holds; others go on.
#[test]
fn a_parked_sequence_goes_on_where_it_was() -> Result<()> {
    on_every_device(|| {
        let model = load("llama3_rope", Fusion::all())?;
        let mut generation = Generation::new(&model.0, &options(2))?;
        let mut first = vec![generation.extend(0, PROMPTS[0])?];
        let mut second = vec![generation.extend(1, PROMPTS[1])?];
        for step in 0..12 {
            if step == 4 {
                generation.truncate(0, generation.ids(0).len())?;
            }
            if step == 8 {
                let last = *first.last().expect("a token");
                first.push(generation.extend(0, &[last])?);
            }
            let tokens = generation.step()?;
            assert_eq!(tokens[0].is_none(), (4..8).contains(&step));
            first.extend(tokens[0]);
            second.extend(tokens[1]);
        }
        assert_eq!(first, by_forward(&model, PROMPTS[0], first.len())?);
        assert_eq!(second, by_forward(&model, PROMPTS[1], 13)?);
        Ok(())
    })
}

/// Each sequence draws by its own parameters, also where they change on the way.
#[test]
fn sampling_is_set_for_each_sequence() -> Result<()> {
    on_every_device(|| {
        let model = load("llama_gqa_tied", Fusion::all())?;
        let hot = |seed| SamplingParams {
            temperature: 1.5,
            top_k: Some(40),
            repeat_penalty: 1.3,
            repeat_last_n: 100,
            seed,
            ..Default::default()
        };
        let drawn = |seed: u64| -> Result<[Vec<u32>; 2]> {
            let mut generation = Generation::new(&model.0, &options(2))?;
            generation.set_sampling(1, hot(seed))?;
            let mut tokens = [
                vec![generation.extend(0, PROMPTS[0])?],
                vec![generation.extend(1, PROMPTS[0])?],
            ];
            for step in 1..20 {
                if step == 12 {
                    generation.set_sampling(1, SamplingParams::default())?;
                }
                for (all, token) in tokens.iter_mut().zip(generation.step()?) {
                    all.extend(token);
                }
            }
            Ok(tokens)
        };
        let (one, again, other) = (drawn(3)?, drawn(3)?, drawn(4)?);
        assert_eq!(one, again);
        assert_ne!(one[1], other[1]);
        assert_eq!(one[0], by_forward(&model, PROMPTS[0], 20)?);
        let text = [PROMPTS[0], &one[1][..12]].concat();
        assert_eq!(one[1][12..], by_forward(&model, &text, 8)?);
        let mut generation = Generation::new(&model.0, &options(1))?;
        let said = |result: Result<()>| result.unwrap_err().to_string();
        assert!(said(generation.set_sampling(1, hot(1))).contains("expected below 1"));
        let cold = SamplingParams {
            temperature: -1.,
            ..Default::default()
        };
        assert!(said(generation.set_sampling(0, cold)).contains("temperature"));
        Ok(())
    })
}

/// Where nothing is said there is room for 2048 positions, or for the whole context of a smaller model.
#[test]
fn positions_have_a_default() -> Result<()> {
    let (model, config) = load("llama_gqa_tied", Fusion::all())?;
    let most = config.max_position_embeddings.min(2048);
    let mut generation = Generation::new(&model, &Options::default())?;
    generation.extend(0, &vec![1; most])?;
    let error = generation.extend(0, &[1]).unwrap_err().to_string();
    assert!(error.contains(&format!("the {most} positions")), "{error}");
    let stop = Options {
        stop: vec![config.vocab_size as u32],
        ..Default::default()
    };
    let error = Generation::new(&model, &stop)
        .err()
        .expect("accepted")
        .to_string();
    assert!(error.contains("stop id"), "{error}");
    Ok(())
}
