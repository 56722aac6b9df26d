//! The structure of the source: which file names which, and how long they are.

mod examples;
mod kernels;
mod lengths;
mod modules;
mod source;

use modules::{Arrows, Crate};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The root of the library, and those of all crates whose files have to be free of circles.
const LIBRARY: &str = "src/lib.rs";
const ROOTS: [&str; 4] = [
    LIBRARY,
    "benches/suite/main.rs",
    "benches/drop_in/src/main.rs",
    "benches/peers/src/main.rs",
];

/// The top-level modules of src in layers, the lowest first; those of one layer do not use each other.
const LAYERS: &[&[&str]] = &[
    &["pool"],
    &["quant", "trace"],
    &["fusion"],
    &["cpu", "cuda"],
    &["ops"],
    &["nn", "flash_attn"],
    &["models", "flash_attn_v3"],
    &["generation"],
    &["serving"],
];

/// The top-level module of a file: `src/cpu/packed/mod.rs` is in `cpu`, `src/trace.rs` in `trace`. The benchmarks
/// are one: `benches/suite/plots/mod.rs` is in `suite`.
fn top_module(path: &Path) -> &str {
    let name = path.components().nth(1).expect("a file in a folder");
    let name = Path::new(name.as_os_str()).file_stem().expect("a name");
    name.to_str().expect("a name in UTF-8")
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

/// Files that are no module of their crate.
fn is_outside(name: &str) -> bool {
    let tests = [
        "tests.rs",
        "src/cpu/packed/wide.rs",
        "src/cpu/tiles/emulated.rs",
    ];
    let is_test = tests.iter().any(|end| name.ends_with(end));
    // Of the build script, and taken in by `include!`.
    let others = ["src/cuda/abi/header.rs", "drop_in/src/program.rs"];
    is_test || others.iter().any(|other| name.ends_with(other))
}

#[test]
fn arrows_are_found() {
    let mut arrows = Arrows::new();
    for root in ROOTS {
        let sources = Crate::read(root);
        let (files, folder) = (sources.files(), Path::new(root).parent());
        let folder = folder.and_then(Path::to_str).expect("a folder");
        for path in source::files(folder, &[".rs"]) {
            let name = path.to_string_lossy();
            assert!(files.contains(&*path) != is_outside(&name), "{name}");
        }
        arrows.extend(sources.arrows());
    }
    for (from, to) in [
        // By an import, an alias of a module, a re-export, and the face that lib.rs gives to quant.
        ("src/cpu/packed/matmul.rs", "src/cpu/packed/registry.rs"),
        ("src/ops/linear/tile.rs", "src/cpu/dense/mod.rs"),
        ("src/nn/projection.rs", "src/ops/linear/mod.rs"),
        ("src/models/quantized/file.rs", "src/quant/scheme.rs"),
        ("benches/suite/export.rs", "benches/suite/figures/op.rs"),
        ("benches/suite/ops.rs", "benches/suite/timing.rs"),
        ("benches/peers/src/serve.rs", "benches/peers/src/llama.rs"),
    ] {
        let found = arrows
            .get(Path::new(from))
            .is_some_and(|targets| targets.contains(Path::new(to)));
        assert!(found, "{from} -> {to}");
    }
}

#[test]
fn modules_use_only_lower_layers() {
    let mut upward = Vec::new();
    for (from, targets) in Crate::read(LIBRARY).arrows() {
        for to in targets {
            let (a, b) = (top_module(&from), top_module(&to));
            if a == "lib" || a == b {
                continue;
            }
            assert!(layer(a).is_some(), "LAYERS lacks src/{a}");
            if layer(b).is_none_or(|b| layer(a) <= Some(b)) {
                upward.push(format!("{} -> {}", from.display(), to.display()));
            }
        }
    }
    assert!(upward.is_empty(), "upward:\n{}", upward.join("\n"));
}

/// Whether `file` is a part of the module `module`. A module and what it declares are one thing: its parts
/// use what stands beside their declarations, as an op's CUDA side uses the op's struct.
fn is_part(file: &Path, module: &Path) -> bool {
    match module.file_name().and_then(|name| name.to_str()) {
        Some("mod.rs") => file.starts_with(module.parent().expect("a folder")),
        _ => file.starts_with(module.with_extension("")),
    }
}

/// Files of its top-level module that can be reached from `start` by arrows, other than from a part to its module.
fn reached(arrows: &Arrows, start: &Path) -> BTreeSet<PathBuf> {
    let (mut found, mut open) = (BTreeSet::new(), vec![start.to_owned()]);
    while let Some(from) = open.pop() {
        for to in arrows.get(&from).into_iter().flatten() {
            let counts = top_module(to) == top_module(start) && !is_part(&from, to);
            if counts && found.insert(to.clone()) {
                open.push(to.clone());
            }
        }
    }
    found
}

/// The circles of a crate, with the arrows that close them.
fn circles(sources: &Crate) -> String {
    let arrows = sources.arrows();
    let mut circles = BTreeSet::new();
    for file in sources.files() {
        let mut circle = reached(&arrows, file);
        if circle.contains(file) {
            circle.retain(|other| reached(&arrows, other).contains(file));
            circles.insert(circle);
        }
    }
    let mut lines = String::new();
    for circle in &circles {
        lines += "\ncircle\n";
        for file in circle {
            for to in arrows[file].intersection(circle) {
                lines += &format!("  {} -> {}\n", file.display(), to.display());
            }
        }
    }
    lines
}

#[test]
fn no_files_of_a_module_use_each_other_in_a_circle() {
    let circles: String = ROOTS.map(|root| circles(&Crate::read(root))).concat();
    assert!(circles.is_empty(), "{circles}");
}
