//! How a table of attention's kernels chooses: for a call of `flash_attention`, and likewise for a step of
//! `flash_decoding`, a rule's kernel makes a plan or says why it does not take the case.

use crate::cuda::{Grid, KernelInfo, Launcher, describe, forced};
use candle_core::{Result, bail};
use std::fmt;

/// A kernel's plan for a case, or why it has none.
pub(crate) type Planned<O> = std::result::Result<Box<dyn Kernel<O>>, &'static str>;

/// A kernel with everything but addresses, which are in the operands `O`.
pub(crate) trait Kernel<O>: fmt::Debug + Send + Sync {
    /// The `__global__` function.
    fn entry(&self) -> &'static str;

    /// Blocks, threads and shared memory.
    fn grid(&self) -> Grid;

    /// The other parameters, in words.
    fn details(&self) -> String;

    /// Launches the kernel.
    ///
    /// # Errors
    /// If the launch fails.
    ///
    /// # Safety
    /// `operands` are of the case that this was planned for, and each address holds what its field says until the
    /// stream has passed the launch.
    unsafe fn run(&self, launcher: &Launcher, operands: &O) -> Result<()>;
}

/// The kernel that was chosen for a case.
#[derive(Debug)]
pub(crate) struct Plan<O> {
    /// The rule's name.
    pub kernel: &'static str,
    pub how: Box<dyn Kernel<O>>,
    /// The kernel before it in the table, and why that one does not take the case.
    pub passed: Option<(&'static str, &'static str)>,
}

/// As in `flash_attention_mma (flash_attention_d64_bf16, 96 blocks of 256, 36864 B shared, 4x2 warps, stages 2)`.
impl<O> fmt::Display for Plan<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = &self.how;
        describe(
            f,
            self.kernel,
            how.entry(),
            Some(how.grid()),
            &how.details(),
        )
    }
}

impl<O> Plan<O> {
    /// The same, and after a colon why it is not the kernel before it in the table.
    pub fn with_reason(&self) -> String {
        match self.passed {
            Some((kernel, reason)) => format!("{self}: not {kernel}, {reason}"),
            None => self.to_string(),
        }
    }
}

/// A row of a table.
pub(crate) trait Rule<C> {
    type Operands;

    fn info(&self) -> KernelInfo;

    /// The kernel's plan for the case, or why it does not take it.
    fn plan(&self, case: &C) -> Planned<Self::Operands>;
}

/// The plan of the first rule that takes the case, or of the one that is forced.
///
/// # Errors
/// If no kernel takes it, or the one that is forced does not; the message says why.
pub(crate) fn select<C: fmt::Display, R: Rule<C>>(
    op: &str,
    rules: &[R],
    case: &C,
) -> Result<Plan<R::Operands>> {
    let table = || rules.iter().map(R::info);
    if let Some(place) = forced(op, table(), crate::ops::all_kernels())? {
        let kernel = rules[place].info().name;
        return match rules[place].plan(case) {
            Ok(how) => Ok(Plan {
                kernel,
                how,
                passed: None,
            }),
            Err(reason) => bail!("{op}: kernel {kernel} cannot take {case}: {reason}"),
        };
    }
    let mut passed = Vec::new();
    for rule in rules {
        let kernel = rule.info().name;
        match rule.plan(case) {
            Ok(how) => {
                let passed = passed.pop();
                return Ok(Plan {
                    kernel,
                    how,
                    passed,
                });
            }
            Err(reason) => passed.push((kernel, reason)),
        }
    }
    let reasons = passed
        .iter()
        .map(|(kernel, why)| format!("{kernel}: {why}"));
    let reasons = reasons.collect::<Vec<_>>().join("; ");
    bail!("{op}: no kernel takes {case} ({reasons})");
}
