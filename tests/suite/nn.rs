//! The layers under candle_nn's names against candle_nn's own, on the same tensors.

use crate::support::{devices, randn_on, values, widest_error};
use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_fused::nn::{self, Linear, LinearWeight, Norm, Projection, RotaryEmbedding};
use candle_fused::ops::{self, Activation, Epilogue, Prologue, RopeStyle, Weight};
use candle_fused::quant::{self, Quantization, Recipe};
use candle_fused::{Fusion, trace};
use candle_nn::{LayerNormConfig, VarBuilder, VarMap};
use std::collections::HashMap;

const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Tensors of these names and shapes.
fn tensors(
    shapes: &[(&str, &[usize])],
    dtype: DType,
    device: &Device,
) -> Result<VarBuilder<'static>> {
    let named = shapes
        .iter()
        .map(|(name, dims)| Ok((name.to_string(), randn_on(dims, dtype, device)?)))
        .collect::<Result<HashMap<_, _>>>()?;
    Ok(VarBuilder::from_tensors(named, dtype, device))
}

/// No further from float64 than twice what candle's own layer is, plus half a unit of the dtype (in
/// f32, what the order of a sum of 64 changes).
#[track_caller]
fn close(ours: &Tensor, candle: &Tensor, expected: &[f64]) -> Result<()> {
    let floor = match ours.dtype() {
        DType::F32 => 1e-6,
        DType::F16 => 5e-4,
        _ => 4e-3,
    };
    assert_eq!((ours.dims(), ours.dtype()), (candle.dims(), candle.dtype()));
    let (ours, candle) = (
        widest_error(ours, expected)?,
        widest_error(candle, expected)?,
    );
    assert!(ours <= 2. * candle + floor, "{ours:e}, candle {candle:e}");
    Ok(())
}

fn message<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("expected an error"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn linear_layers_agree() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            for (k, n) in [(64, 48), (37, 5)] {
                let vb = tensors(&[("weight", &[n, k]), ("bias", &[n])], dtype, &device)?;
                let x = randn_on(&[2, 3, k], dtype, &device)?;
                for bias in [false, true] {
                    let ours = nn::linear_b(k, n, bias, vb.clone())?;
                    let candle = candle_nn::linear_b(k, n, bias, vb.clone())?;
                    let weights = [Weight::Dense(ours.weight().clone())];
                    let epilogue = Epilogue {
                        bias: ours.bias(),
                        ..Default::default()
                    };
                    let expected =
                        ops::linear::reference(&x, Prologue::None, &weights, &epilogue)?.concat();
                    close(&ours.forward(&x)?, &candle.forward(&x)?, &expected)?;
                    assert_eq!(ours.bias().is_some(), bias);
                    let converted = Linear::from(candle.clone());
                    assert_eq!(
                        values(&converted.forward(&x)?)?,
                        values(&ours.forward(&x)?)?
                    );
                    assert_eq!(converted.weight().id(), candle.weight().id());
                    let plain = Linear::from_weight(
                        weight_of(&ours),
                        ours.bias().cloned(),
                        Fusion::none(),
                    )?;
                    let (y, calls) = trace::capture(|| plain.forward(&x));
                    close(&y?, &candle.forward(&x)?, &expected)?;
                    assert_eq!(calls.by_op().len(), 0, "{calls}");
                }
            }
        }
    }
    Ok(())
}

fn weight_of(layer: &Linear) -> Tensor {
    layer.weight().clone()
}

#[test]
fn a_linear_layer_takes_views_and_single_rows() -> Result<()> {
    for device in devices() {
        let weight = randn_on(&[40, 24], DType::F32, &device)?;
        let turned = Linear::new(weight.t()?, None);
        let straight = Linear::new(weight.t()?.contiguous()?, None);
        let x = randn_on(&[5, 3, 40], DType::F32, &device)?;
        let y = turned.forward(&x.transpose(0, 1)?)?;
        let expected = straight.forward(&x.transpose(0, 1)?.contiguous()?)?;
        assert_eq!(values(&y)?, values(&expected)?);
        let row = x.get(2)?.get(1)?;
        assert_eq!(turned.forward(&row)?.dims(), [24]);
        let whole = straight.forward(&x)?.get(2)?.get(1)?;
        let error = widest_error(&turned.forward(&row)?, &values(&whole)?)?;
        assert!(error < 1e-6, "{error:e}");
    }
    Ok(())
}

