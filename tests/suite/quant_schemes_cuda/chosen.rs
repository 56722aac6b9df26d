//! Which kernel runs: what the trace names, on the GPU that the table was measured on, and each kernel that takes a
//! case against the one that the table chooses.

use super::{gpus, random};
use crate::support::architecture;
use candle_core::cuda_backend::cudarc::driver::sys::CUdevice_attribute_enum as attribute;
use candle_core::{D, DType, Device, Error, Result, Tensor};
use candle_fused::cuda::{BlockMatrix, with_kernel};
use candle_fused::ops::linear::kernel_table;
use candle_fused::ops::{Epilogue, Prologue, Weight, quant_linear};
use candle_fused::trace;
use std::sync::Arc;

/// Format, dtype of x, M, N, K, and the kernel on Hopper with 132 multiprocessors.
const CHOICES: [(&str, DType, usize, usize, usize, &str); 48] = [
    ("int4-g128", DType::BF16, 1, 4096, 4096, "gemv_wna16_sm90"),
    (
        "int4-g128",
        DType::BF16,
        16,
        576,
        1536,
        "gemm_wna16_latency_sm90",
    ),
    (
        "int4-g128",
        DType::BF16,
        16,
        4096,
        14336,
        "gemm_wna16_m16_tma",
    ),
    ("int4-g128", DType::BF16, 16, 14336, 4096, "gemm_wna16_m16"),
    (
        "int4-g128",
        DType::BF16,
        17,
        4096,
        4096,
        "gemm_wna16_skinny_sm90",
    ),
    ("int4-g128", DType::BF16, 33, 4096, 4096, "gemm_wna16_sm90"),
    ("int4-g64", DType::BF16, 17, 14336, 4096, "gemm_wna16_sm90"),
    ("int4-g128", DType::BF16, 511, 4096, 4096, "gemm_wna16_sm90"),
    (
        "int4-g128",
        DType::BF16,
        512,
        4096,
        4096,
        "gemm_dequantized_cublaslt",
    ),
    (
        "int4-g128",
        DType::BF16,
        64,
        512,
        512,
        "gemm_wna16_latency_sm90",
    ),
    ("int4-g128", DType::BF16, 48, 512, 2560, "gemm_wna16_mma"),
    (
        "int4-g32",
        DType::BF16,
        1,
        1024,
        1024,
        "gemm_wna16_latency_sm90",
    ),
    ("int8", DType::F16, 9, 576, 1536, "gemm_wna16_latency_sm90"),
    ("int8", DType::BF16, 64, 576, 576, "gemm_wna16_latency_sm90"),
    ("int4-g128", DType::BF16, 511, 512, 512, "gemm_wna16_sm90"),
    (
        "int4-g128",
        DType::BF16,
        4096,
        512,
        512,
        "gemm_dequantized_cublaslt",
    ),
    ("int4-g128", DType::F16, 100, 512, 512, "gemm_wna16_sm90"),
    (
        "int4-g128",
        DType::F16,
        513,
        512,
        512,
        "gemm_dequantized_cublaslt",
    ),
    (
        "int4-g128",
        DType::F16,
        4,
        4096,
        4096,
        "gemm_wna16_skinny_sm90",
    ),
    ("int4-g32-z", DType::BF16, 1, 4096, 4096, "gemv_wna16_sm90"),
    (
        "int4-g32-z",
        DType::BF16,
        8,
        4096,
        4096,
        "gemm_wna16_skinny_sm90",
    ),
    ("int4-g128-z", DType::F32, 1, 4096, 4096, "gemv_wna16_sm90"),
    // Zero points of a tile of 8 rows are not whole 16 bytes.
    ("int4-g128-z", DType::BF16, 1, 4096, 640, "gemv_wna16"),
    (
        "int4-g64",
        DType::F16,
        4,
        4096,
        4096,
        "gemm_wna16_skinny_sm90",
    ),
    ("int8", DType::BF16, 8, 4096, 4096, "gemm_wna16_skinny_sm90"),
    ("int8", DType::BF16, 1, 4096, 4096, "gemv_wna16_sm90"),
    ("int8", DType::BF16, 512, 4096, 4096, "gemm_w8a8_sm90"),
    ("int8", DType::BF16, 512, 576, 1536, "gemm_w8a8_cluster"),
    ("fp8", DType::BF16, 1, 4096, 4096, "gemv_wna16_sm90"),
    (
        "fp8-block128",
        DType::BF16,
        8,
        4096,
        4096,
        "gemm_wna16_skinny_sm90",
    ),
    ("fp8", DType::BF16, 512, 4096, 4096, "gemm_wna16_sm90"),
    ("nvfp4", DType::BF16, 1, 4096, 4096, "gemv_wna16_sm90"),
    (
        "nvfp4",
        DType::BF16,
        8,
        4096,
        4096,
        "gemm_wna16_skinny_sm90",
    ),
    ("fp8", DType::BF16, 16, 512, 14336, "gemm_wna16_mma"),
    ("int4-g128", DType::BF16, 8, 4096, 4096, "gemm_wna16_m16"),
    (
        "ternary-row",
        DType::BF16,
        8,
        4096,
        4096,
        "gemm_wna16_skinny_sm90",
    ),
    ("nvfp4", DType::BF16, 512, 4096, 4096, "gemm_wna16_sm90"),
    ("nf4", DType::BF16, 1, 4096, 4096, "gemv_wna16_sm90"),
    ("nf4", DType::BF16, 8, 4096, 4096, "gemm_wna16_skinny_sm90"),
    ("nf4", DType::BF16, 512, 4096, 4096, "gemm_wna16_sm90"),
    (
        "fp8-block128",
        DType::BF16,
        2048,
        512,
        512,
        "gemm_wna16_sm90",
    ),
    (
        "ternary-row",
        DType::BF16,
        1,
        4096,
        4096,
        "gemv_ternary_latency",
    ),
    (
        "ternary-row",
        DType::BF16,
        4,
        4096,
        4096,
        "gemv_ternary_latency",
    ),
    (
        "ternary-row",
        DType::BF16,
        1,
        28672,
        4096,
        "gemv_wna16_sm90",
    ),
    ("ternary-row", DType::BF16, 16, 4096, 4096, "gemm_wna16_mma"),
    (
        "ternary-row",
        DType::BF16,
        17,
        4096,
        4096,
        "gemm_wna16_sm90",
    ),
    ("ternary-g64", DType::F32, 3, 4096, 4096, "gemm_wna16_sm90"),
    ("ternary-g64", DType::F32, 1, 4096, 4096, "gemv_ternary"),
];

