//! A thread pool for chains of very short parallel steps.
//!
//! A decode step of a small model is about 150 dependent steps of 20 to 50 microseconds. Waking a
//! sleeping thread costs as much as such a step, so workers spin for a short while after each job
//! before they sleep, and a job is handed over by one atomic store.
//!
//! A job is a closure and a number of tasks. Whoever is free takes the next task, the calling
//! thread included, so a worker that the operating system has taken off its core delays nothing but
//! the task it holds. For that one the caller spins as briefly as workers do and then sleeps, which
//! leaves its core to the worker. A second thread that calls [`run`] while a job is under way does
//! its tasks itself instead of waiting.

mod passes;
mod protocol;

pub(crate) use passes::{all, first_without, map, try_for_rows};

use protocol::{Shared, Task};
use std::cell::Cell;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, Thread};

/// What the protocol is made of; a model of it takes others.
mod sync {
    pub use std::sync::atomic::{
        AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering,
    };
    pub use std::sync::{Condvar, Mutex, MutexGuard};
    pub use std::thread::park;
    use std::time::{Duration, Instant};

    /// How long a worker spins for the next job, and a caller for the last task, before it sleeps.
    pub const SPIN: Duration = Duration::from_micros(100);

    /// Turns of a spinning loop between two looks at the clock.
    const LOOK: u32 = 64;

    /// A spinning wait with an end.
    #[derive(Default)]
    pub struct Spin {
        turns: u32,
        since: Option<Instant>,
    }

    impl Spin {
        /// Spins once; false when [`SPIN`] has passed.
        #[inline]
        pub fn goes_on(&mut self) -> bool {
            std::hint::spin_loop();
            self.turns += 1;
            !self.turns.is_multiple_of(LOOK)
                || self.since.get_or_insert_with(Instant::now).elapsed() <= SPIN
        }
    }
}

struct Pool {
    shared: Arc<Shared>,
    workers: Vec<Thread>,
    /// Held by the thread whose job is under way.
    caller: Mutex<()>,
}

static POOL: OnceLock<Pool> = OnceLock::new();
static WANTED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Set on workers, and on a caller inside a job, so that nested calls run in place.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// Sets how many threads, the caller included, [`run`] uses. It holds from the first job on, so it
/// has to be called before any op runs; returns false when it came too late.
///
/// ```
/// use candle_fused::cpu::pool;
/// // It holds if nothing has run yet.
/// if pool::set_threads(2) {
///     assert_eq!(pool::threads(), 2);
/// }
/// ```
pub fn set_threads(threads: usize) -> bool {
    WANTED.store(threads.max(1), Ordering::Relaxed);
    POOL.get()
        .is_none_or(|p| p.workers.len() + 1 == threads.max(1))
}

/// How many threads, the caller included, work on a job: what [`set_threads`] asked for, else
/// `CANDLE_FUSED_THREADS`, else what the affinity mask and the cgroup allow.
///
/// ```
/// assert!(candle_fused::cpu::pool::threads() >= 1);
/// ```
pub fn threads() -> usize {
    pool().workers.len() + 1
}

/// Calls `task(0)`, ... `task(tasks - 1)`, each once, spread over the pool, and returns when all
/// have ended. Panics if a task panics.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// let sum = AtomicUsize::new(0);
/// candle_fused::cpu::pool::run(10, |i| {
///     sum.fetch_add(i, Ordering::Relaxed);
/// });
/// assert_eq!(sum.into_inner(), 45);
/// ```
pub fn run(tasks: usize, task: impl Fn(usize) + Sync) {
    let inline = || (0..tasks).for_each(&task);
    if tasks <= 1 || BUSY.get() {
        return inline();
    }
    let pool = pool();
    if pool.workers.is_empty() {
        return inline();
    }
    // One less than u32::MAX, which marks a job as closed.
    let Some(count) = u32::try_from(tasks).ok().filter(|n| *n < u32::MAX) else {
        return inline();
    };
    let guard = match pool.caller.try_lock() {
        Ok(guard) => guard,
        Err(_) => return inline(),
    };
    let went_well = pool.run(count, &task);
    drop(guard);
    if !went_well {
        resume_unwind(Box::new("a task of candle-fused's thread pool panicked"));
    }
}