#[test]
fn norms_agree() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            let vb = tensors(&[("weight", &[80]), ("bias", &[80])], dtype, &device)?;
            let x = randn_on(&[2, 3, 80], dtype, &device)?;
            let (ours, candle) = (
                nn::rms_norm(80, 1e-5, vb.clone())?,
                candle_nn::rms_norm(80, 1e-5, vb.clone())?,
            );
            let expected = ops::rms_norm::reference(&x, ours.weight(), 1e-5)?;
            close(&ours.forward(&x)?, &candle.forward(&x)?, &expected)?;
            assert_eq!(
                (ours.weight().id(), ours.eps()),
                (candle.weight().id(), 1e-5)
            );
            let norm = Norm::from(nn::RmsNorm::from(candle));
            assert_eq!(values(&norm.forward(&x)?)?, values(&ours.forward(&x)?)?);

            let (ours, candle) = (
                nn::layer_norm(80, 1e-5, vb.clone())?,
                candle_nn::layer_norm(80, 1e-5, vb.clone())?,
            );
            let expected = ops::layer_norm::reference(&x, ours.weight(), ours.bias(), 1e-5)?;
            close(&ours.forward(&x)?, &candle.forward(&x)?, &expected)?;
            let norm = Norm::from(nn::LayerNorm::from(candle));
            assert_eq!(values(&norm.forward(&x)?)?, values(&ours.forward(&x)?)?);

            let (ours, candle) = (
                nn::layer_norm_no_bias(80, 1e-5, vb.clone())?,
                candle_nn::layer_norm_no_bias(80, 1e-5, vb)?,
            );
            assert!(ours.bias().is_none());
            let expected = ops::layer_norm::reference(&x, ours.weight(), None, 1e-5)?;
            close(&ours.forward(&x)?, &candle.forward(&x)?, &expected)?;
            // Views, where candle's norms take another way.
            let view = x.transpose(0, 1)?;
            assert_eq!(
                values(&ours.forward(&view)?)?,
                values(&ours.forward(&view.contiguous()?)?)?
            );
        }
    }
    Ok(())
}

/// Layers that do not remove the mean, with a bias and without, alone and in front of a product.
#[test]
fn norms_that_keep_the_mean_agree() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            let vb = tensors(&[("weight", &[64]), ("bias", &[64])], dtype, &device)?;
            let x = randn_on(&[2, 3, 64], dtype, &device)?;
            for affine in [false, true] {
                let config = LayerNormConfig {
                    eps: 1e-5,
                    remove_mean: false,
                    affine,
                };
                let ours = nn::layer_norm(64, config, vb.clone())?;
                let candle = candle_nn::layer_norm(64, config, vb.clone())?;
                assert!(!ours.remove_mean() && ours.bias().is_some() == affine);
                let mut expected = ops::rms_norm::reference(&x, ours.weight(), 1e-5)?;
                if let Some(bias) = ours.bias() {
                    let bias = values(bias)?;
                    let all = expected.iter_mut().zip(bias.iter().cycle());
                    all.for_each(|(y, b)| *y += b);
                }
                close(&ours.forward(&x)?, &candle.forward(&x)?, &expected)?;
                let layer = Linear::new(randn_on(&[8, 64], dtype, &device)?, None);
                let apart = layer.forward(&ours.forward(&x)?)?;
                let tolerance = if dtype == DType::F32 { 1e-6 } else { 2e-2 };
                for norm in [Norm::from(ours.clone()), Norm::Layer(ours)] {
                    let joint = layer.forward_norm(&x, &norm)?;
                    assert!(widest_error(&joint, &values(&apart)?)? <= tolerance);
                }
            }
            let ours = nn::rms_norm(64, 1e-5, vb.clone())?;
            let candle = candle_nn::rms_norm(64, 1e-5, vb.clone())?;
            let (y, calls) = trace::capture(|| ours.forward_diff(&x));
            assert_eq!(values(&y?)?, values(&candle.forward_diff(&x)?)?);
            assert_eq!(calls.by_op().len(), 0, "{calls}");
            let (ours, candle) = (ours.into_inner(), candle.into_inner());
            assert_eq!(
                (ours.weight().id(), ours.remove_mean(), ours.eps()),
                (candle.weight().id(), candle.remove_mean(), candle.eps())
            );
            let expected = ops::rms_norm::reference(&x, ours.weight(), 1e-5)?;
            close(&ours.forward(&x)?, &candle.forward(&x)?, &expected)?;
        }
    }
    Ok(())
}

