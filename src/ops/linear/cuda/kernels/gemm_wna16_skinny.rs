//! Up to 32 rows of x, all in shared memory, and packed weights or GGUF blocks on Hopper, which come through a pipeline
//! (`kernels/linear/gemm_wna16_skinny_sm90.cuh`).

use super::super::plan::{Kernel, Planned};
use super::super::problem::{Case, Operands};
use super::gemm_dequantized::{operand_b, operand_b_room, parts};
use super::gemm_wna16_tiling::clusters;
use super::gemv::Gemv;
use super::streamed::{Source, Streamed, streamed};
use crate::cuda::abi::{
    GEMV_SM90_K_BLOCKS, GEMV_SM90_MAX_STAGES, GEMV_WARPS, GemmSkinnyParams, K_BLOCK, N_TILE,
    NORM_NONE, ROW_GROUP, SKINNY_EPILOGUE_WARPS, SKINNY_SUMS_PADDING, SKINNY_THREADS,
};
use crate::cuda::{Grid, Launcher, Module, Scratch, fatbin};
use std::sync::Arc;

/// For 8, 16 and 32 rows of operand B, in the order of [`Streamed::kernel`].
pub(super) static MODULE: Module = Module::new(
    "gemm_wna16_skinny_sm90",
    fatbin!("gemm_wna16_skinny_sm90"),
    &[
        "gemm_wna16_skinny_sm90_int4_g128_8",
        "gemm_wna16_skinny_sm90_int4_g128_16",
        "gemm_wna16_skinny_sm90_int4_g128_32",
        "gemm_wna16_skinny_sm90_int4_g64_8",
        "gemm_wna16_skinny_sm90_int4_g64_16",
        "gemm_wna16_skinny_sm90_int4_g64_32",
        "gemm_wna16_skinny_sm90_int4_g32_8",
        "gemm_wna16_skinny_sm90_int4_g32_16",
        "gemm_wna16_skinny_sm90_int4_g32_32",
        "gemm_wna16_skinny_sm90_int4_g128_z_8",
        "gemm_wna16_skinny_sm90_int4_g128_z_16",
        "gemm_wna16_skinny_sm90_int4_g128_z_32",
        "gemm_wna16_skinny_sm90_int4_g64_z_8",
        "gemm_wna16_skinny_sm90_int4_g64_z_16",
        "gemm_wna16_skinny_sm90_int4_g64_z_32",
        "gemm_wna16_skinny_sm90_int4_g32_z_8",
        "gemm_wna16_skinny_sm90_int4_g32_z_16",
        "gemm_wna16_skinny_sm90_int4_g32_z_32",
        "gemm_wna16_skinny_sm90_int8_8",
        "gemm_wna16_skinny_sm90_int8_16",
        "gemm_wna16_skinny_sm90_int8_32",
        "gemm_wna16_skinny_sm90_ternary_rows_8",
        "gemm_wna16_skinny_sm90_ternary_rows_16",
        "gemm_wna16_skinny_sm90_ternary_rows_32",
        "gemm_wna16_skinny_sm90_fp8_8",
        "gemm_wna16_skinny_sm90_fp8_16",
        "gemm_wna16_skinny_sm90_fp8_32",
        "gemm_wna16_skinny_sm90_fp8_block_8",
        "gemm_wna16_skinny_sm90_fp8_block_16",
        "gemm_wna16_skinny_sm90_fp8_block_32",
        "gemm_wna16_skinny_sm90_nvfp4_8",
        "gemm_wna16_skinny_sm90_nvfp4_16",
        "gemm_wna16_skinny_sm90_nvfp4_32",
        "gemm_wna16_skinny_sm90_nf4_8",
        "gemm_wna16_skinny_sm90_nf4_16",
        "gemm_wna16_skinny_sm90_nf4_32",
    ],
);
pub(super) static GGUF: Module = Module::new(
    "gemm_wna16_skinny_sm90_gguf",
    fatbin!("gemm_wna16_skinny_sm90_gguf"),
    &[
        "gemm_wna16_skinny_sm90_gguf_q4_0_8",
        "gemm_wna16_skinny_sm90_gguf_q4_0_16",
        "gemm_wna16_skinny_sm90_gguf_q4_0_32",
        "gemm_wna16_skinny_sm90_gguf_q4_1_8",
        "gemm_wna16_skinny_sm90_gguf_q4_1_16",
        "gemm_wna16_skinny_sm90_gguf_q4_1_32",
        "gemm_wna16_skinny_sm90_gguf_q5_0_8",
        "gemm_wna16_skinny_sm90_gguf_q5_0_16",
        "gemm_wna16_skinny_sm90_gguf_q5_0_32",
        "gemm_wna16_skinny_sm90_gguf_q5_1_8",
        "gemm_wna16_skinny_sm90_gguf_q5_1_16",
        "gemm_wna16_skinny_sm90_gguf_q5_1_32",
        "gemm_wna16_skinny_sm90_gguf_q8_0_8",
        "gemm_wna16_skinny_sm90_gguf_q8_0_16",
        "gemm_wna16_skinny_sm90_gguf_q8_0_32",
        "gemm_wna16_skinny_sm90_gguf_q2_k_8",
        "gemm_wna16_skinny_sm90_gguf_q2_k_16",
        "gemm_wna16_skinny_sm90_gguf_q2_k_32",
        "gemm_wna16_skinny_sm90_gguf_q3_k_8",
        "gemm_wna16_skinny_sm90_gguf_q3_k_16",
        "gemm_wna16_skinny_sm90_gguf_q3_k_32",
        "gemm_wna16_skinny_sm90_gguf_q4_k_8",
        "gemm_wna16_skinny_sm90_gguf_q4_k_16",
        "gemm_wna16_skinny_sm90_gguf_q4_k_32",
        "gemm_wna16_skinny_sm90_gguf_q5_k_8",
        "gemm_wna16_skinny_sm90_gguf_q5_k_16",
        "gemm_wna16_skinny_sm90_gguf_q5_k_32",
        "gemm_wna16_skinny_sm90_gguf_q6_k_8",
        "gemm_wna16_skinny_sm90_gguf_q6_k_16",
        "gemm_wna16_skinny_sm90_gguf_q6_k_32",
    ],
);

