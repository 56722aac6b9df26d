//! A kernel that takes the place of the table's choice: for measuring, and for hunting bugs.

use super::table::KernelInfo;
use candle_core::{Result, bail};
use std::cell::RefCell;
use std::sync::{Arc, OnceLock};

/// The environment's choice.
const VARIABLE: &str = "CANDLE_FUSED_KERNEL";

thread_local! {
    static FORCED: RefCell<Option<Arc<str>>> = const { RefCell::new(None) };
}

/// Runs `body` with kernel `name` on this thread, for every op whose table has it; without a name as the tables
/// choose. A product takes it if the kernel is for its weight format. An op fails, with the reason, where the
/// kernel does not take its shape, and with all names where no table has the name. The environment variable
/// `CANDLE_FUSED_KERNEL` does the same for the whole process.
///
/// ```no_run
/// use candle_core::{DType, Device, Tensor};
/// use candle_fused::ops::linear::kernel_table;
/// use candle_fused::ops::{Epilogue, linear};
/// use candle_fused::{cuda, trace};
/// let device = Device::new_cuda(0)?;
/// let x = Tensor::zeros((1, 4096), DType::BF16, &device)?;
/// let w = Tensor::zeros((4096, 4096), DType::BF16, &device)?;
/// for kernel in kernel_table() {
///     let product = || cuda::with_kernel(Some(kernel.name), || linear(&x, &w, &Epilogue::default()));
///     match trace::capture(product) {
///         (Ok(_), calls) => println!("{calls}"),
///         (Err(why), _) => println!("{why}"),
///     }
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn with_kernel<T>(name: Option<&str>, body: impl FnOnce() -> T) -> T {
    /// Puts back what was forced before, also where the body panics.
    struct Before(Option<Arc<str>>);
    impl Drop for Before {
        fn drop(&mut self) {
            FORCED.set(self.0.take());
        }
    }
    let _before = Before(FORCED.replace(name.map(Into::into)));
    body()
}

/// The place in `table` of the kernel that is to be taken; none if there is no such kernel, or another table has it.
///
/// # Errors
/// If none of `all` tables has it.
pub(crate) fn forced(
    op: &str,
    mut table: impl Iterator<Item = KernelInfo>,
    all: impl Iterator<Item = KernelInfo>,
) -> Result<Option<usize>> {
    let Some(name) = name() else {
        return Ok(None);
    };
    let place = table.position(|kernel| *kernel.name == *name);
    if place.is_none() {
        let names: Vec<_> = all.map(|kernel| kernel.name).collect();
        if !names.contains(&&*name) {
            let names = names.join(", ");
            bail!("{op}: there is no kernel {name}, expected one of {names}");
        }
    }
    Ok(place)
}

/// The thread's choice, or the environment's.
fn name() -> Option<Arc<str>> {
    static OF_PROCESS: OnceLock<Option<Arc<str>>> = OnceLock::new();
    let of_thread = FORCED.with_borrow(Clone::clone);
    of_thread.or_else(|| {
        OF_PROCESS
            .get_or_init(|| std::env::var(VARIABLE).ok().map(Into::into))
            .clone()
    })
}
