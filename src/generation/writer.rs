//! Builds the plan of a decode step, layer by layer.

use super::chain::{Keys, StepIo, StepOp, norm_at};
use super::pages::padded;
use super::refusal::{Refusal, unfused};
use crate::cuda::{Address, Launcher, Preceding, address, address_of, alloc};
use crate::models::decoder::Block;
use crate::nn::{Norm, Projection, RotaryEmbedding};
use crate::ops::embedding::cuda::Lookup;
use crate::ops::flash_decoding::cuda::{
    Attention, Companion, IndependentProduct, Step, StepShape, partials,
};
use crate::ops::linear::cuda::{Operands, Product, ProductAt, gemv_dense_pipelined as pipelined};
use crate::ops::sample::cuda as sample;
use crate::ops::view::dtype_index;
use crate::ops::{Activation, HeadNorms};
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result};

/// Builds a plan, and allocates the buffers between its launches.
pub(super) struct PlanBuilder<'a> {
    device: &'a CudaDevice,
    launcher: Launcher,
    io: &'a StepIo,
    pub work: Vec<(&'static str, StepOp)>,
    pub buffers: Vec<CudaStorage>,
    dtype: DType,
    /// The residual stream, `[sequences, hidden]`: each layer adds to it in place.
    x: Address,
    /// Buffers of the widest layer so far, and their widths: q, k and v; attended, and behind the
    /// activation.
    between: [(Address, usize); 2],
    /// Scratch memory that all layers' attention shares: one follows the other.
    scratch: Option<(Address, Address)>,
}

const QKV: usize = 0;
const INNER: usize = 1;

/// Parts of the model that read keys and values.
const ATTENTION: &str = "attention";
const WITH_UP: &str = "attention+up";
const WITH_QKV: &str = "qkv+attention";

/// The products of a layer.
struct Products {
    /// To queries, keys and values.
    first: Product,
    /// The projection back.
    output: Product,
    /// The MLP's first.
    inside: Product,
    inside_name: &'static str,
    down: Product,
}

/// What a product does beside multiplying.
#[derive(Clone, Copy)]
struct ProductOptions<'a> {
    norm: Option<&'a Norm>,
    activation: Activation,
    residual: Address,
    out: Address,
    out_dtype: DType,
    preceding: Preceding,
}

impl<'a> ProductOptions<'a> {
    /// A product with this norm as its prologue.
    fn after_norm(norm: &'a Norm, out: Address, out_dtype: DType) -> Self {
        Self {
            norm: Some(norm),
            activation: Activation::None,
            residual: 0,
            out,
            out_dtype,
            preceding: Preceding::Other,
        }
    }
}

impl<'a> PlanBuilder<'a> {
    pub fn new(device: &'a CudaDevice, mut lookup: Lookup, io: &'a StepIo) -> Result<Self> {
        let (dtype, hidden) = (lookup.dtype(), lookup.width());
        let mut builder = Self {
            device,
            launcher: Launcher {
                recorded: true,
                ..Launcher::new(device)?
            },
            io,
            work: Vec::new(),
            buffers: Vec::new(),
            dtype,
            x: 0,
            between: [(0, 0); 2],
            scratch: None,
        };
        builder.x = builder.buffer(dtype, io.sequences * hidden)?;
        lookup.out = builder.x;
        builder.work.push(("embedding", StepOp::Embedding(lookup)));
        Ok(builder)
    }

    fn buffer(&mut self, dtype: DType, len: usize) -> Result<Address> {
        let storage = alloc("generation", self.device, dtype, len)?;
        let at = address(&storage, &Layout::contiguous(len))?;
        self.buffers.push(storage);
        Ok(at)
    }

    /// One of the buffers between steps, at least `width` wide.
    fn between(&mut self, which: usize, width: usize) -> Result<Address> {
        if self.between[which].1 < width {
            let len = self.io.sequences * width;
            self.between[which] = (self.buffer(self.dtype, len)?, width);
        }
        Ok(self.between[which].0)
    }

