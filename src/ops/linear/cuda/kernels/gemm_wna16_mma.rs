//! Quantized weights and some tens of rows of x from Ampere on, by `mma.sync` (`kernels/linear/gemm_wna16_mma.cuh`).
//! bf16 rows of x are read as they are; others are written in bf16 by a preceding kernel.

use super::super::plan::{Kernel, Planned};
use super::super::problem::{Case, Operands, WeightFormat};
use super::gemm_dequantized::{operand_b, operand_b_room, parts};
use super::gemv::Gemv;
use super::int4_form;
use crate::cuda::abi::{
    GEMM_WNA16_MMA_MAX_WARPS as MAX_WARPS, GemmWna16MmaParams, K_BLOCK, N_TILE, NORM_NONE, WARP,
};
use crate::cuda::{GpuSpec, Grid, Launcher, Module, Scratch, fatbin, kernel_index};
use crate::ops::view::dtype_index;
use crate::quant::{Format, Scheme};
use candle_core::{DType, Result};
use std::sync::Arc;

/// The rules' name.
pub(crate) const NAME: &str = "gemm_wna16_mma";

/// Rows of operand B of a format's kernels.
const TOKENS: [usize; 3] = [8, 16, 32];

macro_rules! forms {
    ($($name:literal),+) => {
        &[$(concat!($name, "_8"), concat!($name, "_16"), concat!($name, "_32"),)+]
    };
}

static INTEGERS: Module = Module::new(
    "gemm_wna16_mma",
    fatbin!("gemm_wna16_mma"),
    forms!["gemm_wna16_mma_int8", "gemm_wna16_mma_ternary_rows"],
)
.with_all_shared_memory();

/// In the order of [`int4_form`].
static INT4: Module = Module::new(
    "gemm_wna16_mma_int4",
    fatbin!("gemm_wna16_mma_int4"),
    forms![
        "gemm_wna16_mma_int4_g128",
        "gemm_wna16_mma_int4_g64",
        "gemm_wna16_mma_int4_g32",
        "gemm_wna16_mma_int4_g128_z",
        "gemm_wna16_mma_int4_g64_z",
        "gemm_wna16_mma_int4_g32_z"
    ],
)
.with_all_shared_memory();

static FP8: Module = Module::new(
    "gemm_wna16_mma_fp8",
    fatbin!("gemm_wna16_mma_fp8"),
    forms!["gemm_wna16_mma_fp8", "gemm_wna16_mma_fp8_block"],
)
.with_all_shared_memory();

static NVFP4: Module = Module::new(
    "gemm_wna16_mma_nvfp4",
    fatbin!("gemm_wna16_mma_nvfp4"),
    forms!["gemm_wna16_mma_nvfp4"],
)
.with_all_shared_memory();

static NF4: Module = Module::new(
    "gemm_wna16_mma_nf4",
    fatbin!("gemm_wna16_mma_nf4"),
    forms!["gemm_wna16_mma_nf4"],
)
.with_all_shared_memory();

/// In the order of `BlockFormat::DTYPES`.
static GGUF: Module = Module::new(
    "gemm_wna16_mma_gguf",
    fatbin!("gemm_wna16_mma_gguf"),
    forms![
        "gemm_wna16_mma_gguf_q4_0",
        "gemm_wna16_mma_gguf_q4_1",
        "gemm_wna16_mma_gguf_q5_0",
        "gemm_wna16_mma_gguf_q5_1",
        "gemm_wna16_mma_gguf_q8_0",
        "gemm_wna16_mma_gguf_q2_k",
        "gemm_wna16_mma_gguf_q3_k",
        "gemm_wna16_mma_gguf_q4_k",
        "gemm_wna16_mma_gguf_q5_k",
        "gemm_wna16_mma_gguf_q6_k"
    ],
)
.with_all_shared_memory();

/// The kernels of a format, and what they have in shared memory.
#[derive(Clone, Copy, Debug)]
struct Of {
    module: &'static Module,
    /// The first of its kernels.
    first: usize,
    /// Stages of a warp's pipeline, and bytes of each.
    stages: [usize; 2],
    /// Bytes behind a row of x.
    padding: usize,
}

/// Stages of a warp and bytes of each, as the kernels assert them.
const GGUF_STAGES: [[usize; 2]; 10] = [
    [4, 1152],
    [4, 1280],
    [4, 1408],
    [4, 1536],
    [3, 2176],
    [8, 704],
    [4, 960],
    [4, 1216],
    [4, 1472],
    [3, 1728],
];
const INT8_STAGES: [usize; 2] = [3, 2048];
const FP8_BLOCK_STAGES: [usize; 2] = [3, 2112];
const NVFP4_STAGES: [usize; 2] = [4, 1152];
const NF4_STAGES: [usize; 2] = [4, 1152];
const TERNARY_STAGES: [usize; 2] = [8, 512];
const INT4_STAGES: [[usize; 2]; 6] = [
    [4, 1088],
    [4, 1088],
    [4, 1152],
    [4, 1152],
    [4, 1152],
    [4, 1216],
];

