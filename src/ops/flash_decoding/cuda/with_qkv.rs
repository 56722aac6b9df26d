//! `kernels/attention/decode_with_qkv.cu`: the products for queries, keys and values and the step of attention that takes
//! them, in one launch.

use super::problem::{Case, Companion, Operands, StepShape};
use super::{OP, cluster};
use crate::cuda::abi::{
    DECODE_WITH_QKV as FORMS, DECODE_WITH_QKV_BLOCKS as BLOCKS, DECODING_CLUSTER_WARPS as WARPS,
    DecodeWithQkv, DecodeWithQkvParams, WARP,
};
use crate::cuda::{Grid, Launcher, Module, UNALIGNED, fatbin};
use crate::ops::flash_attention::cuda::{Kernel, Planned, head_sizes};
use crate::ops::linear::Activation;
use crate::ops::linear::cuda::{self as linear, Gemv, NormKind};
use candle_core::{DType, Result, bail};

/// By form, caches of slots before pages, f16 before bf16.
static MODULE: Module = Module::new(
    "decode_with_qkv",
    fatbin!("decode_with_qkv"),
    &[
        "flash_decoding_with_qkv_d64_3_640_f16",
        "flash_decoding_with_qkv_d64_3_640_bf16",
        "flash_decoding_with_qkv_paged_d64_3_640_f16",
        "flash_decoding_with_qkv_paged_d64_3_640_bf16",
    ],
)
.with_least_shared_memory();

/// Head sizes of these.
pub(super) const HEAD_SIZES: [usize; FORMS.len()] = head_sizes!(FORMS);

/// A kernel and its grid.
#[derive(Debug)]
struct Together {
    index: usize,
    grid: Grid,
}

/// Bytes of shared memory of a block: those of the step, and `HeadsProduct` of the kernel.
fn shared(shape: &StepShape, form: &DecodeWithQkv) -> usize {
    let rows = (form.group + 2) * form.dim;
    let of_warps = WARPS * rows / BLOCKS * size_of::<f32>();
    cluster::shared(shape, BLOCKS) + 16 + of_warps + rows * shape.dtype.size_in_bytes()
}

/// Whether it is the product of one row that the kernel computes.
fn check_product(case: &linear::Case, shape: &StepShape) -> std::result::Result<(), &'static str> {
    if case.dense() != Some(shape.dtype) || case.x != shape.dtype || case.out != shape.dtype {
        return Err("the product's weights, x or outputs are of another dtype");
    }
    let rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
    if case.m != 1 || case.n() != rows {
        return Err("the product gives something else than a row of q, k and v");
    }
    if case.norm.is_some_and(|norm| norm != NormKind::Rms) {
        return Err("the product's norm is no RMSNorm");
    }
    if case.activation != Activation::None || case.residuals > 0 || case.k_split.is_some() {
        return Err("the product has an activation, residuals or two matrices along K");
    }
    let alignment = case.alignment;
    match alignment.x && alignment.norm && alignment.weights && alignment.outputs {
        true if case.k.is_multiple_of(8) => Ok(()),
        _ => Err(UNALIGNED),
    }
}

/// A step of one sequence, and the product that gives its queries, keys and values.
pub(super) fn plan(case: &Case) -> Planned<Operands> {
    // Each cluster of a key/value head computes the head's rows. What that costs where a cache has room for so many
    // keys that they are several has not been timed.
    match case.shape.slots > cluster::tiles(BLOCKS) * cluster::KEYS {
        true => Err("there is room for more keys than one cluster takes"),
        false => for_any_room(case),
    }
}

/// The same, whatever room there is for keys.
pub(super) fn for_any_room(case: &Case) -> Planned<Operands> {
    case.clustered?;
    let (gpu, shape) = (&case.gpu, &case.shape);
    let product = case.product.as_ref();
    let (_, product) = product.ok_or("there is no product in front of the step")?;
    check_product(product, shape)?;
    let takes = |form: &DecodeWithQkv| {
        form.dim == shape.head_dim && form.group == shape.group() && product.k <= form.k
    };
    let form = FORMS.iter().position(takes);
    let form = form.ok_or("no form has these heads and K")?;
    let [blocks, _] = cluster::blocks(gpu, shape, shape.kv_heads);
    let shared = shared(shape, &FORMS[form]);
    if shared > gpu.shared as usize {
        return Err("the heads of a block do not fit into shared memory");
    }
    let is = [shape.paged, shape.dtype == DType::BF16];
    let grid = [blocks.next_multiple_of(BLOCKS), shape.kv_heads, 1];
    let threads = (WARP * WARPS) as u32;
    Ok(Box::new(Together {
        index: is
            .iter()
            .fold(form, |index, bit| 2 * index + usize::from(*bit)),
        grid: Grid {
            cluster: BLOCKS as u32,
            ..Grid::new(grid.map(|n| n as u32), threads, shared as u32)
        },
    }))
}

impl Kernel<Operands> for Together {
    fn entry(&self) -> &'static str {
        MODULE.names(self.index).1
    }

    fn grid(&self) -> Grid {
        self.grid
    }

    fn details(&self) -> String {
        format!("{} keys a warp", cluster::KEYS)
    }

    unsafe fn run(&self, launcher: &Launcher, operands: &Operands) -> Result<()> {
        let Some(Companion::Qkv(product)) = &operands.companion else {
            bail!("{OP}: there is no product in front of the step");
        };
        let both = DecodeWithQkvParams {
            attention: operands.step.params(launcher, cluster::tiles(BLOCKS)),
            product: Gemv::of(product)?,
        };
        // SAFETY: the kernel takes `DecodeWithQkvParams`; the addresses are the caller's.
        unsafe {
            launcher
                .moving(product.weight_bytes() as u64)
                .run(&MODULE, self.index, self.grid, &both)
        }
    }
}
