//! Which matrices of a model are quantized, and how.

use crate::cpu::packed::PackedMatrix;
use crate::quant::{BlockFormat, Scheme, TernaryScale};
use candle_core::quantized::GgmlDType;
use candle_core::{Error, Result, bail};
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// How a matrix is quantized while a model is loaded.
///
/// As text a [`Scheme`]'s name or that of a GGUF type: `q4_0`, `q4_1`, `q5_0`, `q5_1`, `q8_0`, `q2k`,
/// `q3k`, `q4k`, `q5k` or `q6k`, in either case, with `_` or without:
///
/// ```
/// use candle_fused::quant::Quantization;
/// for (text, name) in [("INT8", "int8"), ("q4_k", "q4k"), ("Q8_0", "q8_0"), ("int4_g64", "int4-g64")] {
///     assert_eq!(text.parse::<Quantization>()?.to_string(), name);
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Quantization {
    /// [`Scheme::Int8`].
    Int8,
    /// [`Scheme::Fp8`].
    Fp8,
    /// [`Scheme::Fp8Block128`].
    Fp8Block128,
    /// [`Scheme::Nvfp4`].
    Nvfp4,
    /// [`Scheme::Nf4`].
    Nf4,
    /// [`Scheme::Int4`].
    Int4 {
        /// 32, 64 or 128.
        group: usize,
        /// Whether zero points are stored.
        zero_point: bool,
    },
    /// [`Scheme::Ternary`].
    Ternary {
        /// What shares a scale.
        scale: TernaryScale,
    },
    /// Blocks of GGUF, as candle quantizes them.
    Gguf(GgmlDType),
}

const GGUF: [(&str, GgmlDType); 10] = [
    ("q4_0", GgmlDType::Q4_0),
    ("q4_1", GgmlDType::Q4_1),
    ("q5_0", GgmlDType::Q5_0),
    ("q5_1", GgmlDType::Q5_1),
    ("q8_0", GgmlDType::Q8_0),
    ("q2k", GgmlDType::Q2K),
    ("q3k", GgmlDType::Q3K),
    ("q4k", GgmlDType::Q4K),
    ("q5k", GgmlDType::Q5K),
    ("q6k", GgmlDType::Q6K),
];

impl Quantization {
    /// The scheme, unless it is a GGUF type.
    pub fn scheme(&self) -> Option<Scheme> {
        match *self {
            Quantization::Int8 => Some(Scheme::Int8),
            Quantization::Fp8 => Some(Scheme::Fp8),
            Quantization::Fp8Block128 => Some(Scheme::Fp8Block128),
            Quantization::Nvfp4 => Some(Scheme::Nvfp4),
            Quantization::Nf4 => Some(Scheme::Nf4),
            Quantization::Int4 { group, zero_point } => Some(Scheme::Int4 { group, zero_point }),
            Quantization::Ternary { scale } => Some(Scheme::Ternary { scale }),
            Quantization::Gguf(_) => None,
        }
    }

    /// Checks that rows of `cols` values can be quantized so.
    ///
    /// # Errors
    /// If they do not divide by the group or block, or the GGUF type is not supported.
    pub fn check(&self, cols: usize) -> Result<()> {
        match (self, self.scheme()) {
            (_, Some(scheme)) => scheme.check(cols),
            (Quantization::Gguf(dtype), _) => {
                let format = BlockFormat::of(*dtype)?;
                let Err(error) = format.row_bytes(cols) else {
                    return Ok(());
                };
                let smaller = cols > 0 && cols.is_multiple_of(32) && dtype.block_size() > 32;
                match smaller {
                    true => bail!("{error}; write q4_0 or q5_0, or int8, which divides by any"),
                    false => bail!("{error}; write int8, which divides by any"),
                }
            }
            (_, None) => Ok(()),
        }
    }
}

impl From<Scheme> for Quantization {
    fn from(scheme: Scheme) -> Self {
        match scheme {
            Scheme::Int8 => Quantization::Int8,
            Scheme::Fp8 => Quantization::Fp8,
            Scheme::Fp8Block128 => Quantization::Fp8Block128,
            Scheme::Nvfp4 => Quantization::Nvfp4,
            Scheme::Nf4 => Quantization::Nf4,
            Scheme::Int4 { group, zero_point } => Quantization::Int4 { group, zero_point },
            Scheme::Ternary { scale } => Quantization::Ternary { scale },
        }
    }
}

