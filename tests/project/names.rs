//! One name means one thing: no two types of the library have the same name, except for those that are listed here.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::imports;

/// Names that several files may use, each for a private type that no other file of the library sees, and why.
const SHARED: [(&str, &str); 2] = [
    ("Inner", "what the file's public type holds behind an `Arc`"),
    ("Reader", "reads the parts of a value off its front"),
];

/// A type's definition: where it is, and whether other files see it.
struct Definition {
    place: String,
    is_private: bool,
}

/// Returns the types of the library by their names, without those of tests and the types of traits.
fn definitions() -> BTreeMap<String, Vec<Definition>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut definitions: BTreeMap<String, Vec<Definition>> = BTreeMap::new();
    for path in imports::read().files {
        let text = fs::read_to_string(root.join(&path)).expect("source is text");
        let code = text.lines().take_while(|line| !line.starts_with("mod tests {"));
        for (index, line) in code.enumerate() {
            let Some((name, is_private)) = defined(line) else { continue };
            let place = format!("src/{path}:{}", index + 1);
            definitions.entry(name.to_owned()).or_default().push(Definition { place, is_private });
        }
    }
    definitions
}

/// Returns the name of the type that a line defines, and whether it is private.
fn defined(line: &str) -> Option<(&str, bool)> {
    let code = line.trim_start();
    let (visibility, rest) = match code.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ")?,
        Some(rest) => ("pub", rest.strip_prefix(' ')?),
        None => ("", code),
    };
    let name = ["struct ", "enum ", "trait ", "type "].iter().find_map(|kind| rest.strip_prefix(kind))?;
    let is_of_a_trait = code.len() < line.len() && rest.starts_with("type ");
    let end = name.find(|letter: char| !letter.is_alphanumeric() && letter != '_').unwrap_or(name.len());
    let is_a_name = !is_of_a_trait && name.starts_with(char::is_uppercase);
    is_a_name.then(|| (&name[..end], visibility.is_empty()))
}

#[test]
fn type_names_mean_one_thing() {
    let definitions = definitions();
    assert!(definitions.len() > 500, "only {} names were found", definitions.len());
    let repeated: BTreeMap<_, _> = definitions.iter().filter(|(_, found)| found.len() > 1).collect();
    let mut wrong = Vec::new();
    for (name, found) in &repeated {
        let may_repeat = SHARED.iter().any(|(shared, _)| shared == name) && found.iter().all(|one| one.is_private);
        if !may_repeat {
            let places: Vec<&str> = found.iter().map(|one| one.place.as_str()).collect();
            wrong.push(format!("{name}: {}", places.join(", ")));
        }
    }
    assert!(wrong.is_empty(), "give these types names of their own:\n{}", wrong.join("\n"));
    for (name, _) in SHARED {
        assert!(repeated.contains_key(&name.to_owned()), "{name} has one definition or none: take it off the list");
    }
    assert!(repeated.len() <= definitions.len() / 100, "the list is longer than one name in a hundred");
}

#[test]
fn definitions_are_found_in_their_lines() {
    assert_eq!(defined("struct Inner<S: Store> {"), Some(("Inner", true)));
    assert_eq!(defined("pub(in crate::limiter) enum Kind {"), Some(("Kind", false)));
    assert_eq!(defined("pub struct Place;"), Some(("Place", false)));
    assert_eq!(defined("    type Error = E;"), None);
    assert_eq!(defined("    struct Local {"), Some(("Local", true)));
    assert_eq!(defined("structure"), None);
}
