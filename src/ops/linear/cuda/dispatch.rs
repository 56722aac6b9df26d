//! The choice of a product's kernel.

use super::plan::Plan;
use super::problem::Case;
use super::rule::{Formats, Rule};
use super::table::RULES;
use crate::cuda::{KernelInfo, forced};
use candle_core::{Result, bail};
use std::cell::RefCell;
use std::collections::HashMap;

/// Plans that a thread keeps: prompts come in many lengths.
const MAX_PLANS: usize = 4096;

thread_local! {
    static PLANS: RefCell<HashMap<Case, Plan>> = RefCell::new(HashMap::new());
}

/// The kernel that is forced, if one is.
pub(super) fn forced_kernel() -> Result<Option<&'static str>> {
    let place = forced("linear", kernels(), crate::ops::all_kernels())?;
    Ok(place.and_then(|place| kernels().nth(place)).map(|k| k.name))
}

/// The plan for a case.
///
/// # Errors
/// If no kernel takes it, or the one that is forced does not; the message says why.
pub(super) fn select(case: &Case) -> Result<Plan> {
    if let Some(name) = forced_kernel()? {
        let format = Formats::of(case.weight);
        let rules = RULES.iter().filter(|rule| rule.kernel == name);
        let rules = rules.filter(|rule| rule.formats.contains(format));
        let (mut known, mut refusal) = (false, "");
        for rule in rules {
            known = true;
            match rule.try_plan(case) {
                Ok(plan) => return Ok(plan),
                Err(reason) => refusal = reason,
            }
        }
        if known {
            bail!("linear: kernel {name} cannot take {case}: {refusal}");
        }
    }
    if let Some(plan) = PLANS.with_borrow(|plans| plans.get(case).cloned()) {
        return Ok(plan);
    }
    let Some(plan) = RULES.iter().find_map(|rule| rule.try_plan(case).ok()) else {
        let reasons = RULES
            .iter()
            .filter(|rule| rule.formats.contains(Formats::of(case.weight)))
            .filter_map(|rule| Some(format!("{}: {}", rule.kernel, rule.plan(case).err()?)));
        let reasons = reasons.collect::<Vec<_>>().join("; ");
        bail!("linear: no kernel takes {case} ({reasons})");
    };
    PLANS.with_borrow_mut(|plans| {
        if plans.len() >= MAX_PLANS {
            plans.clear();
        }
        plans.insert(*case, plan.clone());
    });
    Ok(plan)
}

/// The kernels in the order in which they are tried, each once.
pub fn kernels() -> impl Iterator<Item = KernelInfo> {
    let first = |(i, rule): &(usize, &Rule)| RULES[..*i].iter().all(|r| r.kernel != rule.kernel);
    let rules = RULES.iter().enumerate().filter(first);
    rules.map(|(_, rule)| KernelInfo {
        name: rule.kernel,
        source: rule.source,
        note: rule.note,
    })
}

pub(super) fn takes_mixed(kernel: &str) -> bool {
    let mut rules = RULES.iter().filter(|rule| rule.kernel == kernel);
    rules.any(Rule::takes_mixed)
}
