//! Quantizing: every scheme against what it promises.

use super::quantize;
use crate::quant::{Codes, Scheme, TernaryScale};
use rand::{Rng, SeedableRng, rngs::StdRng};

fn normals(seed: u64, n: usize) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..n)
        .map(|_| {
            let (u, v): (f64, f64) = (rng.random(), rng.random());
            ((-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos() * 0.05) as f32
        })
        .collect()
}

fn schemes() -> Vec<Scheme> {
    let mut all = vec![
        Scheme::Int8,
        Scheme::Fp8,
        Scheme::Fp8Block128,
        Scheme::Nvfp4,
        Scheme::Nf4,
    ];
    for group in [32, 64, 128] {
        for zero_point in [false, true] {
            all.push(Scheme::Int4 { group, zero_point });
        }
        let scale = TernaryScale::Group(group);
        all.push(Scheme::Ternary { scale });
    }
    for scale in [TernaryScale::Tensor, TernaryScale::Row] {
        all.push(Scheme::Ternary { scale });
    }
    all
}

fn squared_error(weights: &[f32], codes: &Codes) -> f64 {
    let values = codes.dequantize();
    let pairs = weights.iter().zip(values);
    pairs.map(|(w, v)| f64::from(w - v).powi(2)).sum()
}

#[test]
fn schemes_are_read_and_written_as_text() {
    for scheme in schemes() {
        assert_eq!(scheme.to_string().parse::<Scheme>().unwrap(), scheme);
    }
    // In either case, with `_` for `-`.
    for (text, scheme) in [
        ("INT8", "int8"),
        ("Int4_G64_Z", "int4-g64-z"),
        ("FP8_Block128", "fp8-block128"),
        ("NVFP4", "nvfp4"),
        ("NF4", "nf4"),
    ] {
        assert_eq!(text.parse::<Scheme>().unwrap().to_string(), scheme);
    }
    for bad in [
        "",
        "int",
        "int4-g48",
        "int4-z-g32",
        "ternary-",
        "INT-8",
        "int8-g32",
        "fp8-g128",
        "nvfp4-g16",
        "nf4-g64",
    ] {
        let error = bad.parse::<Scheme>().unwrap_err().to_string();
        assert!(error.contains(&format!("`{bad}`")), "{error}");
    }
}

#[test]
fn codes_are_in_range_and_near_the_weights() {
    let (rows, cols) = (37, 384);
    let weights = normals(1, rows * cols);
    let power: f64 = weights.iter().map(|w| f64::from(*w).powi(2)).sum();
    for scheme in schemes() {
        let codes = quantize(&weights, rows, cols, scheme).unwrap();
        codes.check().unwrap();
        let error = squared_error(&weights, &codes) / power;
        // What a uniform quantizer of so many levels leaves of a normal distribution; for INT8 over a
        // row whose largest value is about 3.
        // Of e4m3 a sixteenth of the value at most, whose squares are 7e-4 on average.
        let most = match scheme.bits() {
            8 if scheme.is_fp8() => 9e-4,
            8 => 1e-4,
            4 => 0.012,
            _ => 0.28,
        };
        assert!(error < most, "{scheme}: {error}");
    }
}

