//! Rotary embedding and the cache append against float64 and candle.

mod tokens;

use crate::support::{devices, layouts_on, randn, randn_on, values, widest_error};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::rope::{
    HeadNorms, RopeAppend, RopeStyle, Rotation, reference, reference_append, rope, rope_append,
};
use candle_fused::trace;

const STYLES: [RopeStyle; 2] = [RopeStyle::HalfSplit, RopeStyle::Interleaved];

/// Tables `[positions, pairs]` of random angles.
fn tables(
    positions: usize,
    pairs: usize,
    dtype: DType,
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    let angles = randn(&[positions, pairs], DType::F32)?;
    let table = |t: Tensor| t.to_dtype(dtype)?.to_device(device);
    Ok((table(angles.cos()?)?, table(angles.sin()?)?))
}

/// Half a unit in the last place from rounding once, a unit of f32 from computing.
fn limit(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2.4e-7,
        DType::F16 => 5e-4,
        _ => 4e-3,
    }
}

#[test]
fn rotations_agree_with_float64() -> Result<()> {
    let types = [DType::F32, DType::F16, DType::BF16];
    for device in devices() {
        for (dtype, table) in types
            .into_iter()
            .flat_map(|d| types.map(|table| (d, table)))
        {
            for style in STYLES {
                // Whole heads, a quarter (Pythia), an odd rest, nothing at all.
                for (head_dim, pairs) in [(64, 32), (80, 10), (96, 48), (7, 2), (2, 1), (16, 0)] {
                    let x = randn_on(&[2, 3, 5, head_dim], dtype, &device)?;
                    let (cos, sin) = tables(40, pairs, table, &device)?;
                    let rotation = Rotation {
                        cos: &cos,
                        sin: &sin,
                        position: 11,
                        style,
                    };
                    let got = rope(&x, &rotation)?;
                    assert_eq!((got.dims(), got.dtype()), (x.dims(), dtype));
                    let error = widest_error(&got, &reference(&x, &rotation)?)?;
                    assert!(
                        error < limit(dtype),
                        "{device:?} {dtype:?} {table:?} {style:?} {head_dim}: {error:e}"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn whole_heads_are_rotated_as_candle_does() -> Result<()> {
    for device in devices() {
        let x = randn(&[1, 4, 9, 64], DType::F32)?;
        let (cos, sin) = tables(9, 32, DType::F32, &Device::Cpu)?;
        for style in STYLES {
            let expected = match style {
                RopeStyle::HalfSplit => candle_nn::rotary_emb::rope(&x, &cos, &sin)?,
                RopeStyle::Interleaved => candle_nn::rotary_emb::rope_i(&x, &cos, &sin)?,
            };
            let (cos, sin) = (cos.to_device(&device)?, sin.to_device(&device)?);
            let got = rope(
                &x.to_device(&device)?,
                &Rotation {
                    cos: &cos,
                    sin: &sin,
                    position: 0,
                    style,
                },
            )?;
            assert!(widest_error(&got, &values(&expected)?)? < 2.4e-7);
        }
    }
    Ok(())
}

#[test]
fn any_layout_gives_what_its_copy_gives() -> Result<()> {
    for device in devices() {
        for x in layouts_on(DType::F32, &device)? {
            let x = x.unsqueeze(0)?;
            let x = if x.rank() == 3 { x.unsqueeze(0)? } else { x };
            let (_, _, tokens, head_dim) = x.dims4()?;
            let (cos, sin) = tables(tokens + 2, head_dim / 2, DType::BF16, &device)?;
            for style in STYLES {
                let rotation = Rotation {
                    cos: &cos,
                    sin: &sin,
                    position: 2,
                    style,
                };
                assert_eq!(
                    values(&rope(&x, &rotation)?)?,
                    values(&rope(&x.contiguous()?, &rotation)?)?
                );
            }
        }
    }
    Ok(())
}

/// The append is the rotation of its parts, at its slots and nowhere else.
#[test]
fn appending_rotates_and_writes_in_place() -> Result<()> {
    for device in devices() {
        for (dtype, cache_dtype) in [
            (DType::F32, DType::F32),
            (DType::BF16, DType::BF16),
            (DType::F16, DType::F16),
            (DType::F32, DType::F16),
            (DType::BF16, DType::F32),
        ] {
            for style in STYLES {
                for shape in [(1, 1, 9, 3, 64), (2, 5, 4, 1, 80), (1, 40, 2, 2, 16)] {
                    let pairs = shape.4 / 4;
                    append_in_place(&device, (dtype, cache_dtype), style, shape, pairs)?;
                    let pairs = shape.4 / 2;
                    append_in_place(&device, (dtype, cache_dtype), style, shape, pairs)?;
                }
            }
        }
    }
    Ok(())
}

fn append_in_place(
    device: &Device,
    (dtype, cache_dtype): (DType, DType),
    style: RopeStyle,
    (batch, tokens, heads, kv_heads, head_dim): (usize, usize, usize, usize, usize),
    pairs: usize,
) -> Result<()> {
    let width = (heads + 2 * kv_heads) * head_dim;
    let qkv = randn_on(&[batch, tokens, width], dtype, device)?;
    let cache = |_| randn_on(&[batch, kv_heads, 64, head_dim], cache_dtype, device);
    let (k_cache, v_cache) = (cache(0)?, cache(1)?);
    let (k_before, v_before) = (k_cache.copy()?, v_cache.copy()?);
    let (cos, sin) = tables(100, pairs, DType::F32, device)?;
    let rotation = Rotation {
        cos: &cos,
        sin: &sin,
        position: 30,
        style,
    };
    let append = RopeAppend {
        rotation,
        heads,
        kv_heads,
        slot: 7,
        norms: None,
    };
    let (q, calls) = trace::capture(|| rope_append(&qkv, &append, &k_cache, &v_cache));
    let q = q?;
    assert_eq!(calls.count("rope"), 1);
    let part = |first: usize, n: usize| {
        qkv.narrow(2, first * head_dim, n * head_dim)?
            .reshape((batch, tokens, n, head_dim))?
            .transpose(1, 2)
    };
    assert_eq!(values(&q)?, values(&rope(&part(0, heads)?, &rotation)?)?);
    let k = rope(&part(heads, kv_heads)?.to_dtype(DType::F32)?, &rotation)?;
    let v = part(heads + kv_heads, kv_heads)?;
    for (cache, before, new) in [(&k_cache, &k_before, k), (&v_cache, &v_before, v)] {
        let written = cache.narrow(2, 7, tokens)?;
        let new = new.to_device(&Device::Cpu)?.to_dtype(cache_dtype)?;
        assert_eq!(values(&written)?, values(&new)?);
        let behind = |t: &Tensor| values(&t.narrow(2, 7 + tokens, 57 - tokens)?);
        assert_eq!(behind(cache)?, behind(before)?);
        let front = |t: &Tensor| values(&t.narrow(2, 0, 7)?);
        assert_eq!(front(cache)?, front(before)?);
    }
    Ok(())
}

/// Qwen3's form: each head of q and k is normalised, then rotated. Tolerances: the norm rounds
/// twice, the rotation once.
#[test]
fn heads_are_normalised_before_they_are_rotated() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for style in STYLES {
                for (batch, tokens, heads, kv_heads, head_dim) in
                    [(1, 1, 16, 8, 128), (2, 20, 3, 1, 64), (1, 3, 2, 1, 10)]
                {
                    let width = (heads + 2 * kv_heads) * head_dim;
                    let qkv = randn_on(&[batch, tokens, width], dtype, &device)?;
                    let cache = |_| randn_on(&[batch, kv_heads, 32, head_dim], dtype, &device);
                    let (k_cache, v_cache) = (cache(0)?, cache(1)?);
                    let (q_norm, k_norm) = (
                        randn_on(&[head_dim], dtype, &device)?,
                        randn_on(&[head_dim], dtype, &device)?,
                    );
                    let (cos, sin) = tables(50, head_dim / 2, DType::F32, &device)?;
                    let append = RopeAppend {
                        rotation: Rotation {
                            cos: &cos,
                            sin: &sin,
                            position: 4,
                            style,
                        },
                        heads,
                        kv_heads,
                        slot: 4,
                        norms: Some(HeadNorms {
                            q: &q_norm,
                            k: &k_norm,
                            eps: 1e-6,
                        }),
                    };
                    let q = rope_append(&qkv, &append, &k_cache, &v_cache)?;
                    let expected = reference_append(&qkv, &append)?;
                    let written = |t: &Tensor| t.narrow(2, 4, tokens);
                    let got = [q, written(&k_cache)?, written(&v_cache)?];
                    for (got, expected) in got.iter().zip(&expected) {
                        let error = widest_error(got, expected)?;
                        let limit = 3. * limit(dtype);
                        assert!(error < limit, "{device:?} {dtype:?} {head_dim}: {error:e}");
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn bad_arguments_of_a_rotation_are_named() -> Result<()> {
    let x = randn(&[1, 2, 5, 8], DType::F32)?;
    let (cos, sin) = tables(6, 4, DType::F32, &Device::Cpu)?;
    let rotation = Rotation {
        cos: &cos,
        sin: &sin,
        position: 0,
        style: RopeStyle::HalfSplit,
    };
    let message = |x: &Tensor, r: Rotation<'_>| rope(x, &r).expect_err("").to_string();
    assert!(message(&x.squeeze(0)?, rotation).contains("x has shape [2, 5, 8]"));
    let late = Rotation {
        position: 2,
        ..rotation
    };
    assert!(message(&x, late).contains("cos has 6 positions"));
    let (wide, _) = tables(6, 5, DType::F32, &Device::Cpu)?;
    let unlike = Rotation {
        sin: &wide,
        ..rotation
    };
    assert!(message(&x, unlike).contains("sin has shape"));
    let both = Rotation {
        cos: &wide,
        ..unlike
    };
    assert!(message(&x, both).contains("a head has 8"));
    let whole = Tensor::ones((6, 4), DType::U32, &Device::Cpu)?;
    let whole = Rotation {
        cos: &whole,
        ..rotation
    };
    assert!(message(&x, whole).contains("cos is U32"));
    Ok(())
}

#[test]
fn bad_arguments_of_an_append_are_named() -> Result<()> {
    let (cos, sin) = tables(6, 4, DType::F32, &Device::Cpu)?;
    let qkv = randn(&[1, 2, 32], DType::F32)?;
    let cache = randn(&[1, 1, 4, 8], DType::F32)?;
    let append = RopeAppend {
        rotation: Rotation {
            cos: &cos,
            sin: &sin,
            position: 0,
            style: RopeStyle::HalfSplit,
        },
        heads: 2,
        kv_heads: 1,
        slot: 0,
        norms: None,
    };
    let message = |a: RopeAppend<'_>, k: &Tensor, v: &Tensor| {
        rope_append(&qkv, &a, k, v).expect_err("").to_string()
    };
    let three = RopeAppend { heads: 3, ..append };
    assert!(message(three, &cache, &cache).contains("qkv is 32 wide"));
    let late = RopeAppend { slot: 3, ..append };
    assert!(message(late, &cache, &cache.copy()?).contains("k_cache has 4 slots"));
    let other = randn(&[1, 2, 4, 8], DType::F32)?;
    assert!(message(append, &cache, &other).contains("v_cache has shape"));
    let narrowed = randn(&[1, 1, 4, 9], DType::F32)?.narrow(3, 0, 8)?;
    assert!(message(append, &narrowed, &cache).contains("contiguous"));
    assert!(message(append, &cache, &cache).contains("v_cache and k_cache overlap"));
    let (narrow, fine) = (randn(&[7], DType::F32)?, randn(&[8], DType::F32)?);
    let norms = Some(HeadNorms {
        q: &fine,
        k: &narrow,
        eps: 1e-6,
    });
    let normed = RopeAppend { norms, ..append };
    assert!(message(normed, &cache, &cache.copy()?).contains("norms.k is F32 of shape [7]"));
    let half = cache.to_dtype(DType::F16)?;
    assert!(message(append, &cache, &half).contains("v_cache is F16"));
    let far = RopeAppend {
        slot: usize::MAX,
        ..append
    };
    assert!(message(far, &cache, &cache.copy()?).contains("do not fit"));
    Ok(())
}

/// By where they lie in memory, whatever tensors they are views of.
#[test]
fn what_overlaps_the_caches_is_refused() -> Result<()> {
    for device in devices() {
        let all = randn(&[4 * 32], DType::F32)?.to_device(&device)?;
        let view = |first: usize, dims: &[usize]| {
            all.narrow(0, first, dims.iter().product())?.reshape(dims)
        };
        let table = Tensor::ones((6, 4), DType::F32, &device)?;
        let qkv = Tensor::ones((1, 2, 32), DType::F32, &device)?;
        let run = |qkv: &Tensor, table: &Tensor, k: &Tensor, v: &Tensor| {
            let rotation = Rotation {
                cos: table,
                sin: table,
                position: 1,
                style: RopeStyle::HalfSplit,
            };
            let append = RopeAppend {
                rotation,
                heads: 2,
                kv_heads: 1,
                slot: 0,
                norms: None,
            };
            let result = rope_append(qkv, &append, k, v);
            Ok::<_, candle_core::Error>(result.err().map(|e| e.to_string()).unwrap_or_default())
        };
        let cache = |first| view(first, &[1, 1, 4, 8]);
        let (k, v) = (cache(0)?, cache(32)?);
        let said = run(&qkv, &table, &k, &cache(31)?)?;
        assert!(said.contains("v_cache and k_cache overlap"), "{said}");
        let said = run(&qkv, &table, &k, &cache(0)?)?;
        assert!(said.contains("v_cache and k_cache overlap"), "{said}");
        let said = run(&view(10, &[1, 2, 32])?, &table, &k, &v)?;
        // On the CPU one storage is refused first.
        let pair = match device.is_cpu() {
            true => "qkv and k_cache",
            false => "k_cache and qkv overlap",
        };
        assert!(said.contains(pair), "{said}");
        let said = run(&qkv, &view(40, &[6, 4])?, &k, &v)?;
        assert!(said.contains("v_cache and cos overlap"), "{said}");
        // In one storage, but apart, tables too.
        assert_eq!(run(&qkv, &view(64, &[6, 4])?, &k, &v)?, "");
        assert_eq!(values(&v.narrow(2, 0, 2)?)?, [1.; 16]);
    }
    Ok(())
}
