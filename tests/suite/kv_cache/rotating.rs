//! The rotating cache against candle_nn's, and attention over it against float64.

use crate::support::{devices, randn_on, values};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::nn::kv_cache::RotatingKvCache;
use candle_fused::ops::flash_attention::reference;
use candle_fused::ops::{AttentionParams, flash_attention};

/// Appends of these lengths to a cache of 8.
const RUNS: [&[usize]; 6] = [
    &[1; 20],
    &[3, 5, 1, 1, 7, 2],
    &[8, 1, 1],
    &[20, 1, 3, 1],
    &[5, 8, 1, 6],
    &[0, 2, 0, 9, 1],
];

#[test]
fn it_keeps_what_candles_keeps() -> Result<()> {
    for device in devices() {
        for dim in [1, 2] {
            for run in RUNS {
                let mut ours = RotatingKvCache::new(dim, 8);
                let mut candles = candle_nn::kv_cache::RotatingKvCache::new(dim, 8);
                for &tokens in run {
                    let mut dims = [2, 3, 3, 4];
                    dims[dim] = tokens;
                    if tokens == 0 && !device.is_cpu() {
                        continue;
                    }
                    let k = randn_on(&dims, DType::F32, &device)?;
                    let v = (&k * 2.)?;
                    // candle_nn counts slots of the buffer also where the append itself is what is given.
                    if tokens != 8 {
                        assert_eq!(ours.positions(tokens), candles.positions(tokens));
                    }
                    let masks = (
                        ours.attn_mask(tokens, &device)?,
                        candles.attn_mask(tokens, &device)?,
                    );
                    match masks {
                        (Some(ours), Some(candles)) if tokens > 0 => {
                            assert_eq!(ours.to_vec2::<u8>()?, candles.to_vec2::<u8>()?);
                        }
                        (ours, candles) => assert_eq!(ours.is_some(), candles.is_some()),
                    }
                    let got = ours.append(&k, &v)?;
                    if tokens == 0 {
                        // candle_nn refuses to copy nothing.
                        continue;
                    }
                    let want = candles.append(&k, &v)?;
                    assert_eq!(values(&got.0)?, values(&want.0)?, "{run:?}");
                    assert_eq!(values(&got.1)?, values(&want.1)?, "{run:?}");
                    assert_eq!(ours.offset(), candles.offset());
                    assert_eq!(ours.current_seq_len(), candles.current_seq_len());
                    for (ours, candles) in [(ours.k()?, candles.k()?), (ours.v()?, candles.v()?)] {
                        let (Some(ours), Some(candles)) = (ours, candles) else {
                            panic!("nothing is kept");
                        };
                        assert_eq!(values(&ours)?, values(&candles)?);
                    }
                }
                ours.reset();
                assert_eq!((ours.offset(), ours.current_seq_len()), (0, 0));
                assert!(ours.k()?.is_none());
            }
        }
    }
    Ok(())
}

