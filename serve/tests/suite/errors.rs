//! Calls that cannot be answered: each gets an error in JSON that names what is wrong.

use reqwest::{Method, Response, StatusCode};
use serde_json::{Value, json};

use crate::model;
use crate::support::{CHAT, COMPLETIONS, Server};

/// The error of a response, which has this status.
async fn error(response: Response, status: StatusCode) -> Value {
    let got = response.status();
    let kind = response.headers()["content-type"].clone();
    let body: Value = response.json().await.expect("JSON");
    assert_eq!(got, status, "{body}");
    assert_eq!(kind, "application/json");
    let error = &body["error"];
    assert!(error["message"].is_string() && error["type"].is_string());
    error.clone()
}

fn user(content: Value) -> Value {
    json!([{ "role": "user", "content": content }])
}

/// A call of the path with one wrong argument, the argument's name, and words that the message has.
type Wrong = (&'static str, Value, &'static str, &'static str);

/// Completions with a wrong argument.
fn completions() -> impl Iterator<Item = Wrong> {
    let string = "expected a string";
    let wrong = [
        ("prompt", Value::Null, "prompt is missing"),
        ("prompt", json!(""), "prompt is empty"),
        ("prompt", json!([]), "prompt is empty"),
        ("prompt", json!(["a", ""]), "prompt is empty"),
        ("prompt", json!({}), string),
        ("prompt", json!([1, "a"]), string),
        ("max_tokens", json!(-1), "-1, expected at least 1"),
        ("max_tokens", json!(0), "0, expected at least 1"),
        ("max_tokens", json!("7"), "expected i64"),
        ("max_tokens", json!(1.5), "expected i64"),
        ("n", json!(0), "n is 0, expected 1 to 128"),
        ("n", json!(129), "n is 129, expected 1 to 128"),
        ("temperature", json!(-0.1), "-0.1, expected 0 to 2"),
        ("temperature", json!("hot"), "expected f64"),
        ("top_p", json!(0), "top_p is 0, expected above 0"),
        ("top_k", json!(-2), "top_k is -2, expected at least 1"),
        ("repetition_penalty", json!(0), "expected above 0"),
        ("stop", json!(""), "a stop string has 1 to 256 bytes"),
        ("stop", json!(vec!["a"; 17]), "stop has 17 strings"),
        ("stop", json!(5), string),
        ("stream", json!("yes"), "expected a boolean"),
        ("stream_options", json!({}), "only for streams"),
        ("min_p", json!(1.1), "min_p is 1.1, expected 0 to 1"),
        ("logprobs", json!(21), "logprobs is 21, expected 0 to 20"),
        ("logprobs", json!(true), "expected a number"),
        ("logprobs", json!("yes"), "expected a boolean or a number"),
        ("echo", json!(true), "is not supported"),
        ("suffix", json!("end"), "is not supported"),
        ("best_of", json!(2), "is not supported"),
        ("logit_bias", json!({ "5": 1 }), "is not supported"),
        ("presence_penalty", json!(1), "is not supported"),
    ];
    wrong.into_iter().map(|(name, value, words)| {
        let mut call = json!({ "prompt": "abc" });
        call[name] = value;
        (COMPLETIONS, call, name, words)
    })
}

/// Chats with wrong messages.
fn messages() -> impl Iterator<Item = Wrong> {
    let string = "expected a string";
    let content = "messages[0].content";
    let cook = json!([{ "role": "cook", "content": "a" }]);
    let picture = user(json!([{ "type": "image_url" }]));
    let wrong = [
        (Value::Null, "messages", "messages is missing"),
        (json!([]), "messages", "messages is missing or empty"),
        (json!("hello"), "messages", "expected a sequence"),
        (json!([{ "content": "a" }]), "messages[0]", "field `role`"),
        (cook, "messages[0].role", "'cook'"),
        (json!([{ "role": "user" }]), content, "is missing"),
        (user(json!(5)), content, string),
        (picture, content, "a part of type 'image_url'"),
    ];
    wrong
        .into_iter()
        .map(|(messages, param, words)| (CHAT, json!({ "messages": messages }), param, words))
}

/// Chats with one wrong field.
fn chats() -> impl Iterator<Item = Wrong> {
    let format = "response_format";
    let of = |schema: Value| json!({ "type": "json_schema", "json_schema": { "name": "a", "schema": schema } });
    let wrong = [
        ("logprobs", json!(3), "expected true or false"),
        ("top_logprobs", json!(2), "without \"logprobs\": true"),
        ("tools", json!([{ "type": "function" }]), "is not supported"),
        (
            "guided_json",
            json!({ "type": "object" }),
            "is not supported",
        ),
        (format, json!({ "type": "xml" }), "of type 'xml'"),
        (format, of(json!({ "type": "cat" })), "cannot be used"),
        (
            format,
            of(json!({ "$ref": "http://127.0.0.1/a" })),
            "cannot be used",
        ),
    ];
    let calls = wrong.into_iter().map(|(name, value, words)| {
        let mut call = json!({ "messages": user("abc".into()) });
        call[name] = value;
        (CHAT, call, name, words)
    });
    let both = json!({ "messages": user("abc".into()), "logprobs": true, "top_logprobs": 21 });
    let bare = json!({ "messages": user("abc".into()), format: { "type": "json_schema" } });
    calls.chain([
        (CHAT, both, "top_logprobs", "is 21, expected 0 to 20"),
        (
            CHAT,
            bare,
            "response_format.json_schema.schema",
            "is missing",
        ),
    ])
}

#[tokio::test]
async fn wrong_arguments_are_named() {
    let server = Server::start(&[]).await;
    for (path, call, param, words) in completions().chain(messages()).chain(chats()) {
        let response = server.post(path, &call).await;
        let error = error(response, StatusCode::BAD_REQUEST).await;
        assert_eq!(error["type"], "invalid_request_error", "{call}");
        assert_eq!(error["param"], param, "{call}: {error}");
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains(words), "{call}: {message}");
    }
    // Nothing of it has reached the engine.
    assert_eq!(server.metric("prompt_tokens_total").await, 0.);
}

