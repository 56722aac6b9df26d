//! The CUDA form: queries, keys and values of all heads in one launch.

use super::{APPEND, HeadNorms, OP, RopeAppend, RopeStyle, RotaryTables, Rotation};
use crate::cuda::abi::{ROPE_THREADS, RopeParams, WARP};
use crate::cuda::{
    Address, Grid, Launcher, Module, PIECES, UNALIGNED, address, address_of, alloc, fatbin,
};
use crate::ops::view::{dtype_index, float};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};

static MODULE: Module = Module::new(
    "rope",
    fatbin!("rope"),
    &["rope_f32", "rope_f16", "rope_bf16"],
);

/// One call on raw addresses; 0 stands for what is not there. Offsets and strides are in elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RopeAt {
    /// `[B, T, heads + 2 kv_heads, D]`, with the strides of a sequence, a token and a head.
    pub x: Address,
    pub x_strides: [usize; 3],
    /// The rotated queries, `[B, T, heads, D]` with strides in the same order.
    pub y: Address,
    pub y_strides: [usize; 3],
    /// `[B, kv_heads, slots, D]` each, of `cache_dtype`.
    pub k: Address,
    pub v: Address,
    /// `[positions, pairs]` each, of `table_dtype`.
    pub cos: Address,
    pub sin: Address,
    /// `[D]` each.
    pub q_norm: Address,
    pub k_norm: Address,
    pub eps: f32,
    /// A u32 on the device that is added to position and slot, or one for each sequence.
    pub at: Address,
    /// 1 if each sequence has its own, 2 if those are 64 bits wide, 0 if all share one.
    pub at_step: usize,
    pub position: usize,
    pub positions: usize,
    pub slot: usize,
    pub slots: usize,
    pub batch: usize,
    pub tokens: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub dim: usize,
    pub pairs: usize,
    pub style: RopeStyle,
    pub dtype: DType,
    pub table_dtype: DType,
    pub cache_dtype: DType,
}

/// Launches the rotation and, with `kv_heads`, the append. Past `positions` queries are zeros; past them or
/// `slots` nothing is written into the caches.
///
/// # Safety
/// Each address holds what its field says, until the stream has passed the launch.
pub(crate) unsafe fn launch(launcher: &Launcher, at: &RopeAt) -> Result<()> {
    float(OP, "x", at.dtype)?;
    float(OP, "cos", at.table_dtype)?;
    float(OP, "k_cache", at.cache_dtype)?;
    let u32_of = |name: &str, value: usize| match u32::try_from(value) {
        Ok(value) => Ok(value),
        Err(_) => bail!("{OP}: {name} is {value}, past what the kernel takes"),
    };
    let refusal = at.refuses_vectors();
    let vectors = refusal.is_none();
    let pack = if vectors { at.pack() } else { 1 };
    // Two packs for each lane: those of its pairs.
    let lanes = at.dim.div_ceil(2 * pack).next_power_of_two().min(WARP);
    let rows = at.batch * at.tokens * (at.heads + 2 * at.kv_heads);
    at.record(refusal);
    let [x_batch, x_token, x_head] = at.x_strides.map(|s| s as u64);
    let [y_batch, y_token, y_head] = at.y_strides.map(|s| s as u64);
    let params = RopeParams {
        x: at.x,
        y: at.y,
        k: at.k,
        v: at.v,
        cos: at.cos,
        sin: at.sin,
        q_norm: at.q_norm,
        k_norm: at.k_norm,
        at: at.at,
        x_batch,
        x_token,
        x_head,
        y_batch,
        y_token,
        y_head,
        position: u32_of("position", at.position)?,
        positions: u32_of("the number of positions", at.positions)?,
        slot: u32_of("slot", at.slot)?,
        slots: u32_of("the number of slots", at.slots)?,
        rows: u32_of("the number of heads of all tokens", rows)?,
        tokens: at.tokens as u32,
        heads: at.heads as u32,
        kv_heads: at.kv_heads as u32,
        dim: u32_of("the head's width", at.dim)?,
        pairs: at.pairs as u32,
        at_step: at.at_step as u32,
        lanes: lanes as u32,
        eps: at.eps,
        table: dtype_index(at.table_dtype) as i32,
        cache: dtype_index(at.cache_dtype) as i32,
        interleaved: (at.style == RopeStyle::Interleaved).into(),
        vectors: vectors.into(),
    };
    let heads = (ROPE_THREADS / lanes) as u32;
    let grid = Grid::line(params.rows.div_ceil(heads), ROPE_THREADS as u32);
    // SAFETY: the kernel takes `RopeParams`, the addresses are the caller's.
    unsafe { launcher.run(&MODULE, dtype_index(at.dtype), grid, &params) }
}

