//! New keys and values in pages against float64, and copies of pages.

mod quantized;

use crate::pages::{FORMS, Form, numbers, pool, quantized, rows, table, there};
use crate::support::{devices, randn, values, widest_error};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::paged_append::{
    PagedAppend, RotaryTables, TokenMap, copy_pages, paged_append, reference,
};
use candle_fused::ops::{HeadNorms, PageLayout, PagePool, PageTable, RopeStyle};
use candle_fused::quant::KvFormat;

/// Shapes, types and features of one case.
#[derive(Clone, Copy, Debug)]
struct Case {
    form: Form,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    page: usize,
    /// 0: no rotation.
    rotated: usize,
    style: RopeStyle,
    dtype: DType,
    pool: DType,
    codes: Option<KvFormat>,
    norms: bool,
}

const CASE: Case = Case {
    form: FORMS[0],
    heads: 6,
    kv_heads: 2,
    dim: 64,
    page: 16,
    rotated: 64,
    style: RopeStyle::HalfSplit,
    dtype: DType::F32,
    pool: DType::F32,
    codes: None,
    norms: false,
};

/// Each token's sequence and position, in any order; none for what is no token.
type Tokens = [Option<(usize, usize)>];

impl Case {
    fn limit(&self) -> f64 {
        let rounded = match (self.dtype, self.pool) {
            (DType::F32, DType::F32) => 2e-6,
            (DType::BF16, _) | (_, DType::BF16) => 2e-2,
            _ => 3e-3,
        };
        // Half a step of a row whose largest magnitude is the largest of all.
        rounded
            + match self.codes {
                Some(KvFormat::Fp8) => 16. / 448.,
                Some(KvFormat::Int8) => 0.5 / 127.,
                None => 0.,
            }
    }

    /// Where token `position` of a sequence with these pages is among rows of tokens, heads and elements of the pool.
    fn slot(&self, row: &[u32], position: usize) -> usize {
        row[position / self.page] as usize * self.page + position % self.page
    }

    /// Holds queries and pools against the reference, for tokens of sequences of these lengths.
    fn check(&self, device: &Device, lengths: &[usize], tokens: &Tokens, map: Map) -> Result<()> {
        let (kv_heads, dim) = (self.kv_heads, self.dim);
        let pages = lengths.iter().map(|n| n.div_ceil(self.page)).sum::<usize>() + 2;
        let before = pool(self.form, [pages, self.page, kv_heads, dim], self.pool)?;
        let before = match self.codes {
            Some(format) => quantized(&before, self.form, format)?,
            None => before,
        };
        let rows = rows(lengths, [pages, self.page], false, 11);
        let table = table(self.form, &rows, lengths, self.page, device)?;
        let width = (self.heads + 2 * kv_heads) * dim;
        let qkv = randn(&[tokens.len(), width], self.dtype)?;
        let angles = randn(&[512, self.rotated.max(2) / 2], DType::F32)?;
        let parts = [
            angles.cos()?,
            angles.sin()?,
            randn(&[dim], self.dtype)?,
            randn(&[dim], self.dtype)?,
            Tensor::from_iter(
                tokens.iter().map(|t| t.map_or(9999, |t| t.1 as u32)),
                &Device::Cpu,
            )?,
            map.tensor(tokens, lengths.len())?,
        ];
        let expected = reference(&qkv, kv_heads, &self.config(&parts, map))?;

        let on = there(&before, self.form, device)?;
        let there = |t: &Tensor| t.to_device(device);
        let parts = parts
            .each_ref()
            .map(there)
            .into_iter()
            .collect::<Result<Vec<_>>>()?;
        let parts = parts.try_into().expect("six");
        let got = paged_append(&there(&qkv)?, &on, &table, &self.config(&parts, map))?;
        assert_eq!(got.dims(), [tokens.len(), self.heads, dim]);
        let message = format!("{self:?} {map:?} on {device:?}");
        if self.heads > 0 {
            assert!(
                widest_error(&got, &expected[0])? < self.limit(),
                "q: {message}"
            );
        }
        let (on, before) = (numbers(&on)?, numbers(&before)?);
        for (name, got, before, new) in [
            ("k", &on[0], &before[0], &expected[1]),
            ("v", &on[1], &before[1], &expected[2]),
        ] {
            let token_rows = |t: &Tensor| match self.form.layout {
                PageLayout::Nhd => t.contiguous(),
                PageLayout::Hnd => t.transpose(1, 2)?.contiguous(),
            };
            let mut all = values(&token_rows(before)?)?;
            let own = kv_heads * dim;
            for (n, token) in tokens.iter().enumerate() {
                let Some((b, position)) = token else { continue };
                let to = self.slot(&rows[*b], *position) * own;
                all[to..to + own].copy_from_slice(&new[n * own..(n + 1) * own]);
            }
            let error = widest_error(&token_rows(got)?, &all)?;
            assert!(error < self.limit(), "{name}: {message}: {error:e}");
        }
        Ok(())
    }

