//! The table of kernels without a GPU: what it chooses over a grid of cases, and its part of docs/kernels.md.

use super::dispatch::select;
use super::kernels::gemm_wna16_sm90;
use super::problem::{Alignment, Case, MAX_MATRICES, WeightFormat};
use super::table::RULES;
use crate::cuda::table_tests::{GPUS, architectures, assert_current, gather, gpu_named, runs};
use crate::cuda::{GpuSpec, Preceding, with_kernel};
use crate::ops::linear::{Activation, ActivationBits};
use crate::quant::{BlockFormat, Format, Scheme, TernaryScale};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Error, Result};
use std::fmt::Write as _;
use std::hint::black_box;
use std::time::Instant;

/// N and K of the products of SmolLM2-135M, Qwen3-0.6B, Llama-3.2-1B, Pythia-2.8B and Llama-3-8B, and of gated ones.
const SHAPES: [(usize, usize, bool); 18] = [
    (960, 576, false),
    (576, 576, false),
    (3072, 576, true),
    (576, 1536, false),
    (49152, 576, false),
    (4096, 1024, false),
    (1024, 2048, false),
    (6144, 1024, true),
    (1024, 3072, false),
    (16384, 2048, true),
    (2048, 8192, false),
    (128256, 2048, false),
    (7680, 2560, false),
    (6144, 4096, false),
    (4096, 4096, false),
    (28672, 4096, true),
    (4096, 14336, false),
    (128256, 4096, false),
];

const FORMATS: [&str; 19] = [
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q2k",
    "q3k",
    "q4k",
    "q5k",
    "q6k",
    "int8",
    "fp8",
    "fp8-block128",
    "nvfp4",
    "nf4",
    "int4-g128",
    "int4-g32-z",
    "ternary-row",
    "ternary-g64",
];

fn formats() -> Result<Vec<WeightFormat>> {
    let mut formats: Vec<_> = [DType::F32, DType::F16, DType::BF16]
        .map(WeightFormat::Dense)
        .into();
    for name in FORMATS {
        let block = BlockFormat::DTYPES
            .into_iter()
            .find(|dtype: &GgmlDType| format!("{dtype:?}").to_lowercase() == name);
        formats.push(WeightFormat::Quantized(match block {
            Some(dtype) => Format::Block(BlockFormat::of(dtype)?),
            None => Format::Scheme(name.parse()?),
        }));
    }
    Ok(formats)
}

/// A product as models have it: without a norm or, where it is gated, behind an RMS norm.
fn case(
    gpu: GpuSpec,
    weight: WeightFormat,
    x: DType,
    m: usize,
    shape: (usize, usize, bool),
) -> Case {
    let (n, k, gated) = shape;
    let mut rows = [0; MAX_MATRICES];
    rows[0] = n;
    if gated {
        (rows[0], rows[1]) = (n / 2, n / 2);
    }
    Case {
        gpu,
        weight,
        x,
        out: x,
        x_bits: ActivationBits::Auto,
        m,
        k,
        rows,
        k_split: None,
        norm: gated.then_some(super::NormKind::Rms),
        activation: match gated {
            true => Activation::SwiGlu,
            false => Activation::None,
        },
        bias: false,
        residuals: 0,
        preceding: Preceding::Any,
        recorded: false,
        alignment: Alignment::ALL,
    }
}

/// The first product of an MLP that stands beside attention, of one row: N and K, behind a layer norm.
pub(crate) fn parallel_mlp(gpu: GpuSpec, dtype: DType, [n, k]: [usize; 2]) -> Case {
    Case {
        norm: Some(super::NormKind::Layer),
        activation: Activation::Gelu,
        bias: true,
        ..case(gpu, WeightFormat::Dense(dtype), dtype, 1, (n, k, false))
    }
}

/// The products for q, k and v of one row, behind RMSNorm.
pub(crate) fn normed_qkv(gpu: GpuSpec, dtype: DType, [n, k]: [usize; 2]) -> Case {
    Case {
        norm: Some(super::NormKind::Rms),
        ..case(gpu, WeightFormat::Dense(dtype), dtype, 1, (n, k, false))
    }
}

