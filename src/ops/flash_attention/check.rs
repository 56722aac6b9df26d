//! What is refused: shapes, dtypes and devices that do not fit, and parameters that are no usable numbers.

use super::AttentionParams;
use candle_core::{DType, Device, Layout, Result, Tensor, bail};

/// How an op takes queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Form {
    /// Whose name errors have.
    pub op: &'static str,
    /// As in `[batch, heads, tokens, dim]`.
    pub axes: &'static str,
    pub heads: usize,
    pub tokens: usize,
    pub rank: usize,
}

/// As [`flash_attention`](fn@super::flash_attention) takes them.
pub(super) const FORM: Form = Form {
    op: "flash_attention",
    axes: "[batch, heads, tokens, dim]",
    heads: 1,
    tokens: 2,
    rank: 4,
};

/// Dimensions and dtype of queries, keys or values.
pub(crate) type Facts<'a> = (&'a [usize], DType);

/// Those of a tensor.
pub(crate) fn facts(x: &Tensor) -> Facts<'_> {
    (x.dims(), x.dtype())
}

impl Form {
    /// Fails if queries, keys and values do not fit each other.
    pub fn check(&self, [q, k, v]: [Facts<'_>; 3]) -> Result<()> {
        let op = self.op;
        for (name, (dims, dtype)) in [("q", q), ("k", k), ("v", v)] {
            if dims.len() != self.rank {
                bail!("{op}: {name} is {dims:?}, expected {}", self.axes);
            }
            if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
                bail!("{op}: {name} is {dtype:?}, expected f32, f16 or bf16");
            }
        }
        let ((q, _), (k, kv_dtype), (v, v_dtype)) = (q, k, v);
        let own = |axis: usize| axis == self.heads || axis == self.tokens;
        if (0..self.rank).any(|axis| !own(axis) && q[axis] != k[axis]) {
            let expected = (0..self.rank).map(|axis| match axis {
                _ if axis == self.heads => "kv_heads".to_owned(),
                _ if axis == self.tokens => "keys".to_owned(),
                _ => q[axis].to_string(),
            });
            let expected = expected.collect::<Vec<_>>().join(", ");
            bail!("{op}: k is {k:?}, expected [{expected}] to go with q {q:?}");
        }
        if v != k {
            bail!("{op}: v is {v:?}, expected k's {k:?}");
        }
        if v_dtype != kv_dtype {
            bail!("{op}: v is {v_dtype:?}, expected k's {kv_dtype:?}");
        }
        let (heads, kv_heads) = (q[self.heads], k[self.heads]);
        if kv_heads == 0 || heads % kv_heads != 0 {
            bail!("{op}: q has {heads} heads, expected a multiple of k's {kv_heads}");
        }
        if q[self.rank - 1] == 0 {
            bail!("{op}: q is {q:?}, expected a head dimension of at least 1");
        }
        Ok(())
    }

    /// The same of tensors, which have to be on one device.
    pub fn check_tensors(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
        self.check([facts(q), facts(k), facts(v)])?;
        for (name, x) in [("k", k), ("v", v)] {
            self.check_device(name, x, q.device())?;
        }
        Ok(())
    }

    pub fn check_device(&self, name: &str, x: &Tensor, device: &Device) -> Result<()> {
        if !x.device().same_device(device) {
            bail!("{}: {name} is on another device than q", self.op);
        }
        Ok(())
    }

    /// Fails if the parameters are no usable numbers, or the slopes are not one for each head.
    pub fn check_params(&self, params: &AttentionParams, heads: usize) -> Result<()> {
        let op = self.op;
        if !params.scale.is_finite() {
            bail!("{op}: scale is {}, expected a finite number", params.scale);
        }
        if params.window == Some(0) {
            bail!("{op}: window is 0, expected at least 1, the query's own position");
        }
        if let Some(cap) = params.softcap.filter(|c| !(c.is_finite() && *c > 0.0)) {
            bail!("{op}: softcap is {cap}, expected a positive number");
        }
        if let Some(slopes) = &params.alibi_slopes {
            if !matches!(slopes.dtype(), DType::F32 | DType::F16 | DType::BF16) {
                let dtype = slopes.dtype();
                bail!("{op}: alibi_slopes is {dtype:?}, expected f32, f16 or bf16");
            }
            if slopes.dims() != [heads] {
                let dims = slopes.dims();
                bail!("{op}: alibi_slopes is {dims:?}, expected [{heads}], one for each head of q");
            }
        }
        Ok(())
    }

    /// A layout with the dimensions batch, heads, tokens, dim.
    pub fn four(&self, layout: &Layout) -> Result<Layout> {
        match self.rank {
            4 if self.heads == 1 => Ok(layout.clone()),
            4 => layout.transpose(1, 2),
            _ => {
                let [tokens, heads, dim] = [0, 1, 2].map(|axis| layout.dims()[axis]);
                let [token, head, element] = [0, 1, 2].map(|axis| layout.stride()[axis]);
                let strides = vec![0, head, token, element];
                let dims = (1, heads, tokens, dim);
                Ok(Layout::new(dims.into(), strides, layout.start_offset()))
            }
        }
    }
}

/// Fails if the mask does not go with scores of this shape.
pub(super) fn check_mask(mask: &Tensor, device: &Device, scores: [usize; 4]) -> Result<()> {
    if !matches!(mask.dtype(), DType::F32 | DType::F16 | DType::BF16) {
        bail!(
            "flash_attention: mask is {:?}, expected f32, f16 or bf16, added to the scores",
            mask.dtype()
        );
    }
    FORM.check_device("mask", mask, device)?;
    let fits = mask.rank() <= 4
        && mask
            .dims()
            .iter()
            .rev()
            .zip(scores.iter().rev())
            .all(|(m, s)| *m == 1 || m == s);
    if !fits {
        bail!(
            "flash_attention: mask is {:?}, expected a shape that broadcasts to {scores:?} \
             [batch, heads, queries, keys]",
            mask.dims()
        );
    }
    Ok(())
}
