//! `kernels/attention/paged_attention.cu`, and with batch invariance `kernels/attention/paged_attention_fixed_split.cu`

use super::problem::{Call, Case};
use crate::cuda::abi::{
    PAGED_CODES, PAGED_MERGE_BLOCKS, PAGED_MERGED, PAGED_MMA, PAGED_PLAIN, PAGED_PLAIN_KEYS,
    PAGED_SPLIT, PAGED_SPLIT_UNITS, PAGED_WARPS, PagedCodes, PagedMma, PagedPlain, WARP,
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

/// With splits of a fixed size, as [`MODULE`], but with 8 rows alone; and at the end what merges the splits.
pub(super) static FIXED_SPLIT: Module = Module::new(
    "paged_attention_fixed_split",
    fatbin!("paged_attention_fixed_split"),
    &[
        "paged_attention_fixed_split_d64_f16",
        "paged_attention_fixed_split_d64_bf16",
        "paged_attention_fixed_split_d80_f16",
        "paged_attention_fixed_split_d80_bf16",
        "paged_attention_fixed_split_d96_f16",
        "paged_attention_fixed_split_d96_bf16",
        "paged_attention_fixed_split_d128_f16",
        "paged_attention_fixed_split_d128_bf16",
        "paged_attention_fixed_split_d256_f16",
        "paged_attention_fixed_split_d256_bf16",
        "paged_attention_fixed_split_any64",
        "paged_attention_fixed_split_any128",
        "paged_attention_fixed_split_any256",
        "paged_attention_fixed_split_merge",
    ],
);

/// The same over codes, as [`CODES`].
pub(super) static FIXED_SPLIT_CODES: Module = Module::new(
    "paged_attention_fixed_split_codes",
    fatbin!("paged_attention_fixed_split_codes"),
    &[
        "paged_attention_fixed_split_codes_d64_fp8",
        "paged_attention_fixed_split_codes_d64_int8",
        "paged_attention_fixed_split_codes_d80_fp8",
        "paged_attention_fixed_split_codes_d80_int8",
        "paged_attention_fixed_split_codes_d96_fp8",
        "paged_attention_fixed_split_codes_d96_int8",
        "paged_attention_fixed_split_codes_d128_fp8",
        "paged_attention_fixed_split_codes_d128_int8",
        "paged_attention_fixed_split_codes_d256_fp8",
        "paged_attention_fixed_split_codes_d256_int8",
        "paged_attention_fixed_split_codes_any64",
        "paged_attention_fixed_split_codes_any128",
        "paged_attention_fixed_split_codes_any256",
    ],
);

/// The last of [`FIXED_SPLIT`].
const MERGE: usize = 13;

const OTHER_HEAD_SIZES: &str = "it is for other head sizes";

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
    /// Keys of a unit of work, or of a split.
    keys: usize,
    /// Warps that are needed for all rows of a key/value head.
    parts: usize,
    grid: Grid,
    /// Of the launch that merges splits of a fixed size.
    merge: Option<Grid>,
}

/// The place among so many forms, each a head size and rows, of the one with 16 rows if there are more than 8 that may be
/// rounded, which with batch invariance would depend on the number of queries.
fn place(case: &Case, count: usize, form: impl Fn(usize) -> [usize; 2]) -> Option<usize> {
    let of_rows = |rows| (0..count).position(|i| form(i) == [case.sizes.dim, rows]);
    let many = case.rows() > 8 && case.is_narrow() && !case.batch_invariant;
    let place = if many { of_rows(16) } else { None };
    place.or(of_rows(8))
}

/// The place of a head size among the kernels with 8 rows, which are those with splits of a fixed size.
fn of_8_rows(dim: usize) -> std::result::Result<usize, &'static str> {
    let place = MMA_HEAD_SIZES.iter().position(|size| *size == dim);
    place.ok_or(OTHER_HEAD_SIZES)
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
    let place = place.ok_or(OTHER_HEAD_SIZES)?;
    let PagedMma { dim, keys, rows } = PAGED_MMA[place];
    let bf16 = usize::from(case.pool_dtype == DType::BF16);
    let kernel = match case.batch_invariant {
        true => (&FIXED_SPLIT, 2 * of_8_rows(dim)? + bf16),
        false => (&MODULE, 2 * place + bf16),
    };
    Paged::plan(case, kernel, [keys, rows], dim / 16 * 512)
}

/// Over codes, which tensor cores take as f16.
fn codes(case: &Case) -> Planned<Call> {
    let form = |i: usize| [PAGED_CODES[i].dim, PAGED_CODES[i].rows];
    let place = place(case, PAGED_CODES.len(), form);
    let place = place.ok_or(OTHER_HEAD_SIZES)?;
    let PagedCodes { dim, keys, rows } = PAGED_CODES[place];
    let int8 = usize::from(case.pool_dtype == DType::U8);
    let kernel = match case.batch_invariant {
        true => (&FIXED_SPLIT_CODES, 2 * of_8_rows(dim)? + int8),
        false => (&CODES, 2 * place + int8),
    };
    Paged::plan(case, kernel, [keys, rows], dim / 16 * 512)
}

