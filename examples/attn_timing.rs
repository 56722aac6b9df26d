use candle_core::{D, DType, Device, Result, Tensor};
use candle_fused::ops::{AttentionParams, flash_attention};
use std::time::Instant;
fn stock(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, mask: Option<&Tensor>) -> Result<Tensor> {
    let (b, h, t, d) = q.dims4()?;
    let (_, hk, n, _) = k.dims4()?;
    let rep = |x: &Tensor| {
        x.unsqueeze(2)?
            .expand((b, hk, h / hk, n, d))?
            .reshape((b, h, n, d))
    };
    let s = (q.contiguous()?.matmul(&rep(k)?.t()?)? * scale)?;
    let s = match mask {
        Some(m) => s.broadcast_add(m)?,
        None => s,
    };
    candle_nn::ops::softmax_last_dim(&s)?.matmul(&rep(v)?)
}
fn time(mut f: impl FnMut()) -> (f64, f64) {
    let t = Instant::now();
    while t.elapsed().as_millis() < 50 {
        f();
    }
    let mut v = vec![];
    let t = Instant::now();
    while t.elapsed().as_millis() < 700 || v.len() < 10 {
        let s = Instant::now();
        f();
        v.push(s.elapsed().as_secs_f64() * 1e6);
    }
    v.sort_by(f64::total_cmp);
    (v[v.len() / 2], v[v.len() / 10])
}
fn main() -> Result<()> {
    let dev = Device::Cpu;
    let only: Option<String> = std::env::args().nth(1);
    for (hq, hkv, d) in [(9, 3, 64), (32, 8, 128)] {
        for (t, n) in [
            (1, 64),
            (1, 512),
            (1, 2000),
            (8, 512),
            (64, 512),
            (512, 512),
        ] {
            if hq == 32 && t == 512 && only.is_none() {
                continue;
            }
            for dt in [DType::F32, DType::F16, DType::BF16] {
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
                let (m, lo) = time(|| {
                    flash_attention(&q, &k, &v, &p).unwrap();
                });
                let m2 = if dt == DType::F32 && only.is_none() {
                    let mask = (t > 1).then(|| Tensor::zeros((t, n), DType::F32, &dev).unwrap());
                    time(|| {
                        stock(&q, &k, &v, 0.125, mask.as_ref()).unwrap();
                    })
                    .0
                } else {
                    0.
                };
                println!(
                    "Hq {hq} Hkv {hkv} D {d} T {t:4} keys {n:5} {dt:?}: fused {m:9.1} us (p10 {lo:9.1})  stock {m2:9.1} us"
                );
            }
        }
    }
    Ok(())
}
