//! Few rows of x: one kernel with the norm in front and the epilogue behind, which reads every
//! weight once.

use super::gemv::{Core, Gemv, Matrix, NormAt, NormKind, launch};
use super::stream::{self, Fetch, Room};
use crate::cuda::{Address, Gpu, Grid, Launcher, Module, PIECES, UNALIGNED, fatbin};
use crate::ops::linear::Activation;
use crate::ops::view::{dtype_index, float};
use candle_core::{DType, Result, bail};

const OP: &str = "linear";

/// In the order of the constants below.
static MODULE: Module = Module::new(
    "linear",
    fatbin!("linear"),
    &[
        "linear_tensor_f16",
        "linear_tensor_bf16",
        "linear_m1_f32",
        "linear_m1_f16",
        "linear_m1_bf16",
        "linear_m1_large_f32",
        "linear_m1_large_f16",
        "linear_m1_large_bf16",
        "linear_m8_f32",
        "linear_m8_f16",
        "linear_m8_bf16",
        "linear_m8_scalar",
        "linear_small_1024_f16",
        "linear_small_1024_bf16",
        "linear_small_1536_f16",
        "linear_small_1536_bf16",
    ],
);

const TENSOR: usize = 0;
const LANES: usize = 2;
const SCALAR: usize = 11;
const SMALL: usize = 12;

/// Inputs that the kernels for small products take at most.
const SMALL_K: [usize; 2] = [1024, 1536];

/// Rows of weights that a block of a small product computes.
const SMALL_UNIT: usize = 8;
const SMALL_THREADS: u32 = 256;

/// Bytes of weights from which on a warp reads so many that it has more of them on the way.
const LARGE: usize = 24 << 20;

/// The same where rows are long, and from which on they are: in the decode step of a model (Llama-3.2-1B
/// on an H100) worth 7 %, though not to the product alone.
const LARGE_LONG: usize = 8 << 20;
const LONG: usize = 2048;

/// Rows of x that are few: the weights are read once and meet all of them. More go to the library's
/// matrix product.
pub(crate) const FEW: usize = 8;

/// A product of up to [`FEW`] rows on raw addresses; 0 stands for no tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FewRows {
    /// `[m, k]`.
    pub x: Address,
    /// In front of the product.
    pub norm: Option<NormAt>,
    /// Up to three matrices `[rows, k]`, side by side in the output; 0 rows for none.
    pub weights: [(Address, usize); 3],
    /// A second matrix `[rows, k - border]` beside the only one, which is `[rows, border]` then, and
    /// that border; see [`FewRows::paired`].
    pub second: Option<(Address, usize)>,
    /// What a kernel that streams its weights fetches for the next one beside them.
    pub fetch: Option<Fetch>,
    /// `[rows of all weights]`.
    pub bias: Address,
    pub activation: Activation,
    /// `[m, width]`, each row `stride` elements after the one before.
    pub residuals: [Address; 2],
    /// Likewise; with `out_dtype`.
    pub out: Address,
    /// Elements from one row of the output to the next, at least the width.
    pub stride: usize,
    pub m: usize,
    pub k: usize,
    /// Of x, the norm, the bias and the residuals.
    pub x_dtype: DType,
    /// Of the weights.
    pub w_dtype: DType,
    /// x's dtype, or f32.
    pub out_dtype: DType,
}

impl FewRows {
    /// Rows of all weights.
    pub fn rows(&self) -> usize {
        self.weights.iter().map(|(_, rows)| rows).sum()
    }

    /// Outputs of a row of x.
    pub fn width(&self) -> usize {
        self.activation.outputs(self.rows())
    }

    /// The sum of this product of one row and one matrix and of `other`, in one: `other`'s x lies
    /// behind this one's, it has as many rows and no norm, and everything behind the product is
    /// this one's. None if there is no kernel for the two.
    pub fn paired(&self, other: &FewRows, gpu: &Gpu) -> Option<Self> {
        let one = |at: &Self| at.m == 1 && at.weights[1].1 == 0 && at.norm.is_none();
        let behind = self.x + (self.k * self.x_dtype.size_in_bytes()) as Address;
        let pair = Self {
            second: Some((other.weights[0].0, self.k)),
            k: self.k + other.k,
            ..*self
        };
        let fits = one(self)
            && one(other)
            && other.x == behind
            && self.rows() == other.rows()
            && other.activation == Activation::None
            && [self.w_dtype, other.x_dtype, other.w_dtype] == [self.x_dtype; 3]
            && self.x_dtype != DType::F32
            && self.vectors()
            && other.vectors()
            && pair.stream(gpu).is_some();
        fits.then_some(pair)
    }

