//! `kernels/attention/prefill_sm90.cu`: Hopper's asynchronous tensor cores and bulk copies.

use super::forms::head_sizes;
use super::plan::{Kernel, Planned};
use super::problem::{Batch, Call, Case, Operand};
use crate::cuda::abi::{ATTENTION_SM90, AttentionSm90, AttentionSm90Params, KeyPages, TensorMap};
use crate::cuda::{Grid, Launcher, Module, PIECES, fatbin};
use candle_core::cuda_backend::cudarc::driver::{DriverError, sys};
use candle_core::{DType, Result, bail};

static MODULE: Module = Module::new(
    "prefill_sm90",
    fatbin!("prefill_sm90"),
    &[
        "flash_attention_sm90_d64_f16",
        "flash_attention_sm90_d64_bf16",
        "flash_attention_sm90_d80_f16",
        "flash_attention_sm90_d80_bf16",
        "flash_attention_sm90_d96_f16",
        "flash_attention_sm90_d96_bf16",
        "flash_attention_sm90_d128_f16",
        "flash_attention_sm90_d128_bf16",
        "flash_attention_sm90_d256_f16",
        "flash_attention_sm90_d256_bf16",
        "flash_attention_sm90_shared_d64_f16",
        "flash_attention_sm90_shared_d64_bf16",
        "flash_attention_sm90_shared_d128_f16",
        "flash_attention_sm90_shared_d128_bf16",
    ],
);

/// For ragged batches.
static RAGGED: Module = Module::new(
    "varlen_sm90",
    fatbin!("varlen_sm90"),
    &[
        "flash_attention_varlen_sm90_d64_f16",
        "flash_attention_varlen_sm90_d64_bf16",
        "flash_attention_varlen_sm90_d80_f16",
        "flash_attention_varlen_sm90_d80_bf16",
        "flash_attention_varlen_sm90_d96_f16",
        "flash_attention_varlen_sm90_d96_bf16",
        "flash_attention_varlen_sm90_d128_f16",
        "flash_attention_varlen_sm90_d128_bf16",
        "flash_attention_varlen_sm90_d256_f16",
        "flash_attention_varlen_sm90_d256_bf16",
        "flash_attention_varlen_sm90_shared_d64_f16",
        "flash_attention_varlen_sm90_shared_d64_bf16",
        "flash_attention_varlen_sm90_shared_d128_f16",
        "flash_attention_varlen_sm90_shared_d128_bf16",
    ],
);

/// Over keys and values in pages.
static PAGED: Module = Module::new(
    "paged_prefill_sm90",
    fatbin!("paged_prefill_sm90"),
    &[
        "paged_prefill_sm90_d64_f16",
        "paged_prefill_sm90_d64_bf16",
        "paged_prefill_sm90_d80_f16",
        "paged_prefill_sm90_d80_bf16",
        "paged_prefill_sm90_d96_f16",
        "paged_prefill_sm90_d96_bf16",
        "paged_prefill_sm90_d128_f16",
        "paged_prefill_sm90_d128_bf16",
        "paged_prefill_sm90_d256_f16",
        "paged_prefill_sm90_d256_bf16",
        "paged_prefill_sm90_shared_d64_f16",
        "paged_prefill_sm90_shared_d64_bf16",
        "paged_prefill_sm90_shared_d128_f16",
        "paged_prefill_sm90_shared_d128_bf16",
    ],
);

impl AttentionSm90 {
    fn rows(&self) -> usize {
        64 * if self.share { 1 } else { self.consumers }
    }

    /// Bytes of the queries, two tiles of keys and of values in each lane, and alignment.
    fn shared(&self) -> usize {
        let lanes = if self.share { self.consumers } else { 1 };
        2 * self.dim * (self.rows() + lanes * 2 * 2 * self.keys) + 1024
    }

    /// Tokens of a page that are copied at once; none if a tile is no whole number of them.
    fn of_page(&self, page: usize) -> Option<usize> {
        let piece = page.min(self.keys);
        // A swizzle has eight rows.
        let whole = self.keys.is_multiple_of(piece) && page.is_multiple_of(piece);
        (whole && piece.is_multiple_of(8)).then_some(piece)
    }

    /// Elements of a row that lie together in shared memory: as many as a swizzle divides it into.
    fn piece(&self) -> usize {
        [64, 32]
            .into_iter()
            .find(|p| self.dim.is_multiple_of(*p))
            .unwrap_or(SMALL_PIECE)
    }
}

/// Forms whose warpgroups have rows of their own; those that share keys come behind them, for some head sizes.
const UNSHARED: &[AttentionSm90] = ATTENTION_SM90.split_at(5).0;
const _: () = assert!(!UNSHARED[4].share && ATTENTION_SM90[5].share);

