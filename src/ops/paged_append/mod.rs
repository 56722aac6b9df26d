//! Writing the keys and values of new tokens into pages, with norms and rotation on the way, and copying pages.

mod copy;
mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod reference;

use super::HeadNorms;
use super::pages::{PagePool, PageTable, PoolSizes};
use super::rope::check_rotary_tables;
use super::view::{check_storages, check_tensors, float};
use candle_core::{DType, Result, Tensor, bail};

pub use super::rope::RotaryTables;
pub use copy::copy_pages;
pub use reference::reference;

const OP: &str = "paged_append";

const COPY: &str = "copy_pages";

/// Whose the tokens are that [`paged_append`] takes.
#[derive(Clone, Copy, Debug)]
pub enum TokenMap<'a> {
    /// Token b is sequence b's.
    OneEach,
    /// `[N]`, u32: the sequence of each token; `u32::MAX` stands for a row that is no token.
    Sequences(&'a Tensor),
    /// `[B + 1]`, u32: sequence b has tokens `cu_seqlens[b] .. cu_seqlens[b + 1]`; rows after the last are no tokens.
    CuSeqlens(&'a Tensor),
}

/// What [`paged_append`] takes beside the projection and the pages.
#[derive(Clone, Copy, Debug)]
pub struct PagedAppend<'a> {
    /// Query heads; 0 for a projection of keys and values alone.
    pub heads: usize,
    /// The sequence of each token.
    pub tokens: TokenMap<'a>,
    /// `[N]`, u32: the position of each token in its sequence.
    pub positions: &'a Tensor,
    /// The rotation of queries and keys, or none.
    pub rotation: Option<RotaryTables<'a>>,
    /// Norms of queries and keys before the rotation, or none.
    pub norms: Option<HeadNorms<'a>>,
}

/// Queries and keys of a fused projection are normalised if so asked and rotated, keys and values are written into
/// their sequences' pages, and the queries are returned: token n goes into slot `positions[n] % page` of the page
/// that the table has for its sequence at `positions[n] / page`.
///
/// * `qkv`: `[N, (Hq + 2 Hkv) D]`, f32, f16 or bf16: queries, then keys, then values of N tokens, of any sequences in
///   any order
/// * `pool`: f32, f16 or bf16, which may differ from qkv's dtype, or quantized; written in place. No two tokens go to
///   one slot
/// * `table`: as [`paged_attention`](fn@super::paged_attention) takes it, which then counts the new tokens too;
///   lengths are not read here, and in a CSR table only `indptr` and `indices` are
/// * result: `[N, Hq, D]` in qkv's dtype; zeros where a row is no token
///
/// Everything is computed in f32 and rounded as by [`rope_append`](fn@super::rope_append); keys and values for a
/// quantized pool are not rounded before they are quantized, head by head. On CUDA one launch does it,
/// which reads map, positions and table itself.
///
/// Sources: PagedAttention (Kwon et al. 2023); RoFormer (Su et al. 2021).
///
/// # Errors
/// If shapes, dtypes or devices do not fit, by the name of the argument. On the CPU also if a token has no page or a
/// position is past the rotary tables; on CUDA, where that is not known before, such a row counts as no token.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{PageLayout, PagePool, PageTable, PagedAppend, TokenMap, paged_append};
/// let device = Device::Cpu;
/// let pages = Tensor::zeros((4, 2, 8, 1, 16), DType::F32, &device)?;
/// let pool = PagePool::combined(&pages, PageLayout::Nhd)?;
/// let table = PageTable::Padded {
///     block_table: Tensor::new(&[[3u32, 1]], &device)?,
///     lengths: Tensor::new(&[10u32], &device)?,
/// };
/// // Two query heads, a key head and a value head of 16, for the tenth token.
/// let qkv = Tensor::ones((1, 64), DType::F32, &device)?;
/// let positions = Tensor::new(&[9u32], &device)?;
/// let append = PagedAppend {
///     heads: 2,
///     tokens: TokenMap::OneEach,
///     positions: &positions,
///     rotation: None,
///     norms: None,
/// };
/// let q = paged_append(&qkv, &pool, &table, &append)?;
/// assert_eq!(q.dims(), [1, 2, 16]);
/// // Its second page is page 1, where it is in slot 1.
/// assert_eq!(pool.v.get(1)?.get(1)?.sum_all()?.to_scalar::<f32>()?, 16.);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn paged_append(
    qkv: &Tensor,
    pool: &PagePool,
    table: &PageTable,
    append: &PagedAppend<'_>,
) -> Result<Tensor> {
    let sizes = pool.checked(OP)?;
    let sequences = table.checked(OP, pool.k.device())?;
    check(qkv, sizes, append)?;
    check_tokens(qkv, sequences, append)?;
    let mut read = vec![("qkv", qkv), ("positions", append.positions)];
    read.extend(table.named());
    match append.tokens {
        TokenMap::OneEach => {}
        TokenMap::Sequences(map) => read.push(("tokens", map)),
        TokenMap::CuSeqlens(map) => read.push(("tokens", map)),
    }
    if let Some(RotaryTables { cos, sin, .. }) = append.rotation {
        read.extend([("rotation.cos", cos), ("rotation.sin", sin)]);
    }
    if let Some(HeadNorms { q, k, .. }) = append.norms {
        read.extend([("norms.q", q), ("norms.k", k)]);
    }
    let pools = pool.named();
    for (name, t) in read.iter().chain(&pools) {
        if !t.device().same_device(qkv.device()) {
            bail!("{OP}: {name} is on another device than qkv");
        }
    }
    check_tensors(OP, read.iter().chain(&pools).copied())?;
    check_storages(OP, &pools, ("qkv", qkv))?;
    pool.check_written(OP, &read)?;
    #[cfg(feature = "cuda")]
    if qkv.device().is_cuda() {
        return cuda::append(qkv, pool, sizes, sequences, table, append);
    }
    cpu::append(qkv, pool, sizes, table, append)
}

