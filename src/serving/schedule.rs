//! Who takes part in a step: requests are let in and served in the order in which they came (so none starves),
//! prompts are read in chunks under a budget of tokens beside the single tokens of the others (Sarathi-Serve, Agrawal
//! et al. 2024), and where pages run out, the request that came last gives its own back and begins anew later
//! (recomputation, Kwon et al. 2023, section 4.5).

use super::buckets::{Buckets, Move};
use super::pages::Pages;
use super::request::{Drawn, FinishReason, Output, RequestId};
use super::sequence::Sequence;
use std::collections::BTreeMap;

/// Tokens of a prompt, or of what is read again, that a step takes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub slot: usize,
    /// Positions `from .. to`.
    pub from: usize,
    pub to: usize,
    /// Whether these are the last: a token is drawn after them.
    pub draws: bool,
}

/// A step.
#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Slots whose last token is taken in, with its position.
    pub singles: Vec<(usize, usize)>,
    pub chunks: Vec<Chunk>,
    /// Who moves to another slot before the step: the slots above are those after it.
    pub moves: Vec<Move>,
}

impl Batch {
    /// Every sequence's part as a batch of its own, draws in the same order.
    pub fn apart(&self) -> impl Iterator<Item = Batch> {
        let single = |single: &(usize, usize)| Batch {
            singles: vec![*single],
            ..Default::default()
        };
        let chunk = |chunk: &Chunk| Batch {
            chunks: vec![*chunk],
            ..Default::default()
        };
        (self.singles.iter().map(single)).chain(self.chunks.iter().map(chunk))
    }

    /// Follows those who move.
    fn relocate(&mut self, moves: Vec<Move>) {
        let singles = self.singles.iter_mut().map(|(slot, _)| slot);
        for slot in singles.chain(self.chunks.iter_mut().map(|chunk| &mut chunk.slot)) {
            if let Some(of) = moves.iter().find(|of| of.from == *slot) {
                *slot = of.to;
            }
        }
        self.singles.sort_unstable();
        self.moves = moves;
    }

    /// Whether nothing is launched.
    pub fn is_empty(&self) -> bool {
        self.singles.is_empty() && self.chunks.is_empty()
    }

    /// Slots for which a token is drawn, in the order of the draws.
    pub fn draws(&self) -> impl Iterator<Item = usize> {
        let chunks = self.chunks.iter().filter(|chunk| chunk.draws);
        let singles = self.singles.iter().map(|(slot, _)| *slot);
        singles.chain(chunks.map(|chunk| chunk.slot))
    }
}

/// Requests, places and pages.
#[derive(Debug)]
pub(super) struct Schedule {
    waiting: BTreeMap<RequestId, Sequence>,
    /// The places of a step.
    pub slots: Vec<Option<Sequence>>,
    buckets: Buckets,
    /// Slots of the last step of single tokens.
    pub bucket: usize,
    pub pages: Pages,
    /// Of a sequence, at most.
    positions: usize,
    /// Tokens of prompts in a step, at most.
    budget: usize,
    /// With batch invariance, tokens of a chunk: chunks end at multiples of it.
    chunk_tokens: Option<usize>,
    /// Slots whose sequence has left them.
    left: Vec<usize>,
    /// Requests that have ended without a draw.
    ended: Vec<Output>,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub preemptions: u64,
}

impl Schedule {
    pub fn new(
        slots: usize,
        pages: Pages,
        [positions, budget]: [usize; 2],
        chunk_tokens: Option<usize>,
    ) -> Self {
        Self {
            waiting: BTreeMap::new(),
            slots: (0..slots).map(|_| None).collect(),
            buckets: Buckets::new(slots, chunk_tokens.is_some()),
            bucket: 0,
            pages,
            positions,
            budget,
            chunk_tokens,
            left: Vec::new(),
            ended: Vec::new(),
            prompt_tokens: 0,
            cached_tokens: 0,
            preemptions: 0,
        }
    }

