//! Few rows of x and quantized weights, GGUF blocks or codes: one kernel with the norm in front and
//! the epilogue behind, which reads the weights as they are.

use super::code_stream::{self, Streamed};
use super::few::FEW;
use super::gemv::{Core, Gemv, Matrix, NormKind, launch};
use super::parts::ProductAt;
use crate::cuda::{Address, BlockMatrix, Gpu, Grid, Launcher, Module, fatbin};
use crate::ops::linear::Activation;
use crate::ops::view::{dtype_index, float};
use candle_core::{DType, Result, bail};
use std::sync::Arc;

const OP: &str = "quant_linear";

/// As `FormatIndex` of `kernels/formats.cuh` numbers them.
static MODULE: Module = Module::new(
    "quant_linear",
    fatbin!("quant_linear"),
    &[
        "quant_linear_q4_0",
        "quant_linear_q4_1",
        "quant_linear_q5_0",
        "quant_linear_q5_1",
        "quant_linear_q8_0",
        "quant_linear_q4_k",
        "quant_linear_q5_k",
        "quant_linear_q6_k",
    ],
);

/// One takes INT4 in groups that the others do not, and so for ternary. The last two are for one row.
static CODES: Module = Module::new(
    "quant_codes",
    fatbin!("quant_codes"),
    &[
        "quant_codes_int8",
        "quant_codes_int4_g128",
        "quant_codes_int4",
        "quant_codes_int4_g32",
        "quant_codes_ternary_rows",
        "quant_codes_ternary_g128",
        "quant_codes_ternary",
        "quant_codes_stream_int4_g128",
        "quant_codes_stream_ternary_rows",
    ],
);

/// How each of those for several rows works: steps of [`GROUP`] values that a warp asks for at once, and
/// bytes behind a row of x in shared memory.
const CODE_CORES: [(usize, usize); 7] = [
    (2, 80),
    (4, 64),
    (4, 64),
    (4, 64),
    (8, 32),
    (4, 32),
    (4, 32),
];

/// Which of them takes a format, as `CodeFormat` of `kernels/codes.cuh` numbers those.
const CODE_KERNELS: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 6];

/// The first ternary format.
pub(super) const TERNARY: usize = 4;

/// The kernels for GGUF blocks with 8 rows of weights for a block, and then with 24.
static SMALL: Module = Module::new(
    "quant_linear_small",
    fatbin!("quant_linear_small"),
    &[
        "quant_small_q4_0",
        "quant_small_q4_1",
        "quant_small_q5_0",
        "quant_small_q5_1",
        "quant_small_q8_0",
        "quant_small_q4_k",
        "quant_small_q5_k",
        "quant_small_q6_k",
        "quant_small_wide_q4_0",
        "quant_small_wide_q4_1",
        "quant_small_wide_q5_0",
        "quant_small_wide_q5_1",
        "quant_small_wide_q8_0",
        "quant_small_wide_q4_k",
        "quant_small_wide_q5_k",
        "quant_small_wide_q6_k",
    ],
);

/// Before the first kernel for 24 rows of weights.
const WIDE: usize = 8;

/// Rows of weights of a block of a small product, and the groups of k that it has warps for.
const SMALL_SHAPES: [(usize, usize); 2] = [(8, 16), (24, 8)];

/// Rows of x that a launch takes.
const MOST_ROWS: usize = 4;

/// Rows of weights that a warp computes together.
const UNIT: usize = 16;

/// Values of a group of blocks.
const GROUP: usize = 128;

/// Matrices of one launch.
pub(super) const MOST_WEIGHTS: usize = 3;

/// Inputs up to which a row is short, and rows from which on there are many.
const SHORT: usize = 2048;
const MANY: usize = 16 << 10;

/// Rows of x up to which reading ternary weights again for every few of them costs less than making
/// them dense.
const MOST_TERNARY: usize = 64;

/// A product of few rows with quantized weights.
#[derive(Clone, Debug)]
pub(crate) struct FewBlocks {
    /// Matrices of k columns, side by side in the output.
    pub weights: Vec<Arc<BlockMatrix>>,
    pub at: ProductAt,
}

impl FewBlocks {
    fn core(&self, weight: &BlockMatrix) -> (&'static Module, Core) {
        match weight.codes() {
            None => (&MODULE, self.block_core(weight.format_index())),
            Some(_) => (&CODES, self.code_core(weight)),
        }
    }

