//! `rope`, `rope_tokens` and `rope_append`.

use super::{
    cases, devices_for, draw, float, length, lie, ok, own_lie, poison, seeded, size, top, unit,
};
use crate::support::{devices, values};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::rope::{
    HeadNorms, RopeAppend, RopeStyle, RotaryTables, Rotation, reference, reference_append,
    reference_tokens, rope, rope_append, rope_tokens,
};
use proptest::prelude::*;

fn style() -> impl Strategy<Value = RopeStyle> {
    prop::sample::select(vec![RopeStyle::HalfSplit, RopeStyle::Interleaved])
}

/// Cosines and sines of random angles.
fn tables(seed: u64, dims: &[usize], dtype: DType, device: &Device) -> Result<[Tensor; 2]> {
    let angles = draw(&mut seeded(seed), dims, 3.2, DType::F32)?;
    let table = |t: Tensor| t.to_dtype(dtype)?.to_device(device);
    Ok([table(angles.cos()?)?, table(angles.sin()?)?])
}

/// A call of `rope_append`.
#[derive(Clone, Copy, Debug)]
struct Append {
    batch: usize,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    /// Half of a head.
    half: usize,
    slot: usize,
    style: RopeStyle,
    normed: bool,
    seed: u64,
}

impl Append {
    /// Queries, and the caches, which were full of what is no number: as the op and as the plain form
    /// leave them.
    fn both(&self, qkv: &Tensor, cache: DType) -> Result<[Vec<f64>; 2]> {
        let (dtype, device, dim) = (qkv.dtype(), qkv.device(), 2 * self.half);
        let slots = self.slot + self.tokens + 2;
        let [cos, sin] = tables(self.seed, &[slots, self.half], DType::F32, device)?;
        let rng = &mut seeded(self.seed);
        let mut norm = || draw(rng, &[dim], 1., dtype)?.to_device(device);
        let (q, k) = (norm()?, norm()?);
        let append = RopeAppend {
            rotation: Rotation {
                cos: &cos,
                sin: &sin,
                position: self.slot,
                style: self.style,
            },
            heads: self.heads,
            kv_heads: self.kv_heads,
            slot: self.slot,
            norms: self.normed.then_some(HeadNorms {
                q: &q,
                k: &k,
                eps: 1e-5,
            }),
        };
        let empty = || {
            Tensor::full(f32::NAN, (self.batch, self.kv_heads, slots, dim), device)?.to_dtype(cache)
        };
        let (k_cache, v_cache) = (empty()?, empty()?);
        let queries = rope_append(qkv, &append, &k_cache, &v_cache)?;
        let [q, k, v] = reference_append(qkv, &append)?;
        let (mut got, mut expected) = (values(&queries)?, q);
        for (cache, new) in [(k_cache, k), (v_cache, v)] {
            let all = values(&cache)?;
            for (head, (all, new)) in all
                .chunks(slots * dim)
                .zip(new.chunks((self.tokens * dim).max(1)))
                .enumerate()
            {
                let new_at = self.slot * dim..(self.slot + self.tokens) * dim;
                let beside = |i: usize| !new_at.contains(&i);
                assert!(
                    all.iter()
                        .enumerate()
                        .all(|(i, v)| !beside(i) || v.is_nan()),
                    "head {head}"
                );
                got.extend(&all[new_at.clone()]);
                expected.extend(new);
            }
        }
        Ok([got, expected])
    }
}

