//! Small INT8 products on Hopper in one launch: its blocks quantize x to int8 themselves. A kernel of its own for
//! that takes as long as the product.

use super::super::plan::{Kernel, Planned};
use super::super::problem::{Case, Operands};
use super::tensor_map::STAGE_K;
use super::w8a8_params::{ALIGNMENT, check, product_params, tensor_maps, tiles_of_w};
use crate::cuda::abi::{
    W8A8_CLUSTER, W8A8_CLUSTER_MAX_STAGES as MAX_STAGES, W8A8Cluster, W8A8ClusterParams, WARP,
};
use crate::cuda::{GpuSpec, Grid, Launcher, Module, Scratch, fatbin};
use candle_core::Result;
use std::sync::Arc;

/// One for each of [`FORMS`].
pub(super) static MODULE: Module = Module::new(
    "gemm_w8a8_cluster",
    fatbin!("gemm_w8a8_cluster"),
    &[
        "gemm_w8a8_cluster_64x64_4",
        "gemm_w8a8_cluster_64x128_4",
        "gemm_w8a8_cluster_128x192_2",
        "gemm_w8a8_cluster_48x64_3",
        "gemm_w8a8_cluster_64x144_2",
        "gemm_w8a8_cluster_64x192_3",
    ],
)
.with_all_shared_memory();

/// Bytes of shared memory that a block has beside codes, and more.
pub(super) const FIXED: usize = 4096;

/// How blocks cut the product.
#[derive(Clone, Copy, Debug)]
struct Form {
    shape: W8A8Cluster,
    /// Values of k at least, where warpgroups write while others multiply.
    least_k: usize,
    /// Blocks, as shares of the SMs: with fewer two launches are as fast, and with more some of
    /// their clusters would not find SMs free together.
    least: f64,
    most: f64,
}

/// Of the ones that take a product the first is the fastest, as measured on an H100.
const FORMS: [Form; 6] = [
    Form {
        shape: W8A8_CLUSTER[0],
        least_k: 1,
        least: 0.,
        most: 0.75,
    },
    Form {
        shape: W8A8_CLUSTER[1],
        least_k: 1,
        least: 0.,
        most: 0.75,
    },
    Form {
        shape: W8A8_CLUSTER[2],
        least_k: 3 * STAGE_K + 1,
        least: 0.6,
        most: 1.,
    },
    Form {
        shape: W8A8_CLUSTER[3],
        least_k: 1,
        least: 0.,
        most: 0.75,
    },
    Form {
        shape: W8A8_CLUSTER[4],
        least_k: 1,
        least: 0.6,
        most: 1.,
    },
    Form {
        shape: W8A8_CLUSTER[5],
        least_k: 1,
        least: 0.,
        most: 0.75,
    },
];

impl Form {
    /// Rows of W of each warpgroup.
    fn columns_of_warpgroup(&self) -> usize {
        self.shape.columns / self.shape.beside
    }

    /// Values of k at most.
    fn most_k(&self) -> usize {
        self.shape.packs * self.shape.lanes * 16
    }

    /// Threads of a block.
    fn threads(&self) -> usize {
        let W8A8Cluster {
            warpgroups,
            producers,
            loads_w,
            ..
        } = self.shape;
        WARP * (4 * warpgroups + producers + usize::from(!loads_w))
    }

    /// Bytes of the codes of x.
    fn x(&self, k: usize) -> usize {
        k.next_multiple_of(STAGE_K) * self.shape.rows
    }

    /// Stages of W that fit beside x; of a pipeline no more than find room in half of an SM, if those are
    /// four, which is a little faster (4.12 us instead of 4.20 for 512 rows of 1536x576 on an H100).
    fn stages(&self, gpu: &GpuSpec, k: usize) -> usize {
        let fitting = |shared: usize| {
            let room = shared.saturating_sub(FIXED + ALIGNMENT + self.x(k));
            room / (self.shape.columns * STAGE_K)
        };
        let all = k.div_ceil(STAGE_K).min(MAX_STAGES);
        match fitting(gpu.share(2)) {
            stages @ 4.. if !self.shape.whole => stages.min(all),
            _ => fitting(gpu.shared as usize).min(all),
        }
    }

