//! Attention over pages against float64.

mod batch_invariant;
mod quantized;

use crate::pages::{FORMS, Form, lengths, pool, quantized, rows, table, there};
use crate::support::{devices, randn, values, widest_error};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::paged_attention::{PagedAttention, paged_attention, reference};
use candle_fused::ops::{AttentionParams, PageLayout, PagePool, PageTable, flash_attention};
use candle_fused::quant::KvFormat;

/// Shapes, types and features of one case.
#[derive(Clone, Copy, Debug)]
struct Case {
    form: Form,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    page: usize,
    queries: usize,
    dtype: DType,
    pool: DType,
    codes: Option<KvFormat>,
    window: Option<usize>,
    softcap: Option<f32>,
    alibi: bool,
    shared: bool,
    batch_invariant: bool,
}

const CASE: Case = Case {
    form: FORMS[0],
    heads: 8,
    kv_heads: 2,
    dim: 64,
    page: 16,
    queries: 1,
    dtype: DType::F32,
    pool: DType::F32,
    codes: None,
    window: None,
    softcap: None,
    alibi: false,
    shared: false,
    batch_invariant: false,
};

impl Case {
    fn limit(&self) -> f64 {
        match (self.dtype, self.pool) {
            // Tensor cores take queries and weights as two f16 each.
            (DType::F32, DType::F32) if self.codes.is_some() => 1e-5,
            (DType::F32, DType::F32) => 4e-6,
            (DType::BF16, _) | (_, DType::BF16) => 1.6e-2,
            _ => 2e-3,
        }
    }

    fn params(&self, slopes: &Tensor, device: &Device) -> Result<PagedAttention> {
        Ok(PagedAttention {
            scale: 1. / (self.dim as f32).sqrt(),
            window: self.window,
            softcap: self.softcap,
            alibi_slopes: self.alibi.then(|| slopes.to_device(device)).transpose()?,
            batch_invariant: self.batch_invariant,
        })
    }

    /// Holds the result for sequences of these lengths against the reference.
    fn check(&self, device: &Device, lengths: &[usize]) -> Result<()> {
        let pages = lengths.iter().map(|n| n.div_ceil(self.page)).sum::<usize>() + 2;
        let all = pool(
            self.form,
            [pages, self.page, self.kv_heads, self.dim],
            self.pool,
        )?;
        let all = match self.codes {
            Some(format) => quantized(&all, self.form, format)?,
            None => all,
        };
        let rows = rows(lengths, [pages, self.page], self.shared, 7);
        let on = |device: &Device| table(self.form, &rows, lengths, self.page, device);
        let dims = [lengths.len(), self.queries, self.heads, self.dim];
        let q = randn(&dims, self.dtype)?;
        let slopes = (randn(&[self.heads], DType::F32)?.abs()? * 0.1)?;
        let params = |device: &Device| self.params(&slopes, device);
        let expected = reference(&q, &all, &on(&Device::Cpu)?, &params(&Device::Cpu)?)?;
        let got = paged_attention(
            &q.to_device(device)?,
            &there(&all, self.form, device)?,
            &on(device)?,
            &params(device)?,
        )?;
        assert_eq!((got.dims(), got.dtype()), (&dims[..], self.dtype));
        let error = widest_error(&got, &expected)?;
        assert!(
            error < self.limit(),
            "{self:?} over {lengths:?} on {device:?}: {error:e}"
        );
        Ok(())
    }
}

/// Dtypes of queries, each with one of the pools.
const DTYPES: [(DType, DType); 7] = [
    (DType::F32, DType::F32),
    (DType::F16, DType::F16),
    (DType::BF16, DType::BF16),
    (DType::F32, DType::F16),
    (DType::F32, DType::BF16),
    (DType::BF16, DType::F16),
    (DType::F16, DType::F32),
];

const LENGTHS: [usize; 8] = [5, 0, 1, 130, 64, 16, 333, 48];

