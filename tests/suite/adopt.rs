//! The model of `examples/adopt.rs`: its three forms give the same output, and the last is fused.

use crate::adopt_example::{Config, Model, layers, likeliest, ops, plain, weights};
use crate::common::distance::Distance;
use crate::support::{devices, values, widest_error};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::nn::{
    self, Attention, AttentionConfig, KvCache, Projection, RotaryEmbedding, Tokens,
};
use candle_fused::ops::RopeStyle;
use candle_fused::trace::{self, Calls};

const CONFIG: Config = Config {
    vocab: 97,
    hidden: 128,
    inner: 192,
    layers: 2,
    heads: 4,
    kv_heads: 2,
    eps: 1e-5,
    theta: 1e4,
    positions: 24,
};

const PROMPT: [u32; 9] = [5, 11, 96, 0, 42, 42, 7, 63, 18];

fn forms(dtype: DType, device: &Device) -> Result<[Box<dyn Model>; 3]> {
    let vb = weights(&CONFIG, dtype, device)?;
    Ok([
        Box::new(plain::Model::new(&CONFIG, vb.clone())?),
        Box::new(ops::Model::new(&CONFIG, vb.clone())?),
        Box::new(layers::Model::new(&CONFIG, vb)?),
    ])
}

/// The logits behind each of the chunks that the prompt is read in, and behind each of the tokens
/// that follow it.
fn read(
    model: &mut dyn Model,
    chunks: &[usize],
    tokens: &[u32],
    device: &Device,
) -> Result<Vec<Tensor>> {
    model.clear();
    let mut position = 0;
    let singles = tokens.iter().map(std::slice::from_ref);
    let mut rest = &PROMPT[..];
    let mut parts = Vec::new();
    for chunk in chunks {
        let (part, behind) = rest.split_at(*chunk);
        parts.push(part);
        rest = behind;
    }
    let mut logits = Vec::new();
    for part in parts.into_iter().chain(singles) {
        let row = model.forward(&Tensor::new(part, device)?.unsqueeze(0)?, position)?;
        position += part.len();
        logits.push(row.to_device(&Device::Cpu)?);
    }
    Ok(logits)
}

fn difference(a: &Tensor, b: &Tensor) -> Result<f64> {
    Ok(Distance::between(a, b)?.largest)
}

#[test]
fn three_forms_give_the_same_logits_and_tokens() -> Result<()> {
    for device in devices() {
        let mut forms = forms(DType::F32, &device)?;
        let mut tokens = Vec::new();
        let mut expected = read(forms[0].as_mut(), &[9], &[], &device)?;
        while tokens.len() < 12 {
            tokens.push(likeliest(&expected[tokens.len()])?);
            expected = read(forms[0].as_mut(), &[9], &tokens, &device)?;
        }
        for chunks in [&[9][..], &[3, 1, 5], &[1; 9]] {
            for (form, model) in forms.iter_mut().enumerate() {
                let got = read(model.as_mut(), chunks, &tokens, &device)?;
                // Before the last chunk the prompt is not read yet.
                let got = &got[chunks.len() - 1..];
                assert_eq!(got.len(), expected.len());
                for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                    // Logits are about 1; float32 sums of 192 in another order.
                    let far = difference(got, expected)?;
                    assert!(
                        far < 1e-4,
                        "{device:?} form {form}, {chunks:?}, {i}: {far:e}"
                    );
                    assert_eq!(likeliest(got)?, likeliest(expected)?);
                }
            }
        }
    }
    Ok(())
}

/// Held to twice the error of the plain form in the same dtype, plus a hundredth of a logit.
#[test]
fn low_precision_is_no_worse_than_plain() -> Result<()> {
    for device in devices() {
        let tokens = [3, 50, 20];
        let exact = read(
            forms(DType::F32, &device)?[0].as_mut(),
            &[9],
            &tokens,
            &device,
        )?;
        for dtype in [DType::F16, DType::BF16] {
            let mut errors = Vec::new();
            for model in &mut forms(dtype, &device)? {
                let got = read(model.as_mut(), &[9], &tokens, &device)?;
                let pairs = got.iter().zip(&exact);
                let far = pairs
                    .map(|(a, b)| difference(a, b))
                    .collect::<Result<Vec<_>>>()?;
                errors.push(far.into_iter().fold(0., f64::max));
            }
            assert!(
                errors[1] <= 2. * errors[0] + 0.01,
                "{device:?} {dtype:?} {errors:?}"
            );
            assert!(
                errors[2] <= 2. * errors[0] + 0.01,
                "{device:?} {dtype:?} {errors:?}"
            );
        }
    }
    Ok(())
}