/// Head sizes that there are kernels for.
pub(super) const HEAD_SIZES: [usize; UNSHARED.len()] = head_sizes!(UNSHARED);

/// Fewer queries than this leave most of a warpgroup's rows empty.
pub(super) const MIN_QUERIES: usize = 32;

/// Elements of the shortest pieces of a row, each of which TMA copies by itself: of 128 rows with 32 tokens this takes
/// longer than the products (Pythia-2.8B, four sequences on an H200: 7.5 us, `flash_attention_mma` 6.8).
const SMALL_PIECE: usize = 16;

/// Keys and values that stay in L2 while the rows of their heads go through: half of an H100's.
const SECTION_BYTES: usize = 24 << 20;

/// A kernel and how it divides the work.
#[derive(Debug)]
struct Wgmma {
    module: &'static Module,
    index: usize,
    config: AttentionSm90,
    grid: Grid,
    /// Of queries.
    tiles: i32,
    /// Query heads of all sequences.
    columns: i32,
    /// Columns whose keys and values stay in L2 together.
    section: i32,
}

/// Where there are too few tiles of queries for all multiprocessors, by a kernel whose warpgroups have the same rows
/// and share the keys out, if there is one of the head size.
pub(super) fn plan(case: &Case) -> Planned<Call> {
    if let Some(reason) = refusal(case) {
        return Err(reason);
    }
    let sizes = &case.sizes;
    let columns = sizes.batch * sizes.heads;
    let sms = case.gpu.sms as usize;
    let tiles = |config: &AttentionSm90| sizes.queries.div_ceil(config.rows());
    let find = |share: bool| {
        let fits = |config: &AttentionSm90| config.dim == sizes.dim && config.share == share;
        ATTENTION_SM90.iter().position(fits)
    };
    let mut place = find(false).ok_or("it is for other head sizes")?;
    if tiles(&ATTENTION_SM90[place]) * columns < sms {
        place = find(true).unwrap_or(place);
    }
    let config = ATTENTION_SM90[place];
    if config.piece() == SMALL_PIECE && 2 * sizes.queries <= config.rows() {
        return Err(
            "its tiles would be mostly empty, and TMA takes their rows in pieces of 32 bytes",
        );
    }
    if let Batch::Paged(page) = case.batch
        && config.of_page(page).is_none()
    {
        return Err("its tiles are no whole pages, nor pages whole tiles");
    }
    let tiles = tiles(&config);
    let items = tiles * columns;
    if i32::try_from(items).is_err() {
        return Err("more tiles than it counts");
    }
    let blocks = if config.share { items } else { items.min(sms) };
    let threads = 128 * (config.consumers as u32 + 1);
    Ok(Box::new(Wgmma {
        module: case.batch.of([&MODULE, &RAGGED, &PAGED]),
        index: 2 * place + usize::from(case.q == DType::BF16),
        config,
        grid: Grid::new([blocks as u32, 1, 1], threads, config.shared() as u32),
        tiles: tiles as i32,
        columns: columns as i32,
        section: section(case, tiles, blocks) as i32,
    }))
}

impl Kernel<Call> for Wgmma {
    fn entry(&self) -> &'static str {
        self.module.names(self.index).1
    }

    fn grid(&self) -> Grid {
        self.grid
    }

    fn details(&self) -> String {
        let (consumers, section) = (self.config.consumers, self.section);
        let share = match self.config.share {
            true => " that share keys",
            false => "",
        };
        format!("{consumers} warpgroups{share}, sections of {section} heads")
    }

    unsafe fn run(&self, launcher: &Launcher, call: &Call) -> Result<()> {
        let (sizes, config) = (&call.sizes, &self.config);
        let total_q = call.ragged.map_or(sizes.queries, |ragged| ragged.total_q);
        let batch = match call.ragged {
            Some(_) => 1,
            None => sizes.batch,
        };
        let pieces = sizes.dim / config.piece();
        let queries = Tiles {
            dims: [total_q, pieces, sizes.heads, batch],
            rows: config.rows(),
            pieces,
        };
        // A page is copied piece by piece of its rows: those of a tile are not side by side.
        let of_page = |page| config.of_page(page).unwrap_or(page);
        let keys = match call.pages {
            Some(KeyPages { page, pages, .. }) => Tiles {
                dims: [page as usize, pieces, sizes.kv_heads, pages as usize],
                rows: of_page(page as usize),
                pieces: 1,
            },
            None => Tiles {
                dims: [sizes.keys, pieces, sizes.kv_heads, batch],
                rows: config.keys,
                pieces,
            },
        };
        let params = AttentionSm90Params {
            q: tensor_map(call, &call.q, &queries)?,
            k: tensor_map(call, &call.k, &keys)?,
            v: tensor_map(call, &call.v, &keys)?,
            y: call.y,
            cu_q: call.ragged.map_or(0, |ragged| ragged.cu_q),
            cu_k: call.ragged.map_or(0, |ragged| ragged.cu_k),
            pages: call.key_pages(keys.rows),
            heads: sizes.heads as i32,
            kv_heads: sizes.kv_heads as i32,
            queries: sizes.queries as i32,
            keys: sizes.keys as i32,
            unit: call.scale * std::f32::consts::LOG2_E,
            causal: (call.right == Some(0)).into(),
            tiles: self.tiles,
            columns: self.columns,
            section: self.section,
            total_q: total_q as i32,
            total_k: sizes.keys as i32,
            pitch: call.ragged.map_or(0, |ragged| ragged.pitch as i32),
        };
        // SAFETY: the kernel takes `AttentionSm90Params`; the addresses are the caller's.
        unsafe { launcher.run(self.module, self.index, self.grid, &params) }
    }
}

