//! Access lists: clients that are always allowed or denied.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use foldhash::quality::RandomState;
use ipnet::IpNet;

use crate::base::head::Head;
use crate::base::order::sort_indices;
use crate::error::{ConfigError, labelled};
use crate::key::{AddressSource, IntoKey, Key, parse_network, peer_address, translated_ipv4};
use crate::middleware::rule::Read;

/// A list is shrunk when it has few entries and its capacity is above this number.
const SPARE: usize = 256;

labelled! {
    /// The entry of an [`AccessList`] for a client.
    Access,
    /// Returns the label for files.
    as_str {
        /// The client is exempt: its requests pass, and nothing is charged.
        Allow = "allow",
        /// The client's requests are refused with 403, and nothing is charged.
        Deny = "deny",
        /// The client is limited like any other client. This entry makes an exception from a larger
        /// network that is allowed or denied.
        Limit = "limit",
    }
}

/// A list of networks, addresses and other keys that are always allowed or always denied. The list
/// can be changed while requests are served. Clones are the same list.
///
/// The most specific network counts, so one address can be allowed in a network that is denied. Looking up an address
/// costs one hash look-up for each prefix length in the list, whatever the number of networks is. 100,000 networks take
/// about 3 MB. Reads share a lock, which a change holds exclusively.
///
/// An IPv4 client behind a NAT64 (`64:ff9b::192.0.2.1`) is in the networks of both addresses.
///
/// A client cannot leave or enter a list by sending a header that cannot be read:
///
/// * An address that [`key::client_ip`](crate::key::client_ip) cannot determine is in no network,
///   not even in the proxy's network. If the list denies a network, it denies a client whose
///   forwarding header cannot be read, because the client may be in that network. A request without
///   the header, such as a proxy's health check, is limited like any other request.
/// * If a client sends several values where [`key::header`](crate::key::header) and the like expect
///   one value, the layer does not know which value is the client's key. If at least one key is
///   denied in the list, the list denies this client too.
///
/// ```
/// use tower_ratelimit::key::{self, Prefixes};
/// use tower_ratelimit::{
///     MemoryLimiter, Quota, RateLimitLayer,
///     middleware::{Access, AccessList},
/// };
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let addresses = AccessList::new();
/// addresses.set("10.0.0.0/8", Access::Allow)?;
/// addresses.set("203.0.113.0/24", Access::Deny)?;
/// addresses.set("203.0.113.7", Access::Limit)?;
///
/// let keys = AccessList::new();
/// keys.set_key("a-key-that-leaked", Access::Deny);
///
/// let layer =
///     RateLimitLayer::new(MemoryLimiter::new(), Quota::per_minute(100), key::peer_ip())
///         .access(&addresses, key::peer_network(Prefixes::exact()))
///         .access(&keys, key::header("x-api-key"));
///
/// addresses.set("198.51.100.0/24", Access::Deny)?; // from the next request on
/// # Ok(()) }
/// ```
#[derive(Clone, Default)]
pub struct AccessList(Arc<RwLock<AccessTable>>);

#[derive(Clone, Default)]
struct AccessTable {
    networks: Entries<IpNet>,
    /// The prefix lengths of the networks in ascending order, each with the number of networks that
    /// have it.
    lengths: Vec<(u8, usize)>,
    keys: Entries<Key>,
}

#[derive(Clone)]
struct Entries<K> {
    each: HashMap<K, Access, RandomState>,
    /// The number of denied entries.
    denied: usize,
}

impl<K> Default for Entries<K> {
    fn default() -> Self {
        Self { each: HashMap::default(), denied: 0 }
    }
}

impl<K: Eq + Hash> Entries<K> {
    /// Sets or removes an entry, and returns the earlier entry.
    fn change(&mut self, key: K, access: Option<Access>) -> Option<Access> {
        let before = match access {
            Some(access) => self.each.insert(key, access),
            None => self.each.remove(&key),
        };
        if self.each.capacity() > SPARE && self.each.len() < self.each.capacity() / 8 {
            self.each.shrink_to_fit();
        }
        self.denied += usize::from(access == Some(Access::Deny));
        self.denied -= usize::from(before == Some(Access::Deny));
        before
    }
}

