//! Actions that take nothing, and what they write all the same. The tests of both limiters share
//! this table.
//!
//! The including module has the types of quotas: the crate's own tests name them otherwise.

use std::time::Duration;

use super::{Algorithm, Anchor, Oldest, Quota};

const MINUTE: Duration = Duration::from_secs(60);

/// Returns quotas of each algorithm whose units come back with time, one for each layout of its state.
pub(super) fn plans(limit: u64) -> Vec<Quota> {
    let timed = Algorithm::ALL.iter().filter(|algorithm| **algorithm != Algorithm::Concurrency);
    timed.flat_map(|algorithm| plans_of(*algorithm, limit)).collect()
}

fn plans_of(algorithm: Algorithm, limit: u64) -> Vec<Quota> {
    match algorithm {
        Algorithm::TokenBucket => vec![
            Quota::token_bucket(limit, MINUTE).unwrap(),
            // Its states do not fit a word.
            Quota::token_bucket(limit * 4_001, Duration::from_micros(240_060_000_001))
                .and_then(|plan| plan.burst(limit))
                .unwrap(),
        ],
        // Its state drains sooner than the units of the other plan expire.
        Algorithm::Gcra => vec![Quota::gcra(limit, MINUTE).and_then(|plan| plan.max_debt(20)).unwrap()],
        Algorithm::LeakyBucket => vec![Quota::leaky_bucket(limit, MINUTE).unwrap()],
        Algorithm::LeakyQueue => vec![Quota::leaky_queue(limit, MINUTE).unwrap()],
        Algorithm::StepBucket => with_each_anchor(Quota::step_bucket(limit, MINUTE).unwrap()),
        Algorithm::FixedWindow => with_each_anchor(Quota::fixed_window(limit, MINUTE).unwrap()),
        Algorithm::SlidingWindow => {
            let window = Quota::sliding_window(limit, MINUTE).unwrap();
            vec![window, window.oldest(Oldest::Counted).unwrap(), window.buckets(6).unwrap()]
        }
        Algorithm::SlidingLog => vec![Quota::sliding_log(limit, MINUTE).unwrap()],
        Algorithm::Block => vec![Quota::block(limit, MINUTE, MINUTE).unwrap()],
        Algorithm::Meter => vec![Quota::meter(limit, MINUTE).unwrap()],
        #[allow(unreachable_patterns, reason = "the crate's own tests know all of them")]
        other => panic!("add a quota to `plans_of` in tests/support/idle.rs: {other}"),
    }
}

fn with_each_anchor(quota: Quota) -> Vec<Quota> {
    vec![quota, quota.anchor(Anchor::FirstRequest).unwrap()]
}

/// An action that takes nothing. Every key has one unit left, so a cost of 2 is denied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Action {
    Peek,
    PeekOfTooMuch,
    PeekOfSet,
    Look,
    ForcedLook,
    LookInTakenSet,
    LookAfterClockSteppedBack,
    ObservedDenial,
    ObservedDenialInTakenSet,
    TakeInRefusedSet,
    LateRefund,
    RefundOfNoUnits,
    DeniedTake,
    DeniedTakeAfterClockSteppedBack,
    OnRefusalOfAllowed,
    OnRefusalOfObserved,
    OnRefusalOfRefused,
}

use Action::*;

pub(super) const ACTIONS: [Action; 17] = [
    Peek,
    PeekOfTooMuch,
    PeekOfSet,
    Look,
    ForcedLook,
    LookInTakenSet,
    LookAfterClockSteppedBack,
    ObservedDenial,
    ObservedDenialInTakenSet,
    TakeInRefusedSet,
    LateRefund,
    RefundOfNoUnits,
    DeniedTake,
    DeniedTakeAfterClockSteppedBack,
    OnRefusalOfAllowed,
    OnRefusalOfObserved,
    OnRefusalOfRefused,
];

/// The effect on a key's state of an action that takes nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Write {
    Nothing,
    Because(&'static str),
}

const DENIED: Write = Write::Because("the quota counts denied requests");
const AHEAD: Write = Write::Because("the state lies further ahead than its quota can put it, and would stay there");
const REFUSAL: Write = Write::Because("a refusal is what the quota counts");

/// The effect of an action on a state of this quota. An exception that is not listed here is a bug.
pub(super) fn expected(quota: &Quota, action: Action) -> Write {
    match action {
        DeniedTake | DeniedTakeAfterClockSteppedBack | ObservedDenial | ObservedDenialInTakenSet
            if quota.counts_denied() =>
        {
            DENIED
        }
        DeniedTakeAfterClockSteppedBack => AHEAD,
        OnRefusalOfObserved | OnRefusalOfRefused if counts_refusals(quota) => REFUSAL,
        _ => Write::Nothing,
    }
}

pub(super) fn counts_refusals(quota: &Quota) -> bool {
    matches!(quota.algorithm(), Algorithm::Block | Algorithm::Meter)
}

/// A quota for each kind of state, with five units in a minute.
pub(super) fn kinds() -> Vec<Quota> {
    let windows = [Quota::fixed_window(5, MINUTE), Quota::sliding_window(5, MINUTE), Quota::sliding_log(5, MINUTE)];
    let counting = windows.into_iter().map(|quota| quota.and_then(Quota::count_denied).unwrap());
    let more = [
        Quota::fixed_window(5, MINUTE).and_then(|quota| quota.anchor(Anchor::FirstRequest)?.count_denied()),
        Quota::sliding_window(5, MINUTE).and_then(|quota| quota.buckets(6)?.count_denied()),
        Quota::block(5, MINUTE, MINUTE).and_then(Quota::count_denied),
    ];
    // A bucket for one unit has no state when one unit is left.
    let plans = plans(5).into_iter().filter(|quota| quota.capacity() > 1);
    plans.chain(counting).chain(more.into_iter().map(Result::unwrap)).collect()
}
