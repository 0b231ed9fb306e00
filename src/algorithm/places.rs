//! Concurrency limit: units that requests hold while they are in flight.
//!
//! # 1 Definition and laws
//!
//! A charge takes its units if at most `limit` units are held afterwards. The refund of the charge returns its
//! units, once. Only refunds return units, because this algorithm reads no time. A forced charge takes its units
//! even if more than `limit` units are held afterwards.
//!
//! A concurrency limit guarantees that at most `limit` units are held at any instant, except through forced charges.
//! If the limit is lowered below the number of held units, no charge is admitted until enough units have been
//! returned.
//!
//! # 2 Parameters
//!
//! The limit.
//!
//! # 3 State
//!
//! The number of units that are held. The number does not depend on the limit, so a changed quota needs no
//! conversion.

use crate::base::wait::Wait;
use crate::decision::ChargeDecision;
use crate::quota::spec::Spec;

use super::state::TakeMode;

/// The maximum number of units that can be held. Forced charges take no more.
pub(crate) const HELD_MAX: u64 = (1 << 40) - 2;

const _: () = assert!(crate::quota::spec::PLACES_MAX <= HELD_MAX, "requests can hold all units of the largest limit");

/// The result of a charge, from which [`Places::describe`] makes the decision.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PlacesVerdict {
    Admitted {
        remaining: u64,
        taken: u64,
    },
    Denied {
        remaining: u64,
        /// Whether the charge can never be admitted, because its cost is above the limit.
        for_good: bool,
    },
}

/// Decides by a concurrency limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    limit: u64,
}

impl Places {
    pub(crate) fn new(spec: &Spec) -> Self {
        Self { limit: spec.limit }
    }

    /// Returns the result of a charge of `cost` while `held` units are held. [`describe`](Self::describe) turns the
    /// result into a decision. [`Gcra::look`](super::gcra::Gcra::look) says why `look` and `describe` are two
    /// functions.
    #[inline]
    pub(crate) fn look(self, held: u64, cost: u64, how: TakeMode) -> PlacesVerdict {
        let (cost, force) = how.plainly(cost);
        let left = self.limit.saturating_sub(held);
        if cost > left && !force {
            return PlacesVerdict::Denied { remaining: left, for_good: cost > self.limit };
        }
        let taken = cost.min(HELD_MAX.saturating_sub(held));
        PlacesVerdict::Admitted { remaining: left.saturating_sub(taken), taken }
    }

    /// Returns the decision about a charge that the limit allows, if there is no room to store the holder of its
    /// units. Only a forced charge is then admitted, and it takes no units.
    #[cfg(any(feature = "_redis", feature = "store"))]
    pub(crate) fn decide_without_room(self, held: u64, how: TakeMode) -> ChargeDecision {
        let left = self.limit.saturating_sub(held);
        match how.plainly(0) {
            (_, true) => ChargeDecision::allowed(self.limit, left),
            (_, false) => ChargeDecision::denied(self.limit, left, Wait::Unknown),
        }
    }

    #[cfg(any(feature = "_redis", feature = "store"))]
    pub(crate) fn limit(self) -> u64 {
        self.limit
    }

    /// Returns the decision on a charge. The receipt of an admitted charge holds `run`, the number
    /// of the key's run of held units. The run ends when no unit is held any more, or with a reset
    /// of the key.
    #[inline]
    pub(crate) fn describe(self, verdict: PlacesVerdict, run: u64) -> ChargeDecision {
        match verdict {
            PlacesVerdict::Admitted { remaining, taken } => {
                ChargeDecision::allowed(self.limit, remaining).receipted(taken, run, 0)
            }
            PlacesVerdict::Denied { remaining, for_good } => {
                let wait = if for_good { Wait::Never } else { Wait::Unknown };
                ChargeDecision::denied(self.limit, remaining, wait)
            }
        }
    }

    /// Returns the result of a charge while an earlier request waits in line. All free units are for that
    /// request, so only a forced charge takes units.
    pub(crate) fn hold_back(self, held: u64, cost: u64, how: TakeMode) -> PlacesVerdict {
        match how.plainly(cost) {
            (_, true) => self.look(held, cost, how),
            (cost, false) => self.look(held.max(self.limit), cost, TakeMode::IfAllowed),
        }
    }
}

