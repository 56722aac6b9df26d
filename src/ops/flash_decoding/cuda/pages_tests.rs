//! Kernels over keys in pages with every feature of a step, for sequences enough to fill a GPU, against float64.

use super::tests::{Layer, Prepared, difference, in_pages};
use super::{Attention, StepShape, kernel_table};
use crate::cuda::{Graph, Launcher, address_of, with_kernel};
use crate::ops::flash_decoding::{FlashDecoding, reference};
use crate::ops::{HeadNorms, RopeStyle};
use candle_core::{DType, Device, Result, Tensor};

const KV_HEADS: usize = 3;
const PAGE: usize = 16;
const EPS: f64 = 1e-5;

/// What models differ in.
#[derive(Clone, Copy, Debug)]
struct Features {
    /// Query heads of a key/value head.
    group: usize,
    /// One in so many pairs of dimensions is rotated.
    rotated: usize,
    style: RopeStyle,
    normed: bool,
    softcap: Option<f32>,
    window: Option<usize>,
}

const PLAIN: Features = Features {
    group: 3,
    rotated: 1,
    style: RopeStyle::HalfSplit,
    normed: false,
    softcap: None,
    window: None,
};

fn features() -> [Features; 6] {
    let interleaved = RopeStyle::Interleaved;
    [
        Features {
            rotated: 4,
            ..PLAIN
        },
        Features {
            style: interleaved,
            ..PLAIN
        },
        Features {
            rotated: 2,
            style: interleaved,
            normed: true,
            ..PLAIN
        },
        Features {
            normed: true,
            softcap: Some(20.),
            window: Some(300),
            ..PLAIN
        },
        Features { group: 10, ..PLAIN },
        Features {
            group: 12,
            rotated: 2,
            normed: true,
            softcap: Some(5.),
            ..PLAIN
        },
    ]
}

/// A layer, and weights of the norms of its queries and keys.
struct Case {
    layer: Layer,
    norms: [Tensor; 2],
    features: Features,
}

impl Case {
    fn new(
        device: &Device,
        [dim, heads]: [usize; 2],
        dtype: DType,
        at: &[u32],
        features: Features,
    ) -> Result<Self> {
        let layer = Layer::at(device, dim, [dtype; 2], at)?;
        let randn = |shape: &[usize]| {
            let values = Tensor::randn(0f32, 1., shape, &Device::Cpu)?;
            values.to_dtype(dtype)?.to_device(device)
        };
        let pairs = dim / 2 / features.rotated;
        let columns = |t: &Tensor| t.narrow(1, 0, pairs)?.contiguous();
        Ok(Self {
            layer: Layer {
                qkv: randn(&[at.len(), (heads + 2 * KV_HEADS) * dim])?,
                cos: columns(&layer.cos)?,
                sin: columns(&layer.sin)?,
                ..layer
            },
            norms: [randn(&[dim])?, randn(&[dim])?],
            features,
        })
    }

    fn heads(&self) -> usize {
        self.features.group * KV_HEADS
    }

    /// `[B, Hq D]` in float64.
    fn expected(&self) -> Result<Tensor> {
        let on_cpu = |t: &Tensor| t.to_device(&Device::Cpu);
        let layer = &self.layer;
        let [q, k] = [on_cpu(&self.norms[0])?, on_cpu(&self.norms[1])?];
        let (cos, sin) = (on_cpu(&layer.cos)?, on_cpu(&layer.sin)?);
        let config = FlashDecoding {
            heads: self.heads(),
            cos: &cos,
            sin: &sin,
            style: self.features.style,
            norms: self.features.normed.then_some(HeadNorms {
                q: &q,
                k: &k,
                eps: EPS,
            }),
            scale: 0.125,
            window: self.features.window,
            softcap: self.features.softcap,
        };
        let y = reference(
            &on_cpu(&layer.qkv)?,
            &on_cpu(&layer.k)?,
            &on_cpu(&layer.v)?,
            &on_cpu(&layer.position)?,
            &config,
        )?;
        Tensor::new(y, &Device::Cpu)?.reshape((layer.position.elem_count(), ()))
    }

    /// The step by the kernel that is forced, recorded with another step in front of it.
    fn recorded(&self, launcher: &Launcher) -> Result<Tensor> {
        let layer = &self.layer;
        let (pool, table, _) = in_pages(layer, PAGE)?;
        let shape = StepShape {
            paged: true,
            heads: self.heads(),
            pairs: layer.cos.dims()[1],
            ..layer.shape()
        };
        let mut prepared = Prepared::of(launcher, layer, shape)?;
        prepared.set_pages(&pool, &table)?;
        let step = &mut prepared.step;
        step.window = self.features.window.unwrap_or(0);
        step.style = self.features.style;
        step.softcap = self.features.softcap.unwrap_or(0.);
        if self.features.normed {
            let [q, k] = &self.norms;
            (step.q_norm, step.k_norm) = (address_of(q)?, address_of(k)?);
            step.eps = EPS as f32;
        }
        let attention = Attention::new(launcher, *step, None)?;
        // SAFETY: the tensors have the sizes that the step needs and outlive the graph.
        let record = |l: &Launcher| (0..2).try_for_each(|_| unsafe { attention.run(l) });
        let mut graph = Graph::capture(launcher.gpu, record)?;
        // SAFETY: as above; candle's stream carries everything else, too.
        unsafe { graph.launch(launcher.stream)? };
        prepared.out.to_device(&Device::Cpu)
    }
}

/// Sequences of very different lengths, enough to fill a GPU.
#[test]
fn every_feature_over_pages_agrees_with_float64() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let launcher = Launcher::new(device.as_cuda_device()?)?;
    let at: Vec<u32> = (0..48).map(|i| (i * i * 7) % 2000).collect();
    for dim in [64, 128] {
        for dtype in [DType::BF16, DType::F16] {
            for features in features() {
                let heads = features.group * KV_HEADS;
                let case = Case::new(&device, [dim, heads], dtype, &at, features)?;
                let expected = case.expected()?;
                let mut taken = Vec::new();
                for kernel in kernel_table() {
                    let ours = with_kernel(Some(kernel.name), || case.recorded(&launcher));
                    let ours = match ours {
                        Ok(ours) => ours,
                        Err(error) if error.to_string().contains("cannot take q ") => continue,
                        Err(error) => return Err(error),
                    };
                    taken.push(kernel.name);
                    let [error, most] = difference(&ours, &expected)?;
                    let bound = if dtype == DType::BF16 { 2e-2 } else { 4e-3 };
                    let what = format!("{} {dim} {dtype:?} {features:?}", kernel.name);
                    assert!(error <= bound * most, "{what}: {error} of {most}");
                }
                let pipelined = launcher.gpu.arch >= 80;
                assert!(!pipelined || taken.contains(&"flash_decoding_pipelined"));
            }
        }
    }
    Ok(())
}