    fn config<'a>(&self, parts: &'a [Tensor; 6], map: Map) -> PagedAppend<'a> {
        let [cos, sin, q, k, positions, tokens] = parts;
        let style = self.style;
        PagedAppend {
            heads: self.heads,
            tokens: match map {
                Map::OneEach => TokenMap::OneEach,
                Map::Sequences => TokenMap::Sequences(tokens),
                Map::CuSeqlens => TokenMap::CuSeqlens(tokens),
            },
            positions,
            rotation: (self.rotated > 0).then_some(RotaryTables { cos, sin, style }),
            norms: self.norms.then_some(HeadNorms { q, k, eps: 1e-6 }),
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Map {
    OneEach,
    Sequences,
    CuSeqlens,
}

impl Map {
    fn tensor(self, tokens: &Tokens, sequences: usize) -> Result<Tensor> {
        let map: Vec<u32> = match self {
            Map::CuSeqlens => {
                let before = |b: usize| {
                    let known = tokens.iter().flatten();
                    known.filter(|(owner, _)| *owner < b).count() as u32
                };
                (0..=sequences).map(before).collect()
            }
            _ => tokens
                .iter()
                .map(|t| t.map_or(u32::MAX, |t| t.0 as u32))
                .collect(),
        };
        Tensor::new(map, &Device::Cpu)
    }
}

const LENGTHS: [usize; 4] = [5, 40, 100, 17];

/// The last token of each sequence.
fn last() -> Vec<Option<(usize, usize)>> {
    let last = LENGTHS.iter().enumerate();
    last.map(|(b, n)| Some((b, n - 1))).collect()
}

/// A prompt of one sequence, drafts of another, a token of a third, and rows that are no tokens.
fn mixed() -> Vec<Option<(usize, usize)>> {
    let prompt = (0..40).map(|position| Some((1, position)));
    let draft = (94..100).map(|position| Some((2, position)));
    prompt
        .chain(draft)
        .chain([Some((3, 16)), None, None])
        .collect()
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
            (BF16, F32),
        ] {
            for form in FORMS {
                let case = Case {
                    form,
                    dtype,
                    pool,
                    ..CASE
                };
                case.check(&device, &LENGTHS, &last(), Map::OneEach)?;
                case.check(&device, &LENGTHS, &mixed(), Map::Sequences)?;
                case.check(&device, &LENGTHS, &mixed(), Map::CuSeqlens)?;
            }
        }
    }
    Ok(())
}

#[test]
fn norms_rotation_and_odd_shapes() -> Result<()> {
    let cases = [
        Case {
            norms: true,
            ..CASE
        },
        Case { rotated: 0, ..CASE },
        Case {
            style: RopeStyle::Interleaved,
            norms: true,
            ..CASE
        },
        Case {
            rotated: 16,
            page: 8,
            ..CASE
        },
        Case {
            dim: 128,
            rotated: 128,
            page: 128,
            norms: true,
            ..CASE
        },
        Case {
            dim: 18,
            rotated: 6,
            page: 5,
            style: RopeStyle::Interleaved,
            ..CASE
        },
        Case { heads: 0, ..CASE },
        Case {
            heads: 0,
            rotated: 0,
            form: FORMS[3],
            ..CASE
        },
    ];
    for device in devices() {
        for dtype in [DType::F32, DType::BF16] {
            for case in cases {
                let case = Case {
                    dtype,
                    pool: dtype,
                    ..case
                };
                case.check(&device, &LENGTHS, &last(), Map::OneEach)?;
                let mut shuffled = mixed();
                shuffled.reverse();
                case.check(&device, &LENGTHS, &shuffled, Map::Sequences)?;
            }
        }
    }
    Ok(())
}

