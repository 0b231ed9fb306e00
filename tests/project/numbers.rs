//! The guide, the README and the documentation of items state numbers of the code, such as the
//! default deadline. Each of these numbers is one constant. If it changes, the test names every
//! sentence that has to follow.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A number of the code, and the sentences that state it.
///
/// The number is a sum of constants, each with its file, and of whole numbers. A term `A max B` is
/// the larger of two. In a sentence `{}` is the number, and `{_}` is any other number. Each
/// sentence is looked for in all documents.
type Promise = (&'static str, &'static [&'static str]);

const PROMISES: &[Promise] = &[
    (
        "src/limiter/remote/options.rs::DEADLINE",
        &[
            "how long a check may take, from {_} to {_}; {} by default",
            "an answer within its deadline ({} by default)",
            "Beyond the deadline, {} by default, every check fails",
            "So the deadline, {} by default, has to be longer",
            "A check has a deadline of {} (",
            "A check fails after {} by default, then a breaker",
            "A request takes one round trip, with a deadline of {}.",
            "Why does a check of Redis have a deadline of {}, and fail?",
            "default_value = \"{}\", value_parser = time, env = \"TOWER_RATELIMIT_DEADLINE\"",
        ],
    ),
    (
        "src/limiter/remote/options.rs::DEADLINE + src/limiter/remote/options.rs::DEADLINE max \
         src/limiter/redis/connection/settings.rs::SILENCE_MIN",
        &["once a check has waited for {} (with the default deadline)"],
    ),
    (
        "src/limiter/remote/options.rs::DEADLINE_MIN",
        &["how long a check may take, from {} to", "a deadline of {deadline:?} is not possible: use {} to"],
    ),
    (
        "src/limiter/remote/options.rs::DEADLINE_MAX",
        &["how long a check may take, from {_} to {};", "a deadline of {deadline:?} is not possible: use {_} to {}"],
    ),
    (
        "src/limiter/remote/deadline.rs::LATE",
        &["A check that takes longer fails at most {} later.", "fails after the deadline, and at most {} later;"],
    ),
    (
        "src/limiter/remote/options.rs::IN_FLIGHT",
        &["at least 1, and {} by default. A check", "more than {} checks wait for an answer"],
    ),
    (
        "src/limiter/remote/permits.rs::CORRECTIONS_MIN",
        &["The maximum number of waiting refunds is the same number, but at least {}."],
    ),
    ("src/limiter/remote/options.rs::DENIALS", &["at about 200 bytes each: from {_} to {_}, and {} by default."]),
    ("src/limiter/remote/denial_cache.rs::DENIALS_MAX", &["at about 200 bytes each: from {_} to {}, and"]),
    ("src/limiter/remote/denial_cache.rs::LONGEST", &["until the key's wait is over or {} has passed."]),
    ("src/limiter/remote/denial_cache.rs::LONGEST_UNKNOWN", &["A denial is remembered for at most {}, and a return"]),
    (
        "src/limiter/remote/options.rs::PLACES_LAPSE",
        &[
            "from {_} to {_}; {} by default. This option concerns",
            "The default is {}, the minimum {_}.",
            "(#how-places-are-counted), {} by default",
        ],
    ),
    (
        "src/limiter/remote/options.rs::PLACES_LAPSE_MIN",
        &[
            "from {} to {_}; {_} by default. This option concerns",
            "The default is {_}, the minimum {}.",
            "of {places_lapse_after:?} is not possible: use {} to {_}\"",
        ],
    ),
    (
        "src/limiter/remote/options.rs::PLACES_LAPSE_MAX",
        &[
            "from {_} to {}; {_} by default. This option concerns",
            "of {places_lapse_after:?} is not possible: use {_} to {}\"",
        ],
    ),
    ("src/limiter/remote/options.rs::PREFIX_MAX", &["beginning of every stored key: 1 to {} printable ASCII"]),
    ("src/limiter/remote/leases/mod.rs::HELD", &["are denied to other processes, for up to {}."]),
    (
        "src/limiter/place_lines.rs::FAILED_POLLS_MAX + 1",
        &[
            "If {} calls fail in a row, the request is decided",
            "the first or the last call fails, or if {} calls in a row",
        ],
    ),
    (
        "src/limiter/redis/connection/settings.rs::FAILURES",
        &["checks wait for {} attempts, which takes", "or after {} failed attempts"],
    ),
    ("src/limiter/redis/connection/reconnect.rs::IDLE", &["the connection is probed after {} without a check"]),
    (
        "src/limiter/remote/events.rs::QUIET",
        &["no check that was sent has failed for {}.", "and none that was sent failed for {} |"],
    ),
    ("src/limiter/store/silence.rs::DEADLINES", &["until nothing was heard for {} deadlines"]),
    ("src/limiter/store/calls.rs::LISTENS", &["{} more, to notice that the store is not dead"]),
    (
        "src/limiter/store/postgres/builder.rs::CONNECTIONS",
        &[
            "connections the store uses at a time: {_} to {_}, and {} by default",
            "PostgresStoreBuilder::max_connections): {} by default",
        ],
    ),
    ("src/limiter/store/postgres/builder.rs::CONNECTIONS_MAX", &["connections the store uses at a time: {_} to {},"]),
    (
        "src/limiter/store/postgres/builder.rs::LOCK_WAIT",
        &["another transaction has locked: {_} to {_}, and {} by default", "fail as `Contended` after {}, the default"],
    ),
    (
        "src/limiter/store/postgres/builder.rs::LOCK_WAIT_MIN",
        &["another transaction has locked: {} to", "a max_lock_wait of {wait:?} is not possible: use {} to"],
    ),
    (
        "src/limiter/store/postgres/builder.rs::LOCK_WAIT_MAX",
        &["another transaction has locked: {_} to {},", "a max_lock_wait of {wait:?} is not possible: use {_} to {}"],
    ),
    ("src/limiter/store/postgres/builder.rs::KEEPALIVE", &["After {} without traffic, both TCP and the store"]),
    ("src/limiter/store/postgres/connections.rs::PING", &["an idle connection is asked every {} whether"]),
    ("src/limiter/store/postgres/connections.rs::LATE", &["After {} without an answer, other statements"]),
    (
        "src/limiter/store/postgres/connections.rs::SILENT",
        &[
            "After {} the statement is cancelled",
            "use up `max_connections` for {} at most",
            "statements without an answer for {} are cancelled",
        ],
    ),
    (
        "src/limiter/queue_refunds.rs::KEPT_MAX",
        &["Each limiter keeps at most {} such refunds.", "A limiter keeps at most {} such refunds"],
    ),
    ("src/limiter/observers.rs::OBSERVERS_MAX", &["keep at most {} observers each"]),
    (
        "src/limiter/memory/setup.rs::KEYS",
        &["is sure to hold: from {_} to {_}, {} by default", "`MemoryLimiter` holds {} keys by default"],
    ),
    ("src/limiter/memory/setup.rs::ENTRIES_MIN", &["to 2^32, {} by default. The limiter always has room"]),
    (
        "src/middleware/decide/delay/delays.rs::WAITING",
        &[
            "bounds how many requests wait in a layer: {} by default",
            "in line, over all keys. The default is {}.",
            "in this layer, over all keys: {} by default",
            "at most {} in a layer, over all keys",
        ],
    ),
    (
        "src/middleware/decide/delay/delays.rs::IN_LINE",
        &[
            "of these wait for one key: {} by default",
            "for the units of one key. The default is {}.",
            "requests of one key wait in line | at most {};",
        ],
    ),
    (
        "src/middleware/discard.rs::BYTES",
        &[
            "By default it reads up to {}, as much",
            "up to {} are read and discarded",
            "before it answers. The default is {} in",
        ],
    ),
    (
        "src/middleware/discard.rs::TIME",
        &[
            "takes by default, for up to {}.",
            "are read and discarded, for up to {} |",
            "a body costs bandwidth, and holds the connection for up to {}.",
            "before it answers. The default is {_} in {}.",
        ],
    ),
    (
        "src/middleware/rule/overrides.rs::ENTRIES_MAX",
        &["at least one. The default is {}.", "A table has at most {} overrides"],
    ),
    (
        "src/client/times.rs::LONGEST_WAIT",
        &[
            "how long a request may wait, by default {}.",
            "the longest wait before a retry, by default {}.",
            "client::ObeyLayer::max_wait), {} by default",
        ],
    ),
    (
        "src/middleware/pace/account.rs::BATCH_US",
        &["in pieces that take {} at the pace", "A batch lasts for {} or, if it would then be smaller"],
    ),
    (
        "src/middleware/pace/account.rs::TICK_US",
        &[
            "it takes up to {}, because each piece costs",
            "within a piece: {_} to {}.",
            "a key's downloads share the rate, in pieces of {_} to {}.",
        ],
    ),
    ("src/client/retry.rs::RETRIES", &["how many times a request is retried, by default {}."]),
    (
        "src/client/obey/layer.rs::WAITING",
        &[
            "how many requests of a key may wait at a time, by default {}.",
            "At most {} requests of a key wait at a time",
        ],
    ),
    (
        "src/client/obey/layer.rs::KEYS",
        &["how many keys the layer remembers at a time, by default {}.", "at most {} keys, of about 500 bytes"],
    ),
    ("cli/src/replay/args.rs::CLIENTS", &["`--max-clients` bounds them, {} by default"]),
    ("src/client/advice.rs::POLICIES_MAX", &["and the advice holds at most {} policies."]),
    ("src/quota/spec.rs::UNITS_MAX", &["go up to {}. A", "| limits, bursts and other numbers of units | {_} | {} |"]),
    (
        "src/quota/spec.rs::PLACES_MAX",
        &["a concurrency limit {} units, and a block", "| the limit of a concurrency limit | {_} | {} |"],
    ),
    (
        "src/quota/builder.rs::LOG_LIMIT_MAX",
        &[
            "sliding log has at most {} units, a concurrency",
            "each unit of the limit. The limit is at most {}.",
            "the limit is above {}.",
            "So the limit of a log is at most {}.",
            "| the limit of a sliding log | {_} | {} |",
        ],
    ),
    ("src/quota/builder.rs::BUCKETS_MAX", &["| the buckets of a sliding window | {_} | {} |"]),
    ("src/limiter/ready.rs::MAX_WAIT", &["for which a caller waits. The default is {}."]),
    ("src/limiter/ready.rs::MAX_WAITING", &["that wait at a time, over all keys. The default is {}."]),
    (
        "src/limiter/ready.rs::UNKNOWN_WAIT",
        &["With other limiters the caller asks again after {}, and then more and more rarely"],
    ),
    ("src/limiter/ready.rs::UNKNOWN_WAIT_MAX", &["more and more rarely, up to every {}."]),
    (
        "src/algorithm/block.rs::STRIKES_MAX",
        &["a concurrency limit {_} units, and a block {} strikes", "| the strikes of a block | {_} | {} |"],
    ),
    (
        "src/base/time.rs::PERIOD_US_MAX",
        &[
            "Periods are from {_} to {} long, in whole",
            "| periods, in whole microseconds | {_} | {} |",
            "is too long: at most {}\"",
            "at least one and at most {}",
            "zero, longer than {}, or not a whole",
            "wait in line for more than {}.",
        ],
    ),
    (
        "src/headers/wait.rs::MAX_WAIT_US",
        &["`Retry-After` is at most {}, because huge values", "the longest wait that is reported, by default {},"],
    ),
    ("src/stats/policies.rs::POLICIES_MAX", &["At most {} policies are counted separately."]),
    ("src/stats/recent.rs::REFUSALS_MAX", &["At most {} refusals are stored. The number"]),
    ("src/key/forwarded.rs::PART_MAX", &["an entry is longer than {} bytes"]),
    ("src/rules/document.rs::BYTES_MAX", &["| the file | {} |"]),
    ("src/rules/document.rs::DEPTH_MAX", &["| nesting | {} levels |"]),
    ("src/rules/document.rs::NODES_MAX", &["| with its aliases written out | {} values"]),
    (
        "src/rules/document.rs::TEXTS_MAX",
        &["| with its aliases written out | {_} values and {} of text", "| {_} values and {} of text |"],
    ),
    ("src/rules/document.rs::SEPARATORS_MAX", &["colons and question marks | {} |"]),
    ("src/rules/read/shared.rs::VALUES_MAX", &["rules_in_a_file#say-it-once) | {} values and"]),
    ("src/rules/read/value.rs::RULES_MAX", &["| rules | {} |"]),
    ("src/rules/read/value.rs::PATTERNS_MAX", &["user agents, in all rules | {} |", "A file has at most {} patterns."]),
    ("src/rules/read/condition.rs::NOT_MAX", &["| entries of a `not` | {} |"]),
    ("src/rules/read/condition.rs::NAMES_MAX", &["in a `match` or an entry of `not` | {} |"]),
    ("src/rules/error.rs::PROBLEMS_MAX", &["in the order of their positions, at most {}."]),
    (
        "src/rules/handle.rs::EVERY_MIN",
        &["checks the file at an interval of at least {}.", "Reads the file at this interval, at least {},"],
    ),
    ("src/status/operators.rs::OFFER_LASTS", &["is valid for one action within {}, and only"]),
    ("src/limiter/shared_text.rs::REPORTS_MAX", &["the page shows up to {} processes by name"]),
    ("src/status/operators.rs::OFFERS_BYTES_MAX", &["All tokens together hold at most {} of keys."]),
    ("src/status/operators.rs::DONE_MAX", &["The page lists the last {} actions."]),
    ("src/status/request.rs::FORM_MAX", &["the fields of a form of at most {}:"]),
];

/// Sentences that state a default which is no constant of this crate.
const OTHER_DEFAULTS: &[&str] = &[
    // Statuses of HTTP.
    "429 is the default; nginx's is 503",
    "The default is 429",
    "by default 429",
    // None, or one of something.
    "its cost, by default one unit",
    "takes. The default is 1",
    "The default is 0, which stores no refusals.",
];

/// The text between a number and the word that makes it a default.
const DEFAULTS: [&str; 8] = [
    "{} by default",
    "by default {}",
    "By default {}",
    "{} is the default",
    "The default is {}",
    "the default is {}",
    "{}, the default",
    "{} (the default",
];

/// A number with its unit: microseconds if it is a time, otherwise a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Number {
    is_time: bool,
    value: u128,
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match u64::try_from(self.value) {
            Ok(micros) if self.is_time => write!(f, "{:?}", Duration::from_micros(micros)),
            _ => write!(f, "{}", self.value),
        }
    }
}

