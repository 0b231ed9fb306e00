//! Reads the library's source and finds which file uses what from which other file.
//!
//! This is no compiler. It knows `mod` and `use` declarations, the names that a module defines, and
//! paths; that is enough for code that rustfmt has formatted. A name counts where it is defined: a
//! `pub use` between the two files changes nothing. A module that shows a name of a module within it
//! uses that name only if its code mentions it, too. A name that a macro defines counts where its module is.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// For each arrow, from the file that uses a name to the file that defines it, one such use.
pub(crate) type Arrows = BTreeMap<(String, String), String>;

/// The files of the library and the arrows between them. What exists for tests only is left out.
pub(crate) struct Graph {
    pub(crate) files: BTreeSet<String>,
    pub(crate) arrows: Arrows,
}

impl Graph {
    /// Reads the crate whose root is this file of the folder.
    pub(crate) fn read(src: &Path, root: &str) -> Self {
        let mut tree = Tree::default();
        tree.add_file(src, root, None);
        let mut arrows = Arrows::new();
        for (at, module) in tree.modules.iter().enumerate() {
            let imported =
                module.imports.iter().map(|import| (&import.path, tree.imported(at, import), import.is_public));
            let used = module.paths.iter().map(|path| (path, tree.definition(at, path), false));
            for (path, to, is_shown) in imported.chain(used) {
                let Some(to) = to.filter(|to| !(is_shown && tree.is_within(*to, at))) else { continue };
                let to = &tree.modules[to].file;
                if *to != module.file {
                    arrows.entry((module.file.clone(), to.clone())).or_insert_with(|| path.join("::"));
                }
            }
        }
        Self { files: tree.modules.into_iter().map(|module| module.file).collect(), arrows }
    }
}

/// The text before a name that begins no path: a field's or method's name, or the name of a new
/// function.
const NOT_BEFORE_A_PATH: [&str; 3] = [".", "::", "fn"];

struct Module {
    file: String,
    parent: Option<usize>,
    children: BTreeMap<String, usize>,
    defines: BTreeSet<String>,
    imports: Vec<Import>,
    /// Paths and lone names that stand in the code, outside of `use` declarations.
    paths: BTreeSet<Vec<String>>,
}

struct Import {
    path: Vec<String>,
    /// The name in this module; `*` for all names.
    name: String,
    is_public: bool,
}

#[derive(Default)]
struct Tree {
    modules: Vec<Module>,
}

impl Tree {
    fn add_file(&mut self, src: &Path, file: &str, parent: Option<usize>) -> usize {
        let text = fs::read_to_string(src.join(file)).unwrap_or_else(|error| panic!("src/{file}: {error}"));
        let at = self.add(file.to_owned(), parent);
        self.read(src, at, &tokens(&text));
        at
    }

    fn add(&mut self, file: String, parent: Option<usize>) -> usize {
        let (children, defines, paths) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        self.modules.push(Module { file, parent, children, defines, imports: Vec::new(), paths });
        self.modules.len() - 1
    }

    /// Reads the tokens of a module.
    fn read(&mut self, src: &Path, at: usize, tokens: &[String]) {
        let token = |index: usize| tokens.get(index).map_or("", String::as_str);
        let (mut index, mut depth, mut is_public) = (0, 0_u32, false);
        while index < tokens.len() {
            let (word, next) = (token(index), token(index + 1));
            match word {
                "#" => {
                    let end = group_end(tokens, index + 1 + usize::from(next == "!"));
                    let is_test = is_for_tests(&tokens[index..end]);
                    index = if is_test { item_end(tokens, end) } else { end };
                    continue;
                }
                "{" => depth += 1,
                "}" => depth -= 1,
                "pub" => {
                    is_public = true;
                    index = if next == "(" { group_end(tokens, index + 1) } else { index + 1 };
                    continue;
                }
                "mod" if token(index + 2) == ";" => {
                    let child = self.add_file(src, &self.file_of(src, at, next), Some(at));
                    self.modules[at].children.insert(next.to_owned(), child);
                }
                "mod" if token(index + 2) == "{" => {
                    let child = self.add(self.modules[at].file.clone(), Some(at));
                    self.modules[at].children.insert(next.to_owned(), child);
                    let end = group_end(tokens, index + 2);
                    self.read(src, child, &tokens[index + 3..end - 1]);
                    index = end;
                    continue;
                }
                "use" if next != "<" => {
                    let end = index + tokens[index..].iter().position(|token| token == ";").expect("a use ends");
                    let mut rest = &tokens[index + 1..end];
                    import(&mut rest, &[], is_public, &mut self.modules[at].imports);
                    index = end;
                }
                "struct" | "enum" | "trait" | "union" | "type" | "fn" | "const" | "static" if depth == 0 => {
                    self.modules[at].defines.insert(next.to_owned());
                }
                "macro_rules" => {
                    self.modules[at].defines.insert(token(index + 2).to_owned());
                    index = group_end(tokens, index + 3);
                    continue;
                }
                _ if is_name(word) && (index == 0 || !NOT_BEFORE_A_PATH.contains(&token(index - 1))) => {
                    let mut path = vec![word.to_owned()];
                    while token(index + 1) == "::" && is_name(token(index + 2)) {
                        path.push(token(index + 2).to_owned());
                        index += 2;
                    }
                    self.modules[at].paths.insert(path);
                }
                _ => {}
            }
            is_public = false;
            index += 1;
        }
    }

