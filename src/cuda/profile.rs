//! What each kernel took.
//!
//! Off by default; while it is off a launch pays one thread-local read. While it is on, events
//! around each launch tell its time on the GPU. An event costs about a microsecond itself, so short
//! kernels look longer than they are in an undisturbed chain.

use super::gpu::Gpu;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, DriverError, result, sys};
use candle_core::{CudaDevice, Error, Result};
use std::cell::RefCell;

/// One launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// The file under `kernels/`, or the library, as in `cublasLt`.
    pub stem: &'static str,
    /// The kernel's name.
    pub kernel: &'static str,
    /// Bytes that it has to read and write at least; 0 where nobody counted.
    pub bytes: u64,
    /// When it began, in seconds after the first.
    pub start: f64,
    /// Seconds on the GPU.
    pub seconds: f64,
}

thread_local! {
    static RECORDS: RefCell<Option<Vec<Record>>> = const { RefCell::new(None) };
}

/// A launch between two events.
struct Record {
    stem: &'static str,
    kernel: &'static str,
    bytes: u64,
    events: [Event; 2],
}

/// Runs `body` and gives what it returns with the launches that this thread made meanwhile on
/// candle's stream of `device`.
///
/// # Errors
/// If the events cannot be made or read.
///
/// ```no_run
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::cuda::profile;
/// use candle_fused::ops::rms_norm;
/// let device = Device::new_cuda(0)?;
/// let x = Tensor::zeros((64, 4096), DType::BF16, &device)?;
/// let norm = Tensor::ones(4096, DType::BF16, &device)?;
/// let (_, launches) = profile::capture(device.as_cuda_device()?, || rms_norm(&x, &norm, 1e-5))?;
/// for launch in launches {
///     let rate = launch.bytes as f64 / launch.seconds / 1e9;
///     println!("{} {:.1} us, {rate:.0} GB/s", launch.kernel, launch.seconds * 1e6);
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn capture<T>(
    device: &CudaDevice,
    body: impl FnOnce() -> Result<T>,
) -> Result<(T, Vec<Launch>)> {
    Gpu::of(device)?.bind()?;
    // The GPU is kept busy until the first launches are queued: it would wait for the host between
    // short kernels otherwise, and the events would count that.
    let _busy = copies(device, HEAD_START)?;
    let outer = Outer(RECORDS.replace(Some(Vec::new())));
    let value = body();
    let records = RECORDS.take().unwrap_or_default();
    drop(outer);
    let value = value?;
    device.cuda_stream().synchronize().map_err(Error::wrap)?;
    let launches = match records.first() {
        None => Vec::new(),
        Some(first) => records
            .iter()
            .map(|record| {
                Ok(Launch {
                    stem: record.stem,
                    kernel: record.kernel,
                    bytes: record.bytes,
                    start: record.events[0].since(&first.events[0])?,
                    seconds: record.events[1].since(&record.events[0])?,
                })
            })
            .collect::<Result<_>>()?,
    };
    Ok((value, launches))
}

/// What is captured around a capture, which goes on behind it, also where its body panics.
struct Outer(Option<Vec<Record>>);

impl Drop for Outer {
    fn drop(&mut self) {
        RECORDS.set(self.0.take());
    }
}

/// Whether launches of this thread are being captured.
pub(crate) fn is_capturing() -> bool {
    RECORDS.with_borrow(Option::is_some)
}

/// Launches on `stream` through `launch`, between events that the capture keeps.
pub(super) fn between_events(
    stream: sys::CUstream,
    (stem, kernel): (&'static str, &'static str),
    bytes: u64,
    launch: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let begin = Event::record(stream)?;
    launch()?;
    let end = Event::record(stream)?;
    RECORDS.with_borrow_mut(|records| {
        if let Some(records) = records {
            records.push(Record {
                stem,
                kernel,
                bytes,
                events: [begin, end],
            });
        }
    });
    Ok(())
}

/// A point on a stream, with its time.
pub(crate) struct Event(sys::CUevent);

impl Event {
    /// The point behind everything on `stream`.
    pub fn record(stream: sys::CUstream) -> Result<Self> {
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
        let event = Self(result::event::create(flags).map_err(Error::wrap)?);
        // SAFETY: the event has just been made, the stream is the launcher's.
        unsafe { result::event::record(event.0, stream) }.map_err(Error::wrap)?;
        Ok(event)
    }

    /// Waits until it has passed.
    pub fn wait(&self) -> Result<()> {
        // SAFETY: the event exists.
        unsafe { result::event::synchronize(self.0) }.map_err(Error::wrap)
    }

    /// Seconds from `earlier` to this point, once both have passed.
    pub fn since(&self, earlier: &Event) -> Result<f64> {
        // SAFETY: both events exist.
        let wait = unsafe { result::event::synchronize(self.0) };
        let elapsed = wait.and_then(|()| {
            // SAFETY: as above.
            unsafe { result::event::elapsed(earlier.0, self.0) }
        });
        match elapsed {
            Ok(milliseconds) => Ok(f64::from(milliseconds) * 1e-3),
            Err(DriverError(e)) => candle_core::bail!("cuda: no time between two events: {e:?}"),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: nobody has it any more.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

/// Copies that take about 10 ms on the fastest GPUs.
const HEAD_START: usize = 32;

/// Bytes of a copy.
const COPY: usize = 512 << 20;

/// What the GPU copies from its memory to its memory: bytes read and written per second, the
/// median of several copies of 512 MB.
///
/// # Errors
/// If there is no room for two such buffers.
///
/// ```no_run
/// use candle_core::Device;
/// use candle_fused::cuda::profile::copy_bandwidth;
/// let device = Device::new_cuda(0)?;
/// println!("{:.0} GB/s", copy_bandwidth(device.as_cuda_device()?)? / 1e9);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn copy_bandwidth(device: &CudaDevice) -> Result<f64> {
    Gpu::of(device)?.bind()?;
    let (_buffers, events) = copies(device, 12)?;
    let times = events.windows(2).map(|pair| pair[1].since(&pair[0]));
    let mut times = times.collect::<Result<Vec<f64>>>()?;
    times.sort_by(f64::total_cmp);
    Ok(2. * COPY as f64 / times[times.len() / 2])
}

/// The buffers of `count` copies that are under way, and the points in front of, between and behind
/// them.
fn copies(device: &CudaDevice, count: usize) -> Result<([CudaSlice<u8>; 2], Vec<Event>)> {
    let stream = device.cuda_stream();
    let buffers = [
        device.alloc_zeros::<u8>(COPY)?,
        device.alloc_zeros::<u8>(COPY)?,
    ];
    let [from, to] = [&buffers[0], &buffers[1]].map(|b| b.device_ptr(&stream).0);
    let mut events = vec![Event::record(stream.cu_stream())?];
    for _ in 0..count {
        // SAFETY: both buffers hold that many bytes, and are freed behind the copy on this stream.
        unsafe { result::memcpy_dtod_async(to, from, COPY, stream.cu_stream()) }
            .map_err(Error::wrap)?;
        events.push(Event::record(stream.cu_stream())?);
    }
    Ok((buffers, events))
}
