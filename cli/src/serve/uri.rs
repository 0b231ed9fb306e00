//! The path of a request as rules compare it.
//!
//! A client can spell one path in many ways: `/login`, `//login`, `/./login`, `/%6Cogin`. Most proxies and applications
//! take these for one, and rules compare paths as they are. So a path is normalised before: without this a client
//! avoids the rules of a path by spelling it differently.

use clap::ValueEnum;
use http::Uri;
use http::uri::PathAndQuery;

/// The form of paths that rules see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Paths {
    /// Repeated slashes, segments of `.` and `..`, and needless percent-encoding are resolved
    Normalized,
    /// Paths stay as the client wrote them
    AsSent,
    /// As `normalized`, and in lower case, without `;parameters`, and without a slash at the end: for applications that
    /// ignore these. Rules have to name paths in this form
    Folded,
}

/// Bytes that stand for themselves in a path or a query (RFC 3986): all others are percent-encoded here.
fn stands_for_itself(byte: u8) -> bool {
    is_unreserved(byte) || b"!$&'()*+,;=:@/".contains(&byte)
}

/// Bytes that mean the same with and without percent-encoding.
fn is_unreserved(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~".contains(&byte)
}

/// Reads what a client wrote behind its method: a path with a query, the whole address of a proxy's client, or `*`.
/// Returns `None` if it is none of these, or too long.
pub(crate) fn read(target: &[u8], paths: Paths) -> Option<Uri> {
    if target == b"*" {
        return Some(Uri::from_static("*"));
    }
    let target = if target.first() == Some(&b'/') { target } else { without_origin(target)? };
    let target = target.split(|byte| *byte == b'#').next().unwrap_or_default();
    let (path, query) = match target.iter().position(|byte| *byte == b'?') {
        Some(at) => (target.get(..at)?, target.get(at + 1..)),
        None => (target, None),
    };
    let mut read = Vec::with_capacity(target.len());
    match paths {
        Paths::Normalized => normalize(path, &mut read),
        Paths::AsSent => path.iter().for_each(|byte| push_escaped(*byte, &mut read)),
        Paths::Folded => fold(path, &mut read),
    }
    if let Some(query) = query {
        read.push(b'?');
        query.iter().for_each(|byte| if *byte == b'?' { read.push(*byte) } else { push_escaped(*byte, &mut read) });
    }
    PathAndQuery::from_maybe_shared(bytes::Bytes::from(read)).ok().map(Uri::from)
}

/// Returns what follows `http://host`.
fn without_origin(target: &[u8]) -> Option<&[u8]> {
    let after = |scheme: &[u8]| {
        let (start, rest) = target.split_at_checked(scheme.len())?;
        start.eq_ignore_ascii_case(scheme).then_some(rest)
    };
    let rest = after(b"http://").or_else(|| after(b"https://"))?;
    match rest.iter().position(|byte| b"/?#".contains(byte)) {
        Some(at) if rest.get(at) == Some(&b'/') => rest.get(at..),
        _ => Some(b"/"),
    }
}

/// Writes a byte, percent-encoded if it is neither allowed nor the sign of an encoding.
fn push_escaped(byte: u8, to: &mut Vec<u8>) {
    if stands_for_itself(byte) || byte == b'%' { to.push(byte) } else { push_encoded(byte, to) }
}

fn push_encoded(byte: u8, to: &mut Vec<u8>) {
    let digit = |nibble: u8| if nibble < 10 { b'0' + nibble } else { b'A' + nibble - 10 };
    to.extend([b'%', digit(byte >> 4), digit(byte & 15)]);
}

/// Writes a path so that equivalent spellings are one.
fn normalize(path: &[u8], to: &mut Vec<u8>) {
    let mut plain = Vec::with_capacity(path.len());
    let mut rest = path;
    while let Some((byte, after)) = rest.split_first() {
        rest = after;
        let encoded = if *byte == b'%' { after.get(..2).and_then(decoded) } else { None };
        match encoded {
            Some(meant) => {
                rest = after.get(2..).unwrap_or_default();
                // A slash or a percent sign that is encoded is data, and stays so.
                if is_unreserved(meant) { plain.push(meant) } else { push_encoded(meant, &mut plain) }
            }
            None if *byte == b'%' => plain.extend_from_slice(b"%25"),
            None => push_escaped(*byte, &mut plain),
        }
    }
    let mut segments: Vec<&[u8]> = Vec::new();
    let mut ends_with_slash = false;
    for segment in plain.split(|byte| *byte == b'/') {
        ends_with_slash = matches!(segment, b"" | b"." | b"..");
        match segment {
            b"" | b"." => {}
            b".." => _ = segments.pop(),
            _ => segments.push(segment),
        }
    }
    for segment in &segments {
        to.push(b'/');
        to.extend_from_slice(segment);
    }
    if ends_with_slash {
        to.push(b'/');
    }
}

