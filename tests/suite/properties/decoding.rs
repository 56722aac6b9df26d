//! `flash_decoding`.

use super::{Lie, cases, draw, float, ok, own_lie, poison, seeded, top, unit};
use crate::support::{devices, values};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::flash_decoding::{FlashDecoding, flash_decoding, reference};
use candle_fused::ops::{HeadNorms, RopeStyle};
use proptest::prelude::*;

#[derive(Clone, Debug)]
struct Case {
    kv_heads: usize,
    group: usize,
    /// Half of a head.
    half: usize,
    positions: Vec<u32>,
    dtype: DType,
    cache: DType,
    style: RopeStyle,
    normed: bool,
    window: Option<usize>,
    softcap: Option<f32>,
    seed: u64,
}

/// Slots of the caches; those at and past a position are junk.
const SLOTS: usize = 90;

fn case() -> impl Strategy<Value = Case> {
    let shape = (
        1usize..4,
        1usize..4,
        1usize..40,
        prop::collection::vec(0u32..SLOTS as u32, 1..4),
    );
    let style = prop::sample::select(vec![RopeStyle::HalfSplit, RopeStyle::Interleaved]);
    let rule = (
        any::<bool>(),
        prop::option::of(1usize..60),
        prop::option::of(0.5f32..40.),
    );
    (shape, float(), float(), style, rule, any::<u64>()).prop_map(
        |(shape, dtype, cache, style, rule, seed)| {
            let (kv_heads, group, half, positions) = shape;
            let (normed, window, softcap) = rule;
            Case {
                kv_heads,
                group,
                half,
                positions,
                dtype,
                cache,
                style,
                normed,
                window,
                softcap,
                seed,
            }
        },
    )
}

/// A form of the op on qkv, the caches, positions and everything else.
type Op<'a> = &'a dyn Fn(&Tensor, &[Tensor; 2], &Tensor, &FlashDecoding<'_>) -> Result<Vec<f64>>;

impl Case {
    fn dim(&self) -> usize {
        2 * self.half
    }

    fn heads(&self) -> usize {
        self.group * self.kv_heads
    }

    fn qkv(&self) -> Result<Tensor> {
        let width = (self.heads() + 2 * self.kv_heads) * self.dim();
        draw(
            &mut seeded(self.seed),
            &[self.positions.len(), width],
            1.,
            self.dtype,
        )
    }

    /// A cache whose slots from the position on are no numbers.
    fn cache(&self, seed: u64) -> Result<Tensor> {
        let dims = [self.positions.len(), self.kv_heads, SLOTS, self.dim()];
        let mut values: Vec<f32> = draw(&mut seeded(seed), &dims, 1., DType::F32)?
            .flatten_all()?
            .to_vec1()?;
        for (i, value) in values.iter_mut().enumerate() {
            let slot = i / self.dim() % SLOTS;
            let sequence = i / self.dim() / SLOTS / self.kv_heads;
            if slot >= self.positions[sequence] as usize {
                *value = f32::NAN;
            }
        }
        Tensor::from_vec(values, &dims, &Device::Cpu)?.to_dtype(self.cache)
    }

    fn both(&self, qkv: &Tensor, lie: Lie, device: &Device) -> Result<[Vec<f64>; 2]> {
        let angles = draw(
            &mut seeded(self.seed ^ 1),
            &[SLOTS, self.half],
            3.2,
            DType::F32,
        )?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let rng = &mut seeded(self.seed ^ 2);
        let (q, k) = (
            draw(rng, &[self.dim()], 1., self.dtype)?,
            draw(rng, &[self.dim()], 1., self.dtype)?,
        );
        let caches = [self.cache(self.seed ^ 3)?, self.cache(self.seed ^ 4)?];
        let position = Tensor::new(&self.positions[..], &Device::Cpu)?;
        let run = |device: &Device, lie: Lie, op: Op<'_>| {
            let there = |t: &Tensor| t.copy()?.to_device(device);
            let (cos, sin, q, k) = (there(&cos)?, there(&sin)?, there(&q)?, there(&k)?);
            let config = FlashDecoding {
                heads: self.heads(),
                cos: &cos,
                sin: &sin,
                style: self.style,
                norms: self.normed.then_some(HeadNorms {
                    q: &q,
                    k: &k,
                    eps: 1e-5,
                }),
                scale: 1. / (self.dim() as f32).sqrt(),
                window: self.window,
                softcap: self.softcap,
            };
            let caches = [there(&caches[0])?, there(&caches[1])?];
            op(
                &lie.place(qkv, device)?,
                &caches,
                &there(&position)?,
                &config,
            )
        };
        let expected = run(
            &Device::Cpu,
            Lie::Dense,
            &|qkv, [k, v], position, config| reference(qkv, k, v, position, config),
        )?;
        let got = run(device, lie, &|qkv, [k, v], position, config| {
            values(&flash_decoding(qkv, k, v, position, config)?)
        })?;
        Ok([got, expected])
    }
}

proptest! {
    #![proptest_config(cases())]

    /// A key's or value's poison stays with the queries of its head.
    #[test]
    fn decoding_agrees_and_keeps_poison_in_its_head(
        case in case(),
        (lie, poison, at) in (own_lie(), poison(), any::<prop::sample::Index>()),
    ) {
        let qkv = ok(case.qkv())?;
        let at = at.index(qkv.elem_count());
        let bad = ok(poison.put(&qkv, at))?;
        let (dim, heads, kv_heads) = (case.dim(), case.heads(), case.kv_heads);
        for device in devices() {
            let [clean, expected] = ok(case.both(&qkv, lie, &device))?;
            // Queries and keys are rounded behind norms and as the cache holds them: so many units on scores
            // of up to the square root of D for values up to 1, and three times that behind norms.
            let rounds = unit(case.cache) + if case.normed { 3. * unit(case.dtype) } else { 0. };
            let score = (dim as f64).sqrt() * if case.normed { 3. } else { 1. };
            let limit = unit(case.dtype).max(unit(case.cache)) * top(&expected) + 2. * score * (rounds + 4e-6);
            for (g, e) in clean.iter().zip(&expected) {
                prop_assert!((g - e).abs() <= limit, "{device:?}: {g} {e}, {limit:e} apart at most");
            }
            let [dirty, expected] = ok(case.both(&bad, lie, &device))?;
            let width = (heads + 2 * kv_heads) * dim;
            let (sequence, head) = (at / width, at % width / dim);
            let reached = |i: usize| {
                let (row, query) = (i / (heads * dim), i / dim % heads);
                let own = match head.checked_sub(heads) {
                    None => query == head,
                    Some(head) => query / case.group == head % kv_heads,
                };
                row == sequence && own
            };
            poison.check(&clean, &dirty, &expected, reached)?;
        }
    }
}
