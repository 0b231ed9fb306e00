//! Extractors for the client's address behind trusted proxies.

use std::net::IpAddr;
use std::sync::Arc;

use http::header::{self, HeaderName, HeaderValue};

use crate::base::head::Head;

use super::forwarded::{ReverseSplit, forwarded_for, node, node_with_port, one_entry, plain_entries, quoted_entries};
#[cfg(feature = "status")]
use super::peer::DescribedClient;
use super::peer::peer_address;
use super::prefixes::Prefixes;
use super::proxies::{ENTRIES_MAX, ForwardingHeader, Trust, TrustedProxies};
use super::value::{IntoKey, Key, PartKind};

static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
static FORWARDED: HeaderName = header::FORWARDED;
static CLOUDFRONT_VIEWER_ADDRESS: HeaderName = HeaderName::from_static("cloudfront-viewer-address");

/// Returns an extractor of the client's address as trusted proxies report it. The key of an IPv6
/// address is its /64; see [`TrustedProxies`] and [`Prefixes`].
///
/// ```
/// use tower_ratelimit::key::{self, TrustedProxies};
/// use tower_ratelimit::{MemoryLimiter, Quota, RateLimitLayer};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let by_client = key::client_ip(TrustedProxies::count(1)?);
/// let layer = RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), by_client);
/// # Ok(()) }
/// ```
///
/// If the proxies do not report an address, the client is *unknown*. All unknown clients of a proxy
/// share two keys, which are never the proxy's own address. The first key is for requests without the
/// header, such as a proxy's health checks. The second key is for requests whose header cannot be read.
///
/// The key is missing only if the proxies are given as networks and the peer's address is not
/// available; [`peer_ip`](super::peer_ip) says where that address is found.
pub fn client_ip(proxies: TrustedProxies) -> impl Fn(&Head<'_>) -> Option<Key> + Clone + Send + Sync + 'static {
    client_network(proxies, Prefixes::default())
}

/// Returns an extractor like [`client_ip`]. `prefixes` says how many bits of an address count.
pub fn client_network(
    proxies: TrustedProxies,
    prefixes: Prefixes,
) -> impl Fn(&Head<'_>) -> Option<Key> + Clone + Send + Sync + 'static {
    let proxies = Arc::new(proxies);
    move |head| find_client(&proxies, head)?.key(prefixes)
}

impl TrustedProxies {
    /// Returns the name of the header that is read, in lower case.
    #[must_use]
    pub fn header(&self) -> &str {
        self.header_name().as_str()
    }

    /// Returns the key that [`client_ip`] makes for a client. This method is for servers that do not use the
    /// types of the crate `http`.
    ///
    /// `peer` is the address at the other end of the connection. `values` are the values of each line of the
    /// [header](Self::header), in the order in which they arrived.
    ///
    /// ```
    /// use std::net::IpAddr;
    /// use tower_ratelimit::{Key, key::TrustedProxies};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let proxies = TrustedProxies::networks(["10.0.0.0/8"])?;
    /// let peer: IpAddr = "10.0.0.5".parse()?;
    ///
    /// assert_eq!(proxies.header(), "x-forwarded-for");
    /// let key = proxies.client_key(Some(peer), ["6.6.6.6, 203.0.113.9".as_bytes()]);
    /// assert_eq!(key, Key::of("203.0.113.9".parse::<IpAddr>()?));
    /// # Ok(()) }
    /// ```
    pub fn client_key<'a, I>(&self, peer: Option<IpAddr>, values: I) -> Option<Key>
    where
        I: IntoIterator<Item = &'a [u8]>,
        I::IntoIter: DoubleEndedIterator,
    {
        let peer = peer.map(|address| address.to_canonical());
        resolve(self, peer, values.into_iter())?.key(Prefixes::default())
    }

    fn header_name(&self) -> &HeaderName {
        match &self.field {
            ForwardingHeader::XForwardedFor => &X_FORWARDED_FOR,
            ForwardingHeader::Forwarded => &FORWARDED,
            ForwardingHeader::Single(name) => name,
        }
    }
}

/// Returns the whole address of the client, for closures. Returns `None` if the client is unknown;
/// see [`client_ip`].
///
/// If a closure returns `None` because this function did, the request has no key for the closure's
/// rule. With [`MissingKey::Exempt`](crate::MissingKey::Exempt), a client could then escape the rule
/// with a header that cannot be read. So use [`client_ip`] for keys.
#[must_use]
pub fn client_address(proxies: &TrustedProxies, head: &Head<'_>) -> Option<IpAddr> {
    match find_client(proxies, head)? {
        Client::Known(address) => Some(address),
        Client::Unnamed(_) | Client::Unreadable(_) => None,
    }
}

/// The client of a request. For an unknown client, holds the address of the last trusted proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Client {
    Known(IpAddr),
    /// The header has no entry for the client.
    Unnamed(Option<IpAddr>),
    /// The header's entry for the client is not an address.
    Unreadable(Option<IpAddr>),
}

impl Client {
    fn key(self, prefixes: Prefixes) -> Option<Key> {
        let (kind, proxy) = match self {
            Self::Known(address) => return prefixes.group(address).into_key(),
            Self::Unnamed(proxy) => (PartKind::Unnamed, proxy),
            Self::Unreadable(proxy) => (PartKind::Unreadable, proxy),
        };
        Some(Key::unknown_client(kind, proxy.map(|address| prefixes.group(address))))
    }
}

/// Finds the client of a request. Returns `None` if the peer's address is needed and not known.
fn find_client(proxies: &TrustedProxies, head: &Head<'_>) -> Option<Client> {
    let lines = head.headers.get_all(proxies.header_name());
    let client = resolve(proxies, peer_address(head), lines.iter().map(HeaderValue::as_bytes))?;
    #[cfg(feature = "status")]
    if let (Client::Unnamed(_), Some(DescribedClient(address))) = (client, head.extensions.get()) {
        return Some(Client::Known(*address));
    }
    Some(client)
}

/// Finds the client from the peer's address and the lines of the header. Returns `None` if the peer's address is needed
/// and not known.
fn resolve<'a>(
    proxies: &TrustedProxies,
    peer: Option<IpAddr>,
    lines: impl DoubleEndedIterator<Item = &'a [u8]>,
) -> Option<Client> {
    let mut entries = entries(&proxies.field, lines);
    Some(match &proxies.trust {
        Trust::Count(count) => {
            let nth = entries.take(*count).try_fold((0, None), |(read, _), entry| Ok((read + 1, entry?)));
            match nth {
                Ok((read, _)) if read < *count => Client::Unnamed(peer),
                Ok((_, Some(address))) => Client::Known(address),
                Ok((_, None)) | Err(Unreadable) => Client::Unreadable(peer),
            }
        }
        Trust::Networks(networks) => {
            let peer = peer?;
            let is_trusted = |address| networks.iter().any(|network| network.contains(&address));
            if !is_trusted(peer) {
                return Some(Client::Known(peer));
            }
            let mut last = None;
            let client = entries.find_map(|entry| match entry {
                Ok(Some(address)) if is_trusted(address) => {
                    last = Some(address);
                    None
                }
                Ok(Some(address)) => Some(Client::Known(address)),
                Ok(None) | Err(Unreadable) => Some(Client::Unreadable(last.or(Some(peer)))),
            });
            client.unwrap_or_else(|| last.map_or(Client::Unnamed(Some(peer)), Client::Known))
        }
    })
}

