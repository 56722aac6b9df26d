//! What is said of tokens and what holds them: log-probabilities, min-p and JSON schemas.

use crate::model;
use crate::support::{CHAT, COMPLETIONS, Server, joined, text};
use serde_json::{Value, json};

fn user(text: &str) -> Value {
    json!([{ "role": "user", "content": text }])
}

/// The text that bytes of a list spell.
fn spelt(entries: &[Value]) -> String {
    let bytes = entries.iter().flat_map(|entry| {
        let bytes = entry["bytes"].as_array().expect("bytes");
        bytes
            .iter()
            .map(|byte| byte.as_u64().expect("a byte") as u8)
    });
    String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
}

#[tokio::test]
async fn chats_list_log_probabilities() {
    let server = Server::start(&[]).await;
    let mut call = json!({ "messages": user("List"), "max_tokens": 40, "ignore_eos": true, "temperature": 0,
        "logprobs": true, "top_logprobs": 3 });
    let body = server.answer(CHAT, &call).await;
    let content = body["choices"][0]["logprobs"]["content"].clone();
    let content = content.as_array().expect("a list");
    assert_eq!(content.len(), 40);
    for entry in content {
        let top = entry["top_logprobs"].as_array().expect("a list");
        assert_eq!(top.len(), 3);
        // The likeliest was taken.
        assert_eq!(
            (&top[0]["token"], &top[0]["logprob"]),
            (&entry["token"], &entry["logprob"])
        );
        let logprobs = top
            .iter()
            .map(|one| one["logprob"].as_f64().expect("a number"));
        assert!(
            logprobs.clone().all(|logprob| logprob <= 0.) && logprobs.is_sorted_by(|a, b| a >= b)
        );
    }
    assert_eq!(spelt(content), text(&body, 0));

    // A stream has the same, each beside the text that its tokens belong to.
    let events = server.stream(CHAT, &call).await;
    let lists = events
        .iter()
        .map(|event| &event["choices"][0]["logprobs"]["content"]);
    let streamed: Vec<Value> = lists
        .filter_map(Value::as_array)
        .flatten()
        .cloned()
        .collect();
    assert_eq!(streamed.len(), content.len());
    // The beginning may come from the cache of prefixes, with other last bits.
    for (streamed, whole) in streamed.iter().zip(content) {
        assert_eq!(streamed["token"], whole["token"]);
        let [a, b] = [streamed, whole].map(|entry| entry["logprob"].as_f64().expect("a number"));
        assert!((a - b).abs() < 1e-3, "{a} {b}");
    }
    assert_eq!(joined(&events, 1), [text(&body, 0)]);

    call["top_logprobs"] = Value::Null;
    let body = server.answer(CHAT, &call).await;
    assert_eq!(
        body["choices"][0]["logprobs"]["content"][0]["top_logprobs"],
        json!([])
    );
    call["logprobs"] = false.into();
    let body = server.answer(CHAT, &call).await;
    assert_eq!(body["choices"][0]["logprobs"], Value::Null);
}

