//! Rotary position embedding, alone and together with the cache append.

use super::view::{Float, cpu_storage, dispatch_float, elements};
use crate::cpu::{pool, rope as core};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, InplaceOp2, Layout, Result, Shape, Tensor, bail};
use std::borrow::Cow;

const OP: &str = "rope";

/// Tokens that are worth a task of their own: about 4 microseconds of work.
const GRAIN: usize = 16;

/// Which dimensions of a head form the pairs that are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// `i` and `i + R / 2`: Hugging Face's weights (GPT-NeoX's form).
    HalfSplit,
    /// `2i` and `2i + 1`: GGUF files of the llama architecture (RoFormer's form).
    Interleaved,
}

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
pub fn rope(x: &Tensor, rotation: &Rotation<'_>) -> Result<Tensor> {
    let (_, _, tokens, head_dim) = four("x", x)?;
    check_tables(rotation, tokens, head_dim, x)?;
    x.apply_op1_no_bwd(&Rope { rotation })
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
}

/// Rotates the queries and keys of a fused projection, writes keys and values into their caches in
/// place, and returns the queries.
///
/// * `qkv`: `[B, T, (Hq + 2 Hkv) D]`, f32, f16 or bf16: queries, then keys, then values
/// * `k_cache`, `v_cache`: `[B, Hkv, S, D]`, contiguous, f32, f16 or bf16 (their dtype may differ from
///   qkv's); slots `slot..slot + T` are overwritten
/// * result: `[B, Hq, T, D]` in qkv's dtype, a transposed view of `[B, T, Hq, D]` in memory
///
/// # Errors
/// As [`rope`], or if the caches do not fit or end before `slot + T`.
pub fn rope_append(
    qkv: &Tensor,
    append: &RopeAppend<'_>,
    k_cache: &Tensor,
    v_cache: &Tensor,
) -> Result<Tensor> {
    let (batch, tokens, width) = match *qkv.dims() {
        [batch, tokens, width] => (batch, tokens, width),
        _ => bail!(
            "{OP}: qkv has shape {:?}, expected [B, T, (Hq + 2 Hkv) D]",
            qkv.shape()
        ),
    };
    let (_, _, _, head_dim) = four("k_cache", k_cache)?;
    if width != (append.heads + 2 * append.kv_heads) * head_dim {
        bail!(
            "{OP}: qkv is {width} wide, expected (Hq + 2 Hkv) D = ({} + 2 * {}) * {head_dim}",
            append.heads,
            append.kv_heads
        );
    }
    check_tables(&append.rotation, tokens, head_dim, qkv)?;
    if k_cache.id() == v_cache.id() {
        bail!("{OP}: k_cache and v_cache are the same tensor");
    }
    for (argument, cache) in [("k_cache", k_cache), ("v_cache", v_cache)] {
        let (b, h, slots, d) = four(argument, cache)?;
        if (b, h, d) != (batch, append.kv_heads, head_dim) || !cache.is_contiguous() {
            bail!(
                "{OP}: {argument} has shape {:?}, expected a contiguous [{batch}, {}, S, {head_dim}]",
                cache.shape(),
                append.kv_heads
            );
        }
        if append
            .slot
            .checked_add(tokens)
            .is_none_or(|end| end > slots)
        {
            bail!(
                "{OP}: {argument} has {slots} slots, {} tokens from slot {} on do not fit",
                tokens,
                append.slot
            );
        }
        if !cache.device().same_device(qkv.device()) {
            bail!("{OP}: {argument} and qkv are on different devices");
        }
    }
    let first_key = append.heads * head_dim;
    let first_value = first_key + append.kv_heads * head_dim;
    // Read before the caches are locked for writing, in case the tables share a storage with them.
    let angles = Angles::new(&append.rotation, tokens)?;
    let write = |first, rotated| Append {
        first,
        rotated,
        append,
        angles: &angles,
        head_dim,
    };
    k_cache.inplace_op2(qkv, &write(first_key, true))?;
    v_cache.inplace_op2(qkv, &write(first_value, false))?;
    let q = Queries {
        append,
        angles: &angles,
        head_dim,
    };
    qkv.apply_op1_no_bwd(&q)?.transpose(1, 2)
}

fn four(argument: &str, t: &Tensor) -> Result<(usize, usize, usize, usize)> {
    match *t.dims() {
        [a, b, c, d] => Ok((a, b, c, d)),
        _ => bail!(
            "{OP}: {argument} has shape {:?}, expected four dimensions",
            t.shape()
        ),
    }
}