fn of(case: &Case) -> std::result::Result<Of, &'static str> {
    let of = |module, index: usize, stages, padding| Of {
        module,
        first: index * TOKENS.len(),
        stages,
        padding,
    };
    match case.weight {
        WeightFormat::Quantized(format @ Format::Block(_)) => {
            let index = kernel_index(format);
            Ok(of(&GGUF, index, GGUF_STAGES[index], 32))
        }
        WeightFormat::Quantized(Format::Scheme(scheme)) => match scheme {
            Scheme::Int8 => Ok(of(&INTEGERS, 0, INT8_STAGES, 16)),
            Scheme::Fp8 => Ok(of(&FP8, 0, INT8_STAGES, 16)),
            Scheme::Fp8Block128 => Ok(of(&FP8, 1, FP8_BLOCK_STAGES, 16)),
            Scheme::Nvfp4 => Ok(of(&NVFP4, 0, NVFP4_STAGES, 64)),
            Scheme::Nf4 => Ok(of(&NF4, 0, NF4_STAGES, 64)),
            Scheme::Ternary { .. } if scheme.group().is_none() => {
                Ok(of(&INTEGERS, 1, TERNARY_STAGES, 64))
            }
            Scheme::Ternary { .. } => Err("ternary weights in groups"),
            Scheme::Int4 { group, zero_point } => {
                let form = int4_form(group, zero_point);
                Ok(of(&INT4, form, INT4_STAGES[form], 64))
            }
        },
        _ => Err("the weights are not quantized"),
    }
}

/// How CTAs and warps share a product.
#[derive(Clone, Copy, Debug)]
struct Tiling {
    /// The kernel's place in [`TOKENS`].
    form: usize,
    /// Of a CTA.
    warps: usize,
    /// Those of them that share the K of an N tile.
    split_k: usize,
    /// CTAs of a cluster, which share K.
    cluster: usize,
    /// K blocks of x that are in shared memory together, twice.
    slab: usize,
    ctas: usize,
    m_tiles: usize,
    shared: usize,
}

/// What a product looks like to the kernels.
#[derive(Clone, Copy, Debug)]
struct Shape {
    /// 16 output channels each, or 8 and the 8 that they gate.
    n_tiles: usize,
    k_blocks: usize,
    /// Rows of operand B.
    rows: usize,
}

/// What an H100 takes, in nanoseconds. Fitted to 8, 16 and 32 rows of six formats and six shapes.
struct Times {
    /// A K block of a warp where a multiprocessor has eight warps, and where it has sixteen.
    k_block: [f64; 2],
    /// The rest of a CTA.
    rest: f64,
}

/// For each size of [`TOKENS`].
const TIMES: [Times; 3] = [
    Times {
        k_block: [540., 1000.],
        rest: 2300.,
    },
    Times {
        k_block: [650., 1200.],
        rest: 2300.,
    },
    Times {
        k_block: [1010., 1850.],
        rest: 1900.,
    },
];

/// A slab of x behind another; more where the pipeline of weights is shorter than a warp's part of the slab.
const SLAB: f64 = 190.;
const SHORT_SLAB: f64 = 380.;
/// For each K block of 8 rows of x, before the first product.
const FIRST_SLAB: f64 = 14.;
/// Adding up the sums of a warp, and those of a cluster, and of each of its CTAs.
const WARP_SUMS: f64 = 30.;
const CLUSTER_SUMS: [f64; 2] = [750., 90.];
/// More than half of the multiprocessors: the CTAs of the next launch have no room beside these.
const CROWDED: f64 = 1450.;

/// CTAs of a cluster, and the clusters, each CTA alone on its multiprocessor, that an H100 of 132 has room for.
const CLUSTERS: [(usize, usize); 6] = [(1, SMS), (2, 66), (3, 39), (4, 30), (6, 17), (8, 15)];
const SMS: usize = 132;

impl Tiling {
    /// That with the shortest time.
    fn of(gpu: &GpuSpec, of: &Of, shape: Shape) -> Option<Self> {
        let clusters = &CLUSTERS[..if gpu.arch >= 90 { CLUSTERS.len() } else { 1 }];
        let mut best: Option<(f64, Self)> = None;
        for form in 0..TOKENS.len() {
            for warps in [MAX_WARPS / 2, MAX_WARPS] {
                for split_k in [1, 2, 4, 8, 16] {
                    for (cluster, fit) in clusters.iter().filter(|(c, _)| *c <= shape.k_blocks) {
                        for depth in [1, 2, 4, 8, 16] {
                            let tiling = Self {
                                form,
                                warps,
                                split_k,
                                cluster: *cluster,
                                slab: depth * split_k,
                                ctas: 0,
                                m_tiles: shape.rows.div_ceil(TOKENS[form]),
                                shared: 0,
                            };
                            if let Some((time, tiling)) = tiling.timed(gpu, of, shape, *fit)
                                && best.as_ref().is_none_or(|(least, _)| time < *least)
                            {
                                best = Some((time, tiling));
                            }
                        }
                    }
                }
            }
        }
        best.map(|(_, tiling)| tiling)
    }

