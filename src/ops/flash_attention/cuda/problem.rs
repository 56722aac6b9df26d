//! What is asked of `flash_attention`: its operands by address, and the [`Case`] that a kernel is chosen by.

use crate::cpu::attention::Sizes;
use crate::cuda::abi::{AttentionParams as Params, KeyPages};
use crate::cuda::{Address, GpuSpec};
use crate::ops::view::dtype_index;
use candle_core::{DType, Result, bail};
use std::fmt;

/// A tensor of four dimensions, batch (or page of keys and values), head, token, dim: where it starts, and its
/// strides in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operand {
    pub address: Address,
    pub strides: [i64; 4],
}

impl Operand {
    /// The largest power of two, 16 at most, at whose multiples all rows start, in bytes; 0 if a row is not
    /// contiguous.
    fn alignment(&self, dtype: DType) -> u64 {
        let [outer @ .., 1] = self.strides else {
            return 0;
        };
        let size = dtype.size_in_bytes() as i64;
        let steps = outer.iter().map(|stride| (stride * size) as u64);
        alignment(steps.fold(self.address, |bits, step| bits | step))
    }

    /// The largest power of two, 128 at most, of which the distance of its heads is a multiple, in bytes.
    fn head_alignment(&self, dtype: DType) -> u64 {
        let apart = self.strides[1] as u64 * dtype.size_in_bytes() as u64;
        1 << apart.trailing_zeros().min(7)
    }
}

/// The largest power of two that divides it, 16 at most.
fn alignment(address: Address) -> u64 {
    1 << address.trailing_zeros().min(4)
}

/// One attention over addresses on a GPU.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub q: Operand,
    pub k: Operand,
    pub v: Operand,
    /// In f32.
    pub mask: Option<Operand>,
    /// Slopes, `[heads]` in f32.
    pub alibi: Option<Address>,
    /// Where `sizes` has the sequences of a ragged batch, each of up to `sizes.queries` queries, and all keys.
    pub ragged: Option<Ragged>,
    /// Where keys and values are in pages: `sizes` then has as many keys as a row of the table has room for.
    pub pages: Option<KeyPages>,
    /// `[batch, queries, heads, dim]` or `[total_q, heads, dim]`, dense, in q's dtype.
    pub y: Address,
    pub q_dtype: DType,
    pub kv_dtype: DType,
    pub sizes: Sizes,
    pub scale: f32,
    pub softcap: Option<f32>,
    /// Keys after its own position that a query sees; 0 is causal.
    pub right: Option<usize>,
    pub window: Option<usize>,
    /// Whether kernel and order of keys depend on nothing that other sequences of a ragged batch have a part in.
    pub batch_invariant: bool,
}

/// Where the sequences of a ragged batch are, one after the other in tensors whose batch is one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ragged {
    /// `[sequences + 1]`, u32; with a pitch `[sequences]`, their lengths.
    pub cu_q: Address,
    /// Likewise; 0 where keys are in pages.
    pub cu_k: Address,
    /// Rows of q.
    pub total_q: usize,
    /// Rows from a sequence of a padded batch to the next, in queries as in keys; 0 where lengths are cumulative.
    pub pitch: usize,
}

