//! Which kernel takes a product: one table, first match wins.

use super::kernels::{
    gemm_dense, gemm_dequantized, gemm_w8a8, gemm_w8a8_cluster, gemm_wna16_m16, gemm_wna16_m64,
    gemm_wna16_sm90, gemv_dense, gemv_dense_pipelined, gemv_gguf, gemv_wna16, gemv_wna16_sm90,
};
use super::plan::{Plan, Planned};
use super::problem::{Case, NormKind, WeightFormat};
use crate::cuda::{KernelInfo, forced};
use crate::quant::{Format, Scheme};
use candle_core::{DType, Result, bail};
use std::cell::RefCell;
use std::collections::HashMap;

/// Plans that a thread keeps: prompts come in many lengths.
const MAX_PLANS: usize = 4096;

/// Weight formats that a rule takes, as a set of bits.
#[derive(Clone, Copy)]
pub(super) struct Formats(u16);

impl Formats {
    const F32: Self = Self(1);
    const HALF: Self = Self(1 << 1);
    const GGUF: Self = Self(1 << 2);
    const INT8: Self = Self(1 << 3);
    /// INT4 in groups of 128 without zero points.
    const INT4_G128: Self = Self(1 << 4);
    /// All other INT4.
    const INT4_OTHER: Self = Self(1 << 5);
    const TERNARY: Self = Self(1 << 6);
    /// Several dense matrices of different dtypes, or more than a launch takes.
    const MIXED_DENSE: Self = Self(1 << 7);
    /// The same with quantized ones among them.
    const MIXED: Self = Self(1 << 8);

    const DENSE: Self = Self::F32.or(Self::HALF);
    const INT4: Self = Self::INT4_G128.or(Self::INT4_OTHER);
    const QUANTIZED: Self = Self::GGUF.or(Self::INT8).or(Self::INT4).or(Self::TERNARY);

    /// Each with its name.
    const NAMES: [(Self, &'static str); 9] = [
        (Self::F32, "f32"),
        (Self::HALF, "f16, bf16"),
        (Self::GGUF, "GGUF"),
        (Self::INT8, "INT8"),
        (Self::INT4_G128, "INT4 g128"),
        (Self::INT4_OTHER, "other INT4"),
        (Self::TERNARY, "ternary"),
        (Self::MIXED_DENSE, "mixed dense"),
        (Self::MIXED, "mixed"),
    ];

    const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn of(format: WeightFormat) -> Self {
        match format {
            WeightFormat::Dense(DType::F32) => Self::F32,
            WeightFormat::Dense(_) => Self::HALF,
            WeightFormat::Quantized(Format::Block(_)) => Self::GGUF,
            WeightFormat::Quantized(Format::Scheme(scheme)) => match scheme {
                Scheme::Int8 => Self::INT8,
                Scheme::Int4 {
                    group: 128,
                    zero_point: false,
                } => Self::INT4_G128,
                Scheme::Int4 { .. } => Self::INT4_OTHER,
                Scheme::Ternary { .. } => Self::TERNARY,
            },
            WeightFormat::Mixed { quantized: true } => Self::MIXED,
            WeightFormat::Mixed { quantized: false } => Self::MIXED_DENSE,
        }
    }

    fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

impl std::fmt::Display for Formats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = Self::NAMES
            .iter()
            .filter(|(formats, _)| self.contains(*formats));
        let names: Vec<_> = names.map(|(_, name)| *name).collect();
        f.write_str(&names.join(", "))
    }
}

/// Norms that a rule's kernel has as its prologue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Norms {
    None,
    /// An RMS norm or none.
    Rms,
    Any,
}

/// A dtype of x, and the least and the greatest M that a rule takes of it.
type Rows = (DType, [usize; 2]);

/// When a kernel is chosen. What ranges cannot say, its `plan` does.
pub(super) struct Rule {
    /// The name, as in `CANDLE_FUSED_KERNEL`.
    pub kernel: &'static str,
    /// The file below `kernels/`; for a library the part of it that is ours.
    pub source: &'static str,
    pub formats: Formats,
    pub x: &'static [Rows],
    pub max_k: usize,
    /// Least and greatest.
    pub arch: [u32; 2],
    pub norms: Norms,
    /// Whether it takes SwiGLU, and two matrices along k.
    pub gates: bool,
    pub pairs: bool,
    pub plan: fn(&Case) -> Planned,
    /// What a reader of the table should know.
    pub note: &'static str,
}

const F32: DType = DType::F32;
const F16: DType = DType::F16;
const BF16: DType = DType::BF16;

const MAX: usize = usize::MAX;
const NEWEST: u32 = u32::MAX;