#[test]
fn embeddings_agree() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            let vb = tensors(&[("weight", &[11, 6])], dtype, &device)?;
            let ours = nn::embedding(11, 6, vb.clone())?;
            let candle = candle_nn::embedding(11, 6, vb)?;
            assert_eq!((ours.hidden_size(), ours.vocab_size()), (6, 11));
            let ids = Tensor::new(&[[3u32, 0, 10], [7, 7, 1]], &device)?;
            for ids in [
                ids.clone(),
                ids.get(1)?,
                ids.unsqueeze(0)?,
                ids.t()?.contiguous()?,
            ] {
                let expected = candle.forward(&ids)?;
                for dtype in [DType::U32, DType::I64, DType::U8] {
                    let got = Module::forward(&ours, &ids.to_dtype(dtype)?)?;
                    assert_eq!(
                        (got.dims(), got.dtype()),
                        (expected.dims(), expected.dtype())
                    );
                    assert_eq!(values(&got)?, values(&expected)?);
                }
            }
            let converted = nn::Embedding::from(candle.clone());
            assert_eq!(converted.embeddings().id(), candle.embeddings().id());
        }
    }
    Ok(())
}

/// What a `VarMap` is asked for, and what it holds afterwards.
#[test]
fn constructors_ask_for_candles_tensors() -> Result<()> {
    let names = |ours: bool| -> Result<Vec<(String, Vec<usize>)>> {
        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
        macro_rules! build {
            ($from:ident) => {{
                $from::linear(4, 3, vb.pp("a"))?;
                $from::linear_no_bias(4, 3, vb.pp("b"))?;
                $from::linear_b(4, 3, true, vb.pp("c"))?;
                $from::rms_norm(4, 1e-5, vb.pp("d"))?;
                $from::layer_norm(4, LayerNormConfig::default(), vb.pp("e"))?;
                $from::layer_norm_no_bias(4, 1e-5, vb.pp("f"))?;
                $from::embedding(5, 4, vb.pp("g"))?;
            }};
        }
        if ours {
            build!(nn);
        } else {
            build!(candle_nn);
        }
        let data = map.data().lock().expect("one thread");
        let mut names: Vec<_> = data
            .iter()
            .map(|(n, v)| (n.clone(), v.dims().to_vec()))
            .collect();
        names.sort();
        Ok(names)
    };
    let ours = names(true)?;
    assert_eq!(ours.len(), 10);
    assert_eq!(ours, names(false)?);
    Ok(())
}

#[test]
fn joint_layers_are_their_parts() -> Result<()> {
    for device in devices() {
        for dtype in DTYPES {
            let x = randn_on(&[2, 64], dtype, &device)?;
            let norm: Norm =
                nn::rms_norm(64, 1e-6, tensors(&[("weight", &[64])], dtype, &device)?)?.into();
            let layer = |n: usize| -> Result<Linear> {
                let vb = tensors(&[("weight", &[n, 64]), ("bias", &[n])], dtype, &device)?;
                nn::linear(64, n, vb)
            };
            let layers = [layer(48)?, layer(16)?, layer(16)?];
            let joint = Projection::from_linears(layers.to_vec())?;
            let tolerance = if dtype == DType::F32 { 1e-6 } else { 1e-2 };
            for (part, layer) in joint.forward_parts(&x, Some(&norm))?.iter().zip(&layers) {
                let expected = values(&layer.forward(&norm.forward(&x)?)?)?;
                assert!(widest_error(part, &expected)? <= tolerance);
                let alone = layer.forward_norm(&x, &norm)?;
                assert!(widest_error(&alone, &expected)? <= tolerance);
            }
            let whole = joint.forward(&x)?;
            assert_eq!(whole.dims(), [2, 80]);
            let residual = randn_on(&[2, 48], dtype, &device)?;
            let y = layers[0].forward_residual(&x, &residual)?;
            let expected = values(&(layers[0].forward(&x)? + &residual)?)?;
            assert!(widest_error(&y, &expected)? <= tolerance);
            let gated = Projection::from_linears(layers[1..].to_vec())?;
            let y = gated.forward_activated(&x, None, Activation::SwiGlu)?;
            let expected = (layers[1].forward(&x)?.silu()? * layers[2].forward(&x)?)?;
            assert!(widest_error(&y, &values(&expected)?)? <= 4. * tolerance);
        }
    }
    Ok(())
}