/// A document: its text in one line, without the signs of comments, and where each of its lines begins in that text.
struct Document {
    path: String,
    text: String,
    lines: Vec<usize>,
}

impl Document {
    fn read(root: &Path, path: &Path) -> Self {
        let source = fs::read_to_string(path).expect("a document is text");
        let mut document = Self {
            path: path.strip_prefix(root).unwrap_or(path).display().to_string(),
            text: String::new(),
            lines: vec![],
        };
        for line in source.lines() {
            let line = line.trim();
            let words = ["//!", "///", "//"].iter().find_map(|sign| line.strip_prefix(sign)).unwrap_or(line);
            document.lines.push(document.text.len());
            document.text.push_str(words.trim_end_matches('\\').trim());
            document.text.push(' ');
        }
        document
    }

    fn place(&self, at: usize) -> String {
        format!("{}:{}", self.path, self.lines.partition_point(|begin| *begin <= at))
    }
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the documents at the root, and those of the library and the program without their tests.
fn documents() -> Vec<Document> {
    let root = root();
    let mut paths: Vec<PathBuf> =
        ["README.md", "cli/README.md", "DESIGN.md", "COMPARE.md"].iter().map(|name| root.join(name)).collect();
    ["src", "cli/src"].iter().for_each(|folder| add_paths(&root.join(folder), &mut paths));
    paths.sort();
    paths.iter().map(|path| Document::read(&root, path)).collect()
}

fn add_paths(folder: &Path, paths: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the folder is there") {
        let path = entry.expect("it can be read").path();
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let is_test = name == "tests" || name.ends_with("_tests");
        match path.extension().and_then(|extension| extension.to_str()) {
            _ if is_test => {}
            _ if path.is_dir() => add_paths(&path, paths),
            Some("rs" | "md") => paths.push(path),
            _ => {}
        }
    }
}

