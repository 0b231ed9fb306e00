//! Mistakes in how layers are set up that can be noticed, but are no reason to refuse anything.

use std::fmt;

/// Something in how a layer is set up that cannot be meant: what, and how to mend it.
///
/// It is reported once for each layer and [kind](Self::kind): to the layer's [`Observer`](crate::Observer), and by
/// [`RateLimitLayer::check`](crate::RateLimitLayer::check). If the layer has no observer, or one without
/// [`on_misuse`](crate::Observer::on_misuse), it is a warning of `tracing` (with the feature of this name), or otherwise,
/// in builds with debug assertions, a line on stderr. Apart from an
/// [unsupported quota](MisuseKind::UnsupportedQuota), requests are decided as they would be otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misuse {
    kind: MisuseKind,
    text: String,
}

/// What kind of misuse it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MisuseKind {
    /// Two nested layers with one limiter charged a request for the same policy and key. Layers look for this while they
    /// are new: with each of their first 256 requests.
    ChargedTwice,
    /// A request was forwarded (`X-Forwarded-For`, `Forwarded`), and a rule counts by the address of the peer, which then is
    /// the proxy's.
    ProxyNotTrusted,
    /// A list allowed a request by the address of its peer, and the request was forwarded: the list exempts every client of
    /// that proxy.
    ProxyAllowed,
    /// A request costs more than its policy's quota can ever allow.
    NeverPasses,
    /// Layers with one limiter have different quotas under one policy's name, and are not plans of one rule.
    TwoQuotas,
    /// Layers with one limiter have the same unnamed quota, so that a request to one of them uses up what the other one has
    /// for the same key. Clones of a layer, and of a policy, are meant to share.
    UnnamedQuota,
    /// A rule has a quota that the layer's limiter [does not support](crate::Limiter::supports). Requests that the rule
    /// applies to are decided as if the limiter had failed: see [`OnError`](crate::OnError).
    UnsupportedQuota,
    /// A rule counts by the address of the peer, and the server does not pass it on.
    PeerUnknown,
    /// A rule's condition held for none of the first 1,000 requests.
    NeverApplies,
    /// None of the first requests that a rule applies to had a key: 32 of them, or 1,000 if they are exempt without one.
    /// Or none of the first 1,000 requests had the key of an access list.
    KeyNeverFound,
    /// A rule settles what requests cost in the end, and its quota remembers no debt.
    NoDebt,
    /// A rule's quota is a leaky queue, and its layer has no timer by which requests could wait for their departure.
    NoTimer,
    /// A layer has a timer by which requests could wait for their departure, and no rule with a leaky queue, which would
    /// tell them one.
    NoQueue,
}

impl MisuseKind {
    /// The code in metrics and logs: `charged-twice`, `proxy-not-trusted`, `proxy-allowed`, `never-passes`, `two-quotas`,
    /// `unnamed-quota`, `unsupported-quota`, `peer-unknown`, `never-applies`, `key-never-found`, `no-debt`, `no-timer`,
    /// `no-queue`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ChargedTwice => "charged-twice",
            Self::ProxyNotTrusted => "proxy-not-trusted",
            Self::ProxyAllowed => "proxy-allowed",
            Self::NeverPasses => "never-passes",
            Self::TwoQuotas => "two-quotas",
            Self::UnnamedQuota => "unnamed-quota",
            Self::UnsupportedQuota => "unsupported-quota",
            Self::PeerUnknown => "peer-unknown",
            Self::NeverApplies => "never-applies",
            Self::KeyNeverFound => "key-never-found",
            Self::NoDebt => "no-debt",
            Self::NoTimer => "no-timer",
            Self::NoQueue => "no-queue",
        }
    }
}

impl Misuse {
    pub(crate) fn new(kind: MisuseKind, text: String) -> Self {
        Self { kind, text }
    }

    /// Reports the misuse where no observer does.
    pub(crate) fn report(&self) {
        #[cfg(feature = "tracing")]
        tracing::warn!(target: "tower_ratelimit", kind = self.kind.as_str(), "{}", self.text);
        #[cfg(not(feature = "tracing"))]
        if cfg!(debug_assertions) {
            use std::io::Write as _;
            // Not by `eprintln!`, which panics if stderr is closed.
            let _ = writeln!(std::io::stderr(), "tower-ratelimit: {self}");
        }
    }

    /// What kind of misuse it is.
    #[must_use]
    pub fn kind(&self) -> MisuseKind {
        self.kind
    }
}

impl fmt::Display for Misuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.as_str(), self.text)
    }
}

impl std::error::Error for Misuse {}
