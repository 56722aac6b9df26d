//! Quantized matrices on a GPU: GGUF blocks, and codes of our own schemes.

use super::abi::{
    BLOCK, DequantizeParams, DequantizeSource, FORMAT_CHUNK, FORMAT_THREADS, GROUP, IN_ORDER,
    MAX_SOURCES, NarrowParams, ROW_GROUP, RepackParams,
};
use super::packed::{self, PackedAt, PackedLayout, ValuesOf, line, values};
use super::{Address, GpuSpec, Grid, Launcher, Module, address, alloc, dtype_index, fatbin};
use crate::quant::{BlockFormat, Codes, Format};
use candle_core::op::BackpropOp;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{CudaDevice, CudaStorage, DType, Device, Layout, Result, Storage, Tensor, bail};

const OP: &str = "quant_linear";

/// Values of a group, of which rows of a [`BlockMatrix`] have whole ones.
const GROUP_VALUES: usize = GROUP * BLOCK;

/// In the order of [`BlockFormat::DTYPES`], by which `FormatIndex` of `kernels/formats/gguf.cuh` goes too.
static REPACK: Module = Module::new(
    "repack",
    fatbin!("repack"),
    &[
        "repack_q4_0",
        "repack_q4_1",
        "repack_q5_0",
        "repack_q5_1",
        "repack_q8_0",
        "repack_q2_k",
        "repack_q3_k",
        "repack_q4_k",
        "repack_q5_k",
        "repack_q6_k",
    ],
);

static DEQUANTIZE: Module = Module::new(
    "dequantize",
    fatbin!("dequantize"),
    &[
        "dequantize_f32",
        "dequantize_f16",
        "dequantize_bf16",
        "dequantize_narrow_f32",
        "dequantize_narrow_f16",
        "dequantize_narrow_bf16",
    ],
);

/// The first `narrow` kernel.
const NARROW: usize = 3;

/// A quantized matrix, rows x cols, in a GPU's memory: GGUF blocks or the codes of a
/// [`Scheme`](crate::quant::Scheme), in their precision and about their size, in the order in which
/// tensor cores take them (`kernels/formats/gguf.cuh`, `kernels/formats/packed.cuh`).
///
/// ```no_run
/// use candle_core::quantized::{GgmlDType, QTensor};
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::cuda::BlockMatrix;
/// use candle_fused::quant::{Scheme, quantize};
/// let device = Device::new_cuda(0)?;
/// // Blocks of GGUF, from a tensor of candle's or from the bytes of a file.
/// let weights = Tensor::ones((64, 256), DType::F32, &device)?;
/// let blocks = BlockMatrix::from_qtensor(&QTensor::quantize(&weights, GgmlDType::Q4K)?)?;
/// assert_eq!((blocks.rows(), blocks.cols()), (64, 256));
/// let zeros = BlockMatrix::new(GgmlDType::Q8_0, 64, 32, &[0; 64 * 34], &device)?;
/// assert_eq!(zeros.dequantize(DType::F32)?.dims(), [64, 32]);
/// // Codes of a scheme.
/// let codes = quantize(&[1.; 64 * 256], 64, 256, Scheme::Int8)?;
/// let int8 = BlockMatrix::from_codes(&codes, &device)?;
/// println!("{int8:?}: {} in {} bytes", int8.format(), int8.size_in_bytes());
/// assert!(int8.device().same_device(&device));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub struct BlockMatrix {
    stored: Stored,
    rows: usize,
    cols: usize,
    data: CudaStorage,
    at: Address,
    device: Device,
}

/// How a matrix lies in memory.
#[derive(Clone, Copy)]
enum Stored {
    Blocks(BlockFormat),
    Codes(PackedLayout, Format),
}

impl std::fmt::Debug for BlockMatrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "BlockMatrix({}, {} x {})",
            self.format(),
            self.rows,
            self.cols
        )
    }
}

impl BlockMatrix {
    /// Uploads and repacks `blocks`, the bytes of a GGUF tensor of `dtype` with `rows` rows of `cols`
    /// values.
    ///
    /// # Errors
    /// If `dtype` is not one of the formats of [`crate::quant`], `cols` is not a positive multiple of
    /// its block size, `blocks` has not exactly the bytes of rows x cols values, `device` is no CUDA
    /// device, or its memory does not suffice.
    pub fn new(
        dtype: GgmlDType,
        rows: usize,
        cols: usize,
        blocks: &[u8],
        device: &Device,
    ) -> Result<Self> {
        let format = BlockFormat::of(dtype)?;
        format.check_matrix(rows, cols, blocks)?;
        let cuda = cuda_device(device)?;
        let raw = super::upload_tensor(blocks, DType::U8, &[blocks.len()], cuda)?;
        let at = super::address_of(&raw)?;
        // SAFETY: the bytes are those of the matrix, and are freed in the order of the stream.
        unsafe { Self::repack(format, rows, cols, at, device) }
    }