impl FromStr for Quantization {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let plain = |text: &str| text.to_ascii_lowercase().replace('_', "");
        let known = |(name, _): &&(&str, GgmlDType)| plain(name) == plain(text);
        if let Some((_, dtype)) = GGUF.iter().find(known) {
            return Ok(Quantization::Gguf(*dtype));
        }
        match text.parse::<Scheme>() {
            Ok(scheme) => Ok(scheme.into()),
            Err(_) => bail!(
                "quantization: `{text}` is not one of int8, fp8, fp8-block128, nvfp4, nf4, int4, int4-g32, int4-g64, int4-g128 \
                 (each with -z for zero points), ternary-tensor, ternary-row, ternary-g32, ternary-g64, \
                 ternary-g128, {}",
                GGUF.map(|(name, _)| name).join(", ")
            ),
        }
    }
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, self.scheme()) {
            (_, Some(scheme)) => scheme.fmt(f),
            (Quantization::Gguf(dtype), _) => {
                let name = GGUF.iter().find(|(_, known)| known == dtype);
                f.write_str(name.map_or("gguf", |(name, _)| name))
            }
            (_, None) => Ok(()),
        }
    }
}

/// A matrix that has been loaded.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Its name in the checkpoint.
    pub tensor: &'a str,
    /// Matrices that are done, this one included.
    pub done: usize,
    /// Matrices of the model.
    pub total: usize,
}

