//! Pools of pages with random keys and values, as floats or as codes.

use crate::place::Place;
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::{PageLayout, PagePool, PageScales};
use candle_fused::quant::KvFormat;

/// What a pool is stored as.
#[derive(Clone, Copy, Debug)]
pub enum Stored {
    Floats(DType),
    Codes(KvFormat),
}

impl Stored {
    /// Bytes of a head of a token, keys or values.
    pub fn row(self, dim: usize) -> usize {
        match self {
            Stored::Floats(dtype) => dim * dtype.size_in_bytes(),
            Stored::Codes(_) => dim + size_of::<f32>(),
        }
    }

    pub fn name(self) -> String {
        match self {
            Stored::Floats(dtype) => dtype.as_str().to_owned(),
            Stored::Codes(format) => format.to_string(),
        }
    }

    /// `[pages, page, kv_heads, dim]`, the heads of a token side by side.
    pub fn pool(self, place: &Place, dims: [usize; 4]) -> Result<PagePool> {
        let (mut pool, format) = match self {
            Stored::Floats(dtype) => {
                let float = || place.x(&dims, dtype);
                return Ok(PagePool {
                    k: float()?,
                    v: float()?,
                    layout: PageLayout::Nhd,
                    scales: None,
                });
            }
            Stored::Codes(format) => {
                let empty = PagePool::quantized(dims, PageLayout::Nhd, format, &place.device)?;
                (empty, format)
            }
        };
        let [pages, page, heads, dim] = dims;
        // Rows are quantized on the host, a part of them again and again.
        const ROWS: usize = 4099;
        let rows = place.x(&[ROWS, dim], DType::F32)?.to_device(&Device::Cpu)?;
        let rows = rows.flatten_all()?.to_vec1::<f32>()?;
        let mut codes = vec![0; ROWS * dim];
        let of_rows = rows.chunks_exact(dim).zip(codes.chunks_exact_mut(dim));
        let scales: Vec<f32> = of_rows.map(|(x, own)| format.quantize(x, own)).collect();
        let tensors = |skip: usize| -> Result<(Tensor, Tensor)> {
            let count = pages * page * heads;
            let all: Vec<u8> = codes
                .iter()
                .cycle()
                .skip(skip * dim)
                .take(count * dim)
                .copied()
                .collect();
            let scales: Vec<f32> = scales
                .iter()
                .cycle()
                .skip(skip)
                .take(count)
                .copied()
                .collect();
            Ok((
                Tensor::from_vec(all, &dims, &place.device)?,
                Tensor::from_vec(scales, (pages, heads, page), &place.device)?,
            ))
        };
        let ((k, k_scales), (v, v_scales)) = (tensors(0)?, tensors(7)?);
        (pool.k, pool.v) = (k, v);
        pool.scales = Some(PageScales {
            format,
            k: k_scales,
            v: v_scales,
        });
        Ok(pool)
    }
}

/// The same in memory of its own.
pub fn copied(pool: &PagePool) -> Result<PagePool> {
    let scales = |scales: &PageScales| {
        Ok::<_, candle_core::Error>(PageScales {
            format: scales.format,
            k: scales.k.copy()?,
            v: scales.v.copy()?,
        })
    };
    Ok(PagePool {
        k: pool.k.copy()?,
        v: pool.v.copy()?,
        layout: pool.layout,
        scales: pool.scales.as_ref().map(scales).transpose()?,
    })
}

/// One head of the pages `ids`, on the CPU.
pub fn head(pool: &PagePool, head: usize, ids: &Tensor) -> Result<PagePool> {
    let own = |t: &Tensor, dim: usize| {
        let head = t.narrow(dim, head, 1)?.contiguous()?;
        head.index_select(ids, 0)?.to_device(&Device::Cpu)
    };
    let scales = |scales: &PageScales| {
        Ok::<_, candle_core::Error>(PageScales {
            format: scales.format,
            k: own(&scales.k, 1)?,
            v: own(&scales.v, 1)?,
        })
    };
    Ok(PagePool {
        k: own(&pool.k, 2)?,
        v: own(&pool.v, 2)?,
        layout: pool.layout,
        scales: pool.scales.as_ref().map(scales).transpose()?,
    })
}
