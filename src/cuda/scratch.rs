//! Memory of a GPU for what lies between kernels.

use super::memory::{Address, address, alloc};
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result, bail};

/// Pieces start at multiples of this many bytes.
const ALIGNMENT: usize = 256;

/// Memory that is taken piece by piece and given back all at once. Kernels that use it before and
/// after a [`Scratch::reset`] are kept apart by the one stream that runs them and frees it.
pub(crate) struct Scratch {
    device: CudaDevice,
    blocks: Vec<Block>,
    /// Bytes taken of the last block.
    used: usize,
    /// Bytes taken of all since the last reset, and at most between two of them.
    taken: usize,
    most: usize,
    /// Whether there is no more than what there is.
    fixed: bool,
}

struct Block {
    storage: CudaStorage,
    size: usize,
}

impl Scratch {
    /// Without memory yet.
    pub fn new(device: &CudaDevice) -> Self {
        Self {
            device: device.clone(),
            blocks: Vec::new(),
            used: 0,
            taken: 0,
            most: 0,
            fixed: false,
        }
    }

    /// Memory of `bytes` and no more, which stays where it is: what a CUDA graph can have.
    ///
    /// # Errors
    /// If the device's memory does not suffice.
    pub fn fixed(op: &str, device: &CudaDevice, bytes: usize) -> Result<Self> {
        let mut scratch = Self::new(device);
        if bytes > 0 {
            scratch.take(op, DType::U8, bytes)?;
            scratch.reset();
        }
        scratch.fixed = true;
        Ok(scratch)
    }

    /// Bytes that `len` elements take.
    pub const fn room(dtype: DType, len: usize) -> usize {
        let size = match dtype {
            DType::U8 => 1,
            DType::F16 | DType::BF16 => 2,
            _ => 4,
        };
        let bytes = len * size;
        if bytes == 0 {
            ALIGNMENT
        } else {
            bytes.next_multiple_of(ALIGNMENT)
        }
    }

    /// Room for `len` elements, with whatever the memory holds; `op` is named if there is none.
    ///
    /// # Errors
    /// If the device's memory does not suffice.
    pub fn take(&mut self, op: &str, dtype: DType, len: usize) -> Result<Address> {
        let bytes = Self::room(dtype, len);
        if self
            .blocks
            .last()
            .is_none_or(|b| b.size - self.used < bytes)
        {
            if self.fixed {
                bail!("{op}: {bytes} bytes of scratch memory are past what was planned");
            }
            // After a reset one block is to do for all.
            let size = bytes.max(if self.blocks.is_empty() { self.most } else { 0 });
            let storage = alloc(op, &self.device, DType::U8, size)?;
            self.blocks.push(Block { storage, size });
            self.used = 0;
        }
        let Some(block) = self.blocks.last() else {
            bail!("{op}: no memory was taken");
        };
        let at = address(
            &block.storage,
            &Layout::contiguous_with_offset(bytes, self.used),
        )?;
        self.used += bytes;
        self.taken += bytes;
        Ok(at)
    }

    /// Bytes that were taken at most between two resets.
    pub fn most(&self) -> usize {
        self.most
    }

    /// Gives everything back.
    pub fn reset(&mut self) {
        self.most = self.most.max(self.taken);
        (self.taken, self.used) = (0, 0);
        if self.blocks.len() > 1 {
            self.blocks.clear();
        }
    }
}
