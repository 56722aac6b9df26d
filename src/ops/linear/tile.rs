//! What a cell of the output is made of: the product of a range of tokens with a range of outputs,
//! and the epilogue that turns a row of it into elements.

use super::{Activation, Weight};
use crate::cpu::grid::TaskGrid;
use crate::cpu::packed::{PackedMatrix, Q8Activations, ROW_GROUP};
use crate::cpu::simd::Level;
use crate::cpu::{dense, math, vector};
use crate::ops::view::{Float, cpu_storage, elements};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Layout, Result, Storage, bail};
use half::{bf16, f16};
use std::borrow::Cow;
use std::ops::{Deref, Range};

/// Keeps a weight readable for as long as the op runs.
pub(super) enum Guard<'a, S> {
    Dense(S, &'a Layout),
    Packed(&'a PackedMatrix),
    #[cfg(feature = "cuda")]
    OnGpu,
}

/// The name of candle's guard of a storage is not public in 0.11.0.
pub(super) fn guard(weight: &Weight) -> Guard<'_, impl Deref<Target = Storage>> {
    match weight {
        Weight::Dense(w) => {
            let (storage, layout) = w.storage_and_layout();
            Guard::Dense(storage, layout)
        }
        Weight::Packed(w) => Guard::Packed(w),
        #[cfg(feature = "cuda")]
        Weight::Blocks(_) => Guard::OnGpu,
    }
}

impl<S: Deref<Target = Storage>> Guard<'_, S> {
    pub fn matrix(&self) -> Result<Matrix<'_>> {
        let (storage, layout): (&CpuStorage, _) = match self {
            Guard::Packed(w) => {
                return Ok(Matrix {
                    rows: w.rows(),
                    values: Values::Packed(w),
                });
            }
            Guard::Dense(storage, layout) => (cpu_storage(storage)?, layout),
            #[cfg(feature = "cuda")]
            Guard::OnGpu => bail!("weights are on a GPU, expected them on the CPU"),
        };
        let values = match storage.dtype() {
            DType::F32 => Values::F32(elements(storage, layout)?),
            DType::F16 => Values::F16(elements(storage, layout)?),
            DType::BF16 => Values::BF16(elements(storage, layout)?),
            other => bail!("weights are {other:?}, expected f32, f16 or bf16"),
        };
        Ok(Matrix {
            rows: layout.dims()[0],
            values,
        })
    }
}

/// One weight as the cores read it.
pub(super) struct Matrix<'a> {
    rows: usize,
    values: Values<'a>,
}

