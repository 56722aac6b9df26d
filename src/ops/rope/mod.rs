//! Rotary position embedding, alone and together with the cache append.

pub(super) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
mod tokens;

pub use crate::cpu::rope::RopeStyle;
pub use tokens::{reference_tokens, rope_tokens};

use super::view::{check_apart, check_storages, check_tensors, dense_on_cuda, float, float64};
use candle_core::{D, DType, Result, Tensor, bail};

const OP: &str = "rope";

const APPEND: &str = "rope_append";

/// What `rope` and `rope_append` rotate by.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a> {
    /// Cosines `[S, R / 2]` of each position, f32, f16 or bf16.
    pub cos: &'a Tensor,
    /// Sines, as the cosines.
    pub sin: &'a Tensor,
    /// The position of the first token.
    pub position: usize,
    /// Which dimensions form a pair.
    pub style: RopeStyle,
}

impl<'a> Rotation<'a> {
    fn tables(&self) -> RotaryTables<'a> {
        let Self {
            cos, sin, style, ..
        } = *self;
        RotaryTables { cos, sin, style }
    }
}

/// The angles of each position.
#[derive(Clone, Copy, Debug)]
pub struct RotaryTables<'a> {
    /// Cosines `[positions, R / 2]`, f32, R at most the head dimension. [`rope_tokens`] takes f16 and bf16 too.
    pub cos: &'a Tensor,
    /// Sines, as the cosines.
    pub sin: &'a Tensor,
    /// Which dimensions of a head form a pair.
    pub style: RopeStyle,
}

/// Rotates the first R dimensions of each head by its position's angles:
/// `(a, b) -> (a cos - b sin, b cos + a sin)` for each pair; the other dimensions are copied.
///
/// * `x`: `[B, H, T, D]`, f32, f16 or bf16, any layout
/// * `rotation`: tables `[S, R / 2]` with `R <= D`; the tokens stand at `position..position + T`,
///   which ends within S
/// * result: contiguous, x's shape and dtype
///
/// Computed in f32 and rounded once.
///
/// Source: RoFormer (Su et al. 2021); the half-split form is GPT-NeoX's.
///
/// # Errors
/// If ranks, widths, dtypes or devices do not fit, or the positions pass the tables.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{RopeStyle, Rotation, rope};
/// // Position 3 turns the only pair by a quarter: (a, b) -> (-b, a).
/// let (cos, sin) = (Tensor::zeros((4, 1), DType::F32, &Device::Cpu)?, Tensor::ones((4, 1), DType::F32, &Device::Cpu)?);
/// let rotation = Rotation { cos: &cos, sin: &sin, position: 3, style: RopeStyle::HalfSplit };
/// let x = Tensor::new(&[[[[1f32, 2.]]]], &Device::Cpu)?;
/// assert_eq!(rope(&x, &rotation)?.flatten_all()?.to_vec1::<f32>()?, [-2., 1.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn rope(x: &Tensor, rotation: &Rotation<'_>) -> Result<Tensor> {
    check(x, rotation)?;
    // A kernel follows any strides but those within a head.
    let packed = x.dims()[3] <= 1 || x.stride()[3] == 1;
    let x = if packed { x.clone() } else { dense_on_cuda(x)? };
    x.apply_op1_no_bwd(&cpu::Rope { rotation })
}

/// Fails where [`rope`] does, before it computes anything.
pub(crate) fn check(x: &Tensor, rotation: &Rotation<'_>) -> Result<()> {
    let (_, _, tokens, head_dim) = four(OP, "x", x)?;
    check_tables(OP, rotation, tokens, head_dim, x)?;
    check_tensors(OP, [("x", x)])
}

/// The RMSNorms of each head's queries and keys that Qwen3 has before the rotation: one head
/// at a time, rounded as [`rms_norm`](fn@crate::ops::rms_norm) does.
#[derive(Clone, Copy, Debug)]
pub struct HeadNorms<'a> {
    /// Weight `[D]` of the queries, in their dtype.
    pub q: &'a Tensor,
    /// Weight `[D]` of the keys, in their dtype.
    pub k: &'a Tensor,
    /// What is added to the mean of squares.
    pub eps: f64,
}

/// The widths of a fused q, k and v projection, and where its rotated keys go.
#[derive(Clone, Copy, Debug)]
pub struct RopeAppend<'a> {
    /// The angles.
    pub rotation: Rotation<'a>,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// The first slot of the caches that is written.
    pub slot: usize,
    /// Norms of the heads, or none.
    pub norms: Option<HeadNorms<'a>>,
}

