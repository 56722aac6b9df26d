//! Memory of packed weights.
//!
//! Matrices lie one behind the other in regions. Their pages are small at first: on a virtual machine that
//! reports free memory to its host a huge page of the free memory has to be fetched from there (128 MB in
//! 400 ms, small pages in 80), and a model is to start at once. Then the system is asked to put huge pages in
//! their place when it finds time: a decode step reads every byte of the weights, and at 4 KB a page that is
//! a look-up of an address and the end of what the processor fetches ahead every 64 cache lines, 4 % of a
//! step in all. Threads of the pool are handed out pages of their own, so that none waits for another's.

use crate::cpu::pool;
use memmap2::{MmapMut, MmapRaw};
use std::io::Result;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Bytes of a region. What nobody writes takes no memory.
const REGION: usize = 32 << 20;

/// Where matrices begin, a cache line.
const ALIGNMENT: usize = 64;

/// Bytes that have pages at a time, and those that a thread sees to: enough for what a system call costs.
const BATCH: usize = 4 << 20;
const STEP: usize = 512 << 10;

/// A region, whose parts belong to different matrices, and which is given back with the last of them.
fn region(len: usize) -> Result<Arc<MmapRaw>> {
    Ok(Arc::new(MmapRaw::from(MmapMut::map_anon(len)?)))
}

/// Has the system hand out the pages of a part of a region, without a change to what they hold, and asks for
/// huge ones then. It works without either as well: pages come when they are written.
#[cfg(target_os = "linux")]
fn hand_out(region: &MmapRaw, part: &Range<usize>) {
    use memmap2::Advice;
    pool::for_ranges(part.len(), STEP, |some| {
        let _ = region.advise_range(Advice::PopulateWrite, part.start + some.start, some.len());
    });
    let _ = region.advise_range(Advice::HugePage, part.start, part.len());
}

/// Elsewhere pages come when they are written.
#[cfg(not(target_os = "linux"))]
fn hand_out(_: &MmapRaw, _: &Range<usize>) {}

/// The region that has room left, and where that begins. Whole batches in front of there have pages.
static OPEN: Mutex<(Weak<MmapRaw>, usize)> = Mutex::new((Weak::new(), 0));

/// Bytes of one matrix, zero at first.
#[derive(Debug)]
pub(super) struct Memory {
    region: Arc<MmapRaw>,
    start: usize,
    len: usize,
}

impl Memory {
    /// # Errors
    /// If there is not so much memory.
    pub fn zeroed(len: usize) -> Result<Self> {
        let (memory, new) = match len >= REGION {
            true => {
                let (region, start) = (region(len)?, 0);
                (Self { region, start, len }, 0..len)
            }
            false => Self::shared(len)?,
        };
        if !new.is_empty() {
            // The lock is free again: whoever has the pool may be waiting for it.
            hand_out(&memory.region, &new);
        }
        Ok(memory)
    }

    /// Behind what others have of a region, and which part of that is to have pages now.
    fn shared(len: usize) -> Result<(Self, Range<usize>)> {
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let (region, start) = match open.0.upgrade() {
            Some(region) if len <= REGION - open.1 => (region, open.1),
            _ => (region(REGION)?, 0),
        };
        let end = (start + len).next_multiple_of(ALIGNMENT).min(REGION);
        *open = (Arc::downgrade(&region), end);
        let new = start.next_multiple_of(BATCH)..end.next_multiple_of(BATCH);
        Ok((Self { region, start, len }, new))
    }

    pub fn bytes(&self) -> &[u8] {
        let first = self.region.as_ptr().wrapping_add(self.start);
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
            REGION / 2,
            REGION / 2,
            REGION,
            REGION + 1,
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
