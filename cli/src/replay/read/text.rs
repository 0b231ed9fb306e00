//! Lines of text, read by a format as nginx's `log_format` writes it: variables, and what stands between them.

use std::borrow::Cow;

use memchr::{memchr, memchr2};

use super::field::{Field, Fields, HeaderNames, Unit};
use super::request::host_name;

/// A format, ready to read lines.
#[derive(Clone, Debug)]
pub(crate) struct Pattern {
    /// The text before the first variable.
    start: Box<[u8]>,
    /// The variables, and what stands behind each of them.
    steps: Vec<(Field, Box<[u8]>)>,
    pub(crate) headers: HeaderNames,
}

impl Pattern {
    /// Reads a format, such as `$remote_addr [$time_local] "$request" $status`, or a whole `log_format` directive.
    pub(crate) fn parse(format: &str) -> Result<Self, String> {
        let pattern = Self::timeless(format)?;
        if !pattern.steps.iter().any(|(field, _)| matches!(field, Field::Start | Field::End)) {
            return Err("the format has no time: $time_local, $time_iso8601 or $msec".to_owned());
        }
        Ok(pattern)
    }

    /// Reads a format whose lines have no time.
    pub(crate) fn timeless(format: &str) -> Result<Self, String> {
        let format = of_directive(format)?;
        let mut headers = HeaderNames::default();
        let mut parts = format.split('$');
        let start = parts.next().unwrap_or_default();
        let mut steps: Vec<(Field, Box<[u8]>)> = Vec::new();
        for part in parts {
            let (name, behind) = name_of(part);
            if name.is_empty() {
                return Err(format!("the format has a `$` without a name, before `{}`", cut(part)));
            }
            if steps.last().is_some_and(|(_, behind)| behind.is_empty()) {
                return Err(format!("nothing in the format separates `${name}` from the variable before it"));
            }
            steps.push((field_of(name, &mut headers), behind.as_bytes().into()));
        }
        Ok(Self { start: start.as_bytes().into(), steps, headers })
    }

    /// Adds the fields of a line. Returns `None` if the line is not of this format.
    pub(crate) fn read<'a>(&self, line: &'a [u8], fields: &mut Fields<'a>) -> Option<()> {
        let mut rest = behind(line, &self.start)?;
        for (field, end) in &self.steps {
            let (value, after) = split(rest, end)?;
            match field {
                Field::Other => {}
                Field::Size if value.iter().all(|byte| byte.is_ascii_digit() || *byte == b'-') => {}
                Field::Size => return None,
                Field::Unnamed(header) => {
                    if let Some(addresses) = quoted_addresses(value) {
                        fields.add(Field::Header(*header), Cow::Borrowed(addresses));
                    }
                }
                // An address without a port is that of another client, such as of a proxy.
                Field::VirtualHost => {
                    let name = without_port(value);
                    if name.len() == value.len() && host_name(name).is_none() {
                        return None;
                    }
                    fields.add(Field::Host, Cow::Borrowed(name));
                }
                _ => fields.add(*field, unescaped(value)),
            }
            rest = after;
        }
        rest.is_empty().then_some(())
    }
}

/// Returns the first text in quotes that is a list of addresses, as `X-Forwarded-For` is.
fn quoted_addresses(fields: &[u8]) -> Option<&[u8]> {
    let is_address = |part: &[u8]| {
        let text = std::str::from_utf8(part).map(str::trim);
        text.is_ok_and(|text| text.parse::<std::net::IpAddr>().is_ok())
    };
    let mut quoted = fields.split(|byte| *byte == b'"').skip(1).step_by(2);
    quoted.find(|text| text.split(|byte| *byte == b',').all(is_address))
}

/// Returns the name of a virtual host without its port.
fn without_port(value: &[u8]) -> &[u8] {
    let digits = value.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
    let name = value.get(..value.len() - digits).and_then(|name| name.strip_suffix(b":"));
    name.filter(|_| digits > 0).unwrap_or(value)
}

