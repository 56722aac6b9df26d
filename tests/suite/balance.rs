//! Balanced models: the same numbers, rounded otherwise.

use crate::golden::{Golden, relative_error};
use crate::quant_schemes::{logits, quantized_over};
use crate::subject::{GOLDENS, over};
use crate::support::{device, on_every_device};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::quant::{Quantization, Recipe};
use candle_nn::VarBuilder;

/// A golden's weights with norms, and inputs of the MLP's last matrix, of very different sizes.
fn uneven(golden: &Golden, dtype: DType) -> Result<VarBuilder<'static>> {
    let path = golden.folder.join("model.safetensors");
    let mut weights = candle_core::safetensors::load(path, &Device::Cpu)?;
    for (name, weight) in &mut weights {
        let is_norm = weight.rank() == 1 && name.contains("norm");
        if is_norm || name.contains("down_proj.weight") {
            let len = weight.dims()[weight.rank() - 1];
            let sizes = (0..len).map(|i| 0.1 + (i * 37 % 64) as f32 / 16.);
            let sizes = Tensor::from_iter(sizes, &Device::Cpu)?;
            *weight = weight.to_dtype(DType::F32)?.broadcast_mul(&sizes)?;
        }
    }
    Ok(VarBuilder::from_tensors(weights, dtype, &device()))
}

#[test]
fn balancing_changes_no_number_of_a_model() -> Result<()> {
    on_every_device(|| {
        for name in GOLDENS {
            let golden = Golden::open(name)?;
            for dtype in [DType::F32, DType::BF16] {
                let mut plain = over(&golden, uneven(&golden, dtype)?, Fusion::all())?;
                let plain = logits(&golden, plain.as_mut())?;
                let of = |recipe: &Recipe| {
                    let vb = uneven(&golden, dtype)?;
                    let mut model = quantized_over(&golden, vb, recipe, Fusion::all())?;
                    logits(&golden, model.as_mut())
                };
                let balanced = of(&Recipe::default().with_balance())?;
                assert_eq!(relative_error(&balanced, &plain)?, 0., "{name} {dtype:?}");
                // Its weights are others all the same: they are rounded otherwise.
                let recipe = Recipe::new(Quantization::Int8);
                let (int8, balanced) = (of(&recipe)?, of(&recipe.with_balance())?);
                assert!(relative_error(&balanced, &int8)? > 0., "{name} {dtype:?}");
            }
        }
        Ok(())
    })
}
