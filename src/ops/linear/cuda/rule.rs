//! What a rule of the table says: which cases its kernel may be given.

use super::plan::{Plan, Planned};
use super::problem::{Case, NormKind, WeightFormat};
use crate::ops::linear::ActivationBits;
use crate::quant::{Format, Scheme};
use candle_core::DType;

/// Weight formats that a rule takes, as a set of bits.
#[derive(Clone, Copy)]
pub(super) struct Formats(u16);

impl Formats {
    pub const F32: Self = Self(1);
    /// Dense weights in f16 or bf16.
    pub const DENSE_16_BIT: Self = Self(1 << 1);
    pub const GGUF: Self = Self(1 << 2);
    pub const INT8: Self = Self(1 << 3);
    /// INT4 in groups of 128 without zero points.
    pub const INT4_G128: Self = Self(1 << 4);
    /// All other INT4.
    pub const INT4_OTHER: Self = Self(1 << 5);
    pub const TERNARY: Self = Self(1 << 6);
    /// Several dense matrices of different dtypes, or more than a launch takes.
    pub const MIXED_DENSE: Self = Self(1 << 7);
    /// The same with quantized ones among them.
    pub const MIXED: Self = Self(1 << 8);
    pub const FP8: Self = Self(1 << 9);
    pub const NVFP4: Self = Self(1 << 10);
    pub const NF4: Self = Self(1 << 11);

    pub const DENSE: Self = Self::F32.or(Self::DENSE_16_BIT);
    pub const INT4: Self = Self::INT4_G128.or(Self::INT4_OTHER);
    pub const CODES_4_AND_8_BITS: Self = Self::INT8
        .or(Self::FP8)
        .or(Self::NVFP4)
        .or(Self::NF4)
        .or(Self::INT4);
    pub const QUANTIZED: Self = Self::GGUF.or(Self::CODES_4_AND_8_BITS).or(Self::TERNARY);

    /// Each with its name.
    const NAMES: [(Self, &'static str); 12] = [
        (Self::F32, "f32"),
        (Self::DENSE_16_BIT, "f16, bf16"),
        (Self::GGUF, "GGUF"),
        (Self::INT8, "INT8"),
        (Self::FP8, "FP8"),
        (Self::NVFP4, "NVFP4"),
        (Self::NF4, "NF4"),
        (Self::INT4_G128, "INT4 g128"),
        (Self::INT4_OTHER, "other INT4"),
        (Self::TERNARY, "ternary"),
        (Self::MIXED_DENSE, "mixed dense"),
        (Self::MIXED, "mixed"),
    ];

    pub const fn or(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub fn of(format: WeightFormat) -> Self {
        match format {
            WeightFormat::Dense(DType::F32) => Self::F32,
            WeightFormat::Dense(_) => Self::DENSE_16_BIT,
            WeightFormat::Quantized(Format::Block(_)) => Self::GGUF,
            WeightFormat::Quantized(Format::Scheme(scheme)) => match scheme {
                Scheme::Int8 => Self::INT8,
                Scheme::Fp8 | Scheme::Fp8Block128 => Self::FP8,
                Scheme::Nvfp4 => Self::NVFP4,
                Scheme::Nf4 => Self::NF4,
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

    pub fn contains(self, other: Self) -> bool {
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
pub(super) type Rows = (DType, [usize; 2]);

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
    /// Whether it takes activations with a gate, and two matrices along k.
    pub gates: bool,
    pub pairs: bool,
    /// Whether it rounds x to int8.
    pub int8_x: bool,
    /// Whether it is there only where activations of 8 bits are asked for.
    pub bits8: bool,
    /// M up to which it rounds x to 8 bits of each token where that is asked for; 0 if it does not.
    pub rounds_up_to: usize,
    pub plan: fn(&Case) -> Planned,
    /// What a reader of the table should know.
    pub note: &'static str,
}

/// What most rules have.
pub(super) const RULE: Rule = Rule {
    kernel: "",
    source: "",
    formats: Formats::DENSE,
    x: &[
        (DType::F32, [1, usize::MAX]),
        (DType::F16, [1, usize::MAX]),
        (DType::BF16, [1, usize::MAX]),
    ],
    max_k: usize::MAX,
    arch: [0, u32::MAX],
    norms: Norms::Any,
    gates: true,
    pairs: false,
    int8_x: false,
    bits8: false,
    rounds_up_to: 0,
    plan: |_| Err("the rule names no plan"),
    note: "",
};

impl Rule {
    /// The kernel's plan for the case, or why it does not take it.
    pub fn plan(&self, case: &Case) -> Planned {
        if !self.formats.contains(Formats::of(case.weight)) {
            return Err("it does not take weights of this format");
        }
        let Some((_, [least, most])) = self.x.iter().find(|(dtype, _)| *dtype == case.x) else {
            return Err("it does not take x in this dtype");
        };
        if !(*least..=*most).contains(&case.m) {
            return Err("M is out of its range for this dtype of x");
        }
        if self.int8_x && case.x_bits == ActivationBits::Bits16 {
            return Err("x has to keep 16 bits, and it rounds x to int8");
        }
        if self.bits8 && case.x_bits != ActivationBits::Bits8 {
            return Err("it quantizes x to int8, which was not asked for");
        }
        if case.is_rounded() && case.m > self.rounds_up_to {
            return Err("it does not round this many rows of x to 8 bits of each token");
        }
        if case.k > self.max_k {
            return Err("K is too long");
        }
        if !(self.arch[0]..=self.arch[1]).contains(&case.gpu.arch) {
            return Err("it is for other architectures");
        }
        match (self.norms, case.norm) {
            (_, None) | (Norms::Any, _) | (Norms::Rms, Some(NormKind::Rms)) => {}
            _ => return Err("it cannot apply this norm as its prologue"),
        }
        if case.gates() && !self.gates {
            return Err("it cannot apply SwiGLU or another gate");
        }
        if case.k_split.is_some() && !self.pairs {
            return Err("it does not take two matrices along K");
        }
        (self.plan)(case)
    }

    /// The plan with the name of the kernel, or why the rule does not take the case.
    pub fn try_plan(&self, case: &Case) -> std::result::Result<Plan, &'static str> {
        let how = self.plan(case)?;
        Ok(Plan {
            kernel: self.kernel,
            how,
        })
    }

    /// Whether the kernel takes matrices of several formats, and any number of them.
    pub fn takes_mixed(&self) -> bool {
        self.formats.0 & (Formats::MIXED.0 | Formats::MIXED_DENSE.0) != 0
    }
}