    /// Uploads and packs the codes of a scheme.
    ///
    /// # Errors
    /// If the codes are not what [`Codes::check`] asks for, the columns do not divide by 4, `device` is
    /// no CUDA device, or its memory does not suffice.
    pub fn from_codes(codes: &Codes, device: &Device) -> Result<Self> {
        let cuda = cuda_device(device)?;
        let layout = PackedLayout::new(codes.scheme, codes.rows, codes.cols)?.holding(codes);
        let data = layout.upload(codes, cuda)?;
        Self::of_codes(codes, layout, data, device)
    }

    /// A matrix whose codes are packed in `data`.
    pub(super) fn of_codes(
        codes: &Codes,
        layout: PackedLayout,
        data: CudaStorage,
        device: &Device,
    ) -> Result<Self> {
        let at = address(&data, &Layout::contiguous(layout.bytes()))?;
        Ok(Self {
            stored: Stored::Codes(layout, Format::Scheme(codes.scheme)),
            rows: codes.rows,
            cols: codes.cols,
            data,
            at,
            device: device.clone(),
        })
    }

    /// Repacks a tensor of candle's that is on a CUDA device.
    ///
    /// # Errors
    /// As [`BlockMatrix::new`], or if the tensor is not a matrix.
    pub fn from_qtensor(tensor: &QTensor) -> Result<Self> {
        let format = BlockFormat::of(tensor.dtype())?;
        let (rows, cols) = tensor.shape().dims2()?;
        format.row_bytes(cols)?;
        let blocks = tensor.device_ptr()? as Address;
        // SAFETY: candle's storage holds the blocks of rows x cols values; it is freed in the order of
        // the device's stream, on which the repacking runs.
        unsafe { Self::repack(format, rows, cols, blocks, &tensor.device()) }
    }

    /// # Safety
    /// `blocks` is the address of rows x cols values, until the device's stream has passed this.
    pub(super) unsafe fn repack(
        format: BlockFormat,
        rows: usize,
        cols: usize,
        blocks: Address,
        device: &Device,
    ) -> Result<Self> {
        let cuda = cuda_device(device)?;
        let groups = cols.div_ceil(GROUP_VALUES);
        let (Ok(_), Some(bytes)) = (
            u32::try_from(cols.max(rows)),
            tiles_bytes(&format, rows, cols),
        ) else {
            bail!("rows: {rows} rows of {cols} values are past what the kernels take");
        };
        let data = alloc(OP, cuda, DType::U8, bytes)?;
        let at = address(&data, &Layout::contiguous(bytes))?;
        let params = RepackParams {
            blocks,
            out: at,
            rows: rows as u64,
            blocks_of_row: (cols / BLOCK) as u32,
        };
        let grid = line(rows.next_multiple_of(ROW_GROUP) * groups * GROUP)?;
        // SAFETY: the kernel takes `RepackParams` and writes whole tiles, for which there is room.
        unsafe { Launcher::new(cuda)?.run(&REPACK, format_index(format.dtype), grid, &params)? };
        Ok(Self {
            stored: Stored::Blocks(format),
            rows,
            cols,
            data,
            at,
            device: device.clone(),
        })
    }

    /// Number of rows: outputs of a product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns: inputs of a product.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The weights' format.
    pub fn format(&self) -> Format {
        match self.stored {
            Stored::Blocks(format) => Format::Block(format),
            Stored::Codes(_, format) => format,
        }
    }

    /// The device that holds the weights.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Bytes of the weights: what a product with one row reads.
    pub fn size_in_bytes(&self) -> usize {
        stored_bytes(self.format(), self.rows, self.cols)
    }

    /// Where the first row begins.
    pub(crate) fn address(&self) -> Address {
        self.at
    }

    /// The format as the kernels number it: those for blocks, or those for codes.
    pub(crate) fn format_index(&self) -> usize {
        kernel_index(self.format())
    }

    /// Where everything is, of a matrix of codes.
    pub(crate) fn codes(&self) -> Option<PackedAt> {
        match self.stored {
            Stored::Blocks(_) => None,
            Stored::Codes(layout, _) => Some(layout.at(self.at)),
        }
    }

