//! A prompt on a GPU: the kernels of a forward pass on raw addresses, over memory that all layers
//! share. Candle's tensors would cost an allocation and several locks for each of them, which for a
//! small model takes longer than the kernels.

use super::chain::{PagedKeys, norm_at};
use crate::cpu::attention::Sizes;
use crate::cuda::profile;
use crate::cuda::{Address, Launcher, Preceding, Scratch, address, address_of, alloc};
use crate::models::decoder::{Block, Decoder, Rotaries};
use crate::nn::{Norm, Projection, RotaryEmbedding};
use crate::ops::embedding::cuda::{self as embedding, Lookup};
use crate::ops::flash_attention::cuda::{self as flash_attention, Call, Operand};
use crate::ops::linear::cuda::{NormAt, Product, ProductAt, dequantize_together};
use crate::ops::rope::cuda::{self as rope, RopeAt};
use crate::ops::{Activation, ActivationBits};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, DType, Device, Layout, Result, Storage, Tensor, bail};

pub(super) const OP: &str = "generation";

/// Keys and values of one sequence, `[1, Hkv, S, D]` of a layer each.
pub(super) type Cache = (Tensor, Tensor);

/// Whose prompt is read.
pub(super) struct Model<'a> {
    pub decoder: &'a Decoder,
    pub rotaries: &'a Rotaries,
    /// Of the sequence.
    pub caches: &'a [Cache],
    /// The position after the whole prompt, which may come in parts.
    pub end: usize,
}

/// Whose rows are read. All addresses are of u32.
pub(crate) struct PagedRows<'a> {
    pub decoder: &'a Decoder,
    pub rotaries: &'a Rotaries,
    /// The table has these rows' sequences.
    pub keys: PagedKeys<'a>,
    pub sequences: usize,
    /// `[tokens]`: ids, positions, and the number of each one's sequence.
    pub ids: Address,
    pub positions: Address,
    pub owners: Address,
    pub tokens: usize,
    /// `[sequences]`: tokens of each, with the rows.
    pub lengths: Address,
    /// `[sequences + 1]`: where each sequence's rows end.
    pub cu_seqlens: Address,
    /// Rows of a sequence, at most.
    pub longest: usize,
    /// `[draws]`: rows whose logits are wanted.
    pub last: Address,
    pub draws: usize,
}

/// Where a layer's keys and values are.
#[derive(Clone, Copy)]
pub(super) enum LayerKeys<'a> {
    Cache(&'a Cache),
    Pages(&'a PagedRows<'a>, usize),
}

/// Reads `ids` at `position` and following, and gives the logits f32 `[1, V]` after the last of them.
///
/// # Errors
/// If a layer is not fused throughout, or memory is short.
pub(super) fn read(
    device: &CudaDevice,
    model: &Model<'_>,
    ids: &[u32],
    position: usize,
) -> Result<Tensor> {
    let decoder = model.decoder;
    let ids = Tensor::new(ids, &Device::Cuda(device.clone()))?;
    let tokens = ids.elem_count();
    let (mut kept, mut scratch) = (Scratch::new(device), Scratch::new(device));
    // The ids live until the logits are there.
    let at = [address_of(&ids)?, tokens as u64];
    let mut pass = Pass::new(launcher(device)?, &mut scratch, decoder, at, &mut kept)?;
    pass.layers(model, position)?;
    let last = pass.row(tokens - 1);
    pass.logits(device, decoder, last, 1)
}

/// For the kernels of a prompt, on candle's stream.
pub(super) fn launcher(device: &CudaDevice) -> Result<Launcher> {
    Ok(Launcher {
        // An event between two launches would keep them apart anyway.
        dependent: !profile::is_capturing(),
        preceding: Preceding::Other,
        ..Launcher::new(device)?
    })
}

/// Of `tokens` ids at the address `ids`, to an address that is still to be given.
pub(super) fn lookup(decoder: &Decoder, ids: Address, tokens: usize) -> Result<Lookup> {
    let Some(table) = decoder.stack.embedding.table() else {
        bail!("{OP}: the embedding is not on the GPU");
    };
    Lookup::new(table, ids, 0, tokens)
}

/// The rows of a prompt as they go through the layers.
pub(super) struct Pass<'a> {
    pub launcher: Launcher,
    pub scratch: &'a mut Scratch,
    pub dtype: DType,
    pub hidden: usize,
    pub tokens: usize,
    position: usize,
    end: usize,
    /// The residual stream, `[tokens, hidden]`: each layer adds to it in place.
    pub x: Address,
}

