//! A prompt on a GPU: the kernels of a forward pass on raw addresses, over memory that all layers
//! share. Candle's tensors would cost an allocation and several locks for each of them, which for a
//! small model takes longer than the kernels.

use super::plan::norm_at;
use crate::cuda::profile;
use crate::cuda::{Address, Launcher, Scratch, address, address_of, alloc};
use crate::models::decoder::{Block, Decoder};
use crate::nn::{Norm, Projection, RotaryEmbedding};
use crate::ops::embedding::cuda::{self as embedding, Lookup};
use crate::ops::flash_attention::cuda::{self as flash_attention, Call, Operand};
use crate::ops::linear::cuda::{FEW, NormAt, ProductAt, dense_weights, product};
use crate::ops::rope::cuda::{self as rope, RopeAt};
use crate::ops::{Activation, Weight};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, DType, Device, Layout, Result, Storage, Tensor, bail};

/// Keys and values of one sequence, `[1, Hkv, S, D]` of a layer each.
pub(super) type Cache = (Tensor, Tensor);

/// Reads `ids` at `position` and following of the sequence whose `caches` these are, and gives the
/// logits f32 `[1, V]` behind the last of them.
///
/// # Errors
/// If a layer is not fused throughout, or memory is short.
pub(super) fn read(
    device: &CudaDevice,
    decoder: &Decoder,
    rotary: &RotaryEmbedding,
    caches: &[Cache],
    ids: &[u32],
    position: usize,
) -> Result<Tensor> {
    const OP: &str = "generation";
    let Some(table) = decoder.stack.embedding.table() else {
        bail!("{OP}: the embedding is not on the GPU");
    };
    let ids = Tensor::new(ids, &Device::Cuda(device.clone()))?;
    let tokens = ids.elem_count();
    let mut lookup = Lookup::new(table, address_of(&ids)?, 0, tokens)?;
    let (dtype, hidden) = (lookup.dtype(), lookup.width());
    let mut kept = Scratch::new(device);
    let x = kept.take(OP, dtype, tokens * hidden)?;
    lookup.out = x;
    let mut pass = Pass {
        launcher: Launcher {
            // An event between two launches would keep them apart anyway.
            dependent: !profile::is_capturing(),
            mixed: true,
            ..Launcher::new(device)?
        },
        scratch: Scratch::new(device),
        dtype,
        hidden,
        tokens,
        position,
        x,
    };
    // SAFETY: x has room for all rows; the ids live until the logits are there.
    unsafe { embedding::launch(&pass.launcher, &lookup)? };
    for (block, cache) in decoder.stack.blocks.iter().zip(caches) {
        pass.block(block, cache, rotary)?;
        pass.scratch.reset();
    }
    let vocab = decoder.head.rows().iter().sum::<usize>();
    let logits = alloc(OP, device, DType::F32, vocab)?;
    let last = x + ((tokens - 1) * hidden * dtype.size_in_bytes()) as Address;
    let out = address(&logits, &Layout::contiguous(vocab))?;
    let head = ProductAt {
        norm: pass.norm(&decoder.stack.norm)?,
        m: 1,
        out_dtype: DType::F32,
        ..pass.at(last, out, vocab)
    };
    pass.product(&Weights::new(&decoder.head)?, head)?;
    let logits = Storage::Cuda(logits);
    Ok(Tensor::from_storage(
        logits,
        (1, vocab),
        BackpropOp::none(),
        false,
    ))
}

/// The weights of a product.
#[derive(Clone, Copy, Default)]
struct Weights<'a> {
    held: &'a [Weight],
    /// Where they are made dense, if they are.
    dense: Option<Address>,
    bias: Option<&'a Tensor>,
}

impl<'a> Weights<'a> {
    fn new(projection: &'a Projection) -> Result<Self> {
        match projection.fused_parts() {
            Some((held, bias)) => Ok(Self {
                held,
                dense: None,
                bias,
            }),
            None => bail!("generation: a product is not fused"),
        }
    }
}

/// The rows of a prompt on their way through the layers.
struct Pass {
    launcher: Launcher,
    scratch: Scratch,
    dtype: DType,
    hidden: usize,
    tokens: usize,
    position: usize,
    /// The residual stream, `[tokens, hidden]`: each layer adds to it in place.
    x: Address,
}

impl Pass {
    fn block(&mut self, block: &Block, cache: &Cache, rotary: &RotaryEmbedding) -> Result<()> {
        let (qkv, output) = block.attention.projections();
        let (up, down) = block.mlp.projections();
        let [qkv, output, up, down] = self.weights([qkv, output, up, down])?;
        let joint = self.product_of(&qkv, &block.attention_norm, Activation::None)?;
        let inside =
            |pass: &mut Self| pass.product_of(&up, &block.mlp_norm, block.mlp.activation());
        // Side by side, both read the stream before either adds to it.
        let before = block.parallel.then(|| inside(self)).transpose()?;
        let attended = self.attention(block, joint, cache, rotary)?;
        self.add(&output, attended)?;
        let hidden = match before {
            Some(hidden) => hidden,
            None => inside(self)?,
        };
        self.add(&down, hidden)
    }

    /// Adds a product to the stream.
    fn add(&mut self, linear: &Weights<'_>, x: Address) -> Result<()> {
        let at = ProductAt {
            residuals: [self.x, 0],
            ..self.at(x, self.x, self.hidden)
        };
        self.product(linear, at)
    }