#[test]
fn quantized_matrices_of_candle_come_along() -> Result<()> {
    for device in devices() {
        let weight = randn_on(&[32, 64], DType::F32, &Device::Cpu)?;
        let blocks = QTensor::quantize_onto(&weight, GgmlDType::Q8_0, &device)?;
        let matrix = QMatMul::from_qtensor(blocks)?;
        let x = randn_on(&[3, 64], DType::F32, &device)?;
        let expected = values(&matrix.forward(&x)?)?;
        let ours = Projection::new(vec![LinearWeight::from(matrix)], None, Fusion::all())?;
        let (y, calls) = trace::capture(|| ours.forward(&x));
        assert!(widest_error(&y?, &expected)? < 1e-2);
        assert_eq!(calls.count("quant_linear"), 1, "{calls}");
    }
    Ok(())
}

#[test]
fn patterns_that_match_no_layer_are_refused() -> Result<()> {
    let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    let layer = |name: &str| nn::linear_no_bias(64, 32, vb.pp(name));
    let recipe = Recipe::new(Quantization::Int8);
    let with = |pattern| recipe.clone().with(pattern, None);
    let kept = quant::while_loading(&with("head.weight"), || layer("head"))?;
    assert!(!kept.is_quantized());
    let said = message(quant::while_loading(&with("haed.*"), || layer("head")));
    assert!(said.contains("`haed.*` matches no matrix"), "{said}");
    assert!(said.contains("head.weight"), "{said}");
    // What keeps a model from loading is said first.
    let missing = VarBuilder::from_tensors(HashMap::new(), DType::F32, &Device::Cpu);
    let said = message(quant::while_loading(&with("haed.*"), || {
        nn::linear_no_bias(64, 32, missing.pp("up"))
    }));
    assert!(said.contains("up.weight"), "{said}");
    // Without patterns a model may have no such layer. Errors may be a caller's own.
    let none = quant::while_loading(&recipe, || anyhow::Ok(7));
    assert!(matches!(none, Ok(7)));
    let none = quant::while_loading(&with("*"), || anyhow::Ok(7));
    assert!(none.is_err());
    // One within another, which goes on behind it, though it failed.
    let (first, last) = quant::while_loading(&with("first.*"), || {
        let first = layer("first")?;
        assert!(quant::while_loading(&with("first.*"), || layer("inner")).is_err());
        Result::Ok((first, layer("last")?))
    })?;
    assert!(!first.is_quantized() && last.is_quantized());
    assert!(!layer("behind")?.is_quantized());
    Ok(())
}

