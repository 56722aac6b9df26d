//! Devices without kernels of this crate: models and layers take candle's own operations, forced here on the CPU. A GPU
//! has kernels, and candle's quantized products there round activations otherwise than ours.

use crate::gguf_file::bytes;
use crate::golden::{Golden, relative_error};
use crate::linear::ACTIVATIONS;
use crate::subject::{ALL, dense, gguf};
use crate::support::{device, on_every_device, randn_on, values};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_fused::generation::Options;
use candle_fused::nn::{LayerNorm, Linear, Norm, Projection, RmsNorm};
use candle_fused::{Fusion, trace, with_fallback};

/// That nothing but candle's own operations ran, and that the trace says why.
fn told(calls: &trace::Calls) {
    assert!(calls.iter().count() > 0);
    for (call, _) in calls.iter() {
        assert_eq!(call.path, "candle: the fallback is forced", "{}", call.op);
    }
}

#[test]
fn models_take_candles_operations_and_say_why() -> Result<()> {
    on_every_device(|| {
        if !device().is_cpu() {
            return Ok(());
        }
        for name in ALL {
            let golden = Golden::open(name)?;
            let ids = golden.input_ids()?;
            let file = bytes(&golden, GgmlDType::Q8_0)?;
            let mut fused = dense(&golden, DType::F32, Fusion::all())?;
            with_fallback(|| -> Result<()> {
                let mut model = dense(&golden, DType::F32, Fusion::all())?;
                let mut blocks = gguf(&golden, &file, Fusion::all())?;
                // Loaded there, and loaded elsewhere.
                for model in [&mut model, &mut fused] {
                    let (states, calls) = trace::capture(|| model.hidden_states(&ids, 0));
                    told(&calls);
                    let error = relative_error(&states?.1, &golden.outputs["logits"])?;
                    assert!(error < 1e-4, "{name}: {error:e}");
                }
                let plain = gguf(&golden, &file, Fusion::none())?.forward(&ids, 0)?;
                assert!(relative_error(&blocks.forward(&ids, 0)?, &plain)? < 1e-5);
                let options = Options {
                    positions: Some(64),
                    ..Default::default()
                };
                let mut generation = model.generation(&options)?;
                let prompt = ids.get(0)?.to_vec1::<u32>()?;
                let expected = golden.outputs["greedy"]
                    .to_dtype(DType::U32)?
                    .to_vec2::<u32>()?;
                assert_eq!(generation.extend(0, &prompt)?, expected[0][0]);
                Ok(())
            })?;
        }
        Ok(())
    })
}

#[test]
fn layers_take_candles_operations_and_say_why() -> Result<()> {
    let cpu = Device::Cpu;
    let x = randn_on(&[2, 3, 64], DType::F32, &cpu)?;
    let (weight, bias) = (
        randn_on(&[64], DType::F32, &cpu)?,
        randn_on(&[64], DType::F32, &cpu)?,
    );
    let matrix = |n| randn_on(&[n, 64], DType::F32, &cpu);
    let norm = Norm::from(RmsNorm::new(weight.clone(), 1e-5));
    let layers: [Box<dyn Module>; 3] = [
        Box::new(Linear::new(matrix(48)?, Some(bias.narrow(0, 0, 48)?))),
        Box::new(RmsNorm::new(weight.clone(), 1e-5)),
        Box::new(LayerNorm::new(weight, bias, 1e-5)),
    ];
    let close = |got: &Tensor, want: &Tensor| -> Result<()> {
        let (got, want) = (values(got)?, values(want)?);
        // Sums of 64 values in another order, in f32. Gated products reach some hundreds.
        for (a, b) in got.iter().zip(&want) {
            assert!((a - b).abs() < 1e-4 * (1. + b.abs()), "{a} for {b}");
        }
        Ok(())
    };
    for layer in &layers {
        let want = layer.forward(&x)?;
        let (got, calls) = trace::capture(|| with_fallback(|| layer.forward(&x)));
        told(&calls);
        close(&got?, &want)?;
    }
    let gate_up = [
        Linear::new(matrix(32)?, None),
        Linear::new(matrix(32)?, None),
    ];
    let gate_up = Projection::from_linears(gate_up.to_vec())?;
    let square = Projection::from(Linear::new(matrix(64)?, None));
    for activation in ACTIVATIONS {
        for norm in [Some(&norm), None] {
            let run = || gate_up.forward_activated(&x, norm, activation);
            let (got, calls) = trace::capture(|| with_fallback(run));
            told(&calls);
            close(&got?, &run()?)?;
        }
    }
    let runs: [&dyn Fn() -> Result<Tensor>; 2] = [&|| square.forward_residual(&x, &x), &|| {
        Tensor::cat(&gate_up.forward_parts(&x, Some(&norm))?, 2)
    }];
    for run in runs {
        let (got, calls) = trace::capture(|| with_fallback(run));
        told(&calls);
        close(&got?, &run()?)?;
    }
    Ok(())
}