impl AccessTable {
    /// Sets or removes the entry of a network. Returns whether there was an entry before.
    fn change_network(&mut self, network: IpNet, access: Option<Access>) -> bool {
        let had_one = self.networks.change(network, access).is_some();
        let at = match self.lengths.binary_search_by_key(&network.prefix_len(), |(length, _)| *length) {
            Ok(at) => at,
            Err(at) => {
                self.lengths.insert(at, (network.prefix_len(), 0));
                at
            }
        };
        let count = &mut self.lengths[at].1;
        *count += usize::from(access.is_some());
        *count -= usize::from(had_one);
        if *count == 0 {
            self.lengths.remove(at);
        }
        had_one
    }

    /// Returns the most specific network that contains `address`, and its entry.
    fn network(&self, address: IpAddr) -> Option<(IpNet, Access)> {
        self.lengths.iter().rev().find_map(|(length, _)| {
            let network = IpNet::new(address, *length).ok()?.trunc();
            Some((network, *self.networks.each.get(&network)?))
        })
    }

    fn address(&self, address: IpAddr) -> Option<(IpNet, Access)> {
        let address = address.to_canonical();
        let embedded = translated_ipv4(address).and_then(|address| self.network(address.into()));
        let embedded = embedded.map(|found| (96 + found.0.prefix_len(), found));
        let own = self.network(address).map(|found| (found.0.prefix_len(), found));
        let found = own.into_iter().chain(embedded).max_by_key(|(length, _)| *length);
        found.map(|(_, found)| found)
    }

    fn exact(&self, key: &Key) -> Option<Access> {
        if self.keys.each.is_empty() { None } else { self.keys.each.get(key).copied() }
    }

    fn key(&self, key: &Key) -> Option<Access> {
        self.exact(key).or_else(|| Some(self.address(key.address()?)?.1)).or_else(|| {
            let unreadable = self.networks.denied > 0 && key.is_unreadable();
            let ambiguous = self.keys.denied > 0 && key.is_ambiguous();
            (unreadable || ambiguous).then_some(Access::Deny)
        })
    }
}

impl AccessList {
    /// Makes an empty list.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the entry of a network (`203.0.113.0/24`) or an address, and replaces an earlier entry.
    ///
    /// IPv4 networks that are written as IPv6 (`::ffff:10.0.0.0/104`) become IPv4.
    ///
    /// # Errors
    /// Returns an error if the text is neither a network nor an address.
    pub fn set(&self, network: impl AsRef<str>, access: Access) -> Result<(), ConfigError> {
        let network = parse_network(network.as_ref())?.trunc();
        self.write().change_network(network, Some(access));
        Ok(())
    }

    #[cfg(any(feature = "rules", feature = "fleet"))]
    pub(crate) fn set_network(&self, network: IpNet, access: Access) {
        self.write().change_network(network, Some(access));
    }

    /// Sets the entries of many networks in one change.
    ///
    /// # Errors
    /// Returns an error if a text is neither a network nor an address. In that case, no entry of the
    /// list is changed.
    pub fn set_all<I>(&self, networks: I, access: Access) -> Result<(), ConfigError>
    where
        I: IntoIterator,
        I::Item: AsRef<str>,
    {
        let networks: Vec<IpNet> =
            networks.into_iter().map(|one| Ok(parse_network(one.as_ref())?.trunc())).collect::<Result<_, _>>()?;
        let mut table = self.write();
        for network in networks {
            table.change_network(network, Some(access));
        }
        Ok(())
    }

    /// Sets the entry of a key that is not an address, as the extractor returns it: an API key, a
    /// customer's number, a tuple. A missing key (`None`) is ignored.
    pub fn set_key(&self, key: impl IntoKey, access: Access) {
        if let Some(key) = key.into_key() {
            self.write().keys.change(key, Some(access));
        }
    }

