//! The command line.

use crate::figures::Arrivals;
use crate::form::Form;
use crate::lengths::{self, Lengths, SharedPrefix};
use candle_core::DType;
use clap::builder::TypedValueParser;
use clap::{Parser, ValueEnum};
use std::path::PathBuf;
use std::str::FromStr;

/// Every op, every model and their parts against plain candle, and against what the machine can do.
#[derive(Parser, Debug)]
#[command(name = "cargo bench --", max_term_width = 100)]
pub struct Args {
    /// What to measure [default: ops, models, layers and scaling].
    #[arg(long, value_enum, value_delimiter = ',')]
    pub sections: Vec<Section>,

    /// Only what has one of these in its name: words of it, or parts of more than three letters, all of
    /// them, as `flash` or `"rms_norm qwen3-0.6b m1"`.
    #[arg(long, value_delimiter = ',')]
    pub filter: Vec<String>,

    /// Models of the table and of the curves: shapes, or files, folders and hub ids [default: the
    /// named shapes].
    #[arg(long, value_delimiter = ',')]
    pub models: Vec<String>,

    /// Formats of the table of models: dtypes, or what `--quantize` of the examples takes; with `+head`
    /// the head is quantized too, with `@f32` behind it activations have that dtype. With --kernel, --tune and --cliffs the formats of the weights.
    #[arg(long, alias = "format", value_delimiter = ',')]
    pub formats: Vec<String>,

    /// Forms of the table of models [default: all that the device has].
    #[arg(long, value_enum, value_delimiter = ',')]
    pub forms: Vec<Form>,

    /// Time these kernels of the table of `linear` on CUDA, on the products of --shape and --format.
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires_all = ["shapes", "formats"])]
    pub kernel: Vec<String>,

    /// Time every kernel of that table that takes a product, and say where the table chooses a slower
    /// one [default products: those of the models, in several formats and for several M].
    #[arg(long, conflicts_with = "kernel")]
    pub tune: bool,

    /// Time what that table chooses, over the rows of x and beside cuBLAS, and say where more rows or one row less
    /// take much less time [default products: two of Llama-3-8B].
    #[arg(long, conflicts_with_all = ["kernel", "tune"])]
    pub cliffs: bool,

    /// Products for --kernel, --tune and --cliffs.
    #[arg(long = "shape", value_name = "MxNxK", value_delimiter = ',')]
    pub shapes: Vec<Mnk>,

    /// Dtypes of x for --kernel, --tune and --cliffs [default: bf16].
    #[arg(long = "dtype", value_name = "DTYPE", value_delimiter = ',')]
    pub dtypes: Vec<DType>,

    /// Sequences side by side, of the section `serving` [default: 8, 32, 64 and 256 on a GPU, else 1, 4 and 8].
    #[arg(long, value_delimiter = ',')]
    pub sequences: Vec<usize>,

    /// Tokens of prompts in `serving`: fixed:N, uniform:LEAST..MOST, or lognormal:MEDIAN,SIGMA [default: fixed:128 for
    /// requests all at once, uniform:32..224 for those that arrive at random].
    #[arg(long, value_name = "LENGTHS")]
    pub prompt_lengths: Option<Lengths>,

    /// Tokens that are generated behind each, likewise [default: fixed:256, and uniform:64..448].
    #[arg(long, value_name = "LENGTHS")]
    pub answer_lengths: Option<Lengths>,

    /// Tokens in front of the prompts in `serving` that are always the same, and with a colon the share of the prompts
    /// that have them: `512`, or `512:0.5`.
    #[arg(long, value_name = "TOKENS[:SHARE]")]
    pub shared_prefix: Option<SharedPrefix>,

    /// Requests of a run in `serving` [default: one for each sequence, and four where they arrive at random].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..).map(|n| n as usize))]
    pub requests: Option<usize>,

    /// How requests of `serving` come; `poisson` is offline first, and then at random [default: poisson, with --quick
    /// offline].
    #[arg(long, value_enum)]
    pub arrivals: Option<Arrivals>,

    /// Shares of the offline throughput at which requests arrive at random.
    #[arg(long, value_delimiter = ',', default_value = "0.7", value_parser = lengths::load)]
    pub load: Vec<f64>,

    /// Few shapes and rounds: under two minutes on two cores.
    #[arg(long)]
    pub quick: bool,

    /// Measure the CPU although there is a GPU.
    #[arg(long)]
    pub cpu: bool,

    /// Threads on the CPU. Several, as `1,2,4`, ask for a table of prompts and decoding over them, and for nothing
    /// else that is not named.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..).map(usize::from))]
    pub threads: Vec<usize>,

    /// Write all figures to FILE as JSON (benches/README.md describes it).
    #[arg(long, value_name = "FILE")]
    pub export: Option<PathBuf>,

    /// Write plots into FOLDER as SVG and PNG.
    #[arg(long, value_name = "FOLDER")]
    pub plots: Option<PathBuf>,

    /// Write the tables as Markdown into FILE; it shows the plots that lie beside it.
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,

    /// Show what changed beyond the noise since an earlier --export.
    #[arg(long, value_name = "FILE")]
    pub baseline: Option<PathBuf>,

    /// With --baseline, exit with 1 if anything is slower beyond the noise and by more than PERCENT.
    #[arg(long, value_name = "PERCENT", num_args = 0..=1, default_missing_value = "5", requires = "baseline")]
    pub fail_on_regression: Option<f64>,

    /// Measure nothing; show and plot earlier exports of one machine, several as one.
    #[arg(long, value_name = "FILE", value_delimiter = ',', conflicts_with_all = ["quick", "sections"])]
    pub from: Vec<PathBuf>,

    /// List the names of the cases.
    #[arg(long)]
    pub list: bool,

    /// Stop beginning anything new after so many seconds.
    #[arg(long, value_name = "SECONDS")]
    pub budget: Option<u64>,

    /// A model's side in a process of its own, which takes its turns from standard input.
    #[arg(long, value_name = "JSON", hide = true)]
    pub child: Option<String>,

    /// cargo hands it to every benchmark.
    #[arg(long, hide = true)]
    pub bench: bool,
}

