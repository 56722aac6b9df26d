//! A step of many sequences whose keys and values lie in pages: the append and the attention.

use super::picked::spread;
use super::pools::{self, Stored};
use super::{Build, Case, Contender, Dims, Expected, Extent, heads_first, limit};
use crate::figures::{CANDLE, DENSE, FUSED, Work};
use crate::place::Place;
use candle_core::{D, DType, Device, Result, Tensor};
use candle_fused::ops::{
    self, AttentionParams, PagePool, PageTable, PagedAppend, PagedAttention, RaggedQueries,
    RopeStyle, RotaryTables, TokenMap, flash_attention, paged_append, paged_attention,
    paged_prefill,
};
use candle_fused::quant::KvFormat;

/// Tokens of a page.
const PAGE: usize = 16;

/// Bytes of keys and values that have to come near the memory's bandwidth.
const LARGE: [usize; 2] = [64 << 20, 256 << 20];

/// Keys and values of 8 bits.
const FORMATS: [KvFormat; 2] = [KvFormat::Fp8, KvFormat::Int8];

/// Sequences of a model's step.
const SEQUENCES: usize = 16;

pub fn cases(dims: &Dims, dtype: DType, extent: Extent) -> Vec<Case> {
    let shape = Heads {
        heads: dims.heads,
        kv_heads: dims.kv_heads,
        dim: dims.head_dim,
    };
    let of_context = |context: &usize| {
        let lengths = mixed(SEQUENCES, SEQUENCES * context);
        attention(
            &dims.name,
            "mixed",
            shape,
            lengths,
            (dtype, Stored::Floats(dtype)),
        )
    };
    let mut cases: Vec<_> = extent.contexts()[..2].iter().map(of_context).collect();
    let lengths = mixed(SEQUENCES, SEQUENCES * extent.contexts()[1]);
    cases.extend(FORMATS.map(|format| {
        let stored = Stored::Codes(format);
        attention(&dims.name, "mixed", shape, lengths.clone(), (dtype, stored))
    }));
    cases.push(append(&dims.name, shape, dtype));
    cases.extend(PROMPTS.map(|tokens| prefill(&dims.name, shape, tokens, dtype)));
    cases
}

/// Head sizes and batches on a GPU, with far more keys and values than what it has on its chip.
pub fn large() -> Vec<Case> {
    let mut cases = Vec::new();
    for dim in [64, 128, 256] {
        let shape = Heads {
            heads: 32,
            kv_heads: 8,
            dim,
        };
        for bytes in LARGE {
            let tokens = bytes / (2 * shape.kv_heads * dim * DType::BF16.size_in_bytes());
            for sequences in [1, 16, 256] {
                let (name, part) = (format!("32 heads of {dim}"), format!("{}MB", bytes >> 20));
                let (lengths, dtype) = (mixed(sequences, tokens), DType::BF16);
                let stored = (dtype, Stored::Floats(dtype));
                cases.push(attention(&name, &part, shape, lengths.clone(), stored));
                let part = format!("{part} batch invariant");
                let default = attention(&name, &part, shape, lengths.clone(), stored);
                let build: Build = Box::new(move |place| {
                    let mut step = Step::new(place, shape, lengths.clone(), stored)?;
                    step.params.batch_invariant = true;
                    step.attention(place)
                });
                cases.push(Case { build, ..default });
            }
        }
        for sequences in [1, 8] {
            let (name, part) = (format!("32 heads of {dim}"), format!("{sequences}x32k"));
            let formats = FORMATS.map(Stored::Codes).into_iter();
            cases.extend(formats.chain([Stored::Floats(DType::BF16)]).map(|stored| {
                let lengths = vec![1 << 15; sequences];
                attention(&name, &part, shape, lengths, (DType::BF16, stored))
            }));
        }
    }
    cases
}

