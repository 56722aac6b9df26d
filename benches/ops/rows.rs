//! The rows: an op, a shape, candle's way and the reference.

use crate::timing::{Row, Run, near};
use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{D, DType, Device, Module, Result, Tensor, bail};
use candle_fused::cpu::packed::PackedMatrix;
use candle_fused::ops::{self, Activation, AttentionParams, Epilogue, Prologue, Weight};
use std::sync::Arc;

/// Each op's stem with its shapes: rows of x, the width, the dtype or block type.
pub const ALL: [(&str, &[&str]); 11] = [
    (
        "residual_add",
        &["1 576 f32", "512 576 f32", "512 576 bf16"],
    ),
    ("rms_norm", &["1 576 f32", "512 576 f32", "512 576 bf16"]),
    ("layer_norm", &["1 576 f32", "512 576 f32", "512 576 bf16"]),
    (
        "linear",
        &[
            "1 576 f32",
            "1 576 bf16",
            "1 576 f16",
            "512 576 f32",
            "512 576 bf16",
        ],
    ),
    (
        "rms_norm_linear",
        &["1 576 f32", "1 576 bf16", "512 576 f32", "512 576 bf16"],
    ),
    (
        "layer_norm_linear",
        &["1 768 f32", "1 768 bf16", "512 768 f32", "512 768 bf16"],
    ),
    (
        "quant_linear",
        &[
            "1 768 q4_0",
            "1 768 q4_1",
            "1 768 q5_0",
            "1 768 q5_1",
            "1 768 q8_0",
            "1 768 q4k",
            "1 768 q5k",
            "1 768 q6k",
            "512 768 q4_0",
            "512 768 q4_1",
            "512 768 q5_0",
            "512 768 q5_1",
            "512 768 q8_0",
            "512 768 q4k",
            "512 768 q5k",
            "512 768 q6k",
        ],
    ),
    ("rope", &["1 64 f32", "512 64 f32"]),
    (
        "flash_attention",
        &["1 64 f32", "1 512 f32", "1 2048 f32", "512 512 f32"],
    ),
    ("flash_decoding", &["1 512 f32"]),
    ("sample", &["1 49152 f32"]),
];

/// The row of an op for one of its shapes.
pub fn row(stem: &str, shape: &str) -> Result<Row> {
    let parts: Vec<_> = shape.split(' ').collect();
    let [rows, width, kind] = parts[..] else {
        bail!("a shape is rows, width and kind, not {shape}");
    };
    let number = |t: &str| t.parse::<usize>().map_err(candle_core::Error::wrap);
    let (m, k) = (number(rows)?, number(width)?);
    match stem {
        "residual_add" => residual_add(m, k, dtype(kind)?),
        "rms_norm" => rms_norm(m, k, dtype(kind)?),
        "layer_norm" => layer_norm(m, k, dtype(kind)?),
        "linear" => linear(m, k, dtype(kind)?),
        "rms_norm_linear" => rms_norm_linear(m, k, dtype(kind)?),
        "layer_norm_linear" => layer_norm_linear(m, k, dtype(kind)?),
        "quant_linear" => quant_linear(m, k, block_type(kind)?),
        "rope" => rope(m, k),
        "flash_attention" => flash_attention(m, k),
        "flash_decoding" => flash_decoding(m, k),
        "sample" => sample(m, k),
        _ => bail!("no op is called {stem}"),
    }
}

fn dtype(name: &str) -> Result<DType> {
    name.parse().map_err(candle_core::Error::wrap)
}

fn block_type(name: &str) -> Result<GgmlDType> {
    Ok(match name {
        "q4_0" => GgmlDType::Q4_0,
        "q4_1" => GgmlDType::Q4_1,
        "q5_0" => GgmlDType::Q5_0,
        "q5_1" => GgmlDType::Q5_1,
        "q8_0" => GgmlDType::Q8_0,
        "q4k" => GgmlDType::Q4K,
        "q5k" => GgmlDType::Q5K,
        "q6k" => GgmlDType::Q6K,
        _ => bail!("{name} is no block type"),
    })
}

fn randn(dims: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::randn(0f32, 1., dims, &Device::Cpu)?.to_dtype(dtype)
}

/// Rounding to the dtype on the way, which candle does more often than the ops.
fn limit(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 5e-3,
        _ => 4e-2,
    }
}

fn checked(plain: Run, fused: Run, expected: Vec<f64>, limit: f64, bytes: usize) -> Row {
    let check = move |a: &Tensor, b: &Tensor| {
        near("candle", a, &expected, limit)?;
        near("candle-fused", b, &expected, limit)
    };
    Row {
        plain,
        fused,
        check: Box::new(check),
        bytes,
    }
}

