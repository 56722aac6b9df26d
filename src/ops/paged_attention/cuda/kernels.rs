//! `kernels/attention/paged_attention.cu`

use super::problem::{Call, Case};
use crate::cuda::abi::{
    PAGED_CODES, PAGED_MMA, PAGED_PLAIN, PAGED_PLAIN_KEYS, PAGED_WARPS, PagedCodes, PagedMma,
    PagedPlain, WARP,
};
use crate::cuda::{Grid, Launcher, Module, UNALIGNED, fatbin};
use crate::ops::flash_attention::cuda::{Kernel, Planned};
use candle_core::{DType, Result};

/// In the order of the forms: those for tensor cores in f16 and bf16, then those for everything else.
pub(super) static MODULE: Module = Module::new(
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

/// Over codes: of each form in e4m3 and in whole numbers, then those for everything else.
pub(super) static CODES: Module = Module::new(
    "paged_attention_codes",
    fatbin!("paged_attention_codes"),
    &[
        "paged_attention_codes_d64_r8_fp8",
        "paged_attention_codes_d64_r8_int8",
        "paged_attention_codes_d64_r16_fp8",
        "paged_attention_codes_d64_r16_int8",
        "paged_attention_codes_d80_r8_fp8",
        "paged_attention_codes_d80_r8_int8",
        "paged_attention_codes_d80_r16_fp8",
        "paged_attention_codes_d80_r16_int8",
        "paged_attention_codes_d96_r8_fp8",
        "paged_attention_codes_d96_r8_int8",
        "paged_attention_codes_d96_r16_fp8",
        "paged_attention_codes_d96_r16_int8",
        "paged_attention_codes_d128_r8_fp8",
        "paged_attention_codes_d128_r8_int8",
        "paged_attention_codes_d128_r16_fp8",
        "paged_attention_codes_d128_r16_int8",
        "paged_attention_codes_d256_r8_fp8",
        "paged_attention_codes_d256_r8_int8",
        "paged_attention_codes_any64",
        "paged_attention_codes_any128",
        "paged_attention_codes_any256",
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
    module: &'static Module,
    index: usize,
    rows: usize,
    /// Keys of a unit of work.
    keys: usize,
    /// Warps that are needed for all rows of a key/value head.
    parts: usize,
    grid: Grid,
}

/// The place among so many forms, each a head size and rows, of the one with 16 rows if there are more than 8 that may be
/// rounded.
fn place(case: &Case, count: usize, form: impl Fn(usize) -> [usize; 2]) -> Option<usize> {
    let of_rows = |rows| (0..count).position(|i| form(i) == [case.sizes.dim, rows]);
    let many = case.rows() > 8 && case.is_narrow();
    let place = if many { of_rows(16) } else { None };
    place.or(of_rows(8))
}

/// On tensor cores: with 16 rows if there are more than 8, of the pools' own dtype.
pub(super) fn mma(case: &Case) -> Planned<Call> {
    if !case.aligned {
        return Err(UNALIGNED);
    }
    if case.is_coded() {
        return codes(case);
    }
    let form = |i: usize| [PAGED_MMA[i].dim, PAGED_MMA[i].rows];
    let place = place(case, PAGED_MMA.len(), form);
    let place = place.ok_or("it is for other head sizes")?;
    let PagedMma { dim, keys, rows } = PAGED_MMA[place];
    let bf16 = usize::from(case.pool_dtype == DType::BF16);
    let kernel = (&MODULE, 2 * place + bf16);
    Paged::plan(case, kernel, [keys, rows], dim / 16 * 512)
}

/// Over codes, which tensor cores take as f16.
fn codes(case: &Case) -> Planned<Call> {
    let form = |i: usize| [PAGED_CODES[i].dim, PAGED_CODES[i].rows];
    let place = place(case, PAGED_CODES.len(), form);
    let place = place.ok_or("it is for other head sizes")?;
    let PagedCodes { dim, keys, rows } = PAGED_CODES[place];
    let int8 = usize::from(case.pool_dtype == DType::U8);
    let kernel = (&CODES, 2 * place + int8);
    Paged::plan(case, kernel, [keys, rows], dim / 16 * 512)
}

/// By multiply-adds in f32.
pub(super) fn plain(case: &Case) -> Planned<Call> {
    let mut forms = PAGED_PLAIN.iter();
    let place = forms.position(|form| case.sizes.dim <= form.dim);
    let place = place.ok_or("it is for other head sizes")?;
    let PagedPlain { rows, .. } = PAGED_PLAIN[place];
    let queries = 4 * rows * case.sizes.dim;
    let kernel = match case.is_coded() {
        true => (&CODES, 2 * PAGED_CODES.len() + place),
        false => (&MODULE, 2 * PAGED_MMA.len() + place),
    };
    Paged::plan(case, kernel, [PAGED_PLAIN_KEYS, rows], queries)
}

/// Bytes of static shared memory of a block, at most.
pub(super) const FIXED_SHARED: usize = 1280;

/// Bytes of a block: `PagedShared` of the kernel. The memory of the two records of each warp has the plan of the shares
/// before there are records, and the threads' partial results of the merge of blocks behind them.
fn shared_memory(case: &Case, warps: usize, rows: usize, queries: usize) -> usize {
    /// `SharePlan`, and four sums with what they are relative to.
    const OF_THREAD: usize = 24;
    let dim = case.sizes.dim;
    let held = rows.min(case.rows().next_multiple_of(2));
    let records = 4 * 2 * held * (2 + dim + dim % 2 + 2);
    warps * (queries + 4 * 3 * rows + records.max(WARP * OF_THREAD))
}

impl Paged {
    /// `queries`: bytes of shared memory that hold those of a warp.
    fn plan(
        case: &Case,
        (module, index): (&'static Module, usize),
        [keys, rows]: [usize; 2],
        queries: usize,
    ) -> Planned<Call> {
        let shared = |warps: &usize| shared_memory(case, *warps, rows, queries);
        let fits = |warps: &usize, blocks| shared(warps) + FIXED_SHARED <= case.gpu.share(blocks);
        let mut counts = [PAGED_WARPS, PAGED_WARPS / 2, PAGED_WARPS / 4].into_iter();
        let Some(warps) = counts.find(|warps| fits(warps, 1)) else {
            return Err("the rows of a block's warps do not fit into shared memory");
        };
        let parts = case.rows().div_ceil(rows);
        // A sequence may have a page that is not full, and has a unit in front of its keys.
        let units = (case.pages * case.sizes.page).div_ceil(keys) + 2 * case.sequences;
        let units = units.saturating_mul(case.sizes.kv_heads * parts);
        if u32::try_from(units).is_err() {
            return Err("the table has more keys than the kernel counts");
        }
        let mut at_once = (1..=PAGED_WARPS / warps).rev();
        let at_once = at_once.find(|blocks| fits(&warps, *blocks)).unwrap_or(1);
        let blocks = (case.gpu.sms as usize * at_once).min(units) as u32;
        let threads = (WARP * warps) as u32;
        Ok(Box::new(Self {
            module,
            index,
            rows,
            keys,
            parts,
            grid: Grid::new([blocks, 1, 1], threads, shared(&warps) as u32),
        }))
    }
}

impl Kernel<Call> for Paged {
    fn entry(&self) -> &'static str {
        self.module.names(self.index).1
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
        unsafe { launcher.run(self.module, self.index, self.grid, &params) }
    }
}
