//! The modules of a crate: what each file declares and imports, and which files it names.

use super::source::{Token, closing, read, root, tokens};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A path in the code, as `["super", "kernel", "Tile"]`.
type Names = Vec<String>;

/// A module: a file, or one written out within a file.
#[derive(Default)]
struct Module {
    file: PathBuf,
    /// Where the files of its modules are.
    folder: PathBuf,
    parent: usize,
    children: BTreeMap<String, usize>,
    /// Modules whose file is in another crate's folder.
    outside: BTreeSet<String>,
    /// What it defines itself, other than in macros.
    items: BTreeSet<String>,
    /// What it imports, by the name it has here.
    imports: BTreeMap<String, Names>,
    globs: Vec<Names>,
    /// Re-exports, which are the module's face where they name what is below it.
    exports: Vec<Names>,
    /// Paths in the code, with imports that are not handed on.
    paths: Vec<Names>,
}

/// The crate.
pub struct Crate(Vec<Module>);

/// Files that name another.
pub type Arrows = BTreeMap<PathBuf, BTreeSet<PathBuf>>;

impl Crate {
    /// Reads the file `root` and what it declares, without tests.
    pub fn read(root: &str) -> Self {
        let folder = Path::new(root).parent().expect("a folder");
        let mut modules = Self(vec![Module {
            file: root.into(),
            folder: folder.into(),
            ..Module::default()
        }]);
        modules.read_file(0);
        modules
    }

    pub fn files(&self) -> BTreeSet<&Path> {
        self.0.iter().map(|module| module.file.as_path()).collect()
    }

    /// Which files name things that are defined in which.
    pub fn arrows(&self) -> Arrows {
        let mut arrows = Arrows::new();
        for (m, module) in self.0.iter().enumerate() {
            let outside = |target: &usize| !self.is_below(*target, m);
            let named = module.paths.iter().filter_map(|path| self.target(m, path));
            let handed_on = module
                .exports
                .iter()
                .filter_map(|path| self.target(m, path));
            for target in named.chain(handed_on.filter(outside)) {
                let to = &self.0[target].file;
                if *to != module.file {
                    let from = module.file.clone();
                    arrows.entry(from).or_default().insert(to.clone());
                }
            }
        }
        arrows
    }

    fn is_below(&self, mut module: usize, top: usize) -> bool {
        while module != top && module != 0 {
            module = self.0[module].parent;
        }
        module == top
    }

    /// The module that defines what `path` names in module `m`; none for other crates, or a module as
    /// such.
    fn target(&self, m: usize, path: &[String]) -> Option<usize> {
        match self.follow(m, path, 0)? {
            (module, true) => Some(module),
            _ => None,
        }
    }

    /// Where `path` leads from module `m`, and whether that is an item of the module or the module.
    fn follow(&self, m: usize, path: &[String], depth: usize) -> Option<(usize, bool)> {
        assert!(
            depth < 32,
            "{}: {path:?} leads nowhere",
            self.0[m].file.display()
        );
        let (mut at, mut rest) = (m, path);
        match path.first()?.as_str() {
            "crate" => (at, rest) = (0, &path[1..]),
            "self" => rest = &path[1..],
            "super" => (at, rest) = (self.0[m].parent, &path[1..]),
            name if self.knows(m, name) => {}
            _ => return None,
        }
        while let [name, behind @ ..] = rest {
            let module = &self.0[at];
            if name == "super" {
                (at, rest) = (module.parent, behind);
            } else if module.outside.contains(name) {
                return None;
            } else if let Some(child) = module.children.get(name) {
                (at, rest) = (*child, behind);
            } else if module.items.contains(name) {
                return Some((at, true));
            } else if let Some(import) = module.imports.get(name) {
                let whole: Names = import.iter().chain(behind).cloned().collect();
                return self.follow(at, &whole, depth + 1);
            } else {
                let glob = |glob: &Names| {
                    let (target, _) = self.follow(at, glob, depth + 1)?;
                    let whole: Names = [&["self".to_owned()], rest].concat();
                    self.gives(target, name)
                        .then(|| self.follow(target, &whole, depth + 1))?
                };
                return module.globs.iter().find_map(glob).or(Some((at, true)));
            }
        }
        Some((at, false))
    }

    fn knows(&self, m: usize, name: &str) -> bool {
        let module = &self.0[m];
        module.children.contains_key(name)
            || module.items.contains(name)
            || module.imports.contains_key(name)
    }

    /// Whether a glob import of the module has the name: what it only imports for itself, it has not.
    fn gives(&self, m: usize, name: &str) -> bool {
        let module = &self.0[m];
        let mut exports = module.exports.iter();
        module.children.contains_key(name)
            || module.items.contains(name)
            || exports.any(|path| path.last().is_some_and(|last| last == name))
    }

    fn read_file(&mut self, m: usize) {
        let tokens = tokens(&read(&self.0[m].file));
        self.read_tokens(m, &tokens);
    }

