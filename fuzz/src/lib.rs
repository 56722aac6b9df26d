//! The targets' bodies, which the tests have too, with what they take from the examples.

use std::sync::Once;

#[path = "../../tests/suite/fuzz/mod.rs"]
mod targets;

/// Parts of `examples/common`: the rest would need what fetches models.
#[allow(dead_code, reason = "the targets use parts of what the examples share")]
#[path = "../../examples/common"]
mod common {
    pub mod architecture;
    pub mod args;
    pub mod chat;
    pub mod gguf_vocab;
    pub mod gpu;
    pub mod quantize;
    pub mod report;
}

/// Runs the body of `target` on one thread, which makes what libFuzzer sees the same at every run.
///
/// # Panics
/// If there is no such target.
pub fn run(target: &str, data: &[u8]) {
    static BEGIN: Once = Once::new();
    BEGIN.call_once(|| {
        candle_fused::cpu::pool::set_threads(1);
        // libFuzzer's hook ends the process at a panic that somebody catches, too.
        drop(std::panic::take_hook());
    });
    let (_, body) = targets::TARGETS
        .iter()
        .find(|(name, _)| *name == target)
        .expect("a target");
    if std::panic::catch_unwind(|| body(data)).is_err() {
        std::process::abort();
    }
}