#[test]
fn every_step_of_a_layer_is_fused() -> Result<()> {
    for device in devices() {
        let [mut plain, mut ops, mut layers] = forms(DType::F32, &device)?;
        let ids = Tensor::new(&PROMPT, &device)?.unsqueeze(0)?;
        let n = CONFIG.layers as u64;
        let (y, calls) = trace::capture(|| plain.forward(&ids, 0));
        y?;
        assert!(calls.by_op().is_empty(), "{calls}");
        for (form, ropes) in [(&mut ops, 2 * n), (&mut layers, n)] {
            let (y, calls) = trace::capture(|| form.forward(&ids, 0));
            y?;
            assert_eq!(calls.count("rms_norm_linear"), 2 * n + 1, "{calls}");
            assert_eq!(calls.count("linear"), 2 * n, "{calls}");
            assert_eq!(calls.count("flash_attention"), n, "{calls}");
            assert_eq!(calls.count("rope"), ropes, "{calls}");
            assert_eq!(
                calls.count("rms_norm") + calls.count("residual_add"),
                0,
                "{calls}"
            );
        }
    }
    Ok(())
}

/// Attention of one layer, as `layers.rs` has it, with the fusions asked for.
fn attend(fusion: Fusion, device: &Device) -> Result<(Tensor, Calls)> {
    let vb = weights(&CONFIG, DType::F32, device)?.pp("model.layers.0.self_attn");
    let layer = |name: &str, rows| nn::linear_no_bias(CONFIG.hidden, rows, vb.pp(name));
    let config = AttentionConfig {
        heads: CONFIG.heads,
        kv_heads: CONFIG.kv_heads,
        head_dim: CONFIG.head_dim(),
        window: None,
    };
    let [q, kv, _] = config.widths();
    let qkv = vec![
        layer("q_proj", q)?,
        layer("k_proj", kv)?,
        layer("v_proj", kv)?,
    ];
    let output = layer("o_proj", CONFIG.hidden)?;
    let qkv = Projection::from_linears(qkv)?;
    let attention = Attention::new(qkv, output.clone().into(), config).with_fusion(fusion);
    let rotary = RotaryEmbedding::with_theta(32, 1e4, 24, RopeStyle::HalfSplit, device)?;
    let x = layer("q_proj", q)?.weight().narrow(0, 0, 10)?;
    let x = x.reshape((2, 5, CONFIG.hidden))?;
    let at = Tokens {
        position: 0,
        rotary: &rotary,
        mask: None,
    };
    let mut cache = KvCache::new(2, 8);
    let (y, calls) = trace::capture(|| attention.forward(&x, None, &x, &at, &mut cache));
    let y = y?;
    assert_eq!(cache.current_seq_len(), 5);
    // In its two halves, over a cache that has been used.
    cache.reset();
    let halves = output.forward_residual(&attention.attend(&x, None, &at, &mut cache)?, &x)?;
    assert_eq!(values(&halves)?, values(&y)?);
    Ok((y, calls))
}

#[test]
fn an_op_can_be_ruled_out() -> Result<()> {
    for device in devices() {
        let (fused, calls) = attend(Fusion::all(), &device)?;
        assert_eq!(calls.count("flash_attention"), 1, "{calls}");
        let without = Fusion {
            flash_attention: false,
            ..Fusion::all()
        };
        for fusion in [without, Fusion::none()] {
            let (plain, calls) = attend(fusion, &device)?;
            assert_eq!(calls.count("flash_attention"), 0, "{calls}");
            let error = widest_error(&fused, &values(&plain)?)?;
            assert!(error < 1e-5, "{device:?} {fusion}: {error:e}");
        }
    }
    Ok(())
}

/// What docs/adopting.md shows stands in the example, or here.
#[test]
fn the_page_shows_code_that_is_there() {
    let page = include_str!("../../docs/adopting.md");
    let squeezed = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let code = squeezed(concat!(
        include_str!("../../examples/adopt.rs"),
        include_str!("../../examples/adopt/plain.rs"),
        include_str!("../../examples/adopt/ops.rs"),
        include_str!("../../examples/adopt/layers.rs"),
        include_str!("adopt.rs"),
    ));
    let mut blocks = 0;
    for block in page.split("```rust").skip(1) {
        let block = block.split("```").next().unwrap_or_default();
        let (_, block) = block.split_once('\n').expect("a line behind the fence");
        assert!(code.contains(&squeezed(block)), "{block}");
        blocks += 1;
    }
    assert!(blocks > 5, "{blocks}");
}
