//! `ops::flash_attention` against float64, at every instruction-set level and on every device that
//! runs here.

#[cfg(feature = "cuda")]
mod chosen;
mod errors;
mod gpu;
mod positions;
mod random;

use crate::common::distance::pairs;
use crate::support::{devices, values};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cpu::simd::Level;
use candle_fused::ops::flash_attention::{flash_attention_at, reference};
use candle_fused::ops::{AttentionParams, flash_attention};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

fn random(rng: &mut StdRng, dims: &[usize], size: f32) -> Tensor {
    let n = dims.iter().product();
    let x: Vec<f32> = (0..n).map(|_| rng.random_range(-size..size)).collect();
    Tensor::from_vec(x, dims, &Device::Cpu).unwrap()
}

fn on(device: &Device, x: &Tensor) -> Tensor {
    x.to_device(device).unwrap()
}

/// Shapes of a call, and how its tensors lie in memory.
#[derive(Clone, Debug)]
struct Case {
    batch: usize,
    heads: usize,
    kv_heads: usize,
    queries: usize,
    keys: usize,
    dim: usize,
    /// q is `[B, Tq, Hq, D]` in memory, transposed.
    q_transposed: bool,
    kv: Kv,
    q_dtype: DType,
    kv_dtype: DType,
    size: f32,
}

#[derive(Clone, Copy, Debug)]
enum Kv {
    Contiguous,
    /// The first keys of a longer cache.
    Cache,
    /// Keys from the middle of a cache, `[Tk, B, Hkv, D]` in memory.
    TokenMajor,
    /// The last dimension is not contiguous.
    Transposed,
    /// One head, broadcast.
    Broadcast,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            batch: 1,
            heads: 2,
            kv_heads: 1,
            queries: 1,
            keys: 5,
            dim: 8,
            q_transposed: false,
            kv: Kv::Cache,
            q_dtype: DType::F32,
            kv_dtype: DType::F32,
            size: 1.0,
        }
    }
}

impl Case {
    /// q, k and v: the same values on every device.
    fn tensors(&self, seed: u64, device: &Device) -> (Tensor, Tensor, Tensor) {
        let rng = &mut StdRng::seed_from_u64(seed);
        let q = self.query(rng, device).unwrap();
        let kv = |rng: &mut StdRng| self.keys_or_values(rng, device).unwrap();
        (q, kv(rng), kv(rng))
    }

    fn query(&self, rng: &mut StdRng, device: &Device) -> Result<Tensor> {
        let (b, h, t, d) = (self.batch, self.heads, self.queries, self.dim);
        // The dtype is set before the view is taken, since converting makes it contiguous.
        let mut make =
            |dims: &[usize]| on(device, &random(rng, dims, self.size)).to_dtype(self.q_dtype);
        if self.q_transposed {
            make(&[b, t, h, d])?.transpose(1, 2)
        } else {
            make(&[b, h, t, d])
        }
    }

    fn keys_or_values(&self, rng: &mut StdRng, device: &Device) -> Result<Tensor> {
        let (b, h, n, d) = (self.batch, self.kv_heads, self.keys, self.dim);
        let mut make =
            |dims: &[usize]| on(device, &random(rng, dims, self.size)).to_dtype(self.kv_dtype);
        match self.kv {
            Kv::Contiguous => make(&[b, h, n, d]),
            Kv::Cache => make(&[b, h, n + 3, d])?.narrow(2, 0, n),
            Kv::TokenMajor => make(&[n + 4, b, h, d])?
                .narrow(0, 2, n)?
                .permute((1, 2, 0, 3)),
            Kv::Transposed => make(&[b, h, d, n])?.transpose(2, 3),
            Kv::Broadcast => make(&[b, 1, n, d])?.broadcast_as((b, h, n, d)),
        }
    }
}

