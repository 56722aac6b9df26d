//! Every model against Hugging Face's float64 outputs.

use crate::golden::{Golden, relative_error};
use crate::subject::{ALL, Subject, dense};
use crate::support::{device, on_every_device};
use candle_core::{D, DType, IndexOp, Result, Tensor};
use candle_fused::generation::Options;
use candle_fused::{Fusion, trace};

/// Runs a body for every golden on every device.
fn on_every_golden(body: impl Fn(&Golden) -> Result<()>) -> Result<()> {
    on_every_device(|| ALL.iter().try_for_each(|name| body(&Golden::open(name)?)))
}

/// The error of every hidden state, then that of the logits.
fn errors(golden: &Golden, model: &mut dyn Subject) -> Result<Vec<f64>> {
    let (states, logits) = model.hidden_states(&golden.input_ids()?, 0)?;
    let expected = &golden.outputs["hidden_states"];
    assert_eq!(states.len(), expected.dim(0)?);
    let mut errors = Vec::new();
    for (i, state) in states.iter().enumerate() {
        errors.push(relative_error(state, &expected.get(i)?)?);
    }
    errors.push(relative_error(&logits, &golden.outputs["logits"])?);
    Ok(errors)
}

#[test]
fn f32_agrees_with_hugging_face_layer_by_layer() -> Result<()> {
    on_every_golden(|golden| {
        for fusion in [Fusion::all(), Fusion::none()] {
            let mut model = dense(golden, DType::F32, fusion)?;
            for (i, error) in errors(golden, model.as_mut())?.iter().enumerate() {
                assert!(
                    *error < 1e-4,
                    "{}, {fusion}, state {i}: {error:e}",
                    golden.name
                );
            }
        }
        Ok(())
    })
}

/// 16-bit forms are held to twice what candle's own operations lose at the same dtype, plus a floor
/// of half a unit of the dtype's last place.
#[test]
fn low_precision_stays_within_twice_the_plain_error() -> Result<()> {
    on_every_golden(|golden| {
        for (dtype, floor) in [(DType::BF16, 2e-3), (DType::F16, 2.5e-4)] {
            let of = |fusion| errors(golden, dense(golden, dtype, fusion)?.as_mut());
            let (fused, plain) = (of(Fusion::all())?, of(Fusion::none())?);
            for (i, (f, p)) in fused.iter().zip(&plain).enumerate() {
                assert!(
                    *f <= 2. * p + floor,
                    "{} {dtype:?} state {i}: {f:e}, plain {p:e}",
                    golden.name
                );
            }
        }
        Ok(())
    })
}

/// The tokens that each row goes on with.
fn greedy(golden: &Golden) -> Result<Vec<Vec<u32>>> {
    golden.outputs["greedy"].to_dtype(DType::U32)?.to_vec2()
}

/// By how much each of them is ahead of the next best.
fn margins(golden: &Golden) -> Result<Vec<Vec<f32>>> {
    golden.outputs["greedy_margin"].to_vec2()
}

/// Nearer than this, another token is not a mistake in f32.
const MARGIN: f32 = 1e-3;

#[test]
fn greedy_tokens_are_hugging_faces() -> Result<()> {
    on_every_golden(|golden| {
        let (expected, margins) = (greedy(golden)?, margins(golden)?);
        for fusion in [Fusion::all(), Fusion::none()] {
            let mut model = dense(golden, DType::F32, fusion)?;
            let ids = golden.input_ids()?;
            let mut logits = model.forward(&ids, 0)?;
            for step in 0..expected[0].len() {
                for row in 0..2 {
                    let token = logits.i(row)?.argmax(D::Minus1)?.to_scalar::<u32>()?;
                    if margins[row][step] > MARGIN {
                        assert_eq!(token, expected[row][step], "{} {row} {step}", golden.name);
                    }
                }
                let next: Vec<_> = expected.iter().map(|row| row[step]).collect();
                let next = Tensor::from_vec(next, (2, 1), &device())?;
                logits = model.forward(&next, ids.dim(1)? + step)?;
            }
        }
        Ok(())
    })
}

