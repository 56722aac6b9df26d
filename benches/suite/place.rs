//! Where the ops run, and the random tensors that they run on.

use candle_core::{DType, Device, Result, Tensor};
use common::gpu;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Values that repeat in every tensor of the CPU; a prime, so that rows do not.
const VALUES: usize = 1_000_003;

/// Tensors of one shape that take turns at most.
const COPIES: usize = 64;

/// A device with its dtypes and its caches' size.
pub struct Place {
    pub device: Device,
    /// What dense weights and activations are in.
    pub dtypes: Vec<DType>,
    /// Bytes that take turns so that none of them is in a cache when its turn comes.
    cold: usize,
    values: Vec<f32>,
}

impl Place {
    /// Sets the device up as a model of ours does: what it frees stays with it, and candle makes no
    /// events.
    pub fn new(device: Device, quick: bool) -> anyhow::Result<Self> {
        gpu::tune(&device, true)?;
        let mut rng = StdRng::seed_from_u64(7);
        let mut even = || -> f32 { (0..4).map(|_| rng.random_range(-0.9f32..0.9)).sum() };
        Ok(Self {
            dtypes: match (device.is_cuda(), quick) {
                (true, _) => vec![DType::BF16],
                (false, true) => vec![DType::F32],
                (false, false) => vec![DType::F32, DType::BF16],
            },
            cold: if device.is_cuda() {
                192 << 20
            } else {
                64 << 20
            },
            values: (0..VALUES).map(|_| even()).collect(),
            device,
        })
    }

    /// Values around 0 that deviate by `deviation`.
    pub fn random(&self, dims: &[usize], deviation: f32, dtype: DType) -> Result<Tensor> {
        if self.device.is_cuda() {
            return Tensor::randn(0f32, deviation, dims, &self.device)?.to_dtype(dtype);
        }
        let values = self.values.iter().cycle().skip(dims[0] % VALUES);
        let count = dims.iter().product();
        let values: Vec<f32> = values.take(count).map(|v| v * deviation).collect();
        Tensor::from_vec(values, dims, &self.device)?.to_dtype(dtype)
    }

    /// Activations.
    pub fn x(&self, dims: &[usize], dtype: DType) -> Result<Tensor> {
        self.random(dims, 1., dtype)
    }

    /// Bytes that a contender may take for what lies between its operations.
    pub fn room(&self) -> usize {
        if self.device.is_cuda() {
            24 << 30
        } else {
            4 << 30
        }
    }

    /// How many weights of `bytes` are to take turns.
    pub fn turns(&self, bytes: usize) -> usize {
        self.cold.div_ceil(bytes.max(1)).clamp(1, COPIES)
    }

    /// `make` for the first of those, and copies of what it made for the others.
    pub fn in_turns<T>(
        &self,
        bytes: usize,
        first: T,
        copy: impl Fn(&T) -> Result<T>,
    ) -> Result<Vec<T>> {
        let mut all = Vec::new();
        for _ in 1..self.turns(bytes) {
            all.push(copy(&first)?);
        }
        all.push(first);
        Ok(all)
    }
}
