//! The CUDA form: queries, keys and values of all tokens in one launch; copies of pages in another.

use super::{COPY, HeadNorms, OP, PagedAppend, TokenMap};
use crate::cuda::abi::{
    COPY_PAGES_THREADS, CopyPagesParams, PagedAppendParams, Pages, ROPE_THREADS, WARP,
};
use crate::cuda::{
    Address, Grid, Launcher, Module, PIECES, UNALIGNED, address, address_of, alloc, fatbin,
};
use crate::ops::RopeStyle;
use crate::ops::paged_attention::cuda::pages;
use crate::ops::pages::{PagePool, PageTable, PoolSizes};
use crate::ops::view::dtype_index;
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, bail,
};

static MODULE: Module = Module::new(
    "paged_append",
    fatbin!("paged_append"),
    &[
        "paged_append_f32",
        "paged_append_f16",
        "paged_append_bf16",
        "paged_append_copy",
    ],
);

/// The place of the kernel that copies.
const COPIES: usize = 3;

/// Blocks that share a page at most.
const BLOCKS_OF_PAGE: usize = 8;

/// [`super::paged_append`] after its checks.
pub(super) fn append(
    qkv: &Tensor,
    pool: &PagePool,
    sizes: PoolSizes,
    sequences: usize,
    table: &PageTable,
    append: &PagedAppend<'_>,
) -> Result<Tensor> {
    let tables = match append.rotation {
        Some(r) => Some([r.cos.contiguous()?, r.sin.contiguous()?]),
        None => None,
    };
    let norms = match append.norms {
        Some(HeadNorms { q, k, .. }) => Some([q.contiguous()?, k.contiguous()?]),
        None => None,
    };
    let of = |pair: &Option<[Tensor; 2]>, i: usize| match pair {
        Some(pair) => address_of(&pair[i]),
        None => Ok(0),
    };
    let (owners, cu_seqlens) = match append.tokens {
        TokenMap::OneEach => (0, 0),
        TokenMap::Sequences(map) => (address_of(map)?, 0),
        TokenMap::CuSeqlens(map) => (0, address_of(map)?),
    };
    let [positions, pairs] = match &tables {
        Some([cos, _]) => [cos.dims()[0], cos.dims()[1]],
        // None is past the tables.
        None => [u32::MAX as usize, 0],
    };
    let launch = AppendAt {
        pages: pages(OP, pool, sizes, table, sequences)?,
        x: 0,
        y: 0,
        cos: of(&tables, 0)?,
        sin: of(&tables, 1)?,
        q_norm: of(&norms, 0)?,
        k_norm: of(&norms, 1)?,
        at: address_of(append.positions)?,
        owners,
        cu_seqlens,
        tokens: qkv.dims()[0],
        heads: append.heads,
        sizes,
        positions,
        pairs,
        style: append.rotation.map(|r| r.style),
        eps: append.norms.map_or(0., |n| n.eps as f32),
        dtype: qkv.dtype(),
    };
    qkv.contiguous()?.apply_op1_no_bwd(&launch)
}

/// A launch on raw addresses; 0 stands for no tensor. As an op of the projection it gives the queries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AppendAt {
    pub pages: Pages,
    /// `[tokens, (heads + 2 kv_heads) dim]` and `[tokens, heads, dim]` of `dtype`, contiguous.
    pub x: Address,
    pub y: Address,
    /// f32 `[positions, pairs]`
    pub cos: Address,
    pub sin: Address,
    /// `[dim]` of `dtype`
    pub q_norm: Address,
    pub k_norm: Address,
    /// u32 `[tokens]`: positions, and sequences.
    pub at: Address,
    pub owners: Address,
    /// u32 `[sequences + 1]`, in place of `owners`; without both, token b is sequence b's.
    pub cu_seqlens: Address,
    pub tokens: usize,
    pub heads: usize,
    pub sizes: PoolSizes,
    pub positions: usize,
    pub pairs: usize,
    /// Of the rotation, if there is one.
    pub style: Option<RopeStyle>,
    pub eps: f32,
    pub dtype: DType,
}

impl CustomOp1 for AppendAt {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("{OP}: qkv is on the CPU, expected a tensor on a CUDA device")
    }

    fn cuda_fwd(&self, qkv: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (tokens, heads, dim) = (self.tokens, self.heads, self.sizes.dim);
        let count = tokens * heads * dim;
        let out = alloc(OP, qkv.device(), qkv.dtype(), count)?;
        let shape = Shape::from((tokens, heads, dim));
        if tokens == 0 {
            return Ok((out, shape));
        }
        let launch = Self {
            x: address(qkv, layout)?,
            y: address(&out, &Layout::contiguous(count))?,
            ..*self
        };
        // SAFETY: the guards have checked the shapes; the caller holds pools, table, rotary tables and norms, and the
        // stream that runs the kernel is the one that frees them.
        unsafe { launch.run(&Launcher::new(qkv.device())?)? };
        Ok((out, shape))
    }
}

