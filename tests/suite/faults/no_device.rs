//! No GPU to be seen, although the build has CUDA.

use super::{PROMPTS, alone, is_alone, options, tiny};
use crate::common::gpu;
use candle_core::{Device, Result};

#[test]
#[ignore = "runs itself where no GPU is to be seen"]
fn without_a_gpu_there_is_an_error_and_the_cpu() -> Result<()> {
    if !is_alone() {
        let test = "faults::no_device::without_a_gpu_there_is_an_error_and_the_cpu";
        for hidden in ["", "-1"] {
            let status = alone(test, |command| {
                command.env("CUDA_VISIBLE_DEVICES", hidden);
            })?;
            println!("faults: CUDA_VISIBLE_DEVICES='{hidden}': {status}");
            assert!(status.success());
        }
        return Ok(());
    }
    assert!(!gpu::is_present());
    let error = Device::new_cuda(0).expect_err("no GPU").to_string();
    println!("faults: Device::new_cuda says: {error}");
    assert!(error.contains("CUDA_ERROR_NO_DEVICE"), "{error}");
    let device = Device::Cpu;
    for tiny in tiny::all()? {
        let mut generation = tiny.load(&device)?.generation(&options(64))?;
        generation.extend(0, PROMPTS[0])?;
        generation.step()?;
    }
    Ok(())
}
