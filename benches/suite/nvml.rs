//! Clocks and energy, from NVIDIA's management library where it is to be had, and from RAPL.

use nvml_wrapper::enum_wrappers::device::Clock;
use nvml_wrapper::{Device, Nvml as Library};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Instant;

/// The library with the first GPU.
pub struct Nvml(Library);

/// How fast a GPU ran, how warm it was, and what it drew.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Clocks {
    /// Behind which part of the run.
    pub at: String,
    pub sm_mhz: Option<u32>,
    pub memory_mhz: Option<u32>,
    pub celsius: Option<u32>,
    pub watts: Option<f64>,
}

impl Nvml {
    /// None without a driver.
    pub fn open() -> Option<Self> {
        let library = Library::init().ok()?;
        library.device_by_index(0).ok()?;
        Some(Self(library))
    }

    fn device(&self) -> Option<Device<'_>> {
        self.0.device_by_index(0).ok()
    }

    pub fn driver(&self) -> Option<String> {
        self.0.sys_driver_version().ok()
    }

    pub fn clocks(&self, at: &str) -> Option<Clocks> {
        use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
        let device = self.device()?;
        let watts = device.power_usage().ok().map(|mw| f64::from(mw) * 1e-3);
        Some(Clocks {
            at: at.to_owned(),
            sm_mhz: device.clock_info(Clock::SM).ok(),
            memory_mhz: device.clock_info(Clock::Memory).ok(),
            celsius: device.temperature(TemperatureSensor::Gpu).ok(),
            watts,
        })
    }
}

impl Clocks {
    /// In a line; what cannot be read is `?`.
    pub fn describe(&self) -> String {
        let or_unknown = |n: Option<u32>| n.map_or_else(|| "?".to_owned(), |n| n.to_string());
        let watts = self
            .watts
            .map_or_else(|| "?".to_owned(), |w| format!("{w:.0}"));
        format!(
            "behind {}: SM {} MHz, memory {} MHz, {} C, {watts} W",
            self.at,
            or_unknown(self.sm_mhz),
            or_unknown(self.memory_mhz),
            or_unknown(self.celsius),
        )
    }
}

/// What counts joules.
pub enum Meter {
    Gpu(Box<Nvml>),
    /// Each package's counter and where it begins anew.
    Cpu(Vec<(PathBuf, f64)>),
}

impl Meter {
    /// The GPU's counter, or the processor's where it may be read.
    pub fn new(gpu: bool) -> Option<Self> {
        if gpu {
            let nvml = Nvml::open()?;
            nvml.device()?.total_energy_consumption().ok()?;
            return Some(Self::Gpu(Box::new(nvml)));
        }
        let mut counters = Vec::new();
        for entry in std::fs::read_dir("/sys/class/powercap").ok()?.flatten() {
            // Packages are `intel-rapl:0`; what is inside them has a second colon.
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with("intel-rapl:") && name.matches(':').count() == 1 {
                let range = micro(&entry.path().join("max_energy_range_uj"))?;
                let counter = entry.path().join("energy_uj");
                micro(&counter)?;
                counters.push((counter, range));
            }
        }
        (!counters.is_empty()).then_some(Self::Cpu(counters))
    }

    fn joules(&self) -> Option<Vec<f64>> {
        match self {
            Self::Gpu(nvml) => {
                let millijoules = nvml.device()?.total_energy_consumption().ok()?;
                Some(vec![millijoules as f64 * 1e-3])
            }
            Self::Cpu(counters) => counters.iter().map(|(counter, _)| micro(counter)).collect(),
        }
    }

    /// What `body` gives, and the joules and seconds it took.
    pub fn around<T>(&self, body: impl FnOnce() -> T) -> (T, Option<(f64, f64)>) {
        let (before, started) = (self.joules(), Instant::now());
        let value = body();
        let (seconds, after) = (started.elapsed().as_secs_f64(), self.joules());
        let joules = before.zip(after).map(|(before, after)| {
            let spent = before.iter().zip(&after).enumerate();
            spent
                .map(|(i, (b, a))| if a < b { a - b + self.range(i) } else { a - b })
                .sum()
        });
        (value, joules.map(|joules| (joules, seconds)))
    }

    fn range(&self, index: usize) -> f64 {
        match self {
            Self::Gpu(_) => 0.,
            Self::Cpu(counters) => counters[index].1,
        }
    }
}

/// A file's micro-units as units.
fn micro(path: &std::path::Path) -> Option<f64> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim().parse::<f64>().ok()? * 1e-6)
}
