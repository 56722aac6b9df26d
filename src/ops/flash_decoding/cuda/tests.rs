//! A recorded step, whose kernel does what it can before it waits, against one that is launched by itself.

use super::{Attention, Companion, IndependentProduct, Step, StepShape, kernel_table, partials};
use crate::cuda::{Graph, Launcher, address_of, with_kernel};
use crate::ops::flash_decoding::{FlashDecoding, flash_decoding};
use crate::ops::linear;
use crate::ops::linear::cuda::{NormAt, NormKind, Operands, ProductAt};
use crate::ops::paged_attention::cuda::pool_pages;
use crate::ops::{
    Activation, ActivationBits, Epilogue, PageLayout, PagePool, Prologue, RopeStyle, Weight,
};
use candle_core::{DType, Device, Error, Result, Tensor, bail};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_distr::Normal;

/// A layer's tensors: projection, caches, tables, positions.
#[derive(Clone)]
pub(super) struct Layer {
    pub qkv: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub cos: Tensor,
    pub sin: Tensor,
    pub position: Tensor,
}

pub(super) const SLOTS: usize = 2048;

/// Normally distributed values, by whose seed rounding errors are the same in every run.
pub(super) fn normal(rng: &mut StdRng, shape: &[usize], scale: f32) -> Result<Tensor> {
    let distribution = Normal::new(0., scale).expect("a scale");
    let values = rng.sample_iter(distribution).take(shape.iter().product());
    Tensor::from_vec(values.collect(), shape, &Device::Cpu)
}

impl Layer {
    fn new(device: &Device, dim: usize, dtype: DType, cache: DType) -> Result<Self> {
        Self::at(device, dim, [dtype, cache], &[31, 1700])
    }

    /// Of sequences whose next tokens are at these positions.
    pub fn at(device: &Device, dim: usize, [dtype, cache]: [DType; 2], at: &[u32]) -> Result<Self> {
        let sequences = at.len();
        let rng = &mut StdRng::seed_from_u64(1);
        let mut randn =
            |shape: &[usize], dtype| normal(rng, shape, 1.)?.to_dtype(dtype)?.to_device(device);
        let angles = randn(&[SLOTS, dim / 2], DType::F32)?;
        Ok(Self {
            qkv: randn(&[sequences, 15 * dim], dtype)?,
            k: randn(&[sequences, 3, SLOTS, dim], cache)?,
            v: randn(&[sequences, 3, SLOTS, dim], cache)?,
            cos: angles.cos()?,
            sin: angles.sin()?,
            position: Tensor::new(at, device)?,
        })
    }

    /// The same with one sequence, whose next token is at `position`.
    pub fn of_one(device: &Device, dim: usize, dtype: DType, position: u32) -> Result<Self> {
        let layer = Self::new(device, dim, dtype, dtype)?;
        let first = |t: &Tensor| t.narrow(0, 0, 1)?.copy();
        Ok(Self {
            qkv: first(&layer.qkv)?,
            k: first(&layer.k)?,
            v: first(&layer.v)?,
            position: Tensor::new(&[position], device)?,
            ..layer
        })
    }

    pub fn shape(&self) -> StepShape {
        let [slots, dim] = [2, 3].map(|i| self.k.dims()[i]);
        StepShape {
            sequences: self.position.elem_count(),
            heads: 9,
            kv_heads: 3,
            head_dim: dim,
            slots,
            paged: false,
            positions: slots,
            pairs: dim / 2,
            dtype: self.qkv.dtype(),
            cache_dtype: self.k.dtype(),
        }
    }

    fn eager(&self) -> Result<Tensor> {
        self.eager_in(&self.k.copy()?, &self.v.copy()?, None)
    }

    /// The step over these caches.
    pub fn eager_in(&self, k: &Tensor, v: &Tensor, window: Option<usize>) -> Result<Tensor> {
        let config = self.config(window);
        flash_decoding(&self.qkv, k, v, &self.position, &config)
    }

