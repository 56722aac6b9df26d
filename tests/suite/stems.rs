//! Every op has the same stem everywhere: its room, its tests, its benchmark, its public function.

use std::collections::BTreeSet;
use std::path::Path;

fn read(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The public modules of src/ops: one for each op.
fn stems() -> BTreeSet<String> {
    let stems: BTreeSet<_> = read("src/ops/mod.rs")
        .lines()
        .filter_map(|line| {
            line.strip_prefix("pub mod ")?
                .strip_suffix(';')
                .map(str::to_owned)
        })
        .collect();
    assert!(stems.len() > 5, "{stems:?}");
    stems
}

#[test]
fn every_op_has_its_tests() {
    let declared = read("tests/suite/main.rs");
    for stem in stems() {
        assert!(
            declared.contains(&format!("mod {stem};")),
            "tests/suite/main.rs lacks `mod {stem};`"
        );
        let tests = read(&format!("tests/suite/{stem}.rs"));
        assert!(
            tests.contains("#[test]"),
            "tests/suite/{stem}.rs tests nothing"
        );
        assert!(
            tests.contains(&format!("{stem}(")),
            "tests/suite/{stem}.rs never calls {stem}"
        );
    }
}

#[test]
fn every_op_has_its_benchmark() {
    let benches = read("benches/suite/cases/mod.rs");
    for stem in stems() {
        assert!(
            benches.contains(&format!("\"{stem}\"")),
            "benches/suite/cases/mod.rs has no case \"{stem}\""
        );
    }
}

#[test]
fn every_op_has_a_plain_reference() {
    for stem in stems() {
        let file = format!("src/ops/{stem}.rs");
        let exists = Path::new(env!("CARGO_MANIFEST_DIR")).join(&file).exists();
        let room = if exists {
            read(&file)
        } else {
            read(&format!("src/ops/{stem}/mod.rs"))
        };
        assert!(
            room.contains("pub fn reference(")
                || room.contains("reference;")
                || room.contains("reference}"),
            "{stem} has no reference()"
        );
        assert!(
            room.contains(&format!("pub fn {stem}(")),
            "{stem} has no public function of its name"
        );
    }
}
