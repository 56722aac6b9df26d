//! The table of kernels without a GPU: what it chooses, and its part of docs/kernels.md.

use super::dispatch::{RULES, select};
use super::kernels::{self, FEWEST_ROWS, FIXED_SHARED, MOST_ROWS};
use super::problem::{Case, SplitRoom};
use crate::cuda::abi::{PAGED_CODES, PAGED_MMA, PAGED_PLAIN, PAGED_SPLIT};
use crate::cuda::table_tests::{GPUS, gpu_named};
use crate::cuda::{Launcher, with_kernel};
use crate::ops::flash_attention::cuda::table_tests::{MODELS, forms};
use crate::ops::pages::PoolSizes;
use candle_core::{DType, Device, Result};
use std::fmt::Write as _;

fn case(dtypes: [DType; 2], [heads, kv_heads]: [usize; 2], dim: usize, queries: usize) -> Case {
    let [dtype, pool_dtype] = dtypes;
    Case {
        gpu: gpu_named("H100"),
        sequences: 16,
        queries,
        heads,
        sizes: PoolSizes {
            pages: 4096,
            page: 16,
            kv_heads,
            dim,
        },
        pages: 2048,
        dtype,
        pool_dtype,
        aligned: true,
        batch_invariant: false,
    }
}

/// Whole plans of models' steps, by tokens of a sequence.
pub(crate) fn plans() -> Result<String> {
    let mut text = String::new();
    for (name, heads, dim) in MODELS {
        writeln!(text, "\n{name}, bf16, H100, 16 sequences").expect("a string");
        for queries in [1, 2, 4, 16] {
            let plan = select(&case([DType::BF16; 2], heads, dim, queries))?;
            writeln!(text, "  {queries}: {plan}").expect("a string");
        }
        for (pool, queries) in [(DType::F8E4M3, 1), (DType::F8E4M3, 16), (DType::U8, 1)] {
            let plan = select(&case([DType::BF16, pool], heads, dim, queries))?;
            writeln!(text, "  {queries} over {}: {plan}", pool.as_str()).expect("a string");
        }
        let case = case([DType::F32, DType::BF16], heads, dim, 4);
        writeln!(text, "  4 in f32: {}", select(&case)?).expect("a string");
        let plan = select(&Case {
            aligned: false,
            ..case
        })?;
        writeln!(text, "  4 in f32, unaligned: {}", plan.with_reason()).expect("a string");
        for (pool, aligned) in [
            (DType::BF16, true),
            (DType::F8E4M3, true),
            (DType::U8, false),
        ] {
            let plan = select(&Case {
                pool_dtype: pool,
                aligned,
                batch_invariant: true,
                ..case
            })?;
            let pool = pool.as_str();
            writeln!(text, "  4 over {pool}, batch invariant: {plan}").expect("a string");
        }
    }
    Ok(text)
}

/// The table's part of docs/kernels.md.
pub(crate) fn page() -> String {
    let mut text = String::from(
        "## `paged_attention`\n\nWhich kernel takes the newest tokens of many sequences. The table is \
         [dispatch.rs](../src/ops/paged_attention/cuda/dispatch.rs).\n\n\
         | kernel | q over the pools: head sizes (compute capability) | source | |\n|---|---|---|---|\n",
    );
    for rule in RULES {
        let (forms, source, note) = (forms(rule.forms), rule.source, rule.note);
        writeln!(text, "| `{}` | {forms} | {source} | {note} |", rule.kernel).expect("a string");
    }
    text
}

#[test]
fn every_head_size_up_to_256_has_a_kernel() -> Result<()> {
    for (_, gpu) in GPUS {
        for dim in 1..=256 {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for rows in 1..=17 {
                    for pool in [dtype, DType::F8E4M3, DType::U8] {
                        let case = case([dtype, pool], [2 * rows, 2], dim, 1);
                        for batch_invariant in [false, true] {
                            let plan = select(&Case {
                                gpu,
                                batch_invariant,
                                ..case
                            })?;
                            let shared = plan.how.grid().shared as usize;
                            assert!(shared + FIXED_SHARED <= gpu.shared as usize, "{plan}");
                        }
                    }
                }
            }
        }
    }
    let wide = case([DType::F16; 2], [32, 8], 257, 1);
    let error = select(&wide).expect_err("too wide").to_string();
    assert!(error.contains("other head sizes"), "{error}");
    Ok(())
}

