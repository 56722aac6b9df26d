//! Dense weights and many rows of x: cuBLASLt, with the norm in front of it and one kernel behind it for what the
//! library cannot do on the way.

use super::super::plan::{Kernel, Planned};
use super::super::problem::{Case, NormKind, Operand, Operands, ProductAt, offset};
use super::cublaslt::{self, Gemm, WORKSPACE};
use super::gemv::{EpilogueParams, activation_index};
use super::gemv_dense;
use crate::cuda::abi::{SUMS_EPILOGUE_THREADS, SumsEpilogueParams, WidenParams};
use crate::cuda::{Address, Grid, Launcher, Module, Scratch, fatbin};
use crate::ops::layer_norm::cuda::{LayerNormAt, launch as layer_norm};
use crate::ops::linear::{Activation, ActivationBits};
use crate::ops::rms_norm::cuda::{RmsNormAt, launch as rms_norm};
use crate::ops::view::dtype_index;
use candle_core::{DType, Result, bail};
use std::sync::Arc;

static MODULE: Module = Module::new(
    "gemm_dense",
    fatbin!("gemm_dense"),
    &[
        "gemm_dense_epilogue_f32",
        "gemm_dense_epilogue_f16",
        "gemm_dense_epilogue_bf16",
        "gemm_dense_widen_f16",
        "gemm_dense_widen_bf16",
    ],
);

/// Before `gemm_dense_widen_f16`, so that the index of a dtype follows.
const WIDEN: usize = 2;

const THREADS: u32 = SUMS_EPILOGUE_THREADS as u32;

/// Products by the library with what follows them.
#[derive(Clone, Debug)]
pub(super) struct Gemms<'a> {
    /// Rows of x after the norm, in `dtype`.
    pub x: Address,
    pub dtype: DType,
    /// Matrices `[rows, k]` with their rows and dtypes, side by side in the output.
    pub weights: Vec<(Address, usize, DType)>,
    /// What is asked; its x and norm have been used.
    pub at: &'a ProductAt,
}

/// Whether the library's products can write such outputs.
pub(super) fn check(case: &Case) -> std::result::Result<(), &'static str> {
    let plain = case.activation == Activation::None && !case.bias && case.residuals == 0;
    match case.out == case.x || (case.out == DType::F32 && plain) {
        true => Ok(()),
        false => Err("outputs in f32 of 16-bit rows have no epilogue"),
    }
}

/// Of any shape, alignment and dtypes.
pub(crate) fn plan(case: &Case) -> Planned {
    check(case)?;
    Ok(Arc::new(Library))
}

/// The library chooses how.
#[derive(Debug)]
struct Library;

impl Kernel for Library {
    fn entry(&self) -> &'static str {
        "cublasLtMatmul"
    }

    fn grid(&self) -> Option<Grid> {
        None
    }

    fn details(&self) -> String {
        String::new()
    }

    fn scratch(&self, operands: &Operands) -> usize {
        let ProductAt { m, k, x_dtype, .. } = operands.at;
        let rows = operands.rows();
        // Normed rows, sums, both operands widened, and the library's own.
        Scratch::room(x_dtype, m * k)
            + Scratch::room(DType::F32, m * rows)
            + Scratch::room(DType::F32, m * k)
            + operands.weights.len() * (Scratch::room(DType::F32, rows * k) + WORKSPACE)
    }

    unsafe fn run(
        &self,
        launcher: &Launcher,
        scratch: &mut Scratch,
        operands: &Operands,
    ) -> Result<()> {
        let at = &operands.at;
        let weights = operands.weights.iter().map(|weight| match weight {
            Operand::Dense {
                address,
                rows,
                dtype,
            } => Ok((*address, *rows, *dtype)),
            Operand::Quantized(_) => bail!("linear: expected dense weights"),
        });
        let weights = weights.collect::<Result<_>>()?;
        // SAFETY: the caller's.
        unsafe {
            let x = normalised(launcher, scratch, at)?;
            let gemms = Gemms {
                x,
                dtype: at.x_dtype,
                weights,
                at,
            };
            gemms.run(launcher, scratch)
        }
    }
}

/// Where products go, and what is added to them on the way.
#[derive(Clone, Copy)]
struct Target {
    out: Address,
    stride: usize,
    dtype: DType,
    bias: Address,
    residual: Address,
}

