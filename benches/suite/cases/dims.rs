//! A model's sizes.

use candle_core::{Result, bail};
use common::shapes::Shape;

/// What a layer's shapes follow from.
#[derive(Clone, Debug)]
pub struct Dims {
    pub name: String,
    pub layers: usize,
    pub hidden: usize,
    pub inner: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Dimensions of a head that are rotated.
    pub rotated: usize,
    pub vocab: usize,
    /// GPT-NeoX: layer norms, biases, GELU, attention and MLP side by side.
    pub neox: bool,
}

impl Dims {
    pub fn of(shape: Shape) -> Result<Self> {
        let config = shape.config();
        let number = |key: &str| config[key].as_u64().map(|n| n as usize);
        let needed = |key: &str| match number(key) {
            Some(n) => Ok(n),
            None => bail!("{}: the config has no {key}", shape.name()),
        };
        let (hidden, heads) = (needed("hidden_size")?, needed("num_attention_heads")?);
        let head_dim = number("head_dim").unwrap_or(hidden / heads);
        let share = config["rotary_pct"].as_f64().unwrap_or(1.);
        Ok(Self {
            name: shape.name(),
            layers: needed("num_hidden_layers")?,
            hidden,
            inner: needed("intermediate_size")?,
            heads,
            kv_heads: number("num_key_value_heads").unwrap_or(heads),
            head_dim,
            rotated: (head_dim as f64 * share) as usize,
            vocab: needed("vocab_size")?,
            neox: config["model_type"] == "gpt_neox",
        })
    }

    /// Rows of q, k and v.
    pub fn qkv(&self) -> [usize; 3] {
        let kv = self.kv_heads * self.head_dim;
        [self.heads * self.head_dim, kv, kv]
    }

    /// Weights of all layers and the head, in elements: what a decode step reads.
    pub fn weights(&self) -> usize {
        let up = if self.neox { 1 } else { 2 };
        let qkv: usize = self.qkv().iter().sum();
        let layer = self.hidden * (qkv + self.heads * self.head_dim + (up + 1) * self.inner);
        self.layers * layer + self.vocab * self.hidden
    }
}
