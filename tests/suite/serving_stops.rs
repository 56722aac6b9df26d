//! Stop strings end a request with the token that completes one.

use crate::generation::{PROMPTS, load};
use crate::serving::{alone, count, finish, options, request};
use crate::support::on_every_device;
use candle_core::Result;
use candle_fused::Fusion;
use candle_fused::serving::{Engine, FinishReason, Options, Request};
use std::collections::BTreeMap;

/// Token t is the letters of t to the base of 26, two or one, and a comma.
fn vocabulary(tokens: usize) -> Vec<Box<[u8]>> {
    let letter = |i: usize| b'a' + (i % 26) as u8;
    let bytes = |token: usize| match token / 26 {
        0 => vec![letter(token), b','],
        high => vec![letter(high), letter(token), b','],
    };
    (0..tokens).map(|token| bytes(token).into()).collect()
}

/// Strings that end with a token, in the middle of one and in one that is not there, in requests that have to begin
/// anew; and one without.
#[test]
fn a_request_ends_with_the_token_that_completes_a_string() -> Result<()> {
    on_every_device(|| {
        let (model, config) = load("llama_gqa_tied", Fusion::all())?;
        let bytes = vocabulary(config.vocab_size);
        let mut engine = Engine::new(
            &model,
            &Options {
                pages: Some(14),
                ..options()
            },
        )?
        .with_vocabulary(bytes.clone().into());
        let mut wanted = BTreeMap::new();
        for (i, prompt) in PROMPTS.iter().cycle().take(9).enumerate() {
            let whole = alone(&model, &request(*prompt, 40))?;
            let text = |tokens: &[u32]| -> Vec<u8> {
                let bytes = tokens.iter().map(|token| &bytes[*token as usize][..]);
                bytes.collect::<Vec<_>>().concat()
            };
            // From within a token to within the third behind it.
            let from = text(&whole[..20]).len() + 1;
            let stop = text(&whole)[from..text(&whole[..23]).len() + 1].to_vec();
            let stop_strings = match i % 3 {
                0 => vec![],
                1 => vec![b"-".to_vec(), stop.clone()],
                _ => vec![b",".to_vec()],
            };
            let request = Request {
                stop_strings: stop_strings.clone(),
                ..request(*prompt, 40)
            };
            let ends = |tokens: &usize| {
                let text = text(&whole[..*tokens]);
                let there = |stop: &Vec<u8>| text.windows(stop.len()).any(|part| part == stop);
                stop_strings.iter().any(there)
            };
            let tokens = (1..=whole.len()).find(ends);
            assert!(tokens.is_none_or(|tokens| tokens <= 24));
            let reason = match tokens {
                Some(_) => FinishReason::StopString,
                None => FinishReason::Length,
            };
            let expected = whole[..tokens.unwrap_or(whole.len())].to_vec();
            wanted.insert(engine.submit(request)?, (expected, Some(reason)));
        }
        let mut given = BTreeMap::new();
        finish(&mut engine, &mut given)?;
        assert!(engine.stats().preemptions > 0, "{:?}", engine.stats());
        assert_eq!(given, wanted);
        Ok(())
    })
}

#[test]
fn strings_that_cannot_be_looked_for_are_refused() -> Result<()> {
    let (model, _) = load("llama_gqa_tied", Fusion::all())?;
    let with = |stop: &[u8]| Request {
        stop_strings: vec![stop.to_vec()],
        ..Request::new([1])
    };
    let mut engine = Engine::new(&model, &options())?;
    let error = engine.submit(with(b"a")).expect_err("it is refused");
    assert!(error.to_string().contains("the engine has no vocabulary"));
    // Tokens that it leaves out have no bytes.
    let mut engine = engine.with_vocabulary([].into());
    let error = engine.submit(with(b"")).expect_err("it is refused");
    assert!(error.to_string().contains("stop_strings: one is empty"));
    let id = engine.submit(Request {
        max_tokens: 3,
        ..with(b"a")
    })?;
    let mut given = BTreeMap::new();
    while !engine.is_idle() {
        count(&mut given, engine.step()?);
    }
    assert_eq!(given[&id].0.len(), 3);
    Ok(())
}
