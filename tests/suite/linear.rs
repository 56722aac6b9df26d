//! The linear op in all its combinations, against float64.

use crate::support::{device, devices, on_every_device, randn, randn_on, values, widest_error};
use candle_core::{D, DType, Device, Result, Tensor};
use candle_fused::ops::linear::reference;
use candle_fused::ops::{
    Activation, Epilogue, Prologue, Weight, layer_norm_linear, linear, rms_norm_linear,
};
use proptest::prelude::*;

/// All but `Relu2Glu`, whose outputs are too large for f16 here: `bitnet` and `per_token` have it.
pub const ACTIVATIONS: [Activation; 9] = [
    Activation::None,
    Activation::Silu,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::Relu,
    Activation::Relu2,
    Activation::SwiGlu,
    Activation::GeGlu,
    Activation::GeGluTanh,
];

pub fn error(got: &Tensor, expected: &[Vec<f64>]) -> Result<f64> {
    widest_error(got, &expected.concat())
}

/// Units in the last place of the dtype, of which the result is rounded to half of one. Behind a norm
/// every input carries two roundings, gating multiplies two such sums, and where the few outputs of
/// a small shape happen to be small, errors weigh more: four times as many. f32 sums of K products
/// lose the rest.
fn tolerance(dtype: DType, k: usize, norm: Norm) -> f64 {
    let unit = match dtype {
        DType::F32 => 1.2e-7,
        DType::F16 => 9.8e-4,
        _ => 7.9e-3,
    };
    let roundings = if norm == Norm::None { 2. } else { 8. };
    roundings * unit + 1.2e-7 * (k as f64).sqrt()
}

/// One row, odd widths, several cells of the output.
const SHAPES: [(usize, usize, usize); 9] = [
    (1, 64, 48),
    (1, 33, 10),
    (2, 600, 36),
    (1, 1432, 20),
    (5, 2056, 28),
    (3, 576, 100),
    (8, 264, 22),
    (9, 111, 34),
    (40, 64, 260),
];

#[test]
fn every_combination_agrees_with_float64() -> Result<()> {
    combinations(Norm::None)
}

/// What stands in front of the product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    None,
    Rms,
    Layer,
}

/// Every dtype, weight dtype, shape and activation, with bias and two residuals, behind a norm or
/// none.
pub fn combinations(norm: Norm) -> Result<()> {
    let dtypes = [DType::F32, DType::F16, DType::BF16];
    on_every_device(|| {
        for dtype in dtypes {
            for weight_dtype in dtypes {
                for shape in SHAPES {
                    for activation in ACTIVATIONS {
                        combination(dtype, weight_dtype, shape, activation, norm)?;
                    }
                }
            }
        }
        Ok(())
    })
}

fn combination(
    dtype: DType,
    weight_dtype: DType,
    (m, k, n): (usize, usize, usize),
    activation: Activation,
    norm: Norm,
) -> Result<()> {
    let randn = |dims: &[usize], dtype| randn_on(dims, dtype, &device());
    let x = randn(&[m, k], dtype)?;
    let weights = [
        randn(&[n / 2, k], weight_dtype)?,
        randn(&[n - n / 2, k], weight_dtype)?,
    ];
    let (norm_weight, norm_bias) = (randn(&[k], dtype)?, randn(&[k], dtype)?);
    let bias = randn(&[n], dtype)?;
    let width = if activation.gate().is_some() {
        n / 2
    } else {
        n
    };
    let residual = randn(&[m, width], dtype)?;
    let residuals = [&residual, &residual];
    let epilogue = Epilogue {
        bias: Some(&bias),
        activation,
        residuals: &residuals,
    };
    let refs = [&weights[0], &weights[1]];
    let (weight, eps) = (&norm_weight, 1e-5);
    let (prologue, parts) = match norm {
        Norm::None => {
            let y = linear(&x, &Tensor::cat(&refs, 0)?, &epilogue)?;
            (Prologue::None, vec![y])
        }
        Norm::Rms => {
            let parts = rms_norm_linear(&x, weight, eps, &refs, &epilogue)?;
            (Prologue::RmsNorm { weight, eps }, parts)
        }
        Norm::Layer => {
            let bias = Some(&norm_bias);
            let parts = layer_norm_linear(&x, weight, bias, eps, &refs, &epilogue)?;
            (Prologue::LayerNorm { weight, bias, eps }, parts)
        }
    };
    let got = Tensor::cat(&parts, D::Minus1)?;
    assert_eq!((got.dims(), got.dtype()), ([m, width].as_slice(), dtype));
    let weights = weights.map(Weight::Dense);
    let expected = reference(&x, prologue, &weights, &epilogue)?;
    let error = error(&got, &expected)?;
    let limit = tolerance(dtype, k, norm);
    assert!(
        error < limit,
        "{:?}: {dtype:?} x {weight_dtype:?}, {m}x{k}x{n}, {activation:?}, norm {norm:?}: {error:e}",
        device()
    );
    Ok(())
}

