//! Trusted proxies, and the header in which they report the client.

use crate::error::{ConfigError, ConfigErrorKind};
use std::net::IpAddr;

use http::HeaderName;
use ipnet::IpNet;

/// The maximum number of entries of a forwarding header that are read, from the right.
pub(super) const ENTRIES_MAX: usize = 64;

/// Says which proxies are in front of the server, and in which header they report the client.
///
/// A client can send any header, including the left part of a forwarding header. Only the entries that
/// your own proxies added can be trusted. So only one header is read, from the right up to the
/// client's entry.
///
/// ```
/// use tower_ratelimit::key::TrustedProxies;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // A load balancer that appends to X-Forwarded-For. No client can get past it.
/// let one = TrustedProxies::count(1)?;
/// // Proxies with these addresses, which send the `Forwarded` header of RFC 7239.
/// let known = TrustedProxies::networks(["10.0.0.0/8", "fd00::/8"])?.forwarded();
/// // A CDN that reports the client's address in its own header.
/// let cdn = TrustedProxies::networks(["173.245.48.0/20", "2400:cb00::/32"])?
///     .single_header("cf-connecting-ip")?;
/// # Ok(()) }
/// ```
///
/// # How the client is found
///
/// * With a [count](Self::count) of *n*, the client is the *n*-th entry from the right, because each of
///   the *n* proxies appended the address of its caller. A client that reaches the server without these
///   proxies can claim any address.
/// * With [networks](Self::networks), a peer outside of the networks is itself the client. If the peer
///   is in the networks, entries are read from the right while they are in the networks. The first
///   entry outside of the networks is the client. If all entries are in the networks, the client is the
///   leftmost entry. List only the networks of your proxies, because a client in one of these networks
///   is trusted like a proxy.
/// * If the header does not report an address, the client is unknown. An unknown client is limited
///   under a key that [`client_ip`](super::client_ip) describes, and is never treated as a proxy. There
///   are two cases:
///   * The header is absent or has too few entries.
///   * The header cannot be read: the entry is not an address (`unknown`, `_name`, text), a quote is
///     not closed, a header for one address occurs twice, an entry is longer than 1,024 bytes, or the
///     client is not among the last 64 entries.
/// * All lines of the header are read as one list, in their order. Empty entries are skipped, but they
///   count among the 64 entries. Ports, brackets and IPv6 zones are removed, and IPv4-mapped addresses
///   become IPv4 addresses.
/// * Only the entries that are needed are read, from the right. So a client cannot change the meaning
///   of an entry that a proxy appends, and cannot make the header expensive to read.
///
/// # In configuration files
///
/// With the feature `serde`, trusted proxies are read and written as a map with the fields `count` or `networks`, and
/// `forwarded` or `single-header`: `{networks: [10.0.0.0/8], forwarded: true}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustedProxies {
    pub(super) trust: Trust,
    pub(super) field: ForwardingHeader,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Trust {
    Count(usize),
    Networks(Vec<IpNet>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ForwardingHeader {
    XForwardedFor,
    Forwarded,
    Single(HeaderName),
}

impl TrustedProxies {
    /// Trusts this number of proxies. Each proxy appends an address to `X-Forwarded-For`, or to the
    /// header that another method chooses.
    ///
    /// # Errors
    /// Returns an error if `proxies` is 0 or above 64.
    pub fn count(proxies: usize) -> Result<Self, ConfigError> {
        if proxies == 0 || proxies > ENTRIES_MAX {
            return Err(ConfigError::new(
                ConfigErrorKind::Range,
                format!(
                    "{proxies} trusted proxies are not possible: use 1 to {ENTRIES_MAX}, or `key::peer_ip()` without a \
                     proxy"
                ),
            ));
        }
        Ok(Self { trust: Trust::Count(proxies), field: ForwardingHeader::XForwardedFor })
    }

    /// Trusts proxies in these networks, each an address (`10.0.0.2`) or a network (`10.0.0.0/8`). Each
    /// proxy appends an address to `X-Forwarded-For`, or to the header that another method chooses.
    ///
    /// # Errors
    /// Returns an error if `networks` is empty, or if a text is neither an address nor a network.
    pub fn networks<I>(networks: I) -> Result<Self, ConfigError>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        let networks: Vec<IpNet> =
            networks.into_iter().map(|network| parse_network(network.as_ref())).collect::<Result<_, _>>()?;
        if networks.is_empty() {
            return Err(ConfigError::new(
                ConfigErrorKind::Missing,
                "no trusted networks; without a proxy use `key::peer_ip()`",
            ));
        }
        Ok(Self { trust: Trust::Networks(networks), field: ForwardingHeader::XForwardedFor })
    }

    /// Reads the `for` parameters of the `Forwarded` header (RFC 7239).
    #[must_use]
    pub fn forwarded(self) -> Self {
        Self { field: ForwardingHeader::Forwarded, ..self }
    }

    /// Reads a header with one address, which the last proxy sets: `cf-connecting-ip`,
    /// `true-client-ip`, `x-real-ip`, `fly-client-ip`. The proxy must replace this header if a client
    /// sends it. If the header occurs twice, the client is unknown. The guide
    /// [lists](crate::guide::who_is_the_client#cdns-and-clouds) the headers that CDNs and clouds send.
    ///
    /// The value of `cloudfront-viewer-address` is an address and a port. CloudFront writes no brackets
    /// around an IPv6 address, so only this header is split at its last colon.
    ///
    /// # Errors
    /// Returns an error if `name` is not a valid header name, or if the count of proxies is not 1,
    /// because a header with one address reports only one hop.
    pub fn single_header(self, name: &str) -> Result<Self, ConfigError> {
        if let Trust::Count(2..) = self.trust {
            return Err(ConfigError::new(
                ConfigErrorKind::Combination,
                format!("{name} holds one address, so the count of proxies can only be 1"),
            ));
        }
        match HeaderName::try_from(name) {
            Ok(name) => Ok(Self { field: ForwardingHeader::Single(name), ..self }),
            Err(_) => Err(ConfigError::new(
                ConfigErrorKind::Name,
                format!("{name:?} cannot be a header's name: use letters, digits and `-`, such as `x-real-ip`"),
            )),
        }
    }
}

/// Parses a network or an address.
pub(crate) fn parse_network(text: &str) -> Result<IpNet, ConfigError> {
    let network = text.parse().or_else(|_| text.parse().map(|address: IpAddr| IpNet::from(address)));
    let network = network.map_err(|_| {
        let text: String = text.chars().take(64).collect();
        let message = format!("{text:?} is neither an address such as 192.0.2.1 nor a network such as 10.0.0.0/8");
        ConfigError::new(ConfigErrorKind::Syntax, message)
    })?;
    // IPv4-mapped addresses are compared as IPv4, so a mapped network becomes IPv4, too.
    Ok(match network {
        IpNet::V6(mapped) => match (mapped.addr().to_ipv4_mapped(), mapped.prefix_len().checked_sub(96)) {
            (Some(address), Some(bits)) => ipnet::Ipv4Net::new(address, bits).map_or(network, IpNet::V4),
            _ => network,
        },
        IpNet::V4(_) => network,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_proxies_are_refused_at_construction() {
        assert!(TrustedProxies::count(0).is_err());
        assert!(TrustedProxies::count(65).is_err());
        assert!(TrustedProxies::networks(Vec::<String>::new()).is_err());
        assert!(TrustedProxies::networks(["10.0.0.0/33"]).is_err());
        assert!(TrustedProxies::networks(["proxy.local"]).is_err());
        assert!(TrustedProxies::count(1).unwrap().single_header("not a name").is_err());
        assert!(TrustedProxies::count(2).unwrap().single_header("x-real-ip").is_err());
    }

    #[test]
    fn a_network_may_be_one_address_or_a_mapped_one() {
        assert_eq!(parse_network("10.0.0.2").unwrap().to_string(), "10.0.0.2/32");
        assert_eq!(parse_network("::1").unwrap().to_string(), "::1/128");
        assert_eq!(parse_network("::ffff:10.0.0.0/104").unwrap().to_string(), "10.0.0.0/8");
    }
}