impl RopeAt {
    /// Elements of 16 bytes of the input.
    fn pack(&self) -> usize {
        16 / self.dtype.size_in_bytes()
    }

    /// Why 16-byte accesses do not fit; none if they do.
    fn refuses_vectors(&self) -> Option<&'static str> {
        let addresses = [
            self.x,
            self.y,
            self.k,
            self.v,
            self.cos,
            self.sin,
            self.q_norm,
            self.k_norm,
        ];
        let counts = [self.dim, self.pairs];
        let strides = self.x_strides.iter().chain(&self.y_strides);
        if !addresses.iter().all(|a| a.is_multiple_of(16)) {
            Some(UNALIGNED)
        } else if !strides
            .chain(&counts)
            .all(|n| n.is_multiple_of(self.pack()))
        {
            Some(PIECES)
        } else {
            None
        }
    }

    fn record(&self, refusal: Option<&str>) {
        trace::record(OP, || {
            let width = if refusal.is_none() {
                "vector"
            } else {
                "scalar"
            };
            let mut path = format!("cuda {width} {}", self.dtype.as_str());
            if self.q_norm != 0 {
                path.push_str(" +norm");
            }
            if self.kv_heads != 0 {
                path.push_str(&format!(" +append of {} heads", self.kv_heads));
            }
            if let Some(reason) = refusal {
                path.push_str(&format!(": {reason}"));
            }
            path
        });
    }

    /// Everything but the input, the output and the caches.
    fn new(rotation: &Rotation<'_>, tables: &[Tensor; 2]) -> Result<Self> {
        let (positions, pairs) = tables[0].dims2()?;
        Ok(Self {
            x: 0,
            x_strides: [0; 3],
            y: 0,
            y_strides: [0; 3],
            k: 0,
            v: 0,
            cos: address_of(&tables[0])?,
            sin: address_of(&tables[1])?,
            q_norm: 0,
            k_norm: 0,
            eps: 0.,
            at: 0,
            at_step: 0,
            position: rotation.position,
            positions,
            slot: 0,
            slots: 0,
            batch: 0,
            tokens: 0,
            heads: 0,
            kv_heads: 0,
            dim: 0,
            pairs,
            style: rotation.style,
            dtype: DType::F32,
            table_dtype: tables[0].dtype(),
            cache_dtype: DType::F32,
        })
    }
}

/// Contiguous tables of one dtype.
fn tables(rotation: &Rotation<'_>) -> Result<[Tensor; 2]> {
    let (cos, sin) = (rotation.cos.contiguous()?, rotation.sin.contiguous()?);
    if cos.dtype() == sin.dtype() {
        return Ok([cos, sin]);
    }
    Ok([cos.to_dtype(DType::F32)?, sin.to_dtype(DType::F32)?])
}

/// Plain rope of `[B, H, T, D]`; elements of a head lie side by side.
pub(super) fn forward(
    x: &CudaStorage,
    layout: &Layout,
    rotation: &Rotation<'_>,
) -> Result<(CudaStorage, Shape)> {
    let (batch, heads, tokens, dim) = layout.shape().dims4()?;
    let &[of_batch, of_head, of_token, of_value] = layout.stride() else {
        bail!("{OP}: x has strides {:?}, expected four", layout.stride());
    };
    if of_value != 1 && dim > 1 {
        bail!("{OP}: the values of a head of x are {of_value} elements apart, expected 1");
    }
    let tables = tables(rotation)?;
    let count = layout.shape().elem_count();
    let out = alloc(OP, x.device(), x.dtype(), count)?;
    let at = RopeAt {
        x: address(x, layout)?,
        x_strides: [of_batch, of_token, of_head],
        y: address(&out, &Layout::contiguous(count))?,
        y_strides: [heads * tokens * dim, dim, tokens * dim],
        batch,
        tokens,
        heads,
        dim,
        dtype: x.dtype(),
        cache_dtype: x.dtype(),
        ..RopeAt::new(rotation, &tables)?
    };
    // SAFETY: the guards have checked the shapes; the tensors live through the call, and the
    // stream that runs the kernel is the one that frees them.
    unsafe { launch(&Launcher::new(x.device())?, &at)? };
    Ok((out, layout.shape().clone()))
}

