//! Many rows of x and weights in INT8: x becomes int8 too, with a scale for each row, and the tensor
//! cores multiply integers.

use super::gemv::{EpilogueParams, NormAt, PrologueParams, activation_index};
use super::parts::ProductAt;
use super::tensor_map::{STAGE_K, tensor_map};
use super::w8a8_direct::Direct;
use crate::cuda::profile;
use crate::cuda::{Address, CodesAt, Gpu, Grid, Launcher, Module, Rows, Scratch, fatbin};
use crate::ops::linear::{Activation, Weight};
use crate::ops::view::dtype_index;
use crate::quant::{Format, Scheme};
use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::{DType, Result};

const OP: &str = "quant_linear";

/// Rows of x from which on they become int8, where every weight is in INT8; fewer meet the weights as
/// they are. From here on the product is faster by integers, as measured on an H100.
const MANY: usize = 64;

/// Matrices of one launch.
pub(super) const MOST_WEIGHTS: usize = 3;

/// Rows of x of a tile, of each block.
const TILE_ROWS: usize = 128;

/// Where the first stage of k may begin, as in `kernels/w8a8_sm90.cu`.
pub(super) const ALIGNMENT: usize = 1024;

/// Bytes of a row of outputs on its way: 64 of 16 bits, and what keeps the next row off the same banks.
const STAGED: usize = 144;

/// Rows and codes begin at multiples of this many bytes.
const PIECE: usize = 16;

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
    ],
)
.beside_the_next();

static WARPS: Module = Module::new("w8a8", fatbin!("w8a8"), &["w8a8_mma"]);

/// One for each of [`TILES`].
static HOPPER: Module = Module::new(
    "w8a8_sm90",
    fatbin!("w8a8_sm90"),
    &["w8a8_sm90_128_1", "w8a8_sm90_128_2", "w8a8_sm90_256_2"],
);

/// How a kernel cuts the product.
#[derive(Clone, Copy, Debug)]
struct Tile {
    /// Rows of W.
    columns: usize,
    /// Blocks that share them, each with rows of x of its own.
    cluster: usize,
    /// Nanoseconds that a tile takes for a stage of k, and that all take once, of an H100.
    stage: f64,
    start: f64,
}

/// Those of `kernels/w8a8_sm90.cu`; the first is that of `kernels/w8a8.cu` too.
const TILES: [Tile; 3] = [
    Tile {
        columns: 128,
        cluster: 1,
        stage: 360.,
        start: 0.,
    },
    Tile {
        columns: 128,
        cluster: 2,
        stage: 330.,
        start: 1500.,
    },
    Tile {
        columns: 256,
        cluster: 2,
        stage: 620.,
        start: 1500.,
    },
];

impl Tile {
    /// Stages of k.
    fn stages(&self) -> usize {
        match self.columns {
            128 => 6,
            _ => 4,
        }
    }

    /// Dynamic shared memory: the stages, wherever it begins, and outputs on their way.
    fn shared(&self) -> usize {
        self.stages() * (TILE_ROWS + self.columns) * STAGE_K + TILE_ROWS * STAGED + ALIGNMENT
    }
}

/// `Params` of `kernels/quantize_rows.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct QuantizeParams {
    prologue: PrologueParams,
    codes: Address,
    scales: Address,
    rows: u32,
    width: u32,
    pitch: u32,
    warps: u32,
    vectors: i32,
    padding: i32,
}

/// `Weights` of `kernels/w8a8.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct WeightParams {
    codes: Address,
    scales: Address,
    rows: u32,
    column: u32,
    tile: u32,
    padding: u32,
}

/// `Product` of `kernels/w8a8.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ProductParams {
    x: Address,
    x_scales: Address,
    weights: [WeightParams; MOST_WEIGHTS],
    epilogue: EpilogueParams,
    m: u32,
    k: u32,
    width: u32,
    m_tiles: u32,
    n_tiles: u32,
    section: u32,
    gated_part: u32,
    gated_row: u32,
}

