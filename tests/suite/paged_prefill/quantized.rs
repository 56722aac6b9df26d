//! Keys and values of 8 bits.

use super::{BATCH, CASE, Case};
use crate::pages::FORMS;
use crate::support::devices;
use candle_core::{DType, Result};
use candle_fused::quant::KvFormat::{Fp8, Int8};

#[test]
fn every_format_dtype_and_form() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for format in [Fp8, Int8] {
                for form in FORMS {
                    let case = Case {
                        dtype,
                        codes: Some(format),
                        form,
                        ..CASE
                    };
                    case.check(&device, &BATCH)?;
                    case.check(&device, &[[3, 3], [1, 20]])?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn every_head_size_page_and_rule() -> Result<()> {
    for device in devices() {
        for dim in [32, 64, 72, 80, 96, 128, 256] {
            for (page, format) in [(8, Fp8), (12, Int8), (16, Int8), (128, Fp8)] {
                let case = Case {
                    dim,
                    page,
                    codes: Some(format),
                    dtype: [DType::BF16, DType::F16][page / 8 % 2],
                    form: FORMS[dim / 16 % 4],
                    shared: true,
                    ..CASE
                };
                case.check(&device, &BATCH)?;
                let ruled = Case {
                    window: Some(20),
                    softcap: Some(3.),
                    alibi: true,
                    ..case
                };
                ruled.check(&device, &BATCH)?;
            }
        }
    }
    Ok(())
}
