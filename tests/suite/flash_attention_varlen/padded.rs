//! Padded batches: what lies in the padding is no number.

use super::levels;
use crate::support::{devices, values};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::flash_attention_varlen::{
    flash_attention_padded, flash_attention_padded_at, reference_padded,
};
use candle_fused::ops::{AttentionParams, flash_attention};
use candle_fused::trace;
use proptest::prelude::*;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// A padded batch.
#[derive(Clone, Debug)]
struct Case {
    lengths: Vec<u32>,
    tokens: usize,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    /// Whether q, k and v are parts of one tensor.
    joint: bool,
    dtypes: [DType; 2],
}

impl Case {
    /// The same values on every device.
    fn tensors(&self, seed: u64, device: &Device) -> Result<[Tensor; 3]> {
        let rng = &mut StdRng::seed_from_u64(seed);
        let mut make = |heads: usize, dtype: DType| {
            let (batch, width) = (self.lengths.len(), heads * self.dim);
            let mut x = vec![f32::NAN; batch * self.tokens * width];
            for (row, x) in x.chunks_mut(width).enumerate() {
                if row % self.tokens < self.lengths[row / self.tokens] as usize {
                    x.iter_mut().for_each(|x| *x = rng.random_range(-1f32..1.));
                }
            }
            let x = Tensor::from_vec(x, (batch, self.tokens, heads, self.dim), &Device::Cpu)?;
            x.to_dtype(dtype)?.to_device(device)?.transpose(1, 2)
        };
        let [q, kv] = self.dtypes;
        let (heads, kv_heads) = (self.heads, self.kv_heads);
        if self.joint {
            let x = make(heads + 2 * kv_heads, q)?;
            return Ok([
                x.narrow(1, 0, heads)?,
                x.narrow(1, heads, kv_heads)?,
                x.narrow(1, heads + kv_heads, kv_heads)?,
            ]);
        }
        Ok([make(heads, q)?, make(kv_heads, kv)?, make(kv_heads, kv)?])
    }

    /// Twice the rounding of the output's type, and what f32 sums of `dim` products may be off by.
    fn tolerance(&self) -> f64 {
        let out = match self.dtypes[0] {
            DType::F16 => 2f64.powi(-10),
            DType::BF16 => 2f64.powi(-7),
            _ => 2e-6,
        };
        // Weights are rounded to the type of the values on tensor cores.
        out + (self.dim as f64).sqrt() * 3e-7
    }

    fn check(&self, params: &AttentionParams) -> Result<()> {
        let [q, k, v] = self.tensors(5, &Device::Cpu)?;
        let lengths = Tensor::new(self.lengths.clone(), &Device::Cpu)?;
        let want = reference_padded(&q, &k, &v, &lengths, params)?;
        let want = values(&want.transpose(1, 2)?)?;
        for device in devices() {
            for level in levels(&device) {
                self.hold(params, &want, &device, level)?;
            }
        }
        Ok(())
    }

    fn hold(
        &self,
        params: &AttentionParams,
        want: &[f64],
        device: &Device,
        level: candle_fused::cpu::simd::Level,
    ) -> Result<()> {
        let [q, k, v] = self.tensors(5, device)?;
        let lengths = Tensor::new(self.lengths.clone(), device)?;
        let slopes = params.alibi_slopes.as_ref();
        let params = &AttentionParams {
            alibi_slopes: slopes.map(|slopes| slopes.to_device(device)).transpose()?,
            ..params.clone()
        };
        let run = || flash_attention_padded_at(level, &q, &k, &v, &lengths, params);
        let (y, calls) = trace::capture(run);
        let y = y?;
        assert_eq!(calls.count("flash_attention_padded"), 1, "{calls}");
        assert_eq!((y.dims(), y.dtype()), (q.dims(), q.dtype()));
        // Row by row, as it lies in memory.
        let y = y.transpose(1, 2)?;
        assert!(y.is_contiguous());
        let got = values(&y)?;
        let width = self.heads * self.dim;
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let (row, limit) = (i / width, self.tolerance() * (1. + want.abs()));
            if row % self.tokens >= self.lengths[row / self.tokens] as usize {
                assert_eq!(*got, 0., "{device:?} {self:?}: {row}");
            }
            assert!(
                (got - want).abs() <= limit,
                "{device:?} {level:?} {self:?} {params:?}: {got} for {want} in row {row}"
            );
        }
        Ok(())
    }
}