/// `Params` of `kernels/w8a8_sm90.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct HopperParams {
    x: sys::CUtensorMap,
    weights: [sys::CUtensorMap; MOST_WEIGHTS],
    product: ProductParams,
}

/// Which tensor cores multiply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    /// Those of warps, one block for each tile.
    Warps,
    /// Those of warpgroups, on Hopper.
    Warpgroups,
}

impl Form {
    fn of(gpu: &Gpu) -> Result<Self> {
        match gpu.arch == 90 && HOPPER.built_for(gpu, 0)? == 90 {
            true => Ok(Form::Warpgroups),
            false => Ok(Form::Warps),
        }
    }
}

/// Whether so many rows become int8 before a product with `weights`.
pub(super) fn is_in_int8(weights: &[Weight], m: usize) -> bool {
    let is_int8 = |weight: &Weight| match weight {
        Weight::Blocks(w) => w.format() == Format::Scheme(Scheme::Int8),
        _ => false,
    };
    m >= MANY && !weights.is_empty() && weights.iter().all(is_int8)
}

/// A product of many rows by integers.
#[derive(Clone, Debug)]
pub(super) struct W8A8 {
    /// Codes and rows of the matrices, side by side in the output.
    pub weights: Vec<(CodesAt, usize)>,
    pub at: ProductAt,
}

impl W8A8 {
    /// The product of rows that are at `at` with `weights`; none if they are not all in INT8, the rows
    /// are few, or no kernel takes them together.
    pub fn new(weights: &[Weight], at: &ProductAt) -> Option<Self> {
        if !is_in_int8(weights, at.m) {
            return None;
        }
        let codes = |weight: &Weight| match weight {
            Weight::Blocks(w) => Some((w.codes()?, w.rows())),
            _ => None,
        };
        let weights: Vec<_> = weights.iter().map(codes).collect::<Option<_>>()?;
        let product = Self { weights, at: *at };
        product.fits().then_some(product)
    }

    /// Whether a kernel takes the matrices together, and 16-byte accesses fit eight outputs and all that
    /// belongs to them.
    fn fits(&self) -> bool {
        let at = &self.at;
        let paired = match &self.weights[..] {
            [_] => true,
            [(_, gate), (_, up)] => gate == up,
            _ => false,
        };
        let addresses = [at.bias, at.residuals[0], at.residuals[1], at.out];
        let rows = self.weights.iter().map(|(_, rows)| *rows);
        let mut counts = rows.chain([at.stride, at.activation.outputs(self.rows())]);
        self.weights.len() <= MOST_WEIGHTS
            && (!self.gates() || paired)
            && addresses.iter().all(|a| a.is_multiple_of(16))
            && counts.all(|n| n.is_multiple_of(8))
    }

    /// k with the zeros behind it.
    fn pitch(&self) -> usize {
        self.at.k.next_multiple_of(PIECE)
    }

    pub fn rows(&self) -> usize {
        self.weights.iter().map(|(_, rows)| rows).sum()
    }

    fn gates(&self) -> bool {
        self.at.activation == Activation::SwiGlu
    }

    /// Tiles of x above one another, of all blocks of a cluster together, and of W beside one another.
    fn tiles(&self, tile: &Tile) -> [usize; 2] {
        [
            self.at.m.div_ceil(TILE_ROWS * tile.cluster),
            self.beside(tile.columns),
        ]
    }

    /// Tiles of so many rows of W beside one another.
    pub fn beside(&self, columns: usize) -> usize {
        if self.gates() {
            return (self.rows() / 2).div_ceil(columns / 2);
        }
        let of_each = |(_, rows): &(CodesAt, usize)| rows.div_ceil(columns);
        self.weights.iter().map(of_each).sum()
    }

