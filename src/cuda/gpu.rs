//! What is known of each GPU, read once.

use candle_core::cuda_backend::cudarc::driver::{CudaContext, sys};
use candle_core::{CudaDevice, Result, bail};
use std::sync::{Arc, OnceLock};

/// GPUs of one machine that the tables have room for.
pub(crate) const MAX_GPUS: usize = 64;

static GPUS: [OnceLock<Gpu>; MAX_GPUS] = [const { OnceLock::new() }; MAX_GPUS];

/// A GPU's properties.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub ordinal: usize,
    /// Compute capability times ten, as in sm_90.
    pub arch: u32,
    /// Streaming multiprocessors.
    pub sms: u32,
    /// Shared memory that one block can have, in bytes.
    pub shared: u32,
    /// Keeps the primary context, and with it the loaded modules, for as long as the process runs.
    context: Arc<CudaContext>,
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
        Ok(Self {
            ordinal: context.ordinal(),
            arch: 10 * get(attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?
                + get(attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            sms: get(attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared: get(attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            context: context.clone(),
        })
    }

    /// Makes the GPU's context the calling thread's.
    pub fn bind(&self) -> Result<()> {
        self.context
            .bind_to_thread()
            .map_err(candle_core::Error::wrap)
    }
}
