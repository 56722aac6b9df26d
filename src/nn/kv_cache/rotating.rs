//! A cache of the newest positions only: the buffer of a sliding window, written round and round.

use super::Cache;
use crate::fusion::fallback;
use crate::nn::plain::plain_attention;
use crate::ops::flash_attention::{AttentionParams, check, flash_attention};
use crate::trace;
use candle_core::{Device, Error, Result, Tensor, bail};

/// Keys or values of the newest `max_seq_len` positions, under the names of `candle_nn::kv_cache::RotatingCache`.
///
/// Position `p` is in slot `p % max_seq_len` as long as no append is longer than the buffer; such a one begins anew
/// at slot 0. Appending writes the new positions in place and copies nothing else.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::nn::kv_cache::RotatingCache;
/// let mut cache = RotatingCache::new(1, 4);
/// for _ in 0..5 {
///     cache.append(&Tensor::ones((1, 1, 8), DType::F32, &Device::Cpu)?)?;
/// }
/// // The fifth position has taken the place of the first.
/// assert_eq!((cache.dim(), cache.max_seq_len(), cache.current_seq_len(), cache.offset()), (1, 4, 5, 1));
/// assert_eq!(cache.current_data()?.expect("four positions").dims(), [1, 4, 8]);
/// assert_eq!(cache.positions(1), [4, 5, 2, 3]);
/// // Two queries more: the first does not see the second.
/// let mask = cache.attn_mask(2, &Device::Cpu)?.expect("a mask");
/// assert_eq!(mask.dims(), [2, 4]);
/// cache.reset();
/// assert!(cache.all_data().is_none());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RotatingCache {
    buffer: Cache,
    /// The slot that is written next.
    offset: usize,
    /// Positions so far, those that are gone too.
    len: usize,
    size: usize,
}