/// Returns the value of a sum such as `src/a.rs::NAME + 1`.
fn sum(expression: &str) -> Number {
    let one = |term: &str| match term.split_once("::") {
        Some((file, name)) => constant(file, name),
        None => Number { is_time: false, value: term.parse().expect("a term is a constant or a number") },
    };
    let terms = expression.split(" + ").map(|term| term.split(" max ").map(one).max().expect("a term is not empty"));
    let add = |all: Number, one: Number| Number { is_time: all.is_time || one.is_time, value: all.value + one.value };
    terms.reduce(add).expect("a sum has terms")
}

/// Reads a constant from its file.
fn constant(file: &str, name: &str) -> Number {
    let text = fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
    let start = format!("const {name}: ");
    let line = text.lines().find(|line| line.contains(&start));
    let line = line.unwrap_or_else(|| panic!("{file} has no constant {name}: say where it is now"));
    let value = line.split_once(" = ").and_then(|(_, rest)| rest.split_once(';')).map_or("", |(value, _)| value);
    let number = evaluated(file, value).unwrap_or_else(|| panic!("{file}: {line}\n{name} is not understood"));
    Number { is_time: number.is_time || name.contains("_US"), ..number }
}

/// An operator's sign, and what it does.
type Operator = (&'static str, fn(u128, u128) -> u128);

/// Returns the value of a constant's expression, in the order in which Rust's operators bind.
fn evaluated(file: &str, expression: &str) -> Option<Number> {
    let expression = expression.trim();
    let unit = ["micros", "millis", "secs"].into_iter().zip([1, 1_000, 1_000_000]);
    for (name, micros) in unit {
        let argument = expression.strip_prefix(&format!("Duration::from_{name}("));
        if let Some(argument) = argument.and_then(|rest| rest.strip_suffix(')')) {
            return Some(Number { is_time: true, value: evaluated(file, argument)?.value * micros });
        }
    }
    let operators: [Operator; 3] = [
        (" << ", |left, right| left << right),
        (" - ", |left, right| left - right),
        (" * ", |left, right| left * right),
    ];
    for (sign, apply) in operators {
        let outside = |at: &usize| expression[..*at].matches('(').count() == expression[..*at].matches(')').count();
        let at = expression.match_indices(sign).map(|(at, _)| at).filter(outside).last();
        if let Some(at) = at {
            let [left, right] = [&expression[..at], &expression[at + sign.len()..]].map(|part| evaluated(file, part));
            let (left, right) = (left?, right?);
            return Some(Number { is_time: left.is_time || right.is_time, value: apply(left.value, right.value) });
        }
    }
    if let Some(within) = expression.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')) {
        return evaluated(file, within);
    }
    if expression.starts_with(|c: char| c.is_ascii_uppercase()) {
        return Some(constant(file, expression));
    }
    Some(Number { is_time: false, value: expression.replace('_', "").parse().ok()? })
}

