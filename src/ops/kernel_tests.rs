//! All tables of kernels together, without a GPU: their page, attention's committed choices, and their names.

use super::{flash_attention, flash_decoding, linear, paged_attention};
use crate::cuda::table_tests::assert_current;
use crate::ops::all_kernels;
use candle_core::Result;
use flash_attention::cuda::table_tests as prompts;
use flash_decoding::cuda::table_tests as steps;
use paged_attention::cuda::table_tests as paged;
use std::collections::BTreeSet;

#[test]
fn the_page_of_kernels_is_current() {
    let parts = [
        "# Kernels on CUDA\n\nIn each table the first row that matches a call is used. `CANDLE_FUSED_KERNEL=name` forces a kernel, and \
         `candle_fused::trace::capture` shows which one ran. Compute capability `any` is 7.5 or newer. A test writes this page \
         from the tables.\n"
            .to_owned(),
        linear::cuda::tests::page(),
        prompts::page(),
        format!("Head sizes that it takes:\n\n{}", prompts::head_sizes_of_prompts()),
        steps::page(),
        format!(
            "Head sizes that it takes, with 8 query heads of each key/value head:\n\n{}",
            steps::head_sizes_of_steps()
        ),
        paged::page(),
    ];
    assert_current("docs/kernels.md", &parts.join("\n"));
}

#[test]
fn attention_s_choices_are_the_committed_ones() -> Result<()> {
    let text = [
        "# Which kernel takes attention.\n# Written by the test `attention_s_choices_are_the_committed_ones`.\n\n\
         # flash_attention: for query heads/key-value heads and head sizes, the tokens of a causal prompt and the kernel, \
         with how it divides a block.\n",
        &prompts::choices()?,
        "\n# flash_attention: whole plans, by tokens\n",
        &prompts::plans()?,
        "\n# flash_decoding: for query heads/key-value heads, head sizes and their kernel\n",
        &steps::choices(),
        "\n# flash_decoding: whole plans, by sequences x slots\n",
        &steps::plans()?,
        "\n# paged_attention: whole plans, by tokens of a sequence\n",
        &paged::plans()?,
    ];
    assert_current("tests/data/dispatch/attention.txt", &text.concat());
    Ok(())
}

#[test]
fn names_are_there_once() {
    let names: Vec<_> = all_kernels().map(|kernel| kernel.name).collect();
    let different: BTreeSet<_> = names.iter().collect();
    assert_eq!(different.len(), names.len(), "{names:?}");
    assert!(names.contains(&"gemv_dense") && names.contains(&"flash_decoding_mma"));
}
