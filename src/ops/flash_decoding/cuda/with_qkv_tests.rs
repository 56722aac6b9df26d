//! The step with the products in front of it against both in float64, recorded and replayed.

use super::dispatch::select;
use super::problem::Operands;
use super::tests::{Layer, Prepared, SLOTS, difference, in_pages, normal};
use super::{Companion, with_qkv};
use crate::cuda::{Graph, Launcher, address_of};
use crate::ops::flash_decoding;
use crate::ops::linear;
use crate::ops::linear::cuda::{self as products, NormAt, NormKind, ProductAt};
use crate::ops::{Activation, ActivationBits, Epilogue, Prologue, Weight};
use candle_core::{DType, Device, Result, Tensor};
use rand::SeedableRng;
use rand::rngs::StdRng;

const HEADS: [usize; 3] = [9 * 64, 3 * 64, 3 * 64];
const EPS: f32 = 1e-5;

/// The product for queries, keys and values of one token.
struct Qkv {
    x: Tensor,
    norm: Option<Tensor>,
    weights: Vec<Tensor>,
    bias: Option<Tensor>,
}

impl Qkv {
    /// With a matrix for each of q, k and v, or with one for all.
    fn new(device: &Device, dtype: DType, k: usize, joint: bool, whole: bool) -> Result<Self> {
        let rng = &mut StdRng::seed_from_u64(2);
        let mut randn = |shape: &[usize], scale: f32| {
            let values = normal(rng, shape, scale)?;
            values.to_dtype(dtype)?.to_device(device)
        };
        let rows = match joint {
            true => vec![HEADS.iter().sum()],
            false => HEADS.to_vec(),
        };
        let weights = rows.into_iter().map(|rows| randn(&[rows, k], 0.05));
        let weights = weights.collect::<Result<_>>()?;
        Ok(Self {
            x: randn(&[1, k], 1.)?,
            norm: whole.then(|| randn(&[k], 1.)).transpose()?,
            weights,
            bias: whole
                .then(|| randn(&[HEADS.iter().sum()], 0.5))
                .transpose()?,
        })
    }

    fn weights(&self, device: &Device) -> Result<Vec<Weight>> {
        let weights = self.weights.iter().map(|w| w.to_device(device));
        weights.map(|w| Ok(Weight::Dense(w?))).collect()
    }

    fn operands(&self, out: &Tensor) -> Result<products::Operands> {
        let optional = |t: &Option<Tensor>| t.as_ref().map_or(Ok(0), address_of);
        let norm = self.norm.as_ref().map(|weight| {
            Ok::<_, candle_core::Error>(NormAt {
                kind: NormKind::Rms,
                weight: address_of(weight)?,
                bias: 0,
                eps: EPS,
            })
        });
        let at = ProductAt {
            x: address_of(&self.x)?,
            norm: norm.transpose()?,
            bias: optional(&self.bias)?,
            activation: Activation::None,
            residuals: [0; 2],
            out: address_of(out)?,
            stride: HEADS.iter().sum(),
            m: 1,
            k: self.x.dim(1)?,
            x_dtype: self.x.dtype(),
            x_bits: ActivationBits::Auto,
            out_dtype: self.x.dtype(),
        };
        products::Operands::new(&self.weights(self.x.device())?, &at)
    }

    /// What it gives, from float64.
    fn reference(&self) -> Result<Tensor> {
        let on_cpu = |t: &Tensor| t.to_device(&Device::Cpu);
        let norm = self.norm.as_ref().map(on_cpu).transpose()?;
        let prologue = norm
            .as_ref()
            .map_or(Prologue::None, |weight| Prologue::RmsNorm {
                weight,
                eps: EPS.into(),
            });
        let bias = self.bias.as_ref().map(on_cpu).transpose()?;
        let epilogue = Epilogue {
            bias: bias.as_ref(),
            activation: Activation::None,
            residuals: &[],
        };
        let weights = self.weights(&Device::Cpu)?;
        let rows = linear::reference(&on_cpu(&self.x)?, prologue, &weights, &epilogue)?;
        Tensor::new(rows, &Device::Cpu)?.to_dtype(self.x.dtype())
    }
}

/// The layer with what the product gives, and what the step makes of that in float64.
fn expected(layer: &Layer, product: &Qkv, window: Option<usize>) -> Result<(Layer, Tensor)> {
    let on_cpu = |t: &Tensor| t.to_device(&Device::Cpu);
    let of_cpu = Layer {
        qkv: product.reference()?,
        k: on_cpu(&layer.k)?,
        v: on_cpu(&layer.v)?,
        cos: on_cpu(&layer.cos)?,
        sin: on_cpu(&layer.sin)?,
        position: on_cpu(&layer.position)?,
    };
    let Layer {
        qkv,
        k,
        v,
        position,
        ..
    } = &of_cpu;
    let config = of_cpu.config(window);
    let y = flash_decoding::reference(qkv, k, v, position, &config)?;
    let device = layer.k.device();
    let with_qkv = Layer {
        qkv: qkv.to_device(device)?,
        ..layer.clone()
    };
    Ok((with_qkv, Tensor::new(y, device)?.unsqueeze(0)?))
}

/// A step over pages of so many tokens, or over a cache of slots.
#[derive(Clone, Copy, Debug, Default)]
struct Form {
    page: Option<usize>,
    window: Option<usize>,
}

