//! A recorded step, which rehearses before it waits, against one that is launched by itself.

use super::{Attention, Beside, Step, StepShape, partials};
use crate::cuda::{Graph, Launcher, address_of};
use crate::ops::flash_decoding::{FlashDecoding, flash_decoding};
use crate::ops::linear;
use crate::ops::linear::cuda::{NormAt, NormKind, Operands, ProductAt};
use crate::ops::{Activation, Epilogue, Prologue, RopeStyle, Weight};
use candle_core::{DType, Device, Result, Tensor};

/// A layer's tensors: projection, caches, tables, positions.
struct Layer {
    qkv: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    position: Tensor,
}

const SLOTS: usize = 2048;

impl Layer {
    fn new(device: &Device, dim: usize, dtype: DType, cache: DType) -> Result<Self> {
        let randn = |shape: &[usize], dtype| {
            Tensor::randn(0f32, 1., shape, &Device::Cpu)?
                .to_dtype(dtype)?
                .to_device(device)
        };
        let angles = randn(&[SLOTS, dim / 2], DType::F32)?;
        Ok(Self {
            qkv: randn(&[2, 15 * dim], dtype)?,
            k: randn(&[2, 3, SLOTS, dim], cache)?,
            v: randn(&[2, 3, SLOTS, dim], cache)?,
            cos: angles.cos()?,
            sin: angles.sin()?,
            position: Tensor::new(&[31u32, 1700], device)?,
        })
    }

    fn eager(&self) -> Result<Tensor> {
        let config = FlashDecoding {
            heads: 9,
            cos: &self.cos,
            sin: &self.sin,
            style: RopeStyle::HalfSplit,
            norms: None,
            scale: 0.125,
            window: None,
            softcap: None,
        };
        let (k, v) = (self.k.copy()?, self.v.copy()?);
        flash_decoding(&self.qkv, &k, &v, &self.position, &config)
    }
}

#[test]
fn a_recorded_step_gives_what_a_launch_gives() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let launcher = Launcher::new(device.as_cuda_device()?)?;
    for (dim, dtype, cache) in [
        (64, DType::BF16, DType::BF16),
        (64, DType::F32, DType::F16),
        (128, DType::BF16, DType::BF16),
        (64, DType::F32, DType::F32),
    ] {
        let layer = Layer::new(&device, dim, dtype, cache)?;
        let expected = layer.eager()?;
        let shape = StepShape {
            sequences: 2,
            heads: 9,
            kv_heads: 3,
            head_dim: dim,
            slots: SLOTS,
            positions: SLOTS,
            pairs: dim / 2,
            dtype,
            cache_dtype: cache,
        };
        let prepared = Prepared::new(&launcher, &layer, shape)?;
        let attention = Attention::new(&launcher, prepared.step, None)?;
        // SAFETY: the tensors have the sizes that the step asks for and outlive the graph.
        let record = |l: &Launcher| (0..3).try_for_each(|_| unsafe { attention.run(l) });
        let mut graph = Graph::capture(launcher.gpu, record)?;
        for _ in 0..2 {
            // SAFETY: as above; candle's stream carries everything else, too.
            unsafe { graph.launch(launcher.stream)? };
        }
        let flat = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        assert_eq!(
            flat(&prepared.out)?,
            flat(&expected)?,
            "{dim} {dtype:?} {cache:?}"
        );
        assert!(prepared.counters.to_vec1::<u32>()?.iter().all(|c| *c == 0));
    }
    Ok(())
}

/// Scratch memory of a step, and the step over it.
struct Prepared {
    out: Tensor,
    _partial: Tensor,
    counters: Tensor,
    step: Step,
}

impl Prepared {
    fn new(launcher: &Launcher, layer: &Layer, shape: StepShape) -> Result<Self> {
        let (device, gpu) = (layer.qkv.device(), launcher.gpu);
        let width = shape.heads * shape.head_dim;
        let out = Tensor::zeros((shape.sequences, width), shape.dtype, device)?;
        let sizes = partials(gpu, &shape)?;
        let partial = Tensor::zeros(sizes.bytes, DType::U8, device)?;
        let counters = Tensor::zeros(sizes.counters, DType::U32, device)?;
        let step = Step {
            qkv: address_of(&layer.qkv)?,
            q_norm: 0,
            k_norm: 0,
            eps: 0.,
            cos: address_of(&layer.cos)?,
            sin: address_of(&layer.sin)?,
            k_cache: address_of(&layer.k)?,
            v_cache: address_of(&layer.v)?,
            out: address_of(&out)?,
            partial: address_of(&partial)?,
            counters: address_of(&counters)?,
            position: address_of(&layer.position)?,
            shape,
            style: RopeStyle::HalfSplit,
            scale: 0.125,
            softcap: 0.,
            window: 0,
        };
        Ok(Self {
            out,
            _partial: partial,
            counters,
            step,
        })
    }
}

