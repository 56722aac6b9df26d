//! /v1/completions and /v1/chat/completions.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, FromRequest, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use candle_fused::serving;
use common::report::one_line;
use futures_util::stream;
use serde_json::Value;
use tokio::sync::mpsc;

use crate::answer::{End, Job, Update, Writer};
use crate::app::App;
use crate::error::{ApiError, json_response};
use crate::logprobs::{Chosen, Listing};
use crate::request::{Body, Prompt, Usage};
use crate::response::{Answer, Counts, Head, Kind};
use crate::vocabulary::Guide;
use crate::worker::Refused;

/// Tokens of a completion where nothing is said, as OpenAI has it.
const COMPLETION_TOKENS: usize = 16;

/// News that may wait for a client that reads slowly.
const WAITING: usize = 64;

/// Continues a text.
pub async fn completions(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    answer(app, Kind::Text, request).await
}

/// Answers in a conversation.
pub async fn chat_completions(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response, ApiError> {
    answer(app, Kind::Chat, request).await
}

async fn answer(app: Arc<App>, kind: Kind, request: Request) -> Result<Response, ApiError> {
    let arrived = Instant::now();
    let bytes = read(&app, request).await?;
    let body = Body::read(&bytes)?;
    drop(bytes);
    if let Some(model) = &body.model
        && *model != app.settings.name
    {
        return Err(ApiError::unknown_model(model, &app.settings.name));
    }
    let streaming = body.streaming()?;
    // Templates and tokenizers take their time on long texts.
    let preparing = Arc::clone(&app);
    let prepared = tokio::task::spawn_blocking(move || prepare(&preparing, kind, &body));
    let Prepared {
        jobs,
        prompt,
        listing,
    } = prepared
        .await
        .map_err(|_| ApiError::internal("the prompt could not be prepared"))??;
    let call = Call {
        listings: vec![listing; jobs.len()],
        head: Head::new(kind, &app.settings.name),
        prompt,
        answers: jobs.len(),
        updates: submit(&app, jobs, arrived).await?,
    };
    match streaming {
        Some(usage) => Ok(call.stream(usage)),
        None => call.whole().await,
    }
}

async fn read(app: &App, mut request: Request) -> Result<Bytes, ApiError> {
    if !is_json(request.headers()) {
        return Err(ApiError::not_json());
    }
    let limit = app.settings.max_body;
    DefaultBodyLimit::max(limit).apply(&mut request);
    let reading = Bytes::from_request(request, &());
    match tokio::time::timeout(app.settings.timeout, reading).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(error)) if error.status() == StatusCode::PAYLOAD_TOO_LARGE => {
            Err(ApiError::too_large(limit))
        }
        Ok(Err(error)) => Err(ApiError::invalid(
            "",
            format!("the body cannot be read: {}", error.body_text()),
        )),
        Err(_) => Err(ApiError::slow_body()),
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let kind = headers
        .get(header::CONTENT_TYPE)
        .and_then(|kind| kind.to_str().ok());
    let kind = kind.and_then(|kind| kind.split(';').next());
    kind.is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json"))
}

/// A call that is understood.
struct Prepared {
    /// What the engine is asked for.
    jobs: Vec<Job>,
    /// The tokens of the prompts.
    prompt: usize,
    /// How log-probabilities are written, if they are wanted.
    listing: Option<Listing>,
}

fn prepare(app: &App, kind: Kind, body: &Body) -> Result<Prepared, ApiError> {
    let (answers, sampling, stops) = (body.answers()?, body.sampling()?, body.stops()?);
    let logprobs = body.logprobs(kind)?;
    let listing = match logprobs {
        Some(_) => Some(Listing::new(kind, app.vocabulary("logprobs")?)),
        None => None,
    };
    let guide = guide(app, body)?;
    let stop = body.stop_ids(app.text.end_ids());
    let (prompts, default) = match kind {
        Kind::Text => (texts(app, body)?, Some(COMPLETION_TOKENS)),
        Kind::Chat => (vec![conversation(app, body)?], None),
    };
    let (asked, most) = (
        prompts.len() * answers,
        app.settings.sequences + app.settings.max_queue,
    );
    if asked > most {
        let param = if prompts.len() > most { "prompt" } else { "n" };
        let message = format!("{asked} answers are asked for, expected at most {most} in a call");
        return Err(ApiError::invalid(param, message));
    }
    let vocab_size = app.worker.vocab_size();
    prompts
        .iter()
        .try_for_each(|ids| check_ids("prompt", ids, vocab_size))?;
    check_ids("stop_token_ids", &stop, vocab_size)?;
    let tokens = prompts.iter().map(Vec::len).sum();
    let mut jobs = Vec::with_capacity(asked);
    for prompt in prompts {
        let max_tokens = body.max_tokens(prompt.len(), app.worker.room(), default)?;
        for i in 0..answers {
            let mut sampling = sampling.clone();
            sampling.seed = sampling.seed.wrapping_add(i as u64);
            jobs.push(Job {
                request: serving::Request {
                    max_tokens,
                    stop: stop.clone(),
                    sampling,
                    logprobs,
                    ..serving::Request::new(prompt.clone())
                },
                constraint: guide.clone().map(|guide| Box::new(guide) as Box<_>),
                stops: stops.clone(),
            });
        }
    }
    Ok(Prepared {
        jobs,
        prompt: tokens,
        listing,
    })
}

