//! Products with INT8, FP8, NVFP4, NF4, INT4 and ternary weights on a GPU, against float64 of the same codes.

mod chosen;
mod dequantized;
mod fp8;
mod gemm_wna16;
mod latency_forms;
mod matrices;
mod not_finite;
mod subjects;
mod w8a16;

use crate::linear::ACTIVATIONS;
use crate::support::{architecture, devices, randn, randn_on, widest_error};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cuda::BlockMatrix;
use candle_fused::ops::linear::reference;
use candle_fused::ops::{Activation, Epilogue, Prologue, Weight, quant_linear};
use candle_fused::quant::{Codes, Scheme, TernaryScale};
use candle_fused::trace;
use half::f16;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::sync::Arc;

fn gpus() -> impl Iterator<Item = Device> {
    devices().into_iter().filter(Device::is_cuda)
}

const fn int4(group: usize, zero_point: bool) -> Scheme {
    Scheme::Int4 { group, zero_point }
}

const fn ternary(scale: TernaryScale) -> Scheme {
    Scheme::Ternary { scale }
}

const SCHEMES: [Scheme; 16] = [
    Scheme::Int8,
    Scheme::Fp8,
    Scheme::Fp8Block128,
    Scheme::Nvfp4,
    Scheme::Nf4,
    int4(32, false),
    int4(32, true),
    int4(64, false),
    int4(64, true),
    int4(128, false),
    int4(128, true),
    ternary(TernaryScale::Tensor),
    ternary(TernaryScale::Row),
    ternary(TernaryScale::Group(32)),
    ternary(TernaryScale::Group(64)),
    ternary(TernaryScale::Group(128)),
];

/// Values that share a scale: those of a row by which widths are to divide.
fn group_of(scheme: Scheme, cols: usize) -> usize {
    let of_row = scheme == Scheme::Fp8Block128;
    scheme.group().filter(|_| !of_row).unwrap_or(cols)
}

fn is_ternary(scheme: Scheme) -> bool {
    matches!(scheme, Scheme::Ternary { .. })
}

/// Random codes, scales and zero points.
fn random(scheme: Scheme, rows: usize, cols: usize) -> Codes {
    let mut rng = StdRng::seed_from_u64((rows * 31 + cols) as u64);
    let groups = rows * (cols / group_of(scheme, cols));
    let scales = match scheme {
        Scheme::Ternary {
            scale: TernaryScale::Tensor,
        } => 1,
        Scheme::Fp8Block128 => rows.div_ceil(128) * cols.div_ceil(128),
        Scheme::Nvfp4 => rows,
        _ => groups,
    };
    // And what brings a code to about 0.05: products of gates are to fit f16.
    let (range, by) = match scheme {
        Scheme::Int8 => (-128..=127, 7e-4),
        // e4m3 floats without NaN; a negative code has the sign in front.
        Scheme::Fp8 | Scheme::Fp8Block128 => (-128..=126, 5e-4),
        // Under scales of groups of 1 on average.
        Scheme::Nvfp4 => (0..=15, 2e-2),
        Scheme::Nf4 => (0..=15, 1e-1),
        Scheme::Int4 { .. } => (0..=15, 1e-2),
        // Ternary.
        _ => (-1..=1, 6e-2),
    };
    Codes {
        scheme,
        rows,
        cols,
        codes: (0..rows * cols)
            .map(|_| match rng.random_range(range.clone()) {
                -1 if matches!(scheme, Scheme::Fp8 | Scheme::Fp8Block128) => -2,
                code => code,
            })
            .collect(),
        scales: (0..scales)
            .map(|_| f16::from_f32(by * rng.random_range(0.5f32..1.5)).to_f32())
            .collect(),
        zeros: match scheme.has_zeros() {
            true => (0..groups).map(|_| rng.random_range(0..=255)).collect(),
            false => Vec::new(),
        },
        group_scales: match scheme {
            // 0, the subnormal ones, and 0.25 to 2.
            Scheme::Nvfp4 => (0..groups)
                .map(|at| match at % 9 {
                    0 => rng.random_range(0..8),
                    _ => rng.random_range(0x28..=0x40),
                })
                .collect(),
            _ => Vec::new(),
        },
    }
}

