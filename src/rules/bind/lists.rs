//! Access lists by the client's address.

use super::super::names::Names;
use crate::key::{Prefixes, client_network, peer_network};
use crate::middleware::charge::access::{AccessList, BoundList};

/// Makes an access list of clients.
pub(super) fn client_list(list: AccessList, names: &Names) -> BoundList {
    let exact = Prefixes::exact();
    match &names.proxies {
        Some(proxies) => BoundList::new(list, client_network(proxies.clone(), exact)),
        None => BoundList::new(list, peer_network(exact)),
    }
}
