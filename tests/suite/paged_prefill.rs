//! Attention of ragged queries over pages against float64.

mod batch_invariant;
mod quantized;

use crate::pages::{FORMS, Form, pool, quantized, rows, table, there};
use crate::support::{devices, randn, values, widest_error};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::paged_prefill::{paged_prefill, reference};
use candle_fused::ops::{
    AttentionParams, PageTable, PagedAttention, RaggedBatch, RaggedQueries, flash_attention_varlen,
};
use candle_fused::quant::KvFormat;

/// Shapes, types and features of one case.
#[derive(Clone, Copy, Debug)]
struct Case {
    form: Form,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    page: usize,
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
    dtype: DType::F32,
    pool: DType::F32,
    codes: None,
    window: None,
    softcap: None,
    alibi: false,
    shared: false,
    batch_invariant: false,
};

/// Queries and tokens of each sequence: a whole prompt, a chunk behind others, a single token, none of a sequence, an
/// empty sequence, and more queries than tokens.
const BATCH: [[usize; 2]; 7] = [
    [70, 70],
    [33, 200],
    [1, 150],
    [0, 40],
    [0, 0],
    [1, 1],
    [5, 3],
];

/// The queries of a batch, whose first row is `before`.
fn queries(batch: &[[usize; 2]], before: usize, device: &Device) -> Result<RaggedQueries> {
    let mut ends = vec![before as u32];
    for [queries, _] in batch {
        ends.push(ends[ends.len() - 1] + *queries as u32);
    }
    Ok(RaggedQueries {
        cu_seqlens_q: Tensor::new(ends, device)?,
        max_seqlen_q: batch.iter().map(|[queries, _]| *queries).max().unwrap_or(0),
    })
}

impl Case {
    fn limit(&self) -> f64 {
        match (self.dtype, self.pool) {
            (DType::F32, DType::F32) => 4e-6,
            (DType::BF16, _) | (_, DType::BF16) => 1.6e-2,
            _ => 2e-3,
        }
    }

    /// Holds the result for a batch, with rows before and behind it that are no queries, against the reference.
    fn check(&self, device: &Device, batch: &[[usize; 2]]) -> Result<()> {
        let lengths: Vec<_> = batch.iter().map(|[_, tokens]| *tokens).collect();
        let pages = lengths.iter().map(|n| n.div_ceil(self.page)).sum::<usize>() + 2;
        let sizes = [pages, self.page, self.kv_heads, self.dim];
        let all = pool(self.form, sizes, self.pool)?;
        let all = match self.codes {
            Some(format) => quantized(&all, self.form, format)?,
            None => all,
        };
        let rows = rows(&lengths, [pages, self.page], self.shared, 11);
        let on = |device: &Device| table(self.form, &rows, &lengths, self.page, device);
        let total: usize = batch.iter().map(|[queries, _]| queries).sum();
        let dims = [total + 5, self.heads, self.dim];
        let q = randn(&dims, self.dtype)?;
        let slopes = (randn(&[self.heads], DType::F32)?.abs()? * 0.1)?;
        let params = |device: &Device| {
            Ok::<_, candle_core::Error>(PagedAttention {
                scale: 1. / (self.dim as f32).sqrt(),
                window: self.window,
                softcap: self.softcap,
                alibi_slopes: self.alibi.then(|| slopes.to_device(device)).transpose()?,
                batch_invariant: self.batch_invariant,
            })
        };
        let cpu = &Device::Cpu;
        let asked = queries(batch, 2, cpu)?;
        let expected = reference(&q, &all, &on(cpu)?, &asked, &params(cpu)?)?;
        let got = paged_prefill(
            &q.to_device(device)?,
            &there(&all, self.form, device)?,
            &on(device)?,
            &queries(batch, 2, device)?,
            &params(device)?,
        )?;
        assert_eq!((got.dims(), got.dtype()), (&dims[..], self.dtype));
        let error = widest_error(&got, &expected)?;
        assert!(
            error < self.limit(),
            "{self:?} over {batch:?} on {device:?}: {error:e}"
        );
        Ok(())
    }
}

#[test]
fn every_dtype_and_form() -> Result<()> {
    use DType::{BF16, F16, F32};
    for device in devices() {
        for (dtype, pool) in [
            (F32, F32),
            (F16, F16),
            (BF16, BF16),
            (F32, F16),
            (F32, BF16),
            (BF16, F16),
        ] {
            for form in FORMS {
                let case = Case {
                    dtype,
                    pool,
                    form,
                    ..CASE
                };
                case.check(&device, &BATCH)?;
                case.check(&device, &[[3, 3], [1, 20]])?;
            }
        }
    }
    Ok(())
}

#[test]
fn every_head_size_and_grouping() -> Result<()> {
    for device in devices() {
        for dim in [16, 64, 72, 80, 96, 128, 256] {
            for (heads, kv_heads) in [(1, 1), (14, 2), (32, 8)] {
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
                    case.check(&device, &[[40, 90], [1, 17]])?;
                }
            }
        }
    }
    Ok(())
}

