//! Plots of a run, each as SVG and PNG.

mod serving;
mod sweep;
mod tokens;

use crate::cases::OPS;
use crate::export::Export;
use crate::figures::{CANDLE, Curve, FUSED, OpRun, Over};
use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::ranged1d::Ranged;
use plotters::prelude::*;
use plotters::style::{FontStyle, register_font};
use std::path::Path;
use tokens::Tokens;

const SIZE: (u32, u32) = (960, 600);

/// Blue for ours, grey for candle's; others where there are more.
const COLORS: [RGBColor; 8] = [
    RGBColor(0x1f, 0x6f, 0xb4),
    RGBColor(0x8a, 0x8a, 0x8a),
    RGBColor(0xd9, 0x7a, 0x1c),
    RGBColor(0x3a, 0x92, 0x4f),
    RGBColor(0x9c, 0x4f, 0xa8),
    RGBColor(0xb8, 0x3a, 0x3a),
    RGBColor(0x6b, 0x4a, 0x2f),
    RGBColor(0x1a, 0xa6, 0xa6),
];

/// A plot on either kind of canvas.
trait Draw {
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Result<()>
    where
        B::ErrorType: 'static;
}

/// Curves with the name of their plot, its title and what it is over.
const CURVES: [(Over, &str, &str, &str); 3] = [
    (
        Over::Context,
        "attention",
        "attention of a decode step",
        "keys",
    ),
    (
        Over::Batch,
        "batch",
        "a layer of a decode step",
        "sequences",
    ),
    (Over::Model, "models", "all layers and the head", "weights"),
];

/// The files, without their ends, that the run has figures for, and what they show.
pub fn names(export: &Export) -> Vec<(&'static str, &'static str)> {
    let mut names = Vec::new();
    if Tokens::of(export).is_some() {
        names.push(("tokens", "tokens per second of the models"));
    }
    if !export.sweep.is_empty() {
        names.push(("sweep", "time of a product over the rows of x"));
    }
    names.extend(serving::plots(export).iter().map(|plot| (plot.0, plot.1)));
    if !export.ops.is_empty() {
        names.push(("speedup", "times faster than candle, op by op"));
        names.push(("roofline", "roofline"));
    }
    if !curves(export, Over::Position).is_empty() {
        names.push(("context", "tokens per second by position"));
    }
    for (over, name, title, _) in CURVES {
        if !curves(export, over).is_empty() {
            names.push((name, title));
        }
    }
    names
}

/// Writes what the run has figures for.
pub fn write(export: &Export, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    register_font(
        "sans-serif",
        FontStyle::Normal,
        epaint_default_fonts::HACK_REGULAR,
    )
    .map_err(|_| anyhow!("the plots' font cannot be read"))?;
    let on = export.machine.name();
    if let Some(tokens) = Tokens::of(export) {
        save(&tokens, folder, "tokens")?;
    }
    if let Some(lines) = sweep::plot(export) {
        save(&lines, folder, "sweep")?;
    }
    for (name, _, lines) in serving::plots(export) {
        save(&lines, folder, name)?;
    }
    if !export.ops.is_empty() {
        save(&Speedups::of(export, on), folder, "speedup")?;
        save(&Roofline { export, on }, folder, "roofline")?;
    }
    for (over, name, title, x) in CURVES {
        let curves = curves(export, over);
        if !curves.is_empty() {
            let lines = curves.iter().map(|c| Line::of(c, |y| y * 1e6)).collect();
            save(&Lines::new(title, on, (x, "us"), lines), folder, name)?;
        }
    }
    let curves = curves(export, Over::Position);
    if !curves.is_empty() {
        let lines = curves.iter().map(|c| Line::of(c, |y| 1. / y)).collect();
        let plot = Lines::new("decoding", on, ("position", "tokens/s"), lines);
        save(&plot, folder, "context")?;
    }
    Ok(())
}

fn curves(export: &Export, over: Over) -> Vec<&Curve> {
    export.scaling.iter().filter(|c| c.over == over).collect()
}

fn save(plot: &impl Draw, folder: &Path, name: &str) -> Result<()> {
    let svg = folder.join(format!("{name}.svg"));
    let png = folder.join(format!("{name}.png"));
    let area = SVGBackend::new(&svg, SIZE).into_drawing_area();
    plot.draw(&area)?;
    area.present()
        .map_err(|e| anyhow!("cannot write {}: {e}", svg.display()))?;
    let area = BitMapBackend::new(&png, SIZE).into_drawing_area();
    plot.draw(&area)?;
    area.present()
        .map_err(|e| anyhow!("cannot write {}: {e}", png.display()))
}

