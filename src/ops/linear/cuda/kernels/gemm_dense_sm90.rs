//! Dense weights and x of one 16-bit type on Hopper, for few to some hundred rows of x: `wgmma` with both operands in
//! shared memory (`kernels/linear/gemm_dense_sm90.cu`). A preceding kernel applies a norm, while the product's first
//! weights are in flight.

use super::super::plan::{Kernel, Planned};
use super::super::problem::{Case, MAX_MATRICES, Operand, Operands};
use super::gemm_dense::{self, normalised};
use super::gemv::{Gemv, is_bf16};
use super::gemv_dense::{self, check_vectors};
use super::tensor_map::operand_map;
use crate::cuda::abi::{
    GEMM_DENSE_SM90 as FORMS, GemmDenseForm, GemmDenseParams, NORM_NONE, TensorMap, WARP,
};
use crate::cuda::{Grid, Launcher, Module, Scratch, fatbin};
use candle_core::{DType, Result, bail};
use std::sync::Arc;

/// The kernels for f16, then those for bf16, each in the order of [`FORMS`].
pub(super) static MODULE: Module = Module::new(
    "gemm_dense_sm90",
    fatbin!("gemm_dense_sm90"),
    &[
        "gemm_dense_sm90_f16_64_8",
        "gemm_dense_sm90_f16_64_16",
        "gemm_dense_sm90_f16_64_32",
        "gemm_dense_sm90_f16_64_64",
        "gemm_dense_sm90_f16_64_128",
        "gemm_dense_sm90_f16_128_8",
        "gemm_dense_sm90_f16_128_16",
        "gemm_dense_sm90_f16_128_32",
        "gemm_dense_sm90_f16_128_64",
        "gemm_dense_sm90_f16_128_128",
        "gemm_dense_sm90_bf16_64_8",
        "gemm_dense_sm90_bf16_64_16",
        "gemm_dense_sm90_bf16_64_32",
        "gemm_dense_sm90_bf16_64_64",
        "gemm_dense_sm90_bf16_64_128",
        "gemm_dense_sm90_bf16_128_8",
        "gemm_dense_sm90_bf16_128_16",
        "gemm_dense_sm90_bf16_128_32",
        "gemm_dense_sm90_bf16_128_64",
        "gemm_dense_sm90_bf16_128_128",
    ],
);

/// Values of K of a stage.
pub(super) const STAGE_K: usize = 64;

/// Blocks of a cluster at most.
pub(super) const MAX_SPLIT_K: usize = 8;

/// How blocks share a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiling {
    /// The place among [`FORMS`].
    pub form: usize,
    /// Blocks of a cluster, which share K.
    pub split_k: usize,
}

/// Whether the halves of a tile's channels may be of different matrices, or are not side by side.
pub(super) fn has_halves(case: &Case, channels: usize) -> bool {
    let matrices: Vec<_> = case.matrices().collect();
    let inner = &matrices[..matrices.len().saturating_sub(1)];
    case.gates() || !inner.iter().all(|rows| rows.is_multiple_of(channels))
}

/// Why tiles of so many channels cannot be had: half of one is of one matrix.
pub(super) fn check_halves(case: &Case, channels: usize) -> std::result::Result<(), &'static str> {
    let matrices: Vec<_> = case.matrices().collect();
    let fits = match (case.gates(), &matrices[..]) {
        (true, [_]) => true,
        (true, [gate, up]) => gate == up,
        (true, _) => false,
        (false, [first @ .., _]) => first.iter().all(|rows| rows.is_multiple_of(channels / 2)),
        (false, []) => false,
    };
    match fits {
        true => Ok(()),
        false => Err("half a tile would be of several matrices"),
    }
}

/// Shared memory of a block that needs `shared` bytes: with its static part more than half of an SM's, if there is an SM for
/// each block, so that no two blocks share one while another SM has none (see `Preceding`). A step of 32
/// sequences of Qwen3-0.6B took 1.44 ms on an H200 when blocks of its down product shared SMs, and 1.31 when they did
/// not. That product has 16 clusters of eight blocks, of which the GPU then takes 15 at once, so that alone it became
/// slower: 9.3 us instead of 6.0.
pub(super) fn spread_out(case: &Case, blocks: usize, shared: usize) -> usize {
    match case.preceding.is_another() && blocks <= case.gpu.sms as usize {
        true => shared.max(case.gpu.share(2)),
        false => shared,
    }
}

