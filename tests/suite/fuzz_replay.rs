//! The corpus of the fuzz targets, replayed with stable Rust.

use crate::allocations::held;
use crate::fuzz::TARGETS;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What a target may hold beside a multiple of its input.
const ROOM: usize = 64 << 20;

/// The folder of a target.
pub fn corpus(target: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/fuzz");
    folder.join(target)
}

#[test]
fn the_corpus_is_answered_at_once_and_in_little_memory() {
    for (target, body) in TARGETS {
        let folder = fs::read_dir(corpus(target)).unwrap_or_else(|e| panic!("{target}: {e}"));
        let mut files = 0;
        for entry in folder {
            let path = entry.expect("an entry").path();
            let data = fs::read(&path).expect("a file");
            let start = Instant::now();
            let ((), _, most) = held(|| body(&data));
            let shown = path.display();
            assert!(most <= ROOM + 4 * data.len(), "{shown}: {most} bytes");
            assert!(start.elapsed() < Duration::from_secs(5), "{shown}: slow");
            files += 1;
        }
        assert!(files > 0, "{target} has no corpus");
    }
}