fn residual_add(m: usize, k: usize, dtype: DType) -> Result<Row> {
    let (x, a, b) = (
        randn(&[m, k], dtype)?,
        randn(&[m, k], dtype)?,
        randn(&[m, k], dtype)?,
    );
    let expected = ops::residual_add::reference(&x, &[&a, &b])?;
    let bytes = 4 * m * k * dtype.size_in_bytes();
    let (x2, a2, b2) = (x.clone(), a.clone(), b.clone());
    let plain = Box::new(move || (&x + &a)? + &b);
    let fused = Box::new(move || ops::residual_add(&x2, &[&a2, &b2]));
    Ok(checked(plain, fused, expected, limit(dtype), bytes))
}

/// SmolLM2's attention behind `keys` tokens; candle's way appends by concatenation.
fn flash_decoding(batch: usize, keys: usize) -> Result<Row> {
    let (heads, kv_heads, dim) = (9, 3, 64);
    let qkv = randn(&[batch, (heads + 2 * kv_heads) * dim], DType::F32)?;
    let cache = || randn(&[batch, kv_heads, keys + 1, dim], DType::F32);
    let (k, v) = (cache()?, cache()?);
    let angles = randn(&[keys + 1, dim / 2], DType::F32)?;
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    let position = Tensor::full(keys as u32, batch, &Device::Cpu)?;
    let scale = 1. / (dim as f32).sqrt();
    let config = ops::FlashDecoding {
        heads,
        cos: &cos,
        sin: &sin,
        style: ops::RopeStyle::HalfSplit,
        norms: None,
        scale,
        window: None,
        softcap: None,
    };
    let expected = ops::flash_decoding::reference(&qkv, &k, &v, &position, &config)?;
    let (k3, v3, qkv3, cos3, sin3) = (k.clone(), v.clone(), qkv.clone(), cos.clone(), sin.clone());
    let plain = Box::new(move || {
        let part = |first: usize, n: usize| {
            qkv3.narrow(1, first * dim, n * dim)?
                .reshape((batch, n, 1, dim))
        };
        let (cos, sin) = (cos3.narrow(0, keys, 1)?, sin3.narrow(0, keys, 1)?);
        let rotate = |t: Tensor| candle_nn::rotary_emb::rope(&t.contiguous()?, &cos, &sin);
        let (q, new_k) = (rotate(part(0, heads)?)?, rotate(part(heads, kv_heads)?)?);
        let join = |cache: &Tensor, new: &Tensor| {
            let all = Tensor::cat(&[&cache.narrow(2, 0, keys)?, new], 2)?;
            all.unsqueeze(2)?
                .expand((batch, kv_heads, heads / kv_heads, keys + 1, dim))?
                .reshape((batch, heads, keys + 1, dim))
        };
        let (k, v) = (
            join(&k3, &new_k)?,
            join(&v3, &part(heads + kv_heads, kv_heads)?)?,
        );
        let scores = (q.matmul(&k.t()?)? * f64::from(scale))?;
        candle_nn::ops::softmax(&scores, D::Minus1)?
            .matmul(&v)?
            .flatten_all()
    });
    let fused = Box::new(move || {
        let config = ops::FlashDecoding {
            heads,
            cos: &cos,
            sin: &sin,
            style: ops::RopeStyle::HalfSplit,
            norms: None,
            scale,
            window: None,
            softcap: None,
        };
        ops::flash_decoding(&qkv, &k, &v, &position, &config)
    });
    let bytes = 2 * 4 * batch * kv_heads * keys * dim;
    Ok(checked(plain, fused, expected, 1e-5, bytes))
}

/// The likeliest token.
fn sample(m: usize, vocab: usize) -> Result<Row> {
    let logits = randn(&[m, vocab], DType::F32)?;
    let params = vec![ops::SamplingParams::default(); m];
    let expected = logits.argmax(D::Minus1)?.to_vec1::<u32>()?;
    let expected = expected.into_iter().map(f64::from).collect();
    let held = logits.clone();
    let plain = Box::new(move || logits.argmax(D::Minus1));
    let fused = Box::new(move || ops::sample(&held, &params, &vec![&[][..]; m]));
    Ok(checked(plain, fused, expected, 0., 4 * m * vocab))
}

