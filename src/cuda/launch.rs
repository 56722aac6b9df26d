//! Launching a kernel.

use super::gpu::Gpu;
use super::module::Module;
use super::{nvtx, profile};
use candle_core::cuda_backend::cudarc::driver::{DriverError, sys};
use candle_core::{CudaDevice, Result, bail};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// Kernels launched by this process through [`Launcher::run`].
static LAUNCHES: AtomicU64 = AtomicU64::new(0);

/// What those had to read and write at least.
static MOVED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Where the ops of this thread launch instead of on candle's stream, while they are recorded.
    static RECORDING: Cell<Option<Launcher>> = const { Cell::new(None) };
}

/// Whether this thread's launches are being recorded.
pub(super) fn is_recording() -> bool {
    RECORDING.get().is_some()
}

/// Has the ops of this thread launch through `launcher`, or on candle's stream again.
pub(super) fn record_with(launcher: Option<Launcher>) {
    RECORDING.set(launcher);
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    /// Blocks along x, y and z.
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub shared: u32,
    /// Blocks along x that form a cluster; 1 without clusters.
    pub cluster: u32,
}

impl Grid {
    /// Blocks along x.
    pub fn line(blocks: u32, threads: u32) -> Self {
        Self::new([blocks, 1, 1], threads, 0)
    }

    /// Without clusters.
    pub fn new(blocks: [u32; 3], threads: u32, shared: u32) -> Self {
        Self {
            blocks,
            threads,
            shared,
            cluster: 1,
        }
    }
}

/// The kernel in front of a launch in a dependent chain. Its blocks still hold SMs when those of the launch are
/// distributed, which go where they find room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Preceding {
    /// Not known, or one of the same kind.
    Any,
    /// One of another kind.
    Other,
    /// Attention of a decode step. Some SMs have a block of it, others none: if those have room for two blocks of the next
    /// kernel, they get two and the others none, and so on from kernel to kernel.
    Attention,
}

impl Preceding {
    /// Whether an SM is to have one block (CTA) of a kernel only.
    pub fn is_another(self) -> bool {
        self != Self::Any
    }
}

/// Where kernels go: a GPU, a stream of it, and whether each launch may begin before the one in
/// front of it is complete.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launcher {
    pub gpu: &'static Gpu,
    pub stream: sys::CUstream,
    /// Programmatic dependent launch; only where every kernel of the chain waits as
    /// `kernels/common/base.cuh` asks, and none writes what a later one reads before it waits.
    pub dependent: bool,
    /// The kernel in front.
    pub preceding: Preceding,
    /// Whether kernels are chosen for a CUDA graph, in which a launch costs the host nothing. Also set for the same kernels
    /// outside of one, so that both give the same bits.
    pub recorded: bool,
    /// What the next launch has to read and write at least, for the profile.
    pub bytes: u64,
}

