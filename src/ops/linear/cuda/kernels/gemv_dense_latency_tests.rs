//! Every form of the kernel for small dense matrices against float64.

use super::dense_product_tests::each_product;
use super::gemv::is_bf16;
use super::gemv_dense_latency::{fits, of};
use crate::cuda::Launcher;
use crate::cuda::abi::GEMV_DENSE_LATENCY as FORMS;
use crate::ops::Activation;
use candle_core::{Device, Result};

#[test]
fn every_form_agrees_with_float64() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let launcher = Launcher::new(device.as_cuda_device()?)?;
    let (none, swiglu) = (Activation::None, Activation::SwiGlu);
    let mut seen = vec![false; FORMS.len()];
    // Rows and K that blocks do not divide, several matrices, one block of rows and several.
    let sizes = [
        (1, 2048, [500, 60, 60], none, true),
        (3, 1000, [800, 24, 24], none, true),
        (8, 3072, [300, 0, 0], none, false),
        (9, 576, [130, 70, 0], none, true),
        (16, 1024, [264, 264, 0], swiglu, true),
        (27, 768, [96, 96, 0], swiglu, true),
        (37, 1536, [57, 0, 0], none, false),
        (64, 576, [150, 50, 50], none, true),
        (101, 1536, [570, 0, 0], none, false),
        (29, 3000, [600, 120, 0], none, false),
        (128, 576, [72, 24, 24], none, true),
    ];
    each_product(&device, &sizes, |product| {
        let operands = product.operands(&product.w)?;
        let case = operands.case(&launcher);
        for (index, form) in FORMS.iter().enumerate() {
            if fits(&case, form) {
                seen[index] = true;
                let plan = of(&case, index, is_bf16(product.shape.dtype));
                product.assert_close(&launcher, &plan, &operands, &format!("{form:?}"))?;
            }
        }
        Ok(())
    })?;
    // Small GPUs have too few multiprocessors for some.
    assert!(
        launcher.gpu.sms < 100 || seen.iter().all(|seen| *seen),
        "{seen:?}"
    );
    Ok(())
}
