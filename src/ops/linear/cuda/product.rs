//! A product: segments of one weight format, each with the kernel that the table chose, behind one that rounds x where
//! that is asked for and the kernel does not.

use super::dispatch::{forced_kernel, select, takes_mixed};
use super::kernels::gemm_dequantized;
use super::kernels::gemm_w8a8::rounded_rows;
use super::plan::Plan;
use super::problem::{Operand, Operands, ProductAt};
use super::rule::Rule;
use super::table::RULES;
use crate::cuda::{Address, Launcher, Scratch};
use crate::ops::linear::{ActivationBits, Weight};
use candle_core::Result;
use std::fmt;

/// A run of weights of one format with the kernel that takes it.
#[derive(Clone, Debug)]
struct Segment {
    plan: Plan,
    operands: Operands,
    /// Where x is that is to be rounded before the kernel, and its norm.
    rounded: Option<ProductAt>,
}

impl Segment {
    /// # Errors
    /// If no kernel takes the operands.
    fn of(launcher: &Launcher, mut operands: Operands) -> Result<Self> {
        let case = operands.case(launcher);
        let forced = forced_kernel()?;
        let rounds = |rule: &&Rule| forced.is_none_or(|name| rule.kernel == name);
        let mut rounding = RULES.iter().filter(rounds);
        let rounded = (case.is_rounded() && !rounding.any(|rule| rule.try_plan(&case).is_ok()))
            .then(|| {
                let at = operands.at;
                // The address follows when there is one.
                operands.at.x = 0;
                operands.at.norm = None;
                operands.at.x_bits = ActivationBits::Bits16;
                at
            });
        Ok(Self {
            plan: select(&operands.case(launcher))?,
            operands,
            rounded,
        })
    }

    fn scratch(&self) -> usize {
        let rounded = self
            .rounded
            .map_or(0, |at| Scratch::room(at.x_dtype, at.m * at.k));
        rounded + self.plan.how.scratch(&self.operands)
    }

    /// # Safety
    /// As [`Product::run`].
    unsafe fn run(&self, launcher: &Launcher, scratch: &mut Scratch) -> Result<()> {
        let Some(at) = &self.rounded else {
            // SAFETY: the caller's; the plan was made for these operands.
            return unsafe { self.plan.how.run(launcher, scratch, &self.operands) };
        };
        let mut operands = self.operands.clone();
        // SAFETY: the caller's; the plan was made for aligned rows without a norm, as these are.
        unsafe {
            operands.at.x = rounded_rows(launcher, scratch, at)?;
            self.plan.how.run(launcher, scratch, &operands)
        }
    }
}

/// A product ready to run.
#[derive(Clone, Debug)]
pub(crate) struct Product {
    segments: Vec<Segment>,
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
        if segments.len() > 1 && at.activation.gate().is_none() {
            let each = segments
                .iter()
                .map(|operands| Segment::of(launcher, operands.clone()));
            let each: Vec<_> = each.filter_map(Result::ok).collect();
            // Where all of them are the library's, it takes them together.
            if each.len() == segments.len() && !each.iter().all(|s| takes_mixed(s.plan.kernel)) {
                return Ok(Self { segments: each });
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
        Ok(Self {
            segments: vec![Segment::of(launcher, operands)?],
        })
    }

    /// The plan and the operands, if one kernel takes everything and nothing is launched before it.
    pub fn single(&self) -> Option<(&Plan, &Operands)> {
        match &self.segments[..] {
            [segment] if segment.rounded.is_none() => Some((&segment.plan, &segment.operands)),
            _ => None,
        }
    }

    /// The quantized weights that are to be dequantized for a library; none if a segment takes them as they are.
    pub fn to_dequantize(&self) -> Option<&Operands> {
        let [Segment { plan, operands, .. }] = &self.segments[..] else {
            return None;
        };
        let all = operands.weights.iter();
        let quantized = all.clone().all(|w| matches!(w, Operand::Quantized(_)));
        (plan.kernel == gemm_dequantized::NAME && quantized).then_some(operands)
    }

    /// Says where the weights are that [`Product::to_dequantize`] named.
    pub fn set_dequantized(&mut self, at: Address) {
        if let [segment] = &mut self.segments[..] {
            segment.operands.dequantized = Some(at);
        }
    }

    /// Bytes of scratch memory that [`Product::run`] takes at most.
    pub fn scratch(&self) -> usize {
        self.segments.iter().map(Segment::scratch).sum()
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
        let mut segments = self.segments.iter();
        // SAFETY: the caller's.
        segments.try_for_each(|segment| unsafe { segment.run(launcher, scratch) })
    }
}

/// The kernel of each segment.
impl fmt::Display for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, segment) in self.segments.iter().enumerate() {
            let between = if i > 0 { " and " } else { "" };
            let rounded = match segment.rounded {
                Some(_) => "quantize_rows_back, then ",
                None => "",
            };
            write!(f, "{between}{rounded}{}", segment.plan)?;
        }
        Ok(())
    }
}