    /// Shared memory of a CTA: pipelines and x, or the sums of the outputs.
    fn shared(&self, of: &Of, slabs: usize) -> usize {
        let tokens = TOKENS[self.form];
        let [stages, bytes] = of.stages;
        let x = slabs.min(2) * tokens * (self.slab * 2 * K_BLOCK + of.padding);
        let n_warps = self.warps / self.split_k;
        let sums = self.split_k * tokens * (N_TILE * n_warps + 4) * 4;
        (self.warps * stages * bytes + x).max(sums)
    }

    /// With what follows from the rest, and the nanoseconds that it takes; none if it cannot be. `fit` clusters fit on
    /// an H100.
    fn timed(mut self, gpu: &GpuSpec, of: &Of, shape: Shape, fit: usize) -> Option<(f64, Self)> {
        if self.split_k > self.warps {
            return None;
        }
        let k_blocks = shape.k_blocks.div_ceil(self.cluster);
        let slabs = k_blocks.div_ceil(self.slab);
        self.shared = self.shared(of, slabs);
        if self.shared > gpu.shared as usize {
            return None;
        }
        let clusters = shape.n_tiles.div_ceil(self.warps / self.split_k) * self.m_tiles;
        self.ctas = clusters * self.cluster;
        let once = (fit * gpu.sms as usize / SMS).max(1);
        let pairs = self.warps < MAX_WARPS && self.shared <= gpu.share(2) && clusters > once;
        let sixteen = usize::from(pairs || self.warps == MAX_WARPS);
        let of_sm = if pairs { 2 } else { 1 };
        let Times { k_block, rest } = &TIMES[self.form];
        let slab = match self.slab / self.split_k < of.stages[0] {
            true => SLAB + SHORT_SLAB,
            false => SLAB,
        };
        let mut time = k_blocks.div_ceil(self.split_k) as f64 * k_block[sixteen]
            + (slabs - 1) as f64 * slab
            + rest
            + (self.slab.min(k_blocks) * TOKENS[self.form] / TOKENS[0]) as f64 * FIRST_SLAB
            + self.split_k as f64 * WARP_SUMS;
        if self.cluster > 1 {
            time += CLUSTER_SUMS[0] + CLUSTER_SUMS[1] * self.cluster as f64;
        }
        time *= clusters.div_ceil(of_sm * once) as f64;
        if 2 * self.ctas > of_sm * gpu.sms as usize {
            time += CROWDED;
        }
        Some((time, self))
    }

    fn grid(&self) -> Grid {
        let threads = (WARP * self.warps) as u32;
        let mut grid = Grid::new([self.ctas as u32, 1, 1], threads, self.shared as u32);
        grid.cluster = self.cluster as u32;
        grid
    }
}

/// The product, after a kernel that converts x to bf16 where it is not.
#[derive(Debug)]
struct Gemm {
    of: Of,
    /// Rows of operand B for each token.
    parts: usize,
    tiling: Tiling,
    /// Whether 16-byte accesses fit outputs.
    vectors: bool,
}

/// Weights of a product up to which the kernel is about as fast as others or faster on Hopper with 17 to 64 rows, too. On
/// an H200 48 rows, `gemm_wna16_sm90` in brackets: 576x576 3.9 us (6.1) in Q4_1 and 3.6 (5.8) in INT4 in groups of 32, 2048x2048 9.7 (10.2)
/// and 7.8 (9.9), 4096x1024 9.1 (8.6) and 7.1 (7.8), 2048x8192 25.0 (17.7) and 18.6 (16.6).
const FEW_WEIGHTS: usize = 8 << 20;

/// The plan on Hopper where it may be the fastest kernel.
pub(crate) fn plan_on_hopper(case: &Case) -> Planned {
    if case.m * parts(case) > 16 && case.n() * case.k > FEW_WEIGHTS {
        return Err("another kernel is faster for more than 16 rows and so many weights");
    }
    plan(case)
}

