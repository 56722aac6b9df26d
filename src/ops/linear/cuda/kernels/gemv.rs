//! What the GEMV kernels share: their parameters, how a product is spread over blocks and warps, and its
//! launches.

use super::super::plan::{Kernel, Planned};
use super::super::problem::{Case, NormAt, Operand, Operands};
use crate::cuda::abi;
pub(crate) use crate::cuda::abi::{
    Epilogue as EpilogueParams, Gemv, Matrix, Prologue as PrologueParams,
};
use crate::cuda::abi::{GEMV_WARPS as WARPS, WARP};
use crate::cuda::{BlockMatrix, GpuSpec, Grid, Launcher, Module, Scratch};
use crate::ops::linear::{Activation, ActivationBits};
use crate::ops::view::dtype_index;
use candle_core::{DType, Result, bail};
use std::sync::Arc;

/// Static shared memory of the kernels at most.
pub(super) const FIXED_SHARED: usize = 4096;

impl Matrix {
    /// A weight that is not there.
    pub const ABSENT: Self = Self {
        data: 0,
        scales: 0,
        first: u32::MAX,
        zeros: 0,
    };
}

impl PrologueParams {
    /// Sets the norm.
    pub fn set_norm(&mut self, norm: NormAt) {
        self.norm = norm.kind as i32;
        (self.weight, self.bias, self.eps) = (norm.weight, norm.bias, norm.eps);
    }
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
            split_k: 1,
            groups: 0,
            weight_dtype: 0,
            stages: 0,
        }
    }
}

/// As the kernels number them.
pub(crate) fn activation_index(activation: Activation) -> i32 {
    let index = match activation {
        Activation::None => abi::ACT_NONE,
        Activation::Silu => abi::ACT_SILU,
        Activation::Gelu => abi::ACT_GELU,
        Activation::GeluTanh => abi::ACT_GELU_TANH,
        Activation::Relu => abi::ACT_RELU,
        Activation::Relu2 => abi::ACT_RELU2,
        Activation::SwiGlu => abi::ACT_SWIGLU,
        Activation::GeGlu => abi::ACT_GEGLU,
        Activation::GeGluTanh => abi::ACT_GEGLU_TANH,
        Activation::Relu2Glu => abi::ACT_RELU2_GLU,
    };
    index as i32
}

/// A kernel and how it works.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Core {
    /// Its place in the module.
    pub kernel: usize,
    /// Rows of x that it takes at most.
    pub max_m: usize,
    /// Rows of weights that a warp computes together.
    pub n_tile: usize,
    /// Values of k that a warp takes at a time.
    pub k_block: usize,
    /// Such K blocks that it loads at once.
    pub prefetched: usize,
    /// Shared memory of a row of x, in bytes.
    pub row: usize,
    /// Whether it stages `max_m` rows even if there are fewer.
    pub padded: bool,
    /// Whether warps share N tiles until there are blocks for the whole GPU, and no further.
    pub fills: bool,
}

impl Core {
    /// Rows of x for which there is shared memory.
    pub fn rows_at_once(&self, gpu: &GpuSpec) -> usize {
        let room = (gpu.shared as usize).saturating_sub(FIXED_SHARED);
        let rows = room / self.row.next_multiple_of(16).max(1);
        if self.padded && rows < self.max_m {
            // A kernel for more rows than there is room for cannot run at all.
            return 0;
        }
        rows.min(self.max_m)
    }

    fn shared(&self, m: usize) -> usize {
        let rows = if self.padded { self.max_m } else { m };
        rows * self.row.next_multiple_of(16)
    }

