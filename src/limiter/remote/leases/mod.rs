//! Leases for hot keys: a process takes several units in one call, and hands them out without asking the store.
//!
//! The process takes leased units from the quota before it uses them, so the total is never exceeded. Only the
//! time of use changes, because units that were leased earlier may be used now. So `n` processes with leases of
//! at most `m` units admit in any interval at most the quota's bound plus `n·m`. Other processes cannot take
//! the units that one process holds: at most `m` units, for [`HELD`].
//!
//! A key is leased as soon as its requests take [`HOT`] units in one [`SPAN`]. A lease has the
//! units of [`WORTH`] spans at the key's present rate, but at most 1/[`PART`] of the remaining
//! units. So the store decides every unit near the limit.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::base::sync::{Mutex, MutexGuard, lock};
use crate::base::time::Timestamp;
use crate::clock::Clock;
use crate::decision::{ChargeDecision, Receipt};
use crate::key::Key;
use crate::limiter::{Charge, Effect, Refund};
use crate::policy::Policy;
use crate::quota::Algorithm;

use super::tag::{Tag, Tags};

/// The maximum number of keys that are watched at a time. If several keys share a slot, the first busy key keeps the
/// slot, and the other keys are not leased.
const SLOTS: usize = if cfg!(ratelimit_shuttle) { 2 } else { 1_024 };

/// The time over which a rate is measured.
const SPAN: Duration = Duration::from_millis(10);

/// The units in one span that make a key hot.
const HOT: u64 = 8;

/// The number of spans for which a lease should last.
const WORTH: u64 = 2;

/// The time for which a lease is held. The lease's remaining units are then refunded.
pub(crate) const HELD: Duration = Duration::from_millis(100);

/// One lease takes at most this part of the remaining units: 1/`PART`.
const PART: u64 = 8;

/// The time for which a key is not leased after the store denied a lease or failed, or after a
/// reset of the key.
const PAUSE: Duration = Duration::from_millis(100);

/// The leases of a process.
pub(crate) struct Leases {
    slots: Box<[Mutex<Option<Watched>>]>,
    tags: Tags,
    clock: Arc<dyn Clock>,
    most: u64,
}

/// A key whose rate is watched.
struct Watched {
    tag: Tag,
    policy: Policy,
    key: Key,
    /// When the present span began.
    since: Timestamp,
    /// The units that were charged in the present span.
    asked: u64,
    /// The units that were charged per span before the present span began.
    rate: u64,
    /// The remaining units of the quota in the latest answer.
    remaining: u64,
    leases: VecDeque<Lease>,
    /// True if a request for a lease is under way.
    asking: bool,
    /// True if the key was reset after the request for the lease was sent: the lease's units are
    /// then from a state that no longer exists.
    void: bool,
    paused_until: Timestamp,
}

struct Lease {
    until: Timestamp,
    left: u64,
    receipt: Receipt,
    decision: ChargeDecision,
}

/// The next lease to request.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) policy: Policy,
    pub(crate) key: Key,
    pub(crate) units: u64,
}

impl Leases {
    /// Makes a table of leases. The leases of a key have at most `most` units in all.
    pub(crate) fn new(most: u64, tags: Tags, clock: Arc<dyn Clock>) -> Self {
        Self { slots: (0..SLOTS).map(|_| Mutex::new(None)).collect(), tags, clock, most }
    }

    /// Takes a charge's units from a lease, if a lease has enough units. Returns the charge's decision if a
    /// lease granted it, and the next lease to request, if any.
    pub(crate) fn take(&self, charge: &Charge<'_>) -> (Option<ChargeDecision>, Option<Wanted>) {
        if charge.effect != Effect::Enforce || charge.cost == 0 || !can_be_leased(charge.policy) {
            return (None, None);
        }
        let now = self.clock.now();
        let tag = self.tags.charge(charge);
        let mut slot = self.slot(tag);
        let is_free = slot.as_ref().is_none_or(|watched| watched.tag != tag && watched.is_idle(now));
        if is_free {
            *slot = Some(Watched::new(tag, charge, now));
        }
        let Some(watched) = slot.as_mut().filter(|watched| watched.tag == tag) else { return (None, None) };
        watched.count(charge.cost, now);
        let granted = watched.grant(charge, now);
        let wanted = watched.want(self.most, now);
        (granted, wanted)
    }

