//! What `quantization_config` says, and what is refused.

use super::{Bytes, Format, Layer};
use serde_json::{Value, json};

fn read(quantization: Value) -> Result<Option<Format>, String> {
    let config = json!({"model_type": "llama", "quantization_config": quantization});
    Format::of_config(&config.to_string()).map_err(|e| e.to_string())
}

fn weights(fields: Value) -> Value {
    json!({"quant_method": "compressed-tensors", "format": "pack-quantized",
           "config_groups": {"group_0": {"targets": ["Linear"], "weights": fields}}})
}

#[test]
fn formats_are_read() {
    let gptq = |zeros_as_they_are| Ok(Some(Format::Gptq { zeros_as_they_are }));
    assert_eq!(read(Value::Null), Ok(None));
    let v1 = json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": true});
    assert_eq!(read(v1), gptq(false));
    let v2 = json!({"quant_method": "gptq", "bits": 8, "group_size": -1,
                    "checkpoint_format": "gptq_v2"});
    assert_eq!(read(v2), gptq(true));
    let version =
        |field: &str, value: &str| json!({"quant_method": "gptq", "bits": 4, field: value});
    assert_eq!(read(version("checkpoint_format", "GPTQ_V2")), gptq(true));
    assert_eq!(read(version("format", "Gptq_v2")), gptq(true));
    assert_eq!(read(version("checkpoint_format", "GPTQ")), gptq(false));
    let awq = json!({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"});
    assert_eq!(read(awq), Ok(Some(Format::Awq)));
    let w8a8 = json!({"quant_method": "compressed-tensors", "format": "int-quantized",
        "config_groups": {"group_0": {
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "dynamic": false},
            "input_activations": {"num_bits": 8, "type": "int", "dynamic": true}}}});
    let compressed = |bytes, nvfp4, ignores_nvfp4_inputs| {
        Ok(Some(Format::CompressedTensors {
            bytes,
            nvfp4,
            ignores_nvfp4_inputs,
        }))
    };
    let bytes = |bytes| compressed(bytes, false, false);
    assert_eq!(read(w8a8), bytes(Bytes::Int));
    let float = json!({"type": "float", "num_bits": 8, "strategy": "channel"});
    assert_eq!(read(weights(float)), bytes(Bytes::Fp8(None)));
    let nvfp4 =
        json!({"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16});
    let mut config = weights(nvfp4.clone());
    config["format"] = json!("nvfp4-pack-quantized");
    assert_eq!(read(config.clone()), compressed(Bytes::Int, true, false));
    config["config_groups"]["group_0"]["input_activations"] = nvfp4;
    assert_eq!(read(config.clone()), compressed(Bytes::Int, true, true));
    config["format"] = json!("NVFP4-pack-quantized");
    assert_eq!(read(config), compressed(Bytes::Int, true, true));
    // Of codes that are packed nothing is said of bytes, however it is written.
    let eight = json!({"weights": {"num_bits": 8, "type": "int"}, "format": "Pack-Quantized"});
    let float = json!({"weights": {"num_bits": 8, "type": "Float"}, "format": "float-quantized"});
    let mixed = json!({"quant_method": "compressed-tensors", "format": "mixed-precision",
                       "config_groups": {"group_0": eight, "group_1": float}});
    assert_eq!(read(mixed), bytes(Bytes::Fp8(None)));
    let blocks = json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                        "weight_block_size": [128, 128]});
    assert_eq!(read(blocks), Ok(Some(Format::Fp8(Some([128, 128])))));
    let bitnet = |class: &str, mode: &str| {
        read(json!({"quant_method": "bitnet", "linear_class": class, "quantization_mode": mode}))
    };
    let layer = |layer| Ok(Some(Format::BitNet(layer)));
    assert_eq!(
        read(json!({"quant_method": "bitnet"})),
        layer(Layer::Divided)
    );
    assert_eq!(bitnet("bitlinear", "offline"), layer(Layer::Divided));
    assert_eq!(bitnet("autobitlinear", "offline"), layer(Layer::Multiplied));
    assert_eq!(bitnet("autobitlinear", "online"), layer(Layer::Online));
    let nf4 = json!({"quant_method": "bitsandbytes", "load_in_4bit": true,
                     "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": true});
    assert_eq!(read(nf4), Ok(Some(Format::Nf4)));
}

#[test]
fn what_cannot_be_had_is_named() {
    let gptq = |field: &str, value: Value| {
        let mut config = json!({"quant_method": "gptq", "bits": 4, "group_size": 128});
        config[field] = value;
        config
    };
    for (config, names) in [
        (json!({"bits": 4}), "quant_method is missing"),
        (json!({"quant_method": "hqq"}), "quant_method is `hqq`"),
        (gptq("bits", json!(3)), "bits is 3, expected 4 or 8"),
        (gptq("group_size", json!(16)), "group_size is 16"),
        (gptq("group_size", json!(48)), "group_size is 48"),
        (gptq("checkpoint_format", json!("marlin")), "`marlin`"),
        (gptq("is_marlin_format", json!(true)), "is_marlin_format"),
        (gptq("bits", json!("4")), "quantization_config"),
        (
            json!({"quant_method": "awq", "bits": 4, "version": "gemv"}),
            "version is `gemv`, expected gemm",
        ),
        (weights(json!({"num_bits": 2})), "weights.num_bits is 2"),
        (
            weights(json!({"num_bits": 4, "group_size": 16})),
            "weights.group_size is 16",
        ),
        (
            json!({"quant_method": "fp8", "weight_block_size": [0, 128]}),
            "weight_block_size is [0, 128]",
        ),
        (
            json!({"quant_method": "fp8", "fmt": "e5m2"}),
            "fmt is `e5m2`",
        ),
        (
            json!({"quant_method": "bitnet", "linear_class": "linear"}),
            "linear_class is `linear`",
        ),
        (
            json!({"quant_method": "bitsandbytes", "load_in_8bit": true}),
            "load_in_4bit is missing",
        ),
        (
            json!({"quant_method": "bitsandbytes", "load_in_4bit": true}),
            "bnb_4bit_quant_type is `fp4`, expected nf4",
        ),
        (
            json!({"quant_method": "bitnet", "use_rms_norm": true}),
            "use_rms_norm is true",
        ),
        (
            json!({"quant_method": "bitnet", "linear_class": "autobitlinear",
                   "quantization_mode": "online", "modules_to_not_convert": ["model.layers.0"]}),
            "modules_to_not_convert is",
        ),
        (weights(json!({"strategy": "block"})), "strategy is `block`"),
        (
            json!({"quant_method": "compressed-tensors", "format": "int-quantized",
                "config_groups": {"g": {"input_activations": {"num_bits": 4, "dynamic": true}}}}),
            "config_groups.g.input_activations.num_bits is 4, expected 8",
        ),
        (
            json!({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}),
            "kv_cache_scheme",
        ),
    ] {
        let error = read(config.clone()).unwrap_err();
        let line = error.lines().next().unwrap_or_default();
        assert!(line.contains(names), "{config}: {error}");
    }
}

#[test]
fn floats_that_cannot_be_had_are_named() {
    for (config, names) in [
        (
            weights(json!({"type": "float", "num_bits": 4})),
            "weights.strategy is `missing`, expected tensor_group",
        ),
        (
            weights(json!({"type": "float", "num_bits": 6})),
            "weights.num_bits is 6, expected 4 or 8",
        ),
        (
            weights(
                json!({"type": "float", "num_bits": 4, "strategy": "tensor_group",
                           "group_size": 32}),
            ),
            "weights.group_size is 32, expected 16",
        ),
    ] {
        let error = read(config.clone()).unwrap_err();
        assert!(error.contains(names), "{config}: {error}");
    }
}