/// Checks the projection and what it is changed by.
fn check(qkv: &Tensor, sizes: PoolSizes, append: &PagedAppend<'_>) -> Result<()> {
    let PoolSizes { kv_heads, dim, .. } = sizes;
    float(OP, "qkv", qkv.dtype())?;
    let width = (append.heads + 2 * kv_heads) * dim;
    if qkv.rank() != 2 || qkv.dims()[1] != width {
        bail!(
            "{OP}: qkv has shape {:?}, expected [N, (Hq + 2 Hkv) D] = [N, {width}]",
            qkv.shape()
        );
    }
    if let Some(RotaryTables { cos, sin, .. }) = append.rotation {
        check_rotary_tables(OP, "rotation.", [cos, sin], dim)?;
    }
    for (name, weight) in append
        .norms
        .iter()
        .flat_map(|n| [("norms.q", n.q), ("norms.k", n.k)])
    {
        if weight.dims() != [dim] || weight.dtype() != qkv.dtype() {
            bail!(
                "{OP}: {name} is {:?} {:?}, expected {:?} [{dim}]",
                weight.dtype(),
                weight.dims(),
                qkv.dtype()
            );
        }
    }
    Ok(())
}

/// Checks what says where the tokens go.
fn check_tokens(qkv: &Tensor, sequences: usize, append: &PagedAppend<'_>) -> Result<()> {
    let rows = qkv.dims()[0];
    let (map, expected) = match append.tokens {
        TokenMap::OneEach if rows != sequences => {
            bail!("{OP}: qkv has {rows} tokens, expected one for each of {sequences} sequences")
        }
        TokenMap::OneEach => (None, 0),
        TokenMap::Sequences(map) => (Some(map), rows),
        TokenMap::CuSeqlens(map) => (Some(map), sequences + 1),
    };
    let positions = ("positions", append.positions, rows);
    let map = map.map(|map| ("tokens", map, expected));
    for (name, t, expected) in [positions].into_iter().chain(map) {
        if t.dims() != [expected] || t.dtype() != DType::U32 {
            bail!(
                "{OP}: {name} is {:?} {:?}, expected U32 [{expected}]",
                t.dtype(),
                t.dims()
            );
        }
        if expected > 1 && t.stride()[0] != 1 {
            bail!("{OP}: the elements of {name} have to lie side by side");
        }
    }
    Ok(())
}

impl PagedAppend<'_> {
    /// The sequence of each of `rows`, read from a tensor on any device; none for what is no token.
    fn owners(&self, rows: usize) -> Result<Vec<Option<usize>>> {
        match self.tokens {
            TokenMap::OneEach => Ok((0..rows).map(Some).collect()),
            TokenMap::Sequences(map) => {
                let map = map.to_vec1::<u32>()?.into_iter();
                Ok(map.map(|b| (b != u32::MAX).then_some(b as usize)).collect())
            }
            TokenMap::CuSeqlens(map) => {
                let ends = map.to_vec1::<u32>()?;
                let mut owners = vec![None; rows];
                for (b, ends) in ends.windows(2).enumerate() {
                    match owners.get_mut(ends[0] as usize..ends[1] as usize) {
                        Some(own) => own.fill(Some(b)),
                        None => bail!(
                            "{OP}: tokens has {}..{} for sequence {b}, qkv has {rows} tokens",
                            ends[0],
                            ends[1]
                        ),
                    }
                }
                Ok(owners)
            }
        }
    }
}
