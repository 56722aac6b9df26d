//! What plans leave for static shared memory, against what loaded kernels have.

use super::{
    gemm_w8a8_cluster, gemm_wna16_m16, gemm_wna16_skinny, gemv, gemv_dense, gemv_dense_pipelined,
    gemv_gguf, gemv_ternary_latency, gemv_wna16, gemv_wna16_sm90,
};
use crate::cuda::{Launcher, Module};
use candle_core::{Device, Result};

/// Plans are made before kernels are loaded: what they leave for static shared memory has to suffice.
#[test]
fn plans_leave_room_for_static_shared_memory() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let gpu = Launcher::new(device.as_cuda_device()?)?.gpu;
    let check = |module: &Module, kernels: std::ops::Range<usize>, left: usize| {
        for (name, bytes) in &module.static_shared(gpu)?[kernels] {
            assert!(
                *bytes as usize <= left,
                "{name} has {bytes} bytes of static shared memory, plans leave {left}"
            );
        }
        Ok::<_, candle_core::Error>(())
    };
    check(&gemv_dense::MODULE, 0..12, gemv::FIXED_SHARED)?;
    check(&gemv_gguf::MODULE, 0..8, gemv::FIXED_SHARED)?;
    check(&gemv_wna16::MODULE, 0..7, gemv::FIXED_SHARED)?;
    let sm90 = gemv_wna16_sm90::FIXED_SHARED;
    check(&gemv_wna16_sm90::MODULE, 0..12, sm90)?;
    check(&gemv_wna16_sm90::GGUF, 0..10, sm90)?;
    let ternary = gemv_ternary_latency::FIXED_SHARED;
    check(&gemv_ternary_latency::MODULE, 0..12, ternary)?;
    let skinny = gemm_wna16_skinny::FIXED_SHARED;
    check(&gemm_wna16_skinny::MODULE, 0..24, skinny)?;
    check(&gemm_wna16_skinny::GGUF, 0..20, skinny)?;
    let pipelined = gemv_dense_pipelined::FIXED_SHARED;
    check(&gemv_dense_pipelined::MODULE, 0..4, pipelined)?;
    let m16 = gemm_wna16_m16::FIXED_SHARED;
    check(&gemm_wna16_m16::MODULE, 0..1, m16)?;
    check(&gemm_wna16_m16::TMA, 0..1, m16)?;
    if gpu.arch == 90 {
        check(&gemm_w8a8_cluster::MODULE, 0..6, gemm_w8a8_cluster::FIXED)?;
    }
    Ok(())
}
