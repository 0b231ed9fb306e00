//! Finds lines of other programs in a file, and requests that two programs logged.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use memchr::memmem;

use super::request::Request;

/// The most sources that are told apart in a file.
const SOURCES_MAX: usize = 256;

/// The requests that later ones are compared with.
const RECENT_MAX: usize = 256;

/// The lines of Caddy's loggers that later ones are compared with.
const LINES_MAX: usize = 16;

/// Two programs log one request within this time.
const APART_US: u64 = 2_000_000;

/// The fewest requests of a source of which it is said that they are another's.
const TWICE_MIN: u64 = 10;

/// Counts the lines of each source of a file.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    all: HashMap<u64, Source>,
    recent: VecDeque<Recent>,
    /// Hashes of the last lines of loggers that may repeat each other's.
    lines: VecDeque<u64>,
}

#[derive(Debug, Default)]
struct Source {
    requests: u64,
    /// Lines that are not requests.
    other: u64,
    /// Requests that another source logged, too, with the same client and with another one.
    with_equal: u64,
    with_unequal: u64,
    /// The client of its first request, and the requests of that one.
    client: Option<IpAddr>,
    of_client: u64,
    /// How its first request was written.
    sample: Vec<u8>,
}

#[derive(Debug)]
struct Recent {
    source: u64,
    /// A hash of the whole line, and of what two programs agree about.
    line: u64,
    request: u64,
    stamp_us: u64,
    client: Option<IpAddr>,
    is_paired: bool,
}

impl Sources {
    /// Counts a request. Returns whether another source logged it already.
    ///
    /// In a log with whole seconds two sources may have equal lines by chance, so these are only counted.
    pub(crate) fn repeats(&mut self, source: u64, line: u64, request: &Request, of_request: u64, text: &[u8]) -> bool {
        let (stamp_us, client) = (request.stamp_us, request.client);
        let is_near = |other: &&mut Recent| {
            other.source != source && !other.is_paired && other.stamp_us.abs_diff(stamp_us) <= APART_US
        };
        let is_equal = |other: &&mut Recent| other.line == line && !request.is_coarse;
        if let Some(first) = self.recent.iter_mut().filter(is_near).find(is_equal) {
            first.is_paired = true;
            return true;
        }
        let pair = self.recent.iter_mut().filter(is_near).find(|other| other.request == of_request);
        let pair = pair.map(|other| {
            other.is_paired = true;
            (other.source, other.client == client)
        });
        if let Some((other, is_equal)) = pair {
            for source in [other, source] {
                let Some(source) = self.source(source) else { continue };
                *(if is_equal { &mut source.with_equal } else { &mut source.with_unequal }) += 1;
            }
        }
        if let Some(source) = self.source(source) {
            if source.requests == 0 {
                (source.client, source.sample) = (client, text.get(..300).unwrap_or(text).to_vec());
            }
            source.requests += 1;
            source.of_client += u64::from(source.client == client);
        }
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(Recent {
            source,
            line,
            request: of_request,
            stamp_us,
            client,
            is_paired: pair.is_some(),
        });
        false
    }

