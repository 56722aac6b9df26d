//! The CUDA form: slices of the logits side by side, put together by the block that ends last.

use super::{NONE, OP, Sample, Settings};
pub(crate) use crate::cuda::abi::SampleParams as Step;
use crate::cuda::abi::{NO_TOKEN, SAMPLE_THREADS, SampleSettings};
use crate::cuda::{Grid, Launcher, Module, address, address_of, alloc, fatbin};
use crate::ops::view::dtype_index;
use crate::trace;
use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::DevicePtr;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, bail};

static MODULE: Module = Module::new("sample", fatbin!("sample"), &["sample"]);

const _: () = assert!(NONE == NO_TOKEN);

/// Chunks of a sequence's logits at most: the last block gathers from all.
const MAX_CHUNKS: usize = 128;

/// Blocks of all sequences that fill an H100 once.
const ENOUGH: usize = 264;

/// Chunks of a sequence's logits, and how many logits each has. A draw is measured from the highest logit of its chunk,
/// so these depend on nothing else: a sequence gets the same token whatever is drawn beside it.
fn chunks(vocab: usize) -> (usize, usize) {
    let useful = vocab.div_ceil(SAMPLE_THREADS).min(MAX_CHUNKS);
    let chunk = vocab.div_ceil(useful.max(1)).next_multiple_of(4);
    (vocab.div_ceil(chunk.max(1)), chunk)
}

/// Words of a sequence's [`Settings::words`].
pub(crate) const SETTINGS: usize = size_of::<SampleSettings>() / 4;

/// 8-byte words of `partial` for each sequence.
pub(crate) fn partial_words(vocab: usize) -> usize {
    2 * chunks(vocab).0
}

/// Chooses a token for each of `sequences`.
///
/// # Safety
/// Every address that is not 0 is valid for the length given at its field.
pub(crate) unsafe fn launch(launcher: &Launcher, sequences: u32, step: Step) -> Result<()> {
    let (chunks, chunk) = chunks(step.vocab as usize);
    let wanted = (ENOUGH / sequences.max(1) as usize).clamp(1, chunks.max(1));
    let of_block = chunks.div_ceil(wanted);
    let blocks = chunks.div_ceil(of_block) as u32;
    let grid = Grid::new(
        [blocks, sequences, 1],
        SAMPLE_THREADS as u32,
        4 * chunk as u32,
    );
    let params = Step {
        chunk: chunk as u32,
        chunks: chunks as u32,
        of_block: of_block as u32,
        vectors: (step.vocab.is_multiple_of(4) && step.logits.is_multiple_of(16)).into(),
        ..step
    };
    // SAFETY: the kernel takes `SampleParams`; the addresses are the caller's.
    unsafe { launcher.run(&MODULE, 0, grid, &params) }
}

pub(super) fn forward(
    op: &Sample<'_>,
    logits: &CudaStorage,
    layout: &Layout,
) -> Result<(CudaStorage, Shape)> {
    trace::record(OP, || format!("cuda {}", logits.dtype().as_str()));
    let device = logits.device();
    let (sequences, vocab) = layout.shape().dims2()?;
    let out = alloc(OP, device, DType::U32, sequences)?;
    let slots = op.history.iter().map(|h| h.len()).max().unwrap_or(0).max(1);
    let (mut seen, mut position) = (vec![0u32; sequences * slots], Vec::new());
    for (i, tokens) in op.history.iter().enumerate() {
        seen[i * slots..][..tokens.len()].copy_from_slice(tokens);
        // The place before the first token: one further is 0 again.
        position.push((tokens.len() as u32).wrapping_sub(1));
    }
    let words: Vec<u32> = op.settings.iter().flat_map(Settings::words).collect();
    let [settings, seen, position] = [words, seen, position].map(|w| device.clone_htod(&w));
    let (settings, seen, position) = (settings?, seen?, position?);
    let arrived = device.alloc_zeros::<u32>(sequences)?;
    let scores = device.alloc_zeros::<f32>(sequences * vocab)?;
    let partial = device.alloc_zeros::<u64>(sequences * partial_words(vocab))?;
    let stream = device.cuda_stream();
    let step = Step {
        logits: address(logits, layout)?,
        settings: settings.device_ptr(&stream).0,
        mask: op.mask.map_or(Ok(0), address_of)?,
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
    /// The words of [`SampleSettings`].
    pub(crate) fn words(&self) -> [u32; SETTINGS] {
        let settings = SampleSettings {
            inverse_temperature: self.inverse_temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            penalty: self.penalty,
            last_n: self.last_n,
            seed_low: self.seed_low,
            seed_high: self.seed_high,
            sequence: self.sequence,
            limit: self.limit,
            masked: self.masked.into(),
        };
        // SAFETY: fields of 4 bytes and nothing between them; any bits are a u32.
        unsafe { std::mem::transmute(settings) }
    }
}
