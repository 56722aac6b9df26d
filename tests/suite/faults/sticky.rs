//! A kernel that fails takes the GPU from its process for good. Everything after it says so, at once.

use super::{PROMPTS, alone, cuda, gpu, is_alone, options};
use crate::faults::tiny;
use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::nn::KvCache;
use candle_fused::ops::{Epilogue, linear, rms_norm};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// The exit status of a process in which everything went as it should.
const TOLD: i32 = 86;

/// What nothing may take longer than, once the GPU is gone.
const AT_ONCE: Duration = Duration::from_secs(5);

/// One kernel that stops itself, one that writes where nothing is.
const PTX: &str = "
.version 7.0
.target sm_75
.address_size 64
.visible .entry stops() { trap; }
.visible .entry writes(.param .u64 where)
{
    .reg .u64 %rd<3>;
    .reg .u32 %r<2>;
    ld.param.u64 %rd1, [where];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, 1;
    st.global.u32 [%rd2], %r1;
    ret;
}
";

/// Launches one of the two, and does not wait for it.
fn ruin(device: &Device, kernel: &str) -> Result<()> {
    let function = cuda(device).get_or_load_custom_func(kernel, "faults", PTX)?;
    let nowhere = 0x10u64;
    let mut launch = function.builder();
    if kernel == "writes" {
        launch.arg(&nowhere);
    }
    let grid = LaunchConfig {
        grid_dim: (1, 1, 1),
        block_dim: (1, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: the argument is the kernel's; that it fails is what this process is for.
    unsafe { launch.launch(grid) }
        .map(drop)
        .map_err(candle_core::Error::wrap)
}

/// What was tried, and how it went.
#[derive(Default)]
struct Record {
    tried: usize,
    slowest: Duration,
    bad: Vec<String>,
}

impl Record {
    fn add(&mut self, what: &str, took: Duration, well: bool, said: &str) {
        self.tried += 1;
        self.slowest = self.slowest.max(took);
        if !well || took > AT_ONCE {
            self.bad.push(format!("{what} after {took:?}: {said}"));
        }
    }

    /// `call` has to fail at once, without a panic.
    fn fails<T>(&mut self, what: &str, call: impl FnOnce() -> Result<T>) {
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(call));
        let took = start.elapsed();
        let said = match &outcome {
            Ok(Ok(_)) => "nothing",
            Ok(Err(error)) => &error.to_string(),
            Err(_) => "a panic",
        };
        if self.tried == 0 {
            println!("faults: {what} says after {took:?}: {said}");
        }
        self.add(what, took, matches!(outcome, Ok(Err(_))), said);
    }

    /// `value` has to go at once, without a panic.
    fn goes<T>(&mut self, what: &str, value: T) {
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| drop(value)));
        self.add(what, start.elapsed(), outcome.is_ok(), "its drop");
    }

    fn print(&self, what: &str) {
        let (tried, slowest, bad) = (self.tried, self.slowest, &self.bad);
        println!("faults: {what}: {tried}, the slowest {slowest:?}, not as they should: {bad:?}");
    }
}

/// All that is tried behind a kernel that fails; the status of the process.
fn after(kernel: &str) -> Result<i32> {
    let device = gpu();
    let models = tiny::all()?;
    let mut model = models[0].load(&device)?;
    let mut generation = model.generation(&options(64))?;
    generation.extend(0, PROMPTS[0])?;
    generation.step()?;
    let mut other = model.generation(&options(64))?;
    let x = Tensor::ones((4, 64), DType::F32, &device)?;
    let w = Tensor::ones((64, 64), DType::F32, &device)?;
    let norm = Tensor::ones(64, DType::F32, &device)?;
    let (keys, ids) = (
        x.reshape((1, 1, 4, 64))?,
        Tensor::new(PROMPTS[0], &device)?.unsqueeze(0)?,
    );
    let mut cache = KvCache::new(2, 64);
    cache.append(&keys, &keys)?;

    ruin(&device, kernel)?;
    let mut told = Record::default();
    // Tokens that the GPU was ahead with are still right. Then a step waits for one that never comes.
    told.fails("steps", || {
        (0..8).try_for_each(|_| generation.step().map(drop))
    });
    let before = (generation.ids(0).to_vec(), generation.pending(0));
    told.fails("step, again", || generation.step());
    told.fails("extend", || generation.extend(0, PROMPTS[1]));
    told.fails("extend of another", || other.extend(0, PROMPTS[1]));
    told.fails("Generation::new", || {
        model.generation(&options(64)).map(drop)
    });
    told.fails("forward", || model.forward(&ids, 0));
    for (tiny, what) in models.iter().zip(["load", "load in INT4", "load of GGUF"]) {
        told.fails(what, || tiny.load(&device).map(drop));
    }
    told.fails("rms_norm", || rms_norm(&x, &norm, 1e-5));
    told.fails("linear", || linear(&x, &w, &Epilogue::default()));
    told.fails("append", || cache.append(&keys, &keys).map(drop));
    told.fails("candle's matmul", || x.matmul(&w));
    told.fails("reading a tensor", || x.to_vec2::<f32>());
    told.fails("synchronize", || device.synchronize());
    told.print("calls that fail");
    let unchanged = before == (generation.ids(0).to_vec(), generation.pending(0));
    println!("faults: the sequence is as it was: {unchanged}");
    let mut gone = Record::default();
    gone.goes("a generation", generation);
    gone.goes("another generation", other);
    gone.goes("a model", model);
    gone.goes("a cache", cache);
    gone.goes("tensors", (x, w, norm, keys, ids));
    gone.print("drops");
    // Candle's own: where its libraries do not give back their handles, cudarc 0.19 panics.
    let mut candles = Record::default();
    candles.goes("the handle", device);
    candles.print("candle's drops");
    let all = told.bad.is_empty() && gone.bad.is_empty();
    Ok(if all && unchanged { TOLD } else { 3 })
}

fn in_a_process_of_its_own(test: &str, kernel: &str) -> Result<()> {
    if is_alone() {
        // Nothing that this thread still holds is to end it otherwise.
        std::process::exit(match after(kernel) {
            Ok(status) => status,
            Err(error) => {
                println!("faults: {error}");
                4
            }
        });
    }
    let start = Instant::now();
    let status = alone(test, |_| ())?;
    println!("faults: {kernel}: {status} after {:?}", start.elapsed());
    assert_eq!(status.code(), Some(TOLD), "{kernel}");
    Ok(())
}

#[test]
#[ignore = "needs the GPU for itself"]
fn a_kernel_that_stops_is_told_by_all_that_follows() -> Result<()> {
    let test = "faults::sticky::a_kernel_that_stops_is_told_by_all_that_follows";
    in_a_process_of_its_own(test, "stops")
}

#[test]
#[ignore = "needs the GPU for itself"]
fn an_address_that_is_nowhere_is_told_by_all_that_follows() -> Result<()> {
    let test = "faults::sticky::an_address_that_is_nowhere_is_told_by_all_that_follows";
    in_a_process_of_its_own(test, "writes")
}
