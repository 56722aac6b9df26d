//! Rotary embedding and the cache append against float64 and candle.

use crate::support::{layouts, randn, widest_error};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::rope::{RopeAppend, RopeStyle, Rotation, reference, rope, rope_append};
use candle_fused::trace;

const STYLES: [RopeStyle; 2] = [RopeStyle::HalfSplit, RopeStyle::Interleaved];

/// Tables `[positions, pairs]` of random angles.
fn tables(positions: usize, pairs: usize, dtype: DType) -> Result<(Tensor, Tensor)> {
    let angles = randn(&[positions, pairs], DType::F32)?;
    Ok((
        angles.cos()?.to_dtype(dtype)?,
        angles.sin()?.to_dtype(dtype)?,
    ))
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
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for style in STYLES {
            // Whole heads, a quarter (Pythia), an odd rest, nothing at all.
            for (head_dim, pairs) in [(64, 32), (80, 10), (96, 48), (7, 2), (2, 1), (16, 0)] {
                let x = randn(&[2, 3, 5, head_dim], dtype)?;
                let (cos, sin) = tables(40, pairs, DType::F32)?;
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
                    "{dtype:?} {style:?} {head_dim}: {error:e}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn whole_heads_are_rotated_as_candle_does() -> Result<()> {
    let x = randn(&[1, 4, 9, 64], DType::F32)?;
    let (cos, sin) = tables(9, 32, DType::F32)?;
    for style in STYLES {
        let expected = match style {
            RopeStyle::HalfSplit => candle_nn::rotary_emb::rope(&x, &cos, &sin)?,
            RopeStyle::Interleaved => candle_nn::rotary_emb::rope_i(&x, &cos, &sin)?,
        };
        let got = rope(
            &x,
            &Rotation {
                cos: &cos,
                sin: &sin,
                position: 0,
                style,
            },
        )?;
        let expected = expected
            .to_dtype(DType::F64)?
            .flatten_all()?
            .to_vec1::<f64>()?;
        assert!(widest_error(&got, &expected)? < 2.4e-7);
    }
    Ok(())
}

#[test]
fn any_layout_gives_what_its_copy_gives() -> Result<()> {
    for x in layouts(DType::F32)? {
        let x = x.unsqueeze(0)?;
        let x = if x.rank() == 3 { x.unsqueeze(0)? } else { x };
        let (_, _, tokens, head_dim) = x.dims4()?;
        let (cos, sin) = tables(tokens + 2, head_dim / 2, DType::BF16)?;
        for style in STYLES {
            let rotation = Rotation {
                cos: &cos,
                sin: &sin,
                position: 2,
                style,
            };
            let flat = |t: Tensor| t.flatten_all()?.to_vec1::<f32>();
            assert_eq!(
                flat(rope(&x, &rotation)?)?,
                flat(rope(&x.contiguous()?, &rotation)?)?
            );
        }
    }
    Ok(())
}

/// The append is the rotation of its parts, at its slots and nowhere else.
#[test]
fn appending_rotates_and_writes_in_place() -> Result<()> {
    for (dtype, cache_dtype) in [
        (DType::F32, DType::F32),
        (DType::BF16, DType::BF16),
        (DType::F32, DType::F16),
    ] {
        for style in STYLES {
            for (batch, tokens, heads, kv_heads, head_dim) in
                [(1, 1, 9, 3, 64), (2, 5, 4, 1, 80), (1, 40, 2, 2, 16)]
            {
                let width = (heads + 2 * kv_heads) * head_dim;
                let qkv = randn(&[batch, tokens, width], dtype)?;
                let cache = |_| randn(&[batch, kv_heads, 64, head_dim], cache_dtype);
                let (k_cache, v_cache) = (cache(0)?, cache(1)?);
                let (k_before, v_before) = (k_cache.copy()?, v_cache.copy()?);
                let (cos, sin) = tables(100, head_dim / 4, DType::F32)?;
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
                };
                let (q, calls) = trace::capture(|| rope_append(&qkv, &append, &k_cache, &v_cache));
                let q = q?;
                assert_eq!(calls.count("rope"), 1);
                let part = |first: usize, n: usize| {
                    qkv.narrow(2, first * head_dim, n * head_dim)?
                        .reshape((batch, tokens, n, head_dim))?
                        .transpose(1, 2)
                };
                let flat = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
                assert_eq!(flat(&q)?, flat(&rope(&part(0, heads)?, &rotation)?)?);
                let k = rope(&part(heads, kv_heads)?.to_dtype(DType::F32)?, &rotation)?;
                let v = part(heads + kv_heads, kv_heads)?;
                for (cache, before, new) in [(&k_cache, &k_before, k), (&v_cache, &v_before, v)] {
                    let written = cache.narrow(2, 7, tokens)?;
                    assert_eq!(flat(&written)?, flat(&new.to_dtype(cache_dtype)?)?);
                    let behind = |t: &Tensor| flat(&t.narrow(2, 7 + tokens, 57 - tokens)?);
                    assert_eq!(behind(cache)?, behind(before)?);
                    let front = |t: &Tensor| flat(&t.narrow(2, 0, 7)?);
                    assert_eq!(front(cache)?, front(before)?);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn bad_arguments_are_named() -> Result<()> {
    let x = randn(&[1, 2, 5, 8], DType::F32)?;
    let (cos, sin) = tables(6, 4, DType::F32)?;
    let style = RopeStyle::HalfSplit;
    let rotation = Rotation {
        cos: &cos,
        sin: &sin,
        position: 0,
        style,
    };
    let message = |x: &Tensor, r: Rotation<'_>| rope(x, &r).expect_err("").to_string();
    assert!(message(&x.squeeze(0)?, rotation).contains("x has shape [2, 5, 8]"));
    assert!(
        message(
            &x,
            Rotation {
                position: 2,
                ..rotation
            }
        )
        .contains("cos has 6 positions")
    );
    let (wide, _) = tables(6, 5, DType::F32)?;
    assert!(
        message(
            &x,
            Rotation {
                sin: &wide,
                ..rotation
            }
        )
        .contains("sin has shape")
    );
    assert!(
        message(
            &x,
            Rotation {
                cos: &wide,
                sin: &wide,
                ..rotation
            }
        )
        .contains("a head has 8")
    );
    let whole = Tensor::ones((6, 4), DType::U32, &Device::Cpu)?;
    assert!(
        message(
            &x,
            Rotation {
                cos: &whole,
                ..rotation
            }
        )
        .contains("cos is U32")
    );

    let qkv = randn(&[1, 2, 32], DType::F32)?;
    let cache = randn(&[1, 1, 4, 8], DType::F32)?;
    let append = RopeAppend {
        rotation,
        heads: 2,
        kv_heads: 1,
        slot: 0,
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
    assert!(message(append, &cache, &cache).contains("the same tensor"));
    let far = RopeAppend {
        slot: usize::MAX,
        ..append
    };
    assert!(message(far, &cache, &cache.copy()?).contains("do not fit"));
    // Tables that lie in a cache's own storage are read before it is locked.
    let shared = cache.flatten_all()?.narrow(0, 0, 24)?.reshape((6, 4))?;
    let rotation = Rotation {
        cos: &shared,
        sin: &shared,
        ..rotation
    };
    let append = RopeAppend { rotation, ..append };
    rope_append(&qkv, &append, &cache, &cache.copy()?)?;
    Ok(())
}
