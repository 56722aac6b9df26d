//! The CUDA form: one launch for a whole step of attention.

use super::{OP, Op};
use crate::cuda::abi::{
    DECODING_LANES, DECODING_LANES_KEYS, DECODING_MMA, DECODING_MMA_WARPS, DecodingParams,
    MAX_HEADS, WARP,
};
use crate::cuda::{
    Address, Gpu, Grid, Launcher, Module, UNALIGNED, address, address_of, alloc, fatbin,
};
use crate::ops::RopeStyle;
use crate::ops::linear::cuda::Fetch;
use crate::ops::view::dtype_index;
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, bail};

mod beside;
#[cfg(test)]
mod tests;

pub(crate) use beside::Beside;

/// In the order of the constants below.
static MODULE: Module = Module::new(
    "decode",
    fatbin!("decode"),
    &[
        "flash_decoding_d64_f16",
        "flash_decoding_d64_bf16",
        "flash_decoding_d80_f16",
        "flash_decoding_d80_bf16",
        "flash_decoding_d96_f16",
        "flash_decoding_d96_bf16",
        "flash_decoding_d128_f16",
        "flash_decoding_d128_bf16",
        "flash_decoding_d256_f16",
        "flash_decoding_d256_bf16",
        "flash_decoding_any64",
        "flash_decoding_any128",
        "flash_decoding_any256",
    ],
);

/// The widest head whose kernel finds room beside the one in front and has time to rehearse. Wider ones
/// take most of a multiprocessor's registers, so they begin when the queries are there, and a
/// rehearsal would only delay them (on an H100 Qwen3-0.6B's step takes 0.87 ms with it and 0.81 without,
/// but SmolLM2-135M's 0.42 and 0.44).
const REHEARSED: usize = 64;

/// The widest head.
pub(crate) const MOST_DIM: usize = 256;

/// One step of attention on raw addresses; 0 stands for no tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    /// `[sequences, (heads + 2 kv_heads) head_dim]`
    pub qkv: Address,
    /// `[head_dim]`, of qkv's dtype.
    pub q_norm: Address,
    /// Likewise.
    pub k_norm: Address,
    pub eps: f32,
    /// f32 `[positions, pairs]`
    pub cos: Address,
    /// Likewise.
    pub sin: Address,
    /// `[sequences, kv_heads, slots, head_dim]`
    pub k_cache: Address,
    /// Likewise.
    pub v_cache: Address,
    /// `[sequences, heads head_dim]`, of qkv's dtype.
    pub out: Address,
    /// [`partial_bytes`]
    pub partial: Address,
    /// [`counters`] u32, zero.
    pub counters: Address,
    /// u32 `[sequences]`
    pub position: Address,
    pub shape: StepShape,
    pub style: RopeStyle,
    pub scale: f32,
    /// 0 for none.
    pub softcap: f32,
    /// 0 for none.
    pub window: usize,
}

/// What the size of a step's scratch memory depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepShape {
    pub sequences: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub slots: usize,
    /// Rows of the rotary tables.
    pub positions: usize,
    /// Rotated pairs of a head.
    pub pairs: usize,
    pub dtype: DType,
    pub cache_dtype: DType,
}

/// How the keys are shared out.
struct Shares {
    kernel: usize,
    warps: usize,
    /// Rows of blocks: the parts of each key/value head's query heads.
    parts: usize,
    /// Blocks of a row.
    blocks: usize,
    /// Tiles of keys before another block joins.
    tiles: usize,
    shared: usize,
}

