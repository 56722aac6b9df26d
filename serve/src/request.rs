//! The bodies of requests, and what they ask of the engine.

use candle_fused::ops::SamplingParams;
use candle_fused::ops::logprobs::MAX_TOP;
use common::chat::Message;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::conversation::ChatMessage;
use crate::error::ApiError;
use crate::response::Kind;

/// Answers to a call at most.
const MAX_ANSWERS: usize = 128;

/// Stop strings at most, and their bytes.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 256;

/// A body of /v1/completions or /v1/chat/completions. Fields of OpenAI's API that would change the answer and are not
/// offered are read to be refused; others are ignored.
#[derive(Debug, Default, Deserialize)]
#[allow(missing_docs)]
pub struct Body {
    pub model: Option<String>,
    pub messages: Option<Vec<ChatMessage>>,
    pub prompt: Option<Prompt>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub n: Option<i64>,
    pub max_tokens: Option<i64>,
    pub max_completion_tokens: Option<i64>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub seed: Option<i64>,
    pub stop: Option<Strings>,
    /// As vLLM has them; -1 and 0 are no limit.
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f32>,
    pub stop_token_ids: Option<Vec<u32>>,
    pub ignore_eos: Option<bool>,
    frequency_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    logit_bias: Option<Value>,
    logprobs: Option<Logprobs>,
    top_logprobs: Option<i64>,
    prompt_logprobs: Option<i64>,
    response_format: Option<ResponseFormat>,
    guided_json: Option<Value>,
    guided_regex: Option<Value>,
    tools: Option<Vec<Value>>,
    functions: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    modalities: Option<Vec<String>>,
    audio: Option<Value>,
    best_of: Option<i64>,
    echo: Option<bool>,
    suffix: Option<String>,
}

/// One text or several, as text or as tokens.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, an array of strings, an array of token ids, or an array of such arrays"
)]
#[allow(missing_docs)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

/// One text or several.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of strings")]
#[allow(missing_docs)]
pub enum Strings {
    One(String),
    Several(Vec<String>),
}

/// What a stream holds beside the text.
#[derive(Debug, Default, Deserialize)]
#[allow(missing_docs)]
pub struct StreamOptions {
    pub include_usage: Option<bool>,
}

/// Whether log-probabilities are wanted in a chat, or how many in a completion.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a boolean or a number")]
enum Logprobs {
    Wanted(bool),
    Count(i64),
}

#[derive(Debug, Deserialize)]
struct ResponseFormat {
    #[serde(rename = "type")]
    kind: String,
    json_schema: Option<JsonSchema>,
}

#[derive(Debug, Deserialize)]
struct JsonSchema {
    schema: Option<Value>,
}

impl Body {
    /// Reads a body.
    ///
    /// # Errors
    /// If it is no JSON, or a field is of another type, by the field's name.
    pub fn read(bytes: &[u8]) -> Result<Self, ApiError> {
        let json = &mut serde_json::Deserializer::from_slice(bytes);
        let body: Self = serde_path_to_error::deserialize(&mut *json).map_err(|error| {
            let path = error.path().to_string();
            let (path, what) = (path.trim_start_matches('.'), error.inner());
            match path.is_empty() {
                true => ApiError::invalid("", format!("the body cannot be read: {what}")),
                false => ApiError::invalid(path, format!("{path}: {what}")),
            }
        })?;
        json.end()
            .map_err(|error| ApiError::invalid("", format!("the body cannot be read: {error}")))?;
        body.refuse()?;
        Ok(body)
    }

    /// Fails if something is asked for that this server has not.
    fn refuse(&self) -> Result<(), ApiError> {
        let is = |value: &Option<Value>| match value {
            None | Some(Value::Null | Value::Bool(false)) => false,
            Some(Value::Object(map)) => !map.is_empty(),
            Some(Value::String(text)) => text != "none" && text != "auto",
            Some(_) => true,
        };
        let not_zero = |value: Option<f64>| value.is_some_and(|value| value != 0.);
        let repetition = "repetition_penalty is the penalty that there is";
        let leave = "leave it away";
        for (asked, param, instead) in [
            (
                not_zero(self.frequency_penalty),
                "frequency_penalty",
                repetition,
            ),
            (
                not_zero(self.presence_penalty),
                "presence_penalty",
                repetition,
            ),
            (is(&self.logit_bias), "logit_bias", leave),
            (self.prompt_logprobs.is_some(), "prompt_logprobs", leave),
            (
                is(&self.guided_json),
                "guided_json",
                "response_format takes a JSON schema",
            ),
            (is(&self.guided_regex), "guided_regex", leave),
            (
                self.tools.as_ref().is_some_and(|t| !t.is_empty()),
                "tools",
                leave,
            ),
            (
                self.functions.as_ref().is_some_and(|t| !t.is_empty()),
                "functions",
                leave,
            ),
            (is(&self.tool_choice), "tool_choice", leave),
            (is(&self.audio), "audio", leave),
            (
                self.modalities.iter().flatten().any(|kind| kind != "text"),
                "modalities",
                "only [\"text\"] is",
            ),
            (
                self.best_of.is_some_and(|best| best != self.n.unwrap_or(1)),
                "best_of",
                "n asks for several answers",
            ),
            (self.echo == Some(true), "echo", "the client has the prompt"),
            (
                self.suffix
                    .as_ref()
                    .is_some_and(|suffix| !suffix.is_empty()),
                "suffix",
                leave,
            ),
        ] {
            if asked {
                return Err(ApiError::unsupported(param, instead));
            }
        }
        Ok(())
    }

