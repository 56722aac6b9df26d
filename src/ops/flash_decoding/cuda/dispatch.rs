//! Which kernel takes a step of attention: one table, first match wins.

use super::problem::{Case, Operands, Role, StepShape};
use super::split::{Partials, Split};
use super::{OP, cluster, step, with_gemv, with_qkv};
use crate::cuda::{GpuSpec, KernelInfo};
use crate::ops::flash_attention::cuda as table;
use crate::ops::flash_attention::cuda::{Forms, HeadSizes, NEWEST, Plan, Planned};
use candle_core::{DType, Result, bail};

/// When a kernel is chosen. What this cannot say, its `plan` does.
pub(super) struct Rule {
    /// The name, as in `CANDLE_FUSED_KERNEL`.
    pub kernel: &'static str,
    /// The file below `kernels/`.
    pub source: &'static str,
    pub forms: &'static [Forms],
    /// At most.
    pub sequences: usize,
    /// The product that it takes in the same launch; none: it takes steps alone.
    pub product: Option<Role>,
    /// How it shares the keys out.
    pub split: fn(&StepShape) -> Option<Split>,
    pub plan: fn(&Case) -> Planned<Operands>,
    /// What a reader of the table should know.
    pub note: &'static str,
}

const MAX: usize = usize::MAX;

/// The table. First match wins.
pub(super) static RULES: &[Rule] = &[
    Rule {
        kernel: "flash_decoding_cluster",
        source: "attention/decode_cluster.cu",
        forms: &[
            Forms::over(
                DType::F16,
                [90, NEWEST],
                HeadSizes::Of(&cluster::HEAD_SIZES),
            ),
            Forms::over(
                DType::BF16,
                [90, NEWEST],
                HeadSizes::Of(&cluster::HEAD_SIZES),
            ),
        ],
        sequences: MAX,
        product: None,
        split: cluster::split,
        plan: cluster::plan,
        note: "projections in f32 or in the caches' dtype; up to four rows of blocks (a key/value head of a sequence) for each multiprocessor with heads of 64, two with heads of 128; caches with room for up to 32 MiB of each sequence; heads that are rotated whole or not at all. Clusters of small blocks, whose sums meet in distributed shared memory",
    },
    Rule {
        kernel: "flash_decoding_pipelined",
        source: "attention/decode_pipelined.cu",
        forms: &[
            Forms::over(
                DType::F16,
                [80, NEWEST],
                HeadSizes::Of(&step::PIPELINED_HEAD_SIZES),
            ),
            Forms::over(
                DType::BF16,
                [80, NEWEST],
                HeadSizes::Of(&step::PIPELINED_HEAD_SIZES),
            ),
        ],
        sequences: MAX,
        product: None,
        split: step::pipelined_split,
        plan: step::pipelined,
        note: "keys and values in pages, of sequences enough for half of the multiprocessors: two warps for each key/value head of one, keys through rings of stages",
    },
    Rule {
        kernel: "flash_decoding_mma",
        source: "attention/decode.cu",
        forms: &[
            Forms::over(
                DType::F16,
                [75, NEWEST],
                HeadSizes::Of(&step::MMA_HEAD_SIZES),
            ),
            Forms::over(
                DType::BF16,
                [80, NEWEST],
                HeadSizes::Of(&step::MMA_HEAD_SIZES),
            ),
            Forms::over(
                DType::F8E4M3,
                [75, NEWEST],
                HeadSizes::Of(&step::MMA_HEAD_SIZES),
            ),
            Forms::over(
                DType::U8,
                [75, NEWEST],
                HeadSizes::Of(&step::MMA_HEAD_SIZES),
            ),
        ],
        sequences: MAX,
        product: None,
        split: step::mma_split,
        plan: step::mma,
        note: "up to 8 query heads of a key/value head in a block, if shared memory has room for them; caches that begin at multiples of 16 bytes; FP8 (f8e4m3) and INT8 (u8) in pages, which become f16 in registers, in decode_paged_codes.cu",
    },
    Rule {
        kernel: "flash_decoding_plain",
        source: "attention/decode.cu",
        forms: &[Forms::of_each(HeadSizes::UpTo(step::WIDEST))],
        sequences: MAX,
        product: None,
        split: step::plain_split,
        plan: step::plain,
        note: "multiply-adds in f32",
    },
    Rule {
        kernel: "flash_decoding_with_gemv",
        source: "attention/decode_with_gemv.cu",
        forms: &[
            Forms::of(
                DType::F16,
                [80, NEWEST],
                HeadSizes::Of(&with_gemv::HEAD_SIZES),
            ),
            Forms::of(
                DType::BF16,
                [80, NEWEST],
                HeadSizes::Of(&with_gemv::HEAD_SIZES),
            ),
        ],
        sequences: 1,
        product: Some(Role::Beside),
        split: with_gemv::split,
        plan: with_gemv::plan,
        note: "in models whose MLP stands beside attention: its first product, of one dense matrix of the same dtype, in the same launch",
    },
    Rule {
        kernel: "flash_decoding_with_qkv",
        source: "attention/decode_with_qkv.cu",
        forms: &[
            Forms::of(
                DType::F16,
                [90, NEWEST],
                HeadSizes::Of(&with_qkv::HEAD_SIZES),
            ),
            Forms::of(
                DType::BF16,
                [90, NEWEST],
                HeadSizes::Of(&with_qkv::HEAD_SIZES),
            ),
        ],
        sequences: 1,
        product: Some(Role::Qkv),
        split: cluster::split,
        plan: with_qkv::plan,
        note: "`flash_decoding_cluster` with the products for q, k and v, and RMSNorm in front of them, in the same launch: dense matrices of the same dtype and K up to 640, three query heads for each key/value head, room for up to 2,048 keys",
    },
];