fn on(codes: &Codes, device: &Device) -> Result<Weight> {
    Ok(Weight::Blocks(Arc::new(BlockMatrix::from_codes(
        codes, device,
    )?)))
}

/// Each row rounded to whole numbers of its largest magnitude over 127.
fn in_bytes(x: &Tensor) -> Result<Tensor> {
    let rows = x.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    let rounded = rows.into_iter().map(|row| {
        let largest = row.iter().fold(0f32, |m, v| m.max(v.abs()));
        let by = 127. / largest;
        let row = row.into_iter();
        row.map(|v| (v * by).round_ties_even() * (largest / 127.))
            .collect::<Vec<_>>()
    });
    Tensor::new(rounded.collect::<Vec<_>>(), &Device::Cpu)
}

/// What the result is rounded to.
fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-6,
        DType::F16 => 1e-3,
        _ => 8e-3,
    }
}

/// Rows of x that ternary weights meet in bytes: on Hopper tensor cores take x in bf16 from two rows on.
fn rows_in_bytes(device: &Device) -> Result<usize> {
    Ok(if architecture(device)? == 90 { 1 } else { 64 })
}

/// Up to 8 rows keep 16 bits of each input (5e-6; gates multiply two such sums), more rows and the
/// weights are rounded to bf16 (0.16 % together). Ternary weights meet some rows in bytes: behind a
/// norm 0.8 % of a deviation of the inputs on average, and so of the outputs, four times that rarely;
/// without one the oracle rounds alike. NF4's values are rounded to bf16 (0.1 %), however few rows there are.
fn tolerance(scheme: Scheme, m: usize, normed: bool, in_bytes: usize) -> f64 {
    let bytes = is_ternary(scheme) && m <= in_bytes;
    match m {
        _ if bytes && normed => 3e-2,
        _ if bytes => 1e-4,
        _ if scheme == Scheme::Nf4 => 1e-2,
        ..=8 => 1e-4,
        // Activations become int8 too: steps of a 40th of a deviation, in hundreds of inputs.
        _ if scheme == Scheme::Int8 && m >= 64 => 2.5e-2,
        _ => 1e-2,
    }
}

/// Rows of x: few, which kernels of ours take, tens, and so many that all but INT8's codes become dense for a
/// library's product. Each is a test of its own, so that a sanitizer ends within minutes.
const FEW: [usize; 6] = [1, 2, 3, 4, 5, 8];
const TENS: [usize; 4] = [9, 16, 33, 128];
const MANY: [usize; 1] = [300];

/// Types of x.
const ALL: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Those of which tens of rows are multiplied by kernels of ours: tens of f16 go to a library's, of which a
/// sanitizer does not come to an end.
const OURS: [DType; 2] = [DType::F32, DType::BF16];

/// A matrix of the scheme and some of another beside it, every prologue, epilogue and type of x, and widths
/// that do not divide by a step.
fn products(takes: impl Fn(Scheme) -> bool, rows: &[usize], dtypes: &[DType]) -> Result<()> {
    for device in gpus() {
        for (s, scheme) in SCHEMES.into_iter().enumerate().filter(|(_, s)| takes(*s)) {
            for (i, k) in [100usize, 96, 192, 384, 576, 1024, 4096, 14336]
                .into_iter()
                .enumerate()
            {
                if !k.is_multiple_of(group_of(scheme, k)) {
                    continue;
                }
                for (j, m) in FEW.into_iter().chain(TENS).chain(MANY).enumerate() {
                    if !rows.contains(&m) || (k > 1024 && ![1, 4, 16].contains(&m)) {
                        continue;
                    }
                    let case = Case {
                        scheme,
                        m,
                        k,
                        n: [24, 40, 130][(i + j) % 3],
                        dtype: ALL[(s + i + j) % 3],
                        norm: (i + j + s) % 3,
                        activation: ACTIVATIONS[(i + 2 * j + s) % ACTIVATIONS.len()],
                        bare: false,
                    };
                    if dtypes.contains(&case.dtype) {
                        case.check(&device)?;
                    }
                }
            }
        }
    }
    Ok(())
}

