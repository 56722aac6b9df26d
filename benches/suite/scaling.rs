//! How cost grows: with the context, with sequences side by side, and with the model. Laws are fitted
//! through the points by least squares of the logarithms.

use crate::args::Args;
use crate::budget::Budget;
use crate::cases::{Dims, Extent};
use crate::child::{Child, Job};
use crate::figures::{CANDLE, Curve, FUSED, Layer, Over};
use crate::form::Form;
use crate::layers;
use crate::place::Place;
use crate::stats::PowerLaw;
use crate::timing::Effort;
use anyhow::Result;
use common::comparison::median;

/// The curve through `points`, printed.
fn curve(over: Over, (model, format): (&str, &str), side: &str, points: Vec<(f64, f64)>) -> Curve {
    let curve = Curve {
        over,
        model: model.to_owned(),
        format: format.to_owned(),
        side: side.to_owned(),
        law: PowerLaw::fit(&points),
        points,
    };
    print(&curve);
    curve
}

fn print(curve: &Curve) {
    let points = curve.points.iter();
    let points: Vec<_> = points
        .map(|(x, y)| format!("{x:.0}: {:.1}", y * 1e6))
        .collect();
    let law = curve.law.map_or_else(String::new, |law| {
        format!("size^{:.2} (R2 {:.3})", law.exponent, law.r2)
    });
    println!(
        "{:<36}{:<16}{:<8}{law:<24}us: {}",
        curve.over.name(),
        curve.model,
        curve.side,
        points.join(", ")
    );
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
            curves.push(curve(over, what, CANDLE, side(|p| p.1)));
            curves.push(curve(over, what, FUSED, side(|p| p.2)));
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
            threads: args.most_threads(),
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
        curves.push(curve(Over::Position, (&model, format), side, points));
    }
    Ok(curves)
}
