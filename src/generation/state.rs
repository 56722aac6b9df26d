//! What a decode step finds on the GPU and leaves there, and the mailbox through which the host
//! reads tokens.

use super::Sequence;
use super::chain::StepIo;
use crate::cuda::{Address, Gpu, Launcher, Pinned, address_of};
use crate::ops::SamplingParams;
use crate::ops::sample::NONE;
use crate::ops::sample::cuda::{self as sample, SETTINGS};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{CudaDevice, Result, Tensor, bail};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Steps whose tokens the mailbox holds.
pub(super) const MAIL_SLOTS: usize = 64;

/// Tokens of a sequence that the GPU remembers for the repeat penalty.
const SLOTS: usize = SamplingParams::MAX_LAST_N;

/// How long the host spins for a token before it asks whether the GPU is well.
const PATIENCE: Duration = Duration::from_millis(200);

/// Tokens, positions and everything that choosing tokens needs, for all sequences.
pub(super) struct State {
    device: CudaDevice,
    gpu: &'static Gpu,
    /// token, position, step, arrived; then settings; then history.
    words: CudaSlice<u32>,
    scores: CudaSlice<f32>,
    partial: CudaSlice<u64>,
    mailbox: Pinned,
    sequences: usize,
    vocab: usize,
    /// Steps launched and steps read since the last upload.
    launched: u32,
    read: u32,
    /// Whether the GPU's tokens and positions are the host's.
    current: bool,
}

impl State {
    /// For whatever sampling the sequences are set to.
    pub fn new(device: &CudaDevice, vocab: usize, sequences: usize) -> Result<Self> {
        let gpu = Launcher::new(device)?.gpu;
        Ok(Self {
            words: device.alloc_zeros(sequences * (4 + SETTINGS + SLOTS))?,
            scores: device.alloc_zeros(sequences * vocab)?,
            partial: device.alloc_zeros(sequences * sample::partial_words(vocab))?,
            mailbox: Pinned::new(gpu, 2 * MAIL_SLOTS * sequences)?,
            device: device.clone(),
            gpu,
            sequences,
            vocab,
            launched: 0,
            read: 0,
            current: false,
        })
    }

    /// What a step finds here and leaves.
    pub fn io(&self) -> StepIo {
        StepIo {
            sequences: self.sequences,
            token: self.region(0),
            position: self.region(self.sequences),
            sampling: self.sampling(),
        }
    }

    /// The end of a step, but for its logits, f32 `[sequences, vocab]`.
    fn sampling(&self) -> sample::Step {
        let stream = self.device.cuda_stream();
        let n = self.sequences;
        sample::Step {
            settings: self.region(4 * n),
            token: self.region(0),
            position: self.region(n),
            history: self.region((4 + SETTINGS) * n),
            step: self.region(2 * n),
            mailbox: self.mailbox.address(),
            scores: self.scores.device_ptr(&stream).0,
            partial: self.partial.device_ptr(&stream).0,
            arrived: self.region(3 * n),
            vocab: self.vocab as u32,
            history_slots: SLOTS as u32,
            mail_slots: MAIL_SLOTS as u32,
            ..Default::default()
        }
    }

    fn region(&self, words: usize) -> Address {
        self.words.device_ptr(&self.device.cuda_stream()).0 + 4 * words as u64
    }

    /// Draws the token of sequence `index` that follows what it holds, from logits f32 `[1, V]`.
    pub fn draw(&mut self, logits: &Tensor, index: usize, sequence: &Sequence) -> Result<u32> {
        self.current = false;
        let (n, ids) = (self.sequences, &sequence.ids);
        let mut words = vec![0u32; self.words.len()];
        // The place of the token before, which the kernel counts up.
        words[n + index] = (ids.len() as u32).wrapping_sub(1);
        self.write_settings(&mut words, index, &sequence.sampling);
        let known = ids.iter().enumerate();
        self.write_history(
            &mut words,
            index,
            known.skip(ids.len().saturating_sub(SLOTS)),
        );
        self.device.memcpy_htod(&words, &mut self.words)?;
        let all = self.sampling();
        let behind = |base: Address, bytes: usize| base + (index * bytes) as Address;
        let step = sample::Step {
            logits: address_of(logits)?,
            settings: behind(all.settings, 4 * SETTINGS),
            token: behind(all.token, 4),
            position: behind(all.position, 4),
            history: behind(all.history, 4 * SLOTS),
            scores: behind(all.scores, 4 * self.vocab),
            partial: behind(all.partial, 8 * sample::partial_words(self.vocab)),
            arrived: behind(all.arrived, 4),
            step: 0,
            mailbox: 0,
            ..all
        };
        // SAFETY: the addresses are those of one sequence in the state's own buffers.
        unsafe { sample::launch(&Launcher::new(&self.device)?, 1, step)? };
        let token = self
            .device
            .clone_dtoh(&self.words.slice(index..index + 1))?;
        match token[..] {
            [token] if token != NONE => Ok(token),
            _ => bail!("generation: the logits are not numbers, the weights may be damaged"),
        }
    }

