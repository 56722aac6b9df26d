//! The folders of kernels/: which file includes which, and what kernels are called.

use super::source;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The folders in layers, the lowest first; those of one layer include nothing of each other.
const LAYERS: &[&[&str]] = &[
    &["common"],
    &["formats"],
    &["linear", "pointwise"],
    &["attention"],
];

/// What the build script writes from src/cuda/abi.
const WRITTEN: &str = "abi";

fn layer(path: &Path) -> Option<usize> {
    let folder = path.iter().next()?.to_str()?;
    LAYERS.iter().position(|folders| folders.contains(&folder))
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
            layer(from).is_some(),
            "LAYERS lacks kernels/{}",
            from.display()
        );
        for to in includes(from) {
            count += 1;
            if to.starts_with(WRITTEN) {
                continue;
            }
            let beside = from.parent() == to.parent();
            if !files.contains(&to) || !(beside || layer(&to) < layer(from)) {
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

/// The name of a file and those of its kernels, as `Module::new` has them in `text`.
fn modules(text: &str) -> Vec<(String, Vec<String>)> {
    text.split("Module::new(")
        .skip(1)
        .filter_map(|module| {
            let (list, _) = module.split_once("]")?;
            let mut words = list.split('"').skip(1).step_by(2).map(str::to_owned);
            let (stem, fatbin) = (words.next()?, words.next()?);
            assert_eq!(stem, fatbin, "a module and its fatbin");
            Some((stem, words.collect()))
        })
        .collect()
}

/// A profile shows a kernel's name, which leads to its file; scripts/sanitize.sh finds ours by it too.
#[test]
fn kernels_have_the_names_of_their_files() {
    let mut named = BTreeSet::new();
    for path in source::files("src", &[".rs"]) {
        for (stem, kernels) in modules(&source::read(&path)) {
            let mut ours = kernels.iter();
            // Those of attention have the names of its ops.
            let found = ours.all(|kernel| {
                kernel.contains(&stem)
                    || ["flash_", "decoding_"]
                        .iter()
                        .any(|op| kernel.starts_with(op))
            });
            assert!(found && !kernels.is_empty(), "{stem}: {kernels:?}");
            named.insert(stem);
        }
    }
    let stems = kernels(&[".cu"]);
    let stems = stems.iter().filter_map(|path| path.file_stem()?.to_str());
    assert_eq!(named, stems.map(str::to_owned).collect::<BTreeSet<_>>());
}