/// Why the kernels do not take the case, whatever its head size.
fn refusal(case: &Case) -> Option<&'static str> {
    let (sizes, at) = (&case.sizes, case.alignment);
    if let Some(reason) = case.batch.refusal() {
        return Some(reason);
    }
    if !case.positive {
        return Some("the scale is not positive");
    }
    // The kernels for other batches ask each sequence.
    let dense = case.batch == Batch::Dense;
    if sizes.keys == 0 || case.causal && dense && sizes.keys < sizes.queries {
        return Some("there are queries without keys");
    }
    (at.q < 16 || at.kv < 16 || at.y < 4).then_some(PIECES)
}

/// Query heads whose keys and values stay in L2 together, but so many that there are two rounds of
/// work for the blocks.
fn section(case: &Case, tiles: usize, blocks: usize) -> usize {
    let sizes = &case.sizes;
    let keys = match case.batch {
        Batch::Ragged => sizes.keys.div_ceil(sizes.batch),
        _ => sizes.keys,
    };
    let bytes = keys * sizes.dim * 2 * case.kv.size_in_bytes();
    let kv_heads = (SECTION_BYTES / bytes)
        .max((2 * blocks).div_ceil(sizes.group() * tiles))
        .max(1);
    sizes.group() * kv_heads.min(sizes.batch * sizes.kv_heads)
}

/// A tensor's dimensions as TMA sees them, and the tiles that it is copied in.
struct Tiles {
    /// Tokens, pieces of their rows, heads, sequences or pages.
    dims: [usize; 4],
    /// Tokens of a tile, and pieces of their rows.
    rows: usize,
    pieces: usize,
}

/// The TMA descriptor of a tensor of batch (or pages), heads, tokens, dim: tiles of some tokens of one head, which
/// lie in shared memory piece by piece of the rows.
fn tensor_map(call: &Call, operand: &Operand, tiles: &Tiles) -> Result<TensorMap> {
    let size = call.q_dtype.size_in_bytes();
    let data_type = match call.q_dtype {
        DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    };
    let [tokens, pieces, heads, batch] = tiles.dims;
    let piece = call.sizes.dim / pieces;
    let swizzle = match piece {
        64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        _ => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
    };
    let [batch_stride, head_stride, token_stride, _] = operand.strides;
    let dims = [piece, tokens, pieces, heads, batch].map(|d| d as u64);
    // A dimension of one element may have any stride: 16 is always taken.
    let stride = |stride: i64, dim: usize| {
        if dim > 1 {
            stride as u64 * size as u64
        } else {
            16
        }
    };
    let strides = [
        stride(token_stride, tokens),
        stride(piece as i64, pieces),
        stride(head_stride, heads),
        stride(batch_stride, batch),
    ];
    let tile = [piece, tiles.rows, tiles.pieces, 1, 1].map(|d| d as u32);
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: all arrays have the rank of five, or one less for the strides, and outlive the call.
    let result = unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            data_type,
            5,
            operand.address as *mut std::ffi::c_void,
            dims.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            [1u32; 5].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    // Strides are multiples of 16 bytes, as the plan asks, and below 2^40, as memory is: those are always taken.
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(TensorMap { opaque: map.opaque }),
        error => bail!(
            "{}: no tensor map with strides of {strides:?} bytes: {}",
            call.op(),
            DriverError(error)
        ),
    }
}
