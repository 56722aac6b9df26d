//! `kernels/attention/prefill.cu`: tensor cores by `mma.sync`, from sm_75 on.

use super::{Call, Params};
use crate::cuda::abi::{
    ATTENTION_MMA, ATTENTION_MMA_MAX_WARPS, ATTENTION_MMA_ROWS, AttentionMma, WARP,
};
use crate::cuda::{Gpu, Grid, Launcher, Module, fatbin};
use candle_core::{DType, Result};
use std::fmt;

static MODULE: Module = Module::new(
    "prefill",
    fatbin!("prefill"),
    &[
        "flash_attention_d64_f16",
        "flash_attention_d80_f16",
        "flash_attention_d96_f16",
        "flash_attention_d128_f16",
        "flash_attention_d256_f16",
        "flash_attention_d64_bf16",
        "flash_attention_d80_bf16",
        "flash_attention_d96_bf16",
        "flash_attention_d128_bf16",
        "flash_attention_d256_bf16",
        "flash_attention_d64_f32",
        "flash_attention_d80_f32",
        "flash_attention_d96_f32",
        "flash_attention_d128_f32",
    ],
);

/// The kernel for a call and how it divides the work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    index: usize,
    tile: AttentionMma,
    row_warps: usize,
    key_groups: usize,
    stages: usize,
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "d{} {}x{}",
            self.tile.dim, self.row_warps, self.key_groups
        )
    }
}

impl Form {
    /// The form for the call, or why there is none.
    pub fn of(launcher: &Launcher, call: &Call) -> Result<std::result::Result<Self, &'static str>> {
        let gpu = launcher.gpu;
        let forms = ATTENTION_MMA;
        let Some(place) = forms.iter().position(|form| form.dim == call.dim) else {
            return Ok(Err("no tensor-core form of this head dimension"));
        };
        let first = match (call.q_dtype, call.kv_dtype) {
            (DType::F16, DType::F16) => 0,
            (DType::BF16, DType::BF16) => forms.len(),
            // The last one is not there with q in f32.
            (DType::F32, DType::F16) if place + 1 < forms.len() => 2 * forms.len(),
            _ => return Ok(Err("no tensor-core form of these types")),
        };
        let index = first + place;
        // A GPU that is newer than what was built for runs code for an older one.
        let needed = if call.kv_dtype == DType::BF16 { 80 } else { 75 };
        if MODULE.built_for(gpu, index)? < needed {
            return Ok(Err("no tensor cores for this type"));
        }
        let whole = call.k.rows_at(16, call.kv_dtype)
            && call.v.rows_at(16, call.kv_dtype)
            && call.q.rows_at(8, call.q_dtype)
            && call.y.is_multiple_of(8);
        if !whole {
            return Ok(Err("rows that are no whole 16-byte pieces"));
        }
        Ok(Ok(Self::divided(gpu, call, forms[place], index)))
    }

    /// Enough blocks to fill the GPU; where there are too few rows for that, small blocks whose
    /// warps share the keys out among them.
    fn divided(gpu: &Gpu, call: &Call, tile: AttentionMma, index: usize) -> Self {
        let sms = gpu.sms as usize;
        let blocks = |row_warps: usize| {
            call.batch * call.kv_heads * call.rows().div_ceil(ATTENTION_MMA_ROWS * row_warps)
        };
        // Measured on an H100: key groups pay as long as there are less than three blocks to an SM.
        let (row_warps, key_groups) = if blocks(8) >= 2 * sms {
            (8, 1)
        } else if blocks(4) >= 3 * sms {
            (4, 1)
        } else if 5 * blocks(4) >= 3 * sms {
            (4, 2)
        } else if call.rows() > ATTENTION_MMA_ROWS {
            (2, 4)
        } else {
            (1, 4)
        };
        let mut form = Self {
            index,
            tile,
            row_warps,
            key_groups,
            stages: 2,
        };
        while form.shared() > gpu.shared as usize {
            match form {
                Self { stages: 2, .. } => form.stages = 1,
                Self {
                    key_groups: 2.., ..
                } => {
                    (form.key_groups, form.stages) = (form.key_groups / 2, 2);
                }
                Self { row_warps: 2.., .. } => form.row_warps /= 2,
                _ => break,
            }
        }
        form
    }

    /// Bytes of one group: its tiles of keys and values, and later what it leaves for the first.
    fn group_bytes(&self) -> usize {
        let AttentionMma { dim, keys } = self.tile;
        let tiles = self.stages * 2 * keys * (dim + 8) * 2;
        let left = self.row_warps * (dim / 8 + 1) * 512;
        if self.key_groups > 1 {
            tiles.max(left)
        } else {
            tiles
        }
    }

    fn shared(&self) -> usize {
        let queries = if self.tile.dim > 128 {
            ATTENTION_MMA_ROWS * (self.tile.dim + 8) * 2
        } else {
            0
        };
        self.key_groups * self.group_bytes() + self.row_warps * self.key_groups * queries
    }

    /// # Safety
    /// As [`super::launch`].
    pub unsafe fn launch(&self, launcher: &Launcher, call: &Call) -> Result<()> {
        let params = Params {
            row_warps: self.row_warps as i32,
            key_groups: self.key_groups as i32,
            stages: self.stages as i32,
            group_bytes: self.group_bytes() as i32,
            ..call.into()
        };
        let blocks = call.blocks(call.rows().div_ceil(ATTENTION_MMA_ROWS * self.row_warps))?;
        let warps = self.row_warps * self.key_groups;
        debug_assert!(warps <= ATTENTION_MMA_MAX_WARPS);
        let grid = Grid::new(blocks, (WARP * warps) as u32, self.shared() as u32);
        // SAFETY: the kernel takes `Params`; the addresses are the caller's.
        unsafe { launcher.run(&MODULE, self.index, grid, &params) }
    }
}
