//! `ops::flash_attention_varlen` against float64, at every instruction-set level and on every device that
//! runs here.

mod errors;
#[cfg(feature = "cuda")]
mod gpu;
mod padded;
mod random;

use crate::common::distance::pairs;
use crate::support::{devices, values};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cpu::simd::Level;
use candle_fused::ops::flash_attention::flash_attention_at;
use candle_fused::ops::flash_attention_varlen::{flash_attention_varlen_at, reference};
use candle_fused::ops::{AttentionParams, RaggedBatch, flash_attention_varlen};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// A ragged batch, and how it lies in memory.
#[derive(Clone, Debug)]
struct Case {
    /// Queries and keys of each sequence.
    lengths: Vec<(usize, usize)>,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    /// Rows of q, and of k and v, behind the last sequence.
    behind: usize,
    /// q, k and v are parts of one tensor `[tokens, (Hq + 2 Hkv) D]`, which asks for as many keys as queries.
    joint: bool,
    q_dtype: DType,
    kv_dtype: DType,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            lengths: vec![(3, 3), (5, 9)],
            heads: 4,
            kv_heads: 2,
            dim: 16,
            behind: 0,
            joint: false,
            q_dtype: DType::F32,
            kv_dtype: DType::F32,
        }
    }
}

fn cumulative(lengths: impl Iterator<Item = usize>) -> Vec<u32> {
    let mut sum = 0;
    let ends = lengths.map(|n| {
        sum += n as u32;
        sum
    });
    [0].into_iter().chain(ends).collect()
}

impl Case {
    fn batch(&self, device: &Device) -> Result<RaggedBatch> {
        let lengths = self.lengths.iter();
        Ok(RaggedBatch {
            cu_seqlens_q: Tensor::new(cumulative(lengths.clone().map(|l| l.0)), device)?,
            cu_seqlens_k: Tensor::new(cumulative(lengths.clone().map(|l| l.1)), device)?,
            max_seqlen_q: lengths.map(|l| l.0).max().unwrap_or(0),
        })
    }

    /// The same values on every device; what is behind the last sequence is not a number.
    fn tensors(&self, seed: u64, device: &Device) -> Result<[Tensor; 3]> {
        let rng = &mut StdRng::seed_from_u64(seed);
        let (queries, keys) = self
            .lengths
            .iter()
            .fold((0, 0), |sum, l| (sum.0 + l.0, sum.1 + l.1));
        let mut make = |tokens: usize, width: usize, dtype: DType| {
            let own = tokens * width;
            let mut x: Vec<f32> = (0..own).map(|_| rng.random_range(-1f32..1.)).collect();
            x.resize(own + self.behind * width, f32::NAN);
            // Candle's conversions on a GPU do not take tensors without values.
            let x = Tensor::from_vec(x, (tokens + self.behind, width), &Device::Cpu)?;
            x.to_dtype(dtype)?.to_device(device)
        };
        let (heads, kv_heads, dim) = (self.heads, self.kv_heads, self.dim);
        if self.joint {
            assert_eq!(queries, keys);
            let all = heads + 2 * kv_heads;
            let x = make(queries, all * dim, self.q_dtype)?.reshape(((), all, dim))?;
            return Ok([
                x.narrow(1, 0, heads)?,
                x.narrow(1, heads, kv_heads)?,
                x.narrow(1, heads + kv_heads, kv_heads)?,
            ]);
        }
        Ok([
            make(queries, heads * dim, self.q_dtype)?.reshape(((), heads, dim))?,
            make(keys, kv_heads * dim, self.kv_dtype)?.reshape(((), kv_heads, dim))?,
            make(keys, kv_heads * dim, self.kv_dtype)?.reshape(((), kv_heads, dim))?,
        ])
    }
}

/// As in the tests of `flash_attention`: twice the rounding of the output's type, relative, and what f32
/// sums of `dim` products may be off by.
fn tolerance(case: &Case, params: &AttentionParams) -> f64 {
    let out = match case.q_dtype {
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        _ => 2e-6,
    };
    out + f64::from(params.scale) * case.dim as f64 * 3e-7
}

fn on(params: &AttentionParams, device: &Device) -> AttentionParams {
    let slopes = params.alibi_slopes.as_ref();
    AttentionParams {
        alibi_slopes: slopes.map(|slopes| slopes.to_device(device).unwrap()),
        ..params.clone()
    }
}

fn levels(device: &Device) -> Vec<Level> {
    let mut levels = Level::available();
    if !device.is_cpu() {
        levels.truncate(1);
    }
    levels
}

