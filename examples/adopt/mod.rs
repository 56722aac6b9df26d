//! One small model in three forms: as it stood in someone's repository, with single ops swapped in,
//! and with layers swapped in. Compare the files: `diff plain.rs ops.rs`, `diff ops.rs layers.rs`.

pub mod layers;
pub mod ops;
pub mod plain;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::{BTreeMap, HashMap};

/// The shape of the model, a Llama with a head of its own.
#[derive(Clone, Debug)]
pub struct Config {
    pub vocab: usize,
    pub hidden: usize,
    pub inner: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub eps: f64,
    pub theta: f32,
    pub positions: usize,
}

impl Config {
    pub fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }
}

/// What the three forms have in common.
pub trait Model {
    /// The logits `[B, vocab]` (f32) after the last of the tokens `[B, T]` at `position` and behind.
    fn forward(&mut self, ids: &Tensor, position: usize) -> Result<Tensor>;

    /// Forgets all positions.
    fn clear(&mut self);
}

/// The likeliest token of one sequence.
pub fn likeliest(logits: &Tensor) -> Result<u32> {
    logits.argmax(D::Minus1)?.squeeze(0)?.to_scalar()
}

/// Random weights, the same in every run, under the names that the model asks for: uniform, and
/// scaled so that activations keep their size from layer to layer.
pub fn weights(config: &Config, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
    let map = VarMap::new();
    plain::Model::new(
        config,
        VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu),
    )?;
    let data = map.data().lock().expect("nothing has panicked over it");
    let shapes: BTreeMap<_, _> = data.iter().map(|(n, v)| (n.clone(), v.dims())).collect();
    let mut rng = StdRng::seed_from_u64(299_792_458);
    let mut tensors = HashMap::new();
    for (name, dims) in shapes {
        let (center, spread) = match dims {
            [_, inputs] => (0., (3. / *inputs as f32).sqrt()),
            _ => (1., 0.5),
        };
        let values: Vec<f32> = (0..dims.iter().product())
            .map(|_| center + rng.random_range(-spread..spread))
            .collect();
        let tensor = Tensor::from_vec(values, dims, device)?.to_dtype(dtype)?;
        tensors.insert(name, tensor);
    }
    Ok(VarBuilder::from_tensors(tensors, dtype, device))
}
