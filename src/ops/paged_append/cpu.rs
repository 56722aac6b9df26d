//! The CPU form: where each token goes is looked up once, then keys, values and queries are written one after the
//! other.

use super::{OP, PagedAppend};
use crate::cpu::{pool, rope as core};
use crate::ops::pages::{PagePool, PageTable, PoolSizes, check_page, scale_strides};
use crate::ops::rope::cpu::{Angles, HeadNorm, normalise};
use crate::ops::view::{Float, cpu_storage, dispatch_float, elements, gathered};
use crate::ops::{HeadNorms, RopeStyle};
use crate::quant::KvFormat;
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp1, InplaceOp1, InplaceOp2, Layout, Result, Shape, Tensor, WithDType, bail,
};

/// Tokens that are worth a task of their own.
const GRAIN: usize = 16;

/// [`super::paged_append`] after its checks.
pub(super) fn append(
    qkv: &Tensor,
    pool: &PagePool,
    sizes: PoolSizes,
    table: &PageTable,
    append: &PagedAppend<'_>,
) -> Result<Tensor> {
    let places = places(qkv.dims()[0], sizes, table, append)?;
    // Read before the pools are locked for writing, in case they share a storage with them.
    let angles = angles(append, &places)?;
    let (q_norm, k_norm) = match append.norms {
        Some(HeadNorms { q, k, eps }) => {
            (Some(HeadNorm::new(q, eps)?), Some(HeadNorm::new(k, eps)?))
        }
        None => (None, None),
    };
    let rows = |first, heads, rotated, norm| Rows {
        first,
        heads,
        dim: sizes.dim,
        rotated: if rotated { angles.as_ref() } else { None },
        norm,
        places: &places,
    };
    let key = append.heads;
    let scales = pool.scales.as_ref();
    for (t, scales, first, rotated) in [
        (&pool.k, scales.map(|s| (&s.k, s.format)), key, true),
        (
            &pool.v,
            scales.map(|s| (&s.v, s.format)),
            key + sizes.kv_heads,
            false,
        ),
    ] {
        let norm = if rotated { k_norm.as_ref() } else { None };
        let rows = rows(first, sizes.kv_heads, rotated, norm);
        let strides = pool.strides(t);
        match scales {
            Some((scales, format)) => quantize(&rows, qkv, format, (t, strides), scales)?,
            None => t.inplace_op2(qkv, &Write { rows, strides })?,
        }
    }
    qkv.apply_op1_no_bwd(&Queries(rows(0, append.heads, true, q_norm.as_ref())))
}

/// Where a token goes.
#[derive(Clone, Copy)]
struct Place {
    page: usize,
    slot: usize,
    position: usize,
}

/// Of each token; none for what is no token.
fn places(
    rows: usize,
    sizes: PoolSizes,
    table: &PageTable,
    append: &PagedAppend<'_>,
) -> Result<Vec<Option<Place>>> {
    let (entries, owners) = (table.rows(OP)?, append.owners(rows)?);
    let positions = append.positions.to_vec1::<u32>()?;
    let limit = append.rotation.map(|r| r.cos.dims()[0]);
    let place = |(n, (owner, position)): (usize, (Option<usize>, u32))| {
        let Some(b) = owner else { return Ok(None) };
        let (position, Some(row)) = (position as usize, entries.get(b)) else {
            bail!(
                "{OP}: tokens[{n}] is {b}, the table has {} sequences",
                entries.len()
            );
        };
        if let Some(limit) = limit.filter(|limit| position >= *limit) {
            bail!("{OP}: positions[{n}] is {position}, rotation.cos has {limit} positions");
        }
        let at = position / sizes.page;
        let Some(id) = row.get(at) else {
            bail!(
                "{OP}: positions[{n}] is {position}, sequence {b} has {} pages of {} tokens",
                row.len(),
                sizes.page
            );
        };
        Ok(Some(Place {
            page: check_page(OP, *id, sizes.pages, [b, at])?,
            slot: position % sizes.page,
            position,
        }))
    };
    owners
        .into_iter()
        .zip(positions)
        .enumerate()
        .map(place)
        .collect()
}

/// The angles of each token, if there are tokens and they are rotated; any for what is no token.
fn angles(append: &PagedAppend<'_>, places: &[Option<Place>]) -> Result<Option<Rotated>> {
    let (Some(tables), Some(any)) = (append.rotation, places.iter().flatten().next()) else {
        return Ok(None);
    };
    let positions = places
        .iter()
        .map(|place| place.unwrap_or(*any).position as u32);
    Ok(Some(Rotated {
        angles: Angles::of(&tables, positions.collect())?,
        style: tables.style,
    }))
}

/// By which angles tokens are rotated, and how.
struct Rotated {
    angles: Angles,
    style: RopeStyle,
}

/// Heads of the projection, side by side, and what becomes of them.
struct Rows<'a> {
    /// The first head.
    first: usize,
    heads: usize,
    dim: usize,
    /// None if they are not rotated.
    rotated: Option<&'a Rotated>,
    norm: Option<&'a HeadNorm>,
    places: &'a [Option<Place>],
}

impl Rows<'_> {
    /// The heads of all tokens, `[N, heads, D]`; zeros for what is no token.
    fn computed<T: Float, O: Float>(&self, qkv: &[T], width: usize) -> Vec<O> {
        let (dim, own) = (self.dim, self.heads * self.dim);
        let norm = self.norm.map(HeadNorm::weight::<T>);
        let mut out = vec![O::from_f32(0.); self.places.len() * own];
        pool::for_rows(&mut out, own.max(1), GRAIN, |first, rows| {
            let mut normed = vec![T::from_f32(0.); dim];
            for (i, row) in rows.chunks_exact_mut(own).enumerate() {
                let n = first + i;
                if self.places[n].is_none() {
                    continue;
                }
                let from = &qkv[n * width + self.first * dim..][..own];
                for (x, y) in from.chunks_exact(dim).zip(row.chunks_exact_mut(dim)) {
                    let x = normalise(norm.as_ref(), x, &mut normed);
                    let Some(rotated) = self.rotated else {
                        core::copy(x, y);
                        continue;
                    };
                    let (cos, sin) = rotated.angles.at(n);
                    core::rotate(rotated.style, x, cos, sin, y);
                }
            }
        });
        out
    }
}