/// Whether the table's figures are this GPU's.
fn is_measured(device: &Device) -> Result<bool> {
    let stream = device.as_cuda_device()?.cuda_stream();
    let count = attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
    let sms = stream.context().attribute(count).map_err(Error::wrap)?;
    Ok(architecture(device)? == 90 && sms == 132)
}

/// The product, and the trace's line of it.
fn product(x: &Tensor, weight: &Weight) -> Result<(Tensor, String)> {
    let weights = std::slice::from_ref(weight);
    let run = || quant_linear(x, Prologue::None, weights, &Epilogue::default());
    let (y, calls) = trace::capture(run);
    let path = calls.iter().map(|(call, _)| call.path.clone()).collect();
    Ok((y?.to_dtype(DType::F32)?, path))
}

fn largest(x: &Tensor) -> Result<f32> {
    x.abs()?.flatten_all()?.max(D::Minus1)?.to_scalar()
}

#[test]
fn the_table_says_which_kernel_runs() -> Result<()> {
    for device in gpus() {
        if !is_measured(&device)? {
            continue;
        }
        for (format, dtype, m, n, k, kernel) in CHOICES {
            let matrix = BlockMatrix::from_codes(&random(format.parse()?, n, k), &device)?;
            let weight = Weight::Blocks(Arc::new(matrix));
            let x = Tensor::randn(0f32, 1., (m, k), &device)?.to_dtype(dtype)?;
            let (expected, path) = product(&x, &weight)?;
            let named = path.contains(&format!(" {kernel} ("));
            assert!(named, "{format} {dtype:?} {m}x{n}x{k}: {path}");
            // Every other kernel that takes the case agrees, but for what int8 activations round.
            for other in kernel_table() {
                let (Ok((y, path)), false) = (
                    with_kernel(Some(other.name), || product(&x, &weight)),
                    other.name.contains("w8a8") || kernel.contains("w8a8"),
                ) else {
                    continue;
                };
                let most = largest(&expected)?;
                let error = largest(&(y - &expected)?)?;
                assert!(
                    most.is_finite() && error <= 2e-2 * most,
                    "{path}: {error} of {most}"
                );
            }
        }
    }
    Ok(())
}
