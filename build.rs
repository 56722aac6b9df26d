//! Compiles each `.cu` below `kernels/` into a fatbin of its name when the feature `cuda` is on, with the
//! headers that are written from `src/cuda/abi`; does nothing otherwise.
//!
//! Environment: `NVCC` (the compiler), `CUDA_HOME`, `CUDA_PATH` (where its toolkit stands),
//! `NVCC_CCBIN` (its host compiler), and the architectures: `CANDLE_FUSED_COMPUTE_CAP` or else
//! `CUDA_COMPUTE_CAP`, each `80,90`, `native` or `all` (the default). The first is there because
//! candle's own kernels read the second and take one number only. Where
//! `CANDLE_FUSED_KERNEL_CACHE` names a folder, fatbins are kept there too, for builds into other
//! target directories.

#[path = "src/cuda/abi/header.rs"]
mod abi;

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// What a build without `CUDA_COMPUTE_CAP` runs on without the driver compiling anything: Turing,
/// Ampere (A100, RTX 30, Jetson Orin), Ada, Hopper. On newer GPUs the driver compiles PTX.
const ARCHITECTURES: [&str; 6] = ["75", "80", "86", "87", "89", "90a"];

/// The variable that names the folder of fatbins which outlives a target directory.
const CACHE: &str = "CANDLE_FUSED_KERNEL_CACHE";

/// The sources, in folders; includes are relative to it.
const KERNELS: &str = "kernels";

/// A source that has this has code for 8.9 alone, which the front end for 8.0 leaves out.
const CODE_FOR_89: &str = ">= 890";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo::rerun-if-changed={KERNELS}");
    println!("cargo::rerun-if-changed=src/cuda/abi");
    for variable in [
        "NVCC",
        "CUDA_HOME",
        "CUDA_PATH",
        "NVCC_CCBIN",
        "CANDLE_FUSED_COMPUTE_CAP",
        "CUDA_COMPUTE_CAP",
        CACHE,
    ] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    if let Err(message) = build() {
        // Cargo shows these lines alone, and then fails the build.
        for line in message.lines() {
            println!("cargo::error={line}");
        }
    }
}

