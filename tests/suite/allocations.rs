//! What a decode step asks of the allocator.

use crate::gguf_file;
use crate::golden::Golden;
use candle_core::Result;
use candle_core::quantized::GgmlDType;
use candle_fused::Fusion;
use candle_fused::cpu::packed::{PackedMatrix, Q8Activations};
use candle_fused::cpu::{pool, simd};
use candle_fused::generation::{Generation, Options};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, counting what each thread asks for.
struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is handed to the system's allocator as it is; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(block, layout) }
    }
}

/// Threads that are about to end have no counter any more.
fn count() {
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What `body` asked for on this thread, which works on every job of the pool as the others do.
fn allocations(body: impl FnOnce()) -> usize {
    let before = COUNT.get();
    body();
    COUNT.get() - before
}

#[test]
fn a_product_of_a_packed_matrix_allocates_nothing() -> Result<()> {
    let (rows, cols) = (512, 256);
    let blocks = vec![1u8; rows * cols / 32 * 18];
    let matrix = PackedMatrix::pack(GgmlDType::Q4_0, rows, cols, &blocks)?;
    let (x, mut out) = (vec![0.5; cols], vec![0.; rows]);
    let level = simd::level();
    let mut activations = Q8Activations::quantize(level, &x, 1, cols)?;
    let mut step = || {
        activations
            .refill(level, &x, 1, cols)
            .expect("its own width");
        matrix
            .forward(level, &activations, &mut out)
            .expect("its own shape");
    };
    step();
    assert_eq!(allocations(step), 0);
    Ok(())
}

#[test]
fn a_job_of_the_pool_allocates_nothing() {
    let job = || pool::run(16, |i| assert!(std::hint::black_box(i) < 16));
    job();
    assert_eq!(allocations(job), 0);
}

/// Candle's tensors are allocated: an op's output, its shape, strides and storage. What the ops
/// themselves need is kept from step to step, so that their number does not grow with the rest.
#[test]
fn a_step_allocates_little_but_its_tensors() -> Result<()> {
    let golden = Golden::open("llama_gqa_tied")?;
    let model = gguf_file::load(&gguf_file::bytes(&golden, GgmlDType::Q4_0)?, Fusion::all())?;
    let options = Options {
        positions: 64,
        ..Default::default()
    };
    let mut generation = Generation::new(&model, &options)?;
    generation.extend(0, &[1, 5, 9, 2])?;
    generation.step()?;
    let layers = golden.config::<serde_json::Value>()["num_hidden_layers"]
        .as_u64()
        .expect("a number") as usize;
    let mut token = Vec::new();
    let counted = allocations(|| token = generation.step().expect("there is room"));
    assert_eq!(token.len(), 1);
    // Eight ops a layer and the views between them, each a shape, strides, storage and tensor.
    assert!(
        counted <= 100 * layers,
        "{counted} allocations in {layers} layers"
    );
    Ok(())
}
