//! CUDA graphs: a chain of launches recorded once and replayed as a whole.

use super::gpu::Gpu;
use super::launch::{Launcher, Preceding};
use candle_core::cuda_backend::cudarc::driver::{DriverError, result, sys};
use candle_core::{CudaDevice, Error, Result, bail};
use std::time::Duration;

/// What the driver says of a recording that a call of somebody's has ended.
const INVALIDATED: sys::CUresult = sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;

/// A recorded chain of kernels, ready to be replayed.
#[derive(Debug)]
pub(crate) struct Graph {
    exec: sys::CUgraphExec,
    gpu: &'static Gpu,
    kernels: usize,
}

// SAFETY: the driver lets any thread use an executable graph, one at a time, and launching takes
// `&mut self`.
unsafe impl Send for Graph {}

/// Times that a recording is begun.
const ATTEMPTS: u32 = 8;

/// Why there is no recording.
pub(super) struct Broken {
    error: Error,
    /// Whether the driver gave the recording up, which may be another thread's doing.
    invalidated: bool,
}

impl From<Error> for Broken {
    fn from(error: Error) -> Self {
        Self {
            error,
            invalidated: false,
        }
    }
}

impl From<Broken> for Error {
    fn from(broken: Broken) -> Self {
        broken.error
    }
}

impl Graph {
    /// Records what `body` launches, and begins anew where the driver gives the recording up. The
    /// chain uses programmatic dependent launch where the GPU has it, so every kernel has to keep
    /// its rules (`kernels/common/base.cuh`).
    ///
    /// Nothing that is recorded runs, so that `body` may be called several times. It has to be: a
    /// call that waits for the whole context ends every recording there, whichever thread makes it
    /// and whatever the mode (CUDA C++ Programming Guide, "Prohibited and Unhandled Operations": it
    /// is invalid to synchronize a context while one of its streams captures, and an invalid call
    /// invalidates the captures it concerns). `cublasDestroy` waits for the device, and candle calls
    /// it when a device handle is dropped. No lock of ours reaches that.
    ///
    /// # Errors
    /// If a launch or the capture fails; the device can be used as before.
    pub fn capture(
        gpu: &'static Gpu,
        mut body: impl FnMut(&Launcher) -> Result<()>,
    ) -> Result<Self> {
        let mut attempt = 1;
        loop {
            match Self::record(gpu, &mut body) {
                Err(broken) if broken.invalidated && attempt < ATTEMPTS => {
                    let error = broken.error;
                    tracing::debug!("recording {attempt} of a CUDA graph was broken off: {error}");
                    // Whoever waits in a loop is to be out of step.
                    std::thread::sleep(Duration::from_millis((1 << attempt) - 2));
                    attempt += 1;
                }
                recorded => return Ok(recorded?),
            }
        }
    }

    /// One attempt.
    pub(super) fn record(
        gpu: &'static Gpu,
        body: impl FnOnce(&Launcher) -> Result<()>,
    ) -> std::result::Result<Self, Broken> {
        gpu.bind()?;
        let stream = Stream::new()?;
        let launcher = Launcher {
            gpu,
            stream: stream.0,
            dependent: true,
            preceding: Preceding::Any,
            recorded: true,
            bytes: 0,
        };
        // SAFETY: the stream has just been made, is not capturing, and outlives the capture.
        let capture = unsafe { Capture::begin(stream.0)? };
        let recorded = body(&launcher);
        let template = capture.end(recorded)?;
        let kernels = template.kernels()?;
        // SAFETY: the template is valid; the executable graph is a copy.
        let exec =
            unsafe { result::graph::instantiate(template.0, sys::CUgraphInstantiate_flags(0)) };
        Ok(Self {
            exec: with_context("instantiation", exec)?,
            gpu,
            kernels,
        })
    }

    /// Launches of one replay.
    pub fn kernels(&self) -> usize {
        self.kernels
    }

