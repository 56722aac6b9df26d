//! The programs for other architectures, and compare, on the tiny models of every architecture.

use std::collections::HashMap;
use std::path::Path;

use candle_core::quantized::GgmlDType;
use candle_core::{Device, Tensor, safetensors};
use serde_json::Value;

use super::place::{Outcome, Place, assert_failed, assert_refused};
use super::tiny;
use crate::gguf_file;
use crate::golden::Golden;
use crate::subject::GOLDENS;

/// Those whose other side is the same model in candle's own operations, beside GPT-NeoX.
const OF_OUR_OWN: [&str; 4] = [
    "mistral_window",
    "phi3_long",
    "phi3_partial",
    "smollm3_nope",
];

fn all() -> impl Iterator<Item = &'static str> {
    GOLDENS.into_iter().chain(OF_OUR_OWN)
}

/// A copy of a golden model in the folder `model`, with its outputs in `golden.safetensors`.
fn place(name: &str) -> Place {
    let place = Place::new();
    let golden = Golden::open(name).unwrap();
    let model = place.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(golden.folder.join(file), model.join(file)).unwrap();
    }
    let outputs = golden.folder.join("golden.safetensors");
    std::fs::copy(outputs, place.path().join("golden.safetensors")).unwrap();
    place
}

/// Changes the tensors of a safetensors file.
fn change(file: &Path, change: impl FnOnce(&mut HashMap<String, Tensor>)) {
    let mut tensors = safetensors::load(file, &Device::Cpu).unwrap();
    change(&mut tensors);
    safetensors::save(&tensors, file).unwrap();
}

fn assert_passed((output, out, err): Outcome) -> String {
    assert!(output.status.success(), "{out}{err}");
    out
}

/// Text of f32 weights is the same on both sides.
fn assert_generates(program: &str, golden: &str) {
    let place = place(golden);
    let tokenizer = tiny::tokenizer().to_string(false).unwrap();
    std::fs::write(place.path().join("model/tokenizer.json"), tokenizer).unwrap();
    let line = "--model model --prompt ab -n 12";
    let text = assert_passed(place.run(program, line));
    assert!(text.starts_with("ab") && text.len() > 4, "{text}");
    for side in ["--stock", "--fusion none"] {
        let other = assert_passed(place.run(program, &format!("{line} {side}")));
        assert_eq!(text, other, "{side}");
    }
}

#[test]
fn qwen_generates_as_stock_candle_does() {
    assert_generates("qwen", "qwen2_bias");
    assert_generates("qwen", "qwen3_qknorm");
}

#[test]
fn pythia_generates_as_plain_candle_does() {
    assert_generates("pythia", "gpt_neox_parallel");
    assert_generates("pythia", "gpt_neox_sequential");
}

#[test]
fn without_a_hub_the_examples_say_what_to_do() {
    for (program, model) in [
        ("qwen", "Qwen/Qwen3-0.6B"),
        ("pythia", "EleutherAI/pythia-160m"),
    ] {
        let (output, out, err) = Place::new().run(program, "");
        assert!(
            err.contains(model) && err.contains("hub not reachable"),
            "{err}"
        );
        assert_refused((output, out, err), "--model a folder or GGUF file");
        let help = assert_passed(Place::new().run(program, "--help"));
        assert!(help.contains(&format!("[default: {model}]")), "{help}");
    }
}

fn report(place: &Place, line: &str) -> Value {
    let out = assert_passed(place.run("compare", &format!("{line} --json report.json")));
    let text = std::fs::read_to_string(place.path().join("report.json")).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap();
    assert!(out.contains(report["baseline"].as_str().unwrap()), "{out}");
    report
}