impl<'a> Pass<'a> {
    /// With the embedded rows of `tokens` ids at the address `ids`; `kept` has the stream's memory, and `scratch` what
    /// lies between the kernels of a layer.
    pub fn new(
        launcher: Launcher,
        scratch: &'a mut Scratch,
        decoder: &Decoder,
        [ids, tokens]: [Address; 2],
        kept: &mut Scratch,
    ) -> Result<Self> {
        let tokens = tokens as usize;
        let mut lookup = lookup(decoder, ids, tokens)?;
        lookup.out = kept.take(OP, lookup.dtype(), tokens * lookup.width())?;
        let pass = Self::over(launcher, scratch, &lookup, lookup.out);
        // SAFETY: x has room for all rows; the ids are the caller's.
        unsafe { embedding::launch(&pass.launcher, &lookup)? };
        Ok(pass)
    }

    /// Over a stream at `x`, as `lookup` makes it.
    pub fn over(launcher: Launcher, scratch: &'a mut Scratch, lookup: &Lookup, x: Address) -> Self {
        Self {
            launcher,
            scratch,
            dtype: lookup.dtype(),
            hidden: lookup.width(),
            tokens: lookup.count,
            position: 0,
            end: 0,
            x,
        }
    }

    /// Takes the rows, whose first is at `position`, through all layers.
    pub fn layers(&mut self, model: &Model<'_>, position: usize) -> Result<()> {
        (self.position, self.end) = (position, model.end);
        for (block, cache) in model.decoder.stack.blocks.iter().zip(model.caches) {
            self.block(block, LayerKeys::Cache(cache), model.rotaries.of(block))?;
            self.scratch.reset();
        }
        Ok(())
    }

    /// A row of the stream.
    pub fn row(&self, row: usize) -> Address {
        self.x + (row * self.hidden * self.dtype.size_in_bytes()) as Address
    }

    /// The logits f32 `[rows, V]` after each of `rows` rows of the stream, contiguous from `x` on.
    pub fn logits(
        &mut self,
        device: &CudaDevice,
        decoder: &Decoder,
        x: Address,
        rows: usize,
    ) -> Result<Tensor> {
        let vocab = decoder.head.rows().iter().sum::<usize>();
        let logits = alloc(OP, device, DType::F32, rows * vocab)?;
        let out = address(&logits, &Layout::contiguous(rows * vocab))?;
        let head = ProductAt {
            norm: self.norm(&decoder.stack.norm)?,
            m: rows,
            out_dtype: DType::F32,
            ..self.at(x, out, vocab)
        };
        let head = self.product(&decoder.head, head)?;
        self.run(&head)?;
        let logits = Storage::Cuda(logits);
        let none = BackpropOp::none();
        Ok(Tensor::from_storage(logits, (rows, vocab), none, false))
    }

    pub fn block(
        &mut self,
        block: &Block,
        keys: LayerKeys<'_>,
        rotary: &RotaryEmbedding,
    ) -> Result<()> {
        let (qkv, output) = block.attention.projections();
        let (up, down) = block.mlp.projections();
        let activation = block.mlp.activation();
        let [width, kv_width, _] = block.attention.config().widths();
        let inner = activation.outputs(up.rows().iter().sum());
        let joint = self.buffer(width + 2 * kv_width)?;
        let attended = self.buffer(width)?;
        let hidden = self.buffer(inner)?;
        let mut products = [
            self.behind(qkv, &block.attention_norm, Activation::None, joint)?,
            self.residual_product(output, block.attention.sub_norm(), attended)?,
            self.behind(up, &block.mlp_norm, activation, hidden)?,
            self.residual_product(down, block.mlp.sub_norm(), hidden)?,
        ];
        self.dequantize(&mut products)?;
        let [qkv, output, up, down] = &products;
        self.run(qkv)?;
        // Side by side, both read the stream before either adds to it.
        if block.parallel {
            self.run(up)?;
        }
        match keys {
            LayerKeys::Cache(cache) => self.attention(block, [joint, attended], cache, rotary)?,
            LayerKeys::Pages(rows, layer) => {
                self.paged(block, [joint, attended], (rows, layer), rotary)?;
            }
        }
        self.run(output)?;
        if !block.parallel {
            self.run(up)?;
        }
        self.run(down)
    }

