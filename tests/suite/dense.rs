//! Dense products against float64: every level, dtype and path, at the edges of tiles and of pieces.

use crate::common::distance::pairs;
use candle_fused::cpu::dense::{matmul, task_grid};
use candle_fused::cpu::simd::Level;
use candle_fused::cpu::vector::Element;
use half::{bf16, f16};
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Token counts around the single-token, few-token and many-token paths and their tiles.
const TOKENS: [usize; 14] = [1, 2, 3, 4, 5, 9, 48, 53, 71, 72, 95, 96, 97, 110];
/// (n, k): one element, odd sizes, less than a vector, edges of vectors, odd and long rows.
const SHAPES: [(usize, usize); 10] = [
    (1, 1),
    (7, 1),
    (3, 7),
    (8, 64),
    (33, 111),
    (17, 129),
    (64, 576),
    (31, 769),
    (5, 1536),
    (32, 1600),
];

fn values(rng: &mut StdRng, len: usize) -> Vec<f32> {
    (0..len).map(|_| rng.random_range(-1f32..1.)).collect()
}

/// Runs one product and holds it to float64; what lies between the rows of `out` has to stay.
fn check<T: Element>(level: Level, m: usize, n: usize, k: usize, gap: usize, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let x = values(&mut rng, m * k);
    let w: Vec<T> = values(&mut rng, n * k)
        .into_iter()
        .map(T::from_f32)
        .collect();
    let stride = n + gap;
    let mut out = vec![f32::NAN; (m - 1) * stride + n];
    matmul(level, &x, m, k, &w, n, &mut out, stride);
    for i in 0..m {
        for j in 0..n {
            let terms = (0..k).map(|p| f64::from(x[i * k + p]) * f64::from(w[j * k + p].to_f32()));
            let (sum, size) = terms.fold((0., 0.), |(s, a), t| (s + t, a + t.abs()));
            let (got, sum) = pairs(&[out[i * stride + j]], &[sum]).unwrap()[0];
            // Rounding errors of a sum in lanes grow with the root of its length, at most.
            let limit = f64::from(f32::EPSILON) * (k as f64).sqrt().max(2.) * size;
            assert!(
                (got - sum).abs() <= limit,
                "{level:?} {m}x{n}x{k} at {i}, {j}: {got}, expected {sum}"
            );
        }
        let rest = out.iter().skip(i * stride + n).take(gap);
        assert!(
            i + 1 == m || rest.clone().all(|v| v.is_nan()),
            "gap {i} written"
        );
    }
}

#[test]
fn products_agree_with_float64() {
    for level in Level::available() {
        for m in TOKENS {
            for (n, k) in SHAPES {
                check::<f32>(level, m, n, k, 0, 1);
                check::<f16>(level, m, n, k, 3, 2);
                check::<bf16>(level, m, n, k, 1, 3);
            }
        }
    }
}

/// Rows of several pieces, read by eights for one token, and more tokens than are multiplied at a time.
#[test]
fn long_rows_agree_with_float64() {
    for level in Level::available() {
        for (n, k) in [(7, 2056), (8, 4097), (9, 8200), (70, 4098)] {
            for m in [1, 5, 90, 97] {
                check::<f32>(level, m, n, k, 0, 5);
                check::<f16>(level, m, n, k, 3, 6);
                check::<bf16>(level, m, n, k, 1, 7);
            }
        }
    }
}

#[test]
fn an_empty_product_writes_nothing_and_an_empty_sum_is_zero() {
    for level in Level::available() {
        for m in [1, 4, 48, 100] {
            let mut out = vec![7f32; m * 2];
            matmul::<f32>(level, &[], m, 0, &[], 0, &mut out, 0);
            assert!(out.iter().all(|v| *v == 7.));
            matmul::<f32>(level, &[], m, 0, &[], 2, &mut out, 2);
            assert!(out.iter().all(|v| *v == 0.), "{level:?} {m}: {out:?}");
        }
    }
}

