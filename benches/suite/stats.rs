//! Medians, spreads, and how a cost grows.

use common::comparison::{median, percentile};
use serde::{Deserialize, Serialize};

/// Repeated measurements of one thing, in seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Times {
    /// The middle one.
    pub median: f64,
    /// The distance of the quartiles.
    pub spread: f64,
    /// The shortest one.
    pub best: f64,
    /// How many there are.
    pub rounds: usize,
}

impl Times {
    /// Of at least one measurement.
    pub fn of(seconds: &[f64]) -> Self {
        let at = |percent| percentile(seconds.to_vec(), percent);
        Self {
            median: median(seconds.to_vec()),
            spread: at(75.) - at(25.),
            best: seconds.iter().copied().fold(f64::INFINITY, f64::min),
            rounds: seconds.len(),
        }
    }

    /// The spread as a share of the median.
    pub fn noise(&self) -> f64 {
        self.spread / self.median
    }
}

/// `cost = factor * size ^ exponent`, fitted by least squares of the logarithms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PowerLaw {
    pub exponent: f64,
    pub factor: f64,
    /// The share of the logarithms' variance that the law explains.
    pub r2: f64,
}

impl PowerLaw {
    /// The law through `points` of size and cost; none where fewer than two sizes differ.
    pub fn fit(points: &[(f64, f64)]) -> Option<Self> {
        let logs: Vec<_> = points
            .iter()
            .filter(|(x, y)| *x > 0. && *y > 0.)
            .map(|(x, y)| (x.ln(), y.ln()))
            .collect();
        let n = logs.len() as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| logs.iter().map(of).sum::<f64>() / n;
        let (mx, my) = (mean(|p| p.0), mean(|p| p.1));
        let sum = |of: &dyn Fn(f64, f64) -> f64| -> f64 {
            logs.iter().map(|(x, y)| of(x - mx, y - my)).sum()
        };
        let (xx, xy, yy) = (sum(&|x, _| x * x), sum(&|x, y| x * y), sum(&|_, y| y * y));
        if logs.len() < 2 || xx < 1e-12 {
            return None;
        }
        let exponent = xy / xx;
        let r2 = if yy > 0. { xy * xy / (xx * yy) } else { 1. };
        Some(Self {
            exponent,
            factor: (my - exponent * mx).exp(),
            r2,
        })
    }
}