    /// Warps that share an N tile, and blocks. As measured on an H100: two tiles for a warp, so that all
    /// of its weights are on the way before x is there, more where k is long and fewer where N tiles
    /// are; full blocks, and two of them on an SM.
    fn shape(&self, sms: usize, n_tiles: usize, k: usize) -> (usize, usize) {
        let k_blocks = k.div_ceil(self.k_block);
        let mut split_k = (k_blocks.next_power_of_two() / (2 * self.prefetched)).clamp(1, WARPS);
        while split_k < WARPS && 2 * split_k <= k_blocks && n_tiles * split_k < 4 * sms {
            split_k *= 2;
        }
        while self.fills
            && split_k < WARPS
            && 2 * split_k <= k_blocks
            && n_tiles * split_k < 2 * WARPS * sms
        {
            split_k *= 2;
        }
        // Of one row half as many warps, if that leaves less of a tile empty (Pythia-2.8B: 8 %).
        let fill = |split_k| {
            let warp_k_blocks = k_blocks.div_ceil(split_k);
            warp_k_blocks as f64 / warp_k_blocks.next_multiple_of(self.prefetched) as f64
        };
        let one = self.max_m == 1 && self.prefetched == 4 && !self.fills;
        if one && split_k > 1 && fill(split_k / 2) > fill(split_k) {
            split_k /= 2;
        }
        // Longer shares, if all blocks then run at once and leave no more of the GPU empty than several
        // rounds do (codes of 14336 x 4096: 4 to 14 %).
        let blocks = |split_k| n_tiles.div_ceil(WARPS / split_k);
        let empty =
            |split_k| blocks(split_k).next_multiple_of(2 * sms) as f64 / blocks(split_k) as f64;
        if self.fills {
            let longer = (0..split_k.ilog2()).map(|shift| 1 << shift);
            split_k = longer
                .filter(|less| blocks(*less) <= 2 * sms)
                .find(|less| empty(*less) <= 1.02 * empty(split_k))
                .unwrap_or(split_k);
        }
        (split_k, blocks(split_k).min(2 * sms))
    }
}

/// How GEMV kernels carry out a product: one launch for each group of rows of x.
#[derive(Debug)]
pub(super) struct GemvPlan {
    pub module: &'static Module,
    /// The kernel's place in the module.
    pub index: usize,
    /// Of a launch of as many rows as it takes.
    pub grid: Grid,
    /// Warps that share an output.
    pub split_k: usize,
    /// Stages of a pipeline, in the kernels that have one.
    pub stages: usize,
    /// Rows of x of a launch.
    pub once: usize,
    /// Dynamic shared memory of a row of x, where a launch of fewer rows takes less.
    pub row: Option<usize>,
}

impl GemvPlan {
    /// The product of `case` by a kernel that works as `core` says.
    ///
    /// # Errors
    /// If not even one row of x fits into shared memory.
    pub fn of_core(case: &Case, module: &'static Module, core: &Core) -> Planned {
        let once = core.rows_at_once(&case.gpu).min(case.m);
        if once == 0 {
            return Err("a row of x does not fit into shared memory");
        }
        let outputs = if case.gates() {
            core.n_tile / 2
        } else {
            core.n_tile
        };
        let n_tiles = case.width().div_ceil(outputs);
        let (split_k, blocks) = core.shape(case.gpu.sms as usize, n_tiles, case.k);
        Ok(Arc::new(Self {
            module,
            index: core.kernel,
            grid: Grid::new(
                [blocks as u32, 1, 1],
                (WARPS * WARP) as u32,
                core.shared(once) as u32,
            ),
            split_k,
            stages: 0,
            once,
            row: (!core.padded).then(|| core.shared(1)),
        }))
    }
}

impl Kernel for GemvPlan {
    fn entry(&self) -> &'static str {
        self.module.names(self.index).1
    }

    fn grid(&self) -> Option<Grid> {
        Some(self.grid)
    }

    fn details(&self) -> String {
        let (split_k, stages, once) = (self.split_k, self.stages, self.once);
        match stages {
            0 => format!("split {split_k}, {once} rows a launch"),
            stages => format!("{stages} stages, {once} rows a launch"),
        }
    }

    unsafe fn run(&self, launcher: &Launcher, _: &mut Scratch, operands: &Operands) -> Result<()> {
        let bytes = operands.weight_bytes() as u64;
        let mut params = Gemv::of(operands)?;
        (params.split_k, params.stages) = (self.split_k as u32, self.stages as u32);
        let mut grid = self.grid;
        for first in (0..operands.at.m).step_by(self.once) {
            let rows = (operands.at.m - first).min(self.once);
            params.set_rows(operands, first, rows);
            grid.shared = self.row.map_or(grid.shared, |row| (rows * row) as u32);
            // SAFETY: the kernel takes `Gemv`; the addresses are the caller's.
            unsafe {
                launcher
                    .moving(bytes)
                    .run(self.module, self.index, grid, &params)?
            };
        }
        Ok(())
    }
}

