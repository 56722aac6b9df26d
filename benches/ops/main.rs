//! Timings of the crate's cores, each against candle's own op.
//!
//! `cargo bench --bench ops -- [quant] [FILTER]`. Every contender is checked against candle first;
//! rounds of all contenders alternate and the median counts. Bandwidth is measured in the same run,
//! so that a decode step can be given in percent of what the memory delivers.

use std::time::{Duration, Instant};

mod quant;

/// Times each contender: `rounds` rounds in turn, each at least `round` long; gives the medians of
/// the seconds of a call.
pub fn compare(rounds: usize, round: Duration, contenders: &mut [&mut dyn FnMut()]) -> Vec<f64> {
    let calls: Vec<u32> = contenders
        .iter_mut()
        .map(|run| {
            run();
            let start = Instant::now();
            run();
            let once = start.elapsed().max(Duration::from_nanos(50));
            (round.as_secs_f64() / once.as_secs_f64())
                .ceil()
                .clamp(1.0, 1e6) as u32
        })
        .collect();
    let mut times = vec![Vec::new(); contenders.len()];
    for _ in 0..rounds {
        for ((run, calls), times) in contenders.iter_mut().zip(&calls).zip(&mut times) {
            let start = Instant::now();
            (0..*calls).for_each(|_| run());
            times.push(start.elapsed().as_secs_f64() / f64::from(*calls));
        }
    }
    let median = |mut t: Vec<f64>| {
        t.sort_by(f64::total_cmp);
        t[t.len() / 2]
    };
    times.into_iter().map(median).collect()
}

fn main() {
    let filters: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with("--"))
        .collect();
    quant::run(&filters);
}
