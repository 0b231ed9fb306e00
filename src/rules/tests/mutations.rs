//! Files that are changed at random are read or refused: without a panic, and within bounds of
//! memory and time.

use std::sync::atomic::{AtomicU64, Ordering};

use allocation_counter::measure;

use super::super::convert::convert_envoy;
use super::super::document::BYTES_MAX;
use super::super::problem::{Problem, RulesErrorKind};
use super::super::read::{KnownNames, read as read_any};
use super::{accepted, refused, spec};
use crate::base::sampling::{cases, stride};

/// Pieces that mean something to YAML or to the reader.
const PIECES: &[&str] = &[
    "[",
    "]",
    "{",
    "}",
    ": ",
    "- ",
    "\n",
    "  ",
    "\t",
    ", ",
    "&a ",
    "*a",
    "|",
    "|-\n",
    ">",
    "\"",
    "'",
    " # ",
    "!",
    "!!str ",
    "%YAML 1.2\n",
    "---\n",
    "...\n",
    "? ",
    "\r",
    "\r\n",
    "\u{85}",
    "\u{2028}",
    "\u{feff}",
    "\\",
    "\\x",
    "\\u12",
    "é",
    "\0",
    "@",
    "`",
    "<<: *a\n",
    "~",
    "-1",
    "1e9",
    "0x1f",
    "10 MiB",
    "content-length",
    "time: ",
    "mon-fri 08:00-18:00 +01:00",
    "use: ",
    "defaults: {key: path}\n",
    "templates: {a: {quota: 5/s}}\n",
    "999999999999999999999",
    "null",
    "true",
    "name: ",
    "quota: ",
    "5/s",
    "100/min burst 20",
    "{unit: year, requests_per_unit: 1}",
    "key: ",
    "header ",
    "client-ip",
    "query a",
    "not: ",
    "query: {a: b}",
    "path: /{id}",
    "/{*rest}",
    "match: ",
    "10.0.0.0/8",
    "::/0",
    "block: ",
    "plans: ",
    "otherwise: ",
    "cost: 0",
    "was: ",
    "candidate: ",
    "domain: d\n",
    "descriptors: ",
    "value: a*b",
    "rate_limit: ",
    "unlimited: true",
    "replaces: ",
    "metadata: {tower_ratelimit: {options: ",
];

const WORDS: &[&str] =
    &["x", "0", "-", "é", "1", "99999999999999999999", "/", "{id}", "*", "a b", "block", "per", "\\"];

/// The most memory that a file takes while it is read, in bytes. The parser keeps all tokens of a list in brackets.
const MEMORY_MAX: u64 = 160 << 20;

/// A generator of numbers (xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % (bound.max(1) as u64)).unwrap()
    }
}

/// Makes a few changes: inserts, removes, replaces, copies and cuts off.
fn mutated(text: &str, numbers: &mut Numbers) -> String {
    let mut chars: Vec<char> = text.chars().collect();
    for _ in 0..=numbers.below(3) {
        let at = numbers.below(chars.len() + 1);
        let end = (at + numbers.below(12)).min(chars.len());
        match numbers.below(6) {
            0 => drop(chars.splice(at..end, [])),
            1 => {
                let from = numbers.below(chars.len());
                let copied: Vec<char> = chars.iter().skip(from).take(numbers.below(40)).copied().collect();
                chars.splice(at..at, copied);
            }
            2 => chars.truncate(at.max(chars.len() / 2)),
            3 => drop(chars.splice(at..end, PIECES[numbers.below(PIECES.len())].chars())),
            _ => drop(chars.splice(at..at, PIECES[numbers.below(PIECES.len())].chars())),
        }
    }
    chars.into_iter().collect()
}