impl StepShape {
    /// The tensor-core kernel's place and that of its type, or why there is none.
    fn tensor(
        &self,
        gpu: &Gpu,
        aligned: bool,
    ) -> std::result::Result<(usize, usize), &'static str> {
        let half = match self.cache_dtype {
            DType::F16 => 0,
            // Turing has no bf16.
            DType::BF16 if gpu.arch >= 80 => 1,
            _ => return Err("no tensor cores for the cache's type"),
        };
        match DECODING_MMA
            .iter()
            .position(|form| form.dim == self.head_dim)
        {
            None => Err("no tensor-core form of this head dimension"),
            Some(_) if !aligned => Err(UNALIGNED),
            Some(_) if self.shared(DECODING_MMA_WARPS, MAX_HEADS, true) > gpu.shared as usize => {
                Err("too little shared memory for tensor cores")
            }
            Some(i) => Ok((i, half)),
        }
    }

    /// Bytes of shared memory of a block that has up to `most` query heads: `Shared` of the kernel.
    fn shared(&self, warps: usize, most: usize, tensor: bool) -> usize {
        let (d, heads) = (self.head_dim, (self.heads / self.kv_heads).min(most));
        let floats = (MAX_HEADS + 6) * d
            + MAX_HEADS
            + 2 * warps * MAX_HEADS
            + 2
            + warps * heads * (d + d % 2 + 2);
        let queries = if tensor { d / 16 * 512 } else { 0 };
        queries + 4 * floats
    }

    /// `aligned`: whether the caches begin at multiples of 16 bytes, as the tensor cores' loads do;
    /// `keys`: as for [`Prepared::new`].
    fn shares(&self, gpu: &Gpu, aligned: bool, keys: Option<usize>) -> Shares {
        let tensor = self.tensor(gpu, aligned);
        let (kernel, keys, most, warps) = match tensor {
            Ok((i, half)) => {
                let keys = keys.unwrap_or(DECODING_MMA[i].keys);
                (2 * i + half, keys, MAX_HEADS, DECODING_MMA_WARPS)
            }
            Err(_) => {
                let widest = DECODING_LANES.len() - 1;
                let mut forms = DECODING_LANES.iter();
                let place = forms.position(|form| self.head_dim <= form.dim);
                let place = place.unwrap_or(widest);
                let form = DECODING_LANES[place];
                let kernel = 2 * DECODING_MMA.len() + place;
                (kernel, DECODING_LANES_KEYS, form.heads, form.warps)
            }
        };
        let group = self.heads / self.kv_heads;
        let parts = group.div_ceil(most);
        // Each warp has one turn before another block joins: a second turn costs a little more.
        let tiles = warps;
        // Half as many warps leave room for a second block on a multiprocessor.
        let blocks = gpu.sms as usize * (8 / warps);
        let rows = (self.kv_heads * parts * self.sequences).max(1);
        let useful = self.slots.div_ceil(keys).div_ceil(tiles);
        Shares {
            kernel,
            warps,
            parts,
            blocks: (blocks / rows).min(useful).max(1),
            tiles,
            shared: self.shared(warps, most, tensor.is_ok()),
        }
    }

    /// Bytes that the blocks of a step leave for the one that ends last.
    pub fn partial_bytes(&self, gpu: &Gpu) -> usize {
        let bytes = |aligned| {
            let shares = self.shares(gpu, aligned, Some(DECODING_LANES_KEYS));
            8 * self.rows(&shares) * shares.blocks * MAX_HEADS * self.head_dim
        };
        bytes(true).max(bytes(false))
    }

    /// u32 that count the blocks of a step that are done.
    pub fn counters(&self, gpu: &Gpu) -> usize {
        let rows = |aligned| self.rows(&self.shares(gpu, aligned, None));
        rows(true).max(rows(false))
    }

    fn rows(&self, shares: &Shares) -> usize {
        self.sequences * self.kv_heads * shares.parts
    }
}

/// A step as a kernel takes it.
struct Prepared {
    shares: Shares,
    params: DecodingParams,
    /// The grid.
    blocks: [u32; 3],
}

impl Prepared {
    /// `keys`: how many a warp takes at once, if that is not the usual number.
    fn new(launcher: &Launcher, step: &Step, keys: Option<usize>) -> Result<Self> {
        let StepShape {
            sequences,
            heads,
            kv_heads,
            head_dim,
            slots,
            positions,
            pairs,
            dtype,
            cache_dtype,
        } = step.shape;
        let shares = step.shape.shares(launcher.gpu, step.is_aligned(), keys);
        if head_dim > MOST_DIM || shares.shared > launcher.gpu.shared as usize {
            bail!("{OP}: a head dimension of {head_dim} is past what the kernel takes");
        }
        let projected = sequences * (heads + 2 * kv_heads) * head_dim;
        if u32::try_from(projected).is_err() || u32::try_from(slots).is_err() {
            bail!(
                "{OP}: {projected} projected values and {slots} slots are past what the kernel takes"
            );
        }
        let params = DecodingParams {
            qkv: step.qkv,
            q_norm: step.q_norm,
            k_norm: step.k_norm,
            cos: step.cos,
            sin: step.sin,
            k_cache: step.k_cache,
            v_cache: step.v_cache,
            y: step.out,
            partial: step.partial,
            counters: step.counters,
            position: step.position,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            head_dim: head_dim as u32,
            slots: slots as u32,
            positions: positions as u32,
            pairs: pairs as u32,
            // One that no position passes hides nothing.
            window: u32::try_from(step.window).unwrap_or(0),
            tiles: shares.tiles as u32,
            dtype: dtype_index(dtype) as i32,
            cache_dtype: dtype_index(cache_dtype) as i32,
            interleaved: (step.style == RopeStyle::Interleaved).into(),
            // Only where there is a wait to rehearse before.
            rehearse: (launcher.dependent && launcher.gpu.arch >= 90 && head_dim <= REHEARSED)
                .into(),
            scale: step.scale,
            softcap: step.softcap,
            eps: step.eps,
        };
        let blocks = [shares.blocks, kv_heads * shares.parts, sequences].map(|n| n as u32);
        Ok(Self {
            shares,
            params,
            blocks,
        })
    }
}