/// Lengths of so many tokens in all, from one to the longest, in no order.
fn mixed(sequences: usize, tokens: usize) -> Vec<usize> {
    let weight = |i: usize| ((i * 7 + 3) % sequences + 1).pow(2);
    let all: usize = (0..sequences).map(weight).sum();
    let lengths = (0..sequences).map(|i| (tokens * weight(i) / all).max(1));
    lengths.collect()
}

/// The shape of attention.
#[derive(Clone, Copy, Debug)]
struct Heads {
    heads: usize,
    kv_heads: usize,
    dim: usize,
}

fn attention(
    model: &str,
    part: &str,
    shape: Heads,
    lengths: Vec<usize>,
    (dtype, stored): (DType, Stored),
) -> Case {
    let Heads {
        heads,
        kv_heads,
        dim,
    } = shape;
    let (sequences, tokens): (usize, usize) = (lengths.len(), lengths.iter().sum());
    let queries = 2 * dim * sequences * heads * dtype.size_in_bytes();
    let work = Work {
        flops: 4. * (tokens * heads * dim) as f64,
        bytes: (2 * tokens * kv_heads * stored.row(dim) + queries) as f64,
    };
    Case {
        op: "paged_attention",
        model: model.to_owned(),
        part: part.to_owned(),
        rows: sequences,
        context: tokens / sequences,
        format: stored.name(),
        work,
        build: Box::new(move |place| {
            Step::new(place, shape, lengths.clone(), (dtype, stored))?.attention(place)
        }),
    }
}

fn append(model: &str, shape: Heads, dtype: DType) -> Case {
    let width = (shape.heads + 2 * shape.kv_heads) * shape.dim;
    Case {
        op: "paged_append",
        model: model.to_owned(),
        part: "step".to_owned(),
        rows: SEQUENCES,
        context: 0,
        format: dtype.as_str().to_owned(),
        work: Work::moving(2 * SEQUENCES * width, dtype),
        build: Box::new(move |place| {
            let stored = (dtype, Stored::Floats(dtype));
            Step::new(place, shape, vec![PAGE; SEQUENCES], stored)?.append(place)
        }),
    }
}

/// Prompts of a chunk, and tokens that each has.
const CHUNK: usize = 4;
const PROMPTS: [usize; 3] = [128, 512, 1024];

fn prefill(model: &str, shape: Heads, tokens: usize, dtype: DType) -> Case {
    let Heads {
        heads,
        kv_heads,
        dim,
    } = shape;
    let work = Work {
        flops: 2. * (CHUNK * tokens * tokens * heads * dim) as f64,
        ..Work::moving(2 * dim * CHUNK * tokens * (kv_heads + heads), dtype)
    };
    Case {
        op: "paged_prefill",
        model: model.to_owned(),
        part: format!("{CHUNK} equal prompts"),
        rows: CHUNK * tokens,
        context: tokens,
        format: dtype.as_str().to_owned(),
        work,
        build: Box::new(move |place| {
            let stored = (dtype, Stored::Floats(dtype));
            Step::new(place, shape, vec![tokens; CHUNK], stored)?.prefill(place)
        }),
    }
}

/// Pools that take turns, and the table that is theirs.
#[derive(Clone)]
struct Step {
    shape: Heads,
    lengths: Vec<usize>,
    q: Tensor,
    pools: Vec<PagePool>,
    table: PageTable,
    /// The pages of each sequence.
    rows: Vec<Vec<u32>>,
    params: PagedAttention,
}

