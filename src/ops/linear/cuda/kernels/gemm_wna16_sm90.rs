//! Quantized weights of any format and any number of tokens on Hopper, by `wgmma` with the weights dequantized in
//! registers (`kernels/linear/gemm_wna16_sm90.cuh`). A preceding kernel writes x in bf16, in the order in which the
//! weights of the format lie.

use super::super::plan::{Kernel, Planned};
use super::super::problem::{Case, Operands, ProductAt, WeightFormat};
use super::gemm_dequantized::{narrowed_to, parts};
use super::gemm_wna16_tiling::Tiling;
use super::gemv::Gemv;
use super::gemv_gguf::check_head;
use super::int4_form;
use super::tensor_map::{operand_map, sums_map};
use crate::cuda::abi::{
    GEMM_WNA16 as FORMS, GEMM_WNA16_CHANNELS as CHANNELS, GEMM_WNA16_SUMS_TOKENS as SUMS_TOKENS,
    GemmWna16Params, K_BLOCK as BLOCK_K, NORM_NONE, TensorMap,
};
use crate::cuda::{Address, Arranged, Grid, Launcher, Module, Scratch, fatbin, kernel_index};
use crate::quant::{Format, Scaling, Scheme};
use candle_core::{DType, Result};
use std::sync::Arc;

const OP: &str = "quant_linear";

/// The kernels of a format: one for each of [`FORMS`].
macro_rules! forms {
    ($($name:literal),+) => {
        &[$(
            concat!($name, "_8"), concat!($name, "_16"), concat!($name, "_32"),
            concat!($name, "_64"), concat!($name, "_128"), concat!($name, "_192"), concat!($name, "_256"),
        )+]
    };
}

static INTEGERS: Module = Module::new(
    "gemm_wna16_sm90",
    fatbin!("gemm_wna16_sm90"),
    forms![
        "gemm_wna16_sm90_int8",
        "gemm_wna16_sm90_ternary_rows",
        "gemm_wna16_sm90_ternary"
    ],
);

/// In the order of [`int4_form`].
static INT4: Module = Module::new(
    "gemm_wna16_sm90_int4",
    fatbin!("gemm_wna16_sm90_int4"),
    forms![
        "gemm_wna16_sm90_int4_g128",
        "gemm_wna16_sm90_int4_g64",
        "gemm_wna16_sm90_int4_g32",
        "gemm_wna16_sm90_int4_g128_z",
        "gemm_wna16_sm90_int4_g64_z",
        "gemm_wna16_sm90_int4_g32_z"
    ],
);

static FP8: Module = Module::new(
    "gemm_wna16_sm90_fp8",
    fatbin!("gemm_wna16_sm90_fp8"),
    forms!["gemm_wna16_sm90_fp8", "gemm_wna16_sm90_fp8_block"],
);

static NVFP4: Module = Module::new(
    "gemm_wna16_sm90_nvfp4",
    fatbin!("gemm_wna16_sm90_nvfp4"),
    forms!["gemm_wna16_sm90_nvfp4"],
);

static NF4: Module = Module::new(
    "gemm_wna16_sm90_nf4",
    fatbin!("gemm_wna16_sm90_nf4"),
    forms!["gemm_wna16_sm90_nf4"],
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
        "gemm_wna16_sm90_gguf_q2_k",
        "gemm_wna16_sm90_gguf_q3_k",
        "gemm_wna16_sm90_gguf_q4_k",
        "gemm_wna16_sm90_gguf_q5_k",
        "gemm_wna16_sm90_gguf_q6_k"
    ],
);

/// How the weights of a format lie: where the bits of a value's index go among 64 (`NarrowParams::order`).
mod order {
    /// Lane t has values 4t to 4t + 3 of each half of 32.
    pub const GGUF: u32 = 0x542130;
    /// 8t to 8t + 7 of 32; NVFP4 and NF4 too.
    pub const INT4: u32 = 0x521430;
    /// 16t to 16t + 15 of 64.
    pub const INT8: u32 = 0x215430;
    /// As INT4, codes j and j + 4 in one word.
    pub const TERNARY: u32 = 0x521043;
}

/// The kernels of a format, and what x has to be for them.
struct Of {
    module: &'static Module,
    /// The first of its kernels.
    first: usize,
    order: u32,
    /// Whether kernels for few tokens take sums of x.
    sums: bool,
}

/// Whether kernels for few tokens add what a format adds to the values of a block by their sum of x, as `BY_GROUPS` and
/// `HAS_OFFSET` in `kernels/linear/` say. Those of [`Scaling::Super16`] dequantize weights instead, rounded to bf16: their
/// offsets would want sums of 16 values.
fn takes_sums_of_x(scaling: Scaling) -> bool {
    match scaling {
        Scaling::Affine | Scaling::Super => true,
        Scaling::Symmetric | Scaling::SuperSymmetric | Scaling::Super16 => false,
    }
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
            order::GGUF,
            takes_sums_of_x(block.scaling),
        ),
        WeightFormat::Quantized(Format::Scheme(scheme)) => match scheme {
            Scheme::Int8 => of(&INTEGERS, 0, order::INT8, false),
            Scheme::Fp8 => of(&FP8, 0, order::INT8, false),
            Scheme::Fp8Block128 => of(&FP8, 1, order::INT8, false),
            Scheme::Nvfp4 => of(&NVFP4, 0, order::INT4, false),
            Scheme::Nf4 => of(&NF4, 0, order::INT4, false),
            Scheme::Int4 { group, zero_point } => {
                of(&INT4, int4_form(group, zero_point), order::INT4, false)
            }
            Scheme::Ternary { .. } if scheme.group().is_none() => {
                of(&INTEGERS, 1, order::TERNARY, false)
            }
            Scheme::Ternary { .. } => of(&INTEGERS, 2, order::TERNARY, false),
        },
        _ => Err("the weights are not quantized"),
    }
}

