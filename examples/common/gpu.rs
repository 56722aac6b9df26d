//! What there is to ask of a GPU, and to set; nothing in a build without the feature `cuda`.

use anyhow::Result;
use candle_core::Device;

/// Whether this build has CUDA and the driver shows a GPU.
pub fn is_present() -> bool {
    #[cfg(feature = "cuda")]
    {
        use candle_core::cuda_backend::cudarc::driver::CudaContext;
        CudaContext::device_count().is_ok_and(|count| count > 0)
    }
    #[cfg(not(feature = "cuda"))]
    false
}

/// The GPU's name, or `cpu`.
pub fn name(device: &Device) -> String {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        let name = cuda.cuda_stream().context().name();
        return name.unwrap_or_else(|_| "cuda".to_owned());
    }
    let _ = device;
    "cpu".to_owned()
}

/// Settings that cost candle less at small batches: `on` turns the tracking of events off for
/// tensors made from now on and lets the memory pool keep what is freed; otherwise both are as
/// candle has them.
pub fn tune(device: &Device, on: bool) -> Result<()> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        if on {
            // SAFETY: the examples and the server use a device from one thread and on one stream.
            unsafe { cuda.disable_event_tracking() };
        }
        candle_fused::cuda::keep_freed_memory(cuda, on)?;
    }
    let _ = (device, on);
    Ok(())
}

/// The most bytes that tensors have held on the GPU at once.
pub fn peak_memory(device: &Device) -> Option<u64> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        return candle_fused::cuda::peak_memory(cuda).ok();
    }
    let _ = device;
    None
}

/// Kernels that `body` launches; its results are not computed. `None` without a GPU, or where the
/// body cannot be recorded.
pub fn launches(device: &Device, body: impl FnOnce() -> Result<()>) -> Option<u64> {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        return candle_fused::cuda::count_launches(cuda, || {
            body().map_err(candle_core::Error::wrap)
        })
        .ok()
        .map(|count| count as u64);
    }
    let _ = (device, body);
    None
}