/// Rows of operand B of a kernel.
const ROWS: [usize; 3] = [8, 16, 32];

/// Blocks of a cluster, which share K where x has no room in one.
const CLUSTERS: [usize; 3] = [1, 2, 4];
/// Slots of an epilogue warp for sums from other blocks of its cluster.
const SLOTS: usize = 2;

/// Static shared memory of the kernels at most.
pub(super) const FIXED_SHARED: usize = 352;

/// Stages from which on more of them gain nothing.
const STAGES: usize = 8;

/// Stages that half of a multiprocessor's shared memory has to hold, or a block takes more: with FP8, 14336x4096 and 2 rows
/// take 22.1 us in two stages and 20.6 in more, on an H100.
const HALF_STAGES: usize = 3;

/// The product, after a kernel that converts x to bf16 where it is not.
#[derive(Debug)]
struct Gemm {
    format: Streamed,
    /// The kernel's place in [`ROWS`].
    form: usize,
    cluster_size: usize,
    /// Rows of operand B for each token.
    parts: usize,
    stages: usize,
    grid: Grid,
    /// Whether 16-byte accesses fit outputs.
    vectors: bool,
}

/// Bytes between rows of x in shared memory beside their values: lanes that read several rows have no bank conflicts.
fn padding(format: Streamed) -> usize {
    match format {
        Streamed::Int4 { .. } | Streamed::Nvfp4 | Streamed::Nf4 | Streamed::Ternary => 64,
        Streamed::Fp8 | Streamed::Fp8Block | Streamed::Int8 => 16,
        Streamed::Gguf(_) => 32,
    }
}

/// Output channels from which on INT4 is faster here than by `gemm_wna16_m16`, whose warps keep x in registers: on an H100
/// 14336x4096 takes 0.87x to 0.89x of its time with 2 to 8 rows, 6144x4096 1.02x to 1.06x, 4096x4096 1.3x.
const MANY_CHANNELS: usize = 12_288;
/// K past which x would come in pieces there: 4096x14336 takes 0.90x to 0.97x of `gemm_wna16_m16_tma`.
const LONG_K: usize = 4096;

