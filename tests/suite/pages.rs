//! Pools of pages and tables for the tests of the paged ops.

use crate::support::randn;
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::{PageLayout, PagePool, PageScales, PageTable};
use candle_fused::quant::KvFormat;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};

/// How a pool lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    pub layout: PageLayout,
    /// Keys and values in one tensor.
    pub combined: bool,
    /// A CSR table, or else a padded one.
    pub csr: bool,
}

pub const FORMS: [Form; 4] = [
    Form {
        layout: PageLayout::Nhd,
        combined: false,
        csr: true,
    },
    Form {
        layout: PageLayout::Hnd,
        combined: false,
        csr: false,
    },
    Form {
        layout: PageLayout::Nhd,
        combined: true,
        csr: false,
    },
    Form {
        layout: PageLayout::Hnd,
        combined: true,
        csr: true,
    },
];

/// Pages, tokens of a page, key/value heads, head size.
pub type Sizes = [usize; 4];

/// A pool of standard normal values on the CPU.
pub fn pool(form: Form, sizes: Sizes, dtype: DType) -> Result<PagePool> {
    pool_of(form, sizes, |dims| randn(dims, dtype))
}

/// A pool that `draw` gives the values of.
pub fn pool_of(
    form: Form,
    [pages, page, heads, dim]: Sizes,
    draw: impl Fn(&[usize]) -> Result<Tensor>,
) -> Result<PagePool> {
    let [a, b] = match form.layout {
        PageLayout::Nhd => [page, heads],
        PageLayout::Hnd => [heads, page],
    };
    if form.combined {
        return PagePool::combined(&draw(&[pages, 2, a, b, dim])?, form.layout);
    }
    Ok(PagePool {
        k: draw(&[pages, a, b, dim])?,
        v: draw(&[pages, a, b, dim])?,
        layout: form.layout,
        scales: None,
    })
}

/// A pool of floats as codes of a format, head by head as they are appended, on the CPU.
pub fn quantized(pool: &PagePool, form: Form, format: KvFormat) -> Result<PagePool> {
    let one = |t: &Tensor| {
        let ((pages, a, b, dim), dims) = (t.dims4()?, t.dims());
        let rows = t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        let mut codes = vec![0; rows.len()];
        let of_rows = rows.chunks_exact(dim).zip(codes.chunks_exact_mut(dim));
        let scales: Vec<_> = of_rows
            .map(|(row, own)| format.quantize(row, own))
            .collect();
        let scales = Tensor::from_vec(scales, (pages, a, b), &Device::Cpu)?;
        let scales = match form.layout {
            PageLayout::Nhd => scales.transpose(1, 2)?.contiguous()?,
            PageLayout::Hnd => scales,
        };
        Ok::<_, candle_core::Error>((Tensor::from_vec(codes, dims, &Device::Cpu)?, scales))
    };
    let ((k, k_scales), (v, v_scales)) = (one(&pool.k)?, one(&pool.v)?);
    let scales = PageScales {
        format,
        k: k_scales,
        v: v_scales,
    };
    let pool = PagePool {
        k,
        v,
        layout: form.layout,
        scales: Some(scales),
    };
    there(&pool, form, &Device::Cpu)
}

/// Keys and values of a pool as floats in its own order, on the CPU.
pub fn numbers(pool: &PagePool) -> Result<[Tensor; 2]> {
    let Some(PageScales { format, k, v }) = &pool.scales else {
        return Ok([pool.k.clone(), pool.v.clone()]);
    };
    let one = |t: &Tensor, scales: &Tensor| {
        let (codes, cpu) = (t.to_device(&Device::Cpu)?.flatten_all()?, Device::Cpu);
        let codes = codes.to_vec1::<u8>()?.into_iter();
        let codes = Tensor::from_iter(codes.map(|code| format.value(code)), &cpu)?;
        let scales = scales.to_device(&cpu)?;
        let scales = match pool.layout {
            PageLayout::Nhd => scales.transpose(1, 2)?,
            PageLayout::Hnd => scales,
        };
        codes
            .reshape(t.dims())?
            .broadcast_mul(&scales.unsqueeze(3)?)
    };
    Ok([one(&pool.k, k)?, one(&pool.v, v)?])
}