impl AppendAt {
    /// # Safety
    /// Each address holds what its field says, until the stream has passed the launch.
    pub unsafe fn run(&self, launcher: &Launcher) -> Result<()> {
        let Self {
            x,
            y,
            tokens,
            heads,
            dtype,
            ..
        } = *self;
        let (kv_heads, dim) = (self.sizes.kv_heads, self.sizes.dim);
        // Elements of 16 bytes of the input.
        let pack = 16 / dtype.size_in_bytes();
        let refusal = self.refuses_vectors(pack, [x, y]);
        let vectors = refusal.is_none();
        // Two packs for each lane: those of its pairs.
        let lanes = dim.div_ceil(2 * if vectors { pack } else { 1 });
        let lanes = lanes.next_power_of_two().min(WARP);
        let Ok(rows) = u32::try_from(tokens * (heads + 2 * kv_heads)) else {
            bail!("{OP}: {tokens} tokens are past what the kernel takes");
        };
        trace::record(OP, || {
            let width = if vectors { "vector" } else { "scalar" };
            let norm = if self.q_norm != 0 { " +norm" } else { "" };
            let rope = if self.pairs > 0 { " +rope" } else { "" };
            let reason = refusal.map_or(String::new(), |reason| format!(": {reason}"));
            format!("cuda {width} {}{norm}{rope}{reason}", dtype.as_str())
        });
        let params = PagedAppendParams {
            pages: self.pages,
            x,
            y,
            cos: self.cos,
            sin: self.sin,
            q_norm: self.q_norm,
            k_norm: self.k_norm,
            at: self.at,
            owners: self.owners,
            cu_seqlens: self.cu_seqlens,
            rows,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            dim: dim as u32,
            positions: u32::try_from(self.positions).unwrap_or(u32::MAX),
            pairs: self.pairs as u32,
            lanes: lanes as u32,
            eps: self.eps,
            table: dtype_index(DType::F32) as i32,
            interleaved: (self.style == Some(RopeStyle::Interleaved)).into(),
            vectors: vectors.into(),
        };
        let blocks = rows.div_ceil((ROPE_THREADS / lanes) as u32);
        let grid = Grid::line(blocks, ROPE_THREADS as u32);
        // SAFETY: the kernel takes `PagedAppendParams`, the addresses are the caller's.
        unsafe { launcher.run(&MODULE, dtype_index(dtype), grid, &params) }
    }

    /// Why 16-byte accesses do not fit; none if they do.
    fn refuses_vectors(&self, pack: usize, xy: [Address; 2]) -> Option<&'static str> {
        let p = &self.pages;
        let tensors = [p.k, p.v, self.cos, self.sin, self.q_norm, self.k_norm];
        let strides = [p.k_page, p.k_token, p.k_head, p.v_page, p.v_token, p.v_head];
        let counts = [self.sizes.dim as u64, self.pairs as u64];
        if !xy.iter().chain(&tensors).all(|a| a.is_multiple_of(16)) {
            Some(UNALIGNED)
        } else if !strides
            .iter()
            .chain(&counts)
            .all(|n| n.is_multiple_of(pack as u64))
        {
            Some(PIECES)
        } else {
            None
        }
    }
}

/// [`super::copy_pages`] after its checks: keys and values in one launch, and scales in another.
pub(super) fn copy(pool: &PagePool, sizes: PoolSizes, pairs: &Tensor) -> Result<()> {
    if pairs.dims()[0] == 0 {
        return Ok(());
    }
    if pairs.stride()[1] != 1 {
        bail!("{COPY}: the elements of a pair have to lie side by side");
    }
    let all = pool.parts(sizes);
    let (both, _) = all.as_chunks::<2>();
    both.iter().try_for_each(|both| copy_both(both, pairs))
}

/// Copies keys and values, or their scales.
fn copy_both(
    [(k, k_strides, sizes), (v, v_strides, _)]: &[(&Tensor, [usize; 3], PoolSizes); 2],
    pairs: &Tensor,
) -> Result<()> {
    let Device::Cuda(device) = pairs.device() else {
        bail!("{COPY}: pairs is not on a CUDA device");
    };
    let PoolSizes {
        pages,
        page,
        kv_heads,
        dim,
    } = *sizes;
    let element = k.dtype().size_in_bytes();
    let (k, v) = (address_of(k)?, address_of(v)?);
    let bytes = k_strides.iter().chain(v_strides).map(|s| s * element);
    let fits = |size: usize| {
        let aligned = [k, v].iter().all(|a| a.is_multiple_of(size as u64));
        let whole = (dim * element).is_multiple_of(size);
        aligned && whole && bytes.clone().all(|n| n.is_multiple_of(size))
    };
    let size = [16, 4]
        .into_iter()
        .find(|size| fits(*size))
        .unwrap_or(element);
    let counts = [pages, page * kv_heads * dim, pairs.dims()[0]];
    if counts.iter().any(|n| u32::try_from(*n).is_err()) {
        bail!(
            "{COPY}: {counts:?} pages, elements of a page and pairs are past what the kernel takes"
        );
    }
    trace::record(COPY, || format!("cuda {size} bytes at once"));
    let pieces = |strides: &[usize; 3]| strides.map(|s| (s * element / size) as u64);
    let ([k_page, k_token, k_head], [v_page, v_token, v_head]) =
        (pieces(k_strides), pieces(v_strides));
    let params = CopyPagesParams {
        pairs: address_of(pairs)?,
        step: pairs.stride()[0] as u32,
        k,
        v,
        k_page,
        k_token,
        k_head,
        v_page,
        v_token,
        v_head,
        pages: pages as u32,
        page: page as u32,
        kv_heads: kv_heads as u32,
        pieces: (dim * element / size) as u32,
        size: size as i32,
    };
    let all = page * kv_heads * dim * element / size;
    let blocks = all.div_ceil(COPY_PAGES_THREADS).min(BLOCKS_OF_PAGE);
    let grid = Grid::new(
        [pairs.dims()[0] as u32, 2, blocks as u32],
        COPY_PAGES_THREADS as u32,
        0,
    );
    // SAFETY: the kernel takes `CopyPagesParams`; the guards have checked the shapes, the tensors live through the
    // call, and the stream that runs the kernel is the one that frees them.
    unsafe { Launcher::new(device)?.run(&MODULE, COPIES, grid, &params) }
}