/// Plans are made before kernels are loaded: what they leave for static shared memory has to suffice.
#[test]
fn plans_leave_room_for_static_shared_memory_on_cuda() -> Result<()> {
    let Ok(device) = Device::new_cuda(0) else {
        return Ok(());
    };
    let gpu = Launcher::new(device.as_cuda_device()?)?.gpu;
    let modules = [
        &kernels::MODULE,
        &kernels::CODES,
        &kernels::FIXED_SPLIT,
        &kernels::FIXED_SPLIT_CODES,
    ];
    for module in modules {
        let all = module.static_shared(gpu)?.into_iter();
        // What merges splits has no other shared memory.
        for (name, bytes) in all.filter(|(name, _)| !name.ends_with("_merge")) {
            assert!(
                bytes as usize <= FIXED_SHARED,
                "{name} has {bytes} bytes of static shared memory, plans leave {FIXED_SHARED}"
            );
        }
    }
    Ok(())
}

#[test]
fn scratch_memory_has_room_for_every_form() {
    let rows = PAGED_MMA.iter().map(|form| form.rows);
    let rows = rows.chain(PAGED_CODES.iter().map(|form| form.rows));
    let rows = rows.chain(PAGED_PLAIN.iter().map(|form| form.rows));
    assert!(
        rows.clone()
            .all(|rows| (FEWEST_ROWS..=MOST_ROWS).contains(&rows))
    );
}

/// With batch invariance neither the number of queries nor what else is in the batch chooses.
#[test]
fn batch_invariant_plans_differ_in_grids_alone() -> Result<()> {
    for pool in [DType::F32, DType::F16, DType::F8E4M3] {
        for dim in [64, 72, 128, 256] {
            let mut entries = std::collections::BTreeSet::new();
            for (queries, sequences) in [(1, 1), (1, 200), (4, 16), (16, 3)] {
                let plan = select(&Case {
                    sequences,
                    batch_invariant: true,
                    ..case([DType::F16, pool], [32, 8], dim, queries)
                })?;
                entries.insert(plan.how.entry());
            }
            assert_eq!(entries.len(), 1, "{entries:?}");
        }
    }
    Ok(())
}

#[test]
fn few_rows_are_merged_by_a_block_each() -> Result<()> {
    let of = |sequences, dim| {
        let case = Case {
            sequences,
            batch_invariant: true,
            ..case([DType::F16; 2], [32, 8], dim, 1)
        };
        kernels::merge(&case).map(|grid| grid.blocks)
    };
    assert_eq!(of(1, 64), Ok([32, 1, 1]));
    assert_eq!(of(2, 80), Ok([128, 1, 1]));
    assert_eq!(of(16, 128), Ok([4 * 132, 1, 1]));
    assert_eq!(of(256, 64), Ok([1024, 1, 1]));
    assert_eq!(of(257, 256), Ok([4112, 1, 1]));
    of(1 << 26, 64).expect_err("2^31 rows");
    Ok(())
}

/// Each sequence has room for the splits of its keys, in the place where the kernel puts them.
#[test]
fn there_is_room_for_every_split() {
    const SPLIT: usize = PAGED_SPLIT;
    for (pages_each, page) in [
        (vec![0, 1, 70, 3], 16),
        (vec![1; 9], 1),
        (vec![129, 128], 256),
    ] {
        let longest = pages_each.iter().max().map_or(0, |pages| pages * page);
        let all = pages_each.iter().sum::<usize>() * page;
        for queries in [1, 5, 16] {
            for window in [None, Some(1), Some(100), Some(128), Some(5000)] {
                let splits_of = |pages: usize| {
                    (0..=pages * page).map(move |length: usize| {
                        let seen = window.map_or(length, |window| window + queries - 1);
                        length.div_ceil(SPLIT) - length.saturating_sub(seen) / SPLIT
                    })
                };
                let padded = SplitRoom::new(pages_each.len(), longest, false, queries, window);
                assert_eq!(padded.in_all, pages_each.len() * padded.each);
                assert!(splits_of(longest / page).all(|splits| splits <= padded.each));
                let csr = SplitRoom::new(pages_each.len(), all, true, queries, window);
                let (mut entries, mut end) = (0, 0);
                for (b, pages) in pages_each.iter().enumerate() {
                    let first = match csr.each {
                        0 => entries * page / SPLIT + b,
                        each => b * each,
                    };
                    assert!(first >= end, "{csr:?}");
                    end = first + splits_of(*pages).max().unwrap_or(0);
                    entries += pages;
                }
                assert!(end <= csr.in_all, "{csr:?}");
            }
        }
    }
}

#[test]
fn a_forced_kernel_serves_or_says_why_not() -> Result<()> {
    let forced = |name, case: &Case| with_kernel(Some(name), || select(case));
    let step = case([DType::F16; 2], [32, 8], 128, 1);
    let plan = forced("paged_attention_plain", &step)?;
    assert_eq!(plan.kernel, "paged_attention_plain");
    let full = case([DType::F32; 2], [32, 8], 128, 1);
    let error = forced("paged_attention_mma", &full)
        .expect_err("f32")
        .to_string();
    assert!(error.contains("it is for other dtypes"), "{error}");
    Ok(())
}
