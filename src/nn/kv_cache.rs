//! The preallocated key and value cache of one layer.

use candle_core::{DType, Device, Result, Tensor, bail};
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};

/// Keys and values of the positions seen so far, `[B, Hkv, capacity, D]` each.
///
/// Capacity grows by doubling up to the limit; steps write in place behind `len` positions, and
/// attention reads a strided view, so nothing is concatenated or copied from token to token.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::nn::KvCache;
/// // Names and signatures of candle_nn::kv_cache::KvCache.
/// let mut cache = KvCache::new(2, 512);
/// let k = Tensor::ones((1, 2, 5, 64), DType::F32, &Device::Cpu)?;
/// let (keys, values) = cache.append(&k, &k)?;
/// assert_eq!((keys.dims(), cache.current_seq_len()), (&[1, 2, 5, 64][..], 5));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct KvCache {
    k: Tensor,
    v: Tensor,
    start: usize,
    len: usize,
    limit: usize,
    /// The dimension of the positions, as whoever made the cache sees it.
    dim: usize,
    /// Made without a shape: takes that of the first keys, and grows past the limit.
    open: bool,
}

/// Positions beyond a prompt that are made room for at once, so that growing does not fall on the
/// first tokens behind it.
const SPARE: usize = 256;

/// The dimension of `[B, Hkv, T, D]` that grows.
const POSITIONS: usize = 2;

/// Zeros. On the CPU they are pages that the operating system has not handed out yet, so that only
/// positions that are used take memory and time; candle writes those of 16-bit floats.
fn zeros(shape: (usize, usize, usize, usize), dtype: DType, device: &Device) -> Result<Tensor> {
    let (batch, heads, positions, head_dim) = shape;
    let bits = || vec![0u16; batch * heads * positions * head_dim];
    match (device, dtype) {
        (Device::Cpu, DType::F16) => {
            Tensor::from_vec(bits().reinterpret_into::<f16>(), shape, device)
        }
        (Device::Cpu, DType::BF16) => {
            Tensor::from_vec(bits().reinterpret_into::<bf16>(), shape, device)
        }
        _ => Tensor::zeros(shape, dtype, device),
    }
}

impl KvCache {
    /// An empty cache that takes shape, dtype and device from the first keys and values.
    ///
    /// * `dim`: the dimension of the positions; keys and values are `[B, Hkv, T, D]`, so it has to
    ///   be 2, which the first keys are refused with otherwise
    /// * `max_seq_len`: capacity doubles up to here, and past it where more positions come
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        let empty = Tensor::zeros((0, 0, 0, 0), DType::F32, &Device::Cpu)
            .expect("a tensor without elements needs no memory");
        Self {
            k: empty.clone(),
            v: empty,
            start: 0,
            len: 0,
            limit: max_seq_len,
            dim,
            open: true,
        }
    }

    /// An empty cache for `batch` sequences, whose first slot is position `start` and which takes
    /// at most `limit` positions.
    pub fn with_shape(
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
            dim: POSITIONS,
            open: false,
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
        let zeros = || zeros((batch, heads, capacity, head_dim), dtype, device);
        Ok(Self {
            k: zeros()?,
            v: zeros()?,
            start: 0,
            len: 0,
            limit: capacity,
            dim: POSITIONS,
            open: false,
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

    /// Positions that hold keys and values, as [`KvCache::len`].
    pub fn current_seq_len(&self) -> usize {
        self.len
    }

    /// The keys so far, `[B, Hkv, len, D]`; none before the first.
    pub fn k(&self) -> Result<Option<Tensor>> {
        self.part(&self.k)
    }

    /// The values so far, `[B, Hkv, len, D]`; none before the first.
    pub fn v(&self) -> Result<Option<Tensor>> {
        self.part(&self.v)
    }

    fn part(&self, buffer: &Tensor) -> Result<Option<Tensor>> {
        match self.len {
            0 => Ok(None),
            len => Ok(Some(buffer.narrow(POSITIONS, 0, len)?)),
        }
    }

    /// Forgets all positions. The buffers stay for sequences of the same shape; one made by
    /// [`KvCache::new`] takes on any other.
    pub fn reset(&mut self) {
        self.len = 0;
    }

    /// Writes keys and values `[B, Hkv, T, D]` behind those that are there, and gives views of all,
    /// `[B, Hkv, len, D]` each.
    ///
    /// The views read the cache's own memory: they hold what they show until the cache is
    /// [reset](KvCache::reset) or set back and written again.
    ///
    /// # Errors
    /// If the two differ in shape, do not fit what is held, or pass the limit of
    /// [`KvCache::with_shape`].
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let [batch, heads, tokens, head_dim] = *k.dims() else {
            bail!(
                "kv cache: k has shape {:?}, expected [B, Hkv, T, D]",
                k.shape()
            );
        };
        if v.dims() != k.dims() || v.dtype() != k.dtype() {
            bail!(
                "kv cache: v is {:?} {:?}, k is {:?} {:?}",
                v.dtype(),
                v.shape(),
                k.dtype(),
                k.shape()
            );
        }
        self.take_shape((batch, heads, head_dim), k.dtype(), k.device())?;
        let slot = self.advance(self.start + self.len, tokens, batch)?;
        if tokens > 0 {
            for (buffer, part) in [(&self.k, k), (&self.v, v)] {
                let part = part.to_dtype(buffer.dtype())?.contiguous()?;
                buffer.slice_set(&part, POSITIONS, slot)?;
            }
        }
        self.views()
    }

    /// Makes sure that keys of this shape can be written; an empty cache made by [`KvCache::new`]
    /// takes the shape on.
    ///
    /// # Errors
    /// If they cannot.
    pub(crate) fn take_shape(
        &mut self,
        (batch, heads, head_dim): (usize, usize, usize),
        dtype: DType,
        device: &Device,
    ) -> Result<()> {
        if self.dim != POSITIONS {
            bail!(
                "kv cache: dim is {}, expected 2: keys and values are [B, Hkv, T, D]",
                self.dim
            );
        }
        let (b, h, _, d) = self.k.dims4()?;
        let fits = (h, d) == (heads, head_dim) && self.k.device().same_device(device);
        if self.open && self.len == 0 {
            if !(fits && b == batch && self.k.dtype() == dtype) {
                let empty = Tensor::zeros((batch, heads, 0, head_dim), dtype, device)?;
                (self.k, self.v) = (empty.clone(), empty);
            }
        } else if !fits {
            bail!(
                "kv cache: keys are [{batch}, {heads}, T, {head_dim}] on {:?}, the cache holds \
                 [{b}, {h}, T, {d}] on {:?}",
                device.location(),
                self.k.device().location()
            );
        }
        Ok(())
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
        if end > self.limit && !self.open {
            bail!(
                "kv cache: {end} positions are past the context length of {}: shorten the prompt \
                 or generate fewer tokens",
                self.limit
            );
        }
        if end > capacity {
            let doubled = (end + SPARE).max(2 * capacity);
            let grown = if end <= self.limit {
                doubled.min(self.limit)
            } else {
                doubled
            };
            let grow = |old: &Tensor| -> Result<Tensor> {
                let new = zeros((held, heads, grown, head_dim), old.dtype(), old.device())?;
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
