//! Variables, and what is computed from them, are refused: a gradient would stop unseen.

use crate::golden::Golden;
use crate::support::{devices, randn_on};
use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_fused::Fusion;
use candle_fused::models::qwen3;
use candle_fused::nn::{self, Linear, RmsNorm};
use candle_fused::ops::{self, AttentionParams, Epilogue, Prologue, RopeStyle, Rotation};
use candle_nn::{VarBuilder, VarMap};

/// Fails unless the result is the refusal of what `name` says.
#[track_caller]
fn refused<T>(name: &str, result: Result<T>) {
    let Err(error) = result else {
        panic!("{name}: accepted");
    };
    let error = error.to_string();
    let said = error.contains("inference only") && error.contains(name);
    assert!(said, "{name}: {error}");
}

#[test]
fn ops_refuse_what_is_tracked() -> Result<()> {
    for device in devices() {
        let randn = |dims: &[usize]| randn_on(dims, DType::F32, &device);
        let var = |t: &Tensor| Ok::<_, candle_core::Error>(Var::from_tensor(t)?.into_inner());
        let (x, w, m) = (randn(&[2, 8])?, randn(&[8])?, randn(&[4, 8])?);
        let (tx, tw, tm) = (var(&x)?, var(&w)?, var(&m)?);
        refused("x", ops::rms_norm(&tx, &w, 1e-5));
        refused("weight", ops::rms_norm(&x, &tw, 1e-5));
        refused("residual", ops::rms_norm_residual(&x, &tx, &w, 1e-5));
        refused("bias", ops::layer_norm(&x, &w, Some(&tw), 1e-5));
        refused(
            "residual",
            ops::layer_norm_residual(&x, &tx, &w, None, 1e-5),
        );
        refused("residual", ops::residual_add(&x, &[&tx]));
        let none = Epilogue::default();
        refused("x", ops::linear(&tx, &m, &none));
        refused("weights", ops::linear(&x, &tm, &none));
        refused(
            "the norm",
            ops::rms_norm_linear(&x, &tw, 1e-5, &[&m], &none),
        );
        let bias = var(&randn(&[4])?)?;
        let biased = Epilogue {
            bias: Some(&bias),
            ..none
        };
        refused("bias", ops::linear(&x, &m, &biased));
        // What is computed from a variable too; a detached one is welcome.
        refused("x", ops::linear(&(&tx * 2.)?, &m, &none));
        ops::linear(&tx.detach(), &tm.detach(), &none)?;
        let packed = ops::Weight::Dense(m.clone());
        refused(
            "x",
            ops::quant_linear(&tx, Prologue::None, &[packed], &none),
        );

        let q = randn(&[1, 2, 3, 8])?;
        let params = AttentionParams::default();
        refused("v", ops::flash_attention(&q, &q, &var(&q)?, &params));
        let table = Tensor::ones((4, 4), DType::F32, &device)?;
        let rotation = Rotation {
            cos: &table,
            sin: &table,
            position: 0,
            style: RopeStyle::HalfSplit,
        };
        refused("x", ops::rope(&var(&q)?, &rotation));
    }
    Ok(())
}

/// The gradient reaches a layer's weight only without fusion, and a fused layer says so.
#[test]
fn layers_refuse_variables_unless_they_are_candles_own() -> Result<()> {
    for device in devices() {
        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F32, &device);
        let x = randn_on(&[2, 8], DType::F32, &device)?;
        refused("weights", nn::linear(8, 4, vb.pp("a"))?.forward(&x));
        refused("weight", nn::rms_norm(8, 1e-5, vb.pp("b"))?.forward(&x));
        let weight = vb.get((4, 8), "c")?;
        let plain = Linear::from_weight(weight.clone(), None, Fusion::none())?;
        let norm = RmsNorm::from_weight(vb.get(8, "d")?, 1e-5, Fusion::none());
        let loss = plain
            .forward(&norm.forward(&x)?.detach())?
            .sqr()?
            .sum_all()?;
        let gradient = loss.backward()?;
        let gradient = gradient.get(&weight).expect("a gradient");
        assert_eq!(gradient.dims(), [4, 8]);
    }
    Ok(())
}

#[test]
fn models_refuse_variables() -> Result<()> {
    let golden = Golden::open("qwen3_qknorm")?;
    let config: qwen3::Config = golden.config();
    for device in devices() {
        let map = VarMap::new();
        let ids = Tensor::new(&[[1u32, 2, 3]], &device)?;
        for fusion in [Fusion::all(), Fusion::none()] {
            let vb = VarBuilder::from_varmap(&map, DType::F32, &device);
            let model = qwen3::ModelForCausalLM::new_fused(&config, vb, fusion);
            refused("", model.and_then(|mut model| model.forward(&ids, 0)));
        }
    }
    let vb = golden.weights(DType::F32)?;
    let ids = Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?;
    qwen3::ModelForCausalLM::new(&config, vb)?.forward(&ids, 0)?;
    Ok(())
}
