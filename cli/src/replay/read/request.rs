//! A request as a log line describes it.

use std::hash::{BuildHasher, Hasher};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use foldhash::quality::FixedState;
use http::HeaderName;
use http::header::USER_AGENT;

use super::date::{self, Stamp};
use super::field::{Field, Fields};

/// A request of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// When it arrived, in microseconds since the epoch.
    pub(crate) at_us: u64,
    /// The time that the log has, which may be that of the response.
    pub(crate) stamp_us: u64,
    /// How long it took, if the log says so, in microseconds.
    pub(crate) duration_us: Option<u64>,
    /// Whether the log writes whole seconds only.
    pub(crate) is_coarse: bool,
    /// The client's address, or the one that [stands for its name](host_address).
    pub(crate) client: Option<IpAddr>,
    /// The client's name, if the log has that in place of its address.
    pub(crate) host: Option<Box<str>>,
    /// 0 if the log does not say.
    pub(crate) status: u16,
    /// Whether a proxy said that the client has another address.
    pub(crate) is_forwarded: bool,
    /// A hash of the user agent, or 0.
    pub(crate) agent: u64,
    /// The texts, unless nothing reads them.
    pub(crate) texts: Option<Box<Texts>>,
}

/// The texts of a request that are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    Nothing,
    /// The path and the user agent, cut, which a report shows of clients that are refused.
    Samples,
    All,
}

/// The longest path and user agent of [`Keep::Samples`], in bytes.
const SAMPLE_MAX: usize = 200;

/// The texts of a request in one allocation. Those that the log does not have are empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Texts {
    bytes: Box<[u8]>,
    /// The end of each text: the method, the target, the host, the user, and the headers.
    ends: Box<[u32]>,
}

impl Texts {
    fn new<'t>(texts: impl Iterator<Item = &'t [u8]> + Clone) -> Self {
        // As much as is needed, so that no allocation has to shrink.
        let (count, length) = texts.clone().fold((0, 0), |(count, length), text| (count + 1, length + text.len()));
        let (mut bytes, mut ends) = (Vec::with_capacity(length), Vec::with_capacity(count));
        for text in texts {
            bytes.extend_from_slice(text);
            ends.push(u32::try_from(bytes.len()).unwrap_or(u32::MAX)); // a line is far shorter
        }
        Self { bytes: bytes.into(), ends: ends.into() }
    }

    fn text(&self, at: usize) -> &[u8] {
        let end = |at: usize| self.ends.get(at).map(|end| *end as usize);
        let start = at.checked_sub(1).map_or(Some(0), end);
        let range = start.zip(end(at)).map(|(start, end)| start..end);
        range.and_then(|range| self.bytes.get(range)).unwrap_or_default()
    }

    pub(crate) fn method(&self) -> &[u8] {
        self.text(0)
    }

    pub(crate) fn target(&self) -> &[u8] {
        self.text(1)
    }

    pub(crate) fn host(&self) -> &[u8] {
        self.text(2)
    }

    pub(crate) fn user(&self) -> &[u8] {
        self.text(3)
    }

    /// Returns the value of the header of this index in the format's list.
    pub(crate) fn header(&self, at: usize) -> &[u8] {
        self.text(4 + at)
    }

    /// Returns about how much memory it takes, in bytes.
    pub(crate) fn size(&self) -> usize {
        self.bytes.len() + self.ends.len() * 4 + 96
    }
}

