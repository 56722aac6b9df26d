//! The cache's growth: what stood in it stays, wherever it is.

use crate::support::{devices, randn_on, values};
use candle_core::{DType, Result, Tensor};
use candle_fused::nn::KvCache;

#[test]
fn growing_keeps_what_was_written() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16] {
            let mut cache = KvCache::with_shape((2, 3, 10), 5, 1000, dtype, &device)?;
            assert!(cache.is_empty());
            let mut written = Vec::new();
            // Past the first growth, and past the second.
            for (position, tokens) in [(5, 7), (12, 300), (312, 1), (313, 500)] {
                let slot = cache.advance(position, tokens, 2)?;
                assert_eq!(slot, position - 5);
                let part = randn_on(&[2, 3, tokens, 10], dtype, &device)?;
                let (k, v) = cache.buffers();
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
        let mut cache = KvCache::with_shape((1, 2, 8), 0, 64, DType::F32, &device)?;
        cache.advance(0, 4, 1)?;
        let before = randn_on(&[1, 2, 4, 8], DType::F32, &device)?;
        cache.buffers().0.slice_set(&before, 2, 0)?;
        let clone = cache.clone();
        let after = randn_on(&[1, 2, 4, 8], DType::F32, &device)?;
        cache.buffers().0.slice_set(&after, 2, 0)?;
        assert_eq!(values(&clone.views()?.0)?, values(&before)?);
        assert_eq!(values(&cache.views()?.0)?, values(&after)?);
    }
    Ok(())
}

#[test]
fn gaps_and_limits_are_named() -> Result<()> {
    for device in devices() {
        let mut cache = KvCache::with_shape((1, 2, 8), 0, 64, DType::F32, &device)?;
        let mut message = |position, tokens, batch| {
            cache
                .advance(position, tokens, batch)
                .expect_err("")
                .to_string()
        };
        assert!(message(1, 1, 1).contains("position 1 does not follow"));
        assert!(message(0, 65, 1).contains("context length of 64"));
        assert!(message(0, 1, 2).contains("batch size 2"));
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

#[test]
fn what_cannot_be_appended_is_named() -> Result<()> {
    for device in devices() {
        let keys = |dims: &[usize]| randn_on(dims, DType::F32, &device);
        let k = keys(&[1, 2, 3, 8])?;
        let said = |cache: &mut KvCache, k: &Tensor, v: &Tensor| {
            cache.append(k, v).expect_err("an error").to_string()
        };
        assert!(said(&mut KvCache::new(1, 16), &k, &k).contains("dim is 1, expected 2"));
        let mut cache = KvCache::new(2, 16);
        assert!(said(&mut cache, &k.get(0)?, &k.get(0)?).contains("expected [B, Hkv, T, D]"));
        assert!(said(&mut cache, &k, &k.narrow(2, 0, 2)?).contains("v is F32 [1, 2, 2, 8]"));
        cache.append(&k, &k)?;
        let wider = keys(&[1, 2, 1, 16])?;
        assert!(said(&mut cache, &wider, &wider).contains("the cache holds [1, 2, T, 8]"));
        let two = keys(&[2, 2, 1, 8])?;
        assert!(said(&mut cache, &two, &two).contains("batch size 2, the cache was made for 1"));
        assert_eq!(cache.len(), 3);
        let mut limited = KvCache::with_shape((1, 2, 8), 0, 4, DType::F16, &device)?;
        assert_eq!(limited.append(&k, &k)?.0.dtype(), DType::F16);
        assert!(said(&mut limited, &k, &k).contains("context length of 4"));
    }
    Ok(())
}
