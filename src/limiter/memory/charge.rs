//! The one step that locks, reads, decides and writes: charges of any number and of any states.

use smallvec::SmallVec;

use crate::algorithm::carry::Kept;
use crate::algorithm::{How, Pair};
use crate::decision::{ChargeDecision, Several};
use crate::key::Key;
use crate::limiter::{Charge, Refund, binds, how, outlives_refusal, stands};
use crate::policy::Policy;

use super::events::Events;
use super::locked::{INLINE, LockedSet};
use super::state::Hold;
use super::store::Store;
use super::word::{NO_STATE, Now};

impl Store {
    /// Takes one charge.
    #[inline(never)]
    pub(super) fn charge_one(&self, policy: &Policy, key: &Key, cost: u64, force: bool) -> ChargeDecision {
        let how = if force { How::Force } else { How::IfAllowed };
        let mut events = Events::of(self);
        let mut set = LockedSet::lock(self, [self.hold(policy, key)]);
        let [hold] = &mut set.holds;
        // After the lock: an older reading would look like a clock that stepped back, and rewind the state.
        let now = self.now_after();
        self.read(hold, now);
        let mut decision = self.decide(hold, now, cost, how);
        if hold.writes() {
            if self.make_room(hold, now, &mut events) {
                self.write(hold, now);
            } else if decision.is_allowed() {
                decision = events.full(&decision);
            }
        }
        decision
    }

    /// Takes all charges or none, and returns whether it took them; or, if it does not take, whether it would. The charges
    /// should be for different (policy, key) pairs.
    #[inline(never)]
    pub(super) fn charge_all(&self, charges: &[Charge<'_>], decisions: &mut Several, takes: bool) -> bool {
        decisions.clear();
        let mut events = Events::of(self);
        let mut holds: SmallVec<[Hold<'_>; INLINE]> = SmallVec::new();
        for charge in charges {
            let mut hold = self.hold(charge.policy, charge.key);
            hold.is_twice = holds.iter().any(|other| other.key == hold.key);
            holds.push(hold);
        }
        let mut set = LockedSet::lock(self, holds);
        // After the locks, as in `charge_one`.
        let now = self.now_after();
        for (at, (charge, hold)) in charges.iter().zip(&mut set.holds).enumerate() {
            self.read(hold, now);
            let how = how(charges, at, |at| is_denied(decisions, at));
            decisions.push(if hold.is_twice {
                ChargeDecision::denied(charge.policy.quota().capacity(), 0, None)
            } else {
                self.decide(hold, now, charge.cost, how)
            });
        }
        let mut allowed = is_allowed(charges, decisions);
        // Of a refused set only what its refusals count is written, or what brings a state back that is too far ahead.
        let outlives = |at, decisions: &Several| outlives_refusal(charges, at, is_denied(decisions, at));
        for (at, hold) in set.holds.iter_mut().enumerate() {
            if !takes || !allowed && !outlives(at, decisions) || !hold.writes() {
                continue;
            }
            // Room first: if there is none for one of the charges, none has been written.
            if !self.make_room(hold, now, &mut events) {
                hold.change_nothing();
                if let Some(decision) = decisions.get_mut(at).filter(|decision| decision.is_allowed()) {
                    *decision = events.full(decision);
                    allowed = is_allowed(charges, decisions);
                }
            }
        }
        for (at, hold) in set.holds.iter_mut().enumerate() {
            if takes && hold.writes() && (allowed || outlives(at, decisions)) {
                self.write(hold, now);
            }
            let Some(decision) = decisions.get(at) else { continue };
            if !allowed && stands(charges, at, !decision.is_allowed()) {
                decisions[at] = self.decide(hold, now, 0, How::IfAllowed);
            }
            if !allowed || !takes {
                decisions[at].untaken();
            }
        }
        allowed
    }

    /// Refunds what a receipt still holds.
    pub(super) fn refund(&self, refund: &Refund) {
        let receipt = &refund.receipt;
        let own = Pair { at: receipt.at_us(), n: receipt.part() };
        let mut events = Events::of(self);
        let mut set = LockedSet::lock(self, [self.hold(&refund.policy, &refund.key)]);
        let [hold] = &mut set.holds;
        let now = self.now_after();
        self.read(hold, now);
        self.decide_refund(hold, now, receipt.units(), own, &mut events);
        self.write(hold, now);
    }

    /// Forgets a key's state under a policy's name, whatever its quota was.
    pub(super) fn reset(&self, policy: &Policy, key: &Key) {
        let mut set = LockedSet::lock(self, [self.hold(policy, key)]);
        let [hold] = &mut set.holds;
        if let Some(seen) = hold.slot.take() {
            self.free_blocks(seen);
            self.table.unlock(seen.place, 0, NO_STATE);
        }
    }

    /// Replaces the state of a key by one that was kept elsewhere, if there is room.
    pub(super) fn replace(&self, hold: Hold<'_>, kept: Kept, now: Now, events: &mut Events<'_>) {
        let mut set = LockedSet::lock(self, [hold]);
        let [hold] = &mut set.holds;
        self.read(hold, now);
        self.adopt(hold, kept);
        if self.make_room(hold, now, events) {
            self.write(hold, now);
        }
    }
}

fn is_denied(decisions: &[ChargeDecision], at: usize) -> bool {
    decisions.get(at).is_some_and(|decision| !decision.is_allowed())
}

fn is_allowed(charges: &[Charge<'_>], decisions: &[ChargeDecision]) -> bool {
    (0..charges.len()).all(|at| !binds(charges, at) || !is_denied(decisions, at))
}
