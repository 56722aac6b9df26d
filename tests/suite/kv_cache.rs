//! The cache's growth: what stood in it stays, wherever it is.

use crate::support::{devices, randn_on, values};
use candle_core::{DType, Result};
use candle_fused::nn::KvCache;

#[test]
fn growing_keeps_what_was_written() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16] {
            let mut cache = KvCache::new((2, 3, 10), 5, 1000, dtype, &device)?;
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
        let mut cache = KvCache::new((1, 2, 8), 0, 64, DType::F32, &device)?;
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
        let mut cache = KvCache::new((1, 2, 8), 0, 64, DType::F32, &device)?;
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
