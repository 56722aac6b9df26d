//! GPTQ of single matrices, against a plain float64 form of Optimal Brain Surgeon.

use candle_core::{Device, Result, Tensor};
use candle_fused::quant::gptq::{self, Hessian, Options};
use candle_fused::quant::{Codes, Scheme, quantize};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

const SCHEMES: [&str; 7] = [
    "int8",
    "int4-g32",
    "int4-g64",
    "int4-g128",
    "int4-g32-z",
    "int4-g64-z",
    "int4-g128-z",
];

fn schemes() -> impl Iterator<Item = Scheme> {
    SCHEMES
        .iter()
        .map(|name| name.parse().expect("a scheme of the list"))
}

fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut random = StdRng::seed_from_u64(seed);
    (0..count).map(|_| random.random_range(-1f32..1.)).collect()
}

/// Inputs `[rows, cols]` whose columns have much in common, some of them large.
fn inputs(seed: u64, rows: usize, cols: usize) -> Vec<f32> {
    let hidden = cols / 4 + 1;
    let (sources, mixing) = (
        numbers(seed, rows * hidden),
        numbers(seed + 1, hidden * cols),
    );
    let own = numbers(seed + 2, rows * cols);
    let mut x = own;
    for (r, row) in x.chunks_exact_mut(cols).enumerate() {
        for (c, value) in row.iter_mut().enumerate() {
            *value *= 0.3;
            for h in 0..hidden {
                *value += sources[r * hidden + h] * mixing[h * cols + c];
            }
            *value *= if c % 17 == 3 { 6. } else { 1. };
        }
    }
    x
}

fn hessian(x: &[f32], cols: usize) -> Result<Hessian> {
    let mut hessian = Hessian::new(cols)?;
    hessian.add(&Tensor::from_slice(
        x,
        (x.len() / cols, cols),
        &Device::Cpu,
    )?)?;
    Ok(hessian)
}

/// `||X (W - W')ᵀ||²` in f64.
fn error(x: &[f32], weights: &[f32], codes: &Codes) -> f64 {
    let cols = codes.cols;
    let missed: Vec<f64> = weights
        .iter()
        .zip(codes.dequantize())
        .map(|(w, v)| f64::from(*w) - f64::from(v))
        .collect();
    let mut sum = 0.;
    for x in x.chunks_exact(cols) {
        for missed in missed.chunks_exact(cols) {
            let product: f64 = x.iter().zip(missed).map(|(x, m)| f64::from(*x) * m).sum();
            sum += product * product;
        }
    }
    sum
}

/// `XᵀX + λ I`, whole.
fn damped(x: &[f32], cols: usize, damping: f64) -> Vec<f64> {
    let mut h = vec![0f64; cols * cols];
    for row in x.chunks_exact(cols) {
        for i in 0..cols {
            for j in 0..cols {
                h[i * cols + j] += f64::from(row[i]) * f64::from(row[j]);
            }
        }
    }
    let mean = (0..cols).map(|k| h[k * cols + k]).sum::<f64>() / cols as f64;
    (0..cols).for_each(|k| h[k * cols + k] += damping * mean);
    h
}

/// The inverse by Gauss and Jordan.
fn inverted(mut a: Vec<f64>, n: usize) -> Vec<f64> {
    let mut inverse = vec![0f64; n * n];
    (0..n).for_each(|k| inverse[k * n + k] = 1.);
    for k in 0..n {
        let pivot = a[k * n + k];
        for j in 0..n {
            a[k * n + j] /= pivot;
            inverse[k * n + j] /= pivot;
        }
        for i in (0..n).filter(|i| *i != k) {
            let factor = a[i * n + k];
            for j in 0..n {
                a[i * n + j] -= factor * a[k * n + j];
                inverse[i * n + j] -= factor * inverse[k * n + j];
            }
        }
    }
    inverse
}

/// The code of a weight, and what it is worth, in f64.
fn nearest(codes: &Codes, row: usize, k: usize, weight: f64) -> (i8, f64) {
    let (low, high) = match codes.scheme {
        Scheme::Int4 { .. } => (0., 15.),
        _ => (-127., 127.),
    };
    let at = match codes.scheme.group() {
        Some(group) => row * (codes.cols / group) + k / group,
        None => row,
    };
    let zero = match (codes.scheme, codes.zeros.get(at)) {
        (_, Some(zero)) => f64::from(*zero) / 16.,
        (Scheme::Int4 { .. }, None) => 8.,
        _ => 0.,
    };
    let scale = f64::from(codes.scales[at]);
    let code = (weight / scale + zero).clamp(low, high).round_ties_even();
    (code as i8, scale * (code - zero))
}

