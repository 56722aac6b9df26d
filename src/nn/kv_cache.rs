//! The preallocated key and value cache of one layer.

use candle_core::{DType, Device, Result, Tensor, bail};

/// Keys and values of the positions seen so far, `[B, Hkv, capacity, D]` each.
///
/// Capacity grows by doubling up to the limit; steps write in place behind `len` positions, and
/// attention reads a strided view, so nothing is concatenated or copied from token to token.
#[derive(Debug)]
pub struct KvCache {
    k: Tensor,
    v: Tensor,
    start: usize,
    len: usize,
    limit: usize,
}

/// Positions beyond a prompt that are made room for at once, so that growing does not fall on the
/// first tokens behind it.
const SPARE: usize = 256;

impl KvCache {
    /// An empty cache for `batch` sequences, whose first slot is position `start` and which takes
    /// at most `limit` positions.
    pub fn new(
        (batch, heads, head_dim): (usize, usize, usize),
        start: usize,
        limit: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let empty = Tensor::zeros((batch, heads, 0, head_dim), dtype, device)?;
        Ok(Self {
            k: empty.clone(),
            v: empty,
            start,
            len: 0,
            limit,
        })
    }

    /// A cache whose buffers reach `capacity` positions from the start and never grow, so that
    /// their addresses can be recorded.
    pub(crate) fn preallocated(
        (batch, heads, head_dim): (usize, usize, usize),
        capacity: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let zeros = || Tensor::zeros((batch, heads, capacity, head_dim), dtype, device);
        Ok(Self {
            k: zeros()?,
            v: zeros()?,
            start: 0,
            len: 0,
            limit: capacity,
        })
    }

    /// Sequence `index` alone, in the same buffers.
    pub(crate) fn sequence(&self, index: usize) -> Result<Self> {
        Ok(Self {
            k: self.k.narrow(0, index, 1)?,
            v: self.v.narrow(0, index, 1)?,
            ..*self
        })
    }

    /// Counts `len` positions as written: what lies behind is given up, or was written by whoever
    /// says so.
    pub(crate) fn set_len(&mut self, len: usize) {
        self.len = len.min(self.limit);
    }

    /// Sequences.
    pub fn batch(&self) -> usize {
        self.k.dims()[0]
    }

    /// Positions that hold keys and values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing has been written.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The whole buffers, `[B, Hkv, capacity, D]`, to be written in place.
    pub fn buffers(&self) -> (&Tensor, &Tensor) {
        (&self.k, &self.v)
    }

    /// The written part, `[B, Hkv, len, D]`, as views.
    pub fn views(&self) -> Result<(Tensor, Tensor)> {
        Ok((
            self.k.narrow(2, 0, self.len)?,
            self.v.narrow(2, 0, self.len)?,
        ))
    }

    /// Makes room for `tokens` positions from `position` on, counts them as written and returns the
    /// slot of the first; what stood there or behind is given up.
    ///
    /// # Errors
    /// If `position` would leave a gap, the limit is passed, or the batch is not the cache's.
    pub fn advance(&mut self, position: usize, tokens: usize, batch: usize) -> Result<usize> {
        let (held, heads, capacity, head_dim) = self.k.dims4()?;
        if batch != held {
            bail!("kv cache: the input has batch size {batch}, the cache was made for {held}");
        }
        let slot = match position.checked_sub(self.start) {
            Some(slot) if slot <= self.len => slot,
            _ => bail!(
                "kv cache: position {position} does not follow the positions {}..{} that are held",
                self.start,
                self.start + self.len
            ),
        };
        let end = slot + tokens;
        if end > self.limit {
            bail!(
                "kv cache: {end} positions are past the context length of {}: shorten the prompt \
                 or generate fewer tokens",
                self.limit
            );
        }
        if end > capacity {
            let grown = (end + SPARE).max(2 * capacity).min(self.limit);
            let grow = |old: &Tensor| -> Result<Tensor> {
                let new = Tensor::zeros((held, heads, grown, head_dim), old.dtype(), old.device())?;
                copy_slots(old, &new, slot)?;
                Ok(new)
            };
            self.k = grow(&self.k)?;
            self.v = grow(&self.v)?;
        }
        self.len = end;
        Ok(slot)
    }
}

/// The first `slots` of one buffer into another.
fn copy_slots(from: &Tensor, to: &Tensor, slots: usize) -> Result<()> {
    if slots == 0 {
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    if to.device().is_cuda() {
        return crate::cuda::copy_slots(from, to, slots);
    }
    to.slice_set(&from.narrow(2, 0, slots)?.contiguous()?, 2, 0)
}

/// A clone has buffers of its own: steps write in place, and must not write into each other's past.
impl Clone for KvCache {
    fn clone(&self) -> Self {
        let copy = |t: &Tensor| match t.copy() {
            Ok(copy) => copy,
            // As for a `Vec`, the only reason is that the memory is not there.
            Err(e) => panic!("a cache of {:?} cannot be copied: {e}", t.shape()),
        };
        Self {
            k: copy(&self.k),
            v: copy(&self.v),
            ..*self
        }
    }
}