/// Splits `0..len` into ranges of at least `grain` whose starts are multiples of `grain`, about
/// four for each thread, and calls `body` on each, in parallel.
///
/// ```
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// let seen = AtomicUsize::new(0);
/// candle_fused::cpu::pool::for_ranges(1000, 64, |range| {
///     assert!(range.start % 64 == 0);
///     seen.fetch_add(range.len(), Ordering::Relaxed);
/// });
/// assert_eq!(seen.into_inner(), 1000);
/// ```
pub fn for_ranges(len: usize, grain: usize, body: impl Fn(std::ops::Range<usize>) + Sync) {
    if len == 0 {
        return;
    }
    let grain = grain.max(1);
    let grains = len.div_ceil(grain);
    let tasks = grains.min(4 * threads());
    run(tasks, |t| {
        let start = t * grains / tasks * grain;
        let end = ((t + 1) * grains / tasks * grain).min(len);
        body(start..end);
    });
}

/// Splits `out` into rows of `width` and calls `body` on runs of at least `grain` rows, with the index
/// of the first, in parallel.
///
/// # Panics
/// If `out` does not divide into rows.
///
/// ```
/// let mut out = [0; 6];
/// candle_fused::cpu::pool::for_rows(&mut out, 2, 1, |first, rows| {
///     for (i, row) in rows.chunks_exact_mut(2).enumerate() {
///         row.fill(first + i);
///     }
/// });
/// assert_eq!(out, [0, 0, 1, 1, 2, 2]);
/// ```
pub fn for_rows<T: Send>(
    out: &mut [T],
    width: usize,
    grain: usize,
    body: impl Fn(usize, &mut [T]) + Sync,
) {
    if out.is_empty() {
        return;
    }
    assert!(
        out.len().is_multiple_of(width),
        "{} elements in rows of {width}",
        out.len()
    );
    let first = Elements(out.as_mut_ptr());
    for_ranges(out.len() / width, grain, |rows| {
        let len = rows.len() * width;
        // SAFETY: the ranges are disjoint and cover the rows of `out`, which is borrowed mutably
        // until `for_ranges` returns.
        let part = unsafe { std::slice::from_raw_parts_mut(first.at(rows.start * width), len) };
        body(rows.start, part);
    });
}

/// As [`for_rows`] over two slices of the same rows.
///
/// # Panics
/// If the slices differ in length or do not divide into rows.
///
/// ```
/// let (mut rows, mut negated) = ([0; 3], [0; 3]);
/// candle_fused::cpu::pool::for_row_pairs(&mut rows, &mut negated, 1, 1, |first, a, b| {
///     for (i, (a, b)) in (first as i32..).zip(a.iter_mut().zip(b)) {
///         (*a, *b) = (i, -i);
///     }
/// });
/// assert_eq!((rows, negated), ([0, 1, 2], [0, -1, -2]));
/// ```
pub fn for_row_pairs<T: Send>(
    first: &mut [T],
    second: &mut [T],
    width: usize,
    grain: usize,
    body: impl Fn(usize, &mut [T], &mut [T]) + Sync,
) {
    assert_eq!(first.len(), second.len());
    let other = Elements(second.as_mut_ptr());
    for_rows(first, width, grain, |row, part| {
        // SAFETY: `for_rows` hands out disjoint rows of `first`, so these of `second` are disjoint
        // too; `second` is as long and borrowed mutably until `for_rows` returns.
        let rest = unsafe { std::slice::from_raw_parts_mut(other.at(row * width), part.len()) };
        body(row, part, rest);
    });
}

/// The first element of a slice whose parts go to different threads.
struct Elements<T>(*mut T);

// SAFETY: each thread makes a slice of its own part only, and `T` may be sent there.
unsafe impl<T: Send> Sync for Elements<T> {}