/// The product, after a kernel that arranges x where it is not as this one takes it.
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

/// Output channels from which on the kernel is faster than `gemm_wna16_mma` for 2 to 16 rows of x and groups of 16 values:
/// on an H200 14336x4096 takes 25 to 28 us in Q3_K and Q6_K instead of 34 to 42, and in Q2_K 26 to 28 instead of 27 to 38.
/// With 2 rows 6144x4096 takes 0.89x to 0.97x of the time of `gemm_wna16_mma`, 4096x4096 1.2x to 1.4x.
const MANY_CHANNELS: usize = 12_288;

/// The plan for few rows of x and block types with a scale for each 16 values.
pub(crate) fn plan_few_rows_group16(case: &Case) -> Planned {
    if !matches!(
        case.block_scaling(),
        Some(Scaling::SuperSymmetric | Scaling::Super16)
    ) {
        return Err("the weights are neither Q2_K, Q3_K nor Q6_K");
    }
    if case.n() < MANY_CHANNELS {
        return Err("there are few output channels");
    }
    plan(case)
}

/// The plan for few rows of x of a head with short K.
pub(crate) fn plan_head(case: &Case) -> Planned {
    check_head(case)?;
    plan(case)
}

/// Any number of tokens, K and N.
pub(crate) fn plan(case: &Case) -> Planned {
    let of = of(case)?;
    if !case.k.is_multiple_of(4) {
        return Err("K is no multiple of 4");
    }
    let parts = parts(case);
    if parts == 2 && case.x == DType::F32 && case.block_scaling() == Some(Scaling::Super16) {
        return Err("weights with an offset for each 16 values would be rounded to bf16");
    }
    let rows = case.m * parts;
    let k_blocks = case.k.div_ceil(BLOCK_K);
    let tiling = Tiling::of(&case.gpu, [case.n(), rows, k_blocks]);
    Ok(Arc::new(Gemm {
        module: of.module,
        index: of.first + tiling.form,
        order: of.order,
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
    /// Rows that are allocated: those of whole tiles, so that no row of a TMA box is out of bounds. Filling such rows with
    /// zeros takes TMA longer than loading them (some 3.3 ns each on an H200). The rows behind `rows` are uninitialized,
    /// and their sums are not stored.
    whole_rows: usize,
    pitch: usize,
    sums: Address,
    sums_pitch: usize,
    /// Of stream-K.
    partial_sums: Address,
    flags: Address,
}

impl Gemm {
    /// Its sizes, before scratch memory is taken for it.
    fn shape(&self, at: &ProductAt) -> OperandB {
        let rows = at.m * self.parts;
        OperandB {
            x: at.x,
            rows,
            whole_rows: self.tiling.m_tiles * FORMS[self.tiling.form].tokens,
            pitch: at.k.next_multiple_of(64),
            sums: 0,
            sums_pitch: rows.next_multiple_of(4),
            partial_sums: 0,
            flags: 0,
        }
    }

    /// f32 sums that wait in memory, and their flags.
    fn partial_sums(&self) -> (usize, usize) {
        self.tiling.partial_sums(self.grid.blocks[0] as usize)
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
        b.x = scratch.take(OP, DType::BF16, b.whole_rows * b.pitch)?;
        if self.sums {
            b.sums = scratch.take(OP, DType::F32, b.pitch / 32 * b.sums_pitch)?;
        }
        let (partial_sums, flags) = self.partial_sums();
        if self.tiling.stream_k {
            b.partial_sums = scratch.take(OP, DType::F32, partial_sums)?;
            b.flags = scratch.take(OP, DType::U32, flags)?;
        }
        let arranged = Arranged {
            order: self.order,
            pitch: b.pitch,
            parts: self.parts,
            sums: b.sums,
            sums_pitch: b.sums_pitch,
            counters: b.flags,
            counter_count: flags,
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
        let shared = match self.tiling.stream_k {
            true => "stream-K".to_string(),
            false => format!("split-K {}", self.tiling.split_k),
        };
        format!("tiles of {CHANNELS}x{tokens}, {shared}")
    }

    fn scratch(&self, operands: &Operands) -> usize {
        let b = self.shape(&operands.at);
        let (partial_sums, flags) = self.partial_sums();
        Scratch::room(DType::F32, partial_sums)
            + Scratch::room(DType::U32, flags)
            + Scratch::room(DType::BF16, b.whole_rows * b.pitch)
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
        let (share, larger_shares) = self.tiling.shares(&self.grid);
        let params = GemmWna16Params {
            x: operand_map(b.x, [b.whole_rows, b.pitch], tokens / self.tiling.sharing())?,
            x_sums: match self.sums {
                true => sums_map(b.sums, [b.pitch / 32, b.sums_pitch], tokens)?,
                false => TensorMap { opaque: [0; 16] },
            },
            product,
            m_tiles: self.tiling.m_tiles as u32,
            share: share as u32,
            larger_shares: larger_shares as u32,
            split_k: self.tiling.split_k as u32,
            sharing: self.tiling.sharing() as u32,
            parts: self.parts as u32,
            vectors: self.vectors.into(),
            partial_sums: b.partial_sums,
            flags: b.flags,
        };
        // The product may begin while x is still being written here, for which all of its blocks wait.
        let launcher = launcher.overlapping();
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
