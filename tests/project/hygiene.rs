//! Only the middleware names HTTP types, only the connections name the client for Redis, and only clocks
//! read the time.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::imports;

struct Source {
    path: String,
    code: Vec<(usize, String)>,
}

/// Returns the library's files with their lines of code: no comments, no blank lines, no tests.
fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let source = |path: String| {
        let text = fs::read_to_string(root.join(&path)).expect("source is text");
        Source { code: code(&text), path }
    };
    imports::read().files.into_iter().map(source).collect()
}

/// Returns the numbered lines of code. Tests within a file are its last part.
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
fn http_is_named_by_the_middleware_only() {
    for folder in ["algorithm", "clock", "decision.rs", "limiter", "quota", "base/time.rs"] {
        never(folder, &["http::"], &[]);
    }
}

#[test]
fn unsafe_is_written_in_one_function_only() {
    never("", &["unsafe"], &["base/sync.rs"]);
    let unsafes = |source: &Source| source.code.iter().filter(|(_, line)| stands_in(line, "unsafe")).count();
    let sync = sources().iter().find(|source| source.path == "base/sync.rs").map(unsafes);
    assert_eq!(sync, Some(1), "the hint to load a cache line");
}

#[test]
fn time_is_read_by_the_clocks_only() {
    // These files measure deadlines and departures by the runtime's timer, and no limiter's time.
    let deadlines = ["cluster", "health", "link", "mod", "pause", "reconnect", "renewal"]
        .map(|file| format!("limiter/redis/connection/{file}.rs"));
    let except: Vec<&str> = deadlines
        .iter()
        .map(String::as_str)
        .chain([
            "clock/mod.rs",
            "clock/counter.rs",
            "clock/system.rs",
            "clock/timer.rs",
            "clock/tokio.rs",
            "limiter/redis/dispatch/mod.rs",
            "limiter/remote/deadline.rs",
            "limiter/remote/flights/batch.rs",
            "limiter/remote/flights/halving.rs",
            "limiter/remote/flights/groups.rs",
            "limiter/remote/flights/mod.rs",
            "limiter/remote/flights/quickest.rs",
            "limiter/remote/flights/server_load.rs",
            "limiter/remote/flights/queue.rs",
            "limiter/store/calls.rs",
            "limiter/store/swapper.rs",
            "limiter/remote/events.rs",
            "limiter/store/silence.rs",
        ])
        .collect();
    never("", &["Instant", "quanta"], &except);
    never("", &["SystemTime::now", "elapsed"], &except);
}

/// An outcome is added in one place.
#[test]
fn kinds_of_a_layers_outcomes_are_decided_in_one_file() {
    let sets_kind = |line: &String| line.contains(".kind = ") || line.contains(".kind,") && line.contains(") = ");
    let all = sources();
    let lines = all.iter().flat_map(|source| source.code.iter().map(move |(at, line)| (&source.path, at, line)));
    let found: Vec<_> = lines.filter(|(_, _, line)| sets_kind(line)).collect();
    let paths: BTreeSet<&str> = found.iter().map(|(path, ..)| path.as_str()).collect();
    // The service for Envoy has no layer, and so no ticket.
    assert_eq!(paths, BTreeSet::from(["middleware/decide/kind.rs", "rules/descriptors.rs"]), "{found:?}");
}

#[test]
fn redis_client_is_named_by_connections_only() {
    let connection: Vec<String> = sources()
        .into_iter()
        .map(|source| source.path)
        .filter(|path| path.starts_with("limiter/redis/connection"))
        .collect();
    let except: Vec<&str> = connection.iter().map(String::as_str).collect();
    never("", &["fred::", "use redis::"], &except);
}

#[test]
fn postgres_client_is_named_by_its_store_only() {
    let all = sources();
    let store =
        all.iter().map(|source| source.path.as_str()).filter(|path| path.starts_with("limiter/store/postgres/"));
    never("", &["tokio_postgres"], &store.collect::<Vec<_>>());
}

/// Code that both clients for Redis need has the feature `_redis`. With `fred` it would be missing in a build with
/// `redis-rs` alone.
#[test]
fn feature_of_one_redis_client_is_named_where_clients_are() {
    let transports = ["mod", "slots", "target"].map(|file| format!("limiter/redis/connection/{file}.rs"));
    let mut except = vec!["lib.rs", "limiter/mod.rs", "limiter/redis/client.rs"];
    except.extend(transports.iter().map(String::as_str));
    never("", &["feature = \"fred\""], &except);
}

#[test]
fn parts_for_any_remote_store_name_no_redis() {
    never("limiter/remote/", &["redis", "RedisError", "RedisErrorKind", "fred::"], &[]);
}

/// ARCHITECTURE lists what no line of a room does. These words would be a beginning of it.
#[test]
fn rooms_do_nothing_that_other_rooms_do() {
    let pure = ["Limiter", "Mutex", "RwLock", "async", "tokio", "std::fs"];
    for room in ["algorithm/", "quota/", "headers/", "refusal/"] {
        never(room, &pure, &[]);
    }
    never("limiter/memory/", &["tokio", "std::fs"], &[]);
    never("limiter/memory/", &["async", "await"], &["limiter/memory/limiter.rs"]); // which holds units after a wait
    never("limiter/redis/wire/", &["tokio", "async", "Mutex"], &[]);
    never("limiter/redis/connection/", &["Policy", "Quota", "Key", "Decision", "ChargeDecision"], &[]);
    never("stats/", &["Limiter", "async", "tokio"], &[]);
    never("rules/", &["std::fs"], &["rules/store/file.rs"]);
    never("conformance/", &["crate::limiter::memory", "crate::limiter::redis", "crate::limiter::remote"], &[]);
}

