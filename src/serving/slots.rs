//! What the GPU knows of each slot: its token and position, how the next token is chosen, and its pages.

use super::sequence::Sequence;
use crate::cuda::{Address, Launcher, Pinned};
use crate::generation::chain::StepIo;
use crate::ops::SamplingParams;
use crate::ops::logprobs::{MAX_TOP, cuda as logprobs};
use crate::ops::sample::cuda::{self as sample, SETTINGS};
use crate::ops::view::dtype_index;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr, result};
use candle_core::{CudaDevice, DType, Result};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Tokens of a sequence that the GPU remembers for the repeat penalty.
const HISTORY: usize = SamplingParams::MAX_LAST_N;

/// Stands for no page.
const NONE: u32 = u32::MAX;

pub(super) struct Slots {
    device: CudaDevice,
    count: usize,
    vocab: usize,
    /// Tokens, positions, arrivals, wanted log-probabilities; then settings.
    words: CudaSlice<u32>,
    history: CudaSlice<u32>,
    scores: CudaSlice<f32>,
    partial: CudaSlice<u64>,
    /// `[count, vocab / 32 rounded up]`, and what is sent there.
    masks: CudaSlice<u32>,
    masks_sent: Option<Pinned>,
    /// Of each slot [`LOGPROBS`]: all log-probabilities of drawn tokens, then the likeliest tokens, then theirs.
    logprobs: CudaSlice<u32>,
    /// `[count, width]`: the page table on the GPU.
    table: CudaSlice<u32>,
    pages: Vec<u32>,
    /// Rows of the table in flight to the GPU: a table for each step that may be under way, and for the one that is
    /// launched. From memory that is not page-locked the driver may wait for the stream first.
    sent: Pinned,
    sendings: usize,
    width: usize,
    /// How many pages of each slot are in `pages`.
    known: Vec<usize>,
    /// Slots whose pages differ from the GPU's.
    stale: Range<usize>,
}

const TOKEN: usize = 0;
const POSITION: usize = 1;
const ARRIVED: usize = 2;

const WANTED: usize = 3;

/// Words of a slot before the settings.
const WORDS: usize = 4;

/// Words of a slot's log-probabilities.
pub(super) const LOGPROBS: usize = 1 + 2 * MAX_TOP;

/// The position of nobody: past all pages, also when many steps have counted it up.
const VACANT: u32 = 0xf000_0000;

impl Slots {
    /// `count` slots, all empty, of up to `width` pages each.
    ///
    /// Of the steps after an [`upload`](Self::upload), all but the last `ahead` are through before the next one.
    pub fn new(
        device: &CudaDevice,
        [count, width]: [usize; 2],
        vocab: usize,
        ahead: usize,
    ) -> Result<Self> {
        let gpu = Launcher::new(device)?.gpu;
        let mut words = vec![0; count * (WORDS + SETTINGS)];
        words[POSITION * count..][..count].fill(VACANT);
        Ok(Self {
            words: device.clone_htod(&words)?,
            history: device.alloc_zeros(count * HISTORY)?,
            scores: device.alloc_zeros(count * vocab)?,
            partial: device.alloc_zeros(count * sample::partial_words(vocab))?,
            masks: device.alloc_zeros(count * vocab.div_ceil(32))?,
            masks_sent: None,
            logprobs: device.alloc_zeros(count * LOGPROBS)?,
            table: device.clone_htod(&vec![NONE; count * width])?,
            pages: vec![NONE; count * width],
            sent: Pinned::new(gpu, (ahead + 1) * count * width)?,
            sendings: 0,
            known: vec![0; count],
            stale: 0..0,
            device: device.clone(),
            count,
            vocab,
            width,
        })
    }

    /// Pages of a slot at most.
    pub fn width(&self) -> usize {
        self.width
    }

    /// u32 `[count, width]`
    pub fn table(&self) -> Address {
        self.table.device_ptr(&self.device.cuda_stream()).0
    }

    /// u32 `[count]`: the token of each slot that was drawn last.
    pub fn tokens(&self) -> Address {
        self.word(TOKEN, 0)
    }