/// Rotates the queries and keys of a fused projection, normalised before if so asked, writes keys
/// and values into their caches in place, and returns the queries.
///
/// * `qkv`: `[B, T, (Hq + 2 Hkv) D]`, f32, f16 or bf16: queries, then keys, then values
/// * `k_cache`, `v_cache`: `[B, Hkv, S, D]`, contiguous, f32, f16 or bf16 (their dtype may differ from
///   qkv's, but is the same for both); slots `slot..slot + T` are overwritten
/// * result: `[B, Hq, T, D]` in qkv's dtype, a transposed view of `[B, T, Hq, D]` in memory
///
/// # Errors
/// As [`rope`], or if the caches do not fit or end before `slot + T`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::{RopeAppend, RopeStyle, Rotation, rope_append};
/// let f32_on_cpu = (DType::F32, &Device::Cpu);
/// let zeros = |dims: &[usize]| Tensor::zeros(dims, f32_on_cpu.0, f32_on_cpu.1);
/// let (cos, sin) = (zeros(&[16, 4])?.cos()?, zeros(&[16, 4])?);
/// let append = RopeAppend {
///     rotation: Rotation { cos: &cos, sin: &sin, position: 5, style: RopeStyle::HalfSplit },
///     heads: 2,
///     kv_heads: 1,
///     slot: 5,
///     norms: None,
/// };
/// // Two query heads, a key head and a value head of 8, for one token after five others.
/// let (k_cache, v_cache) = (zeros(&[1, 1, 16, 8])?, zeros(&[1, 1, 16, 8])?);
/// let qkv = Tensor::ones((1, 1, 32), DType::F32, &Device::Cpu)?;
/// let q = rope_append(&qkv, &append, &k_cache, &v_cache)?;
/// assert_eq!(q.dims(), [1, 2, 1, 8]);
/// assert_eq!(v_cache.sum_all()?.to_scalar::<f32>()?, 8.);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn rope_append(
    qkv: &Tensor,
    append: &RopeAppend<'_>,
    k_cache: &Tensor,
    v_cache: &Tensor,
) -> Result<Tensor> {
    let (tokens, width) = match *qkv.dims() {
        [_, tokens, width] => (tokens, width),
        _ => bail!(
            "{APPEND}: qkv has shape {:?}, expected [B, T, (Hq + 2 Hkv) D]",
            qkv.shape()
        ),
    };
    let (_, _, _, head_dim) = four(APPEND, "k_cache", k_cache)?;
    if width != (append.heads + 2 * append.kv_heads) * head_dim {
        bail!(
            "{APPEND}: qkv is {width} wide, expected (Hq + 2 Hkv) D = ({} + 2 * {}) * {head_dim}",
            append.heads,
            append.kv_heads
        );
    }
    float(APPEND, "qkv", qkv.dtype())?;
    float(APPEND, "k_cache", k_cache.dtype())?;
    float(APPEND, "v_cache", v_cache.dtype())?;
    check_tables(APPEND, &append.rotation, tokens, head_dim, qkv)?;
    check_caches(qkv, append, k_cache, v_cache, head_dim)?;
    check_tensors(
        APPEND,
        [("qkv", qkv), ("k_cache", k_cache), ("v_cache", v_cache)],
    )?;
    for (argument, weight) in append
        .norms
        .iter()
        .flat_map(|n| [("norms.q", n.q), ("norms.k", n.k)])
    {
        if weight.dims() != [head_dim] || weight.dtype() != qkv.dtype() {
            bail!(
                "{APPEND}: {argument} is {:?} of shape {:?}, expected {:?} of shape [{head_dim}]",
                weight.dtype(),
                weight.shape(),
                qkv.dtype()
            );
        }
        if !weight.device().same_device(qkv.device()) {
            bail!("{APPEND}: {argument} and qkv are on different devices");
        }
        check_tensors(APPEND, [(argument, weight)])?;
    }
    let caches = [("k_cache", k_cache), ("v_cache", v_cache)];
    check_storages(APPEND, &caches, ("qkv", qkv))?;
    let Rotation { cos, sin, .. } = append.rotation;
    check_apart(APPEND, &caches, &[("qkv", qkv), ("cos", cos), ("sin", sin)])?;
    if let Some(HeadNorms { q, k, .. }) = append.norms {
        check_apart(APPEND, &caches, &[("norms.q", q), ("norms.k", k)])?;
    }
    #[cfg(feature = "cuda")]
    if qkv.device().is_cuda() {
        return cuda::append(qkv, append, [k_cache, v_cache]);
    }
    cpu::append(qkv, append, [k_cache, v_cache], head_dim)
}

