//! Single ops against their references in float64.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cpu::packed::PackedMatrix;
use candle_fused::ops::flash_attention::{AttentionParams, reference as attention_reference};
use candle_fused::ops::linear::reference;
use candle_fused::ops::{
    Epilogue, Prologue, SamplingParams, Weight, flash_attention, quant_linear, sample,
};
use candle_fused::quant::{self, Scheme};
use std::sync::Arc;

/// Numbers from -1 to 1, the same ones each time.
pub fn noise(shape: &[usize]) -> Result<Tensor> {
    let mut state = 12345u32;
    let mut next = || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

/// Activations are in 16 bits, 8 with ternary weights.
fn close(x: &Tensor, weight: Weight, what: &str) -> Result<()> {
    let weights = [weight];
    let epilogue = Epilogue::default();
    let got = quant_linear(x, Prologue::None, &weights, &epilogue)?;
    let want = reference(x, Prologue::None, &weights, &epilogue)?.concat();
    let got = got.flatten_all()?.to_vec1::<f32>()?;
    assert_eq!(got.len(), want.len());
    let largest = want.iter().fold(0f64, |most, v| most.max(v.abs()));
    let most = if what.starts_with("ternary") {
        2e-3
    } else {
        1e-5
    };
    for (got, want) in got.iter().zip(&want) {
        let error = (f64::from(*got) - want).abs();
        assert!(error < most * largest, "{what}: {got} for {want}");
    }
    Ok(())
}

pub fn schemes() -> Result<()> {
    let (rows, cols) = (36, 256);
    let values = noise(&[rows, cols])?.flatten_all()?.to_vec1()?;
    for name in [
        "int8",
        "int4-g32",
        "int4-g64-z",
        "int4-g128",
        "ternary-row",
        "ternary-g64",
    ] {
        let scheme: Scheme = name.parse()?;
        let codes = quant::quantize(&values, rows, cols, scheme)?;
        for tokens in [1, 5] {
            let packed = PackedMatrix::from_codes(&codes)?;
            close(
                &noise(&[tokens, cols])?,
                Weight::Packed(Arc::new(packed)),
                name,
            )?;
        }
    }
    Ok(())
}

pub fn blocks() -> Result<()> {
    use GgmlDType::{Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
    let (rows, cols) = (36, 512);
    let values = noise(&[rows, cols])?;
    for dtype in [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2K, Q3K, Q4K, Q5K, Q6K] {
        let blocks = QTensor::quantize(&values, dtype)?;
        let packed = PackedMatrix::pack(dtype, rows, cols, &blocks.data()?)?;
        let weight = Weight::Packed(Arc::new(packed));
        close(&noise(&[3, cols])?, weight, &format!("{dtype:?}"))?;
    }
    Ok(())
}

pub fn attention() -> Result<()> {
    let (q, k) = (noise(&[1, 4, 3, 16])?, noise(&[1, 2, 9, 16])?);
    let params = AttentionParams {
        scale: 0.25,
        causal: true,
        ..Default::default()
    };
    let got = flash_attention(&q, &k, &k, &params)?.to_dtype(DType::F64)?;
    let want = attention_reference(&q, &k, &k, &params)?;
    let error = (got - want)?.abs()?.max_all()?.to_scalar::<f64>()?;
    assert!(error < 1e-5, "{error:e}");
    Ok(())
}

/// The largest logit, and draws that depend on the seed alone.
pub fn sampling() -> Result<()> {
    let logits = Tensor::new(&[[0f32, 3., 1., 2.]], &Device::Cpu)?;
    let greedy = sample(&logits, &[SamplingParams::default()], &[&[]])?;
    assert_eq!(greedy.to_vec1::<u32>()?, [1]);
    let drawn = |seed| -> Result<u32> {
        let params = SamplingParams {
            temperature: 5.,
            seed,
            ..Default::default()
        };
        Ok(sample(&logits, &[params], &[&[]])?.to_vec1::<u32>()?[0])
    };
    let draws = (0..32).map(drawn).collect::<Result<Vec<_>>>()?;
    assert_eq!(draws, (0..32).map(drawn).collect::<Result<Vec<_>>>()?);
    assert!((0..4).all(|token| draws.contains(&token)), "{draws:?}");
    Ok(())
}

/// An error and no trap.
pub fn too_much_memory() -> Result<()> {
    let built = PackedMatrix::builder(GgmlDType::Q8_0, 1 << 14, 1 << 17);
    assert!(built.is_err());
    Ok(())
}
