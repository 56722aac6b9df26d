//! Many rows of x: the library's matrix product, with the norm in front of it and one kernel behind
//! it for what the product itself cannot do on the way.

use super::few::{FEW, FewRows, few_rows};
use super::gemm::{self, Gemm};
use super::gemv::{EpilogueParams, NormAt, NormKind, activation_index};
use super::parts::ProductAt;
use crate::cuda::{Address, Grid, Launcher, Module, Scratch, address_of, fatbin};
use crate::ops::layer_norm::cuda::{LayerNormAt, launch as layer_norm};
use crate::ops::linear::{Activation, Weight};
use crate::ops::rms_norm::cuda::{RmsNormAt, launch as rms_norm};
use crate::ops::view::dtype_index;
use candle_core::{DType, Result, bail};

/// A product of any number of rows on raw addresses; 0 stands for no tensor.
#[derive(Clone, Debug)]
pub(super) struct ManyRows {
    /// `[m, k]`.
    pub x: Address,
    /// In front of the product.
    pub norm: Option<NormAt>,
    /// Matrices `[rows, k]` with their rows and dtypes, side by side in the output.
    pub weights: Vec<(Address, usize, DType)>,
    /// `[rows of all weights]`.
    pub bias: Address,
    pub activation: Activation,
    /// `[m, width]`.
    pub residuals: [Address; 2],
    /// `[m, width]`.
    pub out: Address,
    pub m: usize,
    pub k: usize,
    /// Of all but the weights.
    pub dtype: DType,
}

static MODULE: Module = Module::new(
    "linear_many",
    fatbin!("linear_many"),
    &[
        "linear_finish_f32",
        "linear_finish_f16",
        "linear_finish_bf16",
        "linear_widen_f16",
        "linear_widen_bf16",
    ],
);

/// Before `linear_widen_f16`, so that the index of a dtype follows.
const WIDEN: usize = 2;

const THREADS: u32 = 256;

/// `Params` of `kernels/linear_many.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct FinishParams {
    sums: Address,
    epilogue: EpilogueParams,
    m: u32,
    rows: u32,
    width: u32,
    vectors: i32,
}

/// `Widen` of `kernels/linear_many.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct WidenParams {
    from: Address,
    to: Address,
    count: u64,
}

impl ManyRows {
    /// The product of dense weights that are at `at`.
    pub fn new(weights: &[Weight], at: &ProductAt) -> Result<Self> {
        let weights = weights.iter().map(|weight| match weight {
            Weight::Dense(w) => Ok((address_of(w)?, w.dims()[0], w.dtype())),
            _ => bail!("linear: expected dense weights"),
        });
        let many = Self {
            x: at.x,
            norm: at.norm,
            weights: weights.collect::<Result<_>>()?,
            bias: at.bias,
            activation: at.activation,
            residuals: at.residuals,
            out: at.out,
            m: at.m,
            k: at.k,
            dtype: at.x_dtype,
        };
        at.check_for_library("linear", many.rows())?;
        Ok(many)
    }

    fn rows(&self) -> usize {
        self.weights.iter().map(|(_, rows, _)| rows).sum()
    }

    fn width(&self) -> usize {
        self.activation.outputs(self.rows())
    }

    /// Whether the product itself can write the output: it adds a bias and one residual, and rounds
    /// once.
    fn is_direct(&self) -> bool {
        self.activation == Activation::None
            && self.residuals[1] == 0
            && (self.bias == 0 || (self.weights.len() == 1 && self.bias.is_multiple_of(16)))
            && self
                .weights
                .iter()
                .all(|(_, _, dtype)| *dtype == self.dtype)
    }
}