#[test]
fn rotary_embeddings_agree() -> Result<()> {
    for device in devices() {
        let (q, k) = (
            randn_on(&[2, 4, 3, 32], DType::F32, &device)?,
            randn_on(&[2, 1, 3, 32], DType::F32, &device)?,
        );
        for style in [RopeStyle::HalfSplit, RopeStyle::Interleaved] {
            let rotary = RotaryEmbedding::with_theta(32, 1e4, 50, style, &device)?;
            let (cos, sin) = rotary.tables();
            let given = RotaryEmbedding::from_tables(cos, sin, style)?;
            let candle = match style {
                RopeStyle::HalfSplit => candle_nn::rotary_emb::rope,
                RopeStyle::Interleaved => candle_nn::rotary_emb::rope_i,
            };
            for offset in [0, 7, 47] {
                let (cos, sin) = (cos.narrow(0, offset, 3)?, sin.narrow(0, offset, 3)?);
                let (got_q, got_k) = rotary.apply(&q, &k, offset)?;
                assert!(widest_error(&got_q, &values(&candle(&q, &cos, &sin)?)?)? < 1e-6);
                assert!(widest_error(&got_k, &values(&candle(&k, &cos, &sin)?)?)? < 1e-6);
                let (again, _) = given.apply(&q, &k, offset)?;
                assert_eq!(values(&again)?, values(&got_q)?);
            }
            // The first 8 dimensions are turned, the others kept.
            let partial = RotaryEmbedding::with_theta(8, 1e4, 50, style, &device)?;
            let (part, _) = partial.apply(&q, &k, 5)?;
            assert_eq!(
                values(&part.narrow(3, 8, 24)?)?,
                values(&q.narrow(3, 8, 24)?)?
            );
            let short = q.narrow(3, 0, 8)?.contiguous()?;
            let (alone, _) = partial.apply(&short, &short, 5)?;
            assert_eq!(values(&part.narrow(3, 0, 8)?)?, values(&alone)?);
        }
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_named() -> Result<()> {
    let cpu = &Device::Cpu;
    let ones = |dims: &[usize]| Tensor::ones(dims, DType::F32, cpu);
    let layer = Linear::new(ones(&[3, 4])?, None);
    assert!(message(layer.forward(&ones(&[2, 5])?)).contains("weights[0] is [3, 4]"));
    let wide = ones(&[2, 4])?.to_dtype(DType::F64)?;
    assert!(message(layer.forward(&wide)).contains("x is F64, expected f32, f16 or bf16"));
    let cube = Linear::new(ones(&[3, 4, 4])?, None);
    assert!(message(cube.forward(&ones(&[2, 4])?)).contains("weights[0] has shape [3, 4, 4]"));
    let biased = Linear::new(ones(&[3, 4])?, Some(ones(&[4])?));
    assert!(message(biased.forward(&ones(&[2, 4])?)).contains("bias has shape [4]"));
    let short = message(layer.forward_residual(&ones(&[2, 4])?, &ones(&[2, 4])?));
    assert!(
        short.contains("residuals[0] has shape [2, 4], expected [2, 3]"),
        "{short}"
    );
    let mixed = Linear::new(ones(&[3, 4])?, Some(ones(&[3])?));
    let said = message(Projection::from_linears(vec![layer.clone(), mixed]));
    assert!(said.contains("1 of 2 linears have a bias"), "{said}");
    assert!(message(Projection::from_linears(vec![])).contains("linears is empty"));
    let shifted = |bias: usize| {
        Ok::<_, candle_core::Error>(Linear::new(ones(&[4, 8])?, Some(ones(&[bias])?)))
    };
    let said = message(Projection::from_linears(vec![shifted(3)?, shifted(5)?]));
    assert!(said.contains("expected [4]"), "{said}");
    let plain = Linear::from_weight(ones(&[3, 4])?, None, Fusion::none())?;
    let said = message(Projection::from_linears(vec![layer, plain]));
    assert!(said.contains("different fusions"), "{said}");

    let embedding = nn::Embedding::new(ones(&[5, 4])?, 4);
    let said = message(embedding.forward(&Tensor::new(&[5u32], cpu)?));
    assert!(
        said.contains("token 5 is out of the vocabulary of 5"),
        "{said}"
    );
    for outside in [-1i64, 1 << 32] {
        let said = message(embedding.forward(&Tensor::new(&[outside], cpu)?));
        assert!(said.contains("out of the vocabulary"), "{said}");
    }
    assert!(message(embedding.forward(&ones(&[1])?)).contains("expected u32, u8 or i64"));

    let rotary =
        |dims, theta| RotaryEmbedding::with_theta(dims, theta, 8, RopeStyle::HalfSplit, cpu);
    assert!(message(rotary(7, 1e4)).contains("dims is 7"));
    assert!(message(rotary(8, 0.)).contains("theta is 0"));
    let (cos, sin) = (ones(&[8, 4])?, ones(&[8, 3])?);
    let said = message(RotaryEmbedding::from_tables(
        &cos,
        &sin,
        RopeStyle::HalfSplit,
    ));
    assert!(said.contains("expected [positions, R / 2]"), "{said}");
    let mut given = RotaryEmbedding::from_tables(&cos, &cos, RopeStyle::HalfSplit)?;
    assert!(message(given.reserve(9)).contains("past the 8 of the tables"));
    let q = ones(&[1, 1, 2, 8])?;
    assert!(message(given.apply(&q, &q, 7)).contains("cos has 8 positions"));
    Ok(())
}
