//! Recorded ops against the same ops launched one by one. A recording needs the GPU for itself:
//! `cargo test --release --features cuda -- --ignored replay:: --test-threads 1`.

use crate::quant_linear::blocks_on;
use crate::support::{devices, randn, randn_on, values};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Device, Result, Tensor, bail};
use candle_fused::cuda::{Replay, count_launches, with_kernel};
use candle_fused::ops::{
    Activation, AttentionParams, Epilogue, PageLayout, PagePool, PageTable, PagedAppend,
    PagedAttention, Prologue, RaggedBatch, RopeStyle, RotaryTables, TokenMap,
    flash_attention_padded, flash_attention_varlen, linear, paged_append, paged_attention,
    quant_linear, rms_norm, rope_tokens,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

#[test]
#[ignore = "needs the GPU for itself"]
fn a_replay_computes_anew_what_was_recorded() -> Result<()> {
    for gpu in devices().into_iter().filter(Device::is_cuda) {
        let (k, rows) = (256, 192);
        let x = randn_on(&[1, k], DType::BF16, &gpu)?;
        let norm = randn_on(&[k], DType::BF16, &gpu)?;
        let w = randn_on(&[rows, k], DType::BF16, &gpu)?;
        // The normalised row is dropped on the way.
        let chain = || {
            let normalised = rms_norm(&x, &norm, 1e-5)?;
            let ours = linear(&normalised, &w, &Epilogue::default())?;
            Ok((ours, x.matmul(&w.t()?)?))
        };
        chain()?;
        // SAFETY: tests that are ignored by default run alone.
        let mut replay = unsafe { Replay::record(gpu.as_cuda_device()?, chain)? };
        assert!(replay.kernels() >= 3, "{}", replay.kernels());
        for _ in 0..3 {
            x.slice_set(&randn(&[1, k], DType::BF16)?.to_device(&gpu)?, 0, 0)?;
            // Takes the memory of what the recording has dropped, if that is free for others.
            let other = randn_on(&[1, k], DType::BF16, &gpu)?;
            let before = values(&other)?;
            // SAFETY: x, the norm's weight and w are those that were recorded.
            unsafe { replay.launch()? };
            let (ours, theirs) = replay.results();
            let (expected, product) = chain()?;
            assert_eq!(values(ours)?, values(&expected)?);
            assert_eq!(values(theirs)?, values(&product)?);
            assert_eq!(values(&other)?, before);
        }
    }
    Ok(())
}

/// Attention reads the lengths of a padded batch when it runs.
#[test]
#[ignore = "needs the GPU for itself"]
fn a_replay_reads_lengths_of_padded_batches_anew() -> Result<()> {
    for gpu in devices().into_iter().filter(Device::is_cuda) {
        for (dim, dtype) in [(64, DType::BF16), (24, DType::F32)] {
            let qkv = randn_on(&[3, 70, 6, dim], dtype, &gpu)?;
            let part = |first| qkv.narrow(2, first, 2);
            let (q, k, v) = (part(0)?, part(2)?, part(4)?);
            let lengths = Tensor::new(&[70u32, 1, 30], &gpu)?;
            let params = AttentionParams::default();
            let run = || flash_attention_padded(&q, &k, &v, &lengths, &params);
            run()?;
            // SAFETY: tests that are ignored by default run alone.
            let mut replay = unsafe { Replay::record(gpu.as_cuda_device()?, run)? };
            for new in [[0u32, 70, 33], [64, 2, 1]] {
                lengths.slice_set(&Tensor::new(&new, &gpu)?, 0, 0)?;
                // SAFETY: q, k, v and lengths are those that were recorded.
                unsafe { replay.launch()? };
                assert_eq!(values(replay.results())?, values(&run()?)?);
            }
        }
    }
    Ok(())
}

/// Rotation reads the position of each token when it runs.
#[test]
#[ignore = "needs the GPU for itself"]
fn a_replay_reads_positions_anew() -> Result<()> {
    for gpu in devices().into_iter().filter(Device::is_cuda) {
        let x = randn_on(&[3, 2, 64], DType::BF16, &gpu)?;
        let angles = randn_on(&[40, 32], DType::F32, &gpu)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let tables = RotaryTables {
            cos: &cos,
            sin: &sin,
            style: RopeStyle::HalfSplit,
        };
        let positions = Tensor::new(&[0i64, 1, 2], &gpu)?;
        rope_tokens(&x, &positions, &tables)?;
        let device = gpu.as_cuda_device()?;
        // SAFETY: tests that are ignored by default run alone.
        let mut replay =
            unsafe { Replay::record(device, || rope_tokens(&x, &positions, &tables))? };
        for at in [[39i64, 0, 7], [3, 3, 12]] {
            positions.slice_set(&Tensor::new(&at, &gpu)?, 0, 0)?;
            // SAFETY: x, positions and tables are those that were recorded.
            unsafe { replay.launch()? };
            let expected = rope_tokens(&x, &positions, &tables)?;
            assert_eq!(values(replay.results())?, values(&expected)?);
        }
    }
    Ok(())
}

/// Appending to pages and attention over them are a launch each, and read tables, lengths and positions when they run.
#[test]
#[ignore = "needs the GPU for itself"]
fn a_replay_reads_pages_and_lengths_anew() -> Result<()> {
    for gpu in devices().into_iter().filter(Device::is_cuda) {
        for (dim, dtype, batch_invariant) in [
            (128, DType::BF16, false),
            (64, DType::F16, false),
            (24, DType::F32, false),
            (128, DType::BF16, true),
            (64, DType::F16, true),
            (24, DType::F32, true),
        ] {
            let (sequences, width, page) = (5, 12, 16);
            let pages = randn_on(&[64, 2, page, 2, dim], dtype, &gpu)?;
            let pool = PagePool::combined(&pages, PageLayout::Nhd)?;
            let entries = Tensor::zeros((sequences, width), DType::U32, &gpu)?;
            let lengths = Tensor::new(vec![1u32; sequences], &gpu)?;
            let positions = Tensor::new(vec![0u32; sequences], &gpu)?;
            let qkv = randn_on(&[sequences, 8 * dim], dtype, &gpu)?;
            let angles = randn_on(&[page * width, dim / 2], DType::F32, &gpu)?;
            let (cos, sin) = (angles.cos()?, angles.sin()?);
            let table = PageTable::Padded {
                block_table: entries.clone(),
                lengths: lengths.clone(),
            };
            let append = PagedAppend {
                heads: 4,
                tokens: TokenMap::OneEach,
                positions: &positions,
                rotation: Some(RotaryTables {
                    cos: &cos,
                    sin: &sin,
                    style: RopeStyle::HalfSplit,
                }),
                norms: None,
            };
            let params = PagedAttention {
                scale: 0.1,
                batch_invariant,
                ..Default::default()
            };
            let step = || {
                let q = paged_append(&qkv, &pool, &table, &append)?.unsqueeze(1)?;
                paged_attention(&q, &pool, &table, &params)
            };
            step()?;
            // SAFETY: tests that are ignored by default run alone.
            let mut replay = unsafe { Replay::record(gpu.as_cuda_device()?, step)? };
            // One sets the counters of attention to zero, or merges its splits.
            assert_eq!(replay.kernels(), 3);
            for (seed, now) in [
                [1u32, 9, 17, 190, 64],
                [3, 192, 1, 1, 100],
                [33, 34, 2, 8, 16],
            ]
            .iter()
            .enumerate()
            {
                let new = |values: Vec<u32>| Tensor::new(values, &gpu);
                // Whole pages of their own, in another order each time.
                let order = (0..sequences * width).map(|i| ((i * 7 + seed) % 60) as u32);
                entries.slice_set(&new(order.collect())?.reshape((sequences, width))?, 0, 0)?;
                lengths.slice_set(&new(now.to_vec())?, 0, 0)?;
                positions.slice_set(&new(now.iter().map(|n| n - 1).collect())?, 0, 0)?;
                // SAFETY: the operands are those that were recorded.
                unsafe { replay.launch()? };
                assert_eq!(values(replay.results())?, values(&step()?)?);
            }
        }
    }
    Ok(())
}

/// Blocks of a launch count in memory that other launches of the same recording use for something else.
#[test]
#[ignore = "needs the GPU for itself"]
fn each_of_many_recorded_calls_counts_by_itself() -> Result<()> {
    for gpu in devices().into_iter().filter(Device::is_cuda) {
        let (sequences, heads, dim, page, width) = (3, 8, 64, 16, 200);
        let all = [sequences * width, 2, page, 2, dim];
        let pool = PagePool::combined(&randn_on(&all, DType::BF16, &gpu)?, PageLayout::Nhd)?;
        let entries = Tensor::arange(0, (sequences * width) as u32, &gpu)?;
        // Long enough for many blocks to share a sequence, which the last of them finishes.
        let table = PageTable::Padded {
            block_table: entries.reshape((sequences, width))?,
            lengths: Tensor::new(&[3_200u32, 1_700, 900], &gpu)?,
        };
        let params = PagedAttention {
            scale: 0.1,
            ..Default::default()
        };
        let queries: Vec<_> = (0..32)
            .map(|_| randn_on(&[sequences, 1, heads, dim], DType::BF16, &gpu))
            .collect::<Result<_>>()?;
        let each = |q: &Tensor| paged_attention(q, &pool, &table, &params);
        let expected: Vec<_> = queries
            .iter()
            .map(|q| values(&each(q)?))
            .collect::<Result<_>>()?;
        for _ in 0..8 {
            let calls = || queries.iter().map(each).collect::<Result<Vec<_>>>();
            // SAFETY: tests that are ignored by default run alone.
            let mut replay = unsafe { Replay::record(gpu.as_cuda_device()?, calls)? };
            for _ in 0..2 {
                // SAFETY: the operands are those that were recorded.
                unsafe { replay.launch()? };
                for (result, expected) in replay.results().iter().zip(&expected) {
                    assert_eq!(&values(result)?, expected);
                }
            }
        }
    }
    Ok(())
}

/// One launch takes a ragged batch, and reads the lengths when it runs.
#[test]
#[ignore = "needs the GPU for itself"]
fn a_replay_reads_the_lengths_of_a_ragged_batch_anew() -> Result<()> {
    for gpu in devices().into_iter().filter(Device::is_cuda) {
        // Tensor cores of Hopper where there are some, others, and none.
        for (dim, dtype) in [(128, DType::BF16), (64, DType::F16), (24, DType::F32)] {
            let rows = |heads: usize| randn_on(&[200, heads, dim], dtype, &gpu);
            let (q, k, v) = (rows(4)?, rows(2)?, rows(2)?);
            let batch = RaggedBatch {
                cu_seqlens_q: Tensor::new(&[0u32, 100, 200], &gpu)?,
                cu_seqlens_k: Tensor::new(&[0u32, 100, 200], &gpu)?,
                max_seqlen_q: 150,
            };
            let params = AttentionParams {
                scale: 0.1,
                causal: true,
                ..Default::default()
            };
            let attend = || flash_attention_varlen(&q, &k, &v, &batch, &params);
            attend()?;
            // SAFETY: tests that are ignored by default run alone.
            let mut replay = unsafe { Replay::record(gpu.as_cuda_device()?, attend)? };
            assert_eq!(replay.kernels(), 1);
            for lengths in [[0u32, 60, 200], [0, 150, 170], [0, 0, 90]] {
                let lengths = Tensor::new(&lengths, &gpu)?;
                batch.cu_seqlens_q.slice_set(&lengths, 0, 0)?;
                batch.cu_seqlens_k.slice_set(&lengths, 0, 0)?;
                // SAFETY: the operands are those that were recorded.
                unsafe { replay.launch()? };
                assert_eq!(values(replay.results())?, values(&attend()?)?);
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs the GPU for itself"]
fn a_recording_that_fails_leaves_the_device_as_it_was() -> Result<()> {
    for gpu in devices().into_iter().filter(Device::is_cuda) {
        let cuda = gpu.as_cuda_device()?;
        let x = randn_on(&[2, 64], DType::F32, &gpu)?;
        let norm = randn_on(&[64], DType::F32, &gpu)?;
        let expected = values(&rms_norm(&x, &norm, 1e-5)?)?;
        let body = || {
            rms_norm(&x, &norm, 1e-5)?;
            if x.rank() == 2 {
                bail!("the body's own");
            }
            Ok(())
        };
        // SAFETY: tests that are ignored by default run alone.
        let failed = unsafe { Replay::record(cuda, body) };
        let message = failed.expect_err("the body fails").to_string();
        assert!(message.contains("the body's own"), "{message}");
        // SAFETY: as above.
        let inner = || unsafe { Replay::record(cuda, || Ok(())) }.map(drop);
        // SAFETY: as above.
        let nested = unsafe { Replay::record(cuda, inner) };
        let message = nested.expect_err("one within another").to_string();
        assert!(message.contains("within a recording"), "{message}");
        assert_eq!(values(&rms_norm(&x, &norm, 1e-5)?)?, expected);
    }
    Ok(())
}

/// Neither of candle's stream nor of one of ours.
#[test]
#[ignore = "needs the GPU for itself"]
fn what_panics_leaves_no_recording_behind() -> Result<()> {
    for gpu in devices().into_iter().filter(Device::is_cuda) {
        let cuda = gpu.as_cuda_device()?;
        let x = randn_on(&[2, 64], DType::F32, &gpu)?;
        let norm = randn_on(&[64], DType::F32, &gpu)?;
        let expected = values(&rms_norm(&x, &norm, 1e-5)?)?;
        let body = || -> Result<()> {
            rms_norm(&x, &norm, 1e-5)?;
            panic!("the body's own")
        };
        let recorded = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: tests that are ignored by default run alone.
            unsafe { Replay::record(cuda, body) }.map(drop)
        }));
        assert!(recorded.is_err());
        assert!(catch_unwind(AssertUnwindSafe(|| count_launches(cuda, body))).is_err());
        assert_eq!(values(&rms_norm(&x, &norm, 1e-5)?)?, expected);
        let count = count_launches(cuda, || rms_norm(&x, &norm, 1e-5).map(drop))?;
        assert_eq!(count, 1);
    }
    Ok(())
}

/// Products whose weights are dequantized, in turns in the same memory, wait for their own.
#[test]
#[ignore = "needs the GPU for itself"]
fn a_replay_dequantizes_for_each_product() -> Result<()> {
    for gpu in devices().into_iter().filter(Device::is_cuda) {
        for (dtype, m, k, activation) in [
            (DType::BF16, 100, 576, Activation::None),
            (DType::BF16, 100, 576, Activation::SwiGlu),
            (DType::BF16, 128, 1024, Activation::SwiGlu),
            (DType::F16, 100, 576, Activation::None),
            (DType::F16, 100, 1024, Activation::SwiGlu),
        ] {
            let x = randn_on(&[m, k], dtype, &gpu)?;
            let weight = randn_on(&[k], dtype, &gpu)?;
            let prologue = Prologue::RmsNorm {
                weight: &weight,
                eps: 1e-5,
            };
            let epilogue = Epilogue {
                activation,
                ..Default::default()
            };
            let matrix = || blocks_on(320, k, GgmlDType::Q8_0, &gpu);
            let weights = (0..4)
                .map(|_| Ok([matrix()?, matrix()?]))
                .collect::<Result<Vec<_>>>()?;
            let chain = || {
                with_kernel(Some("gemm_dequantized_cublaslt"), || {
                    let of = |pair| quant_linear(&x, prologue, pair, &epilogue);
                    weights
                        .iter()
                        .map(|pair| of(&pair[..]))
                        .collect::<Result<Vec<_>>>()
                })
            };
            let expected = chain()?;
            // SAFETY: tests that are ignored by default run alone.
            let mut replay = unsafe { Replay::record(gpu.as_cuda_device()?, chain)? };
            for _ in 0..10 {
                // SAFETY: x and all weights are those that were recorded.
                unsafe { replay.launch()? };
                for (ours, expected) in replay.results().iter().zip(&expected) {
                    assert_eq!(values(ours)?, values(expected)?, "{m}x{k} {dtype:?}");
                }
            }
        }
    }
    Ok(())
}