#[test]
fn every_dtype_and_form() -> Result<()> {
    for device in devices() {
        for (dtype, pool) in DTYPES {
            for form in FORMS {
                for queries in [1, 3] {
                    let case = Case {
                        dtype,
                        pool,
                        form,
                        queries,
                        ..CASE
                    };
                    case.check(&device, &LENGTHS)?;
                    case.check(&device, &[700])?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn every_head_size_and_grouping() -> Result<()> {
    for device in devices() {
        for dim in [16, 64, 72, 80, 96, 128, 192, 256] {
            for (heads, kv_heads) in [(1, 1), (4, 2), (14, 2), (24, 1), (32, 8)] {
                for dtype in [DType::F32, DType::BF16] {
                    let case = Case {
                        heads,
                        kv_heads,
                        dim,
                        dtype,
                        pool: dtype,
                        form: FORMS[dim / 16 % 4],
                        ..CASE
                    };
                    case.check(&device, &[149, 17])?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn every_number_of_queries_and_page_size() -> Result<()> {
    for device in devices() {
        for queries in [1, 2, 4, 5, 8, 16] {
            for page in [1, 8, 16, 20, 64, 128] {
                for dtype in [DType::F32, DType::F16] {
                    for dim in [64, 128, 256] {
                        let case = Case {
                            queries,
                            page,
                            dtype,
                            pool: dtype,
                            dim,
                            form: FORMS[queries % 4],
                            ..CASE
                        };
                        case.check(&device, &[9, 3, 200, 0, 16])?;
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn windows_softcap_slopes_and_shared_pages() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16] {
            for queries in [1, 6] {
                let case = Case {
                    dtype,
                    pool: dtype,
                    queries,
                    shared: true,
                    form: FORMS[queries % 4],
                    ..CASE
                };
                case.check(&device, &LENGTHS)?;
                for window in [1, 2, 17, 100, 5000, (1 << 32) + 1, usize::MAX] {
                    let window = Some(window);
                    Case { window, ..case }.check(&device, &LENGTHS)?;
                }
                let softcap = Some(3.);
                Case { softcap, ..case }.check(&device, &LENGTHS)?;
                Case {
                    alibi: true,
                    ..case
                }
                .check(&device, &LENGTHS)?;
                let all = Case {
                    alibi: true,
                    softcap,
                    window: Some(40),
                    ..case
                };
                all.check(&device, &LENGTHS)?;
            }
        }
    }
    Ok(())
}

#[test]
fn long_sequences_beside_short_ones() -> Result<()> {
    for device in devices() {
        for (dim, dtype) in [(64, DType::F16), (128, DType::BF16), (64, DType::F32)] {
            let case = Case {
                dim,
                dtype,
                pool: dtype,
                form: FORMS[2],
                ..CASE
            };
            case.check(&device, &[9000])?;
            case.check(&device, &[3, 5000, 0, 1, 700])?;
            case.check(&device, &lengths(150, 60, 3))?;
        }
    }
    Ok(())
}

/// Pages in order are a cache as `flash_attention` takes it.
#[test]
fn pages_in_order_are_a_cache() -> Result<()> {
    for device in devices() {
        let cache = randn(&[2, 40, 2, 64], DType::F32)?.to_device(&device)?;
        let pages = cache.unsqueeze(1)?.reshape((1, 2, 40, 2, 64))?;
        let pool = PagePool {
            k: pages.squeeze(0)?.narrow(0, 0, 1)?.reshape((5, 8, 2, 64))?,
            v: pages.squeeze(0)?.narrow(0, 1, 1)?.reshape((5, 8, 2, 64))?,
            layout: PageLayout::Nhd,
            scales: None,
        };
        let table = PageTable::Padded {
            block_table: Tensor::new(&[[0u32, 1, 2, 3, 4]], &device)?,
            lengths: Tensor::new(&[37u32], &device)?,
        };
        let q = randn(&[1, 3, 4, 64], DType::F32)?.to_device(&device)?;
        let ours = paged_attention(&q, &pool, &table, &PagedAttention::default())?;
        let kv = |i| cache.narrow(0, i, 1)?.narrow(1, 0, 37)?.transpose(1, 2);
        let params = AttentionParams {
            causal: true,
            ..Default::default()
        };
        let theirs = flash_attention(&q.transpose(1, 2)?, &kv(0)?, &kv(1)?, &params)?;
        let theirs = values(&theirs.transpose(1, 2)?)?;
        assert!(widest_error(&ours, &theirs)? < 2e-5);
    }
    Ok(())
}

/// Queries may be a part of a projection.
#[test]
fn queries_are_read_where_they_lie() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::F16] {
            let all = pool(FORMS[0], [6, 16, 2, 64], dtype)?;
            let lengths = [33, 40];
            let rows = rows(&lengths, [6, 16], false, 1);
            let table = |device| table(FORMS[0], &rows, &lengths, 16, device);
            let qkv = randn(&[2, 1, 8, 64], dtype)?;
            let params = PagedAttention::default();
            let view = |t: &Tensor| t.narrow(2, 1, 4);
            let expected = reference(&view(&qkv)?, &all, &table(&Device::Cpu)?, &params)?;
            let q = view(&qkv.to_device(&device)?)?;
            let on = there(&all, FORMS[0], &device)?;
            let got = paged_attention(&q, &on, &table(&device)?, &params)?;
            assert!(widest_error(&got, &expected)? < 2e-3);
        }
    }
    Ok(())
}

/// A row of two pages of 8 tokens for one sequence.
fn row(entries: &[u32], length: u32) -> Result<PageTable> {
    Ok(PageTable::Padded {
        block_table: Tensor::new(entries, &Device::Cpu)?.unsqueeze(0)?,
        lengths: Tensor::new(&[length], &Device::Cpu)?,
    })
}

fn said(q: &Tensor, pool: &PagePool, table: &PageTable, params: &PagedAttention) -> String {
    let result = paged_attention(q, pool, table, params);
    result.map(drop).expect_err("an error").to_string()
}

#[test]
fn bad_tensors_are_named() -> Result<()> {
    let all = pool(FORMS[1], [4, 8, 2, 16], DType::F32)?;
    let good = row(&[1, 2], 16)?;
    let q = randn(&[1, 1, 4, 16], DType::F32)?;
    let params = PagedAttention::default();
    paged_attention(&q, &all, &good, &params)?;
    let error = said(&q, &all, &row(&[1, 4], 16)?, &params);
    assert!(error.contains("page 1 of sequence 0 is 4"), "{error}");
    // What is not seen is not read.
    paged_attention(&q, &all, &row(&[1, 4], 8)?, &params)?;
    let narrow = PagedAttention {
        window: Some(8),
        ..params.clone()
    };
    paged_attention(&q, &all, &row(&[4, 1], 16)?, &narrow)?;
    assert!(said(&q, &all, &row(&[1, 2], 17)?, &params).contains("lengths[0] is 17"));
    assert!(said(&q.narrow(2, 0, 3)?, &all, &good, &params).contains("q has 3 heads"));
    assert!(said(&q.narrow(3, 0, 8)?, &all, &good, &params).contains("heads of 8"));
    assert!(said(&q.squeeze(0)?, &all, &good, &params).contains("[B, T, Hq, D]"));
    let two = Tensor::cat(&[&q, &q], 0)?;
    assert!(said(&two, &all, &good, &params).contains("the table has 1 sequences"));
    let mut other = all.clone();
    other.v = other.v.narrow(0, 0, 3)?;
    assert!(said(&q, &other, &good, &params).contains("pool.v is"));
    let csr = |last: u32, end: u32| {
        Ok::<_, candle_core::Error>(PageTable::Csr {
            indptr: Tensor::new(&[0, end], &Device::Cpu)?,
            indices: Tensor::new(&[0u32, 1], &Device::Cpu)?,
            last_page_len: Tensor::new(&[last], &Device::Cpu)?,
        })
    };
    paged_attention(&q, &all, &csr(8, 2)?, &params)?;
    assert!(said(&q, &all, &csr(1, 3)?, &params).contains("indptr has 0..3"));
    assert!(said(&q, &all, &csr(9, 2)?, &params).contains("last_page_len[0] is 9"));
    Ok(())
}

#[test]
fn bad_parameters_are_named() -> Result<()> {
    let all = pool(FORMS[1], [4, 8, 2, 16], DType::F32)?;
    let good = row(&[1, 2], 16)?;
    let q = randn(&[1, 1, 4, 16], DType::F32)?;
    let params = PagedAttention::default;
    for (params, part) in [
        (
            PagedAttention {
                window: Some(0),
                ..params()
            },
            "window is 0",
        ),
        (
            PagedAttention {
                softcap: Some(-1.),
                ..params()
            },
            "softcap is -1",
        ),
        (
            PagedAttention {
                scale: f32::NAN,
                ..params()
            },
            "scale is NaN",
        ),
        (
            PagedAttention {
                alibi_slopes: Some(randn(&[3], DType::F32)?),
                ..params()
            },
            "alibi_slopes has shape [3]",
        ),
    ] {
        let error = said(&q, &all, &good, &params);
        assert!(error.contains(part), "{error}");
    }
    Ok(())
}

/// On a GPU nobody knows the table before the kernel: what is not in the pool is not seen.
#[test]
fn pages_that_are_not_there_are_not_seen() -> Result<()> {
    for device in devices().into_iter().filter(Device::is_cuda) {
        for dtype in [DType::F32, DType::F16] {
            let all = pool(FORMS[0], [4, 16, 2, 64], dtype)?;
            let on = there(&all, FORMS[0], &device)?;
            let q = randn(&[2, 1, 8, 64], dtype)?;
            let params = PagedAttention {
                scale: 0.125,
                ..Default::default()
            };
            let table = |first: &[u32; 4], lengths: [u32; 2], device: &Device| {
                Ok::<_, candle_core::Error>(PageTable::Padded {
                    block_table: Tensor::new(&[*first, [0, 1, 2, 3]], device)?,
                    lengths: Tensor::new(&lengths, device)?,
                })
            };
            let whole = table(&[3, 1, 0, 0], [32, 64], &Device::Cpu)?;
            let expected = reference(&q, &all, &whole, &params)?;
            // A hole behind the first page and one before the second; a length past the table.
            let holes = table(&[3, u32::MAX, 4, 1], [64, 70], &device)?;
            let got = paged_attention(&q.to_device(&device)?, &on, &holes, &params)?;
            assert!(widest_error(&got, &expected)? < 2e-3);
            let csr = PageTable::Csr {
                indptr: Tensor::new(&[0u32, 2, 7], &device)?,
                indices: Tensor::new(&[3u32, 1, 0, 1, 2, 3], &device)?,
                last_page_len: Tensor::new(&[16u32, 99], &device)?,
            };
            let got = paged_attention(&q.to_device(&device)?, &on, &csr, &params)?;
            assert!(widest_error(&got, &expected)? < 2e-3);
        }
    }
    Ok(())
}
