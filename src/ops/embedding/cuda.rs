//! The kernels' host side.

use super::{OP, Table};
use crate::cuda::abi::{BLOCK, EMBEDDING_THREADS, EmbeddingParams};
use crate::cuda::{
    Address, Grid, Launcher, Module, PackedAt, ValuesOf, address, address_of, alloc, dtype_index,
    fatbin, values,
};
use crate::ops::view::float;
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, bail};

static MODULE: Module = Module::new(
    "embedding",
    fatbin!("embedding"),
    &["embedding_blocks", "embedding_packs", "embedding_elements"],
);

const BLOCKS: usize = 0;
const PACKS: usize = 1;
const ELEMENTS: usize = 2;

/// The format of a quantized table, as the kernels number it.
#[derive(Clone, Copy, Debug)]
enum Quantized {
    Blocks(usize),
    Codes(PackedAt, usize),
}

/// A look-up on raw addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lookup {
    /// `[rows, width]` of `dtype`, or quantized.
    table: Address,
    rows: usize,
    width: usize,
    /// Of the output.
    dtype: DType,
    /// Of a quantized table.
    quantized: Option<Quantized>,
    /// `[count]` of u32.
    pub ids: Address,
    /// `[count, width]` of `dtype`.
    pub out: Address,
    pub count: usize,
}

impl Lookup {
    /// Of `count` ids at `ids`, to `out`, both of which may still be 0.
    ///
    /// # Errors
    /// If the table is not a contiguous matrix of f32, f16 or bf16 on a GPU, or the output of none of these.
    pub fn new(table: Table<'_>, ids: Address, out: Address, count: usize) -> Result<Self> {
        let (table, rows, width, dtype, quantized) = match table {
            Table::Blocks(t, dtype) => {
                float(OP, "dtype", dtype)?;
                let format = t.format_index();
                let quantized = match t.codes() {
                    None => Quantized::Blocks(format),
                    Some(codes) => Quantized::Codes(codes, format),
                };
                (t.address(), t.rows(), t.cols(), dtype, Some(quantized))
            }
            Table::Dense(t) => {
                float(OP, "table", t.dtype())?;
                let (rows, width) = t.dims2()?;
                if !t.is_contiguous() {
                    bail!("{OP}: the table is a view, expected rows one behind the other");
                }
                (address_of(t)?, rows, width, t.dtype(), None)
            }
        };
        Ok(Self {
            table,
            rows,
            width,
            dtype,
            quantized,
            ids,
            out,
            count,
        })
    }

    /// Of rows `[rows, width]` of `dtype` at `table`.
    pub fn of_rows(table: Address, [rows, width]: [usize; 2], dtype: DType) -> Self {
        Self {
            table,
            rows,
            width,
            dtype,
            quantized: None,
            ids: 0,
            out: 0,
            count: 0,
        }
    }

    /// Of the output.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Columns of the output.
    pub fn width(&self) -> usize {
        self.width
    }
}

/// Launches the look-up. An id that is not below the table's rows gives a row of NaN.
///
/// # Safety
/// Each address holds what its field says, until the stream has passed this; `out` is aligned to 16
/// bytes for a quantized table.
pub(crate) unsafe fn launch(launcher: &Launcher, at: &Lookup) -> Result<()> {
    if let Some(Quantized::Codes(matrix, format)) = at.quantized {
        let rows = ValuesOf {
            matrix,
            format,
            rows: at.rows,
            cols: at.width,
            ids: at.ids,
            count: at.count,
            out: at.out,
            dtype: at.dtype,
        };
        // SAFETY: the caller's.
        return unsafe { values(launcher, &rows) };
    }
    let bytes = at.width * at.dtype.size_in_bytes();
    let packs =
        bytes.is_multiple_of(16) && at.table.is_multiple_of(16) && at.out.is_multiple_of(16);
    // Four threads for a block.
    let (kernel, columns, threads) = match at.quantized {
        Some(_) => (BLOCKS, at.width / BLOCK, at.width / 8),
        None if packs => (PACKS, bytes / 16, bytes / 16),
        None => (ELEMENTS, bytes / 2, bytes / 2),
    };
    let params = EmbeddingParams {
        table: at.table,
        ids: at.ids,
        out: at.out,
        rows: u32::try_from(at.rows).unwrap_or(u32::MAX),
        count: u32::try_from(at.count).map_err(candle_core::Error::wrap)?,
        columns: u32::try_from(columns).map_err(candle_core::Error::wrap)?,
        format: match at.quantized {
            Some(Quantized::Blocks(format)) => format as i32,
            _ => 0,
        },
        dtype: dtype_index(at.dtype) as i32,
    };
    let grid = Grid::new(
        [
            threads.div_ceil(EMBEDDING_THREADS) as u32,
            at.count.min(65535) as u32,
            1,
        ],
        EMBEDDING_THREADS as u32,
        0,
    );
    let launcher = launcher.moving((2 * at.count * bytes) as u64);
    // SAFETY: the kernel takes `EmbeddingParams`; the rest is the caller's.
    unsafe { launcher.run(&MODULE, kernel, grid, &params) }
}

pub(super) fn forward(
    table: Table<'_>,
    ids: &CudaStorage,
    layout: &Layout,
) -> Result<(CudaStorage, Shape)> {
    if ids.dtype() != DType::U32 {
        bail!("{OP}: ids are {:?}, expected u32", ids.dtype());
    }
    let count = layout.shape().elem_count();
    let mut at = Lookup::new(table, address(ids, layout)?, 0, count)?;
    let device = ids.device();
    let out = alloc(OP, device, at.dtype, count * at.width)?;
    at.out = address(&out, &Layout::contiguous(count * at.width))?;
    trace::record(OP, || match at.quantized {
        Some(_) => format!("cuda blocks {}", at.dtype.as_str()),
        None => format!("cuda {}", at.dtype.as_str()),
    });
    // SAFETY: the ids are there, and the output has room for a row for each.
    unsafe { launch(&Launcher::new(device)?, &at)? };
    let mut dims = layout.dims().to_vec();
    dims.push(at.width);
    Ok((out, Shape::from(dims)))
}