fn check_tables(r: &Rotation<'_>, tokens: usize, head_dim: usize, x: &Tensor) -> Result<()> {
    let [positions, pairs] = *r.cos.dims() else {
        bail!(
            "{OP}: cos has shape {:?}, expected [S, R / 2]",
            r.cos.shape()
        );
    };
    if r.sin.dims() != r.cos.dims() {
        bail!(
            "{OP}: sin has shape {:?}, cos has {:?}",
            r.sin.shape(),
            r.cos.shape()
        );
    }
    if 2 * pairs > head_dim {
        bail!(
            "{OP}: cos rotates {} dimensions, a head has {head_dim}",
            2 * pairs
        );
    }
    if r.position
        .checked_add(tokens)
        .is_none_or(|end| end > positions)
    {
        bail!(
            "{OP}: cos has {positions} positions, {tokens} tokens from position {} on do not fit",
            r.position
        );
    }
    for (argument, table) in [("cos", r.cos), ("sin", r.sin)] {
        if !table.device().same_device(x.device()) {
            bail!("{OP}: {argument} and the input are on different devices");
        }
        if !matches!(table.dtype(), DType::F32 | DType::F16 | DType::BF16) {
            bail!(
                "{OP}: {argument} is {:?}, expected f32, f16 or bf16",
                table.dtype()
            );
        }
    }
    Ok(())
}

/// The rows of the tables that are needed, `[T, R / 2]` each.
struct Angles {
    cos: Vec<f32>,
    sin: Vec<f32>,
    pairs: usize,
}

impl Angles {
    fn new(r: &Rotation<'_>, tokens: usize) -> Result<Self> {
        let rows = |table: &Tensor| -> Result<Vec<f32>> {
            let table = table.narrow(0, r.position, tokens)?;
            let (storage, layout) = table.storage_and_layout();
            let storage = cpu_storage(&storage)?;
            dispatch_float!(storage.dtype(), OP, "cos", T => {
                let values: Cow<'_, [T]> = elements(storage, layout)?;
                Ok(T::widen_slice(&values).into_owned())
            })
        };
        Ok(Self {
            cos: rows(r.cos)?,
            sin: rows(r.sin)?,
            pairs: r.cos.dim(1)?,
        })
    }

    fn at(&self, token: usize) -> (&[f32], &[f32]) {
        let row = token * self.pairs..(token + 1) * self.pairs;
        (&self.cos[row.clone()], &self.sin[row])
    }
}

struct Rope<'a> {
    rotation: &'a Rotation<'a>,
}

impl CustomOp1 for Rope<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        trace::record(OP, || format!("cpu {}", x.dtype().as_str()));
        dispatch_float!(x.dtype(), OP, "x", T => self.forward::<T>(x, layout))
    }
}

impl Rope<'_> {
    fn forward<T: Float>(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, _, tokens, head_dim) = layout.shape().dims4()?;
        let angles = Angles::new(self.rotation, tokens)?;
        let x = elements::<T>(x, layout)?;
        let mut out = vec![T::from_f32(0.); x.len()];
        pool::for_rows(&mut out, head_dim.max(1), 16 * GRAIN, |first, rows| {
            for (i, out) in rows.chunks_exact_mut(head_dim).enumerate() {
                let (cos, sin) = angles.at((first + i) % tokens);
                let row = &x[(first + i) * head_dim..][..head_dim];
                core::rotate(self.rotation.style, row, cos, sin, out);
            }
        });
        Ok((T::to_cpu_storage_owned(out), layout.shape().clone()))
    }
}

/// The queries of a fused projection: `[B, T, Hq, D]`.
struct Queries<'a> {
    append: &'a RopeAppend<'a>,
    angles: &'a Angles,
    head_dim: usize,
}

impl CustomOp1 for Queries<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let cached = self.append.kv_heads;
        trace::record(OP, || {
            format!("cpu {} +append of {cached} heads", qkv.dtype().as_str())
        });
        dispatch_float!(qkv.dtype(), OP, "qkv", T => self.forward::<T>(qkv, layout))
    }
}

