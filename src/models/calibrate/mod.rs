//! Models whose matrices are quantized by what goes through them.

mod held;
mod resume;
mod steps;
mod walk;

use super::Architecture;
use super::checkpoint::Stored;
use super::shape::Shape;
use crate::Fusion;
use crate::nn::gptq::Options;
use crate::nn::pack::named;
use crate::nn::recipe::Recipe;
use candle_core::{Result, bail};
use candle_nn::VarBuilder;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use steps::Step;
use walk::Walk;

/// Activations that [`Calibration`] holds by default: 4 GiB.
const MEMORY: u64 = 4 << 30;

/// How far a calibration is.
#[derive(Clone, Copy, Debug)]
pub struct CalibrationProgress<'a> {
    /// The layer, from 0 on.
    pub layer: usize,
    /// Layers of the model.
    pub layers: usize,
    /// What goes on there: the matrix that is quantized, or whose inputs are collected.
    pub doing: &'a str,
    /// Parts of that which are done: of the text, or of one.
    pub done: usize,
    /// All its parts.
    pub total: usize,
}

/// What hears of the [`CalibrationProgress`].
type Listener = Arc<dyn Fn(CalibrationProgress<'_>) + Send + Sync>;

/// A text that goes through a model while [`calibrate`] quantizes it.
///
/// ```
/// use candle_fused::models::Calibration;
/// use candle_fused::quant::gptq::Options;
/// let ids: Vec<u32> = (0..1000).collect();
/// // Windows of 256 tokens; the 232 after the last whole one are left out.
/// let calibration = Calibration::new(&ids, 256)?
///     .with_options(Options { damping: 0.02, ..Options::default() })
///     .with_memory(1 << 30)
///     .with_folder("calibration")
///     .with_progress(|at| println!("layer {} of {}: {}", at.layer, at.layers, at.doing));
/// assert_eq!(calibration.tokens(), 768);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Calibration {
    /// Whole windows.
    ids: Vec<u32>,
    window: usize,
    options: Options,
    memory: u64,
    folder: Option<PathBuf>,
    listener: Option<Listener>,
}

impl Calibration {
    /// Tokens in windows of `window`, which know nothing of each other; a last one that is not whole is left out.
    /// Some ten thousand tokens of text like that which the model is for are a good measure, in windows of 512 or more.
    ///
    /// # Errors
    /// If there is not one whole window, or `window` is 0.
    pub fn new(ids: &[u32], window: usize) -> Result<Self> {
        if window == 0 || ids.len() < window {
            bail!(
                "calibration: {} tokens in windows of {window}, expected one whole window or more",
                ids.len()
            );
        }
        Ok(Self {
            ids: ids[..ids.len() - ids.len() % window].to_vec(),
            window,
            options: Options::default(),
            memory: MEMORY,
            folder: None,
            listener: None,
        })
    }

    /// How errors are handed on.
    pub fn with_options(self, options: Options) -> Self {
        Self { options, ..self }
    }

    /// Bytes of activations that may be held, 4 GiB unless it is said: for each token what enters a layer and what its
    /// attention gathers, in f32. More are refused before anything is done.
    pub fn with_memory(self, bytes: u64) -> Self {
        let memory = bytes;
        Self { memory, ..self }
    }

    /// Writes every layer to `folder` as soon as it is done, and goes on after those that are there: so a calibration
    /// that was stopped ends as if it had not been.
    pub fn with_folder(self, folder: impl AsRef<Path>) -> Self {
        Self {
            folder: Some(folder.as_ref().to_owned()),
            ..self
        }
    }

