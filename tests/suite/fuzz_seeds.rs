//! The inputs that fuzzing began with: small, and taken.

use crate::app::tiny;
use crate::fuzz::{CONFIG, TARGETS};
use crate::fuzz_replay::corpus;
use crate::golden::Golden;
use crate::packers::{self, Format};
use crate::support::randn;
use crate::{gguf_file, subject};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::Fusion;
use candle_fused::models::{CausalLm, Checkpoint, qwen3, save_quantized};
use candle_fused::quant::{QuantizedFile, Recipe};
use candle_nn::VarBuilder;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// The models among them load and speak: a seed is of use only while it is taken.
#[test]
fn models_among_the_seeds_are_taken() -> Result<()> {
    let ids = Tensor::new(&[[0u32, 1]], &Device::Cpu)?;
    let folder = tempfile::tempdir()?;
    for kind in KINDS {
        let golden = tiny_model(kind, folder.path())?;
        for dtype in [GgmlDType::F32, GgmlDType::Q4_0] {
            let bytes = gguf_file::bytes(&golden, dtype)?;
            let mut model = subject::gguf(&golden, &bytes, Fusion::all())?;
            assert_eq!(model.forward(&ids, 0)?.dims(), [1, 16], "{kind} {dtype:?}");
        }
    }
    let config: qwen3::Config = serde_json::from_str(CONFIG).expect("a configuration");
    for (name, bytes) in file_seeds()? {
        let path = folder.path().join(&name);
        fs::write(&path, &bytes)?;
        // SAFETY: nobody changes the file.
        let mapped = unsafe { QuantizedFile::open(path) }?;
        let logits = |file| -> Result<Vec<f32>> {
            let (dtype, fusion) = (DType::F32, Fusion::all());
            let mut model = CausalLm::from_quantized(&config, file, dtype, &Device::Cpu, fusion)?;
            let logits = model.forward(&ids, 0)?;
            assert_eq!(logits.dims(), [1, 1, 16], "{name}");
            logits.flatten_all()?.to_vec1()
        };
        let copied = QuantizedFile::from_bytes(&bytes)?;
        assert_eq!(logits(&mapped)?, logits(&copied)?, "{name}");
    }
    for (name, bytes) in checkpoint_seeds()? {
        let end = bytes
            .iter()
            .position(|byte| *byte == b'\n')
            .expect("a line");
        let path = folder.path().join(&name);
        fs::write(&path, &bytes[end + 1..])?;
        let quantization = String::from_utf8_lossy(&bytes[..end]);
        let text = format!(r#"{{"quantization_config": {quantization}}}"#);
        let file = Checkpoint::open(&[path], &text)?;
        let mut model = CausalLm::new(&config, file.var_builder(DType::F32, &Device::Cpu))?;
        assert_eq!(model.forward(&ids, 0)?.dims(), [1, 1, 16], "{name}");
    }
    Ok(())
}

/// Writes `tests/data/fuzz/TARGET/seed-*` again.
#[test]
#[ignore = "writes files of the repository"]
fn write_seeds() -> Result<()> {
    let seeds = [
        ("arguments", argument_seeds()),
        ("chat_template", template_seeds()),
        ("checkpoint", checkpoint_seeds()?),
        ("config", config_seeds()),
        ("gguf", gguf_seeds()?),
        ("gguf_tensors", tensor_seeds()),
        ("quantized_file", file_seeds()?),
        ("vocabulary", vocabulary_seeds()),
    ];
    assert_eq!(seeds.len(), TARGETS.len());
    for (target, seeds) in seeds {
        fs::create_dir_all(corpus(target))?;
        for (name, bytes) in seeds {
            fs::write(corpus(target).join(format!("seed-{name}")), bytes)?;
        }
    }
    Ok(())
}

type Seeds = Vec<(String, Vec<u8>)>;

fn numbered<T: AsRef<[u8]>>(seeds: &[T]) -> Seeds {
    let named = |(i, seed): (usize, &T)| (i.to_string(), seed.as_ref().to_vec());
    seeds.iter().enumerate().map(named).collect()
}

fn argument_seeds() -> Seeds {
    numbered(&[
        "--prompt\nhello\n--chat\n--cpu\n--dtype\nbf16\n--model\na/b\n--revision\nv1\n--temperature\n0.5\n\
         --top-p\n0.9\n--top-k\n40\n--seed\n7\n-n\n12\n--repeat-penalty\n1.2\n--repeat-last-n\n32\n--threads\n2",
        "--compare\n--json\nout.json\n--tracing\n--fusion\nrope,linear\n--sample-len=3",
        "--quantize\nint4-g64-z\n--head=int8\n--embedding\nq8_0\n--balance\n--matrix\n*.down_proj.weight=int8",
        "--profile\n--mmap\n--no-graph\n--temperature\n1e-37",
        "--stock\n--fusion=none",
    ])
}

fn template_seeds() -> Seeds {
    numbered(&[
        tiny::TEMPLATE,
        "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
         {{ raise_exception('roles must alternate') }}{% endif %}{{ m.content.strip() | tojson(indent=2) }}\
         {% endfor %}{{ eos_token }}",
        "{% macro turn(m, n) -%}{{ n }}{{ m.role | upper }}: {{ m.content.split('i')[0] }}{%- endmacro %}\
         {% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{{ turn(m, ns.n) }}\
         {% endfor %}{% if tools is defined and tools %}x{% else %}{{ strftime_now('%d %b %Y') }}{% endif %}",
        "{% for i in range(3) %}{% if loop.first %}{% continue %}{% endif %}{% generation %}{{ 'x' * i }}\
         {% endgeneration %}{% break %}{% endfor %}{{ {'a': [1, '<é>'], 'b': none} | tojson }}",
    ])
}

fn config_seeds() -> Seeds {
    let mut seeds: Seeds = KINDS
        .map(|kind| (kind.to_owned(), config(kind).to_string().into_bytes()))
        .to_vec();
    let scaling = json!({"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32});
    let mut scaled = config("llama");
    scaled["rope_parameters"] = scaling;
    let mut window = config("qwen2");
    window["use_sliding_window"] = true.into();
    window["sliding_window"] = 8.into();
    window["max_window_layers"] = 0.into();
    for (name, config) in [("llama3", scaled), ("window", window)] {
        seeds.push((name.into(), config.to_string().into_bytes()));
    }
    seeds
}

fn vocabulary_seeds() -> Seeds {
    let letters = "token <s>\nkind 3\ntoken </s>\nkind 3\ntoken <unk>\nkind 2\ntoken a\nkind 1\ntoken b\nkind 1\n\
        token Ġ\nkind 1\ntoken 1\nkind 1\ntoken ab\nkind 1\ntoken Ġa\nkind 1\ntoken !!\nkind 4\nmerge a b\nmerge Ġ a\n";
    let rest = "text ab ab 11 a!!b\ntext <s>a</s>\n";
    numbered(
        &["smollm", "llama-bpe", "qwen2", "gpt-2", "olmo"]
            .map(|pre| format!("pre {pre}\n{letters}bos 0\neos 1\nunk 2\nbos on\neos on\n{rest}")),
    )
}

/// Two row groups of each type, of blocks whose scales are finite.
fn tensor_seeds() -> Seeds {
    let types = [
        GgmlDType::Q4_0,
        GgmlDType::Q4_1,
        GgmlDType::Q5_0,
        GgmlDType::Q5_1,
        GgmlDType::Q8_0,
        GgmlDType::Q4K,
        GgmlDType::Q5K,
        GgmlDType::Q6K,
        GgmlDType::Q2K,
        GgmlDType::Q3K,
    ];
    let seed = |(i, dtype): (usize, &GgmlDType)| {
        let mut bytes = vec![i as u8, 1];
        bytes.extend(17u64.to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
        bytes.extend((0..17 * dtype.type_size()).map(|i| (i * 29 % 64) as u8));
        (format!("{dtype:?}").to_lowercase(), bytes)
    };
    let mut seeds: Seeds = types.iter().enumerate().map(seed).collect();
    // The same size in numbers, and one that no memory has.
    let mut exact = seeds[0].1.clone();
    exact[1] = 0;
    exact[10..18].copy_from_slice(&32u64.to_le_bytes());
    let mut huge = exact.clone();
    huge[2..10].copy_from_slice(&(1u64 << 59).to_le_bytes());
    seeds.extend([("exact".into(), exact), ("huge".into(), huge)]);
    seeds
}

const KINDS: [&str; 4] = ["llama", "qwen2", "qwen3", "gpt_neox"];

/// A tiny model of `kind`.
fn config(kind: &str) -> Value {
    let mut config: Value = serde_json::from_str(CONFIG).expect("JSON");
    config["model_type"] = kind.into();
    if kind == "gpt_neox" {
        config["rope_parameters"] = json!({"partial_rotary_factor": 0.25, "rope_theta": 10000.0});
        config["use_parallel_residual"] = true.into();
        config["layer_norm_eps"] = 1e-5.into();
        config["hidden_act"] = "gelu".into();
        config["tie_word_embeddings"] = false.into();
    } else {
        config["rope_parameters"] = json!({"rope_theta": 10000.0, "rope_type": "default"});
    }
    if kind != "qwen3" {
        config
            .as_object_mut()
            .expect("an object")
            .remove("head_dim");
    }
    config
}

/// The names and shapes of its tensors.
fn tensors(kind: &str) -> Vec<(String, Vec<usize>)> {
    let mut tensors = Vec::new();
    let mut add = |name: String, dims: &[usize]| tensors.push((name, dims.to_vec()));
    if kind == "gpt_neox" {
        add("gpt_neox.embed_in.weight".into(), &[16, 32]);
        add("embed_out.weight".into(), &[16, 32]);
        let layer = |name: &str| format!("gpt_neox.layers.0.{name}");
        for name in [
            layer("input_layernorm"),
            layer("post_attention_layernorm"),
            "gpt_neox.final_layer_norm".into(),
        ] {
            add(format!("{name}.weight"), &[32]);
            add(format!("{name}.bias"), &[32]);
        }
        for (name, rows) in [
            ("attention.query_key_value", 96),
            ("attention.dense", 32),
            ("mlp.dense_h_to_4h", 32),
            ("mlp.dense_4h_to_h", 32),
        ] {
            add(layer(&format!("{name}.weight")), &[rows, 32]);
            add(layer(&format!("{name}.bias")), &[rows]);
        }
        return tensors;
    }
    add("model.embed_tokens.weight".into(), &[16, 32]);
    add("model.norm.weight".into(), &[32]);
    let layer = |name: &str| format!("model.layers.0.{name}");
    for (name, rows) in [
        ("self_attn.q_proj", 32),
        ("self_attn.k_proj", 16),
        ("self_attn.v_proj", 16),
        ("self_attn.o_proj", 32),
        ("mlp.gate_proj", 32),
        ("mlp.up_proj", 32),
        ("mlp.down_proj", 32),
    ] {
        add(layer(&format!("{name}.weight")), &[rows, 32]);
        if kind == "qwen2" && name.starts_with("self_attn") && !name.ends_with("o_proj") {
            add(layer(&format!("{name}.bias")), &[rows]);
        }
    }
    for name in ["input_layernorm", "post_attention_layernorm"] {
        add(layer(&format!("{name}.weight")), &[32]);
    }
    if kind == "qwen3" {
        add(layer("self_attn.q_norm.weight"), &[16]);
        add(layer("self_attn.k_norm.weight"), &[16]);
    }
    tensors
}

/// Its folder, as a golden's.
fn tiny_model(kind: &str, parent: &Path) -> Result<Golden> {
    let folder = parent.join(kind);
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("config.json"), config(kind).to_string())?;
    let tensors: HashMap<_, _> = weights(kind)?;
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors"))?;
    Ok(Golden {
        name: kind.to_owned(),
        folder,
        outputs: HashMap::new(),
    })
}

fn weights(kind: &str) -> Result<HashMap<String, Tensor>> {
    let random =
        |(name, dims): (String, Vec<usize>)| Ok((name, (randn(&dims, DType::F32)? * 0.2)?));
    tensors(kind).into_iter().map(random).collect()
}

fn gguf_seeds() -> Result<Seeds> {
    let folder = tempfile::tempdir()?;
    let mut seeds = Vec::new();
    for kind in KINDS {
        let golden = tiny_model(kind, folder.path())?;
        for dtype in [GgmlDType::Q4_0, GgmlDType::Q8_0] {
            let name = format!("{kind}-{dtype:?}").to_lowercase();
            seeds.push((name, gguf_file::bytes(&golden, dtype)?));
        }
    }
    Ok(seeds)
}

fn file_seeds() -> Result<Seeds> {
    let config: qwen3::Config = serde_json::from_str(CONFIG).expect("a configuration");
    let folder = tempfile::tempdir()?;
    let mut seeds = Vec::new();
    for scheme in ["int8", "fp8-block128", "nvfp4", "int4-g32-z", "ternary-row"] {
        let vb = VarBuilder::from_tensors(weights("qwen3")?, DType::F32, &Device::Cpu);
        let path = folder.path().join(scheme);
        let recipe = Recipe::new(scheme.parse()?).with_head(scheme.parse()?);
        save_quantized(&config, vb, &recipe, &path)?;
        seeds.push((scheme.to_owned(), fs::read(path)?));
    }
    Ok(seeds)
}

/// `quantization_config` on a line, and the file.
fn checkpoint_seeds() -> Result<Seeds> {
    let folder = tempfile::tempdir()?;
    let mut seeds = Vec::new();
    for format in Format::ALL {
        let name = format!("{format:?}").to_lowercase();
        let path = folder.path().join(&name);
        let tensors = packers::packed(weights("qwen3")?, format)?;
        candle_core::safetensors::save(&tensors, &path)?;
        let line = format!("{}\n", format.config());
        seeds.push((name, [line.into_bytes(), fs::read(path)?].concat()));
    }
    Ok(seeds)
}
