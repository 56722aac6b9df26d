//! Checks of the arguments, and the CustomOp that candle calls on the tensors' device. On CUDA it takes the operands'
//! addresses, chooses the kernel by the table, and launches it.

use super::cpu;
use super::op::LinearOp;
use super::{Activation, ActivationBits, Epilogue, Prologue, Weight};
use crate::ops::view::{check_tensors, dense_on_cuda, float};
use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor, bail};
use std::fmt::Display;
#[cfg(feature = "cuda")]
use {
    super::cuda::{Owned, Product, ProductAt},
    crate::cuda::{Launcher, Scratch, address, alloc},
    crate::trace,
    candle_core::CudaStorage,
    candle_core::backend::BackendStorage,
};

impl CustomOp1 for LinearOp<'_> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        cpu::forward(self, x, layout)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let device = x.device();
        let mut dims = layout.dims().to_vec();
        let k = dims.pop().unwrap_or(1);
        let m = dims.iter().product::<usize>();
        dims.push(self.width());
        let out = alloc(self.name, device, x.dtype(), m * self.width())?;
        if m * self.width() == 0 {
            return Ok((out, Shape::from(dims)));
        }
        let owned = Owned::new(self)?;
        let at = ProductAt {
            x: address(x, layout)?,
            norm: owned.norm()?,
            bias: owned.bias()?,
            activation: self.epilogue.activation,
            residuals: owned.residuals()?,
            out: address(&out, &Layout::contiguous(m * self.width()))?,
            stride: self.width(),
            m,
            k,
            x_dtype: x.dtype(),
            x_bits: self.bits,
            out_dtype: x.dtype(),
        };
        let launcher = Launcher::new(device)?;
        let product = Product::new(&launcher, &owned.weights, &at)?;
        // SAFETY: the guards have checked that the tensors have these shapes and lie on the device; the
        // stream that runs the kernels is the one that frees them.
        unsafe { product.run(&launcher, &mut Scratch::new(device))? };
        trace::record(self.name, || format!("cuda {} {product}", self.path()));
        Ok((out, Shape::from(dims)))
    }
}

/// Checks every argument and runs the op.
pub(crate) fn launch(
    name: &'static str,
    x: &Tensor,
    prologue: Prologue<'_>,
    weights: &[Weight],
    epilogue: Epilogue<'_>,
    bits: ActivationBits,
) -> Result<Tensor> {
    let Some(&k) = x.dims().last() else {
        bail!("{name}: x is a scalar, expected [.., K]");
    };
    float(name, "x", x.dtype())?;
    let rows = check_weights(name, x.device(), k, weights)?;
    if let Prologue::RmsNorm { weight, .. } | Prologue::LayerNorm { weight, .. } = prologue {
        vector(name, "norm_weight", weight, k, x)?;
    }
    if let Prologue::LayerNorm {
        bias: Some(bias), ..
    } = prologue
    {
        vector(name, "norm_bias", bias, k, x)?;
    }
    if let Some(bias) = epilogue.bias {
        vector(name, "bias", bias, rows, x)?;
    }
    if epilogue.activation.gate().is_some() {
        let rows: Vec<_> = weights.iter().map(Weight::rows).collect();
        check_gated(name, epilogue.activation, &rows)?;
    }
    let op = LinearOp {
        name,
        prologue,
        weights,
        epilogue,
        bits,
        rows,
    };
    check_residuals(&op, x)?;
    check_untracked(&op, x)?;
    dense_on_cuda(x)?.apply_op1_no_bwd(&op)
}

/// Checks that matrices with these rows are a gate and what it gates.
pub(crate) fn check_gated(name: &str, activation: Activation, rows: &[usize]) -> Result<()> {
    match *rows {
        [gate, up] if gate == up => Ok(()),
        [both] if both.is_multiple_of(2) => Ok(()),
        _ => bail!(
            "{name}: {} over matrices of {rows:?} rows, expected a gate and an up matrix of as many \
             rows, or one of both",
            format!("{activation:?}").to_lowercase()
        ),
    }
}

