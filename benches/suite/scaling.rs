//! How cost grows: with the context, with sequences side by side, and with the model. Laws are fitted
//! through the points by least squares of the logarithms.

use crate::args::Args;
use crate::cases::{CANDLE, Dims, Extent, FUSED};
use crate::child::{Child, Form, Job};
use crate::common::comparison::median;
use crate::layers::{self, Layer};
use crate::place::Place;
use crate::run::Budget;
use crate::stats::PowerLaw;
use crate::timing::Effort;
use anyhow::Result;
use serde::{Deserialize, Serialize};

/// What is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Over {
    /// Attention of a step over so many keys.
    Context,
    /// A layer for so many sequences.
    Batch,
    /// All layers and the head of models with so many weights.
    Model,
    /// A token of a whole model behind so many others.
    Position,
}

impl Over {
    pub fn name(self) -> &'static str {
        match self {
            Self::Context => "attention of a step, by context",
            Self::Batch => "a layer, by sequences",
            Self::Model => "all layers and the head, by weights",
            Self::Position => "a token of the model, by position",
        }
    }
}

/// The cost of one side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Curve {
    pub over: Over,
    /// Empty where models are what is changed.
    pub model: String,
    pub format: String,
    pub side: String,
    /// Sizes and seconds.
    pub points: Vec<(f64, f64)>,
    pub law: Option<PowerLaw>,
}

impl Curve {
    fn new(over: Over, (model, format): (&str, &str), side: &str, points: Vec<(f64, f64)>) -> Self {
        let curve = Self {
            over,
            model: model.to_owned(),
            format: format.to_owned(),
            side: side.to_owned(),
            law: PowerLaw::fit(&points),
            points,
        };
        curve.print();
        curve
    }

    fn print(&self) {
        let points: Vec<_> = self
            .points
            .iter()
            .map(|(x, y)| format!("{x:.0}: {:.1}", y * 1e6))
            .collect();
        let law = self.law.map_or_else(String::new, |law| {
            format!("size^{:.2} (R2 {:.3})", law.exponent, law.r2)
        });
        println!(
            "{:<36}{:<16}{:<8}{law:<24}us: {}",
            self.over.name(),
            self.model,
            self.side,
            points.join(", ")
        );
    }
}

/// Sizes that are measured.
struct Sizes {
    contexts: Vec<usize>,
    batches: Vec<usize>,
    positions: Vec<usize>,
}

impl Sizes {
    fn of(gpu: bool, quick: bool) -> Self {
        let doubling = |from: usize, to: usize, by: usize| -> Vec<usize> {
            std::iter::successors(Some(from), |n| Some(n * by))
                .take_while(|n| *n <= to)
                .collect()
        };
        match (gpu, quick) {
            (_, true) => Self {
                contexts: doubling(128, 2048, 4),
                batches: doubling(1, 16, 4),
                positions: if gpu {
                    doubling(128, 2048, 4)
                } else {
                    doubling(16, 64, 2)
                },
            },
            (false, _) => Self {
                contexts: doubling(128, 32768, 4),
                batches: doubling(1, 64, 2),
                positions: doubling(32, 1024, 2),
            },
            (true, _) => Self {
                contexts: doubling(128, 32768, 2),
                batches: doubling(1, 64, 2),
                positions: doubling(128, 8064, 2),
            },
        }
    }
}

/// The context while sequences or models change.
const CONTEXT: usize = 512;

/// Measures the curves that are wanted.
pub fn run(place: &Place, args: &Args, done: &[Layer], budget: &Budget) -> Result<Vec<Curve>> {
    let gpu = place.device.is_cuda();
    let sizes = Sizes::of(gpu, args.quick);
    let effort = Effort::of(place, args.quick);
    println!("\ngrowth");
    let extent = Extent::of(args.quick);
    let dtype = place.dtypes[0];
    let format = dtype.as_str();
    let mut curves = Vec::new();
    let mut pair = |over, what, points: Vec<(f64, f64, f64)>| {
        let side = |pick: fn(&(f64, f64, f64)) -> f64| -> Vec<(f64, f64)> {
            points.iter().map(|p| (p.0, pick(p))).collect()
        };
        if points.len() > 1 {
            curves.push(Curve::new(over, what, CANDLE, side(|p| p.1)));
            curves.push(Curve::new(over, what, FUSED, side(|p| p.2)));
        }
    };
    let first = Dims::of(extent.models()[0])?;
    if args.wants("scaling context") && !budget.is_spent() {
        let mut points = Vec::new();
        for context in &sizes.contexts {
            let group = layers::attention(place, &first, (1, *context), dtype, effort)?;
            points.push((*context as f64, group.stock(), group.fused.median));
        }
        pair(Over::Context, (&first.name, format), points);
    }
    if args.wants("scaling batch") && !budget.is_spent() {
        let mut points = Vec::new();
        for batch in &sizes.batches {
            let layer = layers::measure(place, &first, (*batch, CONTEXT), dtype, effort)?;
            points.push((*batch as f64, layer.stock(), layer.fused()));
        }
        pair(Over::Batch, (&first.name, format), points);
    }
    if args.wants("scaling model") && !budget.is_spent() {
        let mut points = Vec::new();
        for layer in done.iter().filter(|layer| layer.format == format) {
            let shape = extent
                .models()
                .iter()
                .find(|shape| shape.name() == layer.model);
            if let Some(shape) = shape {
                let weights = Dims::of(*shape)?.weights() as f64;
                points.push((weights, layer.stock_sum(), layer.fused_sum()));
            }
        }
        pair(Over::Model, ("", format), points);
    }
    if args.wants("scaling position") {
        curves.extend(positions(place, args, &sizes, budget)?);
    }
    Ok(curves)
}

/// Steps at each position.
const STEPS: usize = 8;

/// Whole models at different depths of their context.
fn positions(place: &Place, args: &Args, sizes: &Sizes, budget: &Budget) -> Result<Vec<Curve>> {
    let gpu = place.device.is_cuda();
    let dims = Dims::of(Extent::Quick.models()[0])?;
    let model = args.models.first().cloned().unwrap_or(dims.name);
    let format = place.dtypes[0].as_str();
    let most = sizes.positions.iter().max().copied().unwrap_or(1);
    let mut curves = Vec::new();
    let forms = match gpu {
        true => [Form::Settings, Form::Graph],
        false => [Form::Stock, Form::Eager],
    };
    for form in forms {
        if budget.is_spent() {
            break;
        }
        let mut child = Child::start(&Job {
            model: model.clone(),
            format: format.to_owned(),
            form,
            cpu: !gpu,
            threads: args.threads,
            positions: most + STEPS + 2,
        })?;
        child.turn(16, 3)?;
        let mut points = Vec::new();
        for position in &sizes.positions {
            let steps = child.turn(*position, STEPS)?.steps;
            points.push((*position as f64, median(steps)));
        }
        child.end()?;
        let side = if form.is_fused() { FUSED } else { CANDLE };
        curves.push(Curve::new(Over::Position, (&model, format), side, points));
    }
    Ok(curves)
}
