//! What a GGUF file's metadata says of its model.

use crate::models::modules;
use crate::models::shape::{
    GGUF_SIZES, Head, Kind, NormKind, Shape, Sliding, check_sizes, inverse_frequencies,
};
use crate::nn::AttentionConfig;
use crate::ops::RopeStyle;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Result, bail};

/// Architectures whose files keep the rows of queries and keys as Hugging Face orders them.
const HALF_SPLIT: [&str; 20] = [
    "qwen",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "falcon",
    "grok",
    "dbrx",
    "phi2",
    "phi3",
    "phimoe",
    "stablelm",
    "starcoder2",
    "bert",
    "nomic-bert",
    "jina-bert-v2",
    "olmo2",
    "olmoe",
    "codeshell",
    "plamo",
];

/// The context length of files that do not name one.
const DEFAULT_POSITIONS: usize = 4096;

/// What a file's metadata says of its model, checked against the tensors that the file names.
#[derive(Debug)]
pub struct Header {
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Rotated dimensions of a head.
    pub rotated: usize,
    pub theta: f32,
    pub eps: f32,
    pub max_positions: usize,
    pub parallel: bool,
    /// Positions that every layer sees, where that is fewer than all.
    pub window: Option<usize>,
    /// Rotary frequencies are divided by this.
    pub scale: f32,
    /// How the rows of queries and keys are ordered.
    pub style: RopeStyle,
    /// The context length that a model was trained with first, and what its cosines and sines are
    /// multiplied by (LongRoPE).
    pub long: Option<(usize, f32)>,
}

impl Header {
    /// # Errors
    /// If the metadata is not that of `kind`'s architecture, or a value is missing, out of range or at odds with the
    /// tensors, by its name.
    pub fn read(ct: &Content, kind: &Kind) -> Result<Self> {
        let metadata = Metadata::of(ct, kind);
        let header = metadata.header()?;
        let sizes = [
            header.hidden,
            header.intermediate,
            header.vocab,
            header.layers,
            header.heads,
            header.kv_heads,
            header.head_dim,
            header.max_positions,
        ];
        check_sizes(&format!("gguf: {}", metadata.key("")), GGUF_SIZES, sizes)?;
        Ok(header)
    }

    /// The shape of a model of `kind`, with plain frequencies.
    pub fn shape(&self, kind: &'static Kind) -> Shape {
        Shape {
            kind,
            vocab: self.vocab,
            hidden: self.hidden,
            intermediate: self.intermediate,
            layers: self.layers,
            attention: AttentionConfig {
                heads: self.heads,
                kv_heads: self.kv_heads,
                head_dim: self.head_dim,
                window: None,
            },
            sliding: self.window.map(|window| Sliding { window, from: 0 }),
            frequencies: inverse_frequencies(self.theta, self.rotated)
                .into_iter()
                .map(|frequency| frequency / self.scale)
                .collect(),
            eps: f64::from(self.eps),
            activation: kind.activation,
            long: None,
            unrotated: kind.gguf_unrotated.clone(),
            parallel: self.parallel,
            biases: kind.biases,
            head: Head::Either,
            max_positions: self.max_positions,
        }
    }
}

/// Metadata under one of the architecture's prefixes.
struct Metadata<'a> {
    ct: &'a Content,
    kind: &'a Kind,
    /// The architecture's own, or else the first that the file has, if it has one.
    prefix: Option<&'static str>,
}

impl<'a> Metadata<'a> {
    fn of(ct: &'a Content, kind: &'a Kind) -> Self {
        let has = |prefix: &&str| {
            let mut keys = ct.metadata.keys();
            keys.any(|key| key.strip_prefix(prefix).is_some_and(|k| k.starts_with('.')))
        };
        let all = Self {
            ct,
            kind,
            prefix: None,
        };
        let mut present = kind.gguf.iter().copied().filter(has);
        let own = present.clone().find(|own| all.architecture() == Some(*own));
        let prefix = own.or_else(|| present.next());
        Self { prefix, ..all }
    }

