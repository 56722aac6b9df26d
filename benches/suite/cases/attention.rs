//! Attention: a prompt over itself, and a step over what is cached.

use super::picked::spread;
use super::{Case, Contender, Dims, Expected, Extent, limit};
use crate::figures::{CANDLE, FUSED, Work};
use crate::place::Place;
use candle_core::{D, DType, Device, Result, Tensor};
use candle_fused::ops::{
    self, AttentionParams, FlashDecoding, RopeStyle, flash_attention, flash_decoding,
};

/// Queries at the beginning and at the end of a prompt that are checked.
const CHECKED: usize = 2;

/// Bytes of keys and values that have to come near the memory's bandwidth.
const LARGE: usize = 256 << 20;

pub fn cases(dims: &Dims, dtype: DType, extent: Extent) -> Vec<Case> {
    let shape = Heads::of(dims);
    let mut cases = Vec::new();
    for tokens in extent.prompts() {
        cases.push(prompt(&dims.name, shape, (*tokens, dtype)));
    }
    for context in extent.contexts() {
        cases.push(step(&dims.name, shape, (1, *context), dtype));
    }
    if extent == Extent::Full {
        cases.push(step(&dims.name, shape, (8, 2048), dtype));
    }
    cases
}

/// Head sizes on a GPU: long prompts, and caches far larger than what the GPU has on its chip.
pub fn large() -> Result<Vec<Case>> {
    let mut cases = Vec::new();
    for head_dim in [64, 80, 96, 128, 256] {
        let shape = Heads {
            heads: 32,
            kv_heads: 8,
            head_dim,
            rotated: head_dim,
        };
        let name = format!("32 heads of {head_dim}");
        let slots = LARGE / (2 * shape.kv_heads * head_dim * DType::BF16.size_in_bytes());
        cases.push(step(&name, shape, (1, slots), DType::BF16));
    }
    Ok(cases)
}

/// The shape of attention.
#[derive(Clone, Copy, Debug)]
struct Heads {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rotated: usize,
}

impl Heads {
    fn of(dims: &Dims) -> Self {
        Self {
            heads: dims.heads,
            kv_heads: dims.kv_heads,
            head_dim: dims.head_dim,
            rotated: dims.rotated,
        }
    }

    fn scale(self) -> f32 {
        1. / (self.head_dim as f32).sqrt()
    }

    /// Keys or values for every query head, as candle-transformers has them.
    fn repeated(self, t: &Tensor) -> Result<Tensor> {
        candle_transformers::utils::repeat_kv(t.clone(), self.heads / self.kv_heads)
    }
}

/// The whole of a prompt at once.
fn prompt(model: &str, shape: Heads, (tokens, dtype): (usize, DType)) -> Case {
    let Heads {
        heads,
        kv_heads,
        head_dim,
        ..
    } = shape;
    // Half of all pairs are behind the query.
    let pairs = (tokens * (tokens + 1) / 2) as f64;
    let work = Work {
        flops: 4. * pairs * (heads * head_dim) as f64,
        ..Work::moving(2 * tokens * (heads + kv_heads) * head_dim, dtype)
    };
    Case {
        op: "flash_attention",
        model: model.to_owned(),
        part: "prompt".to_owned(),
        rows: tokens,
        context: tokens,
        format: dtype.as_str().to_owned(),
        work,
        build: Box::new(move |place| prompt_contenders(place, shape, tokens, dtype)),
    }
}

fn prompt_contenders(
    place: &Place,
    shape: Heads,
    tokens: usize,
    dtype: DType,
) -> Result<Vec<Contender>> {
    let of = |heads| place.x(&[1, heads, tokens, shape.head_dim], dtype);
    let (q, k, v) = (of(shape.heads)?, of(shape.kv_heads)?, of(shape.kv_heads)?);
    let params = AttentionParams {
        scale: shape.scale(),
        causal: true,
        ..Default::default()
    };
    let expected = prompt_expected([&q, &k, &v], &params, dtype)?;
    let (q2, k2, v2) = (q.clone(), k.clone(), v.clone());
    let plain_expected = prompt_expected([&q, &k, &v], &params, dtype)?;
    let fused = move |_| Ok(vec![flash_attention(&q2, &k2, &v2, &params)?]);
    // Scores, scaled, masked and as shares.
    let scores = 4 * shape.heads * tokens * tokens * dtype.size_in_bytes();
    if scores > place.room() {
        return Ok(vec![Contender::new(FUSED, vec![expected], fused)]);
    }
    let hidden = (0..tokens).flat_map(|i| (0..tokens).map(move |j| (j > i) as u8));
    let hidden = Tensor::from_iter(hidden, &place.device)?.reshape((1, 1, tokens, tokens))?;
    let never = Tensor::full(f32::NEG_INFINITY, (1, 1, 1, 1), &place.device)?.to_dtype(dtype)?;
    // As candle-transformers' models do, with a mask that is made once.
    let plain = move |_| {
        let (k, v) = (shape.repeated(&k)?, shape.repeated(&v)?);
        let scores = (q.matmul(&k.t()?)? * f64::from(shape.scale()))?;
        let all = scores.shape();
        let scores = hidden
            .broadcast_as(all)?
            .where_cond(&never.broadcast_as(all)?, &scores)?;
        let shares = candle_nn::ops::softmax_last_dim(&scores)?;
        Ok(vec![shares.matmul(&v)?])
    };
    Ok(vec![
        Contender::new(CANDLE, vec![plain_expected], plain),
        Contender::new(FUSED, vec![expected], fused),
    ])
}

