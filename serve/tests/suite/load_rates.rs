//! What the benchmark of many clients makes of the times of tokens.

#[path = "../../benches/load/round.rs"]
mod round;

use std::time::{Duration, Instant};

use round::{Rates, Story, line_of_shares};

/// Asked for at 0, with news at these seconds.
fn story(begun: Instant, seconds: impl IntoIterator<Item = f64>, tokens: usize) -> Story {
    let at = |seconds| begun + Duration::from_secs_f64(seconds);
    Story {
        asked: begun,
        news: seconds.into_iter().map(at).collect(),
        tokens,
    }
}

fn near(got: Option<f64>, expected: f64) -> bool {
    got.is_some_and(|got| (got - expected).abs() < 1e-6 * expected)
}

#[test]
fn tokens_count_while_all_are_under_way() {
    let begun = Instant::now();
    // From 1 to 5 and from 3 to 7 seconds, a token a second: both from 3 to 5. The second has two in each piece of news.
    let first = story(begun, (1..=5).map(f64::from), 5);
    let second = story(begun, (3..=7).map(f64::from), 10);
    let rates = Rates::of(&[vec![first, second]]);
    assert!(near(rates.busy, 6. / 2.), "{rates:?}");
    assert!(near(rates.whole, 15. / 7.), "{rates:?}");
    assert!(near(rates.first_p50, 2.), "{rates:?}");
    assert!(rates.line().starts_with("3 tokens/s"), "{}", rates.line());
}

#[test]
fn answers_one_behind_the_other_are_never_all_under_way() {
    let begun = Instant::now();
    let round = vec![story(begun, [1., 2.], 2), story(begun, [3., 4.], 2)];
    let rates = Rates::of(&[round]);
    assert_eq!(rates.busy, None);
    assert!(near(rates.whole, 1.), "{rates:?}");
    assert_eq!(line_of_shares(&rates.over(&Rates::given(5.))), None);
}

#[test]
fn shares_are_of_what_both_have() {
    let begun = Instant::now();
    let rates = Rates::of(&[vec![story(begun, [1., 2., 3.], 3)]]);
    let share = rates.over(&Rates::given(4.));
    assert!(near(share.busy, 0.25) && share.whole.is_none(), "{share:?}");
    let line = line_of_shares(&share).expect("a share");
    assert!(
        line.contains(" 25.0 %") && !line.contains("in all"),
        "{line}"
    );
}