macro_rules! products_stay_near_those_of_the_codes {
    ($($module:ident: $takes:expr;)*) => {
        $(mod $module {
            #[allow(clippy::wildcard_imports, reason = "what stands around the module")]
            use super::*;

            #[test]
            fn products_of_few_rows() -> Result<()> {
                products($takes, &FEW, &ALL)
            }

            #[test]
            fn products_of_tens_of_rows() -> Result<()> {
                products($takes, &TENS, &OURS)
            }

            #[test]
            fn products_of_tens_of_rows_in_f16() -> Result<()> {
                products($takes, &TENS, &[DType::F16])
            }

            #[test]
            fn products_of_many_rows() -> Result<()> {
                products($takes, &MANY, &ALL)
            }
        })*
    };
}

products_stay_near_those_of_the_codes! {
    int8: |scheme| scheme == Scheme::Int8;
    fp8_rows: |scheme| scheme == Scheme::Fp8;
    fp8_blocks: |scheme| scheme == Scheme::Fp8Block128;
    nvfp4: |scheme| scheme == Scheme::Nvfp4;
    nf4: |scheme| scheme == Scheme::Nf4;
    int4_groups_of_32: |scheme| matches!(scheme, Scheme::Int4 { group: 32, .. });
    int4_groups_of_64: |scheme| matches!(scheme, Scheme::Int4 { group: 64, .. });
    int4_groups_of_128: |scheme| matches!(scheme, Scheme::Int4 { group: 128, .. });
    ternary_rows: |scheme| is_ternary(scheme) && scheme.group().is_none();
    ternary_groups: |scheme| is_ternary(scheme) && scheme.group().is_some();
}

/// So many that every block of a kernel goes round more than once, and widths that blocks share, in one pass over
/// their part of them or in several, the last of which may be half a pass.
#[test]
fn many_outputs() -> Result<()> {
    let schemes = [
        Scheme::Int8,
        int4(128, false),
        int4(32, true),
        ternary(TernaryScale::Row),
        Scheme::Fp8Block128,
        Scheme::Nvfp4,
        Scheme::Nf4,
    ];
    for device in gpus() {
        for (n, k) in [
            (20_008, 256),
            (5_000, 2304),
            (3_000, 6144),
            (1_400, 6144),
            (900, 4224),
            (500, 512),
            (500, 1024),
            (168, 1280),
            (288, 1536),
            (288, 1664),
            (330, 1536),
            (560, 1536),
            (1_200, 1536),
            (1_000, 2048),
        ] {
            for (s, scheme) in schemes.into_iter().enumerate() {
                for m in [1, 5, 11, 16] {
                    let case = Case {
                        scheme,
                        m,
                        k,
                        n,
                        dtype: DType::BF16,
                        norm: s % 2,
                        activation: [Activation::None, Activation::SwiGlu][s / 2 % 2],
                        bare: n < 2_000,
                    };
                    case.check(&device)?;
                }
            }
        }
    }
    Ok(())
}

/// Where INT4 in groups of 128 goes through long rows of x, by blocks of which each has several parts of W.
#[test]
fn many_outputs_of_long_rows() -> Result<()> {
    for device in gpus() {
        for (m, activation) in [(16, Activation::None), (11, Activation::SwiGlu)] {
            let case = Case {
                scheme: int4(128, false),
                m,
                k: 4224,
                n: 8_600,
                dtype: DType::BF16,
                norm: 0,
                activation,
                bare: false,
            };
            case.check(&device)?;
        }
    }
    Ok(())
}

#[derive(Debug)]
struct Case {
    scheme: Scheme,
    m: usize,
    k: usize,
    /// Rows of each of two matrices.
    n: usize,
    dtype: DType,
    /// None, RMS, layer.
    norm: usize,
    activation: Activation,
    /// Without bias and residual.
    bare: bool,
}

