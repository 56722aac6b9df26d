//! The table of kernels without a GPU: what it chooses over a grid of cases, and its part of docs/kernels.md.

use super::StepShape;
use super::dispatch::{RULES, partials, select};
use super::problem::{Case, Role};
use crate::cuda::abi::MAX_HEADS;
use crate::cuda::table_tests::{GPUS, gather, gpu_named};
use crate::cuda::{GpuSpec, UNALIGNED, with_kernel};
use crate::ops::flash_attention::cuda::Rule as _;
use crate::ops::flash_attention::cuda::table_tests::{
    HEAD_SIZES, HEADS, MODELS, forms, head_sizes,
};
use crate::ops::linear::cuda as linear;
use crate::ops::linear::cuda::tests::{normed_qkv, parallel_mlp};
use candle_core::{DType, Result};
use std::fmt::Write as _;

const F32: DType = DType::F32;
const F16: DType = DType::F16;
const BF16: DType = DType::BF16;

/// Of the projection, and of the caches.
const DTYPES: [[DType; 2]; 5] = [
    [F32, F32],
    [F16, F16],
    [BF16, BF16],
    [F32, F16],
    [F32, BF16],
];

fn shape(
    [dtype, cache_dtype]: [DType; 2],
    [heads, kv_heads]: [usize; 2],
    head_dim: usize,
    [sequences, slots]: [usize; 2],
) -> StepShape {
    StepShape {
        sequences,
        heads,
        kv_heads,
        head_dim,
        slots,
        paged: false,
        positions: slots,
        pairs: head_dim / 2,
        dtype,
        cache_dtype,
    }
}

/// A step by itself.
fn alone(gpu: GpuSpec, shape: StepShape) -> Case {
    Case {
        gpu,
        shape,
        aligned: true,
        pipelined: match shape.paged {
            true => Ok(()),
            false => Err("keys and values are not in pages"),
        },
        clustered: Ok(()),
        product: None,
    }
}

fn name(case: &Case) -> Option<&'static str> {
    Some(select(case).ok()?.kernel)
}

/// Sequences and slots of few keys, of many, and of many sequences.
const SIZES: [[usize; 2]; 3] = [[1, 2048], [1, 200_000], [600, 2048]];

/// By dtypes, sizes and GPU: for heads the head sizes that a kernel takes.
pub(crate) fn choices() -> String {
    let mut text = String::new();
    for (dtypes, sizes) in DTYPES
        .into_iter()
        .flat_map(|dtypes| SIZES.map(|sizes| (dtypes, sizes)))
    {
        let mut of_gpus = Vec::new();
        for (gpu_name, gpu) in GPUS {
            let mut of_heads = Vec::new();
            for heads in HEADS {
                let mut of_kernels = Vec::new();
                for dim in HEAD_SIZES {
                    let kernel = name(&alone(gpu, shape(dtypes, heads, dim, sizes)));
                    let kernel = kernel.unwrap_or("none").to_owned();
                    gather(&mut of_kernels, dim.to_string(), kernel);
                }
                let kernels = of_kernels
                    .iter()
                    .map(|(dims, kernel)| format!("{} {kernel}", dims.join(" ")));
                let line = kernels.collect::<Vec<_>>().join(", ");
                gather(&mut of_heads, format!("{}/{}", heads[0], heads[1]), line);
            }
            let lines = of_heads
                .iter()
                .map(|(heads, line)| format!("  {}: {line}\n", heads.join(" ")));
            gather(&mut of_gpus, gpu_name.to_owned(), lines.collect());
        }
        let [q, kv] = dtypes.map(|dtype| dtype.as_str());
        let [sequences, slots] = sizes;
        for (gpus, lines) in of_gpus {
            let gpus = gpus.join(", ");
            writeln!(text, "\nq {q}, kv {kv}, {sequences} x {slots}, {gpus}").expect("a string");
            text.push_str(&lines);
        }
    }
    text
}

/// Hidden size, heads of it, and their size, of models whose MLP stands beside attention.
const PARALLEL: [(&str, usize, usize, usize); 5] = [
    ("Pythia-70M", 512, 8, 64),
    ("Pythia-410M", 1024, 16, 64),
    ("Pythia-1B", 2048, 8, 256),
    ("Pythia-2.8B", 2560, 32, 80),
    ("Pythia-6.9B", 4096, 32, 128),
];

/// The first product of such an MLP.
fn up(gpu: GpuSpec, dtype: DType, hidden: usize) -> linear::Case {
    parallel_mlp(gpu, dtype, [4 * hidden, hidden])
}

/// Hidden size, query and key/value heads, and their size, of models whose attention may come with its products.
const SMALL: [(&str, usize, [usize; 2], usize); 4] = [
    ("SmolLM2-135M", 576, [9, 3], 64),
    ("SmolLM2-360M", 960, [15, 5], 64),
    ("Qwen3-0.6B", 1024, [16, 8], 128),
    ("Llama-3.2-1B", 2048, [32, 8], 64),
];

