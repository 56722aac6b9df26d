//! The folders of kernels/: which file includes which, and what kernels are called.

use super::source;
use std::path::{Path, PathBuf};

/// The folders from the ground up; those of one floor include nothing of each other.
const FLOORS: &[&[&str]] = &[
    &["common"],
    &["formats"],
    &["linear", "pointwise"],
    &["attention"],
];

/// What the build script writes from src/cuda/abi.
const WRITTEN: &str = "abi";

fn floor(path: &Path) -> Option<usize> {
    let folder = path.iter().next()?.to_str()?;
    FLOORS.iter().position(|folders| folders.contains(&folder))
}

/// The files below kernels/, relative to it.
fn kernels(endings: &[&str]) -> Vec<PathBuf> {
    source::files("kernels", endings)
        .iter()
        .map(|path| path.strip_prefix("kernels").expect("below").to_owned())
        .collect()
}

fn includes(path: &Path) -> Vec<PathBuf> {
    source::read(&Path::new("kernels").join(path))
        .lines()
        .filter_map(|line| {
            let name = line.trim().strip_prefix("#include \"")?;
            Some(name.strip_suffix('"').expect("a closing quote").into())
        })
        .collect()
}

#[test]
fn kernels_include_only_folders_below() {
    let (files, mut wrong, mut count) = (kernels(&[".cu", ".cuh"]), Vec::new(), 0);
    for from in &files {
        assert!(
            floor(from).is_some(),
            "FLOORS lacks kernels/{}",
            from.display()
        );
        for to in includes(from) {
            count += 1;
            if to.starts_with(WRITTEN) {
                continue;
            }
            let beside = from.parent() == to.parent();
            if !files.contains(&to) || !(beside || floor(&to) < floor(from)) {
                wrong.push(format!("{} -> {}", from.display(), to.display()));
            }
        }
    }
    assert!(count > 50, "{count} includes found");
    assert!(
        wrong.is_empty(),
        "not below, or not there:\n{}",
        wrong.join("\n")
    );
}
