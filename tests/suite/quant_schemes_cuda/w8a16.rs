//! INT8 weights and some tens of rows of x in 16-bit whole numbers, against float64.

use super::gemm_wna16::error;
use super::{on, random};
use crate::support::{architecture, devices, randn_on};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cuda::with_kernel;
use candle_fused::ops::linear::reference;
use candle_fused::ops::{Activation, Epilogue, Prologue, quant_linear};
use candle_fused::quant::Scheme;
use candle_fused::trace;

const KERNEL: &str = "gemm_w8a16_sm90";

fn hoppers() -> Result<Vec<Device>> {
    let mut hoppers = Vec::new();
    for device in devices() {
        if device.is_cuda() && architecture(&device)? == 90 {
            hoppers.push(device);
        }
    }
    Ok(hoppers)
}

/// Root mean square of the errors at most, over that of the outputs: norms and outputs are rounded to the dtype.
fn limit(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 5e-3,
        DType::F16 => 8e-4,
        _ => 5e-4,
    }
}

/// Rows of x, rows of each matrix, K: tiles that are full and not, one and several blocks of a cluster, matrices whose borders
/// are borders of half tiles.
const SHAPES: [(usize, &[usize], usize); 8] = [
    (17, &[300], 512),
    (32, &[256, 64, 72], 1024),
    (33, &[4096], 128),
    (47, &[96, 96], 2048),
    (63, &[1000], 4096),
    (64, &[200, 200], 1152),
    (20, &[34_000], 256),
    // Gates and what they multiply in one matrix.
    (40, &[400], 512),
];

#[test]
fn every_form_agrees_with_float64() -> Result<()> {
    for device in hoppers()? {
        for (i, (m, rows, k)) in SHAPES.into_iter().enumerate() {
            for (j, dtype) in [DType::F32, DType::F16, DType::BF16]
                .into_iter()
                .enumerate()
            {
                let activation = match rows {
                    [_, _] | [400] => [Activation::SwiGlu, Activation::GeGlu][j % 2],
                    _ => [Activation::None, Activation::Silu][j % 2],
                };
                check((m, rows, k), dtype, activation, (i + j) % 3, &device)?;
            }
        }
    }
    Ok(())
}

fn check(
    (m, rows, k): (usize, &[usize], usize),
    dtype: DType,
    activation: Activation,
    norm: usize,
    device: &Device,
) -> Result<()> {
    let mut weights = Vec::new();
    for rows in rows {
        weights.push(on(&random(Scheme::Int8, *rows, k), device)?);
    }
    let all: usize = rows.iter().sum();
    let width = match activation.gate() {
        Some(_) => all / 2,
        None => all,
    };
    // One of 128 values is much larger than the others, which lose bits by it.
    let size = |i: usize| if i % 128 == 5 { 100f32 } else { 1. };
    let sizes = Tensor::from_iter((0..k).map(size), device)?.to_dtype(dtype)?;
    let x = randn_on(&[m, k], dtype, device)?.broadcast_mul(&sizes)?;
    let gain = randn_on(&[k], dtype, device)?;
    let bias = randn_on(&[k], dtype, device)?;
    let prologue = match norm {
        0 => Prologue::None,
        1 => Prologue::RmsNorm {
            weight: &gain,
            eps: 1e-5,
        },
        _ => Prologue::LayerNorm {
            weight: &gain,
            bias: Some(&bias),
            eps: 1e-5,
        },
    };
    let bias = randn_on(&[all], dtype, device)?;
    let residual = randn_on(&[m, width], dtype, device)?;
    let epilogue = Epilogue {
        bias: Some(&bias),
        activation,
        residuals: &[&residual],
    };
    let (y, calls) = trace::capture(|| {
        with_kernel(Some(KERNEL), || {
            quant_linear(&x, prologue, &weights, &epilogue)
        })
    });
    let calls = calls.to_string();
    assert!(calls.contains(KERNEL), "{m} x {rows:?} x {k}: {calls}");
    let expected = reference(&x, prologue, &weights, &epilogue)?;
    let expected = Tensor::new(expected.concat(), &Device::Cpu)?.reshape((m, width))?;
    let (error, limit) = (error(&y?, &expected)?, limit(dtype));
    assert!(
        error <= limit,
        "{m} x {rows:?} x {k} {dtype:?} {activation:?} norm {norm}: {error:e} of {limit:e}"
    );
    Ok(())
}
