//! One side in a process of its own: requests come as lines of JSON, and each is answered by one.

use crate::model::{Model, Sequence};
use crate::peer::Peer;
use crate::{fused, llama};
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::time::Instant;

/// Which side, and what it loads.
#[derive(clap::Args)]
pub struct Side {
    #[arg(long, value_enum)]
    pub peer: Peer,
    #[arg(long)]
    pub model: PathBuf,
    #[arg(long)]
    pub threads: u32,
}

/// What the other process asks for.
#[derive(Serialize, Deserialize)]
pub enum Request {
    /// Load the model and split `text` into tokens, which everything else is about.
    Load { text: String },
    /// Make room for a sequence; they are numbered as they come.
    Open { positions: usize },
    /// Read tokens `from..to` of the text into a sequence, in place of what it held from there on.
    Read {
        sequence: usize,
        from: usize,
        to: usize,
    },
    /// Go back to behind `position + 1` tokens of the text and generate `steps` more, greedily.
    Decode {
        sequence: usize,
        position: usize,
        steps: usize,
    },
    /// The most memory that this process has held.
    Peak,
}

/// What is answered.
#[derive(Serialize, Deserialize, Default)]
pub struct Reply {
    pub seconds: f64,
    pub tokens: Vec<u32>,
    pub bytes: u64,
}

impl Side {
    pub fn load(&self) -> Result<Box<dyn Model>> {
        let threads = self.threads;
        match self.peer {
            Peer::Fused => fused::load(&self.model, threads),
            Peer::LlamaFlash => llama::load(&self.model, threads, true),
            Peer::LlamaPlain => llama::load(&self.model, threads, false),
        }
        .with_context(|| self.model.display().to_string())
    }

    pub fn serve(&self) -> Result<()> {
        let mut requests = std::io::stdin().lock().lines();
        let mut next = || -> Result<Option<Request>> {
            let Some(line) = requests.next() else {
                return Ok(None);
            };
            Ok(Some(serde_json::from_str(&line?)?))
        };
        let Some(Request::Load { text }) = next()? else {
            bail!("serve: the first request is to load the model");
        };
        let begun = Instant::now();
        let model = self.load()?;
        let text = model.tokens(&text)?;
        answer(&Reply {
            seconds: begun.elapsed().as_secs_f64(),
            tokens: text.clone(),
            bytes: 0,
        })?;
        let mut sequences = Vec::new();
        while let Some(request) = next()? {
            answer(&fulfil(&*model, &text, &mut sequences, &request)?)?;
        }
        Ok(())
    }
}

fn answer(reply: &Reply) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, reply)?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

fn fulfil<'a>(
    model: &'a dyn Model,
    text: &[u32],
    sequences: &mut Vec<Box<dyn Sequence + 'a>>,
    request: &Request,
) -> Result<Reply> {
    let mut reply = Reply::default();
    match *request {
        Request::Load { .. } => bail!("serve: the model is loaded already"),
        Request::Open { positions } => sequences.push(model.open(positions)?),
        Request::Read { sequence, from, to } => {
            let begun = Instant::now();
            reply
                .tokens
                .push(sequences[sequence].read(from, &text[from..to])?);
            reply.seconds = begun.elapsed().as_secs_f64();
        }
        Request::Decode {
            sequence,
            position,
            steps,
        } => {
            let sequence = &mut sequences[sequence];
            // The step before the first that is timed wakes the threads.
            let mut token = sequence.read(position, &text[position..=position])?;
            let begun = Instant::now();
            for step in 1..=steps {
                reply.tokens.push(token);
                token = sequence.read(position + step, &[token])?;
            }
            reply.seconds = begun.elapsed().as_secs_f64();
        }
        Request::Peak => reply.bytes = peak()?,
    }
    Ok(reply)
}

/// The most resident memory of this process so far, files that are mapped into it included.
fn peak() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let kilobytes = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .and_then(|line| line.trim().strip_suffix("kB"))
        .context("/proc/self/status has no VmHWM")?;
    Ok(1024 * kilobytes.trim().parse::<u64>()?)
}
