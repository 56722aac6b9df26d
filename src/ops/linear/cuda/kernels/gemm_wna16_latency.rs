//! Small quantized matrices and several rows of x on Hopper, where latency bounds a product: weights are in registers, in
//! x's dtype, before x comes (`kernels/linear/gemm_wna16_latency_sm90.cuh`).

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

/// In the order of the kernels of a format and a dtype of x.
const FORMS: [Form; 7] = [
    form(8, 1, 8),
    form(16, 1, 8),
    form(8, 3, 8),
    form(16, 1, 16),
    form(8, 3, 16),
    form(12, 1, 32),
    form(8, 3, 32),
];

macro_rules! forms {
    ($($name:literal),+) => {
        &[$(
            concat!($name, "_8_1_8"),
            concat!($name, "_16_1_8"),
            concat!($name, "_8_3_8"),
            concat!($name, "_16_1_16"),
            concat!($name, "_8_3_16"),
            concat!($name, "_12_1_32"),
            concat!($name, "_8_3_32"),
        )+]
    };
}

/// In the order of `BlockFormat::DTYPES`, each for x in f16, then in bf16.
static GGUF: Module = Module::new(
    "gemm_wna16_latency_sm90_gguf",
    fatbin!("gemm_wna16_latency_sm90_gguf"),
    forms![
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
    forms![
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

/// Rows of x at most.
pub(crate) const MAX_M: usize = 64;

/// K at most.
pub(crate) const MAX_K: usize = 16 * K_BLOCK;

/// Weights of INT4 and INT8 up to which one row of x, too, is faster than in a kernel whose pipeline reads them. On an H200
/// 1024x2048 of INT4 (N x K) take 1.70 us here and 2.47 there, 2048x2048 take 2.77 and 2.37.
const ONE_ROW_WEIGHTS: usize = 9 << 18;

/// The kernels of a format: the module, and the format's place there.
fn of(case: &Case) -> Result<(&'static Module, usize), &'static str> {
    match case.weight {
        WeightFormat::Quantized(format @ Format::Block(_)) => Ok((&GGUF, kernel_index(format))),
        WeightFormat::Quantized(Format::Scheme(Scheme::Int4 { group, zero_point })) => {
            Ok((&INTEGERS, int4_form(group, zero_point)))
        }
        WeightFormat::Quantized(Format::Scheme(Scheme::Int8)) => Ok((&INTEGERS, INT8)),
        _ => Err("the weights are of another format"),
    }
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

/// The first of the forms that fits.
pub(crate) fn plan(case: &Case) -> Planned {
    let (module, format) = of(case)?;
    if !case.alignment.x || !case.alignment.norm || !case.k.is_multiple_of(8) {
        return Err("rows of x or the norm are not aligned to 16 bytes");
    }
    if case.m == 1 && case.n() * case.k > ONE_ROW_WEIGHTS {
        return Err("another kernel is faster for one row of x");
    }
    if case.x == DType::F16 && case.norm.is_some() {
        return Err("a weight times the norm's may leave the range of f16");
    }
    if !matches!(case.activation, Activation::None | Activation::SwiGlu) {
        return Err("the activation is neither SwiGLU nor none");
    }
    if case.out != DType::F32 && case.out != case.x {
        return Err("the output is neither f32 nor of x's dtype");
    }
    let index = FORMS.iter().position(|form| fits(case, form));
    let index = index
        .ok_or("no block fits K and the rows, or there are more blocks than multiprocessors")?;
    let Form { n_tiles, rows, .. } = &FORMS[index];
    // 64 rows of 3072x576 take 5.7 us, and 3.5 with x in int8, where that is allowed and no norm is in the way.
    let in_int8 = case.scheme() == Some(Scheme::Int8) && case.x_bits != ActivationBits::Bits16;
    if in_int8 && case.m == MAX_M && case.norm.is_none() && (*n_tiles, *rows) == (3, 32) {
        return Err("a kernel that rounds x to int8 is faster");
    }
    let [n_blocks, m_blocks] = blocks(case, &FORMS[index]);
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
        index: (format * 2 + is_bf16(case.x)) * FORMS.len() + index,
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
    use super::{FORMS, GGUF, INT8, INTEGERS};
    use crate::quant::BlockFormat;

    #[test]
    fn kernels_are_in_the_order_of_the_forms() {
        let formats = [(&GGUF, BlockFormat::DTYPES.len()), (&INTEGERS, INT8 + 1)];
        for (module, formats) in formats {
            for index in 0..formats * 2 * FORMS.len() {
                let form = &FORMS[index % FORMS.len()];
                let dtype = ["f16", "bf16"][index / FORMS.len() % 2];
                let end = format!("_{dtype}_{}_{}_{}", form.k_blocks, form.n_tiles, form.rows);
                let name = module.names(index).1;
                assert!(name.ends_with(&end), "{name}: expected {end}");
            }
        }
    }
}