impl Request {
    /// Makes a request of the fields of a line. `at` is for a line without a time of its own. Returns `None` without
    /// a time.
    pub(crate) fn new(fields: &Fields<'_>, headers: &[HeaderName], at: Option<Stamp>, keep: Keep) -> Option<Self> {
        let [start, end] = [Field::Start, Field::End].map(|field| fields.all(field).find_map(date::parse));
        let end = if start.is_none() { end.or(at) } else { end };
        let took = fields.duration();
        let (stamp, before, duration_us) = match (start, end) {
            (Some(start), Some(end)) => (start, 0, took.or_else(|| end.us.checked_sub(start.us))),
            (Some(start), None) => (start, 0, took),
            (None, end) => (end?, took.unwrap_or(0), took),
        };
        let header = |at: usize| fields.get(Field::Header(at)).unwrap_or_default();
        let named = |name: &str| headers.iter().position(|known| known == name).map(header).unwrap_or_default();
        let address = |field| fields.all(field).find_map(address);
        // A proxy appends the address that it sees to the list.
        let forwarded = || named("x-forwarded-for").rsplit(|byte| *byte == b',').next().and_then(self::address);
        let peer = address(Field::Client).or_else(|| address(Field::Peer));
        let is_forwarded = peer.is_some_and(|peer| forwarded().is_some_and(|client| client != peer));
        let client = peer.or_else(forwarded);
        let named_client = || fields.get(Field::Client).and_then(host_name).filter(|_| address(Field::Ident).is_none());
        let host = if client.is_none() { named_client() } else { None };
        let status = fields.get(Field::Status).and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
        let agent = named(USER_AGENT.as_str());
        let texts = (keep != Keep::Nothing).then(|| {
            let line = fields.get(Field::RequestLine).unwrap_or_default();
            let (method, target) = request_line(line).unwrap_or_default();
            let method = fields.get(Field::Method).unwrap_or(method);
            let target = fields.get(Field::Target).unwrap_or(target);
            if keep == Keep::Samples {
                let headers = headers.iter().enumerate();
                let agents = headers.map(|(at, name)| if *name == USER_AGENT { cut(header(at)) } else { &[] });
                return Box::new(Texts::new([&[], cut(path(target)), &[], &[]].into_iter().chain(agents)));
            }
            let host = fields.get(Field::Host).unwrap_or_default();
            let user = fields.get(Field::User).unwrap_or_default();
            Box::new(Texts::new([method, target, host, user].into_iter().chain((0..headers.len()).map(header))))
        });
        Some(Self {
            at_us: stamp.us.saturating_sub(before),
            stamp_us: stamp.us,
            duration_us,
            is_coarse: stamp.is_coarse,
            client: client.or_else(|| host.as_deref().map(host_address)),
            host,
            status: status.unwrap_or(0),
            is_forwarded,
            agent: if agent.is_empty() { 0 } else { hash(agent) | 1 },
            texts,
        })
    }
}

fn cut(text: &[u8]) -> &[u8] {
    text.get(..SAMPLE_MAX).unwrap_or(text)
}

/// Returns the path of a target or a URL, without its query.
pub(crate) fn path(target: &[u8]) -> &[u8] {
    let end = target.iter().position(|byte| matches!(byte, b'?' | b'#')).unwrap_or(target.len());
    let whole = target.get(..end).unwrap_or(target);
    let Some(scheme) = whole.windows(3).position(|word| word == b"://").filter(|_| !whole.starts_with(b"/")) else {
        return whole;
    };
    let behind = whole.get(scheme + 3..).unwrap_or_default();
    let path = behind.iter().position(|byte| *byte == b'/').and_then(|at| behind.get(at..));
    path.unwrap_or(b"/")
}

/// Returns a hash that is the same in every run.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = FixedState::default().build_hasher();
    hasher.write(bytes);
    hasher.finish()
}

/// Reads an address with or without a port.
pub(crate) fn address(text: &[u8]) -> Option<IpAddr> {
    if text.len() < 2 {
        return None; // most often a dash, which stands for nothing
    }
    let text = std::str::from_utf8(text).ok()?.trim();
    let plain = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let with_port = || text.parse::<SocketAddr>().ok().map(|address| address.ip());
    // HAProxy writes no brackets. A port of at most four digits looks like a part of the address.
    let without_brackets = || text.rsplit_once(':').and_then(|(address, _)| address.parse().ok());
    plain.parse().ok().or_else(with_port).or_else(without_brackets).map(|address: IpAddr| address.to_canonical())
}

/// Reads the name of a host. Apache writes it in place of the address, if it looks names up.
pub(crate) fn host_name(text: &[u8]) -> Option<Box<str>> {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_');
    let is_name = text.len() <= 253
        && text.first().is_some_and(u8::is_ascii_alphanumeric)
        && text.iter().any(u8::is_ascii_alphabetic)
        && text.iter().all(is_part)
        && !text.eq_ignore_ascii_case(b"unknown");
    is_name.then(|| String::from_utf8_lossy(text).to_ascii_lowercase().into())
}

/// Returns the address that stands for a host's name: its hash as an IPv6 network of 01::/8, which is reserved, so it
/// is no client's and in no rule's networks.
fn host_address(name: &str) -> IpAddr {
    let hash = hash(name.as_bytes()) >> 8;
    Ipv6Addr::from_bits(u128::from(1_u64 << 56 | hash) << 64).into()
}

/// Returns whether an address stands for a host's name.
pub(crate) fn is_of_host(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.octets().first() == Some(&1))
}