/// The first queries see the first keys, the last all of them.
fn prompt_expected(qkv: [&Tensor; 3], params: &AttentionParams, dtype: DType) -> Result<Expected> {
    let (_, heads, tokens, width) = qkv[0].dims4()?;
    let checked = CHECKED.min(tokens);
    let part = |first: usize, keys: usize| {
        let [q, k, v] = qkv;
        let host = |t: &Tensor, from: usize, n: usize| {
            t.narrow(2, from, n)?.to_device(&Device::Cpu)?.contiguous()
        };
        let (q, k, v) = (
            host(q, first, checked)?,
            host(k, 0, keys)?,
            host(v, 0, keys)?,
        );
        ops::flash_attention::reference(&q, &k, &v, params)
    };
    // [1, H, 2 checked, D]
    let both = Tensor::cat(&[part(0, checked)?, part(tokens - checked, tokens)?], 2)?;
    let places: Vec<_> = (0..checked).chain(tokens - checked..tokens).collect();
    let rows = (0..heads).flat_map(|head| places.iter().map(move |place| head * tokens + place));
    let values = both.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?;
    Ok(Expected::of_rows(
        rows.collect(),
        width,
        values,
        limit(dtype),
    ))
}

/// A token of each of `batch` sequences behind `context - 1` others.
fn step(model: &str, shape: Heads, (batch, context): (usize, usize), dtype: DType) -> Case {
    let kv = 2 * shape.kv_heads * shape.head_dim;
    let work = Work {
        flops: 4. * (batch * context * shape.heads * shape.head_dim) as f64,
        ..Work::moving(
            batch * ((context + 1) * kv + 2 * shape.heads * shape.head_dim),
            dtype,
        )
    };
    Case {
        op: "flash_decoding",
        model: model.to_owned(),
        part: "step".to_owned(),
        rows: batch,
        context,
        format: dtype.as_str().to_owned(),
        work,
        build: Box::new(move |place| {
            Attention::of(place, shape, (batch, context), dtype)?.contenders()
        }),
    }
}

/// A step's input, and caches that take turns.
#[derive(Clone)]
pub struct Attention {
    shape: Heads,
    batch: usize,
    context: usize,
    qkv: Tensor,
    caches: Vec<[Tensor; 2]>,
    position: Tensor,
    /// Cosines and sines of the positions, `[context, rotated / 2]`.
    tables: [Tensor; 2],
}

impl Attention {
    pub fn new(place: &Place, dims: &Dims, step: (usize, usize), dtype: DType) -> Result<Self> {
        Self::of(place, Heads::of(dims), step, dtype)
    }

    fn of(
        place: &Place,
        shape: Heads,
        (batch, context): (usize, usize),
        dtype: DType,
    ) -> Result<Self> {
        let Heads {
            heads,
            kv_heads,
            head_dim,
            rotated,
        } = shape;
        let cache = || place.x(&[batch, kv_heads, context, head_dim], dtype);
        let bytes = 2 * batch * kv_heads * context * head_dim * dtype.size_in_bytes();
        let angles = place.x(&[context, rotated / 2], DType::F32)?;
        Ok(Self {
            shape,
            batch,
            context,
            qkv: place.x(&[batch, (heads + 2 * kv_heads) * head_dim], dtype)?,
            caches: place.in_turns(bytes, [cache()?, cache()?], |[k, v]| {
                Ok([k.copy()?, v.copy()?])
            })?,
            position: Tensor::full(context as u32 - 1, batch, &place.device)?,
            tables: [angles.cos()?, angles.sin()?],
        })
    }

    /// Both sides.
    pub fn contenders(&self) -> Result<Vec<Contender>> {
        Ok(vec![
            Contender::new(CANDLE, vec![self.expected()?], self.plain()),
            Contender::new(FUSED, vec![self.expected()?], self.fused()),
        ])
    }

    /// candle's way in two: the rotation, and the rest.
    pub fn steps(&self) -> Result<Vec<Contender>> {
        let all = self.clone();
        let rope = move |_| {
            let (q, k, _) = all.rotated()?;
            Ok(vec![q, k])
        };
        Ok(vec![
            Contender::new("rope", Vec::new(), rope),
            Contender::new("attention", Vec::new(), self.plain_attention()?),
        ])
    }

    /// By the op.
    fn fused(&self) -> impl Fn(usize) -> Result<Vec<Tensor>> + use<> {
        let all = self.clone();
        move |turn| {
            let [k, v] = &all.caches[turn % all.caches.len()];
            let step = all.config(&all.tables);
            Ok(vec![flash_decoding(&all.qkv, k, v, &all.position, &step)?])
        }
    }

