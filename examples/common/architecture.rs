//! The architectures that the examples run, and their configurations.

use std::fmt;

use anyhow::{Result, bail};
use candle_fused::models::smol::smollm3;
use candle_fused::models::{bitnet, gpt_neox, llama, mistral, phi3, qwen2, qwen3};
use serde_json::Value;

/// An architecture that candle-fused has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    Llama,
    Qwen2,
    Qwen3,
    GptNeox,
    Mistral,
    Phi3,
    SmolLm3,
    BitNet,
}

/// A checkpoint's configuration.
#[derive(Clone, Debug)]
pub enum Config {
    Llama(llama::Config),
    Qwen2(qwen2::Config),
    Qwen3(qwen3::Config),
    GptNeox(gpt_neox::Config),
    Mistral(mistral::Config),
    Phi3(phi3::Config),
    SmolLm3(smollm3::Config),
    BitNet(bitnet::Config),
}

/// What is done for a Llama, whose types differ, and what for the configuration of any other architecture.
#[macro_export]
macro_rules! with_config {
    ($config:expr, $llama:ident => $as_llama:expr, $other:ident => $as_other:expr $(,)?) => {
        match $config {
            $crate::architecture::Config::Llama($llama) => $as_llama,
            $crate::architecture::Config::Qwen2($other) => $as_other,
            $crate::architecture::Config::Qwen3($other) => $as_other,
            $crate::architecture::Config::GptNeox($other) => $as_other,
            $crate::architecture::Config::Mistral($other) => $as_other,
            $crate::architecture::Config::Phi3($other) => $as_other,
            $crate::architecture::Config::SmolLm3($other) => $as_other,
            $crate::architecture::Config::BitNet($other) => $as_other,
        }
    };
}

impl Architecture {
    const ALL: [Self; 8] = [
        Self::Llama,
        Self::Qwen2,
        Self::Qwen3,
        Self::GptNeox,
        Self::Mistral,
        Self::Phi3,
        Self::SmolLm3,
        Self::BitNet,
    ];

    /// By `model_type` of a config.json, or `general.architecture` of a GGUF file.
    pub fn named(name: &str) -> Result<Self> {
        let called = |a: &Self| [a.model_type(), a.gguf()].contains(&name);
        match Self::ALL.into_iter().find(called) {
            Some(architecture) => Ok(architecture),
            None => bail!(
                "models of the architecture '{name}' are not run here; take a llama, qwen2, qwen3, gpt_neox, \
                 mistral, phi3, smollm3 or bitnet model"
            ),
        }
    }

    /// Its name in a config.json.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::GptNeox => "gpt_neox",
            Self::Mistral => "mistral",
            Self::Phi3 => "phi3",
            Self::SmolLm3 => "smollm3",
            Self::BitNet => "bitnet",
        }
    }

    /// Its name in a GGUF file, and the prefix of its metadata.
    pub fn gguf(self) -> &'static str {
        match self {
            Self::GptNeox => "gptneox",
            // Converters write Mistral as a Llama.
            Self::Mistral => Self::Llama.gguf(),
            other => other.model_type(),
        }
    }

    /// Reads a config.json.
    pub fn config(self, json: Value) -> serde_json::Result<Config> {
        let read = serde_json::from_value::<llama::LlamaConfig>;
        Ok(match self {
            Self::Llama => Config::Llama(read(json)?.into_config(false)),
            Self::Qwen2 => Config::Qwen2(serde_json::from_value(json)?),
            Self::Qwen3 => Config::Qwen3(serde_json::from_value(json)?),
            Self::GptNeox => Config::GptNeox(serde_json::from_value(json)?),
            Self::Mistral => Config::Mistral(serde_json::from_value(json)?),
            Self::Phi3 => Config::Phi3(serde_json::from_value(json)?),
            Self::SmolLm3 => Config::SmolLm3(serde_json::from_value(json)?),
            Self::BitNet => Config::BitNet(serde_json::from_value(json)?),
        })
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type())
    }
}
