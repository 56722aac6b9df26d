//! The engine on a thread of its own. It is synchronous, and on CUDA bound to the thread that made it: requests come
//! in by one channel, tokens go out by one channel for each request. A task hands them on there, so that the engine's
//! thread wakes the server's threads once for a step and not once for a token.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use candle_fused::serving::{
    Constraint, Engine, FinishReason, Output, Request, RequestId, Stats, TokenLogprobs,
};
use common::report;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot, watch};

use crate::metrics::Metrics;

/// Steps that may fail one behind the other before the requests under way are given up.
const FAILURES: usize = 3;

/// What a step has brought a request. A channel that closes before an end says that the engine could not go on.
#[derive(Clone, Debug, PartialEq)]
pub struct Drawn {
    /// The token, if one was drawn.
    pub token: Option<u32>,
    /// Its log-probabilities, if the request asks for them.
    pub logprobs: Option<TokenLogprobs>,
    /// Why it was the last, if it was.
    pub finish: Option<FinishReason>,
}

/// Tokens of a request. Dropping it cancels the request and frees its pages.
pub type Tokens = mpsc::UnboundedReceiver<Drawn>;

/// Why a request was not taken.
#[derive(Debug)]
pub enum Refused {
    /// The engine says what is wrong with it.
    Invalid(String),
    /// There is no engine any more.
    Stopped,
}

/// What a step has brought, and whom.
type Brought = Vec<(mpsc::UnboundedSender<Drawn>, Drawn)>;

enum Command {
    Submit(Box<Submission>),
    Stop,
}

struct Submission {
    request: Request,
    constraint: Option<Box<dyn Constraint>>,
    arrived: Instant,
    tokens: mpsc::UnboundedSender<Drawn>,
    permit: OwnedSemaphorePermit,
    taken: oneshot::Sender<Result<(), Refused>>,
}

/// The engine's thread, from outside.
pub struct Worker {
    commands: Sender<Command>,
    room: usize,
    vocab_size: usize,
    /// Closed by the thread's end.
    alive: watch::Receiver<()>,
}

impl Worker {
    /// Starts the thread, on which `make` makes the engine, with pages of `page` tokens.
    ///
    /// # Errors
    /// If `make` fails, the thread cannot be started, or this is not called within a Tokio runtime.
    pub fn start(
        make: impl FnOnce() -> Result<Engine> + Send + 'static,
        page: usize,
        metrics: Arc<Metrics>,
    ) -> Result<Self> {
        let runtime = Handle::try_current().context("there is no runtime for the server")?;
        let (commands, received) = channel();
        let (steps, brought) = mpsc::unbounded_channel();
        let (made, ready) = channel();
        let (living, alive) = watch::channel(());
        let run = move || {
            let _living = living;
            let engine = match make() {
                Ok(engine) => engine,
                Err(error) => {
                    let _ = made.send(Err(error));
                    return;
                }
            };
            let room = engine.positions().min(engine.stats().pages * page);
            let _ = made.send(Ok((room, engine.vocab_size())));
            let state = Loop {
                engine,
                metrics,
                live: HashMap::new(),
                steps,
                stats: Stats::default(),
                failures: 0,
            };
            state.run(&received);
        };
        std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(run)
            .context("the engine's thread cannot be started")?;
        let (room, vocab_size) = ready
            .recv()
            .map_err(|_| anyhow!("the engine's thread has ended"))??;
        runtime.spawn(hand_on(brought));
        Ok(Self {
            commands,
            room,
            vocab_size,
            alive,
        })
    }

    /// Token ids are below this.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Tokens of a request at most, prompt included.
    pub fn room(&self) -> usize {
        self.room
    }

    /// Whether the engine runs.
    pub fn is_alive(&self) -> bool {
        self.alive.has_changed().is_ok()
    }

    /// Ready when the engine runs no more.
    pub async fn ended(&self) {
        // Nothing is ever sent: the error is the end.
        let _ = self.alive.clone().changed().await;
    }

    /// Hands a request in, with what its tokens are held to; `permit` is kept until it has ended.
    ///
    /// # Errors
    /// If the engine refuses it or has stopped.
    pub async fn submit(
        &self,
        (request, constraint): (Request, Option<Box<dyn Constraint>>),
        arrived: Instant,
        permit: OwnedSemaphorePermit,
    ) -> Result<Tokens, Refused> {
        let (tokens, drawn) = mpsc::unbounded_channel();
        let (taken, answer) = oneshot::channel();
        let submission = Submission {
            request,
            constraint,
            arrived,
            tokens,
            permit,
            taken,
        };
        let command = Command::Submit(Box::new(submission));
        self.commands.send(command).map_err(|_| Refused::Stopped)?;
        answer.await.map_err(|_| Refused::Stopped)??;
        Ok(drawn)
    }