    /// Answers to each prompt.
    ///
    /// # Errors
    /// If it is out of range.
    pub fn answers(&self) -> Result<usize, ApiError> {
        let n = self.n.unwrap_or(1);
        usize::try_from(n)
            .ok()
            .filter(|n| (1..=MAX_ANSWERS).contains(n))
            .ok_or_else(|| ApiError::invalid("n", format!("n is {n}, expected 1 to {MAX_ANSWERS}")))
    }

    /// Tokens of an answer to a prompt of `prompt` tokens, where both together have room for `room`; `default` if
    /// nothing is said, or as many as there is room for.
    ///
    /// # Errors
    /// If there is no such room.
    pub fn max_tokens(
        &self,
        prompt: usize,
        room: usize,
        default: Option<usize>,
    ) -> Result<usize, ApiError> {
        let left = room.saturating_sub(prompt);
        let (param, asked) = match (self.max_completion_tokens, self.max_tokens) {
            (Some(asked), _) => ("max_completion_tokens", Some(asked)),
            (None, asked) => ("max_tokens", asked),
        };
        let of_prompt = match self.messages {
            Some(_) => "messages",
            None => "prompt",
        };
        if left == 0 {
            return Err(ApiError::too_long(
                of_prompt,
                format!(
                    "the prompt has {prompt} tokens, expected at most {}: this server has room for {room} with \
                     the answer",
                    room.saturating_sub(1)
                ),
            ));
        }
        let Some(asked) = asked else {
            return Ok(default.unwrap_or(left).min(left));
        };
        match usize::try_from(asked) {
            Ok(asked) if (1..=left).contains(&asked) => Ok(asked),
            Ok(asked) if asked > left => Err(ApiError::too_long(
                param,
                format!(
                    "{param} is {asked}, expected at most {left}: the prompt has {prompt} tokens, and this \
                     server has room for {room} with the answer"
                ),
            )),
            _ => Err(ApiError::invalid(
                param,
                format!("{param} is {asked}, expected at least 1"),
            )),
        }
    }

    /// How tokens are chosen; the seed is random where none is given, and one further with each answer.
    ///
    /// # Errors
    /// If a value is out of range, by its name.
    pub fn sampling(&self) -> Result<SamplingParams, ApiError> {
        let temperature = self.temperature.unwrap_or(1.);
        if !(0. ..=2.).contains(&temperature) {
            let message = format!("temperature is {temperature}, expected 0 to 2");
            return Err(ApiError::invalid("temperature", message));
        }
        if let Some(p) = self.top_p.filter(|p| !(*p > 0. && *p <= 1.)) {
            let message = format!("top_p is {p}, expected above 0 and at most 1");
            return Err(ApiError::invalid("top_p", message));
        }
        if let Some(p) = self.min_p.filter(|p| !(0. ..=1.).contains(p)) {
            let message = format!("min_p is {p}, expected 0 to 1");
            return Err(ApiError::invalid("min_p", message));
        }
        let top_k = match self.top_k {
            None | Some(-1 | 0) => None,
            Some(k) => Some(usize::try_from(k).map_err(|_| {
                ApiError::invalid("top_k", format!("top_k is {k}, expected at least 1, or -1"))
            })?),
        };
        let params = SamplingParams {
            // What candle takes for 0 as well.
            temperature: if temperature < 1e-7 { 0. } else { temperature },
            top_k,
            top_p: self.top_p.filter(|p| *p < 1.),
            min_p: self.min_p,
            repeat_penalty: self.repetition_penalty.unwrap_or(1.),
            repeat_last_n: SamplingParams::MAX_LAST_N,
            seed: self.seed.map_or_else(rand::random, i64::cast_unsigned),
        };
        if !(params.repeat_penalty > 0. && params.repeat_penalty.is_finite()) {
            let message = format!(
                "repetition_penalty is {}, expected above 0",
                params.repeat_penalty
            );
            return Err(ApiError::invalid("repetition_penalty", message));
        }
        Ok(params)
    }

