//! Takes off the prefixes that other programs put before a server's line: those of syslog,
//! journald, container runtimes, compose and Kubernetes, and JSON with the line as a text in it.

use std::borrow::Cow;
use std::fmt;
use std::hash::BuildHasher;

use foldhash::quality::FixedState;
use memchr::{memchr, memmem};
use serde_core::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use super::date::{self, Stamp};
use super::request::address;

/// The most layers around a line.
pub(crate) const LAYERS_MAX: usize = 6;

/// The longest name of a source, in bytes: a host, container, program or stream.
const NAME_MAX: usize = 255;

/// A line without what stood around it.
#[derive(Clone, Debug)]
pub(crate) struct Opened<'l> {
    pub(crate) text: Cow<'l, [u8]>,
    /// The time that the innermost layer has, for lines without one of their own.
    pub(crate) at: Option<Stamp>,
    /// Whether the server itself wrote that time before the line.
    pub(crate) has_own_time: bool,
    /// A hash of the names of all layers: of the container, program or stream that wrote the line.
    pub(crate) source: Option<u64>,
}

/// A layer that was found: where its content begins, and what it says.
struct Layer<'l> {
    content: Content<'l>,
    at: Option<Stamp>,
    name: Option<Cow<'l, [u8]>>,
}

enum Content<'l> {
    Rest(&'l [u8]),
    Text(Vec<u8>),
}

impl<'l> Opened<'l> {
    /// Takes the prefixes off a line. Returns `None` if it has none.
    pub(crate) fn without_prefixes(line: &'l [u8]) -> Option<Self> {
        Some(Self::plain(line).next_layer(layer)?.stripped())
    }

    /// Takes the next layer off that could also be the beginning of a line: JSON that has the line as a text, or a time
    /// with or without the name of a stream. Returns `None` if there is none.
    pub(crate) fn within(&self) -> Option<Self> {
        Some(self.next_layer(wrapped).or_else(|| self.next_layer(bare_time))?.stripped())
    }

    fn stripped(self) -> Self {
        let mut opened = self;
        for _ in 1..LAYERS_MAX {
            let Some(next) = opened.next_layer(layer) else { break };
            opened = next;
        }
        opened
    }

    pub(crate) fn plain(line: &'l [u8]) -> Self {
        Self { text: Cow::Borrowed(line), at: None, has_own_time: false, source: None }
    }

    fn next_layer(&self, find: impl Fn(&[u8]) -> Option<Layer<'_>>) -> Option<Self> {
        let has_own_time = self.has_own_time || is_console_of_caddy(&self.text);
        let (text, at, source) = match &self.text {
            Cow::Borrowed(text) => {
                let layer = find(text)?;
                let source = layer.name.as_deref().map(|name| self.source_within(name));
                let text = match layer.content {
                    Content::Rest(rest) => Cow::Borrowed(rest),
                    Content::Text(text) => Cow::Owned(text),
                };
                (text, layer.at, source)
            }
            Cow::Owned(text) => {
                let layer = find(text)?;
                let source = layer.name.as_deref().map(|name| self.source_within(name));
                let text = match layer.content {
                    Content::Rest(rest) => rest.to_vec(),
                    Content::Text(text) => text,
                };
                (Cow::Owned(text), layer.at, source)
            }
        };
        Some(Self { text, at: at.or(self.at), has_own_time, source: source.or(self.source) })
    }

    fn source_within(&self, name: &[u8]) -> u64 {
        FixedState::default().hash_one((self.source, name))
    }
}

/// Finds a prefix that no access log's own line begins with.
fn layer(line: &[u8]) -> Option<Layer<'_>> {
    match line.first()? {
        b'<' => prioritised(line),
        b'[' => kubectl(line),
        0x1b => coloured(line),
        b'@' => rest(line.strip_prefix(b"@cee:")?.trim_ascii_start()),
        digit if digit.is_ascii_digit() => console_of_caddy(line)
            .or_else(|| octets(line))
            .or_else(|| container_runtime(line))
            .or_else(|| iso_syslog(line))
            .or_else(|| compose(line)),
        letter if letter.is_ascii_alphabetic() => bsd_syslog(line).or_else(|| compose(line)),
        _ => None,
    }
}

fn rest(rest: &[u8]) -> Option<Layer<'_>> {
    Some(Layer { content: Content::Rest(rest), at: None, name: None })
}

/// The codes that colour a name on a terminal.
fn coloured(line: &[u8]) -> Option<Layer<'_>> {
    let code = line.strip_prefix(b"\x1b[")?;
    let length = code.iter().take_while(|byte| byte.is_ascii_digit() || **byte == b';').count();
    let behind = code.get(length..)?.strip_prefix(b"m")?;
    compose(behind).or_else(|| rest(behind))
}