impl Call {
    /// The op as the trace has it.
    pub(super) fn op(&self) -> &'static str {
        match (self.pages, self.ragged) {
            (Some(_), _) => "paged_prefill",
            (None, Some(Ragged { pitch: 1.., .. })) => "flash_attention_padded",
            (None, Some(_)) => "flash_attention_varlen",
            (None, None) => "flash_attention",
        }
    }

    /// The table of pages as kernels take it; `piece`: tokens of a page that are copied at once.
    pub(super) fn key_pages(&self, piece: usize) -> KeyPages {
        let piece = piece as u32;
        self.pages
            .map_or_else(KeyPages::default, |pages| KeyPages { piece, ..pages })
    }

    /// Rows of q in a sequence, at most.
    fn queries(&self) -> usize {
        self.ragged
            .map_or(self.sizes.queries, |ragged| ragged.total_q)
    }

    /// The window if it hides anything: from as many keys as there are, it does not.
    fn narrow_window(&self) -> Option<usize> {
        self.window.filter(|w| *w < self.sizes.keys)
    }

    /// Whether the kernel has to have windows. The longest sequence says whether one hides anything.
    fn has_window(&self) -> bool {
        match self.batch_invariant {
            true => self.window.is_some(),
            false => self.narrow_window().is_some(),
        }
    }

    /// Likewise to the right: the last query may see all keys.
    fn narrow_right(&self) -> Option<usize> {
        self.right
            .filter(|right| right.saturating_add(1) < self.queries())
    }

    /// Fails where a kernel's 32-bit counters would not do.
    pub fn check(&self) -> Result<()> {
        let sizes = &self.sizes;
        let (queries, keys, heads) = (self.queries(), sizes.keys, sizes.heads);
        let counts = [queries * sizes.group(), keys + queries, heads, sizes.dim];
        if counts.iter().any(|n| i32::try_from(*n).is_err()) {
            bail!(
                "{}: {queries} queries of {heads} heads over {keys} keys are past what a GPU form counts",
                self.op()
            );
        }
        Ok(())
    }

    /// What a kernel is chosen by.
    pub(super) fn case(&self, gpu: GpuSpec) -> Case {
        let [k, v] = [self.k, self.v].map(|operand| operand.alignment(self.kv_dtype));
        let heads = [self.k, self.v].map(|operand| operand.head_alignment(self.kv_dtype));
        Case {
            gpu,
            q: self.q_dtype,
            kv: self.kv_dtype,
            sizes: self.sizes,
            causal: self.right == Some(0),
            batch: match (self.pages, self.ragged) {
                (Some(pages), _) => Batch::Paged(pages.page as usize),
                (None, Some(_)) => Batch::Ragged,
                (None, None) => Batch::Dense,
            },
            mask: self.mask.is_some(),
            alibi: self.alibi.is_some(),
            window: self.has_window() || self.narrow_right().is_some_and(|n| n > 0),
            softcap: self.softcap.is_some(),
            positive: self.scale > 0.0,
            alignment: Alignment {
                q: self.q.alignment(self.q_dtype),
                kv: k.min(v),
                kv_heads: heads[0].min(heads[1]),
                y: alignment(self.y),
            },
            batch_invariant: self.batch_invariant,
        }
    }
}

impl From<&Call> for Params {
    fn from(call: &Call) -> Self {
        let index = |dtype| dtype_index(dtype) as i32;
        let sizes = &call.sizes;
        let group = sizes.group() as u32;
        let more = call.mask.is_some() || call.alibi.is_some() || call.softcap.is_some();
        Self {
            q: call.q.address,
            k: call.k.address,
            v: call.v.address,
            mask: call.mask.map_or(0, |m| m.address),
            alibi: call.alibi.unwrap_or(0),
            cu_q: call.ragged.map_or(0, |ragged| ragged.cu_q),
            cu_k: call.ragged.map_or(0, |ragged| ragged.cu_k),
            pages: call.key_pages(0),
            y: call.y,
            q_strides: call.q.strides,
            k_strides: call.k.strides,
            v_strides: call.v.strides,
            mask_strides: call.mask.map_or([0; 4], |m| m.strides),
            q_type: index(call.q_dtype),
            kv_type: index(call.kv_dtype),
            heads: sizes.heads as i32,
            kv_heads: sizes.kv_heads as i32,
            queries: sizes.queries as i32,
            keys: sizes.keys as i32,
            dim: sizes.dim as i32,
            group,
            group_magic: if group > 1 {
                (1u64 << 32).div_ceil(group.into()) as u32
            } else {
                0
            },
            scale: call.scale,
            softcap: call.softcap.unwrap_or(0.0),
            right: call.narrow_right().map_or(-1, |right| right as i32),
            window: call.narrow_window().unwrap_or(0) as i32,
            general: (more || call.scale <= 0.0).into(),
            total_q: call.queries() as i32,
            total_k: sizes.keys as i32,
            pitch: call.ragged.map_or(0, |ragged| ragged.pitch as i32),
            row_warps: 0,
            key_groups: 0,
            stages: 0,
            group_bytes: 0,
        }
    }
}

/// The multiples of bytes that rows start at: powers of two, 16 at most, and 0 where a row is not contiguous.
#[derive(Clone, Copy, Debug)]
pub(super) struct Alignment {
    pub q: u64,
    /// Of keys and values.
    pub kv: u64,
    /// Of the distance of their heads: 128 at most.
    pub kv_heads: u64,
    /// Of the output's first row.
    pub y: u64,
}

