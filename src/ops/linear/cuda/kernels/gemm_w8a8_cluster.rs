//! Small products by integers on Hopper in one launch: its blocks make int8 of x themselves, which a kernel
//! of its own takes as long for as the product.

use super::super::plan::{Kernel, Planned};
use super::super::problem::{Case, MAX_MATRICES, Operands};
use super::tensor_map::STAGE_K;
use super::w8a8_params::{
    ALIGNMENT, ProductParams, check, product_params, tensor_maps, tiles_of_w,
};
use crate::cuda::profile;
use crate::cuda::{Address, GpuSpec, Grid, Launcher, Module, Scratch, fatbin};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::sys;
use std::sync::Arc;

/// One for each of [`FORMS`].
static DIRECT: Module = Module::new(
    "w8a8_direct_sm90",
    fatbin!("w8a8_direct_sm90"),
    &[
        "w8a8_direct_64x64_4",
        "w8a8_direct_64x128_4",
        "w8a8_direct_128x192_2",
        "w8a8_direct_48x64_3",
        "w8a8_direct_64x144_2",
        "w8a8_direct_64x192_3",
    ],
)
.beside_the_next();

/// Stages of W in shared memory at most, as in `kernels/w8a8_direct.cuh`.
const MOST_STAGES: usize = 12;

/// Bytes of shared memory that a block has beside codes, and more.
const FIXED: usize = 4096;

/// How blocks cut the product.
#[derive(Clone, Copy, Debug)]
struct Form {
    /// Rows of x, and of W, of a block.
    rows: usize,
    columns: usize,
    /// Teams of four warps beside one another in `columns`.
    beside: usize,
    /// All threads of a block.
    threads: usize,
    /// Blocks that share rows of x.
    cluster: usize,
    /// Values of k: at least, where teams write while others multiply, and at most.
    least_k: usize,
    most_k: usize,
    /// Whether all of W is in shared memory.
    whole: bool,
    /// Blocks, as shares of the multiprocessors: with fewer two launches are as fast, and with more some of
    /// their clusters would not find multiprocessors free together.
    least: f64,
    most: f64,
}

/// Of the ones that take a product the first is the fastest, as measured on an H100.
const FORMS: [Form; 6] = [
    Form {
        rows: 64,
        columns: 64,
        beside: 1,
        threads: 416,
        cluster: 4,
        least_k: 1,
        most_k: 768,
        whole: true,
        least: 0.,
        most: 0.75,
    },
    Form {
        rows: 64,
        columns: 128,
        beside: 2,
        threads: 544,
        cluster: 4,
        least_k: 1,
        most_k: 768,
        whole: false,
        least: 0.,
        most: 0.75,
    },
    Form {
        rows: 128,
        columns: 192,
        beside: 1,
        threads: 512,
        cluster: 2,
        least_k: 3 * STAGE_K + 1,
        most_k: 640,
        whole: true,
        least: 0.6,
        most: 1.,
    },
    Form {
        rows: 48,
        columns: 64,
        beside: 1,
        threads: 416,
        cluster: 3,
        least_k: 1,
        most_k: 1536,
        whole: true,
        least: 0.,
        most: 0.75,
    },
    Form {
        rows: 64,
        columns: 144,
        beside: 1,
        threads: 512,
        cluster: 2,
        least_k: 1,
        most_k: 1536,
        whole: false,
        least: 0.6,
        most: 1.,
    },
    Form {
        rows: 64,
        columns: 192,
        beside: 2,
        threads: 640,
        cluster: 3,
        least_k: 1,
        most_k: 1536,
        whole: false,
        least: 0.,
        most: 0.75,
    },
];

/// `DirectParams` of `kernels/w8a8_direct.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct DirectParams {
    weights: [sys::CUtensorMap; MAX_MATRICES],
    product: ProductParams,
    x: Address,
    stages: u32,
    padding: u32,
}

impl Form {
    /// Rows of W of each team.
    fn columns_of_team(&self) -> usize {
        self.columns / self.beside
    }

    /// Bytes of the codes of x.
    fn x(&self, k: usize) -> usize {
        k.next_multiple_of(STAGE_K) * self.rows
    }

    /// Stages of W that fit beside x; of a ring no more than find room in half of a multiprocessor, if those are
    /// four, which is a little faster (4.12 us instead of 4.20 for 512 rows of 1536x576 on an H100).
    fn stages(&self, gpu: &GpuSpec, k: usize) -> usize {
        let fitting = |shared: usize| {
            let room = shared.saturating_sub(FIXED + ALIGNMENT + self.x(k));
            room / (self.columns * STAGE_K)
        };
        let all = k.div_ceil(STAGE_K).min(MOST_STAGES);
        match fitting(gpu.share(2)) {
            stages @ 4.. if !self.whole => stages.min(all),
            _ => fitting(gpu.shared as usize).min(all),
        }
    }

