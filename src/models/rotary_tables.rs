//! Rotary tables that can be read on the host too, as candle-transformers' quantized models have them.

use crate::nn;
use crate::ops::RopeStyle;
use candle_core::{Device, Result, Tensor};

#[derive(Clone, Debug)]
pub struct RotaryTables {
    tables: nn::RotaryEmbedding,
    cos: Vec<f32>,
    sin: Vec<f32>,
    pairs: usize,
}

impl RotaryTables {
    pub fn new(
        dims: usize,
        positions: usize,
        theta: f64,
        style: RopeStyle,
        device: &Device,
    ) -> Result<Self> {
        let theta = theta as f32;
        let tables = nn::RotaryEmbedding::with_theta(dims, theta, positions, style, device)?;
        let (cos, sin) = tables.tables();
        // The tables may reach further than they were asked to.
        let values = |table: &Tensor| {
            let asked = table.narrow(0, 0, positions)?;
            asked.flatten_all()?.to_vec1::<f32>()
        };
        Ok(Self {
            cos: values(cos)?,
            sin: values(sin)?,
            pairs: dims / 2,
            tables,
        })
    }

    pub fn apply(&self, q: &Tensor, k: &Tensor, offset: usize) -> Result<(Tensor, Tensor)> {
        self.tables.apply(q, k, offset)
    }

    /// One position's; none past what was asked for.
    pub fn at(&self, position: usize) -> (&[f32], &[f32]) {
        let start = position.saturating_mul(self.pairs);
        let row = start..start.saturating_add(self.pairs);
        let of = |table| <[f32]>::get(table, row.clone()).unwrap_or_default();
        (of(&self.cos), of(&self.sin))
    }
}