/// Twice the rounding of the output's type, relative, and below it what f32 sums of `dim` products
/// of scores this size may be off by: a score's error is a relative error of its weight.
fn tolerance(case: &Case, params: &AttentionParams) -> f64 {
    let out = match case.q_dtype {
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        _ => 2e-6,
    };
    let scores = f64::from(case.size * case.size * params.scale) * case.dim as f64;
    let slopes = params.alibi_slopes.as_ref();
    let steepest = slopes.map_or(0.0, |slopes| {
        let slopes = values(slopes).unwrap();
        slopes.into_iter().fold(0.0, |a, b| f64::max(a, b.abs()))
    });
    out + (scores + steepest * (case.queries + case.keys) as f64) * 3e-7
}

fn check(case: &Case, params: &AttentionParams, seed: u64) {
    let (q, k, v) = case.tensors(seed, &Device::Cpu);
    let want = values(&reference(&q, &k, &v, params).unwrap()).unwrap();
    let tolerance = tolerance(case, params);
    for device in devices() {
        let (q, k, v) = case.tensors(seed, &device);
        let params = AttentionParams {
            mask: params.mask.as_ref().map(|mask| on(&device, mask)),
            alibi_slopes: params
                .alibi_slopes
                .as_ref()
                .map(|slopes| on(&device, slopes)),
            ..params.clone()
        };
        for level in levels(&device) {
            let y = flash_attention_at(level, &q, &k, &v, &params).unwrap();
            assert_eq!(y.dims(), q.dims());
            assert_eq!(y.dtype(), q.dtype());
            let pairs = pairs(&values(&y).unwrap(), &want).unwrap();
            for (i, (y, want)) in pairs.into_iter().enumerate() {
                let bound = tolerance * f64::from(case.size).max(want.abs());
                assert!(
                    (y - want).abs() <= bound,
                    "{device:?} {} {case:?} {params:?}: element {i} is {y}, not {want} +- {bound}",
                    level.name()
                );
            }
        }
    }
}

/// The processor's levels; one of them for a GPU, to which all are the same.
fn levels(device: &Device) -> Vec<Level> {
    let mut levels = Level::available();
    if !device.is_cpu() {
        levels.truncate(1);
    }
    levels
}

fn causal(dim: usize) -> AttentionParams {
    AttentionParams {
        scale: 1.0 / (dim as f32).sqrt(),
        causal: true,
        ..Default::default()
    }
}

#[test]
fn head_dims_and_lengths_to_the_edges() {
    for dim in [1, 7, 8, 16, 20, 64, 80, 96, 128, 256] {
        for (queries, keys) in [
            (1, 1),
            (1, 2),
            (1, 63),
            (1, 64),
            (1, 65),
            (1, 300),
            (2, 2),
            (2, 130),
            (17, 17),
            (17, 95),
            (64, 64),
            (65, 65),
            (65, 200),
            (200, 200),
        ] {
            let case = Case {
                heads: 3,
                queries,
                keys,
                dim,
                ..Default::default()
            };
            check(&case, &causal(dim), 1);
        }
    }
}

#[test]
fn grouped_heads_and_batches() {
    for (heads, kv_heads) in [(9, 3), (7, 1), (4, 4), (1, 1), (32, 1), (130, 1), (14, 2)] {
        for (queries, keys) in [(1, 40), (1, 700), (3, 100), (33, 70)] {
            let case = Case {
                batch: 2,
                heads,
                kv_heads,
                queries,
                keys,
                dim: 24,
                ..Default::default()
            };
            check(&case, &causal(24), 2);
        }
    }
}

#[test]
fn layouts_are_read_where_they_lie() {
    for kv in [
        Kv::Contiguous,
        Kv::Cache,
        Kv::TokenMajor,
        Kv::Transposed,
        Kv::Broadcast,
    ] {
        for q_transposed in [false, true] {
            for (queries, keys, dim) in [(1, 70, 64), (4, 129, 40), (50, 150, 64), (50, 99, 9)] {
                let case = Case {
                    batch: 2,
                    heads: 6,
                    kv_heads: 2,
                    queries,
                    keys,
                    dim,
                    q_transposed,
                    kv,
                    ..Default::default()
                };
                check(&case, &causal(dim), 3);
            }
        }
    }
}

