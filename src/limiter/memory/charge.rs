//! The step that locks, reads, decides and writes, for any number of charges and any states.

use smallvec::SmallVec;

use crate::algorithm::carry::NewState;
use crate::algorithm::{Decider, Pair, TakeMode};
use crate::base::order::sort_indices;
use crate::base::sync::{Ordering, contained};
use crate::base::time::Timestamp;
use crate::base::wait::Wait;
use crate::decision::{ChargeDecision, Receipt, Several};
use crate::key::Key;
use crate::limiter::queue_refunds::is_queue;
use crate::limiter::{Charge, Refund, binds, how, outlives_refusal, stands};
use crate::policy::Policy;

use super::events::PendingEvents;
use super::locked::{INLINE, LockedSet, MANY};
use super::locked_key::LockedKey;
use super::slot_table::Fingerprint;
use super::states::States;
use super::word::Now;

/// The table has to grow before this key gets a slot.
struct NoRoom(Fingerprint);

impl States {
    /// Takes one charge.
    #[inline(never)]
    pub(super) fn charge_one(&self, charge: Charge<'_>) -> ChargeDecision {
        let how = how(&[charge], 0, |_| false);
        let mut events = PendingEvents::of(self);
        let hold = || self.hold(charge.policy, charge.key);
        let decide = |hold: &mut LockedKey<'_>, now| {
            self.look_for_line(hold, &charge);
            self.decide(hold, now, charge.cost, how)
        };
        events.is_contained = holds_units(&charge);
        let (decision, has_room) = self.update(hold, &mut events, decide);
        if has_room || !decision.is_allowed() { decision } else { events.full(&decision) }
    }

    /// Notes whether an earlier request waits in line for the units of this charge. The key's slot or stripe must be
    /// locked.
    #[inline]
    fn look_for_line(&self, hold: &mut LockedKey<'_>, charge: &Charge<'_>) {
        hold.is_held_back = holds_units(charge) && self.place_lines.holds_back(charge);
    }

    /// Locks and reads the state of a key, calls `decide`, and writes the change if there is room for it. Returns what
    /// `decide` returns, and whether there was room. `hold` and `decide` are called again if the table has to grow.
    #[inline(always)]
    fn update<'a, T>(
        &'a self,
        hold: impl Fn() -> LockedKey<'a>,
        events: &mut PendingEvents<'_>,
        mut decide: impl FnMut(&mut LockedKey<'_>, Now) -> T,
    ) -> (T, bool) {
        self.go_on_growing();
        loop {
            let mut holds = [hold()];
            let set = LockedSet::lock(self, &mut holds);
            let [hold] = set.holds;
            // Reads the clock after the lock, because an older reading would look like a clock that stepped back,
            // and rewind the state.
            let now = self.now_after();
            self.read(hold, now);
            let decided = decide(hold, now);
            let has_room = self.make_room(hold, now, events);
            if !hold.awaits_growth {
                self.write(hold, now);
                return (decided, has_room);
            }
            let key = hold.key;
            drop(set);
            self.grow_for(key);
        }
    }

    /// Does what [`update`](Self::update) does. This is compiled only once, for all that is rare.
    #[inline(never)]
    fn update_rarely<'a>(
        &'a self,
        hold: &dyn Fn() -> LockedKey<'a>,
        events: &mut PendingEvents<'_>,
        change: &dyn Fn(&mut LockedKey<'_>),
    ) -> bool {
        self.update(hold, events, |hold, _| change(hold)).1
    }

    /// Takes all charges or none, and returns whether it took them. If `takes` is false, nothing is taken, and
    /// the result says whether all charges would be taken. The charges should be for different (policy, key)
    /// pairs.
    #[inline(never)]
    pub(super) fn charge_all(&self, charges: &[Charge<'_>], decisions: &mut Several, takes: bool) -> bool {
        self.go_on_growing();
        let mut events = PendingEvents::of(self);
        events.is_contained = charges.iter().any(holds_units);
        loop {
            match self.try_charge_all(charges, decisions, takes, &mut events) {
                Ok(allowed) => return allowed,
                Err(NoRoom(key)) => {
                    self.grow_for(key);
                    // Splits at most `charges.len()` lines of the table, and then tries the whole set again. With fewer
                    // splits, each try of a large set would find room for only a few more new keys.
                    self.grow_for_set(charges.len());
                }
            }
        }
    }

    /// Does what [`charge_all`](Self::charge_all) does, or nothing if the table has to grow for one of the keys.
    fn try_charge_all(
        &self,
        charges: &[Charge<'_>],
        decisions: &mut Several,
        takes: bool,
        events: &mut PendingEvents<'_>,
    ) -> Result<bool, NoRoom> {
        decisions.clear();
        let mut holds: SmallVec<[LockedKey<'_>; INLINE]> = SmallVec::new();
        let has_many = charges.len() > MANY;
        for charge in charges {
            let mut hold = self.hold(charge.policy, charge.key);
            hold.is_twice = !has_many && holds.iter().any(|other| other.key == hold.key);
            holds.push(hold);
        }
        if has_many {
            mark_repeated(&mut holds);
        }
        let set = LockedSet::lock(self, holds.as_mut_slice());
        // Reads the clock after the locks, as in `update`.
        let now = self.now_after();
        for (at, (charge, hold)) in charges.iter().zip(set.holds.iter_mut()).enumerate() {
            self.read(hold, now);
            self.look_for_line(hold, charge);
            let how = how(charges, at, |at| is_denied(decisions, at));
            decisions.push(if hold.is_twice {
                ChargeDecision::denied(charge.policy.quota().capacity(), 0, Wait::Never)
            } else {
                self.decide(hold, now, charge.cost, how)
            });
        }
        let mut allowed = is_allowed(charges, decisions);
        // A refused set writes only the counts of its refusals, and corrections of states that are too far ahead.
        let outlives = |at, decisions: &Several| outlives_refusal(charges, at, is_denied(decisions, at));
        for (at, hold) in set.holds.iter_mut().enumerate() {
            if !takes || !allowed && !outlives(at, decisions) {
                hold.change_nothing();
            }
            // Makes room for all charges before it writes one, so that nothing is written if one of the charges finds
            // no room.
            if !self.make_room(hold, now, events) {
                if hold.awaits_growth {
                    return Err(NoRoom(hold.key));
                }
                if let Some(decision) = decisions.get_mut(at).filter(|decision| decision.is_allowed()) {
                    *decision = events.full(decision);
                    allowed = is_allowed(charges, decisions);
                }
            }
        }
        for (at, hold) in set.holds.iter_mut().enumerate() {
            if allowed || outlives(at, decisions) {
                self.write(hold, now);
            }
            debug_assert!(at < decisions.len(), "each charge was decided");
            let Some(decision) = decisions.get(at) else { continue };
            if !allowed && stands(charges, at, !decision.is_allowed()) {
                decisions[at] = self.decide(hold, now, 0, TakeMode::IfAllowed);
            }
            if !allowed || !takes {
                decisions[at].untaken();
            }
        }
        Ok(allowed)
    }

    /// Refunds what a receipt still holds.
    #[inline]
    pub(super) fn refund(&self, policy: &Policy, key: &Key, receipt: &Receipt) {
        if let Decider::Places(_) = policy.quota().decider() {
            self.release(policy, key, receipt);
        } else if is_queue(policy.quota()) {
            self.refund_in_order(policy, key, receipt);
        } else {
            self.refund_once(policy, key, receipt);
        }
    }

    /// Refunds a queue's slot, or keeps the refund until the refunds of the later slots are made.
    fn refund_in_order(&self, policy: &Policy, key: &Key, receipt: &Receipt) {
        let queue = self.fingerprint(policy, key);
        let receipt = Receipt::new(receipt.units(), receipt.at_us(), receipt.part());
        if !self.queue_refunds.add(queue, Refund::new(policy.clone(), key.clone(), receipt), ()) {
            return; // another thread makes it
        }
        while let Some((refund, _)) = self.queue_refunds.next(queue) {
            // The next refund is made even if the observer or the clock panics.
            contained(|| {
                if self.refund_once(&refund.policy, &refund.key, &refund.receipt) {
                    self.queue_refunds.keep(queue, refund, Timestamp::from_micros(self.now_after().at));
                }
            });
        }
    }

    /// Refunds what a receipt still holds, under the slot's lock. Returns `true` if the refund had no effect yet,
    /// because a later slot of the queue is taken.
    #[inline(never)]
    pub(super) fn refund_once(&self, policy: &Policy, key: &Key, receipt: &Receipt) -> bool {
        let own = Pair { at: receipt.at_us(), n: receipt.part() };
        let decide = |hold: &mut LockedKey<'_>, now| self.decide_refund(hold, now, receipt.units(), own);
        self.update(|| self.hold(policy, key), &mut PendingEvents::of(self), decide).0
    }

    /// Forgets a key's state under a policy's name, for all quotas of that name.
    pub(super) fn reset(&self, policy: &Policy, key: &Key) {
        if let Decider::Places(_) = policy.quota().decider() {
            // Raises the counter before the slot is locked, so that the next run of held units in this slot gets
            // another number.
            self.resets.fetch_add(1, Ordering::Relaxed);
        }
        self.queue_refunds.forget(self.fingerprint(policy, key));
        self.update_rarely(&|| self.hold(policy, key), &mut PendingEvents::of(self), &|hold| hold.clear());
        self.place_lines.wake_first(policy, key);
    }

    /// Replaces the state of a key with a state that was kept elsewhere. Returns whether there was room.
    pub(super) fn replace<'a>(
        &'a self,
        hold: &dyn Fn() -> LockedKey<'a>,
        kept: &NewState,
        events: &mut PendingEvents<'_>,
    ) -> bool {
        self.update_rarely(hold, events, &|hold| hold.adopt(kept.clone()))
    }
}

/// Marks the charges of keys that an earlier charge has.
#[cold]
fn mark_repeated(holds: &mut [LockedKey<'_>]) {
    let key = |at: usize| holds.get(at).map(|hold| hold.key.bits());
    let mut order: Vec<usize> = (0..holds.len()).collect();
    sort_indices(&mut order, &|one, other| (key(one), one).cmp(&(key(other), other)));
    let repeated = order.windows(2).filter_map(|pair| match pair {
        [first, next] if key(*first) == key(*next) => Some(*next),
        _ => None,
    });
    for at in repeated.collect::<Vec<_>>() {
        holds.get_mut(at).into_iter().for_each(|hold| hold.is_twice = true);
    }
}

/// Returns whether the charge takes units that are held until they are refunded.
fn holds_units(charge: &Charge<'_>) -> bool {
    matches!(charge.policy.quota().decider(), Decider::Places(_))
}

fn is_denied(decisions: &[ChargeDecision], at: usize) -> bool {
    decisions.get(at).is_some_and(|decision| !decision.is_allowed())
}

fn is_allowed(charges: &[Charge<'_>], decisions: &[ChargeDecision]) -> bool {
    (0..charges.len()).all(|at| !binds(charges, at) || !is_denied(decisions, at))
}
