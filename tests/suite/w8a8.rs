//! Many rows of x and weights in INT8 on a GPU: int8 activations and integer sums, against float64 on
//! the same codes, and against the product with x as it is.

use crate::common::distance::{Distance, pairs};
use crate::linear::{ACTIVATIONS, error};
use crate::support::{devices, randn_on, values};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cuda::BlockMatrix;
use candle_fused::ops::linear::reference;
use candle_fused::ops::{
    Activation, Epilogue, Prologue, Weight, layer_norm, quant_linear, rms_norm,
};
use candle_fused::quant::{Codes, Scheme};
use candle_fused::trace;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::sync::Arc;

const EPS: f64 = 1e-5;

/// GPUs alone take int8 activations this way.
fn gpus() -> impl Iterator<Item = Device> {
    devices().into_iter().filter(Device::is_cuda)
}

/// A matrix in INT8, and the values that it stands for.
struct Matrix {
    weight: Weight,
    values: Weight,
}

fn matrix(rows: usize, cols: usize, device: &Device) -> Result<Matrix> {
    let mut rng = StdRng::seed_from_u64((rows * cols) as u64);
    let codes: Vec<i8> = (0..rows * cols)
        .map(|_| rng.random_range(-128..=127))
        .collect();
    let scales: Vec<f32> = (0..rows).map(|_| rng.random_range(0.001..0.003)).collect();
    let values = codes
        .chunks_exact(cols)
        .zip(&scales)
        .flat_map(|(row, scale)| row.iter().map(|q| f64::from(*q) * f64::from(*scale)));
    let values = Tensor::from_iter(values, &Device::Cpu)?.reshape((rows, cols))?;
    let codes = Codes {
        scheme: Scheme::Int8,
        rows,
        cols,
        codes,
        scales,
        zeros: Vec::new(),
        group_scales: Vec::new(),
    };
    Ok(Matrix {
        weight: Weight::Blocks(Arc::new(BlockMatrix::from_codes(&codes, device)?)),
        values: Weight::Dense(values),
    })
}

