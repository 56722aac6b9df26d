//! The table of a layer: its steps in candle's operations and fused, their shares, and what of a
//! token they do not account for.

use crate::args::Args;
use crate::budget::Budget;
use crate::cases::{Attention, Contender, Dims, Extent, Part, Product, Tensors};
use crate::figures::{CANDLE, Chain, FUSED, Group, Layer, ModelRun, Step};
use crate::models::context;
use crate::ops::checked;
use crate::place::Place;
use crate::timing::{Effort, race};
use candle_core::{DType, Result};
use candle_fused::ops;

/// Weights of the largest model whose layer is measured on a CPU: plain bf16 takes seconds for one.
const MOST_ON_CPU: usize = 2_000_000_000;

/// Measures and prints the layer of each model.
pub fn run(place: &Place, args: &Args, models: &[ModelRun], budget: &Budget) -> Result<Vec<Layer>> {
    let (extent, effort) = (Extent::of(args.quick), Effort::of(place, args.quick));
    let mut layers = Vec::new();
    for shape in extent.models() {
        let dims = Dims::of(*shape)?;
        if place.device.is_cpu() && dims.weights() > MOST_ON_CPU {
            continue;
        }
        for dtype in &place.dtypes {
            let format = dtype.as_str();
            if !args.wants(&format!("layer {} {format}", dims.name)) || budget.is_spent() {
                continue;
            }
            let context = context(place.device.is_cuda(), args.quick);
            let mut layer = measure(place, &dims, (1, context), *dtype, effort)?;
            layer.take_tokens(models);
            layer.chains = chains(place, &layer, effort)?;
            print(&layer);
            layers.push(layer);
        }
    }
    Ok(layers)
}

/// The layer of a model with `rows` sequences of `context` keys.
pub fn measure(
    place: &Place,
    dims: &Dims,
    (rows, context): (usize, usize),
    dtype: DType,
    effort: Effort,
) -> Result<Layer> {
    let product = |part| product(place, dims, part, (rows, dtype), effort);
    let attention = attention(place, dims, (rows, context), dtype, effort)?;
    Ok(Layer {
        model: dims.name.clone(),
        format: dtype.as_str().to_owned(),
        rows,
        context,
        layers: dims.layers,
        groups: vec![
            product(Part::Qkv)?,
            attention,
            product(Part::Output)?,
            product(Part::Up)?,
            product(Part::Down)?,
        ],
        head: product(Part::Head)?,
        chains: Vec::new(),
        stock_token: None,
        fused_token: None,
    })
}

/// A product with what is around it: checked as a whole on both sides, then step by step.
fn product(
    place: &Place,
    dims: &Dims,
    part: Part,
    (rows, dtype): (usize, DType),
    effort: Effort,
) -> Result<Group> {
    let product = Product::of(dims, part);
    let tensors = Tensors::new(place, &product, rows, dtype)?;
    let mut whole = tensors.contenders(place)?;
    whole.retain(|contender| [CANDLE, FUSED].contains(&contender.name.as_str()));
    for contender in &whole {
        checked(place, contender)?;
    }
    whole.retain(|contender| contender.name == FUSED);
    let steps = tensors.steps()?;
    group(place, product.name(), whole, steps, effort)
}

/// Attention of one step.
pub fn attention(
    place: &Place,
    dims: &Dims,
    (rows, context): (usize, usize),
    dtype: DType,
    effort: Effort,
) -> Result<Group> {
    let attention = Attention::new(place, dims, (rows, context), dtype)?;
    let mut whole = attention.contenders()?;
    for contender in &whole {
        checked(place, contender)?;
    }
    whole.retain(|contender| contender.name == FUSED);
    group(place, "attention", whole, attention.steps()?, effort)
}