/// `name-1  | `, as `docker compose logs` writes it, also with colours.
fn compose(line: &[u8]) -> Option<Layer<'_>> {
    let begin = line.get(..NAME_MAX.min(line.len()))?;
    let mut from = 0;
    // A process manager's name has a bar of its own, as in `0|app  | `.
    let bar = loop {
        let at = from + memchr(b'|', begin.get(from..)?)?;
        if begin.get(at.checked_sub(1)?) == Some(&b' ') {
            break at;
        }
        from = at + 1;
    };
    let (name, behind) = line.split_at_checked(bar)?;
    let name = name.trim_ascii_end();
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || b"_.-@/|".contains(byte);
    if name.is_empty() || !name.iter().all(is_part) {
        return None;
    }
    let behind = behind.get(1..)?;
    let behind = behind.strip_prefix(b"\x1b[0m").unwrap_or(behind);
    let content = behind.strip_prefix(b" ").unwrap_or(behind);
    Some(Layer { content: Content::Rest(content), at: None, name: Some(Cow::Borrowed(name)) })
}

/// `[pod/name/container] `, as `kubectl logs --prefix` writes it.
fn kubectl(line: &[u8]) -> Option<Layer<'_>> {
    let behind = line.strip_prefix(b"[pod/")?;
    let end = memmem::find(behind.get(..NAME_MAX.min(behind.len()))?, b"] ")?;
    let (name, content) = (behind.get(..end)?, behind.get(end + 2..)?);
    Some(Layer { content: Content::Rest(content), at: None, name: Some(Cow::Borrowed(name)) })
}

/// `2024-03-01T10:00:00.123456789Z stdout F `, by which containerd and CRI-O keep lines. A line in parts (`P`) is none.
fn container_runtime(line: &[u8]) -> Option<Layer<'_>> {
    let (time, behind) = word(line).filter(|(time, _)| is_iso(time))?;
    let (stream, behind) = word(behind).filter(|(stream, _)| matches!(*stream, b"stdout" | b"stderr"))?;
    let content = behind.strip_prefix(b"F ")?;
    let at = date::parse(time)?;
    Some(Layer { content: Content::Rest(content), at: Some(at), name: Some(Cow::Borrowed(stream)) })
}

/// `2024/03/01 10:00:00.123`, a level, a logger and a message, by which Caddy writes to a terminal. Tabs separate them.
fn console_of_caddy(line: &[u8]) -> Option<Layer<'_>> {
    if line.get(4) != Some(&b'/') {
        return None; // most lines have no tab, and would be read to their end
    }
    let mut parts = line.splitn(5, |byte| *byte == b'\t');
    let (time, _, logger, _, content) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let iso: Vec<u8> = time.iter().map(|byte| if *byte == b'/' { b'-' } else { *byte }).collect();
    let at = date::parse(&iso).filter(|_| logger.starts_with(b"http.log.access") && content.starts_with(b"{"))?;
    Some(Layer { content: Content::Rest(content), at: Some(at), name: None })
}

fn is_console_of_caddy(line: &[u8]) -> bool {
    console_of_caddy(line).is_some()
}

/// The length of a message, before messages that syslog sends over TCP.
fn octets(line: &[u8]) -> Option<Layer<'_>> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let content = line.get(digits..)?.strip_prefix(b" ")?;
    if content.first() == Some(&b'<') && digits <= 6 { prioritised(content) } else { None }
}

/// `<190>`, which begins each message of syslog on the wire.
fn prioritised(line: &[u8]) -> Option<Layer<'_>> {
    let behind = line.strip_prefix(b"<")?;
    let digits = behind.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let behind = behind.get(digits..)?.strip_prefix(b">").filter(|_| (1..=3).contains(&digits))?;
    if let Some(message) = behind.strip_prefix(b"1 ") {
        return ietf_syslog(message);
    }
    bsd_syslog(behind).or_else(|| iso_syslog(behind)).or_else(|| rest(behind))
}

/// Reads the fields of RFC 5424 behind `<190>1 `: time, host, program, process, message's name, data, message.
fn ietf_syslog(message: &[u8]) -> Option<Layer<'_>> {
    let (time, behind) = word(message)?;
    let (host, behind) = word(behind)?;
    let (program, behind) = word(behind)?;
    let (process, behind) = word(behind)?;
    let (_, behind) = word(behind).unwrap_or((behind, b""));
    let content = match behind.strip_prefix(b"-") {
        Some(behind) => behind,
        None => after_data(behind).unwrap_or(behind),
    };
    let content = content.strip_prefix(b" ").unwrap_or(content);
    let content = content.strip_prefix(b"\xef\xbb\xbf").unwrap_or(content);
    // Heroku's router is a process of its platform, and a program there is named by its process, too.
    let name = [host, b" ", program, b" ", if program == b"heroku" || program == b"app" { process } else { b"" }];
    Some(Layer { content: Content::Rest(content), at: date::parse(time), name: Some(Cow::Owned(name.concat())) })
}