    pub fn config(&self, window: Option<usize>) -> FlashDecoding<'_> {
        FlashDecoding {
            heads: 9,
            cos: &self.cos,
            sin: &self.sin,
            style: RopeStyle::HalfSplit,
            norms: None,
            scale: 0.125,
            window,
            softcap: None,
        }
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
        let mut taken = 0;
        for kernel in kernel_table() {
            taken += usize::from(check_recorded(&launcher, &layer, kernel.name)?);
        }
        assert!(taken > 0, "{dim} {dtype:?} {cache:?}");
    }
    Ok(())
}

/// A step by a kernel, recorded and replayed, against the same launched by itself, if the kernel takes it.
fn check_recorded(launcher: &Launcher, layer: &Layer, kernel: &str) -> Result<bool> {
    let expected = match with_kernel(Some(kernel), || layer.eager()) {
        Ok(expected) => expected,
        Err(error) => return refused(&error).map(|()| false),
    };
    let prepared = Prepared::new(launcher, layer)?;
    let attention = with_kernel(Some(kernel), || {
        Attention::new(launcher, prepared.step, None)
    })?;
    // SAFETY: the tensors have the sizes that the step asks for and outlive the graph.
    let record = |l: &Launcher| (0..3).try_for_each(|_| unsafe { attention.run(l) });
    let mut graph = Graph::capture(launcher.gpu, record)?;
    for _ in 0..2 {
        // SAFETY: as above; candle's stream carries everything else, too.
        unsafe { graph.launch(launcher.stream)? };
    }
    let flat = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    let what = format!("{kernel} {:?}", layer.shape());
    assert_eq!(flat(&prepared.out)?, flat(&expected)?, "{what}");
    assert!(prepared.counters.to_vec1::<u32>()?.iter().all(|c| *c == 0));
    Ok(true)
}

/// A layer's caches cut into pages, in any order, and the table of them.
pub(super) fn in_pages(layer: &Layer, page: usize) -> Result<(PagePool, Tensor, Vec<usize>)> {
    let (sequences, heads, _, dim) = layer.k.dims4()?;
    let each = SLOTS / page;
    let mut order: Vec<usize> = (0..sequences * each).collect();
    order.shuffle(&mut StdRng::seed_from_u64(4));
    // Where a page of the cache has gone to.
    let mut table = vec![0u32; order.len()];
    for (place, own) in order.iter().enumerate() {
        table[*own] = place as u32;
    }
    let device = layer.k.device();
    let ids: Vec<u32> = order.iter().map(|own| *own as u32).collect();
    let ids = Tensor::new(ids, device)?;
    let cut = |t: &Tensor| {
        let cut = t.reshape((sequences, heads, each, page, dim))?;
        let cut = cut.permute((0, 2, 3, 1, 4))?.contiguous()?;
        cut.reshape(((), page, heads, dim))?.index_select(&ids, 0)
    };
    let both = Tensor::stack(&[cut(&layer.k)?, cut(&layer.v)?], 1)?;
    let table = Tensor::from_vec(table, (sequences, each), device)?;
    Ok((PagePool::combined(&both, PageLayout::Nhd)?, table, order))
}

#[test]
fn keys_in_pages_give_what_a_cache_gives() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let launcher = Launcher::new(device.as_cuda_device()?)?;
    // Few sequences share a GPU's blocks out; many have some for themselves, and the long ones several.
    let many: Vec<u32> = (0..40).map(|i| (i * i * 7) % 2000).collect();
    for (dim, dtype, cache, page) in [
        (64, DType::BF16, DType::BF16, 16),
        (64, DType::F32, DType::F16, 8),
        (80, DType::F16, DType::F16, 32),
        (96, DType::BF16, DType::BF16, 16),
        (128, DType::BF16, DType::BF16, 128),
        (256, DType::F16, DType::F16, 16),
        (64, DType::F32, DType::F32, 16),
    ] {
        for (at, window) in [
            (&[31u32, 1700][..], None),
            (&[0, 15, 16, 2047], None),
            (&[40, 1701], Some(100)),
            (&many, None),
            (&many, Some(300)),
        ] {
            let layer = Layer::at(&device, dim, [dtype, cache], at)?;
            let taken: Result<usize> = kernel_table().try_fold(0, |taken, kernel| {
                let takes = check_pages(&launcher, &layer, page, window, kernel.name)?;
                Ok(taken + usize::from(takes))
            });
            // What takes any dtype does, and where caches have 16 bits, tensor cores do.
            let least = if cache == DType::F32 { 1 } else { 2 };
            let taken = taken?;
            assert!(taken >= least, "{dim} {dtype:?} {cache:?} {at:?}: {taken}");
        }
    }
    Ok(())
}

