//! Source text without what is no code, as tokens.

use std::path::{Path, PathBuf};

/// The repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All files below `folder`, relative to the repository, whose names end with one of `endings`.
pub fn files(folder: &str, endings: &[&str]) -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![root().join(folder)]);
    while let Some(folder) = folders.pop() {
        let entries =
            std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        for entry in entries {
            let path = entry.expect("an entry").path();
            let name = path.to_string_lossy();
            if path.is_dir() {
                folders.push(path);
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                found.push(path.strip_prefix(root()).expect("below").to_owned());
            }
        }
    }
    found.sort();
    found
}

/// The text of a file of the repository.
pub fn read(path: &Path) -> String {
    let path = root().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// `text` with a space for each character of a comment, string or character literal; lines stay.
pub fn without_comments(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out: Vec<char> = Vec::with_capacity(chars.len());
    let mut at = 0;
    while at < chars.len() {
        let end = at + literal(&chars[at..], out.last().copied());
        if end == at {
            out.push(chars[at]);
            at += 1;
            continue;
        }
        let blank = |c: &char| if *c == '\n' { '\n' } else { ' ' };
        out.extend(chars[at..end].iter().map(blank));
        at = end;
    }
    out.into_iter().collect()
}

/// Length of the comment or literal at the start of `text`, which stands behind `before`; 0 if there
/// is none.
fn literal(text: &[char], before: Option<char>) -> usize {
    let is = |i: usize, c: char| text.get(i) == Some(&c);
    let in_word = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let hashes = text.iter().skip(1).take_while(|c| **c == '#').count();
    match text[0] {
        '/' if is(1, '/') => text.iter().take_while(|c| **c != '\n').count(),
        '/' if is(1, '*') => block_comment(text),
        'r' if !in_word && is(1 + hashes, '"') => {
            let close: Vec<char> = std::iter::once('"').chain(vec!['#'; hashes]).collect();
            let body = &text[2 + hashes..];
            let end = body.windows(close.len()).position(|w| w == close);
            end.map_or(text.len(), |end| 2 + hashes + end + close.len())
        }
        // Of bytes.
        'b' if !in_word && matches!(text.get(1), Some('\'' | '"' | 'r')) => {
            match literal(&text[1..], None) {
                0 => 0,
                len => 1 + len,
            }
        }
        '"' => quoted(text, '"'),
        // Not a lifetime, nor what parts the digits of a C++ number.
        '\'' if !in_word && (is(1, '\\') || is(2, '\'')) => quoted(text, '\''),
        _ => 0,
    }
}

fn block_comment(text: &[char]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        match text[at..] {
            ['/', '*', ..] => (depth, at) = (depth + 1, at + 2),
            ['*', '/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn quoted(text: &[char], quote: char) -> usize {
    let mut at = 1;
    while at < text.len() && text[at] != quote {
        at += if text[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(text.len())
}

/// A word or a punctuation mark (`::` is one), with its line, counted from 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    pub text: String,
    pub line: usize,
}

impl Token {
    pub fn is_word(&self) -> bool {
        self.text
            .starts_with(|c: char| c.is_alphabetic() || c == '_')
    }
}

/// The tokens of a source file.
pub fn tokens(text: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    for (line, text) in (1..).zip(without_comments(text).lines()) {
        let mut rest = text.trim_start();
        while let Some(first) = rest.chars().next() {
            let word = |c: char| c.is_alphanumeric() || c == '_';
            let len = match first {
                c if word(c) => rest.find(|c| !word(c)).unwrap_or(rest.len()),
                _ if rest.starts_with("::") => 2,
                c => c.len_utf8(),
            };
            let text = rest[..len].to_owned();
            tokens.push(Token { text, line });
            rest = rest[len..].trim_start();
        }
    }
    tokens
}

/// Where the bracket at `open` closes; the end if it does not.
pub fn closing(tokens: &[Token], open: usize) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match token.text.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    tokens.len() - 1
}
