//! Small quantized matrices and several rows of x on Hopper, where latency bounds a product: weights are in registers, as
//! operands of `mma`, before x comes (`kernels/linear/gemm_wna16_latency_sm90.cuh`).

use super::super::plan::Planned;
use super::super::problem::{Case, WeightFormat};
use super::gemv::{GemvPlan, is_bf16};
use super::int4_form;
use crate::cuda::abi::{K_BLOCK, N_TILE, WARP};
use crate::cuda::{Grid, Module, fatbin, kernel_index};
use crate::ops::linear::{Activation, ActivationBits};
use crate::quant::{Format, Scheme};
use candle_core::DType;
use std::sync::Arc;

/// Blocks of the kernels.
#[derive(Clone, Copy)]
struct Form {
    /// Of K, at most.
    k_blocks: usize,
    /// N tiles of 16 output channels.
    n_tiles: usize,
    /// Of x.
    rows: usize,
}

const fn form(k_blocks: usize, n_tiles: usize, rows: usize) -> Form {
    Form {
        k_blocks,
        n_tiles,
        rows,
    }
}

/// In the order of the kernels of a format and a 16-bit dtype of x.
const FORMS: [Form; 7] = [
    form(8, 1, 8),
    form(16, 1, 8),
    form(8, 3, 8),
    form(16, 1, 16),
    form(8, 3, 16),
    form(12, 1, 32),
    form(8, 3, 32),
];

/// For x in f32: with 32 rows, 12 warps would spill 77 registers each.
const FORMS_F32: [Form; 7] = {
    let mut forms = FORMS;
    forms[5].rows = 24;
    forms
};

fn forms(x: DType) -> &'static [Form; 7] {
    if x == DType::F32 { &FORMS_F32 } else { &FORMS }
}

macro_rules! forms {
    ($most_rows:literal: $($name:literal),+) => {
        &[$(
            concat!($name, "_8_1_8"),
            concat!($name, "_16_1_8"),
            concat!($name, "_8_3_8"),
            concat!($name, "_16_1_16"),
            concat!($name, "_8_3_16"),
            concat!($name, "_12_1_", $most_rows),
            concat!($name, "_8_3_32"),
        )+]
    };
}

/// In the order of `BlockFormat::DTYPES`, each for x in f16, then in bf16.
static GGUF: Module = Module::new(
    "gemm_wna16_latency_sm90_gguf",
    fatbin!("gemm_wna16_latency_sm90_gguf"),
    forms![32:
        "gemm_wna16_latency_sm90_gguf_q4_0_f16",
        "gemm_wna16_latency_sm90_gguf_q4_0_bf16",
        "gemm_wna16_latency_sm90_gguf_q4_1_f16",
        "gemm_wna16_latency_sm90_gguf_q4_1_bf16",
        "gemm_wna16_latency_sm90_gguf_q5_0_f16",
        "gemm_wna16_latency_sm90_gguf_q5_0_bf16",
        "gemm_wna16_latency_sm90_gguf_q5_1_f16",
        "gemm_wna16_latency_sm90_gguf_q5_1_bf16",
        "gemm_wna16_latency_sm90_gguf_q8_0_f16",
        "gemm_wna16_latency_sm90_gguf_q8_0_bf16",
        "gemm_wna16_latency_sm90_gguf_q2_k_f16",
        "gemm_wna16_latency_sm90_gguf_q2_k_bf16",
        "gemm_wna16_latency_sm90_gguf_q3_k_f16",
        "gemm_wna16_latency_sm90_gguf_q3_k_bf16",
        "gemm_wna16_latency_sm90_gguf_q4_k_f16",
        "gemm_wna16_latency_sm90_gguf_q4_k_bf16",
        "gemm_wna16_latency_sm90_gguf_q5_k_f16",
        "gemm_wna16_latency_sm90_gguf_q5_k_bf16",
        "gemm_wna16_latency_sm90_gguf_q6_k_f16",
        "gemm_wna16_latency_sm90_gguf_q6_k_bf16"
    ],
);

/// INT4 in the order of [`int4_form`], then INT8.
static INTEGERS: Module = Module::new(
    "gemm_wna16_latency_sm90",
    fatbin!("gemm_wna16_latency_sm90"),
    forms![32:
        "gemm_wna16_latency_sm90_int4_g128_f16",
        "gemm_wna16_latency_sm90_int4_g128_bf16",
        "gemm_wna16_latency_sm90_int4_g64_f16",
        "gemm_wna16_latency_sm90_int4_g64_bf16",
        "gemm_wna16_latency_sm90_int4_g32_f16",
        "gemm_wna16_latency_sm90_int4_g32_bf16",
        "gemm_wna16_latency_sm90_int4_g128_z_f16",
        "gemm_wna16_latency_sm90_int4_g128_z_bf16",
        "gemm_wna16_latency_sm90_int4_g64_z_f16",
        "gemm_wna16_latency_sm90_int4_g64_z_bf16",
        "gemm_wna16_latency_sm90_int4_g32_z_f16",
        "gemm_wna16_latency_sm90_int4_g32_z_bf16",
        "gemm_wna16_latency_sm90_int8_f16",
        "gemm_wna16_latency_sm90_int8_bf16"
    ],
);
const INT8: usize = 6;

