//! The kernels that a GPU has, each by its name, and lengths that only the GPU knows.

use super::{Case, expected, hold, params};
use crate::support::{architecture, devices, values};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::cpu::simd::Level;
use candle_fused::cuda::with_kernel;
use candle_fused::ops::flash_attention::kernel_table;
use candle_fused::ops::{AttentionParams, RaggedBatch, flash_attention_varlen};
use candle_fused::trace;

const SM90: &str = "flash_attention_sm90";
const MMA: &str = "flash_attention_mma";
const PLAIN: &str = "flash_attention_plain";

fn gpu() -> Option<Device> {
    devices().into_iter().find(Device::is_cuda)
}

fn path(case: &Case, params: &AttentionParams, kernel: Option<&str>) -> Result<String> {
    let device = gpu().expect("a GPU");
    let [q, k, v] = case.tensors(1, &device)?;
    let batch = case.batch(&device)?;
    let run = || flash_attention_varlen(&q, &k, &v, &batch, params);
    let (y, calls) = trace::capture(|| with_kernel(kernel, run));
    y?;
    Ok(calls.iter().map(|(call, _)| call.path.clone()).collect())
}

/// Holds the kernels that take the case to float64, and on Hopper to those that are to take it.
fn each_kernel(case: &Case, params: &AttentionParams, kernels: &[&str]) -> Result<()> {
    let Some(device) = gpu() else {
        return Ok(());
    };
    let want = expected(case, params, 31)?;
    let mut taken = Vec::new();
    for kernel in kernel_table() {
        match path(case, params, Some(kernel.name)) {
            Ok(path) => {
                assert!(path.contains(&format!(" {} (", kernel.name)), "{path}");
                let on = (&device, Level::Scalar);
                with_kernel(Some(kernel.name), || hold(case, params, 31, on, &want))?;
                taken.push(kernel.name);
            }
            Err(error) => {
                let refused = format!("kernel {} cannot take q ", kernel.name);
                assert!(error.to_string().contains(&refused), "{error}");
            }
        }
    }
    if architecture(&device)? == 90 {
        assert_eq!(taken, kernels, "{case:?} {params:?}");
    }
    let chosen = path(case, params, None)?;
    assert!(chosen.contains(&format!(" {} (", taken[0])), "{chosen}");
    Ok(())
}

/// Of sequences that are ragged, shorter and longer than a tile, with fewer and with more keys, and with none.
fn ragged() -> Vec<(usize, usize)> {
    vec![
        (300, 300),
        (1, 1),
        (64, 700),
        (0, 50),
        (129, 130),
        (200, 90),
        (40, 0),
        (192, 192),
        (0, 0),
        (65, 128),
    ]
}

#[test]
fn each_kernel_takes_ragged_batches() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        for dim in [64, 80, 96, 128, 256] {
            for causal in [false, true] {
                for behind in [0, 70] {
                    let few = Case {
                        lengths: ragged(),
                        heads: 2,
                        kv_heads: 1,
                        dim,
                        behind,
                        q_dtype: dtype,
                        kv_dtype: dtype,
                        ..Default::default()
                    };
                    each_kernel(&few, &params(dim, causal), &[SM90, MMA, PLAIN])?;
                    // Several rounds of blocks.
                    if causal != (behind == 0) {
                        let many = Case {
                            heads: 24,
                            kv_heads: 8,
                            ..few
                        };
                        each_kernel(&many, &params(dim, causal), &[SM90, MMA, PLAIN])?;
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn other_kernels_take_what_the_first_does_not() -> Result<()> {
    let case = Case {
        lengths: ragged(),
        dim: 64,
        q_dtype: DType::F16,
        kv_dtype: DType::F16,
        ..Default::default()
    };
    let rules = [
        AttentionParams {
            window: Some(100),
            ..params(64, true)
        },
        AttentionParams {
            window_right: Some(30),
            ..params(64, false)
        },
        AttentionParams {
            softcap: Some(3.0),
            ..params(64, true)
        },
    ];
    for rule in rules {
        each_kernel(&case, &rule, &[MMA, PLAIN])?;
    }
    for (q_dtype, kv_dtype, dim, kernels) in [
        (DType::F32, DType::F16, 128, &[MMA, PLAIN][..]),
        (DType::F32, DType::F32, 64, &[PLAIN]),
        (DType::F16, DType::F16, 72, &[PLAIN]),
    ] {
        let case = Case {
            q_dtype,
            kv_dtype,
            dim,
            ..case.clone()
        };
        each_kernel(&case, &params(dim, true), kernels)?;
    }
    Ok(())
}

/// Equal lengths are the dense op's work: the same sums in the same order.
#[test]
fn equal_lengths_are_the_dense_op() -> Result<()> {
    let Some(device) = gpu() else {
        return Ok(());
    };
    for (dim, kernel) in [(128, SM90), (64, MMA), (64, PLAIN)] {
        if kernel == SM90 && architecture(&device)? != 90 {
            continue;
        }
        let case = Case {
            lengths: vec![(256, 256); 3],
            heads: 8,
            dim,
            q_dtype: DType::F16,
            kv_dtype: DType::F16,
            ..Default::default()
        };
        let [q, k, v] = case.tensors(2, &device)?;
        let batch = case.batch(&device)?;
        let params = params(dim, true);
        let y = with_kernel(Some(kernel), || {
            flash_attention_varlen(&q, &k, &v, &batch, &params)
        })?;
        let dense = |t: &Tensor| t.reshape((3, 256, (), dim))?.transpose(1, 2);
        let (q, k, v) = (dense(&q)?, dense(&k)?, dense(&v)?);
        let same = with_kernel(Some(kernel), || {
            candle_fused::ops::flash_attention(&q, &k, &v, &params)
        })?;
        let same = same.transpose(1, 2)?;
        if kernel == PLAIN {
            assert_eq!(values(&y)?, values(&same)?, "{kernel}");
        } else {
            let distance = (values(&y)?.iter().zip(values(&same)?))
                .map(|(a, b)| (a - b).abs())
                .fold(0f64, f64::max);
            assert!(distance < 2e-3, "{kernel}: {distance}");
        }
    }
    Ok(())
}

/// Lengths that decrease or pass the totals: nothing outside of q, k and v is read (compute-sanitizer would
/// tell), and the launch ends.
#[test]
fn lengths_that_do_not_fit_read_nothing_outside() -> Result<()> {
    let Some(device) = gpu() else {
        return Ok(());
    };
    for dtype in [DType::F16, DType::F32] {
        let case = Case {
            lengths: vec![(100, 100), (200, 200)],
            dim: 64,
            q_dtype: dtype,
            kv_dtype: dtype,
            ..Default::default()
        };
        let [q, k, v] = case.tensors(3, &device)?;
        for lengths in [
            [0u32, 250, 100],
            [0, 100, 5000],
            [4000, 5000, 6000],
            [u32::MAX, 0, u32::MAX],
            [0, 1 << 31, u32::MAX],
        ] {
            for causal in [false, true] {
                let lengths = Tensor::new(&lengths, &device)?;
                let batch = RaggedBatch {
                    cu_seqlens_q: lengths.clone(),
                    cu_seqlens_k: lengths,
                    max_seqlen_q: 300,
                };
                flash_attention_varlen(&q, &k, &v, &batch, &params(64, causal))?;
                device.synchronize()?;
            }
        }
    }
    Ok(())
}
