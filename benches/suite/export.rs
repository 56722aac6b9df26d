//! All figures of a run, as `--export` writes them. `benches/README.md` describes the fields.

use crate::cases::Work;
use crate::layers::Layer;
use crate::limits::{Bound, Limits};
use crate::machine::Machine;
use crate::models::ModelRun;
use crate::nvml::Clocks;
use crate::ops::count_floors;
use crate::scaling::Curve;
use crate::stats::Times;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Raised when a field changes its meaning or goes; new fields do not raise it.
pub const SCHEMA: u32 = 1;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Export {
    pub schema: u32,
    pub machine: Machine,
    pub limits: Limits,
    #[serde(default)]
    pub clocks: Vec<Clocks>,
    #[serde(default)]
    pub ops: Vec<OpRun>,
    #[serde(default)]
    pub skipped: Vec<Skipped>,
    #[serde(default)]
    pub models: Vec<ModelRun>,
    #[serde(default)]
    pub layers: Vec<Layer>,
    #[serde(default)]
    pub scaling: Vec<Curve>,
    #[serde(default)]
    pub sweep: Vec<OpRun>,
    #[serde(default)]
    pub tune: Vec<Tuned>,
}

/// An op on one shape.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OpRun {
    pub name: String,
    pub op: String,
    pub model: String,
    pub part: String,
    pub rows: usize,
    pub context: usize,
    pub format: String,
    pub work: Work,
    pub sides: Vec<SideRun>,
    /// The least seconds that the machine could take, and why.
    pub floor: f64,
    pub bound: Bound,
}

/// One contender of an op.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SideRun {
    pub name: String,
    /// Seconds of a call.
    pub times: Times,
    /// Seconds of the host to queue a call, on a GPU.
    pub host: Option<f64>,
    /// Seconds of a call in a CUDA graph.
    #[serde(default)]
    pub graph: Option<Times>,
    /// Bytes that a call holds beyond its inputs, the result included.
    pub memory: u64,
}

/// The kernels of the table of `linear` on CUDA, on one product.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Tuned {
    pub name: String,
    pub model: String,
    pub part: String,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub format: String,
    /// The dtype of x.
    pub x: String,
    pub work: Work,
    /// The kernel that the table chooses.
    pub chosen: String,
    /// Seconds of the host to queue a call of that.
    pub host: Option<f64>,
    pub kernels: Vec<KernelRun>,
}

/// A kernel of that table: its times, or why it does not take the product.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct KernelRun {
    pub name: String,
    /// Entry, grid and parameters.
    pub plan: Option<String>,
    /// Seconds of a call.
    pub times: Option<Times>,
    /// Seconds of a call in a CUDA graph.
    pub graph: Option<Times>,
    pub refusal: Option<String>,
}

/// What was left out, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Skipped {
    pub name: String,
    pub why: String,
}

impl OpRun {
    pub fn side(&self, name: &str) -> Option<&SideRun> {
        self.sides.iter().find(|side| side.name == name)
    }

    /// The op's own time.
    pub fn fused(&self) -> f64 {
        let fused = self.side(crate::cases::FUSED);
        fused.map_or(f64::NAN, |side| side.times.median)
    }

    /// How many times faster the op is than a contender.
    pub fn speedup_over(&self, name: &str) -> Option<f64> {
        Some(self.side(name)?.times.median / self.fused())
    }

    /// The same with both in graphs of their own, as a model decodes.
    pub fn speedup_in_graph_over(&self, name: &str) -> Option<f64> {
        let fused = self.side(crate::cases::FUSED)?.graph?;
        Some(self.side(name)?.graph?.median / fused.median)
    }

    /// Seconds of a contender as a model decodes: in a graph where there is one.
    pub fn seconds(&self, name: &str) -> Option<f64> {
        let side = self.side(name)?;
        Some(side.graph.unwrap_or(side.times).median)
    }

    /// How many times faster the op is than what it replaces.
    pub fn speedup(&self) -> Option<f64> {
        self.speedup_over(crate::cases::CANDLE)
    }
}

impl Export {
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let what = || format!("{} is no export of this suite", path.display());
        let value: serde_json::Value = serde_json::from_str(&text).with_context(what)?;
        let schema = value["schema"].as_u64().with_context(what)?;
        ensure!(
            schema == u64::from(SCHEMA),
            "{} has schema {schema}, this suite reads {SCHEMA}",
            path.display()
        );
        serde_json::from_value(value).with_context(what)
    }

    /// Runs of one machine as one.
    pub fn join(paths: &[PathBuf]) -> Result<Self> {
        let mut runs = paths.iter().map(|path| Self::read(path));
        let mut all = runs.next().context("no export is named")??;
        for run in runs {
            let run = run?;
            ensure!(
                run.machine.is_like(&all.machine),
                "{} and {} are different machines",
                run.machine.describe(),
                all.machine.describe()
            );
            all.limits = all.limits.better(&run.limits);
            all.machine.command = format!("{}; {}", all.machine.command, run.machine.command);
            all.clocks.extend(run.clocks);
            all.ops.extend(run.ops);
            all.skipped.extend(run.skipped);
            all.models.extend(run.models);
            all.layers.extend(run.layers);
            all.scaling.extend(run.scaling);
            all.sweep.extend(run.sweep);
            all.tune.extend(run.tune);
        }
        count_floors(&mut all.ops, &all.limits);
        count_floors(&mut all.sweep, &all.limits);
        for layer in &mut all.layers {
            layer.take_tokens(&all.models);
        }
        Ok(all)
    }

    pub fn write(&self, path: &Path) -> Result<()> {
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}