/// All M to 130, and then powers of two.
fn rows_of_x() -> impl Iterator<Item = usize> {
    (1..=130).chain((8..=12).map(|power| 1 << power))
}

#[test]
fn choices_are_the_committed_ones() -> Result<()> {
    let mut text = String::from(
        "# Which kernel takes a product, by weight format, dtype of x and GPU: M and kernel for each N x K (+ where \
         half of N gates the other).\n# Written by the test `choices_are_the_committed_ones`.\n",
    );
    for weight in formats()? {
        for x in [DType::F32, DType::F16, DType::BF16] {
            let mut of_gpus = Vec::new();
            for (name, gpu) in GPUS {
                let mut of_shapes = Vec::new();
                for shape in SHAPES {
                    let (n, k, gated) = shape;
                    let name = format!("{n}x{k}{}", if gated { "+" } else { "" });
                    let choice = |m| Ok(select(&case(gpu, weight, x, m, shape))?.kernel.to_owned());
                    let text = runs(rows_of_x(), choice)?;
                    gather(&mut of_shapes, name, text);
                }
                let lines = of_shapes
                    .iter()
                    .map(|(shapes, text)| format!("  {}: {text}\n", shapes.join(" ")));
                gather(&mut of_gpus, name.to_owned(), lines.collect());
            }
            for (gpus, lines) in of_gpus {
                let x = x.as_str();
                write!(text, "\n{weight}, x {x}, {}\n{lines}", gpus.join(", ")).expect("a string");
            }
        }
    }
    assert_current("tests/data/dispatch/linear.txt", &text);
    Ok(())
}

/// The table's part of docs/kernels.md.
pub(crate) fn page() -> String {
    let mut text = String::from(
        "## `linear` and its relatives\n\nWhich kernel takes a product. M are the rows of x (tokens), N the output \
         channels, K the inputs. The table is [table.rs](../src/ops/linear/cuda/table.rs).\n\n\
         | kernel | weights | x: M | K | compute capability | norm as the prologue | SwiGLU, GeGLU | source | |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    let range = |[least, most]: [usize; 2]| match most {
        usize::MAX => format!("{least} or more"),
        most if most == least => most.to_string(),
        most => format!("{least} to {most}"),
    };
    for rule in RULES {
        let x = rule.x.iter();
        let x: Vec<_> = x
            .map(|(dtype, m)| format!("{}: {}", dtype.as_str(), range(*m)))
            .collect();
        let k = match rule.max_k {
            usize::MAX => "any".to_owned(),
            k => format!("up to {k}"),
        };
        writeln!(
            text,
            "| `{}` | {} | {} | {k} | {} | {} | {} | {} | {} |",
            rule.kernel,
            rule.formats,
            x.join("; "),
            architectures(rule.arch),
            format!("{:?}", rule.norms).to_lowercase(),
            if rule.gates { "yes" } else { "no" },
            rule.source,
            rule.note,
        )
        .expect("a string");
    }
    text
}

#[test]
fn a_forced_kernel_serves_or_says_why_not() -> Result<()> {
    let h100 = gpu_named("H100");
    let int4 = WeightFormat::Quantized(Format::Scheme("int4-g128".parse()?));
    let case = |m| case(h100, int4, DType::BF16, m, (4096, 4096, false));
    let kernel = |name, m| with_kernel(Some(name), || select(&case(m)));
    assert_eq!(kernel("gemm_wna16_mma", 16)?.kernel, "gemm_wna16_mma");
    // Kernels for other formats leave these alone, and so do those of other tables.
    for name in [
        "gemv_dense_mma",
        "flash_attention_mma",
        "flash_decoding_mma",
    ] {
        assert_eq!(
            kernel(name, 16)?.kernel,
            select(&case(16))?.kernel,
            "{name}"
        );
    }
    for (name, m, expected) in [
        ("gemm_wna16_mma", 512, "M is out of its range"),
        ("gemm_wna16_m16_tma", 16, "K is too short"),
        ("no_such", 16, "there is no kernel no_such"),
    ] {
        let error = kernel(name, m).expect_err(name).to_string();
        assert!(error.contains(expected), "{name}: {error}");
    }
    Ok(())
}

