//! The architectures that the examples run, and their configurations.

use std::fmt;

use anyhow::{Result, bail};
use candle_fused::models::{gpt_neox, llama, qwen2, qwen3};
use serde_json::Value;

/// An architecture that candle-fused has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    Llama,
    Qwen2,
    Qwen3,
    GptNeox,
}

/// A checkpoint's configuration.
#[derive(Clone, Debug)]
pub enum Config {
    Llama(llama::Config),
    Qwen2(qwen2::Config),
    Qwen3(qwen3::Config),
    GptNeox(gpt_neox::Config),
}

impl Architecture {
    const ALL: [Self; 4] = [Self::Llama, Self::Qwen2, Self::Qwen3, Self::GptNeox];

    /// By `model_type` of a config.json, or `general.architecture` of a GGUF file.
    pub fn named(name: &str) -> Result<Self> {
        let called = |a: &Self| [a.model_type(), a.gguf()].contains(&name);
        match Self::ALL.into_iter().find(called) {
            Some(architecture) => Ok(architecture),
            None => bail!(
                "models of the architecture '{name}' are not run here; take a llama, qwen2, qwen3 or \
                 gpt_neox model"
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
        }
    }

    /// Its name in a GGUF file, and the prefix of its metadata.
    pub fn gguf(self) -> &'static str {
        match self {
            Self::GptNeox => "gptneox",
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
        })
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type())
    }
}
