//! Dense matrix products with many rows: cuBLASLt, its handle, workspace and choices kept per thread
//! and GPU.

use super::gpu::Gpu;
use super::launch::Launcher;
use super::memory::Address;
use super::profile;
use candle_core::cuda_backend::cudarc::cublas::result::CublasError;
use candle_core::cuda_backend::cudarc::cublas::sys::cublasOperation_t;
use candle_core::cuda_backend::cudarc::cublaslt::{result, sys};
use candle_core::cuda_backend::cudarc::driver::result as driver;
use candle_core::{DType, Error, Result, bail};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::c_void;

/// Bytes that a product may use beside its operands; what NVIDIA advises for Hopper.
const WORKSPACE: usize = 32 << 20;

/// `y = x wᵀ + c`, accumulated in f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gemm {
    /// `[m, k]`, row-major.
    pub x: Address,
    /// `[n, k]`, row-major, of x's dtype.
    pub w: Address,
    /// `[m, n]`, rows `pitch` elements apart; 0 for none. May be y.
    pub c: Address,
    /// `[m, n]`, rows `pitch` elements apart.
    pub y: Address,
    pub shape: GemmShape,
}

/// What a product's plan depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GemmShape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Elements from one row of y to the next.
    pub pitch: usize,
    /// Of x and w: f32, f16 or bf16.
    pub dtype: DType,
    /// Of y and c: `dtype` or f32.
    pub out: DType,
}

thread_local! {
    static LIBRARIES: RefCell<HashMap<usize, Library>> = RefCell::default();
}

/// Computes a product.
///
/// # Safety
/// Every address is valid for its shape until the stream has passed the launch.
pub(crate) unsafe fn gemm(launcher: &Launcher, product: &Gemm) -> Result<()> {
    LIBRARIES.with_borrow_mut(|libraries| {
        let library = match libraries.get_mut(&launcher.gpu.ordinal) {
            Some(library) => library,
            None => libraries
                .entry(launcher.gpu.ordinal)
                .or_insert(Library::new(launcher.gpu)?),
        };
        profile::around(launcher, ("cublasLt", "matmul"), || {
            // SAFETY: the caller's.
            unsafe { library.run(launcher, product) }
        })
    })
}

struct Library {
    handle: sys::cublasLtHandle_t,
    workspace: Address,
    plans: HashMap<(GemmShape, Alignment), Plan>,
    gpu: &'static Gpu,
}

/// The powers of two that the operands' addresses are multiples of, up to 16.
type Alignment = [u32; 3];

/// cuBLASLt's descriptors and the algorithm it advises.
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    w: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Library {
    fn new(gpu: &'static Gpu) -> Result<Self> {
        gpu.bind()?;
        let handle = told("handle", result::create_handle())?;
        // SAFETY: freed when the library is dropped; its content is nobody's.
        let workspace = unsafe { driver::malloc_sync(WORKSPACE) }.map_err(Error::wrap)?;
        Ok(Self {
            handle,
            workspace,
            plans: HashMap::new(),
            gpu,
        })
    }

    /// # Safety
    /// As [`gemm`].
    unsafe fn run(&mut self, launcher: &Launcher, product: &Gemm) -> Result<()> {
        let aligned = |a: Address| 1 << a.trailing_zeros().min(4);
        let key = (
            product.shape,
            [
                aligned(product.x),
                aligned(product.w),
                aligned(product.y | product.c),
            ],
        );
        let plan = match self.plans.get(&key) {
            Some(plan) => plan,
            None => {
                let plan = Plan::new(self.handle, &key.0, key.1)?;
                self.plans.entry(key).or_insert(plan)
            }
        };
        let (one, zero) = (1f32, 0f32);
        let beta = if product.c == 0 { &zero } else { &one };
        let c = if product.c == 0 { product.y } else { product.c };
        // SAFETY: the descriptors are the plan's; the addresses are the caller's. cuBLASLt counts in
        // columns, so that row-major y = x wᵀ is its yᵀ = w xᵀ.
        let result = unsafe {
            result::matmul(
                self.handle,
                plan.product,
                (&raw const one).cast(),
                std::ptr::from_ref(beta).cast(),
                product.w as *const c_void,
                plan.w,
                product.x as *const c_void,
                plan.x,
                c as *const c_void,
                plan.y,
                product.y as *mut c_void,
                plan.y,
                &plan.algorithm,
                self.workspace as *mut c_void,
                WORKSPACE,
                launcher.stream.cast(),
            )
        };
        told("matmul", result)
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            self.plans.clear();
            // SAFETY: both were made in `new`; freeing waits for what uses the workspace.
            unsafe {
                let _ = driver::free_sync(self.workspace);
                let _ = result::destroy_handle(self.handle);
            }
        }
    }
}

