//! What is asked of a step of attention: its operands by address, and the [`Case`] that a kernel is chosen by.

use crate::cuda::abi::{DecodingParams, KeyPages, Pages};
use crate::cuda::{Address, GpuSpec, Launcher, UNALIGNED};
use crate::ops::RopeStyle;
use crate::ops::linear::cuda::{self as linear, Fetch};
use crate::ops::view::dtype_index;
use candle_core::{DType, bail};
use std::fmt;

/// The widest head for which `decode.cuh`'s kernels warm up (`warms_up` there; those in clusters and the pipelined one
/// never do). Wider ones take most of a multiprocessor's registers, so that they find no room beside the preceding
/// kernel and begin when the queries are there. A warm-up would only delay them (on an H100 Qwen3-0.6B's step takes 0.87
/// ms with it and 0.81 without, but SmolLM2-135M's 0.42 and 0.44).
const WIDEST_WARMED_UP: usize = 64;

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
    /// `[sequences, kv_heads, slots, head_dim]`, or a pool of pages.
    pub k_cache: Address,
    /// Likewise.
    pub v_cache: Address,
    /// Where the caches are pools: their strides, and a padded table with a row for each sequence.
    pub pages: Option<Pages>,
    /// `[sequences, heads head_dim]`, of qkv's dtype.
    pub out: Address,
    /// As many bytes as [`partials`](super::partials) says.
    pub partial: Address,
    /// As many u32 as that says, zero.
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

/// Sizes and dtypes of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepShape {
    pub sequences: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Of a sequence; in pages as many as a row of the table has room for.
    pub slots: usize,
    /// Whether keys and values are in pages.
    pub paged: bool,
    /// Rows of the rotary tables.
    pub positions: usize,
    /// Rotated pairs of a head.
    pub pairs: usize,
    pub dtype: DType,
    /// Of codes, what stands for their format.
    pub cache_dtype: DType,
}

impl StepShape {
    /// Query heads that read one key/value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Fails where the kernels' 32-bit counters would not do.
    pub fn check(&self) -> candle_core::Result<()> {
        let projected = self.sequences * (self.heads + 2 * self.kv_heads) * self.head_dim;
        let slots = self.slots;
        if u32::try_from(projected).is_err() || u32::try_from(slots).is_err() {
            bail!(
                "flash_decoding: {projected} projected values and {slots} slots are past what the kernel takes"
            );
        }
        Ok(())
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

    /// Whether the caches' rows begin at multiples of 16 bytes, as the tensor cores' loads do.
    fn is_aligned(&self) -> bool {
        let mut caches = [self.k_cache, self.v_cache].into_iter();
        let size = self.shape.cache_dtype.size_in_bytes() as u64;
        let strides = self.strides();
        let mut strides = strides.as_flattened().iter().map(|s| s * size);
        caches.all(|cache| cache.is_multiple_of(16)) && strides.all(|s| s.is_multiple_of(16))
    }

    /// Whether the kernel in clusters, whose lanes have runs of elements, can take the step's tensors.
    fn clustered(&self) -> Result<(), &'static str> {
        let rows = [self.qkv, self.out].iter().all(|a| a.is_multiple_of(16));
        let norms = [self.q_norm, self.k_norm];
        let norms = norms.iter().all(|a| a.is_multiple_of(16));
        if !(rows && norms && self.is_aligned()) {
            return Err(UNALIGNED);
        }
        let dtypes = [self.shape.dtype, self.shape.cache_dtype];
        if dtypes[0] != dtypes[1] && dtypes[0] != DType::F32 {
            return Err("the projection is of another 16-bit type than the caches");
        }
        match self.shape.pairs == 0 || 2 * self.shape.pairs == self.shape.head_dim {
            true => Ok(()),
            false => Err("only a part of each head is rotated"),
        }
    }

