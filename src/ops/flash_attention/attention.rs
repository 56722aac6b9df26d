//! What is attended to, by whom and how: the op with everything that has been checked.

use super::AttentionParams;
use super::check::{Facts, Form, check_mask};
use super::ragged::{Lengths, RaggedBatch};
use crate::cpu::simd::Level;
use candle_core::{DType, Device, Layout, Result, Shape, Tensor, bail};

/// The op, with what its [`Form::check`] has been told of queries, keys and values.
pub(crate) struct Attention {
    pub form: Form,
    pub params: AttentionParams,
    /// In f32, broadcast to `[B, Hq, Tq, Tk]`.
    pub mask: Option<Tensor>,
    /// In f32, contiguous.
    pub slopes: Option<Tensor>,
    pub ragged: Option<Lengths>,
    pub level: Level,
}

/// Dimensions and strides of a layout of batch, heads, tokens, dim.
pub(super) fn dimensions(
    op: &str,
    layout: &Layout,
    name: &str,
) -> Result<([usize; 4], [usize; 4])> {
    let dims = <[usize; 4]>::try_from(layout.dims());
    let strides = <[usize; 4]>::try_from(layout.stride());
    match (dims, strides) {
        (Ok(dims), Ok(strides)) => Ok((dims, strides)),
        _ => bail!(
            "{op}: {name} is {:?}, expected four dimensions",
            layout.dims()
        ),
    }
}

/// The strides of a head, a token and an element of `[batch, heads, tokens, dim]`, if the tokens of all sequences are
/// as far apart.
pub(crate) fn joined(dims: &[usize], strides: &[usize]) -> Option<[usize; 3]> {
    let (&[batch, _, tokens, _], &[of_batch, of_head, of_token, of_element]) = (dims, strides)
    else {
        return None;
    };
    let token = if tokens == 1 { of_batch } else { of_token };
    (batch <= 1 || of_batch == tokens * token).then_some([of_head, token, of_element])
}

impl Attention {
    /// Checks everything that can be told without the tensors' values.
    ///
    /// # Errors
    /// If something does not fit, by its name.
    pub fn new(
        form: Form,
        params: &AttentionParams,
        qkv: [Facts<'_>; 3],
        device: &Device,
        level: Level,
    ) -> Result<Self> {
        form.check(qkv)?;
        let (q, k) = (qkv[0].0, qkv[1].0);
        let heads = q[form.heads];
        form.check_params(params, heads)?;
        let mask = match &params.mask {
            Some(_) if form.rank != 4 => {
                bail!(
                    "{}: there is a mask, which ragged batches do not take",
                    form.op
                )
            }
            Some(mask) => {
                let scores = [q[0], heads, q[form.tokens], k[form.tokens]];
                check_mask(mask, device, scores)?;
                Some(mask.to_dtype(DType::F32)?.broadcast_as(&scores)?)
            }
            None => None,
        };
        let slopes = match &params.alibi_slopes {
            Some(slopes) => {
                form.check_device("alibi_slopes", slopes, device)?;
                Some(slopes.to_dtype(DType::F32)?.contiguous()?)
            }
            None => None,
        };
        Ok(Self {
            form,
            params: params.clone(),
            mask,
            slopes,
            ragged: None,
            level,
        })
    }

    /// The same for the sequences of a ragged batch.
    ///
    /// # Errors
    /// If the cumulative lengths are of another shape or dtype, or on another device.
    pub fn over(self, batch: &RaggedBatch, device: &Device) -> Result<Self> {
        let ragged = Some(Lengths::Cumulative(batch.checked(&self.form, device)?));
        Ok(Self { ragged, ..self })
    }

    /// The same for sequences of these lengths, `[B]`, each in `pitch` rows.
    ///
    /// # Errors
    /// If the lengths are of another shape or dtype, or on another device.
    pub fn over_padded(
        self,
        lengths: &Tensor,
        [batch, pitch]: [usize; 2],
        device: &Device,
    ) -> Result<Self> {
        let op = self.form.op;
        if lengths.dims() != [batch] || lengths.dtype() != DType::U32 {
            bail!(
                "{op}: lengths is {:?} {:?}, expected U32 [{batch}], one for each sequence",
                lengths.dtype(),
                lengths.dims()
            );
        }
        self.form.check_device("lengths", lengths, device)?;
        let lengths = lengths.contiguous()?;
        let ragged = Some(Lengths::Padded { lengths, pitch });
        Ok(Self { ragged, ..self })
    }

    /// A layout with the dimensions batch, heads, tokens, dim. The sequences of a padded batch lie one behind the
    /// other.
    pub(super) fn four(&self, layout: &Layout) -> Result<Layout> {
        let Some(Lengths::Padded { .. }) = self.ragged else {
            return self.form.four(layout);
        };
        match (joined(layout.dims(), layout.stride()), layout.dims()) {
            (Some([head, token, element]), &[batch, heads, tokens, dim]) => {
                let dims = (1, heads, batch * tokens, dim);
                let strides = vec![0, head, token, element];
                Ok(Layout::new(dims.into(), strides, layout.start_offset()))
            }
            _ => bail!(
                "{}: the sequences of a tensor of {:?} do not lie one behind the other",
                self.form.op,
                layout.dims()
            ),
        }
    }

    /// The op as the trace has it.
    pub(super) fn traced(&self) -> &'static str {
        match self.ragged {
            Some(Lengths::Padded { .. }) => "flash_attention_padded",
            Some(Lengths::Cumulative(_)) => "flash_attention_varlen",
            None => "flash_attention",
        }
    }

    /// Of the result for queries of this layout, whose dimensions are batch, heads, tokens, dim.
    pub(super) fn shape(&self, q: &Layout) -> Result<Shape> {
        let ([batch, heads, queries, dim], _) = dimensions(self.form.op, q, "q")?;
        Ok(match &self.ragged {
            Some(Lengths::Padded { lengths, pitch }) => {
                Shape::from((lengths.dims()[0], *pitch, heads, dim))
            }
            Some(Lengths::Cumulative(_)) => Shape::from((queries, heads, dim)),
            None => Shape::from((batch, queries, heads, dim)),
        })
    }
}