#[test]
fn the_last_dimension_of_q_may_be_strided() {
    for device in devices() {
        let mut rng = StdRng::seed_from_u64(4);
        let q = on(&device, &random(&mut rng, &[1, 2, 16, 3], 1.0));
        let q = q.transpose(2, 3).unwrap();
        let k = on(&device, &random(&mut rng, &[1, 2, 9, 16], 1.0));
        let y = flash_attention(&q, &k, &k, &causal(16)).unwrap();
        let z = flash_attention(&q.contiguous().unwrap(), &k, &k, &causal(16)).unwrap();
        assert_eq!(values(&y).unwrap(), values(&z).unwrap());
    }
}

#[test]
fn windows_softcaps_and_no_causality() {
    for (queries, keys) in [(1, 200), (3, 90), (5, 5), (40, 40), (100, 333), (333, 333)] {
        let case = Case {
            heads: 4,
            kv_heads: 2,
            queries,
            keys,
            dim: 32,
            ..Default::default()
        };
        for window in [None, Some(1), Some(2), Some(31), Some(100), Some(5000)] {
            for causal in [false, true] {
                for softcap in [None, Some(0.5), Some(30.0)] {
                    let scale = if softcap == Some(30.0) { 20.0 } else { 0.3 };
                    let params = AttentionParams {
                        scale,
                        causal,
                        window,
                        softcap,
                        ..Default::default()
                    };
                    check(&case, &params, 5);
                }
            }
        }
    }
}

#[test]
fn masks_broadcast_and_add() {
    let mut rng = StdRng::seed_from_u64(6);
    for (queries, keys) in [(1, 150), (3, 20), (70, 130)] {
        let case = Case {
            batch: 2,
            heads: 4,
            queries,
            keys,
            dim: 16,
            ..Default::default()
        };
        for dims in [
            vec![queries, keys],
            vec![1, keys],
            vec![queries, 1],
            vec![2, 1, queries, keys],
            vec![4, 1, keys],
            vec![2, 4, queries, keys],
            vec![],
        ] {
            let mask = random(&mut rng, &dims, 3.0);
            // A tenth of the keys is hidden altogether.
            let hidden = mask.gt(2.7f64).unwrap();
            let never = Tensor::full(f32::NEG_INFINITY, mask.shape(), &Device::Cpu).unwrap();
            let mask = hidden.where_cond(&never, &mask).unwrap();
            for dtype in [DType::F32, DType::BF16] {
                for causal in [false, true] {
                    let mask = Some(mask.to_dtype(dtype).unwrap());
                    let params = AttentionParams {
                        scale: 0.25,
                        causal,
                        mask,
                        ..Default::default()
                    };
                    check(&case, &params, 7);
                }
            }
        }
    }
}

#[test]
fn rows_without_keys_are_zero() {
    // More queries than keys: the first ones stand before the first key.
    for (queries, keys) in [(4, 2), (90, 40), (3, 0), (50, 0)] {
        let case = Case {
            heads: 2,
            queries,
            keys,
            dim: 8,
            kv: Kv::Contiguous,
            ..Default::default()
        };
        check(&case, &causal(8), 8);
        check(
            &case,
            &AttentionParams {
                window: Some(7),
                ..causal(8)
            },
            8,
        );
        let never = Tensor::full(f32::NEG_INFINITY, (queries, keys), &Device::Cpu).unwrap();
        let params = AttentionParams {
            mask: Some(never),
            ..Default::default()
        };
        check(&case, &params, 8);
        for device in devices() {
            let (q, k, v) = case.tensors(9, &device);
            let mask = params.mask.as_ref().map(|mask| on(&device, mask));
            let params = AttentionParams {
                mask,
                ..params.clone()
            };
            let y = values(&flash_attention(&q, &k, &v, &params).unwrap()).unwrap();
            assert!(y.iter().all(|y| *y == 0.0));
        }
    }
}

