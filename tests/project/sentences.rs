//! Draws sentences of the project at random, so that a reader who did not write them can say which have to be read twice.
//!
//! `SENTENCES=SEED cargo test --test project sentences -- --nocapture` prints 120 of them, each marked in its paragraph.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// How many sentences of each kind are drawn.
const DRAWN: [(Kind, usize); 4] = [(Kind::Rustdoc, 40), (Kind::Comment, 24), (Kind::Message, 16), (Kind::Guide, 40)];

/// A sentence has at least this many words. Shorter ones name an item, or are a piece of a message. What a message has
/// in braces is no word, because it is another text each time.
const MIN_WORDS: usize = 6;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// The documentation of an item or a file.
    Rustdoc,
    /// A comment within the code.
    Comment,
    /// A text that a user or an operator reads while the program runs, such as that of an error.
    Message,
    /// The guide and the README.
    Guide,
}

struct Sentence {
    /// The file, and the line in which the sentence's paragraph begins.
    place: String,
    /// The paragraph, up to the sentence and after it. A reader meets a sentence there.
    around: [String; 2],
    text: String,
}

type Sentences = BTreeMap<Kind, Vec<Sentence>>;

/// Returns the sentences of the library, its guide and the README, without those of tests.
fn sentences() -> Sentences {
    let mut sentences = Sentences::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    read_file(root, &root.join("README.md"), &mut sentences);
    read_folder(root, &root.join("src"), &mut sentences);
    sentences
}

fn read_folder(root: &Path, folder: &Path, sentences: &mut Sentences) {
    let entries = fs::read_dir(folder).expect("the folder is there");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("it can be read").path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let is_of_tests = ["tests", "properties", "oracle"].contains(&name.as_str()) || name.ends_with("_tests");
        if is_of_tests {
            continue;
        }
        if path.is_dir() {
            read_folder(root, &path, sentences);
        } else {
            read_file(root, &path, sentences);
        }
    }
}

fn read_file(root: &Path, path: &Path, sentences: &mut Sentences) {
    let place = path.strip_prefix(root).unwrap_or(path).display().to_string();
    let lines: Vec<(Kind, String)> = match path.extension().and_then(|extension| extension.to_str()) {
        Some("md") => {
            let text = fs::read_to_string(path).expect("a page is text");
            text.lines().map(|line| (Kind::Guide, line.to_owned())).collect()
        }
        Some("rs") => {
            let text = fs::read_to_string(path).expect("source is text");
            let code = text.lines().take_while(|line| !line.starts_with("mod tests {"));
            let mut is_literal = false;
            code.map(|line| comment_or_literals(line, &mut is_literal)).collect()
        }
        _ => return,
    };
    read_paragraphs(&place, &lines, sentences);
}

/// Returns the words of a line that is a comment, or the literals in it, each a line of its own. `is_literal` says whether
/// a literal goes on from line to line.
fn comment_or_literals(line: &str, is_literal: &mut bool) -> (Kind, String) {
    let line = line.trim();
    match line.strip_prefix("//") {
        Some(rest) if rest.starts_with(['/', '!']) => return (Kind::Rustdoc, rest[1..].to_owned()),
        Some(rest) => return (Kind::Comment, rest.to_owned()),
        None => {}
    }
    let code = line.replace(r"\\", "").replace("'\"'", "").replace("\\\"", "'");
    let mut literals = Vec::new();
    for (index, part) in code.split('"').enumerate() {
        *is_literal ^= index > 0;
        if *is_literal {
            // A list's mark keeps literals apart.
            let mark = if index > 0 { "* " } else { "" };
            literals.push(format!("{mark}{}", part.trim_end_matches('\\')));
        }
    }
    (Kind::Message, literals.join("\n"))
}

/// Puts lines together to paragraphs, and takes those apart. Examples, tables and titles have no sentences.
fn read_paragraphs(place: &str, lines: &[(Kind, String)], sentences: &mut Sentences) {
    let mut is_example = false;
    let mut paragraph = (Kind::Message, 0, String::new());
    let lines = lines.iter().enumerate();
    for (index, kind, words) in
        lines.flat_map(|(at, (kind, line))| line.split('\n').map(move |words| (at, kind, words)))
    {
        let words = words.trim();
        let is_fence = words.starts_with("```");
        is_example ^= is_fence && *kind != Kind::Message;
        // A message is one line. A literal with a line break is a piece of a script or of a page.
        let is_code = *kind == Kind::Message && words.contains("\\n");
        let is_sentence = !words.is_empty() && !words.starts_with(['|', '#', '<', '!']);
        let is_text = !is_example && !is_fence && !is_code && is_sentence;
        let item = words.strip_prefix("* ").or_else(|| words.strip_prefix("- "));
        if !is_text || item.is_some() || paragraph.0 != *kind {
            let (kind, line, text) = std::mem::replace(&mut paragraph, (*kind, index + 1, String::new()));
            add_sentences(kind, &format!("{place}:{line}"), &text, sentences);
        }
        if is_text {
            paragraph.2.push(' ');
            paragraph.2.push_str(item.unwrap_or(words));
        }
    }
    add_sentences(paragraph.0, &format!("{place}:{}", paragraph.1), &paragraph.2, sentences);
}

