//! Random tensors that are the same in every run.

use candle_core::{DType, Device, Result, Tensor};
use rand::SeedableRng;
use rand::rngs::StdRng;
use std::cell::RefCell;

thread_local! {
    /// Every test runs on a thread of its own, so each draws the same numbers whatever runs beside.
    static RNG: RefCell<StdRng> = RefCell::new(StdRng::seed_from_u64(299_792_458));
}

/// Standard normal values.
pub fn randn(dims: &[usize], dtype: DType) -> Result<Tensor> {
    let values: Vec<f32> = RNG.with_borrow_mut(|rng| {
        (0..dims.iter().product()).map(|_| normal(rng)).collect()
    });
    Tensor::from_vec(values, dims, &Device::Cpu)?.to_dtype(dtype)
}

/// Box and Muller's transform.
fn normal(rng: &mut StdRng) -> f32 {
    use rand::Rng;
    let radius = (-2. * (1. - rng.random::<f64>()).ln()).sqrt();
    (radius * (2. * std::f64::consts::PI * rng.random::<f64>()).cos()) as f32
}
