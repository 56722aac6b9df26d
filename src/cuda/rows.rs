//! How rows are spread over threads: the host's side of `kernels/common/rows.cuh`.

use super::abi::{KEPT_ELEMENTS, KEPT_PACKS, MAX_WARPS, ROWS_OF_BLOCK, WARP};
use super::{Address, Grid};
use candle_core::{DType, Result, bail};

/// Why 16-byte accesses do not fit, for the trace.
pub(crate) const PIECES: &str = "rows not aligned to 16 bytes";
pub(crate) const UNALIGNED: &str = "a tensor that does not begin at 16 bytes";

/// Rows of one width, as kernels over rows take them. The threads of a row depend on its width
/// alone, so that a row's result does not depend on how many there are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub rows: u32,
    pub width: u32,
    /// Warps of one row.
    pub warps: u32,
    /// Whether 16-byte accesses fit.
    pub vectors: bool,
    dtype: DType,
}

impl Rows {
    /// For tensors at `addresses`, all of them `[rows, width]` or `[width]`.
    pub fn new(
        op: &str,
        rows: usize,
        width: usize,
        dtype: DType,
        addresses: &[Address],
    ) -> Result<Self> {
        let size = dtype.size_in_bytes();
        let vectors =
            (width * size).is_multiple_of(16) && addresses.iter().all(|a| a.is_multiple_of(16));
        let kept = if vectors {
            KEPT_PACKS * 16 / size
        } else {
            KEPT_ELEMENTS
        };
        let warps = width.div_ceil(WARP * kept).clamp(1, MAX_WARPS);
        match (i32::try_from(rows), u32::try_from(width)) {
            (Ok(rows), Ok(width)) => Ok(Self {
                rows: rows as u32,
                width,
                warps: warps as u32,
                vectors,
                dtype,
            }),
            _ => bail!("{op}: {rows} rows of {width} are past what the kernel takes"),
        }
    }

    /// One warp for each row, or one block.
    pub fn grid(&self) -> Grid {
        if self.warps == 1 {
            Grid::line(
                self.rows.div_ceil(ROWS_OF_BLOCK as u32),
                (ROWS_OF_BLOCK * WARP) as u32,
            )
        } else {
            Grid::line(self.rows, self.warps * WARP as u32)
        }
    }

    /// `vector f32`, or `scalar f32` and why, for the trace.
    pub fn path(&self) -> String {
        let dtype = self.dtype.as_str();
        let bytes = self.width as usize * self.dtype.size_in_bytes();
        match self.vectors {
            true => format!("vector {dtype}"),
            false if !bytes.is_multiple_of(16) => format!("scalar {dtype}: {PIECES}"),
            false => format!("scalar {dtype}: {UNALIGNED}"),
        }
    }
}
