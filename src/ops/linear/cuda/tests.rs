//! Products whose weights stream through shared memory, against float64.

use super::few::{FewRows, few_rows};
use super::gemv::{NormAt, NormKind};
use crate::cuda::{Launcher, address_of};
use crate::ops::Activation;
use candle_core::{D, DType, Device, Result, Tensor};

/// Random values on the device, and the same in float64.
struct Both {
    on: Tensor,
    exact: Tensor,
}

impl Both {
    fn new(device: &Device, dtype: DType, shape: &[usize], scale: f32) -> Result<Self> {
        let t = Tensor::randn(0f32, scale, shape, &Device::Cpu)?.to_dtype(dtype)?;
        Ok(Self {
            on: t.to_device(device)?,
            exact: t.to_dtype(DType::F64)?,
        })
    }
}

fn assert_close(ours: &Tensor, expected: &Tensor, bound: f64, what: &str) -> Result<()> {
    let expected = expected.to_vec1::<f64>()?;
    let most = expected.iter().fold(1f64, |most, v| most.max(v.abs()));
    let ours = ours.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    for (ours, expected) in ours.iter().zip(&expected) {
        let error = (f64::from(*ours) - expected).abs();
        assert!(error <= bound * most, "{what}: {error} of {most}");
    }
    Ok(())
}

/// x behind the norm, in float64 but rounded where the kernel rounds.
fn normed(x: &Tensor, kind: NormKind, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let centred = match kind {
        NormKind::Rms => x.clone(),
        NormKind::Layer => x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?,
    };
    let squares = (centred.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?;
    let scaled = centred.broadcast_div(&squares.sqrt()?)?.mul(weight)?;
    match kind {
        NormKind::Rms => Ok(scaled),
        NormKind::Layer => scaled + bias,
    }
}

#[test]
fn streamed_products_agree_with_float64() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let launcher = Launcher::new(device.as_cuda_device()?)?;
    // Rows that units and blocks do not divide, k that steps do not, several matrices, long rows.
    for (k, weights, activation, norm) in [
        (2048, [4097, 0, 0], Activation::None, None),
        (
            2088,
            [2304, 301, 298],
            Activation::None,
            Some(NormKind::Rms),
        ),
        (2560, [7680, 0, 0], Activation::None, Some(NormKind::Layer)),
        (2056, [2805, 0, 0], Activation::Gelu, Some(NormKind::Layer)),
        (4096, [2050, 0, 0], Activation::SwiGlu, Some(NormKind::Rms)),
        (8192, [517, 516, 0], Activation::None, Some(NormKind::Rms)),
        (14336, [515, 0, 0], Activation::None, None),
        (16384, [257, 0, 0], Activation::Silu, Some(NormKind::Layer)),
    ] {
        for dtype in [DType::BF16, DType::F16] {
            let randn = |shape: &[usize], scale| Both::new(&device, dtype, shape, scale);
            let rows = weights.iter().sum::<usize>();
            let width = activation.outputs(rows);
            let (x, scale) = (randn(&[k], 1.)?, 1. / (k as f32).sqrt());
            let (gain, shift) = (randn(&[k], 1.)?, randn(&[k], 1.)?);
            let w = randn(&[rows, k], scale)?;
            let (bias, residual) = (randn(&[rows], 1.)?, randn(&[width], 1.)?);
            let y = Tensor::zeros(width, dtype, &device)?;
            let (first, size) = (address_of(&w.on)?, (k * dtype.size_in_bytes()) as u64);
            let mut from = 0;
            let weights = weights.map(|rows| {
                from += rows;
                (first + (from - rows) as u64 * size, rows)
            });
            let at = FewRows {
                x: address_of(&x.on)?,
                norm: match norm {
                    Some(kind) => Some(NormAt {
                        kind,
                        weight: address_of(&gain.on)?,
                        bias: match kind {
                            NormKind::Layer => address_of(&shift.on)?,
                            NormKind::Rms => 0,
                        },
                        eps: 1e-5,
                    }),
                    None => None,
                },
                weights,
                second: None,
                bias: address_of(&bias.on)?,
                activation,
                residuals: [address_of(&residual.on)?, 0],
                out: address_of(&y)?,
                stride: width,
                m: 1,
                k,
                x_dtype: dtype,
                w_dtype: dtype,
                out_dtype: dtype,
            };
            assert_eq!(at.path(launcher.gpu), "vector, streamed");
            // SAFETY: the tensors have the sizes that the product asks for.
            unsafe { few_rows(&launcher, &at)? };
            let input = match norm {
                Some(kind) => normed(&x.exact, kind, &gain.exact, &shift.exact)?,
                None => x.exact,
            };
            let sums = (w.exact.matmul(&input.unsqueeze(1)?)?.squeeze(1)? + &bias.exact)?;
            let expected = match activation {
                Activation::SwiGlu => {
                    let up = sums.narrow(0, width, width)?;
                    sums.narrow(0, 0, width)?.silu()?.mul(&up)?
                }
                Activation::Silu => sums.silu()?,
                Activation::Gelu => sums.gelu_erf()?,
                _ => sums,
            };
            let bound = if dtype == DType::BF16 { 8e-3 } else { 1e-3 };
            let what = format!("{k} {weights:?} {activation:?} {dtype:?}");
            assert_close(&y, &(expected + residual.exact)?, bound, &what)?;
        }
    }
    Ok(())
}