impl Launcher {
    /// On candle's stream of `device`, in order, or where a recording takes them.
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let gpu = Gpu::of(device)?;
        gpu.bind()?;
        let recording = RECORDING.get().filter(|l| std::ptr::eq(l.gpu, gpu));
        if let Some(recording) = recording {
            return Ok(recording);
        }
        Ok(Self {
            gpu,
            stream: device.cuda_stream().cu_stream(),
            dependent: false,
            preceding: Preceding::Any,
            recorded: false,
            bytes: 0,
        })
    }

    /// The same launcher for a launch that reads and writes `bytes` at least.
    pub fn moving(self, bytes: u64) -> Self {
        Self { bytes, ..self }
    }

    /// The same launcher for a launch behind such a kernel.
    pub fn behind(self, preceding: Preceding) -> Self {
        Self { preceding, ..self }
    }

    /// The same launcher for a launch whose kernel waits for the preceding one, of which it may read nothing before: it
    /// may begin while that runs. Launches that are timed one by one are apart.
    pub fn overlapping(self) -> Self {
        Self {
            dependent: self.dependent || !profile::is_capturing(),
            ..self
        }
    }

    /// The same launcher for a kernel whose weights a preceding kernel writes: it would read them before its PDL wait, so it
    /// begins when those in front of it have ended.
    pub fn in_order(self) -> Self {
        Self {
            dependent: false,
            ..self
        }
    }

    /// Has a library launch what `launch` asks it for, on this stream.
    pub fn library(
        &self,
        names: (&'static str, &'static str),
        launch: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        LAUNCHES.fetch_add(1, Ordering::Relaxed);
        MOVED.fetch_add(self.bytes, Ordering::Relaxed);
        self.profiled(names, launch)
    }

    /// Launches through `launch`, between events if launches are being captured.
    fn profiled(
        &self,
        names: (&'static str, &'static str),
        launch: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let _named = nvtx::range(names.1);
        // What is recorded into a graph does not run yet.
        if self.dependent || !profile::is_capturing() {
            return launch();
        }
        profile::between_events(self.stream, names, self.bytes, launch)
    }

    /// Fails if the GPU has no such grid, or no so much shared memory.
    fn check(&self, kernel: &str, static_shared: u32, grid: &Grid) -> Result<()> {
        if grid.blocks[1].max(grid.blocks[2]) > 65535 || grid.blocks[0] > i32::MAX as u32 {
            bail!(
                "cuda: a grid of {:?} blocks is past what a GPU takes",
                grid.blocks
            );
        }
        if u64::from(static_shared) + u64::from(grid.shared) > self.gpu.shared.into() {
            bail!(
                "cuda: kernel `{kernel}` with {static_shared} bytes of static and {} of dynamic shared memory, \
                 expected at most {} in all on this GPU",
                grid.shared,
                self.gpu.shared
            );
        }
        Ok(())
    }

    /// Launches kernel `index` of `module` with `params` as its one argument.
    ///
    /// # Safety
    /// `P` has the layout of the kernel's parameter, and every address in it is valid for what the
    /// kernel does there until the stream has passed the launch.
    pub unsafe fn run<P: Copy>(
        &self,
        module: &Module,
        index: usize,
        grid: Grid,
        params: &P,
    ) -> Result<()> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        let function = module.kernel(self.gpu, index)?;
        self.check(module.names(index).1, function.static_shared, &grid)?;
        let mut attributes = [sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_IGNORE,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { pad: [0; 64] },
        }; 2];
        let mut count = 0;
        if self.dependent && self.gpu.arch >= 90 {
            attributes[count].id =
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count]
                .value
                .programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        if grid.cluster > 1 {
            attributes[count].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[count].value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
                x: grid.cluster,
                y: 1,
                z: 1,
            };
            count += 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: grid.blocks[0],
            gridDimY: grid.blocks[1],
            gridDimZ: grid.blocks[2],
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared,
            hStream: self.stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as u32,
        };
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast()];
        LAUNCHES.fetch_add(1, Ordering::Relaxed);
        MOVED.fetch_add(self.bytes, Ordering::Relaxed);
        self.profiled(module.names(index), || {
            // SAFETY: the configuration and the argument live through the call, which copies them;
            // the rest is the caller's.
            let result = unsafe {
                sys::cuLaunchKernelEx(
                    &config,
                    function.handle,
                    arguments.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            };
            match result {
                sys::CUresult::CUDA_SUCCESS => Ok(()),
                error => bail!(
                    "cuda: kernel `{}`: {}",
                    module.names(index).1,
                    DriverError(error)
                ),
            }
        })
    }
}

/// Kernels launched so far by the fused ops of this process; a replayed graph counts none.
///
/// ```no_run
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::{cuda, ops};
/// let device = Device::new_cuda(0)?;
/// let x = Tensor::zeros((1, 4096), DType::BF16, &device)?;
/// let before = cuda::launches();
/// ops::residual_add(&x, &[&x])?;
/// assert_eq!(cuda::launches() - before, 1);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn launches() -> u64 {
    LAUNCHES.load(Ordering::Relaxed)
}

/// Bytes that the launches so far had to read and write at least, where somebody counted.
pub(crate) fn moved() -> u64 {
    MOVED.load(Ordering::Relaxed)
}
