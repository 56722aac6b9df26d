//! Host memory to a GPU, by way of page-locked memory.
//!
//! The driver copies from memory that is not page-locked through a buffer of its own, with one thread, which also waits
//! for each page of a mapped file. Here the threads of the pool fill page-locked parts, and while the GPU takes one of
//! these, they fill the next.

use super::gpu::{Gpu, MAX_GPUS};
use super::memory::{Address, address, alloc};
use super::pinned::Pinned;
use crate::cpu::pool;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, result};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, DType, Error, Layout, Result, Storage, Tensor, bail};
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

/// Where a part begins, for several threads.
struct Start(*mut u8);

// SAFETY: it stands for a part, of which the callers of `write` have disjoint ranges.
unsafe impl Sync for Start {}

impl Start {
    /// # Safety
    /// There is room for `bytes` from `at` on, which no other thread accesses.
    unsafe fn write(&self, at: usize, bytes: &[u8]) {
        // SAFETY: the caller's.
        unsafe {
            bytes
                .as_ptr()
                .copy_to_nonoverlapping(self.0.add(at), bytes.len())
        };
    }
}

impl Part {
    /// Has the GPU copy `bytes`, up to a part of them, by way of this.
    ///
    /// # Safety
    /// `to` has room for them until the device's stream has passed this.
    unsafe fn send(&mut self, to: Address, bytes: &[u8], device: &CudaDevice) -> Result<()> {
        let start = Start(self.memory.words().as_ptr().cast_mut().cast());
        pool::for_ranges(bytes.len(), GRAIN, |range| {
            // SAFETY: ranges are disjoint and within the part, which the GPU has read.
            unsafe { start.write(range.start, &bytes[range]) };
        });
        let stream = device.cuda_stream();
        // SAFETY: the part has so many bytes, and is not written to before the event below; the rest is the caller's.
        unsafe {
            self.memory
                .copy_bytes_to(to, bytes.len(), stream.cu_stream())?
        };
        self.read = Some(stream.record_event(None).map_err(Error::wrap)?);
        Ok(())
    }
}

/// Copies `bytes` to the GPU in the order of the device's stream. They may change once this has returned.
///
/// # Safety
/// `to` has room for them until the stream has passed this.
///
/// # Errors
/// If the driver refuses a copy.
pub(crate) unsafe fn upload(to: Address, bytes: &[u8], device: &CudaDevice) -> Result<()> {
    let (mut to, mut left) = (to, bytes);
    let gpu = Gpu::of(device)?;
    if bytes.len() >= LEAST
        && let Some(mut staging) = Staging::of(gpu)
    {
        while !left.is_empty()
            && let Some(part) = staging.next(gpu)?
        {
            let (some, rest) = left.split_at(left.len().min(PART));
            // SAFETY: the caller's.
            unsafe { part.send(to, some, device)? };
            to += some.len() as Address;
            left = rest;
        }
    }
    if left.is_empty() {
        return Ok(());
    }
    // SAFETY: the caller's; the driver has read memory that is not page-locked when the call returns.
    unsafe { result::memcpy_htod_async(to, left, device.cuda_stream().cu_stream()) }
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
    let data = alloc(OP, device, dtype, count)?;
    let to = address(&data, &Layout::contiguous(count))?;
    // SAFETY: the allocation has room for as many, and is used and freed on the stream.
    unsafe { upload(to, bytes, device)? };
    let (storage, none) = (Storage::Cuda(data), BackpropOp::none());
    Ok(Tensor::from_storage(storage, shape, none, false))
}
