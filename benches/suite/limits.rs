//! What the machine can do at best, measured in the same run.

use crate::cases::Contender;
use crate::figures::{Limits, Work};
use crate::place::Place;
use crate::timing::{Effort, race};
use candle_core::{DType, Result, Tensor};
use candle_fused::cpu::pool;
use candle_fused::ops;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

/// Of this run.
pub fn measure(place: &Place, quick: bool) -> Result<Limits> {
    let (copy, read) = bandwidths(place)?;
    let mut gemm = BTreeMap::new();
    let mut dtypes = place.dtypes.clone();
    // candle's product of bf16 on the CPU is one of f32 behind a conversion.
    dtypes.retain(|dtype| place.device.is_cuda() || *dtype == DType::F32);
    for dtype in dtypes {
        let size = match (place.device.is_cuda(), quick) {
            (true, _) => 8192,
            (false, true) => 1024,
            (false, false) => 2048,
        };
        let square = |_| place.random(&[size, size], 1., dtype);
        let (a, b) = (square(0)?, square(1)?);
        let product = Contender::new("gemm", Vec::new(), move |_| Ok(vec![a.matmul(&b)?]));
        let flops = Work::product((size, size, size), 0, 0).flops;
        let best = flops / fastest(place, product)?;
        gemm.insert(dtype.as_str().to_owned(), best);
    }
    let x = place.x(&[1, 32], place.dtypes[0])?;
    let least = Contender::new("least", Vec::new(), move |_| {
        Ok(vec![ops::residual_add(&x, &[&x])?])
    });
    Ok(Limits {
        copy,
        read,
        gemm,
        dispatch: fastest(place, least)?,
    })
}

fn fastest(place: &Place, contender: Contender) -> Result<f64> {
    let taken = race(place, &[contender], Effort::of(place, false))?;
    Ok(taken[0].times.best)
}

/// Of a copy, and of reading.
fn bandwidths(place: &Place) -> Result<(f64, f64)> {
    #[cfg(feature = "cuda")]
    if let candle_core::Device::Cuda(cuda) = &place.device {
        let copy = candle_fused::cuda::profile::copy_bandwidth(cuda)?;
        return Ok((copy, copy));
    }
    let _ = place;
    Ok((host_copy()?, host_read()))
}

/// Times that the host's memory is gone through; the best counts, since neighbours only slow it.
const PASSES: usize = 5;

/// Elements of eight bytes in those buffers.
const LEN: usize = 32 << 20;

fn best(bytes: usize, pass: impl Fn()) -> f64 {
    let seconds = (0..PASSES).map(|_| {
        let started = Instant::now();
        pass();
        started.elapsed().as_secs_f64()
    });
    bytes as f64 / seconds.fold(f64::MAX, f64::min)
}

/// All threads read.
fn host_read() -> f64 {
    let data = vec![1u64; LEN];
    best(LEN * 8, || {
        pool::for_ranges(data.len(), 4096, |range| {
            let mut sums = [0u64; 8];
            for eight in data[range].chunks_exact(8) {
                let pairs = sums.iter_mut().zip(eight);
                pairs.for_each(|(s, v)| *s = s.wrapping_add(*v));
            }
            black_box(sums);
        });
    })
}

/// All threads copy.
fn host_copy() -> Result<f64> {
    let from = vec![1u64; LEN];
    let to = std::cell::RefCell::new(vec![0u64; LEN]);
    let rate = best(LEN * 16, || {
        pool::for_rows(&mut to.borrow_mut(), 1, 4096, |first, rows| {
            rows.copy_from_slice(&from[first..][..rows.len()]);
        });
    });
    black_box(Tensor::new(
        to.borrow()[LEN - 1] as f64,
        &candle_core::Device::Cpu,
    )?);
    Ok(rate)
}
