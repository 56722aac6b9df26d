//! The way from an op to a kernel: `kernels/<stem>.cu` becomes a fatbin at build time ([`Module`]),
//! is loaded once per GPU ([`Gpu`]), and is launched on candle's stream ([`Launcher`]).

mod gpu;
mod launch;
mod memory;
mod module;

pub(crate) use gpu::Gpu;
pub use launch::launches;
pub(crate) use launch::{Grid, Launcher};
pub(crate) use memory::{Address, address, address_of, alloc, contiguous, cuda_storage};
pub(crate) use module::{Module, fatbin};