    /// Whether the pipelined kernel, which copies 16 bytes at a time and counts them by 32 bits, can take the
    /// step's tensors.
    fn pipelined(&self) -> Result<(), &'static str> {
        let Some(pages) = self.pages else {
            return Err("keys and values are not in pages");
        };
        let [k, v] = self.strides();
        let size = self.shape.cache_dtype.size_in_bytes() as u64;
        let rows = [self.qkv, self.out].iter().all(|a| a.is_multiple_of(16));
        if !(rows && self.is_aligned()) {
            return Err(UNALIGNED);
        }
        if k != v {
            return Err("keys lie otherwise in their pages than values");
        }
        match u32::try_from(u64::from(pages.pages) * k[0] * size / 16) {
            Ok(_) => Ok(()),
            Err(_) => Err("the pool has 64 GiB or more"),
        }
    }

    /// Elements from page to page, token to token and head to head, of keys and of values.
    fn strides(&self) -> [[u64; 3]; 2] {
        self.pages.map_or([[0; 3]; 2], |p| {
            [
                [p.k_page, p.k_token, p.k_head],
                [p.v_page, p.v_token, p.v_head],
            ]
        })
    }

    /// The table of pages.
    fn key_pages(&self) -> KeyPages {
        self.pages.map_or_else(KeyPages::default, |p| KeyPages {
            entries: p.entries,
            step: p.step,
            width: p.width,
            page: p.page,
            page_bits: p.page.trailing_zeros(),
            pages: p.pages,
            k_scales: p.k_scales,
            v_scales: p.v_scales,
            k_scale_strides: p.k_scale_strides,
            v_scale_strides: p.v_scale_strides,
            ..Default::default()
        })
    }

    /// What the kernels take, of which a block has so many tiles of keys before another joins.
    pub fn params(&self, launcher: &Launcher, tiles: usize) -> DecodingParams {
        let shape = &self.shape;
        let [k_strides, v_strides] = self.strides();
        DecodingParams {
            qkv: self.qkv,
            q_norm: self.q_norm,
            k_norm: self.k_norm,
            cos: self.cos,
            sin: self.sin,
            k_cache: self.k_cache,
            v_cache: self.v_cache,
            pages: self.key_pages(),
            k_strides,
            v_strides,
            y: self.out,
            partial: self.partial,
            counters: self.counters,
            position: self.position,
            heads: shape.heads as u32,
            kv_heads: shape.kv_heads as u32,
            head_dim: shape.head_dim as u32,
            slots: shape.slots as u32,
            positions: shape.positions as u32,
            pairs: shape.pairs as u32,
            // One that no position passes hides nothing.
            window: u32::try_from(self.window).unwrap_or(0),
            tiles: tiles as u32,
            dtype: dtype_index(shape.dtype) as i32,
            cache_dtype: dtype_index(shape.cache_dtype) as i32,
            interleaved: (self.style == RopeStyle::Interleaved).into(),
            // Only where there is a wait to warm up before, and not where blocks follow one another.
            warm_up: (launcher.dependent
                && launcher.gpu.arch >= 90
                && shape.head_dim <= WIDEST_WARMED_UP
                && shape.sequences * shape.kv_heads <= launcher.gpu.sms as usize)
                .into(),
            scale: self.scale,
            softcap: self.softcap,
            eps: self.eps,
        }
    }
}

/// A product of one row that reads nothing of a step, nor writes what it reads.
#[derive(Clone, Debug)]
pub(crate) struct IndependentProduct {
    pub product: linear::Operands,
    /// Whether the product need not wait for the preceding kernel, which writes nothing that it reads and
    /// begins when all preceding ones are complete.
    pub ready: bool,
}

/// A product that the launch of a step computes as well.
#[derive(Clone, Debug)]
pub(crate) enum Companion {
    /// Beside the step.
    Independent(IndependentProduct),
    /// The step's queries, keys and values.
    Qkv(linear::Operands),
}

/// A step, and the product that the same launch computes.
#[derive(Clone, Debug)]
pub(crate) struct Operands {
    pub step: Step,
    pub companion: Option<Companion>,
}

impl Operands {
    /// What a kernel is chosen by.
    pub fn case(&self, launcher: &Launcher) -> Case {
        Case {
            gpu: launcher.gpu.spec,
            shape: self.step.shape,
            aligned: self.step.is_aligned(),
            pipelined: self.step.pipelined(),
            clustered: self.step.clustered(),
            product: self.companion.as_ref().map(|companion| match companion {
                Companion::Independent(beside) => (Role::Beside, beside.product.case(launcher)),
                Companion::Qkv(product) => (Role::Qkv, product.case(launcher)),
            }),
        }
    }
}

/// What a product is to the step of its launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Neither needs the other.
    Beside,
    /// It gives the step's queries, keys and values.
    Qkv,
}

/// All that the choice of a kernel may depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub gpu: GpuSpec,
    pub shape: StepShape,
    /// Whether the caches begin at multiples of 16 bytes.
    pub aligned: bool,
    /// Why the pipelined kernel cannot read and write the step's tensors, if it cannot.
    pub pipelined: Result<(), &'static str>,
    /// Likewise of the kernel in clusters.
    pub clustered: Result<(), &'static str>,
    /// A product in the same launch.
    pub product: Option<(Role, linear::Case)>,
}

/// As in `q bf16 [1, 9, 64] over bf16 [1, 3, 2048, 64] on sm_90`.
impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StepShape {
            sequences,
            heads,
            kv_heads,
            head_dim,
            slots,
            dtype,
            cache_dtype,
            paged,
            ..
        } = self.shape;
        let (q, kv) = (dtype.as_str(), cache_dtype.as_str());
        write!(f, "q {q} [{sequences}, {heads}, {head_dim}]")?;
        write!(
            f,
            " over {kv} [{sequences}, {kv_heads}, {slots}, {head_dim}]"
        )?;
        if paged {
            f.write_str(" in pages")?;
        }
        match &self.product {
            Some((Role::Beside, product)) => write!(f, " beside {product}"),
            Some((Role::Qkv, product)) => write!(f, " behind {product}"),
            None => write!(f, " on sm_{}", self.gpu.arch),
        }
    }
}