    /// Adds a module that `m` declares: in a file, or written out in that of `m`.
    fn child(&mut self, m: usize, name: &str, in_file: bool) -> usize {
        let folder = self.0[m].folder.join(name);
        let file = match in_file {
            true if root().join(&folder).with_extension("rs").exists() => {
                folder.with_extension("rs")
            }
            true => folder.join("mod.rs"),
            false => self.0[m].file.clone(),
        };
        let child = self.0.len();
        self.0.push(Module {
            file,
            folder,
            parent: m,
            ..Module::default()
        });
        self.0[m].children.insert(name.to_owned(), child);
        child
    }

    fn read_tokens(&mut self, m: usize, tokens: &[Token]) {
        let (mut at, mut depth, mut public, mut outside) = (0, 0, false, false);
        while at < tokens.len() {
            let word = tokens[at].text.as_str();
            let next = tokens.get(at + 1).map_or("", |token| &token.text);
            let mut step = 1;
            match word {
                "#" => {
                    let open = if next == "!" { at + 2 } else { at + 1 };
                    let end = closing(tokens, open);
                    let attribute = &tokens[open..end];
                    outside |= attribute.get(1).is_some_and(|word| word.text == "path");
                    at = end + 1;
                    if is_for_tests(attribute) {
                        at += item_len(&tokens[at..]);
                    }
                    continue;
                }
                "pub" => {
                    public = true;
                    if next == "(" {
                        step = closing(tokens, at + 1) + 1 - at;
                    }
                    at += step;
                    continue;
                }
                "mod" if outside => {
                    self.0[m].outside.insert(next.to_owned());
                }
                "mod" if tokens.get(at + 2).is_some_and(|t| t.text == ";") => {
                    let child = self.child(m, next, true);
                    self.read_file(child);
                    step = 3;
                }
                "mod" if tokens.get(at + 2).is_some_and(|t| t.text == "{") => {
                    let end = closing(tokens, at + 2);
                    let child = self.child(m, next, false);
                    self.read_tokens(child, &tokens[at + 3..end]);
                    step = end + 1 - at;
                }
                "use" => {
                    let len = tokens[at..].iter().position(|t| t.text == ";");
                    step = len.expect("a use that ends") + 1;
                    self.import(m, &tokens[at + 1..at + step - 1], public);
                }
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth -= 1,
                "fn" | "struct" | "enum" | "union" | "trait" | "type" | "const" | "static"
                    if depth == 0 =>
                {
                    self.0[m].items.insert(next.to_owned());
                }
                "macro_rules" => {
                    self.0[m].items.insert(tokens[at + 2].text.clone());
                }
                _ if tokens[at].is_word() && next == "::" => {
                    let path = path(&tokens[at..]);
                    step = 2 * path.len() - 1;
                    self.0[m].paths.push(path);
                }
                _ => {}
            }
            (public, outside) = (false, false);
            at += step;
        }
    }

    fn import(&mut self, m: usize, tree: &[Token], public: bool) {
        for (names, alias) in branches(&[], tree) {
            let module = &mut self.0[m];
            if alias == "*" {
                module.globs.push(names.clone());
            } else if names.first() != Some(&alias) {
                // Not a crate by its name, nor the macro that has the name of its crate.
                module.imports.insert(alias, names.clone());
            }
            match public {
                true => module.exports.push(names),
                false => module.paths.push(names),
            }
        }
    }
}

/// Whether an attribute keeps its item for tests.
fn is_for_tests(attribute: &[Token]) -> bool {
    let has = |word: &str| attribute.iter().any(|token| token.text == word);
    has("cfg") && has("test") && !has("not")
}

/// Tokens up to the end of an item: its semicolon or its closing brace.
fn item_len(tokens: &[Token]) -> usize {
    let mut at = 0;
    while at < tokens.len() {
        match tokens[at].text.as_str() {
            ";" => return at + 1,
            "{" => return closing(tokens, at) + 1,
            "(" | "[" => at = closing(tokens, at) + 1,
            _ => at += 1,
        }
    }
    at
}

/// The path at the start of `tokens`.
fn path(tokens: &[Token]) -> Names {
    let mut names = vec![tokens[0].text.clone()];
    let mut rest = &tokens[1..];
    while let [colons, name, ..] = rest
        && colons.text == "::"
        && name.is_word()
    {
        names.push(name.text.clone());
        rest = &rest[2..];
    }
    names
}

/// The paths of a tree behind `use`, each with its name here, which is `*` for a glob.
fn branches(stem: &[String], tree: &[Token]) -> Vec<(Names, String)> {
    let mut names = stem.to_vec();
    for (at, token) in tree.iter().enumerate() {
        match token.text.as_str() {
            "::" => {}
            "{" => {
                let inner = &tree[at + 1..closing(tree, at)];
                return split(inner)
                    .flat_map(|tree| branches(&names, tree))
                    .collect();
            }
            "*" => return vec![(names, "*".to_owned())],
            "as" => return vec![(names, tree[at + 1].text.clone())],
            "self" if !names.is_empty() => {}
            name => names.push(name.to_owned()),
        }
    }
    let last = names.last().cloned();
    last.map(|last| (names, last)).into_iter().collect()
}

/// The parts of a list between commas that are not within brackets.
fn split(tokens: &[Token]) -> impl Iterator<Item = &[Token]> {
    let mut depth = 0;
    tokens
        .split(move |token| {
            match token.text.as_str() {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
            depth == 0 && token.text == ","
        })
        .filter(|part| !part.is_empty())
}