    pub fn submit(&mut self, sequence: Sequence) {
        self.waiting.insert(sequence.id, sequence);
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub fn running(&self) -> impl Iterator<Item = &Sequence> {
        self.slots.iter().flatten()
    }

    /// Whether one of those that run has a constraint, which has to know its last token before the next is drawn.
    pub fn is_constrained(&self) -> bool {
        self.running().any(|s| s.constrained.is_some())
    }

    /// Updates the masks of all constraints that draw in a step.
    pub fn update_masks(&mut self, batch: &Batch) {
        for slot in batch.draws() {
            let sequence = self.slots[slot].as_mut();
            if let Some(constrained) = sequence.and_then(|s| s.constrained.as_mut()) {
                constrained.update_mask();
            }
        }
    }

    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.ended.is_empty() && self.running().next().is_none()
    }

    /// Slots that sequences have left since this was asked last.
    pub fn take_left(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.left)
    }

    /// Requests that have ended without a draw since this was asked last.
    pub fn take_ended(&mut self) -> Vec<Output> {
        std::mem::take(&mut self.ended)
    }

    /// Forgets a request; whether there was one.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        if self.waiting.remove(&id).is_some() {
            return true;
        }
        let of = |slot: &Option<Sequence>| slot.as_ref().is_some_and(|s| s.id == id);
        match self.slots.iter().position(of) {
            Some(slot) => {
                self.leave(slot);
                true
            }
            None => false,
        }
    }

    /// Takes the sequence of a slot out, and its pages back.
    fn leave(&mut self, slot: usize) -> Option<Sequence> {
        let mut sequence = self.slots[slot].take()?;
        sequence.give_up(&mut self.pages);
        self.left.push(slot);
        Some(sequence)
    }

    /// Sends the sequence of a slot back to wait.
    pub fn preempt(&mut self, slot: usize) {
        if let Some(sequence) = self.leave(slot) {
            self.preemptions += 1;
            self.waiting.insert(sequence.id, sequence);
        }
    }

    /// The step that comes next, counted as launched.
    pub fn next(&mut self) -> Batch {
        let mut batch = Batch::default();
        self.pages.begin_step();
        let order = self.by_age();
        self.singles(&order, &mut batch);
        let mut budget = self.budget;
        self.chunks(&order, &mut batch, &mut budget);
        self.admit(&mut batch, &mut budget);
        batch.relocate(self.buckets.compact(&mut self.slots));
        let highest = batch.singles.last();
        self.bucket = highest.map_or(0, |(slot, _)| self.buckets.size(slot + 1));
        batch
    }

    /// Occupied slots, the oldest request first.
    fn by_age(&self) -> Vec<usize> {
        let id = |slot: &usize| self.slots[*slot].as_ref().map(|s| s.id);
        let mut slots: Vec<_> = (0..self.slots.len()).filter(|s| id(s).is_some()).collect();
        slots.sort_by_key(id);
        slots
    }

    /// The sequences that go on by a token, of the slots in `order`.
    fn singles(&mut self, order: &[usize], batch: &mut Batch) {
        for &slot in order {
            // A younger one may have had to leave.
            let Some(sequence) = &self.slots[slot] else {
                continue;
            };
            if !sequence.active || sequence.is_drawn(self.positions) {
                continue;
            }
            let total = sequence.total();
            if !self.reserve(slot, total) {
                continue;
            }
            if let Some(sequence) = &mut self.slots[slot] {
                batch.singles.push((slot, total - 1));
                (sequence.written, sequence.under_way) = (total, sequence.under_way + 1);
            }
        }
        let there = |(slot, _): &(usize, usize)| self.slots[*slot].is_some();
        batch.singles.retain(there);
        batch.singles.sort_unstable();
    }

    /// Makes room for `positions` positions, if need be at the cost of the youngest; whether it could.
    fn reserve(&mut self, slot: usize, positions: usize) -> bool {
        loop {
            let Some(sequence) = &mut self.slots[slot] else {
                return false;
            };
            if sequence.missing(positions, &self.pages) == 0 {
                return true;
            }
            if let Some(page) = self.pages.take() {
                sequence.pages.push(page);
                continue;
            }
            let (id, awaited) = (sequence.id, sequence.under_way > 0);
            match self.by_age().last() {
                Some(&youngest) if youngest != slot || self.running().count() > 1 => {
                    self.preempt(youngest);
                }
                // It has all pages that there are, and tokens to come for what lies in them.
                _ if awaited => return false,
                _ => {
                    self.leave(slot);
                    self.end_without_page(id);
                }
            }
        }
    }

    /// Tells that a request has no page for its next token, and that there is none to be had.
    fn end_without_page(&mut self, id: RequestId) {
        self.ended.push(Output {
            id,
            token: None,
            logprobs: None,
            finish: Some(FinishReason::Length),
        });
    }

    /// Goes on with prompts that have been begun, in the slots in `order`.
    fn chunks(&mut self, order: &[usize], batch: &mut Batch, budget: &mut usize) {
        for &slot in order {
            let reading = self.slots[slot].as_ref().is_some_and(|s| !s.active);
            if reading && *budget > 0 {
                self.chunk(slot, batch, budget);
            }
        }
    }

    /// As much of what a slot has to read as the budget allows, or with batch invariance a whole chunk, if there is
    /// budget for it; its pages are there. What others have read is not read again. Where others read in this step what
    /// is half of the chunk or more, it waits for the next one.
    fn chunk(&mut self, slot: usize, batch: &mut Batch, budget: &mut usize) {
        let Some(sequence) = &mut self.slots[slot] else {
            return;
        };
        let saved = sequence.reuse(&mut self.pages, self.chunk_tokens);
        self.cached_tokens += saved as u64;
        let (from, end) = (sequence.written, sequence.tokens.len());
        let to = match self.chunk_tokens {
            None => end.min(from + *budget),
            Some(chunk_tokens) => end.min((from / chunk_tokens + 1) * chunk_tokens),
        };
        let coming = sequence.coming(&self.pages, self.chunk_tokens);
        if to - from > *budget || 2 * coming >= to - from {
            return;
        }
        *budget -= to - from;
        sequence.written = to;
        sequence.publish(&mut self.pages, self.chunk_tokens);
        if to == end {
            (sequence.active, sequence.under_way) = (true, 1);
        }
        batch.chunks.push(Chunk {
            slot,
            from,
            to,
            draws: to == end,
        });
    }

    /// Lets in who has waited longest, while there are places, pages and budget.
    fn admit(&mut self, batch: &mut Batch, budget: &mut usize) {
        while *budget > 0
            && let Some(slot) = self.slots.iter().position(Option::is_none)
            && let Some((_, mut sequence)) = self.waiting.pop_first()
        {
            let cached = sequence.reuse(&mut self.pages, self.chunk_tokens);
            let wanted = match self.chunk_tokens {
                // The page of the token that is drawn first is taken as well, so that it is not sent back at once.
                None => sequence.tokens.len() + 1,
                // Who begins anew reads in chunks what was written token by token: all pages are taken at once, so that
                // nobody has to.
                Some(_) => sequence.longest().min(self.positions),
            };
            let missing = sequence.missing(wanted, &self.pages);
            let fits = missing <= self.pages.available();
            // With all pages to itself it may do without that one.
            let alone = self.running().next().is_none();
            if !fits && !alone {
                sequence.give_up(&mut self.pages);
                self.waiting.insert(sequence.id, sequence);
                return;
            }
            let taken = (0..missing).map_while(|_| self.pages.take());
            sequence.pages.extend(taken);
            // Sent back when its last token had no page: alone, it has all that there are.
            if sequence.missing(sequence.tokens.len(), &self.pages) > 0 {
                sequence.give_up(&mut self.pages);
                self.end_without_page(sequence.id);
                continue;
            }
            self.prompt_tokens += sequence.tokens.len() as u64;
            self.cached_tokens += cached as u64;
            self.slots[slot] = Some(sequence);
            self.chunk(slot, batch, budget);
        }
    }

    /// What a draw for the sequence in a slot means; none if it is no longer the one that was asked for.
    pub fn draw(
        &mut self,
        slot: usize,
        id: RequestId,
        beginning: u32,
        drawn: Drawn,
    ) -> Option<Output> {
        let sequence = self.slots[slot].as_mut()?;
        if sequence.id != id || sequence.beginning != beginning {
            return None;
        }
        let Drawn { token, logprobs } = drawn;
        let finish = match token {
            Some(token) => sequence.draw(token, self.positions),
            None => Some(sequence.undrawn()),
        };
        match finish {
            // Keys of what is no number are of no use to others.
            Some(FinishReason::Failed) => self.pages.withdraw(sequence.pages.iter().copied()),
            _ => sequence.publish(&mut self.pages, self.chunk_tokens),
        }
        if finish.is_some() {
            self.leave(slot);
        }
        Some(Output {
            id,
            token,
            logprobs: logprobs.filter(|_| token.is_some()),
            finish,
        })
    }
}
