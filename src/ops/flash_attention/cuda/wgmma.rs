//! `kernels/attention/prefill_sm90.cu`: Hopper's asynchronous tensor cores and bulk copies.

use super::forms::head_sizes;
use super::plan::{Kernel, Planned};
use super::problem::{Batch, Call, Case, Operand};
use crate::cuda::abi::{ATTENTION_SM90, AttentionSm90, AttentionSm90Params, TensorMap};
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

    /// The estimated time of the case, in units of the time that a block whose warpgroups have rows of their own takes for
    /// one key. Blocks run in waves, one on each multiprocessor, most keys first, and a wave takes as long as its mean
    /// block. The constants are fitted to 1,110 cases on an H200 (heads of 64 and 128, 4 to 512 heads of all
    /// sequences, 33 to 8,192 queries, up to 8,192 keys, causal or not): the faster form is chosen, or one at most 5 %
    /// slower, in all but 16, and these lose at most 11 %.
    fn cost(&self, case: &Case) -> f64 {
        let (per_key, per_block) = match (self.share, self.keys) {
            (true, ..=64) => (0.66, 125.),
            (true, _) => (0.5, 125.),
            (false, _) => (1., 150.),
        };
        let (sizes, sms) = (&case.sizes, case.gpu.sms as usize);
        let columns = sizes.batch * sizes.heads;
        let tiles = sizes.queries.div_ceil(self.rows());
        let (keys, blocks) = (keys_of_a_sequence(case), tiles * columns);
        let seen = |block: usize| {
            let last_row = (tiles - block / columns) * self.rows();
            let hidden = sizes.queries.saturating_sub(last_row);
            keys.saturating_sub(if case.causal { hidden } else { 0 }) as f64
        };
        let of_wave = |wave: usize| {
            let ends = [wave * sms, blocks.min((wave + 1) * sms) - 1];
            per_key * 0.5 * ends.map(seen).iter().sum::<f64>() + per_block
        };
        let all = (0..blocks.div_ceil(sms)).map(of_wave).sum::<f64>();
        all.max(per_key * keys as f64 + per_block)
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
    /// Tokens of a page that are copied at once, where keys are in pages.
    copied: Option<usize>,
}

