//! `kernels/attention/decode_with_gemv.cu`: a step of attention beside a product that does not need it, in one launch.

use super::OP;
use super::problem::{Case, Companion, Operands, StepShape};
use super::split::Split;
use crate::cuda::abi::{DECODE_WITH_GEMV, DECODE_WITH_GEMV_KEYS, DecodeWithGemvParams};
use crate::cuda::{Grid, Launcher, Module, UNALIGNED, fatbin};
use crate::ops::flash_attention::cuda::{Kernel, Planned, head_sizes};
use crate::ops::linear::cuda::{Gemv, gemv_dense_pipelined as pipelined};
use candle_core::{DType, Result, bail};

static MODULE: Module = Module::new(
    "decode_with_gemv",
    fatbin!("decode_with_gemv"),
    &[
        "flash_decoding_with_gemv_d64_f16",
        "flash_decoding_with_gemv_d64_bf16",
        "flash_decoding_with_gemv_d80_f16",
        "flash_decoding_with_gemv_d80_bf16",
        "flash_decoding_with_gemv_d96_f16",
        "flash_decoding_with_gemv_d96_bf16",
        "flash_decoding_with_gemv_d128_f16",
        "flash_decoding_with_gemv_d128_bf16",
    ],
);

/// Head sizes that there are kernels for.
pub(super) const HEAD_SIZES: [usize; DECODE_WITH_GEMV.len()] = head_sizes!(DECODE_WITH_GEMV);

/// A kernel, its grid, and those of both of its halves.
#[derive(Debug)]
struct Together {
    index: usize,
    split: Split,
    attention: Grid,
    grid: Grid,
    /// Of the product's pipelines.
    stages: usize,
}

pub(super) fn split(shape: &StepShape) -> Option<Split> {
    let fits = HEAD_SIZES.contains(&shape.head_dim);
    fits.then(|| Split::on_tensor_cores(shape, DECODE_WITH_GEMV_KEYS))
}

/// Of the product, beside so many that attend: two fit a multiprocessor, and more of the product's would
/// begin when attention ends, and end last.
fn product_blocks(sms: u32, attending: u32) -> usize {
    (2 * sms).saturating_sub(attending).max(sms / 2) as usize
}

/// A step of one sequence, and a product of one row and one matrix of the step's dtype.
pub(super) fn plan(case: &Case) -> Planned<Operands> {
    let (shape, sms) = (&case.shape, case.gpu.sms);
    let product = case.product.as_ref();
    let (_, product) = product.ok_or("there is no product for the same launch")?;
    if shape.paged {
        return Err("keys and values are in pages");
    }
    let place = HEAD_SIZES.iter().position(|dim| *dim == shape.head_dim);
    let (Some(place), Some(split)) = (place, split(shape)) else {
        return Err("it is for other head sizes");
    };
    if product.dense() != Some(shape.cache_dtype) {
        return Err("the product's weights are of another dtype");
    }
    if product.k_split.is_some() {
        return Err("the product has two matrices along K");
    }
    if !case.aligned {
        return Err(UNALIGNED);
    }
    let attention = split.grid(&case.gpu, shape)?;
    let attending: u32 = attention.blocks.iter().product();
    let spread = |attending| {
        let room = pipelined::Room::beside(product_blocks(sms, attending));
        pipelined::spread(product, room)
    };
    // It has to fit into the least room, too.
    spread(u32::MAX)?;
    let (of_product, stages) = spread(attending)?;
    let grid = Grid::new(
        [attending + of_product.blocks[0], 1, 1],
        of_product.threads,
        of_product.shared.max(attention.shared),
    );
    Ok(Box::new(Together {
        index: 2 * place + usize::from(shape.cache_dtype == DType::BF16),
        split,
        attention,
        grid,
        stages,
    }))
}

impl Kernel<Operands> for Together {
    fn entry(&self) -> &'static str {
        MODULE.names(self.index).1
    }

    fn grid(&self) -> Grid {
        self.grid
    }

    fn details(&self) -> String {
        let attending: u32 = self.attention.blocks.iter().product();
        let keys = self.split.keys;
        format!(
            "{attending} attend, {keys} keys a warp, {} stages",
            self.stages
        )
    }

    unsafe fn run(&self, launcher: &Launcher, operands: &Operands) -> Result<()> {
        let Some(Companion::Independent(independent)) = &operands.companion else {
            bail!("{OP}: there is no product beside the step");
        };
        let mut product = Gemv::of(&independent.product)?;
        product.stages = self.stages as u32;
        let both = DecodeWithGemvParams {
            attention: operands.step.params(launcher, self.split.warps),
            product,
            blocks: self.attention.blocks,
            ready: u32::from(independent.ready),
        };
        // SAFETY: the kernel takes `DecodeWithGemvParams`; the addresses are the caller's.
        unsafe {
            launcher
                .moving(independent.product.weight_bytes() as u64)
                .run(&MODULE, self.index, self.grid, &both)
        }
    }
}
