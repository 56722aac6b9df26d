//! What ops that only move memory reach on a GPU, against its copy bandwidth in the same run.

use crate::quantized;
use candle_core::{DType, Device, Result, Tensor, bail};
use candle_fused::cuda::keep_freed_memory;
use candle_fused::cuda::profile::copy_bandwidth;
use candle_fused::ops::{
    self, AttentionParams, FlashDecoding, RopeStyle, flash_attention, flash_decoding,
};
use std::time::Instant;

/// Keys and values of a decoding step, in bytes.
const CACHE: usize = 256 << 20;
const HEADS: usize = 32;
const KV_HEADS: usize = 8;

const ROUNDS: usize = 7;
const CALLS: u32 = 30;

/// Reports the ops whose names are wanted, if there is a GPU.
pub fn report(wanted: impl Fn(&str) -> bool) -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let Device::Cuda(cuda) = &device else {
        bail!("expected a CUDA device");
    };
    // As the examples do: or the driver would map the memory of results again and again.
    keep_freed_memory(cuda, true)?;
    let bandwidth = copy_bandwidth(cuda)?;
    println!("\nGPU, {:.2} TB/s copied", bandwidth / 1e12);
    let line = |name: &str, bytes: usize, call: &dyn Fn() -> Result<Tensor>| {
        let seconds = median(&device, call)?;
        let rate = bytes as f64 / seconds;
        println!(
            "{name:<44}{:>9.1} us{:>9.1}{:>7.0}%",
            seconds * 1e6,
            rate / 1e9,
            100. * rate / bandwidth
        );
        Ok::<_, candle_core::Error>(())
    };
    if wanted("gpu rms_norm residual_add") {
        let (rows, width) = (16 << 10, 4096);
        let x = Tensor::randn(0f32, 1., (rows, width), &device)?.to_dtype(DType::BF16)?;
        let weight = x.narrow(0, 0, 1)?.flatten_all()?.copy()?;
        let bytes = 2 * rows * width;
        line("gpu rms_norm 16384x4096 bf16", 2 * bytes, &|| {
            ops::rms_norm(&x, &weight, 1e-5)
        })?;
        let other = x.affine(0.5, 1.)?;
        line("gpu residual_add 16384x4096 bf16", 3 * bytes, &|| {
            ops::residual_add(&x, &[&other])
        })?;
    }
    for dim in [64, 80, 96, 128, 256] {
        let name = format!("gpu flash_decoding d{dim} 256 MB bf16");
        if wanted(&name) {
            let step = Decoding::new(dim, &device)?;
            step.check()?;
            line(&name, CACHE, &|| step.call())?;
        }
    }
    quantized::report(&device, bandwidth, wanted)
}

/// Seconds of a call, the median over rounds of calls in a row.
fn median(device: &Device, call: &dyn Fn() -> Result<Tensor>) -> Result<f64> {
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        call()?;
        device.synchronize()?;
        let started = Instant::now();
        for _ in 0..CALLS {
            call()?;
        }
        device.synchronize()?;
        times.push(started.elapsed().as_secs_f64() / f64::from(CALLS));
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// A decoding step at the end of a full cache.
struct Decoding {
    qkv: Tensor,
    cache: [Tensor; 2],
    position: Tensor,
    tables: [Tensor; 2],
    scale: f32,
}

impl Decoding {
    fn new(dim: usize, device: &Device) -> Result<Self> {
        let slots = CACHE / (2 * KV_HEADS * dim * 2);
        let half = |shape: &[usize]| Tensor::randn(0f32, 1., shape, device)?.to_dtype(DType::BF16);
        let cache = || half(&[1, KV_HEADS, slots, dim]);
        // No rotation, so that the check needs none.
        let table = |value: f32| Tensor::full(value, (slots, dim / 2), device);
        Ok(Self {
            qkv: half(&[1, (HEADS + 2 * KV_HEADS) * dim])?,
            cache: [cache()?, cache()?],
            position: Tensor::new(&[slots as u32 - 1], device)?,
            tables: [table(1.)?, table(0.)?],
            scale: 1. / (dim as f32).sqrt(),
        })
    }

    fn call(&self) -> Result<Tensor> {
        let config = FlashDecoding {
            heads: HEADS,
            cos: &self.tables[0],
            sin: &self.tables[1],
            style: RopeStyle::HalfSplit,
            norms: None,
            scale: self.scale,
            window: None,
            softcap: None,
        };
        flash_decoding(
            &self.qkv,
            &self.cache[0],
            &self.cache[1],
            &self.position,
            &config,
        )
    }

    /// Fails if the kernel for prompts, which shares nothing with this one, finds anything else.
    fn check(&self) -> Result<()> {
        let ours = self.call()?;
        let dim = self.cache[0].dim(3)?;
        let q = self
            .qkv
            .narrow(1, 0, HEADS * dim)?
            .reshape((1, HEADS, 1, dim))?;
        let params = AttentionParams {
            scale: self.scale,
            causal: true,
            ..Default::default()
        };
        let other = flash_attention(&q, &self.cache[0], &self.cache[1], &params)?;
        let other = other.flatten_all()?.to_dtype(DType::F32)?;
        let ours = ours.flatten_all()?.to_dtype(DType::F32)?;
        let scale = other.abs()?.max(0)?.to_scalar::<f32>()?;
        let error = (ours - other)?.abs()?.max(0)?.to_scalar::<f32>()?;
        if error.is_nan() || error > 0.02 * scale {
            bail!("flash_decoding of {dim}: {error} from flash_attention, of {scale}");
        }
        Ok(())
    }
}
