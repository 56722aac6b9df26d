//! Answers as one body.

use serde_json::{Value, json};

use crate::model;
use crate::support::{CHAT, COMPLETIONS, NAME, Server, start_of, text};

#[tokio::test]
async fn a_completion_says_what_it_is() {
    let server = Server::start(&[]).await;
    let call = json!({
        "model": NAME, "prompt": "Once upon", "max_tokens": 7, "temperature": 0, "ignore_eos": true,
    });
    let body = server.answer(COMPLETIONS, &call).await;
    assert_eq!(body["object"], "text_completion");
    assert_eq!(body["model"], NAME);
    assert!(body["id"].as_str().expect("an id").starts_with("cmpl-"));
    assert!(body["created"].is_u64());
    assert_eq!(body["choices"].as_array().expect("choices").len(), 1);
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    let usage = json!({ "prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16 });
    assert_eq!(body["usage"], usage);
    // The same again, by its tokens.
    let mut of_ids = call.clone();
    of_ids["prompt"] = json!(model::ids("Once upon"));
    let again = server.answer(COMPLETIONS, &of_ids).await;
    assert_eq!(text(&again, 0), text(&body, 0));
    // 16 tokens where nothing is said.
    let call = json!({ "prompt": "Once upon", "temperature": 0, "ignore_eos": true });
    let body = server.answer(COMPLETIONS, &call).await;
    assert_eq!(body["usage"]["completion_tokens"], 16);
}

#[tokio::test]
async fn several_prompts_are_answered_in_their_order() {
    let server = Server::start(&[]).await;
    let call = |prompt: Value, n: usize| json!({ "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": true, "n": n });
    let (one, two) = ("Rain", "A long walk home");
    let both = server
        .answer(COMPLETIONS, &call(json!([one, two]), 2))
        .await;
    let one = server.answer(COMPLETIONS, &call(json!(one), 1)).await;
    let two = server.answer(COMPLETIONS, &call(json!(two), 1)).await;
    assert_ne!(text(&one, 0), text(&two, 0));
    let texts: Vec<_> = (0..4).map(|index| text(&both, index)).collect();
    assert_eq!(texts, [&one, &one, &two, &two].map(|body| text(body, 0)));
    let usage = json!({ "prompt_tokens": 20, "completion_tokens": 24, "total_tokens": 44 });
    assert_eq!(both["usage"], usage);
}

#[tokio::test]
async fn a_chat_is_written_by_the_models_template() {
    let server = Server::start(&[]).await;
    let call = |messages: Value| json!({ "messages": messages, "max_completion_tokens": 9, "temperature": 0, "ignore_eos": true });
    let system = json!({ "role": "developer", "content": "Be brief." });
    let asked = json!([system, { "role": "user", "content": "Who?" }]);
    let body = server.answer(CHAT, &call(asked)).await;
    assert_eq!(body["object"], "chat.completion");
    assert!(body["id"].as_str().expect("an id").starts_with("chatcmpl-"));
    assert_eq!(body["choices"][0]["message"]["role"], "assistant");
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["usage"]["completion_tokens"], 9);
    // Special tokens are one each.
    let written = "system\nBe brief.\nuser\nWho?\nassistant\n".len() + "\n".len() * 2 - 2 + 5;
    assert_eq!(body["usage"]["prompt_tokens"], written);
    let parts = json!([{ "type": "text", "text": "Wh" }, { "type": "text", "text": "o?" }]);
    let in_parts = json!([system, { "role": "user", "content": parts }]);
    let again = server.answer(CHAT, &call(in_parts)).await;
    assert_eq!(text(&again, 0), text(&body, 0));
}

#[tokio::test]
async fn a_seed_gives_the_same_answers_again() {
    let server = Server::start(&[]).await;
    let call = |seed: i64, n: usize| json!({ "prompt": "Dice", "max_tokens": 24, "ignore_eos": true, "seed": seed, "n": n });
    let three = server.answer(COMPLETIONS, &call(5, 3)).await;
    let again = server.answer(COMPLETIONS, &call(5, 3)).await;
    assert_eq!(three["choices"], again["choices"]);
    let one = server.answer(COMPLETIONS, &call(5, 1)).await;
    assert_eq!(text(&one, 0), text(&three, 0));
    assert_ne!(text(&three, 1), text(&three, 0));
    assert_ne!(text(&three, 2), text(&three, 1));
    let other = server.answer(COMPLETIONS, &call(-50, 1)).await;
    assert_ne!(text(&other, 0), text(&one, 0));
    assert_eq!(three["usage"]["completion_tokens"], 72);
    assert_eq!(three["usage"]["prompt_tokens"], 4);
    // Without one, each call has a seed of its own.
    let mut call = call(0, 1);
    call["seed"] = Value::Null;
    let first = server.answer(COMPLETIONS, &call).await;
    // Two of them can be alike by chance, since the model likes one token much more than the others.
    let mut differs = false;
    for _ in 0..8 {
        let other = server.answer(COMPLETIONS, &call).await;
        differs |= text(&first, 0) != text(&other, 0);
    }
    assert!(differs);
}

#[tokio::test]
async fn a_stop_string_ends_the_text_before_itself() {
    let server = Server::start(&[]).await;
    let mut call = json!({ "prompt": "Count", "max_tokens": 80, "ignore_eos": true, "seed": 3 });
    let whole = server.answer(COMPLETIONS, &call).await;
    let whole = text(&whole, 0);
    let at = |n: usize| start_of(whole, n);
    let (first, second) = (&whole[at(20)..at(23)], &whole[at(30)..at(33)]);
    let before = &whole[..whole.find(first).expect("it is there")];
    for stop in [
        json!(first),
        json!(["never said by this model", second, first]),
    ] {
        call["stop"] = stop;
        let body = server.answer(COMPLETIONS, &call).await;
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        assert_eq!(text(&body, 0), before);
        assert!(body["usage"]["completion_tokens"].as_u64() < Some(80));
    }
    // The request is over in the engine as well.
    server.until_idle().await;
}

#[tokio::test]
async fn a_text_ends_at_an_end_token() {
    let server = Server::start(&[]).await;
    // Among so many draws there is one of the 256 tokens.
    let call = json!({ "prompt": "End", "max_tokens": 8000, "seed": 1, "temperature": 2 });
    let body = server.answer(COMPLETIONS, &call).await;
    assert_eq!(body["choices"][0]["finish_reason"], "stop");
    let count = body["usage"]["completion_tokens"].as_u64();
    let mut call = call.clone();
    call["ignore_eos"] = true.into();
    call["stop_token_ids"] = json!([model::END]);
    let same = server.answer(COMPLETIONS, &call).await;
    assert_eq!(same["choices"], body["choices"]);
    // The id that ends a text counts, but shows nowhere.
    call["max_tokens"] = count.expect("a number").into();
    call["stop_token_ids"] = json!([]);
    let longer = server.answer(COMPLETIONS, &call).await;
    assert_eq!(longer["choices"][0]["finish_reason"], "length");
    assert_eq!(text(&longer, 0), text(&body, 0));
}
