//! What goes wrong on a GPU: memory that is not there, a kernel that fails, no GPU at all, and other threads.
//! Each test needs the GPU for itself: `scripts/gpu-faults.sh` builds what they need and runs them.

mod captures;
mod no_device;
mod out_of_memory;
mod recordings;
mod shim;
mod sticky;
mod threads;
mod tiny;

use candle_core::{CudaDevice, Device, Result, Tensor};
use candle_fused::generation::{Generation, Options};
use std::process::{Command, ExitStatus};

/// Set for a test that has a process of its own.
const ALONE: &str = "CANDLE_FUSED_TEST_ALONE";

const PROMPTS: [&[u32]; 3] = [
    &[1, 5, 9, 2, 77, 31, 4],
    &[8, 3],
    &[100, 7, 7, 7, 12, 60, 61, 62, 63],
];

/// The GPU, through a handle of this call's own.
fn gpu() -> Device {
    Device::new_cuda(0).expect("a GPU: these tests are for a machine that has one")
}

fn cuda(device: &Device) -> &CudaDevice {
    device.as_cuda_device().expect("a GPU")
}

fn options(positions: usize) -> Options {
    Options {
        positions: Some(positions),
        ..Default::default()
    }
}

/// Whether this process is the test's own.
fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}

/// Runs `test` of this binary in a process of its own, and hands on what it prints.
fn alone(test: &str, set: impl FnOnce(&mut Command)) -> Result<ExitStatus> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args([
            "--exact",
            test,
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(ALONE, "1");
    set(&mut command);
    let out = command.output()?;
    let lines = [&out.stdout[..], &out.stderr].concat();
    for line in String::from_utf8_lossy(&lines).lines() {
        // The first stands behind the test's name.
        match line.find("faults: ") {
            Some(start) => println!("{}", &line[start..]),
            None if !out.status.success() => println!("{line}"),
            None => (),
        }
    }
    Ok(out.status)
}

/// Which of the logits `[1, V]` is the largest.
fn likeliest(logits: &Tensor) -> Result<u32> {
    logits.flatten_all()?.argmax(0)?.to_scalar()
}

/// Whole answers, one prompt after the other, until there were `count` steps: each goes on until there is no
/// room, and after some of them `begin` makes the generation anew.
fn answers(count: usize, begin: impl Fn(&Options) -> Result<Generation>) -> Result<Vec<u32>> {
    const ANEW: usize = 10;
    const POSITIONS: usize = 96;
    let options = options(POSITIONS);
    let (mut tokens, mut steps) = (Vec::new(), 0);
    let mut generation = begin(&options)?;
    for (round, prompt) in PROMPTS.iter().cycle().enumerate() {
        match round % ANEW {
            0 => generation = begin(&options)?,
            _ => generation.truncate(0, 0)?,
        }
        tokens.push(generation.extend(0, prompt)?);
        for _ in prompt.len()..POSITIONS {
            tokens.extend(generation.step()?.into_iter().flatten());
            steps += 1;
        }
        if let Some(why) = generation.graph_refusal() {
            candle_core::bail!("round {round} went without a graph: {why}");
        }
        if steps >= count {
            break;
        }
    }
    Ok(tokens)
}
