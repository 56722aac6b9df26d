//! Compiles `kernels/*.cu` into one fatbin each when the feature `cuda` is on; does nothing
//! otherwise.
//!
//! Environment: `NVCC` (the compiler), `CUDA_HOME`, `CUDA_PATH` (where its toolkit stands),
//! `NVCC_CCBIN` (its host compiler), `CUDA_COMPUTE_CAP` (`80,90` or `native`, in place of all).

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// What a build without `CUDA_COMPUTE_CAP` runs on without the driver compiling anything: Turing,
/// Ampere (A100, RTX 30, Jetson Orin), Ada, Hopper. Newer GPUs compile the PTX of the lowest.
const ARCHITECTURES: [&str; 6] = ["75", "80", "86", "87", "89", "90a"];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo::rerun-if-changed=kernels");
    for variable in [
        "NVCC",
        "CUDA_HOME",
        "CUDA_PATH",
        "NVCC_CCBIN",
        "CUDA_COMPUTE_CAP",
    ] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if let Err(message) = build() {
        eprintln!("candle-fused: {message}");
        exit(1);
    }
}

fn build() -> Result<(), String> {
    let nvcc = nvcc()?;
    let mut arguments: Vec<String> = ["-fatbin", "-O3", "-std=c++17", "-lineinfo"]
        .map(String::from)
        .to_vec();
    arguments.extend(targets(&nvcc)?);
    if let Ok(compiler) = env::var("NVCC_CCBIN") {
        arguments.extend(["-ccbin".into(), compiler]);
    }
    let out = PathBuf::from(env::var("OUT_DIR").map_err(|e| format!("OUT_DIR: {e}"))?);
    let headers = files("cuh")?;
    let sources = files("cu")?;
    let stale: Vec<_> = sources
        .iter()
        .map(|source| Unit::new(source, &out, &nvcc, &arguments, &headers))
        .collect::<Result<Vec<_>, _>>()?
        .into_iter()
        .filter(|unit| !unit.is_current())
        .collect();
    let jobs = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok());
    let next = AtomicUsize::new(0);
    let worker = || -> Result<(), String> {
        while let Some(unit) = stale.get(next.fetch_add(1, Ordering::Relaxed)) {
            unit.compile(&nvcc, &arguments)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs.unwrap_or(1))
            .map(|_| scope.spawn(worker))
            .collect();
        workers.into_iter().try_for_each(|w| {
            w.join()
                .map_err(|_| "a compile thread panicked".to_owned())?
        })
    })
}

/// One source on its way to a fatbin.
struct Unit {
    source: PathBuf,
    fatbin: PathBuf,
    /// Everything the fatbin was made from, beside it.
    stamp: PathBuf,
    made_from: String,
}

impl Unit {
    fn new(
        source: &Path,
        out: &Path,
        nvcc: &Path,
        arguments: &[String],
        headers: &[PathBuf],
    ) -> Result<Self, String> {
        let stem = source.file_stem().unwrap_or_default();
        let fatbin = out.join(stem).with_extension("fatbin");
        let mut made_from = format!("{}\n{}\n", nvcc.display(), arguments.join(" "));
        let text = read(source)?;
        let mut wanted = vec![text.clone()];
        made_from.push_str(&text);
        // Only the headers that are reached: a change in one kernel's own header is its own matter.
        let mut seen = vec![false; headers.len()];
        while let Some(text) = wanted.pop() {
            for (header, seen) in headers.iter().zip(&mut seen) {
                let name = header.file_name().unwrap_or_default().to_string_lossy();
                if !*seen && text.contains(&format!("\"{name}\"")) {
                    *seen = true;
                    let text = read(header)?;
                    made_from.push_str(&text);
                    wanted.push(text);
                }
            }
        }
        Ok(Self {
            source: source.to_owned(),
            stamp: fatbin.with_extension("stamp"),
            fatbin,
            made_from,
        })
    }

    fn is_current(&self) -> bool {
        self.fatbin.exists() && fs::read_to_string(&self.stamp).is_ok_and(|s| s == self.made_from)
    }

