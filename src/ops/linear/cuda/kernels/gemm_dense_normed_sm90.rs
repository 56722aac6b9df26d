//! Dense weights and x in bf16 on Hopper, for many rows of x and few weights: `wgmma` with x in registers, where an RMS
//! norm multiplies it (`kernels/linear/gemm_dense_normed_sm90.cu`), so that neither a norm nor a gate is a kernel of its
//! own.

use super::super::plan::{Kernel, Planned};
use super::super::problem::{Case, NormKind, Operands};
use super::HEAD;
use super::gemm_dense;
use super::gemm_dense_sm90::{STAGE_K, check_halves, has_halves, spread_out, weight_maps};
use super::gemv::Gemv;
use super::gemv_dense::check_vectors;
use super::tensor_map::operand_map;
use crate::cuda::abi::{GemmDenseParams, WARP};
use crate::cuda::{Grid, Launcher, Module, Scratch, fatbin};
use candle_core::{DType, Result};
use std::sync::Arc;

static MODULE: Module = Module::new(
    "gemm_dense_normed_sm90",
    fatbin!("gemm_dense_normed_sm90"),
    &[
        "gemm_dense_normed_sm90_64_32_9",
        "gemm_dense_normed_sm90_64_64_6",
        "gemm_dense_normed_sm90_64_128_4",
        "gemm_dense_normed_sm90_128_64_4",
        "gemm_dense_normed_sm90_128_128_6",
        "gemm_dense_normed_sm90_128_192_5",
    ],
);

/// A kernel's tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    /// Of x.
    pub rows: usize,
    /// Of output.
    pub channels: usize,
    /// Of the pipeline, 64 values of K each.
    stages: usize,
    /// That a multiprocessor has room for.
    blocks: usize,
}

const fn form(rows: usize, channels: usize, stages: usize, blocks: usize) -> Form {
    Form {
        rows,
        channels,
        stages,
        blocks,
    }
}

/// In the order of the kernels.
pub(super) const FORMS: [Form; 6] = [
    form(64, 32, 9, 2),
    form(64, 64, 6, 2),
    form(64, 128, 4, 2),
    form(128, 64, 4, 2),
    form(128, 128, 6, 1),
    form(128, 192, 5, 1),
];

/// The product in tiles of a form.
#[derive(Debug)]
pub(super) struct Gemm {
    form: usize,
    m_tiles: usize,
    /// Rows of x of a tile, and of its TMA box: shared evenly among the tiles, in multiples of 8.
    rows: usize,
    grid: Grid,
    /// Whether a tile's channels come as two boxes of W.
    halves: bool,
    /// Whether 16-byte accesses fit outputs.
    vectors: bool,
}

impl Gemm {
    pub fn new(case: &Case, index: usize) -> std::result::Result<Self, &'static str> {
        let form = &FORMS[index];
        let dtype = case.dense().ok_or("the weights are not dense")?;
        check_vectors(case, dtype)?;
        if case.x != dtype || dtype != DType::BF16 || case.gpu.arch != 90 {
            return Err("x and weights are not in bf16, or the GPU is not Hopper's");
        }
        if case.norm == Some(NormKind::Layer) {
            return Err("a layer norm has a kernel of its own");
        }
        gemm_dense::check(case)?;
        check_halves(case, form.channels)?;
        let m_tiles = case.m.div_ceil(form.rows);
        let blocks = case.n().div_ceil(form.channels) * m_tiles;
        let stages = form.stages * (form.rows + form.channels) * STAGE_K * 2;
        let norm = case.k.next_multiple_of(STAGE_K) * 2;
        Ok(Self {
            form: index,
            m_tiles,
            rows: case.m.div_ceil(m_tiles).next_multiple_of(8),
            grid: Grid::new(
                [blocks as u32, 1, 1],
                (2 * form.rows + WARP) as u32,
                spread_out(case, blocks, 1024 + stages + norm) as u32,
            ),
            halves: has_halves(case, form.channels),
            vectors: case.alignment.outputs && case.width().is_multiple_of(8),
        })
    }

    pub fn form(&self) -> &'static Form {
        &FORMS[self.form]
    }
}

/// K at most: with more, the library's larger tiles were faster in all that was measured.
pub(crate) const MAX_K: usize = 1024;