    /// Replays the chain on `stream`, after what is there.
    ///
    /// # Safety
    /// Every address that was recorded is still valid, and stays so until the stream has passed.
    pub unsafe fn launch(&mut self, stream: sys::CUstream) -> Result<()> {
        self.gpu.bind()?;
        // SAFETY: the executable graph is valid; the rest is the caller's.
        with_context("launch", unsafe {
            result::graph::launch(self.exec, stream)
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.bind_to_free() {
            // SAFETY: nobody has it any more; the driver defers the end of one that is running.
            let _ = unsafe { result::graph::exec_destroy(self.exec) };
        }
    }
}

/// Kernels that `body` launches on candle's stream of `device`, found by recording the stream
/// instead of running it: what the body computes is not there afterwards. Copies and allocations do
/// not count.
///
/// # Errors
/// If the body fails, or does what cannot be recorded, such as reading a result, or if another thread
/// waits for the whole GPU meanwhile, as dropping a device handle does.
///
/// ```no_run
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::cuda::count_launches;
/// use candle_fused::ops::rms_norm;
/// let device = Device::new_cuda(0)?;
/// let x = Tensor::zeros((1, 4096), DType::BF16, &device)?;
/// let norm = Tensor::ones(4096, DType::BF16, &device)?;
/// let body = || rms_norm(&x, &norm, 1e-5).map(drop);
/// // Kernels are loaded at the first call.
/// body()?;
/// assert_eq!(count_launches(device.as_cuda_device()?, body)?, 1);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn count_launches(device: &CudaDevice, body: impl FnOnce() -> Result<()>) -> Result<usize> {
    Gpu::of(device)?.bind()?;
    let stream = device.cuda_stream();
    // SAFETY: the stream is candle's, alive through this call, and captures only here.
    let capture = unsafe { Capture::begin(stream.cu_stream())? };
    let recorded = body();
    capture.end(recorded)?.kernels()
}

/// # Safety
/// The node is one of a graph that exists.
unsafe fn is_kernel(node: sys::CUgraphNode) -> bool {
    let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    // SAFETY: the caller's.
    let result = unsafe { sys::cuGraphNodeGetType(node, &mut kind) };
    result == sys::CUresult::CUDA_SUCCESS && kind == sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL
}

/// A stream that captures, until this ends or is dropped: what unwinds through a body leaves none behind.
struct Capture {
    stream: sys::CUstream,
    open: bool,
}

impl Capture {
    /// # Safety
    /// The stream is not capturing, and lives as long as what is returned.
    unsafe fn begin(stream: sys::CUstream) -> Result<Self> {
        // Relaxed: loading kernels is no part of the capture and does not break it, nor does what
        // other threads allocate, free or load meanwhile (cuThreadExchangeStreamCaptureMode).
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the caller's.
        with_context("begin", unsafe {
            result::stream::begin_capture(stream, mode)
        })?;
        Ok(Self { stream, open: true })
    }

    /// The graph, if what was `recorded` went well.
    fn end(mut self, recorded: Result<()>) -> std::result::Result<Template, Broken> {
        use sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED;
        // SAFETY: the stream is alive.
        let status = unsafe { result::stream::is_capturing(self.stream) };
        let ended = self.close();
        let invalidated = status == Ok(CU_STREAM_CAPTURE_STATUS_INVALIDATED)
            || ended == Err(DriverError(INVALIDATED));
        let broken = |error| Broken { error, invalidated };
        let template = with_context("end", ended.map(Template)).map_err(broken);
        recorded.map_err(broken)?;
        match template? {
            Template(graph) if graph.is_null() => {
                let error = Error::Msg("cuda: the driver gave the graph capture up".to_owned());
                Err(broken(error))
            }
            template => Ok(template),
        }
    }

    fn close(&mut self) -> std::result::Result<sys::CUgraph, DriverError> {
        self.open = false;
        // SAFETY: begun in `begin` and ended once.
        unsafe { result::stream::end_capture(self.stream) }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if self.open {
            let _ = self.close().map(Template);
        }
    }
}

/// A graph as it was recorded; null where the driver gave none.
struct Template(sys::CUgraph);

impl Template {
    fn nodes(&self) -> Result<Vec<sys::CUgraphNode>> {
        let mut count = 0;
        // SAFETY: the graph is valid; without an array the call gives the number of nodes.
        let counted =
            unsafe { sys::cuGraphGetNodes(self.0, std::ptr::null_mut(), &mut count) }.result();
        with_context("nodes", counted)?;
        let mut nodes = vec![std::ptr::null_mut(); count];
        // SAFETY: the array has room for as many.
        let listed =
            unsafe { sys::cuGraphGetNodes(self.0, nodes.as_mut_ptr(), &mut count) }.result();
        with_context("nodes", listed)?;
        Ok(nodes)
    }

    fn kernels(&self) -> Result<usize> {
        let nodes = self.nodes()?;
        // SAFETY: the nodes are those of a graph that exists.
        let kernels = nodes.iter().filter(|node| unsafe { is_kernel(**node) });
        Ok(kernels.count())
    }
}

impl Drop for Template {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: nobody else has it.
            let _ = unsafe { result::graph::destroy(self.0) };
        }
    }
}

/// A stream to record on; candle's own may be in use.
struct Stream(sys::CUstream);

impl Stream {
    fn new() -> Result<Self> {
        let kind = result::stream::StreamKind::NonBlocking;
        Ok(Self(with_context("stream", result::stream::create(kind))?))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made in `new` and used by nobody else.
        let _ = unsafe { result::stream::destroy(self.0) };
    }
}

fn with_context<T>(what: &str, result: std::result::Result<T, DriverError>) -> Result<T> {
    match result {
        Ok(value) => Ok(value),
        Err(e) => bail!("cuda: the graph's {what} failed: {e}"),
    }
}