impl Gemv {
    /// What the kernels take of the product, for all of its rows, but for how it is spread.
    ///
    /// # Errors
    /// If there are more matrices than the kernels take.
    pub fn of(operands: &Operands) -> Result<Self> {
        let at = &operands.at;
        let mut params = Self::new(at.k, operands.rows(), at.activation);
        params.set_matrices(&operands.weights)?;
        if let Some(norm) = at.norm {
            params.prologue.set_norm(norm);
        }
        params.prologue.dtype = dtype_index(at.x_dtype) as i32;
        params.prologue.rounds = (at.x_bits == ActivationBits::PerToken8).into();
        params.epilogue.bias = at.bias;
        params.epilogue.stride = at.stride as u64;
        params.epilogue.dtype = dtype_index(at.x_dtype) as i32;
        params.epilogue.out_dtype = dtype_index(at.out_dtype) as i32;
        params.set_rows(operands, 0, at.m);
        Ok(params)
    }

    /// Sets `count` rows of x from row `first` on.
    pub fn set_rows(&mut self, operands: &Operands, first: usize, count: usize) {
        let at = operands.at.at_rows(first, count);
        (self.m, self.prologue.x) = (count as u32, at.x);
        (self.epilogue.out, self.epilogue.residuals) = (at.out, at.residuals);
    }

    /// Sets the matrices, which are of one format. Absent ones come last: a kernel finds an output's matrix by
    /// where the present ones begin.
    fn set_matrices(&mut self, weights: &[Operand]) -> Result<()> {
        let present = weights.iter().filter(|w| w.rows() > 0);
        if present.clone().count() > self.weights.len() {
            bail!(
                "linear: {} matrices, a launch takes {}",
                weights.len(),
                self.weights.len()
            );
        }
        let mut first = 0;
        for (matrix, weight) in self.weights.iter_mut().zip(present) {
            matrix.first = first as u32;
            match weight {
                Operand::Dense { address, dtype, .. } => {
                    matrix.data = *address;
                    self.weight_dtype = dtype_index(*dtype) as i32;
                }
                Operand::Quantized(weight) => self.groups = matrix.set_quantized(weight),
            }
            first += weight.rows();
        }
        Ok(())
    }
}

impl Matrix {
    /// Sets where a quantized matrix lies, and gives how many scales each 128 values of a row have.
    fn set_quantized(&mut self, weight: &BlockMatrix) -> u32 {
        self.data = weight.address();
        let Some(quantized) = weight.codes() else {
            return 0;
        };
        self.scales = quantized.scales;
        // Scales of 2 bytes in front of the zero points, if there are any.
        self.zeros = (quantized.zeros.saturating_sub(quantized.scales) / 2) as u32;
        quantized.groups as u32
    }
}

/// The place of a 16-bit dtype in a pair of kernels for f16 and bf16.
pub(super) fn is_bf16(dtype: DType) -> usize {
    usize::from(dtype == DType::BF16)
}

#[cfg(test)]
mod tests {
    use super::Core;

    #[test]
    fn codes_take_the_fewest_shares_that_fill_the_gpu() {
        let core = |prefetched| Core {
            kernel: 0,
            max_m: 4,
            n_tile: 16,
            k_block: 128,
            prefetched,
            row: 0,
            padded: false,
            fills: true,
        };
        let int8 = core(2);
        // One round of 224 blocks, or of 256; more rounds where one cannot be.
        for (rows, k, expected) in [
            (14336, 4096, (2, 224)),
            (28672, 4096, (8, 264)),
            (4096, 14336, (8, 256)),
            (4096, 4096, (8, 256)),
            (128256, 4096, (8, 264)),
            (576, 576, (4, 18)),
            (16, 128, (1, 1)),
        ] {
            assert_eq!(int8.shape(132, rows / 16, k), expected, "{rows} x {k}");
        }
        for (prefetched, split_k) in [(4, 4), (8, 2)] {
            assert_eq!(core(prefetched).shape(132, 14336 / 16, 4096), (2, 224));
            assert_eq!(
                core(prefetched).shape(132, 128256 / 16, 4096),
                (split_k, 264)
            );
        }
    }
}