    /// A product without norm, bias or residual of all rows.
    fn at(&self, x: Address, out: Address, stride: usize) -> ProductAt {
        ProductAt {
            x,
            norm: None,
            bias: 0,
            activation: Activation::None,
            residuals: [0; 2],
            out,
            stride,
            m: self.tokens,
            k: 0,
            x_dtype: self.dtype,
            out_dtype: self.dtype,
        }
    }

    fn norm(&self, norm: &Norm) -> Result<Option<NormAt>> {
        let at = norm_at(norm, self.dtype)?;
        if at.is_none() {
            bail!(
                "generation: a norm is not in the dtype of the rows, {:?}",
                self.dtype
            );
        }
        Ok(at)
    }

    /// The product of the stream behind a norm, in memory of its own.
    fn product_of(
        &mut self,
        linear: &Weights<'_>,
        norm: &Norm,
        activation: Activation,
    ) -> Result<Address> {
        let rows = linear.held.iter().map(Weight::rows).sum::<usize>();
        let width = activation.outputs(rows);
        let out = self
            .scratch
            .take("linear", self.dtype, self.tokens * width)?;
        let at = ProductAt {
            norm: self.norm(norm)?,
            activation,
            ..self.at(self.x, out, width)
        };
        self.product(linear, at)?;
        Ok(out)
    }

    fn product(&mut self, linear: &Weights<'_>, at: ProductAt) -> Result<()> {
        let Weights { held, dense, bias } = *linear;
        let at = ProductAt {
            bias: bias.map_or(Ok(0), address_of)?,
            k: held.first().map_or(0, |w| w.cols()),
            ..at
        };
        // SAFETY: the addresses stand for buffers of these sizes, which are freed in the order of
        // the stream; nothing writes weights, norms or biases.
        unsafe { product(&self.launcher, &mut self.scratch, held, dense, &at) }
    }

    /// The weights of a layer; those in blocks, if they all are, are made dense in one launch.
    fn weights<'b, const N: usize>(&mut self, of: [&'b Projection; N]) -> Result<[Weights<'b>; N]> {
        let mut all = [Weights::default(); N];
        for (weights, projection) in all.iter_mut().zip(of) {
            *weights = Weights::new(projection)?;
        }
        // Few rows take blocks as they are.
        if self.tokens > FEW {
            let groups = all.map(|weights| weights.held);
            // SAFETY: as for `product`.
            let dense = unsafe {
                let (launcher, rows) = (&self.launcher, self.tokens);
                dense_weights(launcher, &mut self.scratch, &groups, rows, self.dtype)?
            };
            for (weights, at) in all.iter_mut().zip(dense.into_iter().flatten()) {
                weights.dense = Some(at);
            }
        }
        Ok(all)
    }

    /// Rotation, append and attention: `[tokens, heads * D]`.
    fn attention(
        &mut self,
        block: &Block,
        qkv: Address,
        (k, v): &Cache,
        rotary: &RotaryEmbedding,
    ) -> Result<Address> {
        let config = block.attention.config();
        let (heads, kv_heads, dim) = (config.heads, config.kv_heads, config.head_dim);
        let norms = block.attention.head_norms();
        let (cos, sin) = rotary.tables();
        let (tokens, position) = (self.tokens, self.position);
        let width = heads * dim;
        let joint = width + 2 * kv_heads * dim;
        let q = self.scratch.take("rope", self.dtype, tokens * width)?;
        let y = self
            .scratch
            .take("flash_attention", self.dtype, tokens * width)?;
        let rope = RopeAt {
            x: qkv,
            x_strides: [tokens * joint, joint, dim],
            y: q,
            y_strides: [tokens * width, width, dim],
            k: address_of(k)?,
            v: address_of(v)?,
            cos: address_of(cos)?,
            sin: address_of(sin)?,
            q_norm: norms.map_or(Ok(0), |n| address_of(n.q))?,
            k_norm: norms.map_or(Ok(0), |n| address_of(n.k))?,
            eps: norms.map_or(0., |n| n.eps as f32),
            at: 0,
            at_step: 0,
            position,
            positions: cos.dim(0)?,
            slot: position,
            slots: k.dim(2)?,
            batch: 1,
            tokens,
            heads,
            kv_heads,
            dim,
            pairs: cos.dim(1)?,
            style: rotary.style(),
            dtype: self.dtype,
            table_dtype: cos.dtype(),
            cache_dtype: k.dtype(),
        };
        let cached = |t: &Tensor| -> Result<Operand> {
            let strides = [0, 1, 2, 3].map(|i| t.stride()[i] as i64);
            Ok(Operand {
                address: address_of(t)?,
                strides,
            })
        };
        let call = Call {
            q: Operand {
                address: q,
                strides: [tokens * width, dim, width, 1].map(|n| n as i64),
            },
            k: cached(k)?,
            v: cached(v)?,
            mask: None,
            y,
            q_dtype: self.dtype,
            kv_dtype: k.dtype(),
            batch: 1,
            heads,
            kv_heads,
            queries: tokens,
            keys: position + tokens,
            dim,
            scale: 1. / (dim as f32).sqrt(),
            softcap: None,
            causal: true,
            window: config.window,
        };
        // SAFETY: the addresses stand for buffers of these sizes, which are freed in the order of
        // the stream; the caller has checked that the positions are within the cache.
        unsafe {
            rope::launch(&self.launcher, &rope)?;
            flash_attention::launch(&self.launcher, &call)?;
        }
        Ok(y)
    }
}
