//! The CPU side of the op.

use super::attention::{Attention, dimensions};
use crate::cpu::attention::{AnyView, Output, Rule, Sequences, Sizes, View, attend};
use crate::cpu::vector::Element;
use crate::ops::view::dispatch_float;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Storage, WithDType, bail};

fn view<'a, T: WithDType>(
    op: &str,
    storage: &'a CpuStorage,
    layout: &Layout,
    name: &str,
) -> Result<View<'a, T>> {
    let (dims, strides) = dimensions(op, layout, name)?;
    match View::new(
        storage.as_slice::<T>()?,
        layout.start_offset(),
        dims,
        strides,
    ) {
        Some(view) => Ok(view),
        None => bail!("{op}: the layout of {name} reaches past its storage"),
    }
}

fn any_view<'a>(
    op: &str,
    storage: &'a CpuStorage,
    layout: &Layout,
    name: &str,
) -> Result<AnyView<'a>> {
    Ok(match storage {
        CpuStorage::F32(_) => AnyView::F32(view(op, storage, layout, name)?),
        CpuStorage::F16(_) => AnyView::F16(view(op, storage, layout, name)?),
        CpuStorage::BF16(_) => AnyView::Bf16(view(op, storage, layout, name)?),
        other => bail!(
            "{op}: {name} is {:?}, expected f32, f16 or bf16",
            other.dtype()
        ),
    })
}

/// An operand whose layout has the dimensions batch, heads, tokens, dim.
type Operand<'a> = (&'a CpuStorage, &'a Layout);

fn sizes(op: &str, q: Operand, k: Operand) -> Result<Sizes> {
    let ([batch, heads, queries, dim], _) = dimensions(op, q.1, "q")?;
    let ([_, kv_heads, keys, _], _) = dimensions(op, k.1, "k")?;
    Ok(Sizes {
        batch,
        heads,
        kv_heads,
        queries,
        keys,
        dim,
    })
}

/// Queries, keys and values of these sizes, whose result begins with element `first` of the output.
fn sequences<'a, T: WithDType>(
    op: &str,
    sizes: Sizes,
    [q, k, v]: [Operand<'a>; 3],
    first: usize,
) -> Result<Sequences<'a, T>> {
    Ok(Sequences {
        sizes,
        q: any_view(op, q.0, q.1, "q")?,
        k: view(op, k.0, k.1, "k")?,
        v: view(op, v.0, v.1, "v")?,
        first,
    })
}

/// Attention of all sequences, `[B, Tq, Hq, D]` or `[total_q, Hq, D]`.
pub(super) fn forward(op: &Attention, q: Operand, k: Operand, v: Operand) -> Result<CpuStorage> {
    let sizes = sizes(op.name(), q, k)?;
    let ranges = match &op.ragged {
        Some(ragged) => Some(ragged.ranges(op.name(), sizes.queries, sizes.keys)?),
        None => None,
    };
    crate::trace::record(op.traced(), || {
        let step = match &ranges {
            Some(ranges) => format!("{} sequences", ranges.len()),
            None if sizes.few_rows() => "decode".to_owned(),
            None => "prefill".to_owned(),
        };
        let (q, kv) = (q.0.dtype().as_str(), k.0.dtype().as_str());
        format!("cpu {} {step} q {q} kv {kv}", op.level.name())
    });
    dispatch_float!(k.0.dtype(), op.name(), "k", T => {
        let whole = sequences::<T>(op.name(), sizes, [q, k, v], 0)?;
        let Some(ranges) = ranges else {
            return of_each(op, &[whole], &whole, false);
        };
        let sequences: Vec<_> = ranges.iter().map(|range| Sequences {
            sizes: Sizes { queries: range.queries, keys: range.keys, ..sizes },
            q: whole.q.behind(range.first_query),
            k: whole.k.behind(range.first_key),
            v: whole.v.behind(range.first_key),
            first: range.first_query * sizes.heads * sizes.dim,
        }).collect();
        of_each(op, &sequences, &whole, true)
    })
}

/// Attention of each sequence over keys and values of its own, in one pass: queries, keys and values of sequence s,
/// `[1, H, T, D]`, are `operands[s]`. The outputs of `[S, Tq, Hq, D]` one behind the other.
pub(super) fn forward_each(op: &Attention, operands: &[[Operand; 3]]) -> Result<CpuStorage> {
    let name = op.name();
    let Some([first_q, first_k, _]) = operands.first() else {
        bail!("{name}: there are no sequences");
    };
    let one = sizes(name, *first_q, *first_k)?;
    let alike = |s: &Sizes| [s.batch, s.heads, s.queries, s.dim];
    let values: usize = alike(&one).iter().product();
    dispatch_float!(first_k.0.dtype(), name, "k", T => {
        let all = operands.iter().enumerate().map(|(i, operands)| {
            let [q, k, _] = *operands;
            let own = sizes(name, q, k)?;
            if alike(&own) != alike(&one) {
                bail!("{name}: sequences differ in queries or heads");
            }
            sequences::<T>(name, own, *operands, i * values)
        });
        let all = all.collect::<Result<Vec<_>>>()?;
        let batch = all.len() * one.batch;
        let whole = Sequences { sizes: Sizes { batch, ..one }, ..all[0] };
        of_each(op, &all, &whole, false)
    })
}

/// The sequences of what there is, whose rows may have gaps between them, which become zeros.
fn of_each<T: Element>(
    op: &Attention,
    sequences: &[Sequences<'_, T>],
    whole: &Sequences<'_, T>,
    gaps: bool,
) -> Result<CpuStorage> {
    let mask = op.mask.as_ref().map(|m| m.storage_and_layout());
    let mask = match &mask {
        None => None,
        Some((storage, layout)) => match &**storage {
            Storage::Cpu(storage) => Some(view::<f32>(op.name(), storage, layout, "mask")?),
            _ => bail!("{}: mask is not on the CPU", op.name()),
        },
    };
    let slopes = match &op.slopes {
        Some(slopes) => Some(slopes.to_vec1::<f32>()?),
        None => None,
    };
    let rule = Rule {
        scale: op.params.scale,
        right: op.params.right(),
        window: op.params.window,
        softcap: op.params.softcap,
        mask,
        slopes: slopes.as_deref(),
    };
    let sizes = &whole.sizes;
    let len = sizes.batch * sizes.queries * sizes.heads * sizes.dim;
    macro_rules! into {
        ($variant:ident, $output:ident) => {{
            let mut out = Vec::with_capacity(len);
            let room = &mut out.spare_capacity_mut()[..len];
            if gaps {
                room.iter_mut().for_each(|value| {
                    value.write(Default::default());
                });
            }
            attend(op.level, rule, sequences, Output::$output(room));
            // SAFETY: `attend` has written every element, or zeros were there before.
            unsafe { out.set_len(len) }
            CpuStorage::$variant(out)
        }};
    }
    Ok(match whole.q {
        AnyView::F32(_) => into!(F32, F32),
        AnyView::F16(_) => into!(F16, F16),
        AnyView::Bf16(_) => into!(BF16, Bf16),
    })
}
