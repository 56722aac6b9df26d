use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::{AttentionParams, flash_attention};
fn main() -> Result<()> {
    let a: Vec<usize> = std::env::args()
        .skip(1)
        .map(|a| a.parse().unwrap())
        .collect();
    let (t, n, reps) = (a[0], a[1], a[2]);
    let dt = if a.len() > 3 { DType::F16 } else { DType::F32 };
    let (hq, hkv, d, dev) = (9, 3, 64, Device::Cpu);
    let q = Tensor::randn(0f32, 1., (1, t, hq, d), &dev)?.transpose(1, 2)?;
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
    for _ in 0..reps {
        flash_attention(&q, &k, &v, &p)?;
    }
    Ok(())
}
