//! Memory that the blocks of a launch count in.

use super::abi::{ZEROS_THREADS, ZerosParams};
use super::launch::{Grid, Launcher, is_recording};
use super::module::{Module, fatbin};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, result};
use candle_core::{CudaDevice, Error, Result, bail};

static MODULE: Module = Module::new("zeros", fatbin!("zeros"), &["zeros"]);

/// `len` zeros, for the next launch by `launcher` to count with. They are a part of what a recording replays: memory
/// that an op frees may be given to another launch of the same recording, which leaves it as it likes.
pub(crate) fn zeros_before_launch(
    launcher: &Launcher,
    device: &CudaDevice,
    len: usize,
) -> Result<CudaSlice<u32>> {
    let len = len.max(1);
    // SAFETY: any bits are a u32, and all are written below, in the order of the launch that reads them.
    let zeros = unsafe { device.alloc::<u32>(len)? };
    let at = zeros.device_ptr(&device.cuda_stream()).0;
    if !is_recording() {
        let bytes = size_of::<u32>() * len;
        // SAFETY: the memory has been allocated for as many bytes, and the launcher's stream is candle's.
        let set = unsafe { result::memset_d8_async(at, 0, bytes, launcher.stream) };
        set.map_err(Error::wrap)?;
        return Ok(zeros);
    }
    let Ok(count) = u32::try_from(len) else {
        bail!("cuda: {len} counters, expected at most {}", u32::MAX);
    };
    let blocks = count.div_ceil(ZEROS_THREADS as u32);
    let grid = Grid::new([blocks, 1, 1], ZEROS_THREADS as u32, 0);
    // SAFETY: the kernel takes `ZerosParams`; the memory is the recording's when it is replayed.
    unsafe { launcher.run(&MODULE, 0, grid, &ZerosParams { at, count })? };
    Ok(zeros)
}
