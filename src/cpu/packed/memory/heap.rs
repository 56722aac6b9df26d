//! Regions where the system maps no memory, as in WebAssembly.

use super::ALIGNMENT;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io::{Error, ErrorKind, Result};
use std::ops::Range;
use std::ptr::NonNull;

/// Every matrix has a region of its own: what nobody writes would take memory here.
pub const SHARED: usize = 0;

/// Zeroed memory of the allocator.
#[derive(Debug)]
pub struct Region {
    first: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory belongs to the region, which reads and writes nothing of it.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// # Errors
    /// If there is not so much memory.
    pub fn zeroed(len: usize) -> Result<Self> {
        let layout = Layout::from_size_align(len.max(1), ALIGNMENT)
            .map_err(|e| Error::new(ErrorKind::OutOfMemory, e))?;
        // SAFETY: the size is not 0.
        let first = NonNull::new(unsafe { alloc_zeroed(layout) });
        match first {
            Some(first) => Ok(Self { first, layout }),
            None => Err(ErrorKind::OutOfMemory.into()),
        }
    }

    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.first.as_ptr()
    }

    /// The allocator has handed out everything.
    pub fn hand_out(&self, _: &Range<usize>) {}
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated with this layout.
        unsafe { dealloc(self.first.as_ptr(), self.layout) }
    }
}

#[test]
fn regions_are_zero_and_aligned() {
    for len in [0, 1, 64, 4097] {
        let region = Region::zeroed(len).unwrap();
        let first = region.as_mut_ptr();
        assert_eq!(first.addr() % ALIGNMENT, 0);
        // SAFETY: the region has so many bytes, and nobody else has it.
        let bytes = unsafe { std::slice::from_raw_parts_mut(first, len) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        bytes.fill(1);
    }
    assert!(Region::zeroed(usize::MAX / 2).is_err());
}