    /// Records the remaining units in the answer to a charge.
    pub(crate) fn record_remaining(&self, tag: Tag, decision: &ChargeDecision) {
        self.with(tag, |watched| watched.remaining = decision.remaining());
    }

    /// Records the answer to the request for a lease: granted, denied, or `None` if the store failed.
    /// Returns the refund of the lease if its key is no longer watched. A lease whose key was reset is
    /// dropped without a refund.
    pub(crate) fn record_answer(&self, wanted: &Wanted, mut answer: Option<ChargeDecision>) -> Option<Refund> {
        let now = self.clock.now();
        let mut receipt = answer.as_mut().and_then(ChargeDecision::take_receipt);
        self.with(self.tags.of(&wanted.policy, &wanted.key), |watched| {
            watched.asking = false;
            match (receipt.take(), answer.take()) {
                _ if std::mem::take(&mut watched.void) => {}
                (Some(receipt), Some(decision)) => {
                    watched.remaining = decision.remaining();
                    let until = now.saturating_add(HELD);
                    watched.leases.push_back(Lease { until, left: receipt.units(), receipt, decision });
                }
                (_, told) => {
                    watched.remaining = told.map_or(0, |decision| decision.remaining());
                    watched.paused_until = now.saturating_add(PAUSE);
                }
            }
        });
        receipt.map(|receipt| Refund::new(wanted.policy.clone(), wanted.key.clone(), receipt))
    }

    /// Ends the leases that were held for [`HELD`]. Returns their refunds.
    pub(crate) fn end_expired(&self) -> Vec<Refund> {
        let now = self.clock.now();
        let mut refunds = Vec::new();
        for slot in &self.slots {
            let mut slot = lock(slot);
            if let Some(watched) = slot.as_mut() {
                while watched.leases.front().is_some_and(|lease| lease.is_over(now)) {
                    refunds
                        .extend(watched.leases.pop_front().and_then(|lease| lease.rest(&watched.policy, &watched.key)));
                }
            }
        }
        refunds
    }

    /// Forgets a key's leases, because the key is reset under a policy's name. Leases under other quotas of the policy
    /// may be in any slot, so this searches all slots.
    pub(crate) fn forget(&self, policy: &Policy, key: &Key) {
        let paused_until = self.clock.now().saturating_add(PAUSE);
        for slot in &self.slots {
            if let Some(watched) = lock(slot).as_mut().filter(|watched| watched.is_of(policy, key)) {
                watched.leases.clear();
                watched.void = watched.asking;
                watched.paused_until = paused_until;
            }
        }
    }

    /// Returns the units that are held.
    #[cfg(test)]
    pub(crate) fn held(&self) -> u64 {
        let of = |slot: &Mutex<Option<Watched>>| {
            lock(slot).iter().flat_map(|watched| &watched.leases).map(|lease| lease.left).sum::<u64>()
        };
        self.slots.iter().map(of).sum()
    }

    fn with(&self, tag: Tag, act: impl FnOnce(&mut Watched)) {
        if let Some(watched) = self.slot(tag).as_mut().filter(|watched| watched.tag == tag) {
            act(watched);
        }
    }

    fn slot(&self, tag: Tag) -> MutexGuard<'_, Option<Watched>> {
        lock(&self.slots[tag.slot(self.slots.len())])
    }
}