fn check_caches(
    qkv: &Tensor,
    append: &RopeAppend<'_>,
    k_cache: &Tensor,
    v_cache: &Tensor,
    head_dim: usize,
) -> Result<()> {
    let (batch, tokens) = (qkv.dims()[0], qkv.dims()[1]);
    let kv_heads = append.kv_heads;
    for (argument, cache) in [("k_cache", k_cache), ("v_cache", v_cache)] {
        let (b, h, slots, d) = four(APPEND, argument, cache)?;
        if (b, h, d) != (batch, kv_heads, head_dim) || !cache.is_contiguous() {
            bail!(
                "{APPEND}: {argument} has shape {:?}, expected a contiguous [{batch}, {kv_heads}, S, {head_dim}]",
                cache.shape()
            );
        }
        if append
            .slot
            .checked_add(tokens)
            .is_none_or(|end| end > slots)
        {
            bail!(
                "{APPEND}: {argument} has {slots} slots, {tokens} tokens from slot {} on do not fit",
                append.slot
            );
        }
        if !cache.device().same_device(qkv.device()) {
            bail!("{APPEND}: {argument} and qkv are on different devices");
        }
    }
    if (v_cache.dtype(), v_cache.dims()) != (k_cache.dtype(), k_cache.dims()) {
        bail!(
            "{APPEND}: v_cache is {:?} of shape {:?}, k_cache is {:?} of shape {:?}",
            v_cache.dtype(),
            v_cache.shape(),
            k_cache.dtype(),
            k_cache.shape()
        );
    }
    Ok(())
}

fn four(op: &str, argument: &str, t: &Tensor) -> Result<(usize, usize, usize, usize)> {
    match *t.dims() {
        [a, b, c, d] => Ok((a, b, c, d)),
        _ => bail!(
            "{op}: {argument} has shape {:?}, expected four dimensions",
            t.shape()
        ),
    }
}

fn check_tables(
    op: &str,
    r: &Rotation<'_>,
    tokens: usize,
    head_dim: usize,
    x: &Tensor,
) -> Result<()> {
    let [positions, pairs] = *r.cos.dims() else {
        bail!(
            "{op}: cos has shape {:?}, expected [S, R / 2]",
            r.cos.shape()
        );
    };
    if r.sin.dims() != r.cos.dims() {
        bail!(
            "{op}: sin has shape {:?}, cos has {:?}",
            r.sin.shape(),
            r.cos.shape()
        );
    }
    if 2 * pairs > head_dim {
        bail!(
            "{op}: cos rotates {} dimensions, a head has {head_dim}",
            2 * pairs
        );
    }
    if r.position
        .checked_add(tokens)
        .is_none_or(|end| end > positions)
    {
        bail!(
            "{op}: cos has {positions} positions, {tokens} tokens from position {} on do not fit",
            r.position
        );
    }
    check_tensors(op, [("cos", r.cos), ("sin", r.sin)])?;
    for (argument, table) in [("cos", r.cos), ("sin", r.sin)] {
        if !table.device().same_device(x.device()) {
            bail!("{op}: {argument} and the input are on different devices");
        }
        if !matches!(table.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            bail!(
                "{op}: {argument} is {:?}, expected f32, f16 or bf16",
                table.dtype()
            );
        }
    }
    Ok(())
}

/// The plain form of [`rope`]: float64, one element at a time, in x's row-major order.
///
/// # Errors
/// If a tensor cannot be read as float64, or x does not have four dimensions.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::rope::{self, RopeStyle, Rotation};
/// // A quarter turn at every position: (a, b) -> (-b, a).
/// let tables = Tensor::zeros((4, 1), DType::F32, &Device::Cpu)?;
/// let (cos, sin) = (&tables, &tables.cos()?);
/// let rotation = Rotation { cos, sin, position: 3, style: RopeStyle::Interleaved };
/// let x = Tensor::new(&[[[[1f32, 2.]]]], &Device::Cpu)?;
/// assert_eq!(rope::reference(&x, &rotation)?, [-2., 1.]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference(x: &Tensor, rotation: &Rotation<'_>) -> Result<Vec<f64>> {
    let (_, _, tokens, head_dim) = four(OP, "x", x)?;
    check_tables(OP, rotation, tokens, head_dim, x)?;
    let mut values = float64(x)?;
    let position = |row| rotation.position + row % tokens;
    rotate(&mut values, &rotation.tables(), head_dim, position)?;
    Ok(values)
}

