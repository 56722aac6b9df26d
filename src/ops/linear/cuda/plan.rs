//! How a kernel carries out a product: its grid and parameters, worked out once for a case.

use super::problem::Operands;
use crate::cuda::{Grid, Launcher, Scratch, describe};
use candle_core::Result;
use std::fmt;
use std::sync::Arc;

/// A kernel's plan for a case, or why it has none.
pub(crate) type Planned = std::result::Result<Arc<dyn Kernel>, &'static str>;

/// A kernel with everything but addresses: what its host file has worked out for a
/// [`Case`](super::problem::Case).
pub(crate) trait Kernel: fmt::Debug + Send + Sync {
    /// The `__global__` function, or the library's.
    fn entry(&self) -> &'static str;

    /// Blocks, threads, shared memory and cluster of the main launch; `None` where a library chooses.
    fn grid(&self) -> Option<Grid>;

    /// The other parameters, in words.
    fn details(&self) -> String;

    /// Bytes of scratch memory that [`Kernel::run`] takes at most.
    fn scratch(&self, operands: &Operands) -> usize {
        let _ = operands;
        0
    }

    /// Launches the product.
    ///
    /// # Errors
    /// If a launch fails or memory is short.
    ///
    /// # Safety
    /// `operands` are of the case that this was planned for, and each address holds what its field says until the
    /// stream has passed the launches. In a dependent chain no preceding kernel writes weights, norm or bias.
    unsafe fn run(
        &self,
        launcher: &Launcher,
        scratch: &mut Scratch,
        operands: &Operands,
    ) -> Result<()>;
}

/// The kernel that was chosen for a case.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The rule's name.
    pub kernel: &'static str,
    pub how: Arc<dyn Kernel>,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = &self.how;
        describe(f, self.kernel, how.entry(), how.grid(), &how.details())
    }
}