fn rms_norm(m: usize, k: usize, dtype: DType) -> Result<Row> {
    let (x, w) = (randn(&[m, k], dtype)?, randn(&[k], dtype)?);
    let expected = ops::rms_norm::reference(&x, &w, 1e-5)?;
    let bytes = 2 * m * k * dtype.size_in_bytes();
    let (x2, w2) = (x.clone(), w.clone());
    let plain = Box::new(move || candle_nn::ops::rms_norm(&x, &w, 1e-5));
    let fused = Box::new(move || ops::rms_norm(&x2, &w2, 1e-5));
    Ok(checked(plain, fused, expected, limit(dtype), bytes))
}

fn layer_norm(m: usize, k: usize, dtype: DType) -> Result<Row> {
    let (x, w, b) = (
        randn(&[m, k], dtype)?,
        randn(&[k], dtype)?,
        randn(&[k], dtype)?,
    );
    let expected = ops::layer_norm::reference(&x, &w, Some(&b), 1e-5)?;
    let bytes = 2 * m * k * dtype.size_in_bytes();
    let (x2, w2, b2) = (x.clone(), w.clone(), b.clone());
    let layer = candle_nn::LayerNorm::new(w, b, 1e-5);
    let plain = Box::new(move || layer.forward(&x));
    let fused = Box::new(move || ops::layer_norm(&x2, &w2, Some(&b2), 1e-5));
    Ok(checked(plain, fused, expected, limit(dtype), bytes))
}

/// SmolLM2's down projection with its residual, K inputs widened to the MLP's 1536.
fn linear(m: usize, n: usize, dtype: DType) -> Result<Row> {
    let k = 1536;
    let (x, w, r) = (
        randn(&[m, k], dtype)?,
        randn(&[n, k], dtype)?,
        randn(&[m, n], dtype)?,
    );
    let residuals = [&r];
    let epilogue = Epilogue {
        residuals: &residuals,
        ..Default::default()
    };
    let weights = [Weight::Dense(w.clone())];
    let expected = ops::linear::reference(&x, Prologue::None, &weights, &epilogue)?.concat();
    let bytes = (n * k + m * (k + 2 * n)) * dtype.size_in_bytes();
    let (x2, w2, r2) = (x.clone(), w.clone(), r.clone());
    let plain = Box::new(move || x.matmul(&w.t()?)? + &r);
    let fused = Box::new(move || {
        ops::linear(
            &x2,
            &w2,
            &Epilogue {
                residuals: &[&r2],
                ..Default::default()
            },
        )
    });
    Ok(checked(plain, fused, expected, limit(dtype), bytes))
}

/// SmolLM2's gate and up projections behind their norm.
fn rms_norm_linear(m: usize, k: usize, dtype: DType) -> Result<Row> {
    let n = 1536;
    let (x, norm) = (randn(&[m, k], dtype)?, randn(&[k], dtype)?);
    let (gate, up) = (randn(&[n, k], dtype)?, randn(&[n, k], dtype)?);
    let epilogue = Epilogue {
        activation: Activation::SwiGlu,
        ..Default::default()
    };
    let prologue = Prologue::RmsNorm {
        weight: &norm,
        eps: 1e-5,
    };
    let weights = [Weight::Dense(gate.clone()), Weight::Dense(up.clone())];
    let expected = ops::linear::reference(&x, prologue, &weights, &epilogue)?.concat();
    let bytes = (2 * n * k + m * (k + n)) * dtype.size_in_bytes();
    let (x2, norm2, gate2, up2) = (x.clone(), norm.clone(), gate.clone(), up.clone());
    let plain = Box::new(move || {
        let x = candle_nn::ops::rms_norm(&x, &norm, 1e-5)?;
        x.matmul(&gate.t()?)?.silu()? * x.matmul(&up.t()?)?
    });
    let fused = Box::new(move || {
        let mut y = ops::rms_norm_linear(&x2, &norm2, 1e-5, &[&gate2, &up2], &epilogue)?;
        Ok(y.remove(0))
    });
    Ok(checked(plain, fused, expected, limit(dtype), bytes))
}

