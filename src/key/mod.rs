//! Keys, which say whose allowance is charged, and extractors, which get keys from requests.
//!
//! An extractor is one of the functions below, or a closure over the request's [`Head`](crate::Head)
//! that returns an [`IntoKey`]. The guide says [which extractor to
//! use](crate::guide::who_is_the_client).
//!
//! ```
//! use tower_ratelimit::{Key, MemoryLimiter, Quota, RateLimitLayer, key};
//!
//! let quota = Quota::per_minute(100);
//! let by_address = RateLimitLayer::new(MemoryLimiter::new(), quota, key::peer_ip());
//! let by_header = RateLimitLayer::new(MemoryLimiter::new(), quota, |request| {
//!     request.headers.get("x-user").cloned()
//! });
//! let by_both = RateLimitLayer::new(MemoryLimiter::new(), quota, |request| {
//!     Key::of((request.headers.get("x-user"), request.uri.path()))
//! });
//! ```
//!
//! # What the compiler says of a closure
//!
//! * `lifetime may not live long enough`: the closure returns a part of the request, which is gone when the key is
//!   used. Make the key in the closure with [`Key::of`](crate::Key::of), or return a copy with `.cloned()` or
//!   `.clone()`.
//! * `type annotations needed` (E0282): the closure is assigned to a variable before it is passed to a layer.
//!   Write the type of the closure's argument: `&Head<'_>`.
//! * `` expected a `Fn(&Head<'_>)` closure `` (E0277), found a tuple: combine extractors with [`both`] and
//!   [`either`].
//! * `cannot be used as a rate-limit key`: [`IntoKey`] lists the types that a closure can return.
//!
//! ```
//! use tower_ratelimit::{Head, Key, MemoryLimiter, Quota, RateLimitLayer, key};
//!
//! # struct User { name: String }
//! let quota = Quota::per_minute(100);
//! // Not `request.headers.get("x-user")`, and not `&user.name`.
//! let by_header = RateLimitLayer::new(MemoryLimiter::new(), quota, |request| {
//!     Key::of(request.headers.get("x-user"))
//! });
//! let by_name = RateLimitLayer::new(
//!     MemoryLimiter::new(),
//!     quota,
//!     key::extension(|user: &User| Key::of(user.name.as_str())),
//! );
//! // Not `move |request|`.
//! let address = key::peer_ip();
//! let in_api = move |request: &Head<'_>| {
//!     Key::of((address(request), request.uri.path().starts_with("/api")))
//! };
//! let by_both = RateLimitLayer::new(MemoryLimiter::new(), quota, in_api);
//! ```
//!
//! # What a client can vary
//!
//! A client that can change its key at will has no limit. To limit a client that can change its key,
//! add a second rule by address.
//!
//! | extractor | spellings that make the same key | what a client can vary |
//! |---|---|---|
//! | [`peer_ip`], [`client_ip`] | IPv4-mapped addresses, ports and zones | the address within its own networks; see [`Prefixes`] |
//! | [`extension`] | none | nothing, if an outer layer has checked the value |
//! | [`header`] | spaces around the value | anything; also the case of letters, if the service ignores case |
//! | [`bearer_token`] | case and spaces of the scheme | anything that the service accepts; a signed token often verifies in several spellings, so use [`extension`] with the verified user |
//! | [`cookie`] | percent-encoding, quotes, spaces | anything that the service accepts |
//! | [`path`], [`original_path`] | none | anything: `/%61`, `/A`, `//a`, `/a/` and `/./a` are other keys than `/a`; use `matched_route` |
//! | [`query`] | percent-encoding, the order of parameters | anything that the service accepts |
//! | [`host`] | case, port, a dot at the end | any name |
//! | [`method`] | none | any name |
//! | a closure over headers | as you write it | anything; `HeaderMap::get` returns the first of several values, and the service may read another |
//! | a closure over the query | as you write it | order, encoding and repetition of parameters |

mod address_source;
mod client_ip;
mod fields;
mod forwarded;
mod paths;
mod peer;
mod prefixes;
mod proxies;
mod query;
#[cfg(feature = "serde")]
mod serde;
pub(crate) mod value;

pub use client_ip::{client_address, client_ip, client_network};
pub use fields::{bearer_token, both, cookie, either, extension, global, header, host, method};
#[cfg(feature = "axum")]
pub use paths::matched_route;
pub use paths::{original_path, original_uri, path};
#[cfg(feature = "status")]
pub(crate) use peer::DescribedClient;
pub use peer::{PeerAddr, peer_address, peer_ip, peer_network};
pub use prefixes::Prefixes;
pub use proxies::TrustedProxies;
pub use query::query;
pub(crate) use value::Key;
pub use value::{IntoKey, OrAbsent};

pub(crate) use address_source::AddressSource;
#[cfg(feature = "rules")]
pub(crate) use fields::host_of;
pub(crate) use prefixes::translated_ipv4;
pub(crate) use proxies::parse_network;
#[cfg(feature = "rules")]
pub(crate) use query::{QueryParameter, parameter};
