//! This program once more, as what is measured.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

use crate::Args;
use crate::round::Rates;

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Serves HTTP.
    Server,
    /// Runs requests without a server.
    Engine,
}

/// A process that is killed where it is no longer wanted.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // One that has ended already cannot be killed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn command(args: &Args, role: &str) -> Result<Command> {
    let this = std::env::current_exe().context("cannot find this program")?;
    let mut command = Command::new(this);
    for (flag, value) in [
        ("--clients", args.clients),
        ("--prompt", args.prompt),
        ("--tokens", args.tokens),
        ("--rounds", args.rounds),
    ] {
        command.args([flag, &value.to_string()]);
    }
    command.args(["--be", role, "--"]).args(&args.server);
    Ok(command)
}

/// The engine alone.
pub fn engine(args: &Args) -> Result<Rates> {
    let output = command(args, "engine")?.stderr(Stdio::inherit()).output();
    let output = output.context("cannot start this program again")?;
    ensure!(output.status.success(), "the engine's process has failed");
    serde_json::from_slice(&output.stdout).context("the engine's process says no rates")
}

/// The server.
pub struct Server {
    url: String,
    child: Killed,
}

impl Server {
    /// One that listens on a port that was free.
    pub fn start(args: &Args) -> Result<Self> {
        let mut command = command(args, "server")?;
        command.args(["--port", "0"]);
        let child = command.stderr(Stdio::piped()).spawn();
        let mut child = Killed(child.context("cannot start this program again")?);
        let said = child.0.stderr.take().context("the server has no output")?;
        let mut lines = BufReader::new(said).lines().map_while(Result::ok);
        let url = lines.find_map(|line| {
            let url = line.strip_prefix("listening on ").map(str::to_owned);
            if url.is_none() {
                eprintln!("{line}");
            }
            url
        });
        std::thread::spawn(move || lines.for_each(|line| eprintln!("{line}")));
        Ok(Self {
            url: url.context("the server did not come up")?,
            child,
        })
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// Processor time of the threads that serve HTTP so far, in seconds; none where the system does not say.
    pub fn seconds_of_http(&self) -> Option<f64> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.0.id())).ok()?;
        let mut all = Duration::ZERO;
        for task in tasks.flatten() {
            let read = |file: &str| std::fs::read_to_string(task.path().join(file)).ok();
            // A thread may end meanwhile.
            let Some((name, times)) = read("comm").zip(read("schedstat")) else {
                continue;
            };
            if name.starts_with("tokio") {
                let nanoseconds = times.split(' ').next()?.parse().ok()?;
                all += Duration::from_nanos(nanoseconds);
            }
        }
        Some(all.as_secs_f64())
    }
}