    /// Whether 16-byte accesses fit x, the norm and the weights.
    pub(super) fn vectors(&self) -> bool {
        self.refusal().is_none()
    }

    /// Why 16-byte accesses do not fit x, the norm or the weights; none if they do.
    fn refusal(&self) -> Option<&'static str> {
        let norm = self.norm.map_or([0; 2], |n| [n.weight, n.bias]);
        let fits = |dtype: DType| (self.k * dtype.size_in_bytes()).is_multiple_of(16);
        let weights = self.weights.iter().map(|(address, _)| *address);
        let mut starts = weights.chain(norm).chain([self.x]);
        if !(fits(self.x_dtype) && fits(self.w_dtype)) {
            Some(PIECES)
        } else if !starts.all(|a| a.is_multiple_of(16)) {
            Some(UNALIGNED)
        } else {
            None
        }
    }

    /// The kernel that takes the product, for the trace.
    pub fn path(&self, gpu: &Gpu) -> String {
        if let Some(reason) = self.refusal() {
            return format!("scalar: {reason}");
        }
        let kernel = self.core(gpu).kernel;
        match self.small(gpu) {
            Some(_) => "tensor cores, small",
            None if self.is_streamed(gpu) => "vector, streamed",
            None if kernel < LANES => "tensor cores",
            None => "vector",
        }
        .to_owned()
    }

    /// The kernel and how it works.
    fn core(&self, gpu: &Gpu) -> Core {
        let index = dtype_index(self.w_dtype);
        if !self.vectors() {
            return Core {
                kernel: SCALAR,
                most: FEW,
                unit: 2,
                step: 32,
                tile: 4,
                row: 4 * self.k,
                padded: true,
                fills: false,
            };
        }
        if self.m > 1 && self.on_tensor_cores(gpu) {
            return Core {
                kernel: TENSOR + index - 1,
                most: FEW,
                unit: 8,
                step: 32,
                tile: 8,
                row: 2 * (self.k.next_multiple_of(64) + 32),
                padded: false,
                fills: false,
            };
        }
        let one = if self.is_large() {
            self.lanes(1, 1, 2, 4)
        } else {
            self.lanes(0, 1, 4, 1)
        };
        let eight = self.lanes(2, 8, 2, 2);
        if self.m > 1 && eight.rows_at_once(gpu) > 0 {
            eight
        } else {
            one
        }
    }

    /// The product as the kernels take it whose weights stream through shared memory, and its grid; none
    /// if they do not, or if it is not one that they are faster with.
    fn stream(&self, gpu: &Gpu) -> Option<(Gemv, Grid)> {
        let layer = self.norm.is_some_and(|n| n.kind == NormKind::Layer);
        let faster = self.second.is_some() || (layer && self.is_large());
        faster.then(|| stream::spread(gpu, self, params(self), Room::whole(gpu)))?
    }

    /// Whether its weights stream. Then the next kernel of a dependent chain begins only when all in front
    /// of this one are complete.
    pub fn is_streamed(&self, gpu: &Gpu) -> bool {
        self.stream(gpu).is_some()
    }

    /// The same of any one matrix, on at most so many blocks of a launch that attends too.
    pub fn stream_beside(&self, gpu: &Gpu, blocks: usize) -> Option<(Gemv, Grid)> {
        let one = self.second.is_none();
        one.then(|| stream::spread(gpu, self, params(self), Room::beside(blocks)))?
    }

    /// Whether a warp has more of the weights on the way at once.
    fn is_large(&self) -> bool {
        self.bytes() >= LARGE || (self.k >= LONG && self.bytes() >= LARGE_LONG)
    }

    /// Bytes of the weights.
    pub fn bytes(&self) -> usize {
        self.rows() * self.k * self.w_dtype.size_in_bytes()
    }

    /// A kernel whose lanes multiply, of each three of a group for the dtypes.
    fn lanes(&self, group: usize, most: usize, unit: usize, tile: usize) -> Core {
        Core {
            kernel: LANES + 3 * group + dtype_index(self.w_dtype),
            most,
            unit,
            step: 32 * 16 / self.w_dtype.size_in_bytes(),
            tile,
            row: 4 * self.k,
            padded: true,
            fills: false,
        }
    }

    /// Whether the GPU has the shared memory that one row of x takes.
    pub fn fits(&self, launcher: &Launcher) -> bool {
        let gpu = launcher.gpu;
        self.is_streamed(gpu) || self.small(gpu).is_some() || self.core(gpu).rows_at_once(gpu) > 0
    }

    /// Whether tensor cores multiply x with the weights as they are.
    fn on_tensor_cores(&self, gpu: &Gpu) -> bool {
        let sixteen = self.w_dtype.size_in_bytes() == 2 && self.x_dtype == self.w_dtype;
        sixteen && (gpu.arch >= 80 || self.w_dtype == DType::F16)
    }

    /// The kernel for small products, and its blocks, where each multiprocessor has one at most: with
    /// more, staging x again and again costs what the short way through the kernel saves. It knows
    /// the RMS norm only.
    fn small(&self, gpu: &Gpu) -> Option<(usize, u32)> {
        if self.norm.is_some_and(|n| n.kind != NormKind::Rms) || self.second.is_some() {
            return None;
        }
        let size = SMALL_K.iter().position(|k| self.k <= *k)?;
        let outputs = self.activation.outputs(SMALL_UNIT);
        let blocks = self.width().div_ceil(outputs);
        let fits = self.vectors() && self.on_tensor_cores(gpu) && blocks <= gpu.sms as usize;
        let kernel = SMALL + 2 * size + dtype_index(self.w_dtype).saturating_sub(1);
        fits.then_some((kernel, blocks as u32))
    }
}