/// Any N and M, K in whole 16-byte pieces of bf16.
pub(crate) fn plan(case: &Case) -> Planned {
    let of = of(case)?;
    if !case.k.is_multiple_of(8) {
        return Err("K is no multiple of 8");
    }
    let parts = parts(case);
    let channels = if case.gates() { N_TILE / 2 } else { N_TILE };
    let shape = Shape {
        n_tiles: case.width().div_ceil(channels),
        k_blocks: case.k.div_ceil(K_BLOCK),
        rows: case.m * parts,
    };
    let tiling =
        Tiling::of(&case.gpu, &of, shape).ok_or("the pipelines do not fit into shared memory")?;
    Ok(Arc::new(Gemm {
        of,
        parts,
        tiling,
        vectors: case.alignment.outputs && case.width().is_multiple_of(8),
    }))
}

impl Gemm {
    fn index(&self) -> usize {
        self.of.first + self.tiling.form
    }
}

impl Kernel for Gemm {
    fn entry(&self) -> &'static str {
        self.of.module.names(self.index()).1
    }

    fn grid(&self) -> Option<Grid> {
        Some(self.tiling.grid())
    }

    fn details(&self) -> String {
        let Tiling {
            split_k,
            slab,
            cluster,
            ..
        } = self.tiling;
        format!("split-K {split_k} in a CTA and {cluster} in a cluster, {slab} K blocks of x")
    }

    fn scratch(&self, operands: &Operands) -> usize {
        operand_b_room(&operands.at, self.parts)
    }

    unsafe fn run(
        &self,
        launcher: &Launcher,
        scratch: &mut Scratch,
        operands: &Operands,
    ) -> Result<()> {
        let at = &operands.at;
        let rows = at.m * self.parts;
        let mut product = Gemv::of(operands)?;
        // SAFETY: the caller's.
        product.prologue.x = unsafe { operand_b(launcher, scratch, at, self.parts)? };
        product.prologue.norm = NORM_NONE as i32;
        product.prologue.dtype = dtype_index(DType::BF16) as i32;
        product.split_k = self.tiling.split_k as u32;
        let params = GemmWna16MmaParams {
            product,
            rows: rows as u32,
            m_tiles: self.tiling.m_tiles as u32,
            cluster_size: self.tiling.cluster as u32,
            slab_log2: self.tiling.slab.ilog2(),
            parts: self.parts as u32,
            vectors: self.vectors.into(),
        };
        let outputs = at.m * at.stride * at.out_dtype.size_in_bytes();
        let bytes = operands.weight_bytes() + 2 * rows * at.k + outputs;
        // SAFETY: the caller's; the struct is the kernel's.
        unsafe {
            launcher.moving(bytes as u64).run(
                self.of.module,
                self.index(),
                self.tiling.grid(),
                &params,
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{GGUF_STAGES, GpuSpec, Of, Shape, TOKENS, Tiling};
    use crate::cuda::table_tests::{GPUS, gpu_named};

    /// Of GGUF's formats, by their place.
    fn of(format: usize) -> Of {
        Of {
            module: &super::GGUF,
            first: 0,
            stages: GGUF_STAGES[format],
            padding: 32,
        }
    }

    fn tiling(gpu: &GpuSpec, format: usize, [n, k, rows]: [usize; 3]) -> Option<Tiling> {
        let shape = Shape {
            n_tiles: n.div_ceil(16),
            k_blocks: k.div_ceil(128),
            rows,
        };
        Tiling::of(gpu, &of(format), shape)
    }

    #[test]
    fn tiles_fill_an_h100() {
        let gpu = gpu_named("H100");
        // Output channels, K, rows, and warps of a CTA, those that share K, and CTAs that do: the best of those
        // measured, or within 3 % of it.
        for (shape, expected) in [
            ([4096, 14336, 8], [16, 8, 1]),
            ([4096, 14336, 16], [16, 4, 2]),
            ([14336, 4096, 8], [8, 2, 1]),
            ([14336, 4096, 16], [16, 2, 1]),
            ([6144, 4096, 8], [8, 4, 1]),
            ([576, 1536, 16], [8, 8, 1]),
            ([2048, 2048, 8], [16, 8, 1]),
        ] {
            let t = tiling(&gpu, 0, shape).expect("a tiling");
            assert_eq!([t.warps, t.split_k, t.cluster], expected, "{shape:?}");
        }
    }

    #[test]
    fn every_gpu_has_a_tiling() {
        for (name, gpu) in GPUS.into_iter().filter(|(_, gpu)| gpu.arch >= 80) {
            for format in 0..GGUF_STAGES.len() {
                for shape in [
                    [16, 8, 1],
                    [4096, 14336, 64],
                    [128_256, 4096, 32],
                    [576, 28672, 9],
                ] {
                    let t = tiling(&gpu, format, shape).expect(name);
                    assert!(t.shared <= gpu.shared as usize, "{name} {shape:?}");
                    assert!(t.m_tiles * TOKENS[t.form] >= shape[2], "{name} {shape:?}");
                }
            }
        }
    }
}