fn build() -> Result<(), String> {
    let nvcc = Nvcc::find()?;
    let mut arguments: Vec<String> = ["-fatbin", "-O3", "-std=c++17"].map(String::from).to_vec();
    // Source lines for profilers, where the profile asks for debug information: they triple the
    // size.
    if variable("DEBUG").is_some_and(|debug| debug != "false") {
        arguments.push("-lineinfo".into());
    }
    arguments.extend(targets(&nvcc)?);
    if let Some(compiler) = variable("NVCC_CCBIN") {
        arguments.extend(["-ccbin".into(), compiler]);
    }
    let out = PathBuf::from(env::var("OUT_DIR").map_err(|e| format!("OUT_DIR: {e}"))?);
    abi::write(&out)?;
    // Comments change nothing but the numbers of lines.
    let numbered = arguments.iter().any(|argument| argument == "-lineinfo");
    let code = |path: &Path| {
        Ok(if numbered {
            read(path)?
        } else {
            code_of(&read(path)?)
        })
    };
    let headers = headers(&out, code)?;
    let sources = files(Path::new(KERNELS), "cu")?;
    check_stems(&sources)?;
    let cache = variable(CACHE).map(PathBuf::from);
    if let Some(folder) = &cache {
        fs::create_dir_all(folder).map_err(|e| format!("{CACHE}: {}: {e}", folder.display()))?;
    }
    let mut stale = Vec::new();
    for source in &sources {
        let made_from = format!("{}\n{}\n", nvcc.version, arguments.join(" "));
        let unit = Unit::new(source, &out, made_from, &code(source)?, &headers);
        if !unit.is_current() && !unit.restore_from(cache.as_deref()) {
            stale.push(unit);
        }
    }
    let jobs = variable("NUM_JOBS").and_then(|n| n.parse().ok());
    let next = AtomicUsize::new(0);
    let worker = || -> Result<(), String> {
        while let Some(unit) = stale.get(next.fetch_add(1, Ordering::Relaxed)) {
            unit.compile(&nvcc, unit.arguments(&arguments))?;
            if let Some(folder) = &cache {
                unit.save_to(folder)
                    .map_err(|e| format!("{CACHE}: {}: {e}", folder.display()))?;
            }
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
    has_code_for_89: bool,
}

impl Unit {
    /// Of a source with this code; `made_from` is what all units are made from.
    fn new(
        source: &Path,
        out: &Path,
        mut made_from: String,
        code: &str,
        headers: &[(String, String)],
    ) -> Self {
        made_from.push_str(code);
        // Only the headers that are reached: a change in one kernel's own header is its own matter.
        let (mut wanted, mut seen) = (vec![code], vec![false; headers.len()]);
        while let Some(text) = wanted.pop() {
            for ((name, header), seen) in headers.iter().zip(&mut seen) {
                if !*seen && text.contains(&format!("\"{name}\"")) {
                    *seen = true;
                    made_from.push_str(header);
                    wanted.push(header);
                }
            }
        }
        let has_code_for_89 = code.contains(CODE_FOR_89);
        if has_code_for_89 {
            made_from.push_str("8.9 for itself\n");
        }
        let stem = source.file_stem().unwrap_or_default();
        let fatbin = out.join(stem).with_extension("fatbin");
        Self {
            source: source.to_owned(),
            stamp: fatbin.with_extension("stamp"),
            fatbin,
            made_from,
            has_code_for_89,
        }
    }

    fn is_current(&self) -> bool {
        self.fatbin.exists() && fs::read_to_string(&self.stamp).is_ok_and(|s| s == self.made_from)
    }

    /// The arguments of all sources; for one with code for 8.9, with the front end run for `compute_89` too.
    fn arguments(&self, of_all: &[String]) -> impl Iterator<Item = String> {
        of_all.iter().map(|argument| match self.has_code_for_89 {
            true => argument.replace("compute_80,code=sm_89", "compute_89,code=sm_89"),
            false => argument.clone(),
        })
    }

    fn compile(&self, nvcc: &Nvcc, arguments: impl Iterator<Item = String>) -> Result<(), String> {
        // A compile that is broken off leaves no stamp beside what it wrote.
        if self.stamp.exists() {
            fs::remove_file(&self.stamp).map_err(|e| format!("{}: {e}", self.stamp.display()))?;
        }
        let mut command = Command::new(&nvcc.path);
        command
            .args(arguments)
            .args(["-I", KERNELS, "-I"])
            .arg(self.fatbin.parent().unwrap_or(Path::new(".")))
            .arg("-o")
            .args([&self.fatbin, &self.source]);
        run(command).map_err(|e| format!("{}: {e}", self.source.display()))?;
        fs::write(&self.stamp, &self.made_from)
            .map_err(|e| format!("{}: {e}", self.stamp.display()))
    }

    /// The fatbin's place in a cache, and its stamp's.
    fn cached(&self, cache: &Path) -> (PathBuf, PathBuf) {
        let mut hasher = DefaultHasher::new();
        self.made_from.hash(&mut hasher);
        let stem = self.fatbin.file_stem().unwrap_or_default();
        let name = format!("{}-{:016x}", stem.to_string_lossy(), hasher.finish());
        let fatbin = cache.join(name + ".fatbin");
        (fatbin.clone(), fatbin.with_extension("stamp"))
    }

    /// Copies the fatbin from a cache into its place; whether there was one that had it.
    fn restore_from(&self, cache: Option<&Path>) -> bool {
        cache.is_some_and(|cache| {
            let (fatbin, stamp) = self.cached(cache);
            fs::read_to_string(&stamp).is_ok_and(|s| s == self.made_from)
                && fs::copy(&fatbin, &self.fatbin).is_ok()
                && fs::write(&self.stamp, &self.made_from).is_ok()
        })
    }

    /// Files appear in the cache whole, for builds that run at the same time, and the stamp last.
    fn save_to(&self, cache: &Path) -> std::io::Result<()> {
        let (fatbin, stamp) = self.cached(cache);
        for (from, to) in [(&self.fatbin, fatbin), (&self.stamp, stamp)] {
            let part = to.with_extension(format!("{}.part", std::process::id()));
            fs::copy(from, &part)?;
            fs::rename(part, to)?;
        }
        Ok(())
    }
}

/// C++ without comments and without the lines that are blank then. A `'` between digits begins no
/// character.
fn code_of(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let length = match c {
            '/' if rest.starts_with("//") => {
                rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
                continue;
            }
            '/' if rest.starts_with("/*") => {
                rest = rest[2..].find("*/").map_or("", |end| &rest[end + 4..]);
                code.push(' ');
                continue;
            }
            '"' => literal(rest),
            '\'' if !code.ends_with(|c: char| c.is_ascii_alphanumeric()) => literal(rest),
            other => other.len_utf8(),
        };
        code.push_str(&rest[..length]);
        rest = &rest[length..];
    }
    let lines = code.lines().map(str::trim_end);
    let lines: Vec<_> = lines.filter(|line| !line.is_empty()).collect();
    lines.join("\n")
}

/// The length of the literal at the start of `text`, its quotes among it.
fn literal(text: &str) -> usize {
    let quote = text.chars().next();
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if Some(c) == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// The CUDA compiler.
struct Nvcc {
    path: PathBuf,
    /// What it says of itself.
    version: String,
}

impl Nvcc {
    fn find() -> Result<Self, String> {
        let path = Self::path()?;
        let mut command = Command::new(&path);
        command.arg("--version");
        Ok(Self {
            version: run(command)?,
            path,
        })
    }

    fn path() -> Result<PathBuf, String> {
        if let Some(nvcc) = variable("NVCC") {
            return Ok(nvcc.into());
        }
        let homes = ["CUDA_HOME", "CUDA_PATH"]
            .into_iter()
            .filter_map(variable)
            .map(|home| PathBuf::from(home).join("bin"));
        let path = env::var_os("PATH").unwrap_or_default();
        homes
            .chain(env::split_paths(&path))
            .chain([PathBuf::from("/usr/local/cuda/bin")])
            .map(|folder| folder.join(format!("nvcc{}", env::consts::EXE_SUFFIX)))
            .find(|nvcc| nvcc.is_file())
            .ok_or_else(|| {
                "the feature `cuda` needs nvcc: install the CUDA toolkit (scripts/cuda-toolkit.sh \
                 does so without root), or set NVCC or CUDA_HOME"
                    .into()
            })
    }

    /// The architectures it compiles for, such as `75`; variants such as `90a` are not listed.
    fn architectures(&self) -> Result<Vec<String>, String> {
        let mut command = Command::new(&self.path);
        command.arg("--list-gpu-code");
        let listed = run(command)?;
        Ok(listed
            .lines()
            .filter_map(|line| Some(line.trim().strip_prefix("sm_")?.to_owned()))
            .collect())
    }
}

/// What a command prints; an error has its first line in front of all that the command said.
fn run(mut command: Command) -> Result<String, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .map_err(|e| format!("{name} does not run: {e}"))?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(printed);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!(
        "{name} failed ({})\n{printed}{said}",
        output.status
    ))
}

