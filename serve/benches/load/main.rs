//! Many clients of the server at once, over HTTP, and beside them its engine alone, without a server.
//!
//! ```text
//! cargo bench -p candle-fused-serve -- --clients 8 -- --cpu --shape smollm2-135m
//! cargo bench -p candle-fused-serve --features cuda -- --clients 32 -- --shape llama-3.2-1b
//! cargo bench -p candle-fused-serve -- --url http://127.0.0.1:8000 --offline 1000
//! ```
//! Flags behind the second `--` are the server's. The engine and then the server run in processes of their own, which
//! this program starts from its own file: it can be carried to another machine alone. In each round all clients ask at
//! once, and each gets its whole answer; tokens are counted from when the last client has its first token to when the
//! first client has its last, and over the whole round.

mod client;
mod offline;
mod process;
mod round;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use candle_fused_serve::args::Args as ServerArgs;
use candle_fused_serve::program;
use clap::Parser;
use common::args::at_least_one;
use common::report;
use serde_json::json;

use crate::process::Server;
use crate::round::Rates;

/// Measures many clients of candle-fused-serve at once, and its engine alone.
#[derive(Parser, Clone, Debug)]
#[command(name = "load", max_term_width = 100)]
struct Args {
    /// Clients at once.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_one)]
    clients: usize,

    /// Tokens of a prompt; no two prompts begin alike.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least_one)]
    prompt: usize,

    /// Tokens of an answer.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    tokens: usize,

    /// Rounds that count, behind one that does not.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    rounds: usize,

    /// Measure a server that runs already, by its address as http://127.0.0.1:8000, instead of starting one.
    #[arg(long, conflicts_with = "server")]
    url: Option<String>,

    /// Tokens per second to compare with, instead of measuring the engine alone.
    #[arg(long, value_name = "RATE")]
    offline: Option<f64>,

    /// Write all figures to FILE.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Be one of the processes that are measured.
    #[arg(long, value_enum, hide = true)]
    be: Option<process::Role>,

    /// cargo hands it to every benchmark.
    #[arg(long, hide = true)]
    bench: bool,

    /// Flags of the server.
    #[arg(last = true, value_name = "SERVER FLAGS")]
    server: Vec<String>,
}

impl Args {
    /// Those of the server.
    fn of_server(&self) -> Result<ServerArgs> {
        let name = "candle-fused-serve".to_owned();
        let all = std::iter::once(name).chain(self.server.iter().cloned());
        Ok(ServerArgs::try_parse_from(all)?)
    }
}

fn main() -> ExitCode {
    let mut args = Args::parse();
    // Where there are flags of the server, cargo's own comes behind them.
    args.server.retain(|flag| flag != "--bench");
    report::run_main(|| match args.be {
        Some(process::Role::Server) => program::run(&args.of_server()?),
        Some(process::Role::Engine) => offline::run(&args),
        None => measure(&args),
    })
}

fn measure(args: &Args) -> Result<()> {
    // A mistake in the server's flags is told before anything starts.
    args.of_server()?;
    let alone = match (args.offline, &args.url) {
        (Some(rate), _) => Some(Rates::given(rate)),
        (None, Some(_)) => None,
        (None, None) => Some(process::engine(args)?),
    };
    if let Some(alone) = &alone {
        println!("the engine alone:  {}", alone.line());
    }
    let server = match &args.url {
        Some(_) => None,
        None => Some(Server::start(args)?),
    };
    let url = args.url.as_deref().or(server.as_ref().map(|s| s.url()));
    let url = url.context("there is no server")?;
    let runtime = tokio::runtime::Runtime::new().context("no threads for the clients")?;
    let before = server.as_ref().and_then(Server::seconds_of_http);
    let rates = runtime.block_on(client::rounds(args, url))?;
    let after = server.as_ref().and_then(Server::seconds_of_http);
    println!("{:>3} HTTP clients:  {}", args.clients, rates.line());
    // The first round is in there as well.
    let tokens = (args.rounds + 1) * args.clients * args.tokens;
    let host = before.zip(after);
    let host = host.map(|(before, after)| (after - before) / tokens as f64);
    if let Some(seconds) = host {
        println!(
            "processor time of the server's HTTP threads: {:.1} us a token",
            seconds * 1e6
        );
    }
    let share = alone.as_ref().map(|alone| rates.over(alone));
    if let Some(line) = share.as_ref().and_then(round::line_of_shares) {
        println!("{line}");
    }
    if let Some(path) = &args.json {
        let all = json!({
            "clients": args.clients, "prompt": args.prompt, "tokens": args.tokens, "server": args.server,
            "alone": alone, "http": rates, "share": share, "http_seconds_per_token": host,
        });
        let text = serde_json::to_string_pretty(&all)? + "\n";
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