    /// By candle's operations: rotation of queries and keys, the cache appended to by concatenation,
    /// keys and values repeated for the query heads.
    fn plain(&self) -> impl Fn(usize) -> Result<Vec<Tensor>> + use<> {
        let all = self.clone();
        move |turn| {
            let [k, v] = &all.caches[turn % all.caches.len()];
            let (q, new_k, new_v) = all.rotated()?;
            let (k, v) = (all.appended(k, &new_k)?, all.appended(v, &new_v)?);
            Ok(vec![all.attended(&q, &k, &v)?])
        }
    }

    /// Queries and keys rotated, and the values, `[B, H, 1, D]`.
    fn rotated(&self) -> Result<(Tensor, Tensor, Tensor)> {
        let Heads {
            heads,
            kv_heads,
            head_dim,
            rotated,
        } = self.shape;
        let part = |first: usize, n: usize| {
            let part = self.qkv.narrow(1, first * head_dim, n * head_dim)?;
            part.reshape((self.batch, n, 1, head_dim))
        };
        let table = |t: &Tensor| t.narrow(0, self.context - 1, 1)?.to_dtype(self.qkv.dtype());
        let (cos, sin) = (table(&self.tables[0])?, table(&self.tables[1])?);
        let rotate = |t: Tensor| {
            let turned = t.narrow(D::Minus1, 0, rotated)?.contiguous()?;
            let turned = candle_nn::rotary_emb::rope(&turned, &cos, &sin)?;
            if rotated == head_dim {
                return Ok(turned);
            }
            let rest = t.narrow(D::Minus1, rotated, head_dim - rotated)?;
            Tensor::cat(&[&turned, &rest], D::Minus1)
        };
        Ok((
            rotate(part(0, heads)?)?,
            rotate(part(heads, kv_heads)?)?,
            part(heads + kv_heads, kv_heads)?,
        ))
    }

    fn appended(&self, cache: &Tensor, new: &Tensor) -> Result<Tensor> {
        let old = cache.narrow(2, 0, self.context - 1)?;
        Tensor::cat(&[&old, new], 2)
    }

    fn attended(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (k, v) = (self.shape.repeated(k)?, self.shape.repeated(v)?);
        let scores = (q.matmul(&k.t()?)? * f64::from(self.shape.scale()))?;
        let shares = candle_nn::ops::softmax_last_dim(&scores)?;
        shares
            .matmul(&v)?
            .reshape((self.batch, self.shape.heads * self.shape.head_dim))
    }

    /// Attention of a step whose queries are rotated and whose cache is appended to.
    fn plain_attention(&self) -> Result<impl Fn(usize) -> Result<Vec<Tensor>> + use<>> {
        let all = self.clone();
        let (q, new_k, new_v) = self.rotated()?;
        Ok(move |turn: usize| {
            let [k, v] = &all.caches[turn % all.caches.len()];
            let (k, v) = (all.appended(k, &new_k)?, all.appended(v, &new_v)?);
            Ok(vec![all.attended(&q, &k, &v)?])
        })
    }

    fn config<'a>(&self, [cos, sin]: &'a [Tensor; 2]) -> FlashDecoding<'a> {
        FlashDecoding {
            heads: self.shape.heads,
            cos,
            sin,
            style: RopeStyle::HalfSplit,
            norms: None,
            scale: self.shape.scale(),
            window: None,
            softcap: None,
        }
    }

    /// Of the first and the last sequence, the query heads of the last head of keys.
    fn expected(&self) -> Result<Expected> {
        let rows = spread(self.batch, 2);
        let Heads {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.shape;
        let group = heads / kv_heads;
        let picked = |t: &Tensor| {
            let rows = rows.iter().map(|row| t.narrow(0, *row, 1));
            Tensor::cat(&rows.collect::<Result<Vec<_>>>()?, 0)?.to_device(&Device::Cpu)
        };
        let last = |cache: &Tensor| picked(&cache.narrow(1, kv_heads - 1, 1)?.contiguous()?);
        let [k, v] = &self.caches[0];
        let (k, v) = (last(k)?, last(v)?);
        let part = |first: usize, n: usize| self.qkv.narrow(1, first * head_dim, n * head_dim);
        let qkv = [
            part(heads - group, group)?,
            part(heads + kv_heads - 1, 1)?,
            part(heads + 2 * kv_heads - 1, 1)?,
        ];
        let qkv = picked(&Tensor::cat(&qkv, 1)?)?;
        let [cos, sin] = &self.tables;
        let tables = [cos.to_device(&Device::Cpu)?, sin.to_device(&Device::Cpu)?];
        let config = FlashDecoding {
            heads: group,
            ..self.config(&tables)
        };
        let position = picked(&self.position)?;
        Ok(Expected {
            rows,
            cols: ((heads - group) * head_dim..heads * head_dim).collect(),
            values: ops::flash_decoding::reference(&qkv, &k, &v, &position, &config)?,
            limit: limit(self.qkv.dtype()),
        })
    }
}
