//! A product of any weights: its segments, each with the kernel that the table chose.

use super::dispatch;
use super::plan::Plan;
use super::problem::{Operand, Operands, ProductAt};
use crate::cuda::{Address, Launcher, Scratch};
use crate::ops::linear::{Activation, Weight};
use candle_core::Result;
use std::fmt;

/// A product ready to run: its segments, each with the kernel that takes it.
#[derive(Clone, Debug)]
pub(crate) struct Product {
    segments: Vec<(Plan, Operands)>,
}

impl Product {
    /// Chooses kernels for rows that are at `at` and `weights`, dense ones of which are contiguous: one for each run
    /// of a format, or one for all where the runs belong together or a run has none of its own.
    ///
    /// # Errors
    /// If the weights are not on a GPU, or no kernel takes the product.
    pub fn new(launcher: &Launcher, weights: &[Weight], at: &ProductAt) -> Result<Self> {
        let whole = Operands::new(weights, at)?;
        let mut segments = whole.segments();
        if segments.len() > 1 && at.activation != Activation::SwiGlu {
            let plans = segments.iter().map(|segment| {
                let plan = dispatch::select(&segment.case(launcher)).ok()?;
                (!dispatch::takes_mixed(plan.kernel)).then_some(plan)
            });
            if let Some(plans) = plans.collect::<Option<Vec<_>>>() {
                return Ok(Self {
                    segments: plans.into_iter().zip(segments).collect(),
                });
            }
        }
        let operands = match segments.len() {
            1 => segments.remove(0),
            _ => whole,
        };
        Self::of(launcher, operands)
    }

    /// The same for operands that one kernel is to take.
    ///
    /// # Errors
    /// If no kernel takes them.
    pub fn of(launcher: &Launcher, operands: Operands) -> Result<Self> {
        let plan = dispatch::select(&operands.case(launcher))?;
        Ok(Self {
            segments: vec![(plan, operands)],
        })
    }

    /// The plan and the operands, if one kernel takes everything.
    pub fn single(&self) -> Option<(&Plan, &Operands)> {
        match &self.segments[..] {
            [(plan, operands)] => Some((plan, operands)),
            _ => None,
        }
    }

    /// The quantized weights that are to be dequantized for a library; none if a segment takes them as they are.
    pub fn to_dequantize(&self) -> Option<&Operands> {
        let (plan, operands) = self.single()?;
        let all = operands.weights.iter();
        let quantized = all.clone().all(|w| matches!(w, Operand::Quantized(_)));
        (dispatch::dequantizes(plan.kernel) && quantized).then_some(operands)
    }

    /// Says where the weights are that [`Product::to_dequantize`] named.
    pub fn set_dequantized(&mut self, at: Address) {
        if let [(_, operands)] = &mut self.segments[..] {
            operands.dequantized = Some(at);
        }
    }

    /// Bytes of scratch memory that [`Product::run`] takes at most.
    pub fn scratch(&self) -> usize {
        let each = self.segments.iter();
        each.map(|(plan, operands)| plan.how.scratch(operands))
            .sum()
    }

    /// Launches the product.
    ///
    /// # Errors
    /// If a launch fails or memory is short.
    ///
    /// # Safety
    /// Each address holds what its field says, and dense weights live, until the stream has passed the launches. In a
    /// dependent chain no preceding kernel writes weights, norm or bias.
    pub unsafe fn run(&self, launcher: &Launcher, scratch: &mut Scratch) -> Result<()> {
        self.segments.iter().try_for_each(|(plan, operands)| {
            // SAFETY: the caller's; the plan was made for these operands.
            unsafe { plan.how.run(launcher, scratch, operands) }
        })
    }
}

/// The kernel of each segment.
impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (plan, _)) in self.segments.iter().enumerate() {
            let between = if i > 0 { " and " } else { "" };
            write!(f, "{between}{plan}")?;
        }
        Ok(())
    }
}
