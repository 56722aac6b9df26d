//! Rotary position tables.

use super::plain::plain_rope;
use crate::fusion::fallback;
use crate::ops::{self, RopeStyle, Rotation};
use crate::pool;
use crate::trace;
use candle_core::{DType, Device, Result, Tensor, bail};

/// Rows of the tables that are worth handing to another thread.
const ROWS: usize = 64;

/// Cosines and sines of `position * frequency`, `[positions, R / 2]` in f32 each, made as far as
/// they are needed (RoFormer, Su et al. 2021).
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::nn::RotaryEmbedding;
/// use candle_fused::ops::RopeStyle;
/// let rotary = RotaryEmbedding::with_theta(64, 1e4, 512, RopeStyle::HalfSplit, &Device::Cpu)?;
/// let q = Tensor::ones((1, 8, 3, 64), DType::F32, &Device::Cpu)?;
/// let k = Tensor::ones((1, 2, 3, 64), DType::F32, &Device::Cpu)?;
/// // Three tokens after 100 others.
/// let (q, k) = rotary.apply(&q, &k, 100)?;
/// # assert_eq!((q.dims(), k.dims()), (&[1, 8, 3, 64][..], &[1, 2, 3, 64][..]));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RotaryEmbedding {
    /// None where the tables were given.
    frequencies: Option<Vec<f32>>,
    /// What cosines and sines are multiplied by.
    magnitude: f32,
    long: Option<Long>,
    style: RopeStyle,
    cos: Tensor,
    sin: Tensor,
}

/// Other frequencies from a position on.
#[derive(Clone, Debug)]
struct Long {
    frequencies: Vec<f32>,
    from: usize,
    /// Of every position, for calls that reach past `from`.
    tables: Option<(Tensor, Tensor)>,
}

impl RotaryEmbedding {
    /// Tables for `frequencies`, one for each rotated pair of dimensions.
    pub fn new(frequencies: Vec<f32>, style: RopeStyle, device: &Device) -> Result<Self> {
        let (cos, sin) = tables(|_| &frequencies, 1., 0, device)?;
        Ok(Self {
            frequencies: Some(frequencies),
            magnitude: 1.,
            long: None,
            style,
            cos,
            sin,
        })
    }

    /// The same with other frequencies for calls that reach past position `from`, and with cosines and
    /// sines multiplied by `magnitude` (LongRoPE, Ding et al. 2024).
    pub(crate) fn with_long(self, frequencies: Vec<f32>, from: usize, magnitude: f32) -> Self {
        Self {
            magnitude,
            long: Some(Long {
                frequencies,
                from,
                tables: None,
            }),
            ..self
        }
    }

    /// Tables for `max_positions` with the frequencies `theta^(-2i / dims)`.
    ///
    /// * `dims`: dimensions of a head that are rotated, the first ones; all of them in most models
    /// * `theta`: `rope_theta` of the configuration
    ///
    /// # Errors
    /// If `dims` is not even, or `theta` is not a positive number.
    pub fn with_theta(
        dims: usize,
        theta: f32,
        max_positions: usize,
        style: RopeStyle,
        device: &Device,
    ) -> Result<Self> {
        if dims == 0 || !dims.is_multiple_of(2) {
            bail!("rotary embedding: dims is {dims}, expected an even number above 0");
        }
        if !(theta > 0. && theta.is_finite()) {
            bail!("rotary embedding: theta is {theta}, expected a positive number");
        }
        let frequencies = (0..dims)
            .step_by(2)
            .map(|i| 1f32 / theta.powf(i as f32 / dims as f32));
        let mut rotary = Self::new(frequencies.collect(), style, device)?;
        rotary.reserve(max_positions)?;
        Ok(rotary)
    }

    /// From tables that are there already, `[positions, R / 2]` each: a column for each pair, as
    /// `candle_nn::rotary_emb::rope` takes them. They are kept in f32 and do not grow.
    ///
    /// # Errors
    /// If the tables differ in shape or device, or are not two-dimensional.
    pub fn from_tables(cos: &Tensor, sin: &Tensor, style: RopeStyle) -> Result<Self> {
        if cos.rank() != 2 || sin.dims() != cos.dims() {
            bail!(
                "rotary embedding: cos has shape {:?} and sin {:?}, expected [positions, R / 2] twice",
                cos.shape(),
                sin.shape()
            );
        }
        if !sin.device().same_device(cos.device()) {
            bail!("rotary embedding: sin and cos are on different devices");
        }
        let table = |t: &Tensor| t.to_dtype(DType::F32)?.contiguous();
        Ok(Self {
            frequencies: None,
            magnitude: 1.,
            long: None,
            style,
            cos: table(cos)?,
            sin: table(sin)?,
        })
    }

    /// Queries and keys `[B, H, T, D]` rotated as the tokens at `offset..offset + T`, see
    /// [`rope`](fn@crate::ops::rope); by candle's own operations on a device that has no kernels here.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit, or the positions pass the tables.
    pub fn apply(&self, q: &Tensor, k: &Tensor, offset: usize) -> Result<(Tensor, Tensor)> {
        let rotation = self.rotation_of(offset, q.dims().get(2).copied().unwrap_or(0));
        let Some(why) = fallback(q.device()) else {
            return Ok((ops::rope(q, &rotation)?, ops::rope(k, &rotation)?));
        };
        let plain = |x: &Tensor| {
            ops::rope::check(x, &rotation)?;
            trace::record("rope", || format!("candle: {why}"));
            plain_rope(x, &rotation)
        };
        Ok((plain(q)?, plain(k)?))
    }

