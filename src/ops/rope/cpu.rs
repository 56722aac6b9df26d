//! The CPU form: three ops, since each writes one tensor.

use super::{APPEND, HeadNorms, OP, RopeAppend, RopeStyle, RotaryTables, Rotation};
use crate::cpu::vector::Element;
use crate::cpu::{norm, pool, rope as core, simd};
use crate::ops::view::{Float, cpu_storage, dispatch_float, elements, gathered};
use crate::trace;
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp1, InplaceOp2, Layout, Result, Shape, Tensor, WithDType, bail,
};
use std::borrow::Cow;

/// Tokens that are worth a task of their own: about 4 microseconds of work.
const GRAIN: usize = 16;

/// Tokens of a head that are written to the cache by one task.
const RUN: usize = 4 * GRAIN;

/// [`super::rope_append`] after its checks.
pub(super) fn append(
    qkv: &Tensor,
    append: &RopeAppend<'_>,
    [k_cache, v_cache]: [&Tensor; 2],
    head_dim: usize,
) -> Result<Tensor> {
    let first_key = append.heads * head_dim;
    let first_value = first_key + append.kv_heads * head_dim;
    // Read before the caches are locked for writing, in case they share a storage with them.
    let angles = Angles::new(&append.rotation, qkv.dim(1)?)?;
    let (q_norm, k_norm) = match append.norms {
        Some(HeadNorms { q, k, eps }) => {
            (Some(HeadNorm::new(q, eps)?), Some(HeadNorm::new(k, eps)?))
        }
        None => (None, None),
    };
    let write = |first, rotated| Append {
        first,
        rotated,
        append,
        angles: &angles,
        norm: k_norm.as_ref(),
        head_dim,
    };
    k_cache.inplace_op2(qkv, &write(first_key, true))?;
    v_cache.inplace_op2(qkv, &write(first_value, false))?;
    let q = Queries {
        append,
        angles: &angles,
        norm: q_norm.as_ref(),
        head_dim,
    };
    qkv.apply_op1_no_bwd(&q)?.transpose(1, 2)
}

/// All values of a tensor, widened.
pub(in crate::ops) fn widened(t: &Tensor) -> Result<Vec<f32>> {
    let (storage, layout) = t.storage_and_layout();
    let storage = cpu_storage(&storage)?;
    dispatch_float!(storage.dtype(), OP, "the input", T => {
        let values: Cow<'_, [T]> = elements(storage, layout)?;
        Ok(T::widen_slice(&values).into_owned())
    })
}

/// The RMSNorm of one kind of head.
pub(in crate::ops) struct HeadNorm {
    weight: Vec<f32>,
    eps: f32,
}

impl HeadNorm {
    pub fn new(weight: &Tensor, eps: f64) -> Result<Self> {
        Ok(Self {
            weight: widened(weight)?,
            eps: eps as f32,
        })
    }

    /// The weight as it was before it was widened.
    pub fn weight<T: Float>(&self) -> (Vec<T>, f32) {
        (
            self.weight.iter().map(|w| T::from_f32(*w)).collect(),
            self.eps,
        )
    }
}

/// The head as it is rotated: normalised into the buffer where there is a norm.
pub(in crate::ops) fn normalise<'a, T: Float>(
    norm: Option<&(Vec<T>, f32)>,
    x: &'a [T],
    buffer: &'a mut [T],
) -> &'a [T] {
    let Some((weight, eps)) = norm else { return x };
    norm::rms_norm(simd::level(), x, weight, *eps, buffer);
    buffer
}

/// The rows of the tables that are needed, `[T, R / 2]` each.
pub(in crate::ops) struct Angles {
    cos: Vec<f32>,
    sin: Vec<f32>,
    pairs: usize,
}