/// Rope of `[N, H, D]` with a position for each token, which is a sequence of one token to the kernel.
pub(super) fn forward_tokens(
    x: &CudaStorage,
    layout: &Layout,
    positions: &Tensor,
    &RotaryTables { cos, sin, style }: &RotaryTables<'_>,
) -> Result<(CudaStorage, Shape)> {
    let (count, heads, dim) = layout.shape().dims3()?;
    let &[of_token, of_head, _] = layout.stride() else {
        bail!("{OP}: x has strides {:?}, expected three", layout.stride());
    };
    let rotation = Rotation {
        cos,
        sin,
        position: 0,
        style,
    };
    let tables = tables(&rotation)?;
    let elements = layout.shape().elem_count();
    let out = alloc(OP, x.device(), x.dtype(), elements)?;
    let at = RopeAt {
        x: address(x, layout)?,
        x_strides: [of_token, 0, of_head],
        y: address(&out, &Layout::contiguous(elements))?,
        y_strides: [heads * dim, 0, dim],
        at: address_of(positions)?,
        at_step: positions.dtype().size_in_bytes() / 4,
        batch: count,
        tokens: 1,
        heads,
        dim,
        dtype: x.dtype(),
        cache_dtype: x.dtype(),
        ..RopeAt::new(&rotation, &tables)?
    };
    // SAFETY: as above; the kernel reads a position for each of the tokens.
    unsafe { launch(&Launcher::new(x.device())?, &at)? };
    Ok((out, layout.shape().clone()))
}

/// [`super::rope_append`] after its checks.
pub(super) fn append(
    qkv: &Tensor,
    append: &RopeAppend<'_>,
    [k_cache, v_cache]: [&Tensor; 2],
) -> Result<Tensor> {
    let tables = tables(&append.rotation)?;
    let norms = match append.norms {
        Some(HeadNorms { q, k, .. }) => Some([q.contiguous()?, k.contiguous()?]),
        None => None,
    };
    let norm = |i: usize| norms.as_ref().map_or(Ok(0), |n| address_of(&n[i]));
    let (batch, tokens, _) = qkv.dims3()?;
    let (_, _, slots, dim) = k_cache.dims4()?;
    let at = RopeAt {
        k: address_of(k_cache)?,
        v: address_of(v_cache)?,
        q_norm: norm(0)?,
        k_norm: norm(1)?,
        eps: append.norms.map_or(0., |n| n.eps as f32),
        slot: append.slot,
        slots,
        batch,
        tokens,
        heads: append.heads,
        kv_heads: append.kv_heads,
        dim,
        dtype: qkv.dtype(),
        cache_dtype: k_cache.dtype(),
        ..RopeAt::new(&append.rotation, &tables)?
    };
    qkv.contiguous()?
        .apply_op1_no_bwd(&Append { at })?
        .transpose(1, 2)
}

/// The launch as an op of the projection, which gives the queries.
struct Append {
    at: RopeAt,
}

impl CustomOp1 for Append {
    fn name(&self) -> &'static str {
        APPEND
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("{APPEND}: qkv is on the CPU, expected a tensor on a CUDA device")
    }

    fn cuda_fwd(&self, qkv: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (batch, tokens, width) = layout.shape().dims3()?;
        let RopeAt { heads, dim, .. } = self.at;
        let count = batch * tokens * heads * dim;
        let out = alloc(APPEND, qkv.device(), qkv.dtype(), count)?;
        let at = RopeAt {
            x: address(qkv, layout)?,
            x_strides: [tokens * width, width, dim],
            y: address(&out, &Layout::contiguous(count))?,
            y_strides: [tokens * heads * dim, heads * dim, dim],
            ..self.at
        };
        // SAFETY: the guards have checked the shapes; the caller holds the caches, tables and
        // norms, and the stream that runs the kernel is the one that frees them.
        unsafe { launch(&Launcher::new(qkv.device())?, &at)? };
        Ok((out, Shape::from((batch, tokens, heads, dim))))
    }
}
