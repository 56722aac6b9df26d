//! Taking turns, medians, and what the memory delivers.

use candle_core::{Result, Tensor, bail};
use candle_fused::cpu::pool;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// A contender.
pub type Run = Box<dyn FnMut() -> Result<Tensor>>;

/// Fails if a result, candle's or the op's, is wrong.
pub type Check = Box<dyn Fn(&Tensor, &Tensor) -> Result<()>>;

/// One op on one shape.
pub struct Row {
    /// candle's operations.
    pub plain: Run,
    /// The op.
    pub fused: Run,
    /// Fails if either result is wrong.
    pub check: Check,
    /// Bytes that a call has to move at least.
    pub bytes: usize,
}

const ROUNDS: usize = 7;
const ROUND: Duration = Duration::from_millis(60);

/// Seconds of a call, the median over rounds in which both sides take a turn.
pub fn compare(plain: &mut Run, fused: &mut Run) -> Result<[f64; 2]> {
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (run, times) in [&mut *plain, &mut *fused].into_iter().zip(&mut times) {
            let started = Instant::now();
            let mut calls = 0;
            while started.elapsed() < ROUND {
                black_box(run()?);
                calls += 1;
            }
            times.push(started.elapsed().as_secs_f64() / f64::from(calls));
        }
    }
    Ok(times.map(|mut t| {
        t.sort_by(f64::total_cmp);
        t[t.len() / 2]
    }))
}

/// Bytes per second that all threads together read from memory.
pub fn read_bandwidth() -> f64 {
    let data = vec![1u64; 32 << 20];
    let mut best = f64::MAX;
    for _ in 0..5 {
        let started = Instant::now();
        pool::for_ranges(data.len(), 4096, |range| {
            let mut sums = [0u64; 8];
            for eight in data[range].chunks_exact(8) {
                sums.iter_mut()
                    .zip(eight)
                    .for_each(|(s, v)| *s = s.wrapping_add(*v));
            }
            black_box(sums);
        });
        best = best.min(started.elapsed().as_secs_f64());
    }
    std::mem::size_of_val(data.as_slice()) as f64 / best
}

/// Fails if `got` is further than `limit` of the largest magnitude from `expected`.
pub fn near(what: &str, got: &Tensor, expected: &[f64], limit: f64) -> Result<()> {
    let got = got
        .to_dtype(candle_core::DType::F64)?
        .flatten_all()?
        .to_vec1::<f64>()?;
    if got.len() != expected.len() {
        bail!("{what}: {} values, expected {}", got.len(), expected.len());
    }
    let top = expected.iter().fold(1e-30f64, |m, v| m.max(v.abs()));
    for (g, e) in got.iter().zip(expected) {
        if (g - e).abs() > limit * top || g.is_nan() {
            bail!("{what}: {g} where the reference has {e}");
        }
    }
    Ok(())
}
