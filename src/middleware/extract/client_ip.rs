//! Keys from the address of the client behind trusted proxies.

use std::net::IpAddr;

use http::HeaderMap;
use http::header::{FORWARDED, HeaderName};
use http::request::Parts;

use super::forwarded::{elements, forwarded_for, node, plain_entries};
use super::peer::peer_address;
use super::prefixes::Prefixes;
use super::proxies::{ENTRIES_MAX, Field, Trust, TrustedProxies};

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The address of the client, as trusted proxies tell it, IPv6 by its /64; see [`TrustedProxies`] and [`Prefixes`].
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
/// The key is missing if the peer's address is needed and unknown; [`peer_ip`](super::peer_ip) says where it is found.
pub fn client_ip(proxies: TrustedProxies) -> impl Fn(&Parts) -> Option<IpAddr> + Clone + Send + Sync + 'static {
    client_network(proxies, Prefixes::default())
}

/// As [`client_ip`], with a choice of how many bits of an address count.
pub fn client_network(
    proxies: TrustedProxies,
    prefixes: Prefixes,
) -> impl Fn(&Parts) -> Option<IpAddr> + Clone + Send + Sync + 'static {
    let proxies = std::sync::Arc::new(proxies);
    move |parts| Some(prefixes.group(client_address(&proxies, parts)?))
}

fn client_address(proxies: &TrustedProxies, parts: &Parts) -> Option<IpAddr> {
    let peer = peer_address(parts);
    let mut entries = Entries::default();
    match &proxies.trust {
        Trust::Count(count) => {
            read(&proxies.field, &parts.headers, &mut |entry| entries.push(entry, *count));
            entries.last.filter(|_| entries.seen == *count).or(peer)
        }
        Trust::Networks(networks) => {
            let mut client = peer?;
            if !Trust::contains(networks, client) {
                return Some(client);
            }
            read(&proxies.field, &parts.headers, &mut |entry| {
                // Nothing: the last believed address does not say whom it forwards.
                let Some(address) = entry else { return false };
                client = address;
                Trust::contains(networks, address)
            });
            Some(client)
        }
    }
}

#[derive(Default)]
struct Entries {
    seen: usize,
    last: Option<IpAddr>,
}

impl Entries {
    /// Whether to go on to the next entry.
    fn push(&mut self, entry: Option<IpAddr>, count: usize) -> bool {
        self.seen += 1;
        self.last = entry;
        self.seen < count
    }
}