fn params(dim: usize) -> AttentionParams {
    AttentionParams {
        scale: 1. / (dim as f32).sqrt(),
        ..Default::default()
    }
}

#[test]
fn padding_is_not_seen_and_becomes_zeros() -> Result<()> {
    let (f32, f16, bf16) = (DType::F32, DType::F16, DType::BF16);
    for dtypes in [
        [f32, f32],
        [f16, f16],
        [bf16, bf16],
        [f32, f16],
        [bf16, f32],
    ] {
        for (heads, kv_heads, dim) in [(4, 4, 64), (6, 2, 80), (2, 1, 128), (3, 3, 24)] {
            for (tokens, lengths) in [
                (9, vec![9, 1, 0, 5]),
                (200, vec![130, 200, 64, 0, 3]),
                (1, vec![1, 0]),
                (70, vec![70]),
                (33, vec![0]),
            ] {
                let case = Case {
                    lengths,
                    tokens,
                    heads,
                    kv_heads,
                    dim,
                    joint: dtypes[0] == dtypes[1] && tokens % 2 == 1,
                    dtypes,
                };
                case.check(&params(dim))?;
                let causal = AttentionParams {
                    causal: true,
                    ..params(dim)
                };
                case.check(&causal)?;
            }
        }
    }
    Ok(())
}

/// Every kernel of a GPU, with tiles that are all padding, partly padding, and of several rounds of blocks.
#[cfg(feature = "cuda")]
#[test]
fn each_kernel_passes_over_the_padding() -> Result<()> {
    use candle_fused::cpu::simd::Level;
    use candle_fused::cuda::with_kernel;
    for device in devices().into_iter().filter(Device::is_cuda) {
        for dtype in [DType::F16, DType::BF16] {
            for (heads, kv_heads, dim) in [(4, 4, 64), (24, 8, 128), (2, 1, 256), (3, 3, 96)] {
                let case = Case {
                    lengths: vec![300, 129, 0, 64, 1, 192],
                    tokens: 300,
                    heads,
                    kv_heads,
                    dim,
                    joint: heads == 4,
                    dtypes: [dtype; 2],
                };
                for causal in [false, true] {
                    let params = AttentionParams {
                        causal,
                        ..params(dim)
                    };
                    let [q, k, v] = case.tensors(5, &Device::Cpu)?;
                    let lengths = Tensor::new(case.lengths.clone(), &Device::Cpu)?;
                    let want = reference_padded(&q, &k, &v, &lengths, &params)?;
                    let want = values(&want.transpose(1, 2)?)?;
                    let mut taken = 0;
                    for kernel in candle_fused::ops::flash_attention::kernel_table() {
                        let run = || case.hold(&params, &want, &device, Level::Scalar);
                        match with_kernel(Some(kernel.name), run) {
                            Ok(()) => taken += 1,
                            Err(error) => {
                                let refused = format!("kernel {} cannot take q ", kernel.name);
                                assert!(error.to_string().contains(&refused), "{error}");
                            }
                        }
                    }
                    assert!(taken > 0);
                }
            }
        }
    }
    Ok(())
}

