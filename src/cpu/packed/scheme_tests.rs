//! Every scheme at every level of this processor, against f64.

use super::tests::normals;
use super::*;
use crate::cpu::simd::Level;
use crate::quant::{Codes, Scheme, TernaryScale, e4m3, quantize};
use candle_core::{DType, Device, Tensor};
use rand::{Rng, SeedableRng, rngs::StdRng};

/// Every scheme that there is a kernel for.
pub(super) fn schemes() -> Vec<Scheme> {
    let names = "int8 fp8 fp8-block128 nvfp4 nf4 int4-g32 int4-g64 int4-g128 int4-g32-z int4-g64-z \
                 int4-g128-z ternary-tensor ternary-row ternary-g32 ternary-g64 ternary-g128";
    names
        .split_whitespace()
        .map(|n| n.parse().unwrap())
        .collect()
}

/// Codes that no search finds: all of the range, and scales of any size and sign.
fn adversarial(rng: &mut StdRng, scheme: Scheme, rows: usize, cols: usize) -> Codes {
    let weights = normals(rng, rows * cols);
    let mut codes = quantize(&weights, rows, cols, scheme).unwrap();
    let (low, high) = match scheme.bits() {
        8 => (-128, 127),
        4 => (0, 15),
        _ => (-1, 1),
    };
    for (i, q) in codes.codes.iter_mut().enumerate() {
        *q = match i / 100 % 3 {
            0 => low,
            1 => high,
            _ => rng.random_range(low..=high),
        };
    }
    let scales = [0.0, -0.0, 1.0, -1.0, 65504.0, 6e-8, -0.25];
    for s in &mut codes.scales {
        *s = half::f16::from_f32(scales[rng.random_range(0..scales.len())]).to_f32();
        if scheme.is_fp8() {
            *s = s.abs();
        }
    }
    // NaN is not compared as numbers are.
    for q in codes.codes.iter_mut().filter(|_| scheme.is_fp8()) {
        *q -= i8::from(e4m3::is_nan(*q as u8));
    }
    for b in &mut codes.group_scales {
        *b = [0, 1, 7, 8, 0x7e, rng.random_range(0..0x7f)][rng.random_range(0..6)];
    }
    for z in &mut codes.zeros {
        *z = [0, 240, 128, 255, rng.random()][rng.random_range(0..5)];
    }
    codes
}

fn check(codes: &Codes, m: usize, x: &[f32]) {
    let (rows, cols) = (codes.rows, codes.cols);
    let matrix = PackedMatrix::from_codes(codes).unwrap();
    assert_eq!(matrix.to_codes().unwrap(), *codes);
    let values = codes.dequantize();
    let mut row = vec![0.0; cols];
    for r in 0..rows {
        matrix.dequantize_row(r, &mut row).unwrap();
        assert_eq!(row, values[r * cols..][..cols], "{} row {r}", codes.scheme);
    }
    let wide = matrix.padded_cols();
    for level in Level::available() {
        let q = Q8Activations::quantize(level, x, m, wide).unwrap();
        let out = check_products(&matrix, &values, level, &q, codes);
        let mut whole = vec![f32::NAN; m * rows];
        matrix.forward(level, &q, &mut whole).unwrap();
        assert_eq!(whole, out, "{} {level:?}: forward differs", codes.scheme);
        let mut together = q.clone();
        let plain = Grain::default();
        let fine = Grain {
            fine: true,
            ..plain
        };
        let whole = Grain {
            whole: true,
            ..plain
        };
        let wide = Grain {
            wide: true,
            ..plain
        };
        for grain in [fine, Grain { wide: true, ..fine }, whole, wide] {
            together.refill_by(level, x, (m, q.k()), grain).unwrap();
            check_products(&matrix, &values, level, &together, codes);
            if m == 1 && !grain.fine {
                together.prepare_look_ups(level);
                check_products(&matrix, &values, level, &together, codes);
            }
        }
        if m == 1 {
            // By table look-up, where there is that form.
            let mut prepared = q;
            prepared.prepare_look_ups(level);
            let looked_up = check_products(&matrix, &values, level, &prepared, codes);
            assert_eq!(looked_up, out, "{} {level:?} by table", codes.scheme);
        }
    }
}

