//! Pools of pages that hold keys and values of many sequences, and the tables of whose pages are which.

mod scales;

use super::view::{check_apart, float, span};
use candle_core::{DType, Device, Result, Tensor, bail};

pub use scales::PageScales;
pub(crate) use scales::scale_strides;

/// In which order a page has its tokens and heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageLayout {
    /// `[pages, page, Hkv, D]`: the heads of a token side by side.
    Nhd,
    /// `[pages, Hkv, page, D]`: the tokens of a head side by side.
    Hnd,
}

/// Keys and values in pages of a fixed number of tokens, shared by any number of sequences. On CUDA a page has
/// 256 tokens at most, and a pool fewer than 2^24 pages.
///
/// With [`scales`](Self::scales), keys and values are codes of 8 bits: what is written is quantized, after norms and
/// rotation, each head of each token by itself ([`KvFormat::quantize`](crate::quant::KvFormat::quantize)), so that what
/// a token leaves does not depend on its neighbours; what is read is `scale * value(code)`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{PageLayout, PagePool};
/// // 8 pages of 16 tokens, for two key/value heads of 64.
/// let pages = Tensor::zeros((8, 2, 16, 2, 64), DType::F32, &Device::Cpu)?;
/// let pool = PagePool::combined(&pages, PageLayout::Nhd)?;
/// assert_eq!((pool.k.dims(), pool.v.dims()), (&[8, 16, 2, 64][..], &[8, 16, 2, 64][..]));
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PagePool {
    /// Keys in the order of `layout`, f32, f16 or bf16, or codes, u8; a head's elements side by side, otherwise any
    /// strides.
    pub k: Tensor,
    /// Values, as the keys.
    pub v: Tensor,
    /// The order of the dimensions.
    pub layout: PageLayout,
    /// What codes are read by; none for floats.
    pub scales: Option<PageScales>,
}

impl PagePool {
    /// Views of a pool that has the values of a page after its keys: `[pages, 2, page, Hkv, D]` or
    /// `[pages, 2, Hkv, page, D]`.
    ///
    /// # Errors
    /// If the second of five dimensions is not 2.
    pub fn combined(pool: &Tensor, layout: PageLayout) -> Result<Self> {
        if pool.rank() != 5 || pool.dims()[1] != 2 {
            bail!(
                "PagePool: pool has shape {:?}, expected five dimensions, the second of 2: keys, values",
                pool.shape()
            );
        }
        let part = |i| pool.narrow(1, i, 1)?.squeeze(1);
        Ok(Self {
            k: part(0)?,
            v: part(1)?,
            layout,
            scales: None,
        })
    }
}

/// Which pages the keys and values of each sequence are in: token `j` is in slot `j % page` of the sequence's
/// page `j / page`. All tensors are u32 and on the pools' device; sequences may share pages.
#[derive(Clone, Debug)]
pub enum PageTable {
    /// The pages of all sequences one sequence after the other, as FlashInfer has them.
    Csr {
        /// `[B + 1]`: sequence b has `indices[indptr[b] .. indptr[b + 1]]`.
        indptr: Tensor,
        /// `[n]`
        indices: Tensor,
        /// `[B]`: tokens in the last page of each sequence, 1 to `page`; without a page it is not read.
        last_page_len: Tensor,
    },
    /// A row of pages for each sequence, as vLLM has them.
    Padded {
        /// `[B, max_pages]`; entries after the last page of a sequence are not read.
        block_table: Tensor,
        /// `[B]`: tokens of each sequence.
        lengths: Tensor,
    },
}

/// Sizes of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PoolSizes {
    pub pages: usize,
    /// Tokens of a page.
    pub page: usize,
    pub kv_heads: usize,
    pub dim: usize,
}

