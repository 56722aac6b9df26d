//! Layers: they hold weights and choose, in one place, between the fused op and candle's own.

mod attention;
mod embedding;
mod kv_cache;
mod linear;
mod mlp;
mod norm;
mod rotary;

pub use attention::{Attention, AttentionConfig};
pub use embedding::Embedding;
pub use kv_cache::KvCache;
pub(crate) use linear::dense;
pub use linear::{Linear, LinearWeight};
pub use mlp::GatedMlp;
pub use norm::RmsNorm;
pub use rotary::RotaryEmbedding;
