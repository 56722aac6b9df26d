//! The CPU form: keys and values go through the core of `flash_attention` where they lie, page by page, all sequences
//! at once.

use super::Op;
use crate::cpu::attention::{AnyView, Output, Pages, Rule, Scales, Sequences, Sizes, View, attend};
use crate::cpu::simd;
use crate::cpu::vector::{E4m3, Element, Int8};
use crate::ops::pages::check_page;
use crate::ops::view::{cpu_storage, dispatch_float};
use crate::quant::KvFormat;
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Storage, Tensor, bail};
use std::ops::Range;

pub(super) fn forward(op: &Op<'_>, q: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
    trace::record(op.name, || {
        let (q, kv) = (q.dtype().as_str(), op.pages.stored_name());
        let (sequences, level) = (op.sequences, simd::level().name());
        format!("cpu {level} {sequences} sequences q {q} kv {kv}")
    });
    let out = match op.pages.scales.as_ref().map(|scales| scales.format) {
        Some(KvFormat::Fp8) => of_pool(op, q, layout, |s| Ok(E4m3::of(s.as_slice()?))),
        Some(KvFormat::Int8) => of_pool(op, q, layout, |s| Ok(Int8::of(s.as_slice()?))),
        None => dispatch_float!(op.pages.k.dtype(), op.name, "pool.k", T => {
            of_pool(op, q, layout, |s| s.as_slice::<T>())
        }),
    }?;
    Ok((out, layout.shape().clone()))
}

/// What a sequence's queries see, or one of them.
struct Seen {
    /// Their rows of q.
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
        for (rows, length) in together(op, rows, length) {
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
    }
    Ok(all)
}

/// The rows of a sequence of `length` tokens that are computed together, and the tokens up to the last of them. What a row
/// is computed with decides in which order its keys are taken: with batch invariance each query is alone, as if there were
/// no tokens behind it. Ragged queries stay together, since prompts of one row at a time would take too long.
fn together(op: &Op<'_>, rows: Range<usize>, length: usize) -> Vec<(Range<usize>, usize)> {
    let each = match op.params.batch_invariant && op.ragged.is_none() {
        true => 1,
        false => rows.len().max(1),
    };
    let end = rows.end;
    let upto = |last: usize| (length + last).saturating_sub(end);
    let parts = rows.step_by(each);
    parts.map(|i| (i..i + each, upto(i + each))).collect()
}

/// The keys or values that a sequence's queries see, `[1, Hkv, tokens, D]`.
fn paged<'a, T: Element>(
    op: &Op<'_>,
    (data, layout): (&'a [T], &Layout),
    strides: [usize; 3],
    scales: Option<Scales<'a>>,
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
    inside(
        op,
        match scales {
            Some(scales) => view.and_then(|view| view.scaled(scales, op.pool.kv_heads)),
            None => view,
        },
    )
}

/// The factors of keys or values that are codes.
fn factors<'a>(storage: &'a Storage, layout: &Layout) -> Result<Scales<'a>> {
    let stride = layout.stride();
    Ok(Scales {
        data: cpu_storage(storage)?.as_slice::<f32>()?,
        offset: layout.start_offset(),
        strides: [stride[0], stride[1]],
    })
}

/// `elements`: the pool's storage as what it holds.
fn of_pool<T: Element>(
    op: &Op<'_>,
    q: &CpuStorage,
    layout: &Layout,
    elements: impl Fn(&CpuStorage) -> Result<&[T]>,
) -> Result<CpuStorage> {
    let len = layout.shape().elem_count();
    let width = op.heads * op.pool.dim;
    let seen = seen(op, op.rows(len / width.max(1))?)?;
    let (k, k_layout) = op.pages.k.storage_and_layout();
    let (v, v_layout) = op.pages.v.storage_and_layout();
    let k = (elements(cpu_storage(&k)?)?, k_layout);
    let v = (elements(cpu_storage(&v)?)?, v_layout);
    let scales = op.pages.scales.as_ref();
    let held = scales.map(|s| [s.k.storage_and_layout(), s.v.storage_and_layout()]);
    let scales = match &held {
        Some([k, v]) => [Some(factors(&k.0, k.1)?), Some(factors(&v.0, v.1)?)],
        None => [None; 2],
    };
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
            k: paged(op, k, op.pages.strides(&op.pages.k), scales[0], seen)?,
            v: paged(op, v, op.pages.strides(&op.pages.v), scales[1], seen)?,
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
            let (b, t) = (own.start / op.queries, own.start % op.queries);
            (b * sequence + t * query, query, head, element)
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
