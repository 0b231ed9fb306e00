//! Setup warnings: likely misconfigurations that a layer detects.

use std::fmt;

use crate::error::{debug_as_text, labelled};

/// A likely misconfiguration of a layer. The text of a warning says what was detected and how to fix it.
///
/// Each layer reports each [kind](Self::kind) once, to its [`Observer`](crate::outcome::Observer).
/// [`RateLimitLayer::check`](crate::RateLimitLayer::check) returns the first warning. If the layer
/// has no observer, or an observer without
/// [`on_setup_warning`](crate::outcome::Observer::on_setup_warning), the warning is printed as one
/// line on stderr, in every build. With the feature `tracing` the warning becomes a `WARN` event of
/// the target `tower_ratelimit` instead, after the program has set a subscriber.
/// [`Stats`](crate::guide::observing) reports the warning in the same ways, and also counts it.
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
        /// Two nested layers with one limiter charged a request for the same policy and key. A layer checks only its
        /// first 256 requests for double charges.
        ChargedTwice = "charged-twice",
        /// A request was forwarded (`X-Forwarded-For`, `Forwarded`), but the key of a rule is the address of the peer,
        /// which is the address of the proxy. This warning is also given if a rule trusts proxies by their
        /// [networks](crate::key::TrustedProxies::networks), and 32 forwarded requests came from outside of these
        /// networks before the first request from a trusted proxy.
        ProxyNotTrusted = "proxy-not-trusted",
        /// An access list allowed a forwarded request because of the address of its peer, which is a proxy. The list
        /// therefore exempts every client of the proxy.
        ProxyAllowed = "proxy-allowed",
        /// Each of the first 32 requests that a rule applied to cost more than the rule's quota can ever allow. A layer
        /// checks only the costs of its first 256 requests.
        NeverPasses = "never-passes",
        /// Two layers that share a limiter use the same policy name with different quotas that are not
        /// plans of one rule.
        TwoQuotas = "two-quotas",
        /// Two layers that share a limiter have the same unnamed quota, so they share its allowance. Clones of a layer
        /// or of a policy cause no warning, because they are meant to share the allowance.
        UnnamedQuota = "unnamed-quota",
        /// Two rules of a layer have one name, so the name of the second rule gets a
        /// [number](crate::RateLimitLayer::and). The number is part of the stored keys, so the rules swap the usage of
        /// their keys if their order changes. Rules with equal quotas and without names cause no warning.
        NameTaken = "name-taken",
        /// A rule has a quota that the layer's limiter [does not
        /// support](crate::limiter::Limiter::supports). Requests that the rule applies to are decided
        /// as if the limiter had failed: see [`OnError`](crate::OnError).
        UnsupportedQuota = "unsupported-quota",
        /// A rule or an access list needs the address of the peer, as its key or for a comparison with the networks
        /// of trusted proxies, but the server does not provide this address. A layer detects the missing address at
        /// the first request.
        PeerUnknown = "peer-unknown",
        /// A rule's condition held for none of the first 1,000 requests.
        NeverApplies = "never-applies",
        /// None of the first 32 requests that a rule applies to had a key, or none of the first 1,000 such requests if
        /// requests without a key are exempt. This warning is also given if none of the first 1,000 requests had the
        /// key of an access list.
        KeyNeverFound = "key-never-found",
        /// The key of a rule is [`key::client_ip`](crate::key::client_ip), but the trusted proxies reported the client
        /// of none of the first 256 requests. If the first 32 requests had a forwarding header, the warning is given
        /// after these requests.
        ClientNotReported = "client-not-reported",
        /// A rule settles costs after the response, and its quota allows no debt.
        NoDebt = "no-debt",
        /// A rule's quota [counts bytes](crate::Quota::in_bytes), but the rule does not say how many bytes a request
        /// costs, so each request costs one byte.
        NoCost = "no-cost",
        /// A rule's quota has windows of the [calendar](crate::Quota::calendar), or of whole days, but the limiter's
        /// clock does not [follow](crate::clock::Clock::follows_calendar) the calendar. After a suspension of the
        /// machine, or a correction of its time, the windows end at other times than those of the calendar.
        CalendarNotFollowed = "calendar-not-followed",
        /// A layer has no timer, so nothing waits, although the quota of a rule is a leaky queue or a concurrency limit
        /// with a [wait](crate::Quota::max_wait), or a rule [paces](crate::Rule::pace_responses) bodies.
        NoTimer = "no-timer",
        /// A rule [paces](crate::Rule::pace_responses) bodies, but the capacity of its quota is smaller than the
        /// number of units that its rate allows in a hundredth of a second. The bodies are therefore slower than
        /// the rate of the quota.
        SlowPace = "slow-pace",
        /// A layer has a timer, but no rule has a leaky queue or a concurrency limit with a wait, so no request waits.
        NoQueue = "no-queue",
        /// A handler that [admits](crate::RateLimitLayer::admit) requests itself does not settle them as the rules say.
        /// Either it drops each [`Admission`](crate::middleware::Admission) although a rule settles after the response,
        /// or it reports a cost although no rule settles by such a cost.
        NotSettled = "not-settled",
        /// Headers report only policies with a [name](crate::Headers::for_policy) or a [unit](crate::Headers::for_unit)
        /// that no policy of the layer has, so these headers are never sent. In addition, another policy of the layer
        /// is in none of the headers that report only some policies. This warning is also given if two families of
        /// headers use one header name.
        HeadersUnsent = "headers-unsent",
        /// The headers of a response report so many policies that they have more than 8,192 bytes, which many proxies
        /// and clients do not accept.
        HeadersLong = "headers-long",
        /// A response switched protocols (101, or a success of `CONNECT`), but no handler had taken the
        /// [`Place`](crate::limiter::Place) of its request. The connection therefore does not count for the
        /// [concurrency limit](crate::Quota::concurrent).
        NotHeld = "not-held",
        /// A rule has a setting that has no effect with its quota. Units of a [concurrency
        /// limit](crate::Quota::concurrent) are returned when the request ends, so a response neither settles nor
        /// refunds them. Units of other quotas are not held [until the head](crate::Rule::until_head). Requests that a
        /// [meter](crate::Rule::overage) counts never wait. In a layer without a timer no request waits, so
        /// [`max_waiting`](crate::RateLimitLayer::max_waiting) has no effect. A rule with the
        /// [placeholder](crate::Policy::has_quota_of_request) policy of another rule reads no quota from requests, and
        /// limits no request.
        NoEffect = "no-effect",
        /// A handler of axum has an argument of the type [`Outcome`](crate::observe::Outcome),
        /// [`Usage`](crate::middleware::Usage) or [`InFlight`](crate::middleware::InFlight), but the request has no
        /// such value, so the client got the status 500. The warning is given once for each of these types, on stderr
        /// or by `tracing`. No observer gets this warning.
        NotExposed = "not-exposed",
    }
}

/// Prints a warning that no observer of the application gets.
pub(crate) fn print_warning(warning: &impl fmt::Display) {
    use std::io::Write as _;
    // `eprintln!` would panic if stderr is closed.
    let _ = writeln!(std::io::stderr(), "tower-ratelimit: {warning}");
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
        print_warning(self);
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