/// Launches the product.
///
/// # Safety
/// Each address holds what its field says until the stream has passed the launches.
pub(super) unsafe fn many_rows(
    launcher: &Launcher,
    scratch: &mut Scratch,
    at: &ManyRows,
) -> Result<()> {
    let mut at = at.clone();
    let rows = Rows {
        x: at.x,
        m: at.m,
        k: at.k,
        dtype: at.dtype,
    };
    if let Some(norm) = at.norm.take() {
        // SAFETY: the caller's.
        at.x = unsafe { normalised(launcher, scratch, &rows, norm)? };
    }
    if at.is_direct() {
        let target = Target {
            out: at.out,
            stride: at.width(),
            dtype: at.dtype,
            bias: at.bias,
            residual: at.residuals[0],
        };
        // SAFETY: the caller's.
        return unsafe { products(launcher, scratch, &at, &target) };
    }
    let target = Target {
        out: scratch.take("linear", DType::F32, at.m * at.rows())?,
        stride: at.rows(),
        dtype: DType::F32,
        bias: 0,
        residual: 0,
    };
    // SAFETY: the caller's; the sums have room for all products.
    unsafe {
        products(launcher, scratch, &at, &target)?;
        finish(launcher, &at, target.out)
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

/// The products with all weights, side by side.
///
/// # Safety
/// As [`many_rows`].
unsafe fn products(
    launcher: &Launcher,
    scratch: &mut Scratch,
    at: &ManyRows,
    to: &Target,
) -> Result<()> {
    let mut column = 0;
    let mut wide = None;
    for &(weight, rows, dtype) in &at.weights {
        let behind = |base: Address| match base {
            0 => 0,
            base => base + (column * to.dtype.size_in_bytes()) as u64,
        };
        let mut gemm = Gemm {
            x: at.x,
            weight,
            bias: behind(to.bias),
            residual: behind(to.residual),
            out: behind(to.out),
            m: at.m,
            n: rows,
            k: at.k,
            stride: to.stride,
            dtype: at.dtype,
            out_dtype: to.dtype,
        };
        let mut widened_weight = None;
        if dtype != at.dtype {
            // Types that differ meet in f32.
            // SAFETY: the caller's.
            unsafe {
                if wide.is_none() && at.dtype != DType::F32 {
                    wide = Some(widened(launcher, scratch, at.x, at.dtype, at.m * at.k)?);
                }
                if dtype != DType::F32 {
                    widened_weight = Some(widened(launcher, scratch, weight, dtype, rows * at.k)?);
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

/// One product, by the library if it has an algorithm for its shape and alignment.
///
/// # Safety
/// As [`gemm::run`].
unsafe fn product(launcher: &Launcher, scratch: &mut Scratch, gemm: &Gemm) -> Result<()> {
    // SAFETY: the caller's.
    if unsafe { gemm::run(launcher, scratch, gemm)? } {
        return Ok(());
    }
    let [x_size, out_size] = [gemm.dtype, gemm.out_dtype].map(|d| d.size_in_bytes());
    let in_order = Launcher {
        dependent: false,
        ..*launcher
    };
    for first in (0..gemm.m).step_by(FEW) {
        let out = (first * gemm.stride * out_size) as u64;
        let rows = FewRows {
            x: gemm.x + (first * gemm.k * x_size) as u64,
            norm: None,
            weights: [(gemm.weight, gemm.n), (0, 0), (0, 0)],
            second: None,
            fetch: None,
            bias: gemm.bias,
            activation: Activation::None,
            residuals: [gemm.residual, 0].map(|r| if r == 0 { 0 } else { r + out }),
            out: gemm.out + out,
            stride: gemm.stride,
            m: (gemm.m - first).min(FEW),
            k: gemm.k,
            x_dtype: gemm.dtype,
            w_dtype: gemm.dtype,
            out_dtype: gemm.out_dtype,
        };
        // SAFETY: the caller's; not dependent, since the kernel in front may have made the weight.
        unsafe { few_rows(&in_order, &rows)? };
    }
    Ok(())
}

/// Sums to outputs: bias, activation, residuals.
///
/// # Safety
/// As [`many_rows`]; `sums` holds `[m, rows]`.
pub(super) unsafe fn finish(launcher: &Launcher, at: &ManyRows, sums: Address) -> Result<()> {
    let (rows, width) = (at.rows(), at.width());
    let addresses = [at.bias, at.residuals[0], at.residuals[1], at.out, sums];
    let vectors = width.is_multiple_of(4)
        && rows.is_multiple_of(4)
        && addresses.iter().all(|a| a.is_multiple_of(16));
    let params = FinishParams {
        sums,
        epilogue: EpilogueParams {
            bias: at.bias,
            residuals: at.residuals,
            out: at.out,
            stride: width as u64,
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
    let bytes = at.m * (4 * rows + at.dtype.size_in_bytes() * width);
    // SAFETY: the layout is `Params` of the kernel; the addresses are the caller's.
    unsafe {
        launcher
            .moving(bytes as u64)
            .run(&MODULE, dtype_index(at.dtype), grid, &params)
    }
}

/// Rows of x, `[m, k]`.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub x: Address,
    pub m: usize,
    pub k: usize,
    pub dtype: DType,
}

/// Rows behind a norm.
///
/// # Safety
/// The addresses hold what their fields say until the stream has passed the launch.
pub(super) unsafe fn normalised(
    launcher: &Launcher,
    scratch: &mut Scratch,
    rows: &Rows,
    norm: NormAt,
) -> Result<Address> {
    let Rows { x, m, k, dtype } = *rows;
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
                    weight: norm.weight,
                    bias: norm.bias,
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