    /// Removes the entry of exactly this network or address. Returns whether there was an entry.
    ///
    /// # Errors
    /// Returns an error if the text is neither a network nor an address.
    pub fn remove(&self, network: impl AsRef<str>) -> Result<bool, ConfigError> {
        let network = parse_network(network.as_ref())?.trunc();
        Ok(self.write().change_network(network, None))
    }

    /// Removes the entry of a key. Returns whether there was an entry.
    pub fn remove_key(&self, key: impl IntoKey) -> bool {
        key.into_key().is_some_and(|key| self.write().keys.change(key, None).is_some())
    }

    /// Replaces all entries with the entries of `other` in one change, for lists that are reloaded
    /// as a whole.
    pub fn replace(&self, other: &Self) {
        let table = other.read().clone();
        let before = std::mem::replace(&mut *self.write(), table);
        drop(before); // not under the lock, because freeing a large table takes time
    }

    /// Returns the entry for a client with this address.
    #[must_use]
    pub fn of_address(&self, address: IpAddr) -> Option<Access> {
        self.read().address(address).map(|(_, access)| access)
    }

    /// Returns the entry for a client with this key. A key that is one address is looked up as that
    /// address.
    #[must_use]
    pub fn of_key(&self, key: &Key) -> Option<Access> {
        self.read().key(key)
    }

    /// Returns the network whose entry is that of a client with this key.
    fn network_of_key(&self, key: &Key) -> Option<IpNet> {
        let table = self.read();
        if table.exact(key).is_some() { None } else { table.address(key.address()?).map(|(network, _)| network) }
    }

    /// Returns the networks and addresses of the list with their entries, in the order of their addresses.
    /// [`set`](Self::set) can read each of the returned texts, such as `203.0.113.7/32`.
    #[must_use]
    pub fn networks(&self) -> Vec<(String, Access)> {
        let networks: Vec<(IpNet, Access)> = {
            let table = self.read();
            table.networks.each.iter().map(|(network, access)| (*network, *access)).collect()
        };
        let network = |at: usize| networks.get(at).map(|(network, _)| *network);
        let mut order: Vec<usize> = (0..networks.len()).collect();
        sort_indices(&mut order, &|one, other| network(one).cmp(&network(other)));
        let entries = order.into_iter().filter_map(|at| networks.get(at));
        entries.map(|(network, access)| (network.to_string(), *access)).collect()
    }

    /// Returns the keys of the list that were set by [`set_key`](Self::set_key), with their entries, in no order.
    ///
    /// To show a key, use [`Key::display`]. A key may be a secret.
    #[must_use]
    pub fn keys(&self) -> Vec<(Key, Access)> {
        self.read().keys.each.iter().map(|(key, access)| (key.clone(), *access)).collect()
    }

    /// Returns the number of networks and keys in the list.
    #[must_use]
    pub fn len(&self) -> usize {
        let table = self.read();
        table.networks.each.len() + table.keys.each.len()
    }

    /// Returns whether the list is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn read(&self) -> RwLockReadGuard<'_, AccessTable> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, AccessTable> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for AccessList {
    /// Prints the number of entries, not the entries.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let table = self.read();
        f.debug_struct("AccessList")
            .field("networks", &table.networks.each.len())
            .field("keys", &table.keys.each.len())
            .finish()
    }
}

/// A list in a layer, with its extractor.
#[derive(Clone)]
pub(crate) struct BoundList {
    list: AccessList,
    extract: Read<Option<Key>>,
    by: AddressSource,
}