/// Rows as the int8 activations have them: `round(v / s) s` with `s = max|v| / 127` in f32.
fn quantized(rows: &Tensor) -> Result<Tensor> {
    let (m, k) = rows.dims2()?;
    let rows = rows.to_device(&Device::Cpu)?.to_dtype(DType::F32)?;
    let rows = rows.to_vec2::<f32>()?;
    let values = rows.iter().flat_map(|row| {
        let most = row.iter().fold(0f32, |most, v| most.max(v.abs()));
        let (scale, inverse) = match most > 0. {
            true => (most / 127., 127. / most),
            false => (0., 0.),
        };
        row.iter().map(move |v| {
            // Rounded once, as by a fused multiply-add.
            let code = (f64::from(*v) * f64::from(inverse)).round_ties_even() as f32;
            f64::from(code) * f64::from(scale)
        })
    });
    Tensor::from_iter(values, &Device::Cpu)?.reshape((m, k))
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Norm {
    None,
    Rms,
    Layer,
}

/// Rows of x, inputs, outputs of each matrix: whole tiles and parts of them, rows of codes that are no
/// whole 16 bytes, several matrices, more than a section of tiles.
const SHAPES: [(usize, usize, &[usize]); 10] = [
    (72, 128, &[128]),
    (65, 64, &[40]),
    (128, 576, &[576, 192, 192]),
    (129, 100, &[72]),
    (200, 592, &[328, 8, 16]),
    (256, 1536, &[576]),
    (300, 132, &[144]),
    (513, 576, &[1536, 1536]),
    (640, 256, &[3072]),
    (2300, 64, &[264]),
];

#[test]
fn integer_sums_are_exact() -> Result<()> {
    for device in gpus() {
        for (i, (m, k, rows)) in SHAPES.into_iter().enumerate() {
            for (j, dtype) in [DType::F32, DType::F16, DType::BF16]
                .into_iter()
                .enumerate()
            {
                for (l, norm) in [Norm::None, Norm::Rms, Norm::Layer].into_iter().enumerate() {
                    let none = Activation::None;
                    let activation = ACTIVATIONS[(i + j + l) % 5];
                    for behind in [
                        (none, NOTHING),
                        (none, BIAS),
                        (none, ALL),
                        (activation, ALL),
                    ] {
                        product((m, k, rows), dtype, norm, behind, &device)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// Where Hopper's kernel takes other tiles: blocks that share rows of W, 128 or 256 of them.
#[test]
fn large_products_have_tiles_of_their_own() -> Result<()> {
    let cases = [
        ((300, 8008, &[136, 40][..]), "gemm_w8a8_sm90_128_2,"),
        ((1500, 4104, &[1416]), "gemm_w8a8_sm90_256_2,"),
    ];
    for device in gpus() {
        for (shape, tile) in cases {
            for activation in ACTIVATIONS {
                let path = product(shape, DType::BF16, Norm::None, (activation, ALL), &device)?;
                let Some(path) = path else { continue };
                let hopper = path.contains("gemm_w8a8_sm90");
                assert!(!hopper || path.contains(tile), "{shape:?}: {path}");
            }
        }
    }
    Ok(())
}

/// Where blocks on Hopper make int8 of x themselves: in tiles of this `form`.
fn in_one_launch(shape: (usize, usize, &[usize]), form: &str) -> Result<()> {
    for device in gpus() {
        for dtype in [DType::F16, DType::BF16] {
            for behind in [
                (Activation::None, NOTHING),
                (Activation::None, BIAS),
                (Activation::None, ALL),
                (Activation::SwiGlu, ALL),
                (Activation::Gelu, ALL),
                (Activation::Relu2, ALL),
                (Activation::GeGluTanh, ALL),
            ] {
                let path = product(shape, dtype, Norm::None, behind, &device)?;
                let Some(path) = path else { continue };
                // Half as many outputs are too few for it.
                let gates = behind.0.gate().is_some() && form == "gemm_w8a8_cluster_64x192_3,";
                let other = gates || path.contains("gemm_w8a8_mma");
                assert!(other || path.contains(form), "{shape:?}: {path}");
            }
        }
    }
    Ok(())
}

// Each form by itself: racecheck takes more than a minute and a half for the largest.
#[test]
fn small_products_of_short_rows_are_one_launch() -> Result<()> {
    in_one_launch((200, 576, &[1536]), "gemm_w8a8_cluster_64x64_4,")?;
    in_one_launch((500, 576, &[1536]), "gemm_w8a8_cluster_64x128_4,")
}

#[test]
fn small_products_of_long_rows_are_one_launch() -> Result<()> {
    in_one_launch((70, 1536, &[576]), "gemm_w8a8_cluster_48x64_3,")?;
    in_one_launch((500, 1536, &[576]), "gemm_w8a8_cluster_48x64_3,")?;
    in_one_launch((100, 704, &[960]), "gemm_w8a8_cluster_48x64_3,")
}

#[test]
fn small_products_of_many_rows_are_one_launch() -> Result<()> {
    in_one_launch((2000, 1536, &[576]), "gemm_w8a8_cluster_64x144_2,")?;
    in_one_launch((1200, 1536, &[576]), "gemm_w8a8_cluster_64x192_3,")?;
    in_one_launch((1400, 576, &[1536]), "gemm_w8a8_cluster_128x192_2,")?;
    in_one_launch((1200, 640, &[1920]), "gemm_w8a8_cluster_128x192_2,")?;
    // Outputs are staged in four steps of x.
    in_one_launch((1400, 400, &[1536]), "gemm_w8a8_cluster_128x192_2,")
}

/// What is added to a product, beside its activation.
#[derive(Clone, Copy, Debug)]
struct Added {
    bias: bool,
    residuals: bool,
}

const NOTHING: Added = Added {
    bias: false,
    residuals: false,
};
const BIAS: Added = Added {
    bias: true,
    residuals: false,
};
const ALL: Added = Added {
    bias: true,
    residuals: true,
};

/// How it was computed, if it is for these kernels.
fn product(
    (m, k, rows): (usize, usize, &[usize]),
    dtype: DType,
    norm: Norm,
    (activation, added): (Activation, Added),
    device: &Device,
) -> Result<Option<String>> {
    let matrices = rows
        .iter()
        .map(|rows| matrix(*rows, k, device))
        .collect::<Result<Vec<_>>>()?;
    let all: usize = rows.iter().sum();
    let gates = activation.gate().is_some();
    if gates
        && (!all.is_multiple_of(2) || rows.len() == 3 || (rows.len() == 2 && rows[0] != rows[1]))
    {
        return Ok(None);
    }
    let width = if gates { all / 2 } else { all };
    if !width.is_multiple_of(8) {
        // Not eight outputs at a time: the product goes another way.
        return Ok(None);
    }
    let x = randn_on(&[m, k], dtype, device)?;
    let weight = randn_on(&[k], dtype, device)?;
    let norm_bias = randn_on(&[k], dtype, device)?;
    let bias = randn_on(&[all], dtype, device)?;
    let residuals = [
        randn_on(&[m, width], dtype, device)?,
        randn_on(&[m, width], dtype, device)?,
    ];
    let (prologue, rows_of_x) = match norm {
        Norm::None => (Prologue::None, x.clone()),
        Norm::Rms => (
            Prologue::RmsNorm {
                weight: &weight,
                eps: EPS,
            },
            rms_norm(&x, &weight, EPS)?,
        ),
        Norm::Layer => (
            Prologue::LayerNorm {
                weight: &weight,
                bias: Some(&norm_bias),
                eps: EPS,
            },
            layer_norm(&x, &weight, Some(&norm_bias), EPS)?,
        ),
    };
    let epilogue = Epilogue {
        bias: added.bias.then_some(&bias),
        activation,
        residuals: if added.residuals {
            &[&residuals[0], &residuals[1]]
        } else {
            &[]
        },
    };
    let weights: Vec<_> = matrices.iter().map(|m| m.weight.clone()).collect();
    let values: Vec<_> = matrices.into_iter().map(|m| m.values).collect();
    let (got, calls) = trace::capture(|| quant_linear(&x, prologue, &weights, &epilogue));
    let path = &calls.iter().next().expect("a call").0.path;
    assert!(path.contains("w8a8"), "{path}");
    let expected = reference(&quantized(&rows_of_x)?, Prologue::None, &values, &epilogue)?;
    // Rounding of the result, f32 behind the sums, twice the same where gates multiply; behind a norm
    // a code may differ by one where a value is half way between two.
    let unit = match dtype {
        DType::F32 => 0.,
        DType::F16 => 4.9e-4,
        _ => 3.9e-3,
    };
    let of_norm = if norm == Norm::None { 0. } else { 1e-3 };
    let error = error(&got?, &expected)?;
    assert!(
        error <= unit + of_norm + 4e-6,
        "{m}x{k}x{rows:?} {dtype:?} {norm:?} {activation:?} {added:?} {path}: {error:e}"
    );
    Ok(Some(path.clone()))
}

/// Each input is off by at most half a step of its row's scale.
#[test]
fn the_error_is_that_of_the_activations() -> Result<()> {
    for device in gpus() {
        let (m, k, n) = (100, 576, 200);
        let Matrix { weight, values: w } = matrix(n, k, &device)?;
        let x = randn_on(&[m, k], DType::F32, &device)?;
        let none = Epilogue::default();
        let got = values(&quant_linear(&x, Prologue::None, &[weight], &none)?)?;
        let expected = reference(&x, Prologue::None, std::slice::from_ref(&w), &none)?.concat();
        let Weight::Dense(w) = w else {
            unreachable!("made dense above")
        };
        let magnitudes = w.abs()?.sum(1)?.to_vec1::<f64>()?;
        let largest = x.abs()?.max(1)?.to_vec1::<f32>()?;
        let pairs = pairs(&got, &expected)?;
        for (i, (got, expected)) in pairs.into_iter().enumerate() {
            let half_step = f64::from(largest[i / n]) / 254.;
            let bound = half_step * magnitudes[i % n] + 1e-5;
            assert!((got - expected).abs() <= bound, "{i}: {got}, {expected}");
        }
        let distance = Distance::of(&got, &expected)?;
        // Steps of 3.5 deviations / 127 are off by their 12th part's root, and so are sums.
        assert!(distance.rms() < 4e-3 * distance.top, "{distance:?}");
    }
    Ok(())
}

#[test]
fn rows_that_are_zero_or_not_finite_stay_by_themselves() -> Result<()> {
    for device in gpus() {
        for dtype in [DType::F32, DType::BF16] {
            let (m, k, n) = (70, 64, 32);
            let Matrix { weight, .. } = matrix(n, k, &device)?;
            let clean = randn_on(&[m, k], DType::F32, &Device::Cpu)?;
            let mut rows = clean.to_vec2::<f32>()?;
            rows[3].fill(0.);
            rows[4][5] = f32::NAN;
            rows[5][63] = f32::INFINITY;
            rows[6].fill(1e-40);
            let on_device = |rows: Vec<Vec<f32>>| {
                Tensor::new(rows, &Device::Cpu)?
                    .to_dtype(dtype)?
                    .to_device(&device)
            };
            let weights = [weight];
            let run = |x: &Tensor| -> Result<Vec<Vec<f32>>> {
                quant_linear(x, Prologue::None, &weights, &Epilogue::default())?
                    .to_dtype(DType::F32)?
                    .to_vec2()
            };
            let got = run(&on_device(rows)?)?;
            let other = run(&on_device(clean.to_vec2()?)?)?;
            for (i, (got, other)) in got.iter().zip(&other).enumerate() {
                match i {
                    3 | 6 => assert!(got.iter().all(|v| *v == 0.), "row {i}"),
                    4 | 5 => assert!(got.iter().all(|v| !v.is_finite()), "row {i}"),
                    _ => assert_eq!(got, other, "row {i}"),
                }
            }
        }
    }
    Ok(())
}

/// A launch takes three matrices: a fourth has one of its own.
#[test]
fn four_matrices_are_two_products() -> Result<()> {
    for device in gpus() {
        let matrices = (0..4).map(|_| matrix(8, 128, &device));
        let matrices = matrices.collect::<Result<Vec<_>>>()?;
        let weights: Vec<_> = matrices.iter().map(|m| m.weight.clone()).collect();
        let values: Vec<_> = matrices.into_iter().map(|m| m.values).collect();
        let x = randn_on(&[65, 128], DType::BF16, &device)?;
        let none = Epilogue::default();
        let (got, calls) = trace::capture(|| quant_linear(&x, Prologue::None, &weights, &none));
        let path = &calls.iter().next().expect("a call").0.path;
        // A kernel's name stands in front of its entry's.
        let products = path.split(" and ").filter(|p| p.contains("gemm_w8a8"));
        assert_eq!(products.count(), 2, "{path}");
        let expected = reference(&x, Prologue::None, &values, &none)?;
        // Activations are int8, as in the other products.
        assert!(error(&got?, &expected)? < 2.5e-2, "{path}");
    }
    Ok(())
}

/// Fewer rows, outputs that are not multiples of 8: x is taken as it is.
#[test]
fn what_no_kernel_takes_goes_another_way() -> Result<()> {
    for device in gpus() {
        for (m, rows) in [(63, &[32][..]), (64, &[77])] {
            let k = 128;
            let matrices = rows
                .iter()
                .map(|rows| matrix(*rows, k, &device))
                .collect::<Result<Vec<_>>>()?;
            let weights: Vec<_> = matrices.iter().map(|m| m.weight.clone()).collect();
            let values: Vec<_> = matrices.into_iter().map(|m| m.values).collect();
            let x = randn_on(&[m, k], DType::BF16, &device)?;
            let none = Epilogue::default();
            let (got, calls) = trace::capture(|| quant_linear(&x, Prologue::None, &weights, &none));
            let path = &calls.iter().next().expect("a call").0.path;
            assert!(!path.contains("w8a8"), "{path}");
            let expected = reference(&x, Prologue::None, &values, &none)?;
            // The weights are rounded to bf16.
            assert!(error(&got?, &expected)? < 1e-2, "{m} {rows:?} {path}");
        }
    }
    Ok(())
}

/// Views begin where no 16-byte access can, and more than two axes are rows.
#[test]
fn views_are_taken() -> Result<()> {
    for device in gpus() {
        let (k, n) = (68, 24);
        let Matrix { weight, values } = matrix(n, k, &device)?;
        let wide = randn_on(&[4, 40, k + 3], DType::BF16, &device)?;
        let x = wide.narrow(2, 1, k)?.narrow(1, 3, 35)?;
        let residual = randn_on(&[4, n, 35], DType::BF16, &device)?.transpose(1, 2)?;
        let epilogue = Epilogue {
            residuals: &[&residual],
            ..Default::default()
        };
        let got = quant_linear(&x, Prologue::None, &[weight], &epilogue)?;
        assert_eq!(got.dims(), [4, 35, n]);
        let rows = quantized(&x.contiguous()?.reshape((140, k))?)?;
        let expected = reference(&rows, Prologue::None, &[values], &epilogue)?;
        assert!(error(&got, &expected)? < 4e-3);
    }
    Ok(())
}
