//! Matrix products of the library: cuBLASLt, with a plan made once for each shape and thread.

use crate::cuda::{Address, Launcher, MAX_GPUS, Scratch};
use candle_core::cuda_backend::cudarc::cublaslt::result::{self, CublasError};
use candle_core::cuda_backend::cudarc::cublaslt::sys;
use candle_core::{DType, Error, Result};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr::from_ref;
use std::sync::OnceLock;

/// Memory that an algorithm may ask for, in bytes.
pub(super) const WORKSPACE: usize = 32 << 20;

/// `CUBLAS_OP_T`, which the bindings of cuBLASLt leave out.
const TRANSPOSED: i32 = 1;

/// Bytes that tensors are aligned to at most, as far as the library's choice is concerned.
const ALIGNMENT: u32 = 256;

/// Plans that a thread keeps: prompts come in many lengths.
const MAX_PLANS: usize = 1024;

/// `out = x weight^T + bias + residual` in f32, rounded once to the dtype of `out`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gemm {
    /// `[m, k]`.
    pub x: Address,
    /// `[n, k]`, in x's dtype.
    pub weight: Address,
    /// `[n]` in the output's dtype, or 0.
    pub bias: Address,
    /// `[m, n]` like `out`, or 0.
    pub residual: Address,
    /// `[m, n]`, rows `stride` elements apart.
    pub out: Address,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub stride: usize,
    pub dtype: DType,
    pub out_dtype: DType,
}

impl Gemm {
    /// The shape alone, without addresses: contiguous rows, m x n x k, in the dtypes of operands and output.
    #[cfg(target_os = "linux")]
    pub(super) fn of_shape([m, n, k]: [usize; 3], [dtype, out_dtype]: [DType; 2]) -> Self {
        Self {
            x: 0,
            weight: 0,
            bias: 0,
            residual: 0,
            out: 0,
            m,
            n,
            k,
            stride: n,
            dtype,
            out_dtype,
        }
    }
}

/// What a plan depends on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    ordinal: usize,
    shape: [usize; 4],
    dtypes: [DType; 2],
    biased: bool,
    added: bool,
    alignment: u32,
}

thread_local! {
    static PLANS: RefCell<HashMap<Key, Option<Plan>>> = RefCell::new(HashMap::new());
}

/// A description of a product and the algorithm for it.
struct Plan {
    description: sys::cublasLtMatmulDesc_t,
    /// Of the weight, x and the output, each as the library's column-major transpose.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace: usize,
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: the plan's own, and nobody has it any more; the library copies what it needs when
        // it launches.
        unsafe {
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                let _ = result::destroy_matrix_layout(layout);
            }
            let _ = result::destroy_matmul_desc(self.description);
        }
    }
}

/// Runs the product on the launcher's stream, or gives false if the library has no algorithm for it.
/// `scratch` gives the algorithm's workspace.
///
/// # Safety
/// Each address holds what its field says until the stream has passed the product.
pub(super) unsafe fn run(launcher: &Launcher, scratch: &mut Scratch, gemm: &Gemm) -> Result<bool> {
    let handle = handle(launcher.gpu.ordinal)?;
    let addresses = [gemm.x, gemm.weight, gemm.bias, gemm.residual, gemm.out];
    let alignment = addresses
        .iter()
        .fold(ALIGNMENT.into(), |all: u64, a| all | a);
    let key = Key {
        ordinal: launcher.gpu.ordinal,
        shape: [gemm.m, gemm.n, gemm.k, gemm.stride],
        dtypes: [gemm.dtype, gemm.out_dtype],
        biased: gemm.bias != 0,
        added: gemm.residual != 0,
        alignment: 1 << alignment.trailing_zeros(),
    };
    PLANS.with_borrow_mut(|plans| {
        if !plans.contains_key(&key) {
            if plans.len() >= MAX_PLANS {
                plans.clear();
            }
            plans.insert(key, Plan::new(handle, gemm, key.alignment)?);
        }
        let Some(plan) = &plans[&key] else {
            return Ok(false);
        };
        // SAFETY: the caller's; the plan was made for this product.
        unsafe { plan.launch(handle, launcher, scratch, gemm) }.map(|()| true)
    })
}

/// Chooses an algorithm and forgets it, on a thread whose context is that of the GPU.
#[cfg(target_os = "linux")]
pub(super) fn choose(ordinal: usize, gemm: &Gemm) -> Result<()> {
    Plan::new(handle(ordinal)?, gemm, ALIGNMENT).map(drop)
}

