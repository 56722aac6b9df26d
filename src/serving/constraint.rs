//! Which tokens a request may be given.

use candle_core::Result;

/// Restricts which token of a request may come next, such as a grammar does; the interface fits XGrammar and llguidance.
/// [`Engine::submit_constrained`](super::Engine::submit_constrained) submits a request with one. The engine calls
/// [`mask`](Self::mask) before each draw and [`accept`](Self::accept) with each drawn token, once and in order.
///
/// ```
/// use candle_core::Result;
/// use candle_fused::serving::Constraint;
/// /// Even tokens, until token 0 comes.
/// struct Even;
/// impl Constraint for Even {
///     fn mask(&mut self, mask: &mut [u32]) -> Result<()> {
///         mask.fill(0x5555_5555);
///         Ok(())
///     }
///
///     fn accept(&mut self, token: u32) -> Result<bool> {
///         Ok(token == 0)
///     }
/// }
/// let mut mask = [0];
/// Even.mask(&mut mask)?;
/// assert!(mask[0] & 0b11 == 0b01 && Even.accept(0)?);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub trait Constraint: Send {
    /// Sets the bits of the tokens that may come next: bit `t % 32` of word `t / 32` for token t. All are clear at first;
    /// those past the vocabulary do not count.
    ///
    /// # Errors
    /// If the mask cannot be computed; the request then ends with [`FinishReason::Rejected`](super::FinishReason::Rejected).
    fn mask(&mut self, mask: &mut [u32]) -> Result<()>;

    /// Takes in the token that was drawn, unless that is one of the request's stop ids or completes a stop string; whether
    /// the text is complete with it.
    ///
    /// # Errors
    /// As [`mask`](Self::mask).
    fn accept(&mut self, token: u32) -> Result<bool>;
}

/// A constraint and its last mask.
pub(super) struct Constrained {
    constraint: Box<dyn Constraint>,
    mask: Vec<u32>,
    /// The bits of the mask's last word that stand for tokens.
    last: u32,
}

impl Constrained {
    pub fn new(constraint: Box<dyn Constraint>, vocab: usize) -> Self {
        Self {
            constraint,
            mask: vec![0; vocab.div_ceil(32)],
            last: u32::MAX >> (vocab.wrapping_neg() % 32),
        }
    }

    /// Computes the mask of the next draw; no token is allowed if that fails.
    pub fn update_mask(&mut self) {
        self.mask.fill(0);
        if let Err(error) = self.constraint.mask(&mut self.mask) {
            tracing::warn!("{}: a constraint gives no mask: {error}", super::OP);
            self.mask.fill(0);
        }
        if let Some(word) = self.mask.last_mut() {
            *word &= self.last;
        }
    }

    /// The mask of the next draw.
    pub fn mask(&self) -> &[u32] {
        &self.mask
    }

    pub fn accept(&mut self, token: u32) -> Result<bool> {
        self.constraint.accept(token)
    }
}

impl std::fmt::Debug for Constrained {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Constrained").finish_non_exhaustive()
    }
}
