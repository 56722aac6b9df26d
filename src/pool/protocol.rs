//! How a job is handed over, its tasks are taken, and its end is reported.
//!
//! The atomics, locks and waits are those of `super::sync`: the pool's are the standard library's, and
//! `tests/suite/pool_model.rs` includes this file with loom's, which tries every order of steps.

use super::sync::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering,
    Spin, park,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;

pub type Task<'a> = &'a (dyn Fn(usize) + Sync);

/// What has cache lines of its own, two of them, as processors fetch them in pairs.
#[repr(align(128))]
struct Lines<T>(T);

/// The job under way.
struct Job {
    /// Job number in the upper half, next task to take in the lower half.
    ticket: AtomicU64,
    /// Number of tasks of the job.
    tasks: AtomicU32,
    /// The job's closure: a pointer to a `Task` on the caller's stack.
    task: AtomicPtr<()>,
}

/// What the caller and the workers share.
pub struct Shared {
    /// What a worker reads before its first task, at once.
    job: Lines<Job>,
    /// Tasks that have ended, added up by each thread when it finds no other. The caller waits for them all while
    /// others take theirs.
    done: Lines<AtomicU32>,
    /// Set when a task panicked; the caller panics then.
    panicked: AtomicBool,
    /// Workers that sleep or are about to.
    sleepers: AtomicUsize,
    /// Whether the caller sleeps until the last task has ended, or is about to.
    waiting: AtomicBool,
    /// What the caller sleeps on.
    ended: (Mutex<()>, Condvar),
}

impl Shared {
    pub fn new() -> Self {
        Self {
            job: Lines(Job {
                ticket: AtomicU64::new(0),
                tasks: AtomicU32::new(0),
                task: AtomicPtr::new(std::ptr::null_mut()),
            }),
            done: Lines(AtomicU32::new(0)),
            panicked: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            waiting: AtomicBool::new(false),
            ended: (Mutex::new(()), Condvar::new()),
        }
    }

    /// Runs one job, of fewer than `u32::MAX` tasks; false if a task panicked. `wake` unparks all workers.
    ///
    /// # Safety
    /// No other thread is in here.
    pub unsafe fn run(&self, tasks: u32, task: Task<'_>, wake: impl Fn()) -> bool {
        let ticket = &self.job.0.ticket;
        // The pointer stays valid until this function returns, which it does only when every task
        // that was taken has ended (`done == tasks`), and no task of a job can be taken after that.
        let on_stack: *const Task<'_> = &task;
        self.job
            .0
            .task
            .store(on_stack as *mut (), Ordering::Relaxed);
        self.job.0.tasks.store(tasks, Ordering::Release);
        self.done.0.store(0, Ordering::Relaxed);
        let job = (ticket.load(Ordering::Relaxed) >> 32).wrapping_add(1) & 0xffff_ffff;
        // SeqCst pairs with the worker's `sleepers` increment: either it sees this job, or this
        // thread sees the sleeper.
        ticket.store(job << 32, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            wake();
        }
        self.take(job);
        self.wait(tasks);
        // Closed, so that a late worker cannot pair this ticket with the next job's task count.
        ticket.store(job << 32 | u64::from(u32::MAX), Ordering::Release);
        !self.panicked.swap(false, Ordering::Relaxed)
    }

    /// Waits for a job after job `seen`, and gives its number.
    pub fn next(&self, seen: u64) -> u64 {
        let ticket = &self.job.0.ticket;
        let mut spin = Spin::default();
        loop {
            let job = ticket.load(Ordering::Acquire) >> 32;
            if job != seen {
                return job;
            }
            if !spin.goes_on() {
                self.sleepers.fetch_add(1, Ordering::SeqCst);
                if ticket.load(Ordering::SeqCst) >> 32 == seen {
                    park();
                }
                self.sleepers.fetch_sub(1, Ordering::SeqCst);
                spin = Spin::default();
            }
        }
    }

    /// Takes and runs tasks of `job` until none is left.
    pub fn take(&self, job: u64) {
        // Read before the ticket is taken: if taking succeeds, the job was still under way, so both
        // belong to it.
        let Job {
            task,
            tasks,
            ticket,
        } = &self.job.0;
        let task = task.load(Ordering::Relaxed) as *const Task<'_>;
        // Acquire: if this is already the next job's number, the ticket below reads as closed.
        let tasks = tasks.load(Ordering::Acquire);
        let mut ended = 0;
        loop {
            let seen = ticket.load(Ordering::Acquire);
            let next = seen as u32;
            if seen >> 32 != job || next >= tasks {
                break;
            }
            if ticket
                .compare_exchange_weak(seen, seen + 1, Ordering::AcqRel, Ordering::Relaxed)
                .is_err()
            {
                continue;
            }
            // SAFETY: the ticket was taken from the job that is under way, whose caller keeps the
            // closure alive until `done` counts this task, which this thread has yet to add.
            let body = unsafe { *task };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| body(next as usize))) {
                // Dropping it could panic again, outside of what catches panics.
                std::mem::forget(payload);
                self.panicked.store(true, Ordering::Relaxed);
            }
            ended += 1;
            if next + 1 == tasks {
                break;
            }
        }
        // SeqCst pairs with `wait`: either this thread sees that the caller sleeps, or the caller
        // sees that these were the last tasks.
        if ended > 0
            && self.done.0.fetch_add(ended, Ordering::SeqCst) + ended == tasks
            && self.waiting.load(Ordering::SeqCst)
        {
            drop(self.lock());
            self.ended.1.notify_all();
        }
    }

    /// Returns when all `tasks` of the job have ended.
    fn wait(&self, tasks: u32) {
        let mut spin = Spin::default();
        while self.done.0.load(Ordering::Acquire) != tasks {
            if spin.goes_on() {
                continue;
            }
            // A worker lost its core while it held a task.
            self.waiting.store(true, Ordering::SeqCst);
            let mut guard = self.lock();
            while self.done.0.load(Ordering::SeqCst) != tasks {
                guard = self
                    .ended
                    .1
                    .wait(guard)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            drop(guard);
            self.waiting.store(false, Ordering::Relaxed);
        }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.ended.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
