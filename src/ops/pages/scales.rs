//! Pools of quantized keys and values.

use super::{PageLayout, PagePool, PoolSizes};
use crate::ops::view::float64;
use crate::quant::{KvCacheType, KvFormat};
use candle_core::{DType, Device, Result, Tensor, bail};

/// What makes codes in pages keys and values: a scale for each token and key/value head. Those of a head lie token by
/// token whatever the pool's layout is, so that they are read in few pieces.
#[derive(Clone, Debug)]
pub struct PageScales {
    /// What the codes stand for.
    pub format: KvFormat,
    /// Of keys: `[pages, Hkv, page]`, f32; the tokens of a head side by side, otherwise any strides.
    pub k: Tensor,
    /// Of values, as those of keys.
    pub v: Tensor,
}

impl PagePool {
    /// Pages of zeros: `pages` of `page` tokens, each with `kv_heads` heads of `dim` elements, in `dtype`.
    ///
    /// # Errors
    /// If memory is short.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_fused::ops::{PageLayout, PagePool};
    /// let pool = PagePool::zeros([8, 16, 2, 64], PageLayout::Nhd, DType::F16, &Device::Cpu)?;
    /// assert_eq!(pool.v.dims(), [8, 16, 2, 64]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn zeros(
        [pages, page, kv_heads, dim]: [usize; 4],
        layout: PageLayout,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let [a, b] = match layout {
            PageLayout::Nhd => [page, kv_heads],
            PageLayout::Hnd => [kv_heads, page],
        };
        Self::combined(
            &Tensor::zeros((pages, 2, a, b, dim), dtype, device)?,
            layout,
        )
    }

    /// The same for quantized keys and values.
    ///
    /// # Errors
    /// If memory is short.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_fused::ops::{PageLayout, PagePool};
    /// use candle_fused::quant::KvFormat;
    /// let pool = PagePool::quantized([8, 16, 2, 64], PageLayout::Hnd, KvFormat::Fp8, &Device::Cpu)?;
    /// assert_eq!((pool.k.dims(), pool.k.dtype()), (&[8, 2, 16, 64][..], DType::U8));
    /// assert_eq!(pool.scales.unwrap().k.dims(), [8, 2, 16]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn quantized(
        sizes: [usize; 4],
        layout: PageLayout,
        format: KvFormat,
        device: &Device,
    ) -> Result<Self> {
        let [pages, page, kv_heads, _] = sizes;
        let scales = || Tensor::zeros((pages, kv_heads, page), DType::F32, device);
        Ok(Self {
            scales: Some(PageScales {
                format,
                k: scales()?,
                v: scales()?,
            }),
            ..Self::zeros(sizes, layout, DType::U8, device)?
        })
    }

    /// Pages of zeros in what a cache is to keep, of a model that has keys and values in `model`.
    pub(crate) fn of_type(
        sizes: [usize; 4],
        layout: PageLayout,
        (kind, model): (KvCacheType, DType),
        device: &Device,
    ) -> Result<Self> {
        match kind.format() {
            Some(format) => Self::quantized(sizes, layout, format, device),
            None => Self::zeros(sizes, layout, kind.dtype(model), device),
        }
    }

    /// What keys and values are stored as, by name.
    pub(crate) fn stored_name(&self) -> String {
        match &self.scales {
            Some(scales) => scales.format.to_string(),
            None => self.k.dtype().as_str().to_owned(),
        }
    }

    /// What kernels are chosen by: a dtype, or what stands for codes of a format.
    #[cfg(feature = "cuda")]
    pub(crate) fn stored(&self) -> DType {
        let format = self.scales.as_ref().map(|scales| scales.format);
        format.map_or(self.k.dtype(), KvFormat::stored)
    }

    /// All tensors by name.
    pub(crate) fn named(&self) -> Vec<(&'static str, &Tensor)> {
        let mut all = vec![("pool.k", &self.k), ("pool.v", &self.v)];
        if let Some(scales) = &self.scales {
            all.extend([("pool.scales.k", &scales.k), ("pool.scales.v", &scales.v)]);
        }
        all
    }

    /// Each tensor with its strides from page to page, token to token and head to head, and its sizes: scales are heads
    /// of one element.
    pub(crate) fn parts(&self, sizes: PoolSizes) -> Vec<(&Tensor, [usize; 3], PoolSizes)> {
        let rows = [&self.k, &self.v].map(|t| (t, self.strides(t), sizes));
        let of_one = PoolSizes { dim: 1, ..sizes };
        let scales = self.scales.iter().flat_map(|s| [&s.k, &s.v]);
        let scales = scales.map(|t| (t, scale_strides(t), of_one));
        rows.into_iter().chain(scales).collect()
    }

    /// Fails if the scales do not fit a pool of these sizes.
    pub(super) fn check_scales(&self, op: &str, sizes: PoolSizes) -> Result<()> {
        let Some(scales) = &self.scales else {
            return Ok(());
        };
        let PoolSizes {
            pages,
            page,
            kv_heads,
            ..
        } = sizes;
        for (name, t) in [("pool.scales.k", &scales.k), ("pool.scales.v", &scales.v)] {
            if t.dims() != [pages, kv_heads, page] || t.dtype() != DType::F32 {
                bail!(
                    "{op}: {name} is {:?} {:?}, expected F32 [pages, Hkv, page] = [{pages}, {kv_heads}, {page}]",
                    t.dtype(),
                    t.dims()
                );
            }
            if page > 1 && t.stride()[2] != 1 {
                bail!("{op}: the tokens of a head of {name} have to lie side by side");
            }
            if !t.device().same_device(self.k.device()) {
                bail!("{op}: {name} is on another device than pool.k");
            }
        }
        Ok(())
    }

    /// Keys, or values, as numbers in the order of the pool's dimensions, wherever they are.
    pub(crate) fn numbers(&self, values: bool) -> Result<Vec<f64>> {
        let t = if values { &self.v } else { &self.k };
        let Some(scales) = &self.scales else {
            return float64(t);
        };
        let codes = t.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<u8>()?;
        let of_rows = float64(if values { &scales.v } else { &scales.k })?;
        let (_, kv_heads, page) = scales.k.dims3()?;
        let dim = t.dims()[3].max(1);
        let scale = |row: usize| match self.layout {
            PageLayout::Hnd => of_rows[row],
            PageLayout::Nhd => {
                let (token, head) = (row / kv_heads, row % kv_heads);
                of_rows[(token / page * kv_heads + head) * page + token % page]
            }
        };
        let numbers = codes
            .chunks_exact(dim)
            .enumerate()
            .flat_map(|(row, codes)| {
                let (scale, format) = (scale(row), scales.format);
                codes
                    .iter()
                    .map(move |code| scale * f64::from(format.value(*code)))
            });
        Ok(numbers.collect())
    }
}

/// Scales from page to page, token to token and head to head.
pub(crate) fn scale_strides(t: &Tensor) -> [usize; 3] {
    let s = t.stride();
    [s[0], s[2], s[1]]
}
