//! Products of dequantized weights, which behind a norm and with a gate are those of a kernel for dense weights, against
//! float64.

use super::gemm_wna16::error;
use super::gpus;
use crate::quant_linear::blocks_on;
use crate::support::randn_on;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cuda::with_kernel;
use candle_fused::ops::linear::reference;
use candle_fused::ops::{Activation, Epilogue, Prologue, quant_linear};

/// Root mean square of the errors at most: x, weights and outputs are in bf16.
const LIMIT: f64 = 6e-3;

#[test]
fn they_agree_with_float64() -> Result<()> {
    for device in gpus() {
        // Rows and channels that tiles do not divide, and K for which only gates are taken.
        for size in [[65, 96, 576], [130, 200, 320], [300, 192, 1024]] {
            for dtype in [DType::BF16, DType::F32] {
                for activation in [Activation::None, Activation::SwiGlu] {
                    for added in [false, true] {
                        check(&device, size, dtype, activation, added)?;
                    }
                }
            }
        }
    }
    Ok(())
}

fn check(
    device: &Device,
    [m, n, k]: [usize; 3],
    dtype: DType,
    activation: Activation,
    added: bool,
) -> Result<()> {
    let block = match k % 256 {
        0 => GgmlDType::Q4K,
        _ => GgmlDType::Q4_1,
    };
    let matrix = || blocks_on(n, k, block, device);
    let weights = [matrix()?, matrix()?];
    let width = match activation {
        Activation::None => 2 * n,
        _ => n,
    };
    let x = randn_on(&[m, k], dtype, device)?;
    let norm = randn_on(&[k], dtype, device)?;
    let prologue = Prologue::RmsNorm {
        weight: &norm,
        eps: 1e-5,
    };
    let bias = randn_on(&[2 * n], dtype, device)?;
    let residual = randn_on(&[m, width], dtype, device)?;
    let residuals = [&residual];
    let epilogue = Epilogue {
        bias: added.then_some(&bias),
        activation,
        residuals: if added { &residuals } else { &[] },
    };
    let y = with_kernel(Some("gemm_dequantized_cublaslt"), || {
        quant_linear(&x, prologue, &weights, &epilogue)
    })?;
    let expected = reference(&x, prologue, &weights, &epilogue)?;
    let expected = Tensor::new(expected.concat(), &Device::Cpu)?.reshape((m, width))?;
    let error = error(&y, &expected)?;
    assert!(
        error <= LIMIT,
        "{m}x{n}x{k} {block:?} {dtype:?} {activation:?} {added}: {error:e}"
    );
    Ok(())
}
