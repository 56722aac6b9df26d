//! A recorded step, which rehearses before it waits, against one that is launched by itself.

use super::{Step, StepShape, launch};
use crate::cuda::{Graph, Launcher, address_of};
use crate::ops::RopeStyle;
use crate::ops::flash_decoding::{FlashDecoding, flash_decoding};
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
        let out = Tensor::zeros((2, 9 * dim), dtype, &device)?;
        let partial = Tensor::zeros(shape.partial_bytes(launcher.gpu), DType::U8, &device)?;
        let counters = Tensor::zeros(shape.counters(launcher.gpu), DType::U32, &device)?;
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
        // SAFETY: the tensors have the sizes that the step asks for and outlive the graph.
        let record = |l: &Launcher| (0..3).try_for_each(|_| unsafe { launch(l, &step) });
        let mut graph = Graph::capture(launcher.gpu, record)?;
        for _ in 0..2 {
            // SAFETY: as above; candle's stream carries everything else, too.
            unsafe { graph.launch(launcher.stream)? };
        }
        let flat = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        assert_eq!(flat(&out)?, flat(&expected)?, "{dim} {dtype:?} {cache:?}");
        assert!(counters.to_vec1::<u32>()?.iter().all(|c| *c == 0));
    }
    Ok(())
}