impl RotatingCache {
    /// An empty cache that takes shape, dtype and device from the first tensor.
    ///
    /// * `dim`: the dimension of the positions
    /// * `max_seq_len`: positions that are kept
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        Self {
            buffer: Cache::new(dim, max_seq_len),
            offset: 0,
            len: 0,
            size: max_seq_len,
        }
    }

    /// The slot that is written next.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// The dimension of the positions.
    pub fn dim(&self) -> usize {
        self.buffer.dim()
    }

    /// Positions so far, those that are gone too.
    pub fn current_seq_len(&self) -> usize {
        self.len
    }

    /// Positions that are kept.
    pub fn max_seq_len(&self) -> usize {
        self.size
    }

    /// The whole buffer; none before the first tensor.
    pub fn all_data(&self) -> &Option<Tensor> {
        self.buffer.all_data()
    }

    /// What is kept, as a view in the order of slots; none before the first tensor.
    ///
    /// # Errors
    /// If candle cannot make the view.
    pub fn current_data(&self) -> Result<Option<Tensor>> {
        let kept = |data: &Tensor| data.narrow(self.dim(), 0, self.len.min(self.size));
        self.all_data().as_ref().map(kept).transpose()
    }

    /// Forgets everything; the next tensor may have any other shape.
    pub fn reset(&mut self) {
        self.buffer.reset();
        self.offset = 0;
        self.len = 0;
    }

    /// Writes `src` over the oldest positions and gives a view of what is kept, in the order of slots; `src` itself
    /// where that has `max_seq_len` positions or more.
    ///
    /// # Errors
    /// If `src` differs from what is kept in another dimension than the one of the positions, or on another device, or
    /// no positions are kept. The cache then is as it was.
    pub fn append(&mut self, src: &Tensor) -> Result<Tensor> {
        let tokens = self.make_room(src)?;
        let dim = self.dim();
        let whole = tokens >= self.size;
        let offset = if whole { 0 } else { self.offset };
        let skipped = tokens.saturating_sub(self.size);
        let first = (self.size - offset).min(tokens - skipped);
        self.buffer
            .write(&src.narrow(dim, skipped, first)?, offset)?;
        let rest = tokens - skipped - first;
        self.buffer
            .write(&src.narrow(dim, skipped + first, rest)?, 0)?;
        self.offset = (offset + tokens - skipped) % self.size;
        self.len += tokens;
        match self.current_data()? {
            Some(kept) if !whole => Ok(kept),
            _ => Ok(src.clone()),
        }
    }

    /// The positions of `src`, for which there is a buffer then.
    fn make_room(&mut self, src: &Tensor) -> Result<usize> {
        if self.size == 0 {
            bail!("kv cache: max_seq_len is 0, expected at least 1");
        }
        let tokens = self.buffer.check(src)?;
        self.buffer.make_room(0, self.size)?;
        Ok(tokens)
    }

    /// What is kept, from the oldest position on, in two views.
    fn in_order(&self) -> Result<Vec<Tensor>> {
        let Some(data) = self.all_data() else {
            return Ok(Vec::new());
        };
        let kept = self.len.min(self.size);
        let (old, new) = match kept < self.size {
            true => (0..0, 0..kept),
            false => (self.offset..self.size, 0..self.offset),
        };
        let parts = [old, new].into_iter().filter(|part| !part.is_empty());
        parts
            .map(|part| data.narrow(self.dim(), part.start, part.len()))
            .collect()
    }

    /// The positions of what [`RotatingCache::append`] gives for `seq_len` more.
    pub fn positions(&self, seq_len: usize) -> Vec<usize> {
        let end = self.len + seq_len;
        if seq_len >= self.size {
            return (self.len..end).collect();
        }
        let offset = (self.offset + seq_len) % self.size;
        let newest = |slot: usize| match slot < offset {
            true => end + slot - offset,
            false => end + slot - offset - self.size,
        };
        match end < self.size {
            true => (0..end).collect(),
            false => (0..self.size).map(newest).collect(),
        }
    }

    /// For so many queries at the positions that are appended: u8 `[seq_len, keys]`, 1 where a query does not see a
    /// key of what [`RotatingCache::append`] gives, those behind it and those more than `max_seq_len` before it; none
    /// for one query, which sees them all. As in candle_nn, call it before the append.
    ///
    /// Keys that the append itself writes over are lost to its first queries;
    /// [`RotatingKvCache::attend`] has them.
    ///
    /// # Errors
    /// If candle cannot make the tensor.
    pub fn attn_mask(&self, seq_len: usize, device: &Device) -> Result<Option<Tensor>> {
        if seq_len == 1 {
            return Ok(None);
        }
        let keys = self.positions(seq_len);
        let hidden = |query: usize| {
            keys.iter()
                .map(move |key| u8::from(*key > query || *key + self.size < query))
        };
        let mask: Vec<u8> = (self.len..self.len + seq_len).flat_map(hidden).collect();
        Tensor::from_vec(mask, (seq_len, keys.len()), device).map(Some)
    }
}

/// [`flash_attention`](fn@crate::ops::flash_attention), or candle's own operations on a device that has no kernels here.
fn attention(q: &Tensor, k: &Tensor, v: &Tensor, params: &AttentionParams) -> Result<Tensor> {
    match fallback(q.device()) {
        None => flash_attention(q, k, v, params),
        Some(why) => {
            trace::record("flash_attention", || format!("candle: {why}"));
            plain_attention(q, k, v, params)
        }
    }
}

/// Keys and values of the newest `max_seq_len` positions, under the names of `candle_nn::kv_cache::RotatingKvCache`:
/// the cache of a sliding window, whose memory does not grow with the sequence.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::nn::kv_cache::RotatingKvCache;
/// let mut cache = RotatingKvCache::new(2, 4);
/// let token = Tensor::ones((1, 2, 1, 64), DType::F32, &Device::Cpu)?;
/// for _ in 0..6 {
///     cache.append(&token, &token)?;
/// }
/// assert_eq!((cache.current_seq_len(), cache.offset()), (6, 2));
/// assert_eq!(cache.k()?.expect("keys").dims(), [1, 2, 4, 64]);
/// // The positions that stand in its slots, with one more.
/// assert_eq!(cache.positions(1), [4, 5, 6, 3]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RotatingKvCache {
    k: RotatingCache,
    v: RotatingCache,
}

