//! What is refused of NVFP4.

use super::super::config::{Bytes, Format};
use super::super::packing::Packing;
use super::super::tensors::Tensors;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use std::collections::HashMap;

/// Tensors of NVFP4 that are wrong are named.
#[test]
fn what_nvfp4_does_not_have_is_refused() {
    let (rows, cols) = (4, 32);
    let zeros = |cols: usize, dtype| Tensor::zeros((rows, cols), dtype, &Device::Cpu).unwrap();
    let global = |value: f32| Tensor::new(&[value], &Device::Cpu).unwrap();
    let good = vec![
        ("weight_packed", zeros(cols / 2, DType::U8)),
        ("weight_scale", zeros(cols / 16, DType::F8E4M3)),
        ("weight_global_scale", global(8.)),
    ];
    let format = Format::CompressedTensors {
        bytes: Bytes::Int,
        nvfp4: true,
        ignores_nvfp4_inputs: false,
    };
    let read = |parts: &[(&str, Tensor)], size| {
        let named = |(part, tensor): &(&str, Tensor)| (format!("layer.{part}"), tensor.clone());
        let tensors: HashMap<_, _> = parts.iter().map(named).collect();
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        let tensors = Tensors::new(&vb, "layer");
        let packing = Packing::of(Some(format), &tensors, size)?;
        assert_eq!(packing, Some(Packing::Nvfp4));
        Packing::Nvfp4.values(&tensors, size, DType::F32)
    };
    assert!(read(&good, (rows, cols)).is_ok());
    let nan = Tensor::full(f32::NAN, (rows, cols / 16), &Device::Cpu).unwrap();
    let nan = nan.to_dtype(DType::F8E4M3).unwrap();
    let global_scale = "weight_global_scale is [";
    for (part, tensor, said) in [
        (
            "weight_zero_point",
            Some(zeros(2, DType::U8)),
            "weight_zero_point is there",
        ),
        (
            "weight_g_idx",
            Some(zeros(cols, DType::I32)),
            "weight_g_idx is there",
        ),
        (
            "weight_global_scale",
            None,
            "weight_global_scale is missing",
        ),
        ("weight_global_scale", Some(global(-8.)), global_scale),
        ("weight_global_scale", Some(global(0.)), global_scale),
        ("weight_global_scale", Some(global(1e-40)), global_scale),
        ("weight_global_scale", Some(global(3e38)), global_scale),
        (
            "weight_global_scale",
            Some(global(f32::INFINITY)),
            global_scale,
        ),
        ("weight_global_scale", Some(global(f32::NAN)), global_scale),
        (
            "weight_global_scale",
            Some(zeros(1, DType::F32)),
            global_scale,
        ),
        ("weight_scale", Some(nan), "group_scales: 0x7f"),
        (
            "weight_scale",
            Some(zeros(1, DType::F8E4M3)),
            "weight_scale` has shape",
        ),
        (
            "weight_packed",
            Some(zeros(cols, DType::U8)),
            "weight_packed` has shape",
        ),
    ] {
        let mut parts = good.clone();
        parts.retain(|(name, _)| *name != part);
        parts.extend(tensor.map(|tensor| (part, tensor)));
        let error = read(&parts, (rows, cols)).unwrap_err().to_string();
        let line = error.lines().next().unwrap_or_default();
        assert!(line.contains(said), "{part}: {error}");
    }
    let error = read(&good, (rows, 24)).unwrap_err().to_string();
    assert!(error.contains("24 columns"), "{error}");
}
