//! Which module takes which file, for errors that point onward.

/// A module below [`models`](super), `general.architecture` of its GGUF files if it takes any, and `model_type` of its
/// configurations.
struct Module {
    name: &'static str,
    gguf: Option<&'static str>,
    model_type: &'static str,
}

const MODULES: [Module; 8] = [
    Module {
        name: "llama",
        gguf: Some("llama"),
        model_type: "llama",
    },
    Module {
        name: "qwen2",
        gguf: Some("qwen2"),
        model_type: "qwen2",
    },
    Module {
        name: "qwen3",
        gguf: Some("qwen3"),
        model_type: "qwen3",
    },
    Module {
        name: "gpt_neox",
        gguf: Some("gptneox"),
        model_type: "gpt_neox",
    },
    Module {
        name: "mistral",
        gguf: Some("mistral"),
        model_type: "mistral",
    },
    Module {
        name: "phi3",
        gguf: Some("phi3"),
        model_type: "phi3",
    },
    Module {
        name: "smol::smollm3",
        gguf: Some("smollm3"),
        model_type: "smollm3",
    },
    Module {
        name: "bitnet",
        gguf: None,
        model_type: "bitnet",
    },
];

/// The module for GGUF files of an architecture.
pub fn of_gguf(architecture: &str) -> Option<&'static str> {
    let mut modules = MODULES.iter();
    modules
        .find(|m| m.gguf == Some(architecture))
        .map(|m| m.name)
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
