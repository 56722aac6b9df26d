//! The host's side of `kernels/gemv.cuh`: its parameters, and how a product is spread over blocks and
//! warps.

use crate::cuda::{Address, Gpu, Grid, Launcher, Module};
use crate::ops::linear::Activation;
use candle_core::Result;

const WARP: usize = 32;

/// Warps of a block.
const WARPS: usize = 8;

/// Static shared memory of the kernels at most.
const FIXED_SHARED: usize = 4096;

/// `Matrix` of the kernels.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Matrix {
    pub data: Address,
    /// A second matrix, for kernels that take one.
    pub second: Address,
    /// Its first row among those of all weights.
    pub first: u32,
    /// Values of k that the second has not.
    pub border: u32,
}

impl Matrix {
    /// A weight that is not there.
    pub const ABSENT: Self = Self {
        data: 0,
        second: 0,
        first: u32::MAX,
        border: 0,
    };
}

/// `Prologue` of the kernels.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct PrologueParams {
    pub x: Address,
    pub weight: Address,
    pub bias: Address,
    pub eps: f32,
    /// 0 for none, 1 for an RMS norm, 2 for a layer norm.
    pub norm: i32,
    pub dtype: i32,
    pub padding: i32,
}

/// Which norm is in front of a product, as `kernels/prologue.cuh` numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormKind {
    Rms = 1,
    Layer = 2,
}

/// A norm on raw addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormAt {
    pub kind: NormKind,
    /// `[k]`.
    pub weight: Address,
    /// Likewise, for a layer norm; 0 for none.
    pub bias: Address,
    pub eps: f32,
}

impl PrologueParams {
    /// Sets the norm.
    pub fn set_norm(&mut self, norm: NormAt) {
        self.norm = norm.kind as i32;
        (self.weight, self.bias, self.eps) = (norm.weight, norm.bias, norm.eps);
    }
}

/// `Epilogue` of the kernels.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct EpilogueParams {
    pub bias: Address,
    pub residuals: [Address; 2],
    pub out: Address,
    pub stride: u64,
    pub activation: i32,
    pub dtype: i32,
    pub out_dtype: i32,
    pub padding: i32,
}

/// `Gemv` of the kernels.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Gemv {
    pub weights: [Matrix; 3],
    pub prologue: PrologueParams,
    pub epilogue: EpilogueParams,
    pub m: u32,
    pub k: u32,
    pub rows: u32,
    pub width: u32,
    /// Warps that share a unit, or slots of a ring.
    pub split: u32,
    /// The dtype of dense weights; of codes how many scales each 128 values of a row have.
    pub kind: i32,
}

impl Gemv {
    /// A product without weights, prologue or epilogue yet.
    pub fn new(k: usize, rows: usize, activation: Activation) -> Self {
        Self {
            weights: [Matrix::ABSENT; 3],
            prologue: PrologueParams::default(),
            epilogue: EpilogueParams {
                activation: activation_index(activation),
                ..EpilogueParams::default()
            },
            m: 0,
            k: k as u32,
            rows: rows as u32,
            width: activation.outputs(rows) as u32,
            split: 1,
            kind: 0,
        }
    }
}

/// As `kernels/epilogue.cuh` numbers them.
pub(crate) fn activation_index(activation: Activation) -> i32 {
    match activation {
        Activation::None => 0,
        Activation::Silu => 1,
        Activation::Gelu => 2,
        Activation::GeluTanh => 3,
        Activation::SwiGlu => 4,
    }
}

/// A kernel and how it works.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Core {
    /// Its place in the module.
    pub kernel: usize,
    /// Rows of x that it takes at most.
    pub most: usize,
    /// Rows of weights that a warp computes together.
    pub unit: usize,
    /// Values of k that a warp takes at a time.
    pub step: usize,
    /// Such steps that it asks for at once.
    pub tile: usize,
    /// Shared memory of a row of x, in bytes.
    pub row: usize,
    /// Whether it stages `most` rows even if there are fewer.
    pub padded: bool,
    /// Whether warps share units until there are blocks for the whole GPU.
    pub fills: bool,
}

impl Core {
    /// Rows of x for which there is shared memory.
    pub fn rows_at_once(&self, gpu: &Gpu) -> usize {
        let room = (gpu.shared as usize).saturating_sub(FIXED_SHARED);
        let rows = room / self.row.next_multiple_of(16).max(1);
        if self.padded && rows < self.most {
            // A kernel for more rows than there is room for cannot run at all.
            return 0;
        }
        rows.min(self.most)
    }

    fn shared(&self, m: usize) -> usize {
        let rows = if self.padded { self.most } else { m };
        rows * self.row.next_multiple_of(16)
    }

    /// Warps that share a unit, and blocks. As measured on an H100: two tiles for a warp, so that all
    /// of its weights are on the way before x is there, more where k is long and fewer where units
    /// are; full blocks, and two of them on a multiprocessor.
    fn shape(&self, gpu: &Gpu, units: usize, k: usize) -> (usize, usize) {
        let (steps, sms) = (k.div_ceil(self.step), gpu.sms as usize);
        let mut split = (steps.next_power_of_two() / (2 * self.tile)).clamp(1, WARPS);
        while split < WARPS && 2 * split <= steps && units * split < 4 * sms {
            split *= 2;
        }
        while self.fills && split < WARPS && 2 * split <= steps && units * split < 2 * WARPS * sms {
            split *= 2;
        }
        // Of one row half as many warps, if that leaves less of a tile empty (Pythia-2.8B: 8 %).
        let fill = |split| {
            let share = steps.div_ceil(split);
            share as f64 / share.next_multiple_of(self.tile) as f64
        };
        let one = self.most == 1 && self.tile == 4 && !self.fills;
        if one && split > 1 && fill(split / 2) > fill(split) {
            split /= 2;
        }
        (split, units.div_ceil(WARPS / split).min(2 * sms))
    }
}

/// Spreads the product of `params`, whose `m` is set, over blocks and warps.
pub(crate) fn spread(gpu: &Gpu, core: &Core, params: &mut Gemv) -> Grid {
    let outputs = if params.width < params.rows {
        core.unit / 2
    } else {
        core.unit
    };
    let units = (params.width as usize).div_ceil(outputs);
    let (split, blocks) = core.shape(gpu, units, params.k as usize);
    params.split = split as u32;
    Grid::new(
        [blocks as u32, 1, 1],
        (WARPS * WARP) as u32,
        core.shared(params.m as usize) as u32,
    )
}

/// Launches a kernel of the module on `params`, whose `m` is set, with the spread that fits its shape;
/// `bytes` are those of the weights.
///
/// # Safety
/// The kernel takes `Gemv`, and the addresses are valid for what it says of them until the stream
/// has passed the launch.
pub(crate) unsafe fn launch(
    launcher: &Launcher,
    module: &Module,
    core: &Core,
    bytes: usize,
    mut params: Gemv,
) -> Result<()> {
    let grid = spread(launcher.gpu, core, &mut params);
    // SAFETY: the caller's.
    unsafe {
        launcher
            .moving(bytes as u64)
            .run(module, core.kernel, grid, &params)
    }
}
