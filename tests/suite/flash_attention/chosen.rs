//! Which kernel runs: what the trace names, and each kernel that takes a case against float64.

use super::{Case, Kv, causal, check};
use crate::support::{architecture, devices};
use candle_core::{DType, Device, Result};
use candle_fused::cuda::with_kernel;
use candle_fused::ops::AttentionParams;
use candle_fused::ops::flash_attention::{flash_attention, kernel_table};
use candle_fused::trace;

const SM90: &str = "flash_attention_sm90";
const MMA: &str = "flash_attention_mma";
const PLAIN: &str = "flash_attention_plain";

/// Types of q and of keys and values, queries, heads, their size, and on Hopper the kernels that take it: the first of
/// them is chosen.
type Choice = ([DType; 2], usize, usize, usize, &'static [&'static str]);

const CHOICES: [Choice; 8] = [
    ([DType::F16; 2], 200, 6, 64, &[SM90, MMA, PLAIN]),
    ([DType::BF16; 2], 300, 24, 80, &[SM90, MMA, PLAIN]),
    ([DType::BF16; 2], 100, 3, 128, &[SM90, MMA, PLAIN]),
    ([DType::F16; 2], 31, 3, 64, &[MMA, PLAIN]),
    ([DType::F32, DType::F16], 60, 3, 96, &[MMA, PLAIN]),
    ([DType::F32, DType::F16], 60, 3, 256, &[PLAIN]),
    ([DType::F32; 2], 60, 3, 64, &[PLAIN]),
    ([DType::F16; 2], 60, 3, 72, &[PLAIN]),
];

/// The trace's line of a call, by the kernel of this name if there is one.
fn path(
    case: &Case,
    params: &AttentionParams,
    device: &Device,
    kernel: Option<&str>,
) -> Result<String> {
    let (q, k, v) = case.tensors(1, device);
    let run = || flash_attention(&q, &k, &v, params);
    let (y, calls) = trace::capture(|| with_kernel(kernel, run));
    y?;
    Ok(calls.iter().map(|(call, _)| call.path.clone()).collect())
}

/// Holds the kernels that take the case to float64, and on Hopper to those that are to take it.
fn each_kernel(case: &Case, params: &AttentionParams, expected: &[&str]) -> Result<()> {
    for device in devices().iter().filter(|device| device.is_cuda()) {
        let mut taken = Vec::new();
        for kernel in kernel_table() {
            match path(case, params, device, Some(kernel.name)) {
                Ok(path) => {
                    let named = path.contains(&format!(" {} (", kernel.name));
                    assert!(named, "{}: {path}", kernel.name);
                    with_kernel(Some(kernel.name), || check(case, params, 31));
                    taken.push(kernel.name);
                }
                Err(error) => {
                    let refused = format!("kernel {} cannot take q ", kernel.name);
                    assert!(error.to_string().contains(&refused), "{error}");
                }
            }
        }
        let chosen = path(case, params, device, None)?;
        assert!(
            chosen.contains(&format!(" {} (", taken[0])),
            "{taken:?}: {chosen}"
        );
        if architecture(device)? == 90 {
            assert_eq!(taken, expected, "{case:?} {params:?}");
        }
        // A name of another table leaves attention alone.
        assert_eq!(path(case, params, device, Some("gemv_dense"))?, chosen);
    }
    Ok(())
}

#[test]
fn the_table_says_which_kernel_runs() -> Result<()> {
    for ([q_dtype, kv_dtype], queries, heads, dim, kernels) in CHOICES {
        let case = Case {
            heads,
            kv_heads: heads / 3,
            queries,
            keys: queries + 9,
            dim,
            q_transposed: true,
            q_dtype,
            kv_dtype,
            ..Default::default()
        };
        each_kernel(&case, &causal(dim), kernels)?;
    }
    Ok(())
}

#[test]
fn what_hides_keys_and_what_is_strided_has_its_kernel() -> Result<()> {
    let case = Case {
        heads: 6,
        kv_heads: 2,
        queries: 70,
        keys: 130,
        dim: 64,
        q_dtype: DType::F16,
        kv_dtype: DType::F16,
        ..Default::default()
    };
    let window = AttentionParams {
        window: Some(33),
        softcap: Some(20.0),
        ..causal(64)
    };
    each_kernel(&case, &window, &[MMA, PLAIN])?;
    for (kv, kernels) in [
        (Kv::TokenMajor, &[SM90, MMA, PLAIN][..]),
        (Kv::Broadcast, &[SM90, MMA, PLAIN]),
        (Kv::Transposed, &[PLAIN]),
    ] {
        let case = Case { kv, ..case.clone() };
        each_kernel(&case, &causal(64), kernels)?;
    }
    Ok(())
}
