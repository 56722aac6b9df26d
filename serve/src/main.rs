//! The program: finds a model, starts its engine, and serves it.

use std::process::ExitCode;

use anyhow::{Context, Result};
use candle_fused_serve::args::{Args, KEY};
use candle_fused_serve::load::load;
use candle_fused_serve::server;
use common::args;
use common::report::{run_main, say};
use common::source::DEFAULT_MODEL;
use tokio::net::TcpListener;

fn main() -> ExitCode {
    run_main(run)
}

fn run() -> Result<()> {
    let args: Args = args::parse(std::env::args_os(), DEFAULT_MODEL)?;
    args::set_threads(args.model.threads);
    let key = match std::env::var(KEY) {
        Ok(key) => Some(key).filter(|key| !key.is_empty()),
        Err(std::env::VarError::NotPresent) => None,
        Err(error) => return Err(error).context(KEY),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("the server's threads cannot be started")?;
    // Before the model is loaded, which takes its time.
    let address = (args.host, args.port);
    let listener = runtime
        .block_on(TcpListener::bind(address))
        .with_context(|| format!("cannot listen on {} port {}", args.host, args.port))?;
    if key.is_none() && !args.host.is_loopback() {
        say(format_args!(
            "there is no API key: whoever can reach {} may use this server; {KEY} sets one",
            args.host
        ));
    }
    let (app, loaded) = load(&args, key)?;
    say(loaded);
    runtime.block_on(async {
        let signals = server::signals()?;
        say(format_args!(
            "listening on http://{}",
            listener.local_addr()?
        ));
        server::serve(listener, app, signals, args.limits.grace).await;
        Ok::<_, anyhow::Error>(())
    })?;
    // Connections that are left have had their time.
    runtime.shutdown_background();
    Ok(())
}
