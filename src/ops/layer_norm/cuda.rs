//! The CUDA form: each row read once, kept in registers and written once.

use super::OP;
use crate::cuda::abi::LayerNormParams;
use crate::cuda::{Address, Launcher, Module, Rows, address, address_of, alloc, fatbin};
use crate::ops::view::{dtype_index, float};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, Tensor};

static MODULE: Module = Module::new(
    "layer_norm",
    fatbin!("layer_norm"),
    &["layer_norm_f32", "layer_norm_f16", "layer_norm_bf16"],
);

/// One call on raw addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerNormAt {
    /// `[rows, width]`.
    pub x: Address,
    /// `[rows, width]`, or 0 without a residual.
    pub residual: Address,
    /// `[width]`.
    pub weight: Address,
    /// `[width]`, or 0 without a bias.
    pub bias: Address,
    /// With a residual, where x + residual goes; may be x or the residual.
    pub sum: Address,
    /// `[rows, width]`.
    pub y: Address,
    pub rows: usize,
    pub width: usize,
    pub eps: f32,
    pub dtype: DType,
}

impl LayerNormAt {
    fn addresses(&self) -> [Address; 6] {
        [
            self.x,
            self.residual,
            self.weight,
            self.bias,
            self.sum,
            self.y,
        ]
    }
}

/// Launches the norm of `at.rows` rows.
///
/// # Safety
/// Each address holds as many elements of the dtype as its field says, until the stream has passed
/// the launch.
pub(crate) unsafe fn launch(launcher: &Launcher, at: &LayerNormAt) -> Result<()> {
    float(OP, "x", at.dtype)?;
    let rows = Rows::new(OP, at.rows, at.width, at.dtype, &at.addresses())?;
    let params = LayerNormParams {
        x: at.x,
        residual: at.residual,
        weight: at.weight,
        bias: at.bias,
        sum: at.sum,
        y: at.y,
        rows: rows.rows,
        width: rows.width,
        warps: rows.warps,
        eps: at.eps,
        vectors: rows.vectors.into(),
    };
    // SAFETY: the kernel takes `LayerNormParams`, the addresses are the caller's.
    unsafe { launcher.run(&MODULE, dtype_index(at.dtype), rows.grid(), &params) }
}

pub(super) fn forward(
    x: &CudaStorage,
    layout: &Layout,
    op: &super::LayerNorm<'_>,
) -> Result<(CudaStorage, Shape)> {
    let weight = op.weight.contiguous()?;
    let bias = op.bias.map(Tensor::contiguous).transpose()?;
    let residual = op.residual.map(Tensor::contiguous).transpose()?;
    let (count, width) = (layout.shape().elem_count(), weight.elem_count());
    let copies = if residual.is_some() { 2 } else { 1 };
    let out = alloc(OP, x.device(), x.dtype(), copies * count)?;
    let start = address(&out, &Layout::contiguous(copies * count))?;
    let bytes = (count * x.dtype().size_in_bytes()) as u64;
    let (sum, y) = match residual {
        Some(_) => (start, start + bytes),
        None => (0, start),
    };
    let at = LayerNormAt {
        x: address(x, layout)?,
        residual: residual.as_ref().map_or(Ok(0), address_of)?,
        weight: address_of(&weight)?,
        bias: bias.as_ref().map_or(Ok(0), address_of)?,
        sum,
        y,
        rows: count / width,
        width,
        eps: op.eps,
        dtype: x.dtype(),
    };
    trace::record(OP, || {
        let rows = Rows::new(OP, at.rows, width, at.dtype, &at.addresses());
        let path = rows.map_or_else(|e| e.to_string(), |rows| rows.path());
        let residual = if at.residual == 0 { "" } else { "+residual " };
        format!("cuda {residual}{path}")
    });
    // SAFETY: the guards have checked the shapes; the tensors live through the call, and the
    // stream that runs the kernel is the one that frees them.
    unsafe { launch(&Launcher::new(x.device())?, &at)? };
    Ok((out, op.shape(layout)))
}