/// Pages narrower and wider than a kernel's tile, and such that it cannot copy whole.
#[test]
fn every_page_size() -> Result<()> {
    for device in devices() {
        for page in [1, 4, 8, 16, 20, 32, 64, 128, 256] {
            for dim in [64, 80, 128, 256] {
                for dtype in [DType::F16, DType::BF16] {
                    let case = Case {
                        page,
                        dtype,
                        pool: dtype,
                        dim,
                        form: FORMS[dim / 64 % 4],
                        ..CASE
                    };
                    case.check(&device, &[[50, 300], [90, 90], [1, 33]])?;
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
            let case = Case {
                dtype,
                pool: dtype,
                shared: true,
                form: FORMS[1],
                ..CASE
            };
            case.check(&device, &BATCH)?;
            for window in [1, 17, 100, 5000] {
                let window = Some(window);
                Case { window, ..case }.check(&device, &BATCH)?;
            }
            let softcap = Some(3.);
            Case { softcap, ..case }.check(&device, &BATCH)?;
            let all = Case {
                alibi: true,
                softcap,
                window: Some(40),
                ..case
            };
            all.check(&device, &BATCH)?;
        }
    }
    Ok(())
}

#[test]
fn long_prompts_beside_single_tokens() -> Result<()> {
    let mut batch = vec![[600, 600], [257, 2000]];
    batch.extend((0..30).map(|i| [1, 40 * i + 1]));
    for device in devices() {
        for (dim, dtype) in [(64, DType::F16), (128, DType::BF16)] {
            let case = Case {
                dim,
                dtype,
                pool: dtype,
                form: FORMS[2],
                ..CASE
            };
            case.check(&device, &batch)?;
        }
    }
    Ok(())
}

/// Pages in order are keys as `flash_attention_varlen` takes them.
#[test]
fn pages_in_order_are_a_ragged_batch() -> Result<()> {
    let batch = [[48, 48], [7, 32]];
    for device in devices() {
        for dtype in [DType::F32, DType::F16] {
            let form = FORMS[0];
            let pages = there(&pool(form, [5, 16, 2, 64], dtype)?, form, &device)?;
            let rows = [vec![0, 1, 2], vec![3, 4]];
            let table = table(form, &rows, &[48, 32], 16, &device)?;
            let q = randn(&[55, 4, 64], dtype)?.to_device(&device)?;
            let asked = queries(&batch, 0, &device)?;
            let params = PagedAttention {
                scale: 0.125,
                ..Default::default()
            };
            let ours = paged_prefill(&q, &pages, &table, &asked, &params)?;
            let params = AttentionParams {
                scale: 0.125,
                causal: true,
                ..Default::default()
            };
            let ragged = RaggedBatch {
                cu_seqlens_q: asked.cu_seqlens_q.clone(),
                cu_seqlens_k: Tensor::new(&[0u32, 48, 80], &device)?,
                max_seqlen_q: 48,
            };
            let flat = |t: &Tensor| t.reshape((80, 2, 64));
            let theirs =
                flash_attention_varlen(&q, &flat(&pages.k)?, &flat(&pages.v)?, &ragged, &params)?;
            assert_eq!(values(&ours)?, values(&theirs)?, "{dtype:?} on {device:?}");
        }
    }
    Ok(())
}

#[test]
fn rows_are_zeros_where_there_is_no_sequence() -> Result<()> {
    for device in devices() {
        let all = pool(FORMS[1], [4, 8, 2, 64], DType::F32)?;
        let on = PageTable::Padded {
            block_table: Tensor::zeros((0, 2), DType::U32, &device)?,
            lengths: Tensor::zeros(0, DType::U32, &device)?,
        };
        let q = randn(&[5, 4, 64], DType::F32)?.to_device(&device)?;
        let y = paged_prefill(
            &q,
            &there(&all, FORMS[1], &device)?,
            &on,
            &queries(&[], 0, &device)?,
            &PagedAttention::default(),
        )?;
        assert_eq!(y.dims(), q.dims());
        assert!(values(&y)?.iter().all(|y| *y == 0.), "{device:?}");
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let cpu = &Device::Cpu;
    let form = FORMS[1];
    let all = pool(form, [4, 8, 2, 64], DType::F32)?;
    let on = table(form, &[vec![0], vec![1, 2]], &[8, 12], 8, cpu)?;
    let params = PagedAttention::default();
    let q = randn(&[10, 4, 64], DType::F32)?;
    let refusal = |q: &Tensor, ends: &[u32], most: usize| {
        let asked = RaggedQueries {
            cu_seqlens_q: Tensor::new(ends, cpu).expect("a tensor"),
            max_seqlen_q: most,
        };
        let result = paged_prefill(q, &all, &on, &asked, &params);
        result.expect_err("it is refused").to_string()
    };
    for (ends, most, expected) in [
        (&[0, 4][..], 10, "cu_seqlens_q is U32 [2], expected U32 [3]"),
        (
            &[0, 4, 11],
            10,
            "cu_seqlens_q has 4..11 for sequence 1, q has 10 rows",
        ),
        (&[0, 4, 3], 10, "cu_seqlens_q has 4..3 for sequence 1"),
        (
            &[0, 4, 10],
            5,
            "sequence 1 has 6 queries, max_seqlen_q is 5",
        ),
    ] {
        let text = refusal(&q, ends, most);
        assert!(text.contains(expected), "{text}");
        assert!(text.starts_with("paged_prefill: "), "{text}");
    }
    let text = refusal(&q.unsqueeze(0)?, &[0, 4, 10], 6);
    assert!(text.contains("expected [total_q, Hq, D]"), "{text}");
    Ok(())
}