    /// The place among [`TILES`] of the one that takes the shortest time.
    fn tile(&self, form: Form, sms: u32) -> usize {
        if form == Form::Warps {
            return 0;
        }
        let stages = self.pitch().div_ceil(STAGE_K) as f64;
        let time = |(_, tile): &(usize, &Tile)| {
            let [above, beside] = self.tiles(tile);
            let at_once = (sms as usize / tile.cluster).max(1);
            (above * beside).div_ceil(at_once) as f64 * stages * tile.stage + tile.start
        };
        let fits = |(_, tile): &(usize, &Tile)| self.at.m > TILE_ROWS * (tile.cluster - 1);
        let tiles = TILES.iter().enumerate().filter(fits);
        let least = tiles.min_by(|a, b| time(a).total_cmp(&time(b)));
        least.map_or(0, |(index, _)| index)
    }

    /// How one launch takes it, if that is faster than two.
    fn direct(&self, gpu: &Gpu, form: Form) -> Option<Direct> {
        match form {
            Form::Warps => None,
            Form::Warpgroups => Direct::of(gpu, self),
        }
    }

    /// How it runs, for the trace.
    pub fn path(&self, gpu: &Gpu) -> String {
        match Form::of(gpu) {
            Ok(form) => {
                if let Some(direct) = self.direct(gpu, form) {
                    return format!("w8a8 {}", direct.path());
                }
                let Tile {
                    columns, cluster, ..
                } = TILES[self.tile(form, gpu.sms)];
                format!("w8a8 {form:?} {columns}x{cluster}").to_lowercase()
            }
            Err(e) => format!("w8a8: {e}"),
        }
    }

    /// What the copy engine is told of the weights, the first in place of those that are not there.
    pub fn tensor_maps(&self, rows_of_tile: usize) -> Result<[sys::CUtensorMap; MOST_WEIGHTS]> {
        let weight = |i: usize| {
            let (codes, rows) = self.weights.get(i).unwrap_or(&self.weights[0]);
            tensor_map(codes.codes, [*rows, self.pitch()], rows_of_tile)
        };
        Ok([weight(0)?, weight(1)?, weight(2)?])
    }

    /// For tiles of so many rows of W, `[above, beside]` one another, of which those of `section` rows of
    /// tiles are taken together.
    pub fn params(
        &self,
        [x, x_scales]: [Address; 2],
        columns: usize,
        [m_tiles, n_tiles]: [usize; 2],
        section: usize,
    ) -> ProductParams {
        let at = &self.at;
        let absent = WeightParams {
            codes: 0,
            scales: 0,
            rows: 0,
            column: 0,
            tile: u32::MAX,
            padding: 0,
        };
        let mut weights = [absent; MOST_WEIGHTS];
        let (mut column, mut tile) = (0, 0);
        for (i, (params, (codes, rows))) in weights.iter_mut().zip(&self.weights).enumerate() {
            *params = WeightParams {
                codes: codes.codes,
                scales: codes.scales,
                rows: *rows as u32,
                column: column as u32,
                // What gates multiply is not a tile's first piece.
                tile: match self.gates() && i > 0 {
                    true => u32::MAX,
                    false => tile as u32,
                },
                padding: 0,
            };
            column += rows;
            tile += rows.div_ceil(columns);
        }
        let width = at.activation.outputs(self.rows());
        let in_two = self.weights.len() == 2;
        ProductParams {
            x,
            x_scales,
            weights,
            epilogue: EpilogueParams {
                bias: at.bias,
                residuals: at.residuals,
                out: at.out,
                stride: at.stride as u64,
                activation: activation_index(at.activation),
                dtype: dtype_index(at.x_dtype) as i32,
                out_dtype: dtype_index(at.out_dtype) as i32,
                padding: 0,
            },
            m: at.m as u32,
            k: self.pitch() as u32,
            width: width as u32,
            m_tiles: m_tiles as u32,
            n_tiles: n_tiles as u32,
            section: section as u32,
            gated_part: in_two.into(),
            gated_row: if in_two { 0 } else { width as u32 },
        }
    }
}