/// Reads the number at the beginning of a text. Returns it with its length.
fn number(text: &str) -> Option<(Number, usize)> {
    const WORDS: [&str; 12] =
        ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"];
    let word_end = |text: &str| text.find(|c: char| !c.is_alphanumeric()).unwrap_or(text.len());
    let (thousandths, mut length) = if text.starts_with(|c: char| c.is_ascii_digit()) {
        let end = text.find(|c: char| !c.is_ascii_digit() && !",.^".contains(c)).unwrap_or(text.len());
        let digits = text[..end].trim_end_matches([',', '.', '^']);
        let (whole, part) = digits.split_once('.').unwrap_or((digits, ""));
        let whole = match whole.split_once('^') {
            Some((base, exponent)) => base.parse::<u128>().ok()?.checked_pow(exponent.parse().ok()?)?,
            None => whole.replace(',', "").parse().ok()?,
        };
        let part = format!("{part:0<3}").get(..3)?.parse::<u128>().ok()?;
        (whole * 1_000 + part, digits.len())
    } else if text.starts_with("half a ") {
        (500, "half a".len())
    } else {
        let word = &text[..word_end(text)];
        let at = WORDS.iter().position(|name| *name == word);
        (1_000 * at.map_or(u128::from(matches!(word, "a" | "an")), |at| at as u128 + 1), word.len())
    };
    if thousandths == 0 && !text.starts_with('0') {
        return None;
    }
    let rest = &text[length..];
    let unit = rest.strip_prefix([' ', '-']).unwrap_or(rest);
    let unit = &unit[..word_end(unit)];
    let (is_time, factor) = match unit.strip_suffix('s').filter(|unit| unit.len() > 2).unwrap_or(unit) {
        "µs" | "microsecond" => (true, 1),
        "ms" | "millisecond" => (true, 1_000),
        "s" | "second" => (true, 1_000_000),
        "min" | "minute" => (true, 60_000_000),
        "h" | "hour" => (true, 3_600_000_000),
        "day" => (true, 86_400_000_000),
        "KiB" => (false, 1 << 10),
        "MiB" => (false, 1 << 20),
        "million" => (false, 1_000_000),
        _ => (false, 0),
    };
    if factor > 0 {
        length += rest.find(unit)? + unit.len();
    } else if text.starts_with('a') {
        return None; // an article
    }
    Some((Number { is_time, value: thousandths * factor.max(1) / 1_000 }, length))
}

