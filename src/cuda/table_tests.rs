//! What the tests of the tables have in common: GPUs, lines of text, and files that are held to what the tables give.

use super::GpuSpec;
use candle_core::Result;
use std::path::Path;

/// Set to write the files anew that the tests compare with.
const UPDATE: &str = "CANDLE_FUSED_WRITE_TABLES";

/// Each with its name.
pub(crate) const GPUS: [(&str, GpuSpec); 7] = [
    ("T4", gpu(75, 40, 64 << 10)),
    ("A100", gpu(80, 108, 163 << 10)),
    ("RTX 3090", gpu(86, 82, 99 << 10)),
    ("Orin", gpu(87, 16, 163 << 10)),
    ("L4", gpu(89, 58, 99 << 10)),
    ("H100", gpu(90, 132, 227 << 10)),
    ("H200", gpu(90, 132, 227 << 10)),
];

/// Compute capability, multiprocessors, shared memory of a block.
const fn gpu(capability: u32, sms: u32, shared: u32) -> GpuSpec {
    GpuSpec {
        capability,
        arch: capability,
        sms,
        shared,
    }
}

/// The GPU of this name.
pub(crate) fn gpu_named(name: &str) -> GpuSpec {
    let mut gpus = GPUS.into_iter();
    let found = gpus.find(|(other, _)| *other == name);
    found.expect("a GPU of the list").1
}

/// As in `1 gemv_dense, 2-8 gemv_dense_mma, 9-4096 gemm_dense_cublaslt`.
pub(crate) fn runs(
    numbers: impl Iterator<Item = usize>,
    choice: impl Fn(usize) -> Result<String>,
) -> Result<String> {
    let mut runs: Vec<(usize, usize, String)> = Vec::new();
    for number in numbers {
        let chosen = choice(number)?;
        match runs.last_mut() {
            Some((_, last, same)) if *same == chosen => *last = number,
            _ => runs.push((number, number, chosen)),
        }
    }
    let texts = runs
        .iter()
        .map(|(first, last, chosen)| match first == last {
            true => format!("{first} {chosen}"),
            false => format!("{first}-{last} {chosen}"),
        });
    Ok(texts.collect::<Vec<_>>().join(", "))
}

/// Adds `name` to the line of the same text, or a line.
pub(crate) fn gather(lines: &mut Vec<(Vec<String>, String)>, name: String, text: String) {
    match lines.iter_mut().find(|(_, same)| *same == text) {
        Some((names, _)) => names.push(name),
        None => lines.push((vec![name], text)),
    }
}

/// As in `8.0 or newer`.
pub(crate) fn architectures(arch: [u32; 2]) -> String {
    match arch {
        [0, u32::MAX] => "any".to_owned(),
        [least, u32::MAX] => format!("{} or newer", capability(least)),
        [_, most] => capability(most),
    }
}

/// As in `8.0`.
pub(crate) fn capability(arch: u32) -> String {
    format!("{}.{}", arch / 10, arch % 10)
}

/// What `text` is held to, below the package's root.
pub(crate) fn assert_current(path: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, text).expect("the file can be written");
    }
    let held = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        held == text,
        "{} is not what the table of kernels gives; if the change is meant, run this test with {UPDATE}=1",
        path.display()
    );
}
