//! `paged_attention` and `paged_append`.

use super::{Lie, cases, draw, float, ok, own_lie, poison, seeded, top, unit};
use crate::pages::{FORMS, Form, pool_of, rows, table, there};
use crate::support::{devices, values};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::paged_append::{self, PagedAppend, RotaryTables, TokenMap};
use candle_fused::ops::paged_attention::{PagedAttention, paged_attention, reference};
use candle_fused::ops::{HeadNorms, PagePool, PageTable, RopeStyle};
use proptest::prelude::*;

/// Pools and tables.
#[derive(Clone, Debug)]
struct Paged {
    form: Form,
    page: usize,
    kv_heads: usize,
    dim: usize,
    lengths: Vec<usize>,
    shared: bool,
    dtype: DType,
    pool: DType,
    seed: u64,
}

fn paged() -> impl Strategy<Value = Paged> {
    let length = prop_oneof![1 => Just(0usize), 1 => Just(1), 6 => 0usize..90];
    let shape = (
        prop::sample::select(FORMS.to_vec()),
        1usize..20,
        1usize..4,
        prop_oneof![2 => 1usize..70, 1 => Just(64usize), 1 => Just(128)],
        prop::collection::vec(length, 1..6),
        any::<bool>(),
    );
    (shape, float(), float(), any::<u64>()).prop_map(|(shape, dtype, pool, seed)| {
        let (form, page, kv_heads, dim, lengths, shared) = shape;
        Paged {
            form,
            page,
            kv_heads,
            dim,
            lengths,
            shared,
            dtype,
            pool,
            seed,
        }
    })
}

impl Paged {
    fn pages(&self) -> usize {
        let pages = self.lengths.iter().map(|n| n.div_ceil(self.page));
        pages.sum::<usize>() + 1
    }

    fn rows(&self) -> Vec<Vec<u32>> {
        let pages = [self.pages(), self.page];
        rows(&self.lengths, pages, self.shared, self.seed)
    }

    /// Values up to 1; slots that no sequence has are no numbers.
    fn pool(&self) -> Result<PagePool> {
        let sizes = [self.pages(), self.page, self.kv_heads, self.dim];
        let rng = std::cell::RefCell::new(seeded(self.seed ^ 3));
        let pool = pool_of(self.form, sizes, |dims| {
            draw(&mut rng.borrow_mut(), dims, 1., self.pool)
        })?;
        let mut used = vec![false; self.pages() * self.page];
        for (row, length) in self.rows().iter().zip(&self.lengths) {
            for token in 0..*length {
                used[row[token / self.page] as usize * self.page + token % self.page] = true;
            }
        }
        let junk = used.iter().map(|used| if *used { 0f32 } else { f32::NAN });
        let junk = Tensor::from_iter(junk, &Device::Cpu)?.to_dtype(self.pool)?;
        let dims = match self.form.layout {
            candle_fused::ops::PageLayout::Nhd => (self.pages(), self.page, 1, 1),
            candle_fused::ops::PageLayout::Hnd => (self.pages(), 1, self.page, 1),
        };
        let junk = junk.reshape(dims)?;
        Ok(PagePool {
            k: pool.k.broadcast_add(&junk)?,
            v: pool.v.broadcast_add(&junk)?,
            layout: pool.layout,
            scales: None,
        })
    }

    fn table(&self, device: &Device) -> Result<PageTable> {
        table(self.form, &self.rows(), &self.lengths, self.page, device)
    }
}

#[derive(Clone, Debug)]
struct Attention {
    paged: Paged,
    group: usize,
    queries: usize,
    window: Option<usize>,
    softcap: Option<f32>,
    alibi: bool,
    batch_invariant: bool,
}

fn attention() -> impl Strategy<Value = Attention> {
    let rule = (
        prop::option::of(1usize..60),
        prop::option::of(0.5f32..40.),
        any::<bool>(),
        any::<bool>(),
    );
    (paged(), 1usize..5, 1usize..8, rule).prop_map(|(paged, group, queries, rule)| {
        let (window, softcap, alibi, batch_invariant) = rule;
        Attention {
            paged,
            group,
            queries,
            window,
            softcap,
            alibi,
            batch_invariant,
        }
    })
}

impl Attention {
    fn q(&self) -> Result<Tensor> {
        let Paged { lengths, dim, .. } = &self.paged;
        let heads = self.group * self.paged.kv_heads;
        let dims = [lengths.len(), self.queries, heads, *dim];
        draw(&mut seeded(self.paged.seed), &dims, 1., self.paged.dtype)
    }