impl Step {
    /// The keys and values of one sequence's earlier steps.
    pub fn earlier(&self) -> Fetch {
        let row = self.shape.head_dim * self.shape.cache_dtype.size_in_bytes();
        Fetch {
            k: self.k_cache,
            v: self.v_cache,
            position: self.position,
            planes: self.shape.kv_heads as u32,
            plane: (self.shape.slots * row) as u32,
            row: row as u32,
        }
    }

    /// Whether the caches begin at multiples of 16 bytes, as the tensor cores' loads do.
    fn is_aligned(&self) -> bool {
        let mut caches = [self.k_cache, self.v_cache].into_iter();
        caches.all(|cache| cache.is_multiple_of(16))
    }
}

/// Launches a step.
///
/// # Safety
/// Every address that is not 0 is valid for the shape given at its field until the stream has passed
/// the launch, and the counters are zero.
pub(crate) unsafe fn launch(launcher: &Launcher, step: &Step) -> Result<()> {
    let Prepared {
        shares,
        params,
        blocks,
    } = Prepared::new(launcher, step, None)?;
    let grid = Grid::new(blocks, (WARP * shares.warps) as u32, shares.shared as u32);
    // SAFETY: the kernel takes `DecodingParams`; the addresses are the caller's.
    unsafe { launcher.run(&MODULE, shares.kernel, grid, &params) }
}

pub(super) fn forward(
    op: &Op<'_>,
    qkv: &CudaStorage,
    layout: &Layout,
) -> Result<(CudaStorage, Shape)> {
    let device = qkv.device();
    let launcher = Launcher::new(device)?;
    let config = op.config;
    let (sequences, _) = layout.shape().dims2()?;
    let [_, kv_heads, slots, head_dim] = *op.k_cache.dims() else {
        bail!("{OP}: k_cache is {:?}", op.k_cache.shape());
    };
    let [cos, sin] = [config.cos, config.sin].map(candle_core::Tensor::contiguous);
    let (cos, sin, position) = (cos?, sin?, op.position.contiguous()?);
    let shape = StepShape {
        sequences,
        heads: config.heads,
        kv_heads,
        head_dim,
        slots,
        positions: cos.dim(0)?,
        pairs: cos.dim(1)?,
        dtype: qkv.dtype(),
        cache_dtype: op.k_cache.dtype(),
    };
    let width = config.heads * head_dim;
    let out = alloc(OP, device, qkv.dtype(), sequences * width)?;
    let stream = device.cuda_stream();
    let partial_bytes = shape.partial_bytes(launcher.gpu);
    let partial = alloc(OP, device, DType::U8, partial_bytes)?;
    let counters = device.alloc_zeros::<u32>(shape.counters(launcher.gpu))?;
    let norms = config
        .norms
        .map(|n| Ok::<_, candle_core::Error>((n.q.contiguous()?, n.k.contiguous()?)));
    let norms = norms.transpose()?;
    let norm = |which: Option<&candle_core::Tensor>| which.map_or(Ok(0), address_of);
    let step = Step {
        qkv: address(qkv, layout)?,
        q_norm: norm(norms.as_ref().map(|n| &n.0))?,
        k_norm: norm(norms.as_ref().map(|n| &n.1))?,
        eps: config.norms.map_or(0., |n| n.eps as f32),
        cos: address_of(&cos)?,
        sin: address_of(&sin)?,
        k_cache: address_of(op.k_cache)?,
        v_cache: address_of(op.v_cache)?,
        out: address(&out, &Layout::contiguous(sequences * width))?,
        partial: address(&partial, &Layout::contiguous(partial_bytes))?,
        counters: counters.device_ptr(&stream).0,
        position: address_of(&position)?,
        shape,
        style: config.style,
        scale: config.scale,
        softcap: config.softcap.unwrap_or(0.),
        window: config.window.unwrap_or(0),
    };
    trace::record(OP, || {
        let norms = if norms.is_some() { " +norms" } else { "" };
        let (q, kv) = (qkv.dtype().as_str(), op.k_cache.dtype().as_str());
        match shape.tensor(launcher.gpu, step.is_aligned()) {
            Ok(_) => format!("cuda mma q {q} kv {kv}{norms}"),
            Err(reason) => format!("cuda plain q {q} kv {kv}{norms}: {reason}"),
        }
    });
    // SAFETY: the guards have checked the shapes; scratch memory is made above in the sizes asked
    // for, and freed behind the launch on the same stream.
    unsafe { launch(&launcher, &step)? };
    Ok((out, Shape::from((sequences, width))))
}