/// Launches the product: once, or for a part of the rows at a time where shared memory does not
/// take them all.
///
/// # Safety
/// Each address holds what its field says, until the stream has passed the launches. In a dependent
/// chain no kernel in front writes weights, norm or bias.
pub(crate) unsafe fn few_rows(launcher: &Launcher, at: &FewRows) -> Result<()> {
    float(OP, "x", at.x_dtype)?;
    float(OP, "weights", at.w_dtype)?;
    if at.m > FEW || (at.out_dtype != at.x_dtype && at.out_dtype != DType::F32) {
        bail!(
            "{OP}: {} rows of {:?} to {:?}, expected at most {FEW}, and outputs of x's dtype or f32",
            at.m,
            at.x_dtype,
            at.out_dtype
        );
    }
    if at.m == 0 {
        return Ok(());
    }
    let mut params = params(at);
    let bytes = at.bytes();
    if let Some((kernel, blocks)) = at.small(launcher.gpu) {
        let grid = Grid::line(blocks, SMALL_THREADS);
        // SAFETY: the kernel takes `Gemv`; the addresses are the caller's.
        return unsafe {
            launcher
                .moving(bytes as u64)
                .run(&MODULE, kernel, grid, &params)
        };
    }
    if let Some(streamed) = at.stream(launcher.gpu) {
        // SAFETY: the caller's.
        return unsafe { stream::launch(launcher, at, streamed) };
    }
    let core = at.core(launcher.gpu);
    let once = core.rows_at_once(launcher.gpu);
    if once == 0 {
        bail!(
            "{OP}: a row of {} inputs does not fit into the {} bytes of shared memory of a block",
            at.k,
            launcher.gpu.shared
        );
    }
    let [x_size, out_size] = [at.x_dtype, at.out_dtype].map(|d| d.size_in_bytes() as u64);
    for first in (0..at.m).step_by(once) {
        params.m = (at.m - first).min(once) as u32;
        let (inputs, outputs) = ((first * at.k) as u64, (first * at.stride) as u64);
        params.prologue.x = at.x + inputs * x_size;
        params.epilogue.out = at.out + outputs * out_size;
        params.epilogue.residuals = at.residuals.map(|r| match r {
            0 => 0,
            r => r + outputs * x_size,
        });
        // SAFETY: the kernels take `Gemv`; the addresses are the caller's.
        unsafe { launch(launcher, &MODULE, &core, bytes, params)? };
    }
    Ok(())
}

/// What the kernels take, but for how it is spread.
pub(super) fn params(at: &FewRows) -> Gemv {
    let mut params = Gemv::new(at.k, at.rows(), at.activation);
    let mut first = 0;
    // Absent ones come last: a kernel finds a row's matrix by where the present ones begin.
    let present = at.weights.into_iter().filter(|(_, rows)| *rows > 0);
    for (matrix, (data, rows)) in params.weights.iter_mut().zip(present) {
        *matrix = Matrix {
            data,
            first: first as u32,
            ..Matrix::ABSENT
        };
        first += rows;
    }
    if let Some((second, border)) = at.second {
        params.weights[0].second = second;
        params.weights[0].border = border as u32;
    }
    if let Some(norm) = at.norm {
        params.prologue.set_norm(norm);
    }
    (params.m, params.prologue.x) = (at.m as u32, at.x);
    params.prologue.dtype = dtype_index(at.x_dtype) as i32;
    params.epilogue.bias = at.bias;
    (params.epilogue.residuals, params.epilogue.out) = (at.residuals, at.out);
    params.epilogue.stride = at.stride as u64;
    params.epilogue.dtype = dtype_index(at.x_dtype) as i32;
    params.epilogue.out_dtype = dtype_index(at.out_dtype) as i32;
    params.kind = dtype_index(at.w_dtype) as i32;
    params
}
