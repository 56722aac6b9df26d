//! `kernels/flash_attention_plain.cu`: f32 arithmetic, any layout and types.

use super::{Call, OP, Params};
use crate::cuda::{Grid, Launcher, Module, fatbin};
use candle_core::{Result, bail};

static MODULE: Module = Module::new(
    "flash_attention_plain",
    fatbin!("flash_attention_plain"),
    &[
        "flash_attention_plain_64",
        "flash_attention_plain_128",
        "flash_attention_plain_256",
        "flash_attention_plain_512",
    ],
);

/// The head dimension that a kernel has room for, its rows in a block and keys in a tile.
const KERNELS: [(usize, usize, usize); 4] =
    [(64, 64, 64), (128, 64, 32), (256, 32, 16), (512, 16, 16)];

const THREADS: u32 = 256;

/// # Safety
/// As [`super::launch`].
pub(super) unsafe fn launch(launcher: &Launcher, call: &Call) -> Result<()> {
    let Some(index) = KERNELS.iter().position(|(dim, ..)| call.dim <= *dim) else {
        bail!(
            "{OP}: head dimension {}, expected at most 512 on a GPU",
            call.dim
        );
    };
    let (dim, rows, keys) = KERNELS[index];
    let shared = 4 * ((rows + keys) * (dim + 4) + rows * (keys + 4)) as u32;
    if shared > launcher.gpu.shared {
        bail!(
            "{OP}: head dimension {} takes {shared} bytes of shared memory, this GPU has {}; \
             expected at most {}",
            call.dim,
            launcher.gpu.shared,
            KERNELS[index - 1].0
        );
    }
    let blocks = call.blocks(call.rows().div_ceil(rows))?;
    let grid = Grid::new(blocks, THREADS, shared);
    // SAFETY: `Params` is the kernel's parameter; the addresses are the caller's.
    unsafe { launcher.run(&MODULE, index, grid, &Params::from(call)) }
}
