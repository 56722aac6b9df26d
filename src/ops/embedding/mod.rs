//! Token embeddings on a GPU: the rows of a table that ids name.

pub(crate) mod cuda;

use super::view::check_tensors;
use crate::cuda::BlockMatrix;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};

const OP: &str = "embedding";

/// A table on a GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Table<'a> {
    /// `[V, H]`, f32, f16 or bf16.
    Dense(&'a Tensor),
    /// Quantized, `[V, H]`, whose rows come out in f32, f16 or bf16.
    Blocks(&'a BlockMatrix, DType),
}

/// Rows `ids` (u32, any shape) of the table: the shape of the ids and the width. An id past the table
/// gives a row of NaN.
///
/// # Errors
/// If the ids are not u32 on the table's device.
pub(crate) fn embedding(table: Table<'_>, ids: &Tensor) -> Result<Tensor> {
    let device = match table {
        Table::Dense(t) => t.device(),
        Table::Blocks(t, _) => t.device(),
    };
    if !ids.device().same_device(device) {
        bail!(
            "{OP}: ids are on {:?}, the table on {:?}",
            ids.device().location(),
            device.location()
        );
    }
    if let Table::Dense(table) = table {
        check_tensors(OP, [("the table", table)])?;
    }
    ids.contiguous()?.apply_op1_no_bwd(&Embedding { table })
}

struct Embedding<'a> {
    table: Table<'a>,
}

impl CustomOp1 for Embedding<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("{OP}: expected ids on a CUDA device")
    }

    fn cuda_fwd(&self, ids: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda::forward(self.table, ids, layout)
    }
}