/// No scale on a fine grid around it does better by more than its own steps explain.
#[test]
fn the_scale_is_the_best_of_a_search() {
    let cols = 128;
    for seed in 0..20 {
        let mut weights = normals(seed, cols);
        // An outlier, which clipping should ignore or not as the error asks.
        weights[7] *= 4.;
        for (group, zero_point) in [(32, false), (128, false), (64, true)] {
            let scheme = Scheme::Int4 { group, zero_point };
            let codes = quantize(&weights, 1, cols, scheme).unwrap();
            let found = squared_error(&weights, &codes);
            let mut best = 0.;
            for weights in weights.chunks(group) {
                let amax = weights.iter().fold(0f32, |m, w| m.max(w.abs()));
                let mut least = f64::MAX;
                let zeros = if zero_point { 0..=60 } else { 32..=32 };
                for zero in zeros.map(|quarters| quarters as f32 / 4.) {
                    for step in 1..=400 {
                        for sign in [1., -1.] {
                            let scale = sign * amax / 4. * step as f32 / 400.;
                            let error = weights.iter().map(|w| {
                                let q = (w / scale + zero).round();
                                let v = scale * (q.clamp(0., 15.) - zero);
                                f64::from(w - v).powi(2)
                            });
                            least = least.min(error.sum());
                        }
                    }
                }
                best += least;
            }
            assert!(
                found < best * 1.1,
                "{scheme} {seed}: {found:e} for {best:e}"
            );
        }
        // INT8 against the largest magnitude alone.
        let codes = quantize(&weights, 1, cols, Scheme::Int8).unwrap();
        let scale = weights.iter().fold(0f32, |m, w| m.max(w.abs())) / 127.;
        let plain = weights
            .iter()
            .map(|w| f64::from(w - scale * (w / scale).round()).powi(2));
        assert!(squared_error(&weights, &codes) <= plain.sum::<f64>() * (1. + 1e-5));
    }
}

/// The scale is the largest magnitude, and every code the nearest to its weight.
#[test]
fn the_largest_of_a_group_of_nf4_is_1() {
    use crate::quant::nf4;
    let (rows, cols) = (5, 192);
    let mut weights = normals(8, rows * cols);
    weights[64..128].fill(0.);
    weights[128..192].iter_mut().for_each(|w| *w *= 1e-38);
    let quantized = quantize(&weights, rows, cols, Scheme::Nf4).unwrap();
    quantized.check().unwrap();
    for (group, weights) in weights.chunks(64).enumerate() {
        let codes = &quantized.codes[64 * group..][..64];
        let scale = weights.iter().fold(0f32, |m, w| m.max(w.abs()));
        assert_eq!(quantized.scales[group], scale);
        for (code, w) in codes.iter().zip(weights) {
            let distance = |v: f32| (w - scale * v).abs();
            let least = nf4::TABLE
                .into_iter()
                .map(distance)
                .fold(f32::MAX, f32::min);
            let own = distance(nf4::to_f32(*code as u8));
            assert!(own <= least * (1. + 1e-4), "{w}: {code}");
            assert!(scale != 0. || *code == 7);
        }
    }
}

/// By compressed-tensors' formulas: the largest of a matrix is 448 times 6, the scale of a group the e4m3 number nearest to
/// what makes 6 of its largest, and every code the nearest to its weight.
#[test]
fn the_largest_of_a_group_of_nvfp4_is_near_6() {
    use crate::quant::{e2m1, e4m3};
    let (rows, cols) = (20, 48);
    let mut weights = normals(7, rows * cols);
    // Groups of very different sizes, and of zeros.
    for (group, weights) in weights.chunks_mut(16).enumerate() {
        let by = [1., 1e-3, 30., 0.][group % 4];
        weights.iter_mut().for_each(|w| *w *= by);
    }
    let codes = quantize(&weights, rows, cols, Scheme::Nvfp4).unwrap();
    codes.check().unwrap();
    let largest = weights.iter().fold(0f32, |m, w| m.max(w.abs()));
    let global = 448. * 6. / largest;
    assert!(codes.scales.iter().all(|s| *s == 1. / global));
    let values: Vec<f32> = (0..8).map(e2m1::to_f32).collect();
    for (group, b) in codes.group_scales.iter().enumerate() {
        let (weights, codes) = (
            &weights[16 * group..][..16],
            &codes.codes[16 * group..][..16],
        );
        let most = weights.iter().fold(0f32, |m, w| m.max(w.abs()));
        assert_eq!(*b, e4m3::from_f32(most * global / 6.), "{group}");
        let scale = f64::from(e4m3::to_f32(*b)) / f64::from(global);
        if scale == 0. {
            assert!(codes.iter().all(|q| *q == 0));
            continue;
        }
        for (w, q) in weights.iter().zip(codes) {
            let w = f64::from(*w) / scale;
            let off = |v: f32| (w.abs() - f64::from(v)).abs();
            let nearest = values.iter().map(|v| off(*v)).fold(f64::MAX, f64::min);
            let own = e2m1::to_f32(*q as u8);
            assert!(off(own.abs()) <= nearest + 1e-6, "{w}: {own}");
            assert!(
                own == 0. || own.is_sign_negative() == (w < 0.),
                "{w}: {own}"
            );
        }
    }
}