/// The same on a device, in tensors of its own and in one storage if it was.
pub fn there(pool: &PagePool, form: Form, device: &Device) -> Result<PagePool> {
    let copy = |t: &Tensor| t.copy()?.contiguous()?.to_device(device)?.copy();
    let scales = |scales: &PageScales| {
        Ok::<_, candle_core::Error>(PageScales {
            format: scales.format,
            k: copy(&scales.k)?,
            v: copy(&scales.v)?,
        })
    };
    let scales = pool.scales.as_ref().map(scales).transpose()?;
    if form.combined {
        let both = Tensor::stack(&[copy(&pool.k)?, copy(&pool.v)?], 1)?;
        let pool = PagePool::combined(&both, form.layout)?;
        return Ok(PagePool { scales, ..pool });
    }
    Ok(PagePool {
        k: copy(&pool.k)?,
        v: copy(&pool.v)?,
        layout: form.layout,
        scales,
    })
}

/// Pages of sequences of these lengths, in any order. `shared`: every other sequence has the first whole pages of the
/// one before it, as far as both have some.
pub fn rows(
    lengths: &[usize],
    [pages, page]: [usize; 2],
    shared: bool,
    seed: u64,
) -> Vec<Vec<u32>> {
    let mut free: Vec<u32> = (0..pages as u32).collect();
    free.shuffle(&mut StdRng::seed_from_u64(seed));
    let mut rows: Vec<Vec<u32>> = Vec::new();
    for (b, length) in lengths.iter().enumerate() {
        let mut row = Vec::new();
        if shared && b % 2 == 1 {
            let both = length.min(&lengths[b - 1]) / page;
            row.extend(&rows[b - 1][..both]);
        }
        while row.len() < length.div_ceil(page) {
            row.push(free.pop().expect("pages enough"));
        }
        rows.push(row);
    }
    rows
}

/// A table of these rows on a device. Entries that nothing may read are no pages.
pub fn table(
    form: Form,
    rows: &[Vec<u32>],
    lengths: &[usize],
    page: usize,
    device: &Device,
) -> Result<PageTable> {
    let vector = |values: Vec<u32>| {
        let values = if values.is_empty() {
            vec![u32::MAX]
        } else {
            values
        };
        Tensor::new(values, device)
    };
    if form.csr {
        let mut indptr = vec![0];
        for row in rows {
            indptr.push(indptr[indptr.len() - 1] + row.len() as u32);
        }
        let last = |length: &usize| match length {
            0 => u32::MAX,
            _ => ((length - 1) % page + 1) as u32,
        };
        return Ok(PageTable::Csr {
            indptr: vector(indptr)?,
            indices: vector(rows.concat())?,
            last_page_len: vector(lengths.iter().map(last).collect())?,
        });
    }
    let width = rows.iter().map(Vec::len).max().unwrap_or(0) + 1;
    let padded = rows.iter().flat_map(|row| {
        let behind = std::iter::repeat_n(u32::MAX, width - row.len());
        row.iter().copied().chain(behind)
    });
    let entries = padded.collect::<Vec<_>>();
    Ok(PageTable::Padded {
        block_table: vector(entries)?.reshape((rows.len(), width))?,
        lengths: vector(lengths.iter().map(|n| *n as u32).collect())?,
    })
}

/// Random lengths up to `most`, among them none and one.
pub fn lengths(sequences: usize, most: usize, seed: u64) -> Vec<usize> {
    let rng = &mut StdRng::seed_from_u64(seed);
    let draw = |b: usize| match b {
        1 => 0,
        2 => 1,
        _ => rng.random_range(0..=most),
    };
    (0..sequences).map(draw).collect()
}
