//! The command line.

use std::net::IpAddr;
use std::time::Duration;

use candle_fused::serving::Options;
use clap::Parser;
use common::args::{ModelArgs, at_least_one};
use common::shapes::Shape;

/// The variable that holds the API key.
pub const KEY: &str = "CANDLE_FUSED_API_KEY";

/// Serves a language model by OpenAI's API. The variable CANDLE_FUSED_API_KEY, if it is set, is the key that clients
/// have to send.
#[derive(Parser, Clone, Debug)]
#[command(name = "candle-fused-serve", version, max_term_width = 100)]
pub struct Args {
    /// The address to listen on.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: IpAddr,

    /// The port to listen on; 0 takes a free one.
    #[arg(long, default_value_t = 8000)]
    pub port: u16,

    /// The model's name in the API [default: the file's, folder's or hub's].
    #[arg(long)]
    pub name: Option<String>,

    /// Serve random weights in the shape of a published model, to measure it without its download: texts are made-up
    /// words.
    #[arg(long, value_name = "NAME", conflicts_with_all = ["model", "revision", "mmap"])]
    pub shape: Option<Shape>,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub model: ModelArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub engine: EngineArgs,

    #[command(flatten)]
    #[allow(missing_docs)]
    pub limits: LimitArgs,
}

/// How requests run together.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Engine")]
pub struct EngineArgs {
    /// Requests that run together, 1 to 256.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one)]
    pub sequences: usize,

    /// Tokens of a request at most, prompt included [default: 4096, or the model's context]. Past the original
    /// context of a LongRoPE model all requests have its long frequencies.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub positions: Option<usize>,

    /// Tokens of a page of keys and values: 8, 16, 32, 64, 128 or 256.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub page: usize,

    /// Pages in all [default: what all sequences could need, within 80 % of the GPU's free memory
    /// or 1 GiB on the CPU].
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub pages: Option<usize>,

    /// Tokens of prompts that a step reads beside the single tokens of the others.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_one)]
    pub prompt_budget: usize,

    /// Read every prompt from its beginning, even if another began with the same tokens.
    #[arg(long)]
    pub no_prefix_cache: bool,

    /// Give every request the tokens that it would get alone, to the last bit of the logits: slower
    /// where few requests run on a GPU, or many on the CPU.
    #[arg(long)]
    pub batch_invariant: bool,
}

/// What clients may take.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Limits")]
pub struct LimitArgs {
    /// Requests that may wait; others are answered with 429.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub max_queue: u32,

    /// Bytes of a request's body at most.
    #[arg(long, value_name = "BYTES", default_value_t = 4 << 20, value_parser = at_least_one)]
    pub max_body: usize,

    /// Seconds that a request may take, waiting included.
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub timeout: Duration,

    /// Seconds that requests under way have to end when the server is asked to.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub grace: Duration,
}

/// A day and less: what is longer is no limit.
fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0. ..=86_400.).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("must be 0 to 86400 seconds".into()),
    }
}

impl Args {
    /// How the engine is set up.
    pub fn options(&self) -> Options {
        Options {
            sequences: self.engine.sequences,
            positions: self.engine.positions,
            page: self.engine.page,
            pages: self.engine.pages,
            kv_cache: self.model.kv_cache,
            prompt_budget: self.engine.prompt_budget,
            share_prefixes: !self.engine.no_prefix_cache,
            batch_invariant: self.engine.batch_invariant,
            graph: !self.model.no_graph,
        }
    }
}
