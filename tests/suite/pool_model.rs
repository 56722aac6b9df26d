//! The thread pool's protocol under loom, which runs it in every order of steps, and lets loads see every
//! value that their memory orders allow.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use protocol::Shared;
use std::cell::Cell;

#[path = "../../src/pool/protocol.rs"]
mod protocol;

/// Loom's primitives. It takes `SeqCst` for `AcqRel`, so a fence stands behind each such store, as
/// compilers put it on x86. Loom never makes a later store visible before an earlier one of its thread.
mod sync {
    use super::TURNS;
    use loom::sync::atomic::{self, fence};
    pub use loom::sync::atomic::{AtomicPtr, Ordering};
    pub use loom::sync::{Condvar, Mutex, MutexGuard};
    pub use loom::thread::park;

    fn ordered<T>(order: Ordering, stores: bool, operation: impl FnOnce() -> T) -> T {
        let value = operation();
        if stores && order == Ordering::SeqCst {
            fence(Ordering::SeqCst);
        }
        value
    }

    macro_rules! atomics {
        ($($name:ident of $value:ty: $($method:ident($($argument:ident),*) -> $result:ty),+;)+) => {$(
            pub struct $name(atomic::$name);

            impl $name {
                pub fn new(value: $value) -> Self {
                    Self(atomic::$name::new(value))
                }

                $(pub fn $method(&self, $($argument: $value,)* order: Ordering) -> $result {
                    ordered(order, stringify!($method) != "load", || self.0.$method($($argument,)* order))
                })+
            }
        )+};
    }

    atomics! {
        AtomicBool of bool: load() -> bool, store(value) -> (), swap(value) -> bool;
        AtomicU32 of u32: load() -> u32, store(value) -> (), fetch_add(value) -> u32;
        AtomicU64 of u64: load() -> u64, store(value) -> ();
        AtomicUsize of usize: load() -> usize, fetch_add(value) -> usize, fetch_sub(value) -> usize;
    }

    impl AtomicU64 {
        pub fn compare_exchange_weak(
            &self,
            current: u64,
            new: u64,
            success: Ordering,
            failure: Ordering,
        ) -> Result<u64, u64> {
            self.0.compare_exchange_weak(current, new, success, failure)
        }
    }

    /// A spinning wait that ends after [`TURNS`] turns.
    #[derive(Default)]
    pub struct Spin(u32);

    impl Spin {
        pub fn goes_on(&mut self) -> bool {
            self.0 += 1;
            let goes_on = self.0 <= TURNS.get();
            if goes_on {
                loom::thread::yield_now();
            }
            goes_on
        }
    }
}

thread_local! {
    /// Turns of a spinning wait. Loom runs its threads on the one that starts it.
    static TURNS: Cell<u32> = const { Cell::new(0) };
}

/// Runs jobs of so many tasks each with so many workers. Each task writes a cell of its own, which the
/// caller reads when the job has ended: loom sees it if anything lets the two happen at once, and a
/// closure of an earlier job writes where nobody else expects it.
fn model(workers: usize, jobs: &'static [u32], turns: u32, preemptions: Option<usize>) {
    TURNS.set(turns);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(move || {
        let shared = Arc::new(Shared::new());
        let last = jobs.len() as u64;
        let threads: Vec<_> = (0..workers)
            .map(|_| {
                let shared = shared.clone();
                thread::spawn(move || {
                    let mut job = 0;
                    while job != last {
                        job = shared.next(job);
                        shared.take(job);
                    }
                })
            })
            .collect();
        for (number, tasks) in jobs.iter().enumerate() {
            let cells: Vec<_> = (0..*tasks).map(|_| Cells(UnsafeCell::new(0))).collect();
            let task = |i: usize| {
                // SAFETY: each task is run once, and has a cell of its own.
                cells[i].0.with_mut(|cell| unsafe { *cell += number + 1 });
            };
            let wake = || threads.iter().for_each(|t| t.thread().unpark());
            // SAFETY: this is the only caller.
            assert!(unsafe { shared.run(*tasks, &task, wake) });
            for cell in &cells {
                // SAFETY: the job has ended.
                cell.0.with(|cell| assert_eq!(unsafe { *cell }, number + 1));
            }
        }
        threads
            .into_iter()
            .for_each(|t| t.join().expect("a worker"));
    });
}

struct Cells(UnsafeCell<usize>);

// SAFETY: what the test is about: one task at a time has a cell, and loom watches.
unsafe impl Sync for Cells {}

#[test]
fn a_worker_that_sleeps_at_once() {
    model(1, &[2], 0, None);
    model(1, &[1, 2], 0, Some(2));
}

#[test]
fn a_worker_that_spins() {
    model(1, &[2, 1], 1, Some(2));
}

#[test]
fn two_workers() {
    model(2, &[2], 0, Some(2));
}
