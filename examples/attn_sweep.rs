use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::{AttentionParams, flash_attention};
use std::time::Instant;
fn main() -> Result<()> {
    let a: Vec<usize> = std::env::args()
        .skip(1)
        .map(|a| a.parse().unwrap())
        .collect();
    let (hq, hkv, d, dev) = (9, 3, 64, Device::Cpu);
    let t = a[0];
    for &n in &a[1..] {
        let q = Tensor::randn(0f32, 1., (1, t, hq, d), &dev)?.transpose(1, 2)?;
        for dt in [DType::F32, DType::F16] {
            let k = Tensor::randn(0f32, 1., (1, hkv, 2048, d), &dev)?
                .to_dtype(dt)?
                .narrow(2, 0, n)?;
            let v = Tensor::randn(0f32, 1., (1, hkv, 2048, d), &dev)?
                .to_dtype(dt)?
                .narrow(2, 0, n)?;
            let p = AttentionParams {
                scale: 0.125,
                causal: true,
                ..Default::default()
            };
            let mut best = f64::MAX;
            let s = Instant::now();
            let reps = (2_000_000 / (n * t * t.min(32))).max(1).min(200);
            while s.elapsed().as_millis() < 400 {
                let s = Instant::now();
                for _ in 0..reps {
                    flash_attention(&q, &k, &v, &p)?;
                }
                best = best.min(s.elapsed().as_secs_f64() * 1e6 / reps as f64);
            }
            print!("T {t} keys {n} {dt:?}: {best:.2} us  ");
        }
        println!();
    }
    Ok(())
}
