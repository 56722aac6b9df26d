//! What is asked of the sides, in which order.

use crate::args::{FAR, Measure, NEAR, PREFILL};
use crate::child::Side;
use crate::ik::{Bench, Setting};
use crate::peer::Peer;
use crate::serve::Request;
use anyhow::{Result, ensure};
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

/// English text of some 2,500 tokens that does not repeat itself.
pub const TEXT: &str = include_str!("../../../LICENSE-APACHE");

/// A short prompt for the time to the first token.
const SHORT: &str = "The quick brown fox jumps over the lazy dog near the river bank";

pub const POSITIONS: usize = 2048;

/// The tokens that a side's sequences hold.
const HELD: [usize; 3] = [NEAR, PREFILL, FAR];

/// What one file gave.
#[derive(Serialize)]
pub struct Results {
    pub model: String,
    pub bytes: u64,
    pub measures: Vec<Series>,
    /// The greedy tokens of each side behind position 512.
    pub tokens: Vec<(Peer, Vec<u32>)>,
}

/// A measure's values, one a round.
#[derive(Serialize)]
pub struct Series {
    pub measure: Measure,
    pub values: Vec<(Peer, Vec<f64>)>,
    /// Of ik_llama.cpp, if it is measured: none of what its program does not tell.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ik: Vec<(Setting, Vec<f64>)>,
}

/// What to do with one file.
pub struct Plan<'a> {
    pub model: &'a Path,
    pub threads: u32,
    pub rounds: usize,
    pub steps: usize,
    pub wanted: &'a [Measure],
    /// A built `llama-bench` of ik_llama.cpp.
    pub ik: Option<&'a Path>,
}

impl Plan<'_> {
    pub fn measure(&self) -> Result<Results> {
        let name = self.model.file_name().unwrap_or_default();
        let mut results = Results {
            model: name.to_string_lossy().into_owned(),
            bytes: std::fs::metadata(self.model)?.len(),
            measures: self
                .wanted
                .iter()
                .map(|measure| Series {
                    measure: *measure,
                    values: Peer::ALL.map(|peer| (peer, Vec::new())).to_vec(),
                    ik: match self.ik {
                        Some(_) => Setting::ALL.map(|setting| (setting, Vec::new())).to_vec(),
                        None => Vec::new(),
                    },
                })
                .collect(),
            tokens: Vec::new(),
        };
        let bench = self.ik.map(|program| Bench {
            program,
            model: self.model,
            threads: self.threads,
            steps: self.steps,
        });
        // Once for the page cache, too.
        let mut sides = self.start(&mut results)?;
        for round in 0..self.rounds {
            for series in &mut results.measures {
                // The same each time.
                if series.measure == Measure::PeakMemory && round > 0 {
                    continue;
                }
                let all = sides.len() + series.ik.len();
                for turn in 0..all {
                    // Nobody is always first.
                    let index = (round + turn) % all;
                    if let Some(side) = sides.get_mut(index) {
                        let value = self.once(series.measure, index, side)?;
                        series.values[index].1.push(value);
                    } else if let Some(bench) = &bench {
                        let (setting, values) = &mut series.ik[index - sides.len()];
                        values.extend(bench.once(*setting, series.measure)?);
                    }
                }
            }
            eprintln!("{}: round {} of {}", results.model, round + 1, self.rounds);
        }
        Ok(results)
    }

    /// A process for each side, with a sequence of 512 tokens and one of 2000.
    fn start(&self, results: &mut Results) -> Result<Vec<Side>> {
        let mut sides = Vec::new();
        let mut prompt = Vec::new();
        for peer in Peer::ALL {
            let mut side = Side::start(peer, self.model, self.threads)?;
            let text = TEXT.to_owned();
            let tokens = side.ask(&Request::Load { text })?.tokens;
            ensure!(
                tokens.len() > FAR,
                "the text has {} tokens, more than {FAR} are needed",
                tokens.len()
            );
            if prompt.is_empty() {
                prompt.clone_from(&tokens);
            }
            ensure!(
                tokens == prompt,
                "the two tokenizers split the text differently"
            );
            for (sequence, held) in HELD.into_iter().enumerate() {
                let positions = held + POSITIONS - FAR;
                side.ask(&Request::Open { positions })?;
                if held < FAR || self.wanted.contains(&Measure::Decode2000) {
                    side.ask(&read(sequence, held))?;
                }
            }
            let tokens = side.ask(&self.decode(1, PREFILL))?.tokens;
            results.tokens.push((peer, tokens));
            sides.push(side);
        }
        Ok(sides)
    }

    /// Behind `held` tokens, of which the last is read again to wake the threads.
    fn decode(&self, sequence: usize, held: usize) -> Request {
        Request::Decode {
            sequence,
            position: held - 1,
            steps: self.steps,
        }
    }

    /// One value of one side: tokens a second, seconds or bytes.
    fn once(&self, measure: Measure, index: usize, side: &mut Side) -> Result<f64> {
        let decode = |side: &mut Side, sequence| -> Result<f64> {
            let reply = side.ask(&self.decode(sequence, HELD[sequence]))?;
            Ok(self.steps as f64 / reply.seconds)
        };
        Ok(match measure {
            Measure::Decode64 => decode(side, 0)?,
            Measure::Decode512 => decode(side, 1)?,
            Measure::Decode2000 => decode(side, 2)?,
            Measure::Prefill512 => PREFILL as f64 / side.ask(&read(1, PREFILL))?.seconds,
            Measure::FirstToken => {
                let begun = Instant::now();
                self.fresh(index, SHORT)?;
                begun.elapsed().as_secs_f64()
            }
            Measure::PeakMemory => {
                let mut side = self.fresh(index, TEXT)?;
                side.ask(&read(0, PREFILL))?;
                side.ask(&self.decode(0, PREFILL))?;
                side.ask(&Request::Peak)?.bytes as f64
            }
        })
    }

    /// A new process that has read the first tokens of `text`.
    fn fresh(&self, index: usize, text: &str) -> Result<Side> {
        let mut side = Side::start(Peer::ALL[index], self.model, self.threads)?;
        let text = text.to_owned();
        let tokens = side.ask(&Request::Load { text })?.tokens.len();
        let positions = POSITIONS;
        side.ask(&Request::Open { positions })?;
        side.ask(&read(0, tokens.min(64)))?;
        Ok(side)
    }
}

fn read(sequence: usize, to: usize) -> Request {
    Request::Read {
        sequence,
        from: 0,
        to,
    }
}

/// Threads that keep cores busy until this is dropped.
pub struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    pub fn start(threads: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let spin = |stop: Arc<AtomicBool>| {
            move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }
        };
        Self {
            threads: (0..threads)
                .map(|_| thread::spawn(spin(stop.clone())))
                .collect(),
            stop,
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                eprintln!("a thread of --busy panicked");
            }
        }
    }
}