impl Angles {
    fn new(r: &Rotation<'_>, tokens: usize) -> Result<Self> {
        let rows = |table: &Tensor| widened(&table.narrow(0, r.position, tokens)?);
        Ok(Self {
            cos: rows(r.cos)?,
            sin: rows(r.sin)?,
            pairs: r.cos.dim(1)?,
        })
    }

    /// Of these positions, which the tables have.
    pub fn of(tables: &RotaryTables<'_>, positions: Vec<u32>) -> Result<Self> {
        let ids = Tensor::new(positions, tables.cos.device())?;
        let pairs = tables.cos.dim(1)?;
        // Candle looks behind the end of a view without elements.
        let rows = |table: &Tensor| match pairs {
            0 => Ok(Vec::new()),
            _ => widened(&table.contiguous()?.index_select(&ids, 0)?),
        };
        Ok(Self {
            cos: rows(tables.cos)?,
            sin: rows(tables.sin)?,
            pairs,
        })
    }

    /// Cosines and sines of a token.
    pub fn at(&self, token: usize) -> (&[f32], &[f32]) {
        let row = token * self.pairs..(token + 1) * self.pairs;
        (&self.cos[row.clone()], &self.sin[row])
    }
}

/// Plain rope.
pub(super) struct Rope<'a> {
    pub rotation: &'a Rotation<'a>,
}

impl CustomOp1 for Rope<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let tokens = layout.shape().dims4()?.2;
        let angles = Angles::new(self.rotation, tokens)?;
        let token = |row| row % tokens;
        rotate_rows(x, layout, self.rotation.style, &angles, token)
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        super::cuda::forward(x, layout, self.rotation)
    }
}

/// Heads `[.., D]`, each turned by the angles of its token.
pub(super) fn rotate_rows(
    x: &CpuStorage,
    layout: &Layout,
    style: RopeStyle,
    angles: &Angles,
    token: impl Fn(usize) -> usize + Sync,
) -> Result<(CpuStorage, Shape)> {
    trace::record(OP, || {
        format!("cpu scalar {}{}", x.dtype().as_str(), gathered(layout))
    });
    let head_dim = layout.dims().last().copied().unwrap_or(1);
    dispatch_float!(x.dtype(), OP, "x", T => {
        let x = elements::<T>(x, layout)?;
        let mut out = vec![T::from_f32(0.); x.len()];
        pool::for_rows(&mut out, head_dim.max(1), 16 * GRAIN, |first, rows| {
            for (i, out) in rows.chunks_exact_mut(head_dim).enumerate() {
                let (cos, sin) = angles.at(token(first + i));
                let row = &x[(first + i) * head_dim..][..head_dim];
                core::rotate(style, row, cos, sin, out);
            }
        });
        Ok((T::to_cpu_storage_owned(out), layout.shape().clone()))
    })
}

/// The queries of a fused projection: `[B, T, Hq, D]`.
struct Queries<'a> {
    append: &'a RopeAppend<'a>,
    angles: &'a Angles,
    norm: Option<&'a HeadNorm>,
    head_dim: usize,
}

impl CustomOp1 for Queries<'_> {
    fn name(&self) -> &'static str {
        APPEND
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let cached = self.append.kv_heads;
        trace::record(OP, || {
            let norm = if self.norm.is_some() { " +norm" } else { "" };
            let dtype = qkv.dtype().as_str();
            let gathered = gathered(layout);
            format!("cpu scalar {dtype}{norm} +append of {cached} heads{gathered}")
        });
        dispatch_float!(qkv.dtype(), APPEND, "qkv", T => self.forward::<T>(qkv, layout))
    }
}

