//! Host memory to a GPU, by way of page-locked memory.
//!
//! The driver copies from memory that is not page-locked through a buffer of its own, with one thread, which also waits
//! for each page of a mapped file. Here the threads of the pool fill page-locked parts, and while the GPU takes one of
//! these, they fill the next.

use super::gpu::{Gpu, MAX_GPUS};
use super::memory::{Address, address, alloc};
use super::pinned::Pinned;
use crate::pool;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, result};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Error, Layout, Result, Storage, Tensor, bail};
use std::io::Read;
use std::sync::{Mutex, MutexGuard};

const OP: &str = "upload";

/// Bytes of a part.
const PART: usize = 8 << 20;
const PARTS: usize = 4;

/// Fewer bytes go the driver's way: they would not pay for a part's allocation.
const LEAST: usize = 1 << 20;

/// Bytes that a thread copies at a time.
const GRAIN: usize = 256 << 10;

/// The parts of each GPU, which are allocated one by one as they are needed, and kept.
static STAGING: [Mutex<Staging>; MAX_GPUS] = [const { Mutex::new(Staging::new()) }; MAX_GPUS];

#[derive(Debug)]
struct Staging {
    parts: Vec<Part>,
    turn: usize,
}

/// Page-locked memory, and when the GPU has read what was last put there.
#[derive(Debug)]
struct Part {
    memory: Pinned,
    read: Option<CudaEvent>,
}

impl Staging {
    const fn new() -> Self {
        Self {
            parts: Vec::new(),
            turn: 0,
        }
    }

    /// Those of the GPU, if no other thread uploads just now.
    fn of(gpu: &Gpu) -> Option<MutexGuard<'static, Self>> {
        STAGING[gpu.ordinal].try_lock().ok()
    }

    /// The next part, once the GPU has read it; none if there is no page-locked memory.
    fn next(&mut self, gpu: &'static Gpu) -> Result<Option<&mut Part>> {
        let at = self.turn;
        self.turn = (at + 1) % PARTS;
        if at >= self.parts.len()
            && let Ok(memory) = Pinned::new(gpu, PART / size_of::<u32>())
        {
            self.parts.push(Part { memory, read: None });
        }
        let count = self.parts.len().max(1);
        let Some(part) = self.parts.get_mut(at % count) else {
            return Ok(None);
        };
        if let Some(read) = part.read.take() {
            read.synchronize().map_err(Error::wrap)?;
        }
        Ok(Some(part))
    }
}

impl Part {
    /// Has the GPU copy `bytes` bytes, which `fill` writes.
    ///
    /// # Safety
    /// `to` has room for them until the device's stream has passed this, and the GPU has read what was here.
    unsafe fn send(
        &mut self,
        to: Address,
        bytes: usize,
        device: &CudaDevice,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        // SAFETY: the caller's.
        fill(unsafe { &mut self.memory.bytes_mut()[..bytes] })?;
        let stream = device.cuda_stream();
        // SAFETY: nobody writes to the part before the event below has passed; the rest is the caller's.
        unsafe { self.memory.copy_bytes_to(to, bytes, stream.cu_stream())? };
        self.read = Some(stream.record_event(None).map_err(Error::wrap)?);
        Ok(())
    }
}

/// Has `fill` write `count` units of `size` bytes for the GPU, in the order of the device's stream: some at a time, from the
/// first one to the last.
///
/// # Safety
/// `to` has room for them until the stream has passed this.
///
/// # Errors
/// If the driver refuses a copy, or those of `fill`.
unsafe fn upload_parts(
    to: Address,
    (count, size): (usize, usize),
    device: &CudaDevice,
    mut fill: impl FnMut(usize, &mut [u8]) -> Result<()>,
) -> Result<()> {
    let gpu = Gpu::of(device)?;
    let mut staging = match size <= PART {
        true => Staging::of(gpu),
        false => None,
    };
    let step = (PART / size.max(1)).max(1);
    let mut pageable = Vec::new();
    for first in (0..count).step_by(step) {
        let bytes = step.min(count - first) * size;
        let to = to + (first * size) as Address;
        let part = match staging.as_mut() {
            Some(staging) => staging.next(gpu)?,
            None => None,
        };
        if let Some(part) = part {
            // SAFETY: the caller's; the part has been read.
            unsafe { part.send(to, bytes, device, |part| fill(first, part))? };
            continue;
        }
        pageable.resize(bytes, 0);
        fill(first, &mut pageable)?;
        // SAFETY: the caller's.
        unsafe { copy(to, &pageable, device)? };
    }
    Ok(())
}

