//! The server's state, its paths, and what is checked before a call gets to one.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use common::chat::ChatTemplate;
use common::report::one_line;
use common::tokenizer::Text;
use serde_json::json;
use subtle::ConstantTimeEq;
use tokio::sync::Semaphore;

use crate::api;
use crate::error::{ApiError, json_response};
use crate::metrics::Metrics;
use crate::response;
use crate::vocabulary::Vocabulary;
use crate::worker::Worker;

/// What the server is set to.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The model's name in the API.
    pub name: String,
    /// What clients have to send as bearer token, if anything.
    pub key: Option<String>,
    /// Requests that run together at most, as the engine has it.
    pub sequences: usize,
    /// Requests that may wait beside these.
    pub max_queue: usize,
    /// Bytes of a body at most.
    pub max_body: usize,
    /// From a call's arrival to the end of its answer.
    pub timeout: Duration,
    /// Whether only calls to localhost or to an address are answered: a web page elsewhere can reach a server on this
    /// machine by a name that it lets point here (DNS rebinding).
    pub local_only: bool,
}

/// The server.
pub struct App {
    /// What it is set to.
    pub settings: Settings,
    /// The model's tokenizer.
    pub text: Arc<Text>,
    /// What its tokens stand for, once somebody has asked, or why that cannot be told.
    vocabulary: OnceLock<Result<Arc<Vocabulary>, String>>,
    /// How the model has conversations written, if it has them.
    pub template: Option<ChatTemplate>,
    /// The engine.
    pub worker: Worker,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// A permit for each request that runs or waits.
    pub places: Arc<Semaphore>,
    /// When it was started, in seconds since 1970.
    pub created: u64,
}

impl App {
    /// A server over an engine that runs.
    ///
    /// # Errors
    /// If the model's chat template cannot be used.
    pub fn new(
        settings: Settings,
        text: Text,
        worker: Worker,
        metrics: Arc<Metrics>,
    ) -> anyhow::Result<Arc<Self>> {
        let template = match text.has_chat_template() {
            true => Some(text.chat_template()?),
            false => None,
        };
        let places = settings.sequences + settings.max_queue;
        Ok(Arc::new(Self {
            places: Arc::new(Semaphore::new(places.min(Semaphore::MAX_PERMITS))),
            settings,
            text: Arc::new(text),
            vocabulary: OnceLock::new(),
            template,
            worker,
            metrics,
            created: response::now(),
        }))
    }

    /// What the model's tokens stand for; `param` is the argument that needs it.
    ///
    /// # Errors
    /// If the model's tokenizer does not say.
    pub fn vocabulary(&self, param: &str) -> Result<Arc<Vocabulary>, ApiError> {
        let make = || match Vocabulary::new(&self.text) {
            Ok(vocabulary) => Ok(Arc::new(vocabulary)),
            Err(error) => Err(one_line(&error)),
        };
        let vocabulary = self.vocabulary.get_or_init(make).clone();
        vocabulary.map_err(|why| ApiError::unsupported(param, &why))
    }
}

/// All paths.
pub fn router(app: Arc<App>) -> Router {
    let guarded = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/completions", post(api::completions))
        .route("/v1/chat/completions", post(api::chat_completions))
        .route("/metrics", get(metrics))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&app), with_key));
    Router::new()
        .route("/", get(page))
        .route("/health", get(health))
        .merge(guarded)
        .fallback(async |request: Request| ApiError::unknown_path(request.uri().path()))
        .method_not_allowed_fallback(async |request: Request| {
            ApiError::wrong_method(request.method().as_str(), request.uri().path())
        })
        .layer(middleware::from_fn_with_state(Arc::clone(&app), counted))
        .with_state(app)
}

/// Refuses foreign hosts, and counts errors.
async fn counted(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let response = match foreign_host(&app.settings, request.headers()) {
        Some(host) => ApiError::foreign_host(&host).into_response(),
        None => next.run(request).await,
    };
    let status = response.status();
    if status.is_client_error() || status.is_server_error() {
        app.metrics.error(status.as_u16());
    }
    response
}

/// The host of a request, if it is not to be answered.
fn foreign_host(settings: &Settings, headers: &HeaderMap) -> Option<String> {
    if !settings.local_only || settings.key.is_some() {
        return None;
    }
    let host = String::from_utf8_lossy(headers.get(header::HOST)?.as_bytes()).into_owned();
    let name = match host.strip_prefix('[').and_then(|host| host.split_once(']')) {
        Some((address, _)) => address,
        None => host
            .rsplit_once(':')
            .map_or(host.as_str(), |(name, _)| name),
    };
    let name = name.to_ascii_lowercase();
    let local = name == "localhost" || name.ends_with(".localhost");
    (!local && name.parse::<IpAddr>().is_err()).then_some(host)
}

async fn with_key(
    State(app): State<Arc<App>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if let Some(key) = &app.settings.key {
        let sent = request.headers().get(header::AUTHORIZATION);
        let sent = sent.map_or(&[][..], |value| value.as_bytes());
        let (scheme, token) = sent.split_at_checked(7).unwrap_or_default();
        let bearer = scheme.eq_ignore_ascii_case(b"bearer ");
        // The key's length shows in the time that this takes, its bytes do not.
        if !bearer || !bool::from(token.ct_eq(key.as_bytes())) {
            return Err(ApiError::unauthorized());
        }
    }
    Ok(next.run(request).await)
}

async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
             img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        ),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, include_str!("page.html")).into_response()
}

async fn health(State(app): State<Arc<App>>) -> Response {
    match app.worker.is_alive() {
        true => json_response(StatusCode::OK, &json!({ "status": "ok" })),
        false => ApiError::stopped().into_response(),
    }
}

async fn metrics(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let text = app.metrics.text();
    let text = text.map_err(|_| ApiError::internal("the metrics cannot be written"))?;
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

async fn models(State(app): State<Arc<App>>) -> Response {
    let model = response::model(&app.settings.name, app.created, app.worker.room());
    json_response(
        StatusCode::OK,
        &json!({ "object": "list", "data": [model] }),
    )
}

async fn model(
    State(app): State<Arc<App>>,
    axum::extract::Path(id): axum::extract::Path<String>,
) -> Result<Response, ApiError> {
    let name = &app.settings.name;
    if id != *name {
        return Err(ApiError::unknown_model(&id, name));
    }
    let model = response::model(name, app.created, app.worker.room());
    Ok(json_response(StatusCode::OK, &model))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_localhost_and_addresses_are_answered_without_a_key() {
        let mut settings = Settings {
            name: String::new(),
            key: None,
            sequences: 1,
            max_queue: 1,
            max_body: 1,
            timeout: Duration::ZERO,
            local_only: true,
        };
        let foreign = |settings: &Settings, host: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, host.parse().expect("a value"));
            foreign_host(settings, &headers).is_some()
        };
        for host in [
            "localhost",
            "LOCALHOST:8000",
            "a.localhost:1",
            "127.0.0.1:8000",
            "[::1]:8000",
            "192.168.1.2",
        ] {
            assert!(!foreign(&settings, host), "{host}");
        }
        for host in [
            "example.com",
            "localhost.example.com:8000",
            "127.0.0.1.example.com",
            "",
        ] {
            assert!(foreign(&settings, host), "{host}");
        }
        settings.key = Some("secret".to_owned());
        assert!(!foreign(&settings, "example.com"));
        assert!(foreign_host(&settings, &HeaderMap::new()).is_none());
    }
}