/// Replaces a few words by others, or by nothing, which is often still YAML.
fn reworded(text: &str, numbers: &mut Numbers) -> String {
    let mut words: Vec<&str> = text.split_inclusive(|c: char| !c.is_alphanumeric() && !"-_*/".contains(c)).collect();
    for _ in 0..=numbers.below(3) {
        let (at, from) = (numbers.below(words.len()), numbers.below(words.len()));
        let is_word = |word: &str| word.len() > 1;
        match (words.get(at), words.get(from)) {
            (Some(old), Some(new)) if is_word(old) && is_word(new) && old.chars().last() == new.chars().last() => {
                words[at] = words[from];
            }
            (Some(old), _) if is_word(old) && numbers.below(2) == 0 => {
                words.insert(at, WORDS[numbers.below(WORDS.len())])
            }
            _ => {}
        }
    }
    words.concat()
}

#[test]
fn mutated_files_are_read_or_refused() {
    let count = u64::from(cases(100_000));
    let texts = |found: Vec<super::Case>| found.into_iter().map(|case| case.text).collect::<Vec<String>>();
    let (good, bad) = (texts(accepted()), texts(refused()));
    let (next, read, refused) = (AtomicU64::new(1), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number > count {
                        return;
                    }
                    let mut numbers = Numbers(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
                    let seeds = if numbers.below(4) > 0 { &good } else { &bad };
                    let seed = &seeds[numbers.below(seeds.len())];
                    let text =
                        if numbers.below(2) == 0 { mutated(seed, &mut numbers) } else { reworded(seed, &mut numbers) };
                    match spec(&text) {
                        Ok(file) => {
                            if file.domain.is_some() {
                                // A file that is written anew can be read.
                                let native = convert_envoy(&text).unwrap();
                                read_any(native.as_bytes(), KnownNames::default(), |_, _| ())
                                    .unwrap_or_else(|error| panic!("{text}\n{native}\n{error}"));
                            }
                            read.fetch_add(1, Ordering::Relaxed)
                        }
                        Err(error) => {
                            assert!(!error.problems().is_empty() && !error.to_string().is_empty());
                            // Words of the YAML parser, which may change with its version.
                            let of_parser = ["while parsing", "while scanning", "did not find", "scalar"];
                            let of_parser = |problem: &Problem| {
                                let text = problem.message();
                                text.starts_with("this is not YAML") && of_parser.iter().any(|word| text.contains(word))
                            };
                            assert!(!error.problems().iter().any(of_parser), "{text}\n{error}");
                            refused.fetch_add(1, Ordering::Relaxed)
                        }
                    };
                }
            });
        }
    });
    let (read, refused) = (read.into_inner(), refused.into_inner());
    println!("{read} of {count} files were read, {refused} refused");
    assert!(count < 10_000 || read > count / 100, "{read} of {count}");
}

/// Returns a rule of about a hundred bytes.
fn full_rule(number: usize) -> String {
    format!(
        "- name: r{number}\n  quota: [5/s, 100/min]\n  key: [path, tenant]\n  match: {{method: [GET, PUT], path: \"/{number}/{{id}}\"}}\n"
    )
}

