//! Conversations, written the way a model was taught them: its chat template, a Jinja template that
//! comes with the tokenizer, rendered as transformers renders it.

use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Context, Result, anyhow};
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value, context};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// Steps that a template may take: hundreds for each message are usual. A template comes with a model,
/// and one that goes round in circles ends here.
const STEPS: u64 = 500_000;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    pub role: &'static str,
    pub content: String,
}

impl Message {
    /// What the user says.
    pub fn user(content: impl Into<String>) -> Self {
        Self {
            role: "user",
            content: content.into(),
        }
    }

    /// What the model says.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self {
            role: "assistant",
            content: content.into(),
        }
    }
}

/// A model's way of writing conversations.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos_token: Option<String>,
    eos_token: Option<String>,
}

impl ChatTemplate {
    /// Takes a template's source and the tokens that it may name.
    pub fn new(source: &str, bos_token: Option<&str>, eos_token: Option<&str>) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_fuel(Some(STEPS));
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", to_json);
        environment.add_function(
            "raise_exception",
            |message: String| -> Result<Value, Error> {
                Err(Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_function("strftime_now", strftime_now);
        let source = without_generation_marks(source);
        environment.template_from_str(&source).map_err(|error| {
            anyhow!("the model's chat template cannot be used ({error}); run it without --chat")
        })?;
        Ok(Self {
            environment,
            source,
            bos_token: bos_token.map(str::to_owned),
            eos_token: eos_token.map(str::to_owned),
        })
    }

    /// Writes a conversation down; `for_answer` begins the model's next turn.
    pub fn render(&self, messages: &[Message], for_answer: bool) -> Result<String> {
        let context = context! {
            messages => messages,
            add_generation_prompt => for_answer,
            bos_token => self.bos_token.as_deref().unwrap_or_default(),
            eos_token => self.eos_token.as_deref().unwrap_or_default(),
        };
        // minijinja 2.24 panics at `[][::-1]`.
        let render = || self.environment.render_str(&self.source, context);
        catch_unwind(AssertUnwindSafe(render))
            .map_err(|_| anyhow!("the template engine failed"))
            .context("the model's chat template cannot be used; run it without --chat")?
            .map_err(|error| {
                anyhow!(
                    error
                        .detail()
                        .map_or_else(|| error.to_string(), str::to_owned)
                )
            })
            .context("the model's chat template refuses this conversation")
    }
}

/// transformers marks what the model generates with a tag of its own, which changes no text.
fn without_generation_marks(source: &str) -> String {
    let mut source = source.to_owned();
    for (tag, plain) in [("generation", "if true"), ("endgeneration", "endif")] {
        for open in ["{% ", "{%- "] {
            for close in [" %}", " -%}"] {
                source = source.replace(
                    &format!("{open}{tag}{close}"),
                    &format!("{open}{plain}{close}"),
                );
            }
        }
    }
    source
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=indent)`.
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    match indent {
        Some(width) => serialize(
            value,
            PrettyFormatter::with_indent(" ".repeat(width.min(16)).as_bytes()),
        ),
        None => serialize(value, Spaced),
    }
}

fn serialize(value: &Value, formatter: impl Formatter) -> Result<String, Error> {
    let mut bytes = Vec::new();
    value
        .serialize(&mut Serializer::with_formatter(&mut bytes, formatter))
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    String::from_utf8(bytes)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))
}

/// JSON on one line with a space after commas and colons, as Python writes it.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        out: &mut W,
    ) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

fn strftime_now(format: &str) -> Result<String, Error> {
    let mut text = String::new();
    write!(text, "{}", chrono::Local::now().format(format)).map_err(|_| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("'{format}' is no date format"),
        )
    })?;
    Ok(text)
}