impl<T> Elements<T> {
    fn at(&self, index: usize) -> *mut T {
        self.0.wrapping_add(index)
    }
}

fn pool() -> &'static Pool {
    POOL.get_or_init(|| {
        let wanted = match WANTED.load(Ordering::Relaxed) {
            0 => asked().unwrap_or_else(|| thread::available_parallelism().map_or(1, |n| n.get())),
            n => n,
        };
        Pool::new(wanted)
    })
}

/// What `CANDLE_FUSED_THREADS` says; a warning if that is no number of threads.
fn asked() -> Option<usize> {
    let text = std::env::var("CANDLE_FUSED_THREADS").ok()?;
    let number = text.trim().parse().ok().filter(|n| *n > 0);
    if number.is_none() {
        eprintln!(
            "candle-fused: CANDLE_FUSED_THREADS={text} is not a number from 1 on; using all processors"
        );
    }
    number
}

impl Pool {
    fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared::new());
        let workers = (1..threads)
            .map_while(|i| {
                let shared = shared.clone();
                thread::Builder::new()
                    .name(format!("candle-fused-{i}"))
                    .spawn(move || worker(&shared))
                    .ok()
                    .map(|h| h.thread().clone())
            })
            .collect();
        Self {
            shared,
            workers,
            caller: Mutex::new(()),
        }
    }

    /// Runs one job; false if a task panicked.
    fn run(&self, tasks: u32, task: Task<'_>) -> bool {
        BUSY.set(true);
        let wake = || self.workers.iter().for_each(Thread::unpark);
        // SAFETY: whoever calls this holds `caller`, or the pool for itself alone.
        let went_well = unsafe { self.shared.run(tasks, task, wake) };
        BUSY.set(false);
        went_well
    }
}

fn worker(shared: &Shared) {
    BUSY.set(true);
    let mut job = 0;
    loop {
        job = shared.next(job);
        shared.take(job);
    }
}

#[cfg(test)]
mod tests {
    use super::sync::SPIN;
    use super::*;
    use std::panic::catch_unwind;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn every_task_runs_once() {
        for tasks in [0, 1, 2, 3, 7, 64, 1000] {
            let hits: Vec<AtomicU32> = (0..tasks).map(|_| AtomicU32::new(0)).collect();
            for _ in 0..200 {
                run(tasks, |i| {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                });
            }
            assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 200));
        }
    }

    #[test]
    fn ranges_cover_everything_once_on_grain_borders() {
        for (len, grain) in [
            (1, 16),
            (15, 16),
            (16, 16),
            (17, 16),
            (576, 16),
            (1000, 1),
            (49152, 64),
        ] {
            let hits: Vec<AtomicU32> = (0..len).map(|_| AtomicU32::new(0)).collect();
            for_ranges(len, grain, |r| {
                assert_eq!(r.start % grain, 0);
                r.for_each(|i| {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                });
            });
            assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
        }
    }

    #[test]
    fn nested_and_concurrent_jobs_end() {
        let total = AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        run(8, |_| {
                            run(4, |_| {
                                total.fetch_add(1, Ordering::Relaxed);
                            })
                        });
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 4 * 100 * 8 * 4);
    }

    #[test]
    fn a_caller_that_sleeps_is_woken() {
        for _ in 0..20 {
            let ended = AtomicU32::new(0);
            // Whoever takes it, the others have nothing to do for twenty times as long as they spin.
            run(4, |i| {
                if i == 0 {
                    thread::sleep(20 * SPIN);
                }
                ended.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(ended.load(Ordering::Relaxed), 4);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let caught = catch_unwind(|| run(8, |i| assert_ne!(i, 5)));
        assert!(caught.is_err());
        let sum = AtomicUsize::new(0);
        run(10, |i| {
            sum.fetch_add(i, Ordering::Relaxed);
        });
        assert_eq!(sum.load(Ordering::Relaxed), 45);
    }
}
