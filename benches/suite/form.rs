//! The forms of a model.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// How a model runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// candle-transformers' model, or plain candle where it has none.
    Stock,
    /// The same, with candle's events off and the pool keeping what is freed; on a GPU.
    Settings,
    /// Ours, through the `forward` that takes the place of candle-transformers' own, with nothing else
    /// changed.
    Import,
    /// Ours in `Generation`, one launch after the other.
    Eager,
    /// Ours in `Generation`, a step being one CUDA graph.
    Graph,
}

impl Form {
    pub fn name(self) -> &'static str {
        match self {
            Self::Stock => "stock",
            Self::Settings => "settings",
            Self::Import => "import",
            Self::Eager => "eager",
            Self::Graph => "graph",
        }
    }

    pub fn is_fused(self) -> bool {
        matches!(self, Self::Import) || self.has_generation()
    }

    /// Whether `Generation` runs the token loop.
    pub fn has_generation(self) -> bool {
        matches!(self, Self::Eager | Self::Graph)
    }

    /// Whether candle's settings are as a user finds them.
    pub fn leaves_settings(self) -> bool {
        matches!(self, Self::Stock | Self::Import)
    }
}
