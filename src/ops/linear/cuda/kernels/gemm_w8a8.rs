//! INT8 or FP8 weights and many rows of x: x becomes int8 too, with a scale for each row, or e4m3, with a scale for each
//! 128 values, and the tensor cores multiply 8 bits. One kernel quantizes x, one multiplies.

use super::super::plan::{Kernel, Planned};
use super::super::problem::{Case, NormAt, Operands, ProductAt};
use super::gemv::PrologueParams;
use super::tensor_map::{STAGE_K, tensor_map};
use super::w8a8_params::{ALIGNMENT, check, pitch, product_params, tensor_maps, tiles_of_w};
use crate::cuda::abi::{
    K_BLOCK, QuantizeRowsParams, W8A8_ROWS as TILE_ROWS, W8A8_SM90, W8A8_SM90_THREADS,
    W8A8_STAGED_PITCH, W8A8Sm90, W8A8Sm90Params,
};
use crate::cuda::{Address, Grid, Launcher, Module, Rows, Scratch, fatbin};
use crate::ops::view::dtype_index;
use crate::quant::Scheme;
use candle_core::{DType, Result};
use std::sync::Arc;

const OP: &str = "quant_linear";

/// Dtypes that there are kernels for.
const DTYPES: usize = 3;

/// What a kernel of [`QUANTIZE`] makes of rows, by its place among them.
#[derive(Clone, Copy)]
pub(super) enum QuantizedAs {
    /// Int8, with a scale for each row.
    Int8 = 0,
    /// Rounded to int8, in x's dtype.
    Rounded = 1,
    /// E4m3, with a scale for each 128 values.
    E4m3 = 2,
    /// 16-bit whole numbers in two int8 parts, with a power of two for each 128 values.
    Int16 = 3,
}

impl QuantizedAs {
    fn kernel(self, dtype: DType) -> usize {
        self as usize * DTYPES + dtype_index(dtype)
    }
}

/// Tiles of x's rows whose codes stay in the L2 cache while the weights go by.
const SECTION: usize = 16;

/// The product's blocks fetch their first weights beside its last ones.
static QUANTIZE: Module = Module::new(
    "quantize_rows",
    fatbin!("quantize_rows"),
    &[
        "quantize_rows_f32",
        "quantize_rows_f16",
        "quantize_rows_bf16",
        "quantize_rows_back_f32",
        "quantize_rows_back_f16",
        "quantize_rows_back_bf16",
        "quantize_rows_e4m3_f32",
        "quantize_rows_e4m3_f16",
        "quantize_rows_e4m3_bf16",
        "quantize_rows_int16_f32",
        "quantize_rows_int16_f16",
        "quantize_rows_int16_bf16",
    ],
)
.with_all_shared_memory();

static WARPS: Module = Module::new("gemm_w8a8", fatbin!("gemm_w8a8"), &["gemm_w8a8_mma"]);

/// Of weights with scales of rows, and of those with scales of blocks.
static FP8_WARPS: Module = Module::new(
    "gemm_fp8_mma",
    fatbin!("gemm_fp8_mma"),
    &["gemm_fp8_mma", "gemm_fp8_mma_block"],
);

/// One for each of [`TILES`].
static HOPPER: Module = Module::new(
    "gemm_w8a8_sm90",
    fatbin!("gemm_w8a8_sm90"),
    &[
        "gemm_w8a8_sm90_128_1",
        "gemm_w8a8_sm90_128_2",
        "gemm_w8a8_sm90_256_2",
    ],
);

/// One for each of the first of [`TILES`], of weights with scales of rows and then of those with scales of blocks.
static FP8: Module = Module::new(
    "gemm_fp8_sm90",
    fatbin!("gemm_fp8_sm90"),
    &[
        "gemm_fp8_sm90_1",
        "gemm_fp8_sm90_2",
        "gemm_fp8_sm90_block_1",
        "gemm_fp8_sm90_block_2",
    ],
);

/// Tiles that [`FP8`] has kernels for: a thread of wider ones would have too many sums.
const FP8_TILES: usize = 2;

