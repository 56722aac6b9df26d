//! CUDA graphs: a chain of launches recorded once and replayed as a whole.

use super::gpu::Gpu;
use super::launch::Launcher;
use candle_core::cuda_backend::cudarc::driver::{DriverError, result, sys};
use candle_core::{CudaDevice, Result, bail};

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

impl Graph {
    /// Records what `body` launches. The chain uses programmatic dependent launch where the GPU
    /// has it, so every kernel has to keep its rules (`kernels/common/base.cuh`).
    ///
    /// # Errors
    /// If a launch or the capture fails; the device can be used as before.
    pub fn capture(gpu: &'static Gpu, body: impl FnOnce(&Launcher) -> Result<()>) -> Result<Self> {
        gpu.bind()?;
        let stream = Stream::new()?;
        let launcher = Launcher {
            gpu,
            stream: stream.0,
            dependent: true,
            one_cta_per_sm: false,
            bytes: 0,
        };
        // Relaxed: what other threads do meanwhile, such as allocating, is no part of the capture
        // and does not break it.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream has just been made and is not capturing.
        told("begin", unsafe {
            result::stream::begin_capture(stream.0, mode)
        })?;
        let recorded = body(&launcher);
        // SAFETY: the capture begun above is ended whatever came of the body.
        let graph = ended(recorded, unsafe { result::stream::end_capture(stream.0) })?;
        let mut kernels = 0;
        // SAFETY: the graph is valid; with no array the call gives the number of nodes. The
        // executable graph is a copy, so the graph is destroyed in any case.
        let exec = unsafe {
            sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut kernels);
            let exec = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            exec
        };
        Ok(Self {
            exec: told("instantiation", exec)?,
            gpu,
            kernels,
        })
    }

    /// Launches of one replay.
    pub fn kernels(&self) -> usize {
        self.kernels
    }

    /// Replays the chain on `stream`, behind what is there.
    ///
    /// # Safety
    /// Every address that was recorded is still valid, and stays so until the stream has passed.
    pub unsafe fn launch(&mut self, stream: sys::CUstream) -> Result<()> {
        self.gpu.bind()?;
        // SAFETY: the executable graph is valid; the rest is the caller's.
        told("launch", unsafe {
            result::graph::launch(self.exec, stream)
        })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
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
/// If the body fails, or does what cannot be recorded, such as reading a result.
pub fn count_launches(device: &CudaDevice, body: impl FnOnce() -> Result<()>) -> Result<usize> {
    Gpu::of(device)?.bind()?;
    let stream = device.cuda_stream();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream is candle's, alive through this call.
    told("begin", unsafe {
        result::stream::begin_capture(stream.cu_stream(), mode)
    })?;
    let recorded = body();
    // SAFETY: the capture begun above is ended whatever came of the body.
    let graph = ended(recorded, unsafe {
        result::stream::end_capture(stream.cu_stream())
    })?;
    let mut count = 0;
    // SAFETY: the graph is valid; the first call gives the number of nodes, the second fills an
    // array of that many.
    let kernels = unsafe {
        sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &mut count);
        let mut nodes = vec![std::ptr::null_mut(); count];
        sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count);
        let kernels = nodes.iter().filter(|node| is_kernel(**node)).count();
        let _ = result::graph::destroy(graph);
        kernels
    };
    Ok(kernels)
}

/// # Safety
/// The node is one of a graph that exists.
unsafe fn is_kernel(node: sys::CUgraphNode) -> bool {
    let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    // SAFETY: the caller's.
    let result = unsafe { sys::cuGraphNodeGetType(node, &mut kind) };
    result == sys::CUresult::CUDA_SUCCESS && kind == sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL
}

/// The graph of a capture, destroyed if what was recorded failed on the way.
fn ended(
    recorded: Result<()>,
    graph: std::result::Result<sys::CUgraph, DriverError>,
) -> Result<sys::CUgraph> {
    match (recorded, graph) {
        (Ok(()), Ok(graph)) if graph.is_null() => {
            bail!("cuda: the graph capture was given up by the driver")
        }
        (Ok(()), graph) => told("end", graph),
        (Err(error), graph) => {
            if let Ok(graph) = graph
                && !graph.is_null()
            {
                // SAFETY: nobody else has it.
                let _ = unsafe { result::graph::destroy(graph) };
            }
            Err(error)
        }
    }
}

/// A stream to record on; candle's own may be in use.
struct Stream(sys::CUstream);

impl Stream {
    fn new() -> Result<Self> {
        let kind = result::stream::StreamKind::NonBlocking;
        Ok(Self(told("stream", result::stream::create(kind))?))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made in `new` and used by nobody else.
        let _ = unsafe { result::stream::destroy(self.0) };
    }
}

fn told<T>(what: &str, result: std::result::Result<T, DriverError>) -> Result<T> {
    match result {
        Ok(value) => Ok(value),
        Err(e) => bail!("cuda: the graph's {what} failed: {e}"),
    }
}