/// A step with the products for its queries, keys and values.
fn with_qkv(gpu: GpuSpec, hidden: usize, shape: StepShape) -> Case {
    let rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    let product = normed_qkv(gpu, shape.dtype, [rows, hidden]);
    Case {
        product: Some((Role::Qkv, product)),
        ..alone(gpu, shape)
    }
}

/// A plan, or that there is none.
fn write_plan(text: &mut String, model: &str, case: &Case) {
    match select(case) {
        Ok(plan) => writeln!(text, "  {model}: {plan}").expect("a string"),
        Err(_) => writeln!(text, "  {model}: none").expect("a string"),
    }
}

/// Whole plans: of models' steps, and of those with a product.
pub(crate) fn plans() -> Result<String> {
    let mut text = String::new();
    for gpu in ["T4", "A100", "H100"] {
        let dtypes = [if gpu == "T4" { F16 } else { BF16 }; 2];
        for (name, heads, dim) in MODELS {
            writeln!(text, "\n{name}, {}, {gpu}", dtypes[0].as_str()).expect("a string");
            for sizes in [[1, 128], [1, 4096], [8, 4096]] {
                let shape = shape(dtypes, heads, dim, sizes);
                let [sequences, slots] = sizes;
                write!(text, "  {sequences} x {slots}: ").expect("a string");
                let plan = select(&alone(gpu_named(gpu), shape))?;
                writeln!(text, "{plan}").expect("a string");
            }
            let case = Case {
                aligned: false,
                clustered: Err(UNALIGNED),
                ..alone(gpu_named(gpu), shape(dtypes, heads, dim, [1, 4096]))
            };
            let plan = select(&case)?.with_reason();
            writeln!(text, "  1 x 4096, unaligned: {plan}").expect("a string");
        }
    }
    for (name, gpu) in GPUS {
        writeln!(
            text,
            "\nbeside the first product of the MLP, 2,048 slots, f16, {name}"
        )
        .expect("a string");
        for (model, hidden, heads, dim) in PARALLEL {
            let case = Case {
                product: Some((Role::Beside, up(gpu, F16, hidden))),
                ..alone(gpu, shape([F16; 2], [heads; 2], dim, [1, 2048]))
            };
            write_plan(&mut text, model, &case);
        }
    }
    for (name, gpu) in GPUS {
        writeln!(text, "\nwith the products for q, k and v, bf16, {name}").expect("a string");
        for (model, hidden, heads, dim) in SMALL {
            for slots in [2048, 8192] {
                let shape = shape([BF16; 2], heads, dim, [1, slots]);
                let model = format!("{model}, {slots} slots");
                write_plan(&mut text, &model, &with_qkv(gpu, hidden, shape));
            }
        }
    }
    Ok(text)
}

/// The table's part of docs/kernels.md.
pub(crate) fn page() -> String {
    let mut text = String::from(
        "## `flash_decoding`\n\nWhich kernel takes a step of one token a sequence, by itself or with a product. The \
         table is [dispatch.rs](../src/ops/flash_decoding/cuda/dispatch.rs).\n\n\
         | kernel | q over the caches: head sizes (compute capability) | sequences | a product in the same launch | source | |\n\
         |---|---|---|---|---|---|\n",
    );
    for rule in RULES {
        let sequences = match rule.sequences {
            usize::MAX => "any".to_owned(),
            most => most.to_string(),
        };
        writeln!(
            text,
            "| `{}` | {} | {sequences} | {} | {} | {} |",
            rule.kernel,
            forms(rule.forms),
            match rule.product {
                Some(Role::Beside) => "beside the step",
                Some(Role::Qkv) => "for q, k and v",
                None => "none",
            },
            rule.source,
            rule.note,
        )
        .expect("a string");
    }
    text
}

/// Head sizes with 8 query heads of each key/value head, which take the most shared memory.
pub(crate) fn head_sizes_of_steps() -> String {
    head_sizes(|gpu, dtype, dim| name(&alone(gpu, shape([dtype; 2], [8, 1], dim, [1, 2048]))))
}

/// Cases of every GPU, dtype, number of heads and head size, each with and without a product beside it.
fn cases() -> impl Iterator<Item = Case> {
    let heads_and_sizes = HEADS.into_iter().flat_map(|heads| {
        [16].into_iter()
            .chain(HEAD_SIZES)
            .map(move |dim| (heads, dim))
    });
    let shapes = heads_and_sizes.flat_map(|(heads, dim)| {
        let of_sizes = |dtypes| {
            let sizes = [[0, 2048], [1, 1], [1, 500], [1, 8192], [2, 300], [7, 8192]];
            sizes.map(|sizes| shape(dtypes, heads, dim, sizes))
        };
        DTYPES.map(of_sizes).concat()
    });
    shapes.flat_map(|shape| {
        GPUS.map(|(_, gpu)| {
            let beside = Case {
                product: Some((Role::Beside, up(gpu, shape.cache_dtype, 2560))),
                ..alone(gpu, shape)
            };
            let qkv = with_qkv(gpu, 576, shape);
            let paged = |sequences| {
                let shape = StepShape {
                    sequences,
                    paged: true,
                    ..shape
                };
                alone(gpu, shape)
            };
            [alone(gpu, shape), beside, qkv, paged(3), paged(200)]
        })
        .concat()
    })
}

