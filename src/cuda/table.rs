//! What the tables have in common that choose a kernel: what they show of one, and how a plan is printed.

use super::launch::Grid;
use std::fmt;

/// A kernel of a table.
#[derive(Clone, Copy, Debug)]
pub struct KernelInfo {
    /// Its name, as [`with_kernel`](crate::cuda::with_kernel) takes it.
    pub name: &'static str,
    /// The file below `kernels/`; for a library's product that of what is done around it.
    pub source: &'static str,
    /// When it is chosen, where dtypes, sizes and GPU do not say so.
    pub note: &'static str,
}

/// Writes a plan: the rule's name, the `__global__` function or the library's, the grid, and the other parameters.
/// As in `gemv_dense_mma (linear_tensor_bf16, 264 blocks of 256, 8256 B shared, split 4, 8 rows a launch)`.
pub(crate) fn describe(
    f: &mut fmt::Formatter<'_>,
    kernel: &str,
    entry: &str,
    grid: Option<Grid>,
    details: &str,
) -> fmt::Result {
    write!(f, "{kernel} ({entry}")?;
    if let Some(grid) = grid {
        let blocks: u64 = grid.blocks.iter().map(|n| u64::from(*n)).product();
        write!(f, ", {blocks} blocks of {}", grid.threads)?;
        if grid.cluster > 1 {
            write!(f, " in clusters of {}", grid.cluster)?;
        }
        if grid.shared > 0 {
            write!(f, ", {} B shared", grid.shared)?;
        }
    }
    match details {
        "" => f.write_str(")"),
        details => write!(f, ", {details})"),
    }
}
