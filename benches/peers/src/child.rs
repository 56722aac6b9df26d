//! The other end of [`serve`](crate::serve).

use crate::peer::Peer;
use crate::serve::{Reply, Request};
use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A side's process; it ends when this is dropped.
pub struct Side {
    peer: Peer,
    process: Child,
    requests: Option<ChildStdin>,
    replies: BufReader<ChildStdout>,
}

impl Side {
    pub fn start(peer: Peer, model: &Path, threads: u32) -> Result<Self> {
        let name = match peer {
            Peer::Fused => "fused",
            Peer::LlamaFlash => "llama-flash",
            Peer::LlamaPlain => "llama-plain",
        };
        let mut process = Command::new(std::env::current_exe()?)
            .args(["serve", "--peer", name, "--threads", &threads.to_string()])
            .arg("--model")
            .arg(model)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let requests = process.stdin.take();
        let replies = process.stdout.take().context("no pipe from the process")?;
        Ok(Self {
            peer,
            process,
            requests,
            replies: BufReader::new(replies),
        })
    }

    pub fn ask(&mut self, request: &Request) -> Result<Reply> {
        let pipe = self.requests.as_mut().context("no pipe to the process")?;
        let mut line = serde_json::to_string(request)?;
        line.push('\n');
        pipe.write_all(line.as_bytes())?;
        let mut reply = String::new();
        self.replies.read_line(&mut reply)?;
        ensure!(
            !reply.is_empty(),
            "{} ended early; what it said stands above",
            self.peer.name()
        );
        Ok(serde_json::from_str(&reply)?)
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        // It ends when there is nothing more to read.
        self.requests = None;
        if let Err(error) = self.process.wait() {
            eprintln!("{}: {error}", self.peer.name());
        }
    }
}
