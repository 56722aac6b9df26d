//! Which kernel takes a call: one table, first match wins.

use super::super::OP;
use super::kernels;
use super::problem::{Call, Case};
use crate::cuda::KernelInfo;
use crate::ops::flash_attention::cuda as table;
use crate::ops::flash_attention::cuda::{Forms, HeadSizes, NEWEST, Plan, Planned};
use candle_core::{DType, Result};

/// When a kernel is chosen. What this cannot say, its `plan` does.
pub(super) struct Rule {
    /// The name, as in `CANDLE_FUSED_KERNEL`.
    pub kernel: &'static str,
    /// The file below `kernels/`.
    pub source: &'static str,
    pub forms: &'static [Forms],
    pub plan: fn(&Case) -> Planned<Call>,
    /// What a reader of the table should know.
    pub note: &'static str,
}

/// The table. First match wins.
pub(super) static RULES: &[Rule] = &[
    Rule {
        kernel: "paged_attention_mma",
        source: "attention/paged_attention.cu",
        forms: &[
            Forms::over(
                DType::F16,
                [75, NEWEST],
                HeadSizes::Of(&kernels::MMA_HEAD_SIZES),
            ),
            Forms::over(
                DType::BF16,
                [80, NEWEST],
                HeadSizes::Of(&kernels::MMA_HEAD_SIZES),
            ),
            Forms::over(
                DType::F8E4M3,
                [75, NEWEST],
                HeadSizes::Of(&kernels::MMA_HEAD_SIZES),
            ),
            Forms::over(
                DType::U8,
                [75, NEWEST],
                HeadSizes::Of(&kernels::MMA_HEAD_SIZES),
            ),
        ],
        plan: kernels::mma,
        note: "8 queries of a key/value head in a warp, or 16 of the pools' dtype; rows of keys and values in whole 16-byte pieces; FP8 (f8e4m3) and INT8 (u8), which become f16 in registers, in paged_attention_codes.cu; with batch invariance 8 queries and splits of 128 keys, in paged_attention_fixed_split.cu and paged_attention_fixed_split_codes.cu",
    },
    Rule {
        kernel: "paged_attention_plain",
        source: "attention/paged_attention.cu",
        forms: &[Forms::of_each(HeadSizes::UpTo(kernels::WIDEST))],
        plan: kernels::plain,
        note: "multiply-adds in f32, any strides, codes too; 2 to 4 queries of a key/value head in a warp; with batch invariance in the same files as above",
    },
];

impl table::Rule<Case> for Rule {
    type Operands = Call;

    fn info(&self) -> KernelInfo {
        KernelInfo {
            name: self.kernel,
            source: self.source,
            note: self.note,
        }
    }

    fn plan(&self, case: &Case) -> Planned<Call> {
        let dtypes = [case.dtype, case.pool_dtype];
        match Forms::refusal(self.forms, dtypes, case.gpu.arch, case.sizes.dim) {
            Some(reason) => Err(reason),
            None => (self.plan)(case),
        }
    }
}

/// The plan for a case.
///
/// # Errors
/// If no kernel takes it, or the one that is forced does not; the message says why.
pub(super) fn select(case: &Case) -> Result<Plan<Call>> {
    table::select(OP, RULES, case)
}

/// The kernels in the order in which they are tried.
pub fn kernels() -> impl Iterator<Item = KernelInfo> {
    RULES.iter().map(table::Rule::info)
}