/// Fails if an id is not below `vocab_size`.
fn check_ids(param: &str, ids: &[u32], vocab_size: usize) -> Result<(), ApiError> {
    match ids.iter().find(|id| **id as usize >= vocab_size) {
        Some(id) => Err(ApiError::invalid(
            param,
            format!("{param}: token {id} is out of the vocabulary of {vocab_size}"),
        )),
        None => Ok(()),
    }
}

/// What the answers are held to.
fn guide(app: &App, body: &Body) -> Result<Option<Guide>, ApiError> {
    let Some(schema) = body.schema()? else {
        return Ok(None);
    };
    let param = "response_format";
    let guide = app.vocabulary(param)?.json(&schema).map_err(|error| {
        let why = one_line(&error);
        ApiError::invalid(param, format!("{param}: the schema cannot be used: {why}"))
    })?;
    Ok(Some(guide))
}

fn texts(app: &App, body: &Body) -> Result<Vec<Vec<u32>>, ApiError> {
    let invalid = |what: String| ApiError::invalid("prompt", what);
    let encode = |text: &String| {
        let tokens = app.text.encode_prompt(text);
        tokens.map_err(|error| match text.is_empty() {
            true => invalid("prompt is empty, expected some text".to_owned()),
            false => invalid(format!("prompt: {}", one_line(&error))),
        })
    };
    let prompts = match &body.prompt {
        Some(Prompt::Text(text)) => vec![encode(text)?],
        Some(Prompt::Texts(texts)) => texts.iter().map(encode).collect::<Result<_, _>>()?,
        Some(Prompt::Tokens(tokens)) => vec![tokens.clone()],
        Some(Prompt::TokenLists(lists)) => lists.clone(),
        None => return Err(invalid("prompt is missing, expected some text".to_owned())),
    };
    if prompts.is_empty() || prompts.iter().any(Vec::is_empty) {
        return Err(invalid("prompt is empty, expected some text".to_owned()));
    }
    Ok(prompts)
}

fn conversation(app: &App, body: &Body) -> Result<Vec<u32>, ApiError> {
    let invalid = |what: String| ApiError::invalid("messages", what);
    let messages = body.conversation()?;
    let Some(template) = &app.template else {
        let message = "this model has no chat template; use /v1/completions";
        return Err(invalid(message.to_owned()));
    };
    let written = template.render(&messages, true);
    let tokens = written.and_then(|text| app.text.encode_chat(&text));
    tokens.map_err(|error| invalid(format!("messages: {}", one_line(&error))))
}

/// Hands jobs to the engine. Those that are in already are cancelled where one is refused.
async fn submit(
    app: &Arc<App>,
    jobs: Vec<Job>,
    arrived: Instant,
) -> Result<mpsc::Receiver<Update>, ApiError> {
    let places = Arc::clone(&app.places);
    let mut permits = u32::try_from(jobs.len())
        .ok()
        .and_then(|count| places.try_acquire_many_owned(count).ok())
        .ok_or_else(|| ApiError::busy(app.settings.max_queue))?;
    let (sender, updates) = mpsc::channel(WAITING);
    for (index, job) in jobs.into_iter().enumerate() {
        let permit = permits.split(1).ok_or_else(ApiError::stopped)?;
        let tokens = app
            .worker
            .submit((job.request, job.constraint), arrived, permit)
            .await;
        let tokens = tokens.map_err(|refused| match refused {
            Refused::Invalid(what) => ApiError::invalid("", what),
            Refused::Stopped => ApiError::stopped(),
        })?;
        let writer = Writer {
            index,
            text: Arc::clone(&app.text),
            metrics: Arc::clone(&app.metrics),
            deadline: arrived + app.settings.timeout,
            updates: sender.clone(),
        };
        tokio::spawn(writer.write(tokens, job.stops));
    }
    Ok(updates)
}