    fn params(&self, device: &Device) -> Result<PagedAttention> {
        let heads = self.group * self.paged.kv_heads;
        let slopes = draw(&mut seeded(self.paged.seed ^ 5), &[heads], 0.2, DType::F32)?;
        Ok(PagedAttention {
            scale: 1. / (self.paged.dim as f32).sqrt(),
            window: self.window,
            softcap: self.softcap,
            alibi_slopes: self.alibi.then(|| slopes.to_device(device)).transpose()?,
            batch_invariant: self.batch_invariant,
        })
    }

    fn both(&self, q: &Tensor, lie: Lie, device: &Device) -> Result<[Vec<f64>; 2]> {
        let (pool, cpu) = (self.paged.pool()?, Device::Cpu);
        let expected = reference(q, &pool, &self.paged.table(&cpu)?, &self.params(&cpu)?)?;
        let got = paged_attention(
            &lie.place(q, device)?,
            &there(&pool, self.paged.form, device)?,
            &self.paged.table(device)?,
            &self.params(device)?,
        )?;
        Ok([values(&got)?, expected])
    }

    /// With batch invariance: each query's bits in its step of all sequences, and in one of its own.
    fn together_and_alone(&self, device: &Device) -> Result<[Vec<u64>; 2]> {
        let Paged {
            form,
            page,
            lengths,
            ..
        } = &self.paged;
        let (q, rows) = (self.q()?.to_device(device)?, self.paged.rows());
        let pool = there(&self.paged.pool()?, *form, device)?;
        let params = PagedAttention {
            batch_invariant: true,
            ..self.params(device)?
        };
        let bits = |q: &Tensor, table: &PageTable| {
            let y = values(&paged_attention(q, &pool, table, &params)?)?;
            Ok::<_, candle_core::Error>(y.into_iter().map(f64::to_bits).collect::<Vec<_>>())
        };
        let (together, mut alone) = (bits(&q, &self.paged.table(device)?)?, Vec::new());
        for (b, length) in lengths.iter().enumerate() {
            for t in 0..self.queries {
                let length = (length + t + 1).saturating_sub(self.queries);
                let row = rows[b][..length.div_ceil(*page)].to_vec();
                let table = table(*form, &[row], &[length], *page, device)?;
                alone.extend(bits(&q.narrow(0, b, 1)?.narrow(1, t, 1)?, &table)?);
            }
        }
        Ok([together, alone])
    }
}

#[derive(Clone, Debug)]
struct Append {
    paged: Paged,
    heads: usize,
    /// Pairs that are rotated, of what a head has.
    rotated: prop::sample::Index,
    style: RopeStyle,
    normed: bool,
}

fn append() -> impl Strategy<Value = Append> {
    let style = prop::sample::select(vec![RopeStyle::HalfSplit, RopeStyle::Interleaved]);
    let rule = (any::<prop::sample::Index>(), style, any::<bool>());
    (paged(), 0usize..5, rule).prop_map(|(paged, heads, (rotated, style, normed))| Append {
        // Shared pages are nobody's to write.
        paged: Paged {
            shared: false,
            ..paged
        },
        heads,
        rotated,
        style,
        normed,
    })
}

impl Append {
    /// Every other token of each sequence, backwards, between rows that are no tokens: sequence and position.
    fn tokens(&self) -> Vec<[u32; 2]> {
        let mut tokens = vec![[u32::MAX, 7]];
        for (b, length) in self.paged.lengths.iter().enumerate() {
            tokens.extend(
                (0..*length)
                    .rev()
                    .step_by(2)
                    .map(|at| [b as u32, at as u32]),
            );
        }
        tokens.push([u32::MAX, u32::MAX]);
        tokens
    }

