//! What the sides took, where their tokens part, and which of them are those of f32.

use crate::side::{Model, Run, Side};
use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_fused::trace;
use std::time::Duration;

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

/// Tokens a second, and tokens beside those of the first side and of candle's own model in f32.
pub fn report(
    sides: &mut [Side],
    exact: impl FnOnce() -> Result<Box<dyn Model>>,
    prompt: &[u32],
    device: &Device,
) -> Result<()> {
    let of = |side: &Side, time: fn(&Run) -> Duration| median(side.runs.iter().map(time).collect());
    let first = of(&sides[0], |run| run.decode);
    for side in sides.iter() {
        let decode = of(side, |run| run.decode);
        let steps = side.runs[0].tokens.len() - 1;
        println!(
            "{:22} {:8.1} tok/s  {:5.2}x  prompt in {:.1} ms",
            side.name,
            steps as f64 / decode,
            first / decode,
            of(side, |run| run.prompt) * 1e3
        );
    }
    println!();
    let tokens: Vec<_> = sides.iter().map(|s| s.runs[0].tokens.clone()).collect();
    let mut parted = Vec::new();
    for (i, side) in sides.iter().enumerate() {
        println!("{}: {:?}", side.name, tokens[i]);
        if side.runs.iter().any(|run| run.tokens != tokens[i]) {
            println!("  other tokens in another round");
        }
        match (0..tokens[0].len()).find(|at| tokens[i][*at] != tokens[0][*at]) {
            Some(at) => parted.push((i, at)),
            None if i > 0 => println!("  all {} tokens are stock's", tokens[0].len()),
            None => {}
        }
    }
    let mut exact = exact()?;
    let right = Run::of(&mut *exact, prompt, tokens[0].len(), device)?.tokens;
    println!("candle's own model with the same numbers in f32: {right:?}");
    for (side, tokens) in sides.iter().zip(&tokens) {
        let same = tokens.iter().zip(&right).take_while(|(a, b)| a == b);
        println!(
            "  {}: the first {} of {} tokens are those",
            side.name,
            same.count(),
            right.len()
        );
    }
    for (i, at) in parted {
        part(sides, &mut *exact, i, prompt, &tokens[0][..at], device)?;
    }
    println!();
    for side in sides.iter_mut().skip(1) {
        side.model.restart()?;
        let ids = Tensor::new(prompt, device)?.unsqueeze(0)?;
        side.model.forward(&ids, 0)?;
        let ids = ids.narrow(1, 0, 1)?;
        let (logits, calls) = trace::capture(|| side.model.forward(&ids, prompt.len()));
        logits?;
        println!("candle-fused's calls of one token, {}:\n{calls}", side.name);
    }
    Ok(())
}

/// Where a side's tokens part from those of the first: how near the two likeliest are there, and how far both sides
/// are from f32.
fn part(
    sides: &mut [Side],
    exact: &mut dyn Model,
    i: usize,
    prompt: &[u32],
    tokens: &[u32],
    device: &Device,
) -> Result<()> {
    let right = behind(exact, prompt, tokens, device)?;
    let stock = behind(&mut *sides[0].model, prompt, tokens, device)?;
    let other = behind(&mut *sides[i].model, prompt, tokens, device)?;
    let error = |logits: &[f32]| {
        let distances = logits.iter().zip(&right).map(|(a, b)| (a - b).abs());
        distances.fold(0., f32::max)
    };
    let mut sorted = stock.clone();
    sorted.sort_by(|a, b| b.total_cmp(a));
    println!(
        "  {}: the first {} tokens are stock's; there stock's two likeliest are {:.4} apart. Largest error of a \
         logit against f32: stock {:.4}, this {:.4}",
        sides[i].name,
        tokens.len(),
        sorted[0] - sorted[1],
        error(&stock),
        error(&other)
    );
    Ok(())
}

/// The logits behind `tokens`, which were generated one by one.
fn behind(
    model: &mut dyn Model,
    prompt: &[u32],
    tokens: &[u32],
    device: &Device,
) -> Result<Vec<f32>> {
    model.restart()?;
    let ids = Tensor::new(prompt, device)?.unsqueeze(0)?;
    let mut logits = model.forward(&ids, 0)?;
    for (token, position) in tokens.iter().zip(prompt.len()..) {
        let ids = Tensor::new(&[*token], device)?.unsqueeze(0)?;
        logits = model.forward(&ids, position)?;
    }
    Ok(logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
}
