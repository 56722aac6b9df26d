//! Memory of packed weights.
//!
//! Matrices lie one behind the other in regions. Their pages are small at first: on a virtual machine that
//! reports free memory to its host a huge page of the free memory has to be fetched from there (128 MB in
//! 400 ms, small pages in 80), and a model is to start at once. On Linux huge pages take their place a little later
//! (`huge_pages`): a decode step reads every byte of the weights, and at 4 KB a page that is a look-up of an address and
//! the end of what the processor fetches ahead every 64 cache lines, 7 to 20 % of a step of SmolLM2. Threads of the pool are
//! handed out pages of their own, so that none waits for another's.

#[cfg(any(test, not(any(unix, windows))))]
#[cfg_attr(any(unix, windows), allow(dead_code))]
mod heap;
#[cfg(target_os = "linux")]
mod huge_pages;
#[cfg(any(unix, windows))]
mod mapped;

#[cfg(not(any(unix, windows)))]
use heap::{Region, SHARED};
#[cfg(any(unix, windows))]
use mapped::{Region, SHARED};
use std::io::Result;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Where matrices begin, a cache line.
const ALIGNMENT: usize = 64;

/// Bytes that have pages at a time.
const BATCH: usize = 4 << 20;

/// The region that has room left, and where that begins. Whole batches in front of there have pages.
static OPEN: Mutex<(Weak<Region>, usize)> = Mutex::new((Weak::new(), 0));

/// Bytes of one matrix, zero at first.
#[derive(Debug)]
pub(crate) struct Memory {
    region: Arc<Region>,
    start: usize,
    len: usize,
}

impl Memory {
    /// # Errors
    /// If there is not so much memory.
    pub fn zeroed(len: usize) -> Result<Self> {
        let (memory, new) = match len >= SHARED {
            true => {
                let (region, start) = (Arc::new(Region::zeroed(len)?), 0);
                (Self { region, start, len }, 0..len)
            }
            false => Self::shared(len)?,
        };
        if !new.is_empty() {
            // The lock is free again: whoever has the pool may be waiting for it.
            memory.region.hand_out(&new);
            #[cfg(target_os = "linux")]
            huge_pages::join_later(&memory.region, &new);
        }
        Ok(memory)
    }

    /// Behind what others have of a region, and which part of that is to have pages now.
    fn shared(len: usize) -> Result<(Self, Range<usize>)> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let (region, start) = match open.0.upgrade() {
            Some(region) if len <= SHARED - open.1 => (region, open.1),
            _ => (Arc::new(Region::zeroed(SHARED)?), 0),
        };
        let end = (start + len).next_multiple_of(ALIGNMENT).min(SHARED);
        *open = (Arc::downgrade(&region), end);
        let new = start.next_multiple_of(BATCH)..end.next_multiple_of(BATCH);
        Ok((Self { region, start, len }, new))
    }

    pub fn bytes(&self) -> &[u8] {
        let first = self.region.as_mut_ptr().wrapping_add(self.start);
        // SAFETY: the part lies within the region, which is mapped and zero or written as long as it
        // lives; nobody else has the part, and it is written only through `&mut self`.
        unsafe { std::slice::from_raw_parts(first, self.len) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let first = self.region.as_mut_ptr().wrapping_add(self.start);
        // SAFETY: as above; `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(first, self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_zero_aligned_and_apart() {
        let sizes = [
            64,
            1,
            0,
            4096,
            65,
            SHARED / 2,
            SHARED / 2,
            SHARED,
            SHARED + 1,
            128,
        ];
        let mut parts: Vec<_> = sizes.map(|len| Memory::zeroed(len).unwrap()).into();
        for (i, part) in parts.iter_mut().enumerate() {
            let bytes = part.bytes_mut();
            assert_eq!(
                (bytes.len(), bytes.as_ptr().addr() % ALIGNMENT),
                (sizes[i], 0)
            );
            let mut ends = bytes.first().into_iter().chain(bytes.last());
            assert!(ends.all(|byte| *byte == 0));
            bytes.fill(i as u8 + 1);
        }
        for (i, part) in parts.iter().enumerate() {
            assert!(part.bytes().iter().all(|byte| *byte == i as u8 + 1));
        }
        drop(parts);
        assert!(Memory::zeroed(usize::MAX / 2).is_err());
        assert!(
            Memory::zeroed(100)
                .unwrap()
                .bytes()
                .iter()
                .all(|byte| *byte == 0)
        );
    }
}