/// The names of a chart's series.
fn legend<'a, B: DrawingBackend + 'a, X: Ranged, Y: Ranged>(
    chart: &mut ChartContext<'a, B, Cartesian2d<X, Y>>,
    position: SeriesLabelPosition,
) -> Result<()>
where
    B::ErrorType: 'static,
{
    chart
        .configure_series_labels()
        .position(position)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    Ok(())
}

/// The least and the most of some numbers, as powers of ten around them.
fn decades(values: impl Iterator<Item = f64> + Clone) -> std::ops::Range<f64> {
    let positive = values.filter(|v| v.is_finite() && *v > 0.);
    let least = positive.clone().fold(f64::MAX, f64::min);
    let most = positive.fold(f64::MIN_POSITIVE, f64::max);
    10f64.powf(least.log10().floor())..10f64.powf((most.log10() + 1e-9).ceil())
}

/// How many times faster each case is: a row of points for each op.
struct Speedups {
    title: String,
    rows: Vec<(String, Vec<f64>)>,
}

impl Speedups {
    fn of(export: &Export, on: &str) -> Self {
        let rows = OPS.iter().filter_map(|op| {
            let runs = export.ops.iter().filter(|run| run.op == *op);
            let ratios: Vec<_> = runs.filter_map(OpRun::speedup).collect();
            (!ratios.is_empty()).then(|| ((*op).to_owned(), ratios))
        });
        Self {
            title: format!("times faster than candle, {on}"),
            rows: rows.collect(),
        }
    }
}

impl Draw for Speedups {
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Result<()>
    where
        B::ErrorType: 'static,
    {
        area.fill(&WHITE)?;
        let all = self
            .rows
            .iter()
            .flat_map(|(_, ratios)| ratios.iter().copied());
        let x = decades(all.chain([0.9, 2.]));
        let rows = self.rows.len() as f64;
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(170)
            .build_cartesian_2d(x.log_scale(), 0f64..rows)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .x_desc("times faster; dots are shapes, the bar is their median")
            .x_label_formatter(&|v| format!("{v}"))
            .draw()?;
        chart.draw_series(LineSeries::new(
            [(1., 0.), (1., rows)],
            BLACK.stroke_width(2),
        ))?;
        for (i, (op, ratios)) in self.rows.iter().enumerate() {
            let y = rows - i as f64 - 0.5;
            let middle = common::comparison::median(ratios.clone());
            let dots = ratios
                .iter()
                .map(|r| Circle::new((*r, y), 3, COLORS[0].mix(0.45).filled()));
            chart.draw_series(dots)?;
            let bar = [(middle, y - 0.3), (middle, y + 0.3)];
            chart.draw_series(LineSeries::new(bar, COLORS[2].stroke_width(4)))?;
            let (_, at) = chart.backend_coord(&(1., y));
            let text = format!("{op} {middle:.1}x");
            area.draw(&Text::new(text, (10, at - 8), ("sans-serif", 13)))?;
        }
        Ok(())
    }
}

/// Operations per second over operations per byte, under what memory and products allow.
struct Roofline<'a> {
    export: &'a Export,
    on: &'a str,
}

impl Draw for Roofline<'_> {
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Result<()>
    where
        B::ErrorType: 'static,
    {
        area.fill(&WHITE)?;
        let runs = self.export.ops.iter().filter(|run| run.work.flops > 0.);
        let point = |run: &OpRun, side: &str| {
            let seconds = run.side(side)?.times.median;
            Some((
                run.work.flops / run.work.bytes,
                run.work.flops / seconds * 1e-9,
            ))
        };
        let of = |side: &'static str| -> Vec<_> {
            runs.clone().filter_map(|run| point(run, side)).collect()
        };
        let sides = [(CANDLE, of(CANDLE), 1), (FUSED, of(FUSED), 0)];
        let all = || {
            sides
                .iter()
                .flat_map(|(_, points, _)| points.iter().copied())
        };
        let peak = self.export.limits.peak() * 1e-9;
        let bandwidth = self.export.limits.read.max(self.export.limits.copy) * 1e-9;
        let x = decades(all().map(|p| p.0).chain([0.5, 10. * peak / bandwidth]));
        let y = decades(all().map(|p| p.1).chain([peak]));
        let mut chart = ChartBuilder::on(area)
            .caption(format!("roofline, {}", self.on), ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(70)
            .build_cartesian_2d(x.clone().log_scale(), y.log_scale())?;
        chart
            .configure_mesh()
            .x_desc("operations for each byte that has to move")
            .y_desc("GFLOP/s")
            .x_label_formatter(&|v| format!("{v}"))
            .y_label_formatter(&|v| format!("{v}"))
            .draw()?;
        let roof = [x.start, peak / bandwidth, x.end].map(|i| (i, (i * bandwidth).min(peak)));
        chart
            .draw_series(LineSeries::new(roof, BLACK.stroke_width(2)))?
            .label("memory, product of the library")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 16, y)], BLACK.stroke_width(2)));
        for (name, points, color) in sides {
            let color = COLORS[color];
            chart
                .draw_series(
                    points
                        .iter()
                        .map(|p| Circle::new(*p, 3, color.mix(0.6).filled())),
                )?
                .label(name)
                .legend(move |(x, y)| Circle::new((x + 8, y), 4, color.filled()));
        }
        legend(&mut chart, SeriesLabelPosition::UpperLeft)
    }
}