#[test]
fn a_pair_of_matrices_is_the_sum_of_their_products() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let launcher = Launcher::new(device.as_cuda_device()?)?;
    for (border, behind, rows) in [
        (64, 256, 64),
        (640, 2560, 640),
        (2560, 10240, 2561),
        (8, 8, 3),
    ] {
        for dtype in [DType::BF16, DType::F16] {
            let randn = |shape: &[usize], scale| Both::new(&device, dtype, shape, scale);
            let x = randn(&[border + behind], 1.)?;
            let (w1, w2) = (randn(&[rows, border], 0.1)?, randn(&[rows, behind], 0.1)?);
            let (bias, residual) = (randn(&[rows], 1.)?, randn(&[rows], 1.)?);
            let y = Tensor::zeros(rows, dtype, &device)?;
            let one = FewRows {
                x: address_of(&x.on)?,
                norm: None,
                weights: [(address_of(&w1.on)?, rows), (0, 0), (0, 0)],
                second: None,
                bias: address_of(&bias.on)?,
                activation: Activation::None,
                residuals: [address_of(&residual.on)?, 0],
                out: address_of(&y)?,
                stride: rows,
                m: 1,
                k: border,
                x_dtype: dtype,
                w_dtype: dtype,
                out_dtype: dtype,
            };
            let two = FewRows {
                x: one.x + 2 * border as u64,
                weights: [(address_of(&w2.on)?, rows), (0, 0), (0, 0)],
                k: behind,
                ..one
            };
            let pair = one
                .paired(&two, launcher.gpu)
                .expect("a kernel for two matrices");
            // SAFETY: the tensors have the sizes that the product asks for.
            unsafe { few_rows(&launcher, &pair)? };
            let product = |w: &Both, from: usize, count: usize| {
                w.exact
                    .matmul(&x.exact.narrow(0, from, count)?.unsqueeze(1)?)?
                    .squeeze(1)
            };
            let sum = (product(&w1, 0, border)? + product(&w2, border, behind)?)?;
            let expected = ((sum + bias.exact)? + residual.exact)?;
            let bound = if dtype == DType::BF16 { 4e-3 } else { 5e-4 };
            assert_close(
                &y,
                &expected,
                bound,
                &format!("{border} {behind} {dtype:?}"),
            )?;
            assert!(two.paired(&one, launcher.gpu).is_none());
        }
    }
    Ok(())
}
