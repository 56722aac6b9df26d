//! How the server ends.

use std::time::Duration;

use futures_util::StreamExt;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::{COMPLETIONS, Server, joined, long};

/// Longer than any test: what ends, ends by itself.
const LONG: &str = "86400";

#[tokio::test]
async fn connections_without_a_call_hold_nothing_up() {
    let mut server = Server::start(&["--grace", LONG]).await;
    // One that has said nothing yet, and one behind it that was used and is kept.
    let mut silent = TcpStream::connect(server.address).await.expect("a server");
    server.get("/health").await.text().await.expect("text");
    server.signal();
    server.ended().await;
    assert_eq!(silent.read(&mut [0; 1]).await.expect("an end"), 0);
}

#[tokio::test]
async fn answers_under_way_may_end() {
    let mut server = Server::start(&["--grace", LONG]).await;
    let call = json!({ "prompt": "abc", "max_tokens": 300, "ignore_eos": true, "seed": 1 });
    let whole = server.answer(COMPLETIONS, &call).await;
    let mut events = Box::pin(server.open(COMPLETIONS, &call).await);
    let mut all = vec![events.next().await.expect("an event")];
    server.signal();
    // No one else gets in.
    while TcpStream::connect(server.address).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    all.extend(events.collect::<Vec<_>>().await);
    let last = all.last().expect("an event");
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    assert_eq!(joined(&all, 1)[0], whole["choices"][0]["text"]);
    server.ended().await;
}

#[tokio::test]
async fn what_runs_when_the_grace_is_over_ends_with_an_error() {
    let mut server = Server::start(&["--grace", "0"]).await;
    let events = server.open_long().await;
    // A client that reads nothing, not even its error.
    let mut deaf = TcpStream::connect(server.address).await.expect("a server");
    let mut body = long();
    body["stream"] = true.into();
    let body = body.to_string();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    let call = head + &body;
    deaf.write_all(call.as_bytes()).await.expect("it is sent");
    while server.metric("requests_running").await < 2. {}
    server.signal();
    let events: Vec<_> = events.collect().await;
    let error = &events.last().expect("an event")["error"];
    assert_eq!(error["code"], "stopped");
    server.ended().await;
}

#[tokio::test]
async fn a_second_signal_ends_at_once() {
    let mut server = Server::start(&["--grace", LONG]).await;
    let events = server.open_long().await;
    server.signal();
    server.signal();
    let events: Vec<_> = events.collect().await;
    assert_eq!(events.last().expect("an event")["error"]["code"], "stopped");
    server.ended().await;
}
