//! How an engine is set up.

use super::OP;
use crate::quant::KvCacheType;
use candle_core::{Result, bail};

/// The most sequences of a step.
const MAX_SEQUENCES: usize = 256;

/// Positions of a sequence where nothing is said.
const DEFAULT_POSITIONS: usize = 4096;

/// How an [`Engine`](super::Engine) is set up.
///
/// ```
/// use candle_fused::serving::Options;
/// let defaults = Options::default();
/// assert_eq!((defaults.sequences, defaults.page, defaults.prompt_budget), (64, 16, 512));
/// assert!(defaults.positions.is_none() && defaults.pages.is_none() && defaults.share_prefixes);
/// assert!(!defaults.batch_invariant);
/// ```
#[derive(Clone, Debug)]
pub struct Options {
    /// Sequences of a step, 1 to 256; 64 by default.
    pub sequences: usize,
    /// Positions of a sequence at most, prompt included; by default 4096, or the model's context length if that is
    /// less. A model with LongRoPE (Phi-3 with 128k positions) has one set of frequencies up to its original context
    /// length, past which the default does not go, and another behind it. With more positions than that, the engine
    /// rotates all requests with the second set, short ones too, as vLLM does: keys that are kept cannot change. A short
    /// request's tokens are then not those of a forward pass, which uses the first set.
    pub positions: Option<usize>,
    /// Tokens of a page: 8, 16, 32, 64, 128 or 256; 16 by default.
    pub page: usize,
    /// Pages in all; by default as many as `sequences` sequences of `positions` could need, if 80 % of the GPU's free
    /// memory has room for them, or 1 GiB on the CPU, and otherwise as many as there is room for.
    pub pages: Option<usize>,
    /// What keys and values are kept in; as the model has them by default. 8 bits have room for nearly twice the tokens
    /// of 16.
    pub kv_cache: KvCacheType,
    /// Tokens of prompts that a step reads beside the others' single tokens; 512 by default.
    pub prompt_budget: usize,
    /// Whether requests with the same beginning share its pages, also while one of them reads it; true by default.
    pub share_prefixes: bool,
    /// Whether a request's logits, to the last bit, and so its tokens are independent of the other requests; false by
    /// default. Then:
    ///
    /// - every step on a GPU has the size of `sequences` sequences;
    /// - chunks of prompts, and on the CPU single tokens too, run one request at a time;
    /// - requests share whole chunks of a prompt only;
    /// - a request is admitted when all pages that it may need are free.
    ///
    /// That costs speed with few requests on a GPU or many on the CPU. It holds for engines with the same options on
    /// one machine, except for requests that are restarted after an error or
    /// [`Engine::profile`](super::Engine::profile). On the term: Defeating Nondeterminism in LLM Inference (He and
    /// Thinking Machines Lab 2025).
    pub batch_invariant: bool,
    /// On CUDA, record steps as graphs; true by default.
    pub graph: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            sequences: 64,
            positions: None,
            page: 16,
            pages: None,
            kv_cache: KvCacheType::Auto,
            prompt_budget: 512,
            share_prefixes: true,
            batch_invariant: false,
            graph: true,
        }
    }
}

impl Options {
    /// Positions of a sequence, of which the model allows `most`, and `original` with its first rotary frequencies.
    ///
    /// # Errors
    /// If an option is out of range.
    pub(super) fn positions(&self, most: usize, original: usize) -> Result<usize> {
        let default = DEFAULT_POSITIONS.min(most).min(original);
        let positions = self.positions.unwrap_or(default);
        if !(1..=MAX_SEQUENCES).contains(&self.sequences) {
            let got = self.sequences;
            bail!("{OP}: {got} sequences, expected 1 to {MAX_SEQUENCES}");
        }
        if positions == 0 || positions > most {
            bail!(
                "{OP}: {positions} positions, expected 1 to the model's context length of {most}"
            );
        }
        if !self.page.is_power_of_two() || !(8..=256).contains(&self.page) {
            let got = self.page;
            bail!("{OP}: pages of {got} tokens, expected 8, 16, 32, 64, 128 or 256");
        }
        if self.prompt_budget == 0 {
            bail!("{OP}: prompt_budget is 0, expected at least 1");
        }
        if self.chunk_tokens() == Some(0) {
            let (got, page) = (self.prompt_budget, self.page);
            bail!("{OP}: prompt_budget is {got}, expected a page of {page} with batch_invariant");
        }
        if self.pages == Some(0) {
            bail!("{OP}: pages is 0, expected at least 1");
        }
        Ok(positions)
    }

    /// With batch invariance, tokens of a chunk: whole pages.
    pub(super) fn chunk_tokens(&self) -> Option<usize> {
        let pages = self.prompt_budget / self.page;
        self.batch_invariant.then_some(pages * self.page)
    }

    /// Pages in all, of so many bytes each, where there is room for `bytes`.
    pub(super) fn count(&self, positions: usize, of_page: usize, bytes: usize) -> Result<usize> {
        if let Some(pages) = self.pages {
            return Ok(pages);
        }
        let wanted = self.sequences * positions.div_ceil(self.page);
        match wanted.min(bytes / of_page.max(1)) {
            0 => bail!("{OP}: there is no room for a page of keys and values, of {of_page} bytes"),
            pages => Ok(pages),
        }
    }
}
