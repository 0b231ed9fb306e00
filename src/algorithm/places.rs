//! Concurrency limit: units that requests hold while they are in flight.
//!
//! # 1 Definition and laws
//!
//! A charge takes its units if at most `limit` are held then. Its refund returns them, once. Nothing else returns
//! units: there is no clock. A forced charge takes its units although more than `limit` are held then.
//!
//! It guarantees: without forced charges, at no instant more than `limit` units are held. If the limit becomes lower
//! than what is held, no charge is admitted until enough was returned.
//!
//! # 2 Parameters
//!
//! The limit.
//!
//! # 3 State
//!
//! The number of units that are held. It does not depend on the limit, so a changed quota converts nothing.

use crate::decision::ChargeDecision;
use crate::quota::spec::Spec;
use crate::wait::Wait;

use super::state::How;

/// The most units that can be held. Forced charges take no more.
pub(crate) const HELD_MAX: u64 = (1 << 40) - 2;

const _: () = assert!(crate::quota::spec::PLACES_MAX <= HELD_MAX, "the largest limit can be held");

/// Quotas of units that are held.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    limit: u64,
}

impl Places {
    pub(crate) fn new(spec: &Spec) -> Self {
        Self { limit: spec.limit }
    }

    /// Returns the decision about `cost` while `held` units are held, without a receipt, and how many units it takes.
    #[inline]
    pub(crate) fn decide(self, held: u64, cost: u64, how: How) -> (ChargeDecision, u64) {
        let (cost, force) = how.plainly(cost);
        let left = self.limit.saturating_sub(held);
        if cost > left && !force {
            let wait = if cost > self.limit { Wait::Never } else { Wait::Unknown };
            return (ChargeDecision::denied(self.limit, left, wait), 0);
        }
        let taken = cost.min(HELD_MAX.saturating_sub(held));
        (ChargeDecision::allowed(self.limit, left.saturating_sub(taken)), taken)
    }

    /// Returns the decision about a charge that fits, if there is no room to note who holds its units: only a forced
    /// charge is admitted, and nothing is taken.
    #[cfg(any(feature = "_redis", feature = "store"))]
    pub(crate) fn decide_without_room(self, held: u64, how: How) -> ChargeDecision {
        let left = self.limit.saturating_sub(held);
        match how.plainly(0) {
            (_, true) => ChargeDecision::allowed(self.limit, left),
            (_, false) => ChargeDecision::denied(self.limit, left, Wait::Unknown),
        }
    }

    #[cfg(feature = "store")]
    pub(crate) fn limit(self) -> u64 {
        self.limit
    }

    /// Returns the decision about `cost` while a request that came before waits in line, as [`decide`](Self::decide):
    /// no units are left. Only a forced charge takes its units.
    pub(crate) fn hold_back(self, held: u64, cost: u64, how: How) -> (ChargeDecision, u64) {
        match how.plainly(cost) {
            (_, true) => self.decide(held, cost, how),
            (cost, false) => self.decide(held.max(self.limit), cost, How::IfAllowed),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::quota::Quota;
    use crate::sampling::config;

    fn places(limit: u64) -> Places {
        Places::new(Quota::concurrent(limit).spec())
    }

    fn decide(limit: u64, held: u64, cost: u64) -> (bool, u64, Wait, u64) {
        let (decision, taken) = places(limit).decide(held, cost, How::IfAllowed);
        (decision.is_allowed(), decision.remaining(), decision.wait(), taken)
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
            (0, 1, How::IfAllowed, (false, 0, Wait::Unknown, 0)),
            (0, 4, How::IfAllowed, (false, 0, Wait::Never, 0)),
            (0, 0, How::IfAllowed, (true, 0, Wait::None, 0)),
            (1, 1, How::Force, (true, 1, Wait::None, 1)),
        ] {
            let (decision, taken) = places(3).hold_back(held, cost, how);
            let found = (decision.is_allowed(), decision.remaining(), decision.wait(), taken);
            assert_eq!(found, answer, "{cost} while {held} are held");
        }
    }

    #[test]
    fn forced_charge_holds_more_than_the_limit() {
        let forced = |held, cost| {
            let (decision, taken) = places(3).decide(held, cost, How::Force);
            (decision.is_allowed(), decision.remaining(), taken)
        };
        assert_eq!(forced(2, 2), (true, 0, 2));
        assert_eq!(forced(9, 1), (true, 0, 1));
        assert_eq!(forced(9, u64::MAX), (true, 0, HELD_MAX - 9));
        assert_eq!(forced(HELD_MAX, 1), (true, 0, 0));
    }

    #[test]
    fn concurrency_limit_reports_no_times() {
        for (held, cost) in [(0, 1), (3, 1), (0, 9)] {
            let (decision, _) = places(3).decide(held, cost, How::IfAllowed);
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
                        let (decision, taken) = places(limit).decide(held, a, How::IfAllowed);
                        let fits = a == 0 || held + a <= limit;
                        prop_assert_eq!((decision.is_allowed(), taken), (fits, if fits { a } else { 0 }));
                        prop_assert_eq!(decision.remaining(), limit.saturating_sub(held + taken));
                        receipts.push(taken);
                    }
                    2 => drop(receipts.get(a as usize).is_some().then(|| receipts.remove(a as usize))),
                    _ => limit = b,
                }
            }
        }
    }
}
