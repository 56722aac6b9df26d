//! Every format at every level of this processor, against f64.

use super::*;
use crate::cpu::simd::Level;
use crate::quant::{BlockFormat, Scaling, SubBlock, dequantize};
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Tensor};
use half::f16;
use rand::{Rng, SeedableRng, rngs::StdRng};
use std::borrow::Cow;

pub(super) fn normals(rng: &mut StdRng, n: usize) -> Vec<f32> {
    (0..n)
        .map(|_| {
            let (u, v): (f64, f64) = (rng.random(), rng.random());
            ((-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
        })
        .collect()
}

/// Blocks of random normals, quantized by candle.
pub(super) fn quantized(rng: &mut StdRng, dtype: GgmlDType, rows: usize, cols: usize) -> Vec<u8> {
    let x = Tensor::from_vec(normals(rng, rows * cols), (rows, cols), &Device::Cpu).unwrap();
    let q = QTensor::quantize(&x, dtype).unwrap();
    q.data().unwrap().into_owned()
}

/// Blocks that no quantizer writes: extreme codes, and scales that are zero, negative, subnormal or
/// as large as f16 goes.
fn adversarial(rng: &mut StdRng, dtype: GgmlDType, rows: usize, cols: usize) -> Vec<u8> {
    let format = BlockFormat::of(dtype).unwrap();
    let scales = [0.0, -0.0, 1.0, -1.0, 6e-8, -3e-6, 0.013, 65504.0, -65504.0];
    let mut bytes = vec![0u8; rows * format.row_bytes(cols).unwrap()];
    for (i, block) in bytes.chunks_exact_mut(format.bytes).enumerate() {
        match [Some(0x00), Some(0xff), Some(0x80), Some(0x7f), None][i % 5] {
            Some(byte) => block.fill(byte),
            None => rng.fill(block),
        }
        let at: &[usize] = match format.scaling {
            Scaling::Symmetric => &[0],
            Scaling::Affine | Scaling::Super => &[0, 2],
            Scaling::Super16 => &[80, 82],
            Scaling::SuperSymmetric => &[format.bytes - 2],
        };
        for &at in at {
            let scale = f16::from_f32(scales[rng.random_range(0..scales.len())]);
            block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
        }
    }
    bytes
}

fn columns(dtype: GgmlDType) -> &'static [usize] {
    match BlockFormat::of(dtype).unwrap().values {
        32 => &[32, 64, 96, 288, 576, 1536],
        _ => &[256, 512, 768, 1536],
    }
}

/// Tokens of very different magnitudes, one of them zero, one with a zero block.
fn tokens(rng: &mut StdRng, m: usize, k: usize) -> Vec<f32> {
    let mut x = normals(rng, m * k);
    for (t, row) in x.chunks_exact_mut(k).enumerate() {
        let scale = [1.0, 1e-3, 300.0, 0.0, 1e30][t % 5];
        row.iter_mut().for_each(|v| *v *= scale);
        if t % 5 == 1 {
            row[..32].fill(0.0);
        }
    }
    x
}

/// For each output: the product in f64, the sum of the magnitudes of all that a kernel may add up
/// for it, and the most that the rounding of the activations can change.
struct Expected {
    value: f64,
    magnitude: f64,
    activation_error: f64,
}

fn expect(format: &BlockFormat, row: &[u8], x: &[f32], exact: &[f32]) -> Expected {
    let mut e = Expected {
        value: 0.0,
        magnitude: 0.0,
        activation_error: 0.0,
    };
    for (i, x) in x.chunks_exact(32).enumerate() {
        let exact = &exact[32 * i..][..32];
        let (block, index) = (i / (format.values / 32), i % (format.values / 32));
        let sub = SubBlock::read(format, &row[block * format.bytes..][..format.bytes], index);
        let amax = exact.iter().fold(0f32, |a, v| a.max(v.abs()));
        let zero = f64::from(1u32 << (format.bits - 1));
        let (d, m) = (sub.d.to_f64().abs(), sub.m.to_f64().abs());
        for (k, w) in sub.values(format).into_iter().enumerate() {
            e.value += f64::from(w) * f64::from(x[k]);
            let code = f64::from(sub.codes[k]);
            let parts = match format.scaling {
                // Eight bits may be computed with the zero point 128.
                Scaling::Symmetric if format.bits == 8 => d * (255.0 + zero),
                Scaling::Symmetric => d * (code + zero),
                Scaling::Affine => d * code + m,
                Scaling::Super => d * f64::from(sub.scales[0]) * code + m * f64::from(sub.mins[0]),
                Scaling::Super16 => {
                    d * f64::from(sub.scales[k / 16]) * code + m * f64::from(sub.mins[k / 16])
                }
                Scaling::SuperSymmetric => {
                    d * f64::from(sub.scales[k / 16] as i8).abs() * (code + zero)
                }
            };
            e.magnitude += parts * f64::from(x[k]).abs();
            e.activation_error += f64::from(w).abs() * f64::from(amax) / 254.0;
        }
    }
    e
}

fn in_parts(fine: bool) -> Grain {
    let [wide, whole] = [false; 2];
    Grain { wide, whole, fine }
}

fn check(dtype: GgmlDType, blocks: &[u8], shape: (usize, usize, usize), x: &[f32]) {
    for fine in [false, true] {
        check_in(in_parts(fine), dtype, blocks, shape, x);
    }
}

fn check_in(
    grain: Grain,
    dtype: GgmlDType,
    blocks: &[u8],
    (rows, cols, m): (usize, usize, usize),
    x: &[f32],
) {
    let format = BlockFormat::of(dtype).unwrap();
    let matrix = PackedMatrix::pack(dtype, rows, cols, blocks).unwrap();
    let mut dequantized = vec![0.0; m * cols];
    let row_bytes = format.row_bytes(cols).unwrap();
    let mut expected = Vec::new();
    for level in Level::available() {
        let mut q = Q8Activations::default();
        q.refill_by(level, x, (m, cols), grain).unwrap();
        if expected.is_empty() {
            for (t, row) in dequantized.chunks_exact_mut(cols).enumerate() {
                q.dequantize_row(t, row).unwrap();
            }
            for (near, exact) in dequantized.chunks_exact(cols).zip(x.chunks_exact(cols)) {
                let rows = blocks.chunks_exact(row_bytes);
                expected.extend(rows.map(|row| expect(&format, row, near, exact)));
            }
        }
        let mut out = vec![f32::NAN; m * rows];
        matrix
            .matmul(level, 0..rows, &q, 0..m, &mut out, rows)
            .unwrap();
        // Three roundings of each of the two terms of a block or half block, one of each partial
        // sum, and one of the dequantized weight that the oracle starts from.
        let roundings = (2 * 2 * cols / 32 + 4) as f64 / f64::from(1 << 24);
        // A 256th of a step instead of half a step.
        let finer = if grain.fine { 128. } else { 1. };
        for (i, (got, want)) in out.iter().zip(&expected).enumerate() {
            let (t, r) = (i / rows, i % rows);
            let name = || format!("{dtype:?} {level:?} {grain:?} {rows}x{cols} token {t} row {r}");
            let error = (f64::from(*got) - want.value).abs();
            let bound = roundings * want.magnitude + 1e-38;
            assert!(
                error <= bound,
                "{}: {got} for {}, bound {bound:e}",
                name(),
                want.value
            );
            let row = &blocks[r * row_bytes..][..row_bytes];
            let exact: f64 = dot_exact(&format, row, &x[t * cols..]);
            let error = (f64::from(*got) - exact).abs();
            let bound = bound + want.activation_error / finer * (1.0 + 1e-5);
            assert!(error <= bound, "{}: {error:e}, bound {bound:e}", name());
        }
        let mut whole = vec![f32::NAN; m * rows];
        matrix.forward(level, &q, &mut whole).unwrap();
        assert_eq!(
            whole, out,
            "{dtype:?} {level:?}: forward differs from matmul"
        );
    }
}

fn dot_exact(format: &BlockFormat, row: &[u8], x: &[f32]) -> f64 {
    let mut w = vec![0.0; row.len() / format.bytes * format.values];
    dequantize(format.dtype, row, &mut w).unwrap();
    let products = w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
    products.sum()
}

#[test]
fn products_agree_with_f64() {
    let mut rng = StdRng::seed_from_u64(1);
    for dtype in BlockFormat::DTYPES {
        let all_rows = [1, 15, 16, 17, 100, 33];
        for (i, cols) in columns(dtype).iter().enumerate() {
            for (j, m) in [1, 2, 3, 4, 5, 7, 17].into_iter().enumerate() {
                let shape = (all_rows[(i + j) % all_rows.len()], *cols, m);
                let blocks = quantized(&mut rng, dtype, shape.0, shape.1);
                let x = tokens(&mut rng, m, *cols);
                check(dtype, &blocks, shape, &x);
            }
        }
        let blocks = quantized(&mut rng, dtype, 576, 1536);
        let x = tokens(&mut rng, 7, 1536);
        check(dtype, &blocks, (576, 1536, 7), &x);
    }
}

#[test]
fn adversarial_blocks_agree_with_f64() {
    let mut rng = StdRng::seed_from_u64(2);
    for dtype in BlockFormat::DTYPES {
        for (rows, m) in [(16, 1), (40, 13)] {
            let cols = 768;
            let blocks = adversarial(&mut rng, dtype, rows, cols);
            let mut x = tokens(&mut rng, m, cols);
            // Weights of 65504 x 128 x 63 leave no room for 1e30.
            x.iter_mut().for_each(|v| *v = v.clamp(-1e25, 1e25));
            check(dtype, &blocks, (rows, cols, m), &x);
            // Codes of 127 throughout, in both signs: the largest sums that can arise.
            for (i, v) in x.iter_mut().enumerate() {
                *v = if i % cols < 300 || i % 3 == 0 {
                    1.0
                } else {
                    -1.0
                };
            }
            check(dtype, &blocks, (rows, cols, m), &x);
            x.iter_mut().for_each(|v| *v *= 1e25);
            check(dtype, &blocks, (rows, cols, m), &x);
        }
    }
}

#[test]
fn unpacking_agrees_with_candle_bit_for_bit() {
    let mut rng = StdRng::seed_from_u64(3);
    for dtype in BlockFormat::DTYPES {
        for (rows, cols) in [(1, 256), (17, 768), (100, 1536)] {
            for blocks in [
                quantized(&mut rng, dtype, rows, cols),
                adversarial(&mut rng, dtype, rows, cols),
            ] {
                let data = Cow::Borrowed(&blocks[..]);
                let storage = QStorage::from_data(data, &Device::Cpu, dtype).unwrap();
                let tensor = QTensor::new(storage, (rows, cols)).unwrap();
                let theirs = tensor.dequantize(&Device::Cpu).unwrap();
                let theirs = theirs.flatten_all().unwrap().to_vec1::<f32>().unwrap();
                let mut ours = vec![0.0; rows * cols];
                dequantize(dtype, &blocks, &mut ours).unwrap();
                let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&ours), bits(&theirs), "{dtype:?}");
                let matrix = PackedMatrix::pack(dtype, rows, cols, &blocks).unwrap();
                let mut row = vec![0.0; cols];
                for r in 0..rows {
                    matrix.dequantize_row(r, &mut row).unwrap();
                    assert_eq!(
                        bits(&row),
                        bits(&ours[r * cols..][..cols]),
                        "{dtype:?} row {r}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_matrix_of_pieces_is_the_matrix_of_the_whole() {
    let mut rng = StdRng::seed_from_u64(4);
    for dtype in BlockFormat::DTYPES {
        let (rows, cols) = (61, 256);
        let blocks = quantized(&mut rng, dtype, rows, cols);
        let whole = PackedMatrix::pack(dtype, rows, cols, &blocks).unwrap();
        let mut builder = PackedMatrix::builder(dtype, rows, cols).unwrap();
        let row_bytes = blocks.len() / rows;
        for piece in [0..7, 7..7, 7..33, 33..61] {
            let bytes = &blocks[piece.start * row_bytes..piece.end * row_bytes];
            builder.push(piece.len(), bytes).unwrap();
        }
        let pieces = builder.finish().unwrap();
        for group in 0..4 {
            let (mut one, mut other) = (Vec::new(), Vec::new());
            let pieces = pieces.group(group, &mut other);
            assert_eq!(whole.group(group, &mut one), pieces, "{dtype:?}");
        }
        let padded = 64 * row_bytes;
        // Q3_K has its scales in bytes.
        let more = if dtype == GgmlDType::Q3K { 18 } else { 32 };
        let size = whole.size_in_bytes();
        assert!(
            size >= padded && size <= padded + padded / more,
            "{dtype:?}: {size} of {padded}"
        );
        assert_eq!(whole.group(0, &mut Vec::new()).as_ptr().align_offset(64), 0);
    }
}

#[test]
fn ranges_of_rows_and_tokens_write_their_part_only() {
    let mut rng = StdRng::seed_from_u64(5);
    let (rows, cols, m, stride) = (50, 256, 11, 70);
    for dtype in BlockFormat::DTYPES {
        let blocks = quantized(&mut rng, dtype, rows, cols);
        let matrix = PackedMatrix::pack(dtype, rows, cols, &blocks).unwrap();
        for level in Level::available() {
            let q = Q8Activations::quantize(level, &normals(&mut rng, m * cols), m, cols).unwrap();
            let mut whole = vec![0.0; m * rows];
            matrix.forward(level, &q, &mut whole).unwrap();
            for (some_rows, some) in [
                (16..50, 3..11),
                (32..37, 2..3),
                (0..16, 0..11),
                (48..50, 1..6),
            ] {
                let mut out = vec![7.5; some.len() * stride];
                matrix
                    .matmul(level, some_rows.clone(), &q, some.clone(), &mut out, stride)
                    .unwrap();
                for (i, got) in out.iter().enumerate() {
                    let (t, r) = (i / stride, i % stride);
                    let want = match r < some_rows.len() {
                        true => whole[(some.start + t) * rows + some_rows.start + r],
                        false => 7.5,
                    };
                    // Tiles of other sizes, but each product is summed in the same order.
                    assert_eq!(*got, want, "{dtype:?} {level:?} {some_rows:?} {some:?}");
                }
            }
        }
    }
}

#[test]
fn activations_are_alike_at_every_level() {
    let mut rng = StdRng::seed_from_u64(6);
    let (m, k) = (37, 576);
    let mut x = normals(&mut rng, m * k);
    x[5] = 1e30;
    x[40] = 1e38;
    x[100..132].iter_mut().for_each(|v| *v *= 1e-36);
    x[160..192].fill(f32::MIN_POSITIVE / 4.0);
    let mut plain = Q8Activations::quantize(Level::Scalar, &x, m, k).unwrap();
    let mut again = Q8Activations::zeros(100, 32).unwrap();
    let sizes = [(32, false, false), (128, true, false), (k, false, true)];
    let grains = sizes.map(|size| [(size, false), (size, true)]);
    for ((sharing, wide, whole), fine) in grains.into_iter().flatten() {
        let steps = if fine { 1. / 256. } else { 0.5 };
        let grain = Grain { wide, whole, fine };
        let fill = |q: &mut Q8Activations, level| q.refill_by(level, &x, (m, k), grain).unwrap();
        fill(&mut plain, Level::Scalar);
        for level in Level::available() {
            fill(&mut again, level);
            for (a, b) in plain.blocks().iter().zip(again.blocks()) {
                assert_eq!(
                    (a.q, a.d, a.sum, a.sums),
                    (b.q, b.d, b.sum, b.sums),
                    "{level:?}"
                );
            }
        }
        let mut row = vec![0.0; k];
        for t in 0..m {
            plain.dequantize_row(t, &mut row).unwrap();
            // The last of a token is half of 128.
            for (exact, got) in x[t * k..][..k].chunks(sharing).zip(row.chunks(sharing)) {
                let amax = exact.iter().fold(0f32, |a, v| a.max(v.abs()));
                for (x, y) in exact.iter().zip(got) {
                    let error = (f64::from(*x) - f64::from(*y)).abs();
                    assert!(error <= f64::from(amax) * (steps + 1e-4) / 127.0 + 1e-35);
                }
            }
        }
    }
}

#[test]
fn values_that_are_not_finite_make_their_token_nan_and_no_other() {
    let mut rng = StdRng::seed_from_u64(7);
    for dtype in BlockFormat::DTYPES {
        let (rows, cols, m) = (17, 512, 6);
        let blocks = quantized(&mut rng, dtype, rows, cols);
        let matrix = PackedMatrix::pack(dtype, rows, cols, &blocks).unwrap();
        let mut x = normals(&mut rng, m * cols);
        x[cols + 77] = f32::NAN;
        x[3 * cols] = f32::INFINITY;
        x[4 * cols + 511] = f32::NEG_INFINITY;
        let levels = Level::available().into_iter();
        for (level, fine) in levels.flat_map(|level| [(level, false), (level, true)]) {
            let mut q = Q8Activations::default();
            q.refill_by(level, &x, (m, cols), in_parts(fine)).unwrap();
            let mut out = vec![0.0; m * rows];
            matrix.forward(level, &q, &mut out).unwrap();
            for (t, out) in out.chunks_exact(rows).enumerate() {
                let bad = [1, 3, 4].contains(&t);
                assert!(
                    out.iter().all(|v| v.is_nan() == bad),
                    "{dtype:?} {level:?} token {t}"
                );
            }
        }
    }
}

/// Blocks are counted before there is room for them.
#[test]
fn more_than_there_is_takes_no_memory() {
    let matrix = PackedMatrix::pack(GgmlDType::Q4_0, 1 << 20, 1 << 26, &[0; 18]);
    let text = matrix.expect_err("blocks").to_string();
    assert!(text.starts_with("blocks: 18 bytes given"), "{text}");
    let builder = PackedMatrix::builder(GgmlDType::Q8_0, usize::MAX / 2, 64);
    let text = builder.map(|_| ()).expect_err("rows").to_string();
    assert!(text.starts_with("rows: "), "{text}");
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let fails = |result: candle_core::Result<()>, name: &str| {
        let text = result.expect_err(name).to_string();
        assert!(text.starts_with(name), "{text}");
    };
    let pack = |dtype, rows, cols, bytes| {
        PackedMatrix::pack(dtype, rows, cols, &vec![0; bytes]).map(|_| ())
    };
    fails(pack(GgmlDType::Q8K, 1, 256, 292), "dtype");
    fails(pack(GgmlDType::F32, 1, 32, 128), "dtype");
    fails(pack(GgmlDType::Q4_0, 1, 33, 18), "cols");
    fails(pack(GgmlDType::Q4_0, 1, 0, 0), "cols");
    fails(pack(GgmlDType::Q4K, 1, 128, 72), "cols");
    fails(pack(GgmlDType::Q4_0, 2, 32, 35), "blocks");
    fails(pack(GgmlDType::Q6K, 2, 256, 210), "blocks");
    fails(pack(GgmlDType::Q8_0, usize::MAX / 2, 64, 68), "blocks");
    fails(
        dequantize(GgmlDType::Q4_0, &[0; 18], &mut [0.0; 31]),
        "blocks",
    );
    fails(
        dequantize(GgmlDType::Q8_1, &[0; 36], &mut [0.0; 32]),
        "dtype",
    );

    let mut builder = PackedMatrix::builder(GgmlDType::Q4_0, 3, 32).unwrap();
    builder.push(2, &[0; 36]).unwrap();
    fails(builder.push(2, &[0; 36]), "rows");
    fails(builder.finish().map(|_| ()), "rows");

    fails(
        Q8Activations::quantize(Level::Scalar, &[0.0; 33], 1, 33).map(|_| ()),
        "k",
    );
    fails(
        Q8Activations::quantize(Level::Scalar, &[0.0; 32], 2, 32).map(|_| ()),
        "x",
    );

    let matrix = PackedMatrix::pack(GgmlDType::Q4_0, 20, 64, &[0; 20 * 36]).unwrap();
    let x = Q8Activations::zeros(3, 64).unwrap();
    let narrow = Q8Activations::zeros(3, 32).unwrap();
    let mut out = vec![0.0; 60];
    let level = Level::Scalar;
    fails(
        matrix.matmul(level, 0..20, &narrow, 0..3, &mut out, 20),
        "x",
    );
    fails(matrix.matmul(level, 0..21, &x, 0..3, &mut out, 21), "rows");
    fails(matrix.matmul(level, 8..20, &x, 0..3, &mut out, 20), "rows");
    #[expect(clippy::reversed_empty_ranges, reason = "that is what is tested")]
    let reversed = 16..0;
    fails(
        matrix.matmul(level, reversed, &x, 0..3, &mut out, 20),
        "rows",
    );
    fails(
        matrix.matmul(level, 0..20, &x, 1..4, &mut out, 20),
        "tokens",
    );
    fails(
        matrix.matmul(level, 0..20, &x, 0..3, &mut out, 19),
        "out_stride",
    );
    fails(
        matrix.matmul(level, 0..20, &x, 0..3, &mut out[..59], 20),
        "out",
    );
    fails(
        matrix.matmul(level, 0..20, &x, 0..3, &mut out, usize::MAX),
        "out",
    );
    fails(matrix.forward(level, &x, &mut out[..59]), "out");
    fails(matrix.dequantize_row(20, &mut [0.0; 64]), "row");
    fails(matrix.dequantize_row(0, &mut [0.0; 63]), "out");
    matrix.matmul(level, 16..16, &x, 0..3, &mut [], 0).unwrap();
    matrix.matmul(level, 0..20, &x, 2..2, &mut [], 0).unwrap();
    PackedMatrix::pack(GgmlDType::Q4_0, 0, 32, &[]).unwrap();
}