    fn header(&self) -> Result<Header> {
        self.check()?;
        let heads = self.number("attention.head_count")?;
        let hidden = self.number("embedding_length")?;
        let kv_heads = self.number_or("attention.head_count_kv", heads)?;
        let head_dim = match self.value("attention.key_length") {
            Some(_) => self.number("attention.key_length")?,
            None if heads > 0 && hidden.is_multiple_of(heads) => hidden / heads,
            None => bail!(
                "gguf: {} {hidden} does not divide by the {heads} heads of {}",
                self.key("embedding_length"),
                self.key("attention.head_count")
            ),
        };
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            bail!(
                "gguf: {heads} heads ({}) do not divide by {kv_heads} key and value heads ({})",
                self.key("attention.head_count"),
                self.key("attention.head_count_kv")
            );
        }
        if self.number_or("attention.value_length", head_dim)? != head_dim {
            bail!(
                "gguf: {} is not the {head_dim} of {}",
                self.key("attention.value_length"),
                self.key("attention.key_length")
            );
        }
        let rotated = self.number_or("rope.dimension_count", head_dim)?;
        if rotated > head_dim || !rotated.is_multiple_of(2) {
            bail!(
                "gguf: {} is {rotated}, expected an even number up to head size {head_dim}",
                self.key("rope.dimension_count")
            );
        }
        let [vocab, width] = *shape_of(self.ct, "token_embd.weight")? else {
            bail!("gguf: `token_embd.weight` is no matrix");
        };
        if width != hidden {
            bail!(
                "gguf: {} is {hidden}, the rows of `token_embd.weight` are {width} wide",
                self.key("embedding_length")
            );
        }
        let stated = self.number_or("vocab_size", vocab)?;
        if stated != vocab {
            bail!(
                "gguf: {} is {stated}, `token_embd.weight` has {vocab} rows",
                self.key("vocab_size")
            );
        }
        let eps = match self.kind.norm {
            NormKind::Rms => "attention.layer_norm_rms_epsilon",
            NormKind::Layer => "attention.layer_norm_epsilon",
        };
        Ok(Header {
            vocab,
            hidden,
            intermediate: self.number("feed_forward_length")?,
            layers: self.layers()?,
            heads,
            kv_heads,
            head_dim,
            rotated,
            theta: match self.value("rope.freq_base") {
                Some(_) => self.positive("rope.freq_base")?,
                None => 10_000.,
            },
            eps: self.positive(eps)?,
            max_positions: self.number_or("context_length", DEFAULT_POSITIONS)?,
            parallel: self.parallel()?,
            window: self.window()?,
            scale: self.scale()?,
            style: self.style(),
            long: self.long()?,
        })
    }

    /// What `general.architecture` says, which need not be the prefix of the keys.
    fn architecture(&self) -> Option<&str> {
        match self.ct.metadata.get("general.architecture") {
            Some(Value::String(name)) => Some(name),
            _ => None,
        }
    }

    /// llama.cpp orders the rows by the architecture, whatever the keys are called.
    fn style(&self) -> RopeStyle {
        match self.architecture() {
            Some(name) if !self.kind.gguf.contains(&name) && HALF_SPLIT.contains(&name) => {
                RopeStyle::HalfSplit
            }
            _ => self.kind.gguf_style,
        }
    }

    fn window(&self) -> Result<Option<usize>> {
        let pattern = "attention.sliding_window_pattern";
        if self.value(pattern).is_some() {
            bail!(
                "gguf: {} is given, expected one window for all layers",
                self.key(pattern)
            );
        }
        // 0 is none, as in llama.cpp.
        let window = self.number_or("attention.sliding_window", 0)?;
        Ok(Some(window).filter(|window| *window > 0))
    }

    /// LongRoPE's numbers; its factors are tensors.
    fn long(&self) -> Result<Option<(usize, f32)>> {
        if !self
            .ct
            .tensor_infos
            .contains_key("rope_factors_long.weight")
        {
            return Ok(None);
        }
        let from = self.number("rope.scaling.original_context_length")?;
        let name = "rope.scaling.attn_factor";
        let magnitude = match self.value(name) {
            Some(_) => self.positive(name)?,
            None => 1.,
        };
        Ok(Some((from, magnitude)))
    }

    /// Linear scaling, which files without a type mean too; `rope.scale_linear` is its older name.
    fn scale(&self) -> Result<f32> {
        let kind = match self.value("rope.scaling.type") {
            Some(Value::String(kind)) => kind.as_str(),
            Some(other) => bail!(
                "gguf: {} is {other:?}, expected a name",
                self.key("rope.scaling.type")
            ),
            None => "linear",
        };
        match kind {
            "none" => return Ok(1.),
            // Said by tensors alone: frequencies are not divided beside.
            "longrope"
                if self
                    .ct
                    .tensor_infos
                    .contains_key("rope_factors_long.weight") =>
            {
                return Ok(1.);
            }
            "linear" => {}
            other => bail!(
                "gguf: {} is `{other}`, expected `none` or `linear`",
                self.key("rope.scaling.type")
            ),
        }
        for name in ["rope.scaling.factor", "rope.scale_linear"] {
            // 0 is none, as in llama.cpp.
            let given = self.value(name).map(Value::to_f32).transpose()?;
            if given.is_some_and(|factor| factor != 0.) {
                return self.positive(name);
            }
        }
        Ok(1.)
    }

    fn parallel(&self) -> Result<bool> {
        let name = "use_parallel_residual";
        match self.value(name) {
            _ if !self.kind.side_by_side => Ok(false),
            Some(value) => value.to_bool(),
            None => bail!("gguf: metadata `{}` is missing", self.key(name)),
        }
    }

    fn check(&self) -> Result<()> {
        let known = self.kind.gguf;
        match self.architecture() {
            Some(name) if self.prefix.is_none() && !known.contains(&name) => bail!(
                "gguf: architecture is `{name}`, expected `{}`{}",
                known.join("` or `"),
                modules::hint(modules::of_gguf(name))
            ),
            None if self.prefix.is_none() => {
                bail!("gguf: metadata `general.architecture` is missing")
            }
            _ => {}
        }
        if self.number_or("expert_count", 0)? > 0 {
            bail!(
                "gguf: mixtures of experts are not supported (`{}`)",
                self.key("expert_count")
            );
        }
        Ok(())
    }

    fn layers(&self) -> Result<usize> {
        let layers = self.number("block_count")?;
        let held = |layer: usize| {
            let name = format!("blk.{layer}.attn_norm.weight");
            self.ct.tensor_infos.contains_key(&name)
        };
        if !layers.checked_sub(1).is_some_and(held) || held(layers) {
            bail!(
                "gguf: {} is {layers}, the file holds other layers",
                self.key("block_count")
            );
        }
        Ok(layers)
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix.unwrap_or(self.kind.gguf[0]))
    }

    fn value(&self, name: &str) -> Option<&Value> {
        self.ct.metadata.get(&self.key(name))
    }

    /// A number that may be missing, but not be of another kind.
    fn number_or(&self, name: &str, missing: usize) -> Result<usize> {
        match self.value(name) {
            Some(_) => self.number(name),
            None => Ok(missing),
        }
    }

    fn number(&self, name: &str) -> Result<usize> {
        let key = self.key(name);
        match self.value(name) {
            Some(Value::Array(all)) => {
                bail!("gguf: {key} is a list of {}, expected a number", all.len())
            }
            Some(value) => match value.to_u64().map(usize::try_from) {
                Ok(Ok(number)) => Ok(number),
                _ => bail!("gguf: {key} is {value:?}, expected a whole number from 0 on"),
            },
            None => bail!("gguf: metadata `{key}` is missing"),
        }
    }

    /// A number above zero.
    fn positive(&self, name: &str) -> Result<f32> {
        let key = self.key(name);
        let value = match self.value(name) {
            Some(value) => value.to_f32()?,
            None => bail!("gguf: metadata `{key}` is missing"),
        };
        if !(value > 0. && value.is_finite()) {
            bail!("gguf: {key} is {value}, expected a number above 0");
        }
        Ok(value)
    }
}

/// The dimensions of a tensor that the file names.
pub(super) fn shape_of<'a>(ct: &'a Content, name: &str) -> Result<&'a [usize]> {
    match ct.tensor_infos.get(name) {
        Some(info) => Ok(info.shape.dims()),
        None => bail!("gguf: tensor `{name}` is missing"),
    }
}
