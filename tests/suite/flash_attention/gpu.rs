//! The forms that a GPU has, each taken by its calls and right.

use super::{Case, Kv, causal, check};
use crate::support::devices;
use candle_core::DType;
use candle_fused::ops::{AttentionParams, flash_attention};

fn has_gpu() -> bool {
    devices().iter().any(|device| device.is_cuda())
}

/// What the call was recorded as on the GPU.
fn path(case: &Case, params: &AttentionParams) -> String {
    let device = &devices()[1];
    let (q, k, v) = case.tensors(1, device);
    let (y, calls) = candle_fused::trace::capture(|| flash_attention(&q, &k, &v, params));
    y.unwrap();
    calls.iter().next().unwrap().0.path.to_string()
}

fn case(queries: usize, heads: usize, dim: usize, dtype: DType) -> Case {
    Case {
        heads,
        kv_heads: heads / 3,
        queries,
        keys: queries + 9,
        dim,
        q_transposed: true,
        q_dtype: dtype,
        kv_dtype: dtype,
        ..Default::default()
    }
}

#[test]
fn tensor_cores_take_what_they_can() {
    if !has_gpu() {
        return;
    }
    for dim in [64, 80, 96, 128, 256] {
        let plain = path(&case(5, 3, dim, DType::F32), &causal(dim));
        assert!(plain.contains(" flash_attention_plain ("), "{plain}");
        let half = path(&case(5, 3, dim, DType::F16), &causal(dim));
        let kernel = format!(" flash_attention_mma (flash_attention_d{dim}_f16,");
        assert!(half.contains(&kernel), "{half}");
    }
    // Rows that do not start at a multiple of 16 bytes, and a dimension without a form.
    let mut odd = case(5, 3, 64, DType::F16);
    odd.kv = Kv::Transposed;
    for (case, why) in [
        (odd, "rows not aligned to 16 bytes"),
        (case(5, 3, 72, DType::F16), "it is for other head sizes"),
    ] {
        let path = path(&case, &causal(case.dim));
        let told = format!("): not flash_attention_mma, {why}");
        assert!(
            path.contains(" flash_attention_plain (") && path.ends_with(&told),
            "{path}"
        );
    }
}

#[test]
fn prefill_with_many_and_few_rows() {
    if !has_gpu() {
        return;
    }
    for dtype in [DType::F16, DType::BF16] {
        for dim in [64, 80, 96, 128, 256] {
            // Many rounds of blocks, a few blocks, and keys that are shared out among warps.
            for (queries, heads) in [(700, 36), (300, 3), (130, 6), (40, 3)] {
                let case = case(queries, heads, dim, dtype);
                check(&case, &causal(dim), 20);
                if queries < 700 {
                    let everything = AttentionParams {
                        causal: false,
                        ..causal(dim)
                    };
                    check(&case, &everything, 21);
                    let window = AttentionParams {
                        window: Some(65),
                        softcap: Some(20.0),
                        ..causal(dim)
                    };
                    check(&case, &window, 22);
                }
            }
        }
    }
}

#[test]
fn queries_in_f32_keep_their_precision_over_f16_keys() {
    if !has_gpu() {
        return;
    }
    for dim in [64, 80, 96, 128] {
        for (queries, heads) in [(1, 9), (12, 3), (200, 3), (500, 12)] {
            let case = Case {
                q_dtype: DType::F32,
                ..case(queries, heads, dim, DType::F16)
            };
            assert!(path(&case, &causal(dim)).contains(" flash_attention_mma ("));
            check(&case, &causal(dim), 23);
        }
    }
}