/// On a GPU this is the chain of kernels behind a graph.
#[test]
fn generations_give_hugging_faces_tokens() -> Result<()> {
    on_every_golden(|golden| {
        let (expected, margins) = (greedy(golden)?, margins(golden)?);
        let prompts = golden.input_ids()?.to_vec2::<u32>()?;
        let model = dense(golden, DType::F32, Fusion::all())?;
        let options = Options {
            sequences: 2,
            positions: Some(96),
            ..Default::default()
        };
        let mut generation = model.generation(&options)?;
        let mut tokens = Vec::new();
        for (row, prompt) in prompts.iter().enumerate() {
            tokens.push(vec![generation.extend(row, prompt)?]);
        }
        while tokens[0].len() < expected[0].len() {
            for (all, token) in tokens.iter_mut().zip(generation.step()?) {
                all.extend(token);
            }
        }
        if device().is_cuda() {
            assert!(
                generation.kernels_per_step() > 0 && generation.graph_refusal().is_none(),
                "{} is no chain of kernels: {:?}",
                golden.name,
                generation.graph_refusal()
            );
        }
        for (row, (got, want)) in tokens.iter().zip(&expected).enumerate() {
            // Behind a token that may be another, everything may.
            let sure = margins[row].iter().take_while(|m| **m > MARGIN).count();
            assert!(sure > 0, "{} has nothing to compare", golden.name);
            assert_eq!(got[..sure], want[..sure], "{} row {row}", golden.name);
        }
        Ok(())
    })
}

/// Logits of the last position when the ids come in `chunks`.
fn in_chunks(model: &mut dyn Subject, ids: &Tensor, chunks: &[usize]) -> Result<Tensor> {
    model.clear()?;
    let mut position = 0;
    let mut logits = None;
    for tokens in chunks {
        logits = Some(model.forward(&ids.narrow(1, position, *tokens)?, position)?);
        position += tokens;
    }
    assert_eq!(position, ids.dim(1)?);
    Ok(logits.expect("at least one chunk"))
}

#[test]
fn whole_chunked_and_single_token_prefill_agree() -> Result<()> {
    on_every_golden(|golden| {
        let ids = golden.input_ids()?;
        let tokens = ids.dim(1)?;
        let expected = golden.outputs["logits"].i((.., tokens - 1))?;
        for fusion in [Fusion::all(), Fusion::none()] {
            let mut model = dense(golden, DType::F32, fusion)?;
            for chunks in [
                vec![tokens],
                vec![1; tokens],
                vec![tokens - 3, 3],
                vec![5, 1, tokens - 6],
            ] {
                let logits = in_chunks(model.as_mut(), &ids, &chunks)?;
                let error = relative_error(&logits, &expected)?;
                assert!(
                    error < 1e-4,
                    "{} {fusion} {chunks:?}: {error:e}",
                    golden.name
                );
            }
        }
        Ok(())
    })
}

/// A batch gives what each of its rows gives alone, in whatever chunks.
#[test]
fn rows_of_a_batch_do_not_see_each_other() -> Result<()> {
    on_every_golden(|golden| {
        let ids = golden.input_ids()?;
        let tokens = ids.dim(1)?;
        let mut model = dense(golden, DType::F32, Fusion::all())?;
        let both = in_chunks(model.as_mut(), &ids, &[tokens - 4, 1, 3])?;
        for row in 0..2 {
            let alone = ids.narrow(0, row, 1)?;
            let chunks = [[tokens - 2, 2], [3, tokens - 3]][row];
            let logits = in_chunks(model.as_mut(), &alone, &chunks)?;
            let error = relative_error(&logits, &both.narrow(0, row, 1)?)?;
            assert!(error < 1e-4, "{} row {row}: {error:e}", golden.name);
        }
        Ok(())
    })
}