impl PagePool {
    /// The sizes, if keys and values fit each other.
    pub(crate) fn checked(&self, op: &str) -> Result<PoolSizes> {
        let Self {
            k,
            v,
            layout,
            scales,
        } = self;
        let &[pages, a, b, dim] = k.dims() else {
            let expected = match layout {
                PageLayout::Nhd => "[pages, page, Hkv, D]",
                PageLayout::Hnd => "[pages, Hkv, page, D]",
            };
            bail!(
                "{op}: pool.k has shape {:?}, expected {expected}",
                k.shape()
            );
        };
        match scales {
            Some(_) if k.dtype() != DType::U8 => {
                bail!("{op}: pool.k is {:?}, expected U8 with scales", k.dtype())
            }
            Some(_) => {}
            None => float(op, "pool.k", k.dtype())?,
        }
        if v.dims() != k.dims() || v.dtype() != k.dtype() {
            bail!(
                "{op}: pool.v is {:?} {:?}, expected pool.k's {:?} {:?}",
                v.dtype(),
                v.dims(),
                k.dtype(),
                k.dims()
            );
        }
        let (page, kv_heads) = match layout {
            PageLayout::Nhd => (a, b),
            PageLayout::Hnd => (b, a),
        };
        if page == 0 || kv_heads == 0 || dim == 0 {
            bail!(
                "{op}: pool.k has shape {:?}, expected a token, a head and an element at least",
                k.shape()
            );
        }
        for (name, t) in [("pool.k", k), ("pool.v", v)] {
            if dim > 1 && t.stride()[3] != 1 {
                bail!("{op}: the elements of a head of {name} have to lie side by side");
            }
        }
        let sizes = PoolSizes {
            pages,
            page,
            kv_heads,
            dim,
        };
        self.check_scales(op, sizes)?;
        Ok(sizes)
    }

    /// Fails if keys, values and scales overlap each other or one of `read`: they are written in place.
    pub(crate) fn check_written(&self, op: &str, read: &[(&str, &Tensor)]) -> Result<()> {
        let both = [("pool.k", &self.k), ("pool.v", &self.v)];
        if !self.interleaves(op)? {
            check_apart(op, &both, &[])?;
        }
        if let Some(scales) = &self.scales {
            let written = [("pool.scales.k", &scales.k), ("pool.scales.v", &scales.v)];
            check_apart(op, &written, &both)?;
            check_apart(op, &written, read)?;
        }
        both.iter()
            .try_for_each(|one| check_apart(op, std::slice::from_ref(one), read))
    }

    /// Whether the pages of keys and values lie in turns, as those of a combined pool do.
    fn interleaves(&self, op: &str) -> Result<bool> {
        let (k, v) = (&self.k, &self.v);
        if k.stride() != v.stride() || k.elem_count() == 0 {
            return Ok(false);
        }
        let size = k.dtype().size_in_bytes();
        let inner: usize = (1..4).map(|i| (k.dims()[i] - 1) * k.stride()[i]).sum();
        let inner = (inner + 1) * size;
        let apart = span(op, "pool.k", k)?
            .start
            .abs_diff(span(op, "pool.v", v)?.start);
        Ok(inner <= apart && apart + inner <= k.stride()[0] * size)
    }

    /// Elements from page to page, token to token and head to head.
    pub(crate) fn strides(&self, t: &Tensor) -> [usize; 3] {
        let s = t.stride();
        match self.layout {
            PageLayout::Nhd => [s[0], s[1], s[2]],
            PageLayout::Hnd => [s[0], s[2], s[1]],
        }
    }
}

impl PageTable {
    /// The tensors by name.
    pub(crate) fn named(&self) -> Vec<(&'static str, &Tensor)> {
        match self {
            Self::Csr {
                indptr,
                indices,
                last_page_len,
            } => vec![
                ("indptr", indptr),
                ("indices", indices),
                ("last_page_len", last_page_len),
            ],
            Self::Padded {
                block_table,
                lengths,
            } => vec![("block_table", block_table), ("lengths", lengths)],
        }
    }