/// Writes a path so that spellings are one that many applications take for one.
fn fold(path: &[u8], to: &mut Vec<u8>) {
    let mut normalized = Vec::with_capacity(path.len());
    normalize(path, &mut normalized);
    // The parameters of a segment go before its dots are looked at: `/x/..;a/login` is `/login` to these applications.
    let segments = normalized.split(|byte| *byte == b'/').map(|segment| {
        let end = segment.iter().position(|byte| *byte == b';').unwrap_or(segment.len());
        segment.get(..end).unwrap_or_default()
    });
    let plain = segments.collect::<Vec<_>>().join(&b'/').to_ascii_lowercase();
    let before = to.len();
    normalize(&plain, to);
    if to.len() > before + 1 && to.ends_with(b"/") {
        to.pop();
    }
}

/// Returns the byte that two hexadecimal digits stand for.
fn decoded(digits: &[u8]) -> Option<u8> {
    let value = |digit: &u8| char::from(*digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    match digits {
        [high, low] => Some(value(high)? << 4 | value(low)?),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normalized(target: &str) -> String {
        read(target.as_bytes(), Paths::Normalized).map_or_else(|| "none".to_owned(), |uri| uri.to_string())
    }

    #[test]
    fn spellings_of_a_path_are_one() {
        for target in [
            "/login",
            "//login",
            "///login",
            "/./login",
            "/a/../login",
            "/../../login",
            "/%6Cogin",
            "/%6c%6fgin",
            "/%2e/login",
            "/x/%2E%2e/login",
            "http://shop.example/login",
            "HTTPS://u:p@shop.example:8443//login",
            "/login#top",
        ] {
            assert_eq!(normalized(target), "/login", "{target}");
        }
        for (target, expected) in [
            ("/", "/"),
            ("", "none"),
            ("*", "*"),
            ("login", "none"),
            ("http://shop.example", "/"),
            ("http://shop.example?a=/b", "/"),
            ("ftp://shop.example/login", "none"),
            ("/login/", "/login/"),
            ("/login/.", "/login/"),
            ("/login/x/..", "/login/"),
            ("/a//b/?x=//y", "/a/b/?x=//y"),
            ("/a%2fb", "/a%2Fb"),
            ("/a%252fb", "/a%252fb"),
            ("/a%zz%4", "/a%25zz%254"),
            ("/%c3%a4", "/%C3%A4"),
            ("/ä", "/%C3%A4"),
            ("/a b\"<>\\^`{|}", "/a%20b%22%3C%3E%5C%5E%60%7B%7C%7D"),
            ("/a?b=%6c c&d[]=?", "/a?b=%6c%20c&d%5B%5D=?"),
            ("/a%0d%0ax: y", "/a%0D%0Ax:%20y"),
        ] {
            assert_eq!(normalized(target), expected, "{target}");
        }
    }

    #[test]
    fn path_as_sent_keeps_its_spelling() {
        for (target, expected) in [("//a/../%6C?x", "//a/../%6C?x"), ("/ä", "/%C3%A4"), ("/a%zz", "/a%zz")] {
            assert_eq!(read(target.as_bytes(), Paths::AsSent).unwrap().to_string(), expected);
        }
    }

    #[test]
    fn folded_path_is_without_what_applications_ignore() {
        for (target, expected) in [
            ("/LOGIN/", "/login"),
            ("/Login;jsessionid=1", "/login"),
            ("/login;a/;b=2?C=/D/", "/login?C=/D/"),
            ("/x/..;/login", "/login"),
            ("/x/%2E%2e%3Bv/login", "/x/..%3Bv/login"),
            ("/%4cogin/.", "/login"),
            ("/;x", "/"),
            ("/", "/"),
            ("/A%2fB", "/a%2Fb"),
            ("*", "*"),
        ] {
            assert_eq!(read(target.as_bytes(), Paths::Folded).unwrap().to_string(), expected, "{target}");
        }
    }

    #[test]
    fn no_target_makes_the_reader_fail() {
        let mut state = 1_u64;
        for _ in 0..20_000 {
            let target: Vec<u8> = (0..state % 40)
                .map(|n| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(n | 1);
                    b"/%.?#2fFeE*:@a\xff\x00 ;"[usize::try_from(state >> 40).unwrap() % 18]
                })
                .collect();
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            for paths in [Paths::Normalized, Paths::AsSent, Paths::Folded] {
                if let Some(uri) = read(&target, paths) {
                    assert!(uri.path().starts_with('/') || uri.path() == "*", "{target:?}: {uri}");
                }
            }
            for paths in [Paths::Normalized, Paths::Folded] {
                if let Some(once) = read(&target, paths) {
                    assert_eq!(read(once.to_string().as_bytes(), paths), Some(once), "{target:?}");
                }
            }
        }
        assert_eq!(read(&[b"/".as_slice(), &[b'a'; 70_000]].concat(), Paths::Normalized), None);
    }
}