/// The longest number with its unit, in bytes.
const NUMBER_MAX: usize = 24;

/// The marks for a number in a sentence: the number of the promise, or any.
const HOLES: [&str; 2] = ["{}", "{_}"];

/// Returns the words before a sentence's first number, that number's sign, and what follows it.
fn first_hole(sentence: &str) -> Option<(&str, &str, &str)> {
    let (at, hole) = HOLES.iter().filter_map(|hole| Some((sentence.find(hole)?, *hole))).min()?;
    Some((&sentence[..at], hole, &sentence[at + hole.len()..]))
}

/// Returns where a sentence stands in a text, and the number that it states there.
fn stated(text: &str, sentence: &str) -> Vec<(Range<usize>, Number)> {
    let (before, _, after) = first_hole(sentence).expect("a sentence has a number");
    let begins: Vec<usize> = if before.is_empty() {
        let numbers = text.match_indices(after).flat_map(|(end, _)| end.saturating_sub(NUMBER_MAX)..end);
        numbers.filter(|at| begins_number(text, *at)).collect()
    } else {
        text.match_indices(before).map(|(at, _)| at).collect()
    };
    begins.into_iter().filter_map(|begin| stated_at(text, begin, sentence)).collect()
}

fn stated_at(text: &str, begin: usize, sentence: &str) -> Option<(Range<usize>, Number)> {
    let (mut at, mut rest, mut is_stated) = (begin, sentence, None);
    while let Some((before, hole, after)) = first_hole(rest) {
        at += text[at..].starts_with(before).then_some(before.len())?;
        let (number, length) = number(&text[at..])?;
        at += length;
        if hole == HOLES[0] {
            is_stated = Some(number);
        }
        rest = after;
    }
    text[at..].starts_with(rest).then_some((begin..at + rest.len(), is_stated?))
}