impl Plan {
    fn new(handle: sys::cublasLtHandle_t, shape: &GemmShape, aligned: Alignment) -> Result<Self> {
        let GemmShape { m, n, k, pitch, .. } = *shape;
        let (kind, out) = (data_type(shape.dtype)?, data_type(shape.out)?);
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let product = told(
            "product",
            result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F),
        )?;
        let layout = |kind, rows: usize, cols: usize, pitch: usize| {
            let made = result::create_matrix_layout(kind, rows as u64, cols as u64, pitch as i64);
            told("layout", made)
        };
        let (w, x, y) = (
            layout(kind, k, n, k)?,
            layout(kind, k, m, k)?,
            layout(out, n, m, pitch)?,
        );
        let transposed = cublasOperation_t::CUBLAS_OP_T;
        // SAFETY: the attribute is the size of the value handed over.
        let set = unsafe {
            result::set_matmul_desc_attribute(
                product,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                (&raw const transposed).cast(),
                size_of_val(&transposed),
            )
        };
        told("transposition", set)?;
        let preference = told("preference", result::create_matmul_pref())?;
        use sys::cublasLtMatmulPreferenceAttributes_t as attribute;
        let [x_aligned, w_aligned, y_aligned] = aligned;
        let limits = [
            (
                attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                w_aligned,
            ),
            (
                attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                x_aligned,
            ),
            (
                attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                y_aligned,
            ),
            (
                attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
                y_aligned,
            ),
        ];
        // SAFETY: the attributes are the sizes of the values handed over, and the descriptors exist.
        let found = unsafe {
            let size = WORKSPACE as u64;
            let mut set = result::set_matmul_pref_attribute(
                preference,
                attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const size).cast(),
                size_of_val(&size),
            );
            for (which, bytes) in limits {
                let value = (&raw const bytes).cast();
                set = set.and_then(|()| {
                    result::set_matmul_pref_attribute(preference, which, value, size_of_val(&bytes))
                });
            }
            let found = set.and_then(|()| {
                result::get_matmul_algo_heuristic(handle, product, w, x, y, y, preference)
            });
            let _ = result::destroy_matmul_pref(preference);
            found
        };
        let algorithm = told(&format!("algorithm for {shape:?}"), found)?.algo;
        Ok(Self {
            product,
            w,
            x,
            y,
            algorithm,
        })
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: made in `new`, used by nobody else.
        unsafe {
            let _ = result::destroy_matmul_desc(self.product);
            for layout in [self.w, self.x, self.y] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

fn data_type(dtype: DType) -> Result<sys::cudaDataType> {
    Ok(match dtype {
        DType::F32 => sys::cudaDataType::CUDA_R_32F,
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        other => bail!("cublasLt: no product of {other:?}, expected f32, f16 or bf16"),
    })
}

fn told<T>(what: &str, result: std::result::Result<T, CublasError>) -> Result<T> {
    match result {
        Ok(value) => Ok(value),
        Err(e) => bail!("cublasLt: {what}: {e}"),
    }
}