#[tokio::test]
async fn ids_out_of_the_vocabulary_are_refused() {
    let server = Server::start(&[]).await;
    for (call, param) in [
        (json!({ "prompt": [5, 256] }), "prompt"),
        (
            json!({ "prompt": "a", "stop_token_ids": [256] }),
            "stop_token_ids",
        ),
    ] {
        let response = server.post(COMPLETIONS, &call).await;
        let error = error(response, StatusCode::BAD_REQUEST).await;
        assert_eq!(error["param"], param, "{error}");
        let message = error["message"].as_str().expect("a message");
        assert!(message.contains("token 256 is out of the vocabulary"));
    }
}

#[tokio::test]
async fn what_is_too_long_is_refused() {
    let server = Server::start(&[]).await;
    let most = model::POSITIONS;
    for (call, param) in [
        (json!({ "prompt": "a".repeat(most) }), "prompt"),
        (
            json!({ "prompt": "abc", "max_tokens": most - 2 }),
            "max_tokens",
        ),
    ] {
        let response = server.post(COMPLETIONS, &call).await;
        let error = error(response, StatusCode::BAD_REQUEST).await;
        assert_eq!(error["code"], "context_length_exceeded");
        assert_eq!(error["param"], param);
    }
    let call = json!({ "messages": user("a".repeat(most).into()) });
    let error = error(server.post(CHAT, &call).await, StatusCode::BAD_REQUEST).await;
    assert_eq!(error["param"], "messages");
}

