//! With batch invariance a query's result is the same bits whatever else is in its step.

use super::{CASE, Case, DTYPES, LENGTHS};
use crate::pages::{FORMS, pool, quantized, rows, table, there};
use crate::support::{devices, randn, values};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::paged_attention::paged_attention;
use candle_fused::ops::{PagePool, PageScales};
use candle_fused::quant::KvFormat;

/// Some that Stream-K shares out over many warps, that end at a split's edge or beside it, or have no key.
const LONG: [usize; 8] = [3000, 1, 130, 0, 777, 129, 128, 2];

const INVARIANT: Case = Case {
    batch_invariant: true,
    ..CASE
};

/// Sequences, and their newest tokens' queries.
struct Batch {
    case: Case,
    /// On the CPU.
    pool: PagePool,
    q: Tensor,
    slopes: Tensor,
    rows: Vec<Vec<u32>>,
    lengths: Vec<usize>,
}

/// A step's queries of one sequence: its place in the batch, the first of them, and how many.
type Part = (usize, usize, usize);

impl Batch {
    fn new(case: Case, lengths: &[usize]) -> Result<Self> {
        let pages = lengths.iter().map(|n| n.div_ceil(case.page)).sum::<usize>() + 3;
        let sizes = [pages, case.page, case.kv_heads, case.dim];
        let all = pool(case.form, sizes, case.pool)?;
        Ok(Self {
            pool: match case.codes {
                Some(format) => quantized(&all, case.form, format)?,
                None => all,
            },
            q: randn(
                &[lengths.len(), case.queries, case.heads, case.dim],
                case.dtype,
            )?,
            slopes: (randn(&[case.heads], DType::F32)?.abs()? * 0.1)?,
            rows: rows(lengths, [pages, case.page], case.shared, 7),
            lengths: lengths.to_vec(),
            case,
        })
    }

    /// The same sequences in other pages.
    fn moved(&self) -> Result<Self> {
        let pages = self.pool.k.dim(0)? as u32;
        // Page `i` goes to the place of the last but `i`.
        let from = Tensor::from_iter((0..pages).rev(), &Device::Cpu)?;
        let moved = |t: &Tensor| t.contiguous()?.index_select(&from, 0);
        let scales = self.pool.scales.as_ref().map(|scales| {
            Ok::<_, candle_core::Error>(PageScales {
                format: scales.format,
                k: moved(&scales.k)?,
                v: moved(&scales.v)?,
            })
        });
        let row = |row: &Vec<u32>| row.iter().map(|page| pages - 1 - page).collect();
        Ok(Self {
            pool: PagePool {
                k: moved(&self.pool.k)?,
                v: moved(&self.pool.v)?,
                layout: self.pool.layout,
                scales: scales.transpose()?,
            },
            q: self.q.clone(),
            slopes: self.slopes.clone(),
            rows: self.rows.iter().map(row).collect(),
            lengths: self.lengths.clone(),
            case: self.case,
        })
    }

    /// The bits of a step of some sequences, in this order, as many queries of each.
    fn step(&self, device: &Device, parts: &[Part]) -> Result<Vec<Vec<u64>>> {
        let (case, page) = (&self.case, self.case.page);
        let (mut q, mut rows, mut lengths) = (Vec::new(), Vec::new(), Vec::new());
        for (b, first, count) in parts {
            q.push(self.q.narrow(0, *b, 1)?.narrow(1, *first, *count)?);
            let length = (self.lengths[*b] + first + count).saturating_sub(case.queries);
            rows.push(self.rows[*b][..length.div_ceil(page)].to_vec());
            lengths.push(length);
        }
        let y = paged_attention(
            &Tensor::cat(&q, 0)?.to_device(device)?,
            &there(&self.pool, case.form, device)?,
            &table(case.form, &rows, &lengths, page, device)?,
            &case.params(&self.slopes, device)?,
        )?;
        let y = values(&y)?;
        assert!(y.iter().all(|y| y.is_finite()));
        let of_part = y.len() / parts.len();
        let bits = |y: &[f64]| y.iter().map(|y| y.to_bits()).collect();
        Ok(y.chunks(of_part).map(bits).collect())
    }

    /// All queries of all sequences.
    fn whole(&self, device: &Device) -> Result<Vec<Vec<u64>>> {
        let all: Vec<_> = (0..self.lengths.len())
            .map(|b| (b, 0, self.case.queries))
            .collect();
        self.step(device, &all)
    }

    /// Each sequence alone.
    fn alone(&self, device: &Device) -> Result<Vec<Vec<u64>>> {
        let each = |b| Ok(self.step(device, &[(b, 0, self.case.queries)])?.remove(0));
        (0..self.lengths.len()).map(each).collect()
    }

