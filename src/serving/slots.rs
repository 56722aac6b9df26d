//! What the GPU knows of each slot: its token and position, how the next token is chosen, and its pages.

use crate::cuda::{Address, Launcher, Pinned};
use crate::generation::chain::Ends;
use crate::ops::SamplingParams;
use crate::ops::sample::cuda::{self as sample, SETTINGS};
use crate::ops::view::dtype_index;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
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
    /// Tokens, positions, arrivals; then settings.
    words: CudaSlice<u32>,
    history: CudaSlice<u32>,
    scores: CudaSlice<f32>,
    partial: CudaSlice<u64>,
    /// `[count, width]`, and what the host has of it.
    table: CudaSlice<u32>,
    pages: Vec<u32>,
    /// Rows of it on their way to the GPU: a table for each step that may be under way, and for the one that is
    /// launched. From memory that is not page-locked the driver may wait for the stream first.
    sent: Pinned,
    sendings: usize,
    width: usize,
    /// Pages of each slot that the host's table has.
    known: Vec<usize>,
    /// Slots whose pages differ from the GPU's.
    stale: Range<usize>,
}

const TOKEN: usize = 0;
const POSITION: usize = 1;
const ARRIVED: usize = 2;

/// Words of a slot in front of the settings.
const WORDS: usize = 3;

/// The position of nobody: past all pages, also when many steps have counted it up.
const VACANT: u32 = 0xf000_0000;

impl Slots {
    /// `count` slots, all empty, of up to `width` pages each.
    ///
    /// Of the steps behind an [`upload`](Self::upload), all but the last `ahead` are through before the next one.
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

    /// The ends of a step of the slots `first .. first + count`.
    pub fn ends(&self, first: usize, count: usize) -> Ends {
        let stream = self.device.cuda_stream();
        let settings = self.word(WORDS, 0) + (4 * SETTINGS * first) as Address;
        let behind = |base: Address, bytes: usize| base + (first * bytes) as Address;
        Ends {
            sequences: count,
            token: self.word(TOKEN, first),
            position: self.word(POSITION, first),
            sampling: sample::Step {
                settings,
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

    /// Puts a sequence into a slot: the draw that follows is that behind `tokens`.
    pub fn enter(&mut self, slot: usize, tokens: &[u32], sampling: &SamplingParams) -> Result<()> {
        // The place of the token before, which the kernel counts up.
        self.put(POSITION, slot, (tokens.len() as u32).wrapping_sub(1))?;
        let at = WORDS * self.count + SETTINGS * slot;
        let mut settings = self.words.slice_mut(at..at + SETTINGS);
        let words = sampling.settings(0).words();
        self.device.memcpy_htod(&words, &mut settings)?;
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
        self.put(POSITION, slot, VACANT)?;
        self.pages[slot * self.width..][..self.known[slot]].fill(NONE);
        if self.known[slot] > 0 {
            self.spoil(slot);
        }
        self.known[slot] = 0;
        Ok(())
    }

    fn put(&mut self, which: usize, slot: usize, word: u32) -> Result<()> {
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
            self.spoil(slot);
        }
    }

    fn spoil(&mut self, slot: usize) {
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
