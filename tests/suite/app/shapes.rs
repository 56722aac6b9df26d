use std::collections::HashSet;

use candle_core::{DType, Result, Shape as Dims};
use candle_nn::var_builder::SimpleBackend;
use clap::ValueEnum;

use crate::common::shapes::{RandomWeights, Shape, tokens};
use crate::common::source::ModelFiles;
use crate::common::tokenizer::Text;
use crate::common::weights::{self, Weights};
use crate::support::{devices, values};
use common::with_config;

#[test]
fn every_shape_is_a_configuration() {
    for shape in Shape::value_variants() {
        let weights = weights::open(&ModelFiles::Random(*shape)).unwrap();
        let architecture = weights.architecture().unwrap();
        let config = architecture.config(shape.config()).unwrap();
        let vocab = with_config!(
            config,
            config => config.vocab_size,
            config => config.vocab_size,
        );
        assert_eq!(weights.vocab_size().unwrap(), vocab, "{shape:?}");
        assert_eq!(Weights::Random(*shape).dtype(None).unwrap(), DType::BF16);
    }
}

#[test]
fn random_weights_come_with_a_token_for_every_id() {
    let text = Weights::Random(Shape::SmolLm2).text().unwrap();
    assert!(text.end_ids().is_empty() && !text.has_chat_template());
    let ids = text.encode_prompt("Grüße!").unwrap();
    // A token for each byte.
    assert_eq!(ids.len(), 8);
    assert_eq!(text.tokenizer().decode(&ids, true).unwrap(), "Grüße!");
    let vocab = Weights::Random(Shape::SmolLm2).vocab_size().unwrap() as u32;
    let words = (0..vocab).map(|id| text.tokenizer().id_to_token(id).unwrap());
    assert_eq!(words.collect::<HashSet<_>>().len(), vocab as usize);
    let decoded = text.tokenizer().decode(&[256, 256 + 27, vocab - 1], true);
    assert_eq!(decoded.unwrap(), " aaa abb cuip");
    assert!(Text::made_up(255).is_err());
}

#[test]
fn random_weights_are_the_same_at_every_call() -> Result<()> {
    let weights = RandomWeights { own_head: false };
    for device in devices() {
        let get = |dims: &[usize], name: &str, dtype| {
            let init = candle_nn::Init::Const(0.);
            values(&weights.get(Dims::from(dims), name, init, dtype, &device)?)
        };
        // More than one thread's share, and more than one part of a GPU's.
        let dims = [400, if device.is_cuda() { 15_000 } else { 500 }];
        let all = get(&dims, "a.weight", DType::F32)?;
        // Not assert_eq, which would print them all.
        assert!(all == get(&dims, "a.weight", DType::F32)?);
        assert!(all != get(&dims, "b.weight", DType::F32)?);
        let narrow = get(&dims, "a.weight", DType::BF16)?;
        // Half a unit in the last of eight bits.
        let mut pairs = all.iter().zip(&narrow);
        assert!(pairs.all(|(a, b)| (a - b).abs() <= a.abs() / 256.));
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        let variance = all.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / all.len() as f64;
        // Both within five standard errors.
        assert!(mean.abs() < 5. * 0.02 / (all.len() as f64).sqrt(), "{mean}");
        assert!((variance.sqrt() / 0.02 - 1.).abs() < 0.01, "{variance}");

        let norm = get(&[64], "norm.weight", DType::F32)?;
        assert!(norm.iter().all(|v| (v - 1.).abs() < 0.04));
        let bias = get(&[64], "norm.bias", DType::F32)?;
        assert!(bias.iter().all(|v| v.abs() < 0.04) && bias.iter().any(|v| *v != 0.));
    }
    assert!(!weights.contains_tensor("lm_head.weight"));
    assert!(RandomWeights { own_head: true }.contains_tensor("lm_head.weight"));
    Ok(())
}

#[test]
fn random_tokens_are_in_the_vocabulary() {
    let ids = tokens(1000, 50);
    assert_eq!(ids, tokens(1000, 50));
    assert!((0..50).all(|id| ids.contains(&id)) && ids.iter().all(|id| *id < 50));
    assert_eq!(tokens(3, 1), [0, 0, 0]);
}