/// Returns the largest files of one pattern.
fn large_files() -> Vec<(&'static str, String)> {
    let filled = |begin: &str, part: &str, end: &str| {
        format!("{begin}{}{end}", part.repeat((BYTES_MAX - begin.len() - end.len()) / part.len()))
    };
    // As many separators as a file may have.
    let separated = |begin: &str, part: &str, end: &str| {
        let separators = |text: &str| text.matches(['[', ']', '{', '}', ',', '?', ':']).count();
        format!("{begin}{}{end}", part.repeat((200_000 - separators(begin) - separators(end)) / separators(part)))
    };
    let numbered = |begin: &str, part: &dyn Fn(usize) -> String, end: &str| {
        let mut text = begin.to_owned();
        for number in 0.. {
            let part = part(number);
            if text.len() + part.len() + end.len() > BYTES_MAX {
                break;
            }
            text.push_str(&part);
        }
        text + end
    };
    let aliases = |field: &str, value: &str| {
        let begin = format!("rules:\n- name: a\n  quota: 5/s\n  key: global\n  match:\n   {field}:\n   - &a {value}\n");
        filled(&begin, "   - *a\n", "")
    };
    let mut bomb = "rules:\n  - &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..20 {
        let before = format!("*a{}, ", level - 1).repeat(10);
        bomb.push_str(&format!("  - &a{level} [{before}]\n"));
    }
    let rule = "rules: [{name: a, key: global, quota: ";
    vec![
        ("opening brackets", filled("", "[", "")),
        ("short items", filled("[", "a,", "]")),
        ("empty items", filled("rules: [", "~,", "]")),
        ("empty entries", filled("rules: [", "{},", "]")),
        ("braces", filled("", "{", "")),
        ("dashes", filled("", "- ", "")),
        ("nested keys", filled("", "a: ", "")),
        ("one word", filled("", "a", "")),
        ("lines of text", filled("", "a\n", "")),
        ("breaks", filled("", "\n", "")),
        ("an open quote", filled("\"", "a\n", "")),
        ("a block of text", filled("rules: |\n", " a\n", "")),
        ("fields of one name", filled("", "a: b\n", "")),
        ("fields", numbered("", &|n| format!("f{n}:\n"), "")),
        ("descriptors", numbered("domain: a\ndescriptors:\n", &|n| format!("- {{key: k, value: v{n}*}}\n"), "")),
        ("fields in a line", numbered("{", &|n| format!("f{n},"), "}")),
        ("anchors", numbered("rules:\n", &|n| format!("- &a{n} b\n"), "")),
        ("directives", numbered("", &|n| format!("%TAG !a{n}! b\n"), "--- []")),
        ("aliases of a large value", filled("rules:\n- &a [a, b, c, d, e, f, g, h, i, j]\n", "- *a\n", "")),
        ("aliases of aliases", bomb),
        ("aliases of a long host", aliases("host", &"a".repeat(400_000))),
        ("aliases of a long path", aliases("path", &"/a".repeat(500))),
        ("aliases of a long user agent", aliases("user-agent", &"a*".repeat(200_000))),
        ("commas", filled("[", ",", "")),
        ("fewer short items", separated("[", "a,", "]")),
        ("fewer empty items", separated("rules: [", "~,", "]")),
        ("fewer empty entries", separated("rules: [", "{},", "]")),
        ("fewer commas", separated("[", ",", "")),
        ("fewer colons", separated("[", ": ", "]")),
        ("fewer questions", separated("[", "? ", "]")),
        ("fewer quotas", separated("rules: [{name: a, key: global, quota: [", "5/s,", "]}]")),
        ("colons", filled("", ":", "")),
        ("colons in brackets", filled("[", ": ", "]")),
        ("questions", filled("[", "? ", "]")),
        ("rules", filled("rules:\n", "- {}\n", "")),
        ("rules with unknown fields", filled("rules:\n", "- {quote: 5}\n", "")),
        (
            "ten thousand rules",
            numbered("rules:\n", &|n| if n < 10_000 { full_rule(n) } else { format!("#{}\n", "-".repeat(78)) }, ""),
        ),
        ("quotas", filled(&format!("{rule}["), "5/s,", "]}]")),
        ("words of a quota", filled(rule, " burst 5", "}]")),
        ("a long quota", filled(&format!("{rule}5"), "0", "}]")),
        (
            "plans",
            numbered(
                "rules: [{name: a, key: global, plans: {by: host, otherwise: x, quotas: {",
                &|n| format!("{n}: 5/s,"),
                "}}}]",
            ),
        ),
        ("networks", numbered("rules: []\naccess:\n  deny:\n", &|n| format!("  - 10.{}.{}.1\n", n / 256, n % 256), "")),
        ("paths", filled(&format!("{rule}5/s, match: {{path: \"/"), "{a}/", "\"}}]")),
        ("names in paths", numbered(&format!("{rule}5/s, match: {{path: \"/"), &|n| format!("{{a{n}}}/"), "\"}}]")),
        ("headers", numbered(&format!("{rule}5/s, match: {{header: {{"), &|n| format!("x{n}: a,"), "}}}]")),
        ("parameters", numbered(&format!("{rule}5/s, match: {{query: {{"), &|n| format!("x{n}: a,"), "}}}]")),
        ("what is left out", filled(&format!("{rule}5/s, match: {{not: ["), "{method: GET},", "]}}]")),
        ("times", filled(&format!("{rule}5/s, match: {{time: ["), "mon UTC,", "]}}]")),
        ("days of a time", filled(&format!("{rule}5/s, match: {{time: "), "mon-sun ", "08:00-09:00 UTC}}]")),
        ("parts of a key", filled("rules: [{name: a, quota: 5/s, key: [", "path,", "]}]")),
        ("a long name", filled("rules: [{quota: 5/s, key: path, name: ", "a", "}]")),
        ("a long word", filled("rules: [{name: a, quota: 5/s, key: ", "a", "}]")),
        (
            "rules of one template",
            numbered(
                "defaults: {key: path, match: {path: /a}}\ntemplates: {t: {quota: 5/s}}\nrules:\n",
                &|n| if n < 10_000 { format!("- {{name: a{n}, use: t}}\n") } else { format!("#{}\n", "-".repeat(78)) },
                "",
            ),
        ),
        (
            "rules of a large template",
            numbered(
                &format!(
                    "templates: {{t: {{quota: 5/s, key: path, match: {{path: [{}]}}}}}}\nrules:\n",
                    "/a, ".repeat(10_000)
                ),
                &|n| if n < 10_000 { format!("- {{name: a{n}, use: t}}\n") } else { format!("#{}\n", "-".repeat(78)) },
                "",
            ),
        ),
        ("templates", numbered("rules: []\ntemplates:\n", &|n| format!(" t{n}: {{key: path}}\n"), "")),
        (
            "former names",
            numbered("rules:\n", &|n| format!("- {{name: a{n}, was: b{n}, quota: 5/s, key: path}}\n"), ""),
        ),
    ]
}

