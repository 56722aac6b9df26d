//! The thread pool as it meets its surroundings: the affinity mask, and rayon's threads.

use crate::support::{randn, widest_error};
use candle_core::{DType, Result, Tensor};
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
use candle_fused::cpu::pool;
use candle_fused::ops::rms_norm::{reference, rms_norm};
use rayon::prelude::*;

/// Printed by the child of the test below, in front of the number of its threads.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
const MARK: &str = "threads of the pool: ";

/// What a child is asked for; by itself it holds anywhere.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn there_is_a_thread_at_least() {
    println!("{MARK}{}", pool::threads());
    assert!(pool::threads() >= 1);
}

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[test]
fn threads_follow_the_affinity_mask() -> Result<()> {
    use std::process::Command;

    let child = |mut command: Command| -> Result<Option<usize>> {
        let out = command
            .arg(std::env::current_exe()?)
            .args(["pool::there_is_a_thread_at_least", "--exact", "--nocapture"])
            .env_remove("CANDLE_FUSED_THREADS")
            .output();
        let out = match out {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            out => out?,
        };
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        let number = said
            .split_once(MARK)
            .and_then(|(_, rest)| rest.lines().next()?.parse().ok());
        assert!(number.is_some(), "{said}");
        Ok(number)
    };
    let mut one = Command::new("taskset");
    one.args(["--cpu-list", "0"]);
    let Some(bound) = child(one)? else {
        eprintln!("skipped: there is no taskset");
        return Ok(());
    };
    assert_eq!(bound, 1);
    let free = child(Command::new("env"))?;
    assert_eq!(
        free,
        std::thread::available_parallelism().ok().map(usize::from)
    );
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
