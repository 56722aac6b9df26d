//! What sets decoders of one kind of layer apart.

use super::names::Names;
use crate::nn::AttentionConfig;
use crate::ops::{Activation, RopeStyle};
use candle_core::{Result, bail};

/// What all models of an architecture have in common.
#[derive(Debug)]
pub struct Kind {
    /// `general.architecture` of a GGUF file, and the prefix of its metadata: what converters write, then what else
    /// there is.
    pub gguf: &'static [&'static str],
    /// Tensors of a safetensors checkpoint.
    pub names: Names,
    /// Tensors of a GGUF file.
    pub gguf_names: Names,
    /// How GGUF files order the rows of queries and keys.
    pub gguf_style: RopeStyle,
    /// Layers that are not rotated, which GGUF files do not say.
    pub gguf_unrotated: Unrotated,
    pub norm: NormKind,
    /// Whether queries and keys are normalised head by head.
    pub head_norms: bool,
    /// Whether there are norms before the output projection and of the MLP's last matrix (SubLN).
    pub sub_norms: bool,
    /// Whether there are models with attention and MLP side by side.
    pub side_by_side: bool,
    /// The activation of the MLP where nothing else is said.
    pub activation: Activation,
    /// Likewise, the biases that checkpoints have.
    pub biases: Biases,
}

/// Which norm comes before attention and MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    Rms,
    Layer,
}

/// A decoder's dimensions and the ways in which it may differ from others.
#[derive(Clone, Debug)]
pub struct Shape {
    pub kind: &'static Kind,
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    /// Without a window: that is the layer's.
    pub attention: AttentionConfig,
    pub sliding: Option<Sliding>,
    /// One for each rotated pair of dimensions.
    pub frequencies: Vec<f32>,
    pub long: Option<Long>,
    pub unrotated: Unrotated,
    pub eps: f64,
    pub activation: Activation,
    /// `x + attention(norm1(x)) + mlp(norm2(x))` instead of one after the other.
    pub parallel: bool,
    /// Which biases a checkpoint must have; others are used where it has them.
    pub biases: Biases,
    pub head: Head,
    pub max_positions: usize,
}

/// Where the head's weights are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    Own,
    Embedding,
    /// Its own if there is one, else the embedding.
    Either,
}

impl Head {
    /// By a configuration's `tie_word_embeddings`.
    pub fn tied(tied: bool) -> Self {
        if tied { Head::Embedding } else { Head::Own }
    }
}

/// Layers from `from` on see the last `window` positions only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sliding {
    pub window: usize,
    pub from: usize,
}

/// Other frequencies for calls that reach past position `from`, as many as the first ones.
#[derive(Clone, Debug)]
pub struct Long {
    pub frequencies: Vec<f32>,
    pub from: usize,
    /// What cosines and sines are multiplied by, the first ones too.
    pub magnitude: f32,
}

/// Layers whose queries and keys are not rotated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unrotated {
    None,
    /// The last of each group of this many.
    Every(usize),
    /// By layer; those past its end are rotated.
    Listed(Vec<bool>),
}

/// The biases that must be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Biases {
    pub qkv: bool,
    pub output: bool,
    pub mlp: bool,
}

impl Biases {
    pub const NONE: Self = Self {
        qkv: false,
        output: false,
        mlp: false,
    };
}

/// A configuration as a shape.
pub trait Describe {
    const KIND: &'static Kind;

    /// # Errors
    /// If a value is out of range, by its name.
    fn shape(&self) -> Result<Shape>;
}

/// What a `config.json` calls the sizes that [`check_sizes`] takes.
pub const CONFIG_SIZES: [&str; 8] = [
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim (hidden_size / num_attention_heads where it is not given)",
    "max_position_embeddings",
];

/// What a GGUF file calls them, after its architecture.
pub const GGUF_SIZES: [&str; 8] = [
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "block_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "context_length",
];

