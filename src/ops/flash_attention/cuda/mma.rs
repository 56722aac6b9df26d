//! `kernels/attention/prefill.cu`: tensor cores by `mma.sync`, from sm_75 on.

use super::forms::{Forms, HeadSizes, NEWEST, head_sizes};
use super::plan::{Kernel, Planned};
use super::problem::{Call, Case};
use crate::cuda::abi::AttentionParams as Params;
use crate::cuda::abi::{
    ATTENTION_MMA, ATTENTION_MMA_MAX_WARPS, ATTENTION_MMA_ROWS, AttentionMma, WARP,
};
use crate::cuda::{Grid, Launcher, Module, PIECES, fatbin};
use candle_core::{DType, Result};

/// For q, keys and values in f16, in bf16, and for q in f32 over f16.
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

/// The same for ragged batches.
static RAGGED: Module = Module::new(
    "varlen",
    fatbin!("varlen"),
    &[
        "flash_attention_varlen_d64_f16",
        "flash_attention_varlen_d80_f16",
        "flash_attention_varlen_d96_f16",
        "flash_attention_varlen_d128_f16",
        "flash_attention_varlen_d256_f16",
        "flash_attention_varlen_d64_bf16",
        "flash_attention_varlen_d80_bf16",
        "flash_attention_varlen_d96_bf16",
        "flash_attention_varlen_d128_bf16",
        "flash_attention_varlen_d256_bf16",
        "flash_attention_varlen_d64_f32",
        "flash_attention_varlen_d80_f32",
        "flash_attention_varlen_d96_f32",
        "flash_attention_varlen_d128_f32",
    ],
);

/// The same over keys and values in pages.
static PAGED: Module = Module::new(
    "paged_prefill",
    fatbin!("paged_prefill"),
    &[
        "paged_prefill_d64_f16",
        "paged_prefill_d80_f16",
        "paged_prefill_d96_f16",
        "paged_prefill_d128_f16",
        "paged_prefill_d256_f16",
        "paged_prefill_d64_bf16",
        "paged_prefill_d80_bf16",
        "paged_prefill_d96_bf16",
        "paged_prefill_d128_bf16",
        "paged_prefill_d256_bf16",
        "paged_prefill_d64_f32",
        "paged_prefill_d80_f32",
        "paged_prefill_d96_f32",
        "paged_prefill_d128_f32",
    ],
);

/// Over codes in pages.
static CODES: Module = Module::new(
    "paged_prefill_codes",
    fatbin!("paged_prefill_codes"),
    &[
        "paged_prefill_codes_d64_f16",
        "paged_prefill_codes_d80_f16",
        "paged_prefill_codes_d96_f16",
        "paged_prefill_codes_d128_f16",
        "paged_prefill_codes_d256_f16",
        "paged_prefill_codes_d64_bf16",
        "paged_prefill_codes_d80_bf16",
        "paged_prefill_codes_d96_bf16",
        "paged_prefill_codes_d128_bf16",
        "paged_prefill_codes_d256_bf16",
    ],
);

/// Queries of a dtype over codes, from an architecture on.
pub(super) const fn codes(q: DType, kv: DType, arch: u32) -> Forms {
    Forms {
        q: Some(q),
        ..Forms::over(kv, [arch, NEWEST], HeadSizes::Of(&HEAD_SIZES))
    }
}

/// Head sizes that there are kernels for.
pub(super) const HEAD_SIZES: [usize; ATTENTION_MMA.len()] = head_sizes!(ATTENTION_MMA);

/// Those for q in f32: all but the widest.
pub(super) const HEAD_SIZES_OF_F32: &[usize] = HEAD_SIZES.split_last().expect("head sizes").1;

/// A kernel and how it divides the work.
#[derive(Debug)]
struct Mma {
    module: &'static Module,
    index: usize,
    tile: AttentionMma,
    grid: Grid,
    row_warps: usize,
    key_groups: usize,
    stages: usize,
}

