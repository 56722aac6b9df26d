//! A step of attention beside a product that does not need it, in one launch.

use super::{OP, Prepared, Step};
use crate::cuda::abi::{DECODING_BESIDE, DECODING_BESIDE_KEYS, DecodingBesideParams};
use crate::cuda::{Grid, Launcher, Module, fatbin};
use crate::ops::linear::cuda::{Case, Gemv, Operands, gemv_dense_pipelined};
use candle_core::{DType, Result, bail};

static MODULE: Module = Module::new(
    "decode_with_gemv",
    fatbin!("decode_with_gemv"),
    &[
        "decoding_beside_d64_f16",
        "decoding_beside_d64_bf16",
        "decoding_beside_d80_f16",
        "decoding_beside_d80_bf16",
        "decoding_beside_d96_f16",
        "decoding_beside_d96_bf16",
        "decoding_beside_d128_f16",
        "decoding_beside_d128_bf16",
    ],
);

/// Attention of one token and a product of one row that reads nothing of it, nor writes what it reads.
#[derive(Clone, Debug)]
pub(crate) struct Beside {
    pub step: Step,
    product: Operands,
    case: Case,
    /// Whether the product need not wait for the kernel in front, which writes nothing that it reads and
    /// begins when all in front of it are complete.
    pub ready: bool,
}

impl Beside {
    /// None if there is no kernel for the two.
    pub fn new(launcher: &Launcher, step: Step, product: Operands, ready: bool) -> Option<Self> {
        let shape = &step.shape;
        let case = product.case(launcher);
        let sixteen = [DType::F16, DType::BF16].contains(&shape.cache_dtype);
        let alike = case.dense() == Some(shape.cache_dtype) && shape.dtype == shape.cache_dtype;
        let both = Self {
            step,
            product,
            case,
            ready,
        };
        let fits = launcher.gpu.arch >= 80
            && sixteen
            && alike
            && step.is_aligned()
            && shape.sequences == 1
            && DECODING_BESIDE
                .iter()
                .any(|form| form.dim == shape.head_dim)
            && both
                .spread(Self::blocks(launcher.gpu.sms, u32::MAX))
                .is_some();
        fits.then_some(both)
    }

    /// The product on at most so many blocks: the launch's grid and the stages of its pipelines.
    fn spread(&self, blocks: usize) -> Option<(Grid, usize)> {
        let one = self.product.second.is_none();
        let room = gemv_dense_pipelined::Room::beside(blocks);
        one.then(|| gemv_dense_pipelined::spread(&self.case, room).ok())?
    }

    /// Of the product, beside so many that attend: two fit a multiprocessor, and more of the product's would
    /// begin when attention ends, and end last.
    fn blocks(sms: u32, attending: u32) -> usize {
        (2 * sms).saturating_sub(attending).max(sms / 2) as usize
    }

    /// Launches both.
    ///
    /// # Errors
    /// If the shape is past what the kernel takes.
    ///
    /// # Safety
    /// As for a step and for a product of few rows.
    pub unsafe fn launch(&self, launcher: &Launcher) -> Result<()> {
        let Prepared {
            shares,
            params,
            blocks,
        } = Prepared::new(launcher, &self.step, Some(DECODING_BESIDE_KEYS))?;
        let dim = DECODING_BESIDE
            .iter()
            .position(|form| form.dim == self.step.shape.head_dim);
        let attending: u32 = blocks.iter().product();
        let room = Self::blocks(launcher.gpu.sms, attending);
        let (Some(dim), Some((grid, stages))) = (dim, self.spread(room)) else {
            bail!("{OP}: no kernel for a step of this shape beside a product");
        };
        let mut product = Gemv::of(&self.product)?;
        product.stages = stages as u32;
        let bf16 = self.step.shape.cache_dtype == DType::BF16;
        let both = DecodingBesideParams {
            attention: params,
            product,
            blocks,
            ready: u32::from(self.ready),
        };
        let grid = Grid::new(
            [attending + grid.blocks[0], 1, 1],
            grid.threads,
            grid.shared.max(shares.shared as u32),
        );
        // SAFETY: the kernel takes `DecodingBesideParams`; the addresses are the caller's.
        unsafe {
            launcher.moving(self.product.weight_bytes() as u64).run(
                &MODULE,
                2 * dim + usize::from(bf16),
                grid,
                &both,
            )
        }
    }
}