#[tokio::test]
async fn an_unknown_model_is_named() {
    let server = Server::start(&[]).await;
    let call = json!({ "model": "other", "prompt": "abc" });
    let error = error(server.post(COMPLETIONS, &call).await, StatusCode::NOT_FOUND).await;
    assert_eq!(error["code"], "model_not_found");
    assert_eq!(error["param"], "model");
    let message = "there is no model 'other' here; this server has 'tiny'";
    assert_eq!(error["message"], message);
}

#[tokio::test]
async fn what_is_no_json_is_refused() {
    let server = Server::start(&[]).await;
    let request = |kind: &str, body: &'static str| {
        let request = server.request(Method::POST, COMPLETIONS);
        request.header("Content-Type", kind).body(body).send()
    };
    let json = "application/json; charset=utf-8";
    for body in [
        "",
        "{",
        "[]",
        "5",
        "{\"prompt\": \"a\"} and more",
        "{\"prompt\": \"\u{1}\"}",
    ] {
        let response = request(json, body).await.expect("a response");
        error(response, StatusCode::BAD_REQUEST).await;
    }
    let response = request("text/plain", "{\"prompt\": \"a\"}").await;
    let response = response.expect("a response");
    error(response, StatusCode::UNSUPPORTED_MEDIA_TYPE).await;
}

#[tokio::test]
async fn unknown_paths_and_methods_are_refused() {
    let server = Server::start(&[]).await;
    let nowhere = error(server.get("/v1/nothing").await, StatusCode::NOT_FOUND).await;
    assert_eq!(nowhere["message"], "there is nothing at /v1/nothing");
    let response = server.get(CHAT).await;
    let error = error(response, StatusCode::METHOD_NOT_ALLOWED).await;
    assert_eq!(error["message"], "/v1/chat/completions does not take GET");
}

#[tokio::test]
async fn a_body_above_the_limit_is_refused() {
    let server = Server::start(&["--max-body", "1000"]).await;
    let call = json!({ "prompt": "a".repeat(900), "max_tokens": 1 });
    server.answer(COMPLETIONS, &call).await;
    let call = json!({ "prompt": "a".repeat(1000), "max_tokens": 1 });
    let response = server.post(COMPLETIONS, &call).await;
    let error = error(response, StatusCode::PAYLOAD_TOO_LARGE).await;
    assert_eq!(error["code"], "body_too_large");
    let message = "the body is too large, expected at most 1000 bytes";
    assert_eq!(error["message"], message);
}

#[tokio::test]
async fn a_key_is_asked_for() {
    let server = Server::start_with_key(&[], Some("sesame")).await;
    let call = json!({ "prompt": "abc", "max_tokens": 1 });
    for (method, path) in [
        (Method::GET, "/v1/models"),
        (Method::GET, "/metrics"),
        (Method::POST, COMPLETIONS),
        (Method::POST, CHAT),
    ] {
        for key in [
            None,
            Some("Bearer open"),
            Some("Bearer sesame2"),
            Some("sesame"),
        ] {
            let mut request = server.request(method.clone(), path).json(&call);
            if let Some(key) = key {
                request = request.header("Authorization", key);
            }
            let response = request.send().await.expect("a response");
            assert_eq!(response.headers()["www-authenticate"], "Bearer");
            let error = error(response, StatusCode::UNAUTHORIZED).await;
            assert_eq!(error["code"], "invalid_api_key");
        }
    }
    let request = server.request(Method::POST, COMPLETIONS).json(&call);
    let response = request.bearer_auth("sesame").send().await;
    assert_eq!(response.expect("a response").status(), StatusCode::OK);
    // A page has no key to show, and a probe needs none.
    for path in ["/", "/health"] {
        assert_eq!(server.get(path).await.status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn without_a_key_only_this_machine_is_answered() {
    let server = Server::start(&[]).await;
    let request = server.request(Method::GET, "/v1/models");
    let response = request.header("Host", "example.com").send().await;
    let error = error(response.expect("a response"), StatusCode::FORBIDDEN).await;
    assert_eq!(error["code"], "foreign_host");
}