impl Case {
    fn check(&self, device: &Device) -> Result<()> {
        let Case { m, k, n, dtype, .. } = *self;
        // The second has an odd number of rows more, where nothing gates.
        let gates = self.activation.gate().is_some();
        let rows = if gates { [n, n] } else { [n, n + 5] };
        let codes = rows.map(|rows| random(self.scheme, rows, k));
        let width = if gates { n } else { 2 * n + 5 };
        let x = randn(&[m, k], dtype)?;
        let norm = [randn(&[k], dtype)?, randn(&[k], dtype)?];
        let bias = randn(&[rows[0] + rows[1]], dtype)?;
        let residual = randn(&[m, width], dtype)?;
        let dense = codes.iter().map(|codes| {
            let values = Tensor::from_vec(codes.dequantize(), (codes.rows, k), &Device::Cpu)?;
            Ok(Weight::Dense(values))
        });
        let dense = dense.collect::<Result<Vec<_>>>()?;
        let normed = self.norm > 0;
        let expected = |x: &Tensor| {
            let residuals = [&residual];
            let epilogue = self.epilogue(&bias, &residuals);
            reference(x, self.prologue(&norm), &dense, &epilogue)
        };
        let there = |t: &Tensor| t.to_device(device);
        let weights = [on(&codes[0], device)?, on(&codes[1], device)?];
        let norm = [there(&norm[0])?, there(&norm[1])?];
        let got = quant_linear(
            &there(&x)?,
            self.prologue(&norm),
            &weights,
            &self.epilogue(&there(&bias)?, &[&there(&residual)?]),
        )?;
        let mut error = widest_error(&got, &expected(&x)?.concat())?;
        let in_bytes_to = rows_in_bytes(device)?;
        if is_ternary(self.scheme) && m <= in_bytes_to && !normed {
            // What the kernels multiply with; for a single row one does with more of x.
            let rounded = widest_error(&got, &expected(&in_bytes(&x)?)?.concat())?;
            let more = m == 1 && self.scheme.group().is_none();
            error = if more { error.min(rounded) } else { rounded };
        }
        // A norm's result is rounded to the type of x, and again behind its weight.
        let roundings = if normed { 4. } else { 2. };
        let limit = 2. * tolerance(self.scheme, m, normed, in_bytes_to) + roundings * unit(dtype);
        assert!(error < limit, "{self:?}: {error:e} of {limit:e}");
        Ok(())
    }

    fn epilogue<'a>(&self, bias: &'a Tensor, residuals: &'a [&'a Tensor]) -> Epilogue<'a> {
        Epilogue {
            bias: (!self.bare).then_some(bias),
            activation: self.activation,
            residuals: if self.bare { &[] } else { residuals },
        }
    }

    fn prologue<'a>(&self, norm: &'a [Tensor; 2]) -> Prologue<'a> {
        match self.norm {
            0 => Prologue::None,
            1 => Prologue::RmsNorm {
                weight: &norm[0],
                eps: 1e-5,
            },
            _ => Prologue::LayerNorm {
                weight: &norm[0],
                bias: Some(&norm[1]),
                eps: 1e-5,
            },
        }
    }
}

/// Two schemes, blocks of a file and a dense matrix side by side.
#[test]
fn formats_mix() -> Result<()> {
    use candle_core::quantized::GgmlDType;
    for device in gpus() {
        for m in [1, 3, 40] {
            let k = 256;
            let codes = [random(Scheme::Int8, 20, k), random(int4(64, true), 9, k)];
            let weights = [
                on(&codes[0], &device)?,
                on(&codes[1], &device)?,
                crate::quant_linear::blocks_on(16, k, GgmlDType::Q4_1, &device)?,
                Weight::Dense(randn_on(&[5, k], DType::F32, &device)?),
            ];
            let x = randn_on(&[m, k], DType::F32, &device)?;
            let got = quant_linear(&x, Prologue::None, &weights, &Epilogue::default())?;
            let expected = reference(&x, Prologue::None, &weights, &Epilogue::default())?;
            let error = widest_error(&got, &expected.concat())?;
            assert!(
                error < 2. * tolerance(Scheme::Int8, m, false, 0),
                "{m}: {error:e}"
            );
        }
    }
    Ok(())
}

#[test]
fn the_trace_names_the_scheme() -> Result<()> {
    for device in gpus() {
        let weights = [on(&random(int4(128, false), 16, 128), &device)?];
        let x = randn_on(&[1, 128], DType::F32, &device)?;
        let (y, calls) =
            trace::capture(|| quant_linear(&x, Prologue::None, &weights, &Epilogue::default()));
        y?;
        let (call, _) = calls.iter().next().expect("a call");
        assert!(call.path.contains("cuda int4-g128 gem"), "{}", call.path);
    }
    Ok(())
}