#[test]
fn pages_are_copied() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::BF16] {
            for form in FORMS {
                for dim in [64, 6] {
                    let before = pool(form, [6, 8, 2, dim], dtype)?;
                    let on = there(&before, form, &device)?;
                    copy_pages(&on, &Tensor::new(&[[4u32, 0], [4, 5], [1, 2]], &device)?)?;
                    for (got, before) in [(&on.k, &before.k), (&on.v, &before.v)] {
                        let order = Tensor::new(&[4u32, 1, 1, 3, 4, 4], &Device::Cpu)?;
                        let expected = before.contiguous()?.index_select(&order, 0)?;
                        assert_eq!(values(got)?, values(&expected)?, "{form:?} {device:?}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// On a GPU nobody knows where tokens go before the kernel: what would go elsewhere is left out.
#[test]
fn what_has_no_place_is_left_out() -> Result<()> {
    for device in devices().into_iter().filter(Device::is_cuda) {
        for csr in [false, true] {
            let form = Form { csr, ..FORMS[0] };
            let before = pool(form, [4, 8, 1, 16], DType::F32)?;
            let on = there(&before, form, &device)?;
            let table = match csr {
                false => PageTable::Padded {
                    block_table: Tensor::new(&[[1u32, 9], [u32::MAX, 0]], &device)?,
                    lengths: Tensor::new(&[16u32, 16], &device)?,
                },
                true => PageTable::Csr {
                    indptr: Tensor::new(&[0u32, 2, 9], &device)?,
                    indices: Tensor::new(&[1u32, 9, u32::MAX], &device)?,
                    last_page_len: Tensor::new(&[8u32, 8], &device)?,
                },
            };
            let qkv = randn(&[6, 48], DType::F32)?.to_device(&device)?;
            let positions = Tensor::new(&[8u32, 0, 99, u32::MAX, 3, 3], &device)?;
            let owners = Tensor::new(&[0u32, 1, 0, 1, 2, u32::MAX], &device)?;
            let append = PagedAppend {
                heads: 1,
                tokens: TokenMap::Sequences(&owners),
                positions: &positions,
                rotation: None,
                norms: None,
            };
            let q = paged_append(&qkv, &on, &table, &append)?;
            assert_eq!(values(&q)?, vec![0.; 6 * 16]);
            assert_eq!(values(&on.k)?, values(&before.k)?);
            copy_pages(&on, &Tensor::new(&[[0u32, 4], [u32::MAX, 1]], &device)?)?;
            assert_eq!(values(&on.v)?, values(&before.v)?);
        }
    }
    Ok(())
}

#[test]
fn bad_input_is_named() -> Result<()> {
    let device = Device::Cpu;
    let all = pool(FORMS[0], [4, 8, 1, 16], DType::F32)?;
    let table = PageTable::Padded {
        block_table: Tensor::new(&[[1u32, 4]], &device)?,
        lengths: Tensor::new(&[8u32], &device)?,
    };
    let qkv = randn(&[1, 48], DType::F32)?;
    let said = |qkv: &Tensor, pool: &PagePool, append: &PagedAppend<'_>| {
        let result = paged_append(qkv, pool, &table, append);
        result.err().map(|e| e.to_string()).unwrap_or_default()
    };
    let at = |position: u32| Tensor::new(&[position], &device);
    let (good, next, past) = (at(7)?, at(8)?, at(16)?);
    let append = PagedAppend {
        heads: 1,
        tokens: TokenMap::OneEach,
        positions: &good,
        rotation: None,
        norms: None,
    };
    assert_eq!(said(&qkv, &all, &append), "");
    let with = |positions| PagedAppend {
        positions,
        ..append
    };
    assert!(said(&qkv, &all, &with(&next)).contains("page 1 of sequence 0 is 4"));
    assert!(said(&qkv, &all, &with(&past)).contains("positions[0] is 16"));
    assert!(said(&qkv.narrow(1, 0, 32)?, &all, &append).contains("qkv has shape"));
    let two = Tensor::cat(&[&qkv, &qkv], 0)?;
    assert!(said(&two, &all, &append).contains("qkv has 2 tokens"));
    let short = randn(&[4, 8], DType::F32)?;
    let rotation = Some(RotaryTables {
        cos: &short,
        sin: &short,
        style: RopeStyle::HalfSplit,
    });
    let turned = PagedAppend { rotation, ..append };
    assert!(said(&qkv, &all, &turned).contains("rotation.cos has 4 positions"));
    let mut same = all.clone();
    same.v = same.k.clone();
    assert!(said(&qkv, &same, &append).contains("overlap"));
    let far = Tensor::new(&[3u32], &device)?;
    let mapped = PagedAppend {
        tokens: TokenMap::Sequences(&far),
        ..append
    };
    assert!(said(&qkv, &all, &mapped).contains("tokens[0] is 3"));
    let copy = |pairs: &[[u32; 2]]| {
        let pairs = Tensor::from_slice(pairs.as_flattened(), (pairs.len(), 2), &device)?;
        let result = copy_pages(&all, &pairs);
        Ok::<_, candle_core::Error>(result.err().map(|e| e.to_string()).unwrap_or_default())
    };
    assert!(copy(&[[0, 4]])?.contains("pairs[0] has page 4"));
    assert!(copy(&[[0, 1], [1, 2]])?.contains("pairs[0] copies to page 1"));
    assert!(copy(&[[0, 1], [2, 1]])?.contains("pairs[1] copies to page 1"));
    Ok(())
}
