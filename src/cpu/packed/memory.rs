//! Memory of packed weights.
//!
//! Matrices lie one behind the other in regions that the operating system is asked to back with huge
//! pages: a decode step reads every byte of the weights, and at 4 KB a page that is a look-up of an
//! address and the end of what the processor fetches ahead every 64 cache lines. Pages are handed out
//! when they are first written, by the threads that pack.

use memmap2::{MmapMut, MmapRaw};
use std::io::Result;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Bytes of a region. What nobody writes takes no memory.
const REGION: usize = 32 << 20;

/// Where matrices begin, a cache line.
const ALIGNMENT: usize = 64;

/// A region, whose parts belong to different matrices, and which is given back with the last of them.
fn region(len: usize) -> Result<Arc<MmapRaw>> {
    let map = MmapRaw::from(MmapMut::map_anon(len)?);
    // Without huge pages it works as well.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    Ok(Arc::new(map))
}

/// The region that has room left, and where that begins.
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
        if len >= REGION {
            return Ok(Self {
                region: region(len)?,
                start: 0,
                len,
            });
        }
        let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let (region, start) = match open.0.upgrade() {
            Some(region) if len <= REGION - open.1 => (region, open.1),
            _ => (region(REGION)?, 0),
        };
        let end = (start + len).next_multiple_of(ALIGNMENT).min(REGION);
        *open = (Arc::downgrade(&region), end);
        Ok(Self { region, start, len })
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
