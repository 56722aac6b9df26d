//! The CUDA form: slices of the logits side by side, put together by the block that ends last.

use super::{OP, Settings};
use crate::cuda::{Address, Grid, Launcher, Module, address, alloc, fatbin};
use crate::ops::view::dtype_index;
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, bail};

static MODULE: Module = Module::new("sample", fatbin!("sample"), &["sample"]);

const THREADS: u32 = 1024;

/// Blocks that share a sequence's logits at most: the last one gathers from all.
const MOST_BLOCKS: usize = 128;

/// `Params` of `kernels/sample.cu`: where a step finds its logits and leaves its token.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Step {
    /// `[sequences, vocab]`
    pub logits: Address,
    /// [`Settings`] of each sequence.
    pub settings: Address,
    /// u32 `[sequences]`
    pub token: Address,
    /// u32 `[sequences]`: the place of the token before, counted up.
    pub position: Address,
    /// u32 `[sequences, history_slots]`: token p at `p % history_slots`; may be 0.
    pub history: Address,
    /// u32 `[sequences]`, counted up; may be 0.
    pub step: Address,
    /// On the host, u64 `[mail_slots, sequences]`: step + 1 above the token; may be 0.
    pub mailbox: Address,
    /// f32 `[sequences, vocab]`
    pub scores: Address,
    /// u64 `[sequences, partial_words]`, at a multiple of 16 bytes.
    pub partial: Address,
    /// u32 `[sequences]`, zero.
    pub arrived: Address,
    pub vocab: u32,
    /// Set by [`launch`].
    pub slice: u32,
    pub history_slots: u32,
    pub mail_slots: u32,
    /// 0 for f32, 1 for f16, 2 for bf16.
    pub dtype: i32,
}

/// Blocks that share the logits of one sequence.
pub(crate) fn blocks(vocab: usize) -> usize {
    vocab.div_ceil(THREADS as usize).min(MOST_BLOCKS)
}

/// 8-byte words of `partial` for each sequence.
pub(crate) fn partial_words(vocab: usize) -> usize {
    2 * blocks(vocab)
}

/// Chooses a token for each of `sequences`.
///
/// # Safety
/// Every address that is not 0 is valid for the length given at its field.
pub(crate) unsafe fn launch(launcher: &Launcher, sequences: u32, step: Step) -> Result<()> {
    let blocks = blocks(step.vocab as usize) as u32;
    let slice = step.vocab.div_ceil(blocks);
    let grid = Grid::new([blocks, sequences, 1], THREADS, slice * 4);
    let params = Step { slice, ..step };
    // SAFETY: the layout is the kernel's `Params`; the addresses are the caller's.
    unsafe { launcher.run(&MODULE, 0, grid, &params) }
}

pub(super) fn forward(
    settings: &[Settings],
    history: &[&[u32]],
    logits: &CudaStorage,
    layout: &Layout,
) -> Result<(CudaStorage, Shape)> {
    trace::record(OP, || format!("cuda {}", logits.dtype().as_str()));
    let device = logits.device();
    let (sequences, vocab) = layout.shape().dims2()?;
    let out = alloc(OP, device, DType::U32, sequences)?;
    let slots = history.iter().map(|h| h.len()).max().unwrap_or(0).max(1);
    let (mut seen, mut position) = (vec![0u32; sequences * slots], Vec::new());
    for (i, tokens) in history.iter().enumerate() {
        seen[i * slots..][..tokens.len()].copy_from_slice(tokens);
        // The place before the first token: one further is 0 again.
        position.push((tokens.len() as u32).wrapping_sub(1));
    }
    let words: Vec<u32> = settings.iter().flat_map(Settings::words).collect();
    let [settings, seen, position] = [words, seen, position].map(|w| device.clone_htod(&w));
    let (settings, seen, position) = (settings?, seen?, position?);
    let arrived = device.alloc_zeros::<u32>(sequences)?;
    let scores = device.alloc_zeros::<f32>(sequences * vocab)?;
    let partial = device.alloc_zeros::<u64>(sequences * partial_words(vocab))?;
    let stream = device.cuda_stream();
    let step = Step {
        logits: address(logits, layout)?,
        settings: settings.device_ptr(&stream).0,
        token: address(&out, &Layout::contiguous(sequences))?,
        position: position.device_ptr(&stream).0,
        history: seen.device_ptr(&stream).0,
        scores: scores.device_ptr(&stream).0,
        partial: partial.device_ptr(&stream).0,
        arrived: arrived.device_ptr(&stream).0,
        vocab: vocab as u32,
        history_slots: slots as u32,
        dtype: dtype_index(logits.dtype()) as i32,
        ..Default::default()
    };
    let Ok(count) = u32::try_from(sequences) else {
        bail!("{OP}: {sequences} sequences are too many");
    };
    // SAFETY: the buffers are made above in the sizes that the fields ask for.
    unsafe { launch(&Launcher::new(device)?, count, step)? };
    Ok((out, Shape::from(sequences)))
}

impl Settings {
    /// The struct as the words of which it is made.
    pub(crate) fn words(&self) -> [u32; 8] {
        [
            self.inverse_temperature.to_bits(),
            self.top_p.to_bits(),
            self.top_k,
            self.penalty.to_bits(),
            self.last_n,
            self.seed_low,
            self.seed_high,
            self.sequence,
        ]
    }
}