/// Maps of the weights, in boxes of so many rows.
pub(super) fn weight_maps(
    operands: &Operands,
    box_rows: usize,
) -> Result<[TensorMap; MAX_MATRICES]> {
    let mut maps = [TensorMap { opaque: [0; 16] }; MAX_MATRICES];
    let present = operands.weights.iter().filter(|w| w.rows() > 0);
    for (map, weight) in maps.iter_mut().zip(present) {
        let Operand::Dense { address, rows, .. } = weight else {
            bail!("linear: expected dense weights");
        };
        *map = operand_map(*address, [*rows, operands.at.k], box_rows)?;
    }
    Ok(maps)
}

impl Tiling {
    fn form(&self) -> &'static GemmDenseForm {
        &FORMS[self.form]
    }

    /// Tiles of output channels, and of tokens.
    fn tiles(&self, case: &Case) -> [usize; 2] {
        let GemmDenseForm {
            channels: tile,
            tokens,
            ..
        } = self.form();
        [case.n().div_ceil(*tile), case.m.div_ceil(*tokens)]
    }

    fn check(&self, case: &Case) -> std::result::Result<(), &'static str> {
        check_halves(case, self.form().channels)?;
        match self.split_k <= case.k.div_ceil(STAGE_K) {
            true => Ok(()),
            false => Err("K is short"),
        }
    }

    /// Measured over the products of SmolLM2-135M, Llama-3.2-1B and Llama-3-8B, 8 to 256 rows: as many blocks share K as
    /// fill the GPU once, and a tile has all tokens; where K is too short to be shared, tokens are. Where there are more
    /// tiles of 64 channels than the GPU takes at once, tiles of 128 read W in larger pieces.
    pub fn of(case: &Case) -> std::result::Result<Self, &'static str> {
        let sms = case.gpu.sms as usize;
        let k_stages = case.k.div_ceil(STAGE_K);
        let n_tiles = case.n().div_ceil(64);
        let wanted = (5 * sms / 4 + n_tiles / 2) / n_tiles;
        let split_k = wanted.clamp(1, (k_stages / SHARE).clamp(1, MAX_SPLIT_K));
        // Two blocks of a multiprocessor at a time.
        let wide = n_tiles * split_k > 2 * sms;
        let fits = |form: &GemmDenseForm| match split_k == 1 && wanted > 1 {
            true => n_tiles * case.m.div_ceil(form.tokens) <= 3 * sms / 2,
            // With 32 tokens tiles of 64 were faster by 4 % for 28,672 channels, and slower by 2 % for 128,256.
            false => {
                let narrow = !wide || (form.tokens == 32 && case.m > 16 && n_tiles <= 4 * sms);
                form.tokens >= case.m && (form.channels == 128 || narrow)
            }
        };
        let form = FORMS.iter().position(fits).unwrap_or(FORMS.len() - 1);
        let tiling = Self { form, split_k };
        tiling.check(case)?;
        Ok(tiling)
    }
}

/// Stages of K that a block has at least, where several share it.
const SHARE: usize = 6;

/// Bytes of weights from which on this is faster for up to 8 rows than the GEMV, which applies a norm itself.
const LARGE: usize = 4 << 20;

/// Why another kernel is the faster one.
fn check_speed(case: &Case) -> std::result::Result<(), &'static str> {
    let large = 2 * case.n() * case.k >= LARGE;
    // cuBLASLt is faster for more than 32 rows, or 64 where there are many output channels, unless one half of them gates
    // the other, for which it needs a kernel behind it. Products of small matrices by themselves are faster here up to 64 rows, but a
    // step of 64 sequences of SmolLM2 takes 1.27 ms with them and 1.07 ms with the library.
    let n_tiles = case.n() / 64;
    let many_channels = large && n_tiles >= case.gpu.sms as usize;
    let most = match (case.gates(), many_channels) {
        (true, _) if n_tiles <= 2 * case.gpu.sms as usize => 256,
        (true, _) => 128,
        (false, true) => 64,
        (false, false) => 32,
    };
    match case.m <= most && (large || case.m > gemv_dense::MAX_M) {
        true => Ok(()),
        false => Err("another kernel is faster for so many or so few rows"),
    }
}

