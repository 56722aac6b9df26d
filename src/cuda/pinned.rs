//! Host memory that the GPU writes to, and reads.

use super::gpu::Gpu;
use super::memory::Address;
use candle_core::cuda_backend::cudarc::driver::{result, sys};
use candle_core::{Result, bail};
use std::sync::atomic::AtomicU32;

/// Words of page-locked memory under the same address on the host and on the GPU, zero at first.
#[derive(Debug)]
pub(crate) struct Pinned {
    words: *mut AtomicU32,
    len: usize,
    gpu: &'static Gpu,
}

// SAFETY: the words are only reached as atomics.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `len` words, all zero.
    pub fn new(gpu: &'static Gpu, len: usize) -> Result<Self> {
        gpu.bind()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the memory is filled before anybody reads it.
        match unsafe { result::malloc_host(len * size_of::<u32>(), flags) } {
            Ok(memory) => {
                let words = memory.cast::<AtomicU32>();
                // SAFETY: the driver gave room for `len` words.
                unsafe { words.write_bytes(0, len) };
                Ok(Self { words, len, gpu })
            }
            Err(e) => bail!("cuda: {len} words of page-locked memory: {e}"),
        }
    }

    /// The words, as the host sees them.
    pub fn words(&self) -> &[AtomicU32] {
        // SAFETY: the memory holds `len` initialised words for as long as `self` lives, and whoever
        // writes to them, GPU or host, does so in whole words.
        unsafe { std::slice::from_raw_parts(self.words, self.len) }
    }

    /// The words as bytes, for a host that has them alone.
    ///
    /// # Safety
    /// The GPU neither reads nor writes them while the result lives.
    pub unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        let bytes = self.len * size_of::<u32>();
        // SAFETY: the memory holds so many initialised bytes for as long as `self` lives, which nobody else borrows; the
        // rest is the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.words.cast(), bytes) }
    }

    /// Copies `words` words from the GPU to word `at`, in the order of the stream.
    ///
    /// # Errors
    /// If there are not so many words from there on, or the driver refuses the copy.
    ///
    /// # Safety
    /// `from` holds so many words until the stream has passed the copy, and the owner waits for it before this is
    /// dropped.
    pub unsafe fn copy_from(
        &self,
        at: usize,
        from: Address,
        words: usize,
        stream: sys::CUstream,
    ) -> Result<()> {
        let to = self.part(at, words)?.as_ptr().cast_mut().cast();
        // SAFETY: the words are there, and are atomics, which anybody may write to; the caller's for the rest.
        let copied = unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, 4 * words, stream) };
        copied.result().map_err(candle_core::Error::wrap)
    }

    /// Copies `words` words from word `at` on to the GPU, in the order of the stream.
    ///
    /// # Errors
    /// As [`Pinned::copy_from`].
    ///
    /// # Safety
    /// `to` has room for so many words, and nobody writes to these here, until the stream has passed the copy; the
    /// owner waits for it before this is dropped.
    pub unsafe fn copy_to(
        &self,
        at: usize,
        to: Address,
        words: usize,
        stream: sys::CUstream,
    ) -> Result<()> {
        let from = self.part(at, words)?.as_ptr().cast();
        // SAFETY: the words are there; the caller's for the rest.
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, 4 * words, stream) };
        copied.result().map_err(candle_core::Error::wrap)
    }

    /// Copies the first `bytes` bytes to the GPU, in the order of the stream.
    ///
    /// # Errors
    /// As [`Pinned::copy_from`].
    ///
    /// # Safety
    /// As [`Pinned::copy_to`].
    pub unsafe fn copy_bytes_to(
        &self,
        to: Address,
        bytes: usize,
        stream: sys::CUstream,
    ) -> Result<()> {
        let from = self
            .part(0, bytes.div_ceil(size_of::<u32>()))?
            .as_ptr()
            .cast();
        // SAFETY: the bytes are there; the caller's for the rest.
        let copied = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, bytes, stream) };
        copied.result().map_err(candle_core::Error::wrap)
    }

    fn part(&self, at: usize, words: usize) -> Result<&[AtomicU32]> {
        match self.words().get(at..at + words) {
            Some(part) => Ok(part),
            None => bail!(
                "cuda: words {at} to {} of {} page-locked ones",
                at + words,
                self.len
            ),
        }
    }

    /// The first word's address, as the GPU sees it.
    pub fn address(&self) -> Address {
        self.words as Address
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.gpu.bind_to_free() {
            // SAFETY: allocated in `new`; the owner has waited for the GPU's last write.
            let _ = unsafe { result::free_host(self.words.cast()) };
        }
    }
}
