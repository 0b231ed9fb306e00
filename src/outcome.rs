//! What the middleware did with a request, and the hook that sees it.

use std::fmt;
use std::time::Duration;

use http::request::Parts;
use smallvec::SmallVec;

use crate::decision::ChargeDecision;
use crate::key::Key;
use crate::misuse::Misuse;
use crate::mode::Mode;
use crate::policy::Policy;

/// What the middleware did with a request, and how each policy stands.
///
/// It is in the extensions of a refused request's response, of a request that is degraded or goes to the
/// overflow and of its response, of every request and response if the layer's `expose_outcome` asks for it, and in the hands of responders and of an [`Observer`].
#[derive(Clone, Debug)]
pub struct Outcome {
    kind: OutcomeKind,
    standings: SmallVec<[Standing; 2]>,
}

/// What the middleware did with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OutcomeKind {
    /// It was within every quota, and passed.
    Allowed,
    /// It was within every quota, waited for its departure from a queue, and passed.
    Delayed,
    /// It waited for its departure from a queue, and was dropped before: its client disconnected. What it took is refunded.
    Abandoned,
    /// It was over a quota, and refused.
    Limited,
    /// Its key is closed by a [block](crate::Rule::block), since it was refused too often, and it was refused: the request
    /// that was refused last before that, too.
    Blocked,
    /// It was beyond the quota of a rule that [meters](crate::Rule::overage) it, and passed.
    Overage,
    /// It was over a quota of a rule that [degrades](Mode::Degrade), or had no key for one, and passed, to be served less.
    Degraded,
    /// It was over a quota of a rule that only [looks](Mode::Shadow), or had no key for one, and passed.
    ShadowLimited,
    /// It was over a quota, and went to the [overflow](crate::RateLimitLayer::overflow) instead of the service.
    Overflowed,
    /// No policy applied to it, and it passed.
    Exempt,
    /// It was denied by a list, and refused.
    Denied,
    /// It had no key, and was refused.
    KeyMissing,
    /// The limiter failed, and it passed.
    FailedOpen,
    /// The limiter failed, and it was refused.
    FailedClosed,
}

impl OutcomeKind {
    /// The name in metrics and logs: `allowed`, `delayed`, `abandoned`, `limited`, `blocked`, `overage`, `degraded`,
    /// `shadow_limited`, `overflowed`, `exempt`, `denied`, `key_missing`, `failed_open`, `failed_closed`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Delayed => "delayed",
            Self::Abandoned => "abandoned",
            Self::Limited => "limited",
            Self::Blocked => "blocked",
            Self::Overage => "overage",
            Self::Degraded => "degraded",
            Self::ShadowLimited => "shadow_limited",
            Self::Overflowed => "overflowed",
            Self::Exempt => "exempt",
            Self::Denied => "denied",
            Self::KeyMissing => "key_missing",
            Self::FailedOpen => "failed_open",
            Self::FailedClosed => "failed_closed",
        }
    }

    /// Whether services are told of it in any case: it is to be served otherwise than usual.
    #[inline]
    pub(crate) fn is_told(self) -> bool {
        matches!(self, Self::Degraded | Self::Overflowed)
    }

    /// Whether the request went on to a service: that within the layer, or the overflow.
    #[must_use]
    pub fn passed(self) -> bool {
        match self {
            Self::Allowed | Self::Delayed | Self::Overage | Self::Degraded | Self::ShadowLimited | Self::Overflowed => {
                true
            }
            Self::Exempt | Self::FailedOpen => true,
            Self::Abandoned | Self::Limited | Self::Blocked => false,
            Self::Denied | Self::KeyMissing | Self::FailedClosed => false,
        }
    }
}

/// How one policy stands after a decision.
#[derive(Clone, Debug)]
pub struct Standing {
    pub(crate) policy: Policy,
    pub(crate) cost: u64,
    pub(crate) mode: Mode,
    pub(crate) refuses: bool,
    pub(crate) near: bool,
    pub(crate) decision: ChargeDecision,
}

