//! One tensor that grows along a dimension.

use candle_core::{DType, Device, Result, Tensor, bail};
use half::vec::HalfBitsVecExt;
use half::{bf16, f16};

/// Positions beyond a prompt that are made room for at once, so that growing does not fall on the
/// first tokens behind it.
const SPARE: usize = 256;

/// Keys or values of the positions seen so far: a buffer that grows along one dimension, under the names
/// of `candle_nn::kv_cache::Cache`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::nn::kv_cache::Cache;
/// let mut cache = Cache::new(1, 512);
/// cache.append(&Tensor::ones((2, 3, 4), DType::F32, &Device::Cpu)?)?;
/// cache.append(&Tensor::ones((2, 1, 4), DType::F32, &Device::Cpu)?)?;
/// let held = cache.current_data()?.expect("four positions");
/// assert_eq!((held.dims(), cache.current_seq_len()), (&[2, 4, 4][..], 4));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Cache {
    data: Option<Tensor>,
    dim: usize,
    len: usize,
    limit: usize,
    /// Made without a shape: takes that of the first tensor, and grows past the limit.
    open: bool,
}

impl Cache {
    /// An empty cache that takes shape, dtype and device from the first tensor.
    ///
    /// * `dim`: the dimension that grows
    /// * `max_seq_len`: the size doubles up to here, and past it where more comes
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self {
            data: None,
            dim,
            len: 0,
            limit: max_seq_len,
            open: true,
        }
    }

    /// A cache over a buffer that is there, which grows up to `limit` and no further.
    pub(super) fn over(data: Tensor, dim: usize, limit: usize) -> Self {
        Self {
            data: Some(data),
            dim,
            len: 0,
            limit,
            open: false,
        }
    }

    /// The same positions of sequence `index` alone, in the same buffer.
    pub(super) fn sequence(&self, index: usize) -> Result<Self> {
        let part = |data: &Tensor| data.narrow(0, index, 1);
        Ok(Self {
            data: self.data.as_ref().map(part).transpose()?,
            ..*self
        })
    }

    /// The dimension that grows.
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// Positions that are held.
    pub fn current_seq_len(&self) -> usize {
        self.len
    }

    /// The size up to which the buffer may grow, or which it has beyond that.
    pub fn max_seq_len(&self) -> usize {
        self.limit.max(self.capacity())
    }

    /// The whole buffer, which may be longer than what is held; none before the first tensor.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_fused::nn::kv_cache::Cache;
    /// let mut cache = Cache::new(1, 512);
    /// assert!(cache.all_data().is_none());
    /// cache.append(&Tensor::ones((2, 3, 4), DType::F32, &Device::Cpu)?)?;
    /// // The whole buffer, with room for what comes.
    /// let room = cache.all_data().as_ref().expect("a buffer").dims()[1];
    /// assert!(room >= cache.current_seq_len() && room <= cache.max_seq_len() && cache.dim() == 1);
    /// cache.reset();
    /// assert_eq!(cache.current_seq_len(), 0);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn all_data(&self) -> &Option<Tensor> {
        &self.data
    }

    /// What is held, as a view; none before the first tensor.
    ///
    /// # Errors
    /// If candle cannot make the view.
    pub fn current_data(&self) -> Result<Option<Tensor>> {
        let held = |data: &Tensor| data.narrow(self.dim, 0, self.len);
        self.data.as_ref().map(held).transpose()
    }

    /// Forgets everything; one made by [`Cache::new`] takes on any other shape.
    pub fn reset(&mut self) {
        self.len = 0;
        if self.open {
            self.data = None;
        }
    }

    /// Writes `src` after what is held.
    ///
    /// # Errors
    /// If `src` differs from what is held in another dimension than the one that grows, or on another
    /// device, or passes the limit of a cache that has one.
    pub fn append(&mut self, src: &Tensor) -> Result<()> {
        let tokens = self.check(src)?;
        let slot = self.len;
        self.make_room(slot, tokens)?;
        self.write(src, slot)
    }

    /// Writes `src` from `slot` on, where there is room.
    pub(super) fn write(&self, src: &Tensor, slot: usize) -> Result<()> {
        match &self.data {
            Some(data) if src.elem_count() > 0 => {
                let src = src.to_dtype(data.dtype())?.contiguous()?;
                data.slice_set(&src, self.dim, slot)
            }
            _ => Ok(()),
        }
    }

    /// The positions of `src`, whose shape an empty cache takes on.
    pub(super) fn check(&mut self, src: &Tensor) -> Result<usize> {
        let dim = self.dim;
        if dim >= src.rank() {
            bail!(
                "kv cache: dimension {dim} grows, the tensor has shape {:?}",
                src.shape()
            );
        }
        let mut dims = src.dims().to_vec();
        let tokens = std::mem::replace(&mut dims[dim], 0);
        let Some(data) = &self.data else {
            self.data = Some(Tensor::zeros(dims, src.dtype(), src.device())?);
            return Ok(tokens);
        };
        let mut held = data.dims().to_vec();
        held[dim] = 0;
        if held != dims || !data.device().same_device(src.device()) {
            held[dim] = self.len;
            bail!(
                "kv cache: the tensor has shape {:?} on {:?}, the cache holds {held:?} on {:?}, of which \
                 dimension {dim} grows",
                src.shape(),
                src.device().location(),
                data.device().location()
            );
        }
        Ok(tokens)
    }

    /// Takes on this shape, dtype and device, if it holds nothing and may.
    pub(super) fn take_shape(
        &mut self,
        shape: &[usize],
        dtype: DType,
        device: &Device,
    ) -> Result<()> {
        if self.open && self.len == 0 {
            let fits = self.data.as_ref().is_some_and(|data| {
                let others = |dims: &[usize]| [&dims[..self.dim], &dims[self.dim + 1..]].concat();
                data.rank() == shape.len()
                    && others(data.dims()) == others(shape)
                    && data.dtype() == dtype
                    && data.device().same_device(device)
            });
            if !fits {
                self.data = Some(Tensor::zeros(shape, dtype, device)?);
            }
        }
        Ok(())
    }

    /// Room for `tokens` positions from `slot` on, which count as written; what stood after them is given up.
    pub(super) fn make_room(&mut self, slot: usize, tokens: usize) -> Result<()> {
        let end = slot.saturating_add(tokens);
        if end > self.limit && !self.open {
            bail!(
                "kv cache: {end} positions are past the context length of {}: shorten the prompt \
                 or generate fewer tokens",
                self.limit
            );
        }
        let capacity = self.capacity();
        if end > capacity
            && let Some(old) = &self.data
        {
            let doubled = (end + SPARE).max(2 * capacity);
            let grown = if end <= self.limit {
                doubled.min(self.limit)
            } else {
                doubled
            };
            let mut dims = old.dims().to_vec();
            dims[self.dim] = grown;
            let new = zeros(&dims, old.dtype(), old.device())?;
            copy_slots(old, &new, self.dim, slot)?;
            self.data = Some(new);
        }
        self.len = end;
        Ok(())
    }

    /// Counts `len` positions as written.
    pub(super) fn set_len(&mut self, len: usize) {
        self.len = len.min(self.limit.max(self.capacity()));
    }

    fn capacity(&self) -> usize {
        self.data.as_ref().map_or(0, |data| data.dims()[self.dim])
    }
}

