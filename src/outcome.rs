//! What the middleware did with a request, and the hook that sees it.

use std::time::Duration;

use smallvec::SmallVec;

use crate::decision::ChargeDecision;
use crate::limiter::Effect;
use crate::misuse::Misuse;
use crate::policy::Policy;

/// What the middleware did with a request, and how each policy stands.
///
/// It is in the extensions of a refused request's response, of every request and response if the layer's `expose_outcome`
/// asks for it, and in the hands of responders and of an [`Observer`].
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
    /// It was over a quota, and refused.
    Limited,
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
    /// The name in metrics and logs: `allowed`, `limited`, `exempt`, `denied`, `key_missing`, `failed_open`, `failed_closed`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Limited => "limited",
            Self::Exempt => "exempt",
            Self::Denied => "denied",
            Self::KeyMissing => "key_missing",
            Self::FailedOpen => "failed_open",
            Self::FailedClosed => "failed_closed",
        }
    }

    /// Whether the request went on to the service.
    #[must_use]
    pub fn passed(self) -> bool {
        matches!(self, Self::Allowed | Self::Exempt | Self::FailedOpen)
    }
}

/// How one policy stands after a decision.
#[derive(Clone, Debug)]
pub struct Standing {
    pub(crate) policy: Policy,
    pub(crate) cost: u64,
    pub(crate) effect: Effect,
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

    /// The policy that binds: of those that refused the one with the longest wait, else the one with the least remaining.
    #[must_use]
    pub fn binding(&self) -> Option<&Standing> {
        let refusing = self.violated().max_by_key(|standing| standing.decision.retry_us());
        refusing.or_else(|| self.standings.iter().min_by_key(|standing| standing.decision.remaining()))
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

    /// Whether this policy refused the request.
    #[must_use]
    pub fn refuses(&self) -> bool {
        self.effect == Effect::Enforce && !self.decision.is_allowed()
    }
}

/// Sees what the middleware does and what befalls a limiter. Metrics and logs are built on it.
///
/// The methods run on the request's path: they should be quick, and must not block.
pub trait Observer: Send + Sync {
    /// A request was decided.
    fn on_outcome(&self, outcome: &Outcome) {
        let _ = outcome;
    }

    /// A layer has noticed that it cannot be meant as it is set up. Told once for each layer and kind.
    fn on_misuse(&self, misuse: &Misuse) {
        let _ = misuse;
    }

    /// Something befell a limiter.
    fn on_event(&self, event: &LimiterEvent) {
        let _ = event;
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
    /// A server answers, but somebody has to mend something before it can be used: a password, a right, a URL. Told once a
    /// minute for each kind of trouble.
    StoreMisconfigured {
        /// What is wrong, and what to do.
        error: String,
    },
}
