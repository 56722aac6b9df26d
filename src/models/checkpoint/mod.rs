//! Checkpoints as they are on the hub: where a layer's matrix comes from, dense or quantized.
//!
//! [`packing`] asks how a matrix is stored. A file for each format describes its layout, and
//! [`unpacked`] brings what comes out of it into a format of the crate's own.

mod awq;
mod bitnet;
mod compressed;
mod config;
mod files;
mod fp8;
mod gptq;
mod kept;
mod nf4;
mod nvfp4;
mod packing;
mod shards;
mod stored;
mod tensors;
#[cfg(test)]
mod tests;
mod unpacked;
mod words;

pub use files::Checkpoint;
pub use stored::Stored;