/// Weights of a product up to which more than 8 rows are faster here where they are ternary, and more than 16 where they
/// have offsets. 16 rows of ternary weights, `gemm_wna16_mma` in brackets: 576x576 2.65 us (4.09) and 4096x1024 4.24 (4.96)
/// on an H200, 4096x4096 8.8 (8.7) on an H100. 24 rows of Q4_K, `gemm_wna16_sm90` in brackets: 2048x2048 8.3 us (8.8) and
/// 8192x2048 13.5 (13.2) on an H200.
const FEW_WEIGHTS: usize = 8 << 20;

/// Output channels from which on more than 16 rows are faster by `gemm_wna16_sm90`: on an H200 17 rows of INT4 in groups of
/// 64 take 23.5 us instead of 20.1 at 14336x4096, but 9.1 instead of 10.6 at 8192x2048 and 4.8 instead of 9.3 at 3072x1024.
const WIDE: usize = 12_288;

/// Output channels from which on clusters were measured: on an H200 16 rows of 4096x14336 take 18.3 us in INT4 in groups of
/// 64 instead of 21.8, 24 rows of 2048x8192 12.0 instead of 13.3, and of 1024x3072 in Q4_0 5.8 instead of 8.3.
const CHANNELS_OF_CLUSTERS: usize = 1024;

/// The plan where it is the fastest kernel.
pub(crate) fn plan_if_fastest(case: &Case) -> Planned {
    let parts = parts(case);
    let rows = case.m * parts;
    let format = streamed(case)?;
    let few_weights = case.n() * case.k <= FEW_WEIGHTS;
    let slow = match format {
        // The kernels for INT4 in groups of 128 alone take bf16.
        Streamed::Int4 {
            groups: 1,
            zero_point: false,
        } if parts == 1 && rows <= ROWS[1] => {
            rows > ROWS[0] || (case.n() < MANY_CHANNELS && case.k <= LONG_K)
        }
        Streamed::Ternary => rows > ROWS[0] && !few_weights,
        // Each tile of 8 rows has products with the offsets.
        format if format.x_sums(K_BLOCK) > 0 => rows > ROWS[1] && !few_weights,
        _ => rows > ROWS[1] && case.n() >= WIDE,
    };
    let gemm = gemm(case)?;
    let slow_cluster = match gemm.cluster_size {
        1 => false,
        // 16 rows of 4096x14336 take 26.8 us in INT8 instead of 24.8 by `gemm_wna16_mma`, and 25.1 in FP8 instead of 24.4.
        4 if format.codes_are_bytes() && rows <= ROWS[1] => true,
        _ => case.n() < CHANNELS_OF_CLUSTERS,
    };
    if slow || slow_cluster {
        return Err("another kernel is faster for so many rows and output channels");
    }
    Ok(Arc::new(gemm))
}

/// As many rows as fit into shared memory beside a pipeline, in a block or in those of a cluster.
pub(crate) fn plan(case: &Case) -> Planned {
    Ok(Arc::new(gemm(case)?))
}

fn gemm(case: &Case) -> Result<Gemm, &'static str> {
    let format = streamed(case)?;
    let parts = parts(case);
    let rows = case.m * parts;
    let form = ROWS
        .iter()
        .position(|most| rows <= *most)
        .ok_or("there are more rows of operand B than 32")?;
    let stages = case.k.div_ceil(STAGE_VALUES);
    let fit = CLUSTERS
        .into_iter()
        .filter(|size| *size <= case.m.min(stages))
        .find_map(|size| Some((size, Room::new(case, format, form, rows, size)?)));
    let (cluster_size, room) =
        fit.ok_or("rows of x leave too little shared memory for a pipeline")?;
    let gpu = &case.gpu;
    let channels = if case.gates() { ROW_GROUP } else { N_TILE };
    let clusters = case
        .width()
        .div_ceil(channels)
        .min(clusters(gpu, cluster_size));
    let mut shared = room.fixed + room.stages * format.stage_bytes();
    if case.preceding.is_another() {
        shared = shared.max(gpu.share(2));
    }
    let blocks = (clusters * cluster_size) as u32;
    let mut grid = Grid::new([blocks, 1, 1], SKINNY_THREADS as u32, shared as u32);
    grid.cluster = cluster_size as u32;
    Ok(Gemm {
        format,
        form,
        cluster_size,
        parts,
        stages: room.stages,
        grid,
        vectors: case.alignment.outputs && case.width().is_multiple_of(8),
    })
}