#[tokio::test]
async fn completions_list_log_probabilities() {
    let server = Server::start(&[]).await;
    let mut call = json!({ "prompt": "List", "max_tokens": 30, "ignore_eos": true, "seed": 4, "n": 2, "logprobs": 2 });
    let body = server.answer(COMPLETIONS, &call).await;
    for (index, choice) in body["choices"]
        .as_array()
        .expect("choices")
        .iter()
        .enumerate()
    {
        let list = |name: &str| choice["logprobs"][name].as_array().expect("a list").clone();
        let (tokens, offsets) = (list("tokens"), list("text_offset"));
        let (logprobs, top) = (list("token_logprobs"), list("top_logprobs"));
        assert!([tokens.len(), offsets.len(), logprobs.len(), top.len()] == [30; 4]);
        let mut at = 0;
        for (i, token) in tokens.iter().enumerate() {
            let token = token.as_str().expect("a text");
            assert_eq!(offsets[i], at);
            at += token.chars().count();
            // The drawn one is listed too.
            assert_eq!(top[i][token], logprobs[i], "answer {index}: {}", top[i]);
            assert!((1..=3).contains(&top[i].as_object().expect("a map").len()));
        }
    }
    let events = server.stream(COMPLETIONS, &call).await;
    let streamed: Vec<Value> = events
        .iter()
        .flat_map(|event| event["choices"].as_array().expect("choices"))
        .filter(|choice| choice["index"] == 1)
        .filter_map(|choice| choice["logprobs"]["text_offset"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(
        json!(streamed),
        body["choices"][1]["logprobs"]["text_offset"]
    );
    call["logprobs"] = 0.into();
    let body = server.answer(COMPLETIONS, &call).await;
    let logprobs = &body["choices"][0]["logprobs"];
    assert_eq!(
        (
            &logprobs["top_logprobs"],
            logprobs["tokens"].as_array().map(Vec::len)
        ),
        (&Value::Null, Some(30))
    );
}

/// The end token and what comes behind it show nowhere.
#[tokio::test]
async fn the_end_token_is_not_listed() {
    let server = Server::start(&[]).await;
    let call =
        json!({ "prompt": "End", "max_tokens": 8000, "seed": 1, "temperature": 2, "logprobs": 0 });
    let body = server.answer(COMPLETIONS, &call).await;
    let count = body["usage"]["completion_tokens"]
        .as_u64()
        .expect("a number");
    let tokens = body["choices"][0]["logprobs"]["tokens"]
        .as_array()
        .map(Vec::len);
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    assert_eq!(tokens, Some(count as usize - 1));
}

#[tokio::test]
async fn min_p_leaves_the_likeliest() {
    let server = Server::start(&[]).await;
    let mut call =
        json!({ "prompt": "Few", "max_tokens": 20, "ignore_eos": true, "temperature": 0 });
    let greedy = server.answer(COMPLETIONS, &call).await;
    (call["temperature"], call["min_p"]) = (json!(1.5), json!(1));
    let narrow = server.answer(COMPLETIONS, &call).await;
    assert_eq!(text(&narrow, 0), text(&greedy, 0));
}

/// A model of random weights, held to a schema.
#[tokio::test]
async fn answers_fit_a_schema() {
    let server = Server::start(&[]).await;
    let schema = json!({
        "type": "object",
        "properties": {
            "city": { "enum": ["Paris", "Rome"] },
            "people": { "type": "integer", "minimum": 10, "maximum": 99 },
            "notes": { "type": "array", "items": { "type": "string", "maxLength": 5 }, "maxItems": 3 },
        },
        "required": ["city", "people", "notes"],
        "additionalProperties": false,
    });
    let call = json!({ "messages": user("Where?"), "max_tokens": 400, "n": 4, "temperature": 1.2, "seed": 11,
        "logprobs": true,
        "response_format": { "type": "json_schema", "json_schema": { "name": "place", "schema": schema } } });
    let body = server.answer(CHAT, &call).await;
    for index in 0..4 {
        let text = text(&body, index);
        let place: Value = serde_json::from_str(text).expect(text);
        assert!(["Paris", "Rome"].contains(&place["city"].as_str().expect(text)));
        assert!(
            (10..100).contains(&place["people"].as_i64().expect(text)),
            "{text}"
        );
        let notes = place["notes"].as_array().expect(text);
        assert!(
            notes.len() <= 3
                && notes
                    .iter()
                    .all(|note| note.as_str().expect(text).chars().count() <= 5)
        );
        assert_eq!(body["choices"][index]["finish_reason"], "stop");
        let content = body["choices"][index]["logprobs"]["content"]
            .as_array()
            .expect("a list");
        assert_eq!(spelt(content), text);
    }
    assert_eq!(
        joined(&server.stream(CHAT, &call).await, 4),
        [0, 1, 2, 3].map(|i| text(&body, i))
    );
}

/// Beside an answer that is held to nothing, and to no end.
#[tokio::test]
async fn answers_are_json_objects_beside_others() {
    let server = Server::start(&[]).await;
    let plain = json!({ "prompt": "Other", "max_tokens": 60, "ignore_eos": true, "seed": 3 });
    let alone = server.answer(COMPLETIONS, &plain).await;
    let format = json!({ "type": "json_object" });
    let call =
        json!({ "prompt": "An object:", "max_tokens": 60, "seed": 5, "response_format": format });
    let (object, other) = tokio::join!(
        server.answer(COMPLETIONS, &call),
        server.answer(COMPLETIONS, &plain)
    );
    assert_eq!(text(&other, 0), text(&alone, 0));
    assert!(text(&object, 0).starts_with('{'), "{object}");
    // Ids of the model's own that end an answer do so here too, and only where the object is whole.
    if object["choices"][0]["finish_reason"] == "stop" {
        assert!(serde_json::from_str::<Value>(text(&object, 0)).is_ok());
    }
    let ids = model::ids("text");
    let text_format =
        json!({ "prompt": ids, "max_tokens": 3, "response_format": { "type": "text" } });
    server.answer(COMPLETIONS, &text_format).await;
    server.until_idle().await;
}