#[test]
fn any_layout_gives_what_its_copy_gives() -> Result<()> {
    on_every_device(layouts)
}

fn layouts() -> Result<()> {
    let randn = |dims: &[usize], dtype| randn_on(dims, dtype, &device());
    let w = randn(&[24, 40], DType::F32)?;
    let base = randn(&[6, 2, 43], DType::F32)?;
    let views = [
        base.narrow(2, 1, 40)?,
        base.narrow(0, 2, 3)?.narrow(2, 3, 40)?,
        base.narrow(2, 0, 40)?.transpose(0, 1)?,
        randn(&[40, 5], DType::F32)?.t()?,
        randn(&[1, 40], DType::F32)?.broadcast_as((7, 40))?,
        randn(&[40], DType::F32)?,
    ];
    for x in views {
        let residual = randn(&[24], DType::F32)?;
        let mut dims = x.dims().to_vec();
        *dims.last_mut().expect("a dimension") = 24;
        let residual = residual.broadcast_as(dims.as_slice())?;
        let epilogue = Epilogue {
            residuals: &[&residual],
            ..Default::default()
        };
        let strided = linear(&x, &w, &epilogue)?;
        let copied = linear(&x.contiguous()?, &w.contiguous()?, &epilogue)?;
        assert_eq!(strided.dims(), dims);
        assert_eq!(values(&strided)?, values(&copied)?);
    }
    let transposed = randn(&[40, 24], DType::F32)?.t()?;
    let x = randn(&[2, 40], DType::F32)?;
    let a = linear(&x, &transposed, &Epilogue::default())?;
    let b = linear(&x, &transposed.contiguous()?, &Epilogue::default())?;
    assert_eq!(values(&a)?, values(&b)?);
    Ok(())
}

/// Rows that begin off a multiple of 16 bytes, as after a cut, against the same rows where they are
/// aligned: within rounding, since another path may add in another order.
#[test]
fn unaligned_addresses_give_what_aligned_ones_give() -> Result<()> {
    on_every_device(|| {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for m in [1, 5, 20] {
                let x = randn_on(&[m * 64 + 1], dtype, &device())?;
                let w = randn_on(&[32 * 64 + 1], dtype, &device())?;
                let cut = |t: &Tensor, rows: usize| t.narrow(0, 1, rows * 64)?.reshape((rows, 64));
                let (x, w) = (cut(&x, m)?, cut(&w, 32)?);
                let got = linear(&x, &w, &Epilogue::default())?;
                let expected = reference(
                    &x,
                    Prologue::None,
                    &[Weight::Dense(w)],
                    &Epilogue::default(),
                )?;
                assert!(error(&got, &expected)? < tolerance(dtype, 64, Norm::None));
            }
        }
        Ok(())
    })
}

