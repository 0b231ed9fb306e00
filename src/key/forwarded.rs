//! The text of forwarding headers: entries from the right, and the addresses in them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The longest part that is read, in bytes. An address with a port and a zone is far shorter.
const PART_MAX: usize = 1_024;

/// The parts of a text, from the right, without the whitespace around them: the entries of one line
/// of a forwarding header, or the pairs of one entry.
///
/// The iterator reads only the parts of the line that the caller asks for. So only the entry and the
/// text to its right decide how the entry is read. A client cannot change how an entry that a proxy
/// appends is read.
///
/// A part that is too long, or whose quotes do not match, is returned as `None`. No further part
/// follows it.
pub(super) struct ReverseSplit<'a> {
    rest: Option<&'a [u8]>,
    separator: Option<u8>,
    /// Whether quoted strings may contain separators, which then do not split the text.
    quoted: bool,
}

/// Splits a line of `X-Forwarded-For`, in which quotes have no meaning.
pub(super) fn plain_entries(line: &[u8]) -> ReverseSplit<'_> {
    ReverseSplit { rest: Some(line), separator: Some(b','), quoted: false }
}

/// Splits a line of `Forwarded` (RFC 7239 section 4).
pub(super) fn quoted_entries(line: &[u8]) -> ReverseSplit<'_> {
    ReverseSplit { rest: Some(line), separator: Some(b','), quoted: true }
}

/// Leaves a line whole.
pub(super) fn one_entry(line: &[u8]) -> ReverseSplit<'_> {
    ReverseSplit { rest: Some(line), separator: None, quoted: false }
}

impl<'a> Iterator for ReverseSplit<'a> {
    type Item = Option<&'a [u8]>;

    fn next(&mut self) -> Option<Self::Item> {
        let line = self.rest.take()?;
        let mut in_string = false;
        for (at, byte) in line.iter().enumerate().rev().take(PART_MAX + 1) {
            match byte {
                b'"' if self.quoted => in_string = !in_string || is_escaped(line, at),
                byte if Some(*byte) == self.separator && !in_string => {
                    self.rest = line.get(..at);
                    return Some(line.get(at + 1..).map(<[u8]>::trim_ascii));
                }
                _ => {}
            }
        }
        Some((line.len() <= PART_MAX && !in_string).then(|| line.trim_ascii()))
    }
}

/// Returns whether an odd number of backslashes precedes the byte.
fn is_escaped(line: &[u8], at: usize) -> bool {
    // Counts at most `PART_MAX` backslashes, because a part with more is longer than the maximum and is not read.
    line.iter().take(at).rev().take(PART_MAX).take_while(|byte| **byte == b'\\').count() % 2 == 1
}

/// Returns the address in the `for` parameter of an element. Returns `None` if the element does not
/// have exactly one such parameter, or if its value is not an address.
pub(super) fn forwarded_for(element: &[u8]) -> Option<IpAddr> {
    let mut found = None;
    for pair in (ReverseSplit { separator: Some(b';'), ..quoted_entries(element) }) {
        let Some((name, value)) = split_once(pair?, b'=') else { continue };
        let is_for = name.trim_ascii().eq_ignore_ascii_case(b"for");
        if is_for && found.replace(value.trim_ascii()).is_some() {
            return None;
        }
    }
    let value = found?;
    match value.strip_prefix(b"\"") {
        None => node(value),
        // The quoted text is not unescaped, because an address has no character that needs a backslash.
        Some(quoted) => node(quoted.strip_suffix(b"\"")?),
    }
}

/// Parses an address with or without a port, brackets or a zone: `192.0.2.1:80`, `[2001:db8::1]:80`,
/// `2001:db8::1`, `fe80::1%eth0`.
pub(super) fn node(text: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(text).ok()?;
    let address = if let Some(bracketed) = text.strip_prefix('[') {
        let (address, port) = bracketed.split_once(']')?;
        if !(port.is_empty() || port.strip_prefix(':').is_some_and(is_port)) {
            return None;
        }
        IpAddr::V6(ipv6(address)?)
    } else if let Some(address) = ipv6(text) {
        IpAddr::V6(address)
    } else {
        let address = match text.split_once(':') {
            Some((address, port)) if is_port(port) => address,
            Some(_) => return None,
            None => text,
        };
        IpAddr::V4(address.parse::<Ipv4Addr>().ok()?)
    };
    Some(address.to_canonical())
}