/// M of all GEMV kernels but for ternary weights.
const GEMV: [usize; 2] = [1, 8];
const SEVERAL: [usize; 2] = [2, GEMV[1]];

/// M of the tensor-core kernels for INT8 and INT4 weights, which multiply in bf16. Few f32 rows keep 16 bits as two
/// parts in GEMVs; more are rounded to bf16, as for the library.
const WNA16_M16: &[Rows] = &[(BF16, [2, 32]), (F32, [GEMV[1] + 1, 32])];
/// The same on Hopper, where another kernel takes more.
const WNA16_M16_SM90: &[Rows] = &[(BF16, [2, 16]), (F32, [GEMV[1] + 1, 16])];
const WNA16_M64: &[Rows] = &[(BF16, [2, 128]), (F32, [GEMV[1] + 1, 128])];

/// M from which on x is quantized for INT8 weights, as measured on an H100.
const W8A8: [usize; 2] = [64, MAX];

/// What most rules have.
const RULE: Rule = Rule {
    kernel: "",
    source: "",
    formats: Formats::DENSE,
    x: &[(F32, [1, MAX]), (F16, [1, MAX]), (BF16, [1, MAX])],
    max_k: MAX,
    arch: [0, NEWEST],
    norms: Norms::Any,
    gates: true,
    pairs: false,
    plan: |_| Err("it has no plan"),
    note: "",
};

/// M from which on, on Hopper, weights in tensor cores' registers beat those that are dequantized for the library.
const WNA16_SM90: [usize; 2] = [2, 1024];
/// Twice as many rows of operand B keep the bits of f16.
const WNA16_SM90_OF_EACH: &[Rows] = &[(BF16, WNA16_SM90), (F32, WNA16_SM90), (F16, [2, 64])];

const GEMV_OF_EACH: &[Rows] = &[(F32, GEMV), (F16, GEMV), (BF16, GEMV)];
const GEMV_OF_HALVES: &[Rows] = &[(F16, GEMV), (BF16, GEMV)];

