//! What does not fit is refused by name.

use crate::support::devices;
use candle_core::{DType, Device, Tensor};
use candle_fused::ops::{AttentionParams, flash_attention};

#[test]
fn what_does_not_fit_is_named() {
    devices().iter().for_each(refusals);
}

fn refusals(device: &Device) {
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, device).unwrap();
    let (q, k) = (zeros(&[1, 4, 2, 8]), zeros(&[1, 2, 6, 8]));
    let ints = k.to_dtype(DType::U32).unwrap();
    let with = |params: AttentionParams| flash_attention(&q, &k, &k, &params);
    let mask = |mask: Tensor| {
        with(AttentionParams {
            mask: Some(mask),
            ..Default::default()
        })
    };
    let plain = AttentionParams::default();
    let errors = [
        (
            flash_attention(&zeros(&[4, 2, 8]), &k, &k, &plain),
            "q is [4, 2, 8]",
        ),
        (
            flash_attention(&q, &zeros(&[1, 2, 6, 9]), &k, &plain),
            "k is [1, 2, 6, 9]",
        ),
        (
            flash_attention(&q, &zeros(&[2, 2, 6, 8]), &k, &plain),
            "k is [2, 2, 6, 8]",
        ),
        (
            flash_attention(&q, &k, &zeros(&[1, 2, 5, 8]), &plain),
            "v is [1, 2, 5, 8]",
        ),
        (
            flash_attention(&q, &zeros(&[1, 3, 6, 8]), &zeros(&[1, 3, 6, 8]), &plain),
            "4 heads",
        ),
        (flash_attention(&q, &ints, &ints, &plain), "k is U32"),
        (
            flash_attention(&q, &k, &k.to_dtype(DType::F16).unwrap(), &plain),
            "v is F16",
        ),
        (
            with(AttentionParams {
                scale: f32::NAN,
                ..Default::default()
            }),
            "scale is NaN",
        ),
        (
            with(AttentionParams {
                window: Some(0),
                ..Default::default()
            }),
            "window is 0",
        ),
        (
            with(AttentionParams {
                softcap: Some(0.0),
                ..Default::default()
            }),
            "softcap is 0",
        ),
        (mask(zeros(&[2, 7])), "mask is [2, 7]"),
        (mask(zeros(&[1, 1, 1, 2, 6])), "mask is [1, 1, 1, 2, 6]"),
        (
            mask(zeros(&[2, 6]).to_dtype(DType::U8).unwrap()),
            "mask is U8",
        ),
    ];
    for (result, expected) in errors {
        let message = result.unwrap_err().to_string();
        assert!(
            message.contains("flash_attention") && message.contains(expected),
            "{message}"
        );
    }
}

#[test]
fn slopes_that_do_not_fit_are_named() {
    for device in devices() {
        let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &device).unwrap();
        let (q, k) = (zeros(&[1, 4, 2, 8]), zeros(&[1, 2, 6, 8]));
        for (slopes, expected) in [
            (zeros(&[3]), "alibi_slopes is [3], expected [4]"),
            (zeros(&[1, 4]), "alibi_slopes is [1, 4], expected [4]"),
            (
                zeros(&[4]).to_dtype(DType::U32).unwrap(),
                "alibi_slopes is U32",
            ),
        ] {
            let params = AttentionParams {
                alibi_slopes: Some(slopes),
                ..Default::default()
            };
            let error = flash_attention(&q, &k, &k, &params).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
    }
}