/// The largest difference, and the largest value of `b`.
fn difference(a: &Tensor, b: &Tensor) -> Result<[f32; 2]> {
    let flat = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    let (a, b) = (flat(a)?, flat(b)?);
    let differences = a.iter().zip(&b).map(|(a, b)| (a - b).abs());
    // NaN is larger than anything.
    let most = |values: &mut dyn Iterator<Item = f32>| {
        values.fold(
            0f32,
            |most, v| if v > most || v.is_nan() { v } else { most },
        )
    };
    Ok([
        most(&mut differences.into_iter()),
        most(&mut b.iter().map(|b| b.abs())),
    ])
}

#[test]
fn attention_beside_a_product_gives_what_both_give_alone() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let launcher = Launcher::new(device.as_cuda_device()?)?;
    for (dim, position, ready) in [
        (64, 1900u32, true),
        (80, 5, false),
        (80, 700, true),
        (96, 300, false),
        (128, 1023, true),
    ] {
        for dtype in [DType::BF16, DType::F16] {
            let mut layer = Layer::new(&device, dim, dtype, dtype)?;
            (layer.qkv, layer.k, layer.v) = (
                layer.qkv.narrow(0, 0, 1)?.copy()?,
                layer.k.narrow(0, 0, 1)?.copy()?,
                layer.v.narrow(0, 0, 1)?.copy()?,
            );
            layer.position = Tensor::new(&[position], &device)?;
            let attended = layer.eager()?;
            let shape = StepShape {
                sequences: 1,
                heads: 9,
                kv_heads: 3,
                head_dim: dim,
                slots: SLOTS,
                positions: SLOTS,
                pairs: dim / 2,
                dtype,
                cache_dtype: dtype,
            };
            let prepared = Prepared::new(&launcher, &layer, shape)?;
            let (k, rows) = (1280, 2056);
            let randn = |shape: &[usize], scale: f32| {
                Tensor::randn(0f32, scale, shape, &Device::Cpu)?
                    .to_dtype(dtype)?
                    .to_device(&device)
            };
            let (x, w, bias) = (
                randn(&[1, k], 1.)?,
                randn(&[rows, k], 0.05)?,
                randn(&[rows], 1.)?,
            );
            let (weight, shift) = (randn(&[k], 1.)?, randn(&[k], 1.)?);
            let prologue = Prologue::LayerNorm {
                weight: &weight,
                bias: Some(&shift),
                eps: 1e-5,
            };
            let epilogue = Epilogue {
                bias: Some(&bias),
                activation: Activation::Gelu,
                residuals: &[],
            };
            let expected = linear::launch(
                "linear",
                &x,
                prologue,
                &[Weight::Dense(w.clone())],
                epilogue,
            )?;
            let y = Tensor::zeros((1, rows), dtype, &device)?;
            let at = ProductAt {
                x: address_of(&x)?,
                norm: Some(NormAt {
                    kind: NormKind::Layer,
                    weight: address_of(&weight)?,
                    bias: address_of(&shift)?,
                    eps: 1e-5,
                }),
                bias: address_of(&bias)?,
                activation: Activation::Gelu,
                residuals: [0; 2],
                out: address_of(&y)?,
                stride: rows,
                m: 1,
                k,
                x_dtype: dtype,
                out_dtype: dtype,
            };
            let product = Operands::new(&[Weight::Dense(w.clone())], &at)?;
            let both = Attention::new(&launcher, prepared.step, Some(Beside { product, ready }))?;
            // SAFETY: the tensors have the sizes that step and product ask for, and outlive the graph.
            let record = |l: &Launcher| (0..3).try_for_each(|_| unsafe { both.run(l) });
            let mut graph = Graph::capture(launcher.gpu, record)?;
            // SAFETY: as above; candle's stream carries everything else, too.
            unsafe { graph.launch(launcher.stream)? };
            let bound = if dtype == DType::BF16 { 1e-2 } else { 2e-3 };
            for (ours, other) in [(&prepared.out, &attended), (&y, &expected)] {
                let [error, most] = difference(ours, other)?;
                assert!(error <= bound * most, "{dim} {dtype:?}: {error} of {most}");
            }
            assert!(prepared.counters.to_vec1::<u32>()?.iter().all(|c| *c == 0));
        }
    }
    Ok(())
}
