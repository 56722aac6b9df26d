//! How far results are from what is expected. Both sides have to be finite: candle's `max` skips a NaN
//! that is not the first value, and any result is within an infinite bound.

use candle_core::{DType, Device, Result, Tensor, bail};

/// The distance between two lists of numbers.
#[derive(Clone, Copy, Debug)]
pub struct Distance {
    /// The largest difference.
    pub largest: f64,
    /// The largest expected magnitude.
    pub top: f64,
    /// The Euclidean norm of the differences.
    pub norm: f64,
    /// The Euclidean norm of what is expected.
    pub size: f64,
    /// How many numbers there are.
    pub count: usize,
}

impl Distance {
    /// # Errors
    /// As [`pairs`].
    pub fn of<G: Into<f64> + Copy, E: Into<f64> + Copy>(got: &[G], expected: &[E]) -> Result<Self> {
        let pairs = pairs(got, expected)?;
        let all = |f: fn(&(f64, f64)) -> f64| pairs.iter().map(f);
        Ok(Self {
            largest: all(|(g, e)| (g - e).abs()).fold(0., f64::max),
            top: all(|(_, e)| e.abs()).fold(0., f64::max),
            norm: all(|(g, e)| (g - e).powi(2)).sum::<f64>().sqrt(),
            size: all(|(_, e)| e * e).sum::<f64>().sqrt(),
            count: pairs.len(),
        })
    }

    /// Of tensors of one shape, on any device.
    ///
    /// # Errors
    /// If their shapes differ, or as [`pairs`].
    pub fn between(got: &Tensor, expected: &Tensor) -> Result<Self> {
        if got.dims() != expected.dims() {
            bail!(
                "a result of shape {:?}, expected {:?}",
                got.shape(),
                expected.shape()
            );
        }
        Self::of(&wide(got)?, &wide(expected)?)
    }

    /// The largest difference in parts of the largest magnitude.
    pub fn relative(&self) -> f64 {
        self.largest / self.top.max(f64::MIN_POSITIVE)
    }

    /// The norm of the differences in parts of that of what is expected.
    pub fn relative_norm(&self) -> f64 {
        self.norm / self.size.max(f64::MIN_POSITIVE)
    }

    /// The root of the mean square of the differences.
    pub fn rms(&self) -> f64 {
        self.norm / (self.count.max(1) as f64).sqrt()
    }
}

/// Results beside what is expected of them.
///
/// # Errors
/// If their numbers differ, or one of them is not finite, by its place.
pub fn pairs<G: Into<f64> + Copy, E: Into<f64> + Copy>(
    got: &[G],
    expected: &[E],
) -> Result<Vec<(f64, f64)>> {
    if got.len() != expected.len() {
        bail!("{} results, expected {}", got.len(), expected.len());
    }
    let pairs = got.iter().zip(expected).enumerate();
    pairs
        .map(|(i, (got, expected))| {
            let (got, expected) = ((*got).into(), (*expected).into());
            if !got.is_finite() || !expected.is_finite() {
                bail!("result {i} is {got}, expected {expected}: both have to be finite");
            }
            Ok((got, expected))
        })
        .collect()
}

/// The elements in row-major order.
fn wide(t: &Tensor) -> Result<Vec<f64>> {
    let t = t.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
    t.flatten_all()?.to_vec1()
}