/// How a kernel cuts the product.
#[derive(Clone, Copy, Debug)]
struct Tile {
    form: W8A8Sm90,
    /// Nanoseconds that a tile takes for a stage of k, and that all take once, of an H100.
    stage: f64,
    start: f64,
}

/// Those of [`W8A8_SM90`]; the first is that of `kernels/linear/gemm_w8a8_mma.cuh` too.
const TILES: [Tile; 3] = [
    Tile {
        form: W8A8_SM90[0],
        stage: 360.,
        start: 0.,
    },
    Tile {
        form: W8A8_SM90[1],
        stage: 330.,
        start: 1500.,
    },
    Tile {
        form: W8A8_SM90[2],
        stage: 620.,
        start: 1500.,
    },
];

impl Tile {
    /// Dynamic shared memory: the stages, wherever it begins, and outputs before they are stored.
    fn shared(&self) -> usize {
        let W8A8Sm90 {
            columns, stages, ..
        } = self.form;
        stages * (TILE_ROWS + columns) * STAGE_K + TILE_ROWS * W8A8_STAGED_PITCH + ALIGNMENT
    }
}

/// Who multiplies.
#[derive(Clone, Copy, Debug)]
enum By {
    /// Warps, int8.
    Warps,
    /// Warps, e4m3.
    WarpsFp8,
    /// Hopper's warpgroups, int8.
    Warpgroups,
    /// The same, e4m3.
    WarpgroupsFp8,
}

impl By {
    fn is_fp8(self) -> bool {
        matches!(self, Self::WarpsFp8 | Self::WarpgroupsFp8)
    }

    fn module(self) -> &'static Module {
        match self {
            Self::Warps => &WARPS,
            Self::WarpsFp8 => &FP8_WARPS,
            Self::Warpgroups => &HOPPER,
            Self::WarpgroupsFp8 => &FP8,
        }
    }
}

/// How two launches carry out a product.
#[derive(Debug)]
struct TwoLaunches {
    tile: Tile,
    /// The kernel that multiplies, by its place among them.
    by: By,
    index: usize,
    /// Tiles of x above one another, of all blocks of a cluster together, and of W beside one another.
    tiles: [usize; 2],
    grid: Grid,
}

/// By the tensor cores of warps.
pub(crate) fn mma(case: &Case) -> Planned {
    check(case)?;
    by_warps(case, By::Warps, 0)
}

/// The same of FP8, whose x is in e4m3.
pub(crate) fn fp8_mma(case: &Case) -> Planned {
    check_fp8(case)?;
    by_warps(case, By::WarpsFp8, has_scales_of_blocks(case).into())
}

/// One block for each tile.
fn by_warps(case: &Case, by: By, index: usize) -> Planned {
    let tile = TILES[0];
    let tiles = tiles(case, &tile);
    Ok(Arc::new(TwoLaunches {
        tile,
        by,
        index,
        tiles,
        grid: Grid::line((tiles[0] * tiles[1]) as u32, 256),
    }))
}

/// By those of warpgroups, with the tile that takes the shortest time.
pub(crate) fn sm90(case: &Case) -> Planned {
    check(case)?;
    on_hopper(case, By::Warpgroups, &TILES, 0)
}

/// The same of FP8, whose x is in e4m3.
pub(crate) fn fp8_sm90(case: &Case) -> Planned {
    check_fp8(case)?;
    let blocks = has_scales_of_blocks(case);
    let first = if blocks { FP8_TILES } else { 0 };
    on_hopper(case, By::WarpgroupsFp8, &TILES[..FP8_TILES], first)
}

fn has_scales_of_blocks(case: &Case) -> bool {
    case.scheme() == Some(Scheme::Fp8Block128)
}

/// Whether the kernels that quantize x to e4m3 and multiply it take the case.
fn check_fp8(case: &Case) -> std::result::Result<(), &'static str> {
    check(case)?;
    if !case.k.is_multiple_of(K_BLOCK) {
        return Err("K is no multiple of 128");
    }
    if !case.alignment.x || !case.alignment.norm {
        return Err("x or the norm does not begin at 16 bytes");
    }
    let half_tile = TILES[0].form.columns / 2;
    if has_scales_of_blocks(case) && case.gates() && !case.width().is_multiple_of(half_tile) {
        return Err("what gates multiply is in other blocks of rows than a tile's");
    }
    Ok(())
}