/// The products of all tokens of `q`, which are held against those of its values in f64.
fn check_products(
    matrix: &PackedMatrix,
    values: &[f32],
    level: Level,
    q: &Q8Activations,
    codes: &Codes,
) -> Vec<f32> {
    let (m, rows, cols) = (q.m(), codes.rows, codes.cols);
    let mut row = vec![0.0; q.k()];
    let mut out = vec![f32::NAN; m * rows];
    matrix
        .matmul(level, 0..rows, q, 0..m, &mut out, rows)
        .unwrap();
    for t in 0..m {
        q.dequantize_row(t, &mut row).unwrap();
        for r in 0..rows {
            let (mut want, mut magnitude) = (0f64, 0f64);
            for (k, x) in row[..cols].iter().enumerate() {
                let (mut scale, other) = codes.meaning(r, k);
                if codes.scheme == Scheme::Nvfp4 {
                    scale *= e4m3::to_f32(other);
                }
                want += f64::from(values[r * cols + k]) * f64::from(*x);
                // What a core adds up: codes with an offset of 128 or 15, and the offset.
                let most = f64::from(1u32 << codes.scheme.bits()) * 2.0;
                magnitude += f64::from(scale.abs()) * most * f64::from(x.abs());
            }
            // Codes of 8 bits with an offset meet what pads the rows too.
            let pad: f32 = row[cols..].iter().map(|x| x.abs()).sum();
            magnitude += f64::from(codes.meaning(r, 0).0.abs()) * 512.0 * f64::from(pad);
            let roundings = (2 * 2 * q.k() / 32 + 6) as f64 / f64::from(1 << 24);
            let got = f64::from(out[t * rows + r]);
            assert!(
                (got - want).abs() <= roundings * magnitude + 1e-38,
                "{} {level:?} {rows}x{cols} token {t} row {r}: {got} for {want}",
                codes.scheme
            );
        }
        if codes.scheme.multiplies_in_f32() {
            // In f32 the order of a sum shows: it is the same whatever the tile.
            let some = rows.min(ROW_GROUP);
            let mut alone = vec![f32::NAN; some];
            matrix
                .matmul(level, 0..some, q, t..t + 1, &mut alone, some)
                .unwrap();
            let together = &out[t * rows..][..some];
            assert_eq!(
                alone, together,
                "{} {level:?} token {t} of {m}",
                codes.scheme
            );
        }
    }
    out
}

#[test]
fn products_agree_with_f64() {
    let mut rng = StdRng::seed_from_u64(11);
    for scheme in schemes() {
        let unit = scheme.group().unwrap_or(32);
        for (i, groups) in [1, 2, 3, 5, 9].into_iter().enumerate() {
            // Rows that no block divides, where there are no groups, or the last may be smaller.
            let whole = scheme.check(1).is_err();
            let cols = groups * unit - if whole { 0 } else { [0, 0, 1, 16, 31][i] };
            let (rows, m) = ([1, 15, 17, 33, 100][i], [1, 5, 2, 17, 1][i]);
            let weights = normals(&mut rng, rows * cols);
            let codes = quantize(&weights, rows, cols, scheme).unwrap();
            let wide = cols.next_multiple_of(32);
            let x = normals(&mut rng, m * wide);
            check(&codes, m, &x);
            let codes = adversarial(&mut rng, scheme, rows, cols);
            let ends: Vec<f32> = x.iter().map(|x| x.signum()).collect();
            check(&codes, m, &ends);
            check(&codes, m, &vec![-1.0; m * wide]);
        }
        let weights = normals(&mut rng, 64 * 1536);
        let codes = quantize(&weights, 64, 1536, scheme).unwrap();
        check(&codes, 19, &normals(&mut rng, 19 * 1536));
    }
}

