//! Which pages are whose: counts of references, and full pages kept under what is in them, so that a later request
//! with the same beginning finds its keys and values there (prefix caching, Kwon et al. 2023, section 4.4; Zheng et
//! al. 2024). The page that was let go longest ago is taken first.

use std::collections::{BTreeMap, HashMap};

/// What a full page holds: the tokens in it, after those of a chain of full pages.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Content {
    /// Of the page before it; [`ROOT`] for a first page.
    before: Chain,
    tokens: Box<[u32]>,
}

/// Stands for the tokens of a chain of full pages from position 0 on; never given twice.
pub(super) type Chain = u64;

/// The chain of no page.
pub(super) const ROOT: Chain = 0;

/// A full page that others may share.
#[derive(Debug)]
struct Shared {
    content: Content,
    chain: Chain,
    /// The step that wrote it: others can read it in the steps after that.
    step: u64,
}

/// All pages of a pool.
#[derive(Debug)]
pub(super) struct Pages {
    /// Tokens of a page.
    size: usize,
    /// References to each page.
    held: Vec<u32>,
    /// Pages that hold nothing of use.
    free: Vec<u32>,
    /// Of each page, what it holds, if others may share it.
    shared: Vec<Option<Shared>>,
    by_content: HashMap<Content, u32>,
    /// Shared pages that nobody refers to, by when that began.
    idle: BTreeMap<u64, u32>,
    /// When each page became idle.
    since: Vec<u64>,
    now: u64,
    chains: Chain,
    /// The number of the step that is being put together.
    step: u64,
    /// Whether pages are shared.
    sharing: bool,
}

impl Pages {
    pub fn new(count: usize, size: usize, sharing: bool) -> Self {
        Self {
            size,
            held: vec![0; count],
            // The first is taken first.
            free: (0..count as u32).rev().collect(),
            shared: (0..count).map(|_| None).collect(),
            by_content: HashMap::new(),
            idle: BTreeMap::new(),
            since: vec![0; count],
            now: 0,
            chains: ROOT,
            step: 0,
            sharing,
        }
    }

    /// Tokens of a page.
    pub fn size(&self) -> usize {
        self.size
    }

    pub fn count(&self) -> usize {
        self.held.len()
    }

    /// Pages that can be taken.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// A page that holds nothing yet.
    pub fn take(&mut self) -> Option<u32> {
        let page = match self.free.pop() {
            Some(page) => page,
            None => {
                let (_, page) = self.idle.pop_first()?;
                if let Some(old) = self.shared[page as usize].take() {
                    self.by_content.remove(&old.content);
                }
                page
            }
        };
        self.held[page as usize] = 1;
        Some(page)
    }

    /// Lets go of a sequence's pages. The last ones are taken by others first: those before them are of use to more.
    pub fn release(&mut self, pages: impl DoubleEndedIterator<Item = u32>) {
        for page in pages.rev() {
            let at = page as usize;
            self.held[at] -= 1;
            if self.held[at] > 0 {
                continue;
            }
            match self.shared[at] {
                Some(_) => {
                    self.now += 1;
                    self.since[at] = self.now;
                    self.idle.insert(self.now, page);
                }
                None => self.free.push(page),
            }
        }
    }

    /// Begins a step, which can read what earlier ones have written.
    pub fn begin_step(&mut self) {
        self.step += 1;
    }

    /// The full pages behind `chain` that hold the beginning of `tokens`, and their chain; with those that the current
    /// step writes, if `coming`.
    fn walk(&self, mut chain: Chain, tokens: &[u32], coming: bool) -> (Vec<u32>, Chain) {
        let mut pages = Vec::new();
        if !self.sharing {
            return (pages, chain);
        }
        for tokens in tokens.chunks_exact(self.size) {
            let content = Content {
                before: chain,
                tokens: tokens.into(),
            };
            let Some(&page) = self.by_content.get(&content) else {
                break;
            };
            let shared = self.shared[page as usize].as_ref();
            let Some(shared) = shared.filter(|of| coming || of.step < self.step) else {
                break;
            };
            chain = shared.chain;
            pages.push(page);
        }
        (pages, chain)
    }

    /// The full pages behind `chain` that hold the beginning of `tokens`, now held once more, and their chain.
    pub fn find(&mut self, chain: Chain, tokens: &[u32]) -> (Vec<u32>, Chain) {
        let (pages, chain) = self.walk(chain, tokens, false);
        for page in &pages {
            let at = *page as usize;
            if self.held[at] == 0 {
                self.idle.remove(&self.since[at]);
            }
            self.held[at] += 1;
        }
        (pages, chain)
    }

    /// How many of `tokens` can be found behind `chain` once the current step is through.
    pub fn coming(&self, chain: Chain, tokens: &[u32]) -> usize {
        self.walk(chain, tokens, true).0.len() * self.size
    }

    /// Says that nobody is to find what is in `pages`.
    pub fn withdraw(&mut self, pages: impl Iterator<Item = u32>) {
        for page in pages {
            let at = page as usize;
            let Some(old) = self.shared[at].take() else {
                continue;
            };
            self.by_content.remove(&old.content);
            if self.held[at] == 0 {
                self.idle.remove(&self.since[at]);
                self.free.push(page);
            }
        }
    }

