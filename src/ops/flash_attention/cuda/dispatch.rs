//! Which kernel takes a call of `flash_attention`: one table, first match wins.

use super::forms::{Forms, HeadSizes, NEWEST};
use super::plan::{self, Plan, Planned};
use super::problem::{Call, Case};
use super::{mma, plain, wgmma};
use crate::cpu::attention::Sizes;
use crate::cuda::{GpuSpec, KernelInfo};
use candle_core::{DType, Result, bail};

/// When a kernel is chosen. What this cannot say, its `plan` does.
pub(super) struct Rule {
    /// The name, as in `CANDLE_FUSED_KERNEL`.
    pub kernel: &'static str,
    /// The file below `kernels/`.
    pub source: &'static str,
    pub forms: &'static [Forms],
    /// Of a sequence, at least.
    pub queries: usize,
    /// Whether it takes a mask, slopes, a window that hides keys, and a softcap.
    pub general: bool,
    pub plan: fn(&Case) -> Planned<Call>,
    /// What a reader of the table should know.
    pub note: &'static str,
}

/// The table. First match wins.
pub(super) static RULES: &[Rule] = &[
    Rule {
        kernel: "flash_attention_sm90",
        source: "attention/prefill_sm90.cu",
        forms: &[
            Forms::of(DType::F16, [90, 90], HeadSizes::Of(&wgmma::HEAD_SIZES)),
            Forms::of(DType::BF16, [90, 90], HeadSizes::Of(&wgmma::HEAD_SIZES)),
        ],
        queries: wgmma::MIN_QUERIES,
        general: false,
        plan: wgmma::plan,
        note: "wgmma and TMA; rows in whole 16-byte pieces, a positive scale",
    },
    Rule {
        kernel: "flash_attention_mma",
        source: "attention/prefill.cu",
        forms: &[
            Forms::of(DType::F16, [75, NEWEST], HeadSizes::Of(&mma::HEAD_SIZES)),
            Forms::of(DType::BF16, [80, NEWEST], HeadSizes::Of(&mma::HEAD_SIZES)),
            Forms {
                q: Some(DType::F32),
                ..Forms::of(
                    DType::F16,
                    [75, NEWEST],
                    HeadSizes::Of(mma::HEAD_SIZES_OF_F32),
                )
            },
            mma::codes(DType::F16, DType::F8E4M3, 75),
            mma::codes(DType::F16, DType::U8, 75),
            mma::codes(DType::BF16, DType::F8E4M3, 80),
            mma::codes(DType::BF16, DType::U8, 80),
        ],
        queries: 1,
        general: true,
        plan: mma::plan,
        note: "rows of keys and values in whole 16-byte pieces; few rows of queries share the keys out among warps; FP8 (f8e4m3) and INT8 (u8) in pages, which become q's dtype on their way to shared memory, in paged_prefill_codes.cu",
    },
    Rule {
        kernel: "flash_attention_plain",
        source: "attention/prefill_plain.cu",
        forms: &[Forms::of_each(HeadSizes::UpTo(plain::WIDEST))],
        queries: 1,
        general: true,
        plan: plain::plan,
        note: "multiply-adds in f32, any strides; heads as wide as shared memory has room for",
    },
];

impl plan::Rule<Case> for Rule {
    type Operands = Call;

    fn info(&self) -> KernelInfo {
        KernelInfo {
            name: self.kernel,
            source: self.source,
            note: self.note,
        }
    }

    fn plan(&self, case: &Case) -> Planned<Call> {
        let (gpu, sizes) = (&case.gpu, &case.sizes);
        if let Some(reason) = Forms::refusal(self.forms, [case.q, case.kv], gpu.arch, sizes.dim) {
            return Err(reason);
        }
        // The longest sequence says how many there are.
        if sizes.queries < self.queries && !case.batch_invariant {
            return Err("there are few queries");
        }
        if !self.general && (case.mask || case.alibi || case.window || case.softcap) {
            return Err("it takes no mask, slopes, window or softcap");
        }
        (self.plan)(case)
    }
}

/// The plan for a case.
///
/// # Errors
/// If no kernel takes it, or the one that is forced does not; the message says why.
pub(super) fn select(case: &Case) -> Result<Plan<Call>> {
    plan::select("flash_attention", RULES, case)
}

/// Fails if no kernel takes heads of this size in f32, which each GPU has a kernel for, and which no other dtype goes
/// past.
///
/// # Errors
/// Naming the widest head that there is a kernel for.
pub(in crate::ops::flash_attention) fn check_head_dim(gpu: GpuSpec, dim: usize) -> Result<()> {
    let takes = |dim: usize| {
        let sizes = Sizes {
            batch: 1,
            heads: 1,
            kv_heads: 1,
            queries: 1,
            keys: 1,
            dim,
        };
        let case = Case::causal(gpu, [DType::F32; 2], sizes);
        RULES
            .iter()
            .any(|rule| plan::Rule::plan(rule, &case).is_ok())
    };
    if dim > 0 && takes(dim) {
        return Ok(());
    }
    let most = (1..=plain::WIDEST).rev().find(|dim| takes(*dim));
    bail!(
        "flash_attention: heads of {dim} values, expected 1 to {} on sm_{}; without the fusion `flash_attention` \
         candle's own operations take any",
        most.unwrap_or(0),
        gpu.arch
    )
}

/// The kernels in the order in which they are tried.
pub fn kernels() -> impl Iterator<Item = KernelInfo> {
    RULES.iter().map(plan::Rule::info)
}