/// By multiply-adds in f32.
pub(super) fn plain(case: &Case) -> Planned<Call> {
    let mut forms = PAGED_PLAIN.iter();
    let place = forms.position(|form| case.sizes.dim <= form.dim);
    let place = place.ok_or(OTHER_HEAD_SIZES)?;
    let PagedPlain { rows, .. } = PAGED_PLAIN[place];
    let queries = 4 * rows * case.sizes.dim;
    let kernel = match (case.batch_invariant, case.is_coded()) {
        (false, true) => (&CODES, 2 * PAGED_CODES.len() + place),
        (false, false) => (&MODULE, 2 * PAGED_MMA.len() + place),
        (true, true) => (&FIXED_SPLIT_CODES, 2 * MMA_HEAD_SIZES.len() + place),
        (true, false) => (&FIXED_SPLIT, 2 * MMA_HEAD_SIZES.len() + place),
    };
    Paged::plan(case, kernel, [PAGED_PLAIN_KEYS, rows], queries)
}

/// Bytes of static shared memory of a block, at most; what merges splits has more, and nothing besides.
pub(super) const FIXED_SHARED: usize = 1280;

/// Bytes of a block: `PagedShared` of the kernel. The memory of the two records of each warp has the plan of the shares
/// before there are records, and the threads' partial results of the merge of blocks behind them. Splits of a fixed size
/// leave no records.
fn shared_memory(case: &Case, warps: usize, rows: usize, queries: usize) -> usize {
    /// `SharePlan`, and four sums with what they are relative to.
    const OF_THREAD: usize = 24;
    let dim = case.sizes.dim;
    let held = rows.min(case.rows().next_multiple_of(2));
    let records = match case.batch_invariant {
        true => 0,
        false => 4 * 2 * held * (2 + dim + dim % 2 + 2),
    };
    warps * (queries + 4 * 3 * rows + records.max(WARP * OF_THREAD))
}

/// Units of work, at most: a sequence may have a page that is not full, and has a unit in front of its keys. With splits
/// of a fixed size it may begin or end within one.
fn units(case: &Case, keys: usize, parts: usize) -> std::result::Result<usize, &'static str> {
    let (keys, units) = match case.batch_invariant {
        true => (PAGED_SPLIT, PAGED_SPLIT_UNITS),
        false => (keys, 1),
    };
    let in_all = (case.pages * case.sizes.page).div_ceil(keys) + 2 * case.sequences;
    let in_all = in_all.saturating_mul(units * case.sizes.kv_heads * parts);
    match u32::try_from(in_all) {
        Ok(_) => Ok(in_all),
        Err(_) => Err("the table has more keys than the kernel counts"),
    }
}

/// Of the launch that merges splits: a warp for each part of a row. Only the GPU knows which rows have so many splits that
/// all warps of a block work on one part after the other, so as long as all blocks run at once, parts do not share one.
pub(super) fn merge(case: &Case) -> std::result::Result<Grid, &'static str> {
    let rows = case.sequences * case.queries * case.heads;
    let parts = rows * case.sizes.dim.div_ceil(PAGED_MERGED);
    if i32::try_from(parts).is_err() {
        return Err("there are more queries than the kernel that merges splits counts");
    }
    let at_once = parts.min(PAGED_MERGE_BLOCKS * case.gpu.sms as usize);
    let blocks = parts.div_ceil(PAGED_WARPS).max(at_once);
    Ok(Grid::line(blocks as u32, (WARP * PAGED_WARPS) as u32))
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
        let units = units(case, keys, parts)?;
        let mut at_once = (1..=PAGED_WARPS / warps).rev();
        let at_once = at_once.find(|blocks| fits(&warps, *blocks)).unwrap_or(1);
        let blocks = (case.gpu.sms as usize * at_once).min(units) as u32;
        let threads = (WARP * warps) as u32;
        let (keys, merge) = match case.batch_invariant {
            true => (PAGED_SPLIT, Some(merge(case)?)),
            false => (keys, None),
        };
        Ok(Box::new(Self {
            module,
            index,
            rows,
            keys,
            parts,
            grid: Grid::new([blocks, 1, 1], threads, shared(&warps) as u32),
            merge,
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
        let unit = if self.merge.is_some() {
            "splits"
        } else {
            "units"
        };
        format!("{parts} x {rows} rows, {unit} of {keys} keys")
    }

    unsafe fn run(&self, launcher: &Launcher, call: &Call) -> Result<()> {
        let params = call.params(self.parts);
        // SAFETY: both kernels take `PagedAttentionParams`; the addresses are the caller's. The second reads nothing before
        // it has waited for the first.
        unsafe {
            launcher.run(self.module, self.index, self.grid, &params)?;
            match self.merge {
                Some(grid) => launcher
                    .overlapping()
                    .run(&FIXED_SPLIT, MERGE, grid, &params),
                None => Ok(()),
            }
        }
    }
}
