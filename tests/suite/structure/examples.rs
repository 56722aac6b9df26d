//! Examples in documentation.
//!
//! The rule: the documentation of a public function has an example that runs and calls it, or that of its module has.
//! A method's may stand anywhere in the documentation of its file, since one example of a type shows several; functions of
//! a type without `self` are called by its name there, or an alias's. Examples
//! that are only compiled (`no_run`) do not count. What the feature `cuda` adds is left out: it needs a GPU.

use super::source::{files, read, root, tokens};
use super::{LIBRARY, layer, top_module};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The public functions of a file, with what their examples have to be looked for in.
struct Function {
    name: String,
    line: usize,
    /// The type, of a method.
    owner: Option<String>,
    /// Whether it is called on a value.
    on_self: bool,
    /// Its own documentation.
    docs: String,
}

/// The code of examples that run in documentation, of which `text` has lines with `///` or `//!`.
fn examples(text: &str) -> String {
    let (mut code, mut runs, mut open) = (String::new(), false, false);
    for line in text.lines().map(str::trim_start) {
        let Some(line) = ["///", "//!"].iter().find_map(|doc| line.strip_prefix(doc)) else {
            continue;
        };
        if let Some(kind) = line.trim().strip_prefix("```") {
            (open, runs) = (!open, !open && matches!(kind, "" | "rust"));
        } else if runs {
            code.push_str(line);
            code.push('\n');
        }
    }
    code
}

/// Whether `code` calls a function of this name.
fn calls(code: &str, name: &str) -> bool {
    code.match_indices(name).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        let behind = &code[at + name.len()..];
        before.is_none_or(|c| !c.is_alphanumeric() && c != '_')
            && (behind.starts_with('(') || behind.starts_with("::<"))
    })
}

/// The type of `impl<T> Type<T> {`; none where it is a trait that is implemented.
fn implemented(line: &str) -> Option<String> {
    let tokens = tokens(line);
    let mut depth = 0;
    let mut words = tokens[1..].iter().filter(|token| {
        match token.text.as_str() {
            "<" => depth += 1,
            ">" => depth -= 1,
            _ => return depth == 0 && token.is_word(),
        }
        false
    });
    let owner = words.next()?.text.clone();
    words.all(|word| word.text != "for").then_some(owner)
}

/// The public functions and methods of a file as rustfmt lays it out, without those of tests and of features.
fn functions(text: &str) -> Vec<Function> {
    let lines: Vec<&str> = text.lines().collect();
    let (mut found, mut owner) = (Vec::new(), None);
    for (at, line) in lines.iter().enumerate() {
        if *line == "#[cfg(test)]" && lines.get(at + 1).is_some_and(|next| next.ends_with('{')) {
            break;
        }
        if line.starts_with("impl") {
            owner = implemented(line);
        }
        let signature = line.trim_start();
        let indent = line.len() - signature.len();
        let head = ["pub fn ", "pub unsafe fn ", "pub const fn "];
        let Some(rest) = head.iter().find_map(|head| signature.strip_prefix(head)) else {
            continue;
        };
        let above = |line: &&&str| {
            ["///", "#["]
                .iter()
                .any(|s| line.trim_start().starts_with(s))
        };
        let above: Vec<&str> = lines[..at]
            .iter()
            .rev()
            .take_while(above)
            .copied()
            .collect();
        let of_feature = above.iter().any(|line| line.contains("cfg(feature"));
        if indent > 4 || of_feature || (indent == 4 && owner.is_none()) {
            continue;
        }
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
        found.push(Function {
            name: rest[..end.unwrap_or(rest.len())].to_owned(),
            line: at + 1,
            owner: owner.clone().filter(|_| indent == 4),
            on_self: lines[at..]
                .iter()
                .take_while(|line| !line.trim_start().starts_with(')'))
                .take(2)
                .any(|line| line.contains("self,") || line.contains("self)")),
            docs: above.into_iter().rev().collect::<Vec<_>>().join("\n"),
        });
    }
    found
}

