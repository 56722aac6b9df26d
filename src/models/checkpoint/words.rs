//! A quantized matrix whose codes are still in the words of its checkpoint. A GPU unpacks them itself, so that the host
//! only copies them.

use super::tensors::unpack;
use super::unpacked::{Target, Unpacked};
#[cfg(feature = "cuda")]
use crate::nn::InputOrder;
use crate::nn::LinearWeight;
#[cfg(feature = "cuda")]
use crate::nn::pack::words_on_device;
use crate::quant::words::Words;
use candle_core::Result;

/// The words, and the rest of the matrix, which has no codes.
#[derive(Clone, Debug)]
pub struct InWords {
    pub rest: Unpacked,
    pub words: Words,
}

impl InWords {
    /// With its codes, a byte each.
    ///
    /// # Errors
    /// If the words are on a GPU that does not give them back.
    pub fn unpacked(self) -> Result<Unpacked> {
        let size = (self.rest.rows, self.rest.cols);
        Ok(Unpacked {
            codes: unpack(&self.words.on_host()?, size, self.words.layout),
            ..self.rest
        })
    }

    /// As [`Unpacked::into_weight`].
    ///
    /// # Errors
    /// As there.
    pub fn into_weight(self, heads: Option<usize>, to: Target<'_>) -> Result<LinearWeight> {
        #[cfg(feature = "cuda")]
        if to.unpacks_words(heads)
            && let Some(weight) = self.on_gpu(to)?
        {
            return Ok(weight);
        }
        self.unpacked()?.into_weight(heads, to)
    }

    /// The weight, if it has a format that a GPU makes of words.
    #[cfg(feature = "cuda")]
    fn on_gpu(&self, to: Target<'_>) -> Result<Option<LinearWeight>> {
        let group = self.rest.check_scales()?;
        let whole_rows = group == self.rest.cols;
        if self.rest.bits != 4 && !whole_rows {
            return Ok(None);
        }
        let order = self.rest.order(group)?;
        let codes = match self.rest.bits {
            4 => self.rest.int4(group)?,
            _ => self.rest.int8()?,
        };
        let weight = words_on_device(&codes, (&self.words, order.as_deref()), to.device)?;
        Ok(Some(match order {
            Some(order) => LinearWeight::Reordered(weight, InputOrder::new(order, to.device)?),
            None => LinearWeight::Packed(weight),
        }))
    }
}