fn add_sentences(kind: Kind, place: &str, text: &str, sentences: &mut Sentences) {
    let text = text.trim();
    let mut rest = text;
    while !rest.is_empty() {
        let before = text[..text.len() - rest.len()].to_owned();
        let end = rest.match_indices([' ']).find(|(at, _)| ends_sentence(&rest[..*at], &rest[at + 1..]));
        let (sentence, others) = end.map_or((rest, ""), |(at, _)| rest.split_at(at));
        rest = others.trim_start();
        let is_word = |word: &&str| kind != Kind::Message || !word.contains(['{', '}']);
        if sentence.split(' ').filter(is_word).count() >= MIN_WORDS {
            let around = [before, others.to_owned()];
            let sentence = Sentence { place: place.to_owned(), around, text: sentence.to_owned() };
            sentences.entry(kind).or_default().push(sentence);
        }
    }
}

fn ends_sentence(before: &str, after: &str) -> bool {
    // Two dots are code: the fields that a pattern leaves out.
    before.ends_with(['.', '!', '?']) && !before.ends_with("..") && !after.starts_with(|next: char| next.is_lowercase())
}

/// Returns the next of a sequence of numbers that look random (SplitMix64).
fn next_number(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut number = *state;
    number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

fn draw(seed: u64) -> Vec<(Kind, Sentence)> {
    let mut state = seed;
    let mut drawn = Vec::new();
    for (kind, mut all) in sentences() {
        let count = DRAWN.iter().find(|(drawn, _)| *drawn == kind).map_or(0, |(_, count)| *count);
        assert!(all.len() > 10 * count, "only {} sentences of {kind:?} were found", all.len());
        for _ in 0..count {
            let index = next_number(&mut state) % all.len() as u64;
            drawn.push((kind, all.swap_remove(index as usize)));
        }
    }
    drawn
}

#[test]
fn sentences_are_drawn() {
    let seed = std::env::var("SENTENCES").map_or(1, |seed| seed.parse().expect("SENTENCES is a number"));
    let drawn = draw(seed);
    assert_eq!(drawn.len(), DRAWN.iter().map(|(_, count)| count).sum::<usize>());
    for (number, (kind, sentence)) in drawn.iter().enumerate() {
        let Sentence { place, around: [before, after], text } = sentence;
        println!("{:3} {kind:?} {place}\n    {before}>>{text}<<{after}", number + 1);
    }
}

/// A sentence that begins so has no actor, and its end decides what it is about.
const NOUN_CLAUSES: [&str; 6] = ["What ", "Who ", "Whoever ", "Which ", "Whose ", "Where "];

#[test]
fn sentences_do_not_begin_with_a_noun_clause() {
    let mut found = Vec::new();
    for (kind, sentences) in sentences().into_iter().filter(|(kind, _)| *kind != Kind::Message) {
        let begins = |text: &str| NOUN_CLAUSES.iter().any(|word| text.starts_with(word)) && !text.ends_with('?');
        let wrong = sentences.into_iter().filter(|sentence| begins(&sentence.text));
        found.extend(wrong.map(|Sentence { place, text, .. }| format!("{kind:?} {place}\n    {text}")));
    }
    assert!(found.is_empty(), "give these sentences a subject:\n{}", found.join("\n"));
}

#[test]
fn sentences_end_where_a_reader_says_so() {
    let mut sentences = Sentences::new();
    let text =
        "A client that waits, e.g. for long, gets an answer. `None` is the answer otherwise, as said. It is short.";
    add_sentences(Kind::Guide, "a page", text, &mut sentences);
    let found: Vec<&str> = sentences[&Kind::Guide].iter().map(|sentence| sentence.text.as_str()).collect();
    assert_eq!(
        found,
        ["A client that waits, e.g. for long, gets an answer.", "`None` is the answer otherwise, as said."]
    );
    let mut messages = Sentences::new();
    let lines = "* a list of the rules\n* has more than {max} {unit} of {policy}\n* the rule has no key of its own";
    read_paragraphs("a file", &[(Kind::Message, lines.to_owned())], &mut messages);
    let found: Vec<&str> = messages[&Kind::Message].iter().map(|sentence| sentence.text.as_str()).collect();
    assert_eq!(found, ["the rule has no key of its own"], "pieces are not put together");
    let mut is_literal = false;
    let mut read = |line| comment_or_literals(line, &mut is_literal);
    assert_eq!(read("    /// Returns the key."), (Kind::Rustdoc, " Returns the key.".to_owned()));
    assert_eq!(read("        Err(\"no such \\"), (Kind::Message, "* no such ".to_owned()));
    assert_eq!(read("             rule\")"), (Kind::Message, "rule".to_owned()));
    assert_eq!(read("        [(\"a list\", \"a limit\")]"), (Kind::Message, "* a list\n* a limit".to_owned()));
    assert_eq!(read(r#"        text.push(b"\\");"#), (Kind::Message, "* ".to_owned()), "the literal has ended");
    assert_eq!(read("        None"), (Kind::Message, String::new()));
}