    fn compile(&self, nvcc: &Path, arguments: &[String]) -> Result<(), String> {
        let output = Command::new(nvcc)
            .args(arguments)
            .arg("-o")
            .args([&self.fatbin, &self.source])
            .output()
            .map_err(|e| format!("{} does not run: {e}", nvcc.display()))?;
        if !output.status.success() {
            return Err(format!(
                "nvcc failed on {}:\n{}{}",
                self.source.display(),
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            ));
        }
        fs::write(&self.stamp, &self.made_from)
            .map_err(|e| format!("{}: {e}", self.stamp.display()))
    }
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// The files of `kernels/` with this extension, by name.
fn files(extension: &str) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir("kernels").map_err(|e| format!("kernels/: {e}"))?;
    let mut files: Vec<_> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == extension))
        .collect();
    files.sort();
    Ok(files)
}

fn nvcc() -> Result<PathBuf, String> {
    if let Some(nvcc) = env::var_os("NVCC") {
        return Ok(nvcc.into());
    }
    let homes = ["CUDA_HOME", "CUDA_PATH"]
        .into_iter()
        .filter_map(env::var_os)
        .map(|home| PathBuf::from(home).join("bin"));
    let path = env::var_os("PATH").unwrap_or_default();
    homes
        .chain(env::split_paths(&path))
        .chain([PathBuf::from("/usr/local/cuda/bin")])
        .map(|folder| folder.join(format!("nvcc{}", env::consts::EXE_SUFFIX)))
        .find(|nvcc| nvcc.is_file())
        .ok_or_else(|| {
            "the feature `cuda` needs nvcc: install the CUDA toolkit, or set NVCC or CUDA_HOME"
                .into()
        })
}

/// The `-gencode` arguments: machine code for each architecture, PTX for the lowest.
fn targets(nvcc: &Path) -> Result<Vec<String>, String> {
    let wanted = env::var("CUDA_COMPUTE_CAP").unwrap_or_default();
    if wanted.trim() == "native" {
        return Ok(vec!["-arch=native".into()]);
    }
    let known = Command::new(nvcc)
        .arg("--list-gpu-code")
        .output()
        .map_err(|e| format!("{} does not run: {e}", nvcc.display()))?;
    let known = String::from_utf8_lossy(&known.stdout).into_owned();
    // The list has no `a`: what knows sm_90 knows sm_90a.
    let base = |arch: &str| format!("sm_{}", arch.trim_end_matches(char::is_alphabetic));
    let is_known = |arch: &str| known.lines().any(|line| line.trim() == base(arch));
    let mut chosen = Vec::new();
    if wanted.trim().is_empty() {
        for arch in ARCHITECTURES {
            if is_known(arch) {
                chosen.push(arch.to_owned());
            } else {
                println!(
                    "cargo::warning={} does not know sm_{arch}: left out",
                    nvcc.display()
                );
            }
        }
    } else {
        for arch in wanted.split([',', ';', ' ']).filter(|a| !a.is_empty()) {
            // `8.6` and `86` are the same; Hopper's tensor instructions need the `a`.
            let arch = arch.trim().trim_start_matches("sm_").replace('.', "");
            let arch = if arch == "90" { "90a".to_owned() } else { arch };
            if !is_known(&arch) {
                return Err(format!(
                    "CUDA_COMPUTE_CAP: {} does not know sm_{arch}",
                    nvcc.display()
                ));
            }
            chosen.push(arch);
        }
    }
    let number = |arch: &String| {
        arch.trim_end_matches(char::is_alphabetic)
            .parse()
            .unwrap_or(0)
    };
    chosen.sort_by_key(number);
    chosen.dedup();
    let lowest = chosen
        .first()
        .ok_or("CUDA_COMPUTE_CAP names no architecture that nvcc knows")?;
    let ptx = format!("-gencode=arch=compute_{lowest},code=compute_{lowest}");
    let mut arguments: Vec<_> = chosen
        .iter()
        .map(|arch| format!("-gencode=arch=compute_{arch},code=sm_{arch}"))
        .collect();
    arguments.push(ptx);
    Ok(arguments)
}