#[test]
fn compare_takes_every_architecture() {
    for name in all() {
        let place = place(name);
        let report = report(&place, "--model model --prompt-tokens 9 -n 6 --dtype f32");
        assert_eq!(report["tokens_match"], true, "{name}: {report}");
        assert!(
            report["max_logit_diff"].as_f64().unwrap() < 1e-3,
            "{report}"
        );
        let layers = report["layers"].as_array().unwrap();
        assert!(layers.len() > 1, "{report}");
        for layer in layers {
            assert!(layer["rel"].as_f64().unwrap() < 1e-5, "{name}: {layer}");
        }
        let baseline = match name.starts_with("gpt_neox") || OF_OUR_OWN.contains(&name) {
            true => "plain candle",
            false => "stock",
        };
        assert_eq!(report["baseline"], baseline);
        for op in ["rope", "flash_attention", "linear"] {
            assert!(
                report["op_calls"][op].as_u64() > Some(0),
                "{name}: {report}"
            );
        }
    }
}

#[test]
fn compare_takes_gguf_files_of_every_architecture() {
    for name in [
        "llama_gqa_tied",
        "qwen2_bias",
        "qwen3_qknorm",
        "gpt_neox_parallel",
    ] {
        let place = Place::new();
        let bytes = gguf_file::bytes(&Golden::open(name).unwrap(), GgmlDType::Q8_0).unwrap();
        std::fs::write(place.path().join("model.gguf"), bytes).unwrap();
        let report = report(&place, "--model model.gguf --prompt-tokens 9 -n 6");
        assert_eq!(report["sample_len"], 6);
        assert!(
            report["op_calls"]["quant_linear"].as_u64() > Some(0),
            "{name}: {report}"
        );
        for side in ["stock", "fused"] {
            assert!(
                report[side]["decode_tok_s"].as_f64().unwrap() > 0.,
                "{report}"
            );
        }
    }
}

/// Blocks of a GGUF file with activations in 16 bits: alone, since stock computes in f32, and of no other file.
#[test]
fn activations_of_a_gguf_file_have_a_dtype() {
    let place = place("qwen2_bias");
    let golden = Golden::open("qwen2_bias").unwrap();
    let bytes = gguf_file::bytes(&golden, GgmlDType::Q8_0).unwrap();
    std::fs::write(place.path().join("model.gguf"), bytes).unwrap();
    let line = "--model model.gguf --compute-dtype bf16 --prompt-tokens 5 -n 6";
    let out = assert_passed(place.run("compare", &format!("{line} --only fused")));
    assert!(out.contains("steps/s"), "{out}");
    let line_of_golden = "--model model.gguf --golden golden.safetensors --tol 0.1";
    assert_passed(place.run("compare", &format!("{line_of_golden} --compute-dtype f16")));
    assert_refused(place.run("compare", line), "add --only fused");
    let line = "--model model --compute-dtype bf16 --prompt-tokens 5 --only fused";
    assert_refused(
        place.run("compare", line),
        "--compute-dtype is for GGUF files",
    );
}

#[test]
fn one_side_can_be_measured_alone() {
    let place = place("qwen3_qknorm");
    for side in ["fused --sequences 2", "stock"] {
        let line = format!("--model model --prompt-tokens 5 -n 6 --only {side}");
        let out = assert_passed(place.run("compare", &line));
        assert!(
            out.contains("prefill of 5") && out.contains("steps/s"),
            "{out}"
        );
    }
}

#[test]
fn a_golden_is_met_by_every_model() {
    for name in GOLDENS {
        let place = place(name);
        let line = "--model model --golden golden.safetensors";
        let out = assert_passed(place.run("compare", line));
        let layers = Golden::open(name).unwrap().outputs["hidden_states"]
            .dim(0)
            .unwrap();
        assert_eq!(out.matches("hidden state").count(), layers, "{out}");
        assert!(out.contains("48 of 48 equal"), "{out}");
        assert_passed(place.run("compare", &format!("{line} --dtype bf16")));
        let (output, out, err) = place.run("compare", &format!("{line} --tol 1e-12"));
        assert!(out.contains("logits"), "{out}");
        assert_failed(&(output, out, err), "more than --tol 1e-12");
    }
}

