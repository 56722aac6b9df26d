//! The thread pool as it meets its surroundings: the affinity mask, and rayon's threads.

use crate::support::{randn, widest_error};
use candle_core::{DType, Result, Tensor};
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
use candle_fused::cpu::pool;
use candle_fused::ops::rms_norm::{reference, rms_norm};
use rayon::prelude::*;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
use std::process::Command;

/// Printed by the child of the tests below, in front of the number of its threads.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
const MARK: &str = "threads of the pool: ";

/// What a child is asked for; by itself it holds anywhere.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn there_is_a_thread_at_least() {
    println!("{MARK}{}", pool::threads());
    assert!(pool::threads() >= 1);
}

/// How many threads a process that `command` starts has, and what it says on its error output; none where there is
/// no such command.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn child(command: &mut Command, asked: Option<&str>) -> Result<Option<(usize, String)>> {
    command
        .arg(std::env::current_exe()?)
        .args(["pool::there_is_a_thread_at_least", "--exact", "--nocapture"])
        .env_remove("CANDLE_FUSED_THREADS");
    if let Some(asked) = asked {
        command.env("CANDLE_FUSED_THREADS", asked);
    }
    let out = match command.output() {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        out => out?,
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let said = text(&out.stdout);
    let number = said
        .split_once(MARK)
        .and_then(|(_, rest)| rest.lines().next()?.parse().ok());
    assert!(number.is_some(), "{said}");
    Ok(number.map(|number| (number, text(&out.stderr))))
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn threads_follow_the_affinity_mask() -> Result<()> {
    let mut one = Command::new("taskset");
    let Some((bound, _)) = child(one.args(["--cpu-list", "0"]), None)? else {
        eprintln!("skipped: there is no taskset");
        return Ok(());
    };
    assert_eq!(bound, 1);
    let free = child(&mut Command::new("env"), None)?.map(|(threads, _)| threads);
    assert_eq!(
        free,
        std::thread::available_parallelism().ok().map(usize::from)
    );
    Ok(())
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn a_number_of_threads_that_is_none_is_warned_of() -> Result<()> {
    let run = |asked| -> Result<(usize, String)> {
        Ok(child(&mut Command::new("env"), asked)?.expect("env is everywhere"))
    };
    let (all, quiet) = run(None)?;
    assert!(!quiet.contains("CANDLE_FUSED_THREADS"), "{quiet}");
    let (three, quiet) = run(Some("3"))?;
    assert_eq!(three, 3);
    assert!(!quiet.contains("CANDLE_FUSED_THREADS"), "{quiet}");
    for asked in ["abc", "0", "-1", "", "2.5"] {
        let (threads, said) = run(Some(asked))?;
        assert_eq!(threads, all, "{asked}");
        let warning = format!("CANDLE_FUSED_THREADS={asked} is not a number from 1 on");
        // Once, although the number of threads is asked for more than once.
        assert_eq!(said.matches(&warning).count(), 1, "{said}");
    }
    Ok(())
}

#[test]
fn ops_run_on_rayons_threads_at_once() -> Result<()> {
    let weight = randn(&[256], DType::F32)?;
    let inputs = (0..64)
        .map(|_| randn(&[33, 256], DType::F32))
        .collect::<Result<Vec<Tensor>>>()?;
    // Every thread of rayon's calls the pool, which has one caller at a time, and is called from
    // within rayon's own jobs.
    let outputs = inputs
        .par_iter()
        .map(|x| rms_norm(x, &weight, 1e-5))
        .collect::<Result<Vec<_>>>()?;
    for (x, y) in inputs.iter().zip(&outputs) {
        assert!(widest_error(y, &reference(x, &weight, 1e-5)?)? < 1e-5);
    }
    Ok(())
}
