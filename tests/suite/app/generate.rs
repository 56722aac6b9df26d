use std::cell::RefCell;
use std::ffi::OsString;
use std::rc::Rc;

use anyhow::Result;
use candle_core::{Device, Tensor};

use crate::common::args::{self, Args};
use crate::common::generate::{Generated, Generator, Stop, TextModel};
use crate::common::report::one_line;

const VOCAB: usize = 10;
const CONTEXT: usize = 12;

/// What was read, and where: one entry for each call.
type Log = Rc<RefCell<Vec<(usize, Vec<u32>)>>>;

/// Counts: the likeliest token is the last one plus one, then come the last one again and the last
/// one plus two.
struct Counter(Log);

impl TextModel for Counter {
    fn forward(&mut self, tokens: &[u32], position: usize) -> Result<Tensor> {
        self.0.borrow_mut().push((position, tokens.to_vec()));
        let last = tokens[tokens.len() - 1] as usize;
        let mut logits = [0f32; VOCAB];
        logits[last] = 5.0;
        logits[(last + 1) % VOCAB] = 6.0;
        logits[(last + 2) % VOCAB] = 4.5;
        Ok(Tensor::new(&logits, &Device::Cpu)?)
    }

    fn clear(&mut self) -> Result<()> {
        Ok(())
    }

    fn vocab_size(&self) -> usize {
        VOCAB
    }

    fn context_length(&self) -> usize {
        CONTEXT
    }
}

fn generator(flags: &str, end_ids: &[u32]) -> (Generator, Log) {
    let args: Args = args::parse(
        std::iter::once("x")
            .chain(flags.split_whitespace())
            .map(OsString::from),
        "a/b",
    )
    .unwrap();
    let log = Log::default();
    (
        Generator::new(
            Box::new(Counter(Rc::clone(&log))),
            &args.sampling,
            end_ids,
            true,
            args.model.kv_cache,
        ),
        log,
    )
}

fn run(generator: &mut Generator, prompt: &[u32]) -> (Vec<u32>, Generated) {
    let mut tokens = Vec::new();
    let generated = generator.generate(prompt, |token| {
        tokens.push(token);
        Ok(())
    });
    (tokens, generated.unwrap())
}

#[test]
fn a_text_ends_where_the_model_or_the_user_or_the_context_ends_it() {
    let (tokens, done) = run(&mut generator("-n 4", &[]).0, &[1, 2]);
    assert_eq!(
        (tokens, done.stop, done.prompt_tokens),
        (vec![3, 4, 5, 6], Stop::Length, 2)
    );
    assert_eq!(done.round.steps.len(), 3);
    let (tokens, done) = run(&mut generator("-n 50", &[5, 9]).0, &[2]);
    assert_eq!((tokens, done.stop), (vec![3, 4], Stop::End));
    let (tokens, done) = run(&mut generator("-n 50", &[]).0, &[1]);
    assert_eq!((tokens.len(), done.stop), (CONTEXT - 1, Stop::Context));
    let (tokens, done) = run(&mut generator("", &[2]).0, &[1]);
    assert_eq!((tokens, done.stop), (vec![], Stop::End));
}

#[test]
fn the_cache_is_used_again_where_the_text_goes_on() {
    let (mut generator, log) = generator("-n 2", &[]);
    run(&mut generator, &[1, 2]);
    assert_eq!(*log.borrow(), [(0, vec![1, 2]), (2, vec![3])]);
    log.borrow_mut().clear();
    let (_, done) = run(&mut generator, &[1, 2, 3, 4, 7]);
    assert_eq!(
        (log.borrow()[0].clone(), done.prompt_tokens),
        ((3, vec![4, 7]), 2)
    );
    log.borrow_mut().clear();
    let (_, done) = run(&mut generator, &[1, 2, 8]);
    assert_eq!(
        (log.borrow()[0].clone(), done.prompt_tokens),
        ((0, vec![1, 2, 8]), 3)
    );
    log.borrow_mut().clear();
    run(&mut generator, &[1, 2, 8, 9]);
    assert_eq!(
        log.borrow()[0],
        (0, vec![1, 2, 8, 9]),
        "the cache holds exactly this text, and one token has to be read"
    );
}

#[test]
fn the_penalty_looks_at_the_last_tokens_only() {
    let penalized = |flags: &str| run(&mut generator(&format!("-n 1 {flags}"), &[]).0, &[4, 3]).0;
    assert_eq!(penalized("--repeat-penalty 2"), [5]);
    assert_eq!(penalized("--repeat-penalty 2 --repeat-last-n 1"), [4]);
    assert_eq!(penalized("--repeat-penalty 2 --repeat-last-n 0"), [4]);
    assert_eq!(penalized(""), [4]);
}

#[test]
fn the_seed_fixes_what_is_sampled() {
    let sample = |seed: u64| {
        run(
            &mut generator(&format!("-n 9 --temperature 3 --seed {seed}"), &[]).0,
            &[1],
        )
        .0
    };
    assert_eq!(sample(1), sample(1));
    assert!((2..9).any(|seed| sample(seed) != sample(1)));
}

#[test]
fn prompts_that_cannot_be_read_are_errors() {
    let says = |prompt: &[u32]| {
        one_line(
            &generator("", &[])
                .0
                .generate(prompt, |_| Ok(()))
                .unwrap_err(),
        )
    };
    assert!(says(&[]).contains("prompt is empty"));
    assert!(says(&[1, 10]).contains("token 10"));
    assert!(says(&[1; CONTEXT]).contains("context"));
}
