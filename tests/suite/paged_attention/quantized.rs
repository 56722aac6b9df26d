//! Keys and values of 8 bits.

use super::{CASE, Case, LENGTHS, row, said};
use crate::pages::{FORMS, lengths, pool, quantized, there};
use crate::support::{devices, randn, values, widest_error};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::paged_attention::{PagedAttention, paged_attention, reference};
use candle_fused::quant::KvFormat::{self, Fp8, Int8};

const FORMATS: [KvFormat; 2] = [Fp8, Int8];

#[test]
fn every_format_dtype_and_form() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for format in FORMATS {
                for form in FORMS {
                    for queries in [1, 3] {
                        let case = Case {
                            dtype,
                            codes: Some(format),
                            form,
                            queries,
                            ..CASE
                        };
                        case.check(&device, &LENGTHS)?;
                        case.check(&device, &[700])?;
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn every_head_size_and_grouping() -> Result<()> {
    for device in devices() {
        for dim in [16, 40, 64, 72, 80, 96, 128, 192, 256] {
            for (heads, kv_heads) in [(1, 1), (14, 2), (24, 1), (32, 8)] {
                for format in FORMATS {
                    let case = Case {
                        heads,
                        kv_heads,
                        dim,
                        codes: Some(format),
                        dtype: [DType::F32, DType::BF16][heads % 2],
                        form: FORMS[dim / 16 % 4],
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
fn few_queries_and_every_page_size() -> Result<()> {
    every_page_size([1, 2, 5])
}

#[test]
fn many_queries_and_every_page_size() -> Result<()> {
    every_page_size([8, 15, 16])
}

fn every_page_size(of_sequence: [usize; 3]) -> Result<()> {
    for device in devices() {
        for queries in of_sequence {
            for page in [1, 8, 16, 20, 128] {
                for (dtype, format) in [(DType::BF16, Fp8), (DType::F16, Int8), (DType::F32, Int8)]
                {
                    for dim in [64, 128, 256] {
                        let case = Case {
                            queries,
                            page,
                            dtype,
                            codes: Some(format),
                            dim,
                            form: FORMS[queries % 4],
                            ..CASE
                        };
                        case.check(&device, &[9, 3, 200, 0, 16])?;
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn windows_softcap_slopes_and_long_sequences() -> Result<()> {
    for device in devices() {
        for (dtype, format) in [(DType::F32, Int8), (DType::BF16, Fp8), (DType::F16, Fp8)] {
            for queries in [1, 6] {
                let case = Case {
                    dtype,
                    codes: Some(format),
                    queries,
                    shared: true,
                    form: FORMS[queries % 4],
                    ..CASE
                };
                let cases = [
                    Case {
                        window: Some(17),
                        ..case
                    },
                    Case {
                        softcap: Some(3.),
                        ..case
                    },
                    Case {
                        alibi: true,
                        softcap: Some(3.),
                        window: Some(40),
                        ..case
                    },
                ];
                cases.iter().try_for_each(|c| c.check(&device, &LENGTHS))?;
                case.check(&device, &[3, 5000, 0, 1, 700])?;
                case.check(&device, &lengths(150, 60, 3))?;
            }
        }
    }
    Ok(())
}

/// Rows of any size have scales of their own: tiny values beside huge ones, and rows of zeros.
#[test]
fn rows_of_any_size() -> Result<()> {
    for device in devices() {
        for format in FORMATS {
            for dim in [64, 40] {
                let form = FORMS[2];
                let mut all = pool(form, [3, 16, 1, dim], DType::F32)?;
                let sizes = |powers: [i32; 6]| {
                    let of = |i: usize| match powers[i % 6] {
                        -99 => 0.,
                        power => 10f32.powi(power),
                    };
                    Tensor::from_iter((0..48).map(of), &Device::Cpu)?.reshape((3, 16, 1, 1))
                };
                all.k = all.k.broadcast_mul(&sizes([0, -9, -99, -2, -20, -1])?)?;
                all.v = all.v.broadcast_mul(&sizes([12, -12, 3, -99, 12, 11])?)?;
                let all = quantized(&all, form, format)?;
                let table = |device: &Device| {
                    let rows = [vec![2, 0, 1]];
                    crate::pages::table(form, &rows, &[41], 16, device)
                };
                let q = randn(&[1, 1, 3, dim], DType::F32)?;
                let params = PagedAttention::default();
                let expected = reference(&q, &all, &table(&Device::Cpu)?, &params)?;
                let on = there(&all, form, &device)?;
                let got = paged_attention(&q.to_device(&device)?, &on, &table(&device)?, &params)?;
                let error = widest_error(&got, &expected)?;
                assert!(error < 1e-5, "{format} {dim} {device:?}: {error:e}");
            }
        }
    }
    Ok(())
}

/// A key that is no number is no number to those who see it.
#[test]
fn what_is_no_number_stays_so() -> Result<()> {
    for device in devices() {
        for format in FORMATS {
            let form = FORMS[0];
            let mut all = pool(form, [2, 16, 1, 64], DType::F32)?;
            let junk = Tensor::from_iter(
                (0..32).map(|i| if i == 20 { f32::NAN } else { 0. }),
                &Device::Cpu,
            )?;
            all.k = all.k.broadcast_add(&junk.reshape((2, 16, 1, 1))?)?;
            let on = there(&quantized(&all, form, format)?, form, &device)?;
            let q = randn(&[1, 1, 2, 64], DType::F32)?.to_device(&device)?;
            for (length, numbers) in [(20, true), (21, false)] {
                let rows = [vec![0, 1]];
                let table = crate::pages::table(form, &rows, &[length], 16, &device)?;
                let y = values(&paged_attention(
                    &q,
                    &on,
                    &table,
                    &PagedAttention::default(),
                )?)?;
                assert!(y.iter().all(|y| y.is_finite() == numbers), "{device:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn bad_scales_are_named() -> Result<()> {
    let all = quantized(&pool(FORMS[1], [4, 8, 2, 16], DType::F32)?, FORMS[1], Int8)?;
    let good = row(&[1, 2], 16)?;
    let q = randn(&[1, 1, 4, 16], DType::F32)?;
    let params = PagedAttention::default();
    paged_attention(&q, &all, &good, &params)?;
    let changed = |change: &dyn Fn(&Tensor) -> Result<Tensor>| {
        let (mut pool, mut scales) = (all.clone(), all.scales.clone().expect("scales"));
        scales.v = change(&scales.v)?;
        pool.scales = Some(scales);
        Ok::<_, candle_core::Error>(said(&q, &pool, &good, &params))
    };
    assert!(changed(&|t| t.narrow(0, 0, 3))?.contains("pool.scales.v is F32 [3, 2, 8]"));
    assert!(changed(&|t| t.to_dtype(DType::F16))?.contains("pool.scales.v is F16"));
    let apart = changed(&|t| t.transpose(1, 2)?.contiguous()?.transpose(1, 2))?;
    assert!(
        apart.contains("pool.scales.v have to lie side by side"),
        "{apart}"
    );
    let mut floats = pool(FORMS[1], [4, 8, 2, 16], DType::F32)?;
    floats.scales = all.scales.clone();
    assert!(said(&q, &floats, &good, &params).contains("pool.k is F32, expected U8 with scales"));
    let mut codes = all.clone();
    codes.scales = None;
    assert!(said(&q, &codes, &good, &params).contains("pool.k is U8, expected f32, f16 or bf16"));
    Ok(())
}