    fn write_settings(&self, words: &mut [u32], index: usize, sampling: &SamplingParams) {
        let settings = sampling.settings(index).words();
        words[4 * self.sequences + SETTINGS * index..][..SETTINGS].copy_from_slice(&settings);
    }

    /// Tokens with their places, each of which overwrites what is too old to matter.
    fn write_history<'a>(
        &self,
        words: &mut [u32],
        index: usize,
        tokens: impl Iterator<Item = (usize, &'a u32)>,
    ) {
        let first = (4 + SETTINGS) * self.sequences + SLOTS * index;
        let history = &mut words[first..][..SLOTS];
        tokens.for_each(|(place, token)| history[place % SLOTS] = *token);
    }

    /// Whether the GPU can go on from where it is.
    pub fn is_current(&self) -> bool {
        self.current
    }

    /// Hands the GPU what the host knows of the sequences.
    pub fn upload(&mut self, sequences: &[Sequence]) -> Result<()> {
        let n = self.sequences;
        let mut words = vec![0u32; self.words.len()];
        for (i, sequence) in sequences.iter().enumerate() {
            words[i] = sequence.pending.unwrap_or(0);
            words[n + i] = sequence.ids.len() as u32;
            self.write_settings(&mut words, i, &sequence.sampling);
            let known = sequence.ids.iter().chain(&sequence.pending).enumerate();
            let skipped = (sequence.ids.len() + 1).saturating_sub(SLOTS);
            self.write_history(&mut words, i, known.skip(skipped));
        }
        for word in self.mailbox.words() {
            word.store(0, Ordering::Relaxed);
        }
        self.device.memcpy_htod(&words, &mut self.words)?;
        (self.launched, self.read) = (0, 0);
        self.current = true;
        Ok(())
    }

    /// Counts steps as launched.
    pub fn launched(&mut self, steps: usize) {
        self.launched += steps as u32;
    }

    /// Steps that are launched and not read.
    pub fn in_flight(&self) -> usize {
        (self.launched - self.read) as usize
    }

    /// Waits for the tokens of the oldest step that is under way.
    pub fn receive(&mut self) -> Result<Vec<u32>> {
        let wanted = self.read + 1;
        let slot = self.read as usize % MAIL_SLOTS;
        let mut tokens = Vec::with_capacity(self.sequences);
        let begun = Instant::now();
        let mut spins = 0u32;
        while tokens.len() < self.sequences {
            let at = 2 * (slot * self.sequences + tokens.len());
            let [low, high] = [at, at + 1].map(|i| &self.mailbox.words()[i]);
            // The GPU writes both words at once; the mark in the upper one is read first.
            if high.load(Ordering::Acquire) == wanted {
                tokens.push(low.load(Ordering::Acquire));
                continue;
            }
            std::hint::spin_loop();
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(1 << 16) && begun.elapsed() > PATIENCE {
                // An error of the GPU ends the wait; a step that is merely long goes on.
                self.wait()?;
                if high.load(Ordering::Acquire) != wanted {
                    bail!("generation: the GPU went through a step without leaving its token");
                }
            }
        }
        self.read = wanted;
        Ok(tokens)
    }

    /// Waits until nothing is under way.
    pub fn drain(&mut self) -> Result<()> {
        let under_way = self.in_flight() > 0 || self.current;
        // Also where waiting fails: what the GPU holds is of no use then.
        (self.launched, self.read, self.current) = (0, 0, false);
        match under_way {
            true => self.wait(),
            false => Ok(()),
        }
    }

    /// Not candle's way of waiting: that returns at once where an earlier drop has left an error, and
    /// the GPU writes to the mailbox until the last step is through.
    fn wait(&self) -> Result<()> {
        // SAFETY: the stream is candle's.
        unsafe { self.gpu.wait(self.device.cuda_stream().cu_stream()) }
    }
}