/// How sequences lie in the tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Batch {
    /// All as long.
    Dense,
    /// One after the other: only the GPU knows how long they are, at most as `sizes` says.
    Ragged,
    /// Likewise, with keys and values in pages of this many tokens.
    Paged(usize),
}

impl Batch {
    /// The one of a kernel's modules that is for it: of sequences of one length, ragged, and in pages.
    pub fn of<T>(self, [dense, ragged, paged]: [T; 3]) -> T {
        match self {
            Batch::Dense => dense,
            Batch::Ragged => ragged,
            Batch::Paged(_) => paged,
        }
    }

    /// Why the kernel for tensor cores does not take it.
    pub fn refusal(self) -> Option<&'static str> {
        match self {
            Batch::Paged(page) if !page.is_power_of_two() => {
                Some("a page's tokens are no power of two")
            }
            _ => None,
        }
    }
}

/// All that the choice of a kernel may depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub gpu: GpuSpec,
    /// Of queries, and of keys and values.
    pub q: DType,
    pub kv: DType,
    pub sizes: Sizes,
    pub causal: bool,
    pub batch: Batch,
    pub mask: bool,
    pub alibi: bool,
    /// Whether there is a window that hides keys, other than causal.
    pub window: bool,
    pub softcap: bool,
    /// Whether the factor on the scores is positive.
    pub positive: bool,
    pub alignment: Alignment,
    pub batch_invariant: bool,
}

impl Case {
    /// A causal, dense batch on addresses of whole 16 bytes, without mask, slopes, window or softcap.
    pub fn causal(gpu: GpuSpec, [q, kv]: [DType; 2], sizes: Sizes) -> Self {
        Self {
            gpu,
            q,
            kv,
            sizes,
            causal: true,
            batch: Batch::Dense,
            mask: false,
            alibi: false,
            window: false,
            softcap: false,
            positive: true,
            alignment: Alignment {
                q: 16,
                kv: 16,
                kv_heads: 128,
                y: 16,
            },
            batch_invariant: false,
        }
    }

    /// A grid of `each` blocks for each key/value head.
    pub fn blocks(&self, each: usize) -> std::result::Result<[u32; 3], &'static str> {
        let (kv_heads, batch) = (self.sizes.kv_heads, self.sizes.batch);
        match each.max(batch) > 65535 {
            true => Err("more blocks than a launch has"),
            false => Ok([kv_heads as u32, each as u32, batch as u32]),
        }
    }
}

/// As in `q bf16 [1, 32, 512, 128] over bf16 [1, 8, 512, 128] +causal on sm_90`.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (q, kv) = (self.q.as_str(), self.kv.as_str());
        let Sizes {
            batch,
            heads,
            kv_heads,
            queries,
            keys,
            dim,
        } = self.sizes;
        write!(f, "q {q} [{batch}, {heads}, {queries}, {dim}]")?;
        write!(f, " over {kv} [{batch}, {kv_heads}, {keys}, {dim}]")?;
        for (there, name) in [
            (self.batch == Batch::Ragged, "ragged"),
            (matches!(self.batch, Batch::Paged(_)), "paged"),
            (self.causal, "causal"),
            (self.mask, "mask"),
            (self.alibi, "alibi"),
            (self.window, "window"),
            (self.softcap, "softcap"),
            (self.batch_invariant, "batch invariant"),
        ] {
            if there {
                write!(f, " +{name}")?;
            }
        }
        write!(f, " on sm_{}", self.gpu.arch)
    }
}

#[cfg(test)]
mod tests {
    use super::Operand;
    use candle_core::DType;

    #[test]
    fn a_row_s_alignment_is_that_of_all_its_strides() {
        let alignment = |address, strides| Operand { address, strides }.alignment(DType::F16);
        for (address, strides, expected) in [
            (4096, [512, 128, 64, 1], 16),
            (4096, [0, 0, 0, 1], 16),
            (4104, [512, 128, 64, 1], 8),
            (4096, [512, 128, 68, 1], 8),
            (4096, [512, 130, 64, 1], 4),
            (4096, [513, 128, 64, 1], 2),
            (4096, [512, 64, 1, 128], 0),
        ] {
            assert_eq!(
                alignment(address, strides),
                expected,
                "{address} {strides:?}"
            );
        }
    }
}