impl Step {
    fn new(
        place: &Place,
        shape: Heads,
        lengths: Vec<usize>,
        (dtype, stored): (DType, Stored),
    ) -> Result<Self> {
        let counts = lengths.iter().map(|n| n.div_ceil(PAGE));
        let (pages, width) = (counts.clone().sum::<usize>(), counts.clone().max());
        // Neighbours in a sequence are far from each other: a step that has no divisor in common with the count.
        let step = (pages * 5 / 8..).find(|s| gcd(*s, pages) == 1).unwrap_or(1);
        let mut ids = (0..pages).map(|i| (i * step % pages) as u32);
        let rows: Vec<Vec<u32>> = counts.map(|n| ids.by_ref().take(n).collect()).collect();
        let padded = rows.iter().flat_map(|row| {
            let mut row = row.clone();
            row.resize(width.unwrap_or(0), 0);
            row
        });
        let padded = Tensor::from_iter(padded, &place.device)?;
        let dims = [pages, PAGE, shape.kv_heads, shape.dim];
        let first = stored.pool(place, dims)?;
        let bytes = 2 * pages * PAGE * shape.kv_heads * stored.row(shape.dim);
        Ok(Self {
            shape,
            q: place.x(&[lengths.len(), 1, shape.heads, shape.dim], dtype)?,
            pools: place.in_turns(bytes, first, pools::copied)?,
            table: PageTable::Padded {
                block_table: padded.reshape((rows.len(), ()))?,
                lengths: Tensor::from_iter(lengths.iter().map(|n| *n as u32), &place.device)?,
            },
            rows,
            lengths,
            params: PagedAttention {
                scale: 1. / (shape.dim as f32).sqrt(),
                ..Default::default()
            },
        })
    }

    fn attention(&self, place: &Place) -> Result<Vec<Contender>> {
        let all = self.clone();
        let fused = move |turn: usize| {
            let pool = &all.pools[turn % all.pools.len()];
            Ok(vec![paged_attention(
                &all.q,
                pool,
                &all.table,
                &all.params,
            )?])
        };
        let fused =
            Contender::new(FUSED, vec![self.expected()?], fused).in_graph(self.lengths.len());
        // As long as candle's copies of everything are no measurement of their own.
        let bytes: usize = self.lengths.iter().sum::<usize>() * self.shape.heads * self.shape.dim;
        let large = 16 * bytes > place.room() / 8 || self.lengths.len() > SEQUENCES;
        if large || self.pools[0].scales.is_some() {
            return Ok(vec![fused]);
        }
        let plain = Contender::new(CANDLE, vec![self.expected()?], self.plain(place)?);
        Ok(vec![plain, fused])
    }

    /// By candle's operations, one sequence after the other, whose pages are gathered.
    fn plain(&self, place: &Place) -> Result<impl Fn(usize) -> Result<Vec<Tensor>> + use<>> {
        let all = self.clone();
        let ids = self
            .rows
            .iter()
            .map(|row| Tensor::new(&row[..], &place.device));
        let ids = ids.collect::<Result<Vec<_>>>()?;
        let repeat = self.shape.heads / self.shape.kv_heads;
        Ok(move |turn: usize| {
            let pool = &all.pools[turn % all.pools.len()];
            let mut outputs = Vec::new();
            for (b, (ids, length)) in ids.iter().zip(&all.lengths).enumerate() {
                // [1, H, n, D]
                let gathered = |pool: &Tensor| {
                    let own = pool.index_select(ids, 0)?.flatten(0, 1)?;
                    let own = own.narrow(0, 0, *length)?.transpose(0, 1)?;
                    candle_transformers::utils::repeat_kv(own.contiguous()?.unsqueeze(0)?, repeat)
                };
                let q = all.q.narrow(0, b, 1)?.transpose(1, 2)?.contiguous()?;
                let scores = (q.matmul(&gathered(&pool.k)?.t()?)? * f64::from(all.params.scale))?;
                let shares = candle_nn::ops::softmax_last_dim(&scores)?;
                outputs.push(shares.matmul(&gathered(&pool.v)?)?.transpose(1, 2)?);
            }
            Ok(vec![Tensor::cat(&outputs, 0)?])
        })
    }

