//! The preallocated key and value cache of one layer, of all positions or of the newest ones, under the names of
//! [`candle_nn::kv_cache`].

mod cache;
mod rotating;

pub use cache::Cache;
pub use rotating::{RotatingCache, RotatingKvCache};

// What else is there, as it is.
pub use candle_nn::kv_cache::{
    ConcatKvCache, IndicesAndMask, InterleavedKvCache, RawInterleavedKvCache,
    ScatteredCacheBuilder, ScatteredKvCache, rope_i_inplace,
};

use cache::zeros;
use candle_core::{DType, Device, Result, Tensor, bail};

/// Keys and values of the positions seen so far; in a layer of [`Attention`](super::Attention)
/// `[B, Hkv, capacity, D]` each.
///
/// Capacity grows by doubling up to the limit; steps write in place after what is there, and attention
/// reads a strided view, so nothing is concatenated or copied from token to token.
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
#[derive(Clone, Debug)]
pub struct KvCache {
    k: Cache,
    v: Cache,
    /// Where positions were skipped, in the order of slots.
    gaps: Vec<Gap>,
}

/// From `slot` on, positions are `skipped` ahead of their slots.
#[derive(Clone, Copy, Debug)]
struct Gap {
    slot: usize,
    skipped: usize,
}

/// The dimension of `[B, Hkv, T, D]` that grows.
const POSITIONS: usize = 2;