fn append() -> impl Strategy<Value = Append> {
    let shape = (1usize..3, 1usize..6, 1usize..4, 1usize..4, 1usize..36);
    (shape, 0usize..9, style(), any::<bool>(), any::<u64>()).prop_map(
        |(shape, slot, style, normed, seed)| {
            let (batch, tokens, group, kv_heads, half) = shape;
            Append {
                batch,
                tokens,
                heads: group * kv_heads,
                kv_heads,
                half,
                slot,
                style,
                normed,
                seed,
            }
        },
    )
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn rotations_agree(
        (batch, heads, tokens, dim, pairs) in (length(3), length(4), length(6), 1usize..80, 0usize..40),
        (position, style, dtypes) in (0usize..9, style(), [float(), float()]),
        (lies, exponent, seed) in ([lie(), lie()], -24i32..24, any::<u64>()),
    ) {
        let dims = [batch, heads, tokens, dim];
        let x = ok(draw(&mut seeded(seed), &dims, size(dtypes[0], exponent), dtypes[0]))?;
        for device in devices_for(x.elem_count() * pairs.min(dim / 2)) {
            let x = ok(lies[0].place(&x, &device))?;
            let [cos, sin] = ok(tables(seed, &[position + tokens + 1, pairs.min(dim / 2)], dtypes[1], &device))?;
            let (cos, sin) = (ok(lies[1].place(&cos, &device))?, ok(lies[1].place(&sin, &device))?);
            let rotation = Rotation { cos: &cos, sin: &sin, position, style };
            let got = ok(rope(&x, &rotation))?;
            prop_assert_eq!((got.dims(), got.dtype()), (&dims[..], dtypes[0]));
            let (got, expected) = (ok(values(&got))?, ok(reference(&x, &rotation))?);
            // Two products and a sum in f32, rounded once.
            let limit = 0.51 * unit(dtypes[0]) * top(&expected) + 2.4e-7 * top(&ok(values(&x))?);
            for (g, e) in got.iter().zip(&expected) {
                prop_assert!((g - e).abs() <= limit, "{device:?}: {g} {e}, {limit:e} apart at most");
            }
        }
    }

    #[test]
    fn rotations_by_positions_agree(
        (tokens, heads, dim, pairs) in (1usize..9, 1usize..4, 1usize..80, 0usize..40),
        (at, style, dtypes) in (prop::collection::vec(0u32..50, 9), style(), [float(), float()]),
        (kind, lies, exponent, seed) in (0usize..3, [lie(), lie()], -24i32..24, any::<u64>()),
    ) {
        let dims = [tokens, heads, dim];
        let x = ok(draw(&mut seeded(seed), &dims, size(dtypes[0], exponent), dtypes[0]))?;
        for device in devices_for(pairs.min(dim / 2)) {
            let x = ok(lies[0].place(&x, &device))?;
            let [cos, sin] = ok(tables(seed, &[50, pairs.min(dim / 2)], dtypes[1], &device))?;
            let (cos, sin) = (ok(lies[1].place(&cos, &device))?, ok(lies[1].place(&sin, &device))?);
            let at = &at[..tokens];
            let positions = ok(match kind {
                0 => Tensor::new(at, &device),
                1 => Tensor::new(at.iter().map(|p| *p as i32).collect::<Vec<_>>(), &device),
                _ => Tensor::new(at.iter().map(|p| i64::from(*p)).collect::<Vec<_>>(), &device),
            })?;
            let tables = RotaryTables { cos: &cos, sin: &sin, style };
            let got = ok(rope_tokens(&x, &positions, &tables))?;
            prop_assert_eq!((got.dims(), got.dtype()), (&dims[..], dtypes[0]));
            let (got, expected) = (ok(values(&got))?, ok(reference_tokens(&x, &positions, &tables))?);
            // Two products and a sum in f32, rounded once.
            let limit = 0.51 * unit(dtypes[0]) * top(&expected) + 2.4e-7 * top(&ok(values(&x))?);
            for (g, e) in got.iter().zip(&expected) {
                prop_assert!((g - e).abs() <= limit, "{device:?}: {g} {e}, {limit:e} apart at most");
            }
        }
    }

    #[test]
    fn rotations_keep_poison_in_its_head(
        (heads, tokens, half) in (1usize..4, 1usize..6, 1usize..40),
        (style, dtype, lie, poison) in (style(), float(), own_lie(), poison()),
        (at, seed) in (any::<prop::sample::Index>(), any::<u64>()),
    ) {
        let dims = [2, heads, tokens, 2 * half];
        let x = ok(draw(&mut seeded(seed), &dims, 1., dtype))?;
        let at = at.index(x.elem_count());
        let bad = ok(poison.put(&x, at))?;
        for device in devices() {
            let [cos, sin] = ok(tables(seed, &[tokens, half], DType::F32, &device))?;
            let rotation = Rotation { cos: &cos, sin: &sin, position: 0, style };
            let run = |x: &Tensor| {
                let x = lie.place(x, &device)?;
                Ok([values(&rope(&x, &rotation)?)?, reference(&x, &rotation)?])
            };
            let ([clean, _], [dirty, expected]) = (ok(run(&x))?, ok(run(&bad))?);
            poison.check(&clean, &dirty, &expected, |i| i / (2 * half) == at / (2 * half))?;
        }
    }

    #[test]
    fn appends_agree_and_keep_poison_in_its_head(
        append in append(),
        (dtype, cache, lie, poison) in (float(), float(), own_lie(), poison()),
        (exponent, at) in (-6i32..6, any::<prop::sample::Index>()),
    ) {
        let Append { batch, tokens, heads, kv_heads, half, .. } = append;
        let width = (heads + 2 * kv_heads) * 2 * half;
        let qkv = ok(draw(&mut seeded(append.seed), &[batch, tokens, width], size(dtype, exponent), dtype))?;
        let at = at.index(qkv.elem_count());
        let bad = ok(poison.put(&qkv, at))?;
        for device in devices() {
            let run = |qkv: &Tensor| append.both(&lie.place(qkv, &device)?, cache);
            let [clean, expected] = ok(run(&qkv))?;
            // Rounded behind the norm, behind its weight, and as the cache holds it.
            let round = 1.6 * unit(dtype) + 0.51 * unit(cache) + 2e-6;
            let limit = round * top(&expected);
            for (g, e) in clean.iter().zip(&expected) {
                prop_assert!((g - e).abs() <= limit, "{device:?}: {g} {e}, {limit:e} apart at most");
            }
            let [dirty, expected] = ok(run(&bad))?;
            // The results are a head of a token each: queries [B, H, T], then keys, then values.
            let (row, head) = (at / width, at % width / (2 * half));
            let (sequence, token) = (row / tokens, row % tokens);
            let place = match head.checked_sub(heads) {
                None => (sequence * heads + head) * tokens + token,
                Some(head) => {
                    let (part, head) = (head / kv_heads, head % kv_heads);
                    let before = batch * heads + part * batch * kv_heads;
                    (before + sequence * kv_heads + head) * tokens + token
                }
            };
            poison.check(&clean, &dirty, &expected, |i| i / (2 * half) == place)?;
        }
    }
}
