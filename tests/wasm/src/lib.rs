//! What the library has to do in WebAssembly. `run.py` calls `run`.

mod models;
mod ops;

use candle_core::Result;
use candle_fused::cpu::{pool, simd};

#[link(wasm_import_module = "host")]
unsafe extern "C" {
    fn say(text: *const u8, len: usize);
}

fn tell(text: &str) {
    // SAFETY: the host reads `len` bytes of memory and keeps nothing.
    unsafe { say(text.as_ptr(), text.len()) }
}

type Test = (&'static str, fn() -> Result<()>);

const TESTS: &[Test] = &[
    ("one thread on the scalar path", one_thread),
    ("weights in every scheme", ops::schemes),
    ("weights in every block type", ops::blocks),
    ("attention", ops::attention),
    ("sampling", ops::sampling),
    ("memory that there is not", ops::too_much_memory),
    ("models against Hugging Face", models::goldens),
    ("tokens", models::tokens),
    ("a quantized model", models::quantized),
    ("a quantized file", models::quantized_file),
];

/// Runs every test; how many have failed.
#[unsafe(no_mangle)]
pub extern "C" fn run() -> u32 {
    std::panic::set_hook(Box::new(|info| tell(&info.to_string())));
    let mut failed = 0;
    for (name, test) in TESTS {
        match test() {
            Ok(()) => tell(&format!("test {name} ... ok")),
            Err(e) => {
                tell(&format!("test {name} ... FAILED: {e}"));
                failed += 1;
            }
        }
    }
    tell(&format!(
        "{} passed, {failed} failed",
        TESTS.len() as u32 - failed
    ));
    failed
}

/// There are no threads to start, whoever asks for them.
fn one_thread() -> Result<()> {
    pool::set_threads(4);
    assert_eq!(pool::threads(), 1);
    assert_eq!(simd::level().name(), "scalar");
    let mut rows = vec![0; 100];
    pool::for_rows(&mut rows, 1, 1, |first, part| {
        for (i, row) in part.iter_mut().enumerate() {
            *row = first + i;
        }
    });
    assert!(rows.iter().enumerate().all(|(i, row)| i == *row));
    Ok(())
}