/// The table. First match wins; a kernel may have several rules.
pub(super) static RULES: &[Rule] = &[
    Rule {
        kernel: "gemv_dense_latency",
        source: "linear/gemv_dense.cu",
        formats: Formats::HALF,
        x: GEMV_OF_HALVES,
        max_k: gemv_dense::MAX_LATENCY_K,
        norms: Norms::Rms,
        plan: gemv_dense::latency,
        note: "few output channels: one block a multiprocessor at most",
        ..RULE
    },
    Rule {
        kernel: gemv_dense_pipelined::NAME,
        source: "linear/gemv_dense_pipelined.cu",
        formats: Formats::HALF,
        x: &[(F16, [1, 1]), (BF16, [1, 1])],
        arch: [80, NEWEST],
        pairs: true,
        plan: gemv_dense_pipelined::plan,
        note: "with a layer norm as the prologue, from 8 MB of weights on, and two matrices along K",
        ..RULE
    },
    Rule {
        kernel: "gemv_dense_mma",
        source: "linear/gemv_dense.cu",
        formats: Formats::HALF,
        x: &[(F16, SEVERAL), (BF16, SEVERAL)],
        plan: gemv_dense::mma,
        note: "rows of x that do not fit into shared memory together take several launches; bf16 from 8.0 on",
        ..RULE
    },
    Rule {
        kernel: "gemv_dense_m8",
        source: "linear/gemv_dense.cu",
        x: &[(F32, SEVERAL), (F16, SEVERAL), (BF16, SEVERAL)],
        plan: gemv_dense::m8,
        note: "multiply-adds in f32",
        ..RULE
    },
    Rule {
        kernel: "gemv_dense",
        source: "linear/gemv_dense.cu",
        x: GEMV_OF_EACH,
        plan: gemv_dense::m1,
        note: "a launch for each row",
        ..RULE
    },
    Rule {
        kernel: "gemv_dense_scalar",
        source: "linear/gemv_dense.cu",
        x: GEMV_OF_EACH,
        plan: gemv_dense::scalar,
        note: "rows that are no whole pieces of 16 aligned bytes",
        ..RULE
    },
    Rule {
        kernel: "gemm_dense_cublaslt",
        source: "linear/gemm_dense.cu",
        formats: Formats::DENSE.or(Formats::MIXED_DENSE),
        plan: gemm_dense::plan,
        note: "the norm in a preceding kernel, activation and second residual in a following one",
        ..RULE
    },
    Rule {
        kernel: "gemv_gguf_latency",
        source: "linear/gemv_gguf_latency.cu",
        formats: Formats::GGUF,
        x: &[(F32, [1, 4])],
        arch: [80, NEWEST],
        norms: Norms::Rms,
        plan: gemv_gguf::latency,
        note: "few output channels: one block a multiprocessor at most",
        ..RULE
    },
    Rule {
        kernel: "gemv_wna16_sm90",
        source: "linear/gemv_wna16_sm90.cu",
        formats: Formats::INT4_G128.or(Formats::TERNARY),
        x: &[(F32, [1, 1]), (F16, [1, 1]), (BF16, [1, 1])],
        arch: [90, NEWEST],
        plan: gemv_wna16_sm90::plan,
        note: "of ternary weights those with one scale for a row or the matrix",
        ..RULE
    },
    Rule {
        kernel: "gemm_w8a8_cluster",
        source: "linear/gemm_w8a8_cluster.cu",
        formats: Formats::INT8,
        x: &[(F16, W8A8), (BF16, W8A8)],
        arch: [90, 90],
        norms: Norms::None,
        plan: gemm_w8a8_cluster::plan,
        note: "small products: the same launch quantizes x",
        ..RULE
    },
    Rule {
        kernel: "gemm_w8a8_sm90",
        source: "linear/gemm_w8a8_sm90.cu",
        formats: Formats::INT8,
        x: &[(F32, W8A8), (F16, W8A8), (BF16, W8A8)],
        arch: [90, 90],
        plan: gemm_w8a8::sm90,
        note: "a preceding kernel quantizes x",
        ..RULE
    },
    Rule {
        kernel: "gemm_w8a8_mma",
        source: "linear/gemm_w8a8.cu",
        formats: Formats::INT8,
        x: &[(F32, W8A8), (F16, W8A8), (BF16, W8A8)],
        plan: gemm_w8a8::mma,
        note: "likewise",
        ..RULE
    },
    Rule {
        kernel: "gemm_wna16_m16_cluster",
        source: "linear/gemm_wna16_m16_cluster.cu",
        formats: Formats::INT4_G128,
        x: WNA16_M16_SM90,
        arch: [90, NEWEST],
        gates: false,
        plan: gemm_wna16_m16::cluster,
        note: "few output channels and K up to 2,048; 16 rows a launch",
        ..RULE
    },
    Rule {
        kernel: "gemm_wna16_m16_tma",
        source: "linear/gemm_wna16_m16_tma.cu",
        formats: Formats::INT4_G128,
        x: WNA16_M16_SM90,
        arch: [90, NEWEST],
        plan: gemm_wna16_m16::tma,
        note: "K past 4,096; 16 rows a launch",
        ..RULE
    },
    Rule {
        kernel: "gemm_wna16_m16",
        source: "linear/gemm_wna16_m16.cu",
        formats: Formats::INT4_G128,
        x: WNA16_M16_SM90,
        arch: [90, NEWEST],
        plan: gemm_wna16_m16::plan,
        note: "16 rows a launch",
        ..RULE
    },
    Rule {
        kernel: "gemm_wna16_sm90",
        source: "linear/gemm_wna16_sm90.cu",
        formats: Formats::QUANTIZED,
        x: WNA16_SM90_OF_EACH,
        arch: [90, 90],
        plan: gemm_wna16_sm90::plan,
        note: "a preceding kernel narrows x; f16, and f32 up to M = 8, in two parts",
        ..RULE
    },
    Rule {
        kernel: "gemv_gguf",
        source: "linear/gemv_gguf.cu",
        formats: Formats::GGUF,
        x: GEMV_OF_EACH,
        plan: gemv_gguf::plan,
        note: "four rows a launch",
        ..RULE
    },
    Rule {
        kernel: "gemv_ternary",
        source: "linear/gemv_wna16.cu",
        formats: Formats::TERNARY,
        x: &[(F32, [1, 64]), (F16, [1, 64]), (BF16, [1, 64])],
        plan: gemv_wna16::plan,
        note: "four rows a launch",
        ..RULE
    },
    Rule {
        kernel: "gemm_wna16_m16",
        source: "linear/gemm_wna16_m16.cu",
        formats: Formats::INT8.or(Formats::INT4),
        x: WNA16_M16,
        arch: [80, NEWEST],
        plan: gemm_wna16_m16::plan,
        note: "16 rows a launch",
        ..RULE
    },
    Rule {
        kernel: "gemm_wna16_m64",
        source: "linear/gemm_wna16_m64.cu",
        formats: Formats::INT8.or(Formats::INT4),
        x: WNA16_M64,
        arch: [80, NEWEST],
        plan: gemm_wna16_m64::plan,
        note: "64 rows a launch; f16 rows would lose three of their bits, so they go to a GEMV or the library",
        ..RULE
    },
    Rule {
        kernel: "gemv_wna16",
        source: "linear/gemv_wna16.cu",
        formats: Formats::INT8.or(Formats::INT4),
        x: GEMV_OF_EACH,
        plan: gemv_wna16::plan,
        note: "16 bits of f32 and f16 rows in two parts; four rows a launch",
        ..RULE
    },
    Rule {
        kernel: gemm_dequantized::NAME,
        source: "formats/dequantize.cu",
        formats: Formats::QUANTIZED.or(Formats::MIXED),
        plan: gemm_dequantized::plan,
        note: "a preceding kernel applies an RMS norm and narrows x, a layer norm has a kernel of its own; activation and second residual in a following one",
        ..RULE
    },
];

