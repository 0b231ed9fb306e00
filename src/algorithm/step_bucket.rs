//! Token bucket with stepwise refill.
//!
//! # 1 Definition and laws
//!
//! At each tick, `limit` tokens are added, up to the capacity `burst`. There is one tick in each `period`. No
//! timer adds the tokens: each decision computes how many have been added. Ticks lie at whole multiples of the
//! period since the Unix epoch, or are counted from the key's first request after rest. A tick at exactly now has
//! already happened.
//!
//! A step bucket guarantees at most `burst + limit·ticks` units in any interval that contains `ticks` ticks, and
//! exactly `burst` units at once for a key at rest.
//!
//! # 2 Parameters
//!
//! The tokens per tick, the time between ticks in microseconds, and the capacity. All three parameters
//! are whole numbers, and no computation is rounded.
//!
//! # 3 State
//!
//! A [`Pair`]: the tick at which the bucket will be full again, and how many tokens of this last tick will find no
//! room. If this tick is the `j`th from now, `j·limit − spare` tokens are missing now. A full bucket needs no state,
//! and therefore forgets its anchor.

use crate::decision::ChargeDecision;
use crate::quota::spec::{Anchor, Spec};

use super::state::{Layout, Next, Pair, PairAlgorithm, Transition, bits};
#[cfg(feature = "_redis")]
use super::state::{LuaNumbers, UNBOUNDED, numbers};
use super::used::{Carried, Dated, Used};

/// Decides by a token bucket that is refilled in steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepBucket {
    /// Tokens per tick; 0 closes the quota.
    tokens: u64,
    tick_us: u64,
    burst: u64,
    debt: u64,
    anchor: Anchor,
}

/// The units that are missing now, and the time of the next tick.
#[derive(Clone, Copy)]
struct Level {
    missing: u64,
    next_tick: u64,
    clamped: bool,
}

impl StepBucket {
    pub(crate) fn new(spec: &Spec) -> Self {
        Self { tokens: spec.limit, tick_us: spec.period_us, burst: spec.burst, debt: spec.debt, anchor: spec.anchor }
    }

    pub(crate) fn layout(&self) -> Layout {
        let grid = (self.anchor == Anchor::Epoch).then_some(self.tick_us);
        let ticks = (self.burst + self.debt).div_ceil(self.tokens.max(1));
        Layout::of(bits(self.tokens.saturating_sub(1)), grid, ticks.saturating_mul(self.tick_us))
    }

    // Ticks ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    fn level(&self, state: Option<Pair>, now: u64) -> Level {
        let rest = Level {
            missing: 0,
            next_tick: match self.anchor {
                Anchor::Epoch => now - now % self.tick_us + self.tick_us,
                Anchor::FirstRequest => now + self.tick_us,
            },
            clamped: false,
        };
        let Some(full) = state.filter(|full| full.at > now) else {
            return rest;
        };
        let ticks = (full.at - now).div_ceil(self.tick_us);
        // If another quota wrote the state, the state's number may be larger than the number of units that a tick of
        // this quota adds. Therefore the subtraction saturates at 0.
        let missing = (u128::from(ticks) * u128::from(self.tokens)).saturating_sub(u128::from(full.n));
        match u64::try_from(missing) {
            Ok(missing) if missing <= self.burst + self.debt => {
                Level { missing, next_tick: full.at - (ticks - 1) * self.tick_us, clamped: false }
            }
            // With the largest debt, the stored instant is not so far ahead of the clock. So the clock stepped
            // back.
            _ => Level { missing: self.burst + self.debt, clamped: true, ..rest },
        }
    }

    fn store(&self, level: Level) -> Next {
        if level.missing == 0 || self.tokens == 0 {
            return Next::Clear;
        }
        let ticks = level.missing.div_ceil(self.tokens);
        Next::Set(Pair { at: level.next_tick + (ticks - 1) * self.tick_us, n: ticks * self.tokens - level.missing })
    }

    /// Returns the time in microseconds until ticks have added `units`.
    fn wait(&self, level: Level, now: u64, units: u64) -> u64 {
        match units.div_ceil(self.tokens.max(1)) {
            0 => 0,
            ticks => level.next_tick - now + (ticks - 1) * self.tick_us,
        }
    }

    fn describe(&self, level: Level, now: u64, retry_us: Option<u64>) -> ChargeDecision {
        let remaining = self.burst.saturating_sub(level.missing);
        let window_us = match retry_us {
            Some(wait) if wait > 0 => wait,
            _ if self.burst == 0 => 0,
            _ if remaining == 0 => self.wait(level, now, level.missing + 1 - self.burst),
            _ => level.next_tick - now,
        };
        let reset_us = self.wait(level, now, level.missing);
        ChargeDecision::found(self.burst, remaining, reset_us, window_us, retry_us)
    }
}

