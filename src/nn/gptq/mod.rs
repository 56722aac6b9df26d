//! Weights quantized so that what a layer computes changes least: GPTQ.
//!
//! Rounding each weight to the nearest code makes the error of the weights small. What counts is the error of
//! the product, `||X Wᵀ - X W'ᵀ||²` over the inputs X that the layer meets, and there an error in one column can be
//! made up for by the columns after it. GPTQ (Frantar et al. 2022, after Optimal Brain Surgeon, Hassibi & Stork
//! 1993) rounds the columns of a row w one after the other:
//!
//! ```text
//! H = 2 Xᵀ X + λ I                           [K, K], X [rows, K] being the inputs of all tokens
//! H⁻¹ = Nᵀ N                                 N a triangular matrix
//! for each column k in turn:
//!     w'[k] = nearest code of w[k]
//!     w[j] -= (w[k] - w'[k]) N[k, j] / N[k, k]     for all columns j that are still to come
//! ```
//!
//! - The columns with the largest `H[k, k]` come first (act order). Scales and zero points are found before any column
//!   is visited (static groups): so groups stay consecutive columns, and no table of columns is stored.
//! - They are searched for as [`quant::quantize`](crate::quant::quantize) does it, but an error in column k counts
//!   `1 / N[k, k]²`: that is what it costs once the columns after it have made up for it.
//! - λ is `damping` times the mean of `H`'s diagonal. The factor 2 of H cancels out.
//! - Columns go in blocks: within a block they update each other, and at its end the block updates all columns that are
//!   still to come in one matrix product (lazy updates).
//! - With R the Cholesky factor of H with its columns in the order in which they are visited from last to first,
//!   `N = R⁻¹`: one factorization instead of two.
//!
//! [`Hessian`] collects the inputs, [`Hessian::inverse`] gives N, which all matrices with the same input share, and
//! [`quantize`] gives a matrix's codes. [`models::calibrate`](crate::models::calibrate()) does it for a whole model.

mod columns;
mod factor;
mod hessian;

pub use columns::quantize;
pub use factor::InverseFactor;
pub use hessian::Hessian;

use candle_core::{Result, bail};

/// How errors are handed on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// What is added to the diagonal of H, as a part of its mean. More keeps the weights closer to their codes, less
    /// trusts the calibration data more.
    pub damping: f64,
    /// Whether the columns with the largest inputs come first; else the first columns.
    pub act_order: bool,
}

impl Default for Options {
    /// One part in a hundred, and the largest inputs first.
    fn default() -> Self {
        Self {
            damping: 0.01,
            act_order: true,
        }
    }
}

impl Options {
    /// Fails if the damping is not above 0 and finite.
    pub(crate) fn check(&self) -> Result<()> {
        if !(self.damping > 0. && self.damping.is_finite()) {
            bail!(
                "damping: {}, expected a finite number above 0",
                self.damping
            );
        }
        Ok(())
    }
}
