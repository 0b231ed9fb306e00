//! Ready-made extractors: each is called once, when the layer is built, and returns the closure that reads requests.

mod client_ip;
mod fields;
mod forwarded;
mod paths;
mod peer;
mod prefixes;
mod proxies;

pub(crate) use prefixes::embedded_ipv4;
pub(crate) use proxies::parse_network;

use std::any::TypeId;

pub use client_ip::{client_address, client_ip, client_network};
pub use fields::{bearer_token, both, cookie, extension, global, header, host, method};
pub use paths::{original_path, original_uri, path};
pub use peer::{PeerAddr, peer_address, peer_ip, peer_network};
pub use prefixes::{Prefixes, PrefixesError, PrefixesErrorKind};
pub use proxies::{TrustedProxies, TrustedProxiesError, TrustedProxiesErrorKind};

/// Where an extractor takes an address from, as far as its type tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddressSource {
    /// [`peer_ip`] or [`peer_network`].
    Peer,
    /// [`client_ip`] or [`client_network`].
    Proxies,
    /// A closure, or nowhere.
    Other,
}

impl AddressSource {
    pub(crate) fn of<E: 'static>() -> Self {
        fn type_of<T: 'static, P>(_: fn(P) -> T) -> TypeId {
            TypeId::of::<T>()
        }
        match TypeId::of::<E>() {
            peer if peer == type_of(peer_network) => Self::Peer,
            client if client == type_of(client_ip) => Self::Proxies,
            _ => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source<E: 'static>(_: E) -> AddressSource {
        AddressSource::of::<E>()
    }

    #[test]
    fn address_source_is_told_from_the_type() {
        let proxies = || TrustedProxies::count(1).unwrap();
        assert_eq!(source(peer_ip()), AddressSource::Peer);
        assert_eq!(source(peer_network(Prefixes::exact())), AddressSource::Peer);
        assert_eq!(source(client_ip(proxies())), AddressSource::Proxies);
        assert_eq!(source(client_network(proxies(), Prefixes::exact())), AddressSource::Proxies);
        assert_eq!(source(path()), AddressSource::Other);
    }
}
