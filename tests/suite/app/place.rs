//! A folder in which the examples' programs run as a user runs them, cut off from the network.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Mutex;

use tempfile::TempDir;

/// An example, built as this test was. `cargo test` builds examples before it runs tests; with
/// `--test suite` alone it does not.
fn program(name: &str) -> PathBuf {
    static PROGRAMS: Mutex<Option<HashMap<String, PathBuf>>> = Mutex::new(None);
    let mut programs = PROGRAMS.lock().unwrap();
    let programs = programs.get_or_insert_default();
    if let Some(program) = programs.get(name) {
        return program.clone();
    }
    let this = std::env::current_exe().unwrap();
    let folder = this.parent().unwrap().parent().unwrap().join("examples");
    let program = folder.join(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    if !program.exists() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .args(["build", "--example", name])
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        if !cfg!(debug_assertions) {
            cargo.arg("--release");
        }
        assert!(
            cargo.status().unwrap().success(),
            "the example does not build"
        );
    }
    programs.insert(name.to_owned(), program.clone());
    program
}

/// What a program did and said.
pub type Outcome = (Output, String, String);

/// A folder of its own.
pub struct Place(TempDir);

impl Place {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// The example of that name, with the flags of `line`.
    pub fn command(&self, name: &str, line: &str) -> Command {
        let mut command = Command::new(program(name));
        command
            .args(line.split_whitespace())
            .current_dir(self.path())
            .env("HF_HOME", self.path().join("hf"))
            .env("CANDLE_FUSED_CACHE", self.path().join("cache"))
            .env("HF_ENDPOINT", "http://127.0.0.1:9")
            .env("NO_PROXY", "127.0.0.1")
            .env_remove("HF_HUB_CACHE")
            .env_remove("HF_TOKEN")
            .env_remove("RUST_BACKTRACE")
            .stdin(Stdio::null());
        command
    }

    pub fn run(&self, name: &str, line: &str) -> Outcome {
        outcome(self.command(name, line).output().unwrap())
    }
}

/// An output with what it says as text.
pub fn outcome(output: Output) -> Outcome {
    let out = String::from_utf8(output.stdout.clone()).expect("valid UTF-8");
    let err = String::from_utf8(output.stderr.clone()).expect("valid UTF-8");
    (output, out, err)
}

/// Fails unless the program ended with one line that says `wanted`.
pub fn assert_refused((output, out, err): Outcome, wanted: &str) {
    assert_eq!(out, "", "{wanted}");
    assert_failed(&(output, out, err), wanted);
}

/// The same where it may have said something before.
pub fn assert_failed((output, _, err): &Outcome, wanted: &str) {
    assert_eq!(output.status.code(), Some(1), "{wanted}: {err}");
    let errors: Vec<_> = err
        .lines()
        .filter(|line| line.starts_with("error: "))
        .collect();
    assert_eq!(errors.len(), 1, "{err}");
    assert!(errors[0].contains(wanted), "{wanted}: {err}");
    assert_eq!(
        err.lines().last(),
        Some(errors[0]),
        "something follows the error"
    );
}