/// Whether an error is a kernel's that does not take a step, and no other.
fn refused(error: &Error) -> Result<()> {
    match error.to_string().contains("cannot take q ") {
        true => Ok(()),
        false => bail!("{error}"),
    }
}

/// The step over a layer's keys in pages against the step over its caches, if the kernel takes it.
fn check_pages(
    launcher: &Launcher,
    layer: &Layer,
    page: usize,
    window: Option<usize>,
    kernel: &str,
) -> Result<bool> {
    let (k, v) = (layer.k.copy()?, layer.v.copy()?);
    let (pool, table, order) = in_pages(layer, page)?;
    let shape = StepShape {
        paged: true,
        ..layer.shape()
    };
    let mut prepared = Prepared::of(launcher, layer, shape)?;
    prepared.set_pages(&pool, &table)?;
    prepared.step.window = window.unwrap_or(0);
    let attention = with_kernel(Some(kernel), || {
        Attention::new(launcher, prepared.step, None)
    });
    let attention = match attention {
        Ok(attention) => attention,
        Err(error) => return refused(&error).map(|()| false),
    };
    // The pipelined kernel takes pages alone; it norms and rotates as this one does, bit for bit.
    let over_slots = match kernel {
        "flash_decoding_pipelined" => "flash_decoding_mma",
        kernel => kernel,
    };
    let eager = || layer.eager_in(&k, &v, window);
    let expected = with_kernel(Some(over_slots), eager)?;
    // SAFETY: the tensors have the sizes that the step asks for and outlive the graph.
    let record = |l: &Launcher| (0..2).try_for_each(|_| unsafe { attention.run(l) });
    let mut graph = Graph::capture(launcher.gpu, record)?;
    // SAFETY: as above; candle's stream carries everything else, too.
    unsafe { graph.launch(launcher.stream)? };
    let bound = match layer.qkv.dtype() {
        DType::BF16 => 1e-2,
        DType::F16 => 2e-3,
        _ => 1e-5,
    };
    let [error, most] = difference(&prepared.out, &expected)?;
    let what = format!("{kernel} {shape:?} {page} {window:?}");
    assert!(error <= bound * most, "{what}: {error} of {most}");
    assert!(prepared.counters.to_vec1::<u32>()?.iter().all(|c| *c == 0));
    // The new keys and values are where the cache has them, and nothing else has changed.
    let written = Layer {
        k,
        v,
        ..layer.clone()
    };
    let (after, _, again) = in_pages(&written, page)?;
    assert_eq!(order, again);
    for (ours, cache) in [(&pool.k, &after.k), (&pool.v, &after.v)] {
        let [error, _] = difference(ours, cache)?;
        assert_eq!(error, 0., "{what}");
    }
    Ok(true)
}

/// Scratch memory of a step, and the step over it.
pub(super) struct Prepared {
    pub out: Tensor,
    _partial: Tensor,
    pub counters: Tensor,
    pub step: Step,
}

impl Prepared {
    pub fn new(launcher: &Launcher, layer: &Layer) -> Result<Self> {
        Self::of(launcher, layer, layer.shape())
    }