/// Shows the field's entries, from the right, each as its address if it has one, until `next` has seen enough.
fn read(field: &Field, headers: &HeaderMap, next: &mut dyn FnMut(Option<IpAddr>) -> bool) {
    let mut looked_at = 0;
    match field {
        Field::XForwardedFor => {
            for line in headers.get_all(X_FORWARDED_FOR).iter().rev() {
                for entry in plain_entries(line.as_bytes()) {
                    if looked_at == ENTRIES_MAX || (!entry.is_empty() && !next(node(entry))) {
                        return;
                    }
                    looked_at += 1;
                }
            }
        }
        Field::Forwarded => {
            for line in headers.get_all(FORWARDED).iter().rev() {
                for element in elements(line.as_bytes(), ENTRIES_MAX) {
                    if looked_at == ENTRIES_MAX || (!element.is_empty() && !next(forwarded_for(element))) {
                        return;
                    }
                    looked_at += 1;
                }
            }
        }
        Field::Single(name) => {
            let mut lines = headers.get_all(name).iter();
            if let (Some(line), None) = (lines.next(), lines.next()) {
                next(node(line.as_bytes().trim_ascii()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::peer::PeerAddr;
    use super::*;
    use http::HeaderValue;

    fn client(proxies: TrustedProxies, peer: &str, name: &str, lines: &[&str]) -> Option<String> {
        let (mut parts, ()) = http::Request::new(()).into_parts();
        if let Ok(peer) = peer.parse::<IpAddr>() {
            parts.extensions.insert(PeerAddr::from(peer));
        }
        for line in lines {
            parts
                .headers
                .append(HeaderName::try_from(name).unwrap(), HeaderValue::from_bytes(line.as_bytes()).unwrap());
        }
        client_ip(proxies)(&parts).map(|address| address.to_string())
    }

    const PEER: &str = "10.0.0.5";

    #[test]
    fn the_nth_entry_from_the_right_is_the_client() {
        let x = |count: usize, lines: &[&str]| {
            client(TrustedProxies::count(count).unwrap(), PEER, "x-forwarded-for", lines).unwrap()
        };
        assert_eq!(x(1, &["6.6.6.6, 203.0.113.9"]), "203.0.113.9");
        assert_eq!(x(1, &["6.6.6.6", "203.0.113.9"]), "203.0.113.9");
        assert_eq!(x(2, &["198.51.100.7, 10.0.0.2"]), "198.51.100.7");
        assert_eq!(x(2, &["198.51.100.7", "10.0.0.2"]), "198.51.100.7");
        assert_eq!(x(2, &["198.51.100.7"]), PEER);
        assert_eq!(x(1, &["203.0.113.9:4711"]), "203.0.113.9");
        assert_eq!(x(1, &["garbage"]), PEER);
        assert_eq!(x(1, &["203.0.113.9, garbage"]), PEER);
        assert_eq!(x(1, &["203.0.113.9, caf\u{e9}"]), PEER);
        assert_eq!(x(1, &["203.0.113.9, ,"]), "203.0.113.9");
        assert_eq!(x(1, &[]), PEER);
        assert_eq!(x(1, &["2001:db8:1:2:3::9"]), "2001:db8:1:2::");
    }

    #[test]
    fn a_client_cannot_choose_its_key_by_writing_more_to_the_left() {
        let proxies = || TrustedProxies::count(2).unwrap();
        let honest = client(proxies(), PEER, "x-forwarded-for", &["198.51.100.7, 10.0.0.2"]);
        let long = format!("{}198.51.100.7, 10.0.0.2", "6.6.6.6, ".repeat(10_000));
        assert_eq!(client(proxies(), PEER, "x-forwarded-for", &[&long]), honest);
        let mut lines = vec!["6.6.6.6"; 10_000];
        lines.push("198.51.100.7, 10.0.0.2");
        assert_eq!(client(proxies(), PEER, "x-forwarded-for", &lines), honest);
    }

    #[test]
    fn the_first_address_outside_the_trusted_networks_is_the_client() {
        let x = |peer: &str, lines: &[&str]| {
            client(TrustedProxies::networks(["10.0.0.0/8"]).unwrap(), peer, "x-forwarded-for", lines)
        };
        let found = |address: &str| Some(address.to_owned());
        assert_eq!(x(PEER, &["1.2.3.4, 203.0.113.9, 10.0.0.2"]), found("203.0.113.9"));
        assert_eq!(x("8.8.8.8", &["1.2.3.4, 203.0.113.9"]), found("8.8.8.8"));
        assert_eq!(x(PEER, &["10.0.0.9, 10.0.0.2"]), found("10.0.0.9"));
        assert_eq!(x(PEER, &["1.2.3.4, unknown, 10.0.0.2"]), found("10.0.0.2"));
        assert_eq!(x(PEER, &["1.2.3.4, garbage"]), found(PEER));
        assert_eq!(x("::ffff:10.0.0.5", &["203.0.113.9"]), found("203.0.113.9"));
        assert_eq!(x("nobody", &["203.0.113.9"]), None);
        let long = "10.0.0.1, ".repeat(100) + "10.0.0.2";
        assert_eq!(x(PEER, &[&format!("1.2.3.4, {long}")]), found("10.0.0.1"));
    }

    #[test]
    fn the_forwarded_field_is_read_with_its_quotes() {
        let f =
            |lines: &[&str]| client(TrustedProxies::count(1).unwrap().forwarded(), PEER, "forwarded", lines).unwrap();
        assert_eq!(f(&["for=1.2.3.4, for=\"[2001:db8:1:2:3::9]:4711\";proto=https"]), "2001:db8:1:2::");
        assert_eq!(f(&["for=_hidden"]), PEER);
        assert_eq!(f(&["for=\"x", "for=203.0.113.9"]), "203.0.113.9");
        assert_eq!(f(&["for=\"x, for=203.0.113.9"]), PEER);
        assert_eq!(
            client(TrustedProxies::count(1).unwrap().forwarded(), PEER, "x-forwarded-for", &["6.6.6.6"]).unwrap(),
            PEER
        );
    }

    #[test]
    fn a_field_of_one_address_says_nothing_if_it_comes_twice() {
        let s = |peer: &str, lines: &[&str]| {
            let proxies = TrustedProxies::networks(["10.0.0.0/8"]).unwrap().single_header("CF-Connecting-IP").unwrap();
            client(proxies, peer, "cf-connecting-ip", lines).unwrap()
        };
        assert_eq!(s(PEER, &["203.0.113.9"]), "203.0.113.9");
        assert_eq!(s(PEER, &["6.6.6.6", "203.0.113.9"]), PEER);
        assert_eq!(s(PEER, &["6.6.6.6, 203.0.113.9"]), PEER);
        assert_eq!(s("8.8.8.8", &["203.0.113.9"]), "8.8.8.8");
    }
}