    /// Memory of its own for rows of so many values.
    fn buffer(&mut self, width: usize) -> Result<Address> {
        let len = self.tokens * width;
        self.scratch.take(OP, self.dtype, len)
    }

    /// A product that is added to the residual stream, with `norm` as its prologue if one is given.
    fn residual_product(
        &self,
        linear: &Projection,
        norm: Option<&Norm>,
        x: Address,
    ) -> Result<Product> {
        let at = ProductAt {
            norm: norm.map_or(Ok(None), |norm| self.norm(norm))?,
            residuals: [self.x, 0],
            ..self.at(x, self.x, self.hidden)
        };
        self.product(linear, at)
    }

    /// A product of the stream with a norm as its prologue.
    fn behind(
        &self,
        linear: &Projection,
        norm: &Norm,
        activation: Activation,
        out: Address,
    ) -> Result<Product> {
        let width = activation.outputs(linear.rows().iter().sum());
        let at = ProductAt {
            norm: self.norm(norm)?,
            activation,
            ..self.at(self.x, out, width)
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
            x_bits: ActivationBits::Auto,
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

    fn product(&self, linear: &Projection, at: ProductAt) -> Result<Product> {
        let Some((weights, bias)) = linear.fused_parts() else {
            bail!("{OP}: a product is not fused");
        };
        let at = ProductAt {
            bias: bias.map_or(Ok(0), address_of)?,
            k: weights.first().map_or(0, |w| w.cols()),
            x_bits: linear.fusion().activations,
            ..at
        };
        Product::new(&self.launcher, weights, &at)
    }

    fn run(&mut self, product: &Product) -> Result<()> {
        // SAFETY: the addresses stand for buffers of these sizes, which are freed in the order of
        // the stream; nothing writes weights, norms or biases.
        unsafe { product.run(&self.launcher, self.scratch) }
    }

    /// Dequantizes the weights of a layer that the library is to multiply, in one launch.
    fn dequantize(&mut self, products: &mut [Product]) -> Result<()> {
        let wanted: Vec<_> = products.iter().filter_map(Product::to_dequantize).collect();
        // SAFETY: as for `run`.
        let starts = unsafe { dequantize_together(&self.launcher, self.scratch, &wanted)? };
        let wanting = products.iter_mut().filter(|p| p.to_dequantize().is_some());
        for (product, start) in wanting.zip(starts) {
            product.set_dequantized(start);
        }
        Ok(())
    }

    /// Rotation, append and attention, from `[tokens, (heads + 2 kv_heads) D]` to `[tokens, heads D]`.
    fn attention(
        &mut self,
        block: &Block,
        [qkv, y]: [Address; 2],
        (k, v): &Cache,
        rotary: &RotaryEmbedding,
    ) -> Result<()> {
        let config = block.attention.config();
        let (heads, kv_heads, dim) = (config.heads, config.kv_heads, config.head_dim);
        let norms = block.attention.head_norms();
        let (cos, sin) = rotary.tables_up_to(self.end);
        let (tokens, position) = (self.tokens, self.position);
        let width = heads * dim;
        let joint = width + 2 * kv_heads * dim;
        let q = self.scratch.take("rope", self.dtype, tokens * width)?;
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
        let call = Call {
            q: Operand {
                address: q,
                strides: [tokens * width, dim, width, 1].map(|n| n as i64),
            },
            k: cached(k)?,
            v: cached(v)?,
            mask: None,
            alibi: None,
            ragged: None,
            pages: None,
            y,
            q_dtype: self.dtype,
            kv_dtype: k.dtype(),
            sizes: Sizes {
                batch: 1,
                heads,
                kv_heads,
                queries: tokens,
                keys: position + tokens,
                dim,
            },
            scale: 1. / (dim as f32).sqrt(),
            softcap: None,
            right: Some(0),
            window: config.window,
            batch_invariant: false,
        };
        // SAFETY: the addresses stand for buffers of these sizes, which are freed in the order of
        // the stream; the caller has checked that the positions are within the cache.
        unsafe {
            rope::launch(&self.launcher, &rope)?;
            flash_attention::launch(&self.launcher, &call)?;
        }
        Ok(())
    }
}

/// Keys or values as attention takes them.
fn cached(t: &Tensor) -> Result<Operand> {
    let strides = [0, 1, 2, 3].map(|i| t.stride()[i] as i64);
    Ok(Operand {
        address: address_of(t)?,
        strides,
    })
}