impl PlacesVerdict {
    /// Returns how many units the charge takes.
    #[inline]
    pub(crate) fn taken(self) -> u64 {
        match self {
            Self::Admitted { taken, .. } => taken,
            Self::Denied { .. } => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::sampling::config;
    use crate::quota::Quota;

    fn places(limit: u64) -> Places {
        Places::new(Quota::concurrent(limit).spec())
    }

    fn described(limit: u64, verdict: PlacesVerdict) -> (bool, u64, Wait, u64) {
        let decision = places(limit).describe(verdict, 0);
        assert_eq!(decision.taken(), verdict.taken());
        (decision.is_allowed(), decision.remaining(), decision.wait(), decision.taken())
    }

    fn decide(limit: u64, held: u64, cost: u64) -> (bool, u64, Wait, u64) {
        described(limit, places(limit).look(held, cost, TakeMode::IfAllowed))
    }

    #[test]
    fn concurrency_limit_answers_at_its_bounds() {
        for ((limit, held, cost), answer) in [
            ((3, 0, 1), (true, 2, Wait::None, 1)),
            ((3, 0, 3), (true, 0, Wait::None, 3)),
            ((3, 0, 4), (false, 3, Wait::Never, 0)),
            ((3, 2, 2), (false, 1, Wait::Unknown, 0)),
            ((3, 3, 1), (false, 0, Wait::Unknown, 0)),
            ((3, 3, 0), (true, 0, Wait::None, 0)),
            ((3, 5, 1), (false, 0, Wait::Unknown, 0)),
            ((0, 0, 1), (false, 0, Wait::Never, 0)),
            ((0, 0, 0), (true, 0, Wait::None, 0)),
            ((3, 0, u64::MAX), (false, 3, Wait::Never, 0)),
        ] {
            assert_eq!(decide(limit, held, cost), answer, "{cost} of {limit} while {held} are held");
        }
    }

    #[test]
    fn charge_that_is_held_back_finds_nothing_left() {
        for (held, cost, how, answer) in [
            (0, 1, TakeMode::IfAllowed, (false, 0, Wait::Unknown, 0)),
            (0, 4, TakeMode::IfAllowed, (false, 0, Wait::Never, 0)),
            (0, 0, TakeMode::IfAllowed, (true, 0, Wait::None, 0)),
            (1, 1, TakeMode::Force, (true, 1, Wait::None, 1)),
        ] {
            assert_eq!(described(3, places(3).hold_back(held, cost, how)), answer, "{cost} while {held} are held");
        }
    }

    #[test]
    fn forced_charge_holds_more_than_the_limit() {
        let forced = |held, cost| {
            let (is_allowed, remaining, _, taken) = described(3, places(3).look(held, cost, TakeMode::Force));
            (is_allowed, remaining, taken)
        };
        assert_eq!(forced(2, 2), (true, 0, 2));
        assert_eq!(forced(9, 1), (true, 0, 1));
        assert_eq!(forced(9, u64::MAX), (true, 0, HELD_MAX - 9));
        assert_eq!(forced(HELD_MAX, 1), (true, 0, 0));
    }

    #[test]
    fn concurrency_limit_reports_no_times() {
        for (held, cost) in [(0, 1), (3, 1), (0, 9)] {
            let decision = places(3).describe(places(3).look(held, cost, TakeMode::IfAllowed), 0);
            assert_eq!((decision.reset_after(), decision.effective_window()), (None, None), "{held} {cost}");
        }
    }

    proptest! {
        #![proptest_config(config(5_000))]

        /// Against the definition: what is held is the sum of the receipts that were not returned.
        #[test]
        fn held_units_are_the_receipts_that_were_not_returned(
            steps in prop::collection::vec((0..4_u8, 0..8_u64, 0..8_u64), 1..60),
        ) {
            let mut receipts: Vec<u64> = Vec::new();
            let mut limit = 5;
            for (what, a, b) in steps {
                let held: u64 = receipts.iter().sum();
                match what {
                    0 | 1 => {
                        let (is_allowed, remaining, _, taken) = decide(limit, held, a);
                        let fits = a == 0 || held + a <= limit;
                        prop_assert_eq!((is_allowed, taken), (fits, if fits { a } else { 0 }));
                        prop_assert_eq!(remaining, limit.saturating_sub(held + taken));
                        receipts.push(taken);
                    }
                    2 => drop(receipts.get(a as usize).is_some().then(|| receipts.remove(a as usize))),
                    _ => limit = b,
                }
            }
        }
    }
}
