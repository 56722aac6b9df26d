//! What depends on the distance of query and key: right windows and ALiBi.

use super::{Case, check};
use candle_core::{DType, Device, Tensor};
use candle_fused::ops::AttentionParams;
use candle_fused::ops::flash_attention::reference;

/// 2^-1, 2^-2, ... as for so many heads.
fn slopes(heads: usize) -> Tensor {
    let slopes: Vec<f32> = (1..=heads).map(|i| 0.5f32.powi(i as i32)).collect();
    Tensor::new(slopes, &Device::Cpu).unwrap()
}

fn params(dim: usize) -> AttentionParams {
    AttentionParams {
        scale: 1.0 / (dim as f32).sqrt(),
        ..Default::default()
    }
}

/// Few rows and many, fewer keys than queries, head sizes with and without tensor cores, each dtype.
fn cases() -> impl Iterator<Item = Case> {
    let lengths = [(1, 200), (5, 5), (40, 40), (70, 150), (150, 150), (90, 40)];
    let dtypes = [
        [DType::F32; 2],
        [DType::F16; 2],
        [DType::BF16; 2],
        [DType::F32, DType::F16],
    ];
    lengths.into_iter().flat_map(move |(queries, keys)| {
        [(32, 0), (64, 1), (64, 2), (128, 3), (256, 1)].map(|(dim, dtype)| Case {
            batch: 1,
            heads: 4,
            kv_heads: 2,
            queries,
            keys,
            dim,
            q_dtype: dtypes[dtype][0],
            kv_dtype: dtypes[dtype][1],
            ..Default::default()
        })
    })
}

#[test]
fn right_windows_end_behind_the_position() {
    for case in cases() {
        for (window, window_right) in [
            (None, Some(0)),
            (None, Some(1)),
            (None, Some(70)),
            (Some(1), Some(0)),
            (Some(20), Some(33)),
            (None, Some(usize::MAX)),
            (Some(usize::MAX), Some(3)),
        ] {
            let params = AttentionParams {
                window,
                window_right,
                ..params(case.dim)
            };
            check(&case, &params, 13);
        }
    }
}

#[test]
fn causal_goes_before_a_right_window() {
    let case = Case {
        queries: 30,
        keys: 40,
        ..Default::default()
    };
    let (q, k, v) = case.tensors(14, &Device::Cpu);
    let [both, alone, none] =
        [(true, Some(5)), (true, None), (false, Some(0))].map(|(causal, window_right)| {
            let params = AttentionParams {
                causal,
                window_right,
                ..params(8)
            };
            check(&case, &params, 14);
            let y = reference(&q, &k, &v, &params).unwrap();
            y.flatten_all().unwrap().to_vec1::<f64>().unwrap()
        });
    assert_eq!(both, alone);
    assert_eq!(none, alone);
}

#[test]
fn alibi_takes_off_by_distance() {
    for case in cases() {
        for causal in [false, true] {
            for (window, window_right, softcap) in [
                (None, None, None),
                (Some(50), Some(7), None),
                (None, None, Some(5.0)),
            ] {
                let params = AttentionParams {
                    causal,
                    window,
                    window_right,
                    softcap,
                    alibi_slopes: Some(slopes(4)),
                    ..params(case.dim)
                };
                check(&case, &params, 15);
            }
        }
    }
}

#[test]
fn slopes_in_16_bits_go_with_a_mask() {
    let case = Case {
        heads: 4,
        kv_heads: 2,
        queries: 60,
        keys: 80,
        dim: 64,
        q_dtype: DType::F16,
        kv_dtype: DType::F16,
        ..Default::default()
    };
    let mask = Tensor::arange(0f32, 80., &Device::Cpu).unwrap();
    let params = AttentionParams {
        mask: Some((mask * 0.01).unwrap()),
        alibi_slopes: Some(slopes(4).to_dtype(DType::BF16).unwrap()),
        ..params(64)
    };
    check(&case, &params, 16);
}