/// Returns what stands behind the structured data of RFC 5424, such as `[a b="c]"]`.
fn after_data(text: &[u8]) -> Option<&[u8]> {
    let mut rest = text;
    while let Some(behind) = rest.strip_prefix(b"[") {
        let (mut is_quoted, mut is_escaped) = (false, false);
        let end = behind.iter().position(|byte| {
            let ends = *byte == b']' && !is_quoted;
            if *byte == b'"' && !is_escaped {
                is_quoted = !is_quoted;
            }
            is_escaped = *byte == b'\\' && !is_escaped;
            ends
        })?;
        rest = behind.get(end + 1..)?;
    }
    (rest.len() < text.len()).then_some(rest)
}

/// `Nov 28 10:00:00 host program[17]: `, by RFC 3164 and journald.
fn bsd_syslog(line: &[u8]) -> Option<Layer<'_>> {
    if let Some(behind) = weekday(line) {
        return full_date(behind);
    }
    tagged(behind_bsd_time(line)?, None)
}

/// Returns what stands behind `Nov 28 10:00:00 `.
fn behind_bsd_time(line: &[u8]) -> Option<&[u8]> {
    let (month, behind) = line.split_at_checked(3)?;
    let is_month = date::MONTHS.contains(&month);
    let [b' ', d1, d2, b' ', behind @ ..] = behind else { return None };
    let is_day = d2.is_ascii_digit() && (d1.is_ascii_digit() || *d1 == b' ');
    let (time, behind) = word(behind)?;
    (is_month && is_day && is_time(time)).then_some(behind)
}

fn weekday(line: &[u8]) -> Option<&[u8]> {
    let (day, behind) = line.split_at_checked(4)?;
    [b"Mon ", b"Tue ", b"Wed ", b"Thu ", b"Fri ", b"Sat ", b"Sun "].iter().any(|known| *known == day).then_some(behind)
}

/// `2024-03-01 10:00:00 UTC host program[17]: `, which journald's `short-full` has behind the day of the week.
fn full_date(behind: &[u8]) -> Option<Layer<'_>> {
    let (date, behind) = word(behind)?;
    let (time, behind) = word(behind)?;
    let (_, behind) = word(behind)?;
    if date.len() == 10 && is_time(time) { tagged(behind, None) } else { None }
}

/// `2024-03-01T10:00:00+00:00 host program[17]: `, also with a number of seconds for the date, and without a host.
fn iso_syslog(line: &[u8]) -> Option<Layer<'_>> {
    let (time, behind) = word(line)?;
    let is_unix = time.len() == 17 && time.get(10) == Some(&b'.');
    let at = if is_iso(time) || is_unix { date::parse(time)? } else { return None };
    tagged(behind, Some(at))
}

/// The program's name ends with a colon, and a host may stand before it.
fn tagged(text: &[u8], at: Option<Stamp>) -> Option<Layer<'_>> {
    let (first, behind) = word(text).filter(|(first, _)| !is_iso(first))?;
    let found = if let Some(program) = first.strip_suffix(b":") {
        (program, behind)
    } else {
        let (second, behind) = word(behind)?;
        (second.strip_suffix(b":")?, behind)
    };
    let (tag, content) = found;
    // The number of a process changes when it starts again. `heroku[router]` is a name.
    let opening = tag.strip_suffix(b"]").and_then(|tag| tag.iter().rposition(|byte| *byte == b'['));
    let program = match opening.and_then(|at| tag.split_at_checked(at)) {
        Some((name, [b'[', process @ .., b']'])) if process.iter().all(u8::is_ascii_digit) => name,
        _ => tag,
    };
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || b"_.-/[]()@".contains(byte);
    if program.is_empty() || program.len() > NAME_MAX || !program.iter().all(is_part) {
        return None;
    }
    let host: &[u8] = if first.ends_with(b":") { b"" } else { first };
    Some(Layer { content: Content::Rest(content), at, name: Some(Cow::Owned([host, b" ", program].concat())) })
}

