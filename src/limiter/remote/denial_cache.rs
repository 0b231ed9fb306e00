//! The denial cache, which repeats a denial of the store for a moment, so that a key under attack costs few
//! calls.
//!
//! A denial with a wait of `d` stays true while other charges arrive, because further charges only make the wait
//! longer. So a charge of the same or a larger cost is denied here until `d` after the call was *sent*. The store
//! would deny the charge too, unless another process refunds or resets the key, or the store loses the state. Because
//! of these cases, a denial is remembered for at most [`LONGEST`].

use std::sync::Arc;
use std::time::Duration;

use crate::base::sync::{Mutex, MutexGuard, lock};
use crate::base::time::Timestamp;
use crate::base::wait::Wait;
use crate::clock::Clock;
use crate::decision::{ChargeDecision, Decision};
use crate::key::Key;
use crate::limiter::{Charge, Effect};
use crate::policy::Policy;

use super::tag::{Tag, Tags};

/// The maximum number of denials that are remembered. The memory for all these denials is allocated when the limiter
/// is made.
pub(crate) const DENIALS_MAX: usize = 1 << 20;

/// The longest time for which a denial is remembered.
pub(crate) const LONGEST: Duration = Duration::from_secs(1);

/// The longest time for which a denial is remembered if its wait is not known: the units of another process may be
/// returned at any instant.
const LONGEST_UNKNOWN: Duration = Duration::from_millis(10);

/// The time after a refund in which no denial is remembered: a call that was sent before the refund may return after
/// the refund.
const SETTLING: Duration = Duration::from_millis(200);

/// The denials by (policy, key). Only the latest of the denials that share a slot is remembered. A key has one slot
/// for all quotas of a policy, because a refund or a reset under one quota ends the denials under all quotas.
pub(crate) struct DenialCache {
    slots: Box<[Mutex<CachedDenial>]>,
    tags: Tags,
    clock: Arc<dyn Clock>,
}

#[derive(Default)]
struct CachedDenial {
    denial: Option<Denial>,
    /// The key of the slot whose units were last refunded. Its denials are not remembered if their calls were sent
    /// before this instant.
    refunded: Option<(Tag, Timestamp)>,
    /// Denials of all other keys are not remembered if their calls were sent before this instant. It is the latest
    /// such instant of the keys that were refunded before. So a refund of one key blocks another key only if two keys
    /// of the slot are refunded within [`SETTLING`].
    others_from: Timestamp,
}

impl CachedDenial {
    /// Returns the instant from which a call of this key must have been sent for its denial to be remembered.
    fn remembers_from(&self, tag: Tag) -> Timestamp {
        self.refunded.filter(|(refunded, _)| *refunded == tag).map_or(self.others_from, |(_, from)| from)
    }

    /// Forgets the denial of this key, and those of its calls that were sent before an instant.
    fn forget(&mut self, tag: Tag, from: Timestamp) {
        if self.denial.as_ref().is_some_and(|denial| denial.watch.tag == tag) {
            self.denial = None;
        }
        if let Some((_, before)) = self.refunded.replace((tag, from)).filter(|(before, _)| *before != tag) {
            self.others_from = self.others_from.max(before);
        }
    }
}

struct Denial {
    watch: Watch,
    sent: Timestamp,
    until: Timestamp,
    decision: ChargeDecision,
}

impl DenialCache {
    /// Makes a cache of at most `most` denials, at about 200 bytes each.
    pub(crate) fn new(most: usize, tags: Tags, clock: Arc<dyn Clock>) -> Self {
        Self { slots: (0..most).map(|_| Mutex::default()).collect(), tags, clock }
    }