impl Queries<'_> {
    fn forward<T: Float>(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (batch, tokens, width) = layout.shape().dims3()?;
        let (heads, head_dim) = (self.append.heads, self.head_dim);
        let rotation = &self.append.rotation;
        let angles = self.angles;
        let qkv = elements::<T>(qkv, layout)?;
        let norm = self.norm.map(HeadNorm::weight::<T>);
        let len = batch * tokens * heads * head_dim;
        let mut out = Vec::with_capacity(len);
        let room = &mut out.spare_capacity_mut()[..len];
        pool::for_rows(room, (heads * head_dim).max(1), GRAIN, |first, rows| {
            let mut buffers = vec![T::from_f32(0.); 2 * head_dim];
            let (normed, turned) = buffers.split_at_mut(head_dim);
            for (i, out) in rows.chunks_exact_mut(heads * head_dim).enumerate() {
                let (cos, sin) = angles.at((first + i) % tokens);
                let row = &qkv[(first + i) * width..][..heads * head_dim];
                for (x, y) in row
                    .chunks_exact(head_dim)
                    .zip(out.chunks_exact_mut(head_dim))
                {
                    let x = normalise(norm.as_ref(), x, normed);
                    core::rotate(rotation.style, x, cos, sin, turned);
                    y.write_copy_of_slice(turned);
                }
            }
        });
        // SAFETY: every row was written, and rows are whole heads.
        unsafe { out.set_len(len) };
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
    norm: Option<&'a HeadNorm>,
    head_dim: usize,
}

impl InplaceOp2 for Append<'_> {
    fn name(&self) -> &'static str {
        APPEND
    }

    fn cpu_fwd(
        &self,
        cache: &mut CpuStorage,
        cache_layout: &Layout,
        qkv: &CpuStorage,
        layout: &Layout,
    ) -> Result<()> {
        dispatch_float!(qkv.dtype(), APPEND, "qkv", T => {
            let qkv = elements::<T>(qkv, layout)?;
            let dims = layout.shape().dims3()?;
            match cache {
                CpuStorage::F32(cache) => self.write(cache, cache_layout, &qkv, dims),
                CpuStorage::F16(cache) => self.write(cache, cache_layout, &qkv, dims),
                CpuStorage::BF16(cache) => self.write(cache, cache_layout, &qkv, dims),
                other => bail!("{APPEND}: the cache is {:?}, expected f32, f16 or bf16", other.dtype()),
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
            bail!("{APPEND}: the cache is not contiguous");
        };
        let (heads, head_dim) = (self.append.kv_heads, self.head_dim);
        let slots = layout.dims()[2];
        let norm = self.norm.map(HeadNorm::weight::<T>);
        let write = |normed: &mut [T], plane: usize, first: usize, values: &mut [C]| {
            let (b, h) = (plane / heads, plane % heads);
            for (i, out) in values.chunks_exact_mut(head_dim).enumerate() {
                let t = first + i;
                let column = (b * tokens + t) * width + self.first + h * head_dim;
                let x = &qkv[column..column + head_dim];
                if self.rotated {
                    let (cos, sin) = self.angles.at(t);
                    let x = normalise(norm.as_ref(), x, normed);
                    core::rotate(self.append.rotation.style, x, cos, sin, out);
                } else {
                    core::copy(x, out);
                }
            }
        };
        // A plane of the cache for each sequence and head.
        let planes = cache[start..end].chunks_exact_mut((slots * head_dim).max(1));
        let planes =
            planes.map(|plane| &mut plane[self.append.slot * head_dim..][..tokens * head_dim]);
        if tokens < GRAIN {
            // Too little to share.
            let mut normed = vec![T::from_f32(0.); head_dim];
            planes
                .enumerate()
                .for_each(|(plane, values)| write(&mut normed, plane, 0, values));
            return Ok(());
        }
        let runs = planes.enumerate().flat_map(|(plane, values)| {
            let runs = values.chunks_mut(RUN * head_dim).enumerate();
            runs.map(move |(run, values)| (plane, run * RUN, values))
        });
        pool::for_rows(&mut runs.collect::<Vec<_>>(), 1, 1, |_, runs| {
            let mut normed = vec![T::from_f32(0.); head_dim];
            for (plane, first, values) in runs {
                write(&mut normed, *plane, *first, values);
            }
        });
        Ok(())
    }
}