/// Values of K of a stage.
const STAGE_VALUES: usize = GEMV_SM90_K_BLOCKS * K_BLOCK;

/// What a block has in shared memory: stages, and the bytes of all else.
struct Room {
    stages: usize,
    fixed: usize,
}

impl Room {
    /// None if too few stages fit.
    fn new(
        case: &Case,
        format: Streamed,
        form: usize,
        rows: usize,
        cluster_size: usize,
    ) -> Option<Self> {
        let plane = ROWS[form] * (N_TILE + 4) * 4;
        let received = match cluster_size {
            1 => 0,
            _ => SKINNY_EPILOGUE_WARPS * SLOTS * plane,
        };
        let sums = SKINNY_EPILOGUE_WARPS * GEMV_WARPS * plane + received;
        // Of the block that has most of K.
        let of_block = case.k.div_ceil(STAGE_VALUES).div_ceil(cluster_size) * STAGE_VALUES;
        let values = of_block.min(case.k.next_multiple_of(K_BLOCK));
        let x_sums = match format.x_sums(values) {
            0 => 0,
            bytes => bytes + SKINNY_SUMS_PADDING,
        };
        let fixed = sums + rows * (2 * values + padding(format) + x_sums);
        let gpu = &case.gpu;
        let stages_in = |room: usize| room.saturating_sub(fixed) / format.stage_bytes();
        let most = STAGES.min(GEMV_SM90_MAX_STAGES);
        // Half of a multiprocessor's shared memory, if that does: the next kernel begins beside this one.
        let half = stages_in(gpu.share(2) - FIXED_SHARED);
        let stages = match half >= HALF_STAGES && !case.preceding.is_another() {
            true => half.min(most),
            false => stages_in(gpu.shared as usize - FIXED_SHARED).min(most),
        };
        (stages >= format.least_stages()).then_some(Self { stages, fixed })
    }
}

impl Gemm {
    /// The kernel, and its place in its module.
    fn kernel(&self) -> (&'static Module, usize) {
        let (source, index) = self.format.kernel();
        let module = match source {
            Source::Codes => &MODULE,
            Source::Gguf => &GGUF,
        };
        (module, ROWS.len() * index + self.form)
    }
}

impl Kernel for Gemm {
    fn entry(&self) -> &'static str {
        let (module, index) = self.kernel();
        module.names(index).1
    }

    fn grid(&self) -> Option<Grid> {
        Some(self.grid)
    }

    fn details(&self) -> String {
        let clusters = match self.cluster_size {
            1 => String::new(),
            size => format!("clusters of {size}, "),
        };
        format!("{clusters}{} stages", self.stages)
    }

    fn scratch(&self, operands: &Operands) -> usize {
        operand_b_room(&operands.at, self.parts)
    }

    unsafe fn run(
        &self,
        launcher: &Launcher,
        scratch: &mut Scratch,
        operands: &Operands,
    ) -> candle_core::Result<()> {
        let at = &operands.at;
        let mut product = Gemv::of(operands)?;
        // SAFETY: the caller's.
        product.prologue.x = unsafe { operand_b(launcher, scratch, at, self.parts)? };
        product.prologue.norm = NORM_NONE as i32;
        product.stages = self.stages as u32;
        let rows = at.m * self.parts;
        let params = GemmSkinnyParams {
            product,
            rows: rows as u32,
            parts: self.parts as u32,
            vectors: self.vectors.into(),
            cluster_size: self.cluster_size as u32,
        };
        let outputs = at.m * at.stride * at.out_dtype.size_in_bytes();
        let bytes = operands.weight_bytes() + 2 * rows * at.k + outputs;
        let (module, index) = self.kernel();
        // SAFETY: the caller's; the struct is the kernel's.
        unsafe {
            launcher
                .moving(bytes as u64)
                .run(module, index, self.grid, &params)
        }
    }
}
