//! Llama from the files that GGUF replaced.

use super::{Config, DEFAULT_MAX_SEQ_LEN, ModelWeights};
use crate::Fusion;
use crate::models::decoder::{DecoderCache, Rotaries};
use crate::models::gguf::{cache_dtype, embedding_and_head};
use crate::models::names::{Names, Qkv};
use crate::models::shape::{Describe, Shape};
use crate::models::weights::{Loader, Source};
use crate::nn::{Embedding, LinearWeight, Projection};
use crate::ops::RopeStyle;
use crate::quant;
use candle_core::quantized::QTensor;
use candle_core::quantized::ggml_file::Content;
use candle_core::{DType, Device, Result, Tensor, bail};
use std::collections::HashMap;
use std::sync::Arc;

static NAMES: Names = Names {
    embedding: "tok_embeddings",
    layer: "layers",
    attention_norm: "attention_norm",
    qkv: Qkv::Three(["attention.wq", "attention.wk", "attention.wv"]),
    head_norms: ["attention.q_norm", "attention.k_norm"],
    sub_norms: ["attention.sub_norm", "feed_forward.sub_norm"],
    output: "attention.wo",
    mlp_norm: "ffn_norm",
    up: &["feed_forward.w1", "feed_forward.w3"],
    down: "feed_forward.w2",
    norm: "norm",
    head: "output",
};

/// These files do not name it.
const EPS: f64 = 1e-5;

impl ModelWeights {
    /// Loads the weights of a GGML file, on the device that it was read for, with every fusion on.
    ///
    /// * `gqa`: query heads to a key and value head, which the file does not say: 1 for Llama 7B and 13B,
    ///   8 for Llama 2 70B
    ///
    /// # Errors
    /// If a size is out of range, or a tensor is missing or does not have the shape that the file's
    /// parameters ask for, by its name.
    ///
    /// ```
    /// use candle_core::quantized::ggml_file::{Content, HParams, VersionedMagic, Vocab};
    /// use candle_core::quantized::{GgmlDType, QTensor};
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_fused::models::llama::ModelWeights;
    /// # let mut tensors = std::collections::HashMap::new();
    /// # for (name, shape) in [
    /// #     ("tok_embeddings", vec![32, 64]),
    /// #     ("norm", vec![64]),
    /// #     ("output", vec![32, 64]),
    /// #     ("layers.0.attention_norm", vec![64]),
    /// #     ("layers.0.attention.wq", vec![64, 64]),
    /// #     ("layers.0.attention.wk", vec![64, 64]),
    /// #     ("layers.0.attention.wv", vec![64, 64]),
    /// #     ("layers.0.attention.wo", vec![64, 64]),
    /// #     ("layers.0.ffn_norm", vec![64]),
    /// #     ("layers.0.feed_forward.w1", vec![96, 64]),
    /// #     ("layers.0.feed_forward.w2", vec![64, 96]),
    /// #     ("layers.0.feed_forward.w3", vec![96, 64]),
    /// # ] {
    /// #     let values = Tensor::ones(shape, DType::F32, &Device::Cpu)?;
    /// #     let tensor = QTensor::quantize(&values, GgmlDType::F32)?;
    /// #     tensors.insert(format!("{name}.weight"), tensor);
    /// # }
    /// // What `Content::read` gives.
    /// let content = Content {
    ///     magic: VersionedMagic::GgjtV3,
    ///     hparams: HParams { n_vocab: 32, n_embd: 64, n_mult: 0, n_head: 4, n_layer: 1, n_rot: 16, ftype: 0 },
    ///     vocab: Vocab { token_score_pairs: Vec::new() },
    ///     tensors,
    ///     device: Device::Cpu,
    /// };
    /// let mut model = ModelWeights::from_ggml(content, 1)?;
    /// let logits = model.forward(&Tensor::new(&[[1u32, 2, 3]], &Device::Cpu)?, 0)?;
    /// assert_eq!(logits.dims(), [1, 32]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn from_ggml(ct: Content, gqa: usize) -> Result<Self> {
        let (device, fusion) = (ct.device.clone(), Fusion::all());
        let shape = shape(&ct, gqa)?;
        let blocks = ct.tensors.values().any(|t| quant::supports(t.dtype()));
        let dtype = cache_dtype(blocks, &device, fusion);
        let rotaries = Rotaries::new(&shape, RopeStyle::Interleaved, &device)?;
        let source = Tensors {
            tensors: ct.tensors,
            device: device.clone(),
        };
        let loader = Loader {
            source,
            names: &NAMES,
            shape: &shape,
            fusion,
        };
        let decoder = loader.decoder()?;
        let cache = DecoderCache::new(shape.layers, rotaries, true, dtype, &device);
        Ok(Self::of(decoder, cache))
    }
}

fn shape(ct: &Content, gqa: usize) -> Result<Shape> {
    let params = &ct.hparams;
    let [vocab, hidden, heads, layers] =
        [params.n_vocab, params.n_embd, params.n_head, params.n_layer].map(|size| size as usize);
    if gqa == 0 || !heads.is_multiple_of(gqa) {
        bail!("ggml: gqa is {gqa}, expected a divisor of the {heads} heads");
    }
    let name = "layers.0.feed_forward.w1.weight";
    let Some(up) = ct.tensors.get(name) else {
        bail!("ggml: tensor `{name}` is missing");
    };
    let config = Config {
        hidden_size: hidden,
        intermediate_size: up.shape().dims2()?.0,
        vocab_size: vocab,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        num_key_value_heads: heads / gqa,
        rms_norm_eps: EPS,
        max_position_embeddings: DEFAULT_MAX_SEQ_LEN,
        ..Config::config_7b_v2(false)
    };
    config.shape()
}

/// A file's tensors, which are taken out one by one.
struct Tensors {
    tensors: HashMap<String, QTensor>,
    device: Device,
}

impl Tensors {
    fn take(&mut self, name: &str, dims: &[usize]) -> Result<QTensor> {
        let Some(tensor) = self.tensors.remove(name) else {
            bail!("ggml: tensor `{name}` is missing");
        };
        if tensor.shape().dims() != dims {
            bail!(
                "ggml: tensor `{name}` has shape {:?}, the file's parameters ask for {dims:?}",
                tensor.shape()
            );
        }
        Ok(tensor)
    }
}

impl Source for Tensors {
    fn device(&self) -> &Device {
        &self.device
    }

    fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    fn matrix(
        &mut self,
        tensor: &str,
        rows: usize,
        cols: usize,
        heads: Option<usize>,
    ) -> Result<LinearWeight> {
        if heads.is_some() {
            bail!("`{tensor}` is in blocks, expected dense rows");
        }
        let matrix = self.take(tensor, &[rows, cols])?;
        Ok(LinearWeight::Quantized(Arc::new(matrix)))
    }

    fn vector(&mut self, tensor: &str, len: usize) -> Result<Tensor> {
        self.take(tensor, &[len])?.dequantize(&self.device)
    }

    fn table(
        &mut self,
        tensor: &str,
        (rows, cols): (usize, usize),
        tied: Option<&str>,
        fusion: Fusion,
    ) -> Result<(Embedding, Option<Projection>)> {
        let table = self.take(tensor, &[rows, cols])?;
        embedding_and_head(table, DType::F32, tied.is_some(), fusion)
    }
}
