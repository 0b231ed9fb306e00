//! Finds out from which source a ready-made extractor takes the address.

use std::any::TypeId;

use super::client_ip::client_ip;
use super::peer::{peer_ip, peer_network};

/// The source from which an extractor takes the address, if the extractor's type shows the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AddressSource {
    /// `peer_ip` or `peer_network`.
    Peer,
    /// `client_ip` or `client_network`.
    Proxies,
    /// The extractor is a closure, or takes no address.
    Other,
}

impl AddressSource {
    pub(crate) fn of<E: 'static>() -> Self {
        fn type_of<T: 'static, P>(_: fn(P) -> T) -> TypeId {
            TypeId::of::<T>()
        }
        fn type_of_default<T: 'static>(_: fn() -> T) -> TypeId {
            TypeId::of::<T>()
        }
        match TypeId::of::<E>() {
            peer if peer == type_of_default(peer_ip) || peer == type_of(peer_network) => Self::Peer,
            client if client == type_of(client_ip) => Self::Proxies,
            _ => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::{Prefixes, TrustedProxies, client_network, path, peer_ip};

    fn source<E: 'static>(_: E) -> AddressSource {
        AddressSource::of::<E>()
    }

    #[test]
    fn address_source_is_known_from_the_type() {
        let proxies = || TrustedProxies::count(1).unwrap();
        assert_eq!(source(peer_ip()), AddressSource::Peer);
        assert_eq!(source(peer_network(Prefixes::exact())), AddressSource::Peer);
        assert_eq!(source(client_ip(proxies())), AddressSource::Proxies);
        assert_eq!(source(client_network(proxies(), Prefixes::exact())), AddressSource::Proxies);
        assert_eq!(source(path()), AddressSource::Other);
    }
}
