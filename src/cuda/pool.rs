//! The driver's memory pool, from which candle's tensors are allocated.

use super::gpu::Gpu;
use candle_core::cuda_backend::cudarc::driver::{DriverError, sys};
use candle_core::{CudaDevice, Result, bail};
use sys::CUmemPool_attribute as attribute;

/// Lets the pool keep freed memory across synchronisations (`true`), or give it back to the driver
/// at each one (`false`, the driver's default). Keeping it saves candle the price of mapping memory
/// again and again.
///
/// # Errors
/// If the driver refuses.
///
/// ```no_run
/// use candle_core::Device;
/// let device = Device::new_cuda(0)?;
/// candle_fused::cuda::keep_freed_memory(device.as_cuda_device()?, true)?;
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn keep_freed_memory(device: &CudaDevice, keep: bool) -> Result<()> {
    let threshold = if keep { u64::MAX } else { 0 };
    set(
        device,
        attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
        threshold,
    )
}

/// The most bytes that tensors of this process have held on the GPU at once since the start or the
/// last [`reset_peak_memory`].
///
/// # Errors
/// If the driver refuses.
///
/// ```no_run
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::cuda::{peak_memory, reset_peak_memory};
/// let device = Device::new_cuda(0)?;
/// let cuda = device.as_cuda_device()?;
/// reset_peak_memory(cuda)?;
/// let before = peak_memory(cuda)?;
/// let x = Tensor::zeros((1024, 1024), DType::F32, &device)?;
/// assert!(peak_memory(cuda)? >= before + 4 * 1024 * 1024);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn peak_memory(device: &CudaDevice) -> Result<u64> {
    let mut bytes = 0u64;
    let pool = pool(device)?;
    // SAFETY: the attribute is a u64.
    let result = unsafe {
        sys::cuMemPoolGetAttribute(
            pool,
            attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
            (&raw mut bytes).cast(),
        )
    };
    with_context(result)?;
    Ok(bytes)
}

/// Starts [`peak_memory`] anew from what is held now.
///
/// # Errors
/// If the driver refuses.
pub fn reset_peak_memory(device: &CudaDevice) -> Result<()> {
    set(device, attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0)
}

/// Waits for candle's stream, and gives what the pool keeps of freed memory back to the driver.
///
/// # Errors
/// If something on the stream failed, or the driver refuses.
pub(crate) fn give_back_freed_memory(device: &CudaDevice) -> Result<()> {
    let stream = device.cuda_stream();
    // SAFETY: the stream is candle's.
    unsafe { Gpu::of(device)?.wait(stream.cu_stream())? };
    let pool = pool(device)?;
    // SAFETY: the pool is the device's. What tensors hold stays theirs.
    with_context(unsafe { sys::cuMemPoolTrimTo(pool, 0) })
}

fn pool(device: &CudaDevice) -> Result<sys::CUmemoryPool> {
    let gpu = Gpu::of(device)?;
    gpu.bind()?;
    let mut pool = std::ptr::null_mut();
    // SAFETY: the ordinal is that of a device in use.
    with_context(unsafe { sys::cuDeviceGetDefaultMemPool(&mut pool, gpu.ordinal as i32) })?;
    Ok(pool)
}

fn set(device: &CudaDevice, which: attribute, mut value: u64) -> Result<()> {
    let pool = pool(device)?;
    // SAFETY: both attributes that are set here are u64.
    with_context(unsafe { sys::cuMemPoolSetAttribute(pool, which, (&raw mut value).cast()) })
}

pub(super) fn with_context(result: sys::CUresult) -> Result<()> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        error => bail!("cuda: the memory pool: {}", DriverError(error)),
    }
}
