//! What a call on one thread does to a CUDA graph that another thread records. `cuda::Graph` relies on it.

use super::{cuda, gpu};
use candle_core::cuda_backend::cudarc::driver::{DriverError, result, sys};
use candle_core::{CudaDevice, Device, Result};
use sys::CUstreamCaptureStatus as Status;

type Outcome = std::result::Result<(), DriverError>;

/// A call by its name, and whether a recording elsewhere has to outlive it.
struct Call {
    name: &'static str,
    harmless: bool,
    make: fn(&CudaDevice) -> Outcome,
}

const PTX: &std::ffi::CStr =
    c".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry nothing() { ret; }\n";

fn load() -> std::result::Result<sys::CUmodule, DriverError> {
    // SAFETY: the text ends with a zero.
    unsafe { result::module::load_data(PTX.as_ptr().cast()) }
}

const CALLS: &[Call] = &[
    Call {
        name: "memory in the stream's order, made and freed",
        harmless: true,
        make: |device| device.cuda_stream().alloc_zeros::<u8>(1 << 20).map(drop),
    },
    Call {
        name: "waiting for its own stream",
        harmless: true,
        make: |device| device.cuda_stream().synchronize(),
    },
    Call {
        name: "an event, recorded and waited for",
        harmless: true,
        make: |device| device.cuda_stream().record_event(None)?.synchronize(),
    },
    Call {
        name: "page-locked memory, made and freed",
        harmless: true,
        // SAFETY: freed at once.
        make: |_| unsafe { result::free_host(result::malloc_host(4096, 0)?) },
    },
    Call {
        name: "cuMemAlloc",
        harmless: true,
        // SAFETY: nobody uses what is never freed.
        make: |_| unsafe { result::malloc_sync(4096) }.map(drop),
    },
    Call {
        name: "loading a module",
        harmless: true,
        make: |_| load().map(drop),
    },
    Call {
        name: "a new handle of candle's",
        harmless: true,
        make: |_| {
            std::mem::forget(Device::new_cuda(0).expect("a GPU"));
            Ok(())
        },
    },
    Call {
        name: "cuMemAlloc and cuMemFree",
        harmless: false,
        // SAFETY: freed at once.
        make: |_| unsafe { result::free_sync(result::malloc_sync(4096)?) },
    },
    Call {
        name: "unloading a module",
        harmless: false,
        // SAFETY: nobody has a function of it.
        make: |_| unsafe { result::module::unload(load()?) },
    },
    Call {
        name: "dropping a handle of candle's",
        harmless: false,
        make: |_| {
            drop(Device::new_cuda(0).expect("a GPU"));
            Ok(())
        },
    },
    Call {
        name: "waiting for the legacy stream",
        harmless: false,
        // SAFETY: there always is one.
        make: |_| unsafe { result::stream::synchronize(std::ptr::null_mut()) },
    },
    Call {
        name: "waiting for the context",
        harmless: false,
        make: |_| result::ctx::synchronize(),
    },
];

/// What the call gives on another thread, and the state that it leaves a recording of this one in.
fn beside(call: &Call, device: &Device) -> Result<(String, Status)> {
    let told = |e: DriverError| candle_core::Error::wrap(e);
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking).map_err(told)?;
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream has just been made.
    unsafe { result::stream::begin_capture(stream, mode) }.map_err(told)?;
    let (make, device) = (call.make, device.clone());
    let other = std::thread::spawn(move || {
        let device = cuda(&device);
        device.cuda_stream().context().bind_to_thread()?;
        make(device)
    });
    let outcome = match other.join() {
        Ok(Ok(())) => "success".to_owned(),
        Ok(Err(error)) => format!("{:?}", error.0),
        Err(_) => "a panic".to_owned(),
    };
    // SAFETY: the stream is alive, and its capture is ended whatever became of it.
    let status = unsafe {
        let status = result::stream::is_capturing(stream);
        if let Ok(graph) = result::stream::end_capture(stream)
            && !graph.is_null()
        {
            result::graph::destroy(graph).map_err(told)?;
        }
        result::stream::destroy(stream).map_err(told)?;
        status
    };
    Ok((outcome, status.map_err(told)?))
}

#[test]
#[ignore = "needs the GPU for itself"]
fn what_other_threads_do_to_a_recording() -> Result<()> {
    let device = gpu();
    let mut broken = Vec::new();
    for call in CALLS {
        let (outcome, status) = beside(call, &device)?;
        println!(
            "faults: beside a recording, {}: {outcome}, {status:?}",
            call.name
        );
        let whole = status == Status::CU_STREAM_CAPTURE_STATUS_ACTIVE && outcome == "success";
        if call.harmless && !whole {
            broken.push(call.name);
        }
        device.synchronize()?;
    }
    assert!(broken.is_empty(), "{broken:?}");
    Ok(())
}
