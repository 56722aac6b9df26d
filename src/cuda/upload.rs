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
use std::sync::{Mutex, MutexGuard, TryLockError};

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

/// Page-locked memory, and what tells when the GPU has read what was last put there.
#[derive(Debug)]
struct Part {
    memory: Pinned,
    read: CudaEvent,
    /// Whether the GPU may still have to read it.
    is_taken: bool,
}

impl Staging {
    const fn new() -> Self {
        Self {
            parts: Vec::new(),
            turn: 0,
        }
    }

    /// The GPU's for so many bytes, if they are worth it and no other thread uploads just now.
    fn of(gpu: &Gpu, bytes: usize) -> Option<MutexGuard<'static, Self>> {
        if bytes < LEAST {
            return None;
        }
        match STAGING[gpu.ordinal].try_lock() {
            Ok(staging) => Some(staging),
            // Who panicked was filling a part, which the GPU has not been told of.
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The next part, once the GPU has read it; none if there is no page-locked memory.
    fn next(&mut self, gpu: &'static Gpu, device: &CudaDevice) -> Result<Option<&mut Part>> {
        let at = self.turn;
        self.turn = (at + 1) % PARTS;
        if at >= self.parts.len()
            && let Some(part) = Part::new(gpu, device)
        {
            self.parts.push(part);
        }
        let count = self.parts.len().max(1);
        let Some(part) = self.parts.get_mut(at % count) else {
            return Ok(None);
        };
        if part.is_taken {
            // Not by `CudaEvent`, which returns an error that an earlier drop has left, without waiting.
            gpu.bind_to_free();
            // SAFETY: the event lives as long as the part.
            unsafe { result::event::synchronize(part.read.cu_event()) }.map_err(Error::wrap)?;
            part.is_taken = false;
        }
        Ok(Some(part))
    }
}

impl Part {
    fn new(gpu: &'static Gpu, device: &CudaDevice) -> Option<Self> {
        Some(Self {
            memory: Pinned::new(gpu, PART / size_of::<u32>()).ok()?,
            read: device.cuda_stream().context().new_event(None).ok()?,
            is_taken: false,
        })
    }