    /// How many of the likeliest tokens are listed with the log-probability of each token, if these are wanted.
    ///
    /// # Errors
    /// If that is out of range, or in the form of the other kind of call.
    pub fn logprobs(&self, kind: Kind) -> Result<Option<usize>, ApiError> {
        let invalid = |param: &str, what: String| Err(ApiError::invalid(param, what));
        let (param, count) = match (kind, self.logprobs) {
            (Kind::Chat, Some(Logprobs::Count(n))) => {
                return invalid(
                    "logprobs",
                    format!("logprobs is {n}, expected true or false"),
                );
            }
            (Kind::Text, Some(Logprobs::Wanted(true))) => {
                let message = "logprobs is true, expected a number in a completion";
                return invalid("logprobs", message.to_owned());
            }
            (Kind::Text, Some(Logprobs::Count(n))) => ("logprobs", n),
            (Kind::Chat, Some(Logprobs::Wanted(true))) => {
                ("top_logprobs", self.top_logprobs.unwrap_or(0))
            }
            (_, None | Some(Logprobs::Wanted(false))) => {
                return match self.top_logprobs.unwrap_or(0) {
                    0 => Ok(None),
                    n => invalid(
                        "top_logprobs",
                        format!("top_logprobs is {n} without \"logprobs\": true in a chat"),
                    ),
                };
            }
        };
        let within = usize::try_from(count).ok().filter(|n| *n <= MAX_TOP);
        match within {
            Some(n) => Ok(Some(n)),
            None => invalid(
                param,
                format!("{param} is {count}, expected 0 to {MAX_TOP}"),
            ),
        }
    }

    /// The JSON schema that an answer has to fit, if it has to.
    ///
    /// # Errors
    /// If the format is of another kind, or its schema is missing.
    pub fn schema(&self) -> Result<Option<Value>, ApiError> {
        let Some(format) = &self.response_format else {
            return Ok(None);
        };
        let schema = format.json_schema.as_ref().and_then(|of| of.schema.clone());
        match (format.kind.as_str(), schema) {
            ("text", _) => Ok(None),
            ("json_object", _) => Ok(Some(json!({ "type": "object" }))),
            ("json_schema", Some(schema)) => Ok(Some(schema)),
            ("json_schema", None) => {
                let param = "response_format.json_schema.schema";
                Err(ApiError::invalid(
                    param,
                    format!("{param} is missing, expected a JSON schema"),
                ))
            }
            (other, _) => Err(ApiError::invalid(
                "response_format",
                format!(
                    "response_format is of type '{other}', expected text, json_object or json_schema"
                ),
            )),
        }
    }

    /// Texts that end an answer.
    ///
    /// # Errors
    /// If there are too many, or one is empty or too long.
    pub fn stops(&self) -> Result<Vec<String>, ApiError> {
        let stops = match &self.stop {
            None => Vec::new(),
            Some(Strings::One(stop)) => vec![stop.clone()],
            Some(Strings::Several(stops)) => stops.clone(),
        };
        if stops.len() > MAX_STOPS {
            let message = format!(
                "stop has {} strings, expected at most {MAX_STOPS}",
                stops.len()
            );
            return Err(ApiError::invalid("stop", message));
        }
        if stops
            .iter()
            .any(|stop| !(1..=MAX_STOP_BYTES).contains(&stop.len()))
        {
            let message = format!("a stop string has 1 to {MAX_STOP_BYTES} bytes");
            return Err(ApiError::invalid("stop", message));
        }
        Ok(stops)
    }

    /// Ids that end an answer, where `end_ids` end the model's texts.
    pub fn stop_ids(&self, end_ids: &[u32]) -> Vec<u32> {
        let own = self.stop_token_ids.iter().flatten().copied();
        match self.ignore_eos {
            Some(true) => own.collect(),
            _ => end_ids.iter().copied().chain(own).collect(),
        }
    }

    /// Whether the answer is streamed, and whether its usage is streamed with it.
    ///
    /// # Errors
    /// If there are options for a stream, but no stream is asked for.
    pub fn streaming(&self) -> Result<Option<Usage>, ApiError> {
        match (self.stream == Some(true), &self.stream_options) {
            (false, Some(_)) => Err(ApiError::invalid(
                "stream_options",
                "stream_options is only for streams; add \"stream\": true",
            )),
            (false, None) => Ok(None),
            (true, options) => {
                Ok(Some(Usage(options.as_ref().is_some_and(|options| {
                    options.include_usage == Some(true)
                }))))
            }
        }
    }

    /// The conversation, for a chat template.
    ///
    /// # Errors
    /// If there is none, or a turn is no text of a known role.
    pub fn conversation(&self) -> Result<Vec<Message>, ApiError> {
        let messages = match &self.messages {
            Some(messages) if !messages.is_empty() => messages,
            _ => {
                let message = "messages is missing or empty, expected at least one message";
                return Err(ApiError::invalid("messages", message));
            }
        };
        messages
            .iter()
            .enumerate()
            .map(|(i, message)| message.turn(i))
            .collect()
    }
}

/// Whether a stream ends with its usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage(pub bool);
