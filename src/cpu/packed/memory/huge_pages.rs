//! Huge pages for weights that a program goes on using.
//!
//! Weights begin in small pages. `MADV_HUGEPAGE` leaves the rest to the kernel's own thread, which looks at 16 MB each ten
//! seconds unless it is configured otherwise: a model of 100 MB had none after a thousand tokens. `MADV_COLLAPSE` (Linux
//! 6.1) copies a page's worth of small pages to a huge one at once, for which a thread of its own calls it, page by page,
//! while the model runs. The memory keeps its contents and may be read and written meanwhile.
//!
//! It waits until no weights have been added for a while, since a short answer is over before it would gain anything, and
//! pauses for several times as long as each page took: on a virtual machine whose host has to provide the page, that is
//! up to 5 ms. It ends when there is nothing left to do, or where the system has no huge pages.

use super::mapped::Region;
use std::collections::VecDeque;
use std::io::{Error, ErrorKind};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// For how long no weights have been added when it begins.
const DELAY: Duration = Duration::from_secs(1);
/// How many times as long as a page took it pauses.
const PAUSE: u32 = 4;
/// Failures in a row after which the system is taken to have no memory for huge pages.
const FAILURES: usize = 16;

struct Queue {
    parts: VecDeque<(Weak<Region>, Range<usize>)>,
    added: Option<Instant>,
    /// Whether there is a thread.
    running: bool,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue::new());

impl Queue {
    const fn new() -> Self {
        Self {
            parts: VecDeque::new(),
            added: None,
            running: false,
        }
    }

    fn add(&mut self, region: Weak<Region>, part: &Range<usize>) {
        match self.parts.back_mut() {
            // A huge page may lie in both.
            Some((last, before)) if last.ptr_eq(&region) && before.end == part.start => {
                before.end = part.end;
            }
            _ => self.parts.push_back((region, part.clone())),
        }
        self.added = Some(Instant::now());
    }
}

/// Has a part of a region, whose pages are there, joined to huge pages later.
pub fn join_later(region: &Arc<Region>, part: &Range<usize>) {
    let mut queue = QUEUE.lock().unwrap_or_else(PoisonError::into_inner);
    queue.add(Arc::downgrade(region), part);
    if !queue.running {
        let thread = thread::Builder::new().name("candle-fused-huge-pages".into());
        queue.running = thread.spawn(work).is_ok();
    }
}

fn work() {
    let size = page_size();
    while let Some((region, part)) = next() {
        let Some(size) = size else { continue };
        if join(&region, &part, size, PAUSE).is_err() {
            let mut queue = QUEUE.lock().unwrap_or_else(PoisonError::into_inner);
            queue.parts.clear();
        }
    }
}

/// The next part, when nothing has been added for a while. With `None` the thread has to end.
fn next() -> Option<(Weak<Region>, Range<usize>)> {
    loop {
        let mut queue = QUEUE.lock().unwrap_or_else(PoisonError::into_inner);
        let since = queue.added.map_or(DELAY, |added| added.elapsed());
        if since >= DELAY {
            let part = queue.parts.pop_front();
            queue.running = part.is_some();
            return part;
        }
        drop(queue);
        thread::sleep(DELAY - since);
    }
}

/// Joins the small pages of a part to huge ones of `size` bytes, if the region is still there.
///
/// # Errors
/// Where the system cannot do it.
fn join(region: &Weak<Region>, part: &Range<usize>, size: usize, pause: u32) -> Result<(), Error> {
    let mut failures = 0;
    let Some(first) = region.upgrade().map(|region| region.as_mut_ptr().addr()) else {
        return Ok(());
    };
    let mut page = (first + part.start).next_multiple_of(size) - first;
    while page + size <= part.end {
        let Some(region) = region.upgrade() else {
            return Ok(());
        };
        let begin = Instant::now();
        match region.collapse(page..page + size) {
            Ok(()) => failures = 0,
            Err(error) if error.kind() == ErrorKind::InvalidInput => return Err(error),
            Err(error) if failures == FAILURES => return Err(error),
            Err(_) => failures += 1,
        }
        drop(region);
        thread::sleep(begin.elapsed() * pause);
        page += size;
    }
    Ok(())
}

/// Bytes of a huge page, unless the system has none or is told to give none.
fn page_size() -> Option<usize> {
    let read =
        |name| std::fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{name}")).ok();
    let size: usize = read("hpage_pmd_size")?.trim().parse().ok()?;
    (size.is_power_of_two() && !read("enabled")?.contains("[never]")).then_some(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joined_pages_keep_their_contents() {
        let Some(size) = page_size() else { return };
        let len = 4 * size + 4096;
        let region = Arc::new(Region::zeroed(len).unwrap());
        region.hand_out(&(0..len));
        let first = region.as_mut_ptr();
        for place in (0..len).step_by(997) {
            // SAFETY: within the region, which no other thread knows.
            unsafe { first.add(place).write(place as u8 | 1) };
        }
        let weak = Arc::downgrade(&region);
        // What the system says is its own affair.
        let _ = join(&weak, &(4096..len), size, 0);
        for place in 0..len {
            // SAFETY: as above.
            let byte = unsafe { first.add(place).read() };
            let expected = if place % 997 == 0 { place as u8 | 1 } else { 0 };
            assert_eq!(byte, expected, "{place}");
        }
        drop(region);
        join(&weak, &(0..len), size, 0).unwrap();
    }

    #[test]
    fn adjacent_parts_become_one() {
        let [one, other] = [(); 2].map(|()| Arc::new(Region::zeroed(4 << 20).unwrap()));
        let mut queue = Queue::new();
        for (region, part) in [
            (&one, 0..8),
            (&one, 8..16),
            (&other, 16..24),
            (&one, 16..24),
        ] {
            queue.add(Arc::downgrade(region), &part);
        }
        let parts = queue.parts.into_iter().map(|(_, part)| part);
        assert_eq!(parts.collect::<Vec<_>>(), [0..16, 16..24, 16..24]);
    }
}