    /// The values `[rows, cols]`, as f32 bit for bit what [`crate::quant::dequantize`] gives, or for a
    /// scheme scale times code (less its zero point).
    ///
    /// # Errors
    /// If `dtype` is not f32, f16 or bf16, or the device's memory does not suffice.
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        let cuda = &self.data.device;
        let out = alloc(OP, cuda, dtype, self.rows * self.cols)?;
        let to = address(&out, &Layout::contiguous(self.rows * self.cols))?;
        // SAFETY: there is room for all values.
        unsafe { dequantize(&Launcher::new(cuda)?, &[self], to, dtype)? };
        let shape = (self.rows, self.cols);
        let storage = Storage::Cuda(out);
        Ok(Tensor::from_storage(
            storage,
            shape,
            BackpropOp::none(),
            false,
        ))
    }
}

/// The values of matrices, one after the other, at `out`.
///
/// # Safety
/// `out` is aligned to 16 bytes and has room for all of them, until the stream has passed this.
pub(crate) unsafe fn dequantize(
    launcher: &Launcher,
    matrices: &[&BlockMatrix],
    out: Address,
    dtype: DType,
) -> Result<()> {
    let mut out = out;
    for alike in matrices.chunk_by(|a, b| a.codes().is_none() && b.codes().is_none()) {
        for some in alike.chunks(MAX_SOURCES) {
            // SAFETY: the caller's.
            unsafe {
                match (some, some[0].codes()) {
                    ([matrix], Some(codes)) => values(
                        launcher,
                        &ValuesOf {
                            matrix: codes,
                            format: matrix.format_index(),
                            rows: matrix.rows,
                            cols: matrix.cols,
                            ids: 0,
                            count: matrix.rows,
                            out,
                            dtype,
                        },
                    )?,
                    _ => dequantize_blocks(launcher, some, out, dtype)?,
                }
            }
            let values: usize = some.iter().map(|m| m.rows * m.cols).sum();
            out += (values * dtype.size_in_bytes()) as Address;
        }
    }
    Ok(())
}

/// The same for at most [`MAX_SOURCES`] matrices of blocks.
///
/// # Safety
/// As [`dequantize`].
unsafe fn dequantize_blocks(
    launcher: &Launcher,
    matrices: &[&BlockMatrix],
    out: Address,
    dtype: DType,
) -> Result<()> {
    let mut params = DequantizeParams {
        sources: [DequantizeSource {
            data: 0,
            first: u64::MAX,
            blocks_of_row: 1,
            format: 0,
        }; MAX_SOURCES],
        out,
        total: 0,
    };
    for (source, matrix) in params.sources.iter_mut().zip(matrices) {
        let blocks_of_row = matrix.cols / BLOCK;
        *source = DequantizeSource {
            data: matrix.at,
            first: params.total,
            blocks_of_row: blocks_of_row as u32,
            format: matrix.format_index() as i32,
        };
        params.total += (matrix.rows * blocks_of_row) as u64;
    }
    let values = BLOCK * params.total as usize;
    let read: usize = matrices.iter().map(|m| m.size_in_bytes()).sum();
    // Four threads for a block.
    let grid = line(values / 8)?;
    // SAFETY: the kernel takes `DequantizeParams`; the rest is the caller's.
    unsafe {
        launcher
            .moving((read + values * dtype.size_in_bytes()) as u64)
            .run(&DEQUANTIZE, dtype_index(dtype), grid, &params)
    }
}

/// Rows that a product with many rows takes: `[rows, width]` of `dtype`, behind a norm if there is
/// one, as f16 or bf16.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Narrow {
    pub x: Address,
    /// An RMS norm's weight `[width]` and eps.
    pub norm: Option<(Address, f32)>,
    pub out: Address,
    pub rows: usize,
    /// A multiple of 4.
    pub width: usize,
    pub dtype: DType,
    pub out_dtype: DType,
    /// How rows are written, if not as they are.
    pub arranged: Option<Arranged>,
}

/// Rows in the order in which a GEMM's operand meets weights of one format.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arranged {
    /// Where bit i of a value's index goes among the 6 lowest, in digits of 4 bits.
    pub order: u32,
    /// Values from one row to the next, a multiple of 64; zeros fill them up.
    pub pitch: usize,
    /// Rows for each: 2 have bf16 and what it leaves over.
    pub parts: usize,
    /// `[pitch / 32][sums_pitch]` of f32: sums over 32 values; 0 for none.
    pub sums: Address,
    pub sums_pitch: usize,
    /// Words that become 0, for the next kernel to count with.
    pub counters: Address,
    pub counter_count: usize,
}

