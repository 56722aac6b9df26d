//! Every form of the kernel for few quantized weights and several rows of x against float64.

use super::gemm_wna16::error;
use super::subjects::{SUBJECTS, Subject};
use crate::support::randn_on;
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cuda::with_kernel;
use candle_fused::ops::linear::reference;
use candle_fused::ops::{Activation, Epilogue, Prologue, quant_linear};
use candle_fused::trace;

/// Rows of x, rows of each of two matrices, K, and the form for them on a GPU of 132 multiprocessors: K blocks, N tiles and
/// rows of x.
const FORMS: [(usize, usize, usize, &str); 10] = [
    (5, 100, 576, "_8_1_8"),
    // Not whole steps of a K block.
    (8, 100, 72, "_8_1_8"),
    (8, 264, 1504, "_16_1_8"),
    (7, 1536, 576, "_8_3_8"),
    (32, 512, 2048, "_16_1_16"),
    (30, 1536, 576, "_8_3_16"),
    (64, 288, 1536, "_12_1_"),
    (64, 1536, 576, "_8_3_32"),
    // Several blocks of rows, the last of them with few.
    (91, 288, 1536, "_12_1_32"),
    (128, 280, 576, "_8_3_16"),
];

/// Root mean square of the errors at most. Weights are rounded to x's dtype, in bf16 twice, and so are outputs; f32 keeps 16
/// bits of both factors up to 8 rows, and of x above, where weights are rounded to bf16.
fn limit(dtype: DType, rows: usize) -> f64 {
    match dtype {
        DType::BF16 => 5e-3,
        DType::F16 => 8e-4,
        _ if rows > 8 => 3e-3,
        _ => 3e-5,
    }
}

#[test]
fn every_form_agrees_with_float64() -> Result<()> {
    let subject = SUBJECTS
        .iter()
        .find(|s| s.kernel == "gemm_wna16_latency_sm90")
        .expect("a subject");
    for device in subject.gpus()? {
        for case in FORMS {
            each_format(subject, case, &device)?;
        }
    }
    Ok(())
}

fn each_format(
    subject: &Subject,
    (m, n, k, form): (usize, usize, usize, &str),
    device: &Device,
) -> Result<()> {
    // One scale for 32 values and two, an offset, a scale for each row.
    let formats = ["Q4_0", "Q4K", "Q6K", "int4-g32-z", "int8"];
    for (i, (name, weights)) in subject.pairs(n, k, device)?.into_iter().enumerate() {
        if !formats.contains(&name.as_str()) {
            continue;
        }
        for (j, &dtype) in subject.dtypes.iter().enumerate() {
            // More than 64 rows are taken in bf16 only, and not where they may be rounded to int8.
            if m > 64 && (name == "int8" || dtype != DType::BF16) {
                continue;
            }
            let activation = [Activation::None, Activation::SwiGlu][(i + j) % 2];
            let width = if activation.gate().is_some() {
                n
            } else {
                2 * n
            };
            let x = randn_on(&[m, k], dtype, device)?;
            // The norm's weights are from 2e-5 to 1.
            let norm = Tensor::rand(-11f32, 0., k, device)?
                .exp()?
                .to_dtype(dtype)?;
            let prologue = Prologue::RmsNorm {
                weight: &norm,
                eps: 1e-5,
            };
            let bias = randn_on(&[2 * n], dtype, device)?;
            let residual = randn_on(&[m, width], dtype, device)?;
            let epilogue = Epilogue {
                bias: Some(&bias),
                activation,
                residuals: &[&residual],
            };
            let (y, calls) = trace::capture(|| {
                with_kernel(Some(subject.kernel), || {
                    quant_linear(&x, prologue, &weights, &epilogue)
                })
            });
            let calls = calls.to_string();
            assert!(calls.contains(form), "{name} {m}x{k}: {calls}");
            let expected = reference(&x, prologue, &weights, &epilogue)?;
            let expected = Tensor::new(expected.concat(), &Device::Cpu)?.reshape((m, width))?;
            let (error, limit) = (error(&y?, &expected)?, limit(dtype, m));
            assert!(
                error <= limit,
                "{name}{form} {dtype:?} {activation:?}: {error:e} of {limit:e}"
            );
        }
    }
    Ok(())
}
