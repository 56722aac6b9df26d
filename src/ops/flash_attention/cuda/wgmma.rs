//! `kernels/attention/prefill_sm90.cu`: Hopper's asynchronous tensor cores and bulk copies.

use super::{Call, Operand};
use crate::cuda::abi::{ATTENTION_SM90, AttentionSm90, AttentionSm90Params, TensorMap};
use crate::cuda::{Grid, Launcher, Module, fatbin};
use candle_core::cuda_backend::cudarc::driver::sys;
use candle_core::{DType, Result};
use std::fmt;

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

impl AttentionSm90 {
    fn rows(&self) -> usize {
        64 * if self.share { 1 } else { self.consumers }
    }

    /// Bytes of the queries, two tiles of keys and of values in each lane, and alignment.
    fn shared(&self) -> usize {
        let lanes = if self.share { self.consumers } else { 1 };
        2 * self.dim * (self.rows() + lanes * 2 * 2 * self.keys) + 1024
    }

    /// Elements of a row that lie together in shared memory: as many as a swizzle divides it into.
    fn piece(&self) -> usize {
        [64, 32]
            .into_iter()
            .find(|p| self.dim.is_multiple_of(*p))
            .unwrap_or(16)
    }
}

/// Fewer queries than this leave most of a warpgroup's rows empty.
const MIN_QUERIES: usize = 32;

/// Keys and values that stay in L2 while the rows of their heads go through: half of an H100's.
const SECTION_BYTES: usize = 24 << 20;

/// The kernel for a call, with all it is told.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    index: usize,
    config: AttentionSm90,
    blocks: usize,
    params: AttentionSm90Params,
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = if self.config.share { " shared" } else { "" };
        write!(f, "d{}{shared}", self.config.dim)
    }
}

impl Form {
    /// The form for the call, or why there is none.
    pub fn of(launcher: &Launcher, call: &Call) -> Result<std::result::Result<Self, &'static str>> {
        if launcher.gpu.arch != 90 {
            return Ok(Err("not Hopper"));
        }
        if let Some(reason) = refusal(call) {
            return Ok(Err(reason));
        }
        let columns = call.batch * call.heads;
        let sms = launcher.gpu.sms as usize;
        let tiles = |config: &AttentionSm90| call.queries.div_ceil(config.rows());
        let fits = |share: bool| {
            let fits = |config: &AttentionSm90| config.dim == call.dim && config.share == share;
            ATTENTION_SM90.iter().position(fits)
        };
        let Some(mut place) = fits(false) else {
            return Ok(Err("no form of this head dimension for Hopper"));
        };
        if tiles(&ATTENTION_SM90[place]) * columns < sms {
            place = fits(true).unwrap_or(place);
        }
        let (config, index) = (
            ATTENTION_SM90[place],
            2 * place + usize::from(call.q_dtype == DType::BF16),
        );
        if MODULE.built_for(launcher.gpu, index)? != 90 {
            return Ok(Err("not built for Hopper"));
        }
        let items = tiles(&config) * columns;
        let blocks = if config.share { items } else { items.min(sms) };
        let Ok(items) = i32::try_from(items) else {
            return Ok(Err("more work than the form for Hopper counts"));
        };
        let map = |operand: &Operand, tokens, heads, rows| {
            tensor_map(call, operand, [tokens, heads], rows, config.piece())
        };
        let maps = (
            map(&call.q, call.queries, call.heads, config.rows()),
            map(&call.k, call.keys, call.kv_heads, config.keys),
            map(&call.v, call.keys, call.kv_heads, config.keys),
        );
        let (Some(q), Some(k), Some(v)) = maps else {
            return Ok(Err("strides that the copy engine does not take"));
        };
        let params = AttentionSm90Params {
            q,
            k,
            v,
            y: call.y,
            heads: call.heads as i32,
            kv_heads: call.kv_heads as i32,
            queries: call.queries as i32,
            keys: call.keys as i32,
            unit: call.scale * std::f32::consts::LOG2_E,
            causal: call.causal.into(),
            tiles: items / columns as i32,
            columns: columns as i32,
            section: section(call, tiles(&config), blocks) as i32,
        };
        Ok(Ok(Self {
            index,
            config,
            blocks,
            params,
        }))
    }

    /// # Safety
    /// As [`super::launch`].
    pub unsafe fn launch(&self, launcher: &Launcher) -> Result<()> {
        let grid = Grid::new(
            [self.blocks as u32, 1, 1],
            128 * (self.config.consumers as u32 + 1),
            self.config.shared() as u32,
        );
        // SAFETY: the kernel takes `AttentionSm90Params`; the addresses are the caller's.
        unsafe { launcher.run(&MODULE, self.index, grid, &self.params) }
    }
}

/// Why the kernels do not take the call, whatever its head dimension.
fn refusal(call: &Call) -> Option<&'static str> {
    if call.q_dtype != call.kv_dtype || call.q_dtype == DType::F32 {
        return Some("types that are not one 16-bit type");
    }
    if call.mask.is_some() || call.softcap.is_some() || call.narrow_window().is_some() {
        return Some("a mask, window or softcap");
    }
    if call.scale <= 0.0 {
        return Some("a scale that is not positive");
    }
    if call.queries < MIN_QUERIES {
        return Some("few queries");
    }
    if call.keys == 0 || call.causal && call.keys < call.queries {
        return Some("queries without keys");
    }
    let whole = [call.q, call.k, call.v]
        .iter()
        .all(|operand| operand.rows_at(16, call.q_dtype))
        && call.y.is_multiple_of(4);
    (!whole).then_some("rows that are no whole 16-byte pieces")
}

/// Query heads whose keys and values stay in L2 together, but so many that there are two rounds of
/// work for the blocks.
fn section(call: &Call, tiles: usize, blocks: usize) -> usize {
    let bytes = call.keys * call.dim * 2 * call.kv_dtype.size_in_bytes();
    let kv_heads = (SECTION_BYTES / bytes)
        .max((2 * blocks).div_ceil(call.group() * tiles))
        .max(1);
    call.group() * kv_heads.min(call.batch * call.kv_heads)
}

/// What the copy engine is told of a tensor of `[batch, heads, tokens, dim]`: tiles of `rows` tokens
/// of one head, which lie in shared memory piece by piece of the rows.
fn tensor_map(
    call: &Call,
    operand: &Operand,
    [tokens, heads]: [usize; 2],
    rows: usize,
    piece: usize,
) -> Option<TensorMap> {
    let size = call.q_dtype.size_in_bytes();
    let data_type = match call.q_dtype {
        DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    };
    let swizzle = match piece {
        64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
        _ => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
    };
    let [batch_stride, head_stride, token_stride, _] = operand.strides;
    let pieces = call.dim / piece;
    let dims = [piece, tokens, pieces, heads, call.batch].map(|d| d as u64);
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
        stride(batch_stride, call.batch),
    ];
    let tile = [piece, rows, pieces, 1, 1].map(|d| d as u32);
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
    (result == sys::CUresult::CUDA_SUCCESS).then_some(TensorMap { opaque: map.opaque })
}
