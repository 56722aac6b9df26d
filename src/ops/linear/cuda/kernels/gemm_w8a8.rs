//! INT8 weights and many rows of x: x becomes int8 too, with a scale for each row, and the tensor cores multiply
//! integers. One kernel quantizes x, one multiplies.

use super::super::plan::{Kernel, Planned};
use super::super::problem::{Case, NormAt, Operands, ProductAt};
use super::gemv::PrologueParams;
use super::tensor_map::{STAGE_K, tensor_map};
use super::w8a8_params::{ALIGNMENT, check, pitch, product_params, tensor_maps, tiles_of_w};
use crate::cuda::abi::{
    QuantizeRowsParams, W8A8_ROWS as TILE_ROWS, W8A8_SM90, W8A8_SM90_THREADS, W8A8_STAGED_PITCH,
    W8A8Sm90, W8A8Sm90Params,
};
use crate::cuda::{Address, Grid, Launcher, Module, Rows, Scratch, fatbin};
use crate::ops::view::dtype_index;
use candle_core::{DType, Result};
use std::sync::Arc;

const OP: &str = "quant_linear";

/// Dtypes that there are kernels for.
const DTYPES: usize = 3;

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
    ],
)
.with_all_shared_memory();

static WARPS: Module = Module::new("gemm_w8a8", fatbin!("gemm_w8a8"), &["gemm_w8a8_mma"]);

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

/// How a kernel cuts the product.
#[derive(Clone, Copy, Debug)]
struct Tile {
    form: W8A8Sm90,
    /// Nanoseconds that a tile takes for a stage of k, and that all take once, of an H100.
    stage: f64,
    start: f64,
}

/// Those of [`W8A8_SM90`]; the first is that of `kernels/linear/gemm_w8a8.cu` too.
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
    /// Dynamic shared memory: the stages, wherever it begins, and outputs on their way.
    fn shared(&self) -> usize {
        let W8A8Sm90 {
            columns, stages, ..
        } = self.form;
        stages * (TILE_ROWS + columns) * STAGE_K + TILE_ROWS * W8A8_STAGED_PITCH + ALIGNMENT
    }
}

/// How two launches carry out a product.
#[derive(Debug)]
struct TwoLaunches {
    tile: Tile,
    /// The kernel's place among Hopper's; `None` for that of warps.
    hopper: Option<usize>,
    /// Tiles of x above one another, of all blocks of a cluster together, and of W beside one another.
    tiles: [usize; 2],
    grid: Grid,
}

/// By the tensor cores of warps, one block for each tile.
pub(crate) fn mma(case: &Case) -> Planned {
    check(case)?;
    let tile = TILES[0];
    let tiles = tiles(case, &tile);
    Ok(Arc::new(TwoLaunches {
        tile,
        hopper: None,
        tiles,
        grid: Grid::line((tiles[0] * tiles[1]) as u32, 256),
    }))
}

/// By those of warpgroups, with the tile that takes the shortest time.
pub(crate) fn sm90(case: &Case) -> Planned {
    check(case)?;
    let sms = case.gpu.sms as usize;
    let stages = pitch(case.k).div_ceil(STAGE_K) as f64;
    let time = |(_, tile): &(usize, &Tile)| {
        let [above, beside] = tiles(case, tile);
        let at_once = (sms / tile.form.cluster).max(1);
        (above * beside).div_ceil(at_once) as f64 * stages * tile.stage + tile.start
    };
    let fits = |(_, tile): &(usize, &Tile)| case.m > TILE_ROWS * (tile.form.cluster - 1);
    let fitting = TILES.iter().enumerate().filter(fits);
    let least = fitting.min_by(|a, b| time(a).total_cmp(&time(b)));
    let (index, tile) = least.ok_or("there is no tile of so few rows")?;
    let tiles = tiles(case, tile);
    let clusters = (tiles[0] * tiles[1]).min((sms / tile.form.cluster).max(1));
    Ok(Arc::new(TwoLaunches {
        tile: *tile,
        hopper: Some(index),
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

impl Kernel for TwoLaunches {
    fn entry(&self) -> &'static str {
        match self.hopper {
            Some(index) => HOPPER.names(index).1,
            None => WARPS.names(0).1,
        }
    }

    fn grid(&self) -> Option<Grid> {
        Some(self.grid)
    }

    fn details(&self) -> String {
        format!("tiles of {TILE_ROWS}x{}", self.tile.form.columns)
    }

    fn scratch(&self, operands: &Operands) -> usize {
        let ProductAt { m, k, .. } = operands.at;
        Scratch::room(DType::U8, m * pitch(k)) + Scratch::room(DType::F32, m)
    }

    unsafe fn run(
        &self,
        launcher: &Launcher,
        scratch: &mut Scratch,
        operands: &Operands,
    ) -> Result<()> {
        let at = &operands.at;
        let (m, pitch, tile) = (at.m, pitch(at.k), &self.tile);
        let x = scratch.take(OP, DType::U8, m * pitch)?;
        let scales = scratch.take(OP, DType::F32, m)?;
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
            quantize(launcher, at, pitch, x, scales)?;
            match self.hopper {
                None => next.run(&WARPS, 0, self.grid, &params),
                Some(index) => {
                    let params = W8A8Sm90Params {
                        x: tensor_map(x, [m, pitch], TILE_ROWS)?,
                        weights: tensor_maps(operands, tile.form.columns / 2)?,
                        product: params,
                    };
                    next.run(&HOPPER, index, self.grid, &params)
                }
            }
        }
    }
}

/// Makes int8 of the rows at `at`, behind its norm.
///
/// # Safety
/// There is room for the codes of m rows, `pitch` bytes apart, and for m scales; the rest is the
/// caller's of [`Kernel::run`].
unsafe fn quantize(
    launcher: &Launcher,
    at: &ProductAt,
    pitch: usize,
    codes: Address,
    scales: Address,
) -> Result<()> {
    let (rows, params) = params(at, pitch, codes, scales)?;
    let bytes = at.m * (at.k * at.x_dtype.size_in_bytes() + pitch);
    let kernel = dtype_index(at.x_dtype);
    // SAFETY: the kernel takes `QuantizeRowsParams`; the addresses are the caller's.
    unsafe {
        launcher
            .moving(bytes as u64)
            .run(&QUANTIZE, kernel, rows.grid(), &params)
    }
}

/// The rows at `at` behind its norm, rounded to 8 bits of each, in their dtype
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
    let kernel = DTYPES + dtype_index(at.x_dtype);
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