fn check_untracked(op: &LinearOp<'_>, x: &Tensor) -> Result<()> {
    let weights = op.weights.iter().filter_map(|weight| match weight {
        Weight::Dense(w) => Some(("weights", w)),
        _ => None,
    });
    let norm = match op.prologue {
        Prologue::None => [None, None],
        Prologue::RmsNorm { weight, .. } => [Some(weight), None],
        Prologue::LayerNorm { weight, bias, .. } => [Some(weight), bias],
    };
    let norm = norm.into_iter().flatten().map(|t| ("the norm", t));
    let residuals = op.epilogue.residuals.iter().map(|r| ("residuals", *r));
    let bias = op.epilogue.bias.map(|b| ("bias", b));
    let rest = norm.chain(residuals).chain(bias).chain([("x", x)]);
    check_tensors(op.name, weights.chain(rest))
}

fn check_weights(name: &str, device: &Device, k: usize, weights: &[Weight]) -> Result<usize> {
    if weights.is_empty() {
        bail!("{name}: weights is empty, expected one or more matrices");
    }
    let mut rows = 0;
    for (i, weight) in weights.iter().enumerate() {
        match weight {
            Weight::Dense(w) => {
                float(name, &format!("weights[{i}]"), w.dtype())?;
                if w.rank() != 2 {
                    bail!(
                        "{name}: weights[{i}] has shape {:?}, expected [N, {k}]",
                        w.shape()
                    );
                }
                if !w.device().same_device(device) {
                    bail!(
                        "{name}: weights[{i}] is on {:?}, x on {device:?}",
                        w.device().location()
                    );
                }
            }
            Weight::Packed(_) if !device.is_cpu() => {
                bail!("{name}: weights[{i}] is packed for the CPU, x is on {device:?}");
            }
            Weight::Packed(_) => {}
            #[cfg(feature = "cuda")]
            Weight::Blocks(w) if !w.device().same_device(device) => {
                bail!(
                    "{name}: weights[{i}] holds {} on {:?}, x is on {:?}",
                    w.format(),
                    w.device().location(),
                    device.location()
                );
            }
            #[cfg(feature = "cuda")]
            Weight::Blocks(_) => {}
        }
        if weight.cols() != k {
            let turned = match weight.rows() == k {
                true => "; weights are [N, K], this one may be transposed",
                false => "",
            };
            bail!(
                "{name}: weights[{i}] is [{}, {}], but x's last dimension is {k}{turned}",
                weight.rows(),
                weight.cols()
            );
        }
        if weight.rows() == 0 {
            bail!(
                "{name}: weights[{i}] is [0, {k}], expected at least one row (a quantized layer's weight \
                 is no tensor)"
            );
        }
        rows += weight.rows();
    }
    Ok(rows)
}

fn vector(name: &str, argument: &str, t: &Tensor, len: usize, x: &Tensor) -> Result<()> {
    if t.dims() != [len] {
        bail!(
            "{name}: {argument} has shape {:?}, expected [{len}]",
            t.shape()
        );
    }
    same_kind(name, argument, t, x)
}

fn same_kind(name: &str, argument: impl Display, t: &Tensor, x: &Tensor) -> Result<()> {
    if t.dtype() != x.dtype() {
        bail!(
            "{name}: {argument} is {:?}, x is {:?}",
            t.dtype(),
            x.dtype()
        );
    }
    if !t.device().same_device(x.device()) {
        bail!("{name}: {argument} and x are on different devices");
    }
    Ok(())
}

fn check_residuals(op: &LinearOp<'_>, x: &Tensor) -> Result<()> {
    let name = op.name;
    if op.epilogue.residuals.len() > 2 {
        bail!(
            "{name}: {} residuals, expected at most two",
            op.epilogue.residuals.len()
        );
    }
    let (outer, _) = x.dims().split_at(x.rank() - 1);
    for (i, residual) in op.epilogue.residuals.iter().enumerate() {
        if residual.dims().split_last() != Some((&op.width(), outer)) {
            bail!(
                "{name}: residuals[{i}] has shape {:?}, expected {:?}",
                residual.shape(),
                [outer, &[op.width()]].concat()
            );
        }
        same_kind(name, format_args!("residuals[{i}]"), residual, x)?;
    }
    Ok(())
}
