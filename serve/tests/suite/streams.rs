//! Answers in pieces.

use serde_json::{Value, json};

use crate::support::{CHAT, COMPLETIONS, NAME, Server, joined, start_of, text};

/// The choices of events, in order.
fn choices(events: &[Value]) -> impl Iterator<Item = &Value> {
    events
        .iter()
        .flat_map(|event| event["choices"].as_array().expect("choices"))
}

#[tokio::test]
async fn pieces_join_to_the_whole() {
    let server = Server::start(&[]).await;
    let messages = json!([{ "role": "user", "content": "Ünd?" }]);
    for (path, mut call) in [
        (COMPLETIONS, json!({ "prompt": "Ünd so" })),
        (CHAT, json!({ "messages": messages })),
    ] {
        call["seed"] = 11.into();
        call["max_tokens"] = 60.into();
        call["ignore_eos"] = true.into();
        call["n"] = 3.into();
        let whole = server.answer(path, &call).await;
        let events = server.stream(path, &call).await;
        let texts: Vec<_> = (0..3).map(|index| text(&whole, index)).collect();
        assert_eq!(joined(&events, 3), texts);
        let id = &events[0]["id"];
        for event in &events {
            assert_eq!(event["id"], *id);
            assert_eq!(event["model"], NAME);
            assert!(event.get("usage").is_none());
        }
        let ends = choices(&events).filter(|choice| !choice["finish_reason"].is_null());
        let mut ends: Vec<_> = ends.map(|choice| choice["index"].as_u64()).collect();
        ends.sort_unstable();
        assert_eq!(ends, [Some(0), Some(1), Some(2)]);
    }
}

#[tokio::test]
async fn a_chat_opens_with_its_role_and_ends_with_a_reason() {
    let server = Server::start(&[]).await;
    let messages = json!([{ "role": "user", "content": "Hello" }]);
    let call = json!({ "messages": messages, "seed": 2, "max_tokens": 8, "ignore_eos": true });
    let events = server.stream(CHAT, &call).await;
    let all: Vec<_> = choices(&events).collect();
    assert_eq!(all[0]["delta"]["role"], "assistant");
    let (last, before) = all.split_last().expect("choices");
    assert_eq!(last["finish_reason"], "length");
    assert_eq!(last["delta"], json!({}));
    assert!(
        before
            .iter()
            .all(|choice| choice["finish_reason"].is_null())
    );
    assert!(
        events
            .iter()
            .all(|event| event["object"] == "chat.completion.chunk")
    );
}

#[tokio::test]
async fn usage_comes_last_if_it_is_asked_for() {
    let server = Server::start(&[]).await;
    let call = json!({
        "prompt": ["ab", "cde"], "max_tokens": 4, "ignore_eos": true, "stream_options": { "include_usage": true },
    });
    let events = server.stream(COMPLETIONS, &call).await;
    let (last, before) = events.split_last().expect("events");
    let usage = json!({ "prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13 });
    assert_eq!(last["usage"], usage);
    assert_eq!(last["choices"], json!([]));
    assert!(before.iter().all(|event| event.get("usage").is_none()));
}

#[tokio::test]
async fn a_stop_string_never_shows_in_a_stream() {
    let server = Server::start(&[]).await;
    let mut call = json!({ "prompt": "Count", "max_tokens": 80, "ignore_eos": true, "seed": 4 });
    let whole = server.answer(COMPLETIONS, &call).await;
    let whole = text(&whole, 0);
    let at = |n: usize| start_of(whole, n);
    let stop = &whole[at(25)..at(30)];
    call["stop"] = json!([stop]);
    let events = server.stream(COMPLETIONS, &call).await;
    let before = &whole[..whole.find(stop).expect("it is there")];
    assert_eq!(joined(&events, 1), [before]);
    let last = choices(&events).last().expect("a choice");
    assert_eq!(last["finish_reason"], "stop");
}
