//! What a GPU makes of weights is what the host makes of them, bit for bit.

use super::{Plan, quantized};
use crate::cpu::quantize::quantize;
use crate::cuda::BlockMatrix;
use crate::nn::pack::pack;
use crate::quant::{Codes, Scheme, TernaryScale};
use candle_core::{DType, Device, Result, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::time::Instant;

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// What the GPU quantizes.
fn schemes() -> Vec<Scheme> {
    let mut all = vec![
        Scheme::Int8,
        Scheme::Fp8,
        Scheme::Fp8Block128,
        Scheme::Nvfp4,
        Scheme::Nf4,
        Scheme::Ternary {
            scale: TernaryScale::Row,
        },
    ];
    for group in [32, 64, 128] {
        for zero_point in [false, true] {
            all.push(Scheme::Int4 { group, zero_point });
        }
        let scale = TernaryScale::Group(group);
        all.push(Scheme::Ternary { scale });
    }
    all
}

/// Weights of about `size`, some of their groups of a kind that is special to a search.
fn weights(rng: &mut StdRng, count: usize, size: f32) -> Vec<f32> {
    let mut bell = || -> f32 { (0..4).map(|_| rng.random_range(-0.5..0.5f32)).sum() };
    let mut all: Vec<f32> = (0..count).map(|_| bell() * size).collect();
    for group in all.chunks_mut(32) {
        let (first, outlier) = (group[0], rng.random_range(0..group.len()));
        let tiny = 10f32.powi(rng.random_range(-40..0));
        // Of sizes that f32 has as 0, too, no number is NaN.
        let step = (size / 4.).max(f32::MIN_POSITIVE);
        match rng.random_range(0..16) {
            0 => group.fill(0.),
            1 => group.fill(-0.),
            2 => group[outlier] *= 100.,
            3 => group[outlier] *= -30.,
            4 => group.iter_mut().for_each(|w| *w *= tiny),
            5 => group.fill(first),
            6 => group.iter_mut().for_each(|w| *w = w.abs()),
            7 => group.iter_mut().for_each(|w| *w = -w.abs()),
            // Ties, and many that are alike.
            8 => group
                .iter_mut()
                .for_each(|w| *w = (*w / step).round() * step),
            _ => (),
        }
    }
    all
}

/// A weight on the device in a dtype, and its values.
fn on(
    device: &Device,
    values: Vec<f32>,
    (rows, cols): (usize, usize),
    dtype: DType,
) -> Result<(Tensor, Vec<f32>)> {
    let weight = Tensor::from_vec(values, (rows, cols), &Device::Cpu)?.to_dtype(dtype)?;
    let values = weight.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
    Ok((weight.to_device(device)?, values))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// What the kernels write, before it is packed.
fn on_gpu(weight: &Tensor, scheme: Scheme) -> Result<Option<Codes>> {
    let (rows, cols) = weight.dims2()?;
    let plan = Plan::of(scheme, rows, cols).expect("a scheme of the GPU");
    let device = weight.device().as_cuda_device()?;
    let Some((codes, plain)) = quantized(weight, scheme, plan, device)? else {
        return Ok(None);
    };
    let plain = device.clone_dtoh(&plain)?;
    Ok(Some(Codes {
        codes: plain,
        ..codes
    }))
}

/// Codes and what goes with them, and the packed matrix's values.
fn check(weight: &Tensor, values: &[f32], scheme: Scheme) -> Result<()> {
    let (rows, cols) = weight.dims2()?;
    let case = format!("{scheme}, {rows} x {cols}, {:?}", weight.dtype());
    let expected = quantize(values, rows, cols, scheme)?;
    let found = on_gpu(&weight.contiguous()?, scheme)?.expect("finite weights");
    assert_eq!(bits(&found.scales), bits(&expected.scales), "{case}");
    assert_eq!(found.zeros, expected.zeros, "{case}");
    assert_eq!(found.group_scales, expected.group_scales, "{case}");
    assert!(found.codes == expected.codes, "{case}: codes");
    let ours = BlockMatrix::quantize(weight, scheme)?.expect("finite weights");
    let host = BlockMatrix::from_codes(&expected, weight.device())?;
    let dequantized = |matrix: BlockMatrix| -> Result<Vec<f32>> {
        matrix.dequantize(DType::F32)?.flatten_all()?.to_vec1()
    };
    assert!(
        bits(&dequantized(ours)?) == bits(&dequantized(host)?),
        "{case}: packed"
    );
    Ok(())
}

#[test]
fn a_gpu_quantizes_as_the_host_does() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let mut rng = StdRng::seed_from_u64(1);
    for scheme in schemes() {
        // Widths that the lanes of sums, the K blocks and the chunks of a row do not divide.
        let widths: &[usize] = match scheme {
            Scheme::Nvfp4 => &[16, 144, 1040],
            _ => match scheme.group() {
                Some(group) if scheme != Scheme::Fp8Block128 => &[group, 3 * group, 1024 + group],
                _ => &[4, 132, 300, 2048, 4100],
            },
        };
        for cols in widths {
            for rows in [1, 13, 130] {
                for dtype in DTYPES {
                    for size in [0.05, 30., 1e-6] {
                        let values = weights(&mut rng, rows * cols, size);
                        let (weight, values) = on(&device, values, (rows, *cols), dtype)?;
                        check(&weight, &values, scheme)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Scales that f16 has as subnormals or as 0, weights that f32 has as subnormals, and a matrix of zeros.
#[test]
fn tiny_weights_are_quantized_alike() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let mut rng = StdRng::seed_from_u64(2);
    for scheme in schemes() {
        for exponent in [0, -5, -7, -9, -12, -20, -30, -34, -35, -36, -38, -42, -45] {
            let mut values = weights(&mut rng, 9 * 256, 10f32.powi(exponent));
            if exponent == 0 {
                values.fill(0.);
            }
            for dtype in DTYPES {
                let (weight, values) = on(&device, values.clone(), (9, 256), dtype)?;
                check(&weight, &values, scheme)?;
            }
        }
    }
    Ok(())
}

#[test]
fn views_are_quantized() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let mut rng = StdRng::seed_from_u64(3);
    for scheme in schemes() {
        let values = weights(&mut rng, 384 * 264, 0.1);
        let (whole, _) = on(&device, values, (384, 264), DType::BF16)?;
        let across = whole.t()?.narrow(0, 5, 40)?;
        for view in [across, whole.narrow(0, 128, 256)?.narrow(1, 8, 128)?] {
            let values = view.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
            check(&view, &values, scheme)?;
        }
    }
    Ok(())
}

/// More codes than are packed at a time.
#[test]
fn a_large_matrix_is_quantized() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let mut rng = StdRng::seed_from_u64(4);
    let shape = (8203, 4224);
    let values = weights(&mut rng, shape.0 * shape.1, 0.05);
    let (weight, values) = on(&device, values, shape, DType::BF16)?;
    let int4 = |zero_point| Scheme::Int4 {
        group: 128,
        zero_point,
    };
    for scheme in [Scheme::Int8, Scheme::Nvfp4, int4(false), int4(true)] {
        check(&weight, &values, scheme)?;
    }
    Ok(())
}

/// Those of the host, which the weights go to then.
#[test]
fn errors_name_the_place() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let (rows, cols) = (20, 384);
    for scheme in schemes() {
        for (bad, dtype) in [
            (f32::NAN, DType::F32),
            (f32::INFINITY, DType::F16),
            (f32::NEG_INFINITY, DType::BF16),
        ] {
            let mut values = vec![0.5f32; rows * cols];
            values[17 * cols + 301] = bad;
            let (weight, _) = on(&device, values, (rows, cols), dtype)?;
            assert!(BlockMatrix::quantize(&weight, scheme)?.is_none());
            let error = pack(&weight, scheme.into()).map(|_| ()).unwrap_err();
            let error = error.to_string();
            assert!(
                error.contains("row 17, column 301"),
                "{scheme} {bad}: {error}"
            );
        }
        let mut values = vec![0.5f32; rows * cols];
        values[17 * cols + 128..][..128].fill(3e6);
        let (weight, values) = on(&device, values, (rows, cols), DType::F32)?;
        match quantize(&values, rows, cols, scheme) {
            Ok(_) => check(&weight, &values, scheme)?,
            Err(host) => {
                let error = pack(&weight, scheme.into()).map(|_| ()).unwrap_err();
                let (error, host) = (error.to_string(), host.to_string());
                assert!(host.contains("row 17"), "{scheme}: {host}");
                // A backtrace may follow.
                assert_eq!(error.lines().next(), host.lines().next(), "{scheme}");
            }
        }
    }
    Ok(())
}

/// What is left to the host is packed all the same.
#[test]
fn the_host_does_the_rest() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let mut rng = StdRng::seed_from_u64(5);
    let values = weights(&mut rng, 16 * 128, 0.1);
    let (weight, _) = on(&device, values, (16, 128), DType::BF16)?;
    let tensor = Scheme::Ternary {
        scale: TernaryScale::Tensor,
    };
    for (weight, scheme) in [
        (&weight, tensor),
        (&weight.to_dtype(DType::F64)?, Scheme::Int8),
    ] {
        assert!(BlockMatrix::quantize(weight, scheme)?.is_none(), "{scheme}");
        pack(weight, scheme.into())?;
    }
    Ok(())
}

#[test]
#[ignore = "a measurement: it prints milliseconds and holds nothing"]
fn the_time_of_a_matrix() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let (rows, cols) = (28672, 4096);
    let weight = Tensor::randn(0f32, 0.05, (rows, cols), &device)?.to_dtype(DType::BF16)?;
    let cuda = device.as_cuda_device()?;
    let milliseconds = |run: &dyn Fn() -> Result<()>| -> Result<f64> {
        run()?;
        device.synchronize()?;
        let start = Instant::now();
        run()?;
        device.synchronize()?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    };
    println!("{rows} x {cols}, bf16: codes and scales on the GPU, and with packing");
    for scheme in schemes() {
        let plan = Plan::of(scheme, rows, cols).expect("a scheme of the GPU");
        let codes = milliseconds(&|| quantized(&weight, scheme, plan, cuda).map(|_| ()))?;
        let packed = milliseconds(&|| BlockMatrix::quantize(&weight, scheme).map(|_| ()))?;
        println!("{scheme}: {codes:.1}, {packed:.1}");
    }
    Ok(())
}
