//! The table of kernels without a GPU: what it chooses over a grid of cases, and its part of docs/kernels.md.

use super::dispatch::{RULES, check_head_dim, select};
use super::forms::Forms;
use super::problem::{Batch, Case};
use crate::cpu::attention::Sizes;
use crate::cuda::table_tests::{GPUS, architectures, capability, gather, gpu_named, runs};
use crate::cuda::{GpuSpec, with_kernel};
use candle_core::{DType, Result};
use std::fmt::Write as _;

const F32: DType = DType::F32;
const F16: DType = DType::F16;
const BF16: DType = DType::BF16;

/// Of queries, and of keys and values.
const DTYPES: [[DType; 2]; 5] = [
    [F32, F32],
    [F16, F16],
    [BF16, BF16],
    [F32, F16],
    [F32, BF16],
];

pub(crate) const HEAD_SIZES: [usize; 8] = [64, 80, 96, 128, 160, 192, 256, 512];

/// Query heads and key/value heads of SmolLM2, Qwen2-0.5B, Qwen3-0.6B, Llama-3.2-1B and Llama-3-8B, Pythia-2.8B,
/// and of one with a single key/value head.
pub(crate) const HEADS: [[usize; 2]; 6] = [[9, 3], [14, 2], [16, 8], [32, 8], [32, 32], [8, 1]];

/// Name, heads and head size.
pub(crate) const MODELS: [(&str, [usize; 2], usize); 7] = [
    ("SmolLM2", [9, 3], 64),
    ("Qwen2-0.5B", [14, 2], 64),
    ("Qwen3-0.6B", [16, 8], 128),
    ("Llama-3.2-1B", [32, 8], 64),
    ("Llama-3-8B", [32, 8], 128),
    ("Pythia-2.8B", [32, 32], 80),
    ("8 heads of 256 over one", [8, 1], 256),
];

/// A prompt of so many tokens, causal.
fn case(
    gpu: GpuSpec,
    dtypes: [DType; 2],
    [heads, kv_heads]: [usize; 2],
    dim: usize,
    tokens: usize,
) -> Case {
    let sizes = Sizes {
        batch: 1,
        heads,
        kv_heads,
        queries: tokens,
        keys: tokens,
        dim,
    };
    Case::causal(gpu, dtypes, sizes)
}

/// All to 70, and then those at which grids of 64, 128 and 192 rows are full, and models' prompts.
fn tokens() -> impl Iterator<Item = usize> {
    let long = [
        96, 128, 129, 192, 193, 256, 384, 512, 513, 768, 1024, 1536, 2048, 4096, 8192, 32768,
    ];
    (1..=70).chain(long)
}

/// The kernel and how it divides a block.
fn choice(case: &Case) -> String {
    match select(case) {
        Ok(plan) => {
            let details = plan.how.details();
            let division = details.split(", ").next().unwrap_or_default();
            format!("{} {division}", plan.kernel).trim_end().to_owned()
        }
        Err(_) => "none".to_owned(),
    }
}

/// By dtypes and GPU: for heads and head sizes the tokens that a kernel takes.
pub(crate) fn choices() -> Result<String> {
    let mut text = String::new();
    for dtypes in DTYPES {
        let mut of_gpus = Vec::new();
        for (name, gpu) in GPUS {
            let mut of_heads = Vec::new();
            for heads in HEADS {
                let mut of_sizes = Vec::new();
                for dim in HEAD_SIZES {
                    let choice = |n| Ok(choice(&case(gpu, dtypes, heads, dim, n)));
                    gather(&mut of_sizes, dim.to_string(), runs(tokens(), choice)?);
                }
                let lines = of_sizes
                    .iter()
                    .map(|(dims, text)| format!("    {}: {text}\n", dims.join(" ")));
                let heads = format!("{}/{}", heads[0], heads[1]);
                gather(&mut of_heads, heads, lines.collect());
            }
            let blocks = of_heads
                .iter()
                .map(|(heads, lines)| format!("  {}\n{lines}", heads.join(" ")));
            gather(&mut of_gpus, name.to_owned(), blocks.collect());
        }
        let [q, kv] = dtypes.map(|dtype| dtype.as_str());
        for (gpus, blocks) in of_gpus {
            write!(text, "\nq {q}, kv {kv}, {}\n{blocks}", gpus.join(", ")).expect("a string");
        }
    }
    Ok(text)
}

