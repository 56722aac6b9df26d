//! TMA's tensor maps of weights, and of x.

use crate::cuda::Address;
pub(super) use crate::cuda::abi::W8A8_BLOCK_K as STAGE_K;
use crate::cuda::abi::{K_BLOCK, ROW_GROUP, TensorMap};
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::sys;

const OP: &str = "linear";

/// Of x `[m, k]` in bf16, k a multiple of 64: boxes of four times 64 values of 16 rows, as in
/// `kernels/linear/gemm_wna16_m16_tma.cuh`. Rows and values that are not there come as zeros.
pub(super) fn rows_map(x: Address, [m, k]: [usize; 2]) -> Result<TensorMap> {
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the arrays have the rank of three, or one less for the strides, and outlive the call.
    let result = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            3,
            x as *mut std::ffi::c_void,
            [64, m as u64, k as u64 / 64].as_ptr(),
            [2 * k as u64, 128].as_ptr(),
            [64u32, 16, 4].as_ptr(),
            [1u32; 3].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    taken(result, map, || format!("x of [{m}, {k}]"))
}

/// Of an operand `[rows, pitch]` of a 16-bit type: boxes of 64 values of so many rows. What is not there comes as zeros.
pub(super) fn operand_map(
    x: Address,
    [rows, pitch]: [usize; 2],
    rows_of_tile: usize,
) -> Result<TensorMap> {
    let plane = Plane {
        dtype: sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        sizes: [pitch, rows],
        bytes: 2 * pitch,
        tile: [64, rows_of_tile],
        swizzle: sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    plane.map(x, "16-bit operand")
}

/// Of the sums `[blocks, rows]` in f32 that belong to it, the latter a multiple of 4: boxes of four blocks.
pub(super) fn sums_map(
    sums: Address,
    [blocks, rows]: [usize; 2],
    rows_of_tile: usize,
) -> Result<TensorMap> {
    let plane = Plane {
        dtype: sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        sizes: [rows, blocks],
        bytes: 4 * rows,
        tile: [rows_of_tile, 4],
        swizzle: sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
    };
    plane.map(sums, "sums of x")
}

/// Of codes `[rows, pitch]`: tiles of so many rows and of a stage's k.
pub(super) fn tensor_map(
    start: Address,
    [rows, pitch]: [usize; 2],
    rows_of_tile: usize,
) -> Result<TensorMap> {
    let plane = Plane {
        dtype: sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        sizes: [pitch, rows],
        bytes: pitch,
        tile: [STAGE_K, rows_of_tile],
        swizzle: sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    plane.map(start, "codes")
}

/// Of FP8's codes `[rows, k]` in tiles of 8 rows and 128 columns: so many rows of a column of tiles.
pub(super) fn groups_map(
    start: Address,
    [rows, k]: [usize; 2],
    rows_of_tile: usize,
) -> Result<TensorMap> {
    let (k_blocks, groups) = (k.div_ceil(K_BLOCK), rows.div_ceil(ROW_GROUP));
    let sizes = [K_BLOCK, ROW_GROUP * k_blocks, groups];
    let strides = [K_BLOCK, K_BLOCK * ROW_GROUP * k_blocks];
    let tile = [K_BLOCK, ROW_GROUP, rows_of_tile / ROW_GROUP];
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the arrays have the rank of three, or one less for the strides, and outlive the call.
    let result = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            3,
            start as *mut std::ffi::c_void,
            sizes.map(|n| n as u64).as_ptr(),
            strides.map(|n| n as u64).as_ptr(),
            tile.map(|n| n as u32).as_ptr(),
            [1u32; 3].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    taken(result, map, || format!("[{rows}, {k}] FP8 codes"))
}

/// A matrix, and the boxes that are copied of it; the contiguous dimension first.
struct Plane {
    dtype: sys::CUtensorMapDataType,
    sizes: [usize; 2],
    /// From one row to the next.
    bytes: usize,
    tile: [usize; 2],
    swizzle: sys::CUtensorMapSwizzle,
}

impl Plane {
    fn map(&self, start: Address, what: &str) -> Result<TensorMap> {
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the arrays have the rank of two, or one less for the strides, and outlive the call.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                self.dtype,
                2,
                start as *mut std::ffi::c_void,
                self.sizes.map(|n| n as u64).as_ptr(),
                [self.bytes as u64].as_ptr(),
                self.tile.map(|n| n as u32).as_ptr(),
                [1u32; 2].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                self.swizzle,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        let [columns, rows] = self.sizes;
        taken(result, map, || format!("[{rows}, {columns}] {what}"))
    }
}

/// The map, if the driver has made it of what `what` names.
fn taken(
    result: sys::CUresult,
    map: sys::CUtensorMap,
    what: impl Fn() -> String,
) -> Result<TensorMap> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(TensorMap { opaque: map.opaque }),
        error => {
            let what = what();
            candle_core::bail!("{OP}: TMA does not take {what}: {error:?}")
        }
    }
}