/// A clone has a buffer of its own: steps write in place, and must not write into each other's past.
impl Clone for Cache {
    fn clone(&self) -> Self {
        let copy = |t: &Tensor| match t.copy() {
            Ok(copy) => copy,
            // As for a `Vec`, the only reason is that the memory is not there.
            Err(e) => panic!("a cache of {:?} cannot be copied: {e}", t.shape()),
        };
        Self {
            data: self.data.as_ref().map(copy),
            ..*self
        }
    }
}

/// Zeros. On the CPU they are pages that the operating system has not handed out yet, so that only
/// positions that are used take memory and time; candle writes those of 16-bit floats.
pub(super) fn zeros(dims: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let bits = || vec![0u16; dims.iter().product()];
    match (device, dtype) {
        (Device::Cpu, DType::F16) => {
            Tensor::from_vec(bits().reinterpret_into::<f16>(), dims, device)
        }
        (Device::Cpu, DType::BF16) => {
            Tensor::from_vec(bits().reinterpret_into::<bf16>(), dims, device)
        }
        _ => Tensor::zeros(dims, dtype, device),
    }
}

/// The first `slots` of one buffer into another.
fn copy_slots(from: &Tensor, to: &Tensor, dim: usize, slots: usize) -> Result<()> {
    if slots == 0 {
        return Ok(());
    }
    #[cfg(feature = "cuda")]
    if to.device().is_cuda() && dim == 2 && to.rank() == 4 {
        return crate::cuda::copy_slots(from, to, slots);
    }
    to.slice_set(&from.narrow(dim, 0, slots)?.contiguous()?, dim, 0)
}