    /// Of the first and the last sequence, the query heads of the last head of keys.
    fn expected(&self) -> Result<Expected> {
        let Heads {
            heads,
            kv_heads,
            dim,
        } = self.shape;
        let group = heads / kv_heads;
        let (mut rows, mut values) = (Vec::new(), Vec::new());
        for b in spread(self.lengths.len(), 2) {
            let ids = Tensor::new(&self.rows[b][..], self.q.device())?;
            let pool = pools::head(&self.pools[0], kv_heads - 1, &ids)?;
            let table = PageTable::Padded {
                block_table: Tensor::arange(0, self.rows[b].len() as u32, &Device::Cpu)?
                    .unsqueeze(0)?,
                lengths: Tensor::new(&[self.lengths[b] as u32], &Device::Cpu)?,
            };
            let q = self.q.narrow(0, b, 1)?.narrow(2, heads - group, group)?;
            let q = q.to_device(&Device::Cpu)?;
            values.extend(ops::paged_attention::reference(
                &q,
                &pool,
                &table,
                &self.params,
            )?);
            rows.extend(b * heads + heads - group..(b + 1) * heads);
        }
        Ok(Expected::of_rows(rows, dim, values, limit(self.q.dtype())))
    }

    /// All tokens of all sequences; expected are those of the last head of the first sequence, alone in its table.
    fn prefill(&self, place: &Place) -> Result<Vec<Contender>> {
        let (all, shape, cpu) = (self.clone(), self.shape, Device::Cpu);
        let (prompts, tokens) = (self.lengths.len(), self.lengths[0]);
        let q = place.x(&[prompts * tokens, shape.heads, shape.dim], self.q.dtype())?;
        let queries = |prompts: usize, device: &Device| {
            let ends = (0..=prompts).map(|b| (b * tokens) as u32);
            Ok::<_, candle_core::Error>(RaggedQueries {
                cu_seqlens_q: Tensor::from_iter(ends, device)?,
                max_seqlen_q: tokens,
            })
        };
        let ids = Tensor::new(&self.rows[0][..], &place.device)?;
        let pool = pools::head(&self.pools[0], shape.kv_heads - 1, &ids)?;
        let table = PageTable::Padded {
            block_table: Tensor::arange(0, self.rows[0].len() as u32, &cpu)?.unsqueeze(0)?,
            lengths: Tensor::new(&[tokens as u32], &cpu)?,
        };
        let first = q.narrow(0, 0, tokens)?.narrow(1, shape.heads - 1, 1)?;
        let first = first.contiguous()?.to_device(&cpu)?;
        let values =
            ops::paged_prefill::reference(&first, &pool, &table, &queries(1, &cpu)?, &self.params)?;
        let rows = (0..tokens).map(|row| row * shape.heads + shape.heads - 1);
        let of_dense = (0..tokens).map(|row| (shape.heads - 1) * tokens + row);
        let [expected, dense] = [rows.collect(), of_dense.collect()]
            .map(|rows| Expected::of_rows(rows, shape.dim, values.clone(), limit(q.dtype())));
        let dense = Contender::new(DENSE, vec![dense], self.dense(&q)?);
        let queries = queries(prompts, &place.device)?;
        let fused = move |turn: usize| {
            let pool = &all.pools[turn % all.pools.len()];
            let y = paged_prefill(&q, pool, &all.table, &queries, &all.params)?;
            Ok(vec![y])
        };
        Ok(vec![dense, Contender::new(FUSED, vec![expected], fused)])
    }

    /// The op for tensors `[B, H, n, D]`, with the same keys and values, which take turns as well.
    fn dense(&self, q: &Tensor) -> Result<impl Fn(usize) -> Result<Vec<Tensor>> + use<>> {
        let heads_first = |t: &Tensor| heads_first(t, self.lengths.len());
        let ids = Tensor::new(self.rows.concat(), q.device())?;
        let of_pages = |pool: &Tensor| heads_first(&pool.index_select(&ids, 0)?.flatten(0, 1)?);
        let pools = self
            .pools
            .iter()
            .map(|pool| Ok((of_pages(&pool.k)?, of_pages(&pool.v)?)))
            .collect::<Result<Vec<_>>>()?;
        let q = heads_first(q)?;
        let params = AttentionParams {
            scale: self.params.scale,
            causal: true,
            ..Default::default()
        };
        Ok(move |turn: usize| {
            let (k, v) = &pools[turn % pools.len()];
            Ok(vec![flash_attention(&q, k, v, &params)?])
        })
    }

