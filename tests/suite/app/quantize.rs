//! The flags that quantize, and the program that saves a quantized model, on the tiny model.

use super::place::{Place, assert_refused};
use super::tiny;
use crate::packers::{self, Format};
use candle_core::Device;
use serde_json::Value;

fn place() -> Place {
    let place = Place::new();
    std::fs::write(place.path().join("tiny.gguf"), tiny::gguf().unwrap()).unwrap();
    place
}

#[test]
fn a_saved_model_says_what_one_quantized_at_load_says() {
    let place = place();
    let formats = "--quantize int4-g32-z --head int8 --matrix *.o_proj.weight=int8";
    let (output, at_load, err) = place.run(
        "smollm",
        &format!("--model tiny.gguf --prompt the -n 12 {formats}"),
    );
    assert!(output.status.success(), "{err}");
    assert!(
        err.contains("int4-g32-z") && err.contains("head int8"),
        "{err}"
    );
    let (output, _, err) = place.run(
        "quantize",
        &format!("--model tiny.gguf --out saved {formats}"),
    );
    assert!(output.status.success(), "{err}");
    for file in ["model.safetensors", "config.json", "tokenizer.json"] {
        assert!(place.path().join("saved").join(file).is_file(), "{file}");
    }
    let (output, in_place, err) = place.run("smollm", "--model saved --prompt the -n 12");
    assert!(output.status.success(), "{err}");
    assert_eq!(in_place, at_load);
    // Plain candle takes what the codes are worth.
    let (output, _, err) = place.run("smollm", "--model saved --prompt the -n 3 --stock");
    assert!(output.status.success(), "{err}");
    // What is there is not written over.
    let again = format!("--model tiny.gguf --out saved {formats}");
    assert_refused(place.run("quantize", &again), "is there already");
}

#[test]
fn what_cannot_be_quantized_is_refused_in_one_line() {
    let place = place();
    for (line, wanted) in [
        ("--quantize int3", "`int3` is not one of int8"),
        ("--matrix down_proj", "PATTERN=FORMAT"),
        ("--matrix x=int3", "int3"),
        ("--quantize int8 --stock", "--stock"),
        ("--quantize int4-g128", "proj.weight"),
    ] {
        let line = format!("--model tiny.gguf --prompt the -n 3 {line}");
        let (output, out, err) = place.run("smollm", &line);
        assert!(!output.status.success() && out.is_empty(), "{line}");
        // The model's name may stand in front.
        let last = err.lines().last().unwrap_or_default();
        assert!(last.contains(wanted), "{line}: {err}");
    }
    assert_refused(
        place.run("quantize", "--model tiny.gguf --out saved"),
        "--quantize",
    );
}

/// A folder as the hub has it, quantized.
#[test]
fn a_quantized_checkpoint_runs_as_it_is() {
    let place = Place::new();
    for format in Format::ALL {
        let name = format!("{format:?}").to_lowercase();
        let folder = place.path().join(&name);
        std::fs::create_dir(&folder).unwrap();
        tiny::save(&folder).unwrap();
        let weights = folder.join("model.safetensors");
        let dense = candle_core::safetensors::load(&weights, &Device::Cpu).unwrap();
        let packed = packers::packed(dense, format).unwrap();
        candle_core::safetensors::save(&packed, &weights).unwrap();
        let config = folder.join("config.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
        json["quantization_config"] = format.config();
        std::fs::write(&config, json.to_string()).unwrap();
        let line = format!("--model {name} --prompt the -n 5");
        let mut said = Vec::new();
        for side in ["", "--fusion none", "--stock"] {
            let (output, out, err) = place.run("smollm", &format!("{line} {side}"));
            assert!(output.status.success(), "{name} {side}: {err}");
            said.push(out);
        }
        assert_eq!(said[1], said[2], "{name}");
        let again = place.run("smollm", &format!("{line} --quantize int8"));
        assert_refused(again, "quantized already");
    }
}

/// Weights of 4 and 8 bits for other programs say the same here as when they are quantized at load.
#[test]
fn a_model_saved_for_other_programs_says_the_same() {
    let place = place();
    let formats = "--quantize int4-g32 --matrix *.o_proj.weight=int8";
    let line = format!("--model tiny.gguf --prompt the -n 12 {formats}");
    let (output, at_load, err) = place.run("smollm", &line);
    assert!(output.status.success(), "{err}");
    let save = format!("--model tiny.gguf --layout compressed-tensors --out saved {formats}");
    let (output, _, err) = place.run("quantize", &save);
    assert!(output.status.success(), "{err}");
    let (output, loaded, err) = place.run("smollm", "--model saved --prompt the -n 12");
    assert!(output.status.success(), "{err}");
    assert_eq!(loaded, at_load);
    for (formats, said) in [
        ("--quantize int4-g32-z", "without zero points"),
        ("--quantize int8 --head int8", "tied"),
    ] {
        let line = format!("--model tiny.gguf --layout compressed-tensors --out other {formats}");
        let (output, _, err) = place.run("quantize", &line);
        let last = err.lines().last().unwrap_or_default();
        assert!(!output.status.success() && last.contains(said), "{err}");
    }
}
