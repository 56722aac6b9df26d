//! A GPU's settings, its memory, and which kernel runs: [`with_kernel`] and `CANDLE_FUSED_KERNEL` force a kernel,
//! [`Replay`] times calls of ops as a CUDA graph.
//!
//! Inside the crate this is the way from an op to a kernel: `kernels/<folder>/<stem>.cu` becomes a fatbin at build time
//! (`Module`), is loaded once per GPU (`Gpu`), and is launched on candle's stream (`Launcher`).

pub(crate) mod abi;
mod blocks;
mod blocks_from;
mod counters;
mod force;
mod gpu;
mod graph;
mod launch;
mod memory;
mod module;
pub(crate) mod nvtx;
mod packed;
mod pinned;
mod pool;
pub mod profile;
mod quantize;
mod replay;
mod rows;
mod scratch;
mod table;
#[cfg(test)]
pub(crate) mod table_tests;
mod upload;
mod words;

pub use blocks::BlockMatrix;
pub(crate) use blocks::{
    Arranged, Narrow, dequantize, group_bytes, kernel_index, narrow, product_dtype,
};
pub(crate) use counters::zeros_before_launch;
pub(crate) use force::forced;
pub use force::with_kernel;
pub(crate) use gpu::{Gpu, GpuSpec, MAX_GPUS};
pub(crate) use graph::Graph;
pub use graph::count_launches;
pub use launch::launches;
pub(crate) use launch::moved;
pub(crate) use launch::{Grid, Launcher, Preceding};
pub(crate) use memory::{
    Address, address, address_of, alloc, copy_slots, cuda_storage, stack_rows,
};
pub(crate) use module::{Module, dtype_index, fatbin};
pub(crate) use packed::{PackedAt, ValuesOf, groups_log2, holds_nan, values};
pub(crate) use pinned::Pinned;
pub(crate) use pool::give_back_freed_memory;
pub use pool::{keep_freed_memory, peak_memory, reset_peak_memory};
pub use replay::Replay;
pub(crate) use rows::{PIECES, Rows, UNALIGNED};
pub(crate) use scratch::Scratch;
pub use table::KernelInfo;
pub(crate) use table::describe;
pub(crate) use upload::{upload, upload_from, upload_rows, upload_tensor, upload_tensor_from};