/// Launches the product: one kernel makes int8 of x, behind the norm, and one multiplies, or one does both.
///
/// # Errors
/// If memory is short, or the driver does not take the shape.
///
/// # Safety
/// As [`super::product`].
pub(super) unsafe fn w8a8(
    launcher: &Launcher,
    scratch: &mut Scratch,
    product: &W8A8,
) -> Result<()> {
    let (m, pitch) = (product.at.m, product.pitch());
    let form = Form::of(launcher.gpu)?;
    if let Some(direct) = product.direct(launcher.gpu, form) {
        // SAFETY: the caller's.
        return unsafe { direct.run(launcher, product) };
    }
    let codes = scratch.take(OP, DType::U8, m * pitch)?;
    let scales = scratch.take(OP, DType::F32, m)?;
    let index = product.tile(form, launcher.gpu.sms);
    let tile = &TILES[index];
    let [above, beside] = product.tiles(tile);
    let section = above.min(SECTION / tile.cluster);
    let params = product.params([codes, scales], tile.columns, [above, beside], section);
    let outputs = m * product.at.stride * product.at.out_dtype.size_in_bytes();
    let bytes = (m + product.rows()) * pitch + outputs;
    // The product may begin while x is still on its way to int8, for which all of its blocks wait, as do
    // those that make it int8 for whatever comes before; launches that are timed one by one are apart.
    let launcher = &Launcher {
        dependent: launcher.dependent || !profile::is_capturing(),
        ..*launcher
    };
    let next = launcher.moving(bytes as u64);
    let tiles = params.m_tiles * params.n_tiles;
    // SAFETY: the caller's; the scratch has room for the codes and scales of all rows, the layouts are
    // those of the kernels, and weights are as `kernels/codes.cuh` says.
    unsafe {
        quantize(launcher, &product.at, pitch, codes, scales)?;
        match form {
            Form::Warps => next.run(&WARPS, 0, Grid::line(tiles, 256), &params),
            Form::Warpgroups => {
                let params = HopperParams {
                    x: tensor_map(codes, [m, pitch], TILE_ROWS)?,
                    weights: product.tensor_maps(tile.columns / 2)?,
                    product: params,
                };
                let clusters = tiles.min((launcher.gpu.sms / tile.cluster as u32).max(1));
                let grid = Grid {
                    cluster: tile.cluster as u32,
                    ..Grid::new(
                        [clusters * tile.cluster as u32, 1, 1],
                        384,
                        tile.shared() as u32,
                    )
                };
                next.run(&HOPPER, index, grid, &params)
            }
        }
    }
}

/// Makes int8 of the rows at `at`, behind its norm.
///
/// # Safety
/// There is room for the codes of m rows, `pitch` bytes apart, and for m scales; the rest is the
/// caller's of [`w8a8`].
unsafe fn quantize(
    launcher: &Launcher,
    at: &ProductAt,
    pitch: usize,
    codes: Address,
    scales: Address,
) -> Result<()> {
    let norm = at.norm.map_or([0; 2], |n: NormAt| [n.weight, n.bias]);
    let rows = Rows::new(OP, at.m, at.k, at.x_dtype, &[at.x, norm[0], norm[1]])?;
    let mut params = QuantizeParams {
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
        padding: 0,
    };
    if let Some(norm) = at.norm {
        params.prologue.set_norm(norm);
    }
    let bytes = at.m * (at.k * at.x_dtype.size_in_bytes() + pitch);
    let kernel = dtype_index(at.x_dtype);
    // SAFETY: the layout is `Params` of the kernel; the addresses are the caller's.
    unsafe {
        launcher
            .moving(bytes as u64)
            .run(&QUANTIZE, kernel, rows.grid(), &params)
    }
}
