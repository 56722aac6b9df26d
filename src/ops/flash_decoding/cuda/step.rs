//! `kernels/attention/decode.cu`: a step by itself.

use super::problem::{Case, Operands, StepShape};
use super::split::Split;
use crate::cuda::abi::{DECODING_LANES, DECODING_LANES_KEYS, DECODING_MMA};
use crate::cuda::{Grid, Launcher, Module, UNALIGNED, fatbin};
use crate::ops::flash_attention::cuda::{Kernel, Planned, head_sizes};
use candle_core::{DType, Result};

/// In the order of the forms: those for tensor cores in f16 and bf16, then those for everything else.
static MODULE: Module = Module::new(
    "decode",
    fatbin!("decode"),
    &[
        "flash_decoding_d64_f16",
        "flash_decoding_d64_bf16",
        "flash_decoding_d80_f16",
        "flash_decoding_d80_bf16",
        "flash_decoding_d96_f16",
        "flash_decoding_d96_bf16",
        "flash_decoding_d128_f16",
        "flash_decoding_d128_bf16",
        "flash_decoding_d256_f16",
        "flash_decoding_d256_bf16",
        "flash_decoding_any64",
        "flash_decoding_any128",
        "flash_decoding_any256",
    ],
);

/// The same over keys and values in pages.
static PAGED: Module = Module::new(
    "decode_paged",
    fatbin!("decode_paged"),
    &[
        "flash_decoding_paged_d64_f16",
        "flash_decoding_paged_d64_bf16",
        "flash_decoding_paged_d80_f16",
        "flash_decoding_paged_d80_bf16",
        "flash_decoding_paged_d96_f16",
        "flash_decoding_paged_d96_bf16",
        "flash_decoding_paged_d128_f16",
        "flash_decoding_paged_d128_bf16",
        "flash_decoding_paged_d256_f16",
        "flash_decoding_paged_d256_bf16",
        "flash_decoding_paged_any64",
        "flash_decoding_paged_any128",
        "flash_decoding_paged_any256",
    ],
);

/// Head sizes that tensor cores have a kernel for.
pub(super) const MMA_HEAD_SIZES: [usize; DECODING_MMA.len()] = head_sizes!(DECODING_MMA);

/// The widest head of the others.
pub(super) const WIDEST: usize = DECODING_LANES[DECODING_LANES.len() - 1].dim;

/// A kernel and its grid.
#[derive(Debug)]
struct Alone {
    module: &'static Module,
    index: usize,
    split: Split,
    /// Of keys, that a block takes before another joins.
    tiles: usize,
    grid: Grid,
}

/// The place of a head size's kernel for tensor cores.
fn mma_place(shape: &StepShape) -> Option<usize> {
    let mut forms = DECODING_MMA.iter();
    forms.position(|form| form.dim == shape.head_dim)
}

pub(super) fn mma_split(shape: &StepShape) -> Option<Split> {
    let keys = DECODING_MMA[mma_place(shape)?].keys;
    Some(Split::on_tensor_cores(shape, keys))
}

/// On tensor cores.
pub(super) fn mma(case: &Case) -> Planned<Operands> {
    if !case.aligned {
        return Err(UNALIGNED);
    }
    let bf16 = usize::from(case.shape.cache_dtype == DType::BF16);
    let index = mma_place(&case.shape).map(|place| 2 * place + bf16);
    Alone::plan(case, index, mma_split(&case.shape))
}

/// The place of the narrowest of the others that has room for a head.
fn plain_place(shape: &StepShape) -> Option<usize> {
    let mut forms = DECODING_LANES.iter();
    forms.position(|form| shape.head_dim <= form.dim)
}

pub(super) fn plain_split(shape: &StepShape) -> Option<Split> {
    let form = DECODING_LANES[plain_place(shape)?];
    Some(Split {
        heads: form.heads,
        warps: form.warps,
        keys: DECODING_LANES_KEYS,
        queries: 0,
    })
}

/// By multiply-adds in f32.
pub(super) fn plain(case: &Case) -> Planned<Operands> {
    let index = plain_place(&case.shape).map(|place| 2 * DECODING_MMA.len() + place);
    Alone::plan(case, index, plain_split(&case.shape))
}

impl Alone {
    fn plan(case: &Case, index: Option<usize>, split: Option<Split>) -> Planned<Operands> {
        let (Some(index), Some(split)) = (index, split) else {
            return Err("it is for other head sizes");
        };
        let grid = split.grid(&case.gpu, &case.shape)?;
        Ok(Box::new(Self {
            module: if case.shape.paged { &PAGED } else { &MODULE },
            index,
            split,
            tiles: split.tiles(&case.gpu, &case.shape),
            grid,
        }))
    }
}

impl Kernel<Operands> for Alone {
    fn entry(&self) -> &'static str {
        self.module.names(self.index).1
    }

    fn grid(&self) -> Grid {
        self.grid
    }

    fn details(&self) -> String {
        let Split { heads, keys, .. } = self.split;
        format!("up to {heads} heads a block, {keys} keys a warp")
    }

    unsafe fn run(&self, launcher: &Launcher, operands: &Operands) -> Result<()> {
        let params = operands.step.params(launcher, self.tiles);
        // SAFETY: the kernel takes `DecodingParams`; the addresses are the caller's.
        unsafe { launcher.run(self.module, self.index, self.grid, &params) }
    }
}
