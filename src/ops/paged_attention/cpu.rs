//! The CPU form: keys and values go through the core of `flash_attention` where they lie, page by page, all sequences
//! at once.

use super::Op;
use crate::cpu::attention::{AnyView, Output, Pages, Rule, Sequences, Sizes, View, attend};
use crate::cpu::simd;
use crate::ops::pages::check_page;
use crate::ops::view::{Float, cpu_storage, dispatch_float};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};
use std::ops::Range;

pub(super) fn forward(op: &Op<'_>, q: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
    trace::record(op.name, || {
        let (q, kv) = (q.dtype().as_str(), op.pages.dtype().as_str());
        let (sequences, level) = (op.sequences, simd::level().name());
        format!("cpu {level} {sequences} sequences q {q} kv {kv}")
    });
    let out =
        dispatch_float!(op.pages.dtype(), op.name, "pool.k", T => of_pool::<T>(op, q, layout))?;
    Ok((out, layout.shape().clone()))
}

/// What a sequence's queries see.
struct Seen {
    /// Its rows of q.
    rows: Range<usize>,
    /// Its tokens.
    tokens: Range<usize>,
    /// The pages that have them.
    pages: Vec<u32>,
}

/// Of each sequence that has queries.
fn seen(op: &Op<'_>, rows: Vec<Range<usize>>) -> Result<Vec<Seen>> {
    let table = op.table.rows(op.name)?;
    let lengths = op.table.lengths(op.name, op.pool.page, &table)?;
    let (mut all, page) = (Vec::with_capacity(rows.len()), op.pool.page);
    for (b, ((rows, entries), length)) in rows.into_iter().zip(table).zip(lengths).enumerate() {
        if rows.is_empty() {
            continue;
        }
        let tokens = op.first_key(length, rows.len()).min(length)..length;
        let (first, end) = (tokens.start / page, length.div_ceil(page));
        let pages = entries[first.min(end)..end].to_vec();
        for (at, id) in pages.iter().enumerate() {
            check_page(op.name, *id, op.pool.pages, [b, first + at])?;
        }
        all.push(Seen {
            rows,
            tokens,
            pages,
        });
    }
    Ok(all)
}

/// The keys or values that a sequence's queries see, `[1, Hkv, tokens, D]`.
fn paged<'a, T: Float>(
    op: &Op<'_>,
    (data, layout): (&'a [T], &Layout),
    strides: [usize; 3],
    seen: &'a Seen,
) -> Result<View<'a, T>> {
    let [of_page, of_token, of_head] = strides;
    let pages = Pages {
        table: &seen.pages,
        page: op.pool.page,
        stride: of_page,
        skip: seen.tokens.start % op.pool.page,
    };
    let dims = [1, op.pool.kv_heads, seen.tokens.len(), op.pool.dim];
    let strides = [0, of_head, of_token, 1];
    let view = View::paged(data, layout.start_offset(), dims, strides, pages);
    inside(op, view)
}

fn of_pool<T: Float>(op: &Op<'_>, q: &CpuStorage, layout: &Layout) -> Result<CpuStorage> {
    let len = layout.shape().elem_count();
    let width = op.heads * op.pool.dim;
    let seen = seen(op, op.rows(len / width.max(1))?)?;
    let (k, k_layout) = op.pages.k.storage_and_layout();
    let (v, v_layout) = op.pages.v.storage_and_layout();
    let k = (cpu_storage(&k)?.as_slice::<T>()?, k_layout);
    let v = (cpu_storage(&v)?.as_slice::<T>()?, v_layout);
    let of_sequences = seen.iter().map(|seen| {
        let sizes = Sizes {
            batch: 1,
            heads: op.heads,
            kv_heads: op.pool.kv_heads,
            queries: seen.rows.len(),
            keys: seen.tokens.len(),
            dim: op.pool.dim,
        };
        Ok(Sequences {
            sizes,
            q: queries(op, q, layout, &seen.rows)?,
            k: paged(op, k, op.pages.strides(&op.pages.k), seen)?,
            v: paged(op, v, op.pages.strides(&op.pages.v), seen)?,
            first: seen.rows.start * width,
        })
    });
    let sequences = of_sequences.collect::<Result<Vec<_>>>()?;
    let slopes = op.slopes.as_ref().map(Tensor::to_vec1::<f32>).transpose()?;
    let rule = Rule {
        scale: op.params.scale,
        right: Some(0),
        window: op.params.window,
        softcap: op.params.softcap,
        mask: None,
        slopes: slopes.as_deref(),
    };
    macro_rules! into {
        ($variant:ident, $output:ident) => {{
            let mut out = Vec::with_capacity(len);
            let room = &mut out.spare_capacity_mut()[..len];
            room.iter_mut().for_each(|value| {
                value.write(Default::default());
            });
            attend(simd::level(), rule, &sequences, Output::$output(room));
            // SAFETY: zeros have been written everywhere.
            unsafe { out.set_len(len) }
            CpuStorage::$variant(out)
        }};
    }
    Ok(match q {
        CpuStorage::F32(_) => into!(F32, F32),
        CpuStorage::F16(_) => into!(F16, F16),
        _ => into!(BF16, Bf16),
    })
}

/// The queries in rows `own`.
fn queries<'a>(
    op: &Op<'_>,
    q: &'a CpuStorage,
    layout: &Layout,
    own: &Range<usize>,
) -> Result<AnyView<'a>> {
    let (start, of_query, of_head, of_element) = match *layout.stride() {
        [sequence, query, head, element] => {
            let b = own.start / op.queries;
            (b * sequence, query, head, element)
        }
        [query, head, element] => (own.start * query, query, head, element),
        _ => bail!("{}: q has strides {:?}", op.name, layout.stride()),
    };
    let start = layout.start_offset() + start;
    let dims = [1, op.heads, own.len(), op.pool.dim];
    let strides = [0, of_head, of_query, of_element];
    Ok(match q {
        CpuStorage::F32(q) => AnyView::F32(inside(op, View::new(q, start, dims, strides))?),
        CpuStorage::F16(q) => AnyView::F16(inside(op, View::new(q, start, dims, strides))?),
        CpuStorage::BF16(q) => AnyView::Bf16(inside(op, View::new(q, start, dims, strides))?),
        other => {
            let dtype = other.dtype();
            bail!("{}: q is {dtype:?}, expected f32, f16 or bf16", op.name)
        }
    })
}

fn inside<T>(op: &Op<'_>, view: Option<T>) -> Result<T> {
    match view {
        Some(view) => Ok(view),
        None => bail!("{}: a layout reaches past its storage", op.name),
    }
}