/// A line of a plot.
struct Line {
    name: String,
    points: Vec<(f64, f64)>,
    color: RGBColor,
    dashed: bool,
}

impl Line {
    fn solid(name: &str, color: RGBColor, points: Vec<(f64, f64)>) -> Self {
        Self {
            name: name.to_owned(),
            points,
            color,
            dashed: false,
        }
    }

    fn dashed(name: &str, color: RGBColor, points: Vec<(f64, f64)>) -> Self {
        Self {
            dashed: true,
            ..Self::solid(name, color, points)
        }
    }

    fn of(curve: &Curve, y: impl Fn(f64) -> f64) -> Self {
        let law = curve
            .law
            .map_or_else(String::new, |law| format!(", size^{:.2}", law.exponent));
        let name = format!("{} {} {}{law}", curve.model, curve.format, curve.side);
        let points = curve.points.iter().map(|(x, t)| (*x, y(*t))).collect();
        let color = COLORS[usize::from(curve.side != FUSED)];
        Self::solid(name.trim_start(), color, points)
    }
}

/// Lines over a size, both axes in logarithms.
struct Lines<'a> {
    title: String,
    axes: (&'a str, &'a str),
    lines: Vec<Line>,
    legend: SeriesLabelPosition,
}

impl<'a> Lines<'a> {
    fn new(title: &str, on: &str, axes: (&'a str, &'a str), lines: Vec<Line>) -> Self {
        Self {
            title: format!("{title}, {on}"),
            axes,
            lines,
            legend: SeriesLabelPosition::UpperLeft,
        }
    }

    /// The same for lines that rise, which leave room below them on the right.
    fn rising(self) -> Self {
        Self {
            legend: SeriesLabelPosition::LowerRight,
            ..self
        }
    }
}

impl Draw for Lines<'_> {
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Result<()>
    where
        B::ErrorType: 'static,
    {
        area.fill(&WHITE)?;
        let all = self
            .lines
            .iter()
            .flat_map(|line| line.points.iter().copied());
        let xs = all.clone().map(|p| p.0);
        let (least, most) = (xs.clone().fold(f64::MAX, f64::min), xs.fold(0., f64::max));
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(80)
            .build_cartesian_2d(
                (least / 1.2..most * 1.2).log_scale(),
                decades(all.map(|p| p.1)).log_scale(),
            )?;
        chart
            .configure_mesh()
            .x_desc(self.axes.0)
            .y_desc(self.axes.1)
            .x_labels(6)
            .x_label_formatter(&|v| short(*v))
            .y_label_formatter(&|v| format!("{v}"))
            .draw()?;
        for line in &self.lines {
            let color = line.color;
            let length = if line.dashed { 6 } else { 16 };
            let (points, style) = (line.points.clone(), color.stroke_width(2));
            let series = match line.dashed {
                true => chart.draw_series(DashedLineSeries::new(points, 6, 4, style))?,
                false => chart.draw_series(LineSeries::new(points, style))?,
            };
            series.label(&line.name).legend(move |(x, y)| {
                PathElement::new([(x, y), (x + length, y)], color.stroke_width(2))
            });
            chart.draw_series(
                line.points
                    .iter()
                    .map(|p| Circle::new(*p, 4, color.filled())),
            )?;
        }
        legend(&mut chart, self.legend.clone())
    }
}

/// A number on an axis: 4096, 16k, 1.2G.
fn short(v: f64) -> String {
    let (by, unit) = match v {
        v if v >= 1e9 => (1e9, "G"),
        v if v >= 1e6 => (1e6, "M"),
        v if v >= 1e4 => (1e3, "k"),
        _ => (1., ""),
    };
    format!("{}{unit}", (10. * v / by).round() / 10.)
}
