//! The op as candle sees it.

use super::{Activation, ActivationBits, Epilogue, Prologue, Weight};

/// One input tensor, everything else held by reference.
pub(super) struct LinearOp<'a> {
    pub name: &'static str,
    pub prologue: Prologue<'a>,
    pub weights: &'a [Weight],
    pub epilogue: Epilogue<'a>,
    pub bits: ActivationBits,
    /// Outputs of all weights together, before gating.
    pub rows: usize,
}

impl LinearOp<'_> {
    /// Outputs that are written: half the rows if one half gates the other.
    pub fn width(&self) -> usize {
        self.epilogue.activation.outputs(self.rows)
    }

    /// What is fused in, for the trace.
    pub fn path(&self) -> String {
        let mut path = String::new();
        for weight in self.weights {
            let format = match weight {
                Weight::Dense(w) => w.dtype().as_str().to_owned(),
                Weight::Packed(w) => w.format().to_string(),
                #[cfg(feature = "cuda")]
                Weight::Blocks(w) => w.format().to_string(),
            };
            if !path.split('/').any(|f| f == format) {
                if !path.is_empty() {
                    path.push('/');
                }
                path.push_str(&format);
            }
        }
        path.push_str(match self.prologue {
            Prologue::None => "",
            Prologue::RmsNorm { .. } => " rms_norm+",
            Prologue::LayerNorm { .. } => " layer_norm+",
        });
        if self.epilogue.bias.is_some() {
            path.push_str(" +bias");
        }
        if self.epilogue.activation != Activation::None {
            path.push_str(&format!(" +{:?}", self.epilogue.activation).to_lowercase());
        }
        if !self.epilogue.residuals.is_empty() {
            path.push_str(" +residual");
        }
        path
    }
}