/// Returns whether units of this policy can be leased. Returns `false` for a queue, because each
/// request needs its own departure, and for a quota that counts denied requests, because it has to see every
/// denied request. Also returns `false` for a block or a meter: an unused leased unit would be a strike or be
/// billed.
fn can_be_leased(policy: &Policy) -> bool {
    let algorithm = policy.quota().algorithm();
    algorithm.is_rate() && algorithm != Algorithm::LeakyQueue && !policy.quota().counts_denied()
}

impl Watched {
    fn new(tag: Tag, charge: &Charge<'_>, now: Timestamp) -> Self {
        Self {
            tag,
            policy: charge.policy.clone(),
            key: charge.key.clone(),
            since: now,
            asked: 0,
            rate: 0,
            remaining: 0,
            leases: VecDeque::new(),
            asking: false,
            void: false,
            paused_until: now,
        }
    }

    /// Returns whether this entry belongs to `key` under a policy with the name of `policy`.
    fn is_of(&self, policy: &Policy, key: &Key) -> bool {
        self.policy.name_fingerprint() == policy.name_fingerprint() && self.key == *key
    }

    /// Returns `true` if no lease is held or requested, and no units were charged for about ten spans.
    fn is_idle(&self, now: Timestamp) -> bool {
        self.leases.is_empty() && !self.asking && now.saturating_since(self.since) >= 10 * SPAN
    }

    fn count(&mut self, cost: u64, now: Timestamp) {
        let passed = now.saturating_since(self.since);
        // A new span also begins if the clock stepped back.
        if passed >= SPAN || now < self.since {
            let spans = u64::try_from(passed.as_micros() / SPAN.as_micros()).unwrap_or(u64::MAX).max(1);
            self.rate = self.asked / spans;
            (self.since, self.asked) = (now, 0);
        }
        self.asked = self.asked.saturating_add(cost);
    }

    fn grant(&mut self, charge: &Charge<'_>, now: Timestamp) -> Option<ChargeDecision> {
        let behind: u64 = self.leases.iter().filter(|lease| !lease.is_over(now)).map(|lease| lease.left).sum();
        let lease = self.leases.iter_mut().find(|lease| !lease.is_over(now) && lease.left >= charge.cost)?;
        lease.left -= charge.cost;
        let receipt = charge.policy.quota().decider().first_of(&lease.receipt, charge.cost, lease.left);
        let passed = HELD.saturating_sub(lease.until.saturating_since(now));
        let told = lease.decision.with_more_remaining(behind - charge.cost);
        Some(told.later(u64::try_from(passed.as_micros()).unwrap_or(u64::MAX)).with_receipt(receipt))
    }

    /// Returns the next lease to request, if at most half of the units that a lease should have are
    /// left.
    fn want(&mut self, most: u64, now: Timestamp) -> Option<Wanted> {
        // `held` includes the leases that are over, because a lease stays here until its units are refunded.
        let held: u64 = self.leases.iter().map(|lease| lease.left).sum();
        let left: u64 = self.leases.iter().filter(|lease| !lease.is_over(now)).map(|lease| lease.left).sum();
        let worth = self.rate.max(self.asked).saturating_mul(WORTH);
        let units = worth.min(most.saturating_sub(held)).min(self.remaining / PART);
        if self.asking || now < self.paused_until || self.rate.max(self.asked) < HOT || units < 2 || left > worth / 2 {
            return None;
        }
        self.asking = true;
        Some(Wanted { policy: self.policy.clone(), key: self.key.clone(), units })
    }
}

impl Lease {
    fn is_over(&self, now: Timestamp) -> bool {
        now >= self.until || self.until.saturating_since(now) > HELD
    }

    fn rest(self, policy: &Policy, key: &Key) -> Option<Refund> {
        // The unused units are the last of the lease. The last units drain when the whole lease has drained, so their
        // receipt has the instant of the lease's receipt.
        (self.left > 0).then(|| Refund::new(policy.clone(), key.clone(), self.receipt.split(self.left)))
    }
}

#[cfg(test)]
mod tests;