    /// Queries, and what stands in the pools where tokens were written, each with what it should be.
    fn both(&self, lie: Lie, device: &Device) -> Result<[[Vec<f64>; 2]; 3]> {
        let Paged { kv_heads, dim, .. } = self.paged;
        let tokens = self.tokens();
        let rng = &mut seeded(self.paged.seed ^ 9);
        let width = (self.heads + 2 * kv_heads) * dim;
        let qkv = draw(rng, &[tokens.len(), width], 1., self.paged.dtype)?;
        let angles = draw(rng, &[90, self.rotated.index(dim / 2 + 1)], 3.2, DType::F32)?;
        let norms = [(); 2].map(|()| draw(rng, &[dim], 1., self.paged.dtype));
        let [q, k] = norms;
        let column = |i: usize| Tensor::from_iter(tokens.iter().map(move |t| t[i]), &Device::Cpu);
        let parts = [angles.cos()?, angles.sin()?, q?, k?, column(0)?, column(1)?];
        let run = |parts: &[Tensor], then: &mut dyn FnMut(&PagedAppend<'_>) -> Result<()>| {
            then(&PagedAppend {
                heads: self.heads,
                tokens: TokenMap::Sequences(&parts[4]),
                positions: &parts[5],
                // candle copies nothing of no elements to a GPU.
                rotation: (parts[0].elem_count() > 0).then_some(RotaryTables {
                    cos: &parts[0],
                    sin: &parts[1],
                    style: self.style,
                }),
                norms: self.normed.then_some(HeadNorms {
                    q: &parts[2],
                    k: &parts[3],
                    eps: 1e-5,
                }),
            })
        };
        let mut expected = Default::default();
        run(&parts, &mut |append| {
            expected = paged_append::reference(&qkv, kv_heads, append)?;
            Ok(())
        })?;
        let on = there(&self.paged.pool()?, self.paged.form, device)?;
        let copied = parts.iter().map(|t| match t.elem_count() {
            0 => Ok(t.clone()),
            _ => t.to_device(device),
        });
        let mut got = Vec::new();
        run(&copied.collect::<Result<Vec<_>>>()?, &mut |append| {
            let table = self.paged.table(device)?;
            let q = paged_append::paged_append(&lie.place(&qkv, device)?, &on, &table, append)?;
            got = if self.heads == 0 {
                Vec::new()
            } else {
                values(&q)?
            };
            Ok(())
        })?;
        let [q, k, v] = expected;
        let [got_k, got_v] = [self.written(&on.k)?, self.written(&on.v)?];
        Ok([[got, q], [got_k, k], [got_v, v]])
    }

    /// The slots of the tokens in a pool, `[N, Hkv, D]`; zeros for what is no token.
    fn written(&self, pool: &Tensor) -> Result<Vec<f64>> {
        let own = self.paged.kv_heads * self.paged.dim;
        let pool = match self.paged.form.layout {
            candle_fused::ops::PageLayout::Nhd => pool.clone(),
            candle_fused::ops::PageLayout::Hnd => pool.transpose(1, 2)?,
        };
        let (all, rows) = (values(&pool)?, self.paged.rows());
        let of_token = |[b, at]: [u32; 2]| {
            let Some(row) = rows.get(b as usize) else {
                return vec![0.; own];
            };
            let (at, page) = (at as usize, self.paged.page);
            let slot = row[at / page] as usize * page + at % page;
            all[slot * own..(slot + 1) * own].to_vec()
        };
        Ok(self.tokens().into_iter().flat_map(of_token).collect())
    }
}

proptest! {
    #![proptest_config(cases())]

    /// A query's poison stays in its row.
    #[test]
    fn paged_attention_agrees_and_keeps_poison_in_its_row(
        case in attention(),
        (lie, poison, at) in (own_lie(), poison(), any::<prop::sample::Index>()),
    ) {
        let q = ok(case.q())?;
        let at = at.index(q.elem_count());
        let bad = ok(poison.put(&q, at))?;
        let (dim, units) = (case.paged.dim, unit(case.paged.pool).max(unit(case.paged.dtype)));
        for device in devices() {
            let [clean, expected] = ok(case.both(&q, lie, &device))?;
            let limit = 2. * units * top(&expected) + 2. * (dim as f64).sqrt() * 4e-6 + 1e-5;
            for (g, e) in clean.iter().zip(&expected) {
                prop_assert!((g - e).abs() <= limit, "{device:?}: {g} {e}, {limit:e} apart at most");
            }
            let [dirty, expected] = ok(case.both(&bad, lie, &device))?;
            poison.check(&clean, &dirty, &expected, |i| i / dim == at / dim)?;
        }
    }

    /// Sequences of several splits.
    #[test]
    fn batch_invariant_paged_attention_is_that_of_each_query_alone(case in attention()) {
        let lengths = case.paged.lengths.iter().map(|length| 7 * length).collect();
        let paged = Paged { lengths, ..case.paged };
        let window = case.window.map(|window| 7 * window);
        let case = Attention { paged, window, ..case };
        for device in devices() {
            let [together, alone] = ok(case.together_and_alone(&device))?;
            prop_assert!(together == alone, "{device:?}");
        }
    }

    #[test]
    fn paged_append_agrees(case in append(), lie in own_lie()) {
        let normed = if case.normed { 4. } else { 0. };
        let units = unit(case.paged.dtype).max(unit(case.paged.pool));
        for device in devices() {
            for [got, expected] in ok(case.both(lie, &device))? {
                prop_assert_eq!(got.len(), expected.len());
                let limit = (1. + normed) * units * top(&expected) + 4e-6;
                for (g, e) in got.iter().zip(&expected) {
                    prop_assert!((g - e).abs() <= limit, "{device:?}: {g} {e}, {limit:e} apart at most");
                }
            }
        }
    }
}
