//! One unit of a bucket, the usual charge, with every span as one number.
//!
//! Spans are counted in parts of `1/l` µs, so they are as exact as those of [`gcra`](super::gcra), whose answers these are.
//! What is unusual (debt, a clock that stepped back, parts that are too many for a word) is left to it.

use crate::decision::ChargeDecision;

use super::divisor::Divisor;
use super::{Answer, Next, Pair};

/// Below so many parts of a full bucket all sums here stay below 2^63, as [`Divisor`] wants it.
const PARTS_MAX: u128 = 1 << 61;

/// A bucket's interval and capacity, for charges of one unit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OneUnit {
    /// Parts of a microsecond.
    l: Divisor,
    /// Parts of an interval.
    p: Divisor,
    /// Parts of a full bucket.
    capacity: u64,
    /// The same in whole microseconds, and the parts beyond.
    capacity_us: u64,
    capacity_num: u64,
    burst: u64,
}

/// How far a state is ahead of now, or is to be: whole microseconds and parts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    pub(crate) us: u64,
    pub(crate) num: u64,
}

/// What was found.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Verdict {
    /// The backlog after the unit.
    Allowed { after: u64, ahead: Ahead },
    /// The backlog as it is, and the first microsecond at which the unit would be admitted.
    Denied { ahead: Ahead, retry_us: u64 },
}

impl OneUnit {
    /// For buckets that hold at least one unit and are not of too many parts.
    pub(crate) fn new(l: u64, p: u64, burst: u64) -> Option<Self> {
        let capacity = u128::from(burst) * u128::from(p);
        if burst == 0 || capacity + u128::from(l) >= PARTS_MAX {
            return None;
        }
        let capacity = capacity as u64; // below PARTS_MAX
        let (l, p) = (Divisor::new(l), Divisor::new(p));
        Some(Self { l, p, capacity, capacity_us: capacity / l.get(), capacity_num: capacity % l.get(), burst })
    }

    /// Decides on one unit, by a state that is so far ahead; nothing if that is unusual.
    #[inline(always)]
    pub(crate) fn look(&self, ahead: Ahead) -> Option<Verdict> {
        let l = self.l.get();
        if ahead.us > self.capacity_us || ahead.num >= l {
            return None;
        }
        let before = ahead.us * l + ahead.num; // below capacity + l
        if before > self.capacity {
            return None;
        }
        let after = before + self.p.get(); // an interval is at most the capacity
        if after > self.capacity {
            return Some(Verdict::Denied { ahead, retry_us: self.ceil_us(after - self.capacity) });
        }
        let us = self.l.floor(after);
        Some(Verdict::Allowed { after, ahead: Ahead { us, num: after - us * l } })
    }

    /// The decision.
    #[inline(always)]
    pub(crate) fn tell(&self, verdict: Verdict, now: u64) -> ChargeDecision {
        match verdict {
            Verdict::Allowed { after, ahead: Ahead { us, num } } => {
                let remaining = self.p.floor(self.capacity - after);
                let window_us = if remaining > 0 {
                    // ⌈(capacity − after) / l⌉
                    self.capacity_us - us + u64::from(self.capacity_num > num)
                } else {
                    self.ceil_us(after + self.p.get() - self.capacity)
                };
                ChargeDecision::found(self.burst, remaining, us + u64::from(num > 0), window_us, Some(0)).receipted(
                    1,
                    now + us,
                    num,
                )
            }
            // Less than an interval is left.
            Verdict::Denied { ahead: Ahead { us, num }, retry_us } => {
                ChargeDecision::found(self.burst, 0, us + u64::from(num > 0), retry_us, Some(retry_us))
            }
        }
    }

    /// Both at once, for a state that is kept in any way.
    #[inline]
    pub(crate) fn decide(&self, state: Option<Pair>, now: u64) -> Option<Answer> {
        let live = state.filter(|tail| tail.at >= now);
        let ahead = live.map_or(Ahead { us: 0, num: 0 }, |tail| Ahead { us: tail.at - now, num: tail.n });
        let verdict = self.look(ahead)?;
        let next = match verdict {
            Verdict::Allowed { ahead, .. } => Next::Set(Pair { at: now + ahead.us, n: ahead.num }),
            Verdict::Denied { .. } => Next::Keep,
        };
        Some(Answer { decision: self.tell(verdict, now), next })
    }

    #[inline]
    fn ceil_us(&self, parts: u64) -> u64 {
        self.l.floor(parts + self.l.get() - 1)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::{PairRules, Rules};
    use super::*;
    use crate::quota::Quota;

    #[test]
    fn one_unit_is_decided_as_any_other_cost_is() {
        let mut x = 0x9e37_79b9_7f4a_7c15_u64;
        let mut below = move |bound: u64| {
            x = x.wrapping_mul(0xd129_0f59_6c1d_4b4d).wrapping_add(0x1b87_3593);
            ((u128::from(x) * u128::from(bound)) >> 64) as u64
        };
        let now = 1_735_689_600_000_000;
        let mut decided = 0;
        for _ in 0..20_000 {
            let (digits, places) = (1 + below(9) as u32, 1 + below(10) as u32); // small
            let limit = 1 + below(10_u64.pow(digits));
            let period = Duration::from_micros(1 + below(10_u64.pow(places)));
            let quota = Quota::token_bucket(limit, period).and_then(|quota| quota.burst(1 + below(2 * limit)));
            let Ok(quota) = quota else { continue };
            let Rules::Pair(PairRules::Gcra(rules), _) = quota.rules() else { continue };
            let Some(unit) = rules.one_unit else { continue };
            let mut general = *rules;
            general.one_unit = None;
            for ahead in [0, 1, below(unit.capacity_us + 2), unit.capacity_us, unit.capacity_us.saturating_sub(1)] {
                let state = Some(Pair { at: now + ahead, n: below(unit.l.get() + 1) });
                for state in [None, state] {
                    let Some(answer) = unit.decide(state, now) else { continue };
                    let expected = general.decide(state, now, 1, false);
                    assert_eq!(answer.decision, expected.decision, "{quota}, {state:?}");
                    assert_eq!(answer.next, expected.next, "{quota}, {state:?}");
                    decided += 1;
                }
            }
        }
        assert!(decided > 100_000, "{decided} were compared");
    }
}
