//! Pipelined GEMVs against float64.

use super::super::Product as Planned;
use super::super::plan::Kernel;
use super::super::problem::{Fetch, NormAt, NormKind, Operand, Operands, ProductAt};
use super::gemv_dense_pipelined::{NAME, Pipelined, pair};
use crate::cuda::{Launcher, Scratch, address_of};
use crate::ops::{Activation, ActivationBits};
use candle_core::{D, DType, Device, Result, Tensor};

/// Random values on the device, and the same in float64.
struct Both {
    on: Tensor,
    exact: Tensor,
}

impl Both {
    fn new(device: &Device, dtype: DType, shape: &[usize], scale: f32) -> Result<Self> {
        let t = Tensor::randn(0f32, scale, shape, &Device::Cpu)?.to_dtype(dtype)?;
        Ok(Self {
            on: t.to_device(device)?,
            exact: t.to_dtype(DType::F64)?,
        })
    }
}

fn assert_close(ours: &Tensor, expected: &Tensor, bound: f64, what: &str) -> Result<()> {
    let expected = expected.to_vec1::<f64>()?;
    let most = expected.iter().fold(1f64, |most, v| most.max(v.abs()));
    let ours = ours.to_dtype(DType::F32)?.to_vec1::<f32>()?;
    for (ours, expected) in ours.iter().zip(&expected) {
        let error = (f64::from(*ours) - expected).abs();
        assert!(error <= bound * most, "{what}: {error} of {most}");
    }
    Ok(())
}

/// x behind the norm, in float64 but rounded where the kernel rounds.
fn normed(x: &Tensor, kind: NormKind, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let centred = match kind {
        NormKind::Rms => x.clone(),
        NormKind::Layer => x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?,
    };
    let squares = (centred.sqr()?.mean_keepdim(D::Minus1)? + 1e-5)?;
    let scaled = centred.broadcast_div(&squares.sqrt()?)?.mul(weight)?;
    match kind {
        NormKind::Rms => Ok(scaled),
        NormKind::Layer => scaled + bias,
    }
}

/// One row of x with a matrix for each of `weights`' rows, and all that belongs to them.
struct Product {
    x: Both,
    norm: Option<NormKind>,
    gain: Both,
    shift: Both,
    w: Both,
    bias: Both,
    residual: Both,
    y: Tensor,
    activation: Activation,
    operands: Operands,
}

impl Product {
    fn new(
        device: &Device,
        dtype: DType,
        k: usize,
        weights: [usize; 3],
        activation: Activation,
        norm: Option<NormKind>,
    ) -> Result<Self> {
        let randn = |shape: &[usize], scale| Both::new(device, dtype, shape, scale);
        let rows = weights.iter().sum::<usize>();
        let width = activation.outputs(rows);
        let (x, gain, shift) = (randn(&[k], 1.)?, randn(&[k], 1.)?, randn(&[k], 1.)?);
        let w = randn(&[rows, k], 1. / (k as f32).sqrt())?;
        let (bias, residual) = (randn(&[rows], 1.)?, randn(&[width], 1.)?);
        let y = Tensor::zeros(width, dtype, device)?;
        let (first, size) = (address_of(&w.on)?, (k * dtype.size_in_bytes()) as u64);
        let mut from = 0;
        let weights = weights.into_iter().filter(|rows| *rows > 0).map(|rows| {
            from += rows;
            Operand::Dense {
                address: first + (from - rows) as u64 * size,
                rows,
                dtype,
            }
        });
        let weights = weights.collect();
        let (weight, shifts) = (address_of(&gain.on)?, address_of(&shift.on)?);
        let norm_at = |kind| NormAt {
            kind,
            weight,
            bias: if kind == NormKind::Layer { shifts } else { 0 },
            eps: 1e-5,
        };
        let at = ProductAt {
            x: address_of(&x.on)?,
            norm: norm.map(norm_at),
            bias: address_of(&bias.on)?,
            activation,
            residuals: [address_of(&residual.on)?, 0],
            out: address_of(&y)?,
            stride: width,
            m: 1,
            k,
            x_dtype: dtype,
            x_bits: ActivationBits::Auto,
            out_dtype: dtype,
        };
        let operands = Operands {
            weights,
            at,
            second: None,
            fetch: None,
            dequantized: None,
        };
        Ok(Self {
            x,
            norm,
            gain,
            shift,
            w,
            bias,
            residual,
            y,
            activation,
            operands,
        })
    }

    /// What the outputs have to be, `x` being the inputs in float64.
    fn expected(&self, x: &Tensor) -> Result<Tensor> {
        let input = match self.norm {
            Some(kind) => normed(x, kind, &self.gain.exact, &self.shift.exact)?,
            None => x.clone(),
        };
        let sums = (product(&self.w, &input)? + &self.bias.exact)?;
        let y = match self.activation {
            Activation::SwiGlu => {
                let width = self.y.elem_count();
                let up = sums.narrow(0, width, width)?;
                sums.narrow(0, 0, width)?.silu()?.mul(&up)?
            }
            Activation::Silu => sums.silu()?,
            Activation::Gelu => sums.gelu_erf()?,
            _ => sums,
        };
        y + &self.residual.exact
    }
}