impl RotatingKvCache {
    /// An empty cache that takes shape, dtype and device from the first keys and values.
    ///
    /// * `dim`: the dimension of the positions, 2 in `[B, Hkv, T, D]`
    /// * `max_seq_len`: positions that are kept, the window
    pub fn new(dim: usize, max_seq_len: usize) -> Self {
        let [k, v] = [(); 2].map(|()| RotatingCache::new(dim, max_seq_len));
        Self { k, v }
    }

    /// The keys' part.
    pub fn k_cache(&self) -> &RotatingCache {
        &self.k
    }

    /// The values' part.
    pub fn v_cache(&self) -> &RotatingCache {
        &self.v
    }

    /// The keys' part, to be changed by itself.
    pub fn k_cache_mut(&mut self) -> &mut RotatingCache {
        &mut self.k
    }

    /// The values' part, to be changed by itself.
    pub fn v_cache_mut(&mut self) -> &mut RotatingCache {
        &mut self.v
    }

    /// The keys that are kept, in the order of slots; none before the first.
    ///
    /// # Errors
    /// If candle cannot make the view.
    pub fn k(&self) -> Result<Option<Tensor>> {
        self.k.current_data()
    }

    /// The values that are kept, in the order of slots; none before the first.
    ///
    /// # Errors
    /// If candle cannot make the view.
    pub fn v(&self) -> Result<Option<Tensor>> {
        self.v.current_data()
    }