    /// Calls `listener` again and again.
    pub fn with_progress(
        self,
        listener: impl Fn(CalibrationProgress<'_>) + Send + Sync + 'static,
    ) -> Self {
        Self {
            listener: Some(Arc::new(listener)),
            ..self
        }
    }

    /// Tokens in whole windows.
    pub fn tokens(&self) -> usize {
        self.ids.len()
    }

    fn report(&self, progress: CalibrationProgress<'_>) {
        if let Some(listener) = &self.listener {
            listener(progress);
        }
    }

    /// Fails if a model of this shape cannot take it.
    fn check(&self, shape: &Shape) -> Result<()> {
        self.options.check()?;
        if self.window > shape.max_positions {
            bail!(
                "calibration: windows of {} tokens, the model's context length is {}",
                self.window,
                shape.max_positions
            );
        }
        if let Some(id) = self.ids.iter().find(|id| **id as usize >= shape.vocab) {
            let vocab = shape.vocab;
            bail!("calibration: token {id}, the model's vocabulary has {vocab}");
        }
        let [gathered, ..] = shape.attention.widths();
        let of_one = 4 * (shape.hidden + gathered.max(shape.hidden)) as u64;
        let needed = of_one.saturating_mul(self.ids.len() as u64);
        if needed > self.memory {
            bail!(
                "calibration: {} tokens take {needed} bytes of activations, expected at most {}: give \
                 {} tokens, or more memory",
                self.ids.len(),
                self.memory,
                self.memory / of_one
            );
        }
        Ok(())
    }
}

impl fmt::Debug for Calibration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calibration")
            .field("tokens", &self.ids.len())
            .field("window", &self.window)
            .field("options", &self.options)
            .field("memory", &self.memory)
            .field("folder", &self.folder)
            .finish_non_exhaustive()
    }
}

/// Quantizes the layers' matrices by GPTQ ([`quant::gptq`](crate::quant::gptq)) and gives `recipe` with what came of
/// it, which [`save_quantized`](super::save_quantized), [`save_compressed_tensors`](super::save_compressed_tensors),
/// `load_quantized` and `new_quantized` then take, for the same `vb`.
///
/// Matrices that `recipe` makes INT4 or INT8 are quantized so. Others, the head and the embedding become what they
/// become without calibration. Layers are visited in turn, and in a layer q, k and v, then the projection back, gate
/// and up, and down: each meets what the matrices before it make of the text once they are quantized. The text goes
/// through in f32, whatever the checkpoint is stored in, with weights at what their codes are worth.
///
/// Memory, beside `vb`'s and the quantized model: the activations ([`Calibration::with_memory`]); a layer in f32; of
/// one matrix with K inputs and N outputs some `16 K²` and `32 N K` bytes.
///
/// # Errors
/// If `vb` is not on the CPU, the calibration does not fit the model (its memory, window or tokens), an activation is
/// no number or all inputs of a matrix are zero, the calibration's folder cannot be written or has layers of another
/// calibration; or as the model's `new_quantized`.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_fused::models::llama::Config;
/// use candle_fused::models::{Calibration, calibrate, save_quantized};
/// use candle_fused::quant::Recipe;
/// # use candle_core::Tensor;
/// # let config = Config {
/// #     hidden_size: 64, intermediate_size: 96, vocab_size: 32, num_hidden_layers: 1,
/// #     num_attention_heads: 4, num_key_value_heads: 2, ..Config::config_7b_v2(false)
/// # };
/// # let weights = candle_nn::VarMap::new();
/// # let vb = candle_nn::VarBuilder::from_varmap(&weights, DType::F32, &Device::Cpu);
/// # candle_fused::models::llama::Llama::load(vb.clone(), &config)?;
/// # for weight in weights.all_vars() {
/// #     weight.set(&Tensor::randn(0f32, 1., weight.dims(), &Device::Cpu)?)?;
/// # }
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("model.safetensors");
/// let ids: Vec<u32> = (0..256).map(|i| i * i % 31).collect();
/// let recipe = Recipe::new("int4-g32".parse()?);
/// let recipe = calibrate(&config, vb.clone(), &recipe, &Calibration::new(&ids, 64)?)?;
/// save_quantized(&config, vb, &recipe, &path)?;
/// # assert!(path.exists());
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn calibrate<C: Architecture>(
    cfg: &C,
    vb: VarBuilder,
    recipe: &Recipe,
    calibration: &Calibration,
) -> Result<Recipe> {
    if !vb.device().is_cpu() {
        bail!("vb: on {:?}, expected the CPU", vb.device().location());
    }
    let shape = cfg.shape()?;
    let names = &C::KIND.names;
    calibration.check(&shape)?;
    recipe.check_patterns(|| names.matrices(shape.layers))?;
    for (name, cols) in Step::widths(names, &shape) {
        if let Some(quantization) = recipe.of(&name) {
            named(&name, quantization.check(cols))?;
        }
    }
    let stored = Stored::new(vb, Fusion::all())?;
    let mut walk = Walk::new(stored, names, &shape, recipe, calibration)?;
    for layer in 0..shape.layers {
        walk.layer(layer)?;
    }
    Ok(recipe.clone().with_finished(walk.finished()))
}