    /// All sequences in steps of `count` queries.
    fn in_steps(&self, device: &Device, count: usize) -> Result<Vec<Vec<u64>>> {
        let mut bits = vec![Vec::new(); self.lengths.len()];
        for first in (0..self.case.queries).step_by(count) {
            let count = count.min(self.case.queries - first);
            let all: Vec<_> = (0..bits.len()).map(|b| (b, first, count)).collect();
            for (all, step) in bits.iter_mut().zip(self.step(device, &all)?) {
                all.extend(step);
            }
        }
        Ok(bits)
    }

    /// Holds all of these to each other.
    fn check(&self, device: &Device) -> Result<()> {
        let expected = self.whole(device)?;
        let same = |what: &str, got: Vec<Vec<u64>>| {
            for (b, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let differ = got.iter().zip(expected).filter(|(a, b)| a != b).count();
                assert!(
                    got.len() == expected.len() && differ == 0,
                    "{:?} on {device:?}, {what}: {differ} of sequence {b}'s {} values differ",
                    self.case,
                    expected.len()
                );
            }
        };
        same("alone", self.alone(device)?);
        same("in other pages", self.moved()?.whole(device)?);
        let backwards: Vec<_> = (0..self.lengths.len()).rev().collect();
        let parts: Vec<_> = backwards
            .iter()
            .flat_map(|b| [(*b, 0, self.case.queries); 2])
            .collect();
        let twice = self.step(device, &parts)?;
        same(
            "backwards",
            twice.iter().step_by(2).rev().cloned().collect(),
        );
        same(
            "twice",
            twice.iter().skip(1).step_by(2).rev().cloned().collect(),
        );
        same("query by query", self.in_steps(device, 1)?);
        same("three by three", self.in_steps(device, 3)?);
        Ok(())
    }
}

#[test]
fn every_dtype_and_form() -> Result<()> {
    for device in devices() {
        for (dtype, pool) in DTYPES {
            for form in FORMS {
                let case = Case {
                    dtype,
                    pool,
                    form,
                    queries: 4,
                    ..INVARIANT
                };
                Batch::new(case, &LONG)?.check(&device)?;
            }
        }
    }
    Ok(())
}

