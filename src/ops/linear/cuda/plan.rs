//! How a kernel carries out a product: its grid and parameters, worked out once for a case.

use super::problem::Operands;
use crate::cuda::{Grid, Launcher, Scratch};
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

/// As in `gemv_dense_mma (gemv_dense_mma_bf16, 264 blocks of 256, 8256 B shared, split 4, 8 rows a launch)`.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}", self.kernel, self.how.entry())?;
        if let Some(grid) = self.how.grid() {
            let blocks: u32 = grid.blocks.iter().product();
            write!(f, ", {blocks} blocks of {}", grid.threads)?;
            if grid.cluster > 1 {
                write!(f, " in clusters of {}", grid.cluster)?;
            }
            if grid.shared > 0 {
                write!(f, ", {} B shared", grid.shared)?;
            }
        }
        match self.how.details() {
            details if details.is_empty() => f.write_str(")"),
            details => write!(f, ", {details})"),
        }
    }
}
