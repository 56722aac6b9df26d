//! A decode step written down: which kernels run over which addresses, from token ids to next
//! tokens. Five steps a layer: q, k, v behind the norm; attention with rotation and append; the
//! output projection with the residual; gate and up, or up alone, behind the norm; down with the
//! residual. Where attention and MLP stand side by side, up comes before the residual.

use super::refusal::{Refusal, unfused};
use super::state::State;
use crate::cuda::{Address, Launcher, Scratch, address, address_of, alloc};
use crate::models::decoder::{Block, Decoder, Rotaries};
use crate::nn::{KvCache, Norm, Projection, RotaryEmbedding};
use crate::ops::Activation;
use crate::ops::embedding::cuda::{self as embedding, Lookup};
use crate::ops::flash_decoding::cuda::{Attention, IndependentProduct, Step, StepShape, partials};
use crate::ops::linear::cuda::{
    NormAt, NormKind, Operands, Product, ProductAt, gemv_dense_pipelined as pipelined,
};
use crate::ops::sample::cuda as sample;
use crate::ops::view::dtype_index;
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result, Tensor};
use std::cell::RefCell;

/// One step of the model.
enum Work {
    Embedding(Lookup),
    Linear(Product),
    /// Alone, or beside a product.
    Attention(Box<Attention>),
    Sample(sample::Step),
}

/// The launches of a decode step, in order, and what they work on.
pub(super) struct Plan {
    /// Each with the name of its part of the model.
    work: Vec<(&'static str, Work)>,
    sequences: u32,
    /// What products need between their launches; the steps of a chain take turns.
    scratch: RefCell<Scratch>,
    /// Whose addresses stand in the work, beside the state's.
    _held: Held,
}

struct Held {
    _decoder: Decoder,
    _caches: Vec<(Tensor, Tensor)>,
    _tables: Rotaries,
    _buffers: Vec<CudaStorage>,
}

impl Plan {
    /// # Errors
    /// If a part of the model is not fused, so that there is no such chain, or memory is short.
    pub fn new(
        device: &CudaDevice,
        decoder: &Decoder,
        caches: &[KvCache],
        rotaries: &Rotaries,
        state: &State,
    ) -> std::result::Result<Self, Refusal> {
        let Some(table) = decoder.stack.embedding.table() else {
            return unfused("the embedding is not in the GPU's memory");
        };
        let lookup = Lookup::new(table, state.token(), 0, state.sequences())?;
        let mut writer = Writer::new(device, lookup, state)?;
        for (i, (block, cache)) in decoder.stack.blocks.iter().zip(caches).enumerate() {
            let written = writer.block(block, cache, rotaries.of(block));
            written.map_err(|refusal| refusal.within(format_args!("layer {i}")))?;
        }
        let written = writer.head(&decoder.head, &decoder.stack.norm);
        written.map_err(|refusal| refusal.within(format_args!("head")))?;
        let products = writer.work.iter().map(|(_, work)| match work {
            Work::Linear(product) => product.scratch(),
            _ => 0,
        });
        let scratch = Scratch::fixed("generation", device, products.max().unwrap_or(0))?;
        let held = |cache: &KvCache| {
            let (k, v) = cache.buffers()?;
            Ok((k.clone(), v.clone()))
        };
        Ok(Self {
            work: writer.work,
            sequences: state.sequences() as u32,
            scratch: RefCell::new(scratch),
            _held: Held {
                _decoder: decoder.clone(),
                _caches: caches.iter().map(held).collect::<Result<_>>()?,
                _tables: rotaries.clone(),
                _buffers: writer.buffers,
            },
        })
    }

    /// Launches the whole step.
    pub fn launch(&self, launcher: &Launcher) -> Result<()> {
        self.work
            .iter()
            .try_for_each(|(_, work)| self.launch_one(launcher, work))
    }

    /// The parts of the model that there are launches for, in the order of their first.
    pub fn parts(&self) -> Vec<&'static str> {
        let mut parts = Vec::new();
        for (part, _) in &self.work {
            if !parts.contains(part) {
                parts.push(*part);
            }
        }
        parts
    }

    /// Launches one part of the model in all layers, and tells how many steps that was.
    pub fn launch_part(&self, launcher: &Launcher, part: &str) -> Result<usize> {
        let mut count = 0;
        for (_, work) in self.work.iter().filter(|(name, _)| *name == part) {
            self.launch_one(launcher, work)?;
            count += 1;
        }
        Ok(count)
    }