/// The formats of [`GGUF`], for x in f32.
static GGUF_F32: Module = Module::new(
    "gemm_wna16_latency_sm90_gguf_f32",
    fatbin!("gemm_wna16_latency_sm90_gguf_f32"),
    forms![24:
        "gemm_wna16_latency_sm90_gguf_f32_q4_0",
        "gemm_wna16_latency_sm90_gguf_f32_q4_1",
        "gemm_wna16_latency_sm90_gguf_f32_q5_0",
        "gemm_wna16_latency_sm90_gguf_f32_q5_1",
        "gemm_wna16_latency_sm90_gguf_f32_q8_0",
        "gemm_wna16_latency_sm90_gguf_f32_q2_k",
        "gemm_wna16_latency_sm90_gguf_f32_q3_k",
        "gemm_wna16_latency_sm90_gguf_f32_q4_k",
        "gemm_wna16_latency_sm90_gguf_f32_q5_k",
        "gemm_wna16_latency_sm90_gguf_f32_q6_k"
    ],
);

/// Those of [`INTEGERS`].
static INTEGERS_F32: Module = Module::new(
    "gemm_wna16_latency_sm90_f32",
    fatbin!("gemm_wna16_latency_sm90_f32"),
    forms![24:
        "gemm_wna16_latency_sm90_f32_int4_g128",
        "gemm_wna16_latency_sm90_f32_int4_g64",
        "gemm_wna16_latency_sm90_f32_int4_g32",
        "gemm_wna16_latency_sm90_f32_int4_g128_z",
        "gemm_wna16_latency_sm90_f32_int4_g64_z",
        "gemm_wna16_latency_sm90_f32_int4_g32_z",
        "gemm_wna16_latency_sm90_f32_int8"
    ],
);

/// Rows of x at most, and of those in bf16. More in f32 were not faster, and in f16 were not measured.
pub(crate) const MAX_M: usize = 64;
pub(crate) const MAX_M_BF16: usize = 128;

/// Rows from which on INT8 weights are multiplied by x in int8, where that is allowed: blocks of three N tiles with 64 rows of
/// 3072x576 take 5.7 us here, and 3.5 there if no norm is in the way.
const IN_INT8: usize = 64;

/// K at most.
pub(crate) const MAX_K: usize = 16 * K_BLOCK;

/// Weights of INT4 and INT8 up to which one row of x, too, is faster than in a kernel whose pipeline reads them. On an H200
/// 1024x2048 of INT4 (N x K) take 1.70 us here and 2.47 there, 2048x2048 take 2.77 and 2.37.
const ONE_ROW_WEIGHTS: usize = 9 << 18;