impl Outcome {
    pub(crate) fn new(kind: OutcomeKind, standings: SmallVec<[Standing; 2]>) -> Self {
        Self { kind, standings }
    }

    /// What was done.
    #[must_use]
    pub fn kind(&self) -> OutcomeKind {
        self.kind
    }

    /// How each policy that applied stands.
    #[must_use]
    pub fn standings(&self) -> &[Standing] {
        &self.standings
    }

    /// The policies that refused the request.
    pub fn violated(&self) -> impl Iterator<Item = &Standing> {
        self.standings.iter().filter(|standing| standing.refuses())
    }

    /// The policies whose quotas the request was over: those that refused it, and those whose [`Mode`] let it pass.
    pub fn exceeded(&self) -> impl Iterator<Item = &Standing> {
        self.standings.iter().filter(|standing| standing.is_exceeded())
    }

    /// Whether a policy is [near](Standing::is_near) its limit.
    #[must_use]
    pub fn is_near(&self) -> bool {
        self.standings.iter().any(Standing::is_near)
    }

    /// The policy that binds: of those that refused the one with the longest wait, else the one with the least remaining.
    /// One in shadow never does.
    #[must_use]
    pub fn binding(&self) -> Option<&Standing> {
        let refusing = self.violated().max_by_key(|standing| standing.decision.retry_us());
        let seen = self.standings.iter().filter(|standing| standing.mode != Mode::Shadow);
        refusing.or_else(|| seen.min_by_key(|standing| standing.decision.remaining()))
    }

    /// If refused for its rate, the time after which the same request would pass, if nothing else came: the longest of the
    /// refusing policies. Nothing if no wait helps.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        if self.is_never() {
            return None;
        }
        self.violated().filter_map(|standing| standing.decision.retry_after()).max()
    }

    /// How long the request was to wait for its departure when it was admitted: the longest wait of the enforced queues. It
    /// has waited for less if it moved up, and for nothing without [a timer](crate::RateLimitLayer::delay). Zero if it was
    /// not admitted.
    #[must_use]
    pub fn delay(&self) -> Duration {
        if self.violated().next().is_some() {
            return Duration::ZERO;
        }
        let waited = |standing: &&Standing| standing.mode == Mode::Enforce && standing.cost > 0;
        self.standings.iter().filter(waited).map(|standing| standing.decision.delay()).max().unwrap_or_default()
    }

    /// Refused, and no wait helps: a cost is above its policy's capacity.
    #[must_use]
    pub fn is_never(&self) -> bool {
        self.violated().any(|standing| standing.decision.is_never())
    }
}

impl Standing {
    /// The policy.
    #[must_use]
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// The cost that was asked for.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// What the policy's own quota says.
    #[must_use]
    pub fn decision(&self) -> &ChargeDecision {
        &self.decision
    }

    /// The mode that the policy's rule was in.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Whether this policy refused the request.
    #[must_use]
    pub fn refuses(&self) -> bool {
        self.refuses
    }

    /// Whether the request was over this policy's quota, whatever the policy's mode made of it.
    #[must_use]
    pub fn is_exceeded(&self) -> bool {
        !self.decision.is_allowed()
    }

    /// Whether what remains is as little as [`Rule::near_percent`](crate::Rule::near_percent) asked to be told of. Without
    /// that it never is.
    #[must_use]
    pub fn is_near(&self) -> bool {
        self.near
    }
}

/// A request that was decided, as an [`Observer`] sees it: what was done with it, its head, and the keys it was charged to.
///
/// ```
/// use tower_ratelimit::{Observed, Observer};
///
/// struct Log;
///
/// impl Observer for Log {
///     fn on_outcome(&self, observed: &Observed<'_>) {
///         let request = observed.request();
///         println!("{} {} {}", observed.outcome().kind().as_str(), request.method, request.uri.path());
///     }
/// }
/// ```
pub struct Observed<'a> {
    outcome: &'a Outcome,
    request: &'a Parts,
    keys: SmallVec<[(&'a Policy, &'a Key); 4]>,
}