#[test]
fn every_format_of_codes() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for format in [KvFormat::Fp8, KvFormat::Int8] {
                for dim in [40, 64, 128] {
                    let case = Case {
                        dtype,
                        codes: Some(format),
                        dim,
                        queries: 3,
                        form: FORMS[dim / 16 % 4],
                        ..INVARIANT
                    };
                    Batch::new(case, &LONG)?.check(&device)?;
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
            for (heads, kv_heads) in [(1, 1), (14, 2), (24, 1), (32, 8)] {
                for dtype in [DType::F32, DType::BF16] {
                    let case = Case {
                        heads,
                        kv_heads,
                        dim,
                        dtype,
                        pool: dtype,
                        queries: 2,
                        form: FORMS[dim / 16 % 4],
                        ..INVARIANT
                    };
                    Batch::new(case, &[300, 0, 17])?.check(&device)?;
                    case.check(&device, &[300, 0, 17])?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn every_number_of_queries_and_page_size() -> Result<()> {
    for device in devices() {
        for queries in [1, 2, 5, 8, 16] {
            for page in [1, 16, 20, 128] {
                for dtype in [DType::F32, DType::F16] {
                    let case = Case {
                        queries,
                        page,
                        dtype,
                        pool: dtype,
                        dim: 128,
                        form: FORMS[queries % 4],
                        ..INVARIANT
                    };
                    Batch::new(case, &[9, 3, 1300, 0, 256])?.check(&device)?;
                    case.check(&device, &[9, 3, 1300, 0, 256])?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn windows_softcap_slopes_and_shared_pages() -> Result<()> {
    for device in devices() {
        for (dtype, codes) in [
            (DType::F32, None),
            (DType::BF16, None),
            (DType::F16, Some(KvFormat::Fp8)),
        ] {
            for queries in [1, 6] {
                let case = Case {
                    dtype,
                    pool: if codes.is_some() { DType::F32 } else { dtype },
                    codes,
                    queries,
                    shared: true,
                    form: FORMS[queries % 4],
                    ..INVARIANT
                };
                let mut cases = [1, 17, 100, 128, 1000, usize::MAX].map(|window| Case {
                    window: Some(window),
                    ..case
                });
                cases[2].softcap = Some(3.);
                cases[3].alibi = true;
                for case in cases {
                    Batch::new(case, &LONG)?.check(&device)?;
                    case.check(&device, &LONG)?;
                    case.check(&device, &LENGTHS)?;
                }
            }
        }
    }
    Ok(())
}

/// Queries that see 0, 1, 2, 8, 9 and 130 splits of 128 keys: with one the first launch writes the result, up to 8 are
/// merged by one warp, more by a block, which goes through more than 128 in turns.
const SPLITS: [usize; 9] = [128, 0, 1025, 3, 129, 16600, 1024, 256, 130];

#[test]
fn every_number_of_splits() -> Result<()> {
    for device in devices() {
        for (dtype, pool, dim) in [
            (DType::F32, DType::F32, 64),
            (DType::F16, DType::F16, 72),
            (DType::BF16, DType::BF16, 128),
            (DType::F32, DType::F16, 80),
            (DType::F16, DType::F16, 256),
        ] {
            for queries in [1, 4] {
                let case = Case {
                    dtype,
                    pool,
                    dim,
                    queries,
                    form: FORMS[dim / 8 % 4],
                    ..INVARIANT
                };
                Batch::new(case, &SPLITS)?.check(&device)?;
                case.check(&device, &SPLITS)?;
            }
        }
    }
    Ok(())
}

/// So many rows that on a GPU each block merges those of several sequences.
#[test]
fn many_sequences() -> Result<()> {
    let lengths: Vec<_> = (0..300)
        .map(|b| [1, 1025, 129, 300, 0, 1024, 40, 128][b % 8])
        .collect();
    for device in devices() {
        for (dtype, dim) in [(DType::F32, 64), (DType::BF16, 64), (DType::F16, 128)] {
            let case = Case {
                heads: 24,
                kv_heads: 1,
                dim,
                dtype,
                pool: dtype,
                form: FORMS[dim / 64 % 4],
                ..INVARIANT
            };
            let batch = Batch::new(case, &lengths)?;
            let expected = batch.whole(&device)?;
            // Sequences of all lengths.
            for (b, expected) in expected.iter().enumerate().step_by(13) {
                let alone = batch.step(&device, &[(b, 0, 1)])?;
                assert!(
                    alone[0] == *expected,
                    "{case:?} on {device:?}: sequence {b}"
                );
            }
            case.check(&device, &lengths)?;
        }
    }
    Ok(())
}

/// Pages in front of the window are not read: they may be gone, or other sequences' by now.
#[test]
fn pages_before_a_window_are_not_read() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::F16] {
            let case = Case {
                dtype,
                pool: dtype,
                window: Some(70),
                form: FORMS[1],
                ..INVARIANT
            };
            let mut batch = Batch::new(case, &[1000, 200])?;
            let expected = batch.whole(&device)?;
            let (k, v) = (&batch.pool.k, &batch.pool.v);
            for (row, length) in batch.rows.iter_mut().zip(&batch.lengths) {
                row[..(length - 70) / case.page].fill(u32::MAX);
            }
            let gone = Tensor::full(f32::NAN, (1, 2, 16, 64), &Device::Cpu)?.to_dtype(dtype)?;
            let (k, v) = (Tensor::cat(&[k, &gone], 0)?, Tensor::cat(&[v, &gone], 0)?);
            assert_eq!(batch.whole(&device)?, expected, "{device:?}");
            let last = k.dim(0)? as u32 - 1;
            (batch.pool.k, batch.pool.v) = (k, v);
            for page in batch.rows.iter_mut().flatten() {
                *page = (*page).min(last);
            }
            assert_eq!(batch.whole(&device)?, expected, "{device:?}");
        }
    }
    Ok(())
}

/// The newest tokens' values are far larger than all others, which what is not seen would have to show against.
#[test]
fn values_behind_a_query_have_no_influence() -> Result<()> {
    for device in devices() {
        for (dtype, large) in [
            (DType::F32, 1e30),
            (DType::BF16, 1e30),
            (DType::F16, 1e4),
            (DType::F16, 1.),
        ] {
            let case = Case {
                dtype,
                pool: dtype,
                queries: 4,
                ..INVARIANT
            };
            let mut batch = Batch::new(case, &[300, 129, 20])?;
            let mut sizes = vec![1e-3f32; batch.pool.v.dim(0)? * case.page];
            for (row, length) in batch.rows.iter().zip(&batch.lengths) {
                for token in length - 3..*length {
                    let page = row[token / case.page] as usize;
                    sizes[page * case.page + token % case.page] = large;
                }
            }
            let sizes = Tensor::new(sizes, &Device::Cpu)?.reshape(((), case.page, 1, 1))?;
            let v = batch.pool.v.to_dtype(DType::F32)?;
            batch.pool.v = v.broadcast_mul(&sizes)?.to_dtype(dtype)?;
            batch.check(&device)?;
        }
    }
    Ok(())
}

/// What the tests above would find: by default a long sequence's keys are shared out by what else is there.
#[test]
fn by_default_the_step_has_an_influence() -> Result<()> {
    for device in devices() {
        for pool in [DType::F32, DType::BF16] {
            let case = Case {
                pool,
                queries: 16,
                ..CASE
            };
            let batch = Batch::new(case, &LONG)?;
            let expected = batch.whole(&device)?;
            assert_ne!(batch.in_steps(&device, 1)?, expected, "{device:?}");
            if device.is_cuda() {
                assert_ne!(batch.alone(&device)?, expected, "{device:?}");
            }
        }
    }
    Ok(())
}
