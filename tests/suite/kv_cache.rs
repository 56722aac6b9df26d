//! The cache's growth: what stood in it stays, wherever it is.

mod rotating;

use crate::support::{devices, randn_on, values};
use candle_core::{DType, Result, Tensor};
use candle_fused::nn::KvCache;

#[test]
fn growing_keeps_what_was_written() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16] {
            let mut cache = KvCache::with_shape((2, 3, 10), 1000, dtype, &device)?;
            assert!(cache.is_empty());
            let mut written = Vec::new();
            // Past the first growth, and past the second.
            for (position, tokens) in [(0, 7), (7, 300), (307, 1), (308, 500)] {
                let slot = cache.advance(position, tokens, 2)?;
                assert_eq!(slot, position);
                let part = randn_on(&[2, 3, tokens, 10], dtype, &device)?;
                let (k, v) = cache.buffers()?;
                k.slice_set(&part, 2, slot)?;
                v.slice_set(&part.neg()?, 2, slot)?;
                written.push((slot, tokens, part));
                let (k, v) = cache.views()?;
                assert_eq!(k.dims(), [2, 3, cache.len(), 10]);
                for (slot, tokens, part) in &written {
                    assert_eq!(values(&k.narrow(2, *slot, *tokens)?)?, values(part)?);
                    let negated = values(&part.neg()?)?;
                    assert_eq!(values(&v.narrow(2, *slot, *tokens)?)?, negated);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_clone_has_buffers_of_its_own() -> Result<()> {
    for device in devices() {
        let mut cache = KvCache::with_shape((1, 2, 8), 64, DType::F32, &device)?;
        cache.advance(0, 4, 1)?;
        let before = randn_on(&[1, 2, 4, 8], DType::F32, &device)?;
        cache.buffers()?.0.slice_set(&before, 2, 0)?;
        let clone = cache.clone();
        let after = randn_on(&[1, 2, 4, 8], DType::F32, &device)?;
        cache.buffers()?.0.slice_set(&after, 2, 0)?;
        assert_eq!(values(&clone.views()?.0)?, values(&before)?);
        assert_eq!(values(&cache.views()?.0)?, values(&after)?);
    }
    Ok(())
}

#[test]
fn limits_are_named() -> Result<()> {
    for device in devices() {
        let mut cache = KvCache::with_shape((1, 2, 8), 64, DType::F32, &device)?;
        let mut message = |position, tokens, batch| {
            cache
                .advance(position, tokens, batch)
                .expect_err("")
                .to_string()
        };
        assert!(message(0, 65, 1).contains("context length of 64"));
        assert!(message(0, 1, 2).contains("batch size 2"));
    }
    Ok(())
}

/// A position further on than the next takes the next slot; one that is held is written over, wherever it
/// stands, and what was behind it is given up.
#[test]
fn slot_and_position_are_two_things() -> Result<()> {
    for device in devices() {
        let mut cache = KvCache::with_shape((1, 2, 8), 64, DType::F32, &device)?;
        let mut at = |position, tokens, slot, len| -> Result<()> {
            assert_eq!(
                cache.advance(position, tokens, 1)?,
                slot,
                "position {position}"
            );
            assert_eq!(cache.len(), len, "position {position}");
            Ok(())
        };
        // Positions 0 to 9, 11 to 13, 20.
        at(0, 10, 0, 10)?;
        at(11, 1, 10, 11)?;
        at(12, 2, 11, 13)?;
        at(20, 1, 13, 14)?;
        // 12 stands in slot 11.
        at(12, 1, 11, 12)?;
        // 13 follows, and 30 leaves a gap again.
        at(13, 1, 12, 13)?;
        at(30, 1, 13, 14)?;
        // 25 is in the gap: the first behind it is written over.
        at(25, 1, 13, 14)?;
        at(26, 1, 14, 15)?;
        // In front of all gaps.
        at(5, 1, 5, 6)?;
        at(6, 1, 6, 7)?;
        at(0, 3, 0, 3)?;
        at(2, 1, 2, 3)?;
        // From nothing, any position takes the first slot, also twice.
        let mut empty = KvCache::with_shape((1, 2, 8), 64, DType::F32, &device)?;
        assert_eq!(empty.advance(7, 2, 1)?, 0);
        assert_eq!(empty.advance(9, 1, 1)?, 2);
        assert_eq!(empty.advance(7, 1, 1)?, 0);
        assert_eq!(empty.advance(3, 1, 1)?, 0);
        assert_eq!(empty.advance(4, 1, 1)?, 1);
    }
    Ok(())
}

/// Whatever candle's cache gives, past its first capacity too, and again after a reset.
#[test]
fn it_stands_in_for_candles() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let mut ours = KvCache::new(2, 16);
            let mut candles = candle_nn::kv_cache::KvCache::new(2, 16);
            for batch in [1, 3] {
                assert!(ours.is_empty() && ours.k()?.is_none() && ours.v()?.is_none());
                for tokens in [5, 1, 7, 1, 9, 300] {
                    let k = randn_on(&[batch, tokens, 2, 6], dtype, &device)?.transpose(1, 2)?;
                    let v = k.neg()?;
                    let (got_k, got_v) = ours.append(&k, &v)?;
                    let (k, v) = candles.append(&k.contiguous()?, &v.contiguous()?)?;
                    assert_eq!((got_k.dims(), got_k.dtype()), (k.dims(), dtype));
                    assert_eq!(
                        (values(&got_k)?, values(&got_v)?),
                        (values(&k)?, values(&v)?)
                    );
                    assert_eq!(ours.current_seq_len(), candles.current_seq_len());
                    assert_eq!(values(&ours.k()?.expect("keys"))?, values(&k)?);
                }
                ours.reset();
                candles.reset();
            }
        }
    }
    Ok(())
}