/// The largest of a row or block is 448, and every code the nearest to its weight.
#[test]
fn the_largest_of_a_block_is_448() {
    let (rows, cols) = (200, 300);
    let mut weights = normals(6, rows * cols);
    // Blocks of very different sizes.
    for (i, w) in weights.iter_mut().enumerate() {
        *w *= 10f32.powi((i / cols / 128 * 3 + i % cols / 128) as i32);
    }
    for (scheme, [height, width]) in [(Scheme::Fp8, [1, cols]), (Scheme::Fp8Block128, [128, 128])] {
        let codes = quantize(&weights, rows, cols, scheme).unwrap();
        let across = cols.div_ceil(width);
        assert_eq!(codes.scales.len(), rows.div_ceil(height) * across);
        for (index, scale) in codes.scales.iter().enumerate() {
            let (top, left) = (index / across * height, index % across * width);
            let places = (top..rows.min(top + height))
                .flat_map(|row| (left..cols.min(left + width)).map(move |col| row * cols + col));
            let largest = places.clone().fold(0f32, |m, at| m.max(weights[at].abs()));
            assert_eq!(*scale, largest / 448.);
            let code = |at: usize| codes.codes[at] as u8 & 0x7f;
            assert_eq!(places.map(code).max(), Some(0x7e), "{scheme} {index}");
        }
        let values = codes.dequantize();
        for (at, (w, v)) in weights.iter().zip(values).enumerate() {
            let (scale, _) = codes.meaning(at / cols, at % cols);
            let most = (w.abs() / 16.).max(scale / 1024.) * 1.0001;
            assert!((w - v).abs() <= most, "{scheme} {at}: {v} for {w}");
        }
    }
}

/// Weights that lie on a grid of 16 steps, wherever it begins, stay as they are but for what is less
/// than a sixteenth in the zero point.
#[test]
fn a_grid_of_16_steps_is_found() {
    let cols = 64 * 32;
    let mut rng = StdRng::seed_from_u64(5);
    let grids: Vec<(f32, f32)> = (0..cols / 32)
        .map(|_| {
            let scale = half::f16::from_f32(rng.random_range(0.01..0.1));
            (scale.to_f32(), rng.random_range(0.0..15.0))
        })
        .collect();
    let weights: Vec<f32> = (0..cols)
        .map(|i| {
            let (scale, zero) = grids[i / 32];
            let q = match i % 32 {
                0 => 0,
                1 => 15,
                _ => rng.random_range(0..=15),
            };
            scale * (q as f32 - zero)
        })
        .collect();
    let codes = quantize(&weights, 1, cols, "int4-g32-z".parse().unwrap()).unwrap();
    for (i, (w, v)) in weights.iter().zip(codes.dequantize()).enumerate() {
        let (scale, zero) = grids[i / 32];
        assert!(
            (w - v).abs() <= scale / 16.,
            "{i}: {v} for {w}, zero {zero}"
        );
    }
}

#[test]
fn ternary_is_the_absmean() {
    let weights = [0.5f32, -1.5, 0.1, 2.].repeat(16);
    let scale = TernaryScale::Tensor;
    let codes = quantize(&weights, 2, 32, Scheme::Ternary { scale }).unwrap();
    assert_eq!(codes.scales, [1.025]);
    assert_eq!(codes.codes[..4], [0, -1, 0, 1]);
    assert_eq!(codes.dequantize()[..4], [0., -1.025, 0., 1.025]);
    let scale = TernaryScale::Row;
    let mut weights = weights;
    weights[32..].iter_mut().for_each(|w| *w *= 2.);
    let codes = quantize(&weights, 2, 32, Scheme::Ternary { scale }).unwrap();
    assert_eq!(codes.scales, [1.025, 2.05]);
}

