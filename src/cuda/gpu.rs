//! What is known of each GPU, read once.

use candle_core::cuda_backend::cudarc::driver::{CudaContext, result, sys};
use candle_core::{CudaDevice, Result, bail};
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

/// GPUs of one machine that the tables have room for.
pub(crate) const MAX_GPUS: usize = 64;

static GPUS: [OnceLock<Gpu>; MAX_GPUS] = [const { OnceLock::new() }; MAX_GPUS];

/// What the driver keeps of an SM's shared memory for each block.
const RESERVED: usize = 1024;

/// What the choice of kernels and their grids depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GpuSpec {
    /// Compute capability times ten, as in sm_90.
    pub capability: u32,
    /// What the code that runs here was compiled for: the compute capability, or less where the
    /// driver compiles PTX. Kernels are chosen by this.
    pub arch: u32,
    /// Streaming multiprocessors (SMs).
    pub sms: u32,
    /// Shared memory that one block can have, in bytes.
    pub shared: u32,
}

impl GpuSpec {
    /// Shared memory, static and dynamic, that each of `blocks` blocks of one SM can have, in bytes.
    pub fn share(&self, blocks: usize) -> usize {
        (self.shared as usize + RESERVED) / blocks - RESERVED
    }
}

/// A GPU of this machine.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub ordinal: usize,
    pub spec: GpuSpec,
    /// Keeps the primary context, and with it the loaded modules, for as long as the process runs.
    context: Arc<CudaContext>,
}

impl Deref for Gpu {
    type Target = GpuSpec;

    fn deref(&self) -> &GpuSpec {
        &self.spec
    }
}

impl Gpu {
    /// The GPU that `device` stands for.
    pub fn of(device: &CudaDevice) -> Result<&'static Self> {
        let stream = device.cuda_stream();
        let context = stream.context();
        let ordinal = context.ordinal();
        let Some(slot) = GPUS.get(ordinal) else {
            bail!("cuda: device {ordinal}, expected one of the first {MAX_GPUS}");
        };
        if let Some(gpu) = slot.get() {
            return Ok(gpu);
        }
        let gpu = Self::read(context)?;
        Ok(slot.get_or_init(|| gpu))
    }

    fn read(context: &Arc<CudaContext>) -> Result<Self> {
        use sys::CUdevice_attribute_enum as attribute;
        let get = |which| -> Result<u32> {
            let value = context.attribute(which).map_err(candle_core::Error::wrap)?;
            Ok(u32::try_from(value).unwrap_or(0))
        };
        let capability = 10 * get(attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
            + get(attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(Self {
            ordinal: context.ordinal(),
            spec: GpuSpec {
                capability,
                arch: code_for(
                    capability,
                    env!("CANDLE_FUSED_SASS"),
                    env!("CANDLE_FUSED_PTX"),
                ),
                sms: get(attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
                shared: get(attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            },
            context: context.clone(),
        })
    }

    /// Makes the GPU's context the calling thread's.
    pub fn bind(&self) -> Result<()> {
        self.context
            .bind_to_thread()
            .map_err(candle_core::Error::wrap)
    }

    /// The same where something is given back. Unlike [`Gpu::bind`] it does not take the error that an
    /// earlier drop of candle's has left for the next call, and is not kept from its work by it.
    pub fn bind_to_free(&self) -> bool {
        // SAFETY: the context is retained for as long as `self` lives.
        unsafe { result::ctx::set_current(self.context.cu_ctx()) }.is_ok()
    }

    /// Waits until everything on `stream` is done, whatever error earlier drops have left.
    ///
    /// # Safety
    /// The stream is one of this GPU's, or the calling thread's own.
    ///
    /// # Errors
    /// If something on the stream failed.
    pub unsafe fn wait(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: the context is retained; the stream is the caller's.
        unsafe {
            result::ctx::set_current(self.context.cu_ctx())
                .and_then(|()| result::stream::synchronize(stream))
        }
        .map_err(candle_core::Error::wrap)
    }
}

/// The architecture of the code that a GPU of this compute capability runs, given those that there
/// is machine code and PTX of. Machine code runs on its own and higher minor versions, that of
/// variants (`90a`) on its own alone. What the driver makes of PTX for 9.0 has none of Hopper's
/// tensor instructions, so it counts as 8.9.
fn code_for(capability: u32, sass: &str, ptx: &str) -> u32 {
    let runs = |code: &str| match code.parse::<u32>() {
        Ok(code) => (code / 10 == capability / 10 && code <= capability).then_some(code),
        Err(_) => {
            let own = code.trim_end_matches(char::is_alphabetic) == capability.to_string();
            own.then_some(capability)
        }
    };
    if let Some(code) = sass.split(' ').filter_map(runs).max() {
        return code;
    }
    ptx.split(' ')
        .filter_map(|code| code.parse().ok())
        .filter(|code| *code <= capability)
        .max()
        .map_or(capability, |code: u32| code.min(89))
}

#[cfg(test)]
mod tests {
    use super::code_for;

    #[test]
    fn the_code_of_each_gpu() {
        let all = ("75 80 86 87 89 90a", "75 80");
        for (gpu, code) in [
            (75, 75),
            (80, 80),
            (86, 86),
            (88, 87),
            (89, 89),
            (90, 90),
            (100, 80),
            (120, 80),
            (72, 72),
        ] {
            assert_eq!(code_for(gpu, all.0, all.1), code, "{gpu}");
        }
        assert_eq!(code_for(90, "75", "75"), 75);
        assert_eq!(code_for(86, "89", "80"), 80);
        // What is compiled for 8.0 has none of 8.9's instructions.
        assert_eq!(code_for(89, "80 86", "80"), 86);
        assert_eq!(code_for(120, "90a", "90"), 89);
    }
}
