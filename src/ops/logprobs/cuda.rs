//! The CUDA form: a block for each row.

use super::{Logprobs, NONE, OP};
pub(crate) use crate::cuda::abi::LogprobsParams as Step;
use crate::cuda::abi::{NO_TOKEN, SAMPLE_THREADS};
use crate::cuda::{Grid, Launcher, Module, address, address_of, alloc, fatbin};
use crate::ops::view::dtype_index;
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, DType, Layout, Result, Storage, Tensor, bail};

static MODULE: Module = Module::new("logprobs", fatbin!("logprobs"), &["logprobs"]);

const _: () = assert!(NONE == NO_TOKEN);

/// Log-probabilities of `rows` rows.
///
/// # Safety
/// Every address that is not 0 is valid for the length given at its field.
pub(crate) unsafe fn launch(launcher: &Launcher, rows: u32, step: Step) -> Result<()> {
    let grid = Grid::line(rows, SAMPLE_THREADS as u32);
    // SAFETY: the kernel takes `LogprobsParams`; the addresses are the caller's.
    unsafe { launcher.run(&MODULE, 0, grid, &step) }
}

pub(super) fn forward(
    logits: &CudaStorage,
    layout: &Layout,
    tokens: &Tensor,
    top: usize,
) -> Result<Logprobs> {
    trace::record(OP, || format!("cuda {}", logits.dtype().as_str()));
    let device = logits.device();
    let (rows, vocab) = layout.shape().dims2()?;
    let Ok(count) = u32::try_from(rows) else {
        bail!("{OP}: {rows} rows are too many");
    };
    // A buffer of no elements is none.
    let width = top.max(1);
    let [chosen, top_ids, top_logprobs] =
        [(DType::F32, 1), (DType::U32, width), (DType::F32, width)].map(|(dtype, width)| {
            let out = alloc(OP, device, dtype, rows * width)?;
            let at = address(&out, &Layout::contiguous(rows * width))?;
            let none = BackpropOp::none();
            let out = Tensor::from_storage(Storage::Cuda(out), (rows, width), none, false);
            Ok::<_, candle_core::Error>((out, at))
        });
    let (chosen, top_ids, top_logprobs) = (chosen?, top_ids?, top_logprobs?);
    let step = Step {
        logits: address(logits, layout)?,
        token: address_of(tokens)?,
        logprob: chosen.1,
        top_ids: top_ids.1,
        top_logprobs: top_logprobs.1,
        vocab: vocab as u32,
        width: width as u32,
        top: top as u32,
        dtype: dtype_index(logits.dtype()) as i32,
        ..Default::default()
    };
    // SAFETY: the buffers are made above in the sizes that the fields ask for.
    unsafe { launch(&Launcher::new(device)?, count, step)? };
    Ok(Logprobs {
        chosen: chosen.0.squeeze(1)?,
        top_ids: top_ids.0.narrow(1, 0, top)?,
        top: top_logprobs.0.narrow(1, 0, top)?,
    })
}