    /// Returns whether one of the last lines has this hash, and keeps the hash.
    pub(crate) fn has_line(&mut self, line: u64) -> bool {
        if self.lines.contains(&line) {
            return true;
        }
        if self.lines.len() == LINES_MAX {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
        false
    }

    /// Counts a line that is not a request. Returns whether it could be counted.
    pub(crate) fn note_other(&mut self, source: u64) -> bool {
        self.source(source).map(|source| source.other += 1).is_some()
    }

    /// Returns whether no line of a source is a request.
    pub(crate) fn has_no_request(&self, source: u64) -> bool {
        self.all.get(&source).is_some_and(|source| source.requests == 0)
    }

    /// Returns the lines of sources that log no requests, and the other lines that are not requests.
    pub(crate) fn others(&self) -> (u64, u64) {
        let sum = |is_without: bool| {
            let sources = self.all.values().filter(|source| (source.requests == 0) == is_without);
            sources.map(|source| source.other).sum()
        };
        (sum(true), sum(false))
    }

    /// Returns how a source begins that logs the requests of another source again, if there is one. Its requests are
    /// those of other clients, or of a single one, which is a proxy that logs, too.
    pub(crate) fn logged_twice(&self) -> Option<&[u8]> {
        let is_most = |part: u64, all: u64| part * 10 >= all * 9;
        let twice = |source: &&Source| {
            let is_behind = is_most(source.of_client, source.requests) && is_most(source.with_unequal, source.requests);
            let is_many = source.requests >= TWICE_MIN;
            is_many && (is_most(source.with_equal, source.requests) || is_behind && self.has_front(source))
        };
        let mut found: Vec<&Source> = self.all.values().filter(twice).collect();
        found.sort_by(|a, b| b.requests.cmp(&a.requests).then_with(|| b.sample.cmp(&a.sample)));
        found.first().map(|source| source.sample.as_slice())
    }

    /// Returns whether a source has clients of its own, of which the requests of another one may be.
    fn has_front(&self, behind: &Source) -> bool {
        self.all.values().any(|front| {
            front.client != behind.client
                && front.of_client * 2 < front.requests
                && front.requests * 2 > behind.requests
        })
    }

    fn source(&mut self, source: u64) -> Option<&mut Source> {
        if self.all.len() >= SOURCES_MAX {
            return self.all.get_mut(&source);
        }
        Some(self.all.entry(source).or_default())
    }
}

/// Returns whether a line was written by another logger than that of requests: errors of servers, and what programs say
/// about themselves.
pub(crate) fn is_of_other_logger(line: &[u8]) -> bool {
    let has = |word: &str| memmem::find(line, word.as_bytes()).is_some();
    if is_of_access_log(line) && !is_error_of_nginx(line) {
        return false;
    }
    match line {
        [b'{', ..] => ["\"level\"", "\"severity\"", "\"lvl\""].iter().any(|name| has(name)),
        [b'[', w, e, d, b' ', ..] => [w, e, d].iter().all(|byte| byte.is_ascii_alphabetic()), // Apache's errors
        [b'I' | b'W' | b'E' | b'F', rest @ ..] if is_klog(rest) => true,
        _ if is_error_of_nginx(line) => true,
        _ => {
            // Entrypoints of containers, HAProxy's reports of its servers, and programs that log names and values.
            let begins = [
                "/docker-entrypoint.sh:",
                "time=",
                "level=",
                "ts=",
                "Server ",
                "Proxy ",
                "Health check ",
                "Connect from ",
                "[NOTICE]",
                "[WARNING]",
                "[ALERT]",
            ];
            // Levels, as Traefik, Uvicorn and many others write them.
            let levels =
                ["TRC", "DBG", "INF", "WRN", "ERR", "FTL", "TRACE", "DEBUG", "INFO", "WARN", "WARNING", "ERROR"];
            let first = line.split(|byte| *byte == b' ').next().unwrap_or_default();
            let level = first.strip_suffix(b":").unwrap_or(first);
            begins.iter().any(|word| line.starts_with(word.as_bytes()))
                || first.ends_with(b".sh:")
                || levels.iter().any(|known| known.as_bytes() == level)
        }
    }
}

/// Returns whether a line shows a request: these are not left out in silence.
pub(crate) fn is_of_access_log(line: &[u8]) -> bool {
    ["HTTP/1.", "HTTP/2", "HTTP/3", "ethod\"", "ethod="]
        .iter()
        .any(|word| memmem::find(line, word.as_bytes()).is_some())
}

/// `2024/03/01 10:00:00 [error] `, which may quote a request.
fn is_error_of_nginx(line: &[u8]) -> bool {
    let Some((date, rest)) = line.split_at_checked(19) else { return false };
    let form = date.iter().map(|byte| if byte.is_ascii_digit() { b'0' } else { *byte });
    form.eq(*b"0000/00/00 00:00:00") && rest.starts_with(b" [")
}

/// `0301 10:00:00.123456`, behind the letter of a level.
fn is_klog(rest: &[u8]) -> bool {
    let form = rest.iter().take(14).map(|byte| if byte.is_ascii_digit() { b'0' } else { *byte });
    form.eq(*b"0000 00:00:00.")
}