/// Has all threads write rows of `width` bytes for the GPU, in the order of the device's stream: `fill` writes whole rows
/// from the one that it is given on.
///
/// # Safety
/// `to` has room for the rows until the stream has passed this.
///
/// # Errors
/// If the driver refuses a copy.
pub(crate) unsafe fn upload_rows(
    to: Address,
    (rows, width): (usize, usize),
    device: &CudaDevice,
    fill: impl Fn(usize, &mut [u8]) + Sync,
) -> Result<()> {
    let all = |first: usize, part: &mut [u8]| {
        pool::for_rows(part, width, GRAIN.div_ceil(width), |row, rows| {
            fill(first + row, rows);
        });
        Ok(())
    };
    // SAFETY: the caller's.
    unsafe { upload_parts(to, (rows, width), device, all) }
}

/// Reads so many bytes of a file, which go to the GPU as they come.
///
/// # Errors
/// If there are fewer, or the device's memory does not suffice.
pub(crate) fn upload_from(
    reader: &mut impl Read,
    bytes: usize,
    device: &CudaDevice,
) -> Result<Tensor> {
    let (data, to) = room(DType::U8, bytes, device)?;
    let read = |_: usize, part: &mut [u8]| Ok(reader.read_exact(part)?);
    // SAFETY: the allocation has room for as many, and is used and freed on the stream.
    unsafe { upload_parts(to, (bytes, 1), device, read)? };
    Ok(tensor(data, &[bytes]))
}

/// Copies `bytes` to the GPU in the order of the device's stream. They may change once this has returned.
///
/// # Safety
/// As [`upload_rows`].
///
/// # Errors
/// As there.
pub(crate) unsafe fn upload(to: Address, bytes: &[u8], device: &CudaDevice) -> Result<()> {
    if bytes.len() < LEAST {
        // SAFETY: the caller's.
        return unsafe { copy(to, bytes, device) };
    }
    let fill = |first: usize, out: &mut [u8]| out.copy_from_slice(&bytes[first..][..out.len()]);
    // SAFETY: the caller's.
    unsafe { upload_rows(to, (bytes.len(), 1), device, fill) }
}

/// Has the driver copy memory that is not page-locked, which it has read when this returns.
///
/// # Safety
/// As [`upload_rows`].
unsafe fn copy(to: Address, bytes: &[u8], device: &CudaDevice) -> Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    // SAFETY: the caller's.
    unsafe { result::memcpy_htod_async(to, bytes, device.cuda_stream().cu_stream()) }
        .map_err(Error::wrap)
}

/// A tensor of these bytes.
///
/// # Errors
/// If they are not those of the shape, there is no CUDA storage of the dtype, or the device's memory does not suffice.
pub(crate) fn upload_tensor(
    bytes: &[u8],
    dtype: DType,
    shape: &[usize],
    device: &CudaDevice,
) -> Result<Tensor> {
    let count = shape.iter().product::<usize>();
    if bytes.len() != count * dtype.size_in_bytes() {
        bail!("{OP}: {} bytes for {shape:?} of {dtype:?}", bytes.len());
    }
    let (data, to) = room(dtype, count, device)?;
    // SAFETY: the allocation has room for as many, and is used and freed on the stream.
    unsafe { upload(to, bytes, device)? };
    Ok(tensor(data, shape))
}

/// Memory for so many elements, all of which are to be written, and its address.
fn room(dtype: DType, count: usize, device: &CudaDevice) -> Result<(CudaStorage, Address)> {
    let data = alloc(OP, device, dtype, count)?;
    let to = address(&data, &Layout::contiguous(count))?;
    Ok((data, to))
}

fn tensor(data: CudaStorage, shape: &[usize]) -> Tensor {
    Tensor::from_storage(Storage::Cuda(data), shape, BackpropOp::none(), false)
}
