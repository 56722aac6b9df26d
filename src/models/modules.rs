//! Which module takes which file, for errors that point onward.

/// A module below [`models`](super), `general.architecture` of its GGUF files, and `model_type` of its
/// configurations.
struct Module {
    name: &'static str,
    gguf: &'static str,
    model_type: &'static str,
}

const MODULES: [Module; 7] = [
    Module {
        name: "llama",
        gguf: "llama",
        model_type: "llama",
    },
    Module {
        name: "qwen2",
        gguf: "qwen2",
        model_type: "qwen2",
    },
    Module {
        name: "qwen3",
        gguf: "qwen3",
        model_type: "qwen3",
    },
    Module {
        name: "gpt_neox",
        gguf: "gptneox",
        model_type: "gpt_neox",
    },
    Module {
        name: "mistral",
        gguf: "mistral",
        model_type: "mistral",
    },
    Module {
        name: "phi3",
        gguf: "phi3",
        model_type: "phi3",
    },
    Module {
        name: "smol::smollm3",
        gguf: "smollm3",
        model_type: "smollm3",
    },
];

/// The module for GGUF files of an architecture.
pub fn of_gguf(architecture: &str) -> Option<&'static str> {
    let mut modules = MODULES.iter();
    modules.find(|m| m.gguf == architecture).map(|m| m.name)
}

/// The module for configurations of a `model_type`.
pub fn of_model_type(model_type: &str) -> Option<&'static str> {
    let mut modules = MODULES.iter();
    modules.find(|m| m.model_type == model_type).map(|m| m.name)
}

/// The end of an error that names the module, or says that there is none.
pub fn hint(module: Option<&str>) -> String {
    match module {
        Some(name) => format!("; `candle_fused::models::{name}` takes it"),
        None => "; no module of candle_fused::models takes it".to_owned(),
    }
}
