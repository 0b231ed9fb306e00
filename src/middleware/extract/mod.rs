//! Ready-made extractors: each is called once, when the layer is built, and returns the closure that reads requests.

mod client_ip;
mod fields;
mod forwarded;
mod peer;
mod prefixes;
mod proxies;

pub(crate) use peer::is_by_peer;
pub(crate) use proxies::parse_network;

pub use client_ip::{client_ip, client_network};
pub use fields::{bearer_token, both, cookie, extension, global, header, host, method, path};
pub use peer::{PeerAddr, peer_address, peer_ip, peer_network};
pub use prefixes::{Prefixes, PrefixesError};
pub use proxies::{TrustedProxies, TrustedProxiesError};
