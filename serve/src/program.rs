//! What the program does once its command line is read.

use anyhow::{Context, Result};
use common::args;
use common::report::say;
use tokio::net::TcpListener;

use crate::args::{Args, KEY};
use crate::load::load;
use crate::server;

/// Serves the model that `args` name until a signal comes. Has to come before any thread starts.
///
/// # Errors
/// If the port is taken, there is no such model, or its engine cannot be made.
pub fn run(args: &Args) -> Result<()> {
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
    let (app, loaded) = {
        let _within = runtime.enter();
        load(args, key)?
    };
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