    /// The file of a module's child.
    fn file_of(&self, src: &Path, at: usize, child: &str) -> String {
        let file = &self.modules[at].file;
        let folder = match file.rsplit_once('/').unwrap_or(("", file)) {
            ("", "lib.rs" | "main.rs") => String::new(),
            (folder, "mod.rs") => format!("{folder}/"),
            _ => format!("{}/", file.trim_end_matches(".rs")),
        };
        let [alone, within] = [format!("{folder}{child}.rs"), format!("{folder}{child}/mod.rs")];
        if src.join(&alone).exists() { alone } else { within }
    }

    /// The module whose names an import brings in.
    fn imported(&self, at: usize, import: &Import) -> Option<usize> {
        if import.name != "*" {
            return self.definition(at, &import.path);
        }
        // Otherwise the names are an enum's variants.
        self.module(at, &import.path).or_else(|| self.definition(at, &import.path))
    }

    /// Whether a module is another's child, or a child of its children.
    fn is_within(&self, module: usize, other: usize) -> bool {
        self.modules[module].parent.is_some_and(|parent| parent == other || self.is_within(parent, other))
    }

    /// The module that a path names.
    fn module(&self, at: usize, path: &[String]) -> Option<usize> {
        path.iter().try_fold(at, |at, name| match name.as_str() {
            "crate" => Some(0),
            "self" => Some(at),
            "super" => self.modules[at].parent,
            _ => self.modules[at].children.get(name).copied(),
        })
    }

    /// The module that defines what a path names, if it is of this crate and not a module itself.
    fn definition(&self, at: usize, path: &[String]) -> Option<usize> {
        self.lookup(at, path, 0)
    }

    fn lookup(&self, at: usize, path: &[String], depth: u32) -> Option<usize> {
        let (name, rest) = path.split_first()?;
        let module = &self.modules[at];
        let keyword = match name.as_str() {
            "crate" => Some(0),
            "self" => Some(at),
            "super" => Some(module.parent.expect("no path leads out of the crate")),
            _ => None,
        };
        if let Some(to) = keyword {
            return self.lookup(to, rest, depth);
        }
        if let Some(to) = module.children.get(name).copied() {
            // A macro may define the name: then the module counts that is named.
            return self.lookup(to, rest, depth).or_else(|| self.module(to, rest).is_none().then_some(to));
        }
        if module.defines.contains(name) {
            return Some(at);
        }
        // Imports that import each other would be followed for ever.
        if depth > 8 {
            return None;
        }
        for import in module.imports.iter().filter(|import| import.name == *name && import.path != path) {
            let path: Vec<String> = import.path.iter().chain(rest).cloned().collect();
            if let Some(found) = self.lookup(at, &path, depth + 1) {
                return Some(found);
            }
        }
        for import in module.imports.iter().filter(|import| import.name == "*") {
            let path: Vec<String> = import.path.iter().chain(path).cloned().collect();
            if let Some(found) = self.lookup(at, &path, depth + 1) {
                return Some(found);
            }
        }
        None
    }
}