/// Writes keys or values into their pages as codes, and their scales.
fn quantize(
    rows: &Rows<'_>,
    qkv: &Tensor,
    format: KvFormat,
    (codes, strides): (&Tensor, [usize; 3]),
    scales: &Tensor,
) -> Result<()> {
    let (heads, dim) = (rows.heads, rows.dim);
    let numbers: Vec<f32> = {
        let (storage, layout) = qkv.storage_and_layout();
        let storage = cpu_storage(&storage)?;
        let width = layout.dims()[1];
        dispatch_float!(storage.dtype(), OP, "qkv", T => {
            rows.computed(&elements::<T>(storage, layout)?, width)
        })
    };
    let mut own = vec![0; numbers.len()];
    let of_rows = numbers.chunks_exact(dim).zip(own.chunks_exact_mut(dim));
    let own_scales: Vec<f32> = of_rows
        .map(|(row, codes)| format.quantize(row, codes))
        .collect();
    let places = rows.places;
    codes.inplace_op1(&Scatter {
        rows: &own[..],
        size: [heads, dim],
        strides,
        places,
    })?;
    scales.inplace_op1(&Scatter {
        rows: &own_scales[..],
        size: [heads, 1],
        strides: scale_strides(scales),
        places,
    })
}

/// Rows of all tokens to be written into pages.
struct Scatter<'a, C> {
    rows: &'a [C],
    /// Heads of a token, and elements of a head.
    size: [usize; 2],
    /// Of the pool: from page to page, token to token, head to head.
    strides: [usize; 3],
    places: &'a [Option<Place>],
}

impl<C: Copy> Scatter<'_, C> {
    fn write(&self, pool: &mut [C]) {
        let ([heads, dim], [of_page, of_token, of_head]) = (self.size, self.strides);
        for (place, row) in self.places.iter().zip(self.rows.chunks_exact(heads * dim)) {
            let Some(place) = place else { continue };
            let token = place.page * of_page + place.slot * of_token;
            for (head, row) in row.chunks_exact(dim).enumerate() {
                pool[token + head * of_head..][..dim].copy_from_slice(row);
            }
        }
    }
}

macro_rules! scatter {
    ($t:ty, $variant:ident) => {
        impl InplaceOp1 for Scatter<'_, $t> {
            fn name(&self) -> &'static str {
                OP
            }

            fn cpu_fwd(&self, pool: &mut CpuStorage, layout: &Layout) -> Result<()> {
                let CpuStorage::$variant(pool) = pool else {
                    let (got, expected) = (pool.dtype(), stringify!($variant));
                    bail!("{OP}: the pool holds {got:?}, expected {expected}");
                };
                self.write(&mut pool[layout.start_offset()..]);
                Ok(())
            }
        }
    };
}
scatter!(u8, U8);
scatter!(f32, F32);

/// Writes keys or values into their pages.
struct Write<'a> {
    rows: Rows<'a>,
    /// Of the pool: from page to page, token to token, head to head.
    strides: [usize; 3],
}

impl InplaceOp2 for Write<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        pool: &mut CpuStorage,
        pool_layout: &Layout,
        qkv: &CpuStorage,
        layout: &Layout,
    ) -> Result<()> {
        let start = pool_layout.start_offset();
        dispatch_float!(qkv.dtype(), OP, "qkv", T => {
            let qkv = elements::<T>(qkv, layout)?;
            let width = layout.dims()[1];
            match pool {
                CpuStorage::F32(pool) => self.write(&mut pool[start..], &self.rows.computed(&qkv, width)),
                CpuStorage::F16(pool) => self.write(&mut pool[start..], &self.rows.computed(&qkv, width)),
                CpuStorage::BF16(pool) => self.write(&mut pool[start..], &self.rows.computed(&qkv, width)),
                other => bail!("{OP}: pool.k is {:?}, expected f32, f16 or bf16", other.dtype()),
            }
        });
        Ok(())
    }
}

impl Write<'_> {
    fn write<C: Float>(&self, pool: &mut [C], rows: &[C]) {
        let scatter = Scatter {
            rows,
            size: [self.rows.heads, self.rows.dim],
            strides: self.strides,
            places: self.rows.places,
        };
        scatter.write(pool);
    }
}

/// The queries, `[N, Hq, D]`.
struct Queries<'a>(Rows<'a>);

impl CustomOp1 for Queries<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, qkv: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let rows = &self.0;
        trace::record(OP, || {
            let norm = if rows.norm.is_some() { " +norm" } else { "" };
            let rope = if rows.rotated.is_some() { " +rope" } else { "" };
            let (dtype, gathered) = (qkv.dtype().as_str(), gathered(layout));
            format!("cpu scalar {dtype}{norm}{rope}{gathered}")
        });
        let (tokens, width) = layout.shape().dims2()?;
        let shape = Shape::from((tokens, rows.heads, rows.dim));
        dispatch_float!(qkv.dtype(), OP, "qkv", T => {
            let qkv = elements::<T>(qkv, layout)?;
            let out: Vec<T> = rows.computed(&qkv, width);
            Ok((T::to_cpu_storage_owned(out), shape))
        })
    }
}