/// Pythia-160M's first matrix of the MLP behind its norm.
fn layer_norm_linear(m: usize, k: usize, dtype: DType) -> Result<Row> {
    let n = 4 * k;
    let (x, w) = (randn(&[m, k], dtype)?, randn(&[n, k], dtype)?);
    let [norm, shift] = [randn(&[k], dtype)?, randn(&[k], dtype)?];
    let bias = randn(&[n], dtype)?;
    let prologue = Prologue::LayerNorm {
        weight: &norm,
        bias: Some(&shift),
        eps: 1e-5,
    };
    let epilogue = Epilogue {
        bias: Some(&bias),
        activation: Activation::Gelu,
        ..Default::default()
    };
    let weights = [Weight::Dense(w.clone())];
    let expected = ops::linear::reference(&x, prologue, &weights, &epilogue)?.concat();
    let bytes = (n * k + m * (k + n)) * dtype.size_in_bytes();
    let plain = candle_nn::LayerNorm::new(norm.clone(), shift.clone(), 1e-5);
    let (x2, w2, bias2) = (x.clone(), w.clone(), bias.clone());
    let plain = Box::new(move || {
        let y = plain.forward(&x2)?.matmul(&w2.t()?)?;
        y.broadcast_add(&bias2)?.gelu_erf()
    });
    let fused = Box::new(move || {
        let epilogue = Epilogue {
            bias: Some(&bias),
            activation: Activation::Gelu,
            ..Default::default()
        };
        let mut y = ops::layer_norm_linear(&x, &norm, Some(&shift), 1e-5, &[&w], &epilogue)?;
        Ok(y.remove(0))
    });
    Ok(checked(plain, fused, expected, limit(dtype), bytes))
}

/// A square projection; 768 divides by every block.
fn quant_linear(m: usize, k: usize, block: GgmlDType) -> Result<Row> {
    let n = 768;
    let x = randn(&[m, k], DType::F32)?;
    let w = Arc::new(QTensor::quantize(&randn(&[n, k], DType::F32)?, block)?);
    let packed = Arc::new(PackedMatrix::pack(block, n, k, &w.data()?)?);
    let bytes = packed.size_in_bytes() + 4 * m * (n + k);
    let weights = [Weight::Packed(packed)];
    let none = Epilogue::default();
    let expected = ops::quant_linear::reference(&x, Prologue::None, &weights, &none)?.concat();
    let stock = QMatMul::from_arc(w)?;
    let x2 = x.clone();
    let plain = Box::new(move || stock.forward(&x));
    let fused = Box::new(move || ops::quant_linear(&x2, Prologue::None, &weights, &none));
    // Both sides quantize activations to int8.
    Ok(checked(plain, fused, expected, 2.5e-2, bytes))
}

fn rope(m: usize, head_dim: usize) -> Result<Row> {
    let x = randn(&[1, 9, m, head_dim], DType::F32)?;
    let angles = randn(&[m, head_dim / 2], DType::F32)?;
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    let style = ops::RopeStyle::HalfSplit;
    let rotation = ops::Rotation {
        cos: &cos,
        sin: &sin,
        position: 0,
        style,
    };
    let expected = ops::rope::reference(&x, &rotation)?;
    let bytes = 2 * 4 * x.elem_count();
    let (x2, cos2, sin2) = (x.clone(), cos.clone(), sin.clone());
    let plain = Box::new(move || candle_nn::rotary_emb::rope(&x, &cos, &sin));
    let fused = Box::new(move || {
        ops::rope(
            &x2,
            &ops::Rotation {
                cos: &cos2,
                sin: &sin2,
                position: 0,
                style,
            },
        )
    });
    Ok(checked(plain, fused, expected, 1e-5, bytes))
}

/// SmolLM2's heads: 9 query heads over 3 key and value heads of width 64.
fn flash_attention(m: usize, keys: usize) -> Result<Row> {
    let (heads, kv_heads, d) = (9, 3, 64);
    let q = randn(&[1, heads, m, d], DType::F32)?;
    let k = randn(&[1, kv_heads, keys, d], DType::F32)?;
    let v = randn(&[1, kv_heads, keys, d], DType::F32)?;
    let params = AttentionParams {
        scale: 0.125,
        causal: true,
        ..Default::default()
    };
    let expected = ops::flash_attention::reference(&q, &k, &v, &params)?;
    let expected = expected
        .to_dtype(DType::F64)?
        .flatten_all()?
        .to_vec1::<f64>()?;
    let bytes = 4 * (2 * heads * m * d + 2 * kv_heads * keys * d);
    let hidden = (0..m).flat_map(|i| {
        (0..keys).map(move |j| {
            if j + m > keys + i {
                f32::NEG_INFINITY
            } else {
                0.
            }
        })
    });
    let mask = Tensor::from_iter(hidden, &Device::Cpu)?.reshape((m, keys))?;
    let (q2, k2, v2) = (q.clone(), k.clone(), v.clone());
    let plain = Box::new(move || {
        let repeat =
            |t: &Tensor| candle_transformers::utils::repeat_kv(t.clone(), heads / kv_heads);
        let scores = (q.matmul(&repeat(&k)?.t()?)? * 0.125)?.broadcast_add(&mask)?;
        candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&repeat(&v)?)
    });
    let fused = Box::new(move || ops::flash_attention(&q2, &k2, &v2, &params)?.contiguous());
    Ok(checked(plain, fused, expected, 1e-5, bytes))
}