    fn code_core(&self, weight: &BlockMatrix) -> Core {
        let format = weight.format_index();
        let kernel = code_kernel(weight);
        let (tile, padding) = CODE_CORES[kernel];
        let steps = self.at.k.div_ceil(GROUP);
        let row = if format >= TERNARY {
            // Bytes, the values they are made from, and what they are multiplied by.
            steps * GROUP + padding + 4 * self.at.k + 16
        } else {
            let parts = if self.at.x_dtype == DType::BF16 { 1 } else { 2 };
            parts * (2 * steps * GROUP + padding)
        };
        Core {
            kernel,
            most: MOST_ROWS,
            unit: UNIT,
            step: GROUP,
            tile,
            row,
            padded: false,
            fills: true,
        }
    }

    fn block_core(&self, kernel: usize) -> Core {
        let short = self.at.k < SHORT;
        let rows: usize = self.weights.iter().map(|w| w.rows()).sum();
        Core {
            kernel,
            most: MOST_ROWS,
            unit: UNIT,
            // A warp takes a group at a time, and that is enough for one.
            step: GROUP / 4,
            // Warps that share a short row run out of groups: with units enough they need not.
            tile: if short && rows >= MANY { 8 } else { 2 },
            // Two parts of 16 bits for each value, and twice for the sum of each block of 32.
            row: self.at.k.div_ceil(GROUP) * (4 * GROUP + 32),
            padded: false,
            fills: false,
        }
    }

    /// The kernel for small products of one format behind an RMS norm or none, less the format, and
    /// its grid, where each multiprocessor has one block at most.
    fn small(&self, gpu: &Gpu) -> Option<(usize, Grid)> {
        let at = &self.at;
        let groups = at.k.div_ceil(GROUP);
        let is_f32 = at.x_dtype == DType::F32 && at.out_dtype == DType::F32;
        let centres = at.norm.is_some_and(|n| n.kind != NormKind::Rms);
        let codes = self.weights.iter().any(|w| w.codes().is_some());
        if codes
            || !is_f32
            || centres
            || at.m > MOST_ROWS
            || gpu.arch < 80
            || self.runs().count() > 1
        {
            return None;
        }
        let rows: usize = self.weights.iter().map(|w| w.rows()).sum();
        SMALL_SHAPES
            .iter()
            .enumerate()
            .map(|(wide, (unit, warps))| (wide * WIDE, rows.div_ceil(*unit), *unit / 8, *warps))
            .find(|(_, blocks, units, warps)| {
                *blocks <= gpu.sms as usize && (*units..=*warps).contains(&groups)
            })
            .map(|(kernel, blocks, ..)| (kernel, Grid::line(blocks as u32, 32 * groups as u32)))
    }

    /// Rows of x that are few.
    fn most_rows(&self) -> usize {
        let is_ternary = |w: &Arc<BlockMatrix>| w.codes().is_some() && w.format_index() >= TERNARY;
        match self.weights.iter().all(is_ternary) {
            true => MOST_TERNARY,
            false => FEW,
        }
    }

    /// Whether one launch can gate, the 8-byte accesses fit x and the norm, and the GPU has the
    /// shared memory that one row of x takes.
    pub fn fits(&self, launcher: &Launcher) -> bool {
        let at = &self.at;
        let norm = at.norm.map_or([0; 2], |n| [n.weight, n.bias]);
        let gates = at.activation == Activation::SwiGlu;
        let matrices = || self.weights.iter().map(AsRef::as_ref);
        at.m <= self.most_rows()
            && !super::tiles::takes(launcher.gpu, matrices(), at)
            && norm.iter().chain([&at.x]).all(|a| a.is_multiple_of(16))
            && !(gates && self.runs().count() > 1)
            && self
                .runs()
                .all(|run| self.core(&run[0]).1.rows_at_once(launcher.gpu) > 0)
    }

    /// Neighbours of one format, as many as a launch takes.
    fn runs(&self) -> impl Iterator<Item = &[Arc<BlockMatrix>]> {
        self.weights
            .chunk_by(|a, b| a.format() == b.format())
            .flat_map(|run| run.chunks(MOST_WEIGHTS))
    }
}

