//! Attention of prompts of different lengths in one batch without padding.

use super::{Case, Contender, Dims, Expected, Extent, heads_first, limit};
use crate::figures::{CANDLE, DENSE, FUSED, Work};
use crate::place::Place;
use candle_core::{DType, Device, Result, Tensor};
use candle_fused::ops::{
    self, AttentionParams, RaggedBatch, flash_attention, flash_attention_varlen,
};

/// The last queries of each sequence, which are checked.
const CHECKED: usize = 2;

/// Sequences of one length, whose work the dense op can do too.
const EQUAL: usize = 4;

pub fn cases(dims: &Dims, dtype: DType, extent: Extent) -> Vec<Case> {
    let prompts = extent.prompts().iter();
    prompts
        .flat_map(|tokens| [lengths(*tokens), vec![tokens / EQUAL; EQUAL]])
        .map(|lengths| case(dims, lengths, dtype))
        .collect()
}

fn are_equal(lengths: &[usize]) -> bool {
    lengths.windows(2).all(|pair| pair[0] == pair[1])
}

/// Prompts of so many tokens together: each half as long as the one before, the last two alike.
fn lengths(tokens: usize) -> Vec<usize> {
    let mut left = tokens.max(2);
    let mut lengths = Vec::new();
    while lengths.len() < 7 && left > 3 {
        lengths.push(left / 2);
        left -= left / 2;
    }
    lengths.push(left);
    lengths
}

fn case(dims: &Dims, lengths: Vec<usize>, dtype: DType) -> Case {
    let (heads, kv_heads, dim) = (dims.heads, dims.kv_heads, dims.head_dim);
    let tokens: usize = lengths.iter().sum();
    let pairs: usize = lengths.iter().map(|n| n * (n + 1) / 2).sum();
    let work = Work {
        flops: 4. * (pairs * heads * dim) as f64,
        ..Work::moving(2 * tokens * (heads + kv_heads) * dim, dtype)
    };
    Case {
        op: "flash_attention_varlen",
        model: dims.name.clone(),
        part: match are_equal(&lengths) {
            true => format!("{} equal prompts", lengths.len()),
            false => format!("{} prompts", lengths.len()),
        },
        rows: tokens,
        context: tokens,
        format: dtype.as_str().to_owned(),
        work,
        build: Box::new(move |place| {
            Ragged::new(place, [heads, kv_heads, dim], lengths.clone(), dtype)?.contenders()
        }),
    }
}

/// The batch.
#[derive(Clone)]
struct Ragged {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: RaggedBatch,
    lengths: Vec<usize>,
    params: AttentionParams,
}

impl Ragged {
    fn new(
        place: &Place,
        [heads, kv_heads, dim]: [usize; 3],
        lengths: Vec<usize>,
        dtype: DType,
    ) -> Result<Self> {
        let mut ends = vec![0u32];
        for n in &lengths {
            ends.push(ends[ends.len() - 1] + *n as u32);
        }
        let tokens = lengths.iter().sum();
        let cumulative = Tensor::new(ends, &place.device)?;
        Ok(Self {
            q: place.x(&[tokens, heads, dim], dtype)?,
            k: place.x(&[tokens, kv_heads, dim], dtype)?,
            v: place.x(&[tokens, kv_heads, dim], dtype)?,
            batch: RaggedBatch {
                cu_seqlens_q: cumulative.clone(),
                cu_seqlens_k: cumulative,
                max_seqlen_q: lengths.iter().copied().max().unwrap_or(0),
            },
            lengths,
            params: AttentionParams {
                scale: 1. / (dim as f32).sqrt(),
                causal: true,
                ..Default::default()
            },
        })
    }

    fn contenders(&self) -> Result<Vec<Contender>> {
        let all = self.clone();
        let fused = move |_| {
            let y = flash_attention_varlen(&all.q, &all.k, &all.v, &all.batch, &all.params)?;
            Ok(vec![y])
        };
        let other = match are_equal(&self.lengths) {
            true => self.dense()?,
            false => Contender::new(CANDLE, vec![self.expected(false)?], self.plain()?),
        };
        let fused = Contender::new(FUSED, vec![self.expected(false)?], fused);
        Ok(vec![other, fused])
    }