    /// The steps of a layer: five, or fewer where one launch takes several (see [`Plan`](super::plan::Plan)).
    pub fn block(
        &mut self,
        layer: usize,
        block: &Block,
        keys: &Keys<'_>,
        rotary: &RotaryEmbedding,
    ) -> std::result::Result<(), Refusal> {
        if !block.attention.is_fused() {
            return unfused("attention is switched off");
        }
        let config = block.attention.config();
        let (qkv, output) = block.attention.projections();
        let (up, down) = block.mlp.projections();
        let [width, kv_width, _] = config.widths();
        let rows = up.rows().iter().sum::<usize>();
        let inner = block.mlp.activation().outputs(rows);
        let q = self.between(QKV, width + 2 * kv_width)?;
        // One row of both lies side by side, so that one product can take them.
        let attended = self.between(INNER, width + inner)?;
        let size = self.dtype.size_in_bytes();
        let hidden = attended + (self.io.sequences * width * size) as Address;
        let first = ProductOptions::after_norm(&block.attention_norm, q, self.dtype);
        let inside = ProductOptions {
            activation: block.mlp.activation(),
            ..ProductOptions::after_norm(&block.mlp_norm, hidden, self.dtype)
        };
        let last = ProductOptions {
            preceding: Preceding::Attention,
            ..self.residual_options(block.attention.sub_norm())
        };
        let products = Products {
            first: self.product(qkv, self.x, first)?,
            output: self.product(output, attended, last)?,
            inside: self.product(up, self.x, inside)?,
            inside_name: match block.mlp.activation().gate() {
                Some(_) => "gate_up",
                None => "up",
            },
            down: self.product(down, hidden, self.residual_options(block.mlp.sub_norm()))?,
        };
        let step = self.step(block, (keys, layer), rotary, attended)?;
        if block.parallel {
            return self.side_by_side(step, products);
        }
        match self.with_qkv(&step, &products.first) {
            Some(attention) => self.push_attention(WITH_QKV, attention),
            None => {
                self.work.push(("qkv", StepOp::Linear(products.first)));
                let attention = self.attention(step)?;
                self.push_attention(ATTENTION, attention);
            }
        }
        let output = StepOp::Linear(products.output);
        self.work.push(("output", output));
        let inside = StepOp::Linear(products.inside);
        self.work.push((products.inside_name, inside));
        self.work.push(("down", StepOp::Linear(products.down)));
        Ok(())
    }

    fn attention(&self, step: Step) -> std::result::Result<Attention, Refusal> {
        let attention = Attention::new(&self.launcher, step, None);
        attention.map_err(|e| Refusal::Unfused(e.to_string()))
    }

    fn push_attention(&mut self, name: &'static str, attention: Attention) {
        let attention = StepOp::Attention(Box::new(attention));
        self.work.push((name, attention));
    }

    /// The steps of a layer whose MLP stands beside attention: three where kernels take two at once, or five.
    fn side_by_side(&mut self, step: Step, products: Products) -> std::result::Result<(), Refusal> {
        let Some((both, pair)) = self.in_pairs(&step, &products) else {
            let attention = self.attention(step)?;
            self.work.push(("qkv", StepOp::Linear(products.first)));
            // Both read the stream before either adds to it.
            let inside = StepOp::Linear(products.inside);
            self.work.push((products.inside_name, inside));
            self.push_attention(ATTENTION, attention);
            let output = StepOp::Linear(products.output);
            self.work.push(("output", output));
            self.work.push(("down", StepOp::Linear(products.down)));
            return Ok(());
        };
        let first = match products.first.single() {
            Some((_, operands)) => {
                let operands = Operands {
                    fetch: Some(step.earlier()),
                    ..operands.clone()
                };
                Product::of(&self.launcher.behind(Preceding::Other), operands)?
            }
            None => products.first,
        };
        self.work.push(("qkv", StepOp::Linear(first)));
        self.push_attention(WITH_UP, both);
        self.work.push(("output+down", StepOp::Linear(pair)));
        Ok(())
    }

    /// Attention with the products in front of it, where a kernel takes both.
    fn with_qkv(&self, step: &Step, first: &Product) -> Option<Attention> {
        let (_, operands) = first.single()?;
        let companion = Companion::Qkv(operands.clone());
        Attention::new(&self.launcher, *step, Some(companion)).ok()
    }

    /// Attention with the first half of the MLP, and both ways back in one product.
    fn in_pairs(&self, step: &Step, products: &Products) -> Option<(Attention, Product)> {
        let [(first, _), (_, inside), (_, output), (_, down)] = [
            products.first.single()?,
            products.inside.single()?,
            products.output.single()?,
            products.down.single()?,
        ];
        let independent = Companion::Independent(IndependentProduct {
            product: inside.clone(),
            ready: first.kernel == pipelined::NAME,
        });
        let both = Attention::new(&self.launcher, *step, Some(independent)).ok()?;
        let mut pair = pipelined::pair(output, down)?;
        // The second bias is added as a residual is: there is one row.
        pair.at.residuals[1] = down.at.bias;
        let pair = Product::of(&self.launcher.behind(Preceding::Other), pair).ok()?;
        Some((both, pair))
    }

