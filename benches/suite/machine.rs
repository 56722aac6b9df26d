//! What a run was made with.

use crate::nvml::Nvml;
use candle_core::Device;
use common::gpu;
use serde::{Deserialize, Serialize};
use std::process::Command;

/// Machine, software and commit; runs of different ones are not compared in seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    pub date: String,
    /// `cpu` or the GPU's name.
    pub device: String,
    pub cpu: String,
    pub threads: usize,
    pub simd: String,
    pub os: String,
    pub driver: Option<String>,
    /// With `-dirty` where files differ from it.
    pub commit: Option<String>,
    pub features: Vec<String>,
    pub version: String,
    pub candle: String,
    pub command: String,
}

impl Machine {
    pub fn of(device: &Device, nvml: Option<&Nvml>) -> Self {
        let features = [
            ("cuda", cfg!(feature = "cuda")),
            ("nvtx", cfg!(feature = "nvtx")),
            ("mkl", cfg!(feature = "mkl")),
            ("accelerate", cfg!(feature = "accelerate")),
        ];
        let on = features.iter().filter(|(_, on)| *on);
        let arguments: Vec<_> = std::env::args()
            .skip(1)
            .filter(|a| a != "--bench")
            .collect();
        Self {
            date: chrono::Local::now().format("%Y-%m-%d %H:%M").to_string(),
            device: gpu::name(device),
            cpu: processor(),
            threads: candle_fused::cpu::pool::threads(),
            simd: candle_fused::cpu::simd::level().name().to_owned(),
            os: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            driver: nvml.and_then(Nvml::driver),
            commit: commit(),
            features: on.map(|(name, _)| (*name).to_owned()).collect(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            candle: "0.11.1".to_owned(),
            command: arguments.join(" "),
        }
    }

    /// What the run measured: the GPU, or the processor.
    pub fn name(&self) -> &str {
        match self.device.as_str() {
            "cpu" => &self.cpu,
            gpu => gpu,
        }
    }

    /// Whether seconds of both mean the same.
    pub fn is_like(&self, other: &Self) -> bool {
        let what = |m: &Self| (m.device.clone(), m.cpu.clone(), m.threads, m.simd.clone());
        what(self) == what(other)
    }

    /// The lines above the tables.
    pub fn describe(&self) -> String {
        let gpu = match &self.driver {
            Some(driver) => format!("{}, driver {driver}, beside ", self.device),
            None => String::new(),
        };
        format!(
            "{gpu}{}, {} threads, {}; candle-fused {} at {}, {}",
            self.cpu,
            self.threads,
            self.simd,
            self.version,
            self.commit.as_deref().unwrap_or("no commit"),
            self.date
        )
    }
}

fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(
        || std::env::consts::ARCH.to_owned(),
        |(_, n)| n.trim().to_owned(),
    )
}

/// `CANDLE_FUSED_COMMIT` names it where there is no repository.
fn commit() -> Option<String> {
    if let Ok(commit) = std::env::var("CANDLE_FUSED_COMMIT") {
        return Some(commit);
    }
    let output = Command::new("git")
        .args(["describe", "--always", "--dirty", "--exclude=*"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
