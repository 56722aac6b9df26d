//! `kernels/attention/prefill_plain.cu`: f32 arithmetic, any layout and types.

use super::plan::{Kernel, Planned};
use super::problem::{Call, Case};
use crate::cuda::abi::AttentionParams as Params;
use crate::cuda::abi::{ATTENTION_PLAIN, ATTENTION_PLAIN_THREADS, AttentionPlain};
use crate::cuda::{Grid, Launcher, Module, fatbin};
use candle_core::Result;

static MODULE: Module = Module::new(
    "prefill_plain",
    fatbin!("prefill_plain"),
    &[
        "flash_attention_plain_64",
        "flash_attention_plain_128",
        "flash_attention_plain_256",
        "flash_attention_plain_512",
    ],
);

/// For ragged batches.
static RAGGED: Module = Module::new(
    "varlen_plain",
    fatbin!("varlen_plain"),
    &[
        "flash_attention_varlen_plain_64",
        "flash_attention_varlen_plain_128",
        "flash_attention_varlen_plain_256",
        "flash_attention_varlen_plain_512",
    ],
);

/// Over keys and values in pages.
static PAGED: Module = Module::new(
    "paged_prefill_plain",
    fatbin!("paged_prefill_plain"),
    &[
        "paged_prefill_plain_64",
        "paged_prefill_plain_128",
        "paged_prefill_plain_256",
        "paged_prefill_plain_512",
    ],
);

/// The widest head.
pub(super) const WIDEST: usize = ATTENTION_PLAIN[ATTENTION_PLAIN.len() - 1].dim;

/// A kernel and its grid.
#[derive(Debug)]
struct Plain {
    module: &'static Module,
    index: usize,
    grid: Grid,
}

/// By the narrowest kernel that there is room for a head in.
pub(super) fn plan(case: &Case) -> Planned<Call> {
    let mut forms = ATTENTION_PLAIN.iter();
    let index = forms.position(|form| case.sizes.dim <= form.dim);
    let index = index.ok_or("it is for other head sizes")?;
    let AttentionPlain { dim, rows, keys } = ATTENTION_PLAIN[index];
    let shared = 4 * ((rows + keys) * (dim + 4) + rows * (keys + 4)) as u32;
    if shared > case.gpu.shared {
        return Err("heads of this size do not fit into this GPU's shared memory");
    }
    let blocks = case.blocks(case.sizes.rows().div_ceil(rows))?;
    let grid = Grid::new(blocks, ATTENTION_PLAIN_THREADS as u32, shared);
    let module = case.batch.of([&MODULE, &RAGGED, &PAGED]);
    Ok(Box::new(Plain {
        module,
        index,
        grid,
    }))
}

impl Kernel<Call> for Plain {
    fn entry(&self) -> &'static str {
        self.module.names(self.index).1
    }

    fn grid(&self) -> Grid {
        self.grid
    }

    fn details(&self) -> String {
        String::new()
    }

    unsafe fn run(&self, launcher: &Launcher, call: &Call) -> Result<()> {
        // SAFETY: the kernel takes `Params`; the addresses are the caller's.
        unsafe { launcher.run(self.module, self.index, self.grid, &Params::from(call)) }
    }
}
