//! A step over codes in pages, against the ops that append and attend.

use super::tests::{Layer, Prepared, difference, in_pages};
use super::{Attention, StepShape};
use crate::cuda::Launcher;
use crate::ops::{
    PageLayout, PagePool, PageScales, PageTable, PagedAppend, PagedAttention, RopeStyle,
    RotaryTables, TokenMap, paged_append, paged_attention,
};
use crate::quant::KvFormat;
use candle_core::{DType, Device, Error, Result, Tensor};

/// A pool's keys and values as codes.
fn quantized(pool: &PagePool, format: KvFormat) -> Result<PagePool> {
    let device = pool.k.device();
    let one = |t: &Tensor| {
        let ((pages, page, heads, dim), cpu) = (t.dims4()?, Device::Cpu);
        let rows = t.to_device(&cpu)?.to_dtype(DType::F32)?.flatten_all()?;
        let rows = rows.to_vec1::<f32>()?;
        let mut codes = vec![0; rows.len()];
        let both = rows.chunks_exact(dim).zip(codes.chunks_exact_mut(dim));
        let scales: Vec<_> = both.map(|(row, own)| format.quantize(row, own)).collect();
        let scales = Tensor::from_vec(scales, (pages, page, heads), &cpu)?;
        let scales = scales.transpose(1, 2)?.contiguous()?.to_device(device)?;
        Ok::<_, Error>((Tensor::from_vec(codes, t.dims(), device)?, scales))
    };
    let ((k, k_scales), (v, v_scales)) = (one(&pool.k)?, one(&pool.v)?);
    let scales = PageScales {
        format,
        k: k_scales,
        v: v_scales,
    };
    Ok(PagePool {
        k,
        v,
        layout: PageLayout::Nhd,
        scales: Some(scales),
    })
}

/// The step by the ops, which append to the pool.
fn layer_by_ops(
    layer: &Layer,
    pool: &PagePool,
    table: &PageTable,
    window: Option<usize>,
) -> Result<Tensor> {
    let append = PagedAppend {
        heads: 9,
        tokens: TokenMap::OneEach,
        positions: &layer.position,
        rotation: Some(RotaryTables {
            cos: &layer.cos,
            sin: &layer.sin,
            style: RopeStyle::HalfSplit,
        }),
        norms: None,
    };
    let q = paged_append(&layer.qkv, pool, table, &append)?.unsqueeze(1)?;
    let params = PagedAttention {
        scale: 0.125,
        window,
        ..Default::default()
    };
    paged_attention(&q, pool, table, &params)
}

/// What the ops give that append and attend in two launches; codes of ties may differ by one.
#[test]
fn codes_in_pages_give_what_the_ops_give() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let launcher = Launcher::new(device.as_cuda_device()?)?;
    let many: Vec<u32> = (0..40).map(|i| (i * i * 7) % 2000).collect();
    for (dim, dtype, page, format) in [
        (64, DType::BF16, 16, KvFormat::Fp8),
        (64, DType::F32, 8, KvFormat::Int8),
        (80, DType::F16, 32, KvFormat::Fp8),
        (96, DType::BF16, 16, KvFormat::Int8),
        (128, DType::BF16, 128, KvFormat::Fp8),
        (128, DType::F32, 16, KvFormat::Int8),
        (256, DType::F16, 16, KvFormat::Int8),
        (72, DType::F32, 16, KvFormat::Fp8),
    ] {
        for (at, window) in [
            (&[31u32, 1700][..], None),
            (&[0, 15, 16, 2047], None),
            (&[40, 1701], Some(100)),
            (&many, None),
        ] {
            let layer = Layer::at(&device, dim, [dtype, DType::F32], at)?;
            let (pool, table, _) = in_pages(&layer, page)?;
            let [pool, theirs] = [quantized(&pool, format)?, quantized(&pool, format)?];
            let lengths = Tensor::from_iter(at.iter().map(|at| at + 1), &device)?;
            let entries = PageTable::Padded {
                block_table: table.clone(),
                lengths,
            };
            let expected = layer_by_ops(&layer, &theirs, &entries, window)?;
            let shape = StepShape {
                paged: true,
                cache_dtype: format.stored(),
                ..layer.shape()
            };
            let mut prepared = Prepared::of(&launcher, &layer, shape)?;
            prepared.set_pages(&pool, &table)?;
            prepared.step.window = window.unwrap_or(0);
            let attention = Attention::new(&launcher, prepared.step, None)?;
            // SAFETY: the tensors have the sizes that the step asks for and outlive the launch.
            unsafe { attention.run(&launcher)? };
            let bound = if dtype == DType::F32 { 1e-3 } else { 1e-2 };
            let [error, most] = difference(&prepared.out, &expected)?;
            let what = format!("{dim} {dtype:?} {format} {page} {at:?} {window:?}");
            assert!(error <= bound * most, "{what}: {error} of {most}");
            assert!(prepared.counters.to_vec1::<u32>()?.iter().all(|c| *c == 0));
            for values in [false, true] {
                let both = pool
                    .numbers(values)?
                    .into_iter()
                    .zip(theirs.numbers(values)?);
                let different = both.filter(|(a, b)| (a - b).abs() > 1e-6 * b.abs());
                let (count, widest) = different.fold((0, 0f64), |(n, most), (a, b)| {
                    (n + 1, most.max((a - b).abs()))
                });
                assert!(
                    count < 8 * at.len() && widest < 0.5,
                    "{what}: {count} {widest}"
                );
            }
        }
    }
    Ok(())
}
