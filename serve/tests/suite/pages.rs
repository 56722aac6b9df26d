//! What is to be seen beside answers: the models, the page, health and metrics.

use reqwest::StatusCode;
use serde_json::{Value, json};

use crate::model;
use crate::support::{COMPLETIONS, NAME, Server};

#[tokio::test]
async fn the_model_is_listed() {
    let server = Server::start(&[]).await;
    let list: Value = server.get("/v1/models").await.json().await.expect("JSON");
    assert_eq!(list["object"], "list");
    let models = list["data"].as_array().expect("models");
    assert_eq!(models.len(), 1);
    assert_eq!(models[0]["id"], NAME);
    assert_eq!(models[0]["object"], "model");
    assert_eq!(models[0]["max_model_len"], model::POSITIONS);
    let path = format!("/v1/models/{NAME}");
    let one: Value = server.get(&path).await.json().await.expect("JSON");
    assert_eq!(one, models[0]);
    let other = server.get("/v1/models/some/other").await;
    assert_eq!(other.status(), StatusCode::NOT_FOUND);
    let error: Value = other.json().await.expect("JSON");
    assert_eq!(error["error"]["code"], "model_not_found");
}

#[tokio::test]
async fn the_page_takes_nothing_from_elsewhere() {
    let server = Server::start(&[]).await;
    let response = server.get("/").await;
    let kind = &response.headers()["content-type"];
    assert_eq!(kind, "text/html; charset=utf-8");
    let policy = response.headers()["content-security-policy"].to_str();
    assert!(policy.expect("text").starts_with("default-src 'none'"));
    let page = response.text().await.expect("text");
    assert!(page.contains("<title>candle-fused</title>"));
    assert!(!page.contains("http:") && !page.contains("https:"));
}

#[tokio::test]
async fn health_and_metrics() {
    let server = Server::start(&[]).await;
    let health: Value = server.get("/health").await.json().await.expect("JSON");
    assert_eq!(health, json!({ "status": "ok" }));
    let call = json!({ "prompt": "abcd", "max_tokens": 5, "ignore_eos": true, "n": 2 });
    server.answer(COMPLETIONS, &call).await;
    server.get("/nowhere").await;
    server.until_idle().await;
    for (name, value) in [
        ("prompt_tokens_total", 8.),
        ("generated_tokens_total", 10.),
        ("requests_finished_total{outcome=\"length\"}", 2.),
        ("http_errors_total{code=\"404\"}", 1.),
        ("time_to_first_token_seconds_count", 2.),
        ("time_between_tokens_seconds_count", 8.),
    ] {
        assert_eq!(server.metric(name).await, value, "{name}");
    }
    assert!(server.metric("steps_total").await >= 5.);
    assert!(server.metric("pages").await > 0.);
}