    /// The number of sequences, if the tensors fit each other.
    pub(crate) fn checked(&self, op: &str, device: &Device) -> Result<usize> {
        for (name, t) in self.named() {
            if t.dtype() != DType::U32 {
                bail!("{op}: {name} is {:?}, expected u32", t.dtype());
            }
            if !t.device().same_device(device) {
                bail!("{op}: {name} is on another device than the pool");
            }
            let (rank, expected) = match name {
                "block_table" => (2, "[B, max_pages]"),
                "indptr" => (1, "[B + 1]"),
                "indices" => (1, "[n]"),
                _ => (1, "[B]"),
            };
            if t.rank() != rank {
                bail!(
                    "{op}: {name} has shape {:?}, expected {expected}",
                    t.shape()
                );
            }
            // Kernels follow the stride of a row of the table alone.
            if t.dims()[rank - 1] > 1 && t.stride()[rank - 1] != 1 {
                bail!("{op}: the elements of {name} have to lie side by side");
            }
        }
        let (name, got, sequences) = match self {
            Self::Csr {
                indptr,
                last_page_len,
                ..
            } => {
                let Some(sequences) = indptr.dims()[0].checked_sub(1) else {
                    bail!("{op}: indptr is empty, expected [B + 1]");
                };
                ("last_page_len", last_page_len.dims()[0], sequences)
            }
            Self::Padded {
                block_table,
                lengths,
            } => ("lengths", lengths.dims()[0], block_table.dims()[0]),
        };
        if got != sequences {
            bail!("{op}: {name} has {got} elements, expected {sequences}, one for each sequence");
        }
        Ok(sequences)
    }

    /// The table's entries of each sequence, read from tensors on any device: as many as there are, also behind the
    /// last page.
    pub(crate) fn rows(&self, op: &str) -> Result<Vec<Vec<u32>>> {
        match self {
            Self::Padded { block_table, .. } => block_table.to_vec2::<u32>(),
            Self::Csr {
                indptr, indices, ..
            } => {
                let (indptr, indices) = (indptr.to_vec1::<u32>()?, indices.to_vec1::<u32>()?);
                let row = |(b, ends): (usize, &[u32])| {
                    let range = ends[0] as usize..ends[1] as usize;
                    match indices.get(range.clone()) {
                        Some(row) => Ok(row.to_vec()),
                        None => bail!(
                            "{op}: indptr has {range:?} for sequence {b}, indices has {} entries",
                            indices.len()
                        ),
                    }
                };
                indptr.windows(2).enumerate().map(row).collect()
            }
        }
    }

    /// Tokens of each sequence, whose `rows` are given.
    pub(crate) fn lengths(&self, op: &str, page: usize, rows: &[Vec<u32>]) -> Result<Vec<usize>> {
        let (name, counts) = match self {
            Self::Csr { last_page_len, .. } => ("last_page_len", last_page_len),
            Self::Padded { lengths, .. } => ("lengths", lengths),
        };
        let csr = matches!(self, Self::Csr { .. });
        let counts = counts.to_vec1::<u32>()?;
        let length = |(b, (count, row)): (usize, (u32, &Vec<u32>))| {
            let (count, pages) = (count as usize, row.len());
            match csr {
                true if pages == 0 => Ok(0),
                true if (1..=page).contains(&count) => Ok((pages - 1) * page + count),
                true => bail!("{op}: {name}[{b}] is {count}, expected 1 to {page}"),
                false if count <= pages * page => Ok(count),
                false => bail!(
                    "{op}: {name}[{b}] is {count}, its {pages} pages of {page} hold {}",
                    pages * page
                ),
            }
        };
        counts
            .into_iter()
            .zip(rows)
            .enumerate()
            .map(length)
            .collect()
    }
}

/// Fails if there is no such page; `place` says where it stands.
pub(crate) fn check_page(op: &str, id: u32, pages: usize, place: [usize; 2]) -> Result<usize> {
    match id as usize {
        id if id < pages => Ok(id),
        id => bail!(
            "{op}: page {} of sequence {} is {id}, the pool has {pages} pages",
            place[1],
            place[0]
        ),
    }
}