/// Turns heads of `head_dim` in place, each by the angles of its position.
fn rotate(
    values: &mut [f64],
    tables: &RotaryTables<'_>,
    head_dim: usize,
    position: impl Fn(usize) -> usize,
) -> Result<()> {
    let (cos, sin) = (float64(tables.cos)?, float64(tables.sin)?);
    let pairs = tables.cos.dim(1)?;
    for (row, head) in values.chunks_mut(head_dim.max(1)).enumerate() {
        let position = position(row);
        for i in 0..pairs {
            let (first, second) = match tables.style {
                RopeStyle::HalfSplit => (i, i + pairs),
                RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            };
            let (c, s) = (cos[position * pairs + i], sin[position * pairs + i]);
            let (a, b) = (head[first], head[second]);
            head[first] = a * c - b * s;
            head[second] = b * c + a * s;
        }
    }
    Ok(())
}

/// The plain form of [`rope_append`]: queries `[B, Hq, T, D]`, then the keys and the values that go
/// into the slots, `[B, Hkv, T, D]` each, in float64.
///
/// # Errors
/// If a tensor cannot be read as float64, or qkv does not divide into heads.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::rope::{self, RopeAppend, RopeStyle, Rotation};
/// // A quarter turn at every position: (a, b) -> (-b, a).
/// let tables = Tensor::zeros((4, 1), DType::F32, &Device::Cpu)?;
/// let (cos, sin) = (&tables, &tables.cos()?);
/// let rotation = Rotation { cos, sin, position: 3, style: RopeStyle::HalfSplit };
/// let append = RopeAppend { rotation, heads: 1, kv_heads: 1, slot: 3, norms: None };
/// // A query, a key and a value of two elements each.
/// let qkv = Tensor::new(&[[[1f32, 2., 3., 4., 5., 6.]]], &Device::Cpu)?;
/// let [q, k, v] = rope::reference_append(&qkv, &append)?;
/// assert_eq!((q, k, v), (vec![-2., 1.], vec![-4., 3.], vec![5., 6.]));
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn reference_append(qkv: &Tensor, append: &RopeAppend<'_>) -> Result<[Vec<f64>; 3]> {
    let (batch, tokens, width) = qkv.dims3()?;
    let (heads, kv_heads) = (append.heads, append.kv_heads);
    let head_dim = width / (heads + 2 * kv_heads);
    let part = |first: usize, n: usize| {
        qkv.narrow(D::Minus1, first * head_dim, n * head_dim)?
            .reshape((batch, tokens, n, head_dim))?
            .transpose(1, 2)
    };
    let turned = |x: &Tensor, norm: Option<&Tensor>| -> Result<Vec<f64>> {
        let mut values = match (norm, append.norms) {
            (Some(weight), Some(norms)) => super::rms_norm::reference(x, weight, norms.eps)?,
            _ => float64(x)?,
        };
        let position = |row| append.rotation.position + row % tokens;
        rotate(&mut values, &append.rotation.tables(), head_dim, position)?;
        Ok(values)
    };
    Ok([
        turned(&part(0, heads)?, append.norms.map(|n| n.q))?,
        turned(&part(heads, kv_heads)?, append.norms.map(|n| n.k))?,
        float64(&part(heads + kv_heads, kv_heads)?)?,
    ])
}

/// Whether `cos` and `sin`, arguments below `prefix`, are f32 tables `[positions, R / 2]` that rotate at most `dim`
/// dimensions.
pub(super) fn check_rotary_tables(
    op: &str,
    prefix: &str,
    [cos, sin]: [&Tensor; 2],
    dim: usize,
) -> Result<()> {
    let &[positions, pairs] = cos.dims() else {
        bail!(
            "{op}: {prefix}cos has shape {:?}, expected [positions, R / 2]",
            cos.shape()
        );
    };
    if sin.dims() != cos.dims() || [cos, sin].iter().any(|t| t.dtype() != DType::F32) {
        bail!("{op}: {prefix}cos and {prefix}sin have to be f32 of one shape");
    }
    if positions == 0 {
        bail!("{op}: {prefix}cos has no positions, expected at least 1");
    }
    if 2 * pairs > dim {
        bail!(
            "{op}: {prefix}cos rotates {} dimensions, a head has {dim}",
            2 * pairs
        );
    }
    Ok(())
}