#[test]
fn a_plan_says_what_it_launches() -> Result<()> {
    let l4 = gpu_named("L4");
    let plan = select(&case(
        l4,
        WeightFormat::Dense(DType::BF16),
        DType::BF16,
        8,
        (4096, 4096, false),
    ))?;
    let text = plan.to_string();
    assert!(
        text.starts_with("gemv_dense_mma (gemv_dense_mma_bf16, "),
        "{text}"
    );
    assert!(text.contains(" B shared, split "), "{text}");
    Ok(())
}

/// Rows that are to be rounded to 8 bits of each token meet the kernels that do it themselves, or none.
#[test]
fn rows_are_rounded_by_the_kernels_of_few() -> Result<()> {
    for (name, gpu) in GPUS {
        for (scheme, m, on_hopper, elsewhere) in [
            (
                "ternary-row",
                1,
                Some("gemv_ternary_latency"),
                Some("gemv_ternary"),
            ),
            (
                "ternary-row",
                3,
                Some("gemv_ternary_latency"),
                Some("gemv_ternary"),
            ),
            ("ternary-row", 16, None, None),
            ("int4-g128", 1, None, None),
            ("int8", 16, None, None),
            ("int8", 512, Some("gemm_w8a8_sm90"), Some("gemm_w8a8_mma")),
        ] {
            let weight = WeightFormat::Quantized(Format::Scheme(scheme.parse()?));
            for gated in [false, true] {
                let case = Case {
                    x_bits: ActivationBits::PerToken8,
                    norm: Some(super::NormKind::Rms),
                    ..case(gpu, weight, DType::BF16, m, (4096, 2560, gated))
                };
                let found = RULES.iter().find(|rule| rule.try_plan(&case).is_ok());
                let expected = if gpu.arch == 90 { on_hopper } else { elsewhere };
                assert_eq!(found.map(|rule| rule.kernel), expected, "{name}: {case}");
            }
        }
    }
    Ok(())
}

/// FP8 weights meet x in e4m3 where that is asked for and tensor cores take it, from 64 rows on.
#[test]
fn rows_become_e4m3_where_8_bits_are_asked_for() -> Result<()> {
    let kernel = |gpu, scheme: &str, x_bits, m, shape| {
        let weight = WeightFormat::Quantized(Format::Scheme(scheme.parse()?));
        let case = Case {
            x_bits,
            ..case(gpu, weight, DType::BF16, m, shape)
        };
        Ok::<_, Error>(select(&case)?.kernel)
    };
    for (name, gpu) in GPUS {
        let expected = match gpu.arch {
            90 => Some("gemm_fp8_sm90"),
            89 => Some("gemm_fp8_mma"),
            _ => None,
        };
        for scheme in ["fp8", "fp8-block128"] {
            for (x_bits, m, shape, takes) in [
                (ActivationBits::Bits8, 64, (4096, 4096, false), true),
                (ActivationBits::Bits8, 2048, (28672, 4096, true), true),
                (ActivationBits::Bits8, 63, (4096, 4096, false), false),
                (ActivationBits::Auto, 512, (4096, 4096, false), false),
                // K is no multiple of a K block.
                (ActivationBits::Bits8, 512, (4096, 576, false), false),
            ] {
                let chosen = kernel(gpu, scheme, x_bits, m, shape)?;
                let e4m3 = chosen.contains("gemm_fp8").then_some(chosen);
                let expected = expected.filter(|_| takes);
                assert_eq!(e4m3, expected, "{name}: {scheme} {x_bits:?} {m} {shape:?}");
            }
        }
    }
    Ok(())
}

