//! A request that has been let in.

use super::OP;
use super::constraint::Constrained;
use super::pages::{Chain, Pages, ROOT};
use super::request::{FinishReason, Request, RequestId};
use super::stop::Stopping;

/// A request, what is known of its tokens, and where their keys and values are.
#[derive(Debug)]
pub(super) struct Sequence {
    pub id: RequestId,
    pub request: Request,
    /// What restricts its tokens: it knows those of `tokens` that were drawn.
    pub constrained: Option<Constrained>,
    /// Its stop strings, if it has any, behind the tokens that were drawn.
    stopping: Option<Stopping>,
    /// The prompt, followed by the tokens that were drawn and read back.
    pub tokens: Vec<u32>,
    /// Draws that are under way.
    pub under_way: usize,
    /// Positions whose keys and values are written by what has been launched.
    pub written: usize,
    /// Pages of these, in the order of positions.
    pub pages: Vec<u32>,
    /// Whether the runner holds its last token: the next step takes that in.
    pub active: bool,
    /// How often it has begun anew: draws of an earlier beginning do not count.
    pub beginning: u32,
    /// Full pages that others may find, and their chain.
    published: usize,
    chain: Chain,
}

impl Sequence {
    pub fn new(
        id: RequestId,
        request: Request,
        constrained: Option<Constrained>,
        stopping: Option<Stopping>,
    ) -> Self {
        Self {
            id,
            tokens: request.prompt.clone(),
            request,
            constrained,
            stopping,
            under_way: 0,
            written: 0,
            pages: Vec::new(),
            active: false,
            beginning: 0,
            published: 0,
            chain: ROOT,
        }
    }

    /// Tokens, with those that are under way.
    pub fn total(&self) -> usize {
        self.tokens.len() + self.under_way
    }

    /// Whether nothing is left to draw for it.
    pub fn is_drawn(&self, positions: usize) -> bool {
        let generated = self.total() - self.request.prompt.len();
        generated >= self.request.max_tokens || self.total() > positions
    }

    /// Positions that it may need.
    pub fn longest(&self) -> usize {
        (self.request.prompt.len()).saturating_add(self.request.max_tokens)
    }

    /// Tokens that others' pages may hold behind what it has read: none in the middle of a page, and never the last one,
    /// whose logits are wanted.
    fn sharable(&self, pages: &Pages) -> &[u32] {
        match self.written == self.published * pages.size() {
            true => &self.tokens[self.written..self.tokens.len() - 1],
            false => &[],
        }
    }

    /// Takes over the pages that hold what it has to read next, in place of its own. With batch invariance only whole
    /// chunks of `chunk_tokens` tokens are taken over. How many tokens that saves.
    pub fn reuse(&mut self, pages: &mut Pages, chunk_tokens: Option<usize>) -> usize {
        let mut tokens = self.sharable(pages);
        if let Some(chunk_tokens) = chunk_tokens {
            let (found, _) = pages.find(self.chain, tokens);
            tokens = &tokens[..found.len() * pages.size() / chunk_tokens * chunk_tokens];
            pages.release(found.into_iter());
        }
        let (found, chain) = pages.find(self.chain, tokens);
        let (first, count) = (self.published, found.len());
        let own = first..self.pages.len().min(first + count);
        let own: Vec<u32> = self.pages.splice(own, found).collect();
        pages.release(own.into_iter());
        self.chain = chain;
        self.published += count;
        self.written += count * pages.size();
        count * pages.size()
    }

    /// How many tokens [`reuse`](Self::reuse) will save once the step that is being put together is through.
    pub fn coming(&self, pages: &Pages, chunk_tokens: Option<usize>) -> usize {
        let tokens = pages.coming(self.chain, self.sharable(pages));
        let whole = chunk_tokens.unwrap_or(1);
        tokens / whole * whole
    }

    /// Pages that are missing for `positions` positions.
    pub fn missing(&self, positions: usize, pages: &Pages) -> usize {
        let wanted = positions.div_ceil(pages.size());
        wanted.saturating_sub(self.pages.len())
    }

    /// Lets others find the pages that are full of known tokens once the step is through, or with batch invariance those
    /// of the prompt's whole chunks of `chunk_tokens` tokens: what was read in fewer rows may differ in the last bits.
    pub fn publish(&mut self, pages: &mut Pages, chunk_tokens: Option<usize>) {
        let size = pages.size();
        let known = match chunk_tokens {
            Some(chunk_tokens) => self.request.prompt.len() / chunk_tokens * chunk_tokens,
            None => self.tokens.len(),
        };
        let full = self.written.min(known) / size;
        while self.published < full {
            let at = self.published;
            let tokens = &self.tokens[at * size..(at + 1) * size];
            self.chain = pages.publish(self.pages[at], self.chain, tokens);
            self.published += 1;
        }
    }

    /// Gives its pages back; what is known of its tokens stays.
    pub fn give_up(&mut self, pages: &mut Pages) {
        pages.release(std::mem::take(&mut self.pages).into_iter());
        (self.written, self.published, self.chain) = (0, 0, ROOT);
        (self.under_way, self.active) = (0, false);
        self.beginning += 1;
    }

    /// Why nothing was drawn for it.
    pub fn undrawn(&self) -> FinishReason {
        let mask = self.constrained.as_ref().map(Constrained::mask);
        match mask.is_some_and(|mask| mask.iter().all(|word| *word == 0)) {
            true => FinishReason::Rejected,
            false => FinishReason::Failed,
        }
    }

    /// Counts a token that was drawn; whether it is the last, and why.
    pub fn draw(&mut self, token: u32, positions: usize) -> Option<FinishReason> {
        self.tokens.push(token);
        self.under_way = self.under_way.saturating_sub(1);
        if self.request.stop.contains(&token) {
            return Some(FinishReason::Stop);
        }
        if let Some(stopping) = &mut self.stopping
            && stopping.accept(token)
        {
            return Some(FinishReason::StopString);
        }
        match self.constrained.as_mut().map(|of| of.accept(token)) {
            None | Some(Ok(false)) => {}
            Some(Ok(true)) => return Some(FinishReason::Complete),
            Some(Err(error)) => {
                tracing::warn!("{OP}: a constraint takes no token {token}: {error}");
                return Some(FinishReason::Rejected);
            }
        }
        let generated = self.tokens.len() - self.request.prompt.len();
        let full = generated >= self.request.max_tokens || self.tokens.len() > positions;
        let stopped = full && self.stopping.as_mut().is_some_and(Stopping::finish);
        let reason = match stopped {
            true => FinishReason::StopString,
            false => FinishReason::Length,
        };
        full.then_some(reason)
    }
}
