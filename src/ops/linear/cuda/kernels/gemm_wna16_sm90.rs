//! Quantized weights of any format and any number of tokens on Hopper, by `wgmma` with the weights dequantized in
//! registers (`kernels/linear/gemm_wna16_sm90.cuh`). For few tokens a preceding kernel writes x in the order in which
//! the weights of the format lie; for more, bf16 x is read as it is.

use super::super::plan::{Kernel, Planned};
use super::super::problem::{Case, Operands, ProductAt, WeightFormat};
use super::gemm_dequantized::{narrowed, narrowed_to};
use super::gemv::Gemv;
use super::tensor_map::{operand_map, sums_map};
use crate::cuda::abi::{
    GEMM_WNA16 as FORMS, GEMM_WNA16_CHANNELS as CHANNELS,
    GEMM_WNA16_GGUF_IN_ORDER as GGUF_IN_ORDER, GEMM_WNA16_SMALL_TOKENS as SMALL,
    GEMM_WNA16_STAGED_TOKENS as STAGED_TOKENS, GEMM_WNA16_SUMS_TOKENS as SUMS_TOKENS,
    GemmWna16Form, GemmWna16Params, IN_ORDER, K_BLOCK as BLOCK_K, NORM_NONE, TensorMap, WARP,
};
use crate::cuda::{
    Address, Arranged, GpuSpec, Grid, Launcher, Module, Scratch, fatbin, kernel_index,
};
use crate::quant::{Format, Scaling, Scheme};
use candle_core::{DType, Result};
use std::sync::Arc;

const OP: &str = "quant_linear";

/// Of a block, that multiply.
const WARPS: usize = 8;

/// The kernels of a format: one for each of [`FORMS`].
macro_rules! forms {
    ($($name:literal),+) => {
        &[$(
            concat!($name, "_8"), concat!($name, "_16"), concat!($name, "_32"),
            concat!($name, "_64"), concat!($name, "_128"), concat!($name, "_256"),
        )+]
    };
}

static INTEGERS: Module = Module::new(
    "gemm_wna16_sm90",
    fatbin!("gemm_wna16_sm90"),
    forms![
        "gemm_wna16_sm90_int8",
        "gemm_wna16_sm90_int4_g128",
        "gemm_wna16_sm90_int4",
        "gemm_wna16_sm90_ternary_rows",
        "gemm_wna16_sm90_ternary"
    ],
);

static FP8: Module = Module::new(
    "gemm_wna16_sm90_fp8",
    fatbin!("gemm_wna16_sm90_fp8"),
    forms!["gemm_wna16_sm90_fp8", "gemm_wna16_sm90_fp8_block"],
);

/// In the order of `BlockFormat::DTYPES`.
static GGUF: Module = Module::new(
    "gemm_wna16_sm90_gguf",
    fatbin!("gemm_wna16_sm90_gguf"),
    forms![
        "gemm_wna16_sm90_gguf_q4_0",
        "gemm_wna16_sm90_gguf_q4_1",
        "gemm_wna16_sm90_gguf_q5_0",
        "gemm_wna16_sm90_gguf_q5_1",
        "gemm_wna16_sm90_gguf_q8_0",
        "gemm_wna16_sm90_gguf_q4_k",
        "gemm_wna16_sm90_gguf_q5_k",
        "gemm_wna16_sm90_gguf_q6_k"
    ],
);

/// M up to which f32 keeps 16 bits, as two rows of operand B; past it x is rounded to bf16, as for the library.
const SPLIT_M: usize = 8;

/// How the weights of a format lie.
#[derive(Clone, Copy, Debug)]
struct Order {
    /// Where the bits of a value's index go among 64 (`GemmWna16Params::x`).
    bits: u32,
    /// Tokens of a tile with which the kernel puts weights in order instead, and x is as it is; 0 for none.
    in_order: usize,
}

impl Order {
    /// Lane t has values 4t to 4t + 3 of each half of 32.
    const GGUF: Self = Self {
        bits: 0x542130,
        in_order: GGUF_IN_ORDER,
    };
    /// 8t to 8t + 7 of 32.
    const INT4: Self = Self {
        bits: 0x521430,
        in_order: 0,
    };
    /// 16t to 16t + 15 of 64.
    const INT8: Self = Self {
        bits: 0x215430,
        in_order: 0,
    };
    /// As INT4, codes j and j + 4 in one word.
    const TERNARY: Self = Self {
        bits: 0x521043,
        in_order: 0,
    };
}