#[test]
fn a_tensor_is_quantized_in_parts_as_in_one() {
    let mut rng = StdRng::seed_from_u64(12);
    // Several parts of a million values.
    let (rows, cols) = (2100, 1152);
    let weights = normals(&mut rng, rows * cols);
    let tensor = Tensor::from_vec(weights.clone(), (rows, cols), &Device::Cpu).unwrap();
    for scheme in [
        "int8",
        "fp8-block128",
        "nvfp4",
        "nf4",
        "int4-g32-z",
        "ternary-row",
    ] {
        let scheme = scheme.parse().unwrap();
        let whole = quantize(&weights, rows, cols, scheme).unwrap();
        let packed = PackedMatrix::quantize(&tensor, scheme).unwrap();
        assert!(packed.to_codes().unwrap() == whole, "{scheme}");
    }
    let scale = TernaryScale::Tensor;
    let whole = quantize(&weights, rows, cols, Scheme::Ternary { scale }).unwrap();
    let packed = PackedMatrix::quantize(&tensor, Scheme::Ternary { scale }).unwrap();
    let scales = (packed.to_codes().unwrap().scales[0], whole.scales[0]);
    assert!((scales.0 - scales.1).abs() <= 1e-6 * scales.1);
    let mut bad = weights;
    bad[2000 * cols + 3] = f32::NAN;
    let bad = Tensor::from_vec(bad, (rows, cols), &Device::Cpu).unwrap();
    let bad = bad.to_dtype(DType::BF16).unwrap();
    let error = PackedMatrix::quantize(&bad, Scheme::Int8).unwrap_err();
    assert!(error.to_string().contains("row 2000, column 3"), "{error}");
}

/// The limits that formats are held to, with scales, zero points and padding, against bf16.
#[test]
fn packed_matrices_are_as_small_as_promised() {
    let mut rng = StdRng::seed_from_u64(13);
    for (scheme, most) in [
        ("int8", 0.52),
        ("fp8", 0.52),
        ("fp8-block128", 0.52),
        ("nvfp4", 0.288),
        ("nf4", 0.282),
        ("int4-g128", 0.28),
        ("int4-g128-z", 0.28),
        ("int4-g64", 0.28),
        ("ternary-tensor", 0.15),
        ("ternary-row", 0.15),
        ("ternary-g128", 0.15),
        ("ternary-g64", 0.15),
    ] {
        let scheme = scheme.parse().unwrap();
        let (rows, cols) = (576, 1536);
        let weights = normals(&mut rng, rows * cols);
        let codes = quantize(&weights, rows, cols, scheme).unwrap();
        let size = PackedMatrix::from_codes(&codes).unwrap().size_in_bytes();
        let bf16 = (2 * rows * cols) as f64;
        assert!(size as f64 <= most * bf16, "{scheme}: {size}");
        assert!(size >= codes.nominal_bytes(), "{scheme}: {size}");
    }
}

/// A NaN among the weights makes its own outputs NaN, at every level, and no others.
#[test]
fn a_nan_of_e4m3_reaches_its_row_alone() {
    let (rows, cols, m) = (40, 300, 3);
    let mut rng = StdRng::seed_from_u64(14);
    let weights = normals(&mut rng, rows * cols);
    for scheme in [Scheme::Fp8, Scheme::Fp8Block128] {
        let mut codes = quantize(&weights, rows, cols, scheme).unwrap();
        for (row, col, code) in [(0, 0, 0x7f), (17, 299, 0xff), (39, 130, 0x7f)] {
            codes.codes[row * cols + col] = code as u8 as i8;
        }
        let matrix = PackedMatrix::from_codes(&codes).unwrap();
        assert_eq!(matrix.to_codes().unwrap(), codes);
        let mut row = vec![0.0; cols];
        matrix.dequantize_row(17, &mut row).unwrap();
        let found = row.iter().position(|v| v.is_nan());
        assert_eq!(found, Some(299), "{scheme}");
        let x = normals(&mut rng, m * matrix.padded_cols());
        for level in Level::available() {
            let q = Q8Activations::quantize(level, &x, m, matrix.padded_cols()).unwrap();
            let mut out = vec![0.0; m * rows];
            matrix.forward(level, &q, &mut out).unwrap();
            for (at, y) in out.iter().enumerate() {
                let expected = [0, 17, 39].contains(&(at % rows));
                assert_eq!(y.is_nan(), expected, "{scheme} {level:?} {at}");
            }
        }
    }
}