impl Queries<'_> {
    fn forward<T: Float>(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (batch, tokens, width) = layout.shape().dims3()?;
        let (heads, head_dim) = (self.append.heads, self.head_dim);
        let rotation = &self.append.rotation;
        let angles = self.angles;
        let qkv = elements::<T>(qkv, layout)?;
        let mut out = vec![T::from_f32(0.); batch * tokens * heads * head_dim];
        pool::for_rows(&mut out, (heads * head_dim).max(1), GRAIN, |first, rows| {
            for (i, out) in rows.chunks_exact_mut(heads * head_dim).enumerate() {
                let (cos, sin) = angles.at((first + i) % tokens);
                let row = &qkv[(first + i) * width..][..heads * head_dim];
                for (x, y) in row
                    .chunks_exact(head_dim)
                    .zip(out.chunks_exact_mut(head_dim))
                {
                    core::rotate(rotation.style, x, cos, sin, y);
                }
            }
        });
        let shape = Shape::from((batch, tokens, heads, head_dim));
        Ok((T::to_cpu_storage_owned(out), shape))
    }
}

/// Writes the keys (rotated) or values of a fused projection into their cache.
struct Append<'a> {
    /// The first column of the projection.
    first: usize,
    /// Whether they are rotated.
    rotated: bool,
    append: &'a RopeAppend<'a>,
    angles: &'a Angles,
    head_dim: usize,
}

impl InplaceOp2 for Append<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        cache: &mut CpuStorage,
        cache_layout: &Layout,
        qkv: &CpuStorage,
        layout: &Layout,
    ) -> Result<()> {
        dispatch_float!(qkv.dtype(), OP, "qkv", T => {
            let qkv = elements::<T>(qkv, layout)?;
            let dims = layout.shape().dims3()?;
            match cache {
                CpuStorage::F32(cache) => self.write(cache, cache_layout, &qkv, dims),
                CpuStorage::F16(cache) => self.write(cache, cache_layout, &qkv, dims),
                CpuStorage::BF16(cache) => self.write(cache, cache_layout, &qkv, dims),
                other => bail!("{OP}: the cache is {:?}, expected f32, f16 or bf16", other.dtype()),
            }
        })
    }
}

impl Append<'_> {
    fn write<T: Float, C: Float>(
        &self,
        cache: &mut [C],
        layout: &Layout,
        qkv: &[T],
        (_, tokens, width): (usize, usize, usize),
    ) -> Result<()> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("{OP}: the cache is not contiguous");
        };
        let (heads, head_dim) = (self.append.kv_heads, self.head_dim);
        let slots = layout.dims()[2];
        // One plane of the cache for each sequence and head; a single token is too little to share.
        let grain = if tokens < GRAIN { usize::MAX / 2 } else { 1 };
        pool::for_rows(
            &mut cache[start..end],
            (slots * head_dim).max(1),
            grain,
            |first, planes| {
                for (i, plane) in planes.chunks_exact_mut(slots * head_dim).enumerate() {
                    let (b, h) = ((first + i) / heads, (first + i) % heads);
                    let written = &mut plane[self.append.slot * head_dim..];
                    for (t, out) in written.chunks_exact_mut(head_dim).take(tokens).enumerate() {
                        let column = (b * tokens + t) * width + self.first + h * head_dim;
                        let x = &qkv[column..column + head_dim];
                        if self.rotated {
                            let (cos, sin) = self.angles.at(t);
                            core::rotate(self.append.rotation.style, x, cos, sin, out);
                        } else {
                            core::copy(x, out);
                        }
                    }
                }
            },
        );
        Ok(())
    }
}

/// The plain form of [`rope`]: float64, one element at a time, in x's row-major order.
///
/// # Errors
/// If a tensor cannot be read as float64, or x does not have four dimensions.
pub fn reference(x: &Tensor, rotation: &Rotation<'_>) -> Result<Vec<f64>> {
    let flat = |t: &Tensor| t.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let (_, _, tokens, head_dim) = four("x", x)?;
    check_tables(rotation, tokens, head_dim, x)?;
    let (values, cos, sin) = (flat(x)?, flat(rotation.cos)?, flat(rotation.sin)?);
    let pairs = rotation.cos.dim(1)?;
    let mut out = values.clone();
    for row in 0..values.len() / head_dim.max(1) {
        let position = rotation.position + row % tokens;
        for i in 0..pairs {
            let (first, second) = match rotation.style {
                RopeStyle::HalfSplit => (i, i + pairs),
                RopeStyle::Interleaved => (2 * i, 2 * i + 1),
            };
            let (first, second) = (row * head_dim + first, row * head_dim + second);
            let (c, s) = (cos[position * pairs + i], sin[position * pairs + i]);
            out[first] = values[first] * c - values[second] * s;
            out[second] = values[second] * c + values[first] * s;
        }
    }
    Ok(out)
}