    /// Returns the time at which a call is sent, for [`note`](Self::note).
    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Returns the refusal of a set, if one of its charges is known to be denied.
    pub(crate) fn refusal(&self, charges: &[Charge<'_>]) -> Option<Decision> {
        if self.slots.is_empty() || charges.iter().any(|charge| charge.policy.quota().counts_denied()) {
            return None;
        }
        self.repeat(charges.iter().map(|charge| (self.watch(charge), charge.policy)), self.now())
    }

    /// Returns the refusal of a set whose quotas count no denied requests, if one of its charges is
    /// known to be denied.
    pub(crate) fn repeat<'a>(
        &self,
        charges: impl Iterator<Item = (Option<Watch>, &'a Policy)> + Clone,
        now: Timestamp,
    ) -> Option<Decision> {
        let find = |watch: Option<Watch>| self.find(watch?, now);
        let (at, denied) = charges.clone().enumerate().find_map(|(at, (watch, _))| Some((at, find(watch)?)))?;
        let mut denied = Some(denied);
        Some(Decision::new(
            false,
            charges.enumerate().map(|(index, (watch, policy))| {
                let found = if index == at { denied.take() } else { find(watch) };
                found.unwrap_or_else(|| ChargeDecision::unasked(policy.quota().capacity()))
            }),
        ))
    }

    /// Returns the tag and the cost under which a denial is remembered. Returns `None` if denials
    /// of this charge must not be remembered.
    pub(crate) fn watch(&self, charge: &Charge<'_>) -> Option<Watch> {
        let quota = charge.policy.quota();
        // The denials of a quota with a line are not remembered, because a request in line that asks again needs a
        // new answer.
        let is_lasting = !quota.counts_denied() && quota.wait_in_line().is_zero();
        let remembers = charge.effect == Effect::Enforce && charge.cost > 0 && is_lasting && !self.slots.is_empty();
        remembers.then(|| Watch {
            tag: self.tags.named(charge.policy, charge.key),
            policy: charge.policy.fingerprint(),
            cost: charge.cost,
            can_fit: charge.cost <= quota.capacity(),
        })
    }

    /// Remembers the decision if it is a denial. `sent` is the instant at which the call was sent.
    pub(crate) fn note(&self, watch: Watch, sent: Timestamp, decision: &ChargeDecision) {
        let wait = match decision.wait() {
            Wait::None => return,
            Wait::Unknown => LONGEST_UNKNOWN,
            Wait::After(wait) => wait.min(LONGEST),
            Wait::Never => LONGEST,
        };
        let mut slot = self.slot(watch.tag);
        if sent < slot.remembers_from(watch.tag) {
            return;
        }
        let until = sent.saturating_add(wait);
        slot.denial = Some(Denial { watch, sent, until, decision: decision.clone() });
    }

    /// Forgets the denials of a key under a policy's name, because units of the key are refunded, or the key
    /// is reset.
    pub(crate) fn forget(&self, policy: &Policy, key: &Key) {
        if self.slots.is_empty() {
            return;
        }
        let tag = self.tags.named(policy, key);
        let mut slot = self.slot(tag);
        slot.forget(tag, self.now().saturating_add(SETTLING));
    }

    fn find(&self, watch: Watch, now: Timestamp) -> Option<ChargeDecision> {
        let slot = self.slot(watch.tag);
        let denial = slot.denial.as_ref().filter(|denial| {
            let Watch { tag, policy, cost, .. } = denial.watch;
            tag == watch.tag && policy == watch.policy && cost <= watch.cost
        })?;
        // If the clock stepped back, the time since the call was sent is unknown.
        if now < denial.sent || now >= denial.until {
            return None;
        }
        let passed = now.as_micros() - denial.sent.as_micros();
        let decision = denial.decision.later(passed);
        // The remembered denial may be for a smaller cost, which can pass later.
        Some(if watch.can_fit { decision } else { decision.for_good() })
    }

    fn slot(&self, tag: Tag) -> MutexGuard<'_, CachedDenial> {
        lock(&self.slots[tag.slot(self.slots.len())])
    }
}

