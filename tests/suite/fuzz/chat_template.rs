//! A model's chat template.

use crate::common::chat::{ChatTemplate, Message};

pub fn run(data: &[u8]) {
    let source = String::from_utf8_lossy(data);
    let Ok(template) = ChatTemplate::new(&source, Some("<s>"), Some("</s>")) else {
        return;
    };
    let messages = [
        Message::user("Hi <there> 日本"),
        Message::assistant("{{ 1 }}"),
        Message::user("x"),
    ];
    for (count, for_answer) in [(1, true), (3, false), (0, true)] {
        let _ = template.render(&messages[..count], for_answer);
    }
}
