//! What the source promises about itself: imports point downward, and only the clocks read the time.

use std::fs;
use std::path::{Path, PathBuf};

struct Source {
    path: String,
    code: Vec<(usize, String)>,
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the source is there") {
        let path = entry.expect("the source can be listed").path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The library's files with their lines of code: no comments, no blank lines, no tests.
fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    files(&root, &mut found);
    let sources: Vec<Source> = found
        .into_iter()
        .map(|file| {
            let text = fs::read_to_string(&file).expect("source is text");
            let path = file.strip_prefix(&root).expect("it was found there").to_string_lossy().replace('\\', "/");
            Source { path, code: code(&text) }
        })
        .filter(|source| !is_test(&source.path))
        .collect();
    assert!(sources.len() > 30, "the source was not found");
    sources
}

fn is_test(path: &str) -> bool {
    path.split('/').any(|part| {
        let name = part.trim_end_matches(".rs");
        matches!(name, "tests" | "laws" | "naive" | "oracle") || name.ends_with("_tests")
    })
}

/// Tests within a file are its last part.
fn code(text: &str) -> Vec<(usize, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let tests = lines
        .windows(2)
        .position(|pair| pair[0].trim() == "#[cfg(test)]" && pair[1].starts_with("mod ") && pair[1].ends_with('{'))
        .unwrap_or(lines.len());
    let numbered = lines.iter().take(tests).enumerate();
    let code = numbered.map(|(index, line)| (index + 1, line.split("//").next().unwrap_or("").to_owned()));
    code.filter(|(_, line)| !line.trim().is_empty()).collect()
}

/// Fails with each line of the files below `folder` in which one of the words stands.
fn never(folder: &str, words: &[&str], except: &[&str]) {
    let mut found = Vec::new();
    let mut looked_at = 0;
    for source in sources().iter().filter(|source| source.path.starts_with(folder)) {
        if except.contains(&source.path.as_str()) {
            continue;
        }
        looked_at += 1;
        for (number, line) in &source.code {
            if words.iter().any(|word| stands_in(line, word)) {
                found.push(format!("src/{}:{number}: {}", source.path, line.trim()));
            }
        }
    }
    assert!(looked_at > 0, "there is no src/{folder}");
    assert!(found.is_empty(), "{words:?} must not stand here:\n{}", found.join("\n"));
}

fn stands_in(line: &str, word: &str) -> bool {
    let part_of_a_word = |at: Option<char>| at.is_some_and(|at| at.is_alphanumeric() || at == '_');
    line.match_indices(word).any(|(start, _)| {
        let before = line[..start].chars().next_back();
        let after = line[start + word.len()..].chars().next();
        !part_of_a_word(before) && (word.ends_with(':') || !part_of_a_word(after))
    })
}

#[test]
fn algorithms_know_neither_clocks_nor_limiters_nor_the_middleware() {
    never("algorithm", &["clock", "limiter", "middleware", "Policy", "Key", "Outcome", "http::"], &[]);
}

#[test]
fn what_quotas_are_made_of_knows_nothing_above() {
    never("quota", &["clock", "limiter", "middleware", "Policy", "Key", "Outcome", "http::"], &[]);
    never("time.rs", &["crate::"], &[]);
    never("decision.rs", &["limiter", "middleware", "clock", "http::"], &[]);
}

#[test]
fn limiters_know_neither_http_nor_the_middleware() {
    never("limiter", &["http::", "middleware"], &[]);
    never("clock.rs", &["limiter", "middleware", "http::"], &[]);
}

#[test]
fn only_the_clocks_read_the_time() {
    // What is measured there are deadlines and departures, by the runtime's timer, and no limiter's time.
    let deadlines = ["cluster", "keeper", "mod", "news", "server"].map(|file| format!("limiter/redis/store/{file}.rs"));
    let except: Vec<&str> = deadlines
        .iter()
        .map(String::as_str)
        .chain(["clock.rs", "clock/tokio.rs", "middleware/delay/timer.rs"])
        .collect();
    never("", &["Instant", "quanta"], &except);
    never("", &["SystemTime::now", "elapsed"], &except);
}

#[test]
fn only_the_seam_names_the_client() {
    let seam: Vec<String> = sources()
        .into_iter()
        .map(|source| source.path)
        .filter(|path| path.starts_with("limiter/redis/store"))
        .collect();
    let except: Vec<&str> = seam.iter().map(String::as_str).collect();
    never("", &["fred::"], &except);
}

#[test]
fn words_are_found_as_words() {
    assert!(stands_in("use crate::clock::Clock;", "clock"));
    assert!(stands_in("http::HeaderMap", "http::"));
    assert!(!stands_in("the_clock", "clock"));
    assert!(!stands_in("use Instantly;", "Instant"));
}
