//! Bounds the connections of each peer of an address.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};

/// The connections of each peer, with a bound for each.
pub(crate) struct Peers {
    max: usize,
    open: Mutex<HashMap<IpAddr, usize>>,
}

/// The place of a connection, which ends with it.
pub(crate) struct Place {
    peers: Arc<Peers>,
    peer: IpAddr,
}

impl Peers {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, open: Mutex::default() })
    }

    /// Returns a place for one more connection of a peer. Returns `None` if the peer has as many as it may have.
    pub(crate) fn enter(self: &Arc<Self>, peer: IpAddr) -> Option<Place> {
        let peer = client_of(peer);
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let count = open.entry(peer).or_default();
        if *count >= self.max {
            return None;
        }
        *count += 1;
        Some(Place { peers: Arc::clone(self), peer })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.peers.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.peer);
            }
        }
    }
}

/// Returns the address that counts as one client: in IPv6 the network of 64 bits, all of whose addresses one client has.
fn client_of(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from(u128::from(address) & (u128::MAX << 64)).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peer_gets_its_places_back() {
        let peers = Peers::new(2);
        let enter = |peer: &str| peers.enter(peer.parse().unwrap());
        for (one, same, other) in
            [("192.0.2.1", "::ffff:192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::ffff:0:0:2", "2001:db8:0:1::1")]
        {
            let places = [enter(one), enter(same)];
            assert!(places.iter().all(Option::is_some) && enter(one).is_none() && enter(same).is_none());
            assert!(enter(other).is_some());
            drop(places);
            assert!(enter(one).is_some());
        }
        assert!(peers.open.lock().unwrap().is_empty(), "nothing is kept of peers that have gone");
    }
}