/// With one of the tiles, whose kernels are those from `first` on.
fn on_hopper(case: &Case, by: By, all: &[Tile], first: usize) -> Planned {
    let sms = case.gpu.sms as usize;
    let stages = pitch(case.k).div_ceil(STAGE_K) as f64;
    let time = |(_, tile): &(usize, &Tile)| {
        let [above, beside] = tiles(case, tile);
        let at_once = (sms / tile.form.cluster).max(1);
        (above * beside).div_ceil(at_once) as f64 * stages * tile.stage + tile.start
    };
    let fits = |(_, tile): &(usize, &Tile)| case.m > TILE_ROWS * (tile.form.cluster - 1);
    let fitting = all.iter().enumerate().filter(fits);
    let least = fitting.min_by(|a, b| time(a).total_cmp(&time(b)));
    let (index, tile) = least.ok_or("there is no tile of so few rows")?;
    let tiles = tiles(case, tile);
    let clusters = (tiles[0] * tiles[1]).min((sms / tile.form.cluster).max(1));
    Ok(Arc::new(TwoLaunches {
        tile: *tile,
        by,
        index: first + index,
        tiles,
        grid: Grid {
            cluster: tile.form.cluster as u32,
            ..Grid::new(
                [(clusters * tile.form.cluster) as u32, 1, 1],
                W8A8_SM90_THREADS as u32,
                tile.shared() as u32,
            )
        },
    }))
}

fn tiles(case: &Case, tile: &Tile) -> [usize; 2] {
    [
        case.m.div_ceil(TILE_ROWS * tile.form.cluster),
        tiles_of_w(case.matrices(), case.gates(), tile.form.columns),
    ]
}

impl TwoLaunches {
    /// Rows of x that are allocated: those of whole tiles, so that no row of a TMA box is out of bounds, which is slow.
    fn whole_rows(&self) -> usize {
        self.tiles[0] * TILE_ROWS * self.tile.form.cluster
    }

    /// Scales of x.
    fn scales(&self, m: usize, k: usize) -> usize {
        match self.by.is_fp8() {
            true => m * k.div_ceil(K_BLOCK),
            false => m,
        }
    }
}

impl Kernel for TwoLaunches {
    fn entry(&self) -> &'static str {
        self.by.module().names(self.index).1
    }

    fn grid(&self) -> Option<Grid> {
        Some(self.grid)
    }

    fn details(&self) -> String {
        format!("tiles of {TILE_ROWS}x{}", self.tile.form.columns)
    }

    fn scratch(&self, operands: &Operands) -> usize {
        let ProductAt { m, k, .. } = operands.at;
        Scratch::room(DType::U8, self.whole_rows() * pitch(k))
            + Scratch::room(DType::F32, self.scales(m, k))
    }

    unsafe fn run(
        &self,
        launcher: &Launcher,
        scratch: &mut Scratch,
        operands: &Operands,
    ) -> Result<()> {
        let at = &operands.at;
        let (m, pitch, tile) = (at.m, pitch(at.k), &self.tile);
        let x = scratch.take(OP, DType::U8, self.whole_rows() * pitch)?;
        let scales = scratch.take(OP, DType::F32, self.scales(m, at.k))?;
        let section = self.tiles[0].min(SECTION / tile.form.cluster);
        let params = product_params(
            operands,
            [x, scales],
            tile.form.columns,
            self.tiles,
            section,
        )?;
        let outputs = m * at.stride * at.out_dtype.size_in_bytes();
        let bytes = (m + operands.rows()) * pitch + outputs;
        // The product may begin while x is still on its way to int8, for which all of its blocks wait, as do
        // those that make it int8 for whatever comes before.
        let launcher = &launcher.overlapping();
        let next = launcher.moving(bytes as u64);
        // SAFETY: the caller's; the scratch has room for the values and scales of all rows, the structs are
        // those of the kernels, and weights are as `kernels/formats/packed.cuh` says.
        unsafe {
            let form = match self.by.is_fp8() {
                true => QuantizedAs::E4m3,
                false => QuantizedAs::Int8,
            };
            quantize(launcher, at, pitch, [x, scales], form)?;
            match self.by {
                By::Warps | By::WarpsFp8 => {
                    next.run(self.by.module(), self.index, self.grid, &params)
                }
                by => {
                    let params = W8A8Sm90Params {
                        x: tensor_map(x, [self.whole_rows(), pitch], TILE_ROWS)?,
                        weights: tensor_maps(operands, tile.form.columns / 2, by.is_fp8())?,
                        product: params,
                    };
                    next.run(by.module(), self.index, self.grid, &params)
                }
            }
        }
    }
}