/// For dtypes and head sizes that there is a kernel for.
pub(super) fn plan(case: &Case) -> Planned<Call> {
    let forms = ATTENTION_MMA;
    let place = forms.iter().position(|form| form.dim == case.sizes.dim);
    let place = place.ok_or("it is for other head sizes")?;
    let first = match case.q {
        DType::F16 => 0,
        DType::BF16 => forms.len(),
        _ => 2 * forms.len(),
    };
    if let Some(reason) = case.batch.refusal() {
        return Err(reason);
    }
    let at = case.alignment;
    if at.kv < 16 || at.q < 8 || at.y < 8 {
        return Err(PIECES);
    }
    let mut mma = Mma::divided(case, forms[place], first + place);
    let shared = mma.shared();
    if shared > case.gpu.shared as usize {
        return Err("its tiles do not fit into shared memory");
    }
    let rows = ATTENTION_MMA_ROWS * mma.row_warps;
    let warps = mma.row_warps * mma.key_groups;
    debug_assert!(warps <= ATTENTION_MMA_MAX_WARPS);
    let blocks = case.blocks(case.sizes.rows().div_ceil(rows))?;
    mma.grid = Grid::new(blocks, (WARP * warps) as u32, shared as u32);
    Ok(Box::new(mma))
}

impl Mma {
    /// Enough blocks to fill the GPU; where there are too few rows for that, small blocks whose
    /// warps share the keys out among them, but with batch invariance. The grid is still to be set.
    fn divided(case: &Case, tile: AttentionMma, index: usize) -> Self {
        let (sms, sizes) = (case.gpu.sms as usize, &case.sizes);
        let blocks = |row_warps: usize| {
            let each = sizes.rows().div_ceil(ATTENTION_MMA_ROWS * row_warps);
            sizes.batch * sizes.kv_heads * each
        };
        // Measured on an H100: key groups pay as long as there are less than three blocks to an SM.
        let (row_warps, key_groups) = if blocks(8) >= 2 * sms {
            (8, 1)
        } else if blocks(4) >= 3 * sms || case.batch_invariant {
            (4, 1)
        } else if 5 * blocks(4) >= 3 * sms {
            (4, 2)
        } else if sizes.rows() > ATTENTION_MMA_ROWS {
            (2, 4)
        } else {
            (1, 4)
        };
        let mut mma = Self {
            module: match case.kv {
                DType::F8E4M3 | DType::U8 => &CODES,
                _ => case.batch.of([&MODULE, &RAGGED, &PAGED]),
            },
            index,
            tile,
            grid: Grid::line(0, 0),
            row_warps,
            key_groups,
            stages: 2,
        };
        while mma.shared() > case.gpu.shared as usize {
            match mma {
                Self { stages: 2, .. } => mma.stages = 1,
                Self {
                    key_groups: 2.., ..
                } => {
                    (mma.key_groups, mma.stages) = (mma.key_groups / 2, 2);
                }
                Self { row_warps: 2.., .. } => mma.row_warps /= 2,
                _ => break,
            }
        }
        mma
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
}

impl Kernel<Call> for Mma {
    fn entry(&self) -> &'static str {
        self.module.names(self.index).1
    }

    fn grid(&self) -> Grid {
        self.grid
    }

    fn details(&self) -> String {
        let (rows, keys, stages) = (self.row_warps, self.key_groups, self.stages);
        format!("{rows}x{keys} warps, stages {stages}")
    }

    unsafe fn run(&self, launcher: &Launcher, call: &Call) -> Result<()> {
        let params = Params {
            row_warps: self.row_warps as i32,
            key_groups: self.key_groups as i32,
            stages: self.stages as i32,
            group_bytes: self.group_bytes() as i32,
            ..call.into()
        };
        // SAFETY: the kernel takes `Params`; the addresses are the caller's.
        unsafe { launcher.run(self.module, self.index, self.grid, &params) }
    }
}