/// The kernels of a format, and what x has to be for them.
struct Of {
    module: &'static Module,
    /// The first of its kernels.
    first: usize,
    order: Order,
    /// Whether kernels for few tokens take sums of x.
    sums: bool,
}

/// Whether something is added to all values of a block.
fn has_offset(scaling: Scaling) -> bool {
    matches!(scaling, Scaling::Affine | Scaling::Super)
}

fn of(case: &Case) -> std::result::Result<Of, &'static str> {
    let of = |module, index: usize, order, sums| {
        Ok(Of {
            module,
            first: index * FORMS.len(),
            order,
            sums,
        })
    };
    match case.weight {
        WeightFormat::Quantized(format @ Format::Block(block)) => of(
            &GGUF,
            kernel_index(format),
            Order::GGUF,
            has_offset(block.scaling),
        ),
        WeightFormat::Quantized(Format::Scheme(scheme)) => match scheme {
            Scheme::Int8 => of(&INTEGERS, 0, Order::INT8, false),
            Scheme::Fp8 => of(&FP8, 0, Order::INT8, false),
            Scheme::Fp8Block128 => of(&FP8, 1, Order::INT8, false),
            Scheme::Int4 {
                group: 128,
                zero_point: false,
            } => of(&INTEGERS, 1, Order::INT4, false),
            Scheme::Int4 { .. } => of(&INTEGERS, 2, Order::INT4, false),
            Scheme::Ternary { .. } if scheme.group().is_none() => {
                of(&INTEGERS, 3, Order::TERNARY, false)
            }
            Scheme::Ternary { .. } => of(&INTEGERS, 4, Order::TERNARY, false),
        },
        _ => Err("the weights are not quantized"),
    }
}

/// How blocks share a product.
#[derive(Clone, Copy, Debug)]
struct Tiling {
    /// The kernel's place among those of a format.
    form: usize,
    /// Blocks of a cluster, which share K.
    split_k: usize,
    n_tiles: usize,
    m_tiles: usize,
    /// Whether a multiprocessor has one block, where two would fit.
    alone: bool,
}

/// What an H100 takes, in microseconds: for a block of K where a multiprocessor has one block, where it has two, and
/// for the rest of a tile.
const TIMES: [[f64; 3]; 6] = [
    [0.62, 1.15, 3.],
    [0.68, 1.3, 3.],
    [0.85, 1.6, 3.],
    [1., 1.9, 4.],
    [1., 0., 6.],
    [1.4, 0., 11.],
];

/// For each further tile of a persistent block.
const BETWEEN: f64 = 6.;

/// Clusters of 1 to 8 blocks, each alone on its multiprocessor, that an H100 of 132 has room for: they lie within
/// groups of 16 or 18 multiprocessors.
const CLUSTERS: [usize; 8] = [132, 66, 39, 30, 22, 17, 15, 15];

/// Clusters of so many blocks that a GPU has room for.
fn clusters(gpu: &GpuSpec, blocks: usize) -> usize {
    (CLUSTERS[blocks - 1] * gpu.sms as usize / CLUSTERS[0]).max(1)
}

impl Tiling {
    /// That with the shortest time for so many output channels (or gated pairs of them), rows of operand B and
    /// blocks of K.
    fn of(gpu: &GpuSpec, channels: usize, rows: usize, k_blocks: usize) -> Self {
        let n_tiles = channels.div_ceil(CHANNELS);
        let mut best = (
            f64::INFINITY,
            Self {
                form: 0,
                split_k: 1,
                n_tiles,
                m_tiles: rows.div_ceil(FORMS[0].tokens),
                alone: false,
            },
        );
        for (form, GemmWna16Form { tokens, .. }) in FORMS.iter().enumerate() {
            let m_tiles = rows.div_ceil(*tokens);
            for split_k in 1..=CLUSTERS.len().min(k_blocks) {
                let once = clusters(gpu, split_k);
                let alone = *tokens > SMALL || n_tiles * m_tiles <= once;
                let [one, two, rest] = TIMES[form];
                let (once, each) = if alone { (once, one) } else { (2 * once, two) };
                let tiling = Self {
                    form,
                    split_k,
                    n_tiles,
                    m_tiles,
                    alone,
                };
                let rounds = (n_tiles * m_tiles).div_ceil(once);
                let again = if tiling.is_persistent() {
                    BETWEEN
                } else {
                    rest
                };
                let time = (rounds * k_blocks.div_ceil(split_k)) as f64 * each
                    + (rounds - 1) as f64 * again
                    + rest;
                if time < best.0 {
                    best = (time, tiling);
                }
            }
        }
        best.1
    }