/// Splits a text at the first place where `end` stands. A byte after a backslash is part of the value. The last
/// variable of a format has no end and takes the rest.
fn split<'a>(text: &'a [u8], end: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let Some(first) = end.first() else { return Some((text, &[])) };
    let mut from = 0;
    loop {
        let found = memchr2(*first, b'\\', text.get(from..)?)?;
        let (value, rest) = text.split_at_checked(from + found)?;
        match behind(rest, end) {
            Some(after) => return Some((value, after)),
            None => from += found + if rest.first() == Some(&b'\\') { 2 } else { 1 },
        }
    }
}

/// Returns what stands behind a prefix. It compares byte by byte, because the prefixes are shorter than a call of
/// `memcmp` is worth.
fn behind<'a>(text: &'a [u8], prefix: &[u8]) -> Option<&'a [u8]> {
    let (begin, rest) = text.split_at_checked(prefix.len())?;
    begin.iter().zip(prefix).all(|(a, b)| a == b).then_some(rest)
}

/// Returns a value without the escapes of nginx, Apache and JSON: `\x22`, `\"`, `\\`, `\n`, `\u0022`.
fn unescaped(value: &[u8]) -> Cow<'_, [u8]> {
    if memchr(b'\\', value).is_none() {
        return Cow::Borrowed(value);
    }
    let hex = |digits: &[u8]| u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok();
    let mut plain = Vec::with_capacity(value.len());
    let mut rest = value;
    loop {
        rest = match rest {
            [] => return Cow::Owned(plain),
            [b'\\', b'x', a, b, rest @ ..] if hex(&[*a, *b]).is_some() => {
                plain.extend(hex(&[*a, *b]).and_then(|byte| u8::try_from(byte).ok()));
                rest
            }
            [b'\\', b'u', a, b, c, d, rest @ ..] if hex(&[*a, *b, *c, *d]).is_some() => {
                let c = hex(&[*a, *b, *c, *d]).and_then(char::from_u32).unwrap_or(char::REPLACEMENT_CHARACTER);
                plain.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
                rest
            }
            [b'\\', escaped, rest @ ..] => {
                plain.push(match escaped {
                    b'n' => b'\n',
                    b'r' => b'\r',
                    b't' => b'\t',
                    other => *other,
                });
                rest
            }
            [byte, rest @ ..] => {
                plain.push(*byte);
                rest
            }
        }
    }
}

/// Returns the text of a `log_format` directive: its quoted parts, joined. Any other text is returned as it is.
fn of_directive(format: &str) -> Result<Cow<'_, str>, String> {
    let Some(directive) = format.trim().strip_prefix("log_format").filter(|rest| rest.starts_with([' ', '\t', '\n']))
    else {
        return Ok(Cow::Borrowed(format));
    };
    let mut joined = String::new();
    // A name and `escape=json` stand before the first quote.
    let mut rest = directive;
    while let Some(at) = rest.find(['\'', '"']) {
        let (_, from) = rest.split_at(at);
        let mut chars = from.char_indices();
        let quote = chars.next().map(|(_, quote)| quote);
        let end = loop {
            match chars.next() {
                Some((at, c)) if Some(c) == quote => break at + 1,
                Some((_, '\\')) => joined.extend(chars.next().map(|(_, c)| c)),
                Some((_, c)) => joined.push(c),
                None => return Err("a quote of the log_format is not closed".to_owned()),
            }
        };
        rest = from.get(end..).unwrap_or_default();
    }
    if joined.is_empty() { Err("the log_format has no quoted text".to_owned()) } else { Ok(Cow::Owned(joined)) }
}

/// Splits what follows a `$` into a variable's name, which may be in braces, and the text behind it.
fn name_of(part: &str) -> (&str, &str) {
    if let Some((name, behind)) = part.strip_prefix('{').and_then(|part| part.split_once('}')) {
        return (name, behind);
    }
    let end = part.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(part.len());
    part.split_at(end)
}

