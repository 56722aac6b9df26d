//! A product of two matrices side by side against float64.

use super::few::{FewRows, few_rows};
use crate::cuda::{Launcher, address_of};
use crate::ops::Activation;
use candle_core::{DType, Device, Result, Tensor};

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
            let randn = |shape: &[usize], scale: f32| {
                let t = Tensor::randn(0f32, scale, shape, &Device::Cpu)?.to_dtype(dtype)?;
                Ok::<_, candle_core::Error>((t.to_device(&device)?, t.to_dtype(DType::F64)?))
            };
            let (x, x64) = randn(&[border + behind], 1.)?;
            let (w1, w1_64) = randn(&[rows, border], 0.1)?;
            let (w2, w2_64) = randn(&[rows, behind], 0.1)?;
            let (bias, bias64) = randn(&[rows], 1.)?;
            let (residual, residual64) = randn(&[rows], 1.)?;
            let y = Tensor::zeros(rows, dtype, &device)?;
            let one = FewRows {
                x: address_of(&x)?,
                norm: None,
                weights: [(address_of(&w1)?, rows), (0, 0), (0, 0)],
                second: None,
                bias: address_of(&bias)?,
                activation: Activation::None,
                residuals: [address_of(&residual)?, 0],
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
                weights: [(address_of(&w2)?, rows), (0, 0), (0, 0)],
                k: behind,
                ..one
            };
            let pair = one
                .paired(&two, launcher.gpu)
                .expect("a kernel for two matrices");
            // SAFETY: the tensors have the sizes that the product asks for.
            unsafe { few_rows(&launcher, &pair)? };
            let product = |w: &Tensor, from: usize, count: usize| {
                w.matmul(&x64.narrow(0, from, count)?.unsqueeze(1)?)?
                    .squeeze(1)
            };
            let sum = (product(&w1_64, 0, border)? + product(&w2_64, border, behind)?)?;
            let expected = ((sum + bias64)? + residual64)?.to_vec1::<f64>()?;
            let most = expected.iter().fold(1f64, |most, v| most.max(v.abs()));
            let ours = y.to_dtype(DType::F32)?.to_vec1::<f32>()?;
            let bound = if dtype == DType::BF16 { 4e-3 } else { 5e-4 };
            for (ours, expected) in ours.iter().zip(&expected) {
                let error = (f64::from(*ours) - expected).abs();
                assert!(
                    error <= bound * most,
                    "{border} {behind} {dtype:?}: {error} of {most}"
                );
            }
            assert!(two.paired(&one, launcher.gpu).is_none());
        }
    }
    Ok(())
}
