//! Calls of ops as a graph: what their kernels take without what the host adds between them.

use super::gpu::Gpu;
use super::graph::Graph;
use super::launch::{Launcher, is_recording, record_with};
use super::pool::with_context;
use candle_core::cuda_backend::cudarc::cublas;
use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::{CudaDevice, Error, Result, bail};
use std::sync::{Mutex, PoisonError};

/// Held while a recording's pool is a device's current one: two that took turns would each put back the
/// other's, which may be gone by then.
static CURRENT: Mutex<()> = Mutex::new(());

/// What a body launched, recorded as one CUDA graph with programmatic dependent launches, as
/// `generation` replays a step, and what the body returned.
///
/// This is for measuring: launched one by one, kernels of a few microseconds wait for the host and
/// for each other, which they do not where a model decodes.
///
/// ```no_run
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::cuda::Replay;
/// use candle_fused::ops::{Epilogue, linear, rms_norm};
/// let device = Device::new_cuda(0)?;
/// let x = Tensor::zeros((1, 4096), DType::BF16, &device)?;
/// let norm = Tensor::ones(4096, DType::BF16, &device)?;
/// let w = Tensor::zeros((4096, 4096), DType::BF16, &device)?;
/// let body = || linear(&rms_norm(&x, &norm, 1e-5)?, &w, &Epilogue::default());
/// // What is done at the first call is no part of the recording.
/// body()?;
/// // SAFETY: no other thread uses the GPU.
/// let mut replay = unsafe { Replay::record(device.as_cuda_device()?, body)? };
/// // SAFETY: x, the norm and w are alive.
/// unsafe { replay.launch()? };
/// println!("{} launches: {}", replay.kernels(), replay.results());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Replay<T> {
    graph: Graph,
    device: CudaDevice,
    results: T,
    /// The last to go: the graph's tensors lie there.
    _pool: Pool,
}

impl<T> Replay<T> {
    /// Runs `body` once on the host and records its launches on `device` instead of making them:
    /// those of this crate's ops, and candle's products by cuBLAS. What else the body has candle do
    /// happens at once and is no part of the replay, nor is what `ops::sample` copies from the host.
    /// Tensors that ops make have no values before [`Replay::launch`], so the body is not to read them.
    /// Call it once before: what is done at the first call, such as loading kernels, does not belong in
    /// a graph. Recordings of several threads wait for each other.
    ///
    /// # Errors
    /// If the body fails, is recorded within another, or if the driver has no memory pools.
    ///
    /// # Safety
    /// No other thread of the process uses the GPU meanwhile, nor before what it allocated in the
    /// meantime is gone: the recording's memory pool is the device's for as long as the body runs, and
    /// ends with the recording. What the body appends to a cache is not read by a `flash_decoding` of the same body:
    /// its kernels may read keys before those of the calls in front are complete.
    pub unsafe fn record(device: &CudaDevice, body: impl FnOnce() -> Result<T>) -> Result<Self> {
        let gpu = Gpu::of(device)?;
        gpu.bind()?;
        if is_recording() {
            bail!("cuda: a recording within a recording");
        }
        // What is freed on the way stays the graph's, and goes to nobody else.
        let pool = Pool::new(gpu)?;
        let mut results = None;
        let graph = {
            let _one = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
            let _current = pool.make_current()?;
            // Once: no other thread breaks it off, and the body may not be called again.
            Graph::record(gpu, |launcher| {
                let _recording = Recording::begin(device, *launcher)?;
                results = Some(body()?);
                Ok(())
            })
            .map_err(Error::from)?
        };
        match results {
            Some(results) => Ok(Self {
                graph,
                device: device.clone(),
                results,
                _pool: pool,
            }),
            None => bail!("cuda: the body was not recorded"),
        }
    }

    /// Launches everything on candle's stream, after what is there.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Safety
    /// Every tensor that the body read and did not make is still alive where it was, and stays so
    /// until the stream has passed.
    pub unsafe fn launch(&mut self) -> Result<()> {
        // SAFETY: what the body made lies in the pool; the rest is the caller's.
        unsafe { self.graph.launch(self.device.cuda_stream().cu_stream()) }
    }

    /// What the body returned.
    pub fn results(&self) -> &T {
        &self.results
    }

    /// Launches of one replay.
    pub fn kernels(&self) -> usize {
        self.graph.kernels()
    }
}

/// Sends this thread's launches to a recording, and back to candle's stream at its end.
struct Recording<'a>(&'a CudaDevice);

impl<'a> Recording<'a> {
    fn begin(device: &'a CudaDevice, launcher: Launcher) -> Result<Self> {
        let recording = Self(device);
        recording.library_launches_on(launcher.stream)?;
        record_with(Some(launcher));
        Ok(recording)
    }

    fn library_launches_on(&self, stream: sys::CUstream) -> Result<()> {
        // SAFETY: the handle is candle's, the stream exists while the library launches there.
        unsafe { cublas::result::set_stream(*self.0.cublas_handle().handle(), stream.cast()) }
            .map_err(Error::wrap)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        record_with(None);
        // A refusal shows at the next product.
        let _ = self.library_launches_on(self.0.cuda_stream().cu_stream());
    }
}

/// A memory pool beside the device's own.
#[derive(Debug)]
struct Pool {
    pool: sys::CUmemoryPool,
    gpu: &'static Gpu,
}

// SAFETY: the driver lets any thread use a pool.
unsafe impl Send for Pool {}

impl Pool {
    fn new(gpu: &'static Gpu) -> Result<Self> {
        // SAFETY: zeros are a value of every field; the driver asks for them in those not set here.
        let mut props: sys::CUmemPoolProps = unsafe { std::mem::zeroed() };
        props.allocType = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        props.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        // SAFETY: a location is its kind and then its number, which later versions call otherwise.
        unsafe {
            let id = (&raw mut props.location).cast::<i32>().add(1);
            id.write(gpu.ordinal as i32);
        }
        let mut made = Self {
            pool: std::ptr::null_mut(),
            gpu,
        };
        // SAFETY: both live through the call.
        with_context(unsafe { sys::cuMemPoolCreate(&mut made.pool, &props) })?;
        // What was freed stays mapped: the graph writes there.
        let mut all = u64::MAX;
        let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: the attribute is a u64.
        with_context(unsafe {
            sys::cuMemPoolSetAttribute(made.pool, threshold, (&raw mut all).cast())
        })?;
        Ok(made)
    }

    /// Has tensors allocated here until what is returned is dropped.
    fn make_current(&self) -> Result<Current> {
        let device = self.gpu.ordinal as sys::CUdevice;
        let mut before = std::ptr::null_mut();
        // SAFETY: the device is in use, and the pool lives longer than it is the current one.
        unsafe {
            with_context(sys::cuDeviceGetMemPool(&mut before, device))?;
            with_context(sys::cuDeviceSetMemPool(device, self.pool))?;
        }
        Ok(Current { before, device })
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if !self.pool.is_null() && self.gpu.bind_to_free() {
            // SAFETY: nobody allocates there any more; the driver keeps what is still allocated.
            let _ = unsafe { sys::cuMemPoolDestroy(self.pool) };
        }
    }
}

/// A device whose tensors are allocated in another pool than `before`.
struct Current {
    before: sys::CUmemoryPool,
    device: sys::CUdevice,
}

impl Drop for Current {
    fn drop(&mut self) {
        // SAFETY: the pool was the device's.
        let _ = unsafe { sys::cuDeviceSetMemPool(self.device, self.before) };
    }
}
