//! What is asked: the operands by address, and the [`Case`] that a kernel is chosen by.

use crate::cuda::abi::{PAGED_SPLIT, PagedAttentionParams, Pages};
use crate::cuda::{Address, GpuSpec};
use crate::ops::pages::PoolSizes;
use crate::ops::view::dtype_index;
use candle_core::DType;
use std::fmt;

/// One call on raw addresses; 0 stands for no tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub pages: Pages,
    /// u32 `[sequences]`: tokens of each, or of its last page.
    pub lengths: Address,
    /// `[sequences, queries, heads, dim]`, with the strides of the first three.
    pub q: Address,
    pub q_strides: [usize; 3],
    /// As q, contiguous.
    pub y: Address,
    /// f32 `[heads]`
    pub slopes: Address,
    /// f32, for each block two times the rows of a warp, of a head's width; with batch invariance all rows of each split.
    pub means: Address,
    /// f32, one for each of those rows.
    pub tops: Address,
    /// With batch invariance likewise.
    pub weights: Address,
    /// u32, zero: one for each sequence, key/value head and part of its rows; not with batch invariance.
    pub counters: Address,
    pub sizes: PoolSizes,
    pub csr: bool,
    pub queries: usize,
    pub heads: usize,
    pub dtype: DType,
    pub pool_dtype: DType,
    pub scale: f32,
    pub softcap: Option<f32>,
    pub window: Option<usize>,
    pub batch_invariant: bool,
}

/// How much room there is for splits of a fixed size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SplitRoom {
    pub in_all: usize,
    /// Of each sequence; 0 if in all there are as many as the entries of a table in CSR form need.
    pub each: usize,
}

impl SplitRoom {
    /// Whatever the lengths are, which the host does not know: `tokens` is what the table has entries for, of each sequence
    /// or in CSR form of all.
    pub fn new(
        sequences: usize,
        tokens: usize,
        csr: bool,
        queries: usize,
        window: Option<usize>,
    ) -> Self {
        // What the queries of a step see may begin and end within a split.
        let seen =
            window.map(|window| (window + queries - 1 + PAGED_SPLIT - 1).div_ceil(PAGED_SPLIT));
        let each = |each: usize| Self {
            in_all: sequences * each,
            each,
        };
        let by_window = seen.map(each);
        let by_table = match csr {
            // Each may end within a split.
            true => Self {
                in_all: tokens / PAGED_SPLIT + sequences,
                each: 0,
            },
            false => each(tokens.div_ceil(PAGED_SPLIT).max(1)),
        };
        match by_window {
            Some(by_window) if by_window.in_all < by_table.in_all => by_window,
            _ => by_table,
        }
    }
}

impl Call {
    pub fn case(&self, gpu: GpuSpec) -> Case {
        Case {
            gpu,
            sequences: self.pages.sequences as usize,
            queries: self.queries,
            heads: self.heads,
            sizes: self.sizes,
            pages: match self.csr {
                true => self.pages.width as usize,
                false => self.pages.sequences as usize * self.pages.width as usize,
            },
            dtype: self.dtype,
            pool_dtype: self.pool_dtype,
            aligned: self.is_aligned(),
            batch_invariant: self.batch_invariant,
        }
    }

    /// The window, if there are positions that pass it.
    fn narrow_window(&self) -> Option<usize> {
        self.window.filter(|window| *window < 1 << 30)
    }

    pub fn split_room(&self) -> SplitRoom {
        let (sequences, tokens) = (
            self.pages.sequences,
            self.pages.width as usize * self.sizes.page,
        );
        SplitRoom::new(
            sequences as usize,
            tokens,
            self.csr,
            self.queries,
            self.narrow_window(),
        )
    }

