//! What the tensor-core kernels for INT4 in groups of 128 share: bf16 rows of x, and one launch for each group of them.

use super::super::plan::Kernel;
use super::super::problem::Operands;
use super::gemm_dequantized::{operand_b, operand_b_room};
use super::gemv::Gemv;
use super::tensor_map::rows_map;
use crate::cuda::abi::{GemmM16Params, GemmM16TmaParams, NORM_NONE};
use crate::cuda::{Grid, Launcher, Module, Scratch};
use crate::ops::view::dtype_index;
use candle_core::{DType, Result};

/// How the kernels carry out a product: one launch for each group of rows of x.
#[derive(Debug)]
pub(super) struct GemmPlan {
    pub module: &'static Module,
    /// The kernel's place in the module.
    pub index: usize,
    /// Rows of x of a launch.
    pub rows: usize,
    /// Warps that share an output.
    pub split_k: usize,
    pub params: FormParams,
    pub grid: Grid,
}

/// A kernel's parameters beside the product.
#[derive(Clone, Copy, Debug)]
pub(super) enum FormParams {
    /// Blocks of a cluster.
    M16(usize),
    /// Likewise, where x comes by TMA.
    M16Tma(usize),
}

impl GemmPlan {
    /// # Safety
    /// As [`Kernel::run`].
    unsafe fn launch(&self, launcher: &Launcher, product: Gemv) -> Result<()> {
        let of = |cluster_size: usize| GemmM16Params {
            product,
            cluster_size: cluster_size as u32,
        };
        // SAFETY: the kernels take these structs; the addresses are the caller's.
        unsafe {
            match self.params {
                FormParams::M16(cluster_size) => {
                    launcher.run(self.module, self.index, self.grid, &of(cluster_size))
                }
                FormParams::M16Tma(cluster_size) => {
                    let shape = [product.m, product.k].map(|n| n as usize);
                    let params = GemmM16TmaParams {
                        x: rows_map(product.prologue.x, shape)?,
                        m16: of(cluster_size),
                    };
                    launcher.run(self.module, self.index, self.grid, &params)
                }
            }
        }
    }
}

impl Kernel for GemmPlan {
    fn entry(&self) -> &'static str {
        self.module.names(self.index).1
    }

    fn grid(&self) -> Option<Grid> {
        Some(self.grid)
    }

    fn details(&self) -> String {
        format!("split {}, {} rows a launch", self.split_k, self.rows)
    }

    fn scratch(&self, operands: &Operands) -> usize {
        operand_b_room(&operands.at, 1)
    }

    unsafe fn run(
        &self,
        launcher: &Launcher,
        scratch: &mut Scratch,
        operands: &Operands,
    ) -> Result<()> {
        let at = &operands.at;
        let mut product = Gemv::of(operands)?;
        // SAFETY: the caller's.
        let x = unsafe { operand_b(launcher, scratch, at, 1)? };
        product.prologue.norm = NORM_NONE as i32;
        product.prologue.dtype = dtype_index(DType::BF16) as i32;
        product.split_k = self.split_k as u32;
        for first in (0..at.m).step_by(self.rows) {
            product.set_rows(operands, first, (at.m - first).min(self.rows));
            product.prologue.x = x + (2 * first * at.k) as u64;
            let launcher = launcher.moving(operands.weight_bytes() as u64);
            // SAFETY: the caller's.
            unsafe { self.launch(&launcher, product)? };
        }
        Ok(())
    }
}
