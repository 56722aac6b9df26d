//! Fatbins and their kernels, loaded once per GPU.

use super::abi;
use super::gpu::{Gpu, MAX_GPUS};
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUfunction, CUfunction_attribute_enum as attribute, CUresult,
};
use candle_core::cuda_backend::cudarc::driver::{DriverError, result};
use candle_core::{DType, Result, bail};
use std::ffi::CString;
use std::sync::OnceLock;

/// The bytes of `kernels/<folder>/<stem>.cu` as compiled by the build script.
macro_rules! fatbin {
    ($stem:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/", $stem, ".fatbin"))
    };
}
pub(crate) use fatbin;

/// A kernel in the driver. The module it belongs to is never unloaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function {
    pub handle: CUfunction,
    /// Bytes of shared memory that a block has besides what a launch gives it.
    pub static_shared: u32,
}

// SAFETY: a handle that the driver lets any thread use.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// One fatbin and the names of its kernels; a kernel is then known by its place among them.
pub(crate) struct Module {
    stem: &'static str,
    fatbin: &'static [u8],
    kernels: &'static [&'static str],
    /// The preferred shared-memory carveout of an SM's L1 cache, in percent; none: the driver chooses.
    carveout: Option<i32>,
    loaded: [OnceLock<Box<[Function]>>; MAX_GPUS],
}

/// The stem.
impl std::fmt::Debug for Module {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.stem)
    }
}

impl Module {
    /// A module to be loaded when its first kernel is asked for.
    pub const fn new(
        stem: &'static str,
        fatbin: &'static [u8],
        kernels: &'static [&'static str],
    ) -> Self {
        Self {
            stem,
            fatbin,
            kernels,
            carveout: None,
            loaded: [const { OnceLock::new() }; MAX_GPUS],
        }
    }

    /// Lets blocks of the next kernel start beside those of this module's, however much shared memory they
    /// take: an SM divides its cache anew only when it is idle.
    pub const fn with_all_shared_memory(mut self) -> Self {
        self.carveout = Some(100);
        self
    }

    /// Makes as little of an SM's cache shared memory as a block takes. Then few blocks of other kernels find room
    /// beside it.
    pub const fn with_least_shared_memory(mut self) -> Self {
        self.carveout = Some(0);
        self
    }

    /// The kernel at `index` among the names.
    ///
    /// # Errors
    /// If the driver does not take the fatbin, with the reason.
    pub fn kernel(&self, gpu: &Gpu, index: usize) -> Result<Function> {
        let slot = &self.loaded[gpu.ordinal];
        let functions = match slot.get() {
            Some(functions) => functions,
            None => {
                let functions = self.load(gpu)?;
                slot.get_or_init(|| functions)
            }
        };
        Ok(functions[index])
    }

    /// The stem, and the name of the kernel at `index`.
    pub fn names(&self, index: usize) -> (&'static str, &'static str) {
        (self.stem, self.kernels[index])
    }

    /// The names of all kernels, and the bytes of static shared memory that a block of each has.
    #[cfg(test)]
    pub fn static_shared(&self, gpu: &Gpu) -> Result<Vec<(&'static str, u32)>> {
        let of = |index| Ok((self.kernels[index], self.kernel(gpu, index)?.static_shared));
        (0..self.kernels.len()).map(of).collect()
    }

    fn load(&self, gpu: &Gpu) -> Result<Box<[Function]>> {
        gpu.bind()?;
        // SAFETY: the bytes are a whole fatbin, as nvcc wrote it.
        let module = unsafe { result::module::load_data(self.fatbin.as_ptr().cast()) };
        let module = match module {
            Ok(module) => module,
            Err(e) => return self.refused(gpu, e),
        };
        self.kernels
            .iter()
            .map(|name| {
                let symbol = CString::new(*name).map_err(candle_core::Error::wrap)?;
                // SAFETY: the module has just been loaded.
                let function = match unsafe { result::module::get_function(module, symbol) } {
                    Ok(function) => function,
                    Err(e) => bail!("cuda: kernel `{name}` of {}.cu: {e}", self.stem),
                };
                let static_shared = allow_shared(gpu, function)?;
                if let Some(percent) = self.carveout {
                    prefer_carveout(function, percent)?;
                }
                Ok(Function {
                    handle: function,
                    static_shared,
                })
            })
            .collect()
    }

    /// What the driver's refusal means for the user.
    fn refused<T>(&self, gpu: &Gpu, error: DriverError) -> Result<T> {
        let (stem, arch) = (self.stem, gpu.capability);
        match error.0 {
            CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => bail!(
                "cuda: this build has no `{stem}` kernels for compute capability {}.{}; build with \
                 CUDA_COMPUTE_CAP={arch} or without CUDA_COMPUTE_CAP",
                arch / 10,
                arch % 10
            ),
            CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION | CUresult::CUDA_ERROR_INVALID_PTX => {
                bail!(
                    "cuda: the driver is too old to compile the `{stem}` kernels for compute capability \
                 {}.{}; update the driver, or build with CUDA_COMPUTE_CAP={arch}",
                    arch / 10,
                    arch % 10
                )
            }
            CUresult::CUDA_ERROR_INVALID_IMAGE => bail!(
                "cuda: the driver does not read the `{stem}` kernels: it is older than the CUDA \
                 toolkit that built them; update the driver"
            ),
            _ => bail!("cuda: the `{stem}` kernels do not load: {error}"),
        }
    }
}

/// The number of an element type in the kernels; of f32, f16 and bf16 also the place among a module's kernels for each
/// of them. F8E4M3 and U8 stand for codes of keys and values ([`KvFormat::stored`](crate::quant::KvFormat::stored)).
pub(crate) fn dtype_index(dtype: DType) -> usize {
    match dtype {
        DType::F32 => abi::F32,
        DType::F16 => abi::F16,
        DType::F8E4M3 => abi::E4M3,
        DType::U8 => abi::INT8,
        _ => abi::BF16,
    }
}

/// Lets a kernel have all the dynamic shared memory that its static part leaves; gives the bytes of that.
fn allow_shared(gpu: &Gpu, function: CUfunction) -> Result<u32> {
    // SAFETY: the function belongs to a loaded module.
    let fixed = unsafe {
        result::function::get_function_attribute(
            function,
            attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
        )
    }
    .map_err(candle_core::Error::wrap)?;
    let room = i32::try_from(gpu.shared).unwrap_or(i32::MAX) - fixed;
    // Within the device's limit.
    set_attribute(
        function,
        attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        room,
    )?;
    Ok(u32::try_from(fixed).unwrap_or(0))
}

/// Sets the preferred shared-memory carveout of an SM's L1 cache, in percent.
fn prefer_carveout(function: CUfunction, percent: i32) -> Result<()> {
    set_attribute(
        function,
        attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
        percent,
    )
}

fn set_attribute(function: CUfunction, what: attribute, value: i32) -> Result<()> {
    // SAFETY: the function belongs to a loaded module; the driver checks the value.
    unsafe { result::function::set_function_attribute(function, what, value) }
        .map_err(candle_core::Error::wrap)
}
