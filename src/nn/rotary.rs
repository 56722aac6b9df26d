//! Rotary position tables.

use crate::ops::RopeStyle;
use candle_core::{Device, Result, Tensor};

/// Cosines and sines of `position * frequency`, `[positions, R / 2]` in f32 each, made as far as
/// they are needed (RoFormer, Su et al. 2021).
#[derive(Clone, Debug)]
pub struct RotaryEmbedding {
    frequencies: Vec<f32>,
    style: RopeStyle,
    cos: Tensor,
    sin: Tensor,
}

impl RotaryEmbedding {
    /// Tables for `frequencies`, one for each rotated pair of dimensions.
    pub fn new(frequencies: Vec<f32>, style: RopeStyle, device: &Device) -> Result<Self> {
        let (cos, sin) = tables(&frequencies, 0, device)?;
        Ok(Self {
            frequencies,
            style,
            cos,
            sin,
        })
    }

    /// Which dimensions form a pair.
    pub fn style(&self) -> RopeStyle {
        self.style
    }

    /// Makes the tables reach `positions`, by doubling.
    pub fn reserve(&mut self, positions: usize) -> Result<()> {
        let held = self.cos.dims()[0];
        if positions > held {
            let grown = positions.max(2 * held).max(256);
            (self.cos, self.sin) = tables(&self.frequencies, grown, self.cos.device())?;
        }
        Ok(())
    }

    /// The tables `(cos, sin)`.
    pub fn tables(&self) -> (&Tensor, &Tensor) {
        (&self.cos, &self.sin)
    }
}

fn tables(frequencies: &[f32], positions: usize, device: &Device) -> Result<(Tensor, Tensor)> {
    // The angle is rounded to f32, as in Hugging Face's tables; its cosine then is exact to f32.
    let angles = (0..positions)
        .flat_map(|p| frequencies.iter().map(move |f| f64::from(p as f32 * f)))
        .collect::<Vec<_>>();
    let table = |f: fn(f64) -> f64| {
        let values: Vec<f32> = angles.iter().map(|a| f(*a) as f32).collect();
        Tensor::from_vec(values, (positions, frequencies.len()), device)
    };
    Ok((table(f64::cos)?, table(f64::sin)?))
}
