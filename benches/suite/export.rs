//! All figures of a run, as `--export` writes them. `benches/README.md` describes the fields.

use crate::figures::{
    Curve, Layer, Limits, ModelRun, OpRun, PrefixRun, ServingRun, Skipped, ThreadRun, Tuned,
    count_bounds, count_floors,
};
use crate::machine::Machine;
use crate::nvml::Clocks;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Raised when a field changes its meaning or goes; new fields do not raise it.
const SCHEMA: u32 = 1;

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
    pub serving: Vec<ServingRun>,
    #[serde(default)]
    pub prefixes: Vec<PrefixRun>,
    #[serde(default)]
    pub threads: Vec<ThreadRun>,
    #[serde(default)]
    pub tune: Vec<Tuned>,
}

impl Export {
    /// That of a run that has yet to measure anything else.
    pub fn new(machine: Machine, limits: Limits) -> Self {
        Self {
            schema: SCHEMA,
            machine,
            limits,
            clocks: Vec::new(),
            ops: Vec::new(),
            skipped: Vec::new(),
            models: Vec::new(),
            layers: Vec::new(),
            scaling: Vec::new(),
            sweep: Vec::new(),
            serving: Vec::new(),
            prefixes: Vec::new(),
            threads: Vec::new(),
            tune: Vec::new(),
        }
    }

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
            all.serving.extend(run.serving);
            all.prefixes.extend(run.prefixes);
            all.threads.extend(run.threads);
            all.sweep.extend(run.sweep);
            all.tune.extend(run.tune);
        }
        count_floors(&mut all.ops, &all.limits);
        count_floors(&mut all.sweep, &all.limits);
        count_bounds(&mut all.serving, &all.limits);
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
