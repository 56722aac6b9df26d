//! With batch invariance the rows of a sequence are the same bits whatever other sequences are in the batch.

use super::{CASE, Case, queries};
use crate::pages::{FORMS, pool, quantized, rows, table, there};
use crate::support::{devices, randn, values};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::paged_prefill::paged_prefill;
use candle_fused::ops::{PagePool, PagedAttention};
use candle_fused::quant::KvFormat;

/// Queries and tokens, few and many: enough of them that by default another form of the kernel takes them together than
/// one by one.
const BATCH: [[usize; 2]; 7] = [
    [9, 1500],
    [600, 600],
    [1, 333],
    [0, 40],
    [40, 700],
    [2, 1],
    [31, 31],
];

struct Ragged {
    case: Case,
    /// On the CPU.
    pool: PagePool,
    rows: Vec<Vec<u32>>,
    /// Of each sequence.
    q: Vec<Tensor>,
}

impl Ragged {
    fn new(case: Case) -> Result<Self> {
        let lengths = BATCH.map(|[_, tokens]| tokens);
        let pages = lengths.iter().map(|n| n.div_ceil(case.page)).sum::<usize>() + 2;
        let all = pool(
            case.form,
            [pages, case.page, case.kv_heads, case.dim],
            case.pool,
        )?;
        let q = |[queries, _]: [usize; 2]| randn(&[queries, case.heads, case.dim], case.dtype);
        Ok(Self {
            pool: match case.codes {
                Some(format) => quantized(&all, case.form, format)?,
                None => all,
            },
            rows: rows(&lengths, [pages, case.page], false, 5),
            q: BATCH.into_iter().map(q).collect::<Result<_>>()?,
            case,
        })
    }

    /// The bits of each of some sequences, in a batch of these.
    fn bits(&self, device: &Device, sequences: &[usize]) -> Result<Vec<Vec<u64>>> {
        let case = &self.case;
        let batch: Vec<_> = sequences.iter().map(|b| BATCH[*b]).collect();
        let lengths: Vec<_> = batch.iter().map(|[_, tokens]| *tokens).collect();
        let rows: Vec<_> = sequences.iter().map(|b| self.rows[*b].clone()).collect();
        let q: Vec<_> = sequences.iter().map(|b| &self.q[*b]).collect();
        let params = PagedAttention {
            scale: 1. / (case.dim as f32).sqrt(),
            window: case.window,
            softcap: case.softcap,
            batch_invariant: case.batch_invariant,
            ..Default::default()
        };
        let y = paged_prefill(
            &Tensor::cat(&q, 0)?.to_device(device)?,
            &there(&self.pool, case.form, device)?,
            &table(case.form, &rows, &lengths, case.page, device)?,
            &queries(&batch, 0, device)?,
            &params,
        )?;
        let all: Vec<_> = values(&y)?.into_iter().map(f64::to_bits).collect();
        let (mut rest, mut parts) = (&all[..], Vec::new());
        for [queries, _] in batch {
            let (own, behind) = rest.split_at(queries * case.heads * case.dim);
            parts.push(own.to_vec());
            rest = behind;
        }
        Ok(parts)
    }

    /// Holds each sequence alone, and all backwards, to all in order.
    fn check(&self, device: &Device) -> Result<()> {
        let all: Vec<_> = (0..BATCH.len()).collect();
        let backwards: Vec<_> = all.iter().rev().copied().collect();
        let expected = self.bits(device, &all)?;
        let mut turned = self.bits(device, &backwards)?;
        turned.reverse();
        let same = turned == expected;
        assert!(same, "{:?} backwards on {device:?}", self.case);
        for b in all.into_iter().filter(|b| BATCH[*b][0] > 0) {
            let alone = self.bits(device, &[b])?.remove(0);
            let same = alone == expected[b];
            assert!(same, "{:?}, sequence {b} on {device:?}", self.case);
        }
        Ok(())
    }
}

#[test]
fn every_dtype_and_head_size() -> Result<()> {
    use DType::{BF16, F16, F32};
    for device in devices() {
        for (dtype, pool, codes) in [
            (F32, F32, None),
            (F16, F16, None),
            (BF16, BF16, None),
            (F32, F16, None),
            (BF16, F32, Some(KvFormat::Fp8)),
            (F16, F32, Some(KvFormat::Int8)),
        ] {
            for dim in [64, 80, 128] {
                let case = Case {
                    dtype,
                    pool,
                    codes,
                    dim,
                    form: FORMS[dim / 16 % 4],
                    batch_invariant: true,
                    ..CASE
                };
                Ragged::new(case)?.check(&device)?;
                case.check(&device, &BATCH)?;
            }
        }
    }
    Ok(())
}

/// A window that hides keys of the longest sequence alone.
#[test]
fn windows_and_softcap() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16] {
            for (window, softcap) in [(Some(1000), None), (Some(33), None), (Some(100), Some(5.))] {
                let case = Case {
                    dtype,
                    pool: dtype,
                    window,
                    softcap,
                    batch_invariant: true,
                    ..CASE
                };
                Ragged::new(case)?.check(&device)?;
                case.check(&device, &BATCH)?;
            }
        }
    }
    Ok(())
}
