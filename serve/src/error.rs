//! Errors as OpenAI's API writes them: `{"error": {"message", "type", "param", "code"}}`.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// Why a request has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// The status of the response.
    pub status: StatusCode,
    /// For people: what is wrong, and what was expected.
    pub message: String,
    /// The argument that is wrong, if it is one.
    pub param: Option<String>,
    /// For programs.
    pub code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, code: Option<&'static str>, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
            code,
        }
    }

    /// An argument that is missing, malformed or out of range.
    pub fn invalid(param: &str, message: impl Into<String>) -> Self {
        Self {
            param: (!param.is_empty()).then(|| param.to_owned()),
            ..Self::new(StatusCode::BAD_REQUEST, None, message)
        }
    }

    /// An argument of OpenAI's API that asks for something which is not there.
    pub fn unsupported(param: &str, instead: &str) -> Self {
        Self {
            code: Some("unsupported_parameter"),
            ..Self::invalid(
                param,
                format!("{param} is not supported by this server; {instead}"),
            )
        }
    }

    /// More tokens than a request may have.
    pub fn too_long(param: &str, message: impl Into<String>) -> Self {
        Self {
            code: Some("context_length_exceeded"),
            ..Self::invalid(param, message)
        }
    }

    /// No key, or a wrong one.
    pub fn unauthorized() -> Self {
        let message = "wrong or missing API key; send it as 'Authorization: Bearer KEY'";
        Self::new(StatusCode::UNAUTHORIZED, Some("invalid_api_key"), message)
    }

    /// A request that comes by way of a name this server does not have.
    pub fn foreign_host(host: &str) -> Self {
        let message = format!(
            "the host '{}' is not this machine; without an API key only localhost is answered",
            host.escape_debug()
        );
        Self::new(StatusCode::FORBIDDEN, Some("foreign_host"), message)
    }

    /// A model that this server does not have.
    pub fn unknown_model(asked: &str, served: &str) -> Self {
        let message = format!("there is no model '{asked}' here; this server has '{served}'");
        Self {
            param: Some("model".to_owned()),
            ..Self::new(StatusCode::NOT_FOUND, Some("model_not_found"), message)
        }
    }

    /// A path that this server does not have.
    pub fn unknown_path(path: &str) -> Self {
        let message = format!("there is nothing at {path}");
        Self::new(StatusCode::NOT_FOUND, Some("not_found"), message)
    }

    /// A path that takes another method.
    pub fn wrong_method(method: &str, path: &str) -> Self {
        let message = format!("{path} does not take {method}");
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            Some("method_not_allowed"),
            message,
        )
    }

    /// A body that is no JSON by its content type.
    pub fn not_json() -> Self {
        let message = "the body is not JSON by its headers; send 'Content-Type: application/json'";
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, message)
    }

    /// A body above the limit, in bytes.
    pub fn too_large(limit: usize) -> Self {
        let message = format!("the body is too large, expected at most {limit} bytes");
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            Some("body_too_large"),
            message,
        )
    }

    /// More requests than may wait.
    pub fn busy(limit: usize) -> Self {
        let message =
            format!("too many requests wait already, expected at most {limit}; try again later");
        Self::new(StatusCode::TOO_MANY_REQUESTS, Some("queue_full"), message)
    }

    /// A body that took too long to arrive.
    pub fn slow_body() -> Self {
        let message = "the body did not arrive in time";
        Self::new(StatusCode::REQUEST_TIMEOUT, Some("timeout"), message)
    }

    /// An answer that took too long.
    pub fn timeout() -> Self {
        let message = "the answer took longer than this server's time limit";
        Self::new(StatusCode::GATEWAY_TIMEOUT, Some("timeout"), message)
    }

    /// An answer that was given up.
    pub fn stopped() -> Self {
        let message = "no answer: the server is shutting down, or its engine has failed";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, Some("stopped"), message)
    }

    /// A failure of the server's own.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, None, message)
    }

    /// The body of the response.
    pub fn json(&self) -> Value {
        let kind = match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        };
        json!({ "error": {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        } })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, &self.json());
        let headers = response.headers_mut();
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            StatusCode::UNAUTHORIZED => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response
    }
}

/// A response whose body is JSON.
pub fn json_response(status: StatusCode, body: &Value) -> Response {
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (status, kind, body.to_string()).into_response()
}
