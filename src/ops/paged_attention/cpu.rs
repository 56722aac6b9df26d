//! The CPU form: the keys and values that are seen are gathered from their pages, and go through the core of
//! `flash_attention`, all sequences at once.

use super::Op;
use crate::cpu::attention::{AnyView, Output, Rule, Sequences, Sizes, View, attend};
use crate::cpu::{pool, simd};
use crate::ops::pages::check_page;
use crate::ops::view::{Float, cpu_storage, dispatch_float};
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};
use std::ops::Range;

/// Tokens that are worth a task of their own while they are gathered.
const GRAIN: usize = 64;

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

/// The tokens that are seen, sequence by sequence.
struct Seen {
    /// Page and slot of each.
    tokens: Vec<[usize; 2]>,
    /// Those of each sequence among them.
    ranges: Vec<Range<usize>>,
    /// Rows of q that each sequence has.
    rows: Vec<Range<usize>>,
}

impl Seen {
    fn new(op: &Op<'_>, rows: Vec<Range<usize>>) -> Result<Self> {
        let table = op.table.rows(op.name)?;
        let lengths = op.table.lengths(op.name, op.pool.page, &table)?;
        let (mut tokens, mut ranges) = (Vec::new(), Vec::new());
        for (b, (row, length)) in table.iter().zip(lengths).enumerate() {
            let start = tokens.len();
            let first = match rows[b].len() {
                0 => length,
                queries => op.first_key(length, queries),
            };
            for token in first..length {
                let at = token / op.pool.page;
                let id = check_page(op.name, row[at], op.pool.pages, [b, at])?;
                tokens.push([id, token % op.pool.page]);
            }
            ranges.push(start..tokens.len());
        }
        Ok(Self {
            tokens,
            ranges,
            rows,
        })
    }

    /// Their keys or values, `[tokens, Hkv, D]`.
    fn gather<T: Float>(&self, op: &Op<'_>, from: &Tensor) -> Result<Vec<T>> {
        let (storage, layout) = from.storage_and_layout();
        let data = cpu_storage(&storage)?.as_slice::<T>()?;
        let [of_page, of_token, of_head] = op.pages.strides(from);
        let (dim, width) = (op.pool.dim, op.pool.kv_heads * op.pool.dim);
        let mut out = vec![T::from_f32(0.); self.tokens.len() * width];
        pool::for_rows(&mut out, width, GRAIN, |first, rows| {
            for (i, row) in rows.chunks_exact_mut(width).enumerate() {
                let [page, slot] = self.tokens[first + i];
                let token = layout.start_offset() + page * of_page + slot * of_token;
                for (head, row) in row.chunks_exact_mut(dim).enumerate() {
                    row.copy_from_slice(&data[token + head * of_head..][..dim]);
                }
            }
        });
        Ok(out)
    }
}

fn of_pool<T: Float>(op: &Op<'_>, q: &CpuStorage, layout: &Layout) -> Result<CpuStorage> {
    let len = layout.shape().elem_count();
    let width = op.heads * op.pool.dim;
    let seen = Seen::new(op, op.rows(len / width.max(1))?)?;
    let (k, v) = (
        seen.gather::<T>(op, &op.pages.k)?,
        seen.gather::<T>(op, &op.pages.v)?,
    );
    let (dim, kv_heads, heads) = (op.pool.dim, op.pool.kv_heads, op.heads);
    let of_sequence = |(own, range): (&Range<usize>, &Range<usize>)| {
        let sizes = Sizes {
            batch: 1,
            heads,
            kv_heads,
            queries: own.len(),
            keys: range.len(),
            dim,
        };
        let rows = |data| {
            let strides = [0, dim, kv_heads * dim, 1];
            let start = range.start * kv_heads * dim;
            let dims = [1, kv_heads, range.len(), dim];
            inside(op, View::new(data, start, dims, strides))
        };
        Ok(Sequences {
            sizes,
            q: queries(op, q, layout, own)?,
            k: rows(&k)?,
            v: rows(&v)?,
            first: own.start * width,
        })
    };
    let all = seen.rows.iter().zip(&seen.ranges);
    let asked = all.filter(|(own, _)| !own.is_empty());
    let sequences = asked.map(of_sequence).collect::<Result<Vec<_>>>()?;
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
