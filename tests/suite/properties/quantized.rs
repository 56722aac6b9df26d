//! `quant_linear` over GGUF blocks and over our own schemes.

use super::products::{Before, Operands, before, behind, off_centre};
use super::{
    cases, devices_for, draw, float, length, lie, ok, own_lie, poison, seeded, size, top, unit,
};
use crate::linear::ACTIVATIONS;
use crate::quant_linear::blocks_on;
use crate::quant_schemes::weight_on;
use crate::support::{devices, values};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::linear::reference;
use candle_fused::ops::{Activation, Epilogue, Weight, quant_linear};
use candle_fused::quant::Quantization;
use proptest::prelude::*;

const FORMATS: [&str; 20] = [
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q2k",
    "q3k",
    "q4k",
    "q5k",
    "q6k",
    "int8",
    "fp8",
    "fp8-block128",
    "nvfp4",
    "nf4",
    "int4-g32",
    "int4-g64-z",
    "int4-g128",
    "ternary-row",
    "ternary-g64",
];

fn weight(format: &str, rows: usize, blocks: usize, device: &Device) -> Result<Weight> {
    let format: Quantization = format.parse()?;
    match (format, format.scheme()) {
        (Quantization::Gguf(dtype), _) => {
            let wide = dtype.block_size() > 32;
            let cols = if wide {
                dtype.block_size()
            } else {
                32 * blocks
            };
            blocks_on(rows, cols, dtype, device)
        }
        (_, scheme) => {
            let scheme = scheme.expect("one of ours");
            let cols = scheme.group().unwrap_or(32) * blocks.min(4);
            weight_on(rows, cols, scheme, device)
        }
    }
}

/// Around a weight, on its device.
fn operands(
    weight: &Weight,
    m: usize,
    dtype: DType,
    exponent: i32,
    seed: u64,
    device: &Device,
) -> Result<Operands> {
    let rng = &mut seeded(seed);
    let (k, n) = (weight.cols(), weight.rows());
    let make = |t: Result<Tensor>| t?.to_device(device);
    Ok(Operands {
        x: make(draw(rng, &[m, k], size(dtype, exponent), dtype))?,
        norm: make(draw(rng, &[k], 1., dtype))?,
        weight: make(draw(rng, &[0, k], 1., dtype))?,
        bias: make(draw(rng, &[n], 1., dtype))?,
        residual: make(draw(rng, &[m, n], 1., dtype))?,
    })
}

/// Result and plain form.
fn both(
    operands: &Operands,
    weight: &Weight,
    before: Before,
    activation: Activation,
) -> Result<[Vec<f64>; 2]> {
    let epilogue = Epilogue {
        bias: Some(&operands.bias),
        activation,
        residuals: &[],
    };
    let weights = std::slice::from_ref(weight);
    let got = quant_linear(&operands.x, operands.prologue(before), weights, &epilogue)?;
    let expected = reference(&operands.x, operands.prologue(before), weights, &epilogue)?;
    Ok([values(&got)?, expected.concat()])
}

/// The weights as numbers, row after row.
fn numbers(weight: &Weight) -> Result<Vec<f64>> {
    let device = match weight {
        Weight::Packed(_) => Device::Cpu,
        #[cfg(feature = "cuda")]
        Weight::Blocks(blocks) => blocks.device().clone(),
        Weight::Dense(t) => t.device().clone(),
    };
    let eye = Tensor::eye(weight.cols(), DType::F32, &device)?;
    let columns = reference(
        &eye,
        candle_fused::ops::Prologue::None,
        std::slice::from_ref(weight),
        &Epilogue::default(),
    )?;
    let row = |r: usize| columns.iter().map(move |column| column[r]);
    Ok((0..weight.rows()).flat_map(row).collect())
}

proptest! {
    #![proptest_config(cases())]

    /// An activation in 8 bits is off by half of a 127th of its row's largest at most.
    #[test]
    fn quantized_products_agree(
        (m, half, blocks) in (length(12), 1usize..20, 1usize..6),
        (format, before) in (prop::sample::select(&FORMATS[..]), before()),
        activation in prop::sample::select(&ACTIVATIONS[..]),
        (dtype, lie, exponent, seed) in (float(), lie(), -20i32..20, any::<u64>()),
    ) {
        for device in devices_for(m) {
            let weight = ok(weight(format, 2 * half, blocks, &device))?;
            let mut operands = ok(operands(&weight, m, dtype, exponent, seed, &device))?;
            operands.x = ok(lie.place(&operands.x, &device))?;
            let [got, expected] = ok(both(&operands, &weight, before, activation))?;
            let numbers = ok(numbers(&weight))?;
            // The sums of magnitudes, and what they are if every activation is as large as its row's largest.
            let sums = ok(operands.sums(before, &numbers))?;
            let largest = ok(largest(&operands, before))?;
            let heaviest = numbers.chunks(weight.cols()).map(|w| w.iter().map(|v| v.abs()).sum::<f64>());
            let heaviest = heaviest.fold(0., f64::max);
            let steps = if device.is_cpu() { 254. } else { 120. };
            let off = ok(off_centre(&operands, before, &numbers))?;
            let error = 1.05 * largest * heaviest / steps + (1e-5 + 2.5 * unit(dtype)) * sums + off;
            let limit = unit(dtype) * top(&expected) + behind(activation, error, sums + error);
            for (g, e) in got.iter().zip(&expected) {
                prop_assert!((g - e).abs() <= limit, "{format} {device:?}: {g} {e}, {limit:e} apart at most");
            }
        }
    }

    #[test]
    fn quantized_products_keep_poison_in_its_row(
        (m, half, blocks) in (1usize..12, 1usize..20, 1usize..6),
        (format, before) in (prop::sample::select(&FORMATS[..]), before()),
        (dtype, lie, poison, at, seed) in (float(), own_lie(), poison(), any::<prop::sample::Index>(), any::<u64>()),
    ) {
        for device in devices() {
            let weight = ok(weight(format, 2 * half, blocks, &device))?;
            let clean = ok(operands(&weight, m, dtype, 0, seed, &device))?;
            let (k, n) = (weight.cols(), weight.rows());
            let at = at.index(m * k);
            let run = |x: Tensor| {
                let x = lie.place(&x, &device)?;
                both(&Operands { x, ..clean.clone() }, &weight, before, Activation::None)
            };
            let x = ok(clean.x.to_device(&Device::Cpu))?;
            let bad = ok(poison.put(&x, at))?;
            let ([clean, _], [dirty, expected]) = (ok(run(x))?, ok(run(bad))?);
            poison.check(&clean, &dirty, &expected, |i| i / n == at / k)?;
        }
    }
}

/// The largest activation behind the prologue.
fn largest(operands: &Operands, before: Before) -> Result<f64> {
    let eye = Tensor::eye(operands.x.dims()[1], DType::F32, operands.x.device())?;
    let x = reference(
        &operands.x,
        operands.prologue(before),
        &[Weight::Dense(eye)],
        &Epilogue::default(),
    )?;
    Ok(x.iter().fold(0., |m: f64, row| m.max(top(row))))
}