    pub fn of(launcher: &Launcher, layer: &Layer, shape: StepShape) -> Result<Self> {
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
            pages: None,
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

impl Prepared {
    /// Has the step read and write the pages of a pool, which are those of the sequences by the rows of `table`.
    pub fn set_pages(&mut self, pool: &PagePool, table: &Tensor) -> Result<()> {
        let (sequences, width) = table.dims2()?;
        let [sequences, width] = [sequences as u64, width as u64];
        let rows = [address_of(table)?, 0, width, width, sequences];
        let pages = pool_pages("test", pool, pool.checked("test")?, rows)?;
        let step = &mut self.step;
        (step.k_cache, step.v_cache) = (pages.k, pages.v);
        (step.pages, step.shape.paged) = (Some(pages), true);
        Ok(())
    }
}

/// The largest difference, and the largest value of `b`.
pub(super) fn difference(a: &Tensor, b: &Tensor) -> Result<[f32; 2]> {
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

/// A product that attention runs beside: up of a GPT-NeoX layer, with its layer norm, bias and GELU.
struct Up {
    x: Tensor,
    w: Tensor,
    bias: Tensor,
    /// Of the norm.
    weight: Tensor,
    shift: Tensor,
    y: Tensor,
}

impl Up {
    const K: usize = 1280;
    const ROWS: usize = 2056;
    const EPS: f32 = 1e-5;

    fn new(device: &Device, dtype: DType) -> Result<Self> {
        let randn = |shape: &[usize], scale: f32| {
            Tensor::randn(0f32, scale, shape, &Device::Cpu)?
                .to_dtype(dtype)?
                .to_device(device)
        };
        Ok(Self {
            x: randn(&[1, Self::K], 1.)?,
            w: randn(&[Self::ROWS, Self::K], 0.05)?,
            bias: randn(&[Self::ROWS], 1.)?,
            weight: randn(&[Self::K], 1.)?,
            shift: randn(&[Self::K], 1.)?,
            y: Tensor::zeros((1, Self::ROWS), dtype, device)?,
        })
    }

    /// The product by itself.
    fn eager(&self) -> Result<Tensor> {
        let prologue = Prologue::LayerNorm {
            weight: &self.weight,
            bias: Some(&self.shift),
            eps: Self::EPS.into(),
        };
        let epilogue = Epilogue {
            bias: Some(&self.bias),
            activation: Activation::Gelu,
            residuals: &[],
        };
        let weights = [Weight::Dense(self.w.clone())];
        linear::launch(
            "linear",
            &self.x,
            prologue,
            &weights,
            epilogue,
            ActivationBits::Auto,
        )
    }

    /// The same into `y`.
    fn operands(&self) -> Result<Operands> {
        let at = ProductAt {
            x: address_of(&self.x)?,
            norm: Some(NormAt {
                kind: NormKind::Layer,
                weight: address_of(&self.weight)?,
                bias: address_of(&self.shift)?,
                eps: Self::EPS,
            }),
            bias: address_of(&self.bias)?,
            activation: Activation::Gelu,
            residuals: [0; 2],
            out: address_of(&self.y)?,
            stride: Self::ROWS,
            m: 1,
            k: Self::K,
            x_dtype: self.x.dtype(),
            x_bits: ActivationBits::Auto,
            out_dtype: self.x.dtype(),
        };
        Operands::new(&[Weight::Dense(self.w.clone())], &at)
    }
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
            let layer = Layer::of_one(&device, dim, dtype, position)?;
            let up = Up::new(&device, dtype)?;
            let (attended, expected) = (layer.eager()?, up.eager()?);
            let prepared = Prepared::new(&launcher, &layer)?;
            let product = up.operands()?;
            let both = Attention::new(
                &launcher,
                prepared.step,
                Some(Companion::Independent(IndependentProduct {
                    product,
                    ready,
                })),
            )?;
            // SAFETY: the tensors have the sizes that step and product ask for, and outlive the graph.
            let record = |l: &Launcher| (0..3).try_for_each(|_| unsafe { both.run(l) });
            let mut graph = Graph::capture(launcher.gpu, record)?;
            // SAFETY: as above; candle's stream carries everything else, too.
            unsafe { graph.launch(launcher.stream)? };
            let bound = if dtype == DType::BF16 { 1e-2 } else { 2e-3 };
            for (ours, other) in [(&prepared.out, &attended), (&up.y, &expected)] {
                let [error, most] = difference(ours, other)?;
                assert!(error <= bound * most, "{dim} {dtype:?}: {error} of {most}");
            }
            assert!(prepared.counters.to_vec1::<u32>()?.iter().all(|c| *c == 0));
        }
    }
    Ok(())
}
