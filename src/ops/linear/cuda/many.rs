//! Many rows: the norm once, cuBLASLt, and one kernel for what is left of the epilogue.

use crate::cuda::{Address, Gemm, GemmShape, Grid, Launcher, Module, address, alloc, fatbin, gemm};
use crate::ops::linear::Activation;
use crate::ops::rms_norm::cuda::{RmsNormAt, launch as rms_norm};
use crate::ops::view::dtype_index;
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result};

static MODULE: Module = Module::new("finish", fatbin!("finish"), &["finish"]);

const THREADS: u32 = 256;

/// A linear layer over many rows, on raw addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ManyRows<'a> {
    /// `[m, k]`
    pub x: Address,
    pub x_dtype: DType,
    /// Weight `[k]` of an RMSNorm, and what is added to the mean of squares.
    pub norm: Option<(Address, f32)>,
    /// Dense matrices `[rows, k]` one below the other, and their rows.
    pub weights: &'a [(Address, usize)],
    pub w_dtype: DType,
    pub bias: Address,
    pub activation: Activation,
    /// 0 where there is none.
    pub residuals: [Address; 2],
    /// `[m, rows]`, or half of it where one half gates the other.
    pub out: Address,
    pub m: usize,
    pub k: usize,
}

/// `Epilogue` of `kernels/epilogue.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Epilogue {
    bias: Address,
    residuals: [Address; 2],
    out: Address,
    stride: u64,
    activation: i32,
    dtype: i32,
    out_dtype: i32,
    padding: i32,
}

/// `Params` of `kernels/finish.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Finish {
    y: Address,
    epilogue: Epilogue,
    m: u32,
    rows: u32,
    y_dtype: i32,
    vectors: i32,
}

/// Computes the layer; scratch memory is taken from candle's pool.
///
/// # Safety
/// Every address that is not 0 is valid for its shape until the stream has passed the launch.
pub(crate) unsafe fn many_rows(
    launcher: &Launcher,
    device: &CudaDevice,
    layer: &ManyRows<'_>,
) -> Result<()> {
    let ManyRows { m, k, x_dtype, .. } = *layer;
    let rows = layer.weights.iter().map(|(_, rows)| rows).sum::<usize>();
    let mut x = layer.x;
    let normed;
    if let Some((weight, eps)) = layer.norm {
        normed = Scratch::new(device, x_dtype, m * k)?;
        let at = RmsNormAt {
            x,
            residual: 0,
            weight,
            sum: 0,
            y: normed.at,
            rows: m,
            width: k,
            eps,
            dtype: x_dtype,
        };
        // SAFETY: the caller's, and the scratch is m x k.
        unsafe { rms_norm(launcher, &at)? };
        x = normed.at;
    }
    // Both sides of a product have one type; the wider of the two keeps what there is.
    let dtype = if x_dtype == layer.w_dtype { x_dtype } else { DType::F32 };
    let wide;
    if dtype != x_dtype {
        wide = Scratch::new(device, dtype, m * k)?;
        // SAFETY: the scratch is m x k, as x is.
        unsafe { convert(launcher, (x, x_dtype), (wide.at, dtype), m, k)? };
        x = wide.at;
    }
    let direct = layer.bias == 0
        && layer.activation == Activation::None
        && layer.residuals[1] == 0
        && (x_dtype == dtype);
    let scratch;
    let (y, out) = if direct {
        (layer.out, x_dtype)
    } else {
        scratch = Scratch::new(device, DType::F32, m * rows)?;
        (scratch.at, DType::F32)
    };
    let mut column = 0;
    for (w, n) in layer.weights {
        let widened;
        let mut w = *w;
        if dtype != layer.w_dtype {
            widened = Scratch::new(device, dtype, n * k)?;
            // SAFETY: the scratch is n x k, as the matrix is.
            unsafe { convert(launcher, (w, layer.w_dtype), (widened.at, dtype), *n, k)? };
            w = widened.at;
        }
        let offset = (column * out.size_in_bytes()) as u64;
        let residual = if direct { layer.residuals[0] } else { 0 };
        let product = Gemm {
            x,
            w,
            c: if residual == 0 { 0 } else { residual + offset },
            y: y + offset,
            shape: GemmShape {
                m,
                n: *n,
                k,
                pitch: rows,
                dtype,
                out,
            },
        };
        let size = dtype.size_in_bytes() as u64;
        let moved = size * (n * k + m * k) as u64 + (m * n * out.size_in_bytes()) as u64;
        // SAFETY: the caller's, and the scratch buffers are made for these shapes.
        unsafe { gemm(&launcher.moving(moved), &product)? };
        column += n;
    }
    if direct {
        return Ok(());
    }
    // SAFETY: the scratch is m x rows; the rest is the caller's.
    unsafe { finish(launcher, layer, y, rows) }
}

