//! Keys and values that are quantized as they are written.

use super::{CASE, Case, LENGTHS, Map, last, mixed};
use crate::pages::{FORMS, numbers, pool, quantized, table, there};
use crate::support::{devices, randn, values};
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::paged_append::{PagedAppend, TokenMap, copy_pages, paged_append};
use candle_fused::ops::{PageTable, RopeStyle};
use candle_fused::quant::KvFormat::{Fp8, Int8};

#[test]
fn every_format_dtype_and_form() -> Result<()> {
    for device in devices() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for format in [Fp8, Int8] {
                for form in FORMS {
                    let case = Case {
                        form,
                        dtype,
                        codes: Some(format),
                        ..CASE
                    };
                    case.check(&device, &LENGTHS, &last(), Map::OneEach)?;
                    case.check(&device, &LENGTHS, &mixed(), Map::Sequences)?;
                    case.check(&device, &LENGTHS, &mixed(), Map::CuSeqlens)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn norms_rotation_and_odd_shapes() -> Result<()> {
    for device in devices() {
        for (dtype, format) in [(DType::F32, Int8), (DType::BF16, Fp8)] {
            let case = Case {
                dtype,
                codes: Some(format),
                norms: true,
                ..CASE
            };
            let cases = [
                case,
                Case {
                    rotated: 16,
                    page: 8,
                    style: RopeStyle::Interleaved,
                    ..case
                },
                Case {
                    dim: 256,
                    rotated: 64,
                    page: 128,
                    ..case
                },
                Case {
                    dim: 18,
                    rotated: 6,
                    page: 5,
                    ..case
                },
                Case {
                    heads: 0,
                    rotated: 0,
                    form: FORMS[3],
                    ..case
                },
            ];
            for case in cases {
                case.check(&device, &LENGTHS, &mixed(), Map::Sequences)?;
            }
        }
    }
    Ok(())
}

/// Without norms and rotation, codes and scales are those of each head's elements, to the bit, in one call or in many.
#[test]
fn codes_are_those_of_each_row() -> Result<()> {
    for device in devices() {
        for format in [Fp8, Int8] {
            for dim in [64, 20] {
                let form = FORMS[0];
                let empty = quantized(&pool(form, [3, 8, 2, dim], DType::F32)?, form, format)?;
                let [together, apart] =
                    [there(&empty, form, &device)?, there(&empty, form, &device)?];
                let qkv = (randn(&[20, 4 * dim], DType::F32)? * 7.3)?;
                let on = qkv.to_device(&device)?;
                let table = table(form, &[vec![2, 0, 1]], &[20], 8, &device)?;
                let append = |pool, from: usize, count: usize| {
                    let positions = Tensor::arange(from as u32, (from + count) as u32, &device)?;
                    let append = PagedAppend {
                        heads: 0,
                        tokens: TokenMap::Sequences(&Tensor::zeros(count, DType::U32, &device)?),
                        positions: &positions,
                        rotation: None,
                        norms: None,
                    };
                    paged_append(&on.narrow(0, from, count)?, pool, &table, &append)
                };
                append(&together, 0, 20)?;
                for (from, count) in [(0, 7), (7, 1), (8, 12)] {
                    append(&apart, from, count)?;
                }
                let rows = qkv.to_vec2::<f32>()?;
                for pool in [&together, &apart] {
                    let scales = pool.scales.as_ref().expect("scales");
                    for (n, row) in rows.iter().enumerate() {
                        let (page, slot) = ([2, 0, 1][n / 8], n % 8);
                        for (i, row) in row.chunks_exact(dim).enumerate() {
                            let (t, s) = [(&pool.k, &scales.k), (&pool.v, &scales.v)][i / 2];
                            let mut codes = vec![0; dim];
                            let scale = format.quantize(row, &mut codes);
                            let got = t.get(page)?.get(slot)?.get(i % 2)?.to_vec1::<u8>()?;
                            let own = s.get(page)?.get(i % 2)?.get(slot)?.to_scalar::<f32>()?;
                            assert_eq!((got, own), (codes, scale), "{format} {n} {i} {device:?}");
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn pages_are_copied_with_their_scales() -> Result<()> {
    for device in devices() {
        for format in [Fp8, Int8] {
            for form in FORMS {
                for dim in [64, 6] {
                    let before = pool(form, [6, 8, 2, dim], DType::F32)?;
                    let before = quantized(&before, form, format)?;
                    let on = there(&before, form, &device)?;
                    copy_pages(&on, &Tensor::new(&[[4u32, 0], [4, 5], [1, 2]], &device)?)?;
                    let order = Tensor::new(&[4u32, 1, 1, 3, 4, 4], &Device::Cpu)?;
                    for (got, before) in numbers(&on)?.iter().zip(numbers(&before)?) {
                        let expected = before.contiguous()?.index_select(&order, 0)?;
                        assert_eq!(values(got)?, values(&expected)?, "{form:?} {device:?}");
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn scales_that_overlap_are_refused() -> Result<()> {
    let form = FORMS[0];
    let mut all = quantized(&pool(form, [2, 8, 1, 16], DType::F32)?, form, Int8)?;
    let scales = all.scales.as_mut().expect("scales");
    scales.v = scales.k.clone();
    let table = PageTable::Padded {
        block_table: Tensor::new(&[[1u32]], &Device::Cpu)?,
        lengths: Tensor::new(&[8u32], &Device::Cpu)?,
    };
    let append = PagedAppend {
        heads: 1,
        tokens: TokenMap::OneEach,
        positions: &Tensor::new(&[7u32], &Device::Cpu)?,
        rotation: None,
        norms: None,
    };
    let result = paged_append(&randn(&[1, 48], DType::F32)?, &all, &table, &append);
    let said = result.expect_err("an error").to_string();
    assert!(
        said.contains("pool.scales.v and pool.scales.k overlap"),
        "{said}"
    );
    Ok(())
}
