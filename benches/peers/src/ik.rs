//! ik_llama.cpp's own benchmark program (`llama-bench`), which is started anew for each value.

use crate::args::{FAR, Measure, NEAR, PREFILL};
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::process::Command;

/// How it holds weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Setting {
    /// As the file has them.
    Stored,
    /// Repacked when they are loaded (`-rtr 1`).
    Repacked,
}

impl Setting {
    pub const ALL: [Self; 2] = [Self::Stored, Self::Repacked];

    pub fn name(self) -> &'static str {
        match self {
            Self::Stored => "ik_llama.cpp",
            Self::Repacked => "ik_llama.cpp, repacked",
        }
    }

    fn flag(self) -> &'static str {
        match self {
            Self::Stored => "0",
            Self::Repacked => "1",
        }
    }
}

/// A built `llama-bench`, and what it is given.
pub struct Bench<'a> {
    pub program: &'a Path,
    pub model: &'a Path,
    pub threads: u32,
    /// Tokens of a decode measurement.
    pub steps: usize,
}

/// What the program says of a test, as far as it is read here.
#[derive(Deserialize)]
struct Test {
    /// Tokens a second.
    avg_ts: f64,
}

impl Bench<'_> {
    /// One value, in tokens a second; none of what the program does not measure.
    ///
    /// # Errors
    /// If the program cannot be started, fails, or answers something else than one test as JSON.
    pub fn once(&self, setting: Setting, measure: Measure) -> Result<Option<f64>> {
        let behind = |held: usize| ["-gp".to_owned(), format!("{held},{}", self.steps)];
        let test = match measure {
            Measure::Decode64 => behind(NEAR),
            Measure::Decode512 => behind(PREFILL),
            Measure::Decode2000 => behind(FAR),
            Measure::Prefill512 => ["-p".to_owned(), PREFILL.to_string()],
            Measure::FirstToken | Measure::PeakMemory => return Ok(None),
        };
        let mut command = Command::new(self.program);
        command.arg("-m").arg(self.model).args(["-o", "json"]);
        command.args(["-r", "1", "-n", "0", "-rtr", setting.flag()]);
        command.args(["-t", &self.threads.to_string()]);
        // Where a prompt is measured, "-p" says which.
        if measure != Measure::Prefill512 {
            command.args(["-p", "0"]);
        }
        let name = || format!("--ik {}", self.program.display());
        let output = command.args(test).output().with_context(name)?;
        ensure!(
            output.status.success(),
            "{}: {}: {}",
            name(),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
        let tests: Vec<Test> = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("{}: expected a list of tests as JSON", name()))?;
        let [Test { avg_ts }] = tests[..] else {
            anyhow::bail!("{}: {} tests, expected one", name(), tests.len());
        };
        Ok(Some(avg_ts))
    }
}