/// A part of the suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Section {
    /// Every op on the models' shapes.
    Ops,
    /// Whole models: stock, with settings, fused, as a graph.
    Models,
    /// The steps of a layer, and what they leave of a token.
    Layers,
    /// How cost grows with context, batch and model.
    Scaling,
    /// One product over the number of rows, format by format.
    Sweep,
    /// Prompts and decoding of a model on the CPU over the numbers of --threads.
    Threads,
    /// Many requests at once: all at the same time, and arriving at random.
    Serving,
    /// Ways of fusing a norm with a ternary product, on a GPU.
    Ternary,
    /// All plans of those.
    TernarySweep,
}

/// The sizes of a product, as `16x14336x4096`: M rows of x, N output channels, K inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mnk {
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

impl FromStr for Mnk {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sizes: Result<Vec<usize>, _> = text.split('x').map(str::parse).collect();
        match sizes.as_deref() {
            Ok(&[m, n, k]) if m > 0 && n > 0 && k > 0 => Ok(Self { m, n, k }),
            _ => Err("expected M, N and K, as 16x14336x4096".to_owned()),
        }
    }
}

impl Args {
    /// Whether single kernels are timed; nothing else is then, unless it is named.
    pub fn times_kernels(&self) -> bool {
        self.tune || self.cliffs || !self.kernel.is_empty()
    }

    pub fn has(&self, section: Section) -> bool {
        match self.sections.is_empty() {
            true if self.times_kernels() => false,
            true if self.threads.len() > 1 => section == Section::Threads,
            true => matches!(
                section,
                Section::Ops | Section::Models | Section::Layers | Section::Scaling
            ),
            false => self.sections.contains(&section),
        }
    }

    /// Threads of what is measured with one number of them.
    pub fn most_threads(&self) -> Option<usize> {
        self.threads.iter().max().copied()
    }

    pub fn wants(&self, name: &str) -> bool {
        let has = |word: &str| {
            let whole = name.split(' ').any(|part| part == word);
            whole || (word.len() > 3 && name.contains(word))
        };
        let fits = |filter: &String| filter.split_whitespace().all(has);
        self.filter.is_empty() || self.filter.iter().any(fits)
    }
}