#[test]
fn infinities_and_nans_stay_in_their_row() {
    let k = 40;
    for level in Level::available() {
        for m in [2, 60, 100] {
            let mut x = vec![1f32; m * k];
            x[k] = f32::NAN;
            let mut w = vec![bf16::ONE; 3 * k];
            w[2 * k] = bf16::INFINITY;
            let mut out = vec![0f32; m * 3];
            matmul(level, &x, m, k, &w, 3, &mut out, 3);
            assert_eq!(out[..3], [40., 40., f32::INFINITY]);
            assert!(out[3..6].iter().all(|v| v.is_nan()));
            assert!(out[6..].chunks(3).all(|y| *y == [40., 40., f32::INFINITY]));
        }
    }
}

/// How a product is cut must not change its results: the same bits whatever the grid for few tokens,
/// and the same but for the order of the additions where the gemm crate chooses its own.
#[test]
fn results_do_not_depend_on_the_rows_of_a_task() {
    let (n, k) = (77, 130);
    let mut rng = StdRng::seed_from_u64(4);
    for m in [1, 5, 64, 100] {
        let x = values(&mut rng, m * k);
        let w = values(&mut rng, n * k);
        for level in Level::available() {
            let mut whole = vec![0f32; m * n];
            matmul(level, &x, m, k, &w, n, &mut whole, n);
            for rows in [1, 3, 32] {
                let mut parts = vec![0f32; m * n];
                for j in (0..n).step_by(rows) {
                    let count = rows.min(n - j);
                    matmul(level, &x, m, k, &w[j * k..], count, &mut parts[j..], n);
                }
                if m < 72 {
                    assert_eq!(parts, whole, "{level:?}, {m} tokens, {rows} rows");
                }
                for (a, b) in pairs(&parts, &whole).unwrap() {
                    assert!(
                        (a - b).abs() < 2e-5,
                        "{level:?}, {m} tokens, {rows} rows: {a} {b}"
                    );
                }
            }
        }
    }
}

#[test]
fn short_slices_are_refused() {
    type Call = fn();
    let calls: [(&str, Call); 4] = [
        ("x holds", || {
            matmul(Level::Scalar, &[0.; 3], 1, 4, &[0f32; 4], 1, &mut [0.], 1)
        }),
        ("w holds", || {
            matmul(Level::Scalar, &[0.; 4], 1, 4, &[0f32; 3], 1, &mut [0.], 1)
        }),
        ("out holds", || {
            matmul(Level::Scalar, &[0.; 8], 2, 4, &[0f32; 4], 1, &mut [0.], 1)
        }),
        ("overlap", || {
            matmul(
                Level::Scalar,
                &[0.; 2],
                2,
                1,
                &[0f32; 2],
                2,
                &mut [0.; 4],
                1,
            )
        }),
    ];
    for (expected, call) in calls {
        let panic = std::panic::catch_unwind(call).expect_err("a panic");
        let message = panic.downcast_ref::<String>().expect("a message");
        assert!(message.contains(expected), "{message}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(60) })]

    #[test]
    fn random_shapes_agree(m in 1usize..130, n in 1usize..70, k in 1usize..300, gap in 0usize..5, seed: u64) {
        for level in Level::available() {
            check::<f32>(level, m, n, k, gap, seed);
            check::<f16>(level, m, n, k, gap, seed);
            check::<bf16>(level, m, n, k, gap, seed);
        }
    }

    #[test]
    fn grids_cover_the_product(m in 0usize..200, n in 0usize..500, k in 0usize..5000, threads in 0usize..40) {
        let grid = task_grid(m, n, k, threads);
        let mut hits = vec![0u8; m * n];
        for c in 0..grid.cells() {
            let (tokens, rows) = grid.cell(c);
            prop_assert!(!tokens.is_empty() && !rows.is_empty());
            for i in tokens {
                rows.clone().for_each(|j| hits[i * n + j] += 1);
            }
        }
        prop_assert!(hits.iter().all(|h| *h == 1));
    }
}
