//! The sides.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// What is measured against what.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Peer {
    /// candle-fused.
    Fused,
    /// llama.cpp with flash attention.
    LlamaFlash,
    /// llama.cpp without.
    LlamaPlain,
}

impl Peer {
    pub const ALL: [Self; 3] = [Self::Fused, Self::LlamaFlash, Self::LlamaPlain];

    pub fn name(self) -> &'static str {
        match self {
            Self::Fused => "candle-fused",
            Self::LlamaFlash => "llama.cpp, flash attention",
            Self::LlamaPlain => "llama.cpp, without",
        }
    }
}