#[test]
fn a_golden_may_be_of_the_last_positions_only() {
    let place = place("gpt_neox_parallel");
    change(&place.path().join("golden.safetensors"), |tensors| {
        for (name, dim, keep) in [("hidden_states", 2, 3), ("logits", 1, 1)] {
            let tensor = &tensors[name];
            let from = tensor.dim(dim).unwrap() - keep;
            let last = tensor
                .narrow(dim, from, keep)
                .unwrap()
                .contiguous()
                .unwrap();
            tensors.insert(name.to_owned(), last);
        }
        tensors.remove("greedy_margin");
    });
    assert_passed(place.run("compare", "--model model --golden golden.safetensors"));
}

#[test]
fn damage_is_found_and_named() {
    let line = "--model model --golden golden.safetensors";
    let damaged = place("qwen3_qknorm");
    let weights = damaged.path().join("model/model.safetensors");
    change(&weights, |tensors| {
        let name = "model.layers.1.self_attn.q_norm.weight";
        let scaled = (&tensors[name] * 1.05).unwrap();
        tensors.insert(name.to_owned(), scaled);
    });
    assert_failed(&damaged.run("compare", line), "hidden state 2 is off");

    let with = |change_golden: &dyn Fn(&mut HashMap<String, Tensor>)| {
        let place = place("llama_gqa_tied");
        change(&place.path().join("golden.safetensors"), change_golden);
        place.run("compare", line)
    };
    let outcome = with(&|t| {
        let logits = (&t["logits"] * 1.01).unwrap();
        t.insert("logits".into(), logits);
    });
    assert_failed(&outcome, "the logits are off");
    let outcome = with(&|t| {
        let greedy = &t["greedy"];
        let other = greedy.broadcast_sub(&greedy.ones_like().unwrap()).unwrap();
        t.insert("greedy".into(), other.abs().unwrap());
    });
    assert_failed(&outcome, "greedy tokens are not the reference's");
    for name in ["input_ids", "logits", "hidden_states", "greedy"] {
        let outcome = with(&|t| {
            t.remove(name);
        });
        assert_refused(outcome, &format!("no tensor {name}"));
        let outcome = with(&|t| {
            let flat = t[name].flatten_all().unwrap();
            t.insert(name.into(), flat);
        });
        assert_refused(outcome, &format!("{name} has shape"));
    }
    let outcome = with(&|t| {
        let fewer = t["hidden_states"]
            .narrow(0, 1, 2)
            .unwrap()
            .contiguous()
            .unwrap();
        t.insert("hidden_states".into(), fewer);
    });
    assert_refused(outcome, "hidden_states holds 2 states");
}

#[test]
fn what_cannot_be_meant_is_refused() {
    let place = place("llama_gqa_tied");
    for (line, wanted) in [
        ("--shape qwen3-0.6b --model model", "--model"),
        ("--shape gpt-5", "gpt-5"),
        ("--model model", "--prompt-tokens N"),
        ("--model model --prompt-tokens 5 --prompt ab", "--prompt"),
        ("--model model --prompt-tokens 0", "at least 1"),
        ("--model model --prompt-tokens 500 -n 600", "positions"),
        (
            "--model model --prompt-tokens 5 --only fused -n 2",
            "at least 3",
        ),
        (
            "--model model --prompt-tokens 5 --only stock --sequences 2",
            "plain candle runs one",
        ),
        (
            "--model model --prompt-tokens 5 --only fused --sequences 9",
            "1 to 8",
        ),
        ("--model model --sequences 2", "--only"),
        ("--model model --tol 1", "--golden"),
        (
            "--model model --golden missing.safetensors",
            "missing.safetensors",
        ),
        ("--model model --golden model/config.json", "config.json"),
        (
            "--model model --golden golden.safetensors --tol -1",
            "0 or more",
        ),
    ] {
        assert_refused(place.run("compare", line), wanted);
    }
}