/// Parses an address with a port after its last colon, as CloudFront writes it: `192.0.2.1:46532`,
/// `2001:db8::1:46532`. A text without a port is parsed like in [`node`].
pub(super) fn node_with_port(text: &[u8]) -> Option<IpAddr> {
    let bare = || {
        let (address, port) = std::str::from_utf8(text).ok()?.rsplit_once(':').filter(|(_, port)| is_port(port))?;
        debug_assert!(!port.is_empty(), "a port has digits");
        Some(IpAddr::V6(ipv6(address)?).to_canonical())
    };
    bare().or_else(|| node(text))
}

fn ipv6(text: &str) -> Option<Ipv6Addr> {
    let (address, zone) = text.split_once('%').map_or((text, None), |(address, zone)| (address, Some(zone)));
    if zone.is_some_and(str::is_empty) {
        return None;
    }
    address.parse().ok()
}

/// Returns whether a text is a port's number, or an obfuscated port (RFC 7239 section 6).
fn is_port(port: &str) -> bool {
    match port.strip_prefix('_') {
        Some(name) => {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        }
        None => (1..=5).contains(&port.len()) && port.bytes().all(|byte| byte.is_ascii_digit()),
    }
}

/// Splits a text at the first `separator`.
pub(super) fn split_once(text: &[u8], separator: u8) -> Option<(&[u8], &[u8])> {
    let mut parts = text.splitn(2, |byte| *byte == separator);
    Some((parts.next()?, parts.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn address(text: &str) -> Option<String> {
        node(text.as_bytes()).map(|address| address.to_string())
    }

    #[test]
    fn an_address_is_found_with_and_without_its_trimmings() {
        for (text, plain) in [
            ("203.0.113.9", "203.0.113.9"),
            ("203.0.113.9:4711", "203.0.113.9"),
            ("203.0.113.9:_port", "203.0.113.9"),
            ("2001:db8::1", "2001:db8::1"),
            ("[2001:db8::1]", "2001:db8::1"),
            ("[2001:db8::1]:4711", "2001:db8::1"),
            ("fe80::1%eth0", "fe80::1"),
            ("[fe80::1%25eth0]:1", "fe80::1"),
            ("::ffff:192.0.2.1", "192.0.2.1"),
            ("[::ffff:192.0.2.1]:1", "192.0.2.1"),
        ] {
            assert_eq!(address(text).as_deref(), Some(plain), "{text}");
        }
        for text in [
            "",
            "unknown",
            "_hidden",
            "garbage",
            "1.2.3",
            "1.2.3.4:",
            "1.2.3.4:http",
            "1.2.3.4:123456",
            "1.2.3.4 5.6.7.8",
            "[2001:db8::1",
            "2001:db8::1]",
            "[2001:db8::1]4711",
            "[1.2.3.4]:80",
            "fe80::1%",
            "01.2.3.4",
            "1.2.3.4%eth0",
            "\"1.2.3.4\"",
        ] {
            assert_eq!(address(text), None, "{text}");
        }
        assert_eq!(node(b"1.2.3.\xff"), None);
    }

    #[test]
    fn the_for_parameter_is_read_in_any_case_and_place() {
        let read = |text: &str| forwarded_for(text.as_bytes()).map(|address| address.to_string());
        assert_eq!(read("for=192.0.2.60;proto=http;by=203.0.113.43").as_deref(), Some("192.0.2.60"));
        assert_eq!(read("proto=https; For=\"[2001:db8:cafe::17]:4711\"").as_deref(), Some("2001:db8:cafe::17"));
        assert_eq!(read("by=\"a;for=1.2.3.4\";for=5.6.7.8").as_deref(), Some("5.6.7.8"));
        for text in [
            "",
            "for",
            "for=",
            "for=_hidden",
            "for=unknown",
            "by=1.2.3.4",
            "for=1.2.3.4;for=5.6.7.8",
            "for=\"1.2.3.4",
            "for=\"\"",
            "for=\"",
        ] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    fn entries(entries: ReverseSplit<'_>) -> Vec<Option<&str>> {
        entries.map(|entry| entry.map(|text| std::str::from_utf8(text).unwrap())).collect()
    }

    #[test]
    fn entries_are_read_from_the_right() {
        assert_eq!(entries(plain_entries(b"a, b ,c")), [Some("c"), Some("b"), Some("a")]);
        assert_eq!(entries(plain_entries(b"\"a,")), [Some(""), Some("\"a")]);
        assert_eq!(entries(plain_entries(b"")), [Some("")]);
        let quoted = entries(quoted_entries(b"for=a, for=\"b,c\" ,for=d"));
        assert_eq!(quoted, [Some("for=d"), Some("for=\"b,c\""), Some("for=a")]);
        let escaped = entries(quoted_entries(br#"for=a;x="\",", y="\\", for=b"#));
        assert_eq!(escaped, [Some("for=b"), Some(r#"y="\\""#), Some(r#"for=a;x="\",""#)]);
    }

    #[test]
    fn an_entry_with_an_open_quote_is_unreadable() {
        assert_eq!(entries(quoted_entries(b"for=\"x")), [None]);
        assert_eq!(entries(quoted_entries(b"a, for=\"x, for=203.0.113.9")), [Some("for=203.0.113.9"), None]);
        assert_eq!(entries(quoted_entries(b"x=\"\\, for=\"[::1]\"")), [Some("for=\"[::1]\""), None]);
    }

    #[test]
    fn an_entry_that_is_too_long_is_unreadable() {
        let (longest, too_long) = ("a".repeat(PART_MAX), "a".repeat(PART_MAX + 1));
        for read in [plain_entries, quoted_entries] {
            let line = format!("a,{longest},b");
            assert_eq!(entries(read(line.as_bytes())), [Some("b"), Some(longest.as_str()), Some("a")]);
            let line = format!("a,{too_long},b");
            assert_eq!(entries(read(line.as_bytes())), [Some("b"), None]);
            assert_eq!(entries(read(too_long.as_bytes())), [None]);
        }
    }

    /// An element of a valid `Forwarded` header.
    fn element() -> impl Strategy<Value = String> {
        let value = prop_oneof!["[a-z0-9._-]{1,6}", "\"([ !,;=a-z\\[\\]:]|\\\\[ -~]){0,8}\""];
        prop::collection::vec(("[a-z]{1,3}", value), 1..4).prop_map(|pairs| {
            let pairs: Vec<String> = pairs.into_iter().map(|(name, value)| format!("{name}={value}")).collect();
            pairs.join(";")
        })
    }

    proptest! {
        #[test]
        fn entries_of_a_valid_line_are_its_elements(elements in prop::collection::vec(element(), 1..6)) {
            let line = elements.join(" ,\t");
            let read: Vec<_> = quoted_entries(line.as_bytes()).map(Option::unwrap).collect();
            let written: Vec<&[u8]> = elements.iter().rev().map(String::as_bytes).collect();
            prop_assert_eq!(read, written);
        }

        #[test]
        fn the_last_entry_does_not_depend_on_what_stands_left_of_it(left in "[ -~]{0,12}", element in element()) {
            let line = format!("{left},{element}");
            prop_assert_eq!(quoted_entries(line.as_bytes()).next(), Some(Some(element.as_bytes())));
            let line = format!("{left}, 192.0.2.1");
            prop_assert_eq!(plain_entries(line.as_bytes()).next(), Some(Some(&b"192.0.2.1"[..])));
        }
    }
}
