//! What TMA is told of int8 codes, and of x.

use crate::cuda::Address;
use crate::cuda::abi::TensorMap;
pub(super) use crate::cuda::abi::W8A8_BLOCK_K as STAGE_K;
use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::sys;

const OP: &str = "quant_linear";

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

/// Of codes `[rows, pitch]`: tiles of so many rows and of a stage's k.
pub(super) fn tensor_map(
    start: Address,
    [rows, pitch]: [usize; 2],
    rows_of_tile: usize,
) -> Result<TensorMap> {
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the arrays have the rank of two, or one less for the strides, and outlive the call.
    let result = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2,
            start as *mut std::ffi::c_void,
            [pitch as u64, rows as u64].as_ptr(),
            [pitch as u64].as_ptr(),
            [STAGE_K as u32, rows_of_tile as u32].as_ptr(),
            [1u32; 2].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    taken(result, map, || format!("[{rows}, {pitch}] codes"))
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
            candle_core::bail!("{OP}: the copy engine does not take {what}: {error:?}")
        }
    }
}