    /// Dynamic shared memory: stages of x with their sums, or f32 sums of the tile, from a multiple of 1,024 on.
    fn shared(&self, gpu: &GpuSpec) -> usize {
        let GemmWna16Form { tokens, stages } = FORMS[self.form];
        let x_sums = if tokens <= SUMS_TOKENS {
            16 * tokens
        } else {
            0
        };
        let x = stages * (tokens * 2 * BLOCK_K + x_sums);
        let sums = |tokens| tokens * (CHANNELS + 4) * 4;
        let needed = 1024
            + match self.is_persistent() {
                true => x + sums(STAGED_TOKENS),
                false => x.max(sums(tokens)),
            };
        match self.alone && tokens <= SMALL {
            true => needed.max(gpu.share(2)),
            false => needed,
        }
    }

    /// Tiles of the output, or pairs of them for the blocks that share x, in the order in which clusters take them.
    fn tiles(&self) -> usize {
        self.n_tiles.div_ceil(self.sharing()) * self.m_tiles
    }

    /// Blocks of a cluster that share x.
    fn sharing(&self) -> usize {
        if self.is_persistent() && self.n_tiles > 1 {
            2
        } else {
            1
        }
    }

    /// Whether a block takes one tile after the other.
    fn is_persistent(&self) -> bool {
        FORMS[self.form].tokens > SMALL && self.split_k == 1
    }

    fn grid(&self, gpu: &GpuSpec) -> Grid {
        // Where there are many tokens a warpgroup more brings x.
        let warps = match FORMS[self.form].tokens > SMALL {
            true => WARPS + 4,
            false => WARPS,
        };
        let cluster = self.split_k.max(self.sharing());
        let clusters = match self.is_persistent() {
            true => self.tiles().min(clusters(gpu, cluster)),
            false => self.tiles(),
        };
        let mut grid = Grid::new(
            [(clusters * cluster) as u32, 1, 1],
            (warps * WARP) as u32,
            self.shared(gpu) as u32,
        );
        grid.cluster = cluster as u32;
        grid
    }
}

/// The product, and in front of it x where it is not as the kernel takes it.
#[derive(Debug)]
struct Gemm {
    module: &'static Module,
    index: usize,
    /// That of operand B.
    order: u32,
    /// Rows of operand B for each token.
    parts: usize,
    /// Whether the kernel takes sums of x.
    sums: bool,
    tiling: Tiling,
    grid: Grid,
    /// Whether 16-byte accesses fit outputs.
    vectors: bool,
}

/// Any number of tokens, K and N.
pub(crate) fn plan(case: &Case) -> Planned {
    let of = of(case)?;
    if !case.k.is_multiple_of(4) {
        return Err("K is no multiple of 4");
    }
    let parts = match case.x {
        DType::BF16 => 1,
        DType::F32 if case.m > SPLIT_M => 1,
        _ => 2,
    };
    let rows = case.m * parts;
    let tiling = Tiling::of(&case.gpu, case.n(), rows, case.k.div_ceil(BLOCK_K));
    let in_order = FORMS[tiling.form].tokens == of.order.in_order;
    Ok(Arc::new(Gemm {
        module: of.module,
        index: of.first + tiling.form,
        order: if in_order {
            IN_ORDER as u32
        } else {
            of.order.bits
        },
        parts,
        sums: of.sums && FORMS[tiling.form].tokens <= SUMS_TOKENS,
        grid: tiling.grid(&case.gpu),
        tiling,
        vectors: case.alignment.outputs && case.width().is_multiple_of(8),
    }))
}

/// `[rows, pitch]` of x in bf16, and its sums `[pitch / 32, sums_pitch]`.
struct OperandB {
    x: Address,
    rows: usize,
    pitch: usize,
    sums: Address,
    sums_pitch: usize,
}

impl Gemm {
    /// Its sizes, before scratch memory is taken for it.
    fn shape(&self, at: &ProductAt) -> OperandB {
        let rows = at.m * self.parts;
        OperandB {
            x: at.x,
            rows,
            pitch: at.k.next_multiple_of(64),
            sums: 0,
            sums_pitch: rows.next_multiple_of(4),
        }
    }