    /// The op for sequences of one length, with its own layout.
    fn dense(&self) -> Result<Contender> {
        let padded = |t: &Tensor| heads_first(t, self.lengths.len());
        let (q, k, v) = (padded(&self.q)?, padded(&self.k)?, padded(&self.v)?);
        let params = self.params.clone();
        let call = move |_| Ok(vec![flash_attention(&q, &k, &v, &params)?]);
        Ok(Contender::new(DENSE, vec![self.expected(true)?], call))
    }

    /// Of a sequence, `[1, H, n, D]`.
    fn sequence(t: &Tensor, first: usize, n: usize) -> Result<Tensor> {
        t.narrow(0, first, n)?.transpose(0, 1)?.unsqueeze(0)
    }

    /// By candle's operations, one sequence after the other, with masks that are made once.
    fn plain(&self) -> Result<impl Fn(usize) -> Result<Vec<Tensor>> + use<>> {
        let all = self.clone();
        let device = self.q.device();
        let masks = self.lengths.iter().map(|n| {
            let hidden = (0..*n)
                .flat_map(|i| (0..*n).map(move |j| if j > i { f32::NEG_INFINITY } else { 0. }));
            let mask = Tensor::from_iter(hidden, device)?.reshape((1, 1, *n, *n))?;
            mask.to_dtype(all.q.dtype())
        });
        let masks = masks.collect::<Result<Vec<_>>>()?;
        let repeat = all.q.dims()[1] / all.k.dims()[1];
        Ok(move |_| {
            let mut first = 0;
            let mut outputs = Vec::new();
            for (n, mask) in all.lengths.iter().zip(&masks) {
                let repeated = |t: &Tensor| {
                    let one = Self::sequence(t, first, *n)?.contiguous()?;
                    candle_transformers::utils::repeat_kv(one, repeat)
                };
                let q = Self::sequence(&all.q, first, *n)?.contiguous()?;
                let scores = q.matmul(&repeated(&all.k)?.t()?)?;
                let scores = (scores * f64::from(all.params.scale))?.broadcast_add(mask)?;
                let shares = candle_nn::ops::softmax_last_dim(&scores)?;
                let y = shares.matmul(&repeated(&all.v)?)?;
                outputs.push(y.squeeze(0)?.transpose(0, 1)?.contiguous()?);
                first += n;
            }
            Ok(vec![Tensor::cat(&outputs, 0)?])
        })
    }

    /// The last queries of each sequence; `[B, H, n, D]` if the result is `dense`.
    fn expected(&self, dense: bool) -> Result<Expected> {
        let (heads, dim) = (self.q.dims()[1], self.q.dims()[2]);
        let (mut first, mut rows, mut values) = (0, Vec::new(), Vec::new());
        for (b, n) in self.lengths.iter().enumerate() {
            let checked = CHECKED.min(*n);
            let host = |t: &Tensor, first: usize, n: usize| {
                Self::sequence(t, first, n)?.to_device(&Device::Cpu)
            };
            let start = first + n - checked;
            let y = ops::flash_attention::reference(
                &host(&self.q, start, checked)?,
                &host(&self.k, first, *n)?,
                &host(&self.v, first, *n)?,
                &self.params,
            )?;
            let y = y.squeeze(0)?.transpose(0, 1)?.flatten_all()?;
            values.extend(y.to_vec1::<f64>()?);
            match dense {
                true => {
                    rows.extend((n - checked..*n).flat_map(|token| {
                        (0..heads).map(move |head| (b * heads + head) * n + token)
                    }))
                }
                false => rows.extend(start * heads..(start + checked) * heads),
            }
            first += n;
        }
        Ok(Expected::of_rows(rows, dim, values, limit(self.q.dtype())))
    }
}