#[test]
fn words_are_found_as_words() {
    assert!(stands_in("use crate::clock::Clock;", "clock"));
    assert!(stands_in("http::HeaderMap", "http::"));
    assert!(!stands_in("the_clock", "clock"));
    assert!(!stands_in("use Instantly;", "Instant"));
}

/// A literal that was joined by hand keeps the blanks of its second line. Indented text after a line's end, and columns
/// after a colon, are meant.
#[test]
fn texts_have_no_two_blanks_in_a_row() {
    let has_two = |text: &str| {
        text.match_indices("  ").any(|(at, _)| {
            let (before, after) = (&text[..at], text[at..].trim_start());
            !before.is_empty()
                && !before.ends_with([' ', '"', ':'])
                && !before.ends_with("\\n")
                && !after.starts_with(['"', '\\'])
        })
    };
    let mut found = Vec::new();
    for source in sources() {
        for (number, line) in &source.code {
            // From the first quote to the last one: between two literals of a line stand single blanks.
            let text = line.find('"').zip(line.rfind('"')).map_or("", |(start, end)| &line[start..end]);
            if has_two(text) {
                found.push(format!("src/{}:{number}: {}", source.path, line.trim()));
            }
        }
    }
    assert!(found.is_empty(), "two blanks in a row:\n{}", found.join("\n"));
    assert!(has_two("\"of buckets                      that divides"));
}

/// Returns the numbered lines of the Rust examples of a page or a file of source, without those that are not shown.
fn example_lines(path: &str, text: &str) -> Vec<(usize, String)> {
    let mut lines = Vec::new();
    // Whether the lines belong to a block, and to one of Rust.
    let (mut is_in_block, mut is_rust) = (false, false);
    for (index, line) in text.lines().enumerate() {
        let line = match path.ends_with(".md") {
            true => line,
            false => match line.trim_start().strip_prefix("///").or(line.trim_start().strip_prefix("//!")) {
                Some(comment) => comment.strip_prefix(' ').unwrap_or(comment),
                None => continue,
            },
        };
        if let Some(kind) = line.trim_start().strip_prefix("```") {
            is_in_block = !is_in_block;
            is_rust = is_in_block
                && kind.split(',').all(|word| ["", "rust", "no_run", "should_panic", "compile_fail"].contains(&word));
        } else if is_rust && line != "#" && !line.starts_with("# ") {
            lines.push((index + 1, line.to_owned()));
        }
    }
    lines
}

/// A page of rustdoc is 1280 pixels wide, and shows 90 columns of an example.
#[test]
fn examples_fit_their_page() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = imports::read().files.into_iter().map(|path| format!("src/{path}"));
    let pages = |folder: &str| -> Vec<String> {
        let entries = fs::read_dir(root.join(folder)).expect("the folder exists");
        let names = entries.map(|entry| entry.expect("it can be listed").file_name().to_string_lossy().into_owned());
        names.filter(|name| name.ends_with(".md")).map(|name| format!("{folder}/{name}")).collect()
    };
    let guide = pages("src/guide").into_iter().chain(pages("src/guide/coming_from"));
    let (mut found, mut seen) = (Vec::new(), 0);
    for path in source.chain(guide).chain(["README.md".to_owned()]) {
        let text = fs::read_to_string(root.join(&path)).expect("it is text");
        for (number, line) in example_lines(&path, &text) {
            seen += 1;
            if line.chars().count() > 90 {
                found.push(format!("{path}:{number}: {line}"));
            }
        }
    }
    let first_day = include_str!("../../examples/first_day.rs").lines().enumerate();
    found.extend(
        first_day
            .filter(|(_, line)| line.len() > 90)
            .map(|(index, line)| format!("first_day.rs:{}: {line}", index + 1)),
    );
    assert!(seen > 1_000, "{seen} lines of examples");
    assert!(found.is_empty(), "examples wider than 90 columns:\n{}", found.join("\n"));
}

/// The formatter leaves comments as they are. Tables and examples have lines of their own.
#[test]
fn comments_are_no_wider_than_the_code() {
    let mut found = Vec::new();
    for path in imports::read().files {
        let text =
            fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(&path)).expect("source is text");
        let mut is_example = false;
        for (index, line) in text.lines().enumerate() {
            let Some(comment) = line.trim_start().strip_prefix("//") else { continue };
            let words = comment.trim_start_matches(['/', '!']).trim_start();
            is_example ^= words.starts_with("```");
            if !is_example && !words.starts_with('|') && line.chars().count() > 120 {
                found.push(format!("src/{path}:{}: {line}", index + 1));
            }
        }
    }
    assert!(found.is_empty(), "comments wider than 120 columns:\n{}", found.join("\n"));
}
