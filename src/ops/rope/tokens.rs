//! Rotary embedding of tokens that have a position each.

use super::cpu::{Angles, rotate_rows};
use super::{RotaryTables, Rotation, check_tables, rotate};
use crate::ops::view::{check_tensors, dense_on_cuda, float64};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};

const OP: &str = "rope_tokens";

/// Rotates the first R dimensions of each head by the angles of its token's position, as
/// [`rope`](fn@super::rope) does for tokens that follow each other: tokens of several sequences in one batch
/// without padding, in any order.
///
/// * `x`: `[N, H, D]`, f32, f16 or bf16, any layout
/// * `positions`: `[N]`, u32, i32 or i64, on x's device, side by side in memory; each below `tables`' positions
/// * `tables`: `[positions, R / 2]` each with `R <= D`, f32, f16 or bf16
/// * result: contiguous, x's shape and dtype
///
/// Computed in f32 and rounded once. On CUDA the launch reads the positions itself, so that a graph may be
/// replayed with others.
///
/// # Errors
/// If ranks, widths, dtypes or devices do not fit. On the CPU also if a position is negative or past the tables; on
/// CUDA, where that is not known before, such a token's heads are zeros.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{RopeStyle, RotaryTables, rope_tokens};
/// // Position 0 turns nothing, position 1 the only pair by a quarter: (a, b) -> (-b, a).
/// let cos = Tensor::new(&[[1f32], [0.]], &Device::Cpu)?;
/// let sin = Tensor::new(&[[0f32], [1.]], &Device::Cpu)?;
/// let tables = RotaryTables { cos: &cos, sin: &sin, style: RopeStyle::HalfSplit };
/// let x = Tensor::new(&[[[1f32, 2.]], [[3., 4.]]], &Device::Cpu)?;
/// let positions = Tensor::new(&[1u32, 0], &Device::Cpu)?;
/// let y = rope_tokens(&x, &positions, &tables)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [-2., 1., 3., 4.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn rope_tokens(x: &Tensor, positions: &Tensor, tables: &RotaryTables<'_>) -> Result<Tensor> {
    check(x, positions, tables)?;
    check_tensors(OP, [("x", x)])?;
    // A kernel follows any strides but those within a head.
    let packed = x.dims()[2] <= 1 || x.stride()[2] == 1;
    let x = if packed { x.clone() } else { dense_on_cuda(x)? };
    x.apply_op1_no_bwd(&RopeTokens { positions, tables })
}

fn check(x: &Tensor, positions: &Tensor, tables: &RotaryTables<'_>) -> Result<()> {
    let &[tokens, _, head_dim] = x.dims() else {
        bail!("{OP}: x has shape {:?}, expected [N, H, D]", x.shape());
    };
    let RotaryTables { cos, sin, style } = *tables;
    let rotation = Rotation {
        cos,
        sin,
        position: 0,
        style,
    };
    check_tables(OP, &rotation, 0, head_dim, x)?;
    if !matches!(positions.dtype(), DType::U32 | DType::I32 | DType::I64) {
        bail!(
            "{OP}: positions is {:?}, expected u32, i32 or i64",
            positions.dtype()
        );
    }
    if positions.dims() != [tokens] {
        bail!(
            "{OP}: positions has shape {:?}, expected [N] = [{tokens}]",
            positions.shape()
        );
    }
    if tokens > 1 && positions.stride() != [1] {
        bail!("{OP}: the elements of positions have to lie side by side");
    }
    if !positions.device().same_device(x.device()) {
        bail!("{OP}: positions and x are on different devices");
    }
    Ok(())
}

/// The positions on the host.
fn read(positions: &Tensor, tables: &RotaryTables<'_>) -> Result<Vec<u32>> {
    let values: Vec<i64> = match positions.dtype() {
        DType::U32 => positions
            .to_vec1::<u32>()?
            .iter()
            .map(|p| (*p).into())
            .collect(),
        DType::I32 => positions
            .to_vec1::<i32>()?
            .iter()
            .map(|p| (*p).into())
            .collect(),
        _ => positions.to_vec1()?,
    };
    let there = tables.cos.dims()[0];
    let known = |(i, p): (usize, i64)| match u32::try_from(p) {
        Ok(at) if (at as usize) < there => Ok(at),
        _ => bail!("{OP}: positions[{i}] is {p}, cos has {there} positions"),
    };
    values.into_iter().enumerate().map(known).collect()
}

struct RopeTokens<'a> {
    positions: &'a Tensor,
    tables: &'a RotaryTables<'a>,
}

impl CustomOp1 for RopeTokens<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, heads, _) = layout.shape().dims3()?;
        let angles = Angles::of(self.tables, read(self.positions, self.tables)?)?;
        rotate_rows(x, layout, self.tables.style, &angles, |row| row / heads)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        super::cuda::forward_tokens(x, layout, self.positions, self.tables)
    }
}

/// The plain form of [`rope_tokens`]: float64, one element at a time, in x's row-major order.
///
/// # Errors
/// As [`rope_tokens`] on the CPU, or if a tensor cannot be read as float64.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_fused::ops::rope::{RopeStyle, reference_tokens};
/// use candle_fused::ops::RotaryTables;
/// // Position 0 turns nothing, position 1 the only pair by a quarter: (a, b) -> (-b, a).
/// let (cos, sin) = (Tensor::new(&[[1f32], [0.]], &Device::Cpu)?, Tensor::new(&[[0f32], [1.]], &Device::Cpu)?);
/// let tables = RotaryTables { cos: &cos, sin: &sin, style: RopeStyle::HalfSplit };
/// let x = Tensor::new(&[[[1f32, 2.]], [[3., 4.]]], &Device::Cpu)?;
/// let positions = Tensor::new(&[1u32, 0], &Device::Cpu)?;
/// assert_eq!(reference_tokens(&x, &positions, &tables)?, [-2., 1., 3., 4.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference_tokens(
    x: &Tensor,
    positions: &Tensor,
    tables: &RotaryTables<'_>,
) -> Result<Vec<f64>> {
    check(x, positions, tables)?;
    let (_, heads, head_dim) = x.dims3()?;
    let positions = read(positions, tables)?;
    let mut values = float64(x)?;
    rotate(&mut values, tables, head_dim, |row| {
        positions[row / heads] as usize
    })?;
    Ok(values)
}