impl Rule {
    /// The kernel's plan for the case, or why it does not take it.
    fn plan(&self, case: &Case) -> Planned {
        if !self.formats.contains(Formats::of(case.weight)) {
            return Err("it does not take weights of this format");
        }
        let Some((_, [least, most])) = self.x.iter().find(|(dtype, _)| *dtype == case.x) else {
            return Err("it does not take x in this dtype");
        };
        if !(*least..=*most).contains(&case.m) {
            return Err("M is out of its range for this dtype of x");
        }
        if case.k > self.max_k {
            return Err("K is too long");
        }
        if !(self.arch[0]..=self.arch[1]).contains(&case.gpu.arch) {
            return Err("it is for other architectures");
        }
        match (self.norms, case.norm) {
            (_, None) | (Norms::Any, _) | (Norms::Rms, Some(NormKind::Rms)) => {}
            _ => return Err("it does not have this norm in front"),
        }
        if case.gates() && !self.gates {
            return Err("it does not gate");
        }
        if case.border.is_some() && !self.pairs {
            return Err("it does not take two matrices along K");
        }
        (self.plan)(case)
    }

    fn chosen(&self, case: &Case) -> std::result::Result<Plan, &'static str> {
        let how = self.plan(case)?;
        Ok(Plan {
            kernel: self.kernel,
            how,
        })
    }
}

/// Whether the kernel takes matrices of several formats, and any number of them.
pub(super) fn takes_mixed(kernel: &str) -> bool {
    let any = Formats::MIXED.0 | Formats::MIXED_DENSE.0;
    RULES
        .iter()
        .any(|rule| rule.kernel == kernel && rule.formats.0 & any != 0)
}

/// Whether the kernel is the library's with dequantized weights.
pub(super) fn dequantizes(kernel: &str) -> bool {
    kernel == gemm_dequantized::NAME
}

thread_local! {
    static PLANS: RefCell<HashMap<Case, Plan>> = RefCell::new(HashMap::new());
}

/// The plan for a case.
///
/// # Errors
/// If no kernel takes it, or the one that is forced does not; the message says why.
pub(super) fn select(case: &Case) -> Result<Plan> {
    let place = forced("linear", kernels(), crate::ops::all_kernels())?;
    if let Some(KernelInfo { name, .. }) = place.and_then(|place| kernels().nth(place)) {
        let format = Formats::of(case.weight);
        let rules = RULES.iter().filter(|rule| rule.kernel == name);
        let rules = rules.filter(|rule| rule.formats.contains(format));
        let (mut known, mut refusal) = (false, "");
        for rule in rules {
            known = true;
            match rule.chosen(case) {
                Ok(plan) => return Ok(plan),
                Err(reason) => refusal = reason,
            }
        }
        if known {
            bail!("linear: kernel {name} cannot take {case}: {refusal}");
        }
    }
    if let Some(plan) = PLANS.with_borrow(|plans| plans.get(case).cloned()) {
        return Ok(plan);
    }
    let Some(plan) = RULES.iter().find_map(|rule| rule.chosen(case).ok()) else {
        let reasons = RULES
            .iter()
            .filter(|rule| rule.formats.contains(Formats::of(case.weight)))
            .filter_map(|rule| Some(format!("{}: {}", rule.kernel, rule.plan(case).err()?)));
        let reasons = reasons.collect::<Vec<_>>().join("; ");
        bail!("linear: no kernel takes {case} ({reasons})");
    };
    PLANS.with_borrow_mut(|plans| {
        if plans.len() >= MAX_PLANS {
            plans.clear();
        }
        plans.insert(*case, plan.clone());
    });
    Ok(plan)
}

/// The kernels in the order in which they are tried, each once.
pub fn kernels() -> impl Iterator<Item = KernelInfo> {
    let first = |(i, rule): &(usize, &Rule)| RULES[..*i].iter().all(|r| r.kernel != rule.kernel);
    let rules = RULES.iter().enumerate().filter(first);
    rules.map(|(_, rule)| KernelInfo {
        name: rule.kernel,
        source: rule.source,
        note: rule.note,
    })
}
