//! The attention kernel for many sequences in a whole engine, where positions change from step to step behind its early
//! start, against the kernel for any sequences.

use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cuda;
use candle_fused::models::qwen3::{Config, ModelForCausalLM};
use candle_fused::serving::{Engine, Options, Output, Request, RequestId};
use candle_nn::{VarBuilder, VarMap};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::collections::BTreeMap;

const SEQUENCES: usize = 48;

/// So many that the kernel for many sequences takes a single one, too: the last one ends alone.
const HEADS: usize = 80;

/// With norms of the heads.
fn model(device: &Device) -> Result<ModelForCausalLM> {
    let config = Config {
        vocab_size: 128,
        hidden_size: 64,
        intermediate_size: 96,
        num_hidden_layers: 3,
        num_attention_heads: HEADS,
        head_dim: 64,
        attention_bias: false,
        num_key_value_heads: HEADS,
        max_position_embeddings: 512,
        sliding_window: None,
        max_window_layers: 3,
        tie_word_embeddings: false,
        rope_theta: 1e4,
        rms_norm_eps: 1e-6,
        use_sliding_window: false,
        hidden_act: candle_nn::Activation::Silu,
    };
    let names = VarMap::new();
    ModelForCausalLM::new(
        &config,
        VarBuilder::from_varmap(&names, DType::BF16, &Device::Cpu),
    )?;
    let rng = &mut StdRng::seed_from_u64(3);
    let of_names = names.data().lock().expect("no other thread");
    let shapes: BTreeMap<_, _> = of_names.iter().map(|(n, v)| (n, v.dims())).collect();
    let mut weights = std::collections::HashMap::new();
    for (name, dims) in shapes {
        let count = dims.iter().product();
        let scale = if dims.len() == 1 { 1. } else { 0.25 };
        let values: Vec<f32> = (0..count)
            .map(|_| scale * rng.random_range(-1f32..1.))
            .collect();
        let values = Tensor::from_vec(values, dims, device)?;
        weights.insert(name.clone(), values.to_dtype(DType::BF16)?);
    }
    ModelForCausalLM::new(
        &config,
        VarBuilder::from_tensors(weights, DType::BF16, device),
    )
}

/// What requests of different lengths are given.
fn outputs(model: &ModelForCausalLM) -> Result<BTreeMap<RequestId, Vec<Output>>> {
    let mut engine = Engine::new(
        model,
        &Options {
            sequences: SEQUENCES,
            positions: Some(256),
            ..Default::default()
        },
    )?;
    for i in 0..SEQUENCES as u32 {
        let prompt: Vec<u32> = (0..3 + 3 * i).map(|at| (at * (i + 5) + i) % 128).collect();
        engine.submit(Request {
            max_tokens: 40,
            logprobs: Some(2),
            ..Request::new(prompt)
        })?;
    }
    let mut given: BTreeMap<_, Vec<_>> = BTreeMap::new();
    while !engine.is_idle() {
        for output in engine.step()? {
            given.entry(output.id).or_default().push(output);
        }
    }
    assert_eq!(engine.graph_refusal(), None);
    Ok(given)
}

#[test]
fn tokens_are_those_of_the_kernel_for_any_sequences() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let model = model(&device)?;
    let ours = cuda::with_kernel(Some("flash_decoding_pipelined"), || outputs(&model))?;
    let theirs = cuda::with_kernel(Some("flash_decoding_mma"), || outputs(&model))?;
    assert_eq!(ours.len(), SEQUENCES);
    let mut same = 0;
    for (id, ours) in &ours {
        let theirs = &theirs[id];
        assert_eq!((ours.len(), theirs.len()), (40, 40));
        for (ours, theirs) in ours.iter().zip(theirs) {
            let top = |output: &Output| output.logprobs.clone().expect("log-probabilities").top;
            let (a, b) = (top(ours), top(theirs));
            assert!((a[0].1 - b[0].1).abs() < 0.1, "{id}: {a:?} {b:?}");
            if ours.token != theirs.token {
                // Roundings may decide between two that are alike; what follows is another text.
                assert!(a[0].1 - a[1].1 < 0.1, "{id}: {a:?} {b:?}");
                break;
            }
            same += 1;
        }
    }
    assert!(same > SEQUENCES * 20, "{same} tokens");
    Ok(())
}