    fn word(&self, which: usize, slot: usize) -> Address {
        let at = which * self.count + slot;
        self.words.device_ptr(&self.device.cuda_stream()).0 + 4 * at as Address
    }

    /// Inputs and outputs of a step of the slots `first .. first + count`.
    pub fn io(&self, first: usize, count: usize) -> StepIo {
        let stream = self.device.cuda_stream();
        let settings = self.word(WORDS, 0) + (4 * SETTINGS * first) as Address;
        let behind = |base: Address, bytes: usize| base + (first * bytes) as Address;
        StepIo {
            sequences: count,
            token: self.word(TOKEN, first),
            position: self.word(POSITION, first),
            sampling: sample::Step {
                settings,
                mask: behind(
                    self.masks.device_ptr(&stream).0,
                    4 * self.vocab.div_ceil(32),
                ),
                token: self.word(TOKEN, first),
                position: self.word(POSITION, first),
                history: behind(self.history.device_ptr(&stream).0, 4 * HISTORY),
                scores: behind(self.scores.device_ptr(&stream).0, 4 * self.vocab),
                partial: behind(
                    self.partial.device_ptr(&stream).0,
                    8 * sample::partial_words(self.vocab),
                ),
                arrived: self.word(ARRIVED, first),
                vocab: self.vocab as u32,
                history_slots: HISTORY as u32,
                dtype: dtype_index(DType::F32) as i32,
                ..Default::default()
            },
        }
    }

    /// The log-probabilities of the tokens that were drawn last from `logits`, f32, for slots from `first` on.
    pub fn logprobs_of(&self, first: usize, logits: Address) -> logprobs::Step {
        let base = self.logprobs();
        let row = |from: usize, width: usize| base + (4 * (from + first * width)) as Address;
        logprobs::Step {
            logits,
            token: self.word(TOKEN, first),
            wanted: self.word(WANTED, first),
            logprob: row(0, 1),
            top_ids: row(self.count, MAX_TOP),
            top_logprobs: row(self.count * (1 + MAX_TOP), MAX_TOP),
            vocab: self.vocab as u32,
            width: MAX_TOP as u32,
            dtype: dtype_index(DType::F32) as i32,
            ..Default::default()
        }
    }

    /// `count` times [`LOGPROBS`] words.
    pub fn logprobs(&self) -> Address {
        self.logprobs.device_ptr(&self.device.cuda_stream()).0
    }

    /// Sends the mask of the draw that is launched next. What was sent for an earlier draw of the slot has arrived.
    pub fn set_mask(&mut self, slot: usize, mask: &[u32]) -> Result<()> {
        let launcher = Launcher::new(&self.device)?;
        let sent = match &mut self.masks_sent {
            Some(sent) => sent,
            none => none.insert(Pinned::new(launcher.gpu, self.masks.len())?),
        };
        let at = slot * mask.len();
        for (to, word) in sent.words()[at..].iter().zip(mask) {
            to.store(*word, Ordering::Relaxed);
        }
        let masks = self.masks.device_ptr(&self.device.cuda_stream()).0;
        let to = masks + 4 * at as Address;
        // SAFETY: there is a mask for each slot; the engine reads the step of a slot with a mask before it launches the
        // next one, and the runner waits for the stream before it drops this.
        unsafe { sent.copy_to(at, to, mask.len(), launcher.stream) }
    }

    /// Puts a sequence into a slot: the next draw is that after its tokens.
    pub fn enter(&mut self, slot: usize, sequence: &Sequence) -> Result<()> {
        let (tokens, sampling) = (&sequence.tokens, &sequence.request.sampling);
        // The place of the token before, which the kernel counts up.
        self.write_word(POSITION, slot, (tokens.len() as u32).wrapping_sub(1))?;
        let at = WORDS * self.count + SETTINGS * slot;
        let mut settings = self.words.slice_mut(at..at + SETTINGS);
        let masked = sequence.constrained.is_some();
        let words = sampling.settings(0).masked(masked).words();
        self.device.memcpy_htod(&words, &mut settings)?;
        let wanted = sequence.request.logprobs.map_or(0, |top| 1 + top);
        self.write_word(WANTED, slot, wanted as u32)?;
        if sampling.repeat_penalty == 1. {
            return Ok(());
        }
        let mut history = vec![0; HISTORY];
        let lately = tokens.len().saturating_sub(HISTORY);
        for (place, token) in tokens.iter().enumerate().skip(lately) {
            history[place % HISTORY] = *token;
        }
        let at = slot * HISTORY;
        let mut room = self.history.slice_mut(at..at + HISTORY);
        self.device.memcpy_htod(&history, &mut room)
    }

