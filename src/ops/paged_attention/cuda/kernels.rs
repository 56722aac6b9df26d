//! `kernels/attention/paged_attention.cu`

use super::problem::{Call, Case};
use crate::cuda::abi::{
    PAGED_MMA, PAGED_PLAIN, PAGED_PLAIN_KEYS, PAGED_WARPS, PagedMma, PagedPlain, WARP,
};
use crate::cuda::{Grid, Launcher, Module, UNALIGNED, fatbin};
use crate::ops::flash_attention::cuda::{Kernel, Planned};
use candle_core::{DType, Result};

/// In the order of the forms: those for tensor cores in f16 and bf16, then those for everything else.
static MODULE: Module = Module::new(
    "paged_attention",
    fatbin!("paged_attention"),
    &[
        "paged_attention_d64_r8_f16",
        "paged_attention_d64_r8_bf16",
        "paged_attention_d64_r16_f16",
        "paged_attention_d64_r16_bf16",
        "paged_attention_d80_r8_f16",
        "paged_attention_d80_r8_bf16",
        "paged_attention_d80_r16_f16",
        "paged_attention_d80_r16_bf16",
        "paged_attention_d96_r8_f16",
        "paged_attention_d96_r8_bf16",
        "paged_attention_d96_r16_f16",
        "paged_attention_d96_r16_bf16",
        "paged_attention_d128_r8_f16",
        "paged_attention_d128_r8_bf16",
        "paged_attention_d128_r16_f16",
        "paged_attention_d128_r16_bf16",
        "paged_attention_d256_r8_f16",
        "paged_attention_d256_r8_bf16",
        "paged_attention_any64",
        "paged_attention_any128",
        "paged_attention_any256",
    ],
);

/// Head sizes that tensor cores have a kernel for.
pub(super) const MMA_HEAD_SIZES: [usize; 5] = [64, 80, 96, 128, 256];

/// The widest head of the others.
pub(super) const WIDEST: usize = PAGED_PLAIN[PAGED_PLAIN.len() - 1].dim;

/// Of a warp.
pub(super) const MOST_ROWS: usize = 16;
pub(super) const FEWEST_ROWS: usize = 2;

/// A kernel and its grid.
#[derive(Debug)]
struct Paged {
    index: usize,
    rows: usize,
    /// Keys of a unit of work.
    keys: usize,
    /// Warps that are needed for all rows of a key/value head.
    parts: usize,
    grid: Grid,
}

/// On tensor cores: with 16 rows if there are more than 8, of the pools' own dtype.
pub(super) fn mma(case: &Case) -> Planned<Call> {
    if !case.aligned {
        return Err(UNALIGNED);
    }
    let many = case.rows() > 8 && case.dtype == case.pool_dtype;
    let fits = |form: &PagedMma| form.dim == case.sizes.dim;
    let of_rows = |rows| {
        let mut forms = PAGED_MMA.iter();
        forms.position(|form| fits(form) && form.rows == rows)
    };
    let place = if many { of_rows(16) } else { None };
    let place = place.or(of_rows(8)).ok_or("it is for other head sizes")?;
    let PagedMma {
        dim,
        keys,
        rows,
        blocks,
    } = PAGED_MMA[place];
    let bf16 = usize::from(case.pool_dtype == DType::BF16);
    Paged::plan(case, 2 * place + bf16, [keys, rows, blocks], dim / 16 * 512)
}

/// By multiply-adds in f32.
pub(super) fn plain(case: &Case) -> Planned<Call> {
    let mut forms = PAGED_PLAIN.iter();
    let place = forms.position(|form| case.sizes.dim <= form.dim);
    let place = place.ok_or("it is for other head sizes")?;
    let PagedPlain { rows, blocks, .. } = PAGED_PLAIN[place];
    let index = 2 * PAGED_MMA.len() + place;
    let queries = 4 * rows * case.sizes.dim;
    Paged::plan(case, index, [PAGED_PLAIN_KEYS, rows, blocks], queries)
}

impl Paged {
    /// `queries`: bytes of shared memory that hold them.
    fn plan(
        case: &Case,
        index: usize,
        [keys, rows, blocks]: [usize; 3],
        queries: usize,
    ) -> Planned<Call> {
        let dim = case.sizes.dim;
        // `PagedShared` of the kernel: each warp's queries and what they see, and two records of rows.
        let held = rows.min(case.rows().next_multiple_of(2));
        let floats = 3 * rows + 2 * held * (2 + dim + dim % 2 + 2);
        let shared = PAGED_WARPS * (queries + 4 * floats);
        if shared > case.gpu.shared as usize {
            return Err("the rows of a block's warps do not fit into shared memory");
        }
        let parts = case.rows().div_ceil(rows);
        let units = (case.pages * case.sizes.page).div_ceil(keys) + case.sequences;
        let units = units.saturating_mul(case.sizes.kv_heads * parts);
        if u32::try_from(units).is_err() {
            return Err("the table has more keys than the kernel counts");
        }
        let blocks = (case.gpu.sms as usize * blocks).min(units) as u32;
        let threads = (WARP * PAGED_WARPS) as u32;
        Ok(Box::new(Self {
            index,
            rows,
            keys,
            parts,
            grid: Grid::new([blocks, 1, 1], threads, shared as u32),
        }))
    }
}

impl Kernel<Call> for Paged {
    fn entry(&self) -> &'static str {
        MODULE.names(self.index).1
    }

    fn grid(&self) -> Grid {
        self.grid
    }

    fn details(&self) -> String {
        let Self {
            rows, keys, parts, ..
        } = self;
        format!("{parts} x {rows} rows, units of {keys} keys")
    }

    unsafe fn run(&self, launcher: &Launcher, call: &Call) -> Result<()> {
        let params = call.params(self.parts);
        // SAFETY: the kernel takes `PagedAttentionParams`; the addresses are the caller's.
        unsafe { launcher.run(&MODULE, self.index, self.grid, &params) }
    }
}
