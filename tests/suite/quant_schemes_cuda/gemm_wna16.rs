//! The tensor-core GEMMs for quantized weights, those of Hopper and that for few rows: every format, tile of tokens,
//! dtype, prologue and epilogue, held to float64 and to what cuBLAS makes of the same weights in bf16.

use super::subjects::{SUBJECTS, Subject};
use crate::support::{randn_on, widest_error};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cuda::with_kernel;
use candle_fused::ops::linear::reference;
use candle_fused::ops::{Activation, Epilogue, Prologue, quant_linear};
use candle_fused::trace;

const LIBRARY: &str = "gemm_dequantized_cublaslt";

/// Relative to the root mean square of `expected`, that of the difference.
pub fn error(y: &Tensor, expected: &Tensor) -> Result<f64> {
    let expected = expected.to_dtype(DType::F64)?.to_device(&Device::Cpu)?;
    let y = y.to_dtype(DType::F64)?.to_device(&Device::Cpu)?;
    let squares = |t: &Tensor| t.sqr()?.mean_all()?.to_scalar::<f64>();
    let error = (squares(&(y - &expected)?)? / squares(&expected)?).sqrt();
    assert!(error.is_finite());
    Ok(error)
}

/// Whether a kernel refused more than 16 rows of operand B because x has no room in shared memory.
fn has_no_room(product: &Result<Tensor>, rows: usize) -> bool {
    let error = product.as_ref().err().map(ToString::to_string);
    rows > 16 && error.is_some_and(|e| e.contains("rows of x leave too little shared memory"))
}

/// What the error is to that of the library's product at most. NF4's values are rounded to bf16 before they meet a scale
/// and are rounded again.
fn most_error(format: &str) -> f64 {
    if format == "nf4" { 1.2 } else { 1.02 }
}

fn exact(subject: &Subject, device: &Device, k: usize) -> Result<()> {
    let kernel = subject.kernel;
    for (name, weights) in subject.pairs(200, k, device)? {
        let weights = &weights[..1];
        let most = (subject.most)(&name);
        for &m in subject.rows.iter().filter(|m| **m <= most) {
            let x = randn_on(&[m, k], DType::BF16, device)?;
            let product = |kernel| {
                with_kernel(Some(kernel), || {
                    quant_linear(&x, Prologue::None, weights, &Epilogue::default())
                })
            };
            let (ours, calls) = trace::capture(|| product(kernel));
            if has_no_room(&ours, m) {
                continue;
            }
            let ours = ours?;
            let path = &calls.iter().next().expect("a call").0.path;
            assert!(path.contains(kernel), "{path}");
            let expected = reference(&x, Prologue::None, weights, &Epilogue::default())?;
            let expected = Tensor::new(expected.concat(), &Device::Cpu)?.reshape((m, 200))?;
            let (ours, theirs) = (
                error(&ours, &expected)?,
                error(&product(LIBRARY)?, &expected)?,
            );
            assert!(
                ours <= most_error(&name) * theirs,
                "{kernel} {name} M {m}, K {k}: {ours:e}, the library {theirs:e}"
            );
        }
    }
    Ok(())
}

/// Whole K blocks, and values of K that fill none.
#[test]
fn they_are_as_exact_as_the_librarys_product_of_dequantized_weights() -> Result<()> {
    for subject in SUBJECTS {
        for device in subject.gpus()? {
            let long = if subject.kernel == "gemm_wna16_latency_sm90" {
                1792
            } else {
                3840
            };
            for k in [1024, long] {
                exact(&subject, &device, k)?;
            }
        }
    }
    Ok(())
}

