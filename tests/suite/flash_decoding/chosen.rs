//! Which kernel runs: what the trace names, and each kernel that takes a step against float64.

use super::{CASE, Case, LONG};
use crate::support::{architecture, devices};
use candle_core::{DType, Device, Result};
use candle_fused::cuda::with_kernel;
use candle_fused::ops::RopeStyle;
use candle_fused::ops::flash_decoding::kernel_table;
use candle_fused::trace;

const CLUSTER: &str = "flash_decoding_cluster";
const MMA: &str = "flash_decoding_mma";
const PLAIN: &str = "flash_decoding_plain";

/// Types of the projection and of the caches, heads, key/value heads, head size, and on Hopper the kernels that take a
/// step: the first of them is chosen.
type Choice = ([DType; 2], [usize; 2], usize, &'static [&'static str]);

const CHOICES: [Choice; 7] = [
    ([DType::F16; 2], [9, 3], 64, &[CLUSTER, MMA, PLAIN]),
    ([DType::BF16; 2], [32, 8], 128, &[CLUSTER, MMA, PLAIN]),
    (
        [DType::F32, DType::BF16],
        [14, 2],
        64,
        &[CLUSTER, MMA, PLAIN],
    ),
    ([DType::BF16; 2], [8, 1], 256, &[MMA, PLAIN]),
    ([DType::F16; 2], [4, 4], 192, &[PLAIN]),
    ([DType::F32; 2], [9, 3], 64, &[PLAIN]),
    ([DType::F16, DType::F32], [24, 1], 80, &[PLAIN]),
];

#[test]
fn the_table_says_which_kernel_runs() -> Result<()> {
    for device in devices().iter().filter(|device| device.is_cuda()) {
        for ([dtype, cache], [heads, kv_heads], dim, expected) in CHOICES {
            let case = Case {
                heads,
                kv_heads,
                dim,
                rotated: dim,
                dtype,
                cache,
                ..CASE
            };
            let run = |kernel| {
                let check = || case.check(device, &[699, 0, 130]);
                let (result, calls) = trace::capture(|| with_kernel(kernel, check));
                let path: String = calls.iter().map(|(call, _)| call.path.clone()).collect();
                result.map(|()| path)
            };
            let mut taken = Vec::new();
            for kernel in kernel_table() {
                match run(Some(kernel.name)) {
                    Ok(path) => {
                        let named = path.contains(&format!(" {} (", kernel.name));
                        assert!(named, "{}: {path}", kernel.name);
                        taken.push(kernel.name);
                    }
                    Err(error) => {
                        let refused = format!("kernel {} cannot take q ", kernel.name);
                        assert!(error.to_string().contains(&refused), "{error}");
                    }
                }
            }
            let chosen = run(None)?;
            assert!(
                chosen.contains(&format!(" {} (", taken[0])),
                "{taken:?}: {chosen}"
            );
            if architecture(device)? == 90 {
                assert_eq!(taken, expected, "{case:?}");
            }
            // A name of another table leaves attention alone.
            assert_eq!(run(Some("gemv_dense"))?, chosen);
        }
    }
    Ok(())
}

/// Every kernel that takes the case, against float64.
fn check_each_kernel(case: &Case, device: &Device, positions: &[u32]) -> Result<usize> {
    let mut taken = 0;
    // That one refuses all of these cases, and would draw numbers for each. Its own tests are in the library.
    let alone = |name: &str| name != "flash_decoding_with_qkv";
    for kernel in kernel_table().filter(|kernel| alone(kernel.name)) {
        match with_kernel(Some(kernel.name), || case.check(device, positions)) {
            Ok(()) => taken += 1,
            Err(error) => {
                let refused = format!("kernel {} cannot take q ", kernel.name);
                assert!(error.to_string().contains(&refused), "{error}");
            }
        }
    }
    Ok(taken)
}

/// Kernels that take steps over caches of 16 bits with heads of 64 and 128.
fn expected(device: &Device) -> Result<usize> {
    Ok(if architecture(device)? == 90 { 3 } else { 2 })
}

#[test]
fn every_kernel_has_every_feature() -> Result<()> {
    use DType::{BF16, F16, F32};
    for device in devices().iter().filter(|device| device.is_cuda()) {
        for (dim, [dtype, cache]) in [
            (64, [F16, F16]),
            (64, [F32, F16]),
            (128, [BF16, BF16]),
            (128, [F32, BF16]),
        ] {
            let case = Case {
                dim,
                rotated: dim,
                dtype,
                cache,
                norms: true,
                ..CASE
            };
            let cases = [
                case,
                Case {
                    style: RopeStyle::Interleaved,
                    ..case
                },
                Case {
                    window: Some(100),
                    ..case
                },
                Case {
                    softcap: Some(3.),
                    norms: false,
                    ..case
                },
                // As many query heads as a block takes, and more.
                Case {
                    heads: 8,
                    kv_heads: 1,
                    ..case
                },
                Case {
                    heads: 24,
                    kv_heads: 1,
                    norms: false,
                    ..case
                },
            ];
            for case in cases {
                // On both sides of the borders of warps and of blocks.
                for positions in [&[0, 15, 16, 63, 64, 65, 127][..], &[128, 255, 699], &[512]] {
                    let taken = check_each_kernel(&case, device, positions)?;
                    assert!(taken >= expected(device)?, "{case:?}: {taken}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn every_kernel_takes_long_contexts() -> Result<()> {
    for device in devices().iter().filter(|device| device.is_cuda()) {
        for (dim, dtype) in [(64, DType::F16), (128, DType::BF16)] {
            let case = Case {
                dim,
                rotated: dim,
                dtype,
                cache: dtype,
                ..LONG
            };
            for position in [2046, 2047, 2048, 5000, 8999] {
                let taken = check_each_kernel(&case, device, &[position])?;
                assert!(taken >= expected(device)?, "{case:?}: {taken}");
            }
        }
    }
    Ok(())
}
