//! The least that a step could take: each part's weights, and the keys and values of live tokens, at the speed of a
//! copy, or its arithmetic at that of the library's products, whichever is the longer.

use super::drive::Means;
use crate::cases::{Dims, weight_bits};
use crate::child;
use crate::figures::{Limits, PartBound, StepBound, Work};
use anyhow::Result;
use candle_core::DType;
use clap::ValueEnum;
use common::shapes::Shape;

/// Of a named shape; nothing for files, whose sizes nobody knows here.
pub fn of(
    (model, format): (&str, &str),
    cpu: bool,
    means: &Means,
    limits: &Limits,
) -> Result<Option<StepBound>> {
    let Ok(shape) = Shape::from_str(model, true) else {
        return Ok(None);
    };
    let works = works(&Dims::of(shape)?, &Formats::of(format, cpu)?, means);
    let part = |(name, work): (&str, Work)| {
        let (seconds, bound) = limits.roof(work);
        PartBound {
            name: name.to_owned(),
            work,
            seconds,
            bound,
        }
    };
    Ok(Some(StepBound {
        rows: means.rows,
        prompt_rows: means.prompt_rows,
        keys: means.keys,
        step: means.step,
        parts: works.into_iter().map(part).collect(),
    }))
}

/// Bytes of a number in each place.
struct Formats {
    layers: f64,
    head: f64,
    /// Activations, and keys and values, which have their dtype.
    x: f64,
}

impl Formats {
    fn of(format: &str, cpu: bool) -> Result<Self> {
        let (format, asked) = child::activations_dtype(format)?;
        let loaded = if cpu { DType::F32 } else { DType::BF16 };
        let x = format.parse().ok().or(asked).unwrap_or(loaded);
        let x = x.size_in_bytes() as f64;
        let layers = format.strip_suffix("+head").unwrap_or(format);
        let is_dense = layers.parse::<DType>().is_ok();
        let bytes = if is_dense {
            x
        } else {
            weight_bits(layers) / 8.
        };
        let head = if layers == format { x } else { bytes };
        Ok(Self {
            layers: bytes,
            head,
            x,
        })
    }
}

/// What the parts of a step have to move and to compute, in all layers, by the names that [`Engine::profile`] has for
/// them.
///
/// [`Engine::profile`]: candle_fused::serving::Engine::profile
fn works(dims: &Dims, formats: &Formats, means: &Means) -> [(&'static str, Work); 7] {
    let layers = dims.layers as f64;
    let all = means.rows + means.prompt_rows;
    let [q, k, v] = dims.qkv();
    let up = if dims.neox { 1 } else { 2 };
    // 2 M N K operations, and the weights once.
    let product = |n: usize, k: usize, rows: f64, bytes: f64| {
        let weights = (n * k) as f64;
        Work {
            bytes: weights * bytes,
            flops: 2. * rows * weights,
        }
    };
    let in_layers = |n: usize, k: usize| {
        let one = product(n, k, all, formats.layers);
        Work {
            bytes: layers * one.bytes,
            flops: layers * one.flops,
        }
    };
    // Both products of attention, 2 operations each for a key, a query head and a dimension.
    let attention = Work {
        bytes: layers * means.keys * (k + v) as f64 * formats.x,
        flops: layers * means.keys * 4. * q as f64,
    };
    // Logits are read once, in f32.
    let sample = Work {
        bytes: means.rows * (4 * dims.vocab) as f64,
        flops: 0.,
    };
    [
        ("qkv", in_layers(q + k + v, dims.hidden)),
        ("attention", attention),
        ("output", in_layers(dims.hidden, q)),
        (
            if dims.neox { "up" } else { "gate_up" },
            in_layers(up * dims.inner, dims.hidden),
        ),
        ("down", in_layers(dims.hidden, dims.inner)),
        (
            "head",
            product(dims.vocab, dims.hidden, means.rows, formats.head),
        ),
        ("sample", sample),
    ]
}