    /// Dynamic shared memory: sums take the place of W in the end.
    fn shared(&self, gpu: &GpuSpec, k: usize) -> usize {
        let weights = self.stages(gpu, k) * self.shape.columns * STAGE_K;
        let sums = self.shape.rows * (4 * self.shape.columns + 32 * self.shape.beside);
        self.x(k) + weights.max(sums) + ALIGNMENT
    }

    /// Blocks above and beside one another, if clusters have no more than there are.
    fn blocks(&self, case: &Case) -> Option<[usize; 2]> {
        let all = tiles_of_w(case.matrices(), case.gates(), self.columns_of_warpgroup());
        let beside = all / self.shape.beside;
        let whole =
            all.is_multiple_of(self.shape.beside) && beside.is_multiple_of(self.shape.cluster);
        whole.then_some([case.m.div_ceil(self.shape.rows), beside])
    }

    /// Whether it takes the product, and each block finds an SM for itself.
    fn takes(&self, case: &Case) -> bool {
        let (gpu, k) = (&case.gpu, case.k);
        let filled = |[above, beside]: [usize; 2]| {
            let share = (above * beside) as f64 / f64::from(gpu.sms);
            self.least <= share && share <= self.most
        };
        let least = if self.shape.whole {
            k.div_ceil(STAGE_K)
        } else {
            2
        };
        (self.least_k..=self.most_k()).contains(&k)
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
        return Err("rows of x are not aligned to 16 bytes");
    }
    let index = FORMS.iter().position(|form| form.takes(case));
    let index = index.ok_or("none of its tiles fills the GPU with one block a multiprocessor")?;
    let form = &FORMS[index];
    let beside = tiles_of_w(case.matrices(), case.gates(), form.columns_of_warpgroup());
    let tiles = [case.m.div_ceil(form.shape.rows), beside];
    let blocks = tiles[0] * beside / form.shape.beside;
    Ok(Arc::new(OneLaunch {
        index,
        tiles,
        stages: form.stages(&case.gpu, case.k),
        grid: Grid {
            cluster: form.shape.cluster as u32,
            ..Grid::new(
                [blocks as u32, 1, 1],
                form.threads() as u32,
                form.shared(&case.gpu, case.k) as u32,
            )
        },
    }))
}

impl Kernel for OneLaunch {
    fn entry(&self) -> &'static str {
        MODULE.names(self.index).1
    }

    fn grid(&self) -> Option<Grid> {
        Some(self.grid)
    }

    fn details(&self) -> String {
        let W8A8Cluster { rows, columns, .. } = FORMS[self.index].shape;
        format!("tiles of {rows}x{columns}, {} stages", self.stages)
    }

    unsafe fn run(&self, launcher: &Launcher, _: &mut Scratch, operands: &Operands) -> Result<()> {
        let (form, at) = (&FORMS[self.index], &operands.at);
        let columns = form.columns_of_warpgroup();
        let params = W8A8ClusterParams {
            weights: tensor_maps(operands, columns / 2, false)?,
            product: product_params(operands, [0; 2], columns, self.tiles, 1)?,
            x: at.x,
            stages: self.stages as u32,
        };
        let outputs = at.m * at.stride * at.out_dtype.size_in_bytes();
        let x = at.m * at.k * at.x_dtype.size_in_bytes();
        let bytes = x + operands.rows() * at.k + outputs;
        // It waits for whatever is in front.
        let launcher = launcher.overlapping();
        // SAFETY: the caller's; the layouts are those of the kernel.
        unsafe {
            launcher
                .moving(bytes as u64)
                .run(&MODULE, self.index, self.grid, &params)
        }
    }
}