fn product(w: &Both, x: &Tensor) -> Result<Tensor> {
    w.exact.matmul(&x.unsqueeze(1)?)?.squeeze(1)
}

/// Keys and values that are fetched beside a product, and a position.
struct Cache {
    kv: Both,
    position: Tensor,
}

impl Cache {
    /// 70 tokens of two heads, of which 69 are there.
    fn new(device: &Device) -> Result<Self> {
        Ok(Self {
            kv: Both::new(device, DType::F16, &[2, 2, 70, 72], 1.)?,
            position: Tensor::new(&[69u32], device)?,
        })
    }

    fn fetch(&self) -> Result<Fetch> {
        let (row, plane) = (2 * 72, 2 * 72 * 70);
        let k = address_of(&self.kv.on)?;
        Ok(Fetch {
            k,
            v: k + 2 * u64::from(plane),
            position: address_of(&self.position)?,
            planes: 2,
            plane,
            row,
        })
    }
}

#[test]
fn streamed_products_agree_with_float64() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let launcher = Launcher::new(device.as_cuda_device()?)?;
    let (layer, rms) = (Some(NormKind::Layer), Some(NormKind::Rms));
    let cache = Cache::new(&device)?;
    // Rows that N tiles and blocks do not divide, k that K blocks do not, several matrices, long rows.
    for (k, weights, activation, norm) in [
        (2048, [4097, 0, 0], Activation::None, None),
        (2088, [2304, 301, 298], Activation::None, rms),
        (2560, [7680, 0, 0], Activation::None, layer),
        (2056, [2805, 0, 0], Activation::Gelu, layer),
        (4096, [2050, 0, 0], Activation::SwiGlu, rms),
        (8192, [517, 516, 0], Activation::None, rms),
        (14336, [515, 0, 0], Activation::None, None),
        (16384, [257, 0, 0], Activation::Silu, layer),
    ] {
        for dtype in [DType::BF16, DType::F16] {
            let one = Product::new(&device, dtype, k, weights, activation, norm)?;
            let operands = Operands {
                fetch: Some(cache.fetch()?),
                ..one.operands.clone()
            };
            let kernel = Pipelined::new(&operands.case(&launcher)).expect("a kernel");
            let mut scratch = Scratch::new(device.as_cuda_device()?);
            // SAFETY: the tensors have the sizes that the product takes.
            unsafe { kernel.run(&launcher, &mut scratch, &operands)? };
            let bound = if dtype == DType::BF16 { 8e-3 } else { 1e-3 };
            let what = format!("{k} {weights:?} {activation:?} {dtype:?}");
            assert_close(&one.y, &one.expected(&one.x.exact)?, bound, &what)?;
        }
    }
    Ok(())
}

#[test]
fn a_pair_of_matrices_is_the_sum_of_their_products() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let launcher = Launcher::new(device.as_cuda_device()?)?;
    for (border, behind, rows) in [
        (64, 256, 64),
        (640, 2560, 640),
        (2560, 10240, 2561),
        (8, 8, 3),
        // As long as those of GPT-NeoX-20B, which are more than a block's threads have at once.
        (6144, 24576, 515),
    ] {
        for dtype in [DType::BF16, DType::F16] {
            let made = |k| Product::new(&device, dtype, k, [rows, 0, 0], Activation::None, None);
            let (first, second) = (made(border)?, made(behind)?);
            let x = Both::new(&device, dtype, &[border + behind], 1.)?;
            let (mut one, mut two) = (first.operands.clone(), second.operands.clone());
            one.at.x = address_of(&x.on)?;
            two.at.x = one.at.x + 2 * border as u64;
            let both = pair(&one, &two).expect("two matrices along k");
            let planned = Planned::of(&launcher, both)?;
            assert_eq!(planned.single().map(|(plan, _)| plan.kernel), Some(NAME));
            let mut scratch = Scratch::new(device.as_cuda_device()?);
            // SAFETY: the tensors have the sizes that the product takes.
            unsafe { planned.run(&launcher, &mut scratch)? };
            let expected = first.expected(&x.exact.narrow(0, 0, border)?)?;
            let behind = product(&second.w, &x.exact.narrow(0, border, behind)?)?;
            let bound = if dtype == DType::BF16 { 4e-3 } else { 5e-4 };
            let what = format!("{border} {dtype:?}");
            assert_close(&first.y, &(expected + behind)?, bound, &what)?;
            assert!(pair(&two, &one).is_none());
        }
    }
    Ok(())
}
