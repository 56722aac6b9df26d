//! `kernels/attention/decode.cu`, `decode_paged.cu` and `decode_pipelined.cu`: a step by itself.

use super::problem::{Case, Operands, StepShape};
use super::split::{Split, TURNS};
use crate::cuda::abi::{
    DECODING_LANES, DECODING_LANES_KEYS, DECODING_MMA, DECODING_PIPELINED, DecodingPipelined,
    MAX_HEADS,
};
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

/// For many sequences in pages.
static PIPELINED: Module = Module::new(
    "decode_pipelined",
    fatbin!("decode_pipelined"),
    &[
        "flash_decoding_pipelined_d64_f16",
        "flash_decoding_pipelined_d64_bf16",
        "flash_decoding_pipelined_d128_f16",
        "flash_decoding_pipelined_d128_bf16",
    ],
);

/// Head sizes of these.
pub(super) const PIPELINED_HEAD_SIZES: [usize; DECODING_PIPELINED.len()] =
    head_sizes!(DECODING_PIPELINED);

/// Keys of a sequence before a second block has some of them.
const PIPELINED_KEYS: usize = 512;

/// The same over codes, for tensor cores: in e4m3 and in whole numbers.
static CODES: Module = Module::new(
    "decode_paged_codes",
    fatbin!("decode_paged_codes"),
    &[
        "flash_decoding_paged_d64_fp8",
        "flash_decoding_paged_d64_int8",
        "flash_decoding_paged_d80_fp8",
        "flash_decoding_paged_d80_int8",
        "flash_decoding_paged_d96_fp8",
        "flash_decoding_paged_d96_int8",
        "flash_decoding_paged_d128_fp8",
        "flash_decoding_paged_d128_int8",
        "flash_decoding_paged_d256_fp8",
        "flash_decoding_paged_d256_int8",
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
    // Of each head size one in f16 or e4m3, and one in bf16 or whole numbers.
    let second = matches!(case.shape.cache_dtype, DType::BF16 | DType::U8);
    let index = mma_place(&case.shape).map(|place| 2 * place + usize::from(second));
    Alone::plan(case, index, mma_split(&case.shape))
}

/// Bytes of shared memory: the warps' rings of stages, and behind them queries, the new key and value, and a row for
/// each warp.
fn pipelined_shared(form: DecodingPipelined) -> usize {
    let pitch = 2 * form.dim + 16;
    let rings = form.warps * form.stages * 2 * form.keys * pitch;
    rings + form.dim / 16 * 512 + (2 + form.warps) * 4 * form.dim
}

pub(super) fn pipelined_split(shape: &StepShape) -> Option<Split> {
    let mut forms = DECODING_PIPELINED.iter();
    let form = *forms.find(|form| form.dim == shape.head_dim)?;
    shape.paged.then_some(Split {
        heads: MAX_HEADS,
        warps: form.warps,
        keys: form.keys,
        turns: PIPELINED_KEYS / form.keys / form.warps,
        queries: 0,
        shared: pipelined_shared(form),
    })
}

/// For many sequences in pages.
pub(super) fn pipelined(case: &Case) -> Planned<Operands> {
    case.pipelined?;
    let (shape, split) = (&case.shape, pipelined_split(&case.shape));
    let split = split.ok_or("it is for other head sizes")?;
    if !split.is_full(&case.gpu, shape) {
        return Err("there are few sequences: more blocks share the keys of each");
    }
    let mut sizes = PIPELINED_HEAD_SIZES.iter();
    let place = sizes.position(|dim| *dim == shape.head_dim);
    let bf16 = usize::from(shape.cache_dtype == DType::BF16);
    let mut grid = split.grid(&case.gpu, shape)?;
    // Blocks for keys that most sequences do not have come last: they would leave multiprocessors idle.
    grid.blocks.rotate_left(1);
    Ok(Box::new(Alone {
        module: &PIPELINED,
        index: place.map_or(0, |place| 2 * place + bf16),
        split,
        tiles: split.tiles(&case.gpu, shape),
        grid,
    }))
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
        turns: TURNS,
        queries: 0,
        shared: 0,
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
        let tensor_cores = split.queries > 0;
        Ok(Box::new(Self {
            module: match case.shape.cache_dtype {
                DType::F8E4M3 | DType::U8 if tensor_cores => &CODES,
                _ if case.shape.paged => &PAGED,
                _ => &MODULE,
            },
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