    /// Dynamic shared memory: sums take the place of W in the end.
    fn shared(&self, gpu: &GpuSpec, k: usize) -> usize {
        let weights = self.stages(gpu, k) * self.columns * STAGE_K;
        let sums = self.rows * (4 * self.columns + 32 * self.beside);
        self.x(k) + weights.max(sums) + ALIGNMENT
    }

    /// Blocks above and beside one another, if clusters have no more than there are.
    fn blocks(&self, case: &Case) -> Option<[usize; 2]> {
        let all = tiles_of_w(case.matrices(), case.gates(), self.columns_of_team());
        let beside = all / self.beside;
        let whole = all.is_multiple_of(self.beside) && beside.is_multiple_of(self.cluster);
        whole.then_some([case.m.div_ceil(self.rows), beside])
    }

    /// Whether it takes the product, and each block finds a multiprocessor for itself.
    fn takes(&self, case: &Case) -> bool {
        let (gpu, k) = (&case.gpu, case.k);
        let filled = |[above, beside]: [usize; 2]| {
            let share = (above * beside) as f64 / f64::from(gpu.sms);
            self.least <= share && share <= self.most
        };
        let least = if self.whole { k.div_ceil(STAGE_K) } else { 2 };
        (self.least_k..=self.most_k).contains(&k)
            && self.blocks(case).is_some_and(filled)
            && self.stages(gpu, k) >= least
            && self.shared(gpu, k) + FIXED <= gpu.shared as usize
    }
}

/// How one launch carries out a product.
#[derive(Debug)]
struct OneLaunch {
    /// The place among [`FORMS`].
    index: usize,
    /// Tiles above and beside one another, and stages of W.
    tiles: [usize; 2],
    stages: usize,
    grid: Grid,
}

/// The form that takes a product faster than two launches do, if there is one.
pub(crate) fn plan(case: &Case) -> Planned {
    check(case)?;
    if !case.k.is_multiple_of(16) || !case.alignment.x {
        return Err("rows of x are not whole pieces of 16 aligned bytes");
    }
    let index = FORMS.iter().position(|form| form.takes(case));
    let index = index.ok_or("none of its tiles fills the GPU with one block a multiprocessor")?;
    let form = &FORMS[index];
    let beside = tiles_of_w(case.matrices(), case.gates(), form.columns_of_team());
    let tiles = [case.m.div_ceil(form.rows), beside];
    let blocks = tiles[0] * beside / form.beside;
    Ok(Arc::new(OneLaunch {
        index,
        tiles,
        stages: form.stages(&case.gpu, case.k),
        grid: Grid {
            cluster: form.cluster as u32,
            ..Grid::new(
                [blocks as u32, 1, 1],
                form.threads as u32,
                form.shared(&case.gpu, case.k) as u32,
            )
        },
    }))
}

impl Kernel for OneLaunch {
    fn entry(&self) -> &'static str {
        DIRECT.names(self.index).1
    }

    fn grid(&self) -> Option<Grid> {
        Some(self.grid)
    }

    fn details(&self) -> String {
        let Form { rows, columns, .. } = FORMS[self.index];
        format!("tiles of {rows}x{columns}, {} stages", self.stages)
    }

    unsafe fn run(&self, launcher: &Launcher, _: &mut Scratch, operands: &Operands) -> Result<()> {
        let (form, at) = (&FORMS[self.index], &operands.at);
        let columns = form.columns_of_team();
        let params = DirectParams {
            weights: tensor_maps(operands, columns / 2)?,
            product: product_params(operands, [0; 2], columns, self.tiles, 1)?,
            x: at.x,
            stages: self.stages as u32,
            padding: 0,
        };
        let outputs = at.m * at.stride * at.out_dtype.size_in_bytes();
        let x = at.m * at.k * at.x_dtype.size_in_bytes();
        let bytes = x + operands.rows() * at.k + outputs;
        // It waits for whatever is in front; launches that are timed one by one are apart.
        let launcher = Launcher {
            dependent: launcher.dependent || !profile::is_capturing(),
            ..*launcher
        };
        // SAFETY: the caller's; the layouts are those of the kernel.
        unsafe {
            launcher
                .moving(bytes as u64)
                .run(&DIRECT, self.index, self.grid, &params)
        }
    }
}
