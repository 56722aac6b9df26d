//! Limits on the queue and on time, and clients that go away.

use futures_util::StreamExt;
use reqwest::StatusCode;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{COMPLETIONS, Server, long};

#[tokio::test]
async fn a_full_queue_refuses_more() {
    // Two run, one waits.
    let server = Server::start(&["--max-queue", "1"]).await;
    let open = [server.open_long().await, server.open_long().await];
    let small = json!({ "prompt": "abc", "max_tokens": 3, "ignore_eos": true, "n": 2 });
    let response = server.post(COMPLETIONS, &small).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(response.headers()["retry-after"], "1");
    let error: Value = response.json().await.expect("JSON");
    assert_eq!(error["error"]["code"], "queue_full");
    assert_eq!(error["error"]["type"], "rate_limit_error");
    // One has a place, and an answer once another has left.
    let one = json!({ "prompt": "abc", "max_tokens": 3, "ignore_eos": true });
    let (body, ()) = tokio::join!(server.answer(COMPLETIONS, &one), async {
        while server.metric("requests_waiting").await < 1. {}
        drop(open);
    });
    assert_eq!(body["usage"]["completion_tokens"], 3);
    // More than there are places is no matter of waiting.
    let call = json!({ "prompt": "abc", "n": 4 });
    let response = server.post(COMPLETIONS, &call).await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    let error: Value = response.json().await.expect("JSON");
    assert_eq!(error["error"]["param"], "n");
    server.until_idle().await;
}

#[tokio::test]
async fn an_answer_that_takes_too_long_is_ended() {
    let server = Server::start(&["--timeout", "0.2"]).await;
    let response = server.post(COMPLETIONS, &long()).await;
    assert_eq!(response.status(), StatusCode::GATEWAY_TIMEOUT);
    let error: Value = response.json().await.expect("JSON");
    assert_eq!(error["error"]["code"], "timeout");
    let events = server.stream(COMPLETIONS, &long()).await;
    let (last, before) = events.split_last().expect("events");
    assert_eq!(last["error"]["code"], "timeout");
    assert!(before.iter().all(|event| event.get("error").is_none()));
    server.until_idle().await;
    let timeouts = "requests_finished_total{outcome=\"timeout\"}";
    assert_eq!(server.metric(timeouts).await, 2.);
}

#[tokio::test]
async fn a_body_that_does_not_arrive_is_not_waited_for() {
    let server = Server::start(&["--timeout", "0.2"]).await;
    let mut stream = TcpStream::connect(server.address).await.expect("a server");
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
        Content-Length: 100\r\nConnection: close\r\n\r\n{";
    stream.write_all(head.as_bytes()).await.expect("it is sent");
    let mut response = String::new();
    stream
        .read_to_string(&mut response)
        .await
        .expect("a response");
    assert!(response.starts_with("HTTP/1.1 408 "), "{response}");
    assert!(response.contains("the body did not arrive in time"));
}

#[tokio::test]
async fn a_client_that_goes_away_frees_its_pages() {
    let server = Server::start(&[]).await;
    // In the midst of a stream.
    let mut events = Box::pin(server.open_long().await);
    for _ in 0..3 {
        events.next().await.expect("an event");
    }
    assert_eq!(server.metric("requests_running").await, 1.);
    assert!(server.metric("pages_free").await < server.metric("pages").await);
    drop(events);
    server.until_idle().await;
    // While a whole answer is made.
    let call = long();
    let answer = server.post(COMPLETIONS, &call);
    let runs = async { while server.metric("requests_running").await < 1. {} };
    tokio::select! {
        response = answer => panic!("{response:?}"),
        () = runs => {}
    }
    server.until_idle().await;
    let cancelled = "requests_finished_total{outcome=\"cancelled\"}";
    assert_eq!(server.metric(cancelled).await, 2.);
    // And the server goes on.
    let call = json!({ "prompt": "abc", "max_tokens": 3, "ignore_eos": true });
    server.answer(COMPLETIONS, &call).await;
}
