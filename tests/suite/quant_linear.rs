//! Products over GGUF blocks, against float64 and in every combination of matrices.

use crate::linear::{ACTIVATIONS, error};
use crate::support::{devices, randn, randn_on};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cpu::packed::PackedMatrix;
use candle_fused::cpu::simd::{self, Level};
use candle_fused::ops::linear::reference;
use candle_fused::ops::{Activation, Epilogue, Prologue, Weight, quant_linear};
use candle_fused::trace;
use std::sync::Arc;

/// Random blocks in the form that the device takes.
pub fn blocks_on(rows: usize, cols: usize, dtype: GgmlDType, device: &Device) -> Result<Weight> {
    let quantized = QTensor::quantize(&randn(&[rows, cols], DType::F32)?, dtype)?;
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        let data = quantized.data()?;
        let blocks = candle_fused::cuda::BlockMatrix::new(dtype, rows, cols, &data, device)?;
        return Ok(Weight::Blocks(Arc::new(blocks)));
    }
    assert!(device.is_cpu());
    Ok(Weight::Packed(Arc::new(PackedMatrix::pack(
        dtype,
        rows,
        cols,
        &quantized.data()?,
    )?)))
}

/// On the CPU int8 activations are off by max / 127 / sqrt(12) on average, 0.6 % of a deviation of
/// the inputs. Errors and outputs both add up as the square root of K, so an output is off by 0.6 %
/// of the outputs' deviation on average, and four times that is rare. On a GPU up to 8 rows keep 16
/// bits of each input (5e-6), and more rows and the weights are rounded to bf16 (0.16 % together).
pub fn tolerance(device: &Device, rows: usize) -> f64 {
    match (device.is_cpu(), rows) {
        (true, _) => 2.5e-2,
        (false, ..=8) => 5e-5,
        (false, _) => 1e-2,
    }
}

/// Products stay within the error of their activations.
fn products(dtype: GgmlDType, shapes: &[(usize, usize, usize)]) -> Result<()> {
    for device in devices() {
        for shape in shapes {
            for with_norm in [false, true] {
                product(dtype, *shape, with_norm, &device)?;
            }
        }
    }
    Ok(())
}

/// A test for each format. Those of few rows call no library on a GPU: a sanitizer takes minutes for
/// cuBLAS's kernels alone.
macro_rules! products_of_each_format {
    ($module:ident: $shapes:expr) => {
        mod $module {
            products_of_each_format! {
                $shapes, q4_0: Q4_0, q4_1: Q4_1, q5_0: Q5_0, q5_1: Q5_1, q8_0: Q8_0, q2_k: Q2K, q3_k: Q3K, q4_k: Q4K,
                q5_k: Q5K, q6_k: Q6K,
            }
        }
    };
    ($shapes:expr, $($name:ident: $dtype:ident,)*) => {
        $(#[test]
        fn $name() -> candle_core::Result<()> {
            super::products(candle_core::quantized::GgmlDType::$dtype, $shapes)
        })*
    };
}

products_of_each_format!(products_of_few_rows: &[(1, 256, 64), (1, 512, 21), (5, 256, 100)]);
products_of_each_format!(products_of_many_rows: &[(70, 256, 300)]);

fn product(
    dtype: GgmlDType,
    (m, k, n): (usize, usize, usize),
    with_norm: bool,
    device: &Device,
) -> Result<()> {
    let x = randn_on(&[m, k], DType::F32, device)?;
    let norm_weight = randn_on(&[k], DType::F32, device)?;
    let prologue = match with_norm {
        true => Prologue::RmsNorm {
            weight: &norm_weight,
            eps: 1e-6,
        },
        false => Prologue::None,
    };
    // Matrices whose rows do not divide by the row group, and one that is dense.
    let weights = [
        blocks_on(n, k, dtype, device)?,
        blocks_on(7, k, dtype, device)?,
        Weight::Dense(randn_on(&[5, k], DType::F32, device)?),
    ];
    let residual = randn_on(&[m, n + 12], DType::F32, device)?;
    let epilogue = Epilogue {
        residuals: &[&residual],
        ..Default::default()
    };
    let got = quant_linear(&x, prologue, &weights, &epilogue)?;
    let expected = reference(&x, prologue, &weights, &epilogue)?;
    let error = error(&got, &expected)?;
    assert!(
        error < tolerance(device, m),
        "{device:?} {dtype:?} {m}x{k}x{n} norm {with_norm}: {error:e}"
    );
    Ok(())
}