/// Optimal Brain Surgeon, column by column: the inverse of what is left of H is made anew for every column. With the
/// scales of `codes`.
fn reference(weights: &[f32], mut codes: Codes, x: &[f32], options: &Options) -> Codes {
    let (rows, cols) = (codes.rows, codes.cols);
    let h = &damped(x, cols, options.damping);
    let mut left: Vec<usize> = (0..cols).collect();
    if options.act_order {
        left.sort_by(|a, b| h[b * cols + b].total_cmp(&h[a * cols + a]));
    }
    let mut weights: Vec<f64> = weights.iter().map(|w| f64::from(*w)).collect();
    while !left.is_empty() {
        let n = left.len();
        let part = left
            .iter()
            .flat_map(|i| left.iter().map(move |j| h[i * cols + j]));
        let inverse = inverted(part.collect(), n);
        let k = left[0];
        for row in 0..rows {
            let weights = &mut weights[row * cols..][..cols];
            let (code, value) = nearest(&codes, row, k, weights[k]);
            codes.codes[row * cols + k] = code;
            let error = (weights[k] - value) / inverse[0];
            for (j, by) in left.iter().zip(&inverse[..n]).skip(1) {
                weights[*j] -= error * by;
            }
        }
        left.remove(0);
    }
    codes
}

#[test]
fn inputs_that_have_nothing_in_common_give_the_nearest_codes() -> Result<()> {
    let (rows, cols) = (9, 256);
    let weights = numbers(1, rows * cols);
    for scheme in schemes() {
        for sizes in [[1f32; 4], [1., 3., 0.1, 0.]] {
            // Every row has one input.
            let x: Vec<f32> = (0..cols * cols)
                .map(|at| {
                    if at / cols == at % cols {
                        sizes[at % 4]
                    } else {
                        0.
                    }
                })
                .collect();
            let inverse = hessian(&x, cols)?.inverse(&Options::default())?;
            let codes = gptq::quantize(&weights, rows, cols, scheme, &inverse)?;
            let plain = quantize(&weights, rows, cols, scheme)?;
            if sizes == [1.; 4] {
                assert!(codes == plain, "{scheme}");
                continue;
            }
            // Scales are for the large inputs, and each code is the nearest to its weight.
            for (at, weight) in weights.iter().enumerate() {
                let code = nearest(&codes, at / cols, at % cols, f64::from(*weight)).0;
                assert!(code.abs_diff(codes.codes[at]) <= 1, "{scheme}");
            }
            let (ours, theirs) = (error(&x, &weights, &codes), error(&x, &weights, &plain));
            assert!(ours < theirs, "{scheme}: {ours} of {theirs}");
        }
    }
    Ok(())
}

