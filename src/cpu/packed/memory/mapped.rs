//! Regions where the system maps memory.

use memmap2::{MmapMut, MmapRaw};
use std::io::Result;
use std::ops::Range;

/// Bytes of a region that several matrices share. What nobody writes takes no memory.
pub const SHARED: usize = 32 << 20;

/// Bytes that a thread sees to: enough for what a system call costs.
#[cfg(target_os = "linux")]
const STEP: usize = 512 << 10;

/// Zeroed pages.
#[derive(Debug)]
pub struct Region(MmapRaw);

impl Region {
    /// # Errors
    /// If there is not so much memory.
    pub fn zeroed(len: usize) -> Result<Self> {
        Ok(Self(MmapRaw::from(MmapMut::map_anon(len)?)))
    }

    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    /// Has the system hand out the pages of a part, without a change to what they hold, and asks for huge ones
    /// then. It works without either as well: pages come when they are written.
    #[cfg(target_os = "linux")]
    pub fn hand_out(&self, part: &Range<usize>) {
        use memmap2::Advice;
        crate::pool::for_ranges(part.len(), STEP, |some| {
            let start = part.start + some.start;
            let _ = self
                .0
                .advise_range(Advice::PopulateWrite, start, some.len());
        });
        let _ = self
            .0
            .advise_range(Advice::HugePage, part.start, part.len());
    }

    /// Has the system replace the small pages of a part by a huge page, without a change to what they hold, now.
    ///
    /// # Errors
    /// Where it cannot, and of the kind `InvalidInput` where it cannot in general.
    #[cfg(target_os = "linux")]
    pub fn collapse(&self, part: Range<usize>) -> Result<()> {
        /// `MADV_COLLAPSE`, of Linux 6.1, which not every C library names.
        const COLLAPSE: libc::c_int = 25;
        assert!(part.start <= part.end && part.end <= self.0.len());
        // SAFETY: the part lies within the mapping, which lives as long as `self`, and keeps what it holds.
        let failed = unsafe {
            let first = self.0.as_mut_ptr().add(part.start);
            libc::madvise(first.cast(), part.len(), COLLAPSE)
        };
        match failed {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }

    /// Elsewhere pages come when they are written.
    #[cfg(not(target_os = "linux"))]
    pub fn hand_out(&self, _: &Range<usize>) {}
}
