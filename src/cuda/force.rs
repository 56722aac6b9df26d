//! A kernel that takes the place of the table's choice: for measuring, and for hunting bugs.

use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

/// The environment's choice.
const VARIABLE: &str = "CANDLE_FUSED_KERNEL";

thread_local! {
    static FORCED: RefCell<Option<Arc<str>>> = const { RefCell::new(None) };
}

/// Runs `body` with kernel `name` for every product whose weight format it takes, on this thread; without a name as
/// the tables choose. An op fails, with the reason, where the kernel does not take its shape. The environment
/// variable `CANDLE_FUSED_KERNEL` does the same for the whole process.
pub fn with_kernel<T>(name: Option<&str>, body: impl FnOnce() -> T) -> T {
    let before = FORCED.replace(name.map(Into::into));
    let result = body();
    FORCED.set(before);
    result
}

/// The kernel that is to be taken.
pub(crate) fn forced() -> Option<Arc<str>> {
    static OF_PROCESS: OnceLock<Option<Arc<str>>> = OnceLock::new();
    let of_thread = FORCED.with_borrow(Clone::clone);
    of_thread.or_else(|| {
        OF_PROCESS
            .get_or_init(|| std::env::var(VARIABLE).ok().map(Into::into))
            .clone()
    })
}