impl Rule {
    /// Why it takes no steps of the shape, if it takes none.
    fn refusal(&self, gpu: &GpuSpec, shape: &StepShape) -> Option<&'static str> {
        let dtypes = [shape.dtype, shape.cache_dtype];
        let refusal = Forms::refusal(self.forms, dtypes, gpu.arch, shape.head_dim);
        refusal.or((shape.sequences > self.sequences).then_some("there are several sequences"))
    }
}

impl table::Rule<Case> for Rule {
    type Operands = Operands;

    fn info(&self) -> KernelInfo {
        KernelInfo {
            name: self.kernel,
            source: self.source,
            note: self.note,
        }
    }

    fn plan(&self, case: &Case) -> Planned<Operands> {
        let role = case.product.as_ref().map(|(role, _)| *role);
        if role != self.product {
            return Err(match (self.product, role) {
                (None, _) => "it takes no product in the same launch",
                (Some(_), None) => "there is no product for the same launch",
                (Some(Role::Beside), _) => "the product gives the step's queries, keys and values",
                (Some(Role::Qkv), _) => "the product does not give queries, keys and values",
            });
        }
        if let Some(reason) = self.refusal(&case.gpu, &case.shape) {
            return Err(reason);
        }
        (self.plan)(case)
    }
}

/// The plan for a case.
///
/// # Errors
/// If no kernel takes it, or the one that is forced does not; the message says why.
pub(super) fn select(case: &Case) -> Result<Plan<Operands>> {
    table::select(OP, RULES, case)
}

/// What steps of this shape need, whichever kernel takes them.
///
/// # Errors
/// If none does.
pub(crate) fn partials(gpu: &GpuSpec, shape: &StepShape) -> Result<Partials> {
    let rules = RULES
        .iter()
        .filter(|rule| rule.refusal(gpu, shape).is_none());
    let splits = rules.filter_map(|rule| (rule.split)(shape));
    let partials = splits.map(|split| split.partials(gpu, shape));
    let most = partials.reduce(|a, b| Partials {
        bytes: a.bytes.max(b.bytes),
        counters: a.counters.max(b.counters),
    });
    match most {
        Some(partials) => Ok(partials),
        None => bail!(
            "{OP}: a head size of {}, expected at most {} on a GPU",
            shape.head_dim,
            step::WIDEST
        ),
    }
}

/// The kernels in the order in which they are tried.
pub fn kernels() -> impl Iterator<Item = KernelInfo> {
    RULES.iter().map(table::Rule::info)
}