/// Widths that do not divide by four blocks, several formats side by side, one to many rows, every
/// epilogue and every type of x.
#[test]
fn epilogues_meet_blocks_of_any_width() -> Result<()> {
    for device in devices() {
        for (i, k) in [32, 96, 576, 1536].into_iter().enumerate() {
            for m in [1, 2, 3, 4, 7, 8, 9, 33] {
                let activation = ACTIVATIONS[(i + m) % ACTIVATIONS.len()];
                let dtype = [DType::F32, DType::BF16, DType::F16][(i + m) % 3];
                let types = match m % 2 {
                    0 => [GgmlDType::Q4_1, GgmlDType::Q4_1],
                    _ => [GgmlDType::Q5_0, GgmlDType::Q8_0],
                };
                let weights = [
                    blocks_on(24, k, types[0], &device)?,
                    blocks_on(24, k, types[1], &device)?,
                ];
                let width = if activation.gate().is_some() { 24 } else { 48 };
                let x = randn_on(&[m, k], dtype, &device)?;
                let bias = randn_on(&[48], dtype, &device)?;
                let residuals = [
                    randn_on(&[m, width], dtype, &device)?,
                    randn_on(&[m, width], dtype, &device)?,
                ];
                let epilogue = Epilogue {
                    bias: Some(&bias),
                    activation,
                    residuals: &[&residuals[0], &residuals[1]],
                };
                let got = quant_linear(&x, Prologue::None, &weights, &epilogue)?;
                let expected = reference(&x, Prologue::None, &weights, &epilogue)?;
                // What the result is rounded to.
                let unit = match dtype {
                    DType::F32 => 1e-6,
                    DType::F16 => 1e-3,
                    _ => 8e-3,
                };
                let error = error(&got, &expected)?;
                // On a GPU a gate and what it gates in different formats go the way of many rows.
                let mixed = types[0] != types[1] && activation.gate().is_some();
                let rows = if mixed { 512 } else { m };
                assert!(
                    error < 2. * tolerance(&device, rows) + unit,
                    "{device:?} {m}x{k} {dtype:?} {activation:?}: {error:e}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn gating_pairs_matrices_of_any_size() -> Result<()> {
    for device in devices() {
        for rows in [16, 24, 7, 160] {
            for types in [
                [GgmlDType::Q8_0, GgmlDType::Q4_1],
                [GgmlDType::Q4_0, GgmlDType::Q4_0],
            ] {
                let x = randn_on(&[3, 64], DType::F32, &device)?;
                let weights = [
                    blocks_on(rows, 64, types[0], &device)?,
                    blocks_on(rows, 64, types[1], &device)?,
                ];
                let epilogue = Epilogue {
                    activation: Activation::SwiGlu,
                    ..Default::default()
                };
                let got = quant_linear(&x, Prologue::None, &weights, &epilogue)?;
                let expected = reference(&x, Prologue::None, &weights, &epilogue)?;
                // Matrices of two formats are multiplied as many rows are.
                let m = if types[0] == types[1] { 3 } else { 33 };
                assert!(
                    error(&got, &expected)? < 2. * tolerance(&device, m),
                    "{device:?} {rows} rows"
                );
            }
        }
    }
    Ok(())
}

/// Rows of a view begin where no 16-byte access can.
#[test]
fn views_that_are_not_aligned_are_taken() -> Result<()> {
    for device in devices() {
        let wide = randn_on(&[65 * 3 + 1], DType::F32, &device)?;
        let x = wide.narrow(0, 1, 64 * 3)?.reshape((3, 64))?;
        let norm = wide.narrow(0, 3, 64)?;
        let prologue = Prologue::RmsNorm {
            weight: &norm,
            eps: 1e-6,
        };
        let weights = [blocks_on(20, 64, GgmlDType::Q4_1, &device)?];
        let got = quant_linear(&x, prologue, &weights, &Epilogue::default())?;
        let expected = reference(&x, prologue, &weights, &Epilogue::default())?;
        assert!(
            error(&got, &expected)? < tolerance(&device, 33),
            "{device:?}"
        );
    }
    Ok(())
}

#[test]
fn the_trace_tells_what_was_fused() -> Result<()> {
    for device in devices() {
        traced(&device)?;
    }
    Ok(())
}

fn traced(device: &Device) -> Result<()> {
    let x = randn_on(&[1, 64], DType::F32, device)?;
    let norm = randn_on(&[64], DType::F32, device)?;
    let prologue = Prologue::RmsNorm {
        weight: &norm,
        eps: 1e-6,
    };
    let weights = [
        blocks_on(16, 64, GgmlDType::Q4_1, device)?,
        blocks_on(16, 64, GgmlDType::Q4_1, device)?,
    ];
    let epilogue = Epilogue {
        activation: Activation::SwiGlu,
        ..Default::default()
    };
    let (y, calls) = trace::capture(|| quant_linear(&x, prologue, &weights, &epilogue));
    y?;
    let (call, n) = calls.iter().next().expect("a call");
    assert_eq!((call.op, n), ("quant_linear", 1));
    assert!(
        call.path.contains("q4_1 rms_norm+ +swiglu"),
        "{}",
        call.path
    );
    Ok(())
}

#[test]
fn the_trace_names_the_kernel_on_the_cpu() -> Result<()> {
    let weights = [blocks_on(16, 64, GgmlDType::Q5_0, &Device::Cpu)?];
    for (m, form, bits) in [
        (1, "_tiles", 16),
        (15, "_tiles", 16),
        (16, "_unpacked_tiles", 16),
        (48, "_unpacked_tiles", 16),
        (65, "_unpacked_tiles", 8),
    ] {
        let x = randn(&[m, 64], DType::F32)?;
        let run = || quant_linear(&x, Prologue::None, &weights, &Epilogue::default());
        let (y, calls) = trace::capture(run);
        y?;
        let kernel = match simd::level() {
            Level::Scalar => "scalar".to_owned(),
            // AMX multiplies many tokens only.
            #[cfg(target_arch = "x86_64")]
            Level::Amx if m >= 48 => "amx_tiles".to_owned(),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Bf16 | Level::Amx => format!("avx512{form}"),
            level => format!("{}{form}", level.name()),
        };
        let (call, _) = calls.iter().next().expect("a call");
        assert_eq!(call.path, format!("cpu {kernel} x{bits} q5_0"));
    }
    Ok(())
}

#[test]
fn bad_arguments_are_named() -> Result<()> {
    let x = randn(&[2, 64], DType::F32)?;
    let none = Epilogue::default();
    let message = |weights: &[Weight]| {
        quant_linear(&x, Prologue::None, weights, &none)
            .expect_err("accepted")
            .to_string()
    };
    assert!(message(&[]).contains("weights is empty"));
    let wide = blocks_on(16, 96, GgmlDType::Q4_0, &Device::Cpu)?;
    assert!(message(&[wide]).contains("weights[0] is [16, 96]"));
    Ok(())
}

#[test]
fn huge_inputs_are_fine() -> Result<()> {
    for device in devices() {
        let huge = (randn(&[4, 32], DType::F32)? * 1e18)?.to_device(&device)?;
        let norm = Tensor::ones(32, DType::F32, &Device::Cpu)?.to_device(&device)?;
        let weights = [blocks_on(32, 32, GgmlDType::Q8_0, &device)?];
        let prologue = Prologue::RmsNorm {
            weight: &norm,
            eps: 1e-6,
        };
        let y = quant_linear(&huge, prologue, &weights, &Epilogue::default())?;
        let expected = reference(&huge, prologue, &weights, &Epilogue::default())?;
        assert!(error(&y, &expected)? < tolerance(&device, 4), "{device:?}");
    }
    Ok(())
}

#[cfg(feature = "cuda")]
mod gpu {
    use crate::support::{devices, randn};
    use candle_core::quantized::{GgmlDType, QTensor};
    use candle_core::{DType, Device, Result, Tensor};
    use candle_fused::cuda::BlockMatrix;
    use candle_fused::nn::Embedding;
    use candle_fused::ops::{Epilogue, Prologue, Weight, quant_linear};
    use candle_fused::quant::{BlockFormat, Format, dequantize};
    use std::sync::Arc;

    fn gpus() -> impl Iterator<Item = Device> {
        devices().into_iter().filter(Device::is_cuda)
    }

    /// Random blocks, and their values.
    fn quantized(rows: usize, cols: usize, dtype: GgmlDType) -> Result<(QTensor, Vec<f32>)> {
        let tensor = QTensor::quantize(&randn(&[rows, cols], DType::F32)?, dtype)?;
        let mut values = vec![0f32; rows * cols];
        dequantize(dtype, &tensor.data()?, &mut values)?;
        Ok((tensor, values))
    }

    /// Bit for bit: the same values come out of the repacked blocks.
    #[test]
    fn repacked_blocks_hold_the_same_values() -> Result<()> {
        for device in gpus() {
            for dtype in BlockFormat::DTYPES {
                for blocks in [1, 3, 4, 18] {
                    let cols = blocks * dtype.block_size();
                    let (tensor, values) = quantized(13, cols, dtype)?;
                    let matrix = BlockMatrix::new(dtype, 13, cols, &tensor.data()?, &device)?;
                    let got = matrix.dequantize(DType::F32)?.flatten_all()?;
                    let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&got.to_vec1()?), bits(&values), "{dtype:?} {cols}");
                    for half in [DType::F16, DType::BF16] {
                        let rounded = Tensor::from_slice(&values, (13, cols), &Device::Cpu)?;
                        let rounded = rounded.to_dtype(half)?.to_dtype(DType::F32)?;
                        let got = matrix.dequantize(half)?.to_device(&Device::Cpu)?;
                        assert_eq!(
                            got.to_dtype(DType::F32)?.to_vec2::<f32>()?,
                            rounded.to_vec2::<f32>()?
                        );
                    }
                }
            }
        }
        Ok(())
    }

    #[test]
    fn embeddings_are_rows_of_the_table() -> Result<()> {
        for device in gpus() {
            let ids = [3u32, 36, 0, 3, 17, 20];
            let at = Tensor::new(&ids, &device)?.reshape((2, 3))?;
            for dtype in BlockFormat::DTYPES {
                let cols = 3 * dtype.block_size();
                let (tensor, values) = quantized(37, cols, dtype)?;
                let matrix = BlockMatrix::new(dtype, 37, cols, &tensor.data()?, &device)?;
                let matrix = Arc::new(matrix);
                for of_rows in [DType::F32, DType::F16, DType::BF16] {
                    let table = Embedding::from_blocks(matrix.clone(), of_rows)?;
                    let got = table.forward(&at)?;
                    assert_eq!((got.dims(), got.dtype()), (&[2, 3, cols][..], of_rows));
                    let got = got.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
                    let rounded = Tensor::new(&values[..], &Device::Cpu)?.to_dtype(of_rows)?;
                    let expected = rounded.to_dtype(DType::F32)?.to_vec1::<f32>()?;
                    for (id, row) in ids.iter().zip(got.chunks_exact(cols)) {
                        let expected = &expected[*id as usize * cols..][..cols];
                        assert_eq!(row, expected, "{dtype:?} {of_rows:?}");
                    }
                    let past = Tensor::new(&[[37u32]], &device)?;
                    let error = table.forward(&past).expect_err("accepted").to_string();
                    assert!(error.contains("token 37"), "{error}");
                }
                let error = Embedding::from_blocks(matrix, DType::U32).expect_err("accepted");
                assert!(error.to_string().contains("dtype is U32"), "{error}");
            }
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for cols in [40, 33] {
                    let rows = randn(&[37, cols], dtype)?;
                    let table = Embedding::new(rows.to_device(&device)?, cols);
                    let got = table.forward(&at)?.to_device(&Device::Cpu)?;
                    let on_cpu = at.to_device(&Device::Cpu)?;
                    let expected = Embedding::new(rows, cols).forward(&on_cpu)?;
                    let wide = |t: Tensor| t.to_dtype(DType::F32)?.to_vec3::<f32>();
                    assert_eq!(wide(got)?, wide(expected)?);
                }
            }
        }
        Ok(())
    }

    /// What candle loads onto a GPU is repacked where it is.
    #[test]
    fn tensors_of_candle_are_taken_over() -> Result<()> {
        for device in gpus() {
            for dtype in BlockFormat::DTYPES {
                let cols = 2 * dtype.block_size();
                let (tensor, values) = quantized(9, cols, dtype)?;
                let storage =
                    candle_core::quantized::QStorage::from_data(tensor.data()?, &device, dtype)?;
                let there = QTensor::new(storage, (9, cols))?;
                let matrix = BlockMatrix::from_qtensor(&there)?;
                drop(there);
                assert_eq!(matrix.format(), Format::Block(BlockFormat::of(dtype)?));
                let got = matrix.dequantize(DType::F32)?.flatten_all()?;
                assert_eq!(got.to_vec1::<f32>()?, values, "{dtype:?}");
            }
        }
        Ok(())
    }

    #[test]
    fn weights_on_another_device_are_named() -> Result<()> {
        for device in gpus() {
            let (tensor, _) = quantized(8, 64, GgmlDType::Q4_0)?;
            let matrix = BlockMatrix::new(GgmlDType::Q4_0, 8, 64, &tensor.data()?, &device)?;
            let weights = [Weight::Blocks(Arc::new(matrix))];
            let x = randn(&[1, 64], DType::F32)?;
            let error = quant_linear(&x, Prologue::None, &weights, &Epilogue::default())
                .expect_err("accepted")
                .to_string();
            assert!(error.contains("weights[0] holds q4_0 on"), "{error}");
        }
        let cpu = BlockMatrix::new(GgmlDType::Q4_0, 1, 32, &[0; 18], &Device::Cpu);
        assert!(cpu.expect_err("accepted").to_string().contains("device"));
        Ok(())
    }
}