/// A variable that is set to something.
fn variable(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.trim().is_empty())
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// The code of headers by the names that they are included by: `common/mma.cuh` of ours, `abi/common.cuh` of the
/// written ones.
fn headers(
    out: &Path,
    code: impl Fn(&Path) -> Result<String, String>,
) -> Result<Vec<(String, String)>, String> {
    let ours = (Path::new(KERNELS), Path::new(KERNELS).to_owned());
    let written = (out, out.join("abi"));
    let mut headers = Vec::new();
    for (root, folder) in [ours, written] {
        for path in files(&folder, "cuh")? {
            let name = path.strip_prefix(root).unwrap_or(&path);
            let parts: Vec<_> = name.iter().map(|part| part.to_string_lossy()).collect();
            headers.push((parts.join("/"), code(&path)?));
        }
    }
    Ok(headers)
}

/// The files below a folder with this extension, by name.
fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    let mut files = Vec::new();
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        if path.is_dir() {
            files.extend(self::files(&path, extension)?);
        } else if path.extension().is_some_and(|e| e == extension) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// A fatbin has the name of its source without the folder, so no two sources may share one.
fn check_stems(sources: &[PathBuf]) -> Result<(), String> {
    for (i, source) in sources.iter().enumerate() {
        let same = |other: &&PathBuf| other.file_stem() == source.file_stem();
        if let Some(other) = sources[..i].iter().find(same) {
            let (a, b) = (other.display(), source.display());
            return Err(format!("{a} and {b} would both become one fatbin"));
        }
    }
    Ok(())
}

