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

    /// The full pages that hold the beginning of `tokens`, now held once more, and their chain.
    pub fn find(&mut self, tokens: &[u32]) -> (Vec<u32>, Chain) {
        let (mut pages, mut chain) = (Vec::new(), ROOT);
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
            let at = page as usize;
            let Some(shared) = &self.shared[at] else {
                break;
            };
            chain = shared.chain;
            if self.held[at] == 0 {
                self.idle.remove(&self.since[at]);
            }
            self.held[at] += 1;
            pages.push(page);
        }
        (pages, chain)
    }

    /// Says that `page` is full of `tokens`, after the chain `before`; its own chain is given. Where another page
    /// holds the same, that one stays the one that is found.
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
        });
        self.chains
    }
}

#[cfg(test)]
mod tests {
    use super::{Pages, ROOT};

    /// Takes pages for `tokens` and says what the full ones hold.
    fn fill(pages: &mut Pages, tokens: &[u32]) -> Vec<u32> {
        let (mut held, mut chain) = pages.find(tokens);
        for tokens in tokens.chunks(pages.size()).skip(held.len()) {
            let page = pages.take().expect("a page");
            held.push(page);
            if tokens.len() == pages.size() {
                chain = pages.publish(page, chain, tokens);
            }
        }
        held
    }

    #[test]
    fn a_beginning_is_found_again() {
        let mut pages = Pages::new(8, 2, true);
        let first = fill(&mut pages, &[1, 2, 3, 4, 5]);
        assert_eq!((first.len(), pages.available()), (3, 5));
        let (found, _) = pages.find(&[1, 2, 3, 4, 9, 9]);
        assert_eq!(found, first[..2]);
        // The same tokens behind others are other keys.
        assert!(pages.find(&[3, 4]).0.is_empty());
        pages.release(first.into_iter());
        assert_eq!(pages.available(), 6);
        pages.release(found.into_iter());
        assert_eq!(pages.available(), 8);
        assert_eq!(pages.find(&[1, 2, 3, 4]).0.len(), 2);
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
        assert_eq!(pages.find(&[1, 2]).0, [first[0]]);
        pages.release([first[0]].into_iter());
        assert_eq!(pages.find(&[7, 8]).0.len(), 2);
        assert_eq!(pages.take(), Some(first[0]));
        assert_eq!(pages.take(), None);
        assert!(pages.find(&[1]).0.is_empty());
    }

    #[test]
    fn of_two_pages_with_one_content_the_first_is_found() {
        let mut pages = Pages::new(3, 1, true);
        let (a, b) = (pages.take().expect("a page"), pages.take().expect("a page"));
        let chain = pages.publish(a, ROOT, &[5]);
        assert_eq!(pages.publish(b, ROOT, &[5]), chain);
        assert_eq!(pages.find(&[5]).0, [a]);
        // The other goes back as a free one.
        pages.release([b].into_iter());
        assert_eq!(pages.available(), 2);
    }

    #[test]
    fn without_sharing_nothing_is_found() {
        let mut pages = Pages::new(3, 1, false);
        let held = fill(&mut pages, &[1, 2]);
        assert!(pages.find(&[1, 2]).0.is_empty());
        pages.release(held.into_iter());
        assert_eq!(pages.available(), 3);
    }
}
