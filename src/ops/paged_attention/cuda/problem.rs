//! What is asked: the operands by address, and the [`Case`] that a kernel is chosen by.

use crate::cuda::abi::{PagedAttentionParams, Pages};
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
    /// f32, for each block two times the rows of a warp, of a head's width.
    pub means: Address,
    /// f32, one for each of those rows.
    pub tops: Address,
    /// u32, zero: one for each sequence, key/value head and part of its rows.
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
        }
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
            // One that no position passes hides nothing.
            window: self
                .window
                .map_or(0, |w| if w < 1 << 30 { w as u32 } else { 0 }),
            dtype: dtype_index(self.dtype) as i32,
            packs: self.has_packs().into(),
            scale: self.scale,
            softcap: self.softcap.unwrap_or(0.),
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
        write!(f, "on sm_{}", self.gpu.arch)
    }
}