    /// Nobody is in a slot any more: steps pass it over.
    pub fn leave(&mut self, slot: usize) -> Result<()> {
        self.write_word(POSITION, slot, VACANT)?;
        self.pages[slot * self.width..][..self.known[slot]].fill(NONE);
        if self.known[slot] > 0 {
            self.mark_pages_stale(slot);
        }
        self.known[slot] = 0;
        Ok(())
    }

    /// Moves who is in slot `from` to slot `to`, which nobody is in: on the GPU, behind the steps that are under way,
    /// since the host does not know their tokens yet. A mask comes with the next [`set_mask`](Self::set_mask).
    pub fn relocate(&mut self, from: usize, to: usize) -> Result<()> {
        for which in [TOKEN, POSITION, WANTED] {
            self.copy(self.word(which, from), self.word(which, to), 1)?;
        }
        let settings = |slot: usize| self.word(WORDS, 0) + (4 * SETTINGS * slot) as Address;
        self.copy(settings(from), settings(to), SETTINGS)?;
        let history = self.history.device_ptr(&self.device.cuda_stream()).0;
        let history = |slot: usize| history + (4 * HISTORY * slot) as Address;
        self.copy(history(from), history(to), HISTORY)?;
        let row = from * self.width..from * self.width + self.known[from];
        let pages = self.pages[row].to_vec();
        self.set_pages(to, &pages);
        self.leave(from)
    }

    /// Copies words of one slot to another, in the order of the stream.
    fn copy(&self, from: Address, to: Address, words: usize) -> Result<()> {
        let stream = Launcher::new(&self.device)?.stream;
        // SAFETY: the addresses are those of two slots in one buffer that has as many words for each, and which is
        // freed in the order of the stream.
        let copied = unsafe { result::memcpy_dtod_async(to, from, 4 * words, stream) };
        copied.map_err(candle_core::Error::wrap)
    }

    fn write_word(&mut self, which: usize, slot: usize, word: u32) -> Result<()> {
        let at = which * self.count + slot;
        let mut word_at = self.words.slice_mut(at..=at);
        self.device.memcpy_htod(&[word], &mut word_at)
    }

    /// Says which pages a slot has: those that it had, and more.
    pub fn set_pages(&mut self, slot: usize, pages: &[u32]) {
        let known = self.known[slot];
        if pages.len() > known {
            let row = &mut self.pages[slot * self.width..][..self.width];
            row[known..pages.len()].copy_from_slice(&pages[known..]);
            self.known[slot] = pages.len();
            self.mark_pages_stale(slot);
        }
    }

    fn mark_pages_stale(&mut self, slot: usize) {
        self.stale = match self.stale.is_empty() {
            true => slot..slot + 1,
            false => self.stale.start.min(slot)..self.stale.end.max(slot + 1),
        };
    }

    /// Brings the GPU's table up to date.
    pub fn upload(&mut self) -> Result<()> {
        if self.stale.is_empty() {
            return Ok(());
        }
        let words = self.stale.start * self.width..self.stale.end * self.width;
        let table = self.count * self.width;
        let from = self.sendings * table % self.sent.words().len();
        self.sendings += 1;
        let part = &self.sent.words()[from..from + table];
        for (to, page) in part.iter().zip(&self.pages[words.clone()]) {
            to.store(*page, Ordering::Relaxed);
        }
        let to = self.table() + 4 * words.start as Address;
        let stream = Launcher::new(&self.device)?.stream;
        // SAFETY: the table has these rows; what was sent from this part before has arrived, as `new` asks for, and the
        // runner waits for the stream before it drops this.
        unsafe { self.sent.copy_to(from, to, words.len(), stream)? };
        self.stale = 0..0;
        Ok(())
    }
}
