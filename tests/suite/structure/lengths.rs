//! How long files and functions are.

use super::source::{Token, closing, files, read, tokens};

const FILE: usize = 500;
const FUNCTION: usize = 80;
const FOLDERS: [&str; 8] = [
    "src",
    "kernels",
    "tests",
    "benches",
    "examples",
    "serve/src",
    "serve/benches",
    "serve/tests",
];

/// The name, first line and lines of every function; one within another counts for itself and for that.
fn functions(text: &str, rust: bool) -> Vec<(String, usize, usize)> {
    let tokens = tokens(text);
    let (mut found, mut at) = (Vec::new(), 0);
    while at < tokens.len() {
        let body = match rust {
            true => rust_body(&tokens, at),
            false => cuda_body(&tokens, at),
        };
        match body {
            Some((name, open)) => {
                let (first, last) = (tokens[at].line, tokens[closing(&tokens, open)].line);
                found.push((name, first, last + 1 - first));
                at = if rust { open } else { closing(&tokens, open) };
            }
            None => at += 1,
        }
    }
    found
}

/// The name and the opening brace of a function whose `fn` is at `at`.
fn rust_body(tokens: &[Token], at: usize) -> Option<(String, usize)> {
    let name = tokens.get(at + 1).filter(|name| name.is_word())?;
    if tokens[at].text != "fn" {
        return None;
    }
    let mut end = at + 2;
    loop {
        match tokens.get(end)?.text.as_str() {
            "{" => return Some((name.text.clone(), end)),
            ";" => return None,
            "(" | "[" => end = closing(tokens, end) + 1,
            _ => end += 1,
        }
    }
}

/// The name and the opening brace of a function whose name is at `at`: a list in parentheses follows, and
/// then the brace, but for qualifiers and initializers between them.
fn cuda_body(tokens: &[Token], at: usize) -> Option<(String, usize)> {
    const STATEMENTS: [&str; 6] = [
        "if",
        "for",
        "while",
        "switch",
        "return",
        "__launch_bounds__",
    ];
    let name = &tokens[at];
    if !name.is_word()
        || STATEMENTS.contains(&name.text.as_str())
        || tokens.get(at + 1)?.text != "("
    {
        return None;
    }
    let mut end = closing(tokens, at + 1) + 1;
    loop {
        match tokens.get(end)?.text.as_str() {
            "{" => return Some((name.text.clone(), end)),
            "(" => end = closing(tokens, end) + 1,
            "const" | "noexcept" | ":" | "," => end += 1,
            _ if tokens[end].is_word() && tokens.get(end + 1)?.text == "(" => end += 1,
            _ => return None,
        }
    }
}

#[test]
fn files_and_functions_are_short() {
    let mut wrong = Vec::new();
    let mut count = 0;
    for path in FOLDERS
        .iter()
        .flat_map(|folder| files(folder, &[".rs", ".cu", ".cuh"]))
    {
        let (text, path) = (read(&path), path.to_string_lossy());
        let lines = text.lines().count();
        if lines > FILE {
            wrong.push(format!("{path}: {lines} lines, expected at most {FILE}"));
        }
        for (name, first, lines) in functions(&text, path.ends_with(".rs")) {
            count += 1;
            if lines > FUNCTION {
                wrong.push(format!(
                    "{path}:{first}: `{name}` has {lines} lines, expected at most {FUNCTION}"
                ));
            }
        }
    }
    assert!(count > 1000, "{count} functions found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn functions_are_measured_from_their_name_to_their_brace() {
    let text = "fn a<T: Fn() -> [u8; 2]>(x: T)\nwhere\n    T: Copy,\n{\n    fn b() {}\n    \"{\";\n}\ntrait C {\n    fn d();\n}";
    let expected = [("a".to_owned(), 1, 7), ("b".to_owned(), 5, 1)];
    assert_eq!(functions(text, true), expected);
    let text = "fn f(c: &[u8]) {\n    g(b'{', br#\"{\"#, b\"\\\"{\", '{');\n}";
    assert_eq!(functions(text, true), [("f".to_owned(), 1, 3)]);
    let text = "__global__ void __launch_bounds__(64)\ne(int x) {\n  if (x) {\n    f(x);\n  }\n}\nstruct G {\n  int h() const { return 1'000; }\n};";
    let expected = [("e".to_owned(), 2, 5), ("h".to_owned(), 8, 1)];
    assert_eq!(functions(text, false), expected);
}