impl BoundList {
    pub(crate) fn new<E, K>(list: AccessList, extract: E) -> Self
    where
        E: Fn(&Head<'_>) -> K + Send + Sync + 'static,
        K: IntoKey,
    {
        Self { list, extract: Arc::new(move |head| extract(head).into_key()), by: AddressSource::of::<E>() }
    }

    /// Returns whether the list looks up the peer's address.
    pub(crate) fn is_by_peer(&self) -> bool {
        self.by == AddressSource::Peer
    }

    /// Returns whether the list's entry for this request is the entry of the peer's address.
    pub(crate) fn decided_by_peer(&self, head: &Head<'_>) -> bool {
        match self.by {
            AddressSource::Peer => true,
            AddressSource::Proxies => false,
            AddressSource::Other => {
                let address = (self.extract)(head).and_then(|key| key.address());
                address.is_some() && address == peer_address(head)
            }
        }
    }
}

/// Returns the entry of the first list that has an entry for the request, and that list.
/// `looked_up` gets each list's index and the list's key.
pub(crate) fn ask<'a>(
    lists: &'a [BoundList],
    head: &Head<'_>,
    looked_up: impl Fn(usize, AddressSource, Option<&Key>),
) -> Option<(Access, &'a BoundList)> {
    lists.iter().enumerate().find_map(|(at, bound)| {
        let key = (bound.extract)(head);
        looked_up(at, bound.by, key.as_ref());
        Some((bound.list.of_key(&key?)?, bound))
    })
}