/// An error: this entry and all entries to its left cannot be read.
struct Unreadable;

/// Returns the header's entries from the right. Each entry is an address, or `None` if it is not an
/// address.
fn entries<'a>(
    field: &ForwardingHeader,
    mut lines: impl DoubleEndedIterator<Item = &'a [u8]>,
) -> impl Iterator<Item = Result<Option<IpAddr>, Unreadable>> {
    let split: fn(&[u8]) -> ReverseSplit<'_> = match field {
        ForwardingHeader::XForwardedFor => plain_entries,
        ForwardingHeader::Forwarded => quoted_entries,
        ForwardingHeader::Single(_) => one_entry,
    };
    let address = match field {
        ForwardingHeader::XForwardedFor => node,
        ForwardingHeader::Forwarded => forwarded_for,
        ForwardingHeader::Single(name) if *name == CLOUDFRONT_VIEWER_ADDRESS => node_with_port,
        ForwardingHeader::Single(_) => node,
    };
    let is_single = matches!(field, ForwardingHeader::Single(_));
    let last = lines.next_back();
    let is_twice = is_single && lines.next_back().is_some();
    let entries = last.into_iter().chain(lines.rev()).flat_map(split).enumerate();
    // Empty entries count toward the maximum, so that a line of commas is not read to its end.
    entries.filter(move |(at, entry)| is_single || *at >= ENTRIES_MAX || *entry != Some(b"")).map(move |(at, entry)| {
        match entry {
            Some(entry) if at < ENTRIES_MAX && !is_twice => Ok(address(entry)),
            _ => Err(Unreadable),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::peer::PeerAddr;
    use http::request::Parts;

    use super::*;

    fn parts(peer: &str, name: &str, lines: &[&str]) -> Parts {
        let (mut parts, ()) = http::Request::new(()).into_parts();
        if let Ok(peer) = peer.parse::<IpAddr>() {
            parts.extensions.insert(PeerAddr::from(peer));
        }
        for line in lines {
            parts
                .headers
                .append(HeaderName::try_from(name).unwrap(), HeaderValue::from_bytes(line.as_bytes()).unwrap());
        }
        parts
    }

    fn client(proxies: &TrustedProxies, peer: &str, name: &str, lines: &[&str]) -> Option<Client> {
        find_client(proxies, &Head::from(&parts(peer, name, lines)))
    }

    const PEER: &str = "10.0.0.5";

    fn known(address: &str) -> Option<Client> {
        Some(Client::Known(address.parse().unwrap()))
    }

    fn unreadable(proxy: &str) -> Option<Client> {
        Some(Client::Unreadable(proxy.parse().ok()))
    }

    fn unnamed(proxy: &str) -> Option<Client> {
        Some(Client::Unnamed(proxy.parse().ok()))
    }

    #[test]
    fn count_takes_the_nth_entry_from_the_right() {
        let x = |count: usize, lines: &[&str]| {
            client(&TrustedProxies::count(count).unwrap(), PEER, "x-forwarded-for", lines)
        };
        assert_eq!(x(1, &["6.6.6.6, 203.0.113.9"]), known("203.0.113.9"));
        assert_eq!(x(1, &["6.6.6.6", "203.0.113.9"]), known("203.0.113.9"));
        assert_eq!(x(2, &["198.51.100.7, 10.0.0.2"]), known("198.51.100.7"));
        assert_eq!(x(2, &["198.51.100.7", "10.0.0.2"]), known("198.51.100.7"));
        assert_eq!(x(2, &["198.51.100.7"]), unnamed(PEER));
        assert_eq!(x(1, &["203.0.113.9:4711"]), known("203.0.113.9"));
        assert_eq!(x(1, &["garbage"]), unreadable(PEER));
        assert_eq!(x(1, &["203.0.113.9, garbage"]), unreadable(PEER));
        assert_eq!(x(1, &["203.0.113.9, caf\u{e9}"]), unreadable(PEER));
        assert_eq!(x(1, &["203.0.113.9, ,"]), known("203.0.113.9"));
        assert_eq!(x(1, &["203.0.113.9", &"a".repeat(5_000)]), unreadable(PEER));
        assert_eq!(x(1, &["203.0.113.9", &",".repeat(64)]), unreadable(PEER));
        assert_eq!(x(1, &["203.0.113.9", &",".repeat(63)]), unreadable(PEER));
        assert_eq!(x(1, &["203.0.113.9", &",".repeat(62)]), known("203.0.113.9"));
        assert_eq!(x(1, &[]), unnamed(PEER));
    }

    #[test]
    fn count_needs_no_peer_and_always_has_a_key() {
        let proxies = TrustedProxies::count(1).unwrap();
        let at = |lines: &[&str]| client(&proxies, "nobody", "x-forwarded-for", lines);
        assert_eq!(at(&["203.0.113.9"]), known("203.0.113.9"));
        assert_eq!(at(&["garbage"]), unreadable("nobody"));
        assert_eq!(at(&[]), unnamed("nobody"));
        assert!(client_ip(proxies)(&Head::from(&parts("nobody", "x-forwarded-for", &[]))).is_some());
    }

    /// A server without `http`'s types gets the key that the extractor finds in a request.
    #[test]
    fn client_key_is_that_of_the_extractor() {
        let networks = || TrustedProxies::networks(["10.0.0.0/8"]).unwrap();
        let kinds = [TrustedProxies::count(1).unwrap(), TrustedProxies::count(2).unwrap(), networks()];
        let kinds = kinds.into_iter().flat_map(|kind| [kind.clone(), kind.forwarded()]);
        let single = networks().single_header("x-real-ip").unwrap();
        let lines: [&[&str]; 7] = [
            &[],
            &["203.0.113.9"],
            &["for=203.0.113.9, for=10.0.0.2"],
            &["1.2.3.4, 203.0.113.9", "10.0.0.2"],
            &["2001:db8::1"],
            &["garbage"],
            &["203.0.113.9", "203.0.113.9"],
        ];
        let mut keys = std::collections::HashSet::new();
        for proxies in kinds.chain([single]) {
            for (lines, peer) in lines.iter().flat_map(|lines| [(lines, PEER), (lines, "::ffff:10.0.0.5"), (lines, "")])
            {
                let by_parts = client_ip(proxies.clone())(&Head::from(&parts(peer, proxies.header(), lines)));
                let values = lines.iter().map(|line| line.as_bytes());
                assert_eq!(proxies.client_key(peer.parse().ok(), values), by_parts, "{proxies:?}, {peer}: {lines:?}");
                keys.insert(by_parts);
            }
        }
        assert!(keys.len() > 5, "{keys:?}");
        assert_eq!(networks().forwarded().header(), "forwarded");
    }

    #[test]
    fn client_cannot_choose_its_key_by_writing_more_to_the_left() {
        let proxies = TrustedProxies::count(2).unwrap();
        let long = format!("{}198.51.100.7, 10.0.0.2", "6.6.6.6, ".repeat(10_000));
        assert_eq!(client(&proxies, PEER, "x-forwarded-for", &[&long]), known("198.51.100.7"));
        let mut lines = vec!["6.6.6.6"; 10_000];
        lines.push("198.51.100.7, 10.0.0.2");
        assert_eq!(client(&proxies, PEER, "x-forwarded-for", &lines), known("198.51.100.7"));
    }

    #[test]
    fn entries_beyond_the_last_64_are_not_read() {
        let one = TrustedProxies::count(1).unwrap();
        for (name, proxies) in [("x-forwarded-for", one.clone()), ("forwarded", one.forwarded())] {
            for line in [",".repeat(400_000), " , ".repeat(100_000), "\\".repeat(400_000) + "\""] {
                let parts = parts(PEER, name, &[&line]);
                assert_eq!(find_client(&proxies, &Head::from(&parts)), unreadable(PEER), "{name}: {}", &line[..3]);
                let read = entries(&proxies.field, [line.as_bytes()].into_iter()).take_while(Result::is_ok).count();
                assert_eq!(read, 0, "{name}: {}", &line[..3]);
            }
        }
        let empty = vec![""; 10_000];
        let parts = parts(PEER, "x-forwarded-for", &empty);
        assert_eq!(find_client(&TrustedProxies::count(1).unwrap(), &Head::from(&parts)), unreadable(PEER));
    }

    #[test]
    fn networks_take_the_first_address_outside_of_them() {
        let proxies = TrustedProxies::networks(["10.0.0.0/8"]).unwrap();
        let x = |peer: &str, lines: &[&str]| client(&proxies, peer, "x-forwarded-for", lines);
        assert_eq!(x(PEER, &["1.2.3.4, 203.0.113.9, 10.0.0.2"]), known("203.0.113.9"));
        assert_eq!(x("8.8.8.8", &["1.2.3.4, 203.0.113.9"]), known("8.8.8.8"));
        assert_eq!(x(PEER, &["10.0.0.9, 10.0.0.2"]), known("10.0.0.9"));
        assert_eq!(x(PEER, &["1.2.3.4, unknown, 10.0.0.2"]), unreadable("10.0.0.2"));
        assert_eq!(x(PEER, &["1.2.3.4, garbage"]), unreadable(PEER));
        assert_eq!(x(PEER, &[]), unnamed(PEER));
        assert_eq!(x("::ffff:10.0.0.5", &["203.0.113.9"]), known("203.0.113.9"));
        assert_eq!(x("nobody", &["203.0.113.9"]), None);
        let long = "10.0.0.1, ".repeat(100) + "10.0.0.2";
        assert_eq!(x(PEER, &[&format!("1.2.3.4, {long}")]), unreadable("10.0.0.1"));
    }

    #[test]
    fn forwarded_is_read_with_its_quotes() {
        let proxies = TrustedProxies::count(1).unwrap().forwarded();
        let f = |lines: &[&str]| client(&proxies, PEER, "forwarded", lines);
        let quoted = "for=1.2.3.4, for=\"[2001:db8:1:2:3::9]:4711\";proto=https";
        assert_eq!(f(&[quoted]), known("2001:db8:1:2:3::9"));
        assert_eq!(f(&["for=_hidden"]), unreadable(PEER));
        assert_eq!(f(&["for=\"x", "for=203.0.113.9"]), known("203.0.113.9"));
        assert_eq!(f(&["for=\"x, for=203.0.113.9"]), known("203.0.113.9"));
        assert_eq!(f(&["for=\""]), unreadable(PEER));
        assert_eq!(client(&proxies, PEER, "x-forwarded-for", &["6.6.6.6"]), unnamed(PEER));
    }

    #[test]
    fn single_header_that_comes_twice_is_unreadable() {
        let proxies = TrustedProxies::networks(["10.0.0.0/8"]).unwrap().single_header("CF-Connecting-IP").unwrap();
        let s = |peer: &str, lines: &[&str]| client(&proxies, peer, "cf-connecting-ip", lines);
        assert_eq!(s(PEER, &["203.0.113.9"]), known("203.0.113.9"));
        assert_eq!(s(PEER, &["10.0.0.9"]), known("10.0.0.9"));
        assert_eq!(s(PEER, &["6.6.6.6", "203.0.113.9"]), unreadable(PEER));
        assert_eq!(s(PEER, &["6.6.6.6, 203.0.113.9"]), unreadable(PEER));
        assert_eq!(s(PEER, &[""]), unreadable(PEER));
        assert_eq!(s(PEER, &[]), unnamed(PEER));
        assert_eq!(s("8.8.8.8", &["203.0.113.9"]), known("8.8.8.8"));
    }

    #[test]
    fn unknown_clients_share_a_key_that_is_not_an_address() {
        let proxies = TrustedProxies::count(1).unwrap();
        let key = |peer: &str, lines: &[&str]| {
            client_ip(proxies.clone())(&Head::from(&parts(peer, "x-forwarded-for", lines)))
        };
        assert_eq!(key(PEER, &["203.0.113.9"]), Key::of(IpAddr::from([203, 0, 113, 9])));
        assert_eq!(key(PEER, &["garbage"]), key(PEER, &["other garbage"]));
        let unknown = [key(PEER, &["garbage"]), key(PEER, &[]), key("10.0.0.6", &["garbage"]), key("10.0.0.6", &[])];
        for (at, one) in unknown.iter().enumerate() {
            assert_eq!(one.as_ref().unwrap().address(), None);
            assert!(!unknown[..at].contains(one));
        }
        let ipv6 = |last: &str| key(PEER, &[&format!("2001:db8:1:2::{last}")]);
        assert_eq!(ipv6("1"), ipv6("2"));
        let whole = client_address(&proxies, &Head::from(&parts(PEER, "x-forwarded-for", &["2001:db8:1:2::1"])));
        assert_eq!(whole, "2001:db8:1:2::1".parse().ok());
        assert_eq!(client_address(&proxies, &Head::from(&parts(PEER, "x-forwarded-for", &["garbage"]))), None);
    }
}
