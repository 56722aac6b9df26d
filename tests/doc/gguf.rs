// The module `tiny` of examples in documentation: a GGUF file of one layer, whose weights are all equal.

/// The bytes of a file of `architecture`, whose queries, keys and values, and gate and up, are one matrix if `joint`.
pub fn gguf(architecture: &str, joint: bool) -> candle_core::Result<Vec<u8>> {
    use candle_core::quantized::gguf_file::{self, Value};
    use candle_core::quantized::{GgmlDType, QTensor};
    use candle_core::{DType, Device, Tensor};

    let mut shapes = vec![
        ("token_embd", vec![32, 64]),
        ("output_norm", vec![64]),
        ("blk.0.attn_norm", vec![64]),
        ("blk.0.attn_output", vec![64, 64]),
        ("blk.0.ffn_norm", vec![64]),
        ("blk.0.ffn_down", vec![64, 96]),
    ];
    match joint {
        true => shapes.extend([
            ("blk.0.attn_qkv", vec![128, 64]),
            ("blk.0.ffn_up", vec![192, 64]),
        ]),
        false => shapes.extend([
            ("blk.0.attn_q", vec![64, 64]),
            ("blk.0.attn_k", vec![32, 64]),
            ("blk.0.attn_v", vec![32, 64]),
            ("blk.0.ffn_gate", vec![96, 64]),
            ("blk.0.ffn_up", vec![96, 64]),
        ]),
    }
    let mut tensors = Vec::new();
    for (name, shape) in shapes {
        let values = Tensor::ones(shape, DType::F32, &Device::Cpu)?.affine(0.02, 0.)?;
        let tensor = QTensor::quantize(&values, GgmlDType::F32)?;
        tensors.push((format!("{name}.weight"), tensor));
    }
    let key = |name: &str| format!("{architecture}.{name}");
    let metadata = [
        ("general.architecture".to_owned(), Value::String(architecture.to_owned())),
        (key("embedding_length"), Value::U32(64)),
        (key("block_count"), Value::U32(1)),
        (key("feed_forward_length"), Value::U32(96)),
        (key("context_length"), Value::U32(128)),
        (key("attention.head_count"), Value::U32(4)),
        (key("attention.head_count_kv"), Value::U32(2)),
        (key("attention.layer_norm_rms_epsilon"), Value::F32(1e-5)),
        (key("rope.dimension_count"), Value::U32(16)),
        (key("rope.freq_base"), Value::F32(1e4)),
    ];
    let metadata: Vec<_> = metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let tensors: Vec<_> = tensors.iter().map(|(k, t)| (k.as_str(), t)).collect();
    let mut file = std::io::Cursor::new(Vec::new());
    gguf_file::write(&mut file, &metadata, &tensors)?;
    Ok(file.into_inner())
}
