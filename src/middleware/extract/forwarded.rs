//! The text of forwarding header fields: entries from the right, and the addresses in them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The entries of one line of `X-Forwarded-For`, from the right. They have no quotes.
pub(super) fn plain_entries(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.rsplit(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}

/// The elements of one line of `Forwarded` (RFC 7239 section 4), from the right. Commas in quoted strings do not split.
///
/// A line whose last quote is never closed is one element that says nothing. So if a client leaves a quote open and a
/// proxy appends to the same line, what the proxy said is not read as part of the client's text, nor the other way round.
pub(super) fn elements(line: &[u8], most: usize) -> Vec<&[u8]> {
    let mut elements = std::collections::VecDeque::new();
    let mut rest = line;
    loop {
        let Some(end) = find_unquoted(rest, b',') else { return vec![b"\""] };
        let (element, after) = rest.split_at(end);
        if elements.len() == most {
            elements.pop_front();
        }
        elements.push_back(element.trim_ascii());
        match after.split_first() {
            Some((_, after)) => rest = after,
            None => return elements.into_iter().rev().collect(),
        }
    }
}

/// The address in the `for` parameter of an element, if it has just one such parameter and it is an address.
pub(super) fn forwarded_for(element: &[u8]) -> Option<IpAddr> {
    let mut found = None;
    let mut rest = element;
    loop {
        let end = find_unquoted(rest, b';')?;
        let (pair, after) = rest.split_at(end);
        if let Some(equals) = pair.iter().position(|byte| *byte == b'=') {
            let (name, value) = pair.split_at(equals);
            if name.trim_ascii().eq_ignore_ascii_case(b"for") {
                if found.is_some() {
                    return None;
                }
                found = Some(value.get(1..)?.trim_ascii());
            }
        }
        match after.split_first() {
            Some((_, after)) => rest = after,
            None => break,
        }
    }
    let value = found?;
    match value.strip_prefix(b"\"") {
        None => node(value),
        // An address has nothing that needs a backslash.
        Some(quoted) => node(quoted.strip_suffix(b"\"")?),
    }
}

/// An address with or without a port, brackets or a zone: `192.0.2.1:80`, `[2001:db8::1]:80`, `2001:db8::1`, `fe80::1%eth0`.
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

fn ipv6(text: &str) -> Option<Ipv6Addr> {
    let (address, zone) = text.split_once('%').map_or((text, None), |(address, zone)| (address, Some(zone)));
    if zone.is_some_and(str::is_empty) {
        return None;
    }
    address.parse().ok()
}

/// A port's number, or the obfuscated one of RFC 7239 section 6.
fn is_port(port: &str) -> bool {
    match port.strip_prefix('_') {
        Some(name) => {
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        }
        None => (1..=5).contains(&port.len()) && port.bytes().all(|byte| byte.is_ascii_digit()),
    }
}

/// Where the first `byte` outside of quoted strings is, or the length; nothing if a quote is left open.
fn find_unquoted(text: &[u8], wanted: u8) -> Option<usize> {
    let mut quoted = false;
    let mut escaped = false;
    for (index, byte) in text.iter().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            byte if *byte == wanted && !quoted => return Some(index),
            _ => {}
        }
    }
    (!quoted).then_some(text.len())
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn commas_in_quotes_do_not_split_and_an_open_quote_says_nothing() {
        assert_eq!(elements(b"for=a, for=\"b,c\" ,for=d", 64), [&b"for=d"[..], b"for=\"b,c\"", b"for=a"]);
        assert_eq!(elements(b"for=a;x=\"\\\",\", for=b", 64), [&b"for=b"[..], b"for=a;x=\"\\\",\""]);
        assert_eq!(elements(b"a,b,c", 2), [b"c", b"b"]);
        for line in [&b"for=\"x, for=203.0.113.9"[..], b"for=\"x, for=\"[2001:db8::1]:4711\"", b"x=\"\\, for=\"[::1]\""]
        {
            let elements = elements(line, 64);
            assert_eq!(elements.len(), 1, "{line:?}");
            assert_eq!(forwarded_for(elements[0]), None);
        }
    }
}