impl<'a> Observed<'a> {
    pub(crate) fn new(
        outcome: &'a Outcome,
        request: &'a Parts,
        keys: impl Iterator<Item = (&'a Policy, &'a Key)>,
    ) -> Self {
        Self { outcome, request, keys: keys.collect() }
    }

    /// What was done with the request, and how each policy stands.
    #[must_use]
    pub fn outcome(&self) -> &'a Outcome {
        self.outcome
    }

    /// The request's head, as the layer found it. Its headers may carry secrets.
    #[must_use]
    pub fn request(&self) -> &'a Parts {
        self.request
    }

    /// The key that a policy of this name was charged for; `None` if the policy did not apply to the request.
    ///
    /// A key may be a secret or personal data, such as a token or an address: it should not be in logs or metrics as it is.
    #[must_use]
    pub fn key(&self, policy: &str) -> Option<&'a Key> {
        self.keys.iter().find(|(of, _)| of.name() == policy).map(|(_, key)| *key)
    }
}

impl fmt::Debug for Observed<'_> {
    /// Without the headers and the keys: they may be secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observed")
            .field("outcome", &self.outcome)
            .field("method", &self.request.method)
            .field("path", &self.request.uri.path())
            .finish_non_exhaustive()
    }
}

/// Sees what the middleware does and what happens to a limiter. Metrics and logs are built on it.
///
/// The methods run on the request's path: they should be quick, and must not block. A layer without an observer pays
/// nothing for them. An `Arc` of an observer is an observer, so that a layer and its limiters can have one in common.
pub trait Observer: Send + Sync {
    /// A request was decided.
    fn on_outcome(&self, observed: &Observed<'_>) {
        let _ = observed;
    }

    /// A layer has noticed that it cannot be meant as it is set up. Called once for each layer and kind.
    ///
    /// Unless an observer does otherwise, it is reported as without an observer; see [`Misuse`].
    fn on_misuse(&self, misuse: &Misuse) {
        misuse.report();
    }

    /// Something befell a limiter.
    fn on_event(&self, event: &LimiterEvent) {
        let _ = event;
    }
}

#[warn(clippy::missing_trait_methods, reason = "a method that is not forwarded falls back to its default")]
impl<O: Observer + ?Sized> Observer for std::sync::Arc<O> {
    fn on_outcome(&self, observed: &Observed<'_>) {
        (**self).on_outcome(observed);
    }

    fn on_misuse(&self, misuse: &Misuse) {
        (**self).on_misuse(misuse);
    }

    fn on_event(&self, event: &LimiterEvent) {
        (**self).on_event(event);
    }
}

/// Something that befell a limiter.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimiterEvent {
    /// A key that still counted was forgotten to make room for another.
    Evicted {
        /// It was out of allowance: forgetting it gave its client a fresh one.
        throttled: bool,
    },
    /// A new key was denied because the table is full.
    Full,
    /// More quotas have live states than a limiter can tell apart (16,383). Those beyond are kept all the same, but a key
    /// whose quota changes to or from one of them starts afresh. Reported at most every ten seconds.
    TooManyQuotas,
    /// The first of two limiters could not answer, and the second was asked.
    FellBack {
        /// What the first said.
        error: String,
    },
    /// The limiter could not answer.
    Failed {
        /// What it said.
        error: String,
    },
    /// A server does not answer any more: until it does, checks that need it fail at once.
    StoreDown {
        /// Its host and port.
        server: String,
        /// What was met last.
        error: String,
    },
    /// A server that did not answer does again.
    StoreUp {
        /// Its host and port.
        server: String,
    },
    /// A check failed at the store: no answer came in time, the server is read-only, loading or out of memory, too many checks
    /// wait already, or a value is not one of this crate's. Told once a minute for each kind of error.
    StoreFailed {
        /// What was met.
        error: String,
    },
    /// A server answers, but somebody has to mend something before it can be used: a password, a right, a URL. Told once a
    /// minute for each kind of trouble.
    StoreMisconfigured {
        /// What is wrong, and what to do.
        error: String,
    },
}
