//! Layers: they hold weights and choose, in one place, between the fused op and candle's own.
//!
//! For a candle model of one's own there are candle_nn's constructors under its names ([`linear`],
//! [`rms_norm`], [`embedding`], ..), conversions from its layers, and [`Module`]. What shares an input
//! becomes one [`Projection`]; norms and residuals are handed to the layer that they belong to:
//!
//! ```
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_fused::nn::{self, Mlp, Norm, Projection};
//! use candle_fused::ops::Activation;
//! use candle_nn::VarBuilder;
//! # let randn = |shape: &[usize]| Tensor::randn(0f32, 0.1, shape, &Device::Cpu);
//! # let tensors = std::collections::HashMap::from([
//! #     ("norm.weight".to_owned(), randn(&[64])?),
//! #     ("gate_proj.weight".to_owned(), randn(&[96, 64])?),
//! #     ("up_proj.weight".to_owned(), randn(&[96, 64])?),
//! #     ("down_proj.weight".to_owned(), randn(&[64, 96])?),
//! # ]);
//! let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
//! let norm = nn::rms_norm(64, 1e-6, vb.pp("norm"))?;
//! let [gate, up] = ["gate_proj", "up_proj"].map(|name| nn::linear_no_bias(64, 96, vb.pp(name)));
//! let (gate, up) = (gate?, up?);
//! let down = nn::linear_no_bias(96, 64, vb.pp("down_proj"))?;
//! let x = Tensor::randn(0f32, 1., (2, 64), &Device::Cpu)?;
//!
//! // Layer by layer, as with candle_nn.
//! let normed = norm.forward(&x)?;
//! let hidden = (gate.forward(&normed)?.silu()? * up.forward(&normed)?)?;
//! let plain = (&x + down.forward(&hidden)?)?;
//!
//! // The same in two steps.
//! let gate_up = Projection::from_linears(vec![gate, up])?;
//! let mlp = Mlp::new(gate_up, down.into(), Activation::SwiGlu);
//! let fused = mlp.forward(&x, Some(&Norm::from(norm)), &x)?;
//! # let error = (plain - fused)?.abs()?.max_all()?.to_scalar::<f32>()?;
//! # assert!(error < 1e-4, "{error}");
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! The fused forms have no gradients: they refuse variables and what is computed from them, and so does
//! attention in any form, since a cache has none. Other layers have them with
//! [`Fusion::none`](crate::Fusion::none), which gives candle's own operations.
//!
//! [`Module`]: candle_core::Module

mod attention;
mod convert;
mod embedding;
pub mod gptq;
pub mod kv_cache;
mod linear;
mod load;
mod mlp;
mod norm;
mod order;
pub(crate) mod pack;
mod paged;
mod per_token;
mod plain;
mod projection;
pub(crate) mod quantize;
pub(crate) mod recipe;
mod rotary;
pub(crate) mod rounded;

pub use attention::{Attention, AttentionConfig, Tokens};
pub use embedding::Embedding;
pub use kv_cache::KvCache;
pub use linear::Linear;
pub use load::{
    LayerNormConfig, embedding, layer_norm, layer_norm_no_bias, linear, linear_b, linear_no_bias,
    rms_norm,
};
pub use mlp::Mlp;
pub use norm::{LayerNorm, Norm, RmsNorm};
pub use order::InputOrder;
pub(crate) use paged::{PagedRun, PagedTokens};
pub(crate) use projection::numbers;
pub use projection::{LinearWeight, Projection};
pub use rotary::RotaryEmbedding;

/// Rotations of tensors as candle_nn has them; [`ops::rope`](fn@crate::ops::rope) takes any view.
pub use candle_nn::rotary_emb;