    /// Options of a product that is added to the residual stream, with `norm` as its prologue if one is given.
    fn residual_options<'n>(&self, norm: Option<&'n Norm>) -> ProductOptions<'n> {
        ProductOptions {
            norm,
            activation: Activation::None,
            residual: self.x,
            out: self.x,
            out_dtype: self.dtype,
            preceding: Preceding::Other,
        }
    }

    fn product(
        &self,
        linear: &Projection,
        x: Address,
        options: ProductOptions<'_>,
    ) -> std::result::Result<Product, Refusal> {
        let Some((weights, bias)) = linear.fused_parts() else {
            return unfused(
                "a product is switched off, gathers its input, or its weights are not on the GPU",
            );
        };
        let rows = linear.rows().iter().sum::<usize>();
        let norm = match options.norm {
            Some(norm) => match norm_at(norm, self.dtype)? {
                Some(at) => Some(at),
                None => return unfused("a norm is of another dtype than the stream"),
            },
            None => None,
        };
        let at = ProductAt {
            x,
            norm,
            bias: bias.map_or(Ok(0), address_of)?,
            activation: options.activation,
            residuals: [options.residual, 0],
            out: options.out,
            stride: options.activation.outputs(rows),
            m: self.io.sequences,
            k: weights.first().map_or(0, |w| w.cols()),
            x_dtype: self.dtype,
            x_bits: linear.fusion().activations,
            out_dtype: options.out_dtype,
        };
        let product = Product::new(&self.launcher.behind(options.preceding), weights, &at);
        product.map_err(|e| Refusal::Unfused(e.to_string()))
    }

    fn step(
        &mut self,
        block: &Block,
        (keys, layer): (&Keys<'_>, usize),
        rotary: &RotaryEmbedding,
        out: Address,
    ) -> std::result::Result<Step, Refusal> {
        let config = block.attention.config();
        let (cos, sin) = rotary.tables();
        let sequences = self.io.sequences;
        let (caches, pages, slots, cache_dtype) = match keys {
            Keys::Caches(caches) => {
                let (k, v) = caches[layer].buffers()?;
                ([address_of(k)?, address_of(v)?], None, k.dim(2)?, k.dtype())
            }
            Keys::Pages(keys) => {
                let pool = &keys.pools[layer];
                let rows = [keys.table, keys.width as u64, sequences as u64];
                let (pages, sizes) = padded(pool, rows)?;
                let slots = keys.width * sizes.page;
                ([pages.k, pages.v], Some(pages), slots, pool.stored())
            }
        };
        let [k_cache, v_cache] = caches;
        let shape = StepShape {
            sequences,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            slots,
            paged: pages.is_some(),
            positions: cos.dim(0)?,
            pairs: cos.dim(1)?,
            dtype: self.dtype,
            cache_dtype,
        };
        let norms = block.attention.head_norms();
        let own = |n: &HeadNorms<'_>| [n.q, n.k].iter().all(|w| w.dtype() == self.dtype);
        if !norms.as_ref().is_none_or(own) {
            return unfused("norms of the heads are of another dtype than the stream");
        }
        let (partial, counters) = self.scratch(&shape)?;
        Ok(Step {
            qkv: self.between[QKV].0,
            q_norm: norms.map_or(Ok(0), |n| address_of(n.q))?,
            k_norm: norms.map_or(Ok(0), |n| address_of(n.k))?,
            eps: norms.map_or(0., |n| n.eps as f32),
            cos: address_of(cos)?,
            sin: address_of(sin)?,
            k_cache,
            v_cache,
            pages,
            out,
            partial,
            counters,
            position: self.io.position,
            shape,
            style: rotary.style(),
            scale: 1. / (config.head_dim as f32).sqrt(),
            softcap: 0.,
            window: config.window.unwrap_or(0),
        })
    }

    /// The layers of a model have one shape.
    fn scratch(&mut self, shape: &StepShape) -> std::result::Result<(Address, Address), Refusal> {
        if let Some(scratch) = self.scratch {
            return Ok(scratch);
        }
        let sizes = partials(self.launcher.gpu, shape);
        let sizes = sizes.map_err(|e| Refusal::Unfused(e.to_string()))?;
        let partial = self.buffer(DType::U8, sizes.bytes)?;
        let zeros = self.device.alloc_zeros::<u32>(sizes.counters)?;
        let zeros = CudaStorage::wrap_cuda_slice(zeros, self.device.clone());
        let counters = address(&zeros, &Layout::contiguous(sizes.counters))?;
        self.buffers.push(zeros);
        Ok(*self.scratch.insert((partial, counters)))
    }

    /// The head with the last norm as its prologue, and the choice of the next tokens.
    pub fn head(&mut self, head: &Projection, norm: &Norm) -> std::result::Result<(), Refusal> {
        let vocab = head.rows().iter().sum::<usize>();
        let logits = self.buffer(DType::F32, self.io.sequences * vocab)?;
        let options = ProductOptions::after_norm(norm, logits, DType::F32);
        let head = self.product(head, self.x, options)?;
        self.work.push(("head", StepOp::Linear(head)));
        let step = sample::Step {
            dtype: dtype_index(DType::F32) as i32,
            logits,
            ..self.io.sampling
        };
        self.work.push(("sample", StepOp::Sample(step)));
        Ok(())
    }
}
