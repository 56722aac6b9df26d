//! What a decode step, and loading a model, ask of the allocator.

use crate::gguf_file;
use crate::golden::Golden;
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::cpu::packed::{PackedMatrix, Q8Activations};
use candle_fused::cpu::{pool, simd};
use candle_fused::generation::{Generation, Options};
use candle_fused::models::{CausalLm, qwen3};
use candle_fused::quant::{BlockFormat, Quantization, Recipe};
use candle_nn::VarBuilder;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fmt::Debug;

/// The system's allocator, counting what each thread asks for and gives back.
struct Counting;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
    /// Bytes that are held, less those that other threads asked for, and the most that were.
    static HELD: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

// SAFETY: every call is handed to the system's allocator as it is; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: the caller's.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        hold(-(layout.size() as isize));
        // SAFETY: the caller's.
        unsafe { System.dealloc(block, layout) }
    }
}

/// Threads that are about to end have no counter any more.
fn count(bytes: isize) {
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
    hold(bytes);
}

fn hold(bytes: isize) {
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = MOST.try_with(|most| most.set(most.get().max(held.get())));
    });
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What `body` asked for on this thread, which works on every job of the pool as the others do.
pub fn allocations(body: impl FnOnce()) -> usize {
    let before = COUNT.get();
    body();
    COUNT.get() - before
}

/// What `body` gives, the bytes that it leaves behind and the most that it held at a time.
pub fn held<T>(body: impl FnOnce() -> T) -> (T, usize, usize) {
    let before = HELD.get();
    MOST.set(before);
    let value = body();
    let [left, most] = [HELD.get(), MOST.get()].map(|bytes| (bytes - before).max(0) as usize);
    (value, left, most)
}

/// The bytes of each packed matrix that `Debug` finds in a model. They lie in memory that is mapped, which
/// no allocator counts.
fn packed(model: &impl Debug) -> Result<Vec<usize>> {
    let text = format!("{model:?}");
    let size = |said: &str| {
        let (format, shape) = said.split_once(", ")?;
        let (rows, cols) = shape.split_once(')')?.0.split_once(" x ")?;
        let (rows, cols) = (rows.parse().ok()?, cols.parse().ok()?);
        Some(size(format.parse().ok()?, rows, cols))
    };
    let said = text.split("PackedMatrix(").skip(1);
    said.map(|said| size(said).expect("a format and a shape"))
        .collect()
}

/// The bytes of a packed matrix.
fn size(quantization: Quantization, rows: usize, cols: usize) -> Result<usize> {
    let matrix = match (quantization, quantization.scheme()) {
        (Quantization::Gguf(dtype), _) => {
            let blocks = vec![0; rows * BlockFormat::of(dtype)?.row_bytes(cols)?];
            PackedMatrix::pack(dtype, rows, cols, &blocks)?
        }
        (_, scheme) => {
            let zeros = Tensor::zeros((rows, cols), DType::F32, &Device::Cpu)?;
            PackedMatrix::quantize(&zeros, scheme.expect("one of ours"))?
        }
    };
    Ok(matrix.size_in_bytes())
}

/// A checkpoint that gives each tensor when it is asked for, as a mapped file does.
#[test]
fn quantizing_while_loading_holds_little_but_the_quantized_model() -> Result<()> {
    let (hidden, inner, layers) = (256, 1024, 12);
    let mut config: serde_json::Value = Golden::open("qwen3_qknorm")?.config();
    for (key, value) in [
        ("hidden_size", hidden),
        ("intermediate_size", inner),
        ("num_hidden_layers", layers),
    ] {
        config[key] = value.into();
    }
    let config: qwen3::Config = serde_json::from_value(config).expect("a configuration");
    for recipe in [
        Recipe::new(Quantization::Int8),
        Recipe::new(Quantization::Int8).with_balance(),
        Recipe::new("int4-g64-z".parse()?),
        Recipe::new(Quantization::Gguf(GgmlDType::Q4_0)),
    ] {
        let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
        let load = || CausalLm::<qwen3::Config>::new_quantized(&config, vb, &recipe, Fusion::all());
        let (model, left, most) = held(load);
        let matrices = packed(&model?)?;
        // Q, k, v and the output, gates and what they gate, and down, each of them once.
        assert_eq!(matrices.len(), 7 * layers, "{recipe:?}");
        let packed: usize = matrices.iter().sum();
        let largest = 4 * hidden * inner;
        assert!(left < largest, "{recipe:?}: {left} bytes beside them");
        assert!(
            left + packed > layers * hidden * inner,
            "{recipe:?}: {left} and {packed} bytes"
        );
        // The largest matrix as it is read, turned into f32, and its codes.
        assert!(
            most <= left + 4 * largest,
            "{recipe:?}: {most} bytes, of which {left} stay"
        );
        assert!(
            left + packed <= layers * 3 * largest / 2,
            "{recipe:?}: {left} and {packed} bytes, as if it were dense"
        );
    }
    Ok(())
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
        positions: Some(64),
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