/// Returns whether a word begins here that may be a number.
fn begins_number(text: &str, at: usize) -> bool {
    let Some((before, word)) = text.split_at_checked(at) else { return false };
    before.is_empty()
        || before.ends_with([' ', '(']) && word.starts_with(|c: char| c.is_ascii_digit() || c.is_lowercase())
}

#[test]
fn sentences_state_the_numbers_of_the_code() {
    let documents = documents();
    let mut wrong = Vec::new();
    for (expression, sentences) in PROMISES {
        let expected = sum(expression);
        for sentence in *sentences {
            let mut is_found = false;
            for document in &documents {
                for (range, number) in stated(&document.text, sentence) {
                    is_found = true;
                    if number != expected {
                        let place = document.place(range.start);
                        wrong.push(format!("{place}: \"{}\"\n    {expression} is {expected}", &document.text[range]));
                    }
                }
            }
            if !is_found {
                wrong
                    .push(format!("no document has the sentence \"{sentence}\" of {expression}: say how it reads now"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} sentences have to follow the code:\n{}", wrong.len(), wrong.join("\n"));
}

/// A statement waits for a lock for half of the default deadline, as `max_lock_wait` says.
#[test]
fn lock_wait_of_postgres_is_half_of_the_deadline() {
    let [wait, deadline] =
        ["src/limiter/store/postgres/builder.rs::LOCK_WAIT", "src/limiter/remote/options.rs::DEADLINE"].map(sum);
    assert_eq!(2 * wait.value, deadline.value, "change what the documentation of max_lock_wait says");
}

/// A new default is a new promise.
#[test]
fn numbers_that_are_defaults_are_promises() {
    let known: Vec<&str> = PROMISES.iter().flat_map(|(_, sentences)| sentences.iter().copied()).collect();
    let mut unknown = BTreeSet::new();
    for document in documents() {
        let told: Vec<_> = known
            .iter()
            .flat_map(|sentence| stated(&document.text, sentence))
            .map(|(range, _)| range)
            .chain(
                OTHER_DEFAULTS
                    .iter()
                    .flat_map(|words| document.text.match_indices(words).map(|(at, words)| at..at + words.len())),
            )
            .collect();
        for (range, _) in DEFAULTS.iter().flat_map(|words| stated(&document.text, words)) {
            if !told.iter().any(|told| told.start < range.end && range.start < told.end) {
                unknown.insert(format!("{}: \"{}\"", document.place(range.start), &document.text[range]));
            }
        }
    }
    let unknown: Vec<String> = unknown.into_iter().collect();
    assert!(unknown.is_empty(), "add these sentences to PROMISES or OTHER_DEFAULTS:\n{}", unknown.join("\n"));
}

#[test]
fn numbers_are_read_in_words_digits_and_units() {
    let time = |micros| Some(Number { is_time: true, value: micros });
    let count = |value| Some(Number { is_time: false, value });
    for (text, expected) in [
        ("50 ms by default", time(50_000)),
        ("0.1 s, then", time(100_000)),
        ("half a second", time(500_000)),
        ("a minute", time(60_000_000)),
        ("five seconds", time(5_000_000)),
        ("24 h", time(86_400_000_000)),
        ("4,096, and", count(4_096)),
        ("2^32.", count(1 << 32)),
        ("a million keys", count(1_000_000)),
        ("2 MiB of text", count(2 << 20)),
        ("five failures", count(5)),
        ("a limiter", None),
        ("deadline", None),
    ] {
        assert_eq!(number(text).map(|(number, _)| number), expected, "{text}");
    }
    for (expression, expected) in [
        ("(1 << 4) - 1", count(15)),
        ("2 << 20", count(2 << 20)),
        ("366 * 86_400 * 1_000", count(366 * 86_400_000)),
        ("Duration::from_secs(24 * 3_600)", time(86_400_000_000)),
    ] {
        assert_eq!(evaluated("lib.rs", expression), expected, "{expression}");
    }
    let of = |text: &str, sentence| stated(text, sentence).into_iter().map(|(_, number)| number).collect::<Vec<_>>();
    assert_eq!(of("from 1 ms to 60 s; 50 ms by default", "from {_} to {};"), [time(60_000_000).unwrap()]);
    assert_eq!(of("it waits 3 s by default", "{} by default"), [time(3_000_000).unwrap()]);
}