#[test]
fn the_output_misses_less_than_with_the_nearest_codes() -> Result<()> {
    for (rows, cols) in [(1, 128), (5, 384), (33, 640)] {
        let (weights, x) = (numbers(2, rows * cols), inputs(3, 2 * cols, cols));
        for act_order in [false, true] {
            let options = Options {
                act_order,
                ..Options::default()
            };
            let inverse = hessian(&x, cols)?.inverse(&options)?;
            for scheme in schemes() {
                let codes = gptq::quantize(&weights, rows, cols, scheme, &inverse)?;
                codes.check()?;
                let nearest = quantize(&weights, rows, cols, scheme)?;
                let (ours, theirs) = (error(&x, &weights, &codes), error(&x, &weights, &nearest));
                assert!(
                    ours < 0.7 * theirs,
                    "{scheme} {rows}x{cols}: {ours} of {theirs}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn codes_are_those_of_the_plain_form() -> Result<()> {
    // More than one block of columns, and one that is not whole.
    let (rows, cols) = (4, 160);
    let (weights, x) = (numbers(5, rows * cols), inputs(6, 300, cols));
    for act_order in [false, true] {
        for damping in [0.01, 0.1] {
            let options = Options { act_order, damping };
            let inverse = hessian(&x, cols)?.inverse(&options)?;
            for scheme in schemes().filter(|scheme| scheme.check(cols).is_ok()) {
                let ours = gptq::quantize(&weights, rows, cols, scheme, &inverse)?;
                let plain = reference(&weights, ours.clone(), &x, &options);
                // The sums of H are of f32 here and of f64 there; where a weight lies between two codes that can
                // tip it, and what follows in its row.
                let other = ours
                    .codes
                    .iter()
                    .zip(&plain.codes)
                    .filter(|(a, b)| a != b)
                    .count();
                assert!(
                    other * 50 <= ours.codes.len(),
                    "{scheme}: {other} of {}",
                    rows * cols
                );
                let (a, b) = (error(&x, &weights, &ours), error(&x, &weights, &plain));
                assert!((a / b - 1.).abs() < 0.02, "{scheme}: {a} and {b}");
            }
        }
    }
    Ok(())
}

#[test]
fn rows_may_come_in_any_number_of_parts_and_dtypes() -> Result<()> {
    let cols = 600;
    let x = Tensor::from_vec(inputs(8, 700, cols), (7, 100, cols), &Device::Cpu)?;
    let weights = numbers(9, 3 * cols);
    let codes = |parts: &[Tensor]| -> Result<Codes> {
        let mut hessian = Hessian::new(cols)?;
        parts.iter().try_for_each(|part| hessian.add(part))?;
        assert_eq!(hessian.rows(), 700);
        let inverse = hessian.inverse(&Options::default())?;
        gptq::quantize(&weights, 3, cols, Scheme::Int8, &inverse)
    };
    let whole = codes(std::slice::from_ref(&x))?;
    let parts = codes(&[x.narrow(0, 0, 3)?, x.narrow(0, 3, 4)?])?;
    let turned = codes(&[x.transpose(0, 1)?])?;
    for other in [&parts, &turned] {
        let differ = whole.codes.iter().zip(&other.codes).filter(|(a, b)| a != b);
        assert!(differ.count() < 20);
    }
    let half = x.to_dtype(candle_core::DType::BF16)?;
    assert_eq!(
        codes(std::slice::from_ref(&half))?,
        codes(&[half.to_dtype(candle_core::DType::F32)?])?
    );
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let refused = |result: Result<()>, why: &str| {
        let error = result.expect_err(why).to_string();
        assert!(error.contains(why), "`{error}` does not say `{why}`");
    };
    refused(Hessian::new(0).map(drop), "inputs: 0");
    refused(Hessian::new(1 << 40).map(drop), "inputs: 1099511627776");
    let mut sums = Hessian::new(64)?;
    refused(sums.inverse(&Options::default()).map(drop), "no inputs");
    let tensor = |values: Vec<f32>, shape: &[usize]| Tensor::from_vec(values, shape, &Device::Cpu);
    refused(
        sums.add(&tensor(vec![0.; 63], &[1, 63])?),
        "x: shape [1, 63]",
    );
    refused(sums.add(&tensor(vec![0.; 1], &[])?), "x: shape []");
    for wrong in [f32::NAN, f32::INFINITY, -1e20] {
        let mut values = vec![0f32; 128];
        values[64 + 7] = wrong;
        refused(sums.add(&tensor(values, &[2, 64])?), "at row 1, column 7");
    }
    // No rows are no inputs.
    sums.add(&tensor(Vec::new(), &[0, 64])?)?;
    refused(sums.inverse(&Options::default()).map(drop), "no inputs");
    sums.add(&tensor(vec![0.; 64], &[1, 64])?)?;
    refused(
        sums.inverse(&Options::default()).map(drop),
        "all inputs were zero",
    );
    sums.add(&tensor(numbers(4, 64), &[1, 64])?)?;
    for damping in [0., -1., f64::NAN, f64::INFINITY] {
        let options = Options {
            damping,
            ..Options::default()
        };
        refused(sums.inverse(&options).map(drop), "damping: ");
    }
    let options = Options {
        damping: 1e-30,
        ..Options::default()
    };
    refused(sums.inverse(&options).map(drop), "not positive definite");
    let inverse = sums.inverse(&Options::default())?;
    let weights = numbers(5, 128);
    let quantize = |weights: &[f32], rows, cols, scheme: &str| {
        gptq::quantize(weights, rows, cols, scheme.parse()?, &inverse).map(drop)
    };
    quantize(&weights, 2, 64, "int8")?;
    quantize(&[], 0, 64, "int8")?;
    refused(quantize(&weights, 2, 64, "fp8"), "scheme: fp8");
    refused(
        quantize(&weights, 2, 64, "ternary-row"),
        "scheme: ternary-row",
    );
    refused(quantize(&weights, 1, 128, "int8"), "inverse: of 64 inputs");
    refused(quantize(&weights, 3, 64, "int8"), "weights: 128 values");
    refused(quantize(&weights, 2, 64, "int4-g128"), "cols: ");
    let mut wrong = weights.clone();
    wrong[70] = f32::NAN;
    refused(quantize(&wrong, 2, 64, "int8"), "row 1, column 6");
    Ok(())
}