/// The `-gencode` arguments: machine code for each architecture, PTX for newer ones. What there is
/// of both goes to the crate as `CANDLE_FUSED_SASS` and `CANDLE_FUSED_PTX`.
fn targets(nvcc: &Nvcc) -> Result<Vec<String>, String> {
    let known = nvcc.architectures()?;
    let is_known = |arch: &str| known.iter().any(|k| k == base(arch));
    let asked = ["CANDLE_FUSED_COMPUTE_CAP", "CUDA_COMPUTE_CAP"]
        .into_iter()
        .find_map(|name| Some((name, variable(name)?)));
    let mut chosen: Vec<String> = match &asked {
        Some((name, list)) if list.trim() != "all" => {
            let list = match list.trim() {
                "native" => native(nvcc)?,
                list => list.to_owned(),
            };
            let chosen: Vec<_> = list
                .split([',', ';', ' ', '\n'])
                .map(str::trim)
                .filter(|arch| !arch.is_empty())
                .map(architecture)
                .collect();
            if let Some(arch) = chosen.iter().find(|arch| !is_known(arch)) {
                let known = known.join(", ");
                return Err(format!(
                    "{name}: no architecture `{arch}` in this nvcc, which has {known}"
                ));
            }
            chosen
        }
        _ => ARCHITECTURES
            .into_iter()
            .filter(|arch| {
                let known = is_known(arch);
                if !known {
                    println!("cargo::warning=this nvcc does not know sm_{arch}: left out");
                }
                known
            })
            .map(String::from)
            .collect(),
    };
    chosen.sort_by_key(|arch| base(arch).parse().unwrap_or(0));
    chosen.dedup();
    if chosen.is_empty() {
        return Err("no architecture to compile for".into());
    }
    // PTX of the lowest, and of what has been through the front end anyway; that of `90a` would
    // run on Hopper alone.
    let mut ptx: Vec<_> = chosen.iter().map(|arch| front_end(arch)).collect();
    ptx.dedup();
    ptx.retain(|front| front == base(front));
    if ptx.is_empty() {
        ptx.push(base(&chosen[0]).to_owned());
    }
    let mut arguments: Vec<_> = chosen
        .iter()
        .map(|arch| format!("-gencode=arch=compute_{},code=sm_{arch}", front_end(arch)))
        .collect();
    arguments.extend(
        ptx.iter()
            .map(|front| format!("-gencode=arch=compute_{front},code=compute_{front}")),
    );
    println!("cargo::rustc-env=CANDLE_FUSED_SASS={}", chosen.join(" "));
    println!("cargo::rustc-env=CANDLE_FUSED_PTX={}", ptx.join(" "));
    Ok(arguments)
}

/// What the language is compiled for: next to nothing that kernels are written with sets 8.0 to 8.9 apart, so that one
/// pass does for all of them (`__CUDA_ARCH__` is 800), which saves 40 % of the time. For the exception see
/// [`Unit::arguments`].
fn front_end(arch: &str) -> String {
    match arch {
        "80" | "86" | "87" | "88" | "89" => "80".into(),
        other => other.into(),
    }
}

/// `8.6`, `sm_86` and `86` are the same; Hopper's tensor instructions need the `a`.
fn architecture(name: &str) -> String {
    match name.trim_start_matches("sm_").replace('.', "").as_str() {
        "90" => "90a".into(),
        other => other.into(),
    }
}

/// Without the letter of a variant.
fn base(arch: &str) -> &str {
    arch.trim_end_matches(|c: char| c.is_ascii_alphabetic())
}

/// The GPUs of this machine: as nvcc's own helper finds them, or the driver's program.
fn native(nvcc: &Nvcc) -> Result<String, String> {
    let helper = nvcc.path.with_file_name("__nvcc_device_query");
    let mut smi = Command::new("nvidia-smi");
    smi.args(["--query-gpu=compute_cap", "--format=csv,noheader"]);
    [Command::new(helper), smi]
        .into_iter()
        .filter_map(|command| run(command).ok())
        .find(|found| found.contains(|c: char| c.is_ascii_digit()))
        .ok_or_else(|| "`native`: no GPU of this machine answers; name its architecture".into())
}
