//! The table of kernels without a GPU: what it chooses over a grid of cases, and its page in the documentation.

use super::dispatch::{RULES, select};
use super::problem::{Alignment, Case, MAX_MATRICES, WeightFormat};
use crate::cuda::{GpuSpec, with_kernel};
use crate::ops::linear::Activation;
use crate::quant::{BlockFormat, Format};
use candle_core::quantized::GgmlDType;
use candle_core::{DType, Result};
use std::fmt::Write as _;
use std::path::Path;

/// Set to write the files anew that the tests compare with.
const UPDATE: &str = "CANDLE_FUSED_WRITE_TABLES";

/// Name, compute capability, SMs, shared memory of a block.
const GPUS: [(&str, u32, u32, u32); 7] = [
    ("T4", 75, 40, 64 << 10),
    ("A100", 80, 108, 163 << 10),
    ("RTX 3090", 86, 82, 99 << 10),
    ("Orin", 87, 16, 163 << 10),
    ("L4", 89, 58, 99 << 10),
    ("H100", 90, 132, 227 << 10),
    ("H200", 90, 132, 227 << 10),
];

/// N and K of the products of SmolLM2-135M, Qwen3-0.6B, Llama-3.2-1B, Pythia-2.8B and Llama-3-8B, and of gated ones.
const SHAPES: [(usize, usize, bool); 17] = [
    (960, 576, false),
    (576, 576, false),
    (3072, 576, true),
    (576, 1536, false),
    (49152, 576, false),
    (4096, 1024, false),
    (1024, 2048, false),
    (6144, 1024, true),
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

const FORMATS: [&str; 13] = [
    "q4_0",
    "q4_1",
    "q5_0",
    "q5_1",
    "q8_0",
    "q4k",
    "q5k",
    "q6k",
    "int8",
    "int4-g128",
    "int4-g32-z",
    "ternary-row",
    "ternary-g64",
];

fn gpu(capability: u32, sms: u32, shared: u32) -> GpuSpec {
    GpuSpec {
        capability,
        arch: capability,
        sms,
        shared,
    }
}

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
        m,
        k,
        rows,
        border: None,
        norm: gated.then_some(super::NormKind::Rms),
        activation: match gated {
            true => Activation::SwiGlu,
            false => Activation::None,
        },
        bias: false,
        residuals: 0,
        one_cta_per_sm: false,
        alignment: Alignment::ALL,
    }
}

/// All M to 130, and then powers of two.
fn rows_of_x() -> impl Iterator<Item = usize> {
    (1..=130).chain((8..=12).map(|power| 1 << power))
}

/// As in `1 gemv_dense, 2-8 gemv_dense_mma, 9-4096 gemm_dense_cublaslt`.
fn choices(of: impl Fn(usize) -> Case) -> Result<String> {
    let mut runs: Vec<(usize, usize, &str)> = Vec::new();
    for m in rows_of_x() {
        let kernel = select(&of(m))?.kernel;
        match runs.last_mut() {
            Some((_, last, same)) if *same == kernel => *last = m,
            _ => runs.push((m, m, kernel)),
        }
    }
    let texts = runs
        .iter()
        .map(|(first, last, kernel)| match first == last {
            true => format!("{first} {kernel}"),
            false => format!("{first}-{last} {kernel}"),
        });
    Ok(texts.collect::<Vec<_>>().join(", "))
}

/// Adds `name` to the line of the same text, or a line.
fn gather(lines: &mut Vec<(Vec<String>, String)>, name: String, text: String) {
    match lines.iter_mut().find(|(_, same)| *same == text) {
        Some((names, _)) => names.push(name),
        None => lines.push((vec![name], text)),
    }
}

/// What `text` is held to, below the package's root.
fn assert_current(path: &str, text: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if std::env::var_os(UPDATE).is_some() {
        std::fs::write(&path, text).expect("the file can be written");
    }
    let held = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        held == text,
        "{} is not what the table of kernels gives; if the change is meant, run this test with {UPDATE}=1",
        path.display()
    );
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
            for (name, capability, sms, shared) in GPUS {
                let mut of_shapes = Vec::new();
                for shape in SHAPES {
                    let gpu = gpu(capability, sms, shared);
                    let (n, k, gated) = shape;
                    let name = format!("{n}x{k}{}", if gated { "+" } else { "" });
                    let text = choices(|m| case(gpu, weight, x, m, shape))?;
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

#[test]
fn the_page_of_kernels_is_current() {
    let mut text = String::from(
        "# Kernels of `linear` and its relatives on CUDA\n\nWhich kernel takes a product. The first row of the table \
         that fits is taken; `CANDLE_FUSED_KERNEL=name` forces one, and `candle_fused::trace::capture` tells which ran. \
         M are the rows of x (tokens), N the output channels, K the inputs. The table is \
         [dispatch.rs](../src/ops/linear/cuda/dispatch.rs); a test writes this page from it.\n\n\
         | kernel | weights | x: M | K | compute capability | norm as the prologue | SwiGLU | source | |\n\
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
        let arch = match rule.arch {
            [0, u32::MAX] => "any".to_owned(),
            [least, u32::MAX] => format!("{}.{} or newer", least / 10, least % 10),
            [_, most] => format!("{}.{}", most / 10, most % 10),
        };
        writeln!(
            text,
            "| `{}` | {} | {} | {k} | {arch} | {} | {} | {} | {} |",
            rule.kernel,
            rule.formats,
            x.join("; "),
            format!("{:?}", rule.norms).to_lowercase(),
            if rule.gates { "yes" } else { "no" },
            rule.source,
            rule.note,
        )
        .expect("a string");
    }
    assert_current("docs/kernels.md", &text);
}

#[test]
fn a_forced_kernel_serves_or_says_why_not() -> Result<()> {
    let h100 = gpu(90, 132, 227 << 10);
    let int4 = WeightFormat::Quantized(Format::Scheme("int4-g128".parse()?));
    let case = |m| case(h100, int4, DType::BF16, m, (4096, 4096, false));
    let kernel = |name, m| with_kernel(Some(name), || select(&case(m)));
    assert_eq!(kernel("gemm_wna16_m64", 16)?.kernel, "gemm_wna16_m64");
    // Kernels for other formats leave these alone.
    assert_eq!(
        kernel("gemv_dense_mma", 16)?.kernel,
        select(&case(16))?.kernel
    );
    for (name, m, expected) in [
        ("gemm_wna16_m64", 512, "M is out of its range"),
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
    let h100 = gpu(90, 132, 227 << 10);
    let plan = select(&case(
        h100,
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
