//! `kernels/attention/prefill_plain.cu`: f32 arithmetic, any layout and types.

use super::{Call, OP, Params};
use crate::cuda::abi::{ATTENTION_PLAIN, ATTENTION_PLAIN_THREADS, AttentionPlain};
use crate::cuda::{Grid, Launcher, Module, fatbin};
use candle_core::{Result, bail};

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

/// # Safety
/// As [`super::launch`].
pub(super) unsafe fn launch(launcher: &Launcher, call: &Call) -> Result<()> {
    let Some(index) = ATTENTION_PLAIN.iter().position(|form| call.dim <= form.dim) else {
        bail!(
            "{OP}: head dimension {}, expected at most 512 on a GPU",
            call.dim
        );
    };
    let AttentionPlain { dim, rows, keys } = ATTENTION_PLAIN[index];
    let shared = 4 * ((rows + keys) * (dim + 4) + rows * (keys + 4)) as u32;
    if shared > launcher.gpu.shared {
        bail!(
            "{OP}: head dimension {} takes {shared} bytes of shared memory, this GPU has {}; \
             expected at most {}",
            call.dim,
            launcher.gpu.shared,
            ATTENTION_PLAIN[index - 1].dim
        );
    }
    let blocks = call.blocks(call.rows().div_ceil(rows))?;
    let grid = Grid::new(blocks, ATTENTION_PLAIN_THREADS as u32, shared);
    // SAFETY: the kernel takes `Params`; the addresses are the caller's.
    unsafe { launcher.run(&MODULE, index, grid, &Params::from(call)) }
}