/// A charge whose denial is to be remembered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watch {
    tag: Tag,
    /// The fingerprint of the policy and its quota.
    policy: u64,
    cost: u64,
    /// True if the cost is at most the capacity.
    can_fit: bool,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::base::sampling::config;
    use crate::{clock::ManualClock, quota::Quota};

    struct Bench {
        clock: ManualClock,
        denials: DenialCache,
        policy: Policy,
        key: Key,
    }

    fn bench() -> Bench {
        let clock = ManualClock::new();
        let denials = DenialCache::new(64, Tags::default(), Arc::new(clock.clone()));
        let policy = Policy::new("test", Quota::per_minute(10)).unwrap();
        Bench { clock, denials, policy, key: Key::of("alice").unwrap() }
    }

    impl Bench {
        fn charge(&self, cost: u64) -> Charge<'_> {
            Charge::new(&self.policy, &self.key).cost(cost)
        }

        /// Remembers that the store denied `cost` with this wait.
        fn deny(&self, cost: u64, wait: Wait) {
            let decision = ChargeDecision::denied(10, 1, wait).with_reset_after(Duration::from_secs(60));
            let watch = self.denials.watch(&self.charge(cost)).unwrap();
            self.denials.note(watch, self.denials.now(), &decision);
        }

        fn refusal(&self, cost: u64) -> Option<Decision> {
            self.denials.refusal(&[self.charge(cost)])
        }
    }

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn denial_without_room_replaces_an_older_one() {
        let mut bench = bench();
        let keys: Vec<Key> = (0..1_000_u64).map(|number| Key::of(number).unwrap()).collect();
        for key in &keys {
            bench.key = key.clone();
            bench.deny(1, Wait::After(300 * MS));
            assert!(bench.refusal(1).is_some(), "the latest is known");
        }
        let known =
            keys.iter().filter(|key| bench.denials.refusal(&[Charge::new(&bench.policy, key)]).is_some()).count();
        assert!((1..=64).contains(&known), "{known} are known, of 1,000, in 64 places");
    }

    #[test]
    fn same_cost_or_more_is_denied_until_the_wait_is_over() {
        let bench = bench();
        bench.deny(2, Wait::After(300 * MS));
        bench.clock.advance(100 * MS);
        assert!(bench.refusal(1).is_none(), "a smaller cost may pass");
        let refusal = bench.refusal(2).unwrap();
        assert!(!refusal.is_allowed());
        assert_eq!(refusal.charges()[0].wait(), Wait::After(200 * MS));
        assert_eq!(refusal.charges()[0].reset_after(), Some(Duration::from_secs(60) - 100 * MS));
        assert!(bench.refusal(3).is_some());
        bench.clock.advance(200 * MS - Duration::from_micros(1));
        assert!(bench.refusal(2).is_some());
        bench.clock.advance(Duration::from_micros(1));
        assert!(bench.refusal(2).is_none(), "at the reported instant the store is asked again");
    }

    #[test]
    fn cost_above_the_capacity_is_denied_for_good() {
        let bench = bench();
        bench.deny(2, Wait::After(300 * MS));
        assert_eq!(bench.refusal(10).unwrap().charges()[0].wait(), Wait::After(300 * MS));
        let refusal = bench.refusal(11).unwrap();
        let [denied] = refusal.charges() else { panic!("one charge, one answer") };
        assert_eq!((denied.wait(), denied.remaining()), (Wait::Never, 1), "no wait lets 11 of 10 pass");
    }

    #[test]
    fn denial_for_an_unknown_time_lasts_10_ms_or_until_a_refund() {
        let bench = bench();
        bench.deny(1, Wait::Unknown);
        assert_eq!(bench.refusal(1).unwrap().charges()[0].wait(), Wait::Unknown);
        bench.clock.advance(LONGEST_UNKNOWN);
        assert!(bench.refusal(1).is_none(), "another process may have returned units");
        bench.deny(1, Wait::Unknown);
        bench.denials.forget(&bench.policy, &bench.key);
        assert!(bench.refusal(1).is_none(), "this process has returned units");
    }

    #[test]
    fn no_denial_is_remembered_for_longer_than_a_second() {
        for wait in [Wait::After(Duration::from_secs(3_600)), Wait::Never] {
            let bench = bench();
            bench.deny(1, wait);
            bench.clock.advance(LONGEST - Duration::from_micros(1));
            assert_eq!(bench.refusal(1).unwrap().charges()[0].wait() == Wait::Never, wait == Wait::Never);
            bench.clock.advance(Duration::from_micros(1));
            assert!(bench.refusal(1).is_none());
        }
    }

    #[test]
    fn refund_is_not_undone_by_a_denial_under_way() {
        let bench = bench();
        bench.deny(1, Wait::After(LONGEST));
        bench.denials.forget(&bench.policy, &bench.key);
        assert!(bench.refusal(1).is_none());
        bench.deny(1, Wait::After(LONGEST));
        assert!(bench.refusal(1).is_none(), "asked for before the refund was there");
        bench.clock.advance(SETTLING);
        bench.deny(1, Wait::After(LONGEST));
        assert!(bench.refusal(1).is_some());
    }

    /// A bench whose keys have one slot.
    fn crowded() -> (Bench, [Key; 3]) {
        let bench = bench();
        let denials = DenialCache::new(1, Tags::default(), Arc::new(bench.clock.clone()));
        (Bench { denials, ..bench }, ["alice", "bob", "carol"].map(|name| Key::of(name).unwrap()))
    }

    #[test]
    fn refund_of_another_key_of_the_slot_ends_no_denial() {
        let (bench, [_, bob, carol]) = crowded();
        bench.deny(1, Wait::After(LONGEST));
        bench.denials.forget(&bench.policy, &bob);
        assert!(bench.refusal(1).is_some(), "nothing of this key was refunded");
        bench.denials.forget(&bench.policy, &bench.key);
        assert!(bench.refusal(1).is_none());

        bench.clock.advance(SETTLING);
        bench.denials.forget(&bench.policy, &bob);
        bench.deny(1, Wait::After(LONGEST));
        assert!(bench.refusal(1).is_some(), "only denials of the refunded key are blocked");

        bench.clock.advance(SETTLING);
        bench.denials.forget(&bench.policy, &carol);
        bench.clock.advance(LONGEST);
        bench.deny(1, Wait::After(LONGEST));
        assert!(bench.refusal(1).is_some(), "a block that is over blocks nothing");
    }

    proptest! {
        #![proptest_config(config(20_000))]

        /// Keys of one slot are denied and refunded. A denial is not repeated if its call was sent before a refund of
        /// its key, however late the denial arrives.
        #[test]
        fn denial_of_before_a_refund_is_never_repeated(
            steps in prop::collection::vec((0..5_u8, 0..3_usize, 0..100_usize), 1..40),
        ) {
            let (mut bench, keys) = crowded();
            let mut under_way: Vec<(usize, Watch, Timestamp)> = Vec::new();
            let (mut refunded, mut may_be_denied) = ([None; 3], [false; 3]);
            for (what, at, number) in steps {
                bench.key = keys[at].clone();
                match what {
                    0 => {
                        let watch = bench.denials.watch(&bench.charge(1)).unwrap();
                        under_way.push((at, watch, bench.denials.now()));
                    }
                    1 if !under_way.is_empty() => {
                        let (at, watch, sent) = under_way.swap_remove(number % under_way.len());
                        bench.denials.note(watch, sent, &ChargeDecision::denied(10, 1, Wait::After(LONGEST)));
                        may_be_denied[at] |= refunded[at].is_none_or(|refunded| sent > refunded);
                    }
                    2 => {
                        bench.denials.forget(&bench.policy, &bench.key);
                        refunded[at] = Some(bench.denials.now());
                        may_be_denied[at] = false;
                    }
                    _ => bench.clock.advance(SETTLING * number as u32 / 50),
                }
                for (key, may_be_denied) in keys.iter().zip(may_be_denied) {
                    let is_denied = bench.denials.refusal(&[Charge::new(&bench.policy, key)]).is_some();
                    prop_assert!(may_be_denied || !is_denied, "{key:?} is denied after its refund");
                }
            }
        }
    }

    #[test]
    fn another_quota_key_or_effect_is_not_denied() {
        let bench = bench();
        bench.deny(1, Wait::After(LONGEST));
        let changed = Policy::new("test", Quota::per_minute(11)).unwrap();
        let other = Key::of("bob").unwrap();
        for charge in [
            Charge::new(&changed, &bench.key),
            Charge::new(&bench.policy, &other),
            bench.charge(1).effect(Effect::Observe),
            bench.charge(1).effect(Effect::Force),
            bench.charge(0),
        ] {
            assert!(bench.denials.refusal(&[charge]).is_none(), "{charge:?}");
        }
    }

    #[test]
    fn refund_under_another_quota_of_the_policy_ends_a_denial() {
        let bench = bench();
        bench.deny(1, Wait::After(LONGEST));
        let before = Policy::new("test", Quota::per_minute(9)).unwrap();
        bench.denials.forget(&before, &bench.key);
        assert!(bench.refusal(1).is_none(), "the units came back to the same state");
    }

    #[test]
    fn quota_that_counts_denied_requests_is_always_asked() {
        let bench = bench();
        let counting = Quota::fixed_window(1, Duration::from_secs(60)).unwrap().count_denied().unwrap();
        let counting = Policy::new("counting", counting).unwrap();
        let charge = Charge::new(&counting, &bench.key);
        assert!(bench.denials.watch(&charge).is_none());
        bench.deny(1, Wait::After(LONGEST));
        assert!(bench.denials.refusal(&[bench.charge(1), charge]).is_none(), "it counts this refusal");
    }

    #[test]
    fn refused_set_reports_only_what_is_known() {
        let bench = bench();
        bench.deny(1, Wait::After(LONGEST));
        let other = Policy::new("other", Quota::per_minute(7)).unwrap();
        let refusal = bench.denials.refusal(&[Charge::new(&other, &bench.key), bench.charge(1)]).unwrap();
        let [unasked, denied] = refusal.charges() else { panic!("two charges, two answers") };
        assert!(unasked.is_allowed() && !unasked.is_known() && unasked.limit() == 7 && unasked.wait() == Wait::None);
        assert!(!denied.is_allowed() && denied.is_known());
    }

    #[test]
    fn clock_that_steps_back_denies_nothing_for_longer() {
        let bench = bench();
        bench.clock.advance(Duration::from_secs(10));
        bench.deny(1, Wait::After(LONGEST));
        bench.clock.set(Timestamp::from_micros(0));
        assert!(bench.refusal(1).is_none());
    }
}
