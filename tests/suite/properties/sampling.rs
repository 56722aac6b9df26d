//! `sample`.

use super::{cases, draw, float, lie, ok, own_lie, poison, seeded, size};
use crate::support::{devices, values};
use candle_core::{Device, Tensor};
use candle_fused::ops::sample::{SampleOptions, SamplingParams, reference, sample_with};
use proptest::prelude::*;

fn params() -> impl Strategy<Value = SamplingParams> {
    let temperature = prop_oneof![Just(0.), 0.05f64..4., Just(1e-30)];
    let share = || prop::option::of(0.01f64..=1.);
    let cut = (prop::option::of(1usize..60), share(), share());
    (temperature, cut, 0.5f32..2., 0usize..6, any::<u64>()).prop_map(
        |(temperature, (top_k, top_p, min_p), repeat_penalty, repeat_last_n, seed)| {
            SamplingParams {
                temperature,
                top_k,
                top_p,
                min_p,
                repeat_penalty,
                repeat_last_n,
                seed,
            }
        },
    )
}

proptest! {
    #![proptest_config(cases())]

    /// What is drawn can come: its probability in the plain form is above zero, or as good as that of
    /// the best where rounding decides. A mask allows some tokens or all, the first in any case.
    #[test]
    fn draws_can_come(
        (rows, vocab, dtype, lie) in (1usize..4, 1usize..80, float(), lie()),
        (params, exponent, seed) in (params(), -12i32..12, any::<u64>()),
        history in prop::collection::vec(0u32..80, 0..9),
        mask in prop::option::of(prop::array::uniform3(any::<u32>())),
    ) {
        let logits = ok(draw(&mut seeded(seed), &[rows, vocab], size(dtype, exponent), dtype))?;
        let words = vocab.div_ceil(32);
        let mask = mask.map(|[first, rest @ ..]| [&[first | 1], &rest[..]].concat()[..words].to_vec());
        for device in devices() {
            let logits = ok(lie.place(&logits, &device))?;
            let of_rows = mask.as_ref().map(|mask| Tensor::from_vec(mask.repeat(rows), (rows, words), &device));
            let options = SampleOptions { mask: ok(of_rows.transpose())?, ..Default::default() };
            let (params, history) = (vec![params.clone(); rows], vec![&history[..]; rows]);
            let tokens = ok(ok(sample_with(&logits, &params, &history, &options))?.tokens.to_vec1::<u32>())?;
            let (params, history) = (&params[0], history[0]);
            let scores = ok(values(&logits))?;
            for (token, row) in tokens.into_iter().zip(scores.chunks(vocab)) {
                prop_assert!((token as usize) < vocab);
                let row = ok(Tensor::new(row, &Device::Cpu))?;
                let expected = ok(reference(&row, params, history, mask.as_deref()))?;
                // A score is rounded when it is penalised, and the border of top-p when it is summed: a
                // token this near to one that can come may come too.
                let uncut = SamplingParams { top_k: None, top_p: None, min_p: None, ..params.clone() };
                let tempered = ok(reference(&row, &uncut, history, mask.as_deref()))?;
                let near = |p: f64| p > 0. && p <= tempered[token as usize] * 1.00001;
                let may = expected[token as usize] > 0.
                    || tempered.iter().zip(&expected).any(|(p, e)| *e > 0. && near(*p));
                prop_assert!(may || params.temperature < 0.05, "{token}: {expected:?}");
            }
        }
    }

    /// Rows are drawn by themselves, and what is no number never is.
    #[test]
    fn draws_keep_poison_in_its_row(
        (rows, vocab, dtype, lie) in (1usize..5, 2usize..60, float(), own_lie()),
        (params, poison, at, seed) in (params(), poison(), any::<prop::sample::Index>(), any::<u64>()),
    ) {
        let logits = ok(draw(&mut seeded(seed), &[rows, vocab], 8., dtype))?;
        let at = at.index(rows * vocab);
        let bad = ok(poison.put(&logits, at))?;
        for device in devices() {
            let run = |logits: &Tensor| {
                let logits = lie.place(logits, &device)?;
                let (params, history) = (vec![params.clone(); rows], vec![&[][..]; rows]);
                sample_with(&logits, &params, &history, &SampleOptions::default())?.tokens.to_vec1::<u32>()
            };
            let (clean, dirty) = (ok(run(&logits))?, ok(run(&bad))?);
            for (row, (clean, dirty)) in clean.iter().zip(&dirty).enumerate() {
                prop_assert!(row == at / vocab || clean == dirty, "row {row}");
                let value = ok(bad.get(row).and_then(|r| r.get(*dirty as usize)).and_then(|v| values(&v)))?[0];
                prop_assert!(!value.is_nan(), "row {row} drew token {dirty}");
            }
        }
    }
}