#[test]
fn every_switch_alone_and_every_switch_missing_give_the_same_logits() -> Result<()> {
    // Parts of a fused product show only with it, no weight here is quantized, and models have one
    // kind of norm and of MLP.
    let parts = [
        "rms_norm_linear",
        "layer_norm_linear",
        "swiglu",
        "gelu",
        "quant_linear",
    ];
    on_every_golden(|golden| {
        let neox = golden.model_type() == "gpt_neox";
        let other_norm = if neox { "rms_norm" } else { "layer_norm" };
        for switch in Fusion::NAMES {
            let others: Vec<_> = Fusion::NAMES.into_iter().filter(|n| *n != switch).collect();
            for list in [switch.to_owned(), others.join(",")] {
                let mut model = dense(golden, DType::F32, list.parse()?)?;
                let ids = golden.input_ids()?;
                let (states, calls) = trace::capture(|| model.hidden_states(&ids, 0));
                let silent = parts.contains(&list.as_str()) || list == other_norm;
                assert_eq!(switched(&calls) == 0, silent, "{} {list}", golden.name);
                let error = relative_error(&states?.1, &golden.outputs["logits"])?;
                assert!(error < 1e-4, "{} with {list}: {error:e}", golden.name);
            }
        }
        Ok(())
    })
}

/// Calls of the ops that have a switch; the look-up of embeddings on a GPU has none.
fn switched(calls: &trace::Calls) -> u64 {
    calls.by_op().values().sum::<u64>() - calls.count("embedding")
}

/// How often a path with `part` was taken.
fn with(calls: &trace::Calls, part: &str) -> u64 {
    let of = |(call, n): (&trace::Call, u64)| call.path.contains(part).then_some(n);
    calls.iter().filter_map(of).sum()
}

/// Two products behind a norm, rotation, attention and two products a layer, and the head: nothing
/// runs beside the fused ops, and none is left out.
#[test]
fn every_layer_runs_fused() -> Result<()> {
    on_every_golden(|golden| {
        let ids = golden.input_ids()?;
        let layers = golden.outputs["hidden_states"].dim(0)? as u64 - 1;
        let neox = golden.model_type() == "gpt_neox";
        let mut fused = dense(golden, DType::F32, Fusion::all())?;
        for (chunk, position) in [(ids.clone(), 0), (ids.narrow(1, 0, 1)?, ids.dim(1)?)] {
            let (logits, calls) = trace::capture(|| fused.forward(&chunk, position));
            logits?;
            let (norm, activation) = match neox {
                true => ("layer_norm_linear", "+gelu"),
                false => ("rms_norm_linear", "+swiglu"),
            };
            assert_eq!(calls.count(norm), 2 * layers + 1, "{}", golden.name);
            assert_eq!(calls.count("rope"), layers);
            assert_eq!(calls.count("flash_attention"), layers);
            assert_eq!(calls.count("linear"), 2 * layers);
            assert_eq!(switched(&calls), 6 * layers + 1, "{}", golden.name);
            assert_eq!(with(&calls, activation), layers);
            assert_eq!(with(&calls, "+residual"), 2 * layers);
            let biases = match golden.model_type().as_str() {
                "gpt_neox" => 4 * layers,
                "qwen2" => layers,
                _ => 0,
            };
            assert_eq!(with(&calls, "+bias"), biases, "{}", golden.name);
        }

        let alone = "rms_norm,layer_norm,residual_add".parse()?;
        let mut alone = dense(golden, DType::F32, alone)?;
        let (states, calls) = trace::capture(|| alone.hidden_states(&ids, 0));
        states?;
        let norm = if neox { "layer_norm" } else { "rms_norm" };
        // Qwen3 has two more, of the heads.
        let each = if golden.model_type() == "qwen3" { 4 } else { 2 };
        assert_eq!(calls.count(norm), each * layers + 1);
        assert_eq!(calls.count("residual_add"), 2 * layers);

        let mut plain = dense(golden, DType::F32, Fusion::none())?;
        let (logits, calls) = trace::capture(|| plain.forward(&ids, 0));
        logits?;
        assert_eq!(switched(&calls), 0);
        Ok(())
    })
}
