//! `flash_attention`.

use super::{
    Lie, cases, devices_for, draw, float, length, lie, ok, own_lie, poison, seeded, size, top, unit,
};
use crate::support::values;
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::AttentionParams;
use candle_fused::ops::flash_attention::{flash_attention, reference};
use proptest::prelude::*;

#[derive(Clone, Debug)]
struct Case {
    batch: usize,
    kv_heads: usize,
    group: usize,
    queries: usize,
    keys: usize,
    dim: usize,
    dtype: DType,
    cache: DType,
    causal: bool,
    window: Option<usize>,
    softcap: Option<f32>,
    masked: bool,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let shape = (
        length(2),
        1usize..3,
        1usize..4,
        length(40),
        length(150),
        1usize..70,
    );
    let rule = (
        any::<bool>(),
        prop::option::of(1usize..60),
        prop::option::of(0.5f32..40.),
        any::<bool>(),
    );
    (shape, float(), float(), rule, any::<u64>()).prop_map(|(shape, dtype, cache, rule, seed)| {
        let (batch, kv_heads, group, queries, keys, dim) = shape;
        let (causal, window, softcap, masked) = rule;
        Case {
            batch,
            kv_heads,
            group,
            queries,
            keys,
            dim,
            dtype,
            cache,
            causal,
            window,
            softcap,
            masked,
            seed,
        }
    })
}

impl Case {
    fn draw(&self, exponent: i32) -> Result<[Tensor; 3]> {
        let rng = &mut seeded(self.seed);
        let Self {
            batch,
            kv_heads,
            group,
            queries,
            keys,
            dim,
            ..
        } = *self;
        let kv = [batch, kv_heads, keys, dim];
        Ok([
            draw(
                rng,
                &[batch, kv_heads * group, queries, dim],
                size(self.dtype, exponent),
                self.dtype,
            )?,
            draw(rng, &kv, 1., self.cache)?,
            draw(rng, &kv, size(self.cache, exponent), self.cache)?,
        ])
    }

    /// Half of the scores lowered by up to 4, and a key hidden here and there.
    fn params(&self, device: &Device) -> Result<AttentionParams> {
        let rng = &mut seeded(!self.seed);
        let mask = draw(rng, &[self.queries, self.keys], 8., DType::F32)?;
        let hidden = Tensor::full(f32::NEG_INFINITY, mask.shape(), &Device::Cpu)?;
        let mask = mask
            .gt(6f32)?
            .where_cond(&hidden, &mask.minimum(0f32)?.maximum(-4f32)?)?;
        Ok(AttentionParams {
            scale: 1. / (self.dim as f32).sqrt(),
            causal: self.causal,
            window: self.window,
            softcap: self.softcap,
            mask: self.masked.then(|| mask.to_device(device)).transpose()?,
            ..Default::default()
        })
    }

    fn both(
        &self,
        [q, k, v]: &[Tensor; 3],
        lies: &[Lie; 3],
        device: &Device,
    ) -> Result<[Vec<f64>; 2]> {
        let (q, k) = (lies[0].place(q, device)?, lies[1].place(k, device)?);
        let v = lies[2].place(v, device)?;
        let params = self.params(device)?;
        let got = flash_attention(&q, &k, &v, &params)?;
        assert_eq!((got.dims(), got.dtype()), (q.dims(), q.dtype()));
        // Head dimensions that candle cannot hold as nothing have no plain form.
        let expected = reference(&q, &k, &v, &params)?;
        Ok([values(&got)?, values(&expected)?])
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn attention_agrees(
        case in case(),
        (lies, exponent) in ([lie(), lie(), lie()], -8i32..6),
    ) {
        let tensors = ok(case.draw(exponent))?;
        for device in devices_for(tensors.iter().map(Tensor::elem_count).min().unwrap_or(0)) {
            let [got, expected] = ok(case.both(&tensors, &lies, &device))?;
            let [q, k, v] = &tensors;
            let [q, k, v] = [q, k, v].map(|t| top(&values(t).expect("numbers")));
            // A score is off by what its sum loses and, in 16 bits, by how the softcap rounds; each weight
            // by as much of itself, and by a rounding to the keys' type on a GPU.
            let score = (case.dim as f64).sqrt() * q * k;
            let weights = 2.5 * score * 1.2e-7 * (4. + case.dim as f64) + 0.6 * unit(case.cache) + 4e-6;
            let limit = 0.51 * unit(case.dtype) * top(&expected) + weights * v;
            prop_assert_eq!(got.len(), expected.len());
            for (g, e) in got.iter().zip(&expected) {
                prop_assert!((g - e).abs() <= limit, "{device:?}: {g} {e}, {limit:e} apart at most");
            }
        }
    }

    /// A query's stays with the query, a key's or a value's with its head.
    #[test]
    fn attention_keeps_poison_in_its_head(
        case in case(),
        (lies, poison, part) in ([own_lie(), own_lie(), own_lie()], poison(), 0usize..3),
        at in any::<prop::sample::Index>(),
    ) {
        let clean = ok(case.draw(0))?;
        let elements = clean[part].elem_count();
        if elements == 0 {
            return Ok(());
        }
        let at = at.index(elements);
        let mut dirty = clean.clone();
        dirty[part] = ok(poison.put(&clean[part], at))?;
        for device in devices_for(clean.iter().map(Tensor::elem_count).min().unwrap_or(0)) {
            let run = |tensors: &[Tensor; 3]| case.both(tensors, &lies, &device);
            let ([clean, _], [dirty, expected]) = (ok(run(&clean))?, ok(run(&dirty))?);
            let (row, kv_head) = (at / case.dim, at / case.dim / case.keys.max(1));
            // A key that a query does not see has no weight, but the plain form multiplies by it.
            let seen = |i: usize| part == 0 || clean[i].to_bits() != dirty[i].to_bits();
            let reached = |i: usize| match part {
                0 => i / case.dim == row,
                _ => i / case.dim / case.queries / case.group == kv_head && seen(i),
            };
            poison.check(&clean, &dirty, &expected, reached)?;
            let hidden = case.causal || case.window.is_some() || case.masked;
            if part > 0 && !hidden {
                let in_head = |i: usize| i / case.dim / case.queries / case.group == kv_head;
                poison.check(&clean, &dirty, &expected, in_head)?;
            }
        }
    }
}
