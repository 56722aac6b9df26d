//! A server in this process, and what its clients do.

use std::net::SocketAddr;
use std::time::Duration;

use candle_fused_serve::args::Args;
use candle_fused_serve::load::load;
use candle_fused_serve::server;
use clap::Parser;
use futures_util::{Stream, StreamExt, stream};
use reqwest::{Client, Method, RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::model;

pub const COMPLETIONS: &str = "/v1/completions";
pub const CHAT: &str = "/v1/chat/completions";

/// The model's name in the API.
pub const NAME: &str = "tiny";

/// A server that runs until it is dropped or stopped.
pub struct Server {
    pub address: SocketAddr,
    client: Client,
    signals: mpsc::UnboundedSender<()>,
    serving: JoinHandle<()>,
    _model: TempDir,
}

impl Server {
    /// With these flags of the command line.
    pub async fn start(flags: &[&str]) -> Self {
        Self::start_with_key(flags, None).await
    }

    pub async fn start_with_key(flags: &[&str], key: Option<&str>) -> Self {
        let model = model::save();
        let folder = model.path().to_str().expect("a path in UTF-8");
        let positions = model::POSITIONS.to_string();
        let common = ["candle-fused-serve", "--cpu", "--model", folder, "--name"];
        let sizes = [NAME, "--positions", &positions, "--sequences", "2"];
        let all = common.iter().chain(&sizes).chain(flags);
        let args = Args::parse_from(all);
        let grace = args.limits.grace;
        let key = key.map(str::to_owned);
        let app = tokio::task::spawn_blocking(move || load(&args, key));
        let (app, _) = app.await.expect("no panic").expect("a server");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (signals, mut received) = mpsc::unbounded_channel();
        let received = stream::poll_fn(move |context| received.poll_recv(context));
        Self {
            address,
            client: Client::new(),
            signals,
            serving: tokio::spawn(server::serve(listener, app, received, grace)),
            _model: model,
        }
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.client
            .request(method, format!("http://{}{path}", self.address))
    }

    pub async fn get(&self, path: &str) -> Response {
        let response = self.request(Method::GET, path).send().await;
        response.expect("a response")
    }

    pub async fn post(&self, path: &str, body: &Value) -> Response {
        let request = self.request(Method::POST, path).json(body);
        request.send().await.expect("a response")
    }

    /// The body of an answer.
    pub async fn answer(&self, path: &str, body: &Value) -> Value {
        let response = self.post(path, body).await;
        let status = response.status();
        let body = response.json().await.expect("JSON");
        assert_eq!(status, StatusCode::OK, "{body}");
        body
    }

    /// The events of a stream, up to its end.
    pub async fn stream(&self, path: &str, body: &Value) -> Vec<Value> {
        let events = self.open(path, body).await;
        events.collect().await
    }

    /// The events of a stream as they come.
    pub async fn open(&self, path: &str, body: &Value) -> impl Stream<Item = Value> + use<> {
        let mut body = body.clone();
        body["stream"] = true.into();
        let response = self.post(path, &body).await;
        assert_eq!(response.status(), StatusCode::OK);
        let kind = &response.headers()["content-type"];
        assert_eq!(kind, "text/event-stream");
        events(response)
    }

    /// A long answer as it comes, begun already.
    pub async fn open_long(&self) -> impl Stream<Item = Value> + use<> {
        let mut events = Box::pin(self.open(COMPLETIONS, &long()).await);
        let first = events.next().await.expect("an event");
        assert!(first.get("error").is_none(), "{first}");
        events
    }

    /// A metric's value, by its name without the prefix and with its labels.
    pub async fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").await.text().await.expect("text");
        let name = format!("candle_fused_{name} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&name));
        line.map_or(0., |value| value.parse().expect("a number"))
    }

    /// Waits until no request runs or waits, and no page is held.
    pub async fn until_idle(&self) {
        loop {
            let used = self.metric("pages").await - self.metric("pages_free").await;
            let waiting = self.metric("requests_waiting").await;
            if used + waiting + self.metric("requests_running").await == 0. {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Asks the server to end, as a signal does.
    pub fn signal(&self) {
        self.signals.send(()).expect("a server that runs");
    }

    /// Waits for the server's end.
    pub async fn ended(&mut self) {
        (&mut self.serving).await.expect("no panic");
    }
}

/// The data of a stream's events, whose last is `[DONE]`.
pub fn events(response: Response) -> impl Stream<Item = Value> + use<> {
    let state = (response, Vec::new());
    stream::unfold(state, async |(mut response, mut read)| {
        loop {
            let end = read.windows(2).position(|two| two == b"\n\n");
            let Some(end) = end else {
                let more = response.chunk().await.expect("a stream that ends well");
                read.extend_from_slice(&more.expect("[DONE] before the end"));
                continue;
            };
            let event = String::from_utf8(read.drain(..end + 2).collect()).expect("UTF-8");
            match event.trim_end().strip_prefix("data: ") {
                Some("[DONE]") => {
                    assert_eq!(response.chunk().await.expect("an end"), None);
                    return None;
                }
                Some(data) => {
                    let data = serde_json::from_str(data).expect("JSON");
                    return Some((data, (response, read)));
                }
                // A comment, which keeps the connection alive.
                None => {}
            }
        }
    })
}

/// The call of an answer that takes longer than a test wants it to.
pub fn long() -> Value {
    json!({ "prompt": "On and on", "max_tokens": model::POSITIONS - 9, "ignore_eos": true, "temperature": 0 })
}

/// The texts of a stream, joined for each answer.
pub fn joined(events: &[Value], answers: usize) -> Vec<String> {
    let mut texts = vec![String::new(); answers];
    for choice in events
        .iter()
        .flat_map(|event| event["choices"].as_array().expect("choices"))
    {
        let index = choice["index"].as_u64().expect("an index") as usize;
        let text = match choice.get("delta") {
            Some(delta) => &delta["content"],
            None => &choice["text"],
        };
        texts[index].push_str(text.as_str().unwrap_or_default());
    }
    texts
}

/// Where character `n` of a text begins.
pub fn start_of(text: &str, n: usize) -> usize {
    let (at, _) = text.char_indices().nth(n).expect("a text of that length");
    at
}

/// The text of an answer.
pub fn text(body: &Value, index: usize) -> &str {
    let choice = &body["choices"][index];
    assert_eq!(choice["index"], index);
    let text = match choice.get("message") {
        Some(message) => &message["content"],
        None => &choice["text"],
    };
    text.as_str().expect("a text")
}
