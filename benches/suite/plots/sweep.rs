//! The time of a product over the number of rows of x, a line for each weight format.

use super::{COLORS, Line, Lines};
use crate::export::Export;
use crate::figures::{CANDLE, FUSED, GEMM, OpRun};

/// The lines' colors, by format.
const FORMATS: [(&str, plotters::style::RGBColor); 8] = [
    ("bf16", COLORS[0]),
    ("f32", COLORS[0]),
    ("q8_0", COLORS[5]),
    ("q4_0", COLORS[2]),
    ("q4k", COLORS[6]),
    ("int8", COLORS[3]),
    ("int4-g128", COLORS[4]),
    ("ternary-row", COLORS[7]),
];

/// Formats that candle multiplies too.
const CANDLES: [&str; 5] = ["bf16", "f32", "q8_0", "q4_0", "q4k"];

/// The plot; nothing where the run has no sweep. On a GPU the dashed line is cuBLAS in bf16, on the
/// CPU dashed lines are candle's products of the same formats.
pub(super) fn plot(export: &Export) -> Option<Lines<'static>> {
    let runs = &export.sweep;
    let shape = &runs.first()?.model;
    let points = |format: &str, side: &str| -> Vec<(f64, f64)> {
        let of = runs.iter().filter(|run| run.format == format);
        of.filter_map(|run: &OpRun| Some((run.rows as f64, run.seconds(side)? * 1e6)))
            .collect()
    };
    let library = points("bf16", GEMM);
    let mut lines = Vec::new();
    for (format, color) in FORMATS {
        let ours = points(format, FUSED);
        if !ours.is_empty() {
            lines.push(Line::solid(format, color, ours));
        }
        let candle = points(format, CANDLE);
        // On a GPU candle's dense product is the library's.
        if CANDLES.contains(&format) && !candle.is_empty() && library.is_empty() {
            lines.push(Line::dashed(&format!("candle, {format}"), color, candle));
        }
    }
    if !library.is_empty() {
        lines.push(Line::dashed("cuBLAS, bf16", COLORS[1], library));
    }
    let title = format!("a product of {shape} over the rows of x");
    let axes = ("rows of x (M)", "us");
    Some(Lines::new(&title, export.machine.name(), axes, lines).rising())
}