impl KvCache {
    /// An empty cache that takes shape, dtype and device from the first keys and values.
    ///
    /// * `dim`: the dimension of the positions; 2 for [`Attention`](super::Attention), whose keys and
    ///   values are `[B, Hkv, T, D]`
    /// * `max_seq_len`: capacity doubles up to here, and past it where more positions come
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self::of([(); 2].map(|()| Cache::new(dim, max_seq_len)))
    }

    /// An empty cache for `batch` sequences, which takes at most `limit` positions.
    ///
    /// # Errors
    /// If candle cannot make tensors of `dtype` on `device`.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_fused::nn::KvCache;
    /// let mut cache = KvCache::with_shape((1, 2, 16), 512, DType::F32, &Device::Cpu)?;
    /// assert!(cache.is_empty() && cache.batch() == 1);
    /// let k = Tensor::ones((1, 2, 5, 16), DType::F32, &Device::Cpu)?;
    /// cache.append(&k, &k)?;
    /// // Room for a token at position 5, to be written in place: it is in slot 5.
    /// assert_eq!(cache.advance(5, 1, 1)?, 5);
    /// let (buffer, _) = cache.buffers()?;
    /// assert!(buffer.dims()[2] >= 6);
    /// let (keys, values) = cache.views()?;
    /// assert_eq!((keys.dims(), values.dims(), cache.len()), (&[1, 2, 6, 16][..], &[1, 2, 6, 16][..], 6));
    /// assert_eq!((cache.k_cache().current_seq_len(), cache.v_cache().current_seq_len()), (6, 6));
    /// cache.reset();
    /// assert!(cache.k()?.is_none() == cache.v()?.is_none() && cache.is_empty());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn with_shape(
        (batch, heads, head_dim): (usize, usize, usize),
        limit: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let empty = Tensor::zeros((batch, heads, 0, head_dim), dtype, device)?;
        let over = || Cache::over(empty.clone(), POSITIONS, limit);
        Ok(Self::of([over(), over()]))
    }

    /// A cache whose buffers have `capacity` slots from the start and never grow, so that their
    /// addresses can be recorded.
    pub(crate) fn preallocated(
        (batch, heads, head_dim): (usize, usize, usize),
        capacity: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let over = || -> Result<Cache> {
            let data = zeros(&[batch, heads, capacity, head_dim], dtype, device)?;
            Ok(Cache::over(data, POSITIONS, capacity))
        };
        Ok(Self::of([over()?, over()?]))
    }

    fn of([k, v]: [Cache; 2]) -> Self {
        let gaps = Vec::new();
        Self { k, v, gaps }
    }

    /// Sequence `index` alone, in the same buffers.
    pub(crate) fn sequence(&self, index: usize) -> Result<Self> {
        Ok(Self {
            k: self.k.sequence(index)?,
            v: self.v.sequence(index)?,
            gaps: self.gaps.clone(),
        })
    }

    /// Counts `len` slots as written: what comes after is given up, or was written by whoever says so.
    pub(crate) fn set_len(&mut self, len: usize) {
        self.k.set_len(len);
        self.v.set_len(len);
        self.gaps.retain(|gap| gap.slot < len);
    }

    /// Sequences; 0 before the first keys of a cache without a shape.
    pub fn batch(&self) -> usize {
        self.k.all_data().as_ref().map_or(0, |data| data.dims()[0])
    }

    /// Slots that hold keys and values.
    pub fn len(&self) -> usize {
        self.k.current_seq_len()
    }

    /// Whether nothing has been written.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The whole buffers, `[B, Hkv, capacity, D]`, to be written in place.
    ///
    /// # Errors
    /// If the cache has no shape yet.
    pub fn buffers(&self) -> Result<(&Tensor, &Tensor)> {
        match (self.k.all_data(), self.v.all_data()) {
            (Some(k), Some(v)) => Ok((k, v)),
            _ => bail!("kv cache: made without a shape, expected keys and values first"),
        }
    }

    /// The written part, `[B, Hkv, len, D]`, as views.
    ///
    /// # Errors
    /// If the cache has no shape yet.
    pub fn views(&self) -> Result<(Tensor, Tensor)> {
        let (k, v) = self.buffers()?;
        Ok((
            k.narrow(self.k.dim(), 0, self.k.current_seq_len())?,
            v.narrow(self.v.dim(), 0, self.v.current_seq_len())?,
        ))
    }

    /// Slots that hold keys and values, as [`KvCache::len`].
    pub fn current_seq_len(&self) -> usize {
        self.len()
    }

    /// The buffer of the keys.
    pub fn k_cache(&self) -> &Cache {
        &self.k
    }

    /// The buffer of the values.
    pub fn v_cache(&self) -> &Cache {
        &self.v
    }

    /// The buffer of the keys, to be changed by itself.
    pub fn k_cache_mut(&mut self) -> &mut Cache {
        &mut self.k
    }

    /// The buffer of the values, to be changed by itself.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// let mut cache = candle_fused::nn::KvCache::new(2, 512);
    /// let k = Tensor::ones((1, 2, 5, 16), DType::F32, &Device::Cpu)?;
    /// cache.k_cache_mut().append(&k)?;
    /// cache.v_cache_mut().append(&k)?;
    /// assert_eq!(cache.current_seq_len(), 5);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn v_cache_mut(&mut self) -> &mut Cache {
        &mut self.v
    }

    /// The keys so far; none before the first.
    ///
    /// # Errors
    /// If candle cannot make the view.
    pub fn k(&self) -> Result<Option<Tensor>> {
        self.k.current_data()
    }

    /// The values so far; none before the first.
    ///
    /// # Errors
    /// If candle cannot make the view.
    pub fn v(&self) -> Result<Option<Tensor>> {
        self.v.current_data()
    }

    /// Forgets all positions; one made by [`KvCache::new`] takes on any other shape.
    pub fn reset(&mut self) {
        self.k.reset();
        self.v.reset();
        self.gaps.clear();
    }

    /// Writes keys and values after those that are there, and gives views of all.
    ///
    /// The views read the cache's own memory: they hold what they show until the cache is
    /// [reset](KvCache::reset) or set back and written again.
    ///
    /// # Errors
    /// If they do not fit what is held, or pass the limit of [`KvCache::with_shape`]. The cache then is as
    /// it was.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let held = (self.k.current_seq_len(), self.v.current_seq_len());
        let written = self.k.append(k).and_then(|()| self.v.append(v));
        if let Err(error) = written {
            self.k.set_len(held.0);
            self.v.set_len(held.1);
            return Err(error);
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
        if self.k.dim() != POSITIONS {
            bail!(
                "kv cache: dim is {}, expected 2: keys and values are [B, Hkv, T, D]",
                self.k.dim()
            );
        }
        for cache in [&mut self.k, &mut self.v] {
            cache.take_shape(&[batch, heads, 0, head_dim], dtype, device)?;
        }
        let (k, v) = self.buffers()?;
        for (name, data) in [("keys", k), ("values", v)] {
            let fits = matches!(*data.dims(), [_, h, _, d] if (h, d) == (heads, head_dim));
            if !fits || !data.device().same_device(device) {
                bail!(
                    "kv cache: {name} are [{batch}, {heads}, T, {head_dim}] on {:?}, the cache holds \
                     {:?} on {:?}",
                    device.location(),
                    data.shape(),
                    data.device().location()
                );
            }
        }
        Ok(())
    }

    /// Makes room for `tokens` positions from `position` on, counts them as written and returns the slot
    /// of the first.
    ///
    /// A position after all that are held takes the next slot, also if it leaves a gap. One that is held
    /// is written over, and what stood after it is given up.
    ///
    /// # Errors
    /// If the limit is passed, or the batch is not the cache's.
    pub fn advance(&mut self, position: usize, tokens: usize, batch: usize) -> Result<usize> {
        let held = self.batch();
        if batch != held {
            bail!("kv cache: the input has batch size {batch}, the cache was made for {held}");
        }
        let slot = self.slot(position);
        let before = self.k.current_seq_len();
        self.k.make_room(slot, tokens)?;
        if let Err(error) = self.v.make_room(slot, tokens) {
            self.k.set_len(before);
            return Err(error);
        }
        self.gaps.retain(|gap| gap.slot < slot);
        let skipped = self.gaps.last().map_or(0, |gap| gap.skipped);
        if position > slot + skipped {
            self.gaps.push(Gap {
                slot,
                skipped: position - slot,
            });
        }
        Ok(slot)
    }

    /// The slot of the first position from `position` on, or the next free one.
    fn slot(&self, position: usize) -> usize {
        let len = self.len();
        let (mut start, mut skipped) = (0, 0);
        for gap in self.gaps.iter().filter(|gap| gap.slot < len) {
            if position < gap.slot + skipped {
                break;
            }
            (start, skipped) = (gap.slot, gap.skipped);
        }
        position.saturating_sub(skipped).max(start).min(len)
    }
}