#[test]
fn results_are_the_same_in_every_run() -> Result<()> {
    for device in devices() {
        for m in [1, 3, 8, 30] {
            let x = randn_on(&[m, 1536], DType::BF16, &device)?;
            let w = randn_on(&[576, 1536], DType::BF16, &device)?;
            let first = values(&linear(&x, &w, &Epilogue::default())?)?;
            for _ in 0..3 {
                assert_eq!(values(&linear(&x, &w, &Epilogue::default())?)?, first);
            }
        }
    }
    Ok(())
}

#[test]
fn bad_arguments_are_named() -> Result<()> {
    let x = randn(&[2, 8], DType::F32)?;
    let w = randn(&[6, 8], DType::F32)?;
    let none = Epilogue::default();
    let message = |result: Result<Tensor>| result.expect_err("accepted").to_string();
    let narrow = randn(&[6, 7], DType::F32)?;
    assert!(message(linear(&x, &narrow, &none)).contains("weights[0] is [6, 7]"));
    assert!(message(linear(&x, &randn(&[8], DType::F32)?, &none)).contains("weights[0]"));
    let scalar = Tensor::new(1f32, &Device::Cpu)?;
    assert!(message(linear(&scalar, &w, &none)).contains("x is a scalar"));
    let whole = Tensor::ones((2, 8), DType::U32, &Device::Cpu)?;
    assert!(message(linear(&whole, &w, &none)).contains("x is U32"));
    let short = randn(&[5], DType::F32)?;
    let bias = Epilogue {
        bias: Some(&short),
        ..none
    };
    assert!(message(linear(&x, &w, &bias)).contains("bias has shape [5]"));
    let half = randn(&[6], DType::BF16)?;
    let bias = Epilogue {
        bias: Some(&half),
        ..none
    };
    assert!(message(linear(&x, &w, &bias)).contains("bias is BF16"));
    let residual = randn(&[2, 5], DType::F32)?;
    let residuals = Epilogue {
        residuals: &[&residual],
        ..none
    };
    assert!(message(linear(&x, &w, &residuals)).contains("residuals[0]"));
    let three = [&x, &x, &x];
    let residuals = Epilogue {
        residuals: &three,
        ..none
    };
    assert!(message(linear(&x, &randn(&[8, 8], DType::F32)?, &residuals)).contains("3 residuals"));
    let odd = Epilogue {
        activation: Activation::SwiGlu,
        ..none
    };
    assert!(message(linear(&x, &randn(&[5, 8], DType::F32)?, &odd)).contains("swiglu"));
    Ok(())
}

#[test]
fn no_rows_give_no_rows() -> Result<()> {
    for device in devices() {
        let w = randn_on(&[6, 32], DType::F32, &device)?;
        let none = Tensor::zeros((0, 32), DType::F32, &device)?;
        assert_eq!(linear(&none, &w, &Epilogue::default())?.dims(), [0, 6]);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(150) })]

    /// Any shape, any view of x and of the weight, any epilogue.
    #[test]
    fn random_shapes_and_views_agree_with_float64(
        (m, k, n) in (1usize..70, 1usize..90, 1usize..60),
        (cut, transposed, turned) in (0usize..3, any::<bool>(), any::<bool>()),
        activation in prop::sample::select(&ACTIVATIONS[..4]),
    ) {
        on_every_device(|| {
            let wide = randn_on(&[m, k + cut], DType::F32, &device())?;
            let x = wide.narrow(1, cut, k)?;
            let x = if transposed { x.t()?.contiguous()?.t()? } else { x };
            let w = randn_on(&[n, k], DType::F32, &device())?;
            let w = if turned { w.t()?.contiguous()?.t()? } else { w };
            let residual = randn_on(&[m, n], DType::F32, &device())?;
            let residuals = [&residual];
            let epilogue = Epilogue { bias: None, activation, residuals: &residuals };
            let got = linear(&x, &w, &epilogue)?;
            let expected = reference(&x, Prologue::None, &[Weight::Dense(w)], &epilogue)?;
            let error = error(&got, &expected)?;
            assert!(error < tolerance(DType::F32, k, Norm::None), "{:?}: {error:e}", device());
            Ok(())
        })
        .unwrap();
    }
}
