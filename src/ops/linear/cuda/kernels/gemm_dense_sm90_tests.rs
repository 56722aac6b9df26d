//! The dense GEMM for Hopper against float64, in every tiling; and what each tiling takes.

use super::super::plan::Kernel;
use super::super::problem::{Case, Operands};
use super::dense_product_tests::{Product, Shape, each_product};
use super::gemm_dense;
use super::gemm_dense_sm90::{Gemm, MAX_SPLIT_K, Tiling};
use super::gemv_dense;
use crate::cuda::abi::GEMM_DENSE_SM90 as FORMS;
use crate::cuda::profile::Event;
use crate::cuda::{Graph, Launcher, Scratch};
use crate::ops::Activation;
use candle_core::{DType, Device, Result, Tensor};

fn tilings(case: &Case) -> Vec<(Tiling, Gemm)> {
    let forms = (0..FORMS.len()).flat_map(|form| (1..=MAX_SPLIT_K).map(move |k| (form, k)));
    let of = |(form, split_k)| {
        let tiling = Tiling { form, split_k };
        Gemm::new(case, tiling).ok().map(|gemm| (tiling, gemm))
    };
    forms.filter_map(of).collect()
}

#[test]
fn every_tiling_agrees_with_float64() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let launcher = Launcher::new(device.as_cuda_device()?)?;
    if launcher.gpu.arch != 90 {
        return Ok(());
    }
    let swiglu = Activation::SwiGlu;
    // Rows and K that tiles do not divide, matrices whose borders lie within a tile, one matrix and two that gate.
    let sizes = [
        (9, 576, [576, 192, 192], Activation::None, true),
        (33, 1000, [1000, 0, 0], Activation::None, false),
        (70, 2048, [192, 0, 0], swiglu, true),
        (130, 328, [100, 100, 0], swiglu, false),
        (300, 520, [64, 64, 61], Activation::None, false),
        (16, 72, [129, 0, 0], Activation::None, true),
    ];
    each_product(&device, &sizes, |product| {
        let operands = product.operands(&product.w)?;
        let tilings = tilings(&operands.case(&launcher));
        let (shape, count) = (product.shape, tilings.len());
        assert!(count >= 10, "{shape:?}: {count}");
        for (tiling, gemm) in tilings {
            product.assert_close(&launcher, &gemm, &operands, &format!("{tiling:?}"))?;
        }
        Ok(())
    })
}

/// Bytes of weights that do not stay in the L2 cache.
pub(super) const COLD: usize = 256 << 20;

/// Microseconds of a product in a chain of them, with other weights for each.
pub(super) fn time(
    device: &Device,
    launcher: &Launcher,
    kernel: &dyn Kernel,
    operands: &[Operands],
) -> Result<f64> {
    let cuda = device.as_cuda_device()?;
    let mut scratch = Scratch::fixed("linear", cuda, kernel.scratch(&operands[0]))?;
    let mut graph = Graph::capture(launcher.gpu, |launcher| {
        operands.iter().try_for_each(|operands| {
            scratch.reset();
            // SAFETY: the tensors have the sizes that the product takes.
            unsafe { kernel.run(launcher, &mut scratch, operands) }
        })
    })?;
    let mut times = Vec::new();
    for _ in 0..7 {
        let begin = Event::record(launcher.stream)?;
        // SAFETY: every buffer that was recorded is alive.
        unsafe { graph.launch(launcher.stream)? };
        let end = Event::record(launcher.stream)?;
        times.push(end.since(&begin)? * 1e6 / operands.len() as f64);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[3])
}

/// What the library, the GEMV, the chosen tiling and the best ones take.
fn line(device: &Device, launcher: &Launcher, operands: &[Operands]) -> Result<String> {
    let case = operands[0].case(launcher);
    let of = |kernel: &dyn Kernel| time(device, launcher, kernel, operands);
    let library = of(&*gemm_dense::plan(&case).expect("any product"))?;
    let gemv = match gemv_dense::mma(&case) {
        Ok(kernel) if case.m <= gemv_dense::MAX_M => of(&*kernel)?,
        _ => f64::NAN,
    };
    let chosen = Tiling::of(&case).expect("a tiling");
    let (mut ours, mut times) = (f64::NAN, Vec::new());
    for (tiling, gemm) in tilings(&case) {
        let tokens = FORMS[tiling.form].tokens;
        // Tiles of more tokens than there are, or of far fewer.
        if tiling != chosen && (tokens >= 2 * case.m.max(8) || 4 * tokens < case.m) {
            continue;
        }
        let time = of(&gemm)?;
        if tiling == chosen {
            ours = time;
        }
        times.push((time, gemm.details()));
    }
    times.sort_by(|a, b| a.0.total_cmp(&b.0));
    let best = times.iter().take(3).map(|(t, d)| format!("{t:.2} {d}"));
    let best = best.collect::<Vec<_>>().join("; ");
    Ok(format!(
        "cuBLASLt {library:.2}, GEMV {gemv:.2}, chosen {ours:.2} {chosen:?}; {best}"
    ))
}

/// For the rules by which a tiling, and a kernel, are chosen.
#[test]
#[ignore = "a measurement: it prints microseconds and holds nothing"]
fn times_of_tilings() -> Result<()> {
    let device = Device::new_cuda(0)?;
    let launcher = Launcher::new(device.as_cuda_device()?)?;
    let (none, swiglu) = (Activation::None, Activation::SwiGlu);
    for (k, rows, activation, norm) in [
        (576, 960, none, true),
        (576, 576, none, false),
        (576, 3072, swiglu, true),
        (1536, 576, none, false),
        (2048, 3072, none, true),
        (2048, 2048, none, false),
        (2048, 16384, swiglu, true),
        (8192, 2048, none, false),
        (4096, 6144, none, true),
        (4096, 4096, none, false),
        (4096, 28672, swiglu, true),
        (14336, 4096, none, false),
        (2048, 128_256, none, true),
    ] {
        let w = Tensor::randn(0f32, 0.02, (rows, k), &device)?.to_dtype(DType::BF16)?;
        let copies = COLD.div_ceil(2 * k * rows).clamp(8, 64);
        let copies: Vec<_> = (0..copies).map(|_| w.copy()).collect::<Result<_>>()?;
        for m in [2, 4, 8, 16, 24, 32, 48, 64, 128, 256] {
            let shape = Shape {
                m,
                k,
                weights: [rows, 0, 0],
                activation,
                norm,
                residuals: false,
                dtype: DType::BF16,
            };
            let product = Product::of(&device, shape, Vec::new())?;
            let operands = copies
                .iter()
                .map(|w| product.operands(std::slice::from_ref(w)))
                .collect::<Result<Vec<_>>>()?;
            let line = line(&device, &launcher, &operands)?;
            println!("{rows}x{k} m {m}: {line}");
        }
    }
    Ok(())
}
