//! The open connections of an address that strangers can reach. If the address has as many as it may have, the peer with
//! the most connections loses its oldest one. So a few peers cannot keep others out.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

/// The open connections of all peers.
pub(crate) struct Peers {
    max: usize,
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    /// The number of connections so far.
    count: u64,
    /// The open connections by their numbers, so that the oldest comes first.
    connections: BTreeMap<u64, (IpAddr, Arc<Notify>)>,
}

/// The place of a connection, which ends with it.
pub(crate) struct Place {
    peers: Arc<Peers>,
    number: u64,
    lost: Arc<Notify>,
}

impl Peers {
    pub(crate) fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, open: Mutex::default() })
    }

    /// Returns a place for one more connection. If all places are taken, also returns the peer whose oldest connection
    /// has lost its place.
    pub(crate) fn enter(self: &Arc<Self>, peer: IpAddr) -> (Place, Option<IpAddr>) {
        let lost = Arc::new(Notify::new());
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let number = open.count;
        open.count += 1;
        open.connections.insert(number, (client_of(peer), Arc::clone(&lost)));
        let loser = (open.connections.len() > self.max).then(|| open.close_one()).flatten();
        (Place { peers: Arc::clone(self), number, lost }, loser)
    }
}

impl Open {
    /// Closes the oldest connection of the peer with the most. If several peers have the most, closes the oldest of
    /// theirs.
    fn close_one(&mut self) -> Option<IpAddr> {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        self.connections.values().for_each(|(peer, _)| *counts.entry(*peer).or_default() += 1);
        let most = counts.values().copied().max()?;
        let (number, _) = self.connections.iter().find(|(_, (peer, _))| counts.get(peer) == Some(&most))?;
        let number = *number;
        let (peer, lost) = self.connections.remove(&number)?;
        lost.notify_one();
        Some(peer)
    }
}

impl Place {
    /// Waits until another connection has taken the place.
    pub(crate) async fn lost(&self) {
        self.lost.notified().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.peers.open.lock().unwrap_or_else(PoisonError::into_inner).connections.remove(&self.number);
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
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    fn has_lost(place: &Place) -> bool {
        pin!(place.lost()).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn peer_with_the_most_connections_loses_its_oldest() {
        for (one, same, other) in
            [("192.0.2.1", "::ffff:192.0.2.1", "192.0.2.2"), ("2001:db8::1", "2001:db8::ffff:0:0:2", "2001:db8:0:1::1")]
        {
            let peers = Peers::new(3);
            let enter = |peer: &str| peers.enter(peer.parse().unwrap());
            let (first, of_other, second) = (enter(other), enter(one), enter(same));
            assert!([&first, &of_other, &second].iter().all(|(place, loser)| loser.is_none() && !has_lost(place)));
            let third = enter(other);
            assert_eq!(third.1, Some(client_of(other.parse().unwrap())));
            assert!(has_lost(&first.0) && !has_lost(&of_other.0) && !has_lost(&second.0) && !has_lost(&third.0));
            drop((first, of_other, second, third));
            assert!(peers.open.lock().unwrap().connections.is_empty(), "nothing is kept of peers that have gone");
        }
    }

    #[test]
    fn few_peers_never_take_the_place_of_another() {
        let peers = Peers::new(8);
        let operator = peers.enter("198.51.100.1".parse().unwrap()).0;
        let mut held = Vec::new();
        for n in 0..1_000_u32 {
            held.push(peers.enter(std::net::Ipv4Addr::from(n % 4).into()).0);
            assert!(peers.open.lock().unwrap().connections.len() <= 8);
        }
        assert!(!has_lost(&operator));
        assert_eq!(held.iter().filter(|place| !has_lost(place)).count(), 7);
    }
}