/// A case that differs from a prompt of 512 tokens.
type Variant = (&'static str, fn(&mut Case));

const VARIANTS: [Variant; 21] = [
    ("as it is", |_| {}),
    ("4,096 keys", |case| case.sizes.keys = 4096),
    ("a token over 4,096 keys", |case| {
        (case.sizes.queries, case.sizes.keys) = (1, 4096);
    }),
    ("8 sequences", |case| case.sizes.batch = 8),
    ("not causal", |case| case.causal = false),
    ("fewer keys than queries", |case| case.sizes.keys = 500),
    ("no keys", |case| case.sizes.keys = 0),
    ("ragged", |case| case.batch = Batch::Ragged),
    ("16 ragged sequences", |case| {
        (case.batch, case.sizes.batch, case.sizes.keys) = (Batch::Ragged, 16, 8192);
    }),
    ("a ragged step", |case| {
        (case.batch, case.sizes.batch) = (Batch::Ragged, 16);
        (case.sizes.queries, case.sizes.keys) = (1, 65536);
    }),
    ("pages of 16 tokens", |case| case.batch = Batch::Paged(16)),
    ("pages of 256 tokens", |case| case.batch = Batch::Paged(256)),
    ("pages of 20 tokens", |case| case.batch = Batch::Paged(20)),
    ("a mask", |case| case.mask = true),
    ("slopes", |case| case.alibi = true),
    ("a window", |case| case.window = true),
    ("a softcap", |case| case.softcap = true),
    ("a scale of 0", |case| case.positive = false),
    ("q at 8 bytes", |case| case.alignment.q = 8),
    ("kv at 8 bytes", |case| case.alignment.kv = 8),
    ("y at 4 bytes", |case| case.alignment.y = 4),
];

/// Whole plans: of models' prompts, and of cases beside them.
pub(crate) fn plans() -> Result<String> {
    let mut text = String::new();
    for gpu in ["T4", "A100", "H100"] {
        let dtypes = [if gpu == "T4" { F16 } else { BF16 }; 2];
        for (name, heads, dim) in MODELS {
            writeln!(text, "\n{name}, {}, {gpu}", dtypes[0].as_str()).expect("a string");
            for tokens in [1, 16, 64, 512, 2048, 8192] {
                let plan = select(&case(gpu_named(gpu), dtypes, heads, dim, tokens))?;
                writeln!(text, "  {tokens}: {plan}").expect("a string");
            }
        }
    }
    for gpu in ["RTX 3090", "H100"] {
        writeln!(text, "\n512 tokens of Llama-3.2-1B, f16, {gpu}").expect("a string");
        for (name, change) in VARIANTS {
            let mut case = case(gpu_named(gpu), [F16; 2], [32, 8], 64, 512);
            change(&mut case);
            let plan = select(&case)?.with_reason();
            writeln!(text, "  {name}: {plan}").expect("a string");
        }
    }
    Ok(text)
}

/// As in `f16: 64, 80 (7.5 or newer); f32 over f16: 64`.
pub(crate) fn forms(forms: &[Forms]) -> String {
    let text = |form: &Forms| {
        let dtypes = match (form.q, form.kv) {
            (None, None) => "any".to_owned(),
            (None, Some(kv)) => format!("any over {}", kv.as_str()),
            (Some(q), Some(kv)) if q == kv => q.as_str().to_owned(),
            (q, kv) => {
                let name = |dtype: Option<DType>| dtype.map_or("any", |dtype| dtype.as_str());
                format!("{} over {}", name(q), name(kv))
            }
        };
        let sizes = &form.head_sizes;
        match architectures(form.arch).as_str() {
            "any" => format!("{dtypes}: {sizes}"),
            arch => format!("{dtypes}: {sizes} ({arch})"),
        }
    };
    forms.iter().map(text).collect::<Vec<_>>().join("; ")
}

/// The table's part of docs/kernels.md.
pub(crate) fn page() -> String {
    let mut text = String::from(
        "## `flash_attention`\n\nWhich kernel takes a prompt, many queries, or the ragged batches of \
         `flash_attention_varlen` and `paged_prefill`. The table is \
         [dispatch.rs](../src/ops/flash_attention/cuda/dispatch.rs).\n\n\
         | kernel | q over keys and values: head sizes (compute capability) | queries of a sequence | mask, slopes, \
         window, softcap | source | |\n|---|---|---|---|---|---|\n",
    );
    for rule in RULES {
        let general = if rule.general { "yes" } else { "no" };
        writeln!(
            text,
            "| `{}` | {} | {} or more | {general} | {} | {} |",
            rule.kernel,
            forms(rule.forms),
            rule.queries,
            rule.source,
            rule.note,
        )
        .expect("a string");
    }
    text
}

/// Head sizes by GPU: of tensor cores' kernels in f16 and in bf16, and of any dtype, where `kernel` tells which takes
/// a head size, if one does. Lines of a table.
pub(crate) fn head_sizes(kernel: impl Fn(GpuSpec, DType, usize) -> Option<&'static str>) -> String {
    let mut of_gpus = Vec::new();
    for gpus in GPUS.chunk_by(|a, b| a.1 == b.1) {
        let gpu = gpus[0].1;
        let names: Vec<_> = gpus.iter().map(|(name, _)| *name).collect();
        let name = format!("{} ({})", capability(gpu.arch), names.join(", "));
        let taken = |dtype, tensor_cores: bool| -> Vec<usize> {
            let is_taken = |dim: &usize| {
                kernel(gpu, dtype, *dim)
                    .is_some_and(|name| !tensor_cores || !name.ends_with("_plain"))
            };
            (1..=1024).filter(is_taken).collect()
        };
        let list = |dims: Vec<usize>| match &dims[..] {
            [] => "none".to_owned(),
            dims => dims
                .iter()
                .map(usize::to_string)
                .collect::<Vec<_>>()
                .join(", "),
        };
        let any = taken(F32, false);
        assert!(any.iter().copied().eq(1..=any.len()), "{name}: {any:?}");
        assert_eq!(taken(F16, false).len(), any.len(), "{name}");
        let line = format!(
            "{} KB | {} | {} | up to {} |",
            gpu.shared >> 10,
            list(taken(F16, true)),
            list(taken(BF16, true)),
            any.len()
        );
        gather(&mut of_gpus, name, line);
    }
    let mut text = String::from(
        "| compute capability | shared memory of a block | tensor cores, f16 | tensor cores, bf16 | all dtypes |\n\
         |---|---|---|---|---|\n",
    );
    for (gpus, line) in of_gpus {
        writeln!(text, "| {} | {line}", gpus.join(", ")).expect("a string");
    }
    text
}

/// Those of `flash_attention`.
pub(crate) fn head_sizes_of_prompts() -> String {
    head_sizes(|gpu, dtype, dim| {
        let plan = select(&case(gpu, [dtype; 2], [8, 1], dim, 512)).ok()?;
        Some(plan.kernel)
    })
}

/// The documentation of the op has the same head sizes.
#[test]
fn the_op_names_its_head_sizes() {
    let documentation = include_str!("../mod.rs");
    for line in head_sizes_of_prompts().lines() {
        let there = documentation.contains(&format!("/// {line}\n"));
        assert!(there, "src/ops/flash_attention/mod.rs lacks: /// {line}");
    }
}

/// With batch invariance neither the longest sequence nor their number chooses, and no warps share a row's keys.
#[test]
fn batch_invariant_plans_differ_in_rows_alone() -> Result<()> {
    for gpu in ["T4", "A100", "H100"] {
        for dim in [64, 72, 80, 128, 256] {
            let mut entries = std::collections::BTreeSet::new();
            for (queries, batch) in [(1, 1), (1, 64), (40, 1), (600, 7), (9000, 2)] {
                let mut case = case(gpu_named(gpu), [F16; 2], [32, 8], dim, queries);
                (case.batch, case.sizes.batch) = (Batch::Paged(16), batch);
                case.batch_invariant = true;
                let plan = select(&case)?;
                let details = plan.how.details();
                let shared = ["share keys", "x2 warps", "x4 warps"];
                assert!(shared.iter().all(|part| !details.contains(part)), "{plan}");
                entries.insert(plan.how.entry());
            }
            assert_eq!(entries.len(), 1, "{gpu}: {entries:?}");
        }
    }
    Ok(())
}

#[test]
fn a_forced_kernel_serves_or_says_why_not() -> Result<()> {
    let case = |tokens| case(gpu_named("H100"), [F16; 2], [32, 8], 128, tokens);
    let kernel = |name, tokens| with_kernel(Some(name), || select(&case(tokens)));
    for (name, expected) in [
        ("flash_attention_plain", "flash_attention_plain"),
        ("flash_attention_mma", "flash_attention_mma"),
        // Those of other tables leave this one alone.
        ("gemv_dense", "flash_attention_sm90"),
        ("flash_decoding_plain", "flash_attention_sm90"),
    ] {
        assert_eq!(kernel(name, 512)?.kernel, expected, "{name}");
    }
    let error = kernel("flash_attention_sm90", 1)
        .expect_err("one token")
        .to_string();
    let expected = "kernel flash_attention_sm90 cannot take q f16 [1, 32, 1, 128] over f16 [1, 8, 1, 128] +causal on \
                    sm_90: there are few queries";
    assert!(error.contains(expected), "{error}");
    let error = kernel("no_such", 512)
        .expect_err("no such kernel")
        .to_string();
    for expected in [
        "there is no kernel no_such",
        "gemv_dense_mma",
        "flash_decoding_plain",
    ] {
        assert!(error.contains(expected), "{error}");
    }
    Ok(())
}

/// What is told when a model is loaded is what the kernels take.
#[test]
fn heads_that_no_kernel_takes_are_known_before() {
    for (name, most) in [("T4", 256), ("L4", 512), ("H100", 512)] {
        let gpu = gpu_named(name);
        for dim in 1..=1024 {
            for dtype in [F32, F16, BF16] {
                let taken = select(&case(gpu, [dtype; 2], [8, 1], dim, 1)).is_ok();
                assert_eq!(check_head_dim(gpu, dim).is_ok(), taken, "{name} {dim}");
            }
        }
        let error = check_head_dim(gpu, 1024).expect_err("1024").to_string();
        let expected = format!("heads of 1024 values, expected 1 to {most} on sm_");
        assert!(error.contains(&expected), "{error}");
    }
}

#[test]
fn a_case_without_a_kernel_says_why() {
    let case = case(gpu_named("T4"), [F32; 2], [8, 8], 512, 16);
    let error = select(&case)
        .expect_err("a head of 512 on a T4")
        .to_string();
    for expected in [
        "no kernel takes q f32 [1, 8, 16, 512] over f32 [1, 8, 16, 512] +causal on sm_75",
        "flash_attention_sm90: it is for other architectures",
        "flash_attention_mma: it is for other dtypes",
        "flash_attention_plain: heads of this size do not fit into this GPU's shared memory",
    ] {
        assert!(error.contains(expected), "{error}");
    }
}