/// Returns the network by which the lists decide about a request. Returns `None` if they decide by a key, or because
/// the client's address cannot be read.
pub(crate) fn deciding_network(lists: &[BoundList], head: &Head<'_>) -> Option<IpNet> {
    let (_, bound) = ask(lists, head, |_, _, _| {})?;
    bound.list.network_of_key(&(bound.extract)(head)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn access_list_returns_its_entries_and_reads_them_again() {
        let list = AccessList::new();
        list.set("203.0.113.7", Access::Limit).unwrap();
        list.set("2001:db8::/32", Access::Allow).unwrap();
        list.set("10.1.2.3/8", Access::Deny).unwrap();
        list.set("::ffff:192.0.2.0/120", Access::Deny).unwrap();
        list.set("198.51.100.1", Access::Deny).unwrap();
        list.remove("198.51.100.1").unwrap();
        list.set_key("a-token", Access::Deny);
        let networks = [
            ("10.0.0.0/8", Access::Deny),
            ("192.0.2.0/24", Access::Deny),
            ("203.0.113.7/32", Access::Limit),
            ("2001:db8::/32", Access::Allow),
        ];
        assert_eq!(list.networks(), networks.map(|(network, access)| (network.to_owned(), access)));
        assert_eq!(list.keys(), [(Key::of("a-token").unwrap(), Access::Deny)]);

        let again = AccessList::new();
        for (network, access) in list.networks() {
            again.set(network, access).unwrap();
        }
        list.keys().into_iter().for_each(|(key, access)| again.set_key(key, access));
        assert_eq!((again.networks(), again.keys(), again.len()), (list.networks(), list.keys(), list.len()));
    }

    #[test]
    fn the_most_specific_network_decides() {
        let list = AccessList::new();
        list.set("10.0.0.0/8", Access::Deny).unwrap();
        list.set("10.1.0.0/16", Access::Allow).unwrap();
        list.set("10.1.2.3", Access::Deny).unwrap();
        list.set("10.1.2.9/24", Access::Limit).unwrap(); // the network that this address is in
        list.set("2001:db8::/32", Access::Deny).unwrap();
        for (text, access) in [
            ("10.9.9.9", Some(Access::Deny)),
            ("10.1.9.9", Some(Access::Allow)),
            ("10.1.2.3", Some(Access::Deny)),
            ("10.1.2.4", Some(Access::Limit)),
            ("11.0.0.0", None),
            ("::ffff:10.9.9.9", Some(Access::Deny)),
            ("2001:db8:9::1", Some(Access::Deny)),
            ("2001:db9::1", None),
        ] {
            assert_eq!(list.of_address(address(text)), access, "{text}");
        }
        assert!(list.remove("10.1.2.0/24").unwrap());
        assert!(!list.remove("10.1.2.0/24").unwrap());
        assert_eq!(list.of_address(address("10.1.2.4")), Some(Access::Allow));
    }

    #[test]
    fn list_shrinks_when_many_entries_are_removed() {
        let list = AccessList::new();
        (0..10_000_u64).for_each(|key| list.set_key(key, Access::Deny));
        (0..10_000_u64).for_each(|key| assert!(list.remove_key(key)));
        let room = list.read().keys.each.capacity();
        assert!(room <= SPARE, "room for {room}");
    }

    #[test]
    fn everybody_is_a_network_too_and_a_mapped_one_is_ipv4() {
        let list = AccessList::new();
        list.set("0.0.0.0/0", Access::Deny).unwrap();
        list.set("::ffff:192.0.2.0/120", Access::Allow).unwrap();
        assert_eq!(list.of_address(address("8.8.8.8")), Some(Access::Deny));
        assert_eq!(list.of_address(address("192.0.2.77")), Some(Access::Allow));
        assert_eq!(list.of_address(address("2001:db8::1")), None);
        list.set("::/0", Access::Deny).unwrap();
        assert_eq!(list.of_address(address("2001:db8::1")), Some(Access::Deny));
    }

    #[test]
    fn client_of_a_nat64_is_looked_up_by_both_addresses() {
        let list = AccessList::new();
        list.set("192.0.2.0/24", Access::Deny).unwrap();
        list.set("10.0.0.0/8", Access::Allow).unwrap();
        assert_eq!(list.of_address(address("64:ff9b::192.0.2.1")), Some(Access::Deny));
        assert_eq!(list.of_address(address("64:ff9b::198.51.100.1")), None);
        for internal in ["64:ff9b::10.0.0.1", "64:ff9b:1::10.0.0.1", "2002:a00:1::1", "::10.0.0.1"] {
            assert_eq!(list.of_address(address(internal)), None, "{internal}");
        }
        list.set("64:ff9b::/96", Access::Limit).unwrap();
        assert_eq!(list.of_address(address("64:ff9b::192.0.2.1")), Some(Access::Deny));
        assert_eq!(list.of_address(address("64:ff9b::198.51.100.1")), Some(Access::Limit));
        list.set("64:ff9b::192.0.2.7", Access::Allow).unwrap();
        assert_eq!(list.of_address(address("64:ff9b::192.0.2.7")), Some(Access::Allow));
        assert_eq!(list.of_address(address("192.0.2.7")), Some(Access::Deny));
    }

    #[test]
    fn access_list_looks_addresses_up_as_addresses() {
        let list = AccessList::new();
        list.set("192.0.2.0/24", Access::Deny).unwrap();
        list.set_key(("customer", 7), Access::Allow);
        let of = |key: Option<Key>| list.of_key(&key.unwrap());
        assert_eq!(of(Key::of(address("192.0.2.1"))), Some(Access::Deny));
        assert_eq!(of(Key::of(address("::ffff:192.0.2.1"))), Some(Access::Deny));
        assert_eq!(of(Key::of(("customer", 7))), Some(Access::Allow));
        for other in
            [Key::of("192.0.2.1"), Key::of((address("192.0.2.1"), 1)), Key::of(("customer", 8)), Some(Key::global())]
        {
            assert_eq!(of(other), None);
        }
        assert!(list.remove_key(("customer", 7)));
        assert!(!list.remove_key(("customer", 7)));
        assert_eq!(list.len(), 1);
    }

    #[test]
    fn bad_network_is_refused_and_changes_nothing() {
        let list = AccessList::new();
        let error = list.set_all(["10.0.0.0/8", "10.0.0.0/33"], Access::Deny).unwrap_err();
        assert!(error.to_string().contains("10.0.0.0/33"), "{error}");
        assert!(list.set("example.com", Access::Deny).is_err());
        assert!(list.is_empty());
    }

    #[test]
    fn a_list_is_replaced_as_a_whole_and_its_clones_with_it() {
        let (list, other) = (AccessList::new(), AccessList::new());
        let clone = list.clone();
        list.set("10.0.0.0/8", Access::Deny).unwrap();
        other.set("192.0.2.0/24", Access::Allow).unwrap();
        list.replace(&other);
        list.replace(&list);
        assert_eq!(clone.of_address(address("10.0.0.1")), None);
        assert_eq!(clone.of_address(address("192.0.2.1")), Some(Access::Allow));
        other.set("10.0.0.0/8", Access::Deny).unwrap();
        assert_eq!(clone.len(), 1, "the other list is one of its own");
    }
}