/// Weights of Q2_K are rounded to bf16 by `gemm_wna16_sm90`, so it is not for f32 rows that keep 16 bits.
#[test]
fn q2_k_is_not_rounded_for_few_f32_rows() -> Result<()> {
    let h100 = gpu_named("H100");
    for (dtype, x, m, takes) in [
        (GgmlDType::Q2K, DType::F32, 8, false),
        (GgmlDType::Q2K, DType::F32, 9, true),
        (GgmlDType::Q2K, DType::BF16, 8, true),
        (GgmlDType::Q3K, DType::F32, 8, true),
    ] {
        let weight = WeightFormat::Quantized(Format::Block(BlockFormat::of(dtype)?));
        let planned = gemm_wna16_sm90::plan(&case(h100, weight, x, m, (4096, 4096, false)));
        assert_eq!(planned.is_ok(), takes, "{dtype:?} {x:?} {m}");
    }
    Ok(())
}

/// Among kernels of other kinds a block has an SM to itself if there is an SM for each block, and only then.
#[test]
fn blocks_of_a_chain_are_spread_over_the_gpu() -> Result<()> {
    let h100 = gpu_named("H100");
    let weight = WeightFormat::Dense(DType::BF16);
    for (kernel, m, shape, spread) in [
        ("gemm_dense_sm90", 32, (1024, 4096, false), true),
        ("gemm_dense_sm90", 32, (28672, 4096, true), false),
        ("gemm_dense_normed_sm90", 128, (3072, 576, true), true),
        ("gemm_dense_normed_sm90", 2048, (3072, 576, true), false),
    ] {
        let plan = |preceding| {
            select(&Case {
                preceding,
                ..case(h100, weight, DType::BF16, m, shape)
            })
        };
        let (apart, chained) = (plan(Preceding::Any)?, plan(Preceding::Other)?);
        assert_eq!(chained.kernel, kernel);
        let grid = chained.how.grid().expect("a grid");
        assert_eq!(grid.blocks[0] <= h100.sms, spread, "{chained}");
        let least = if spread { h100.share(2) } else { 0 };
        let before = apart.how.grid().expect("a grid").shared;
        assert_eq!(
            grid.shared as usize,
            least.max(before as usize),
            "{chained}"
        );
    }
    Ok(())
}

/// Behind attention, no SM has room for two blocks of ternary weights, but one of the next product fits beside each.
#[test]
fn blocks_behind_attention_are_spread_over_the_gpu() -> Result<()> {
    let h100 = gpu_named("H100");
    let weight = WeightFormat::Quantized(Format::Scheme(Scheme::Ternary {
        scale: TernaryScale::Tensor,
    }));
    let shared = |preceding, shape| {
        let plan = select(&Case {
            preceding,
            ..case(h100, weight, DType::BF16, 1, shape)
        })?;
        assert_eq!(plan.kernel, "gemv_ternary_latency");
        Ok::<_, Error>(plan.how.grid().expect("a grid").shared as usize)
    };
    // BitNet-2B-4T: the output projection, gate and up.
    let [output, next] = [(2560, 2560, false), (13824, 2560, true)];
    assert!(2 * shared(Preceding::Other, output)? <= h100.share(2));
    let output = shared(Preceding::Attention, output)?;
    assert_eq!(output, h100.share(2));
    let next = shared(Preceding::Other, next)?;
    assert!(output + next <= h100.shared as usize - 2048);
    Ok(())
}

/// What choosing costs the host: with a plan that the thread keeps, and for the first time.
#[test]
#[ignore = "a measurement: it prints nanoseconds and holds nothing"]
fn time_of_a_choice() -> Result<()> {
    let h100 = gpu_named("H100");
    for weight in formats()? {
        let cases: Vec<_> = (1..=16)
            .map(|m| case(h100, weight, DType::BF16, m, (4096, 4096, false)))
            .collect();
        let per_choice = || -> Result<f64> {
            let started = Instant::now();
            for case in &cases {
                black_box(select(black_box(case))?);
            }
            Ok(started.elapsed().as_secs_f64() * 1e9 / cases.len() as f64)
        };
        // A thread of its own, which has no plans yet.
        let times = std::thread::scope(|scope| {
            let rounds = || (0..=1000).map(|_| per_choice()).collect::<Result<Vec<_>>>();
            scope.spawn(rounds).join()
        });
        let mut times = times.map_err(|_| Error::msg("a choice panicked"))??;
        let first = times.remove(0);
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        println!("{weight}: {median:.0} ns for a case seen before, {first:.0} ns for a new one");
    }
    Ok(())
}
