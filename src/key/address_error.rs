//! The error of settings that deal with addresses.

use crate::error::kind_and_message;

kind_and_message! {
    /// The error of [`Prefixes`](super::Prefixes), [`TrustedProxies`](super::TrustedProxies) and
    /// [`AccessList`](crate::middleware::AccessList).
    AddressError, AddressErrorKind
}

/// The kind of an [`AddressError`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AddressErrorKind {
    /// An address has no prefix of this many bits, or the group would be too large.
    Prefix,
    /// The count of trusted proxies is not possible.
    Count,
    /// There is no network, or a text is neither an address nor a network.
    Network,
    /// The name is not a valid header name.
    Header,
}
