//! How many bytes a call holds beside what was there before it.

use crate::place::Place;
use candle_core::Result;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator, counting what is held and the most that was held at once.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

fn took(bytes: usize) {
    let held = HELD.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(held, Relaxed);
}

fn gave(bytes: usize) {
    HELD.fetch_sub(bytes, Relaxed);
}

// SAFETY: every call is handed to the system's allocator as it is; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: the caller's.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        took(size);
        gave(layout.size());
        // SAFETY: the caller's.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        gave(layout.size());
        // SAFETY: the caller's.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What `body` gives, and the most bytes of the place's memory that it held beyond what was held
/// before, its result included.
pub fn held_by<T>(place: &Place, body: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
    #[cfg(feature = "cuda")]
    if let candle_core::Device::Cuda(cuda) = &place.device {
        use candle_fused::cuda::{peak_memory, reset_peak_memory};
        place.device.synchronize()?;
        reset_peak_memory(cuda)?;
        let before = peak_memory(cuda)?;
        let value = body()?;
        place.device.synchronize()?;
        return Ok((value, peak_memory(cuda)?.saturating_sub(before)));
    }
    let _ = place;
    let before = HELD.load(Relaxed);
    PEAK.store(before, Relaxed);
    let value = body()?;
    Ok((value, PEAK.load(Relaxed).saturating_sub(before) as u64))
}
