//! Flags that quantize a model while it is loaded.

use anyhow::Result;
use candle_fused::quant::{Progress, Quantization, Recipe};
use clap::Args as ClapArgs;
use indicatif::{ProgressBar, ProgressStyle};

/// How the weights are quantized.
#[derive(ClapArgs, Clone, Debug, Default)]
#[command(next_help_heading = "Quantization")]
pub struct QuantizeArgs {
    /// Quantize the layers' matrices: int8, fp8, fp8-block128, nvfp4, nf4, int4-g32, int4-g64, int4-g128 (with -z for
    /// zero points), ternary-tensor, ternary-row, ternary-g32, ternary-g64, ternary-g128, or a GGUF type such as q4_0.
    #[arg(long, value_name = "FORMAT", value_parser = quantization)]
    pub quantize: Option<Quantization>,

    /// Quantize the head too; an embedding that it is tied to stays as it is.
    #[arg(long, value_name = "FORMAT", value_parser = quantization)]
    pub head: Option<Quantization>,

    /// Quantize the embedding too.
    #[arg(long, value_name = "FORMAT", value_parser = quantization)]
    pub embedding: Option<Quantization>,

    /// Bring the columns of the layers' matrices to like sizes first, which leaves what the model
    /// computes as it is; int8 comes nearer to the model by it.
    #[arg(long, requires = "quantize")]
    pub balance: bool,

    /// Another format for matrices whose name matches, as '*.down_proj.weight=int8', or `none`; the
    /// first that matches wins.
    #[arg(long = "matrix", value_name = "PATTERN=FORMAT", value_parser = pattern)]
    pub matrices: Vec<(String, Option<Quantization>)>,
}

impl QuantizeArgs {
    /// What is asked for, if anything is, with a bar that shows how far it is.
    pub fn recipe(&self) -> Option<Recipe> {
        let asked = [self.quantize, self.head, self.embedding];
        if asked.iter().all(Option::is_none) && self.matrices.is_empty() {
            return None;
        }
        let mut recipe = self.quantize.map(Recipe::new).unwrap_or_default();
        for (pattern, quantization) in &self.matrices {
            recipe = recipe.with(pattern, *quantization);
        }
        if let Some(head) = self.head {
            recipe = recipe.with_head(head);
        }
        if let Some(embedding) = self.embedding {
            recipe = recipe.with_embedding(embedding);
        }
        if self.balance {
            recipe = recipe.with_balance();
        }
        Some(recipe.with_progress(bar()))
    }

    /// For people: the layers' format, and that of the head.
    pub fn describe(&self) -> Option<String> {
        self.recipe()?;
        let layers = self
            .quantize
            .map_or("as stored".to_owned(), |q| q.to_string());
        let other = |name: &str, asked: Option<Quantization>| {
            asked.map_or(String::new(), |q| format!(", {name} {q}"))
        };
        let some = if self.matrices.is_empty() {
            ""
        } else {
            ", some otherwise"
        };
        let balanced = if self.balance { ", balanced" } else { "" };
        let (head, embedding) = (other("head", self.head), other("embedding", self.embedding));
        Some(format!("{layers}{balanced}{some}{head}{embedding}"))
    }
}

/// Shows progress on a terminal, and takes the bar away at the end.
fn bar() -> impl Fn(Progress<'_>) + Send + Sync {
    let bar = ProgressBar::no_length();
    if let Ok(style) = ProgressStyle::with_template("quantizing  {bar:30}  {pos} of {len}  {msg}") {
        bar.set_style(style);
    }
    move |progress| {
        bar.set_length(progress.total as u64);
        bar.set_position(progress.done as u64);
        bar.set_message(progress.tensor.to_owned());
        if progress.done >= progress.total {
            bar.finish_and_clear();
        }
    }
}

fn quantization(text: &str) -> Result<Quantization, String> {
    text.parse().map_err(|e: candle_core::Error| {
        let text = e.to_string();
        text.lines().next().unwrap_or_default().to_owned()
    })
}

fn pattern(text: &str) -> Result<(String, Option<Quantization>), String> {
    match text.rsplit_once('=') {
        Some((pattern, "none")) => Ok((pattern.to_owned(), None)),
        Some((pattern, format)) => Ok((pattern.to_owned(), Some(quantization(format)?))),
        None => Err("must be PATTERN=FORMAT, as '*.down_proj.weight=int8'".into()),
    }
}
