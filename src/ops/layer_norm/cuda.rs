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
    /// `[width]`.
    pub weight: Address,
    /// `[width]`, or 0 without a bias.
    pub bias: Address,
    /// `[rows, width]`.
    pub y: Address,
    pub rows: usize,
    pub width: usize,
    pub eps: f32,
    pub dtype: DType,
}

impl LayerNormAt {
    fn addresses(&self) -> [Address; 4] {
        [self.x, self.weight, self.bias, self.y]
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
        weight: at.weight,
        bias: at.bias,
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
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f32,
) -> Result<(CudaStorage, Shape)> {
    let weight = weight.contiguous()?;
    let bias = bias.map(Tensor::contiguous).transpose()?;
    let (count, width) = (layout.shape().elem_count(), weight.elem_count());
    let out = alloc(OP, x.device(), x.dtype(), count)?;
    let at = LayerNormAt {
        x: address(x, layout)?,
        weight: address_of(&weight)?,
        bias: bias.as_ref().map_or(Ok(0), address_of)?,
        y: address(&out, &Layout::contiguous(count))?,
        rows: count / width,
        width,
        eps,
        dtype: x.dtype(),
    };
    trace::record(OP, || {
        let rows = Rows::new(OP, at.rows, width, at.dtype, &at.addresses());
        format!(
            "cuda {}",
            rows.map_or_else(|e| e.to_string(), |rows| rows.path())
        )
    });
    // SAFETY: the guards have checked the shapes; the tensors live through the call, and the
    // stream that runs the kernel is the one that frees them.
    unsafe { launch(&Launcher::new(x.device())?, &at)? };
    Ok((out, layout.shape().clone()))
}