    /// The last token of each sequence.
    fn append(&self, place: &Place) -> Result<Vec<Contender>> {
        let Heads {
            heads,
            kv_heads,
            dim,
        } = self.shape;
        let (dtype, all) = (self.q.dtype(), self.clone());
        let qkv = place.x(&[SEQUENCES, (heads + 2 * kv_heads) * dim], dtype)?;
        let angles = place.x(&[PAGE, dim / 2], DType::F32)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let positions = Tensor::full(PAGE as u32 - 1, SEQUENCES, &place.device)?;
        let there = |t: &Tensor| t.to_device(&Device::Cpu);
        let on_cpu = [there(&cos)?, there(&sin)?, there(&positions)?];
        let of = |parts: &[Tensor; 3], run: &dyn Fn(&PagedAppend<'_>) -> Result<Vec<f64>>| {
            let [cos, sin, positions] = parts;
            run(&config(heads, [cos, sin], positions))
        };
        let expected = of(&on_cpu, &|config| {
            let [q, _, _] = ops::paged_append::reference(&there(&qkv)?, kv_heads, config)?;
            Ok(q)
        })?;
        let rows: Vec<_> = (0..SEQUENCES * heads).collect();
        let expected = || Expected::of_rows(rows.clone(), dim, expected.clone(), limit(dtype));
        let plain = {
            let (qkv, all) = (qkv.clone(), all.clone());
            let tables = [cos.to_dtype(dtype)?, sin.to_dtype(dtype)?];
            move |turn: usize| all.plain_append(&qkv, &tables, turn)
        };
        let fused = move |turn: usize| {
            let config = config(heads, [&cos, &sin], &positions);
            let pool = &all.pools[turn % all.pools.len()];
            Ok(vec![paged_append(&qkv, pool, &all.table, &config)?])
        };
        Ok(vec![
            Contender::new(CANDLE, vec![expected()], plain),
            Contender::new(FUSED, vec![expected()], fused).in_graph(SEQUENCES),
        ])
    }

    /// By candle's operations: the rotation, and slot by slot into the pools.
    fn plain_append(&self, qkv: &Tensor, tables: &[Tensor; 2], turn: usize) -> Result<Vec<Tensor>> {
        let Heads {
            heads,
            kv_heads,
            dim,
        } = self.shape;
        let pool = &self.pools[turn % self.pools.len()];
        let part = |first: usize, n: usize| {
            let part = qkv.narrow(D::Minus1, first * dim, n * dim)?.contiguous()?;
            part.reshape((SEQUENCES, n, 1, dim))
        };
        let [cos, sin] = [&tables[0], &tables[1]].map(|t| t.narrow(0, PAGE - 1, 1));
        let (cos, sin) = (cos?, sin?);
        let q = candle_nn::rotary_emb::rope(&part(0, heads)?, &cos, &sin)?;
        let k = candle_nn::rotary_emb::rope(&part(heads, kv_heads)?, &cos, &sin)?;
        let v = part(heads + kv_heads, kv_heads)?;
        for (b, row) in self.rows.iter().enumerate() {
            for (pool, new) in [(&pool.k, &k), (&pool.v, &v)] {
                let slots = pool.flatten(0, 1)?;
                let slot = row[0] as usize * PAGE + PAGE - 1;
                slots.slice_set(&new.narrow(0, b, 1)?.squeeze(2)?.contiguous()?, 0, slot)?;
            }
        }
        Ok(vec![q])
    }
}

fn config<'a>(heads: usize, [cos, sin]: [&'a Tensor; 2], positions: &'a Tensor) -> PagedAppend<'a> {
    PagedAppend {
        heads,
        tokens: TokenMap::OneEach,
        positions,
        rotation: Some(RotaryTables {
            cos,
            sin,
            style: RopeStyle::HalfSplit,
        }),
        norms: None,
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
