//! The turns of a conversation, as bodies have them.

use common::chat::Message;
use serde::Deserialize;

use crate::error::ApiError;

/// A turn of a conversation.
#[derive(Debug, Deserialize)]
#[allow(missing_docs)]
pub struct ChatMessage {
    pub role: String,
    pub content: Option<Content>,
}

/// What a turn says: a text, or parts of it.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of parts")]
#[allow(missing_docs)]
pub enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// A part of what a turn says.
#[derive(Debug, Deserialize)]
#[allow(missing_docs)]
pub struct Part {
    #[serde(rename = "type")]
    pub kind: String,
    pub text: Option<String>,
}

impl ChatMessage {
    /// The turn for a chat template; `i` is its number in the conversation.
    ///
    /// # Errors
    /// If it is no text of a known role.
    pub fn turn(&self, i: usize) -> Result<Message, ApiError> {
        let role = match self.role.as_str() {
            // Templates have no word for the newer name.
            "system" | "developer" => "system",
            "user" => "user",
            "assistant" => "assistant",
            other => {
                let param = format!("messages[{i}].role");
                let message = format!("{param} is '{other}', expected system, user or assistant");
                return Err(ApiError::invalid(&param, message));
            }
        };
        let param = format!("messages[{i}].content");
        let content = match &self.content {
            Some(Content::Text(text)) => text.clone(),
            Some(Content::Parts(parts)) => {
                let text = |part: &Part| match (part.kind.as_str(), &part.text) {
                    ("text", Some(text)) => Ok(text.clone()),
                    (kind, _) => {
                        let message = format!("{param} has a part of type '{kind}', expected text");
                        Err(ApiError::invalid(&param, message))
                    }
                };
                parts
                    .iter()
                    .map(text)
                    .collect::<Result<Vec<_>, _>>()?
                    .concat()
            }
            None => {
                let message = format!("{param} is missing, expected a string");
                return Err(ApiError::invalid(&param, message));
            }
        };
        Ok(Message { role, content })
    }
}