/// Splits a request line into its method and its target.
pub(crate) fn request_line(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut words = line.splitn(2, |byte| *byte == b' ');
    let (method, rest) = (words.next()?, words.next()?);
    if method.is_empty() || !method.iter().all(u8::is_ascii_alphabetic) {
        return None; // what scanners send, such as a TLS hello
    }
    // A target may have spaces, if a client wrote them.
    let end = rest.windows(6).rposition(|word| word == b" HTTP/").unwrap_or(rest.len());
    Some((method, rest.get(..end)?))
}

#[cfg(test)]
mod tests {
    use tower_ratelimit::key::Prefixes;

    use super::super::format::Reader;
    use super::*;

    #[test]
    fn address_is_read_with_and_without_a_port() {
        for (text, expected) in [
            ("192.0.2.1", Some("192.0.2.1")),
            ("192.0.2.1:4711", Some("192.0.2.1")),
            (" ::ffff:192.0.2.1", Some("192.0.2.1")),
            ("2001:db8::1", Some("2001:db8::1")),
            ("[2001:db8::1]:80", Some("2001:db8::1")),
            ("[2001:db8::1]", Some("2001:db8::1")),
            ("2001:db8::1:33317", Some("2001:db8::1")),
            ("unix:", None),
            ("localhost", None),
        ] {
            assert_eq!(address(text.as_bytes()), expected.map(|text| text.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn host_name_is_a_client() {
        let format = super::super::format::Format::named("combined", &[]).unwrap();
        let read = |client: &str| {
            let line = format!("{client} - [17/May/2015:10:05:03 +0000] \"GET / HTTP/1.1\" 200 20 \"-\" \"curl/8\"");
            let request = Reader::default().read(&mut format.clone(), line.as_bytes(), Keep::Nothing)?;
            assert_eq!(request.host.is_some(), request.client.is_some_and(is_of_host));
            Some((request.host.map(String::from), request.client))
        };
        let (name, address) = read("Host-1.Example.org -").unwrap();
        assert_eq!(name.as_deref(), Some("host-1.example.org"));
        assert_eq!(read("host-1.example.org -").unwrap().1, address);
        assert_ne!(read("host-2.example.org -").unwrap().1, address);
        assert_eq!(Prefixes::default().group(address.unwrap()), address.unwrap());
        for text in ["unknown -", "unix: -"] {
            assert_eq!(read(text), Some((None, None)), "{text}");
        }
        // A name, and the client's address behind it: this is a format with a virtual host.
        for text in ["shop.example 192.0.2.1", "shop.example:443 -", "-a -", "17 -"] {
            assert_eq!(read(text), None, "{text}");
        }
        assert_eq!(read("192.0.2.1 ann").unwrap().1, Some("192.0.2.1".parse().unwrap()));
    }

    #[test]
    fn request_line_is_split_at_its_ends() {
        let split = |line: &'static str| request_line(line.as_bytes());
        assert_eq!(split("GET /a b HTTP/1.1"), Some((&b"GET"[..], &b"/a b"[..])));
        assert_eq!(split("GET /"), Some((&b"GET"[..], &b"/"[..])));
        for line in ["", "GET", "\u{16}\u{3}\u{1} a", " / HTTP/1.1"] {
            assert_eq!(split(line), None, "{line:?}");
        }
    }

    #[test]
    fn path_is_that_of_a_target() {
        for (target, expected) in [
            ("/a?b=c", "/a"),
            ("/a#b?c", "/a"),
            ("/?u=http://e.org/a", "/"),
            ("/http://e.org/a", "/http://e.org/a"),
            ("http://e.org:80/a/b?c", "/a/b"),
            ("https://e.org", "/"),
            ("e.org:443", "e.org:443"),
            ("*", "*"),
            ("", ""),
        ] {
            assert_eq!(path(target.as_bytes()), expected.as_bytes(), "{target}");
        }
    }

    #[test]
    fn samples_are_a_path_and_a_user_agent() {
        let line = format!(
            r#"::1 - ann [17/May/2015:10:05:03 +0000] "GET /{}?token HTTP/1.1" 200 1 "/r" "a""#,
            "b".repeat(999)
        );
        let mut format = super::super::format::Format::named("combined", &[]).unwrap();
        let request = Reader::default().read(&mut format, line.as_bytes(), Keep::Samples).unwrap();
        let texts = request.texts.unwrap();
        assert_eq!(texts.target(), &line.as_bytes()[line.find("/b").unwrap()..][..SAMPLE_MAX]);
        assert_eq!((texts.user(), texts.header(0), texts.header(1)), (&b""[..], &b""[..], &b"a"[..]));
    }
}
