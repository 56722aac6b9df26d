//! The dense GEMM that norms rows of x in registers against float64, in every form; and what each form takes.

use super::super::plan::Kernel;
use super::super::problem::{Case, Operands};
use super::dense_product_tests::{Product, Shape, each_product};
use super::gemm_dense;
use super::gemm_dense_normed_sm90::{FORMS, Gemm, plan};
use super::gemm_dense_sm90_tests::{COLD, time};
use crate::cuda::Launcher;
use crate::ops::Activation;
use candle_core::{DType, Device, Result, Tensor};

fn forms(case: &Case) -> Vec<Gemm> {
    let forms = (0..FORMS.len()).map(|index| Gemm::new(case, index));
    forms.filter_map(std::result::Result::ok).collect()
}

#[test]
fn every_form_agrees_with_float64() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let launcher = Launcher::new(device.as_cuda_device()?)?;
    if launcher.gpu.arch != 90 {
        return Ok(());
    }
    let (none, swiglu) = (Activation::None, Activation::SwiGlu);
    // Rows and K that tiles do not divide, matrices whose borders lie within a tile, one matrix and two that gate, fewer and
    // more stages than a pipeline has, and few rows.
    let sizes = [
        (65, 576, [576, 192, 192], none, true),
        (9, 1000, [1000, 0, 0], none, false),
        (200, 2048, [384, 0, 0], swiglu, true),
        (130, 328, [192, 192, 0], swiglu, true),
        (300, 520, [96, 192, 61], none, false),
        (129, 72, [321, 0, 0], none, true),
        (1000, 576, [192, 192, 0], swiglu, true),
    ];
    let mut seen = [0; FORMS.len()];
    each_product(&device, &sizes, |product| {
        let operands = product.operands(&product.w)?;
        for gemm in forms(&operands.case(&launcher)) {
            let place = FORMS.iter().position(|form| form == gemm.form());
            seen[place.expect("a form")] += 1;
            product.assert_close(&launcher, &gemm, &operands, &gemm.details())?;
        }
        Ok(())
    })?;
    assert!(seen.iter().all(|count| *count >= 6), "{seen:?}");
    Ok(())
}

/// What the library with its norm and its gate, the chosen form and the others take.
fn line(device: &Device, launcher: &Launcher, operands: &[Operands]) -> Result<String> {
    let case = operands[0].case(launcher);
    let of = |kernel: &dyn Kernel| time(device, launcher, kernel, operands);
    let library = of(&*gemm_dense::plan(&case).expect("any product"))?;
    let chosen = match plan(&case) {
        Ok(gemm) => format!("{} {:.2}", gemm.details(), of(&*gemm)?),
        Err(reason) => reason.to_owned(),
    };
    let mut line = format!("cuBLASLt {library:.2}; {chosen};");
    for gemm in forms(&case) {
        let form = gemm.form();
        line += &format!(" {}x{} {:.2}", form.rows, form.channels, of(&gemm)?);
    }
    Ok(line)
}

/// For the rules by which a form, and the kernel, are chosen.
#[test]
#[ignore = "a measurement: it prints microseconds and holds nothing"]
fn times_of_forms() -> Result<()> {
    let device = Device::new_cuda(0)?;
    let launcher = Launcher::new(device.as_cuda_device()?)?;
    let (none, swiglu) = (Activation::None, Activation::SwiGlu);
    for (k, rows, activation, norm) in [
        (576, 960, none, true),
        (576, 576, none, false),
        (576, 3072, swiglu, true),
        (1536, 576, none, false),
        (1024, 4096, none, true),
        (2048, 1024, none, false),
        (1024, 6144, swiglu, true),
        (2048, 3072, none, true),
        (2048, 16384, swiglu, true),
    ] {
        let w = Tensor::randn(0f32, 0.02, (rows, k), &device)?.to_dtype(DType::BF16)?;
        let copies = COLD.div_ceil(2 * k * rows).clamp(8, 32);
        let copies: Vec<_> = (0..copies).map(|_| w.copy()).collect::<Result<_>>()?;
        for m in [48, 65, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096] {
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
