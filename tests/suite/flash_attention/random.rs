//! Random shapes, layouts and rules.

use super::{Case, Kv, check};
use candle_core::{DType, Device, Tensor};
use candle_fused::ops::AttentionParams;
use proptest::prelude::*;

fn any_case() -> impl Strategy<Value = (Case, AttentionParams)> {
    let dtype = || prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)];
    let kv = prop_oneof![
        Just(Kv::Contiguous),
        Just(Kv::Cache),
        Just(Kv::TokenMajor),
        Just(Kv::Transposed),
        Just(Kv::Broadcast),
    ];
    let shape = (
        1usize..3,
        1usize..4,
        1usize..6,
        1usize..80,
        1usize..260,
        // Half of them are the head dimensions that GPUs have tensor-core forms for.
        prop_oneof![
            1usize..70,
            proptest::sample::select(vec![64, 80, 96, 128, 256])
        ],
    );
    let rule = (
        any::<bool>(),
        proptest::option::of(1usize..300),
        proptest::option::of(0.1f32..40.0),
        proptest::option::of(0usize..300),
        proptest::option::of(0f32..0.3),
    );
    (shape, dtype(), dtype(), kv, any::<bool>(), rule).prop_map(
        |(
            (batch, kv_heads, group, queries, keys, dim),
            q_dtype,
            kv_dtype,
            kv,
            q_transposed,
            rule,
        )| {
            let heads = kv_heads * group;
            let case = Case {
                batch,
                heads,
                kv_heads,
                queries,
                keys,
                dim,
                q_transposed,
                kv,
                q_dtype,
                kv_dtype,
                size: 2.0,
            };
            let (causal, window, softcap, window_right, slope) = rule;
            let slopes = |slope: f32| Tensor::full(slope, heads, &Device::Cpu).unwrap();
            let scale = 1.0 / (dim as f32).sqrt();
            (
                case,
                AttentionParams {
                    scale,
                    causal,
                    window,
                    window_right,
                    softcap,
                    alibi_slopes: slope.map(slopes),
                    mask: None,
                },
            )
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]
    #[test]
    fn any_shape_and_layout(case in any_case(), seed in any::<u64>()) {
        check(&case.0, &case.1, seed);
    }
}