impl PairAlgorithm for StepBucket {
    fn decide(&self, state: Option<Pair>, now: u64, cost: u64, force: bool) -> Transition {
        let level = self.level(state, now);
        let kept = if level.clamped && cost > 0 { self.store(level) } else { Next::Keep };
        let deny = |retry_us| Transition { decision: self.describe(level, now, retry_us), next: kept };
        if cost > self.burst && !force {
            return deny(None);
        }
        let mut missing = level.missing.saturating_add(cost);
        if missing > self.burst {
            if !force && cost > 0 {
                return deny(Some(self.wait(level, now, missing - self.burst)));
            }
            missing = missing.min(self.burst + self.debt);
        }
        let after = Level { missing, ..level };
        let decision = self.describe(after, now, Some(0));
        if cost == 0 {
            return Transition { decision, next: kept };
        }
        let next = self.store(after);
        let Next::Set(full) = next else {
            return Transition { decision, next }; // a closed quota: nothing was taken
        };
        // The state does not keep units beyond the allowed debt, so the receipt does not hold them either.
        Transition { decision: decision.receipted(missing - level.missing, full.at, full.n), next }
    }

    /// Refunds the units of a charge that no tick has refilled yet. `own` says when the bucket was to be full again
    /// after the charge.
    fn refund(&self, state: Pair, now: u64, units: u64, own: Pair) -> Next {
        let level = self.level(Some(state), now);
        let left = self.level(Some(own), now).missing;
        match units.min(left).min(level.missing) {
            0 => Next::Keep,
            given => self.store(Level { missing: level.missing - given, ..level }),
        }
    }

    #[cfg(any(feature = "_redis", feature = "store"))]
    fn own_without(&self, own: Pair, units: u64) -> Pair {
        let (spare, tokens) = (own.n.saturating_add(units), self.tokens.max(1));
        Pair { at: own.at.saturating_sub((spare / tokens).saturating_mul(self.tick_us)), n: spare % tokens }
    }

    #[cfg(feature = "_redis")]
    fn numbers(&self, cost: u64, force: bool) -> LuaNumbers {
        let most = self.burst + self.debt;
        let bound = if force || cost == 0 { UNBOUNDED } else { self.burst };
        let epoch = u64::from(self.anchor == Anchor::Epoch);
        numbers(&[cost.min(most + 1), bound, most, self.tokens, self.tick_us, epoch])
    }

    fn carried(&self, state: Pair, now: u64, sliced: bool) -> Carried {
        let level = self.level(Some(state), now);
        let back = now + self.wait(level, now, level.missing);
        let mut carried = Carried::new(Used::units(level.missing), [Dated::new(None, back, level.missing)]);
        carried.tick = Some(level.next_tick.saturating_sub(self.tick_us));
        let full = self.store(level).state();
        if sliced { carried.sliced(now, |later| self.level(full, later).missing) } else { carried }
    }

    /// Keeps the ticks of the old quota if the old quota is a step bucket and this quota's ticks count
    /// from the first request.
    fn take_over(&self, carried: &Carried, now: u64) -> Option<Pair> {
        let mut level =
            Level { missing: carried.used.units_ceil().min(self.burst + self.debt), ..self.level(None, now) };
        if let (Anchor::FirstRequest, Some(last)) = (self.anchor, carried.tick) {
            level.next_tick = last + (now.saturating_sub(last) / self.tick_us + 1) * self.tick_us;
        }
        self.store(level).state()
    }

    fn most(&self) -> u64 {
        self.burst + self.debt
    }

    /// If units of another quota are freed later than this time from now, even a denied charge writes the
    /// converted state.
    fn longest_us(&self, _now: u64) -> u64 {
        (self.burst + self.debt).div_ceil(self.tokens.max(1)).saturating_mul(self.tick_us)
    }

    fn could_be(&self, state: Pair) -> bool {
        state.n < self.tokens && (self.anchor == Anchor::FirstRequest || state.at % self.tick_us == 0)
    }

    /// Whether a decision at `now` would move this state's instant back.
    fn is_clamped(&self, state: Pair, now: u64) -> bool {
        self.level(Some(state), now).clamped
    }
}