/// K up to which products with a norm or a gate are faster here than in the library with kernels around it, whose tiles are
/// larger and read x and W less often (on an H200 K = 576 and 1024 were measured).
const SHORT_K: usize = 768;

/// Rows up to which a head is faster here: with 256 SmolLM2-135M's takes 47.7 us on an H200, and 38.1 in the library with
/// the norm in front.
const HEAD_ROWS: usize = 128;

/// Why another kernel is the faster one.
fn check_speed(case: &Case) -> std::result::Result<(), &'static str> {
    let faster = match (case.gates(), case.k <= SHORT_K) {
        (true, true) => true,
        // Fewer rows are `gemm_dense_sm90`'s, as far as it takes them.
        (true, false) => (257..=2048).contains(&case.m),
        (false, short) => {
            let most = if case.n() < HEAD { 2048 } else { HEAD_ROWS };
            case.norm.is_some() && short && case.m <= most
        }
    };
    match faster {
        true => Ok(()),
        false => Err(
            "another kernel is faster for such K, so many rows and channels, or without a norm and a gate",
        ),
    }
}

/// What a product takes in tiles of a form, relative to others: waves of blocks, each some time for its start and its end and
/// some for each stage. Two blocks of a multiprocessor take one and a half times as long as one. It misses the fastest form
/// by 0.4 % on average, and 9 % at most, of 27 products of 576 and 1024 by 960 to 6,144.
fn cost(case: &Case, form: &Form) -> usize {
    let sms = case.gpu.sms as usize;
    let blocks = case.n().div_ceil(form.channels) * case.m.div_ceil(form.rows);
    let stages = case.k.div_ceil(STAGE_K) * (form.rows * form.channels / 64 + 64);
    let wave = |blocks: usize| match blocks {
        0 => 0,
        blocks => stages * (blocks + 1) / 2 + 2000,
    };
    let at_once = form.blocks * sms;
    blocks / at_once * wave(form.blocks) + wave((blocks % at_once).div_ceil(sms))
}

/// The form of the least cost.
pub(crate) fn plan(case: &Case) -> Planned {
    check_speed(case)?;
    let forms = (0..FORMS.len()).map(|index| Gemm::new(case, index));
    let (fit, not): (Vec<_>, Vec<_>) = forms.partition(std::result::Result::is_ok);
    let least = fit
        .into_iter()
        .flatten()
        .min_by_key(|gemm| cost(case, gemm.form()));
    match (least, not.into_iter().find_map(std::result::Result::err)) {
        (Some(gemm), _) => Ok(Arc::new(gemm)),
        (None, reason) => Err(reason.unwrap_or("no tile fits")),
    }
}

impl Kernel for Gemm {
    fn entry(&self) -> &'static str {
        MODULE.names(self.form).1
    }

    fn grid(&self) -> Option<Grid> {
        Some(self.grid)
    }

    fn details(&self) -> String {
        let Form { rows, channels, .. } = self.form();
        format!("tiles of {rows}x{channels}")
    }

    unsafe fn run(&self, launcher: &Launcher, _: &mut Scratch, operands: &Operands) -> Result<()> {
        let at = &operands.at;
        let box_rows = self.form().channels / if self.halves { 2 } else { 1 };
        let params = GemmDenseParams {
            x: operand_map(at.x, [at.m, at.k], self.rows)?,
            weights: weight_maps(operands, box_rows)?,
            product: Gemv::of(operands)?,
            m_tiles: self.m_tiles as u32,
            tokens: self.rows as u32,
            split_k: 1,
            halves: self.halves.into(),
            vectors: self.vectors.into(),
        };
        let outputs = at.m * at.stride * at.out_dtype.size_in_bytes();
        let bytes = operands.weight_bytes() + 2 * at.m * at.k + outputs;
        // SAFETY: the caller's; the struct is the kernel's.
        unsafe {
            launcher
                .moving(bytes as u64)
                .run(&MODULE, self.form, self.grid, &params)
        }
    }
}

#[cfg(test)]
mod table_tests {
    use super::{FORMS, MODULE};

    /// What the host allocates for a form is what its kernel takes.
    #[test]
    fn kernels_are_in_the_order_of_the_forms() {
        for (index, form) in FORMS.iter().enumerate() {
            let end = format!("_{}_{}_{}", form.rows, form.channels, form.stages);
            let name = MODULE.names(index).1;
            assert!(name.ends_with(&end), "{name}: expected {end}");
        }
    }
}