    /// Says that `page` is full of `tokens`, after the chain `before`, once the current step is through; its own chain is
    /// given. Where another page holds the same, that one stays the one that is found.
    pub fn publish(&mut self, page: u32, before: Chain, tokens: &[u32]) -> Chain {
        if !self.sharing {
            return ROOT;
        }
        let content = Content {
            before,
            tokens: tokens.into(),
        };
        if let Some(same) = self.by_content.get(&content)
            && let Some(shared) = &self.shared[*same as usize]
        {
            return shared.chain;
        }
        self.chains += 1;
        self.by_content.insert(content.clone(), page);
        self.shared[page as usize] = Some(Shared {
            content,
            chain: self.chains,
            step: self.step,
        });
        self.chains
    }
}

#[cfg(test)]
mod tests {
    use super::{Pages, ROOT};

    /// In a step of its own, takes pages for `tokens` and says what the full ones hold.
    fn fill(pages: &mut Pages, tokens: &[u32]) -> Vec<u32> {
        let (mut held, mut chain) = pages.find(ROOT, tokens);
        for tokens in tokens.chunks(pages.size()).skip(held.len()) {
            let page = pages.take().expect("a page");
            held.push(page);
            if tokens.len() == pages.size() {
                chain = pages.publish(page, chain, tokens);
            }
        }
        pages.begin_step();
        held
    }

    #[test]
    fn a_beginning_is_found_again() {
        let mut pages = Pages::new(8, 2, true);
        let first = fill(&mut pages, &[1, 2, 3, 4, 5]);
        assert_eq!((first.len(), pages.available()), (3, 5));
        let (found, _) = pages.find(ROOT, &[1, 2, 3, 4, 9, 9]);
        assert_eq!(found, first[..2]);
        // The same tokens behind others are other keys.
        assert!(pages.find(ROOT, &[3, 4]).0.is_empty());
        pages.release(first.into_iter());
        assert_eq!(pages.available(), 6);
        pages.release(found.into_iter());
        assert_eq!(pages.available(), 8);
        assert_eq!(pages.find(ROOT, &[1, 2, 3, 4]).0.len(), 2);
    }

    #[test]
    fn the_longest_idle_page_is_taken_first() {
        let mut pages = Pages::new(4, 1, true);
        let first = fill(&mut pages, &[1, 2]);
        let second = fill(&mut pages, &[7, 8]);
        pages.release(first.clone().into_iter());
        pages.release(second.into_iter());
        assert_eq!(pages.available(), 4);
        // The end of the first to go, then its beginning.
        assert_eq!(pages.take(), Some(first[1]));
        assert_eq!(pages.find(ROOT, &[1, 2]).0, [first[0]]);
        pages.release([first[0]].into_iter());
        assert_eq!(pages.find(ROOT, &[7, 8]).0.len(), 2);
        assert_eq!(pages.take(), Some(first[0]));
        assert_eq!(pages.take(), None);
        assert!(pages.find(ROOT, &[1]).0.is_empty());
    }

    #[test]
    fn of_two_pages_with_one_content_the_first_is_found() {
        let mut pages = Pages::new(3, 1, true);
        let (a, b) = (pages.take().expect("a page"), pages.take().expect("a page"));
        let chain = pages.publish(a, ROOT, &[5]);
        assert_eq!(pages.publish(b, ROOT, &[5]), chain);
        pages.begin_step();
        assert_eq!(pages.find(ROOT, &[5]).0, [a]);
        // The other goes back as a free one.
        pages.release([b].into_iter());
        assert_eq!(pages.available(), 2);
    }

    #[test]
    fn what_a_step_writes_is_found_in_the_next() {
        let mut pages = Pages::new(4, 2, true);
        let (a, b) = (pages.take().expect("a page"), pages.take().expect("a page"));
        let chain = pages.publish(a, ROOT, &[1, 2]);
        let text = [1, 2, 3, 4, 5, 6];
        assert_eq!(pages.find(ROOT, &text), (vec![], ROOT));
        assert_eq!(pages.coming(ROOT, &text), 2);
        pages.begin_step();
        let last = pages.publish(b, chain, &[3, 4]);
        assert_eq!(pages.find(ROOT, &text), (vec![a], chain));
        assert_eq!(pages.coming(ROOT, &text), 4);
        pages.begin_step();
        // Behind the first page.
        assert_eq!(pages.find(chain, &text[2..]), (vec![b], last));
    }

    #[test]
    fn what_is_withdrawn_is_not_found() {
        let mut pages = Pages::new(4, 1, true);
        let held = fill(&mut pages, &[1, 2, 3]);
        pages.release([held[2]].into_iter());
        assert_eq!(pages.available(), 2);
        // One that is held, and one that is idle.
        pages.withdraw(held[1..].iter().copied());
        assert_eq!(pages.available(), 2);
        assert_eq!(pages.find(ROOT, &[1, 2, 3]).0, [held[0]]);
        pages.release([held[0], held[1], held[0]].into_iter());
        assert_eq!(pages.available(), 4);
        // It can be found again where it is written again.
        assert_eq!(fill(&mut pages, &[1, 2]).len(), 2);
        assert_eq!(pages.find(ROOT, &[1, 2]).0.len(), 2);
    }

    #[test]
    fn without_sharing_nothing_is_found() {
        let mut pages = Pages::new(3, 1, false);
        let held = fill(&mut pages, &[1, 2]);
        assert!(pages.find(ROOT, &[1, 2]).0.is_empty());
        assert_eq!(pages.coming(ROOT, &[1, 2]), 0);
        pages.release(held.into_iter());
        assert_eq!(pages.available(), 3);
    }
}