enum Values<'a> {
    F32(Cow<'a, [f32]>),
    F16(Cow<'a, [f16]>),
    BF16(Cow<'a, [bf16]>),
    Packed(&'a PackedMatrix),
}

/// Rows that are multiplied with dense weights.
#[derive(Clone, Copy)]
pub(super) enum Rows<'a> {
    F32(&'a [f32]),
    /// Where all weights are in bf16 too.
    Bf16(&'a dense::Bf16Tokens),
}

/// The products of all rows of x with all weights, to be computed cell by cell.
pub(super) struct Product<'a> {
    pub level: Level,
    /// `[m, k]`, after the prologue.
    pub input: Rows<'a>,
    /// The same, quantized, if a weight needs it.
    pub quantized: Option<&'a Q8Activations>,
    pub k: usize,
    pub matrices: Vec<Matrix<'a>>,
}

impl Product<'_> {
    /// Computes outputs `columns` (counted over all matrices) of `tokens` into `tile`
    /// `[tokens, columns]`.
    pub fn cell(&self, columns: Range<usize>, tokens: Range<usize>, tile: &mut [f32]) {
        if tokens.is_empty() {
            return;
        }
        let stride = columns.len();
        let mut first = 0;
        for matrix in &self.matrices {
            let start = columns.start.max(first);
            let end = columns.end.min(first + matrix.rows);
            if start < end {
                let part = &mut tile[start - columns.start..];
                self.part(
                    matrix,
                    start - first..end - first,
                    tokens.clone(),
                    part,
                    stride,
                );
            }
            first += matrix.rows;
        }
    }

    /// Whether all weights are packed.
    pub fn is_packed(&self) -> bool {
        let mut matrices = self.matrices.iter();
        matrices.all(|matrix| matches!(matrix.values, Values::Packed(_)))
    }

    /// How the product with dense weights is cut into cells.
    pub fn dense_grid(&self, shape: (usize, usize, usize), threads: usize) -> TaskGrid {
        let all_bf16 = self
            .matrices
            .iter()
            .all(|m| matches!(m.values, Values::BF16(_)));
        let x_bf16 = matches!(self.input, Rows::Bf16(_));
        dense::task_grid_at(self.level, [x_bf16, all_bf16], shape, threads)
    }

    fn part(
        &self,
        matrix: &Matrix<'_>,
        rows: Range<usize>,
        tokens: Range<usize>,
        out: &mut [f32],
        stride: usize,
    ) {
        match &matrix.values {
            Values::F32(w) => self.dense(w, rows, tokens, out, stride),
            Values::F16(w) => self.dense(w, rows, tokens, out, stride),
            Values::BF16(w) => match self.input {
                Rows::F32(_) => self.dense(w, rows, tokens, out, stride),
                Rows::Bf16(x) => {
                    let w = &w[rows.start * self.k..rows.end * self.k];
                    x.matmul(self.level, tokens, (w, rows.len()), out, stride);
                }
            },
            Values::Packed(w) => self.packed(w, rows, tokens, out, stride),
        }
    }

    fn dense<T: Float>(
        &self,
        w: &[T],
        rows: Range<usize>,
        tokens: Range<usize>,
        out: &mut [f32],
        stride: usize,
    ) {
        let k = self.k;
        let Rows::F32(x) = self.input else {
            unreachable!("tokens stay in bf16 where all weights are");
        };
        let x = &x[tokens.start * k..tokens.end * k];
        let w = &w[rows.start * k..rows.end * k];
        dense::matmul(self.level, x, tokens.len(), k, w, rows.len(), out, stride);
    }

    fn packed(
        &self,
        w: &PackedMatrix,
        rows: Range<usize>,
        tokens: Range<usize>,
        out: &mut [f32],
        stride: usize,
    ) {
        let Some(x) = self.quantized else {
            unreachable!("activations are quantized whenever a weight is packed");
        };
        let multiply = |rows, out: &mut [f32], stride| {
            // The guards of the op have checked the width, and cells lie inside the matrix.
            if let Err(e) = w.matmul(self.level, rows, x, tokens.clone(), out, stride) {
                unreachable!("{e}");
            }
        };
        let skip = rows.start % ROW_GROUP;
        if skip == 0 {
            return multiply(rows, out, stride);
        }
        // A cell's border inside a group of interleaved rows, as where one matrix's rows do not
        // divide by the group: the whole group is computed and the rows of this cell kept.
        let (n, wide) = (rows.len(), rows.len() + skip);
        let mut group = vec![0f32; tokens.len() * wide];
        multiply(rows.start - skip..rows.end, &mut group, wide);
        for (from, to) in group.chunks_exact(wide).zip(out.chunks_mut(stride)) {
            to[..n].copy_from_slice(&from[skip..]);
        }
    }
}

/// The epilogue.
pub(super) struct Finish<'a, T: Float> {
    pub level: Level,
    pub activation: Activation,
    pub bias: Option<&'a [f32]>,
    /// Each `[m, width]`.
    pub residuals: &'a [Cow<'a, [T]>],
    /// Outputs of one row.
    pub width: usize,
}

impl<T: Float> Finish<'_, T> {
    /// Finishes outputs `columns` of `token`: `row` are their products, `up` those that `row` gates.
    pub fn row(
        &self,
        row: &mut [f32],
        mut up: Option<&mut [f32]>,
        token: usize,
        columns: &Range<usize>,
        target: &Target<T>,
    ) {
        if let Some(bias) = self.bias {
            add(row, &bias[columns.clone()]);
        }
        if let (Some(up), Some(bias)) = (&mut up, self.bias) {
            let gated = columns.start + self.width..columns.end + self.width;
            add(up, &bias[gated]);
        }
        let level = self.level;
        match (self.activation, up) {
            (Activation::Silu, _) => math::silu(level, row),
            (Activation::Gelu, _) => math::gelu_erf(level, row),
            (Activation::GeluTanh, _) => math::gelu_tanh(level, row),
            (Activation::Relu, _) => math::relu(level, row),
            (Activation::Relu2, _) => math::relu2(level, row),
            (Activation::SwiGlu, Some(up)) => math::swiglu(level, row, up),
            (Activation::GeGlu, Some(up)) => math::geglu(level, row, up),
            (Activation::GeGluTanh, Some(up)) => math::geglu_tanh(level, row, up),
            (Activation::Relu2Glu, Some(up)) => math::relu2_glu(level, row, up),
            _ => {}
        }
        let start = token * self.width + columns.start;
        for residual in self.residuals {
            for (y, r) in row.iter_mut().zip(&residual[start..start + columns.len()]) {
                *y += r.to_f32();
            }
        }
        // SAFETY: `start..start + columns.len()` lies in this cell's part of the `m * width`
        // elements that the target was allocated for.
        unsafe { target.write(level, start, row) }
    }
}

fn add(row: &mut [f32], other: &[f32]) {
    for (y, b) in row.iter_mut().zip(other) {
        *y += b;
    }
}

/// Where cells write their elements.
pub(super) struct Target<T>(pub *mut T);

// SAFETY: cells are disjoint, so threads that share the pointer never write the same element.
unsafe impl<T: Send> Sync for Target<T> {}

impl<T: Float> Target<T> {
    /// # Safety
    /// `start..start + row.len()` must lie inside the allocation, and no other thread may write
    /// there.
    unsafe fn write(&self, level: Level, start: usize, row: &[f32]) {
        // SAFETY: the caller's obligation; a tile does not overlap the output.
        unsafe { vector::narrow_all(level, row, self.0.add(start)) };
    }
}