    /// Ends all requests and the thread; waits for neither.
    pub fn stop(&self) {
        let _ = self.commands.send(Command::Stop);
    }
}

/// Hands on what steps bring, until the engine's thread ends.
async fn hand_on(mut steps: mpsc::UnboundedReceiver<Brought>) {
    while let Some(brought) = steps.recv().await {
        for (tokens, drawn) in brought {
            // Of a request that is left the engine's thread hears by the same channel's end.
            let _ = tokens.send(drawn);
        }
    }
}

/// A request that is under way.
struct Live {
    tokens: mpsc::UnboundedSender<Drawn>,
    arrived: Instant,
    /// When its last token came.
    last: Option<Instant>,
    _permit: OwnedSemaphorePermit,
}

struct Loop {
    engine: Engine,
    metrics: Arc<Metrics>,
    live: HashMap<RequestId, Live>,
    /// To [`hand_on`].
    steps: mpsc::UnboundedSender<Brought>,
    /// What the metrics know.
    stats: Stats,
    failures: usize,
}

impl Loop {
    fn run(mut self, commands: &Receiver<Command>) {
        loop {
            self.report();
            if self.engine.is_idle() {
                match commands.recv() {
                    Ok(Command::Submit(submission)) => self.submit(*submission),
                    Ok(Command::Stop) | Err(_) => return,
                }
            }
            while let Ok(command) = commands.try_recv() {
                match command {
                    Command::Submit(submission) => self.submit(*submission),
                    Command::Stop => return,
                }
            }
            self.drop_left();
            if !self.engine.is_idle() {
                self.step();
            }
        }
    }

    fn submit(&mut self, submission: Submission) {
        let Submission {
            request,
            constraint,
            arrived,
            tokens,
            permit,
            taken,
        } = submission;
        let submitted = match constraint {
            Some(constraint) => self.engine.submit_constrained(request, constraint),
            None => self.engine.submit(request),
        };
        let answer = match submitted {
            Ok(id) => {
                let live = Live {
                    tokens,
                    arrived,
                    last: None,
                    _permit: permit,
                };
                self.live.insert(id, live);
                Ok(())
            }
            Err(error) => Err(Refused::Invalid(report::one_line(&error.into()))),
        };
        // Who asks no more has dropped the other end of `tokens` as well.
        let _ = taken.send(answer);
    }

    /// Cancels requests whose receivers are gone.
    fn drop_left(&mut self) {
        let engine = &mut self.engine;
        self.live.retain(|id, live| {
            let left = live.tokens.is_closed();
            if left {
                engine.cancel(*id);
            }
            !left
        });
    }

    fn step(&mut self) {
        let begun = Instant::now();
        match self.engine.step() {
            Ok(outputs) => {
                self.failures = 0;
                let now = Instant::now();
                self.metrics.step(now - begun);
                let all = outputs.into_iter();
                let brought: Brought = all.filter_map(|o| self.bring(o, now)).collect();
                if !brought.is_empty() {
                    // The task ends with the runtime only.
                    let _ = self.steps.send(brought);
                }
            }
            Err(error) => {
                report::say(format_args!(
                    "a step failed: {}",
                    report::one_line(&error.into())
                ));
                self.failures += 1;
                if self.failures == FAILURES {
                    self.failures = 0;
                    for (id, _) in self.live.drain() {
                        self.engine.cancel(id);
                    }
                }
            }
        }
    }

    /// Whom an output is for; nobody if the request is gone.
    fn bring(
        &mut self,
        output: Output,
        now: Instant,
    ) -> Option<(mpsc::UnboundedSender<Drawn>, Drawn)> {
        let Output {
            id,
            token,
            logprobs,
            finish,
        } = output;
        let live = self.live.get_mut(&id)?;
        if token.is_some() {
            match live.last {
                None => self.metrics.first_token(now - live.arrived),
                Some(last) => self.metrics.next_token(now - last),
            }
            live.last = Some(now);
        }
        let drawn = Drawn {
            token,
            logprobs,
            finish,
        };
        let tokens = match finish {
            Some(_) => self.live.remove(&id)?.tokens,
            None => live.tokens.clone(),
        };
        Some((tokens, drawn))
    }

    fn report(&mut self) {
        let now = self.engine.stats();
        self.metrics.busy(&now, &self.stats);
        self.stats = now;
    }
}
