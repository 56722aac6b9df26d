//! What cuBLASLt loads at its first choice of an algorithm, ahead of the first product.

use super::cublaslt::{Gemm, choose};
use crate::cuda::{Gpu, product_dtype};
use candle_core::{CudaDevice, DType};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

thread_local! {
    /// Of each thread that loads a model.
    static WAIT: Wait = const { Wait };
}

/// Threads that were begun, each for a GPU and a dtype, and not waited for.
static BEGUN: Mutex<Vec<Begun>> = Mutex::new(Vec::new());

struct Begun {
    ordinal: usize,
    dtype: DType,
    thread: Option<JoinHandle<()>>,
}

/// Has the library choose algorithms for products of rows in `dtype`, on a thread of its own. Its first choice for a pair
/// of dtypes takes 40 to 140 ms, which the first prompt would wait for; a model is still being loaded meanwhile.
pub(crate) fn choose_early(device: &CudaDevice, dtype: DType) {
    // Without a GPU's properties there is no product either, and that says so.
    let Ok(gpu) = Gpu::of(device) else { return };
    WAIT.with(|_| ());
    let mut begun = BEGUN.lock().unwrap_or_else(PoisonError::into_inner);
    if begun
        .iter()
        .any(|b| (b.ordinal, b.dtype) == (gpu.ordinal, dtype))
    {
        return;
    }
    let work = move || {
        if gpu.bind().is_ok() {
            // Outputs in the dtype of the operands, and the f32 sums that a gated activation reads. Rows of f32 are
            // multiplied by quantized weights in a 16-bit dtype.
            let pairs = match dtype {
                DType::F32 => [product_dtype(gpu, dtype), dtype],
                _ => [dtype; 2],
            };
            for (dtype, out_dtype) in pairs.into_iter().zip([dtype, DType::F32]) {
                let gemm = Gemm::of_shape([512, 1024, 1024], [dtype, out_dtype]);
                // What fails here fails again where it is wanted.
                let _ = choose(gpu.ordinal, &gemm);
            }
        }
    };
    let thread = std::thread::Builder::new().name("cublaslt".to_owned());
    begun.push(Begun {
        ordinal: gpu.ordinal,
        dtype,
        thread: thread.spawn(work).ok(),
    });
}

/// Waits for all threads when the thread that has it ends. A program that ends takes the library down, and no thread may be
/// in it then. It could not wait in a function for `atexit`: what the library itself asks to be called at the end of the
/// program is called before that, since it asks later. A thread's destructors come first. Nothing waits where another thread
/// ends the program meanwhile.
struct Wait;

impl Drop for Wait {
    fn drop(&mut self) {
        let mut begun = BEGUN.lock().unwrap_or_else(PoisonError::into_inner);
        for thread in begun.iter_mut().filter_map(|b| b.thread.take()) {
            // A panic there has been reported, and is of no consequence here.
            let _ = thread.join();
        }
    }
}