impl Gemms<'_> {
    fn rows(&self) -> usize {
        self.weights.iter().map(|(_, rows, _)| rows).sum()
    }

    /// Whether the product itself can write the output: it adds a bias and one residual of the output's dtype, and
    /// rounds once.
    fn is_direct(&self) -> bool {
        let at = self.at;
        let added = at.bias != 0 || at.residuals[0] != 0;
        at.activation == Activation::None
            && at.residuals[1] == 0
            && (at.bias == 0
                || (self.weights.len() == 1
                    && at.bias.is_multiple_of(16)
                    && self.dtype == at.out_dtype))
            && (!added || at.x_dtype == at.out_dtype)
            && [self.dtype, DType::F32].contains(&at.out_dtype)
            && self.weights.iter().all(|(.., dtype)| *dtype == self.dtype)
    }

    /// Launches the products, and what follows them.
    ///
    /// # Safety
    /// Each address holds what its field says until the stream has passed the launches.
    pub unsafe fn run(&self, launcher: &Launcher, scratch: &mut Scratch) -> Result<()> {
        let at = self.at;
        if self.is_direct() {
            let target = Target {
                out: at.out,
                stride: at.stride,
                dtype: at.out_dtype,
                bias: at.bias,
                residual: at.residuals[0],
            };
            // SAFETY: the caller's.
            return unsafe { self.products(launcher, scratch, &target) };
        }
        let rows = self.rows();
        let target = Target {
            out: scratch.take("linear", DType::F32, at.m * rows)?,
            stride: rows,
            dtype: DType::F32,
            bias: 0,
            residual: 0,
        };
        // SAFETY: the caller's; the sums have room for all products.
        unsafe {
            self.products(launcher, scratch, &target)?;
            finish(launcher, at, rows, target.out)
        }
    }

    /// The products with all weights, side by side.
    ///
    /// # Safety
    /// As [`Gemms::run`].
    unsafe fn products(
        &self,
        launcher: &Launcher,
        scratch: &mut Scratch,
        to: &Target,
    ) -> Result<()> {
        let (m, k) = (self.at.m, self.at.k);
        let mut column = 0;
        let mut wide = None;
        for &(weight, rows, dtype) in &self.weights {
            let behind = |base: Address| offset(base, column * to.dtype.size_in_bytes());
            let mut gemm = Gemm {
                x: self.x,
                weight,
                bias: behind(to.bias),
                residual: behind(to.residual),
                out: behind(to.out),
                m,
                n: rows,
                k,
                stride: to.stride,
                dtype: self.dtype,
                out_dtype: to.dtype,
            };
            let mut widened_weight = None;
            if dtype != self.dtype {
                // Types that differ meet in f32.
                // SAFETY: the caller's.
                unsafe {
                    if wide.is_none() && self.dtype != DType::F32 {
                        wide = Some(widened(launcher, scratch, self.x, self.dtype, m * k)?);
                    }
                    if dtype != DType::F32 {
                        widened_weight = Some(widened(launcher, scratch, weight, dtype, rows * k)?);
                    }
                }
                gemm.x = wide.unwrap_or(gemm.x);
                gemm.weight = widened_weight.unwrap_or(gemm.weight);
                gemm.dtype = DType::F32;
            }
            // SAFETY: the caller's.
            unsafe { product(launcher, scratch, &gemm)? };
            column += rows;
        }
        Ok(())
    }
}

/// One product, by the library if it has an algorithm for its shape and alignment, else by dense GEMVs.
///
/// # Safety
/// As [`cublaslt::run`].
unsafe fn product(launcher: &Launcher, scratch: &mut Scratch, gemm: &Gemm) -> Result<()> {
    // SAFETY: the caller's.
    if unsafe { cublaslt::run(launcher, scratch, gemm)? } {
        return Ok(());
    }
    // The preceding kernel may have made the weight.
    let in_order = launcher.in_order();
    let all = ProductAt {
        x: gemm.x,
        norm: None,
        bias: gemm.bias,
        activation: Activation::None,
        residuals: [gemm.residual, 0],
        out: gemm.out,
        stride: gemm.stride,
        m: gemm.m,
        k: gemm.k,
        x_dtype: gemm.dtype,
        x_bits: ActivationBits::Auto,
        out_dtype: gemm.out_dtype,
    };
    for first in (0..gemm.m).step_by(gemv_dense::MAX_M) {
        let operands = Operands {
            weights: vec![Operand::Dense {
                address: gemm.weight,
                rows: gemm.n,
                dtype: gemm.dtype,
            }],
            at: all.at_rows(first, (gemm.m - first).min(gemv_dense::MAX_M)),
            second: None,
            fetch: None,
            dequantized: None,
        };
        match gemv_dense::any(&operands.case(&in_order)) {
            // SAFETY: the caller's.
            Ok(gemv) => unsafe { gemv.run(&in_order, scratch, &operands)? },
            Err(reason) => bail!(
                "linear: cuBLASLt has no product of {} rows with weights [{}, {}] in {:?}, and {reason}",
                gemm.m,
                gemm.n,
                gemm.k,
                gemm.dtype
            ),
        }
    }
    Ok(())
}