/// All in turns: the fused step first, then candle's.
fn group(
    place: &Place,
    name: &str,
    mut fused: Vec<Contender>,
    steps: Vec<Contender>,
    effort: Effort,
) -> Result<Group> {
    fused.extend(steps);
    // The table holds launches against launches.
    fused.iter_mut().for_each(|step| step.in_graph = false);
    let taken = race(place, &fused, effort)?;
    let mut times = fused.iter().zip(&taken);
    let fused = times.next().map(|(_, taken)| taken.times);
    let Some(fused) = fused else {
        candle_core::bail!("{name}: nothing to measure");
    };
    Ok(Group {
        name: name.to_owned(),
        fused,
        stock: times
            .map(|(contender, taken)| Step {
                name: contender.name.clone(),
                times: taken.times,
            })
            .collect(),
    })
}

/// What launches alone cost.
fn chains(place: &Place, layer: &Layer, effort: Effort) -> Result<Vec<Chain>> {
    let x = place.x(&[1, 32], place.dtypes[0])?;
    let stock = layer.groups.iter().map(|group| group.stock.len()).sum();
    [1, layer.groups.len(), stock]
        .into_iter()
        .map(|count| {
            let x = x.clone();
            let chain = Contender::new("chain", Vec::new(), move |_| {
                let step = |sum, _| ops::residual_add(&sum, &[&x]);
                Ok(vec![(0..count).try_fold(x.clone(), step)?])
            });
            let taken = race(place, &[chain], effort)?;
            Ok(Chain {
                ops: count,
                seconds: taken[0].times.median,
                host: taken[0].host,
            })
        })
        .collect()
}

fn print(layer: &Layer) {
    println!(
        "\nlayer of {} {}, {} row(s), context {}: us, and shares of the layer",
        layer.model, layer.format, layer.rows, layer.context
    );
    let (stock, fused) = (layer.stock(), layer.fused());
    println!(
        "{:<28}{:>10}{:>8}{:>12}{:>8}{:>9}",
        "", "candle", "", "fused", "", "faster"
    );
    for group in &layer.groups {
        group_lines(group, (stock, fused));
    }
    println!(
        "{:<28}{:>10.1}{:>8}{:>12.1}{:>8}{:>8.2}x",
        "a layer",
        stock * 1e6,
        "",
        fused * 1e6,
        "",
        stock / fused
    );
    group_lines(&layer.head, (f64::NAN, f64::NAN));
    let (all, all_fused) = (layer.stock_sum(), layer.fused_sum());
    let count = format!("{} layers and the head", layer.layers);
    println!(
        "{count:<28}{:>10.1}{:>8}{:>12.1}",
        all * 1e6,
        "",
        all_fused * 1e6
    );
    let token = |t: Option<f64>| t.map_or_else(|| "n/a".to_owned(), |t| format!("{:.1}", t * 1e6));
    println!(
        "{:<28}{:>10}{:>8}{:>12}",
        "a token of the model",
        token(layer.stock_token),
        "",
        token(layer.fused_token)
    );
    let rest = |whole: Option<f64>, sum: f64| {
        whole.map_or_else(String::new, |t| format!("{:+.0}%", 100. * (t - sum) / t))
    };
    println!(
        "{:<28}{:>10}{:>8}{:>12}",
        "not accounted for",
        rest(layer.stock_token, all),
        "",
        rest(layer.fused_token, all_fused)
    );
    for chain in &layer.chains {
        let host = chain
            .host
            .map_or_else(String::new, |h| format!(", host {:.1} us", h * 1e6));
        println!(
            "{:>3} ops without work: {:.1} us{host}",
            chain.ops,
            chain.seconds * 1e6
        );
    }
}

fn group_lines(group: &Group, (stock, fused): (f64, f64)) {
    let share = |part: f64, whole: f64| match whole.is_nan() {
        true => String::new(),
        false => format!("{:.1}%", 100. * part / whole),
    };
    for (i, step) in group.stock.iter().enumerate() {
        let t = step.times.median;
        print!("{:<28}{:>10.1}{:>8}", step.name, t * 1e6, share(t, stock));
        match i {
            0 => println!(
                "{:>12.1}{:>8}{:>8.2}x",
                group.fused.median * 1e6,
                share(group.fused.median, fused),
                group.stock() / group.fused.median
            ),
            _ => println!(),
        }
    }
}
