//! candle-flash-attn's functions by its name, over the kernels of [candle_fused].

pub use candle_fused::flash_attn::*;