impl Plan {
    /// None if the library has no algorithm.
    fn new(handle: sys::cublasLtHandle_t, gemm: &Gemm, alignment: u32) -> Result<Option<Self>> {
        use sys::cublasLtMatmulDescAttributes_t as attribute;
        let [input, output] = [gemm.dtype, gemm.out_dtype].map(data_type);
        let (m, n, k) = (gemm.m as u64, gemm.n as u64, gemm.k as u64);
        // f32 inputs are multiplied as f32, never as TF32.
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let mut plan = Self {
            description: with_context(result::create_matmul_desc(
                compute,
                sys::cudaDataType::CUDA_R_32F,
            ))?,
            layouts: [std::ptr::null_mut(); 3],
            algorithm: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
            workspace: 0,
        };
        let matrices = [
            (input, k, n, gemm.k),
            (input, k, m, gemm.k),
            (output, n, m, gemm.stride),
        ];
        for (layout, (dtype, rows, columns, leading)) in plan.layouts.iter_mut().zip(matrices) {
            *layout = with_context(result::create_matrix_layout(
                dtype,
                rows,
                columns,
                leading as i64,
            ))?;
        }
        plan.set(attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
        if gemm.bias != 0 {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            plan.set(attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            plan.set(attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, &gemm.bias)?;
        }
        let found = match plan.heuristic(handle, alignment) {
            Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)) => return Ok(None),
            found => with_context(found)?,
        };
        (plan.algorithm, plan.workspace) = (found.algo, found.workspaceSize);
        Ok(Some(plan))
    }

    fn set<T: Copy>(&self, which: sys::cublasLtMatmulDescAttributes_t, value: &T) -> Result<()> {
        let size = size_of::<T>();
        // SAFETY: the description is alive, and the library copies `size` bytes.
        with_context(unsafe {
            result::set_matmul_desc_attribute(self.description, which, from_ref(value).cast(), size)
        })
    }

    /// The library's choice for tensors of this alignment.
    fn heuristic(
        &self,
        handle: sys::cublasLtHandle_t,
        alignment: u32,
    ) -> std::result::Result<sys::cublasLtMatmulHeuristicResult_t, CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as attribute;
        let preference = result::create_matmul_pref()?;
        let set = |which, value: *const c_void, size| {
            // SAFETY: the preference is alive, and the library copies `size` bytes of the value.
            unsafe { result::set_matmul_pref_attribute(preference, which, value, size) }
        };
        let workspace = WORKSPACE as u64;
        let mut outcome = set(
            attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            from_ref(&workspace).cast(),
            8,
        );
        for which in [
            attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ] {
            outcome = outcome.and_then(|()| set(which, from_ref(&alignment).cast(), 4));
        }
        let [weight, x, out] = self.layouts;
        let found = outcome.and_then(|()| {
            // SAFETY: everything named has been made above and is alive.
            unsafe {
                result::get_matmul_algo_heuristic(
                    handle,
                    self.description,
                    weight,
                    x,
                    out,
                    out,
                    preference,
                )
            }
        });
        // SAFETY: made above, used no more.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        found
    }

    /// # Safety
    /// As [`run`]; the plan is one for this product.
    unsafe fn launch(
        &self,
        handle: sys::cublasLtHandle_t,
        launcher: &Launcher,
        scratch: &mut Scratch,
        gemm: &Gemm,
    ) -> Result<()> {
        if gemm.bias != 0 {
            let which = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            self.set(which, &gemm.bias)?;
        }
        let workspace = match self.workspace {
            0 => 0,
            bytes => scratch.take("linear", DType::U8, bytes)?,
        };
        let (one, beta) = (1f32, if gemm.residual != 0 { 1f32 } else { 0. });
        let residual = if gemm.residual != 0 {
            gemm.residual
        } else {
            gemm.out
        };
        let [weight, x, out] = self.layouts;
        let bytes = gemm.dtype.size_in_bytes() * gemm.k * (gemm.m + gemm.n)
            + gemm.out_dtype.size_in_bytes() * gemm.m * gemm.n;
        launcher
            .moving(bytes as u64)
            .library(("cublasLt", "matmul"), || {
                // SAFETY: the plan's layouts describe what is at the addresses, which the caller vouches
                // for. The workspace is freed in the stream's order.
                with_context(unsafe {
                    result::matmul(
                        handle,
                        self.description,
                        from_ref(&one).cast(),
                        from_ref(&beta).cast(),
                        gemm.weight as *const c_void,
                        weight,
                        gemm.x as *const c_void,
                        x,
                        residual as *const c_void,
                        out,
                        gemm.out as *mut c_void,
                        out,
                        &self.algorithm,
                        workspace as *mut c_void,
                        self.workspace,
                        launcher.stream.cast(),
                    )
                })
            })
    }
}

/// The library's handle on a GPU, whose context is the calling thread's.
fn handle(ordinal: usize) -> Result<sys::cublasLtHandle_t> {
    struct Handle(sys::cublasLtHandle_t);
    // SAFETY: the library takes calls on one handle from any thread.
    unsafe impl Send for Handle {}
    // SAFETY: as above.
    unsafe impl Sync for Handle {}
    static HANDLES: [OnceLock<Handle>; MAX_GPUS] = [const { OnceLock::new() }; MAX_GPUS];
    if let Some(handle) = HANDLES[ordinal].get() {
        return Ok(handle.0);
    }
    let made = Handle(with_context(result::create_handle())?);
    Ok(HANDLES[ordinal].get_or_init(|| made).0)
}

fn data_type(dtype: DType) -> sys::cudaDataType {
    match dtype {
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        _ => sys::cudaDataType::CUDA_R_32F,
    }
}

fn with_context<T>(outcome: std::result::Result<T, CublasError>) -> Result<T> {
    outcome.map_err(|e| Error::Msg(format!("cuda: a product of cuBLASLt failed: {e}")))
}
