//! The other side of `tests/shims/cuda_faults.c`, and a guard against hanging.

use libloading::os::unix::{Library, Symbol};
use std::ffi::{CStr, c_char, c_int, c_long};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

/// The library that stands in front of the driver.
pub struct Shim {
    arm: Symbol<unsafe extern "C" fn(c_long, c_int)>,
    failed: Symbol<unsafe extern "C" fn() -> *const c_char>,
    live: Symbol<unsafe extern "C" fn(c_int) -> c_long>,
    name: Symbol<unsafe extern "C" fn(c_int) -> *const c_char>,
    refused: Symbol<unsafe extern "C" fn() -> c_long>,
}

/// Which allocations fail, counted from the arming on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Which {
    /// One alone.
    Nth(usize),
    /// One and all after it.
    From(usize),
    None,
}

impl Shim {
    /// # Panics
    /// If the process was started without it.
    pub fn find() -> Self {
        let process = Library::this();
        fn get<T>(process: &Library, name: &str) -> Symbol<T> {
            // SAFETY: the types are those of tests/shims/cuda_faults.c.
            let symbol = unsafe { process.get(name.as_bytes()) };
            symbol.unwrap_or_else(|_| {
                panic!("LD_PRELOAD lacks tests/shims/cuda_faults.c; scripts/gpu-faults.sh sets it")
            })
        }
        Self {
            arm: get(&process, "cuda_faults_arm"),
            failed: get(&process, "cuda_faults_failed"),
            live: get(&process, "cuda_faults_live"),
            name: get(&process, "cuda_faults_name"),
            refused: get(&process, "cuda_faults_refused"),
        }
    }

    /// From now on these fail.
    pub fn arm(&self, which: Which) {
        let (n, all) = match which {
            Which::Nth(n) => (n, 0),
            Which::From(n) => (n, 1),
            Which::None => (0, 0),
        };
        // SAFETY: takes any numbers.
        unsafe { (self.arm)(n as c_long, all) }
    }

    /// The driver's function that failed first since the arming.
    pub fn failed(&self) -> Option<String> {
        // SAFETY: takes nothing.
        text(unsafe { (self.failed)() })
    }

    /// What there is of each kind that the driver gives out.
    pub fn live(&self) -> Vec<(String, i64)> {
        let kind = |kind| {
            // SAFETY: both take any number.
            let (name, live) = unsafe { ((self.name)(kind), (self.live)(kind)) };
            Some((text(name)?, live))
        };
        (0..).map_while(kind).collect()
    }

    /// How often the driver did not take something back.
    pub fn refused(&self) -> i64 {
        // SAFETY: takes nothing.
        unsafe { (self.refused)() }
    }
}

fn text(text: *const c_char) -> Option<String> {
    if text.is_null() {
        return None;
    }
    // SAFETY: the library's texts are constants.
    let text = unsafe { CStr::from_ptr(text) };
    Some(text.to_string_lossy().into_owned())
}

/// Ends the process if it is not told for a while that things go on.
pub struct Watchdog {
    news: Sender<String>,
    done: Arc<AtomicBool>,
}

impl Watchdog {
    pub fn new(patience: Duration) -> Self {
        let (news, told) = mpsc::channel();
        let done = Arc::new(AtomicBool::new(false));
        let is_done = done.clone();
        std::thread::spawn(move || {
            let mut last = "the start".to_owned();
            while !is_done.load(Ordering::Relaxed) {
                match told.recv_timeout(patience) {
                    Ok(next) => last = next,
                    Err(mpsc::RecvTimeoutError::Disconnected) => return,
                    Err(mpsc::RecvTimeoutError::Timeout) => {
                        eprintln!("faults: {last} takes more than {patience:?}");
                        std::process::abort();
                    }
                }
            }
        });
        Self { news, done }
    }

    /// What begins now.
    pub fn begin(&self, what: String) {
        self.news.send(what).expect("the watchdog listens");
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
    }
}