/// Files whose module is public all the way from the root, and the names that they hand on from others, with the
/// top-level module that these are in.
fn public() -> (BTreeSet<PathBuf>, BTreeSet<(String, String)>) {
    let (mut public, mut names) = (BTreeSet::new(), BTreeSet::new());
    let mut open = vec![PathBuf::from(LIBRARY)];
    while let Some(path) = open.pop() {
        let tokens = tokens(&read(&path));
        let at = |i: usize| tokens.get(i).map_or("", |token| token.text.as_str());
        for i in (0..tokens.len()).filter(|i| at(*i) == "pub") {
            if at(i + 1) == "mod" && at(i + 3) == ";" {
                let folder = match path.file_stem().and_then(|stem| stem.to_str()) {
                    Some("lib" | "mod") => path.parent().expect("a folder").to_owned(),
                    _ => path.with_extension(""),
                };
                let child = folder.join(at(i + 2));
                let file = [child.with_extension("rs"), child.join("mod.rs")];
                open.extend(file.into_iter().filter(|file| root().join(file).exists()));
            } else if at(i + 1) == "use" {
                let end = (i..tokens.len()).find(|i| at(*i) == ";").expect("an end");
                let last = (i + 2..end).filter(|i| tokens[*i].is_word() && at(i + 1) != "::");
                let from = match at(i + 2) {
                    "crate" => at(i + 4),
                    name if layer(name).is_some() => name,
                    // What lib.rs writes out is the public face of this module.
                    _ if path == Path::new(LIBRARY) => "quant",
                    _ => top_module(&path),
                };
                names.extend(last.map(|i| (from.to_owned(), at(i).to_owned())));
            }
        }
        public.insert(path);
    }
    (public, names)
}

/// Public names for types with parameters, and the types.
fn aliases() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for path in files("src", &[".rs"]) {
        for line in read(&path).lines() {
            let alias = line.strip_prefix("pub type ");
            if let Some((alias, of)) = alias.and_then(|rest| rest.split_once(" = ")) {
                let path = of.split('<').next().unwrap_or(of);
                let of = path.rsplit("::").next().unwrap_or(path);
                found.push((alias.to_owned(), of.to_owned()));
            }
        }
    }
    found
}

/// Whether the rule leaves a file out.
fn is_left_out(path: &Path) -> bool {
    let name = path.to_string_lossy();
    name.contains("/cuda") || name.ends_with("tests.rs")
}

#[test]
fn public_functions_have_examples_that_run() {
    let ((public, names), aliases) = (public(), aliases());
    let (mut count, mut wrong) = (0, Vec::new());
    for path in files("src", &[".rs"])
        .into_iter()
        .filter(|path| !is_left_out(path))
    {
        let text = read(&path);
        let of_module = text.lines().take_while(|line| line.starts_with("//!"));
        let module = examples(&of_module.collect::<Vec<_>>().join("\n"));
        let all = examples(&text);
        for function in functions(&text) {
            let item = function.owner.as_ref().unwrap_or(&function.name);
            let handed_on = names.contains(&(top_module(&path).to_owned(), item.clone()));
            if !public.contains(&path) && !handed_on {
                continue;
            }
            count += 1;
            let code = match function.owner {
                Some(_) => &all,
                None => &format!("{module}{}", examples(&function.docs)),
            };
            let name = &function.name;
            let called = match &function.owner {
                Some(owner) if !function.on_self => {
                    let of_owner = aliases.iter().filter(|(_, of)| of == owner);
                    let owners = of_owner.map(|(alias, _)| alias).chain([owner]);
                    owners.map(|owner| format!("{owner}::{name}")).collect()
                }
                _ => vec![name.clone()],
            };
            if !called.iter().any(|called| calls(code, called)) {
                let (path, Function { name, line, .. }) = (path.display(), function);
                wrong.push(format!("{path}:{line}: `{name}`"));
            }
        }
    }
    assert!(count > 200, "{count} public functions found");
    assert!(
        wrong.is_empty(),
        "no example that runs calls these:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn functions_and_their_examples_are_found() {
    let text = "/// Two.\n///\n/// ```\n/// # let one = 1;\n/// assert_eq!(two(one), 2);\n/// ```\n#[inline]\npub fn two(x: u32) -> u32 {\n    x\n}\n\nimpl<T: Into<u32>> Three<T> {\n    /// ```no_run\n    /// three.four();\n    /// ```\n    pub fn four(&self) {}\n\n    #[cfg(feature = \"cuda\")]\n    pub fn five(&self) {}\n\n    pub(crate) fn six(&self) {}\n}\n\nimpl Drop for Three {\n    fn drop(&mut self) {}\n}\n\n#[cfg(test)]\nmod tests {\n    pub fn seven() {}\n}\n";
    let found = functions(text);
    let named: Vec<_> = found
        .iter()
        .map(|f| (f.name.as_str(), f.owner.as_deref(), f.line))
        .collect();
    assert_eq!(named, [("two", None, 8), ("four", Some("Three"), 16)]);
    assert!(calls(&examples(&found[0].docs), "two"));
    assert!(!calls(&examples(&found[0].docs), "wo") && !calls(&examples(text), "four"));
    assert_eq!(implemented("impl Drop for Three {"), None);
    assert!(calls("x.collect::<Vec<_>>()", "collect"));
}