/// What hears of the [`Progress`].
type Listener = Arc<dyn Fn(Progress<'_>) + Send + Sync>;

/// Matrices that a calibration has quantized, by their names, with the rows of heads put apart.
pub(crate) type Finished = HashMap<String, Arc<PackedMatrix>>;

/// Which matrices of a model are quantized, and how.
///
/// The matrices of the layers follow the first pattern that matches their name, else the recipe's
/// quantization. The head and the embedding stay as they are unless a pattern matches them or they are
/// asked for. A head that is tied to the embedding counts under its own name (`lm_head.weight`), and
/// quantizing it leaves the embedding as it is.
///
/// ```
/// use candle_fused::quant::{Quantization, Recipe};
/// let recipe = Recipe::new("int4-g64".parse()?)
///     .with("model.layers.0.*", None)
///     .with("*.down_proj.weight", Some(Quantization::Int8))
///     .with_head(Quantization::Int8);
/// let of = |name| recipe.of(name).map(|q| q.to_string());
/// assert_eq!(of("model.layers.0.mlp.down_proj.weight"), None);
/// assert_eq!(of("model.layers.1.mlp.down_proj.weight").as_deref(), Some("int8"));
/// assert_eq!(of("model.layers.1.mlp.up_proj.weight").as_deref(), Some("int4-g64"));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Default)]
pub struct Recipe {
    layers: Option<Quantization>,
    patterns: Vec<(String, Option<Quantization>)>,
    head: Option<Quantization>,
    embedding: Option<Quantization>,
    balanced: bool,
    listener: Option<Listener>,
    finished: Arc<Finished>,
}

impl Recipe {
    /// All matrices of the layers.
    pub fn new(layers: Quantization) -> Self {
        Self {
            layers: Some(layers),
            ..Self::default()
        }
    }

    /// Matrices whose name matches `pattern`, in which `*` stands for any characters; `None` leaves them
    /// as they are. Patterns that were given first win. One that matches no matrix of a model is refused when
    /// the model is loaded or saved, and by [`while_loading`](crate::quant::while_loading).
    pub fn with(mut self, pattern: &str, quantization: Option<Quantization>) -> Self {
        self.patterns.push((pattern.to_owned(), quantization));
        self
    }

    /// The head too.
    pub fn with_head(mut self, quantization: Quantization) -> Self {
        self.head = Some(quantization);
        self
    }

    /// The embedding too.
    pub fn with_embedding(mut self, quantization: Quantization) -> Self {
        self.embedding = Some(quantization);
        self
    }

    /// Brings the columns of the layers' matrices to like sizes before they are quantized, which
    /// serves formats whose scales belong to whole rows, such as INT8: columns are multiplied by powers
    /// of two, and the norm's weight (and bias) before them is divided by them; in a gated MLP the
    /// last matrix's columns, and the rows of the one before it. What the model computes in f32 or bf16
    /// without quantization stays the same to the bit (numbers of f16 below its normal ones are
    /// rounded), but those weights and norms are no longer the checkpoint's. It looks at weights alone,
    /// at no data.
    ///
    /// It takes effect where whole models are loaded or saved, not in
    /// [`while_loading`](crate::quant::while_loading) and [`Rounded`](crate::quant::Rounded), which know single
    /// matrices only.
    pub fn with_balance(mut self) -> Self {
        self.balanced = true;
        self
    }

    /// With these matrices, for the model that they were calibrated for.
    pub(crate) fn with_finished(mut self, finished: Finished) -> Self {
        self.finished = Arc::new(finished);
        self
    }

    /// What a calibration has made of the matrix of this name.
    pub(crate) fn finished(&self, name: &str) -> Option<&Arc<PackedMatrix>> {
        self.finished.get(name)
    }

    /// Calls `listener` after every matrix.
    ///
    /// ```
    /// use candle_fused::quant::{Quantization, Recipe, Scheme};
    /// let recipe = Recipe::new("int4-g32".parse()?)
    ///     .with_balance()
    ///     .with_head(Quantization::Int8)
    ///     .with_embedding(Quantization::Int8)
    ///     .with_progress(|progress| println!("{} {}/{}", progress.tensor, progress.done, progress.total));
    /// let head = recipe.of_head("lm_head.weight").expect("quantized");
    /// assert_eq!(head.scheme(), Some(Scheme::Int8));
    /// assert!(recipe.of_embedding("model.embed_tokens.weight").is_some());
    /// // Groups of 32 take rows of whole groups.
    /// let layers = recipe.of("model.layers.0.mlp.up_proj.weight").expect("quantized");
    /// assert!(layers.check(64).is_ok() && layers.check(50).is_err());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn with_progress(
        mut self,
        listener: impl Fn(Progress<'_>) + Send + Sync + 'static,
    ) -> Self {
        self.listener = Some(Arc::new(listener));
        self
    }

    /// What becomes of the layers' matrix of this name.
    pub fn of(&self, name: &str) -> Option<Quantization> {
        self.by_pattern(name).unwrap_or(self.layers)
    }

    /// What becomes of the head of this name.
    pub fn of_head(&self, name: &str) -> Option<Quantization> {
        self.by_pattern(name).unwrap_or(self.head)
    }

    /// What becomes of the embedding of this name.
    pub fn of_embedding(&self, name: &str) -> Option<Quantization> {
        self.by_pattern(name).unwrap_or(self.embedding)
    }

    /// That each pattern matches one of a model's `matrices` at least.
    ///
    /// # Errors
    /// By the pattern that does not.
    pub(crate) fn check_patterns(&self, matrices: impl FnOnce() -> Vec<String>) -> Result<()> {
        if self.patterns.is_empty() {
            return Ok(());
        }
        let matrices = matrices();
        for (pattern, _) in &self.patterns {
            if !matrices.iter().any(|name| matches(pattern, name)) {
                bail!(
                    "recipe: the pattern `{pattern}` matches no matrix of the model, expected one of names \
                     like {}",
                    matrices.last().map_or("none", String::as_str)
                );
            }
        }
        Ok(())
    }

    /// Whether columns are balanced.
    pub(crate) fn is_balanced(&self) -> bool {
        self.balanced
    }

    /// Tells the listener.
    pub(crate) fn report(&self, progress: Progress<'_>) {
        if let Some(listener) = &self.listener {
            listener(progress);
        }
    }

    fn by_pattern(&self, name: &str) -> Option<Option<Quantization>> {
        let first = self.patterns.iter().find(|(p, _)| matches(p, name));
        first.map(|(_, quantization)| *quantization)
    }
}

impl fmt::Debug for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recipe")
            .field("layers", &self.layers)
            .field("patterns", &self.patterns)
            .field("head", &self.head)
            .field("embedding", &self.embedding)
            .field("balanced", &self.balanced)
            .finish_non_exhaustive()
    }
}

/// Whether `name` is `pattern`, in which `*` stands for any characters.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut name) = name.strip_prefix(start) else {
        return false;
    };
    let Some((middle, end)) = rest.rsplit_once('*') else {
        return name.ends_with(rest);
    };
    for part in middle.split('*') {
        match name.find(part) {
            Some(at) => name = &name[at + part.len()..],
            None => return false,
        }
    }
    name.ends_with(end)
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn stars_stand_for_anything() {
        let name = "model.layers.10.mlp.down_proj.weight";
        for yes in [
            name,
            "*",
            "model.*",
            "*.weight",
            "*.10.*",
            "model.*.down_proj.*",
            "*mlp*proj*",
            "**weight",
            "model.layers.10.mlp.down_proj.weight*",
        ] {
            assert!(matches(yes, name), "{yes}");
        }
        for no in [
            "",
            "model",
            "*.1.*",
            "layers.*",
            "*.bias",
            "*down*mlp*",
            "model.layers.10.mlp.down_proj.weight*t",
            "*weight*weight",
        ] {
            assert!(!matches(no, name), "{no}");
        }
    }
}
