//! Setup warnings: likely misconfigurations that a layer detects.

use std::fmt;

use crate::error::{debug_as_text, labelled};

/// A likely misconfiguration of a layer. Its text says what was detected and how to fix it.
///
/// Each layer reports each [kind](Self::kind) once, to its [`Observer`](crate::outcome::Observer).
/// [`RateLimitLayer::check`](crate::RateLimitLayer::check) returns the first warning. If the layer
/// has no observer, or one without
/// [`on_setup_warning`](crate::outcome::Observer::on_setup_warning), the warning is one line on
/// stderr, in every build. With the feature `tracing` it is a `WARN` event of the target
/// `tower_ratelimit` instead, once the program has set a subscriber. With
/// [`Stats`](crate::guide::observing), which also counts the warning, it is the same.
///
/// A warning does not change how requests are decided, except for an
/// [unsupported quota](SetupWarningKind::UnsupportedQuota).
#[derive(Clone, PartialEq, Eq)]
pub struct SetupWarning {
    kind: SetupWarningKind,
    text: String,
}

labelled! {
    /// The kind of a [`SetupWarning`].
    SetupWarningKind,
    /// Returns the code for metrics and logs.
    as_str {
        /// Two nested layers with one limiter charged a request for the same policy and key. A layer
        /// looks for this in its first 256 requests.
        ChargedTwice = "charged-twice",
        /// A request was forwarded (`X-Forwarded-For`, `Forwarded`), and a rule counts by the address
        /// of the peer, which is the proxy's. Or a rule trusts
        /// [networks](crate::key::TrustedProxies::networks), and 32 forwarded requests came from outside
        /// of them before one came from a trusted proxy.
        ProxyNotTrusted = "proxy-not-trusted",
        /// An access list allowed a forwarded request by the address of its peer, so the list exempts
        /// every client of that proxy.
        ProxyAllowed = "proxy-allowed",
        /// The first 32 requests that a rule applied to cost more than its quota can ever allow. A layer
        /// looks for this in its first 256 requests.
        NeverPasses = "never-passes",
        /// Two layers that share a limiter use the same policy name with different quotas that are not
        /// plans of one rule.
        TwoQuotas = "two-quotas",
        /// Two layers that share a limiter have the same unnamed quota, so they share its allowance.
        /// Clones of a layer and clones of a policy are meant to share, and are not reported.
        UnnamedQuota = "unnamed-quota",
        /// Two rules of a layer have one name, so the second one is [numbered](crate::RateLimitLayer::and). The
        /// number is part of the stored keys, so a change of the rules' order swaps what their keys have used.
        /// Equal quotas without names are not reported.
        NameTaken = "name-taken",
        /// A rule has a quota that the layer's limiter [does not
        /// support](crate::limiter::Limiter::supports). Requests that the rule applies to are decided
        /// as if the limiter had failed: see [`OnError`](crate::OnError).
        UnsupportedQuota = "unsupported-quota",
        /// A rule or an access list needs the address of the peer, and the server does not provide it: to look it up,
        /// or to compare it with the networks of trusted proxies. A layer detects this at the first request.
        PeerUnknown = "peer-unknown",
        /// A rule's condition held for none of the first 1,000 requests.
        NeverApplies = "never-applies",
        /// None of the first 32 requests that a rule applies to had a key, or none of the first 1,000
        /// if requests without a key are exempt. Or none of the first 1,000 requests had the key of an
        /// access list.
        KeyNeverFound = "key-never-found",
        /// A rule counts by [`key::client_ip`](crate::key::client_ip), and the trusted proxies reported
        /// the client of none of the first 256 requests. If the first 32 requests had a
        /// forwarding header, it is reported after those.
        ClientNotReported = "client-not-reported",
        /// A rule settles costs after the response, and its quota allows no debt.
        NoDebt = "no-debt",
        /// A rule's quota [counts bytes](crate::Quota::in_bytes), and the rule does not say how many bytes a
        /// request costs, so each costs one byte.
        NoCost = "no-cost",
        /// A rule's quota has windows of the [calendar](crate::Quota::calendar), or of whole days, and the limiter's
        /// clock does not [follow](crate::clock::Clock::follows_calendar) the calendar: after the machine was suspended
        /// or its time corrected, the windows end at other times.
        CalendarNotFollowed = "calendar-not-followed",
        /// A rule's quota is a leaky queue, or a concurrency limit with a [wait](crate::Quota::max_wait), or the rule
        /// [paces](crate::Rule::pace_responses) bodies, and its layer has no timer, so nothing waits.
        NoTimer = "no-timer",
        /// A rule [paces](crate::Rule::pace_responses) bodies, and its quota has room for less than what passes in
        /// a hundredth of a second, so bodies are slower than the pace.
        SlowPace = "slow-pace",
        /// A layer has a timer, and no rule has a leaky queue or a concurrency limit with a wait, so no request waits.
        NoQueue = "no-queue",
        /// A handler that [admits](crate::RateLimitLayer::admit) requests itself does not settle them as
        /// the rules say: it drops each [`Admission`](crate::middleware::Admission) though a rule settles
        /// after the response, or it settles by a cost that no rule is settled by.
        NotSettled = "not-settled",
        /// Headers are never sent: the layer has no policy of the [name](crate::Headers::for_policy) or the
        /// [unit](crate::Headers::for_unit) that they report, and another policy has no headers. Or two
        /// families of headers have a name in common.
        HeadersUnsent = "headers-unsent",
        /// The headers of a response report so many policies that they have more than 8,192 bytes, which many proxies
        /// and clients do not accept.
        HeadersLong = "headers-long",
        /// A response switched protocols (101, or a success of `CONNECT`), and no handler had taken the
        /// [`Place`](crate::limiter::Place) of its request. So the connection does not count for the
        /// [concurrency limit](crate::Quota::concurrent).
        NotHeld = "not-held",
        /// A rule has a setting that does nothing with its quota. The units of a [concurrency
        /// limit](crate::Quota::concurrent) come back when the request ends, so they are neither settled nor refunded
        /// by a response. Other units are not held [until the head](crate::Rule::until_head). Requests that a
        /// [meter](crate::Rule::overage) counts never wait. A layer without a timer lets no request wait,
        /// so its [`max_waiting`](crate::RateLimitLayer::max_waiting) does nothing. A rule with the
        /// [stand-in](crate::Policy::has_quota_of_request) of another rule reads no quota from requests, and limits
        /// none.
        NoEffect = "no-effect",
        /// A handler of axum takes an [`Outcome`](crate::observe::Outcome), a [`Usage`](crate::middleware::Usage) or an
        /// [`InFlight`](crate::middleware::InFlight), and the request has none, so the client got 500. It is reported
        /// once for each of these types, on stderr or by `tracing`: no observer gets it.
        NotExposed = "not-exposed",
    }
}

impl SetupWarning {
    pub(crate) fn new(kind: SetupWarningKind, text: String) -> Self {
        Self { kind, text }
    }

    /// Reports the warning without an observer.
    pub(crate) fn report(&self) {
        #[cfg(feature = "tracing")]
        if tracing::dispatcher::has_been_set() {
            tracing::warn!(target: "tower_ratelimit", kind = self.kind.as_str(), "{}", self.text);
            return;
        }
        use std::io::Write as _;
        // `eprintln!` would panic if stderr is closed.
        let _ = writeln!(std::io::stderr(), "tower-ratelimit: {self}");
    }

    /// Returns the kind of the warning.
    #[must_use]
    pub fn kind(&self) -> SetupWarningKind {
        self.kind
    }
}

debug_as_text!(SetupWarning);

impl fmt::Display for SetupWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind.as_str(), self.text)
    }
}

impl std::error::Error for SetupWarning {}