fn field_of(name: &str, headers: &mut HeaderNames) -> Field {
    match name {
        "remote_addr" => Field::Client,
        "realip_remote_addr" => Field::Peer,
        "remote_user" => Field::User,
        "ident" => Field::Ident,
        "time_local" | "time_iso8601" | "msec" => Field::End,
        // These are not nginx's. The formats of other servers are written with them.
        "time_start" => Field::Start,
        "time_end" => Field::End,
        "duration_s" => Field::Duration(Unit::Seconds),
        "duration_ms" => Field::Duration(Unit::Millis),
        "size" | "bytes_sent" | "body_bytes_sent" => Field::Size,
        "request" => Field::RequestLine,
        "request_method" => Field::Method,
        "request_uri" | "uri" => Field::Target,
        "status" => Field::Status,
        "request_time" => Field::Duration(Unit::Seconds),
        "host" | "server_name" => Field::Host,
        "vhost" => Field::VirtualHost,
        "rest" => match headers.field("x-forwarded-for") {
            Some(Field::Header(at)) => Field::Unnamed(at),
            _ => Field::Other,
        },
        "http_host" => Field::Host,
        name => {
            let header = name.strip_prefix("http_").map(|name| name.replace('_', "-"));
            header.and_then(|name| headers.field(&name)).unwrap_or(Field::Other)
        }
    }
}

fn cut(text: &str) -> String {
    text.chars().take(20).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(format: &str, line: &str, field: Field) -> Option<String> {
        let mut fields = Fields::default();
        Pattern::parse(format).expect("the format is valid").read(line.as_bytes(), &mut fields)?;
        Some(String::from_utf8_lossy(fields.get(field)?).into_owned())
    }

    #[test]
    fn value_ends_where_the_next_text_begins() {
        let format = r#"$remote_addr - $remote_user [$time_local] "$request" $status"#;
        let line = r#"::1 - a - b [c [17/May/2015:10:05:03 +0000] "GET /\" \x22 HTTP/1.1" 200"#;
        assert_eq!(read(format, line, Field::Client).as_deref(), Some("::1"));
        assert_eq!(read(format, line, Field::User).as_deref(), Some("a - b"));
        assert_eq!(read(format, line, Field::Status).as_deref(), Some("200"));
        let line = r#"::1 - - [17/May/2015:10:05:03 +0000] "GET /\" \x22\u00e9\\ HTTP/1.1" 200"#;
        assert_eq!(read(format, line, Field::RequestLine).as_deref(), Some("GET /\" \"é\\ HTTP/1.1"));
        assert_eq!(read(format, line, Field::User), None, "a dash is no value");
    }

    #[test]
    fn line_of_another_shape_is_not_read() {
        let format = r#"$msec "$request""#;
        for line in ["", "1.5", "1.5 \"a", "1.5 \"a\" b", "1.5 \"a\\\"", "1.5 \"a\\"] {
            assert_eq!(read(format, line, Field::RequestLine), None, "{line}");
        }
    }

    #[test]
    fn directive_is_read_as_nginx_reads_it() {
        let directive =
            "log_format main escape=json '{\"ip\":\"$remote_addr\",'\n  '\"at\":${msec},\"ua\":\"$http_user_agent\"}';";
        let line = r#"{"ip":"192.0.2.1","at":1.5,"ua":"a \"b\" \u003c"}"#;
        assert_eq!(read(directive, line, Field::Client).as_deref(), Some("192.0.2.1"));
        assert_eq!(read(directive, line, Field::End).as_deref(), Some("1.5"));
        assert_eq!(read(directive, line, Field::Header(0)).as_deref(), Some("a \"b\" <"));
    }

    #[test]
    fn format_that_cannot_be_meant_is_reported() {
        for (format, expected) in [
            ("$msec$status", "`$status`"),
            ("$remote_addr $status", "no time"),
            ("$msec $ $status", "without a name"),
            ("log_format main '$msec", "not closed"),
            ("log_format main;", "no quoted"),
        ] {
            let error = Pattern::parse(format).unwrap_err();
            assert!(error.contains(expected), "{format}: {error}");
        }
    }
}