/// Sums to outputs: bias, activation, residuals.
///
/// # Safety
/// As [`Gemms::run`]; `sums` holds `[m, rows]`.
unsafe fn finish(launcher: &Launcher, at: &ProductAt, rows: usize, sums: Address) -> Result<()> {
    let width = at.activation.outputs(rows);
    let addresses = [at.bias, at.residuals[0], at.residuals[1], at.out, sums];
    let vectors = [width, rows, at.stride].iter().all(|n| n.is_multiple_of(4))
        && addresses.iter().all(|a| a.is_multiple_of(16));
    let params = SumsEpilogueParams {
        sums,
        epilogue: EpilogueParams {
            bias: at.bias,
            residuals: at.residuals,
            out: at.out,
            stride: at.stride as u64,
            activation: activation_index(at.activation),
            ..EpilogueParams::default()
        },
        m: at.m as u32,
        rows: rows as u32,
        width: width as u32,
        vectors: vectors.into(),
    };
    let columns = if vectors { width / 4 } else { width } as u32;
    let grid = Grid::new(
        [columns.div_ceil(THREADS), at.m.min(65535) as u32, 1],
        THREADS,
        0,
    );
    let bytes = at.m * (4 * rows + at.x_dtype.size_in_bytes() * width);
    // SAFETY: the kernel takes `SumsEpilogueParams`; the addresses are the caller's.
    unsafe {
        launcher
            .moving(bytes as u64)
            .run(&MODULE, dtype_index(at.x_dtype), grid, &params)
    }
}

/// Rows of x after the norm, or x itself where there is none.
///
/// # Safety
/// The addresses hold what their fields say until the stream has passed the launch.
pub(super) unsafe fn normalised(
    launcher: &Launcher,
    scratch: &mut Scratch,
    at: &ProductAt,
) -> Result<Address> {
    let Some(norm) = at.norm else {
        return Ok(at.x);
    };
    let ProductAt {
        x,
        m,
        k,
        x_dtype: dtype,
        ..
    } = *at;
    let y = scratch.take("linear", dtype, m * k)?;
    // SAFETY: the caller's; the scratch has room for all rows.
    unsafe {
        match norm.kind {
            NormKind::Rms => rms_norm(
                launcher,
                &RmsNormAt {
                    x,
                    residual: 0,
                    weight: norm.weight,
                    sum: 0,
                    y,
                    rows: m,
                    width: k,
                    eps: norm.eps,
                    dtype,
                },
            )?,
            NormKind::Layer => layer_norm(
                launcher,
                &LayerNormAt {
                    x,
                    residual: 0,
                    weight: norm.weight,
                    bias: norm.bias,
                    sum: 0,
                    y,
                    rows: m,
                    width: k,
                    eps: norm.eps,
                    dtype,
                },
            )?,
        }
    }
    Ok(y)
}

/// `count` elements of a 16-bit type as f32.
///
/// # Safety
/// `from` holds them.
unsafe fn widened(
    launcher: &Launcher,
    scratch: &mut Scratch,
    from: Address,
    dtype: DType,
    count: usize,
) -> Result<Address> {
    let to = scratch.take("linear", DType::F32, count)?;
    let params = WidenParams {
        from,
        to,
        count: count as u64,
    };
    let blocks = count
        .div_ceil(THREADS as usize)
        .min(16 * launcher.gpu.sms as usize);
    let grid = Grid::line(blocks as u32, THREADS);
    let kernel = WIDEN + dtype_index(dtype);
    // SAFETY: the layout is `Widen` of the kernel, and there is room for `count` elements.
    unsafe { launcher.run(&MODULE, kernel, grid, &params)? };
    Ok(to)
}