    /// What the ops rotate by, for tokens from `position` on.
    pub fn rotation(&self, position: usize) -> Rotation<'_> {
        Rotation {
            cos: &self.cos,
            sin: &self.sin,
            position,
            style: self.style,
        }
    }

    /// The same with the tables of a call whose `tokens` stand from `position` on.
    pub(crate) fn rotation_of(&self, position: usize, tokens: usize) -> Rotation<'_> {
        let (cos, sin) = self.tables_up_to(position.saturating_add(tokens));
        Rotation {
            cos,
            sin,
            ..self.rotation(position)
        }
    }

    /// Which dimensions form a pair.
    pub fn style(&self) -> RopeStyle {
        self.style
    }

    /// Makes the tables reach `positions`, by doubling.
    ///
    /// # Errors
    /// If the tables were given and end before.
    pub fn reserve(&mut self, positions: usize) -> Result<()> {
        let held = self.cos.dims()[0];
        if positions <= held {
            return Ok(());
        }
        let Some(frequencies) = &self.frequencies else {
            bail!("rotary embedding: position {positions} is past the {held} of the tables given");
        };
        let grown = positions.max(2 * held).max(256);
        let (magnitude, device) = (self.magnitude, self.cos.device().clone());
        let by_position = |position| match &self.long {
            Some(long) if position >= long.from => &long.frequencies[..],
            _ => frequencies,
        };
        let grown_tables = tables(by_position, magnitude, grown, &device)?;
        if let Some(long) = self.long.as_mut().filter(|long| grown > long.from) {
            long.tables = Some(tables(|_| &long.frequencies, magnitude, grown, &device)?);
        }
        (self.cos, self.sin) = grown_tables;
        Ok(())
    }

    /// The tables `(cos, sin)`, by position.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_fused::nn::RotaryEmbedding;
    /// use candle_fused::ops::RopeStyle;
    /// // Two rotated pairs of dimensions, one turning ten times as fast as the other.
    /// let mut rotary = RotaryEmbedding::new(vec![1., 0.1], RopeStyle::HalfSplit, &Device::Cpu)?;
    /// rotary.reserve(16)?;
    /// let (cos, sin) = rotary.tables();
    /// assert!(cos.dims()[0] >= 16 && cos.dims()[1] == 2);
    /// assert_eq!(cos.get(3)?.to_vec1::<f32>()?, [3f32.cos(), 0.3f32.cos()]);
    /// // Tables that are there already.
    /// let same = RotaryEmbedding::from_tables(cos, sin, rotary.style())?;
    /// assert_eq!(same.rotation(3).position, 3);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn tables(&self) -> (&Tensor, &Tensor) {
        (&self.cos, &self.sin)
    }

    /// Positions up to which a token's rotation does not depend on later ones.
    pub(crate) fn even_positions(&self) -> usize {
        self.long.as_ref().map_or(usize::MAX, |long| long.from)
    }

    /// Makes the rotation of a token independent of how many tokens come after it, for sequences of up to `positions`
    /// positions: if those pass the model's first context length, every token is rotated with the long frequencies,
    /// in short sequences too, as vLLM does.
    pub(crate) fn fix_frequencies(&mut self, positions: usize) -> Result<()> {
        if let Some(long) = self.long.take_if(|long| positions > long.from) {
            *self = Self {
                magnitude: self.magnitude,
                ..Self::new(long.frequencies, self.style, self.cos.device())?
            };
        }
        Ok(())
    }

    /// The tables of a call whose tokens come before position `end`: past a model's first context
    /// length, all of them turn by its long frequencies.
    pub(crate) fn tables_up_to(&self, end: usize) -> (&Tensor, &Tensor) {
        match &self.long {
            Some(Long {
                from,
                tables: Some((cos, sin)),
                ..
            }) if end > *from => (cos, sin),
            _ => self.tables(),
        }
    }
}

/// Tables of `positions`, each turned by its `frequencies`.
fn tables<'a>(
    frequencies: impl Fn(usize) -> &'a [f32] + Sync,
    magnitude: f32,
    positions: usize,
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    let width = frequencies(0).len();
    let [mut cos, mut sin] = [(); 2].map(|()| vec![0f32; positions * width]);
    pool::for_row_pairs(&mut cos, &mut sin, width.max(1), ROWS, |first, cos, sin| {
        let rows = cos.chunks_exact_mut(width).zip(sin.chunks_exact_mut(width));
        for (position, (cos, sin)) in (first..).zip(rows) {
            let frequencies = frequencies(position).iter();
            for (f, (cos, sin)) in frequencies.zip(cos.iter_mut().zip(sin)) {
                // The angle is rounded to f32, as in Hugging Face's tables; its cosine then is exact to
                // f32.
                let angle = f64::from(position as f32 * f);
                let of = |value: f64| (value * f64::from(magnitude)) as f32;
                (*cos, *sin) = (of(angle.cos()), of(angle.sin()));
            }
        }
    });
    let table = |values| Tensor::from_vec(values, (positions, width), device);
    Ok((table(cos)?, table(sin)?))
}
