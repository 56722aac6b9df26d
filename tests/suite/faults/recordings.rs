//! Recordings of one thread while others do what may break one.

use super::{PROMPTS, alone, cuda, gpu, is_alone, options, tiny};
use candle_core::cuda_backend::cudarc::driver::result;
use candle_core::{DType, Device, Result, Tensor};
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long threads disturb each other, of each kind.
const TIME: Duration = Duration::from_secs(5);

/// Makes generations, each of which records, until the time is over; gives how many.
fn record(model: usize) -> Result<usize> {
    let tiny = &tiny::all()?[model];
    let subject = tiny.load(&gpu())?;
    let answer = || -> Result<Vec<u32>> {
        let mut generation = subject.generation(&options(64))?;
        let mut tokens = vec![generation.extend(0, PROMPTS[0])?];
        for _ in 0..4 {
            tokens.extend(generation.step()?.into_iter().flatten());
        }
        match generation.graph_refusal() {
            Some(why) => candle_core::bail!("{}: without a graph: {why}", tiny.name),
            None => Ok(tokens),
        }
    };
    let expected = answer()?;
    let (start, mut count) = (Instant::now(), 0);
    while start.elapsed() < TIME {
        assert_eq!(answer()?, expected, "{}", tiny.name);
        count += 1;
    }
    Ok(count)
}

/// What another thread does, again and again.
type Disturbance = fn(&Device) -> std::result::Result<(), String>;

fn memory(device: &Device) -> std::result::Result<(), String> {
    let stream = cuda(device).cuda_stream();
    let bytes = stream.alloc_zeros::<u8>(64 << 20);
    // SAFETY: freed at once.
    let pinned = unsafe { result::malloc_host(1 << 20, 0).and_then(|at| result::free_host(at)) };
    bytes
        .map(drop)
        .and(pinned)
        .and_then(|()| stream.synchronize())
        .map_err(|e| e.to_string())
}

/// Loads candle's kernels with a new handle, which it drops.
fn handles(_: &Device) -> std::result::Result<(), String> {
    let use_one = || {
        let device = Device::new_cuda(0)?;
        let x = Tensor::ones((8, 8), DType::F32, &device)?;
        x.matmul(&x.t()?)?.exp()?.to_vec2::<f32>()
    };
    use_one().map(drop).map_err(|e| e.to_string())
}

fn context(_: &Device) -> std::result::Result<(), String> {
    std::thread::sleep(Duration::from_millis(20));
    result::ctx::synchronize().map_err(|e| e.to_string())
}

/// Two threads record while another one disturbs them.
fn recordings_stand(name: &str, disturb: Disturbance, allowed: fn(&String) -> bool) -> Result<()> {
    let over = AtomicBool::new(false);
    let (counts, told) = std::thread::scope(|scope| {
        let recorders = [0, 1].map(|model| scope.spawn(move || record(model)));
        let other = scope.spawn(|| {
            let device = gpu();
            let (mut times, mut errors, mut panics) = (0, Vec::new(), 0);
            while !over.load(Ordering::Relaxed) {
                times += 1;
                match catch_unwind(AssertUnwindSafe(|| disturb(&device))) {
                    Ok(Ok(())) => (),
                    Ok(Err(error)) => errors.push(error),
                    Err(_) => panics += 1,
                }
            }
            errors.sort();
            let count = errors.len();
            errors.dedup();
            (times, count, errors, panics)
        });
        let counts = recorders.map(|thread| thread.join());
        over.store(true, Ordering::Relaxed);
        let told = other.join().expect("no panic");
        (counts.map(|count| count.expect("no panic")), told)
    });
    let (times, count, errors, panics) = told;
    println!(
        "faults: {name}, {times} times: {count} errors {errors:?}, {panics} panics, beside recordings {counts:?}"
    );
    for recorded in counts {
        assert!(recorded? > 10, "{name}");
    }
    assert!(errors.iter().all(allowed) && panics == 0, "{name}");
    Ok(())
}

#[test]
#[ignore = "needs the GPU for itself"]
fn recordings_stand_allocations() -> Result<()> {
    recordings_stand("memory", memory, |_| false)
}

#[test]
#[ignore = "needs the GPU for itself"]
fn recordings_stand_handles() -> Result<()> {
    recordings_stand("handles made and dropped", handles, |_| false)
}

/// This crate does not wait for a whole context. candle does where a device handle is dropped, with cuBLAS's, and a
/// program may, but driver 580.159.04 does not stand it while another thread records: every millisecond, its own cuCtxSynchronize soon reads a null pointer. Here it
/// is called less often; a process that it ends all the same is told, and another one tried. Whatever else goes
/// wrong fails.
#[test]
#[ignore = "needs the GPU for itself"]
fn recordings_stand_waiting_for_the_context() -> Result<()> {
    const TEST: &str = "faults::recordings::recordings_stand_waiting_for_the_context";
    const SEGMENTATION_FAULT: i32 = 11;
    if is_alone() {
        // The driver refuses to wait for a context in which a thread records, and nothing else.
        let refused = |error: &String| error.contains("STREAM_CAPTURE");
        return recordings_stand("waiting for the context", context, refused);
    }
    for _ in 0..3 {
        let status = alone(TEST, |_| ())?;
        if status.success() {
            return Ok(());
        }
        let signal = status.signal();
        println!("faults: waiting for the context ended the process, signal {signal:?}");
        assert_eq!(signal, Some(SEGMENTATION_FAULT), "{status}");
    }
    candle_core::bail!("three processes out of three were ended")
}
