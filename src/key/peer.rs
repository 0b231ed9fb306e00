//! Extractors for the address at the other end of the connection.

use std::net::{IpAddr, SocketAddr};

use http::Extensions;

use crate::base::head::Head;

use super::prefixes::{Prefixes, canonical};

/// The address at the other end of the request's connection. A server other than axum's and tonic's
/// should insert a `PeerAddr` into each request's extensions, before the layer runs.
///
/// ```
/// use std::net::SocketAddr;
/// use tower_ratelimit::key::{self, PeerAddr};
///
/// let mut request = http::Request::new(());
/// request.extensions_mut().insert(PeerAddr::from(SocketAddr::from(([192, 0, 2, 1], 4711))));
/// assert_eq!(key::peer_address(&(&request).into()), Some([192, 0, 2, 1].into()));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerAddr(IpAddr);

/// The client of a request that an operator describes. A request from this client comes through the proxies, which the
/// description need not have.
#[cfg(feature = "status")]
#[derive(Clone, Copy)]
pub(crate) struct DescribedClient(pub(crate) IpAddr);

impl From<IpAddr> for PeerAddr {
    fn from(address: IpAddr) -> Self {
        Self(address)
    }
}

impl From<SocketAddr> for PeerAddr {
    fn from(address: SocketAddr) -> Self {
        Self(address.ip())
    }
}

/// Returns an extractor of the address at the other end of the connection. The key of an IPv6 address
/// is its /64; see [`Prefixes`].
///
/// The address is taken from the first of these values in the request's extensions:
///
/// * a [`PeerAddr`];
/// * with the feature `axum`, the `ConnectInfo<SocketAddr>` that axum inserts when it serves
///   `into_make_service_with_connect_info::<SocketAddr>()`, or its `MockConnectInfo<SocketAddr>`
///   for tests;
/// * with the feature `tonic`, the `TcpConnectInfo` that tonic inserts;
/// * a bare [`SocketAddr`].
///
/// If the extensions have none of these values, the key is missing.
///
/// Behind a proxy, this address is the proxy's, and all clients share one key. Use
/// [`client_ip`](super::client_ip) behind a proxy.
///
/// ```
/// use http::Request;
/// use std::net::{IpAddr, Ipv4Addr};
/// use tower_ratelimit::{Head, key};
///
/// let address = IpAddr::from(Ipv4Addr::new(192, 0, 2, 1));
/// let mut request = Request::new(());
/// request.extensions_mut().insert(key::PeerAddr::from(address)); // as a server does
/// assert_eq!(key::peer_ip()(&Head::from(&request)), Some(address));
/// ```
pub fn peer_ip() -> impl Fn(&Head<'_>) -> Option<IpAddr> + Clone + Send + Sync + 'static {
    // The closure captures nothing, so the layer knows that rules with this extractor have the same
    // key, and calls the extractor once for all of them.
    |head| Some(Prefixes::DEFAULT.group(peer_address(head)?))
}

/// Returns an extractor like [`peer_ip`]. `prefixes` says how many bits of an address count.
///
/// ```
/// use tower_ratelimit::key::{self, Prefixes};
///
/// let each_address = key::peer_network(Prefixes::exact());
/// ```
pub fn peer_network(prefixes: Prefixes) -> impl Fn(&Head<'_>) -> Option<IpAddr> + Clone + Send + Sync + 'static {
    move |head| Some(prefixes.group(peer_address(head)?))
}

/// Returns the whole address at the other end of the connection, for closures. [`peer_ip`] says where
/// the address is found.
#[must_use]
#[inline(always)] // in place, where each request is asked
pub fn peer_address(head: &Head<'_>) -> Option<IpAddr> {
    let extensions = head.extensions;
    let own = extensions.get().map(|peer: &PeerAddr| peer.0);
    let bare = || extensions.get().map(SocketAddr::ip);
    own.or_else(|| axum_peer(extensions)).or_else(|| tonic_peer(extensions)).or_else(bare).map(canonical)
}

#[cfg(feature = "axum")]
#[inline]
fn axum_peer(extensions: &Extensions) -> Option<IpAddr> {
    use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};
    let real = extensions.get().map(|info: &ConnectInfo<SocketAddr>| info.0);
    let address = real.or_else(|| extensions.get().map(|mock: &MockConnectInfo<SocketAddr>| mock.0))?;
    Some(address.ip())
}

#[cfg(not(feature = "axum"))]
fn axum_peer(_: &Extensions) -> Option<IpAddr> {
    None
}

#[cfg(feature = "tonic")]
fn tonic_peer(extensions: &Extensions) -> Option<IpAddr> {
    let info: &tonic::transport::server::TcpConnectInfo = extensions.get()?;
    Some(info.remote_addr()?.ip())
}

#[cfg(not(feature = "tonic"))]
fn tonic_peer(_: &Extensions) -> Option<IpAddr> {
    None
}

#[cfg(test)]
mod tests {
    use http::request::Parts;

    use super::*;

    fn parts() -> Parts {
        http::Request::new(()).into_parts().0
    }

    #[test]
    fn the_peer_is_found_in_our_own_type_and_in_a_bare_address() {
        assert_eq!(peer_ip()(&Head::from(&parts())), None);
        let mut bare = parts();
        bare.extensions.insert(SocketAddr::from(([192, 0, 2, 1], 1)));
        assert_eq!(peer_ip()(&Head::from(&bare)), Some([192, 0, 2, 1].into()));
        bare.extensions.insert(PeerAddr::from(IpAddr::from([192, 0, 2, 2])));
        assert_eq!(peer_ip()(&Head::from(&bare)), Some([192, 0, 2, 2].into()));
    }

    #[cfg(feature = "axum")]
    #[test]
    fn the_peer_is_found_where_axum_puts_it() {
        let mut parts = parts();
        parts.extensions.insert(axum::extract::ConnectInfo(SocketAddr::from(([192, 0, 2, 3], 1))));
        assert_eq!(peer_ip()(&Head::from(&parts)), Some([192, 0, 2, 3].into()));
    }

    #[test]
    fn an_ipv6_peer_is_its_network_and_a_mapped_one_is_ipv4() {
        let at = |text: &str| {
            let mut parts = parts();
            parts.extensions.insert(PeerAddr::from(text.parse::<IpAddr>().unwrap()));
            parts
        };
        assert_eq!(peer_ip()(&Head::from(&at("2001:db8::1"))), peer_ip()(&Head::from(&at("2001:db8::2"))));
        assert_eq!(peer_ip()(&Head::from(&at("::ffff:192.0.2.1"))), Some([192, 0, 2, 1].into()));
        let exact = peer_network(Prefixes::exact());
        assert_ne!(exact(&Head::from(&at("2001:db8::1"))), exact(&Head::from(&at("2001:db8::2"))));
    }
}
