//! A decode step written down: which kernels run over which addresses, from token ids to next
//! tokens. Five launches a layer: q, k, v behind the norm; attention with rotation and append; the
//! output projection with the residual; gate and up behind the norm; down with the residual.

use super::state::State;
use crate::cuda::{Address, Launcher, address_of};
use crate::models::decoder::{Block, Decoder};
use crate::nn::{KvCache, Linear, RmsNorm, RotaryEmbedding};
use crate::ops::flash_decoding::cuda as flash_decoding;
use crate::ops::linear::cuda::{self as linear, FewRows};
use crate::ops::sample::cuda as sample;
use crate::ops::{Activation, RopeStyle, Weight};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{CudaDevice, DType, Result, Tensor};

/// One launch.
enum Work {
    Embedding(embedding::Lookup),
    Linear(FewRows),
    Attention(flash_decoding::Step),
    Sample(sample::Step),
}

/// The launches of a step, in order, and what they work on.
pub(super) struct Plan {
    work: Vec<(&'static str, Work)>,
    sequences: u32,
    /// Buffers whose addresses stand in the work; the weights are held by the decoder, the caches by
    /// the sequences.
    _buffers: Vec<CudaSlice<u8>>,
}