#[test]
fn zeros_stay_zeros() {
    let (rows, cols) = (3, 128);
    let mut weights = normals(2, rows * cols);
    weights[cols..2 * cols].fill(0.);
    weights[2 * cols..2 * cols + 32].fill(-0.);
    for scheme in schemes() {
        let codes = quantize(&weights, rows, cols, scheme).unwrap();
        codes.check().unwrap();
        let values = codes.dequantize();
        assert!(values[cols..2 * cols].iter().all(|v| *v == 0.), "{scheme}");
        assert!(values.iter().all(|v| v.is_finite()), "{scheme}");
    }
    for tiny in [1e-38f32, 1e-45, 1e-30] {
        for scheme in schemes() {
            let codes = quantize(&[tiny; 128], 1, 128, scheme).unwrap();
            codes.check().unwrap();
            assert!(codes.dequantize().iter().all(|v| v.abs() <= 2. * tiny));
        }
    }
}

#[test]
fn bad_weights_and_shapes_are_named() {
    let refused = |weights: &[f32], rows, cols, scheme| {
        quantize(weights, rows, cols, scheme)
            .unwrap_err()
            .to_string()
    };
    let int4 = |group| Scheme::Int4 {
        group,
        zero_point: false,
    };
    let mut weights = vec![0.5f32; 4 * 96];
    let error = refused(&weights, 4, 96, int4(128));
    assert!(error.contains("96") && error.contains("128"), "{error}");
    assert!(error.contains("write int4-g32"), "{error}");
    assert!(refused(&weights, 4, 96, int4(48)).contains("48"));
    assert!(refused(&weights, 3, 96, Scheme::Int8).contains("384 values"));
    assert!(refused(&weights[..40], 1, 40, int4(32)).contains("40"));
    assert!(refused(&[], 1, 0, Scheme::Int8).contains("cols"));
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        weights[2 * 96 + 5] = bad;
        for scheme in [Scheme::Int8, int4(32)] {
            let error = refused(&weights, 4, 96, scheme);
            assert!(error.contains("row 2, column 5"), "{error}");
        }
    }
    weights[2 * 96 + 5] = 3e6;
    let error = refused(&weights, 4, 96, int4(32));
    assert!(error.contains("row 2") && error.contains("int8"), "{error}");
    quantize(&weights, 4, 96, Scheme::Int8).unwrap();
    assert!(quantize(&[], 0, 96, Scheme::Int8).is_ok());
}

#[test]
fn codes_that_do_not_fit_are_named() {
    let good = quantize(&normals(3, 256), 2, 128, "int4-g32-z".parse().unwrap()).unwrap();
    let refused = |change: &dyn Fn(&mut Codes)| {
        let mut codes = good.clone();
        change(&mut codes);
        codes.check().unwrap_err().to_string()
    };
    assert!(refused(&|c| c.codes[130] = 16).contains("row 1, column 2"));
    assert!(refused(&|c| c.codes[0] = -1).contains("0 to 15"));
    assert!(refused(&|c| c.scales[1] = 0.1).contains("f16"));
    assert!(refused(&|c| c.scales[1] = f32::NAN).contains("NaN"));
    assert!(refused(&|c| c.rows = 3).contains("codes"));
    assert!(refused(&|c| c.scales.truncate(1)).contains("scales"));
    assert!(refused(&|c| c.zeros.truncate(1)).contains("zeros"));
    assert!(refused(&|c| c.group_scales.push(1)).contains("group_scales: 1 given, expected 0"));
    let good = quantize(&normals(3, 256), 2, 128, Scheme::Nvfp4).unwrap();
    for (at, b) in [(3, 0x7f), (15, 0x80)] {
        let mut codes = good.clone();
        codes.group_scales[at] = b;
        let error = codes.check().unwrap_err().to_string();
        assert!(error.contains(&format!("group_scales: {b:#x}")), "{error}");
    }
}