/// Steps and chunks see the window of a sequence that is all there, whatever has been written over.
#[test]
fn attention_over_it_is_a_sliding_window() -> Result<()> {
    for device in devices() {
        for (dtype, kept, limit) in [
            (DType::F32, DType::F32, 4e-6),
            (DType::BF16, DType::BF16, 2e-2),
        ] {
            for run in [
                &[1; 20][..],
                &[3, 5, 1, 1, 7, 2],
                &[20, 1, 3, 1],
                &[5, 8, 1, 6],
            ] {
                let total = run.iter().sum();
                let q = randn_on(&[2, 6, total, 64], dtype, &device)?;
                let (k, v) = (
                    randn_on(&[2, 3, total, 64], kept, &device)?,
                    randn_on(&[2, 3, total, 64], kept, &device)?,
                );
                let params = AttentionParams {
                    scale: 0.125,
                    softcap: (run.len() % 2 == 0).then_some(20.),
                    ..Default::default()
                };
                let windowed = AttentionParams {
                    causal: true,
                    window: Some(8),
                    ..params.clone()
                };
                let cpu = |t: &Tensor| t.to_device(&Device::Cpu);
                let want = reference(&cpu(&q)?, &cpu(&k)?, &cpu(&v)?, &windowed)?;
                let mut cache = RotatingKvCache::new(2, 8);
                let mut at = 0;
                for &tokens in run {
                    let part = |t: &Tensor| t.narrow(2, at, tokens);
                    let y = cache.attend(&part(&q)?, &part(&k)?, &part(&v)?, &params)?;
                    assert_eq!((y.dims(), y.dtype()), (&[2, 6, tokens, 64][..], dtype));
                    let want = values(&want.narrow(2, at, tokens)?)?;
                    for (got, want) in values(&y)?.iter().zip(&want) {
                        let near = (got - want).abs() <= limit * (1. + want.abs());
                        assert!(near, "{device:?} {dtype:?} {run:?} {at}: {got} for {want}");
                    }
                    at += tokens;
                    assert_eq!(cache.current_seq_len(), at);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn what_does_not_fit_changes_nothing() -> Result<()> {
    for device in devices() {
        let token =
            |heads: usize, tokens: usize| randn_on(&[1, heads, tokens, 16], DType::F32, &device);
        let plain = AttentionParams::default();
        let mut cache = RotatingKvCache::new(2, 4);
        let said = |r: Result<()>| r.expect_err("").to_string();
        // The first keys and values leave no shape behind if they do not fit each other.
        let error = said(cache.append(&token(2, 1)?, &token(2, 2)?).map(|_| ()));
        assert!(error.contains("1 keys and 2 values"), "{error}");
        cache.append(&token(3, 5)?, &token(3, 5)?)?;
        let before = (values(&cache.k()?.unwrap())?, cache.offset());
        let error = said(cache.append(&token(3, 1)?, &token(2, 1)?).map(|_| ()));
        assert!(error.contains("the cache holds"), "{error}");
        let three = token(3, 1)?;
        let mut attend = |q: &Tensor, params: &AttentionParams| {
            said(cache.attend(q, &three, &three, params).map(|_| ()))
        };
        let error = attend(&token(3, 2)?, &plain);
        assert!(error.contains("q has shape [1, 3, 2, 16]"), "{error}");
        let error = attend(&token(4, 1)?, &plain);
        assert!(
            error.contains("q has 4 heads, expected a multiple of k's 3"),
            "{error}"
        );
        let windowed = AttentionParams {
            window: Some(3),
            ..plain.clone()
        };
        let error = attend(&three, &windowed);
        assert!(error.contains("params has window"), "{error}");
        let masked = AttentionParams {
            mask: Some(Tensor::zeros((1, 4), DType::F32, &device)?),
            ..plain
        };
        let error = attend(&three, &masked);
        assert!(error.contains("params has mask"), "{error}");
        assert_eq!((values(&cache.k()?.unwrap())?, cache.offset()), before);
        assert_eq!(cache.current_seq_len(), 5);
        let mut none = RotatingKvCache::new(2, 0);
        let error = said(none.append(&three, &three).map(|_| ()));
        assert!(error.contains("max_seq_len is 0"), "{error}");
        let mut other = RotatingKvCache::new(1, 4);
        let error = said(
            other
                .attend(&three, &three, &three, &AttentionParams::default())
                .map(|_| ()),
        );
        assert!(error.contains("dim is 1, expected 2"), "{error}");
    }
    Ok(())
}

/// A clone is written by itself, and keys of another type are kept as the first were.
#[test]
fn a_clone_has_buffers_of_its_own_and_types_are_converted() -> Result<()> {
    for device in devices() {
        let token = || randn_on(&[1, 1, 1, 8], DType::F32, &device);
        let mut cache = RotatingKvCache::new(2, 2);
        let first = token()?.to_dtype(DType::BF16)?;
        cache.append(&first, &first)?;
        let mut clone = cache.clone();
        let (k, v) = clone.append(&token()?, &token()?)?;
        assert_eq!((k.dtype(), v.dtype()), (DType::BF16, DType::BF16));
        clone.append(&token()?, &token()?)?;
        assert_eq!(values(&cache.k()?.unwrap())?, values(&first)?);
        // The views that one step reads are the buffer itself.
        let y = flash_attention(&token()?, &k, &v, &AttentionParams::default())?;
        assert_eq!(y.dims(), [1, 1, 1, 8]);
    }
    Ok(())
}
