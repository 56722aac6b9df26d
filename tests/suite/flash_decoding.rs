//! The attention step of decoding against float64, and the caches that it leaves.

#[cfg(feature = "cuda")]
mod chosen;

use crate::support::{devices, randn, randn_on, values, widest_error};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::flash_decoding::{FlashDecoding, flash_decoding, reference};
use candle_fused::ops::{HeadNorms, RopeStyle};

/// Shapes, types and features of one case.
#[derive(Clone, Copy, Debug)]
struct Case {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    slots: usize,
    rotated: usize,
    style: RopeStyle,
    dtype: DType,
    cache: DType,
    norms: bool,
    window: Option<usize>,
    softcap: Option<f32>,
}

const CASE: Case = Case {
    heads: 9,
    kv_heads: 3,
    dim: 64,
    slots: 700,
    rotated: 64,
    style: RopeStyle::HalfSplit,
    dtype: DType::F32,
    cache: DType::F32,
    norms: false,
    window: None,
    softcap: None,
};

/// More positions than a few blocks take at once.
const LONG: Case = Case {
    heads: 8,
    kv_heads: 2,
    slots: 9000,
    ..CASE
};

impl Case {
    fn limit(&self) -> f64 {
        match (self.dtype, self.cache) {
            (DType::F32, DType::F32) => 2e-6,
            (DType::BF16, _) | (_, DType::BF16) => 1.2e-2,
            _ => 2e-3,
        }
    }

    /// Runs it on a device, for sequences at these positions, and holds result and caches against
    /// the reference.
    fn check(&self, device: &Device, positions: &[u32]) -> Result<()> {
        let Case {
            heads,
            kv_heads,
            dim,
            slots,
            ..
        } = *self;
        let batch = positions.len();
        let qkv = randn(&[batch, (heads + 2 * kv_heads) * dim], self.dtype)?;
        let caches = [(); 2].map(|()| randn(&[batch, kv_heads, slots, dim], self.cache));
        let [k, v] = caches;
        let (k, v) = (k?, v?);
        let angles = randn(&[slots, self.rotated / 2], DType::F32)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let weights = (randn(&[dim], self.dtype)?, randn(&[dim], self.dtype)?);
        let position = Tensor::new(positions, &Device::Cpu)?;
        let config = |cos, sin, q, k| FlashDecoding {
            heads,
            cos,
            sin,
            style: self.style,
            norms: self.norms.then_some(HeadNorms { q, k, eps: 1e-6 }),
            scale: 1. / (dim as f32).sqrt(),
            window: self.window,
            softcap: self.softcap,
        };
        let expected = reference(
            &qkv,
            &k,
            &v,
            &position,
            &config(&cos, &sin, &weights.0, &weights.1),
        )?;

        let there = |t: &Tensor| t.copy()?.to_device(device);
        let (on_k, on_v, on_cos, on_sin) = (there(&k)?, there(&v)?, there(&cos)?, there(&sin)?);
        let (wq, wk) = (there(&weights.0)?, there(&weights.1)?);
        let config = config(&on_cos, &on_sin, &wq, &wk);
        let got = flash_decoding(&there(&qkv)?, &on_k, &on_v, &there(&position)?, &config)?;
        assert_eq!(got.dims(), [batch, heads * dim]);
        let error = widest_error(&got, &expected)?;
        assert!(
            error < self.limit(),
            "{self:?} at {positions:?} on {device:?}: {error:e}"
        );
        self.check_cache(&on_v, &v, &qkv, positions)
    }

    /// Of the values, the row at the position is the projection's, and no other has changed.
    fn check_cache(
        &self,
        got: &Tensor,
        before: &Tensor,
        qkv: &Tensor,
        positions: &[u32],
    ) -> Result<()> {
        let Case {
            heads,
            kv_heads,
            dim,
            slots,
            ..
        } = *self;
        let (got, mut expected) = (values(got)?, values(before)?);
        let rows = values(&qkv.to_dtype(self.cache)?)?;
        let width = (heads + 2 * kv_heads) * dim;
        for (b, position) in positions.iter().enumerate() {
            for h in 0..kv_heads {
                let from = b * width + (heads + kv_heads + h) * dim;
                let to = ((b * kv_heads + h) * slots + *position as usize) * dim;
                expected[to..to + dim].copy_from_slice(&rows[from..from + dim]);
            }
        }
        assert!(got == expected, "{self:?}: the cache");
        Ok(())
    }
}

#[test]
fn every_dtype_and_position() -> Result<()> {
    use DType::{BF16, F16, F32};
    for device in devices() {
        for (dtype, cache) in [
            (F32, F32),
            (F16, F16),
            (BF16, BF16),
            (F32, F16),
            (F32, BF16),
            (BF16, F16),
        ] {
            let case = Case {
                dtype,
                cache,
                ..CASE
            };
            case.check(&device, &[0])?;
            case.check(&device, &[699])?;
            case.check(&device, &[5, 0, 130, 64, 63, 511, 698, 300])?;
        }
    }
    Ok(())
}