fn check(layer: &Layer, product: &Qkv, form: Form) -> Result<()> {
    let device = layer.k.device();
    let launcher = Launcher::new(device.as_cuda_device()?)?;
    let (with_qkv, y) = expected(layer, product, form.window)?;
    let (k, v) = (layer.k.copy()?, layer.v.copy()?);
    with_qkv.eager_in(&k, &v, form.window)?;
    let mut appended = Layer {
        k,
        v,
        ..layer.clone()
    };
    let mut ours = Layer {
        // Nothing reads a projection.
        qkv: (layer.qkv.zeros_like()? / 0.)?,
        k: layer.k.copy()?,
        v: layer.v.copy()?,
        ..layer.clone()
    };
    let mut prepared = Prepared::new(&launcher, &ours)?;
    prepared.step.window = form.window.unwrap_or(0);
    // The owner of the table.
    let mut _table = None;
    if let Some(page) = form.page {
        let (pool, table, _) = in_pages(&ours, page)?;
        prepared.set_pages(&pool, &table)?;
        _table = Some(table);
        let (after, _, _) = in_pages(&appended, page)?;
        (appended.k, appended.v) = (after.k, after.v);
        (ours.k, ours.v) = (pool.k, pool.v);
    }
    let qkv = product.operands(&ours.qkv)?;
    let operands = Operands {
        step: prepared.step,
        companion: Some(Companion::Qkv(qkv)),
    };
    let case = operands.case(&launcher);
    let chosen = select(&case).map(|plan| plan.kernel);
    match layer.k.dim(2)? > SLOTS {
        true => assert!(chosen.is_err(), "one cluster would not take all keys"),
        false => assert_eq!(chosen?, "flash_decoding_with_qkv"),
    }
    let all = with_qkv::for_any_room(&case).expect("a plan");
    // SAFETY: the tensors have the sizes that step and products ask for, and outlive the graph.
    let record = |l: &Launcher| (0..3).try_for_each(|_| unsafe { all.run(l, &operands) });
    let mut graph = Graph::capture(launcher.gpu, record)?;
    for _ in 0..2 {
        // SAFETY: as above; candle's stream carries everything else, too.
        unsafe { graph.launch(launcher.stream)? };
    }
    // A value in the caches is rounded once, or falls to the other side of the middle. What is attended comes from rotated
    // queries and weights that are rounded, too.
    let bounds = match layer.qkv.dtype() {
        DType::BF16 => [2e-2, 1e-2],
        _ => [3e-3, 2e-3],
    };
    let caches = [(&ours.k, &appended.k), (&ours.v, &appended.v)];
    let what = format!("{:?} {form:?}", layer.shape());
    let attended = [((&prepared.out, &y), bounds[0])];
    let stored = caches.map(|pair| (pair, bounds[1]));
    for ((ours, expected), bound) in attended.into_iter().chain(stored) {
        let [error, most] = difference(ours, expected)?;
        assert!(error <= bound * most, "{what}: {error} of {most}");
    }
    // Of the caches only one row of each head is another.
    let flat = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    for (ours, expected) in caches {
        let (ours, expected) = (flat(ours)?, flat(expected)?);
        let others = ours.iter().zip(&expected).filter(|(a, b)| a != b).count();
        assert!(others <= 3 * 64, "{what}: {others}");
    }
    assert!(prepared.counters.to_vec1::<u32>()?.iter().all(|c| *c == 0));
    Ok(())
}

/// A GPU with clusters.
fn device() -> Result<Option<Device>> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(None);
    };
    let arch = Launcher::new(device.as_cuda_device()?)?.gpu.arch;
    Ok((arch >= 90).then_some(device))
}

#[test]
fn a_step_with_its_products_gives_what_float64_gives() -> Result<()> {
    let Some(device) = device()? else {
        return Ok(());
    };
    for dtype in [DType::BF16, DType::F16] {
        for (k, joint, whole) in [
            (576, false, true),
            (640, true, true),
            (512, false, false),
            (136, true, false),
            (8, false, true),
        ] {
            let product = Qkv::new(&device, dtype, k, joint, whole)?;
            for (position, page, window) in [
                (0, None, None),
                (15, Some(16), None),
                (63, None, None),
                (300, Some(8), None),
                (1023, None, Some(100)),
                (1900, Some(32), Some(70)),
                (2047, None, None),
            ] {
                let layer = Layer::of_one(&device, 64, dtype, position)?;
                check(&layer, &product, Form { page, window })?;
            }
        }
    }
    Ok(())
}

/// Where one cluster would go over its keys often, several share them, and each computes the rows.
#[test]
fn several_clusters_give_what_float64_gives() -> Result<()> {
    let Some(device) = device()? else {
        return Ok(());
    };
    let (slots, dtype) = (9000, DType::BF16);
    let randn = |shape: &[usize]| Tensor::randn(0f32, 1., shape, &device)?.to_dtype(dtype);
    let angles = Tensor::randn(0f32, 1., (slots, 32), &device)?;
    let product = Qkv::new(&device, dtype, 576, false, true)?;
    for position in [5u32, 2047, 2048, 5000, 8999] {
        let layer = Layer {
            qkv: randn(&[1, 15 * 64])?,
            k: randn(&[1, 3, slots, 64])?,
            v: randn(&[1, 3, slots, 64])?,
            cos: angles.cos()?,
            sin: angles.sin()?,
            position: Tensor::new(&[position], &device)?,
        };
        check(&layer, &product, Form::default())?;
    }
    Ok(())
}