/// The largest sizes that are taken: far above any model's, and so small that the bytes of a matrix fit
/// 64 bits and what is computed from them alone, without a tensor, takes no time.
const MAX_SIZES: [usize; 8] = [
    1 << 28,
    1 << 28,
    1 << 28,
    1 << 16,
    1 << 16,
    1 << 16,
    1 << 16,
    1 << 31,
];

/// Fails by the name of a size that no model has, before anything of that size is made.
pub fn check_sizes(place: &str, names: [&str; 8], sizes: [usize; 8]) -> Result<()> {
    for ((name, size), most) in names.into_iter().zip(sizes).zip(MAX_SIZES) {
        if size > most {
            bail!("{place}{name} is {size}, expected at most {most}");
        }
    }
    Ok(())
}

impl Shape {
    /// A configuration's shape with the frequencies that `frequencies` gives, which is called only if
    /// the sizes are a model's.
    pub fn rotated_by(mut self, frequencies: impl FnOnce() -> Vec<f32>) -> Result<Self> {
        let sizes = [
            self.hidden,
            self.intermediate,
            self.vocab,
            self.layers,
            self.attention.heads,
            self.attention.kv_heads,
            self.attention.head_dim,
            self.max_positions,
        ];
        check_sizes("config: ", CONFIG_SIZES, sizes)?;
        self.frequencies = frequencies();
        Ok(self)
    }

    /// The attention of a layer.
    pub fn attention_of(&self, layer: usize) -> AttentionConfig {
        let sliding = self.sliding.filter(|s| layer >= s.from);
        AttentionConfig {
            window: sliding.map(|s| s.window),
            ..self.attention
        }
    }

    /// Whether a layer's queries and keys are rotated.
    pub fn rotates(&self, layer: usize) -> bool {
        match &self.unrotated {
            Unrotated::None => true,
            Unrotated::Every(n) => !(layer + 1).is_multiple_of(*n),
            Unrotated::Listed(layers) => !layers.get(layer).copied().unwrap_or(false),
        }
    }

    /// Whether a model of this shape can exist.
    pub fn check(&self) -> Result<()> {
        let AttentionConfig {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.attention;
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            bail!("config: {heads} heads do not divide by {kv_heads} key and value heads");
        }
        let rotated = 2 * self.frequencies.len();
        if rotated == 0 || rotated > head_dim {
            bail!("config: {rotated} rotated dimensions, expected 2 to the head size {head_dim}");
        }
        if rotated + 1 == head_dim {
            bail!("config: the head size is {head_dim}, expected an even number");
        }
        let long = self.long.iter().flat_map(|long| &long.frequencies);
        if let Some(f) = self.frequencies.iter().chain(long).find(|f| !f.is_finite()) {
            bail!("config: a rotary frequency is {f}, expected a number: look at rope_theta");
        }
        for (name, value) in [
            ("hidden size", self.hidden),
            ("intermediate size", self.intermediate),
            ("number of layers", self.layers),
            ("size of the vocabulary", self.vocab),
        ] {
            if value == 0 {
                bail!("config: the {name} is 0");
            }
        }
        if !(self.eps >= 0. && self.eps.is_finite()) {
            bail!("config: the norms' eps is {}, expected 0 or more", self.eps);
        }
        if self.sliding.is_some_and(|s| s.window == 0) {
            bail!("config: sliding_window is 0, expected at least 1, the token's own position");
        }
        Ok(())
    }
}

/// The width of a head of models that do not name it.
pub fn head_dim(hidden: usize, heads: usize) -> Result<usize> {
    if heads == 0 || !hidden.is_multiple_of(heads) {
        bail!(
            "config: hidden_size {hidden} does not divide by the {heads} heads of num_attention_heads"
        );
    }
    Ok(hidden / heads)
}

/// Rotary frequencies `theta^(-2i / dims)`, one for each pair of `dims` dimensions.
///
/// Computed in f32 as Hugging Face does, so that angles agree with its tables at any position.
pub fn inverse_frequencies(theta: f32, dims: usize) -> Vec<f32> {
    (0..dims / 2)
        .map(|i| 1f32 / theta.powf((2 * i) as f32 / dims as f32))
        .collect()
}
