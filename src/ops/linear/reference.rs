//! The plain form: float64, one output at a time.

use super::{Activation, Epilogue, Prologue, Weight};
use crate::ops::view::float64;
use crate::ops::{layer_norm, rms_norm};
#[cfg(feature = "cuda")]
use candle_core::DType;
use candle_core::{Result, Tensor};

/// What [`linear`](fn@super::linear), `rms_norm_linear` and `quant_linear` compute, in float64 from
/// the same (dequantized) weights and without quantizing activations: `[M, N]` with x's rows
/// flattened. The oracle of tests and benchmarks.
///
/// # Errors
/// If a tensor cannot be read as float64.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::ops::linear::{self, Epilogue, Prologue, Weight};
/// let x = Tensor::new(&[[1f32, 2.]], &Device::Cpu)?;
/// let weight = Weight::Dense(Tensor::new(&[[10f32, 1.], [0., 3.]], &Device::Cpu)?);
/// let y = linear::reference(&x, Prologue::None, &[weight], &Epilogue::default())?;
/// assert_eq!(y, [[12., 6.]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference(
    x: &Tensor,
    prologue: Prologue<'_>,
    weights: &[Weight],
    epilogue: &Epilogue<'_>,
) -> Result<Vec<Vec<f64>>> {
    let k = x.dims().last().copied().unwrap_or(1);
    let mut matrix: Vec<Vec<f64>> = Vec::new();
    for weight in weights {
        match weight {
            Weight::Dense(w) => matrix.extend(float64(w)?.chunks(k.max(1)).map(<[f64]>::to_vec)),
            Weight::Packed(w) => {
                for r in 0..w.rows() {
                    let mut row = vec![0f32; k];
                    w.dequantize_row(r, &mut row)?;
                    matrix.push(row.iter().map(|v| f64::from(*v)).collect());
                }
            }
            #[cfg(feature = "cuda")]
            Weight::Blocks(w) => {
                let values = float64(&w.dequantize(DType::F32)?)?;
                matrix.extend(values.chunks(k.max(1)).map(<[f64]>::to_vec));
            }
        }
    }
    let bias = epilogue.bias.map(float64).transpose()?;
    let residuals = epilogue
        .residuals
        .iter()
        .map(|r| float64(r))
        .collect::<Result<Vec<_>>>()?;
    let normed = match prologue {
        Prologue::None => float64(x)?,
        Prologue::RmsNorm { weight, eps } => rms_norm::reference(x, weight, eps)?,
        Prologue::LayerNorm { weight, bias, eps } => layer_norm::reference(x, weight, bias, eps)?,
    };
    let rows = normed
        .chunks(k.max(1))
        .map(<[f64]>::to_vec)
        .collect::<Vec<_>>();
    let finish = |(i, row): (usize, Vec<f64>)| {
        let mut y: Vec<f64> = matrix
            .iter()
            .map(|w| w.iter().zip(&row).map(|(w, v)| w * v).sum())
            .collect();
        if let Some(bias) = &bias {
            y.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
        }
        let mut y = activate(epilogue.activation, y);
        let width = y.len();
        for residual in &residuals {
            y.iter_mut()
                .zip(&residual[i * width..])
                .for_each(|(y, r)| *y += r);
        }
        y
    };
    Ok(rows.into_iter().enumerate().map(finish).collect())
}

fn activate(activation: Activation, y: Vec<f64>) -> Vec<f64> {
    if let Some(gate) = activation.gate() {
        let (first, up) = y.split_at(y.len() / 2);
        let gate = activate(gate, first.to_vec());
        return gate.iter().zip(up).map(|(g, u)| g * u).collect();
    }
    let each = |f: &dyn Fn(f64) -> f64| y.iter().map(|v| f(*v)).collect();
    match activation {
        Activation::Silu => each(&|v| v / (1. + (-v).exp())),
        Activation::Relu => each(&|v| if v < 0. { 0. } else { v }),
        Activation::Relu2 => each(&|v| if v < 0. { 0. } else { v * v }),
        Activation::Gelu => {
            each(&|v| v / 2. * (1. + candle_core::cpu::erf::erf_f64(v / 2f64.sqrt())))
        }
        Activation::GeluTanh => each(&|v| {
            let inner = (2. / std::f64::consts::PI).sqrt() * (v + 0.044715 * v.powi(3));
            v / 2. * (1. + inner.tanh())
        }),
        _ => y,
    }
}