#[test]
fn large_files_are_read_within_bounds() {
    for (name, text) in large_files().into_iter().step_by(stride()) {
        let mut outcome = None;
        let used = measure(|| outcome = Some(spec(&text).map(|_| ()).map_err(|error| error.problems().len())));
        println!("{name}: {} bytes, {outcome:?}, {} KiB", text.len(), used.bytes_max / 1024);
        assert!(used.bytes_max < MEMORY_MAX, "{name}: {} bytes", used.bytes_max);
    }
}

/// Each misspelt name is compared with all templates.
#[test]
fn suggestions_take_bounded_time() {
    let templates: String = (0..3_000).map(|n| format!(" t{n:059}: {{key: path}}\n")).collect();
    let rules: String = (0..100).map(|n| format!("- {{name: a{n}, quota: 5/s, use: s{n:059}}}\n")).collect();
    let error = spec(&format!("templates:\n{templates}rules:\n{rules}")).unwrap_err();
    let suggestions: Vec<bool> = error.problems().iter().map(|problem| problem.suggestion().is_some()).collect();
    assert_eq!((suggestions.len(), suggestions[0], suggestions[99]), (100, true, false));
}

#[test]
fn files_beyond_the_bounds_are_refused() {
    let too_long = " ".repeat(BYTES_MAX + 1);
    assert!(spec(&too_long).unwrap_err().to_string().contains("more than 1048576 bytes"));
    let rules =
        |count: usize| (0..count).map(|n| format!("- {{name: r{n}, quota: 5/s, key: global}}\n")).collect::<String>();
    assert_eq!(spec(&format!("rules:\n{}", rules(10_000))).unwrap().rules.len(), 10_000);
    assert!(spec(&format!("rules:\n{}", rules(10_001))).unwrap_err().to_string().contains("the most is 10000"));
    let nested = |count: usize| {
        let inner: String = (1..count).map(|n| format!("  - {{key: k, value: v{n}}}\n")).collect();
        format!("domain: a\ndescriptors:\n- key: k\n  descriptors:\n{inner}")
    };
    assert!(spec(&nested(10_000)).unwrap().domain.is_some());
    assert!(spec(&nested(10_001)).unwrap_err().to_string().contains("10001 descriptors; the most is 10000"));
    for (name, is_right) in [("n".repeat(1_000), true), ("n".repeat(1_001), false)] {
        let known = KnownNames { are_all: false, ..KnownNames::default() };
        let read =
            |rest: &str| read_any(format!("rules: [{{name: a, quota: 5/s, {rest}}}]").as_bytes(), known, |_, _| ());
        assert_eq!(read(&format!("key: {name}")).is_ok(), is_right);
        assert_eq!(read(&format!("key: path, match: {{action: {name}}}")).is_ok(), is_right);
    }
    let patterns = |count: usize| {
        let agents: String = (0..count).map(|n| format!("'*{n}*', ")).collect();
        spec(&format!("rules: [{{name: n, quota: 5/s, key: path, match: {{user-agent: [{agents}x], host: '*'}}}}]"))
    };
    assert!(patterns(9_999).is_ok());
    assert!(patterns(10_000).unwrap_err().to_string().contains("more than 10000 patterns with `*`"));
    let shared = |count: usize, rules: usize| {
        let paths = "/a, ".repeat(count);
        let rules: String = (0..rules).map(|n| format!("- {{name: a{n}, use: t}}\n")).collect();
        spec(&format!(
            "defaults: {{key: path}}\ntemplates: {{t: {{quota: 5/s, match: {{path: [{paths}]}}}}}}\nrules:\n{rules}"
        ))
    };
    assert!(shared(100, 4_000).is_ok());
    assert!(shared(100, 5_000).unwrap_err().to_string().contains("inherit more than 500000 values"));
    let shared_patterns = |rules: usize| {
        let rules: String = (0..rules).map(|n| format!("{{name: a{n}}}, ")).collect();
        spec(&format!(
            "{{defaults: {{quota: 5/s, key: path, match: {{host: 'a*', user-agent: '*b'}}}}, rules: [{rules}]}}"
        ))
    };
    assert!(shared_patterns(4_999).is_ok(), "the patterns of `defaults` themselves count, too");
    assert!(shared_patterns(5_000).unwrap_err().to_string().contains("more than 10000 patterns with `*`"));
    let long = |bytes: usize| spec(&format!("domain: a\ndescriptors: [{{key: k, value: {}}}]", "v".repeat(bytes)));
    assert!(long(1_000).is_ok());
    assert_eq!(long(1_001).unwrap_err().kind(), RulesErrorKind::TooLarge);
    let headers = |count: usize| {
        let names: Vec<String> = (0..count).map(|n| format!("x{n}: a")).collect();
        spec(&format!("rules: [{{name: n, quota: 5/s, key: path, match: {{header: {{{}}}}}}}]", names.join(", ")))
    };
    assert!(headers(32).is_ok());
    assert!(headers(33).unwrap_err().to_string().contains("`header` has at most 32 names, not 33"));
    let aliases = |bytes: usize| {
        spec(&format!(
            "rules: [{{name: n, quota: 5/s, key: path, match: {{host: [&a {}, *a, *a]}}}}]",
            "a".repeat(bytes)
        ))
    };
    assert!(aliases(600_000).is_ok());
    assert!(aliases(700_000).unwrap_err().to_string().contains("texts have more than 2097152 bytes, aliases included"));
}