    /// Writes keys and values over the oldest ones, and gives what is kept in the order of slots; `k` and `v`
    /// themselves where those have `max_seq_len` positions or more.
    ///
    /// # Errors
    /// If they do not fit what is kept. The cache then is as it was.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        self.make_room(k, v)?;
        Ok((self.k.append(k)?, self.v.append(v)?))
    }

    /// Fails if keys and values do not fit what is kept.
    fn make_room(&mut self, k: &Tensor, v: &Tensor) -> Result<()> {
        let fits = match (self.k.make_room(k), self.v.make_room(v)) {
            (Ok(keys), Ok(values)) if keys == values => Ok(()),
            (Ok(keys), Ok(values)) => Err(Error::msg(format!(
                "kv cache: there are {keys} keys and {values} values, expected as many"
            ))),
            (Err(error), _) | (_, Err(error)) => Err(error),
        };
        if fits.is_err() && self.k.len == 0 {
            // Neither keeps a shape that it has taken on.
            self.reset();
        }
        fits
    }

    /// Appends keys and values, and gives the attention of their queries, of which each sees its own position and
    /// the `max_seq_len - 1` before it, also those that the append writes over.
    ///
    /// * `q`: `[B, Hq, T, D]`, the queries of the same T positions; Hkv divides Hq
    /// * `k`, `v`: `[B, Hkv, T, D]`, rotated as they are to be kept
    /// * `params`: as in [`flash_attention`](fn@crate::ops::flash_attention), of which `causal` and `window` are this
    ///   cache's; without a mask and without slopes, which slots out of order do not take
    /// * result: `[B, Hq, T, D]` in q's dtype
    ///
    /// A single position, as in decoding, reads the slots as they lie. More of them behind others are a prompt's
    /// chunk: what is kept is copied in order, once, in front of them.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, or `params` has what is not taken. The cache then is as it was.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_fused::nn::kv_cache::RotatingKvCache;
    /// use candle_fused::ops::AttentionParams;
    /// let mut cache = RotatingKvCache::new(2, 4);
    /// let tokens = |n: usize| Tensor::ones((1, 2, n, 16), DType::F32, &Device::Cpu);
    /// let params = AttentionParams { scale: 0.25, ..Default::default() };
    /// // A prompt of six tokens, then one more.
    /// cache.attend(&tokens(6)?, &tokens(6)?, &tokens(6)?, &params)?;
    /// let y = cache.attend(&tokens(1)?, &tokens(1)?, &tokens(1)?, &params)?;
    /// // All values are 1, and so is any mean of them.
    /// assert!((y - 1.)?.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
    /// let kept = [cache.k()?, cache.v()?].map(|kept| kept.expect("four positions").dims()[2]);
    /// assert_eq!((kept, cache.current_seq_len()), ([4, 4], 7));
    /// assert_eq!((cache.k_cache().offset(), cache.v_cache().offset()), (1, 1));
    /// // Each part by itself.
    /// cache.k_cache_mut().append(&tokens(1)?)?;
    /// cache.v_cache_mut().append(&tokens(1)?)?;
    /// assert!(cache.attn_mask(1, &Device::Cpu)?.is_none());
    /// cache.reset();
    /// assert_eq!(cache.current_seq_len(), 0);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn attend(
        &mut self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        params: &AttentionParams,
    ) -> Result<Tensor> {
        let named = params.tensors().map(|(name, _)| name);
        let limits = params.window.map(|_| "window");
        let right = params.window_right.map(|_| "window_right");
        if let Some(name) = named.chain(limits).chain(right).next() {
            bail!("kv cache: params has {name}, which a rotating cache does not take");
        }
        if self.k.dim() != 2 {
            bail!(
                "kv cache: dim is {}, expected 2: keys and values are [B, Hkv, T, D]",
                self.k.dim()
            );
        }
        self.make_room(k, v)?;
        let tokens = k.dims()[2];
        if q.rank() != 4 || q.dims()[2] != tokens {
            bail!(
                "kv cache: q has shape {:?}, expected [B, Hq, {tokens}, D] for {tokens} keys",
                q.shape()
            );
        }
        let windowed = AttentionParams {
            causal: true,
            window: Some(self.k.size),
            ..params.clone()
        };
        check(q, k, v, &windowed)?;
        if tokens == 1 {
            // One query sees all that is kept, in whatever order.
            let unordered = AttentionParams {
                causal: false,
                ..params.clone()
            };
            let (keys, values) = self.append(k, v)?;
            return attention(q, &keys, &values, &unordered);
        }
        let with = |cache: &RotatingCache, new: &Tensor| -> Result<Tensor> {
            let mut parts = cache.in_order()?;
            let Some(kept) = parts.first() else {
                return Ok(new.clone());
            };
            let new = new.to_dtype(kept.dtype())?;
            parts.push(new);
            Tensor::cat(&parts, 2)
        };
        let y = attention(q, &with(&self.k, k)?, &with(&self.v, v)?, &windowed)?;
        self.append(k, v)?;
        Ok(y)
    }

    /// The slot that is written next.
    pub fn offset(&self) -> usize {
        self.k.offset()
    }

    /// Positions so far, those that are gone too.
    pub fn current_seq_len(&self) -> usize {
        self.k.current_seq_len()
    }

    /// As [`RotatingCache::attn_mask`].
    ///
    /// # Errors
    /// If candle cannot make the tensor.
    pub fn attn_mask(&self, seq_len: usize, device: &Device) -> Result<Option<Tensor>> {
        self.k.attn_mask(seq_len, device)
    }

    /// As [`RotatingCache::positions`].
    pub fn positions(&self, seq_len: usize) -> Vec<usize> {
        self.k.positions(seq_len)
    }

    /// Forgets everything; the next keys and values may have any other shape.
    pub fn reset(&mut self) {
        self.k.reset();
        self.v.reset();
    }
}