#[test]
fn every_head_dimension_and_grouping() -> Result<()> {
    for device in devices() {
        for dim in [16, 64, 80, 96, 128, 256] {
            for (heads, kv_heads) in [(1, 1), (4, 2), (14, 2), (24, 1), (32, 8)] {
                for cache in [DType::F32, DType::BF16] {
                    let case = Case {
                        heads,
                        kv_heads,
                        dim,
                        rotated: dim,
                        slots: 150,
                        cache,
                        ..CASE
                    };
                    case.check(&device, &[149, 17])?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn norms_partial_rotation_window_and_softcap() -> Result<()> {
    for device in devices() {
        for cache in [DType::F32, DType::F16] {
            let case = Case { cache, ..CASE };
            let cases = [
                Case {
                    norms: true,
                    ..case
                },
                Case {
                    style: RopeStyle::Interleaved,
                    ..case
                },
                Case {
                    rotated: 16,
                    ..case
                },
                Case {
                    rotated: 32,
                    style: RopeStyle::Interleaved,
                    norms: true,
                    ..case
                },
                Case {
                    window: Some(1),
                    ..case
                },
                Case {
                    window: Some(100),
                    ..case
                },
                Case {
                    window: Some(5000),
                    softcap: Some(3.),
                    ..case
                },
                Case {
                    window: Some((1 << 32) + 1),
                    ..case
                },
                Case {
                    window: Some(usize::MAX),
                    ..case
                },
            ];
            for case in cases {
                case.check(&device, &[0, 99, 100, 101, 650])?;
            }
        }
    }
    Ok(())
}

#[test]
fn a_long_context() -> Result<()> {
    for device in devices() {
        for (dim, cache) in [(64, DType::F16), (128, DType::BF16), (64, DType::F32)] {
            let case = Case {
                dim,
                rotated: dim,
                cache,
                ..LONG
            };
            case.check(&device, &[8999])?;
        }
    }
    Ok(())
}

/// By where they lie in memory, whatever tensors they are views of.
#[test]
fn what_overlaps_the_caches_is_refused() -> Result<()> {
    for device in devices() {
        let all = randn_on(&[5 * 256], DType::F32, &device)?;
        let view = |first: usize, dims: &[usize]| {
            all.narrow(0, first, dims.iter().product())?.reshape(dims)
        };
        let table = Tensor::ones((8, 8), DType::F32, &device)?;
        let qkv = randn_on(&[1, 8 * 16], DType::F32, &device)?;
        let position = Tensor::new(&[3u32], &device)?;
        let run = |qkv: &Tensor, table: &Tensor, k: &Tensor, v: &Tensor| {
            let config = FlashDecoding {
                heads: 4,
                cos: table,
                sin: table,
                style: RopeStyle::HalfSplit,
                norms: None,
                scale: 0.25,
                window: None,
                softcap: None,
            };
            let result = flash_decoding(qkv, k, v, &position, &config);
            result.err().map(|e| e.to_string()).unwrap_or_default()
        };
        let cache = |first| view(first, &[1, 2, 8, 16]);
        let (k, v) = (cache(0)?, cache(256)?);
        let said = run(&qkv, &table, &k, &cache(255)?);
        assert!(said.contains("v_cache and k_cache overlap"), "{said}");
        let said = run(&view(200, &[1, 128])?, &table, &k, &v);
        // On the CPU one storage is refused first.
        let pair = match device.is_cpu() {
            true => "qkv and k_cache",
            false => "k_cache and qkv overlap",
        };
        assert!(said.contains(pair), "{said}");
        let said = run(&qkv, &view(480, &[8, 8])?, &k, &v);
        assert!(said.contains("v_cache and cos overlap"), "{said}");
        assert_eq!(run(&qkv, &view(512, &[8, 8])?, &k, &v), "");
        // The CPU locks a storage as a whole: an error, not a deadlock.
        let said = run(&view(1024, &[1, 128])?, &table, &k, &v);
        assert_eq!(said.contains("one storage"), device.is_cpu(), "{said}");
    }
    Ok(())
}

#[test]
fn bad_input_is_named() -> Result<()> {
    let device = Device::Cpu;
    let zeros = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &device);
    let (k, v) = (
        zeros(&[1, 2, 8, 16], DType::F32)?,
        zeros(&[1, 2, 8, 16], DType::F32)?,
    );
    let qkv = randn_on(&[1, 8 * 16], DType::F32, &device)?;
    let table = zeros(&[8, 8], DType::F32)?;
    let position = Tensor::new(&[3u32], &device)?;
    let config = FlashDecoding {
        heads: 4,
        cos: &table,
        sin: &table,
        style: RopeStyle::HalfSplit,
        norms: None,
        scale: 0.25,
        window: None,
        softcap: None,
    };
    let said =
        |qkv: &Tensor, k: &Tensor, v: &Tensor, position: &Tensor, config: &FlashDecoding<'_>| {
            flash_decoding(qkv, k, v, position, config)
                .map(drop)
                .unwrap_err()
                .to_string()
        };
    flash_decoding(&qkv, &k, &v, &position, &config)?;
    assert!(said(&qkv, &k, &k, &position, &config).contains("k_cache overlap"));
    assert!(
        said(
            &qkv,
            &k,
            &zeros(&[1, 2, 9, 16], DType::F32)?,
            &position,
            &config
        )
        .contains("v_cache")
    );
    assert!(said(&qkv.narrow(1, 0, 64)?, &k, &v, &position, &config).contains("qkv has shape"));
    assert!(
        said(&qkv, &k, &v, &Tensor::new(&[8u32], &device)?, &config).contains("position[0] is 8")
    );
    assert!(said(&qkv, &k, &v, &Tensor::new(&[3i64], &device)?, &config).contains("position is"));
    let uneven = FlashDecoding { heads: 3, ..config };
    assert!(said(&qkv, &k, &v, &position, &uneven).contains("3 heads"));
    let none = FlashDecoding {
        window: Some(0),
        ..config
    };
    assert!(said(&qkv, &k, &v, &position, &none).contains("window is 0"));
    let wide = zeros(&[8, 9], DType::F32)?;
    let wide = FlashDecoding {
        cos: &wide,
        sin: &wide,
        ..config
    };
    assert!(said(&qkv, &k, &v, &position, &wide).contains("cos rotates 18"));
    Ok(())
}
