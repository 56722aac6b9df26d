//! What the user sees of a run: the text as it comes, turn by turn, and the table at its end.

use std::io::{BufRead, IsTerminal, Write};
use std::time::Duration;

use anyhow::{Context, Result};

use super::chat::Message;
use super::generate::{Generator, Stop, Totals};
use super::report::{self, Table};
use super::token_stream::TokenStream;
use super::tokenizer::Text;

/// A model, its tokenizer, and where its text goes.
pub struct Session<'a, W: Write> {
    text: &'a Text,
    generator: Generator,
    out: W,
    totals: Totals,
}

impl<'a, W: Write> Session<'a, W> {
    /// Text goes to `out`; all else to standard error.
    pub fn new(text: &'a Text, generator: Generator, out: W) -> Self {
        Self {
            text,
            generator,
            out,
            totals: Totals::default(),
        }
    }

    /// Continues a text, which is repeated first.
    pub fn complete(&mut self, prompt: &str) -> Result<()> {
        let tokens = self.text.encode_prompt(prompt)?;
        self.generator.check(&tokens)?;
        report::write_text(&mut self.out, prompt)?;
        self.stream(&tokens).map(drop)
    }

    /// Answers one question.
    pub fn answer(&mut self, question: &str) -> Result<()> {
        self.text.chat_template()?;
        self.stream(&self.text.encode_question(question)?).map(drop)
    }

    /// Answers line after line of `input` until it ends.
    pub fn converse(&mut self, input: impl BufRead, ask: bool) -> Result<()> {
        let template = self.text.chat_template()?;
        let mut conversation = Vec::new();
        if ask {
            report::ask("> ");
        }
        for line in input.lines() {
            let line = line.context("cannot read standard input")?;
            if !line.trim().is_empty() {
                conversation.push(Message::user(line.trim()));
                let written = template.render(&conversation, true)?;
                let answer = self.stream(&self.text.encode_chat(&written)?)?;
                conversation.push(Message::assistant(answer));
            }
            if ask {
                report::ask("> ");
            }
        }
        if ask {
            report::say("");
        }
        Ok(())
    }

    /// Generates, writing text as soon as it is whole, and ends the line.
    fn stream(&mut self, prompt: &[u32]) -> Result<String> {
        let mut stream = TokenStream::new(self.text.tokenizer());
        let mut answer = String::new();
        let out = &mut self.out;
        let generated = self.generator.generate(prompt, |token| {
            let piece = stream.push(token)?;
            answer.push_str(&piece);
            report::write_text(out, &piece)
        })?;
        let rest = stream.finish()?;
        answer.push_str(&rest);
        report::write_text(&mut self.out, &format!("{rest}\n"))?;
        if generated.stop == Stop::Context {
            report::say("the model's context is full");
        }
        self.totals.add(&generated);
        Ok(answer)
    }

    /// The closing table.
    pub fn table(&self, load: Duration) -> Table {
        let totals = &self.totals;
        let none = || "n/a".to_owned();
        let mut table = Table::default();
        table
            .row("load", report::seconds(load), "")
            .row(
                "first token",
                totals.first_token.map_or_else(none, report::seconds),
                "",
            )
            .row(
                "prefill",
                report::rate(totals.prompt_tokens, totals.prefill),
                tokens(totals.prompt_tokens),
            )
            .row(
                "decode",
                report::rate(totals.steps, totals.decode),
                tokens(totals.steps),
            )
            .row(
                "memory",
                report::peak_memory().map_or_else(none, report::bytes),
                "at its peak",
            );
        table
    }
}

fn tokens(count: usize) -> String {
    match count {
        1 => "1 token".to_owned(),
        n => format!("{n} tokens"),
    }
}

/// Whether a person types what the program reads.
pub fn at_a_terminal() -> bool {
    std::io::stdin().is_terminal()
}