/// A call that is being answered. Dropping it cancels its requests.
struct Call {
    head: Head,
    prompt: usize,
    answers: usize,
    /// How log-probabilities are written, of each answer.
    listings: Vec<Option<Listing>>,
    updates: mpsc::Receiver<Update>,
}

impl Call {
    /// The field `logprobs` for these tokens of an answer.
    fn logprobs(&mut self, index: usize, chosen: &[Chosen]) -> Value {
        let listing = self.listings[index].as_mut();
        listing.map_or(Value::Null, |listing| listing.write(chosen))
    }

    /// The answers once they are whole.
    async fn whole(mut self) -> Result<Response, ApiError> {
        let mut texts = vec![String::new(); self.answers];
        let mut chosen = vec![Vec::new(); self.answers];
        let mut ends = vec![None; self.answers];
        let mut counts = Counts {
            prompt: self.prompt,
            answers: 0,
        };
        while let Some(update) = self.updates.recv().await {
            texts[update.index].push_str(&update.text);
            chosen[update.index].extend(update.chosen);
            if let Some(end) = update.end {
                ends[update.index] = Some(end?);
                counts.answers += update.tokens;
            }
        }
        let ends: Option<Vec<End>> = ends.into_iter().collect();
        let ends = ends.ok_or_else(ApiError::timeout)?;
        let answers = texts.into_iter().zip(ends).enumerate();
        let answers = answers.map(|(index, (text, end))| Answer {
            text,
            logprobs: self.logprobs(index, &chosen[index]),
            end,
        });
        let answers = answers.collect();
        Ok(json_response(
            StatusCode::OK,
            &self.head.whole(answers, counts),
        ))
    }

    /// The answers as they come.
    fn stream(self, usage: Usage) -> Response {
        let openings = (0..self.answers).filter_map(|index| self.head.opening(index));
        let events = Events {
            ready: openings.map(data).collect(),
            counts: Counts {
                prompt: self.prompt,
                answers: 0,
            },
            open: self.answers,
            over: false,
            usage: usage.0,
            call: self,
        };
        let next = async |mut events: Events| {
            let event = events.next().await?;
            Some((Ok::<_, Infallible>(event), events))
        };
        let headers = [(header::CACHE_CONTROL, "no-cache")];
        let body = Sse::new(stream::unfold(events, next)).keep_alive(KeepAlive::default());
        (headers, body).into_response()
    }
}

/// The events of a stream.
struct Events {
    call: Call,
    ready: VecDeque<Event>,
    counts: Counts,
    /// Answers that have not ended.
    open: usize,
    over: bool,
    usage: bool,
}

impl Events {
    async fn next(&mut self) -> Option<Event> {
        while self.ready.is_empty() && !self.over {
            match self.call.updates.recv().await {
                Some(update) => self.take(update),
                // An answer ran out of time while nobody read.
                None => self.fail(&ApiError::timeout()),
            }
        }
        self.ready.pop_front()
    }

    fn take(&mut self, update: Update) {
        let Update {
            index,
            text,
            chosen,
            tokens,
            end,
        } = update;
        let end = match end {
            Some(Err(error)) => return self.fail(&error),
            Some(Ok(end)) => Some(end),
            None => None,
        };
        let mut logprobs = match text.is_empty() && chosen.is_empty() {
            true => Value::Null,
            false => self.call.logprobs(index, &chosen),
        };
        let head = &self.call.head;
        // Clients look for text and for an end in events of their own.
        if !text.is_empty() {
            let piece = head.piece(index, &text, &logprobs.take(), None);
            self.ready.push_back(Event::default().data(piece));
        }
        let Some(end) = end else { return };
        let piece = head.piece(index, "", &logprobs, Some(end));
        self.ready.push_back(Event::default().data(piece));
        self.counts.answers += tokens;
        self.open -= 1;
        if self.open == 0 {
            if self.usage {
                self.ready.push_back(data(head.usage(self.counts)));
            }
            self.end();
        }
    }

    fn fail(&mut self, error: &ApiError) {
        self.ready.push_back(data(error.json()));
        self.end();
    }

    fn end(&mut self) {
        self.ready.push_back(Event::default().data("[DONE]"));
        self.over = true;
    }
}

fn data(value: Value) -> Event {
    Event::default().data(value.to_string())
}