/// Launches the product: once for each run of weights of one format and for each four rows of x.
///
/// # Safety
/// Each address holds what its field says, until the stream has passed the launches. In a dependent
/// chain no kernel in front writes weights, norm or bias.
pub(super) unsafe fn few_blocks(launcher: &Launcher, product: &FewBlocks) -> Result<()> {
    let at = &product.at;
    float(OP, "x", at.x_dtype)?;
    if !product.fits(launcher) || (at.out_dtype != at.x_dtype && at.out_dtype != DType::F32) {
        bail!(
            "{OP}: {} rows of {} inputs in {:?} to {:?} are not what the kernel for few rows takes: \
             at most {}, aligned to 16 bytes, of what {} bytes of shared memory hold, and outputs \
             of x's dtype or f32",
            at.m,
            at.k,
            at.x_dtype,
            at.out_dtype,
            product.most_rows(),
            launcher.gpu.shared
        );
    }
    let mut column = 0;
    for run in product.runs() {
        // SAFETY: the caller's.
        unsafe { launch_run(launcher, product, run, column)? };
        column += run.iter().map(|w| w.rows()).sum::<usize>();
    }
    Ok(())
}

/// One run, whose outputs begin at `column`.
///
/// # Safety
/// As [`few_blocks`].
unsafe fn launch_run(
    launcher: &Launcher,
    product: &FewBlocks,
    run: &[Arc<BlockMatrix>],
    column: usize,
) -> Result<()> {
    let at = &product.at;
    let rows = run.iter().map(|w| w.rows()).sum();
    let bytes = run.iter().map(|w| w.size_in_bytes()).sum();
    let (module, core) = product.core(&run[0]);
    let [x_size, out_size] = [at.x_dtype, at.out_dtype].map(|d| d.size_in_bytes());
    let behind = |base: Address, elements: usize, size: usize| match base {
        0 => 0,
        base => base + (elements * size) as u64,
    };
    let mut params = Gemv::new(at.k, rows, at.activation);
    matrices(&mut params, run);
    if let Some(norm) = at.norm {
        params.prologue.set_norm(norm);
    }
    params.prologue.dtype = dtype_index(at.x_dtype) as i32;
    params.epilogue.bias = behind(at.bias, column, x_size);
    params.epilogue.stride = at.stride as u64;
    params.epilogue.dtype = dtype_index(at.x_dtype) as i32;
    params.epilogue.out_dtype = dtype_index(at.out_dtype) as i32;
    if let Some((small, grid)) = product.small(launcher.gpu) {
        let kernel = small + run[0].format_index();
        params.m = at.m as u32;
        params.prologue.x = at.x;
        (params.epilogue.out, params.epilogue.residuals) = (at.out, at.residuals);
        // SAFETY: the kernels take `Gemv`; the addresses are the caller's.
        return unsafe {
            launcher
                .moving(bytes as u64)
                .run(&SMALL, kernel, grid, &params)
        };
    }
    let once = core.rows_at_once(launcher.gpu);
    // All rows of a product in one way: those that are several meet ternary codes in bytes.
    let streams = at.m == 1 && run[0].codes().is_some();
    let streamed = streams.then(|| Streamed::of(core.kernel)).flatten();
    for start in (0..at.m).step_by(once) {
        params.m = (at.m - start).min(once) as u32;
        params.prologue.x = behind(at.x, start * at.k, x_size);
        let elements = start * at.stride + column;
        params.epilogue.out = behind(at.out, elements, out_size);
        params.epilogue.residuals = at.residuals.map(|r| behind(r, elements, x_size));
        let streamed = streamed.and_then(|(format, kernel)| {
            let (params, grid) = code_stream::spread(launcher, format, &params)?;
            Some((kernel, params, grid))
        });
        // SAFETY: the kernels take `Gemv`; the addresses are the caller's.
        unsafe {
            match streamed {
                Some((kernel, params, grid)) => launcher
                    .moving(bytes as u64)
                    .run(module, kernel, grid, &params)?,
                None => launch(launcher, module, &core, bytes, params)?,
            }
        }
    }
    Ok(())
}

/// Which of the kernels for codes takes a matrix: those for one group know no zero points.
pub(super) fn code_kernel(weight: &BlockMatrix) -> usize {
    let has_zeros = weight.codes().is_some_and(|codes| codes.zeros != 0);
    CODE_KERNELS[weight.format_index()] + usize::from(has_zeros && weight.format_index() == 1)
}

/// Sets the matrices, which are of one format.
pub(super) fn matrices(params: &mut Gemv, run: &[Arc<BlockMatrix>]) {
    let mut first = 0;
    for (matrix, weight) in params.weights.iter_mut().zip(run) {
        *matrix = Matrix {
            data: weight.address(),
            first: first as u32,
            ..Matrix::ABSENT
        };
        if let Some(codes) = weight.codes() {
            params.kind = codes.groups as i32;
            matrix.second = codes.scales;
            // Scales of 2 bytes in front of the zero points, if there are any.
            matrix.border = (codes.zeros.saturating_sub(codes.scales) / 2) as u32;
        }
        first += weight.rows();
    }
}