/// A time alone, and the path of a stream behind it.
fn bare_time(line: &[u8]) -> Option<Layer<'_>> {
    if let Some(behind) = behind_bsd_time(line) {
        // Without a program's name only a client can stand here: a host would be taken for a virtual host.
        let behind = behind.trim_ascii_start();
        return rest(behind).filter(|_| word(behind).is_some_and(|(client, _)| address(client).is_some()));
    }
    let (time, behind) = word(line).filter(|(time, _)| is_iso(time))?;
    let at = date::parse(time)?;
    let (content, name) = match word(behind) {
        Some((stream, behind)) if is_path(stream) => (behind, Some(stream)),
        _ => (behind, None),
    };
    Some(Layer { content: Content::Rest(content), at: Some(at), name: name.map(Cow::Borrowed) })
}

/// Returns whether a word is the path of a stream, such as `ecs/web/0123`.
fn is_path(word: &[u8]) -> bool {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || b"_.-/".contains(byte);
    word.contains(&b'/') && word.first() != Some(&b'/') && word.iter().all(is_part)
}

fn is_iso(time: &[u8]) -> bool {
    time.get(10) == Some(&b'T') && time.len() >= 19
}

fn is_time(text: &[u8]) -> bool {
    matches!(text, [h1, h2, b':', m1, m2, b':', s1, s2, ..] if [h1, h2, m1, m2, s1, s2].iter().all(|digit| digit.is_ascii_digit()))
}

/// Splits a text at its first space.
fn word(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = memchr(b' ', text).filter(|end| (1..=NAME_MAX).contains(end))?;
    Some((text.get(..end)?, text.get(end + 1..)?))
}

/// The fields in which other programs keep a line: Docker and Fluent Bit, journald, Elastic's and AWS' agents, GCP,
/// Loki, Splunk.
const LINES: [&str; 9] = ["log", "MESSAGE", "message", "@message", "textPayload", "line", "event", "_raw", "msg"];

/// The fields that name who wrote a line.
const NAMES: [&str; 5] = ["stream", "container_name", "_SYSTEMD_UNIT", "SYSLOG_IDENTIFIER", "source"];

/// A line in JSON.
fn wrapped(line: &[u8]) -> Option<Layer<'_>> {
    if !line.trim_ascii_start().starts_with(b"{") {
        return None;
    }
    let mut json = serde_json::Deserializer::from_slice(line);
    let mut found = json.deserialize_map(Wrapped).ok()?;
    json.end().ok()?;
    let text = found.text.as_mut()?;
    while matches!(text.last(), Some(b'\n' | b'\r')) {
        text.pop();
    }
    let content = Content::Text(found.text?);
    Some(Layer { content, at: found.at, name: found.name.map(|name| Cow::Owned(name.into_bytes())) })
}

#[derive(Default)]
struct Found {
    text: Option<Vec<u8>>,
    at: Option<Stamp>,
    name: Option<String>,
}

struct Wrapped;

impl<'a> Visitor<'a> for Wrapped {
    type Value = Found;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Found, A::Error> {
        let mut found = Found::default();
        while let Some(name) = map.next_key::<Cow<'_, str>>()? {
            let name = &*name;
            if LINES.contains(&name) && found.text.is_none() {
                found.text = map.next_value::<Text>()?.0;
            } else if NAMES.contains(&name) && found.name.is_none() {
                found.name = map.next_value::<Text>()?.0.and_then(|name| String::from_utf8(name).ok());
            } else if matches!(name, "time" | "@timestamp" | "timestamp") && found.at.is_none() {
                found.at = map.next_value::<Text>()?.0.and_then(|time| date::parse(&time));
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// A text, or the list of its bytes, as journald writes a text that is not UTF-8. Any other value is none.
struct Text(Option<Vec<u8>>);

impl<'a> serde_core::Deserialize<'a> for Text {
    fn deserialize<D: Deserializer<'a>>(json: D) -> Result<Self, D::Error> {
        json.deserialize_any(TextVisitor).map(Self)
    }
}

struct TextVisitor;

impl<'a> Visitor<'a> for TextVisitor {
    type Value = Option<Vec<u8>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Some(text.as_bytes().to_vec()))
    }

    fn visit_seq<A: SeqAccess<'a>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut bytes = Some(Vec::new());
        while let Some(Text(byte)) = list.next_element()? {
            debug_assert!(byte.is_none() || !byte.as_ref().is_some_and(Vec::is_empty), "a byte is one byte");
            match (&mut bytes, byte.as_deref()) {
                (Some(bytes), Some([byte])) => bytes.push(*byte),
                _ => bytes = None,
            }
        }
        Ok(bytes)
    }

    fn visit_map<A: MapAccess<'a>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(None)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Self::Value, E> {
        Ok(u8::try_from(number).ok().map(|byte| vec![byte]))
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }
}