/// Launches the conversion.
///
/// # Safety
/// Each address holds what its field says, until the stream has passed this.
pub(crate) unsafe fn narrow(launcher: &Launcher, at: &Narrow) -> Result<()> {
    let (weight, eps) = at.norm.unwrap_or((0, 0.));
    let aligned = 4 * at.dtype.size_in_bytes() as u64;
    let arranged = at.arranged.unwrap_or(Arranged {
        order: IN_ORDER as u32,
        pitch: at.width,
        parts: 1,
        sums: 0,
        sums_pitch: 0,
        counters: 0,
        counter_count: 0,
    });
    let chunks = arranged.pitch.div_ceil(FORMAT_CHUNK).max(1);
    let params = NarrowParams {
        x: at.x,
        weight,
        out: at.out,
        sums: arranged.sums,
        sums_pitch: arranged.sums_pitch as u32,
        parts: arranged.parts as u32,
        pitch: arranged.pitch as u32,
        chunks: chunks as u32,
        order: arranged.order,
        width: at.width as u32,
        eps,
        out_dtype: dtype_index(at.out_dtype) as i32,
        vectors: (at.x.is_multiple_of(aligned) && weight.is_multiple_of(aligned)).into(),
        counters: arranged.counters,
        counter_count: arranged.counter_count as u32,
    };
    let Ok(blocks) = u32::try_from(at.rows * chunks) else {
        bail!("{OP}: {} rows are past what a GPU takes at once", at.rows);
    };
    let grid = Grid::line(blocks, FORMAT_THREADS as u32);
    let bytes = at.rows * at.width * (at.dtype.size_in_bytes() + 2);
    // SAFETY: the kernel takes `NarrowParams`; the rest is the caller's.
    unsafe {
        launcher.moving(bytes as u64).run(
            &DEQUANTIZE,
            NARROW + dtype_index(at.dtype),
            grid,
            &params,
        )
    }
}

/// What a product with many rows computes in: x's dtype if it has 16 bits, else bf16, which has the
/// range of f32, where the GPU's tensor cores take it.
pub(crate) fn product_dtype(gpu: &GpuSpec, x: DType) -> DType {
    match x {
        DType::F16 => DType::F16,
        _ if gpu.arch < 80 => DType::F16,
        _ => DType::BF16,
    }
}

/// Bytes of a row and a group, all planes together, as in `kernels/formats/gguf.cuh`: a tile has those of 8 rows.
pub(crate) fn group_bytes(format: &BlockFormat) -> usize {
    use crate::quant::Scaling::{Affine, Super, Super16, SuperSymmetric, Symmetric};
    16 * format.bits as usize
        + match format.scaling {
            Symmetric => GROUP * 2,
            Affine => GROUP * 4,
            // For two groups 4 or 2 bytes, and 2 bytes for each block.
            Super | Super16 => 2 + GROUP * 2,
            SuperSymmetric => 1 + GROUP * 2,
        }
}

/// Bytes of a matrix: whole tiles of 8 rows.
fn tiles_bytes(format: &BlockFormat, rows: usize, cols: usize) -> Option<usize> {
    let row = group_bytes(format) * cols.div_ceil(GROUP_VALUES);
    rows.checked_next_multiple_of(ROW_GROUP)?.checked_mul(row)
}

/// Bytes that a matrix of rows x cols takes in a GPU's memory.
pub(crate) fn stored_bytes(format: Format, rows: usize, cols: usize) -> usize {
    match format {
        Format::Block(format) => tiles_bytes(&format, rows, cols).unwrap_or(usize::MAX),
        Format::Scheme(scheme) => PackedLayout::of(scheme, rows, cols).bytes(),
    }
}

/// A format as the kernels number it: those for blocks, or those for codes.
pub(crate) fn kernel_index(format: Format) -> usize {
    match format {
        Format::Block(format) => format_index(format.dtype),
        Format::Scheme(scheme) => packed::index(scheme),
    }
}

fn format_index(dtype: GgmlDType) -> usize {
    // `BlockFormat::of` has refused all others.
    let mut all = BlockFormat::DTYPES.iter();
    all.position(|known| *known == dtype).unwrap_or(0)
}

pub(super) fn cuda_device(device: &Device) -> Result<&CudaDevice> {
    match device {
        Device::Cuda(device) => Ok(device),
        _ => bail!("device: expected a CUDA device"),
    }
}