/// In float64.
fn expected(case: &Case, params: &AttentionParams, seed: u64) -> Result<Vec<f64>> {
    let [q, k, v] = case.tensors(seed, &Device::Cpu)?;
    values(&reference(&q, &k, &v, &case.batch(&Device::Cpu)?, params)?)
}

/// Holds a device's result to what is expected.
fn hold(
    case: &Case,
    params: &AttentionParams,
    seed: u64,
    (device, level): (&Device, Level),
    want: &[f64],
) -> Result<()> {
    let [q, k, v] = case.tensors(seed, device)?;
    let (batch, params) = (case.batch(device)?, on(params, device));
    let y = flash_attention_varlen_at(level, &q, &k, &v, &batch, &params)?;
    assert_eq!((y.dims(), y.dtype()), (q.dims(), q.dtype()));
    assert!(y.is_contiguous());
    let tolerance = tolerance(case, &params);
    for (i, (y, want)) in pairs(&values(&y)?, want)?.into_iter().enumerate() {
        let bound = tolerance * want.abs().max(1.0);
        assert!(
            (y - want).abs() <= bound,
            "{device:?} {} {case:?} {params:?}: element {i} is {y}, not {want} +- {bound}",
            level.name()
        );
    }
    Ok(())
}

fn check(case: &Case, params: &AttentionParams, seed: u64) -> Result<()> {
    let want = expected(case, params, seed)?;
    for device in devices() {
        for level in levels(&device) {
            hold(case, params, seed, (&device, level), &want)?;
        }
    }
    Ok(())
}

fn params(dim: usize, causal: bool) -> AttentionParams {
    AttentionParams {
        scale: 1.0 / (dim as f32).sqrt(),
        causal,
        ..Default::default()
    }
}

const DTYPES: [[DType; 2]; 5] = [
    [DType::F32; 2],
    [DType::F16; 2],
    [DType::BF16; 2],
    [DType::F32, DType::F16],
    [DType::BF16, DType::F32],
];

#[test]
fn lengths_to_the_edges() -> Result<()> {
    let lengths: [&[(usize, usize)]; 9] = [
        &[(1, 1)],
        &[(200, 200)],
        &[(1, 300), (1, 1), (1, 64), (1, 129)],
        &[(5, 5), (64, 64), (1, 1), (130, 130)],
        // More keys than queries, and the other way.
        &[(3, 90), (70, 257), (128, 128)],
        &[(90, 40), (17, 3), (60, 64)],
        // Nothing at the ends and in between.
        &[(0, 0), (33, 50), (0, 12), (9, 0), (65, 65), (0, 0)],
        &[(0, 0)],
        &[(40, 0), (50, 0)],
    ];
    for lengths in lengths {
        for (dim, [q_dtype, kv_dtype]) in [16, 64, 64, 128, 20].into_iter().zip(DTYPES) {
            for causal in [false, true] {
                let case = Case {
                    lengths: lengths.to_vec(),
                    dim,
                    q_dtype,
                    kv_dtype,
                    ..Default::default()
                };
                check(&case, &params(dim, causal), 1)?;
            }
        }
    }
    Ok(())
}

#[test]
fn grouped_heads_and_head_sizes() -> Result<()> {
    let lengths = vec![(40, 40), (7, 90), (100, 100), (1, 33)];
    for (heads, kv_heads) in [(9, 3), (7, 1), (4, 4), (32, 2)] {
        for (dim, dtype) in [
            (64, DType::F16),
            (80, DType::BF16),
            (96, DType::F16),
            (128, DType::BF16),
            (256, DType::F16),
            (72, DType::F32),
        ] {
            let case = Case {
                lengths: lengths.clone(),
                heads,
                kv_heads,
                dim,
                q_dtype: dtype,
                kv_dtype: dtype,
                ..Default::default()
            };
            check(&case, &params(dim, true), 2)?;
        }
    }
    Ok(())
}

#[test]
fn windows_softcaps_and_alibi() -> Result<()> {
    let slopes = Tensor::new(&[0.5f32, 0.25, 0.125, 0.0625], &Device::Cpu)?;
    let lengths = vec![(70, 70), (20, 130), (1, 40), (50, 20)];
    for (dim, [q_dtype, kv_dtype]) in [32, 64, 128, 64, 20].into_iter().zip(DTYPES) {
        let case = Case {
            lengths: lengths.clone(),
            dim,
            q_dtype,
            kv_dtype,
            ..Default::default()
        };
        for (window, window_right, softcap, alibi) in [
            (Some(1), Some(0), None, false),
            (Some(33), None, None, false),
            (None, Some(20), None, false),
            (Some(40), Some(9), Some(3.0), false),
            (None, None, None, true),
            (None, Some(0), Some(5.0), true),
            (Some(25), Some(30), None, true),
        ] {
            let params = AttentionParams {
                window,
                window_right,
                softcap,
                alibi_slopes: alibi.then(|| slopes.clone()),
                ..params(dim, false)
            };
            check(&case, &params, 3)?;
        }
    }
    Ok(())
}

