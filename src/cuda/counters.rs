//! Memory that the blocks of a launch count in.

use super::launch::Launcher;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, result};
use candle_core::{CudaDevice, Error, Result};

/// `len` zeros, for a launch by `launcher` to count with. They are a part of what a recording replays: memory that an
/// op frees may be given to another launch of the same recording, which leaves it as it likes.
pub(crate) fn zeros_before_launch(
    launcher: &Launcher,
    device: &CudaDevice,
    len: usize,
) -> Result<CudaSlice<u32>> {
    let len = len.max(1);
    // SAFETY: any bits are a u32, and all are written below, in the order of the launch that reads them.
    let zeros = unsafe { device.alloc::<u32>(len)? };
    let at = zeros.device_ptr(&device.cuda_stream()).0;
    // SAFETY: the memory has been allocated for as many bytes, and the launcher's stream is candle's or one that is
    // recorded to be replayed there.
    let set = unsafe { result::memset_d8_async(at, 0, size_of::<u32>() * len, launcher.stream) };
    set.map_err(Error::wrap)?;
    Ok(zeros)
}
