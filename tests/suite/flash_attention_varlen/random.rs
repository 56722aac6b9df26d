//! Random lengths, heads and rules.

use super::{Case, check};
use candle_core::{DType, Device, Tensor};
use candle_fused::ops::AttentionParams;
use proptest::prelude::*;

fn any_case() -> impl Strategy<Value = (Case, AttentionParams)> {
    let dtype = || prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)];
    let lengths = proptest::collection::vec((0usize..90, 0usize..260), 1..6);
    let dim = prop_oneof![
        1usize..70,
        proptest::sample::select(vec![64, 80, 96, 128, 256])
    ];
    let rule = (
        any::<bool>(),
        proptest::option::of(1usize..300),
        proptest::option::of(0usize..300),
        proptest::option::of(0.1f32..40.0),
        proptest::option::of(0f32..0.1),
    );
    let shape = (lengths, 1usize..4, 1usize..5, dim, 0usize..3);
    (shape, dtype(), dtype(), rule).prop_map(
        |((lengths, kv_heads, group, dim, behind), q_dtype, kv_dtype, rule)| {
            let (causal, window, window_right, softcap, slope) = rule;
            let heads = kv_heads * group;
            let slopes = |slope: f32| Tensor::full(slope, heads, &Device::Cpu).unwrap();
            let case = Case {
                lengths,
                heads,
                kv_heads,
                dim,
                behind,
                joint: false,
                q_dtype,
                kv_dtype,
            };
            let params = AttentionParams {
                scale: 1.0 / (dim as f32).sqrt(),
                causal,
                window,
                window_right,
                softcap,
                alibi_slopes: slope.map(slopes),
                mask: None,
            };
            (case, params)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..Default::default() })]
    #[test]
    fn any_batch(case in any_case(), seed in any::<u64>()) {
        check(&case.0, &case.1, seed).unwrap();
    }
}
