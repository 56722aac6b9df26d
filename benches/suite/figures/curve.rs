//! How a cost grows.

use crate::stats::PowerLaw;
use serde::{Deserialize, Serialize};

/// What is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Over {
    /// Attention of a step over so many keys.
    Context,
    /// A layer for so many sequences.
    Batch,
    /// All layers and the head of models with so many weights.
    Model,
    /// A token of a whole model behind so many others.
    Position,
}

impl Over {
    pub fn name(self) -> &'static str {
        match self {
            Self::Context => "attention of a step, by context",
            Self::Batch => "a layer, by sequences",
            Self::Model => "all layers and the head, by weights",
            Self::Position => "a token of the model, by position",
        }
    }
}

/// The cost of one side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Curve {
    pub over: Over,
    /// Empty where models are what is changed.
    pub model: String,
    pub format: String,
    pub side: String,
    /// Sizes and seconds.
    pub points: Vec<(f64, f64)>,
    pub law: Option<PowerLaw>,
}
