//! Layers: they hold weights and choose, in one place, between the fused op and candle's own.

mod attention;
mod convert;
mod embedding;
mod kv_cache;
mod linear;
mod load;
mod mlp;
mod norm;
mod projection;
mod rotary;

pub use attention::{Attention, AttentionConfig, Tokens};
pub use embedding::Embedding;
pub use kv_cache::KvCache;
pub use linear::Linear;
pub use load::{
    embedding, layer_norm, layer_norm_no_bias, linear, linear_b, linear_no_bias, rms_norm,
};
pub use mlp::Mlp;
pub use norm::{LayerNorm, Norm, RmsNorm};
pub(crate) use projection::dense;
pub use projection::{LinearWeight, Projection};
pub use rotary::RotaryEmbedding;