/// The product, after a kernel for the norm.
#[derive(Debug)]
pub(super) struct Gemm {
    index: usize,
    tiling: Tiling,
    m_tiles: usize,
    /// Tokens of a tile, and rows of its TMA box: those of x shared evenly among the tiles, in multiples of 8.
    tokens: usize,
    grid: Grid,
    /// Whether a tile's channels come as two boxes of W.
    halves: bool,
    /// Whether 16-byte accesses fit outputs.
    vectors: bool,
}

impl Gemm {
    pub fn new(case: &Case, tiling: Tiling) -> std::result::Result<Self, &'static str> {
        let dtype = case.dense().ok_or("the weights are not dense")?;
        check_vectors(case, dtype)?;
        if case.x != dtype || dtype == DType::F32 || case.gpu.arch != 90 {
            return Err("x and weights are not of one 16-bit type, or the GPU is not Hopper's");
        }
        gemm_dense::check(case)?;
        tiling.check(case)?;
        let form = tiling.form();
        let [n_tiles, m_tiles] = tiling.tiles(case);
        let stage = (form.channels + form.tokens) * 2 * STAGE_K;
        let blocks = n_tiles * m_tiles * tiling.split_k;
        let mut grid = Grid::new(
            [blocks as u32, 1, 1],
            (2 * form.channels + WARP) as u32,
            spread_out(case, blocks, form.stages * stage + 1024) as u32,
        );
        grid.cluster = tiling.split_k as u32;
        Ok(Self {
            index: is_bf16(dtype) * FORMS.len() + tiling.form,
            tiling,
            m_tiles,
            tokens: case.m.div_ceil(m_tiles).next_multiple_of(8),
            grid,
            halves: has_halves(case, form.channels),
            vectors: case.alignment.outputs && case.width().is_multiple_of(8),
        })
    }
}

/// Up to three matrices, any K of whole 16 bytes.
pub(crate) fn plan(case: &Case) -> Planned {
    check_speed(case)?;
    Ok(Arc::new(Gemm::new(case, Tiling::of(case)?)?))
}

impl Kernel for Gemm {
    fn entry(&self) -> &'static str {
        MODULE.names(self.index).1
    }

    fn grid(&self) -> Option<Grid> {
        Some(self.grid)
    }

    fn details(&self) -> String {
        let GemmDenseForm {
            channels, tokens, ..
        } = self.tiling.form();
        let split_k = self.tiling.split_k;
        format!("tiles of {channels}x{tokens}, split-K {split_k}")
    }

    fn scratch(&self, operands: &Operands) -> usize {
        let at = &operands.at;
        Scratch::room(at.x_dtype, at.m * at.k)
    }

    unsafe fn run(
        &self,
        launcher: &Launcher,
        scratch: &mut Scratch,
        operands: &Operands,
    ) -> Result<()> {
        let at = &operands.at;
        let form = self.tiling.form();
        // SAFETY: the caller's.
        let x = unsafe { normalised(launcher, scratch, at)? };
        let box_rows = form.channels / if self.halves { 2 } else { 1 };
        let weights = weight_maps(operands, box_rows)?;
        let mut product = Gemv::of(operands)?;
        product.prologue.norm = NORM_NONE as i32;
        let params = GemmDenseParams {
            x: operand_map(x, [at.m, at.k], self.tokens)?,
            weights,
            product,
            m_tiles: self.m_tiles as u32,
            tokens: self.tokens as u32,
            split_k: self.tiling.split_k as u32,
            halves: self.halves.into(),
            vectors: self.vectors.into(),
        };
        // Its weights may be read while a norm is still being applied here.
        let launcher = match x == at.x {
            true => *launcher,
            false => launcher.overlapping(),
        };
        let outputs = at.m * at.stride * at.out_dtype.size_in_bytes();
        let bytes = operands.weight_bytes() + 2 * at.m * at.k + outputs;
        // SAFETY: the caller's; the struct is the kernel's.
        unsafe {
            launcher
                .moving(bytes as u64)
                .run(&MODULE, self.index, self.grid, &params)
        }
    }
}