    /// Whether rows of keys and values begin at multiples of 16 bytes, as the tensor cores' loads do.
    fn is_aligned(&self) -> bool {
        let p = &self.pages;
        let strides = [p.k_page, p.k_token, p.k_head, p.v_page, p.v_token, p.v_head];
        let size = self.pool_dtype.size_in_bytes() as u64;
        let mut offsets = strides.iter().map(|s| s * size).chain([p.k, p.v]);
        offsets.all(|offset| offset.is_multiple_of(16))
    }

    /// Whether q is of the pools' dtype, or of 16 bits over codes, and its rows begin at multiples of 16 bytes.
    fn has_packs(&self) -> bool {
        let mut strides = self.q_strides.iter();
        let whole = strides.all(|s| (s * self.dtype.size_in_bytes()).is_multiple_of(16));
        narrow(self.dtype, self.pool_dtype) && whole && self.q.is_multiple_of(16)
    }

    /// What the kernels take, of which so many warps have the rows of a key/value head.
    pub fn params(&self, parts: usize) -> PagedAttentionParams {
        let [q_sequence, q_token, q_head] = self.q_strides.map(|s| s as u64);
        PagedAttentionParams {
            pages: self.pages,
            lengths: self.lengths,
            q: self.q,
            q_sequence,
            q_token,
            q_head,
            y: self.y,
            slopes: self.slopes,
            means: self.means,
            tops: self.tops,
            counters: self.counters,
            queries: self.queries as u32,
            heads: self.heads as u32,
            kv_heads: self.sizes.kv_heads as u32,
            head_dim: self.sizes.dim as u32,
            parts: parts as u32,
            window: self.narrow_window().unwrap_or(0) as u32,
            dtype: dtype_index(self.dtype) as i32,
            packs: self.has_packs().into(),
            scale: self.scale,
            softcap: self.softcap.unwrap_or(0.),
            weights: self.weights,
            splits: match self.batch_invariant {
                true => self.split_room().each as u32,
                false => 0,
            },
        }
    }
}

/// Whether queries are of the dtype that tensor cores multiply them in, or need no more bits than it has.
fn narrow(dtype: DType, pool_dtype: DType) -> bool {
    dtype == pool_dtype || coded(pool_dtype) && dtype != DType::F32
}

/// Whether a dtype stands for codes.
fn coded(pool_dtype: DType) -> bool {
    matches!(pool_dtype, DType::F8E4M3 | DType::U8)
}

/// All that the choice of a kernel may depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub gpu: GpuSpec,
    pub sequences: usize,
    /// Of a sequence.
    pub queries: usize,
    pub heads: usize,
    pub sizes: PoolSizes,
    /// Entries of the table.
    pub pages: usize,
    pub dtype: DType,
    pub pool_dtype: DType,
    /// Whether rows of keys and values begin at multiples of 16 bytes.
    pub aligned: bool,
    pub batch_invariant: bool,
}

impl Case {
    /// Queries that read a key/value head.
    pub fn rows(&self) -> usize {
        self.queries * (self.heads / self.sizes.kv_heads)
    }

    /// Whether keys and values are codes.
    pub fn is_coded(&self) -> bool {
        coded(self.pool_dtype)
    }

    /// Whether queries may be rounded to what tensor cores multiply.
    pub fn is_narrow(&self) -> bool {
        narrow(self.dtype, self.pool_dtype)
    }
}

/// As in `q bf16 [8, 1, 32, 128] over 512 pages of bf16 [16, 8, 128] on sm_90`.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            sequences,
            queries,
            heads,
            pages,
            ..
        } = self;
        let PoolSizes {
            page,
            kv_heads,
            dim,
            ..
        } = self.sizes;
        let (q, kv) = (self.dtype.as_str(), self.pool_dtype.as_str());
        write!(f, "q {q} [{sequences}, {queries}, {heads}, {dim}] ")?;
        write!(f, "over {pages} pages of {kv} [{page}, {kv_heads}, {dim}] ")?;
        if self.batch_invariant {
            write!(f, "+batch invariant ")?;
        }
        write!(f, "on sm_{}", self.gpu.arch)
    }
}
