//! What kernels of all kinds have in common.

use super::Count;

abi! {
    /// Threads of a warp.
    const WARP: Count<i32> = 32;

    /// Numbers of element types.
    const F32: Count<i32> = 0;
    const F16: Count<i32> = 1;
    const BF16: Count<i32> = 2;
    /// Codes of 8 bits, which keys and values alone may be.
    const E4M3: Count<i32> = 3;
    const INT8: Count<i32> = 4;

    /// A tensor as `cuTensorMapEncodeTiled` describes it.
    struct TensorMap align(64) {
        opaque: [u64; 16],
    }
}