/// The epilogue over f32 sums `[m, rows]` at `y`.
///
/// # Safety
/// As [`many_rows`].
unsafe fn finish(launcher: &Launcher, layer: &ManyRows<'_>, y: Address, rows: usize) -> Result<()> {
    let width = match layer.activation {
        Activation::SwiGlu => rows / 2,
        _ => rows,
    };
    let dtype = dtype_index(layer.x_dtype) as i32;
    let epilogue = Epilogue {
        bias: layer.bias,
        residuals: layer.residuals,
        out: layer.out,
        stride: width as u64,
        activation: layer.activation as i32,
        dtype,
        out_dtype: dtype,
        padding: 0,
    };
    let values = layer.m * (rows + width * (1 + usize::from(layer.residuals[0] != 0)));
    // SAFETY: the caller's.
    unsafe { launch(&launcher.moving(4 * values as u64), epilogue, (y, DType::F32), layer.m, rows) }
}

/// Changes the element type of `rows` rows of `width`.
///
/// # Safety
/// Both addresses are valid for rows x width elements of their types.
pub(crate) unsafe fn convert(
    launcher: &Launcher,
    from: (Address, DType),
    to: (Address, DType),
    rows: usize,
    width: usize,
) -> Result<()> {
    let epilogue = Epilogue {
        bias: 0,
        residuals: [0; 2],
        out: to.0,
        stride: width as u64,
        activation: Activation::None as i32,
        dtype: dtype_index(to.1) as i32,
        out_dtype: dtype_index(to.1) as i32,
        padding: 0,
    };
    let bytes = rows * width * (from.1.size_in_bytes() + to.1.size_in_bytes());
    // SAFETY: the caller's.
    unsafe { launch(&launcher.moving(bytes as u64), epilogue, from, rows, width) }
}

/// # Safety
/// The addresses in `epilogue` and `y` are valid for m x rows elements of their types.
unsafe fn launch(
    launcher: &Launcher,
    epilogue: Epilogue,
    y: (Address, DType),
    m: usize,
    rows: usize,
) -> Result<()> {
    let width = epilogue.stride as usize;
    let addresses = [
        y.0,
        epilogue.bias,
        epilogue.residuals[0],
        epilogue.residuals[1],
        epilogue.out,
    ];
    let vectors = width.is_multiple_of(4) && addresses.iter().all(|a| a.is_multiple_of(16));
    let params = Finish {
        y: y.0,
        epilogue,
        m: m as u32,
        rows: rows as u32,
        y_dtype: dtype_index(y.1) as i32,
        vectors: vectors.into(),
    };
    let packs = m * width / if vectors { 4 } else { 1 };
    let blocks = packs.div_ceil(THREADS as usize).min(16 * launcher.gpu.sms as usize);
    let grid = Grid::line(blocks as u32, THREADS);
    // SAFETY: the layout is the kernel's `Params`; the addresses are the caller's.
    unsafe { launcher.run(&MODULE, 0, grid, &params) }
}

/// Memory of candle's pool for the length of a call: freed behind the work that was launched.
struct Scratch {
    at: Address,
    _storage: CudaStorage,
}

impl Scratch {
    fn new(device: &CudaDevice, dtype: DType, len: usize) -> Result<Self> {
        let storage = alloc("linear", device, dtype, len)?;
        Ok(Self {
            at: address(&storage, &Layout::contiguous(len))?,
            _storage: storage,
        })
    }
}