#[test]
fn empty_tensors_give_empty_results() {
    for device in devices() {
        let k = Tensor::zeros((1, 2, 3, 4), DType::F32, &device).unwrap();
        let q = k.narrow(0, 0, 0).unwrap();
        let y = flash_attention(&q, &q, &q, &causal(4)).unwrap();
        assert_eq!(y.dims(), [0, 2, 3, 4]);
        let q = k.narrow(2, 0, 0).unwrap();
        let y = flash_attention(&q, &k, &k, &causal(4)).unwrap();
        assert_eq!(y.dims(), [1, 2, 0, 4]);
    }
}

#[test]
fn half_precision_in_any_combination() {
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    for q_dtype in dtypes {
        for kv_dtype in dtypes {
            for (queries, keys, dim) in [(1, 333, 64), (2, 50, 20), (120, 120, 64), (40, 77, 20)] {
                for kv in [Kv::Cache, Kv::Transposed] {
                    let case = Case {
                        heads: 6,
                        kv_heads: 2,
                        queries,
                        keys,
                        dim,
                        kv,
                        q_dtype,
                        kv_dtype,
                        ..Default::default()
                    };
                    check(&case, &causal(dim), 10);
                }
            }
        }
    }
}

#[test]
fn huge_scores_do_not_overflow() {
    for (queries, keys) in [(1, 200), (60, 200)] {
        let case = Case {
            queries,
            keys,
            dim: 64,
            size: 40.0,
            q_transposed: true,
            ..Default::default()
        };
        // Scores of up to +-1e5, so that the largest takes all.
        check(
            &case,
            &AttentionParams {
                scale: 1.0,
                ..Default::default()
            },
            11,
        );
    }
}

#[test]
fn not_a_number_is_not_hidden() {
    for device in devices() {
        for (queries, dim, dtype) in [
            (1, 16, DType::F32),
            (40, 16, DType::F32),
            (1, 64, DType::F16),
            (40, 64, DType::F16),
            (40, 128, DType::BF16),
        ] {
            let ones = |t| Tensor::ones((1, 1, t, dim), dtype, &device).unwrap();
            let nan = (ones(1) * f64::NAN).unwrap();
            let k = Tensor::cat(&[&ones(20), &nan, &ones(19)], 2).unwrap();
            let (q, v) = (ones(queries), ones(40));
            for level in levels(&device) {
                let y = flash_attention_at(level, &q, &k, &v, &AttentionParams::default()).unwrap();
                let y = values(&y).unwrap();
                assert!(y.iter().all(|y| y.is_nan()), "{device:?} {}", level.name());
            }
        }
    }
}

#[test]
fn the_result_lies_token_by_token() {
    for device in devices() {
        let mut rng = StdRng::seed_from_u64(12);
        let q = on(&device, &random(&mut rng, &[1, 9, 5, 64], 1.0));
        let k = on(&device, &random(&mut rng, &[1, 3, 5, 64], 1.0));
        let y = flash_attention(&q, &k, &k, &causal(64)).unwrap();
        assert!(y.transpose(1, 2).unwrap().is_contiguous());
    }
}

#[test]
fn calls_are_recorded_with_their_path() {
    for device in devices() {
        let q = Tensor::zeros((1, 2, 1, 64), DType::F32, &device).unwrap();
        let k = q.to_dtype(DType::F16).unwrap();
        let (y, calls) = candle_fused::trace::capture(|| flash_attention(&q, &k, &k, &causal(64)));
        y.unwrap();
        let (call, n) = calls.iter().next().unwrap();
        assert_eq!((call.op, n), ("flash_attention", 1));
        let form = if device.is_cpu() {
            "decode"
        } else {
            "flash_attention_mma (flash_attention_d64_f32, "
        };
        assert!(
            call.path.contains(form) && call.path.contains("kv f16"),
            "{}",
            call.path
        );
    }
}