/// Adds the names of a `use` declaration, of which the part before `rest` is in `before`.
fn import(rest: &mut &[String], before: &[String], is_public: bool, found: &mut Vec<Import>) {
    let mut path = before.to_vec();
    let mut name = None;
    while let Some((word, after)) = rest.split_first() {
        *rest = after;
        match word.as_str() {
            "{" => {
                while rest.first().is_some_and(|token| token != "}") {
                    import(rest, &path, is_public, found);
                    if rest.first().is_some_and(|token| token == ",") {
                        *rest = &rest[1..];
                    }
                }
                *rest = &rest[1..];
                return;
            }
            "as" => {
                name = Some(rest[0].clone());
                *rest = &rest[1..];
            }
            "*" => name = Some("*".to_owned()),
            "self" if !path.is_empty() => {}
            "::" => {}
            _ => path.push(word.clone()),
        }
        if rest.first().is_some_and(|token| token == "," || token == "}") {
            break;
        }
    }
    let name = name.or_else(|| path.last().cloned()).expect("a use names something");
    found.push(Import { path, name, is_public });
}

/// Whether an attribute is `cfg(test)` or `cfg(all(test, …))`.
fn is_for_tests(attribute: &[String]) -> bool {
    let words: Vec<&str> = attribute.iter().map(String::as_str).collect();
    words.starts_with(&["#", "[", "cfg", "(", "test"])
        || (words.starts_with(&["#", "[", "cfg", "(", "all"]) && words.contains(&"test"))
}

/// The index after the group that begins at this index.
fn group_end(tokens: &[String], from: usize) -> usize {
    let mut depth = 0_u32;
    for (index, token) in tokens.iter().enumerate().skip(from) {
        match token.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => continue,
        }
        if depth == 0 {
            return index + 1;
        }
    }
    tokens.len()
}

/// The index after the item, statement or field that begins at this index.
fn item_end(tokens: &[String], from: usize) -> usize {
    let mut index = from;
    while tokens.get(index).is_some_and(|token| token == "#") {
        index = group_end(tokens, index + 1);
    }
    let is_use = |index: usize| tokens.get(index).is_some_and(|token| token == "use");
    let keywords =
        ["pub", "mod", "fn", "struct", "enum", "trait", "impl", "type", "const", "static", "unsafe", "async"];
    let is_item = is_use(index) || tokens.get(index).is_some_and(|token| keywords.contains(&token.as_str()));
    while let Some(token) = tokens.get(index) {
        match token.as_str() {
            ";" => return index + 1,
            "," if !is_item => return index + 1,
            "}" => return index,
            "{" if is_item && !tokens[from..index].iter().any(|token| token == "use") => {
                return group_end(tokens, index);
            }
            "(" | "[" | "{" => index = group_end(tokens, index),
            _ => index += 1,
        }
    }
    index
}

fn is_name(token: &str) -> bool {
    token.starts_with(|first: char| first.is_alphabetic() || first == '_')
}

/// The words and signs of a text in Rust, without comments. What stands in quotes is one token,
/// `"`.
fn tokens(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if let Some(length) = literal(rest) {
            found.push("\"".to_owned());
            length
        } else if first.is_alphanumeric() || first == '_' {
            let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            found.push(rest[..length].to_owned());
            length
        } else if first.is_whitespace() {
            first.len_utf8()
        } else {
            let length = if rest.starts_with("::") { 2 } else { first.len_utf8() };
            found.push(rest[..length].to_owned());
            length
        };
        rest = &rest[length..];
    }
    found
}

/// The length of the text, character or lifetime that begins here.
fn literal(rest: &str) -> Option<usize> {
    let prefix = ["br", "b", "r", ""]
        .into_iter()
        .find(|prefix| rest.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(['"', '\'', '#'])))?;
    let quoted = &rest[prefix.len()..];
    if prefix.ends_with('r') {
        let hashes = quoted.len() - quoted.trim_start_matches('#').len();
        let end = format!("\"{}", "#".repeat(hashes));
        let within = quoted.get(hashes..)?.strip_prefix('"')?;
        return Some(prefix.len() + hashes + 1 + within.find(&end)? + end.len());
    }
    let quote = quoted.chars().next().filter(|quote| *quote != '#')?;
    let mut escaped = false;
    for (index, c) in quoted.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return Some(prefix.len() + index + 1),
            // A lifetime, which has no second quote.
            _ if quote == '\'' && index > 1 && !quoted.starts_with("'\\") => break,
            _ => {}
        }
    }
    (quote == '\'').then(|| 1 + quoted[1..].find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(0))
}
