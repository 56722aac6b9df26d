//! Tokens per second of whole models, a bar for each form.

use super::{COLORS, Draw, legend};
use crate::export::Export;
use crate::form::Form;
use anyhow::Result;
use plotters::coord::Shift;
use plotters::prelude::*;

/// The forms that are shown, with what a user calls them.
const FORMS: [(Form, &str, RGBColor); 4] = [
    (Form::Stock, "stock candle", COLORS[1]),
    (Form::Import, "drop-in import", COLORS[2]),
    (Form::Eager, "Generation, launch by launch", COLORS[3]),
    (Form::Graph, "Generation, CUDA graph", COLORS[0]),
];

/// A model in a format, with tokens per second of each form that was measured.
struct Group {
    name: String,
    bars: Vec<(usize, f64)>,
}

/// The plot of all models that were measured in plain candle and in a form of ours.
pub struct Tokens {
    title: String,
    groups: Vec<Group>,
}

impl Tokens {
    /// Nothing where no model was measured in two of the forms.
    pub fn of(export: &Export) -> Option<Self> {
        let mut groups: Vec<Group> = Vec::new();
        for run in &export.models {
            let name = match run.format.as_str() {
                "stored" => run.model.trim_end_matches(".gguf").to_owned(),
                format => format!("{} {format}", run.model),
            };
            let Some(form) = FORMS.iter().position(|(form, ..)| *form == run.form) else {
                continue;
            };
            let bar = (form, run.tokens_per_second());
            match groups.iter_mut().find(|group| group.name == name) {
                Some(group) => group.bars.push(bar),
                None => groups.push(Group {
                    name,
                    bars: vec![bar],
                }),
            }
        }
        groups
            .retain(|group| group.bars.iter().any(|(form, _)| *form == 0) && group.bars.len() > 1);
        let best = |group: &Group| group.bars.iter().fold(0f64, |most, bar| most.max(bar.1));
        groups.sort_by(|a, b| best(b).total_cmp(&best(a)));
        (!groups.is_empty()).then(|| Self {
            title: format!("tokens per second, batch 1, {}", export.machine.name()),
            groups,
        })
    }
}

impl Draw for Tokens {
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> Result<()>
    where
        B::ErrorType: 'static,
    {
        area.fill(&WHITE)?;
        let bars = || self.groups.iter().flat_map(|group| &group.bars);
        let most = bars().fold(0f64, |most, bar| most.max(bar.1));
        let shown: Vec<_> = (0..FORMS.len())
            .filter(|form| bars().any(|bar| bar.0 == *form))
            .collect();
        let count = self.groups.len() as f64;
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(230)
            .build_cartesian_2d(0f64..most * 1.1, 0f64..count)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .x_desc("tokens/s")
            .x_label_formatter(&|v| format!("{v:.0}"))
            .draw()?;
        let height = 0.8 / shown.len() as f64;
        for (row, form) in shown.iter().enumerate() {
            let (_, name, color) = FORMS[*form];
            // From the top of a group down.
            let bottom = |group: usize| count - group as f64 - 0.1 - (row + 1) as f64 * height;
            let measured: Vec<_> = self
                .groups
                .iter()
                .enumerate()
                .filter_map(|(i, group)| {
                    let bar = group.bars.iter().find(|bar| bar.0 == *form)?;
                    Some((bottom(i), bar.1))
                })
                .collect();
            let rectangle = |(y, rate): &(f64, f64)| {
                Rectangle::new([(0., *y), (*rate, y + 0.92 * height)], color.filled())
            };
            chart
                .draw_series(measured.iter().map(rectangle))?
                .label(name)
                .legend(move |(x, y)| {
                    Rectangle::new([(x, y - 4), (x + 16, y + 4)], color.filled())
                });
            for (y, rate) in &measured {
                let (x, y) = chart.backend_coord(&(*rate, y + height / 2.));
                let text = format!("{rate:.0}");
                area.draw(&Text::new(text, (x + 4, y - 6), ("sans-serif", 12)))?;
            }
        }
        for (i, group) in self.groups.iter().enumerate() {
            let (_, y) = chart.backend_coord(&(0., count - i as f64 - 0.5));
            area.draw(&Text::new(
                group.name.clone(),
                (10, y - 8),
                ("sans-serif", 13),
            ))?;
        }
        legend(&mut chart, SeriesLabelPosition::LowerRight)
    }
}
