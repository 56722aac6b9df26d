//! Flags that quantize a model by what a text makes of it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candle_fused::models::{Calibration, CalibrationProgress};
use candle_fused::quant::gptq::Options;
use clap::Args as ClapArgs;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::args;
use super::report;
use super::tokenizer::Text;

/// How the weights are calibrated.
#[derive(ClapArgs, Clone, Debug)]
#[command(next_help_heading = "Calibration")]
pub struct CalibrateArgs {
    /// Quantize by GPTQ: this text goes through the model, and matrices in int8 and int4 are rounded so that what they
    /// make of it changes least. Matrices in other formats, the head and the embedding become what they become
    /// without it. Layers that are done are kept in --out, and the same command goes on behind them.
    #[arg(long, value_name = "FILE")]
    pub calibrate: Option<PathBuf>,

    /// Tokens of the text to take at most, from its beginning.
    #[arg(
        long,
        value_name = "N",
        default_value_t = 32768,
        requires = "calibrate"
    )]
    #[arg(allow_negative_numbers = true, value_parser = args::at_least_one)]
    pub calibration_tokens: usize,

    /// Tokens of a window; windows know nothing of each other.
    #[arg(long, value_name = "N", default_value_t = 512, requires = "calibrate")]
    #[arg(allow_negative_numbers = true, value_parser = args::at_least_one)]
    pub calibration_window: usize,

    /// Memory for the text's activations, in MiB.
    #[arg(
        long,
        value_name = "MIB",
        default_value_t = 4096,
        requires = "calibrate"
    )]
    #[arg(allow_negative_numbers = true, value_parser = args::at_least_one)]
    pub calibration_memory: usize,

    /// What keeps weights close to their codes, as a part of the mean square of the inputs.
    #[arg(long, value_name = "PART", default_value_t = Options::default().damping, requires = "calibrate")]
    #[arg(allow_negative_numbers = true)]
    pub damping: f64,

    /// Round columns in their order, instead of those with the largest inputs first.
    #[arg(long, requires = "calibrate")]
    pub no_act_order: bool,
}

impl CalibrateArgs {
    /// The calibration that the flags ask for, with progress bars; none without `--calibrate`. Finished layers are kept
    /// in `folder`.
    pub fn calibration(&self, text: &Text, folder: &Path) -> Result<Option<Calibration>> {
        let Some(path) = &self.calibrate else {
            return Ok(None);
        };
        let read = fs::read_to_string(path);
        let read = read.with_context(|| format!("cannot read {}", path.display()))?;
        let mut ids = text.encode_prompt(&read)?;
        ids.truncate(self.calibration_tokens);
        let options = Options {
            damping: self.damping,
            act_order: !self.no_act_order,
        };
        let calibration = Calibration::new(&ids, self.calibration_window)
            .with_context(|| format!("{} does not do", path.display()))?;
        Ok(Some(
            calibration
                .with_options(options)
                .with_memory((self.calibration_memory as u64) << 20)
                .with_folder(folder)
                .with_progress(bars()),
        ))
    }
}

/// Shows layers and what goes on in one on a terminal, and takes the bars away at the end; elsewhere a line for each
/// layer.
fn bars() -> impl Fn(CalibrationProgress<'_>) + Send + Sync {
    let all = MultiProgress::new();
    let bar = |template: &str| {
        let style = ProgressStyle::with_template(template);
        all.add(
            ProgressBar::no_length()
                .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())),
        )
    };
    let layers = bar("calibrating  {bar:30}  layer {pos} of {len}  {elapsed} of {msg}");
    let within = bar("             {bar:30}  {pos} of {len}  {msg}");
    move |at| {
        if layers.is_hidden() && at.done == 0 && at.layer as u64 + 1 > layers.position() {
            report::say(format_args!(
                "calibrating layer {} of {}",
                at.layer + 1,
                at.layers
            ));
        }
        layers.set_length(at.layers as u64);
        layers.set_position(at.layer as u64 + 1);
        // What is left, by the layers that are done.
        let done = at.layer as u32;
        layers.set_message(match done {
            0 => "?".to_owned(),
            done => format!(
                "{:?}s",
                (layers.elapsed() / done * at.layers as u32).as_secs()
            ),
        });
        within.set_length(at.total as u64);
        within.set_position(at.done as u64);
        within.set_message(at.doing.to_owned());
    }
}
