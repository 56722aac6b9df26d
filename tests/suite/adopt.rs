//! The model of `examples/adopt.rs`: its three forms give the same output, and the last is fused.

use crate::adopt_example::{Config, Model, layers, likeliest, ops, plain, weights};
use crate::support::devices;
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::trace;

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

fn difference(a: &Tensor, b: &Tensor) -> Result<f32> {
    (a - b)?.abs()?.flatten_all()?.max(0)?.to_scalar()
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
                errors.push(far.into_iter().fold(0., f32::max));
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