/// A sequence without padding gets what the dense op gives it.
#[test]
fn whole_sequences_are_the_dense_form() -> Result<()> {
    for device in devices() {
        let case = Case {
            lengths: vec![40; 3],
            tokens: 40,
            heads: 4,
            kv_heads: 2,
            dim: 64,
            joint: true,
            dtypes: [DType::F32; 2],
        };
        let [q, k, v] = case.tensors(7, &device)?;
        let lengths = Tensor::new(case.lengths.clone(), &device)?;
        let got = flash_attention_padded(&q, &k, &v, &lengths, &params(64))?;
        let dense = flash_attention(&q, &k, &v, &params(64))?;
        let dense = values(&dense)?;
        for (got, dense) in values(&got)?.iter().zip(&dense) {
            assert!((got - dense).abs() < 2e-6, "{device:?}: {got} {dense}");
        }
        // Sequences that do not lie one behind the other are copied.
        let [q, k, v] = [q.contiguous()?, k.contiguous()?, v.contiguous()?];
        let copied = flash_attention_padded(&q, &k, &v, &lengths, &params(64))?;
        assert_eq!(values(&copied)?, values(&got)?);
        let none = q.narrow(2, 0, 0)?;
        let zero = Tensor::zeros(3, DType::U32, &device)?;
        let nothing = flash_attention_padded(&none, &none, &none, &zero, &params(64));
        assert_eq!(nothing?.dims(), none.dims());
    }
    Ok(())
}

#[test]
fn bad_arguments_are_named() -> Result<()> {
    let cpu = &Device::Cpu;
    let q = Tensor::zeros((2, 4, 5, 8), DType::F32, cpu)?;
    let lengths = Tensor::new(&[5u32, 3], cpu)?;
    let message = |q: &Tensor, k: &Tensor, lengths: &Tensor, params: &AttentionParams| {
        flash_attention_padded(q, k, k, lengths, params)
            .expect_err("")
            .to_string()
    };
    let plain = AttentionParams::default();
    let said = message(&q, &q, &Tensor::new(&[5u32, 6], cpu)?, &plain);
    assert!(said.contains("lengths[1] is 6"), "{said}");
    let said = message(&q, &q, &Tensor::new(&[5u32], cpu)?, &plain);
    assert!(
        said.contains("lengths is U32 [1], expected U32 [2]"),
        "{said}"
    );
    let said = message(&q, &q, &lengths.to_dtype(DType::I64)?, &plain);
    assert!(
        said.contains("lengths is I64 [2], expected U32 [2]"),
        "{said}"
    );
    let said = message(&q, &q.narrow(2, 0, 4)?, &lengths, &plain);
    assert!(said.contains("expected q's 5 tokens"), "{said}");
    let said = message(&q.squeeze(0)?.get(0)?, &q, &lengths, &plain);
    assert!(
        said.contains("expected [batch, heads, tokens, dim]"),
        "{said}"
    );
    let masked = AttentionParams {
        mask: Some(Tensor::zeros((5, 5), DType::F32, cpu)?),
        ..plain
    };
    let said = message(&q, &q, &lengths, &masked);
    assert!(said.contains("there is a mask"), "{said}");
    Ok(())
}

fn any_case() -> impl Strategy<Value = (Case, AttentionParams)> {
    let dtype = || prop::sample::select(vec![DType::F32, DType::F16, DType::BF16]);
    let dim = prop_oneof![1usize..70, prop::sample::select(vec![64, 80, 96, 128, 256])];
    let shape = (
        1usize..150,
        prop::collection::vec(any::<u32>(), 1..6),
        1usize..4,
        1usize..4,
    );
    let rule = (
        any::<bool>(),
        prop::option::of(1usize..200),
        prop::option::of(0usize..200),
        prop::option::of(0.1f32..40.),
        prop::option::of(0f32..0.1),
    );
    (shape, dim, [dtype(), dtype()], any::<bool>(), rule).prop_map(
        |((tokens, lengths, kv_heads, group), dim, dtypes, joint, rule)| {
            let (causal, window, window_right, softcap, slope) = rule;
            let heads = kv_heads * group;
            let most = tokens as u32 + 1;
            let case = Case {
                lengths: lengths.into_iter().map(|n| n % most).collect(),
                tokens,
                heads,
                kv_heads,
                dim,
                joint,
                dtypes,
            };
            let slopes = |slope: f32| Tensor::full(slope, heads, &Device::Cpu).unwrap();
            let params = AttentionParams {
                causal,
                window,
                window_right,
                softcap,
                alibi_slopes: slope.map(slopes),
                ..params(dim)
            };
            (case, params)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..Default::default() })]
    #[test]
    fn any_padded_batch((case, params) in any_case()) {
        case.check(&params).unwrap();
    }
}