/// Makes codes of the rows at `at`, after its norm.
///
/// # Safety
/// There is room for the codes of m rows, `pitch` bytes each (2 `pitch` for 16 bits), and for their scales (for 16 bits those
/// of whole units of `W8A16_UNIT` rows); the rest is the caller's of [`Kernel::run`]. For e4m3 and 16 bits rows divide by 128 and everything is aligned to 16 bytes.
pub(super) unsafe fn quantize(
    launcher: &Launcher,
    at: &ProductAt,
    pitch: usize,
    [codes, scales]: [Address; 2],
    form: QuantizedAs,
) -> Result<()> {
    let (rows, params) = params(at, pitch, codes, scales)?;
    let parts = match form {
        QuantizedAs::Int16 => 2,
        _ => 1,
    };
    let bytes = at.m * (at.k * at.x_dtype.size_in_bytes() + parts * pitch);
    let kernel = form.kernel(at.x_dtype);
    // SAFETY: the kernel takes `QuantizeRowsParams`; the addresses are the caller's.
    unsafe {
        launcher
            .moving(bytes as u64)
            .run(&QUANTIZE, kernel, rows.grid(), &params)
    }
}

/// The rows at `at` after its norm, rounded to 8 bits of each, in their dtype
/// ([`PerToken8`](crate::ActivationBits::PerToken8)).
///
/// # Errors
/// If the launch fails or memory is short.
///
/// # Safety
/// As [`Kernel::run`].
pub(crate) unsafe fn rounded_rows(
    launcher: &Launcher,
    scratch: &mut Scratch,
    at: &ProductAt,
) -> Result<Address> {
    let values = at.m * at.k;
    let out = scratch.take(OP, at.x_dtype, values)?;
    let (rows, params) = params(at, at.k, out, 0)?;
    let bytes = 2 * values * at.x_dtype.size_in_bytes();
    let kernel = QuantizedAs::Rounded.kernel(at.x_dtype);
    // SAFETY: as in `quantize`; the scratch has room for all rows.
    unsafe {
        let launcher = launcher.moving(bytes as u64);
        launcher.run(&QUANTIZE, kernel, rows.grid(), &params)?;
    }
    Ok(out)
}

/// What the kernels take that round rows.
fn params(
    at: &ProductAt,
    pitch: usize,
    codes: Address,
    scales: Address,
) -> Result<(Rows, QuantizeRowsParams)> {
    let norm = at.norm.map_or([0; 2], |n: NormAt| [n.weight, n.bias]);
    let rows = Rows::new(OP, at.m, at.k, at.x_dtype, &[at.x, norm[0], norm[1]])?;
    let mut params = QuantizeRowsParams {
        prologue: PrologueParams {
            x: at.x,
            dtype: dtype_index(at.x_dtype) as i32,
            ..PrologueParams::default()
        },
        codes,
        scales,
        rows: rows.rows,
        width: rows.width,
        pitch: pitch as u32,
        warps: rows.warps,
        vectors: rows.vectors.into(),
    };
    if let Some(norm) = at.norm {
        params.prologue.set_norm(norm);
    }
    Ok((rows, params))
}