    /// Bytes of keys and values that a part of a step reads when the sequences stand at `positions`.
    pub fn cache_bytes(&self, part: &str, positions: &[usize]) -> u64 {
        let keys: usize = positions.iter().map(|p| p + 1).sum();
        let of = |shape: &StepShape| {
            2 * shape.kv_heads * shape.head_dim * shape.cache_dtype.size_in_bytes()
        };
        let row = |work: &Work| match work {
            Work::Attention(attention) => of(attention.shape()),
            _ => 0,
        };
        self.work
            .iter()
            .filter(|(name, _)| *name == part)
            .map(|(_, work)| (keys * row(work)) as u64)
            .sum()
    }

    fn launch_one(&self, launcher: &Launcher, work: &Work) -> Result<()> {
        // SAFETY: every address stands for a buffer that `_held` or the state keeps, in the size
        // that the work asks for, and all of it is used on candle's stream alone. In the chain no
        // kernel writes what a later one reads before it waits: those are weights and tables.
        unsafe {
            match work {
                Work::Embedding(lookup) => embedding::launch(launcher, lookup),
                Work::Linear(product) => {
                    let mut scratch = self.scratch.borrow_mut();
                    scratch.reset();
                    product.run(&launcher.with_one_cta_per_sm(), &mut scratch)
                }
                Work::Attention(attention) => attention.run(launcher),
                Work::Sample(step) => sample::launch(launcher, self.sequences, *step),
            }
        }
    }

    /// Steps of the model; a product of several weight formats may be more than one kernel.
    pub fn len(&self) -> usize {
        self.work.len()
    }
}

/// Writes a plan, and makes the buffers between its steps.
struct Writer<'a> {
    device: &'a CudaDevice,
    launcher: Launcher,
    state: &'a State,
    work: Vec<(&'static str, Work)>,
    buffers: Vec<CudaStorage>,
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

/// What a product does beside multiplying.
#[derive(Clone, Copy)]
struct Around<'a> {
    norm: Option<&'a Norm>,
    activation: Activation,
    residual: Address,
    out: Address,
    out_dtype: DType,
}

impl<'a> Around<'a> {
    /// A norm in front.
    fn behind(norm: &'a Norm, out: Address, out_dtype: DType) -> Self {
        Self {
            norm: Some(norm),
            activation: Activation::None,
            residual: 0,
            out,
            out_dtype,
        }
    }
}