    /// Has the GPU copy `bytes` bytes, which `fill` writes.
    ///
    /// # Safety
    /// `to` has room for them until the device's stream has passed this, and the part is not taken.
    unsafe fn send(
        &mut self,
        to: Address,
        bytes: usize,
        device: &CudaDevice,
        fill: impl FnOnce(&mut [u8]) -> Result<()>,
    ) -> Result<()> {
        // SAFETY: the caller's.
        fill(unsafe { &mut self.memory.bytes_mut()[..bytes] })?;
        let stream = device.cuda_stream().cu_stream();
        self.is_taken = true;
        // SAFETY: nobody writes to the part before the event below has passed; the rest is the caller's.
        unsafe { self.memory.copy_bytes_to(to, bytes, stream)? };
        // SAFETY: event and stream are of one GPU, and live.
        if let Err(e) = unsafe { result::event::record(self.read.cu_event(), stream) } {
            // Nothing tells when the copy has passed, so it is waited for.
            // SAFETY: the stream is one of this GPU's.
            unsafe { Gpu::of(device)?.wait(stream)? };
            self.is_taken = false;
            return Err(Error::wrap(e));
        }
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
        true => Staging::of(gpu, count * size),
        false => None,
    };
    let step = (PART / size.max(1)).max(1);
    let mut pageable = Vec::new();
    for first in (0..count).step_by(step) {
        let bytes = step.min(count - first) * size;
        let to = to + (first * size) as Address;
        let part = match staging.as_mut() {
            Some(staging) => staging.next(gpu, device)?,
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
/// If the driver refuses a copy, or one of those of `fill`.
pub(crate) unsafe fn upload_rows(
    to: Address,
    (rows, width): (usize, usize),
    device: &CudaDevice,
    fill: impl Fn(usize, &mut [u8]) -> Result<()> + Sync,
) -> Result<()> {
    let all = |first: usize, part: &mut [u8]| {
        let grain = GRAIN.div_ceil(width);
        pool::try_for_rows(part, width, grain, |row, rows| fill(first + row, rows))
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
    let fill = |first: usize, out: &mut [u8]| {
        out.copy_from_slice(&bytes[first..][..out.len()]);
        Ok(())
    };
    // A statement of its own: a `match` would keep the lock that `upload_rows` takes.
    let is_free = Staging::of(Gpu::of(device)?, bytes.len()).is_some();
    // SAFETY: the caller's.
    unsafe {
        match is_free {
            true => upload_rows(to, (bytes.len(), 1), device, fill),
            false => copy(to, bytes, device),
        }
    }
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

/// A tensor of bytes that `read` writes, from one of them on. Many threads call it at a time.
///
/// # Errors
/// If there is no CUDA storage of the dtype, the device's memory does not suffice, or one of those of `read`.
pub(crate) fn upload_tensor_from(
    dtype: DType,
    shape: &[usize],
    device: &CudaDevice,
    read: impl Fn(usize, &mut [u8]) -> Result<()> + Sync,
) -> Result<Tensor> {
    let count = shape.iter().product::<usize>();
    let (data, to) = room(dtype, count, device)?;
    let bytes = count * dtype.size_in_bytes();
    // SAFETY: the allocation has room for as many, and is used and freed on the stream.
    unsafe { upload_rows(to, (bytes, 1), device, read)? };
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

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use std::io::Cursor;

    fn bytes(count: usize) -> Vec<u8> {
        (0..count).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    #[test]
    fn every_size_arrives() -> Result<()> {
        let Ok(Device::Cuda(device)) = Device::new_cuda(0) else {
            return Ok(());
        };
        for count in [0, 1, LEAST - 1, LEAST, PART, PART + 1, 5 * PART + 13] {
            let sent = bytes(count);
            let tensor = upload_tensor(&sent, DType::U8, &[count], &device)?;
            assert!(tensor.to_vec1::<u8>()? == sent, "{count} bytes");
            let read = upload_from(&mut Cursor::new(&sent), count, &device)?;
            assert!(read.to_vec1::<u8>()? == sent, "{count} bytes of a file");
            let read = |first: usize, out: &mut [u8]| {
                out.copy_from_slice(&sent[first..][..out.len()]);
                Ok(())
            };
            let read = upload_tensor_from(DType::U8, &[count], &device, read)?;
            assert!(
                read.to_vec1::<u8>()? == sent,
                "{count} bytes by all threads"
            );
        }
        // Rows wider than a part.
        let (rows, width) = (2, PART + 5);
        let (data, to) = room(DType::U8, rows * width, &device)?;
        let fill = |first: usize, out: &mut [u8]| {
            for (row, out) in (first..).zip(out.chunks_exact_mut(width)) {
                out.fill(row as u8 + 1);
            }
            Ok(())
        };
        // SAFETY: there is room for them.
        unsafe { upload_rows(to, (rows, width), &device, fill)? };
        let sent = tensor(data, &[rows, width]).to_vec2::<u8>()?;
        assert!(
            (1..)
                .zip(sent)
                .all(|(row, sent)| sent.iter().all(|b| *b == row))
        );
        Ok(())
    }

    #[test]
    fn what_fails_leaves_the_next_upload_as_it_is() -> Result<()> {
        let Ok(Device::Cuda(device)) = Device::new_cuda(0) else {
            return Ok(());
        };
        let sent = bytes(3 * PART);
        let short = upload_from(&mut Cursor::new(&sent[..2 * PART]), 3 * PART, &device);
        assert!(short.is_err());
        let short = |first: usize, out: &mut [u8]| match first + out.len() > 2 * PART {
            true => Err(Error::Msg("cut short".to_owned())),
            false => Ok(()),
        };
        assert!(upload_tensor_from(DType::U8, &[3 * PART], &device, short).is_err());
        let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let (_data, to) = room(DType::U8, PART, &device).unwrap();
            // SAFETY: there is room for them.
            unsafe { upload_rows(to, (PART, 1), &device, |_, _| panic!("on purpose")) }
        }));
        assert!(panics.is_err());
        let both = std::thread::scope(|scope| {
            let one = || -> Result<bool> {
                let Device::Cuda(device) = Device::new_cuda(0)? else {
                    return Ok(false);
                };
                let tensor = upload_tensor(&sent, DType::U8, &[sent.len()], &device)?;
                Ok(tensor.to_vec1::<u8>()? == sent)
            };
            [scope.spawn(one), scope.spawn(one)].map(|thread| thread.join().unwrap())
        });
        for right in both {
            assert!(right?);
        }
        Ok(())
    }
}