/// Any dimension may grow, of any rank, keys and values may differ, and each can be changed alone.
#[test]
fn its_parts_stand_in_for_candles() -> Result<()> {
    for device in devices() {
        for (dim, shape) in [
            (0, &[2, 3][..]),
            (1, &[2, 3, 4]),
            (2, &[1, 2, 3, 4]),
            (3, &[1, 2, 2, 3]),
        ] {
            let mut ours = KvCache::new(dim, 4);
            let mut candles = candle_nn::kv_cache::KvCache::new(dim, 4);
            let mut wide = shape.to_vec();
            wide[if dim == 0 { 1 } else { 0 }] += 1;
            for _ in 0..3 {
                let (k, v) = (
                    randn_on(shape, DType::F32, &device)?,
                    randn_on(&wide, DType::F32, &device)?,
                );
                let (got, want) = (ours.append(&k, &v)?, candles.append(&k, &v)?);
                assert_eq!((got.0.dims(), got.1.dims()), (want.0.dims(), want.1.dims()));
                assert_eq!(values(&got.0)?, values(&want.0)?);
                assert_eq!(values(&got.1)?, values(&want.1)?);
            }
            let more = randn_on(shape, DType::F32, &device)?;
            ours.k_cache_mut().append(&more)?;
            candles.k_cache_mut().append(&more)?;
            for (got, want) in [
                (ours.k_cache(), candles.k_cache()),
                (ours.v_cache(), candles.v_cache()),
            ] {
                assert_eq!(got.dim(), want.dim());
                assert_eq!(got.current_seq_len(), want.current_seq_len());
                assert!(got.max_seq_len() >= got.current_seq_len());
                let (got, want) = (got.current_data()?, want.current_data()?);
                assert_eq!(values(&got.expect("data"))?, values(&want.expect("data"))?);
            }
            ours.v_cache_mut().reset();
            assert!(ours.v_cache().all_data().is_none() && ours.v()?.is_none());
            assert_eq!(ours.current_seq_len(), candles.current_seq_len());
        }
    }
    Ok(())
}

#[test]
fn what_cannot_be_appended_is_named() -> Result<()> {
    for device in devices() {
        let keys = |dims: &[usize]| randn_on(dims, DType::F32, &device);
        let k = keys(&[1, 2, 3, 8])?;
        let said = |cache: &mut KvCache, k: &Tensor, v: &Tensor| {
            cache.append(k, v).expect_err("an error").to_string()
        };
        let flat = keys(&[3, 8])?;
        let mut cache = KvCache::new(2, 16);
        assert!(said(&mut cache, &flat, &flat).contains("dimension 2 grows"));
        cache.append(&k, &k)?;
        let wider = keys(&[1, 2, 1, 16])?;
        assert!(said(&mut cache, &wider, &wider).contains("the cache holds [1, 2, 3, 8]"));
        // What was written of the keys is given up with the values.
        assert!(said(&mut cache, &k, &wider).contains("the cache holds [1, 2, 3, 8]"));
        let two = keys(&[2, 2, 1, 8])?;
        assert!(said(&mut cache, &two, &two).contains("the tensor has shape [2, 2, 1, 8]"));
        assert_eq!(cache.len(), 3);
        let mut limited = KvCache::with_shape((1, 2, 8), 4, DType::F16, &device)?;
        assert_eq!(limited.append(&k, &k)?.0.dtype(), DType::F16);
        assert!(said(&mut limited, &k, &k).contains("context length of 4"));
    }
    Ok(())
}