#[test]
fn joint_tensors_are_read_where_they_lie() -> Result<()> {
    for (dim, dtype) in [(64, DType::F16), (128, DType::BF16), (24, DType::F32)] {
        let case = Case {
            lengths: vec![(64, 64), (3, 3), (100, 100)],
            dim,
            joint: true,
            q_dtype: dtype,
            kv_dtype: dtype,
            ..Default::default()
        };
        check(&case, &params(dim, true), 4)?;
        check(&case, &params(dim, false), 4)?;
    }
    Ok(())
}

/// Padding behind the last sequence may hold anything; its rows become zeros.
#[test]
fn what_is_behind_the_last_sequence_is_not_read() -> Result<()> {
    for (dim, [q_dtype, kv_dtype]) in [16, 64, 64, 128, 20].into_iter().zip(DTYPES) {
        for causal in [false, true] {
            let case = Case {
                lengths: vec![(64, 64), (3, 70), (100, 100)],
                dim,
                behind: 50,
                q_dtype,
                kv_dtype,
                ..Default::default()
            };
            check(&case, &params(dim, causal), 5)?;
        }
    }
    Ok(())
}

/// Values of a neighbour that are no numbers stay there.
#[test]
fn sequences_do_not_touch_each_other() -> Result<()> {
    let lengths = [(40, 40), (70, 70), (90, 90)];
    for (dim, dtype) in [(64, DType::F16), (128, DType::BF16), (24, DType::F32)] {
        let case = Case {
            lengths: lengths.to_vec(),
            dim,
            q_dtype: dtype,
            kv_dtype: dtype,
            ..Default::default()
        };
        for device in devices() {
            let [q, k, v] = case.tensors(6, &device)?;
            let nan = (v.narrow(0, 40, 70)?.zeros_like()? + f64::NAN)?;
            let v = Tensor::cat(&[&v.narrow(0, 0, 40)?, &nan, &v.narrow(0, 110, 90)?], 0)?;
            let y = flash_attention_varlen(&q, &k, &v, &case.batch(&device)?, &params(dim, true))?;
            for (first, (n, _)) in [0, 40, 110].into_iter().zip(lengths) {
                let own = values(&y.narrow(0, first, n)?)?;
                assert!(
                    own.iter().all(|y| y.is_nan() == (first == 40)),
                    "{device:?} {first}"
                );
            }
        }
    }
    Ok(())
}

/// The sequences' rows are those of `flash_attention`, to the bit where the CPU computes them.
#[test]
fn a_sequence_gets_what_it_gets_alone() -> Result<()> {
    let case = Case {
        lengths: vec![(40, 60), (1, 9), (130, 130)],
        dim: 64,
        ..Default::default()
    };
    let [q, k, v] = case.tensors(7, &Device::Cpu)?;
    let params = params(64, true);
    for level in Level::available() {
        let y = flash_attention_varlen_at(level, &q, &k, &v, &case.batch(&Device::Cpu)?, &params)?;
        let (mut query, mut key) = (0, 0);
        for (queries, keys) in &case.lengths {
            let one = |t: &Tensor, first: usize, n: usize| {
                t.narrow(0, first, n)?.transpose(0, 1)?.unsqueeze(0)
            };
            let (k, v) = (one(&k, key, *keys)?, one(&v, key, *keys)?);
            let alone = flash_attention_at(level, &one(&q, query, *queries)?, &k, &v, &params)?;
            let alone = alone.squeeze(0)?.transpose(0, 1)?;
            let own = values(&y.narrow(0, query, *queries)?)?;
            assert_eq!(own, values(&alone)?, "{}", level.name());
            (query, key) = (query + queries, key + keys);
        }
    }
    Ok(())
}

#[test]
fn calls_are_recorded_with_their_path() -> Result<()> {
    for device in devices() {
        let case = Case::default();
        let [q, k, v] = case.tensors(8, &device)?;
        let batch = case.batch(&device)?;
        let (y, calls) = candle_fused::trace::capture(|| {
            flash_attention_varlen(&q, &k, &v, &batch, &params(16, true))
        });
        y?;
        let (call, n) = calls.iter().next().expect("a call");
        assert_eq!((call.op, n), ("flash_attention_varlen", 1));
        let form = if device.is_cpu() {
            "2 sequences"
        } else {
            "flash_attention_plain (flash_attention_varlen_plain_64, "
        };
        assert!(call.path.contains(form), "{}", call.path);
    }
    Ok(())
}
