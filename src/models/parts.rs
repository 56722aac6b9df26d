//! What runs a model without its `forward`, as [`generation`](crate::generation) does, asks it for.

use super::decoder::{Decoder, DecoderCache};
use candle_core::Result;

/// A model's layers and cache. Only models of this crate have it: the module is not public.
pub trait Parts {
    /// The layers.
    fn decoder(&self) -> &Decoder;
    /// An empty cache of the kind that the model's own `forward` takes.
    fn empty_cache(&self) -> Result<DecoderCache>;
}