    /// Where it is, or will be once the stream has passed what this launches.
    ///
    /// # Safety
    /// As [`Kernel::run`].
    unsafe fn operand_b(
        &self,
        launcher: &Launcher,
        scratch: &mut Scratch,
        at: &ProductAt,
    ) -> Result<OperandB> {
        let mut b = self.shape(at);
        // A tensor map's rows are whole pieces of 16 bytes.
        if self.parts == 1 && self.order == IN_ORDER as u32 && at.k.is_multiple_of(8) {
            // SAFETY: the caller's.
            b.x = unsafe { narrowed(launcher, scratch, at, DType::BF16)? };
            b.pitch = at.k;
            return Ok(b);
        }
        b.x = scratch.take(OP, DType::BF16, b.rows * b.pitch)?;
        if self.sums {
            b.sums = scratch.take(OP, DType::F32, b.pitch / 32 * b.sums_pitch)?;
        }
        let arranged = Arranged {
            order: self.order,
            pitch: b.pitch,
            parts: self.parts,
            sums: b.sums,
            sums_pitch: b.sums_pitch,
        };
        // SAFETY: the caller's; the scratch has room for operand B and its sums.
        unsafe { narrowed_to(launcher, scratch, at, DType::BF16, b.x, Some(arranged))? };
        Ok(b)
    }
}

impl Kernel for Gemm {
    fn entry(&self) -> &'static str {
        self.module.names(self.index).1
    }

    fn grid(&self) -> Option<Grid> {
        Some(self.grid)
    }

    fn details(&self) -> String {
        let tokens = FORMS[self.tiling.form].tokens;
        format!(
            "tiles of {CHANNELS}x{tokens}, split-K {}",
            self.tiling.split_k
        )
    }

    fn scratch(&self, operands: &Operands) -> usize {
        let b = self.shape(&operands.at);
        Scratch::room(DType::BF16, b.rows * b.pitch)
            + Scratch::room(DType::F32, b.pitch / 32 * b.sums_pitch)
            + Scratch::room(operands.at.x_dtype, operands.at.m * operands.at.k)
    }

    unsafe fn run(
        &self,
        launcher: &Launcher,
        scratch: &mut Scratch,
        operands: &Operands,
    ) -> Result<()> {
        let at = &operands.at;
        // SAFETY: the caller's.
        let b = unsafe { self.operand_b(launcher, scratch, at)? };
        let mut product = Gemv::of(operands)?;
        product.prologue.norm = NORM_NONE as i32;
        let tokens = FORMS[self.tiling.form].tokens;
        let params = GemmWna16Params {
            x: operand_map(b.x, [b.rows, b.pitch], tokens / self.tiling.sharing())?,
            x_sums: match self.sums {
                true => sums_map(b.sums, [b.pitch / 32, b.sums_pitch], tokens)?,
                false => TensorMap { opaque: [0; 16] },
            },
            product,
            m_tiles: self.tiling.m_tiles as u32,
            tiles: self.tiling.tiles() as u32,
            split_k: self.tiling.split_k as u32,
            sharing: self.tiling.sharing() as u32,
            parts: self.parts as u32,
            vectors: self.vectors.into(),
        };
        // The product may begin while x is still being written here, for which all of its blocks wait.
        let launcher = match b.x == at.x {
            true => *launcher,
            false => launcher.overlapping(),
        };
        let outputs = at.m * at.stride * at.out_dtype.size_in_bytes();
        let bytes = operands.weight_bytes() + 2 * b.rows * b.pitch + outputs;
        // SAFETY: the caller's; the struct is the kernel's.
        unsafe {
            launcher
                .moving(bytes as u64)
                .run(self.module, self.index, self.grid, &params)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{FORMS, GpuSpec, Tiling};

    #[test]
    fn tiles_fill_an_h100() {
        let gpu = GpuSpec {
            capability: 90,
            arch: 90,
            sms: 132,
            shared: 227 << 10,
        };
        // Channels, rows and K, and tokens of a tile and blocks that share K: the best of those measured.
        for ((channels, rows, k), expected) in [
            ((14336, 8, 4096usize), (8, 2)),
            ((4096, 8, 14336), (8, 6)),
            ((14336, 16, 4096), (16, 2)),
            ((14336, 64, 4096), (64, 2)),
            ((14336, 128, 4096), (128, 1)),
            ((14336, 512, 4096), (256, 1)),
            ((4096, 512, 14336), (256, 2)),
            ((128, 8, 32), (8, 1)),
        ] {
            let tiling = Tiling::of(&gpu, channels, rows, k.div_ceil(128));
            let got = (FORMS[tiling.form].tokens, tiling.split_k);
            assert_eq!(got, expected, "{channels} x {rows} x {k}");
            assert!(tiling.shared(&gpu) <= gpu.shared as usize);
        }
    }
}