impl<'a> Writer<'a> {
    fn new(device: &'a CudaDevice, mut lookup: Lookup, state: &'a State) -> Result<Self> {
        let (dtype, hidden) = (lookup.dtype(), lookup.width());
        let mut writer = Self {
            device,
            launcher: Launcher::new(device)?,
            state,
            work: Vec::new(),
            buffers: Vec::new(),
            dtype,
            x: 0,
            between: [(0, 0); 2],
            scratch: None,
        };
        writer.x = writer.buffer(dtype, state.sequences() * hidden)?;
        lookup.out = writer.x;
        writer.work.push(("embedding", Work::Embedding(lookup)));
        Ok(writer)
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
            let len = self.state.sequences() * width;
            self.between[which] = (self.buffer(self.dtype, len)?, width);
        }
        Ok(self.between[which].0)
    }

    /// The steps of a layer, five or, side by side, three.
    fn block(
        &mut self,
        block: &Block,
        cache: &KvCache,
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
        let hidden = attended + (self.state.sequences() * width * size) as Address;
        let first = Around::behind(&block.attention_norm, q, self.dtype);
        let inside = Around {
            activation: block.mlp.activation(),
            ..Around::behind(&block.mlp_norm, hidden, self.dtype)
        };
        let first = self.product(qkv, self.x, first)?;
        let inside = self.product(up, self.x, inside)?;
        let add = self.added();
        let output = self.product(output, attended, add)?;
        let down = self.product(down, hidden, add)?;
        let step = self.step(block, cache, rotary, attended)?;
        let side = match block.parallel {
            true => self.side_by_side(&step, [&first, &inside, &output, &down]),
            false => None,
        };
        let first = match (&side, first.single()) {
            (Some(_), Some((_, operands))) => {
                let operands = Operands {
                    fetch: Some(step.earlier()),
                    ..operands.clone()
                };
                Product::of(&self.launcher.with_one_cta_per_sm(), operands)?
            }
            _ => first,
        };
        self.work.push(("qkv", Work::Linear(first)));
        let inside_name = match block.mlp.activation().gate() {
            Some(_) => "gate_up",
            None => "up",
        };
        if let Some((both, pair)) = side {
            self.work.push((WITH_UP, Work::Attention(Box::new(both))));
            self.work.push(("output+down", Work::Linear(pair)));
            return Ok(());
        }
        let attention = Attention::new(&self.launcher, step, None);
        let attention = attention.map_err(|e| Refusal::Unfused(e.to_string()))?;
        let attention = Work::Attention(Box::new(attention));
        if block.parallel {
            // Both read the stream before either adds to it.
            self.work.push((inside_name, Work::Linear(inside)));
            self.work.push((ATTENTION, attention));
            self.work.push(("output", Work::Linear(output)));
        } else {
            self.work.push((ATTENTION, attention));
            self.work.push(("output", Work::Linear(output)));
            self.work.push((inside_name, Work::Linear(inside)));
        }
        self.work.push(("down", Work::Linear(down)));
        Ok(())
    }

    /// Attention with the first half of the MLP, and both ways back in one product.
    fn side_by_side(
        &self,
        step: &Step,
        [first, inside, output, down]: [&Product; 4],
    ) -> Option<(Attention, Product)> {
        let [(first, _), (_, inside), (_, output), (_, down)] = [
            first.single()?,
            inside.single()?,
            output.single()?,
            down.single()?,
        ];
        let independent = IndependentProduct {
            product: inside.clone(),
            ready: first.kernel == pipelined::NAME,
        };
        let both = Attention::new(&self.launcher, *step, Some(independent)).ok()?;
        let mut pair = pipelined::pair(output, down)?;
        // The second bias is added as a residual is: there is one row.
        pair.at.residuals[1] = down.at.bias;
        let pair = Product::of(&self.launcher.with_one_cta_per_sm(), pair).ok()?;
        Some((both, pair))
    }

    /// A product that is added to the stream.
    fn added(&self) -> Around<'static> {
        Around {
            norm: None,
            activation: Activation::None,
            residual: self.x,
            out: self.x,
            out_dtype: self.dtype,
        }
    }

    fn product(
        &self,
        linear: &Projection,
        x: Address,
        around: Around<'_>,
    ) -> std::result::Result<Product, Refusal> {
        let Some((weights, bias)) = linear.fused_parts() else {
            return unfused(
                "a product is switched off, gathers its input, or its weights are not on the GPU",
            );
        };
        let rows = linear.rows().iter().sum::<usize>();
        let norm = match around.norm {
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
            activation: around.activation,
            residuals: [around.residual, 0],
            out: around.out,
            stride: around.activation.outputs(rows),
            m: self.state.sequences(),
            k: weights.first().map_or(0, |w| w.cols()),
            x_dtype: self.dtype,
            x_bits: linear.fusion().activations,
            out_dtype: around.out_dtype,
        };
        let product = Product::new(&self.launcher.with_one_cta_per_sm(), weights, &at);
        product.map_err(|e| Refusal::Unfused(e.to_string()))
    }

    fn step(
        &mut self,
        block: &Block,
        cache: &KvCache,
        rotary: &RotaryEmbedding,
        out: Address,
    ) -> std::result::Result<Step, Refusal> {
        let config = block.attention.config();
        let (k, v) = cache.buffers()?;
        let (cos, sin) = rotary.tables();
        let shape = StepShape {
            sequences: self.state.sequences(),
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            slots: k.dim(2)?,
            positions: cos.dim(0)?,
            pairs: cos.dim(1)?,
            dtype: self.dtype,
            cache_dtype: k.dtype(),
        };
        let norms = block.attention.head_norms();
        let alike = norms.is_none_or(|n| [n.q, n.k].iter().all(|w| w.dtype() == self.dtype));
        if !alike {
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
            k_cache: address_of(k)?,
            v_cache: address_of(v)?,
            out,
            partial,
            counters,
            position: self.state.position(),
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

    /// The head behind the last norm, and the choice of the next tokens.
    fn head(&mut self, head: &Projection, norm: &Norm) -> std::result::Result<(), Refusal> {
        let vocab = head.rows().iter().sum::<usize>();
        let logits = self.buffer(DType::F32, self.state.sequences() * vocab)?;
        let around = Around::behind(norm, logits, DType::F32);
        let head = self.product(head, self.x, around)?;
        self.work.push(("head", Work::Linear(head)));
        let step = sample::Step {
            dtype: dtype_index(DType::F32) as i32,
            ..self.state.sampling(logits)
        };
        self.work.push(("sample", Work::Sample(step)));
        Ok(())
    }
}

/// None if the norm is of another dtype than the stream.
pub(super) fn norm_at(norm: &Norm, dtype: DType) -> Result<Option<NormAt>> {
    let (kind, weight, bias, eps) = match norm {
        Norm::Rms(n) => (NormKind::Rms, n.weight(), None, n.eps()),
        // Without the removal of the mean and with a bias: no model has it.
        Norm::Layer(n) if !n.remove_mean() => return Ok(None),
        Norm::Layer(n) => (NormKind::Layer, n.weight(), n.bias(), n.eps()),
    };
    if weight.dtype() != dtype || bias.is_some_and(|b| b.dtype() != dtype) {
        return Ok(None);
    }
    Ok(Some(NormAt {
        kind,
        weight: address_of(weight)?,
        bias: bias.map_or(Ok(0), address_of)?,
        eps: eps as f32,
    }))
}