/// The kernels of a format and a dtype of x: the module, and the first of their forms there.
fn of(case: &Case) -> Result<(&'static Module, usize), &'static str> {
    let ([narrow, wide], format) = match case.weight {
        WeightFormat::Quantized(format @ Format::Block(_)) => {
            ([&GGUF, &GGUF_F32], kernel_index(format))
        }
        WeightFormat::Quantized(Format::Scheme(Scheme::Int4 { group, zero_point })) => {
            ([&INTEGERS, &INTEGERS_F32], int4_form(group, zero_point))
        }
        WeightFormat::Quantized(Format::Scheme(Scheme::Int8)) => ([&INTEGERS, &INTEGERS_F32], INT8),
        _ => return Err("the weights are of another format"),
    };
    Ok(match case.x {
        DType::F32 => (wide, format * FORMS.len()),
        dtype => (narrow, (format * 2 + is_bf16(dtype)) * FORMS.len()),
    })
}

/// Blocks of output channels by blocks of rows of x.
fn blocks(case: &Case, form: &Form) -> [usize; 2] {
    let channels = if case.gates() { N_TILE / 2 } else { N_TILE };
    [
        case.width().div_ceil(form.n_tiles * channels),
        case.m.div_ceil(form.rows),
    ]
}

/// Whether blocks of this form can take the product, and are fast at it.
fn fits(case: &Case, form: &Form) -> bool {
    // More blocks would have to load x again, which costs what the short way through the kernel saves.
    let at_once = blocks(case, form).iter().product::<usize>() <= case.gpu.sms as usize;
    // Rows that are not there are loaded and multiplied all the same.
    let few_absent = form.rows <= case.m.next_multiple_of(8).next_power_of_two();
    case.k <= form.k_blocks * K_BLOCK && at_once && few_absent
}

/// Whether a GEMV is faster for few rows of f32. One row of 3072x576 in INT4 g32 takes 2.87 us in blocks of three N tiles,
/// and 2.55 by `gemv_wna16_sm90`; in Q4_1 two rows take 3.46 us, and 2.35 by `gemv_gguf_latency`, where two of 576x576 take 1.86
/// and 1.52, and four of 576x1536 2.26 and 2.57.
fn is_slow_in_f32(case: &Case, n_tiles: usize) -> bool {
    match case.block_scaling() {
        Some(_) => case.m <= 4 && (n_tiles > 1 || case.m * case.k <= 3 << 10),
        None => case.m == 1 && n_tiles > 1,
    }
}

/// The first of the forms that fits.
pub(crate) fn plan(case: &Case) -> Planned {
    let (module, first) = of(case)?;
    if !case.alignment.x || !case.alignment.norm || !case.k.is_multiple_of(8) {
        return Err("rows of x or the norm are not aligned to 16 bytes");
    }
    if case.m == 1 && case.n() * case.k > ONE_ROW_WEIGHTS {
        return Err("another kernel is faster for one row of x");
    }
    if !matches!(case.activation, Activation::None | Activation::SwiGlu) {
        return Err("the activation is neither SwiGLU nor none");
    }
    if case.out != DType::F32 && case.out != case.x {
        return Err("the output is neither f32 nor of x's dtype");
    }
    let forms = forms(case.x);
    let index = forms.iter().position(|form| fits(case, form));
    let index = index
        .ok_or("no block fits K and the rows, or there are more blocks than multiprocessors")?;
    let Form { n_tiles, rows, .. } = &forms[index];
    if case.x == DType::F32 && is_slow_in_f32(case, *n_tiles) {
        return Err("another kernel is faster for so few rows of f32");
    }
    let in_int8 = case.scheme() == Some(Scheme::Int8) && case.x_bits != ActivationBits::Bits16;
    let slower = case.m == IN_INT8 && case.norm.is_none() && (*n_tiles, *rows) == (3, 32);
    if in_int8 && (slower || case.m > IN_INT8) {
        return Err("a kernel that rounds x to int8 is faster");
    }
    let [n_blocks, m_blocks] = blocks(case, &forms[index]);
    let k_blocks = case.k.div_ceil(K_BLOCK);
    // The sums of 16 channels and 8 rows, of each warp that has a K block.
    let sums = n_tiles * (rows / 8) * k_blocks * N_TILE * 8 * size_of::<f32>();
    // Warps that write outputs only, where there are registers enough: half a tile of channels by 8 rows for each.
    let warps = match n_tiles {
        1 => k_blocks.max(2 * rows / 8),
        _ => k_blocks,
    };
    Ok(Arc::new(GemvPlan {
        module,
        index: first + index,
        grid: Grid::new(
            [n_blocks as u32, m_blocks as u32, 1],
            (warps * WARP) as u32,
            sums as u32,
        ),
        split_k: 1,
        stages: 0,
        once: case.m,
        row: None,
    }))
}

#[cfg(test)]
mod table_tests {
    use super::{FORMS, GGUF, GGUF_F32, INT8, INTEGERS, INTEGERS_F32, forms};
    use crate::quant::BlockFormat;
    use candle_core::DType;

    #[test]
    fn kernels_are_in_the_order_of_the_forms() {
        let (blocks, schemes) = (BlockFormat::DTYPES.len(), INT8 + 1);
        let (narrow, wide) = ([DType::F16, DType::BF16], [DType::F32]);
        let modules: [(_, _, &[_]); 4] = [
            (&GGUF, blocks, &narrow),
            (&INTEGERS, schemes, &narrow),
            (&GGUF_F32, blocks, &wide),
            (&INTEGERS_F32, schemes, &wide),
        ];
        for (module, formats, dtypes) in modules {
            for index in 0..formats * dtypes.len() * FORMS.len() {
                let dtype = dtypes[index / FORMS.len() % dtypes.len()];
                let form = &forms(dtype)[index % FORMS.len()];
                let dtype = format!("_{}_", dtype.as_str());
                let end = format!("_{}_{}_{}", form.k_blocks, form.n_tiles, form.rows);
                let name = module.names(index).1;
                let fits = name.ends_with(&end) && name.contains(&dtype);
                assert!(fits, "{name}: expected {dtype} and {end}");
            }
        }
    }
}