/// The kernel whose warpgroups have rows of queries of their own, or, if there is one for the head size and its estimated
/// time is shorter, the one whose warpgroups have the same rows and split the keys; not so with batch invariance, since all
/// sequences have a part in these times.
pub(super) fn plan(case: &Case) -> Planned<Call> {
    if let Some(reason) = refusal(case) {
        return Err(reason);
    }
    let sizes = &case.sizes;
    let columns = sizes.batch * sizes.heads;
    let sms = case.gpu.sms as usize;
    let find = |share: bool| {
        let fits = |config: &AttentionSm90| config.dim == sizes.dim && config.share == share;
        ATTENTION_SM90.iter().position(fits)
    };
    let mut place = find(false).ok_or("it is for other head sizes")?;
    let cost = |place: usize| ATTENTION_SM90[place].cost(case);
    let shared = find(true).filter(|shared| cost(*shared) < cost(place));
    if let Some(shared) = shared.filter(|_| !case.batch_invariant) {
        place = shared;
    }
    let config = ATTENTION_SM90[place];
    let empty = 2 * sizes.queries <= config.rows() && !case.batch_invariant;
    if config.piece() == SMALL_PIECE && empty {
        return Err(
            "its tiles would be mostly empty, and TMA takes their rows in pieces of 32 bytes",
        );
    }
    let copied = match case.batch {
        Batch::Paged(page) => Some(
            config
                .of_page(page)
                .ok_or("its tiles are no whole pages, nor pages whole tiles")?,
        ),
        _ => None,
    };
    if let Batch::Paged(_) = case.batch
        && case.alignment.kv_heads < 2 * config.piece() as u64
    {
        return Err("heads of keys and values are no whole pieces of a row apart");
    }
    let tiles = sizes.queries.div_ceil(config.rows());
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
        copied,
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
        let queries = rows_map(
            &call.q,
            config,
            [total_q, sizes.heads, batch],
            config.rows(),
        );
        let keys = |operand: &Operand| match (call.pages, self.copied) {
            (Some(pages), Some(copied)) => {
                let dims = [pages.page, pages.pages].map(|n| n as usize);
                pages_map(operand, config, sizes.kv_heads, dims, copied)
            }
            _ => rows_map(
                operand,
                config,
                [sizes.keys, sizes.kv_heads, batch],
                config.keys,
            ),
        };
        let head_pieces = |operand: &Operand| (operand.strides[1] / config.piece() as i64) as i32;
        let params = AttentionSm90Params {
            q: tensor_map(call, &call.q, &queries)?,
            k: tensor_map(call, &call.k, &keys(&call.k))?,
            v: tensor_map(call, &call.v, &keys(&call.v))?,
            y: call.y,
            cu_q: call.ragged.map_or(0, |ragged| ragged.cu_q),
            cu_k: call.ragged.map_or(0, |ragged| ragged.cu_k),
            pages: call.key_pages(self.copied.unwrap_or(0)),
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
            k_head_pieces: head_pieces(&call.k),
            v_head_pieces: head_pieces(&call.v),
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
    let bytes = keys_of_a_sequence(case) * sizes.dim * 2 * case.kv.size_in_bytes();
    let kv_heads = (SECTION_BYTES / bytes)
        .max((2 * blocks).div_ceil(sizes.group() * tiles))
        .max(1);
    sizes.group() * kv_heads.min(sizes.batch * sizes.kv_heads)
}

/// Keys of a sequence: the mean of a ragged batch, room in the table where they are in pages.
fn keys_of_a_sequence(case: &Case) -> usize {
    match case.batch {
        Batch::Ragged => case.sizes.keys.div_ceil(case.sizes.batch),
        _ => case.sizes.keys,
    }
}

/// A tensor as TMA sees it, innermost dimension first, which is a piece of a row: its dimensions, the elements from one
/// to the next of each but that one, and the box that a copy takes.
struct Boxes {
    dims: [usize; 5],
    strides: [i64; 4],
    tile: [usize; 5],
}

/// Rows of one head: tokens, pieces of their rows, heads, sequences. A copy takes `rows` tokens, which lie in shared
/// memory piece by piece.
fn rows_map(
    operand: &Operand,
    config: &AttentionSm90,
    [tokens, heads, batch]: [usize; 3],
    rows: usize,
) -> Boxes {
    let [batch_stride, head, token, _] = operand.strides;
    let (piece, pieces) = (config.piece(), config.dim / config.piece());
    Boxes {
        dims: [piece, tokens, pieces, heads, batch],
        strides: [token, piece as i64, head, batch_stride],
        tile: [piece, rows, pieces, 1, 1],
    }
}

/// Pages: 8 tokens, pieces of their rows of all heads, groups of 8 tokens, pages. A copy takes one head of `rows` tokens
/// of a page, which lie in shared memory 8 by 8 and within these piece by piece.
fn pages_map(
    operand: &Operand,
    config: &AttentionSm90,
    heads: usize,
    [page, pages]: [usize; 2],
    rows: usize,
) -> Boxes {
    let [page_stride, head, token, _] = operand.strides;
    let (piece, pieces) = (config.piece(), config.dim / config.piece());
    // The last head ends with its own pieces.
    let all_pieces = (heads - 1) * (head as usize / piece) + pieces;
    Boxes {
        dims: [piece, 8, all_pieces, page / 8, pages],
        strides: [token, piece as i64, 8 * token, page_stride],
        tile: [piece, 8, pieces, rows / 8, 1],
    }
}

/// The TMA descriptor.
fn tensor_map(call: &Call, operand: &Operand, boxes: &Boxes) -> Result<TensorMap> {
    let size = call.q_dtype.size_in_bytes();
    let data_type = match call.q_dtype {
        DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    };
    let swizzle = match boxes.dims[0] {
        64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        _ => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
    };
    let dims = boxes.dims.map(|d| d as u64);
    // A dimension of one element may have any stride: 16 is always taken.
    let mut strides = [16; 4];
    for (i, stride) in strides.iter_mut().enumerate() {
        if boxes.dims[i + 1] > 1 {
            *stride = boxes.strides[i] as u64 * size as u64;
        }
    }
    let tile = boxes.tile.map(|d| d as u32);
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