/// Stream-K on 132 multiprocessors: tiles that several clusters share, and rows and channels that fill no tile. Some
/// rows are held to float64; all rows are the same bits in every launch.
#[test]
fn clusters_have_shares_of_all_tiles() -> Result<()> {
    let subject = &SUBJECTS[0];
    let (n, k) = (4344, 2048);
    // So many rows of f16 are dequantized for the library.
    let takes_f16 = |name: &str| !name.starts_with('Q') && name != "int8";
    for device in subject.gpus()? {
        for (name, weights) in subject.pairs(n, k, &device)? {
            let weights = &weights[..1];
            // f16 has two rows of operand B for each token.
            for (m, dtype) in [(450, DType::BF16), (512, DType::BF16), (225, DType::F16)] {
                if dtype == DType::F16 && !takes_f16(&name) {
                    continue;
                }
                let x = randn_on(&[m, k], dtype, &device)?;
                let product = |kernel, x: &Tensor| {
                    with_kernel(Some(kernel), || {
                        quant_linear(x, Prologue::None, weights, &Epilogue::default())
                    })
                };
                let rows = Tensor::new(&[0, 127, 128, m as u32 - 150, m as u32 - 1], &device)?;
                let some = x.index_select(&rows, 0)?;
                let expected = reference(&some, Prologue::None, weights, &Epilogue::default())?;
                let expected = Tensor::new(expected.concat(), &Device::Cpu)?.reshape((5, n))?;
                let ours = product(subject.kernel, &x)?;
                let of = |y: &Tensor| error(&y.index_select(&rows, 0)?, &expected);
                // Weights are rounded to bf16, whatever x is.
                let theirs = product(LIBRARY, &x.to_dtype(DType::BF16)?)?;
                let (our_error, theirs) = (of(&ours)?, of(&theirs)?);
                assert!(
                    our_error <= most_error(&name) * theirs,
                    "{name} M {m}: {our_error:e}, the library {theirs:e}"
                );
                for _ in 0..3 {
                    let again = (product(subject.kernel, &x)? - &ours)?.to_dtype(DType::F32)?;
                    assert_eq!(
                        again.abs()?.max_all()?.to_scalar::<f32>()?,
                        0.,
                        "{name} M {m}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// Norms, gates, bias, residuals, three dtypes of x, output channels that fill neither a tile nor 8, and values of K
/// that fill no block.
#[test]
fn prologues_and_epilogues() -> Result<()> {
    for subject in SUBJECTS {
        for device in subject.gpus()? {
            with_prologues(&subject, &device)?;
        }
    }
    Ok(())
}

fn with_prologues(subject: &Subject, device: &Device) -> Result<()> {
    for (i, (n, k)) in subject.shapes.into_iter().enumerate() {
        for (f, (name, weights)) in subject.pairs(n, k, device)?.into_iter().enumerate() {
            for (j, &m) in subject.few.iter().enumerate() {
                let dtype = subject.dtypes[(i + j + f) % subject.dtypes.len()];
                let most = (subject.most)(&name) / if dtype == DType::F16 { 2 } else { 1 };
                // Tiles of few tokens round the weights of Q2_K, so the kernel refuses rows that are to keep 16 bits.
                let rounds = subject.kernel == "gemm_wna16_sm90" && name == "Q2K";
                if m > most || (rounds && dtype == DType::F32 && m <= 8) {
                    continue;
                }
                let activation = subject.activations[(i + f + j) % subject.activations.len()];
                let width = if activation.gate().is_some() {
                    n
                } else {
                    2 * n
                };
                let x = randn_on(&[m, k], dtype, device)?;
                let norm = [
                    randn_on(&[k], dtype, device)?,
                    randn_on(&[k], dtype, device)?,
                ];
                let prologue = match (f + j) % 3 {
                    i if i == 0 || i >= (subject.prologues)(dtype) => Prologue::None,
                    1 => Prologue::RmsNorm {
                        weight: &norm[0],
                        eps: 1e-5,
                    },
                    _ => Prologue::LayerNorm {
                        weight: &norm[0],
                        bias: Some(&norm[1]),
                        eps: 1e-5,
                    },
                };
                let bias = randn_on(&[2 * n], dtype, device)?;
                let residual = randn_on(&[m, width], dtype, device)?;
                let epilogue = Epilogue {
                    bias: Some(&bias),
                    activation,
                    residuals: &[&residual],
                };
                let got = with_kernel(Some(subject.kernel), || {
                    quant_linear(&x, prologue, &weights, &epilogue)
                });
                if has_no_room(&got, 2 * m) {
                    continue;
                }
                let (got, expected) = (got?, reference(&x, prologue, &weights, &epilogue)?);
                let expected = expected.concat();
                // x and weights are rounded to bf16 where M is past 8, NF4's values in any case, the result to its dtype.
                let unit = match dtype {
                    DType::F32 => 1e-4,
                    DType::F16 => 4e-3,
                    _ => 3.2e-2,
                };
                let rounded = m > 8 || name == "nf4";
                let limit = if rounded { 2e-2 } else { 2e-4 } + unit;
                let error = widest_error(&got, &expected)?;
                assert!(
                    error < limit,
                    "{} {name} {m}x{k}x{n} {dtype:?} {activation:?}: {error:e} of {limit:e}",
                    subject.kernel
                );
            }
        }
    }
    Ok(())
}

/// A row that is not finite spoils no other, whichever tile it shares with them.
#[test]
fn rows_stay_by_themselves() -> Result<()> {
    for subject in SUBJECTS {
        for device in subject.gpus()? {
            apart(&subject, &device)?;
        }
    }
    Ok(())
}

fn apart(subject: &Subject, device: &Device) -> Result<()> {
    let k = 512;
    for (name, weights) in subject.pairs(64, k, device)? {
        let most = (subject.most)(&name);
        for &m in subject.rows.iter().filter(|m| (3..=most).contains(*m)) {
            let x = randn_on(&[m, k], DType::BF16, device)?;
            let product = |x: &Tensor| {
                with_kernel(Some(subject.kernel), || {
                    quant_linear(x, Prologue::None, &weights[..1], &Epilogue::default())
                })
            };
            let plain = product(&x)?.to_dtype(DType::F32)?;
            let infinite = Tensor::full(f32::INFINITY, (1, k), device)?.to_dtype(DType::BF16)?;
            let spoiled = Tensor::cat(
                &[&x.narrow(0, 0, 1)?, &infinite, &x.narrow(0, 2, m - 2)?],
                0,
            )?;
            let spoiled = product(&spoiled)?.to_dtype(DType::F32)?;
            let (plain, spoiled) = (plain.to_vec2::<f32>()?, spoiled.to_vec2::<f32>()?);
            assert!(spoiled[1].iter().all(|v| !v.is_finite()), "{name} {m}");
            for row in (0..m).filter(|row| *row != 1) {
                assert_eq!(plain[row], spoiled[row], "{name} {m} row {row}");
            }
        }
    }
    Ok(())
}

/// So many output channels that a block of `gemm_wna16_skinny_sm90` fills each of its buffers more than once, and values
/// of K that fill no stage.
#[test]
fn blocks_have_many_tiles() -> Result<()> {
    let subject = &SUBJECTS[2];
    for device in subject.gpus()? {
        many_tiles(subject, [16 * 132 * 5 + 24, 2304], &[2, 3, 8, 16], &device)?;
    }
    Ok(())
}

/// The same where clusters of two and of four blocks share K, and some blocks have more of it than others.
#[test]
fn clusters_of_few_rows_share_k() -> Result<()> {
    let subject = &SUBJECTS[2];
    for device in subject.gpus()? {
        let calls = many_tiles(subject, [16 * 66 * 3 + 24, 6144], &[11, 12], &device)?;
        assert!(calls.contains("clusters of 2"), "{calls}");
        let calls = many_tiles(subject, [16 * 30 * 5 + 8, 10_240], &[12], &device)?;
        assert!(calls.contains("clusters of 4"), "{calls}");
    }
    Ok(())
}

/// `gemv_ternary_latency` with more outputs of a block than threads, and with more shares of K than warps in its longest
/// rows; with and without a gate.
#[test]
fn few_rows_and_all_ternary_weights_of_a_block() -> Result<()> {
    let subject = &SUBJECTS[4];
    for device in subject.gpus()? {
        many_tiles(subject, [40_008, 256], &[1, 1, 4, 3], &device)?;
        many_tiles(subject, [1_064, 4_096], &[2, 4, 3], &device)?;
        let calls = many_tiles(subject, [1_064, 8_192], &[1, 1], &device)?;
        // Of 64 K blocks, for 8 warps.
        assert!(calls.contains("split 16"), "{calls}");
        // So many values of f32 that warps do not suffice for all rows at once.
        for (name, weights) in subject.pairs(200, 6_144, &device)? {
            let (x, weights) = (randn_on(&[4, 6_144], DType::F32, &device)?, &weights[..1]);
            let product = || quant_linear(&x, Prologue::None, weights, &Epilogue::default());
            let ours = with_kernel(Some(subject.kernel), product)?;
            let expected = reference(&x, Prologue::None, weights, &Epilogue::default())?;
            let expected = Tensor::new(expected.concat(), &Device::Cpu)?.reshape((4, 200))?;
            let error = error(&ours, &expected)?;
            assert!(error < 1e-4, "{name}: {error:e}");
        }
    }
    Ok(())
}

/// Held to what the library makes of the same weights, with gates, bias and a residual; all rows are the same bits in
/// every launch. The trace of the calls is returned.
fn many_tiles(
    subject: &Subject,
    [n, k]: [usize; 2],
    rows: &[usize],
    device: &Device,
) -> Result<String> {
    let mut traces = String::new();
    for (i, (name, weights)) in subject.pairs(n, k, device)?.into_iter().enumerate() {
        for (j, m) in rows.iter().enumerate() {
            let gated = (i + j) % 2 == 0;
            let (weights, activation) = match gated {
                true => (&weights[..], Activation::SwiGlu),
                false => (&weights[..1], Activation::None),
            };
            let x = randn_on(&[*m, k], DType::BF16, device)?;
            let bias = randn_on(&[n * weights.len()], DType::BF16, device)?;
            let residual = randn_on(&[*m, n], DType::BF16, device)?;
            let epilogue = Epilogue {
                bias: Some(&bias),
                activation,
                residuals: &[&residual],
            };
            let product = |kernel| {
                let y = with_kernel(Some(kernel), || {
                    quant_linear(&x, Prologue::None, weights, &epilogue)
                })?;
                y.to_dtype(DType::F32)
            };
            let (ours, calls) = trace::capture(|| product(subject.kernel));
            traces += &calls.to_string();
            let (ours, theirs) = (ours?, product(LIBRARY)?);
            let scale = theirs.abs()?.max_all()?.to_scalar::<f32>()?;
            let apart = (&ours - &theirs)?.abs()?.max_all()?.to_scalar::<f32>()?;
            assert!(
                apart <= 1e-2 * scale,
                "{name} {m}x{n}x{k}: {apart:e} of {scale:e}"
            );
            for _ in 0..3 {
                let again = (product(subject.kernel)? - &ours)?.abs()?.max_all()?;
                assert_eq!(again.to_scalar::<f32>()?, 0., "{name} {m}x{n}x{k}");
            }
        }
    }
    Ok(traces)
}