/// Whichever kernel takes a step has room for what its blocks leave.
#[test]
fn every_plan_fits_into_the_scratch_memory() {
    let mut taken = 0;
    for case in cases() {
        let Ok(room) = partials(&case.gpu, &case.shape) else {
            assert!(case.shape.head_dim > 256, "{case}");
            continue;
        };
        for rule in RULES {
            let Ok(plan) = rule.plan(&case) else {
                continue;
            };
            let split = (rule.split)(&case.shape).expect("how the plan splits");
            let mut needed = split.partials(&case.gpu, &case.shape);
            let grid = plan.grid();
            // Clusters have their own grids, and leave something where there are several for a row.
            if grid.cluster > 1 && grid.blocks[0] > grid.cluster {
                let blocks = split.rows(&case.shape) * grid.blocks[0] as usize;
                needed.bytes = 8 * blocks * MAX_HEADS * case.shape.head_dim;
            }
            assert!(
                needed.bytes <= room.bytes && needed.counters <= room.counters,
                "{}: {needed:?} of {room:?} for {case}",
                rule.kernel
            );
            taken += 1;
        }
    }
    assert!(taken > 10_000, "{taken}");
}

#[test]
fn many_sequences_in_pages_are_pipelined() -> Result<()> {
    let gpu = gpu_named("H100");
    let shape = |sequences, dim| StepShape {
        paged: true,
        ..shape([BF16; 2], [9, 3], dim, [sequences, 2048])
    };
    for (sequences, dim, expected) in [
        (176, 64, "flash_decoding_cluster"),
        (177, 64, "flash_decoding_pipelined"),
        (88, 128, "flash_decoding_cluster"),
        (89, 128, "flash_decoding_pipelined"),
        (256, 128, "flash_decoding_pipelined"),
        (256, 80, "flash_decoding_mma"),
    ] {
        let plan = select(&alone(gpu, shape(sequences, dim)))?;
        assert_eq!(plan.kernel, expected, "{sequences} of {dim}");
    }
    let reason = "there are few sequences: more blocks share the keys of each";
    let forced = with_kernel(Some("flash_decoding_pipelined"), || {
        select(&alone(gpu, shape(21, 64)))
    });
    assert!(forced.expect_err("few").to_string().contains(reason));
    Ok(())
}

#[test]
fn a_forced_kernel_serves_or_says_why_not() -> Result<()> {
    let gpu = gpu_named("H100");
    let step = alone(gpu, shape([BF16; 2], [32, 32], 80, [1, 2048]));
    let beside = Case {
        product: Some((Role::Beside, up(gpu, BF16, 2560))),
        ..step
    };
    let kernel = |name, case: &Case| with_kernel(Some(name), || select(case));
    for (name, case, expected) in [
        ("flash_decoding_plain", &step, "flash_decoding_plain"),
        (
            "flash_decoding_with_gemv",
            &beside,
            "flash_decoding_with_gemv",
        ),
        // Those of other tables leave this one alone.
        ("gemv_dense", &step, "flash_decoding_mma"),
        ("flash_attention_plain", &step, "flash_decoding_mma"),
        ("flash_attention_plain", &beside, "flash_decoding_with_gemv"),
    ] {
        assert_eq!(kernel(name, case)?.kernel, expected, "{name}");
    }
    let wide = alone(gpu, shape([BF16; 2], [8, 8], 192, [1, 2048]));
    let small = with_qkv(gpu, 576, shape([BF16; 2], [9, 3], 64, [1, 2048]));
    for (name, case, expected) in [
        ("flash_decoding_mma", &wide, "it is for other head sizes"),
        (
            "flash_decoding_plain",
            &beside,
            "it takes no product in the same launch",
        ),
        (
            "flash_decoding_with_gemv",
            &step,
            "there is no product for the same launch",
        ),
        (
            "flash_decoding_with_qkv",
            &beside,
            "the product does not give queries, keys and values",
        ),
        (
            "flash_decoding_with_gemv",
            &small,
            "the product gives the step's queries, keys and values",
        ),
        (
            "no_such",
            &step,
            "there is no kernel no_such, expected one of gemv_dense_latency, ",
        ),
    ] {
        let error = kernel(name, case).expect_err(name).to_string();
        assert!(error.contains(expected), "{name}: {error}");
    }
    Ok(())
}
